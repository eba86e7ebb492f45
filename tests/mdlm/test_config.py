"""A configuration that cannot be built says why; importing the package is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from assay._errors import InputError
from assay.mdlm import MaskedDiffusionLM, MDLMConfig


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mask_token_id": 40}, "mask_token_id 40 lies outside the vocabulary of 40"),
        ({"mask_token_id": -1}, "mask_token_id -1 lies outside"),
        ({"mask_token_id": 3, "pad_token_id": 3}, "pad_token_id equals mask_token_id 3"),
        ({"mask_token_id": 3, "eos_token_id": 3}, "eos_token_id equals mask_token_id 3"),
        ({"eos_token_id": 99}, "eos_token_id 99 lies outside"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 30}, "hidden_size 30 is no multiple of num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"qk_norm": "layer"}, "qk_norm must be None, 'head' or 'full', got 'layer'"),
        ({"attention": "causal"}, "attention must be 'full' or 'block', got 'causal'"),
        ({"attention": "block"}, "needs a block_size of at least 1, got None"),
        ({"head_bias": True, "tie_word_embeddings": True}, "a tied head is the embedding"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(settings: dict[str, Any], sentence: str):
    base: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(InputError, match=sentence):
        MDLMConfig(**{**base, **settings})


def test_a_model_needs_a_mask_id():
    with pytest.raises(InputError, match="mask_token_id is not set"):
        MaskedDiffusionLM(MDLMConfig(vocab_size=40, hidden_size=32, num_attention_heads=4, num_hidden_layers=1))


def test_a_configuration_comes_back_from_its_file(tmp_path: Path):
    config = MDLMConfig(vocab_size=40, mask_token_id=3, attention="block", block_size=4, rope_theta=5e5, head_dim=32)
    config.save_pretrained(tmp_path)
    assert MDLMConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_importing_the_package_loads_no_torch():
    code = "import sys, assay.mdlm; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError):
        from assay.mdlm import nothing_of_that_name  # noqa: F401
