"""Drafters and judges whose every answer is known, and a small real pair of models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from assay.mdlm import MaskedDiffusionLM, MDLMConfig
from assay.methods.freecache_guided_diffusion import MatchResult

from ...mdlm.tiny import scatter

GOLDEN = Path(__file__).parents[2] / "data" / "freecache-guided-diffusion"


def golden(name: str) -> dict:
    return json.loads((GOLDEN / name).read_text())


class Table(MaskedDiffusionLM):
    """Drafts a fixed token at each column, whatever it sees; its regions are noted."""

    def __init__(self, drafts: list[int], vocab: int, mask: int, eos: int) -> None:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        super().__init__(MDLMConfig(vocab_size=vocab, mask_token_id=mask, eos_token_id=eos, pad_token_id=eos, **sizes))
        self.drafts, self.regions = torch.tensor(drafts), []
        self.eval()

    def forward(self, *args, logits_for, region=None, **kwargs):
        self.regions.append(region)
        out = super().forward(*args, logits_for=logits_for, region=region, **kwargs)
        sharp = 10.0 * nn.functional.one_hot(self.drafts[logits_for], self.config.vocab_size)
        out.logits = sharp.float()[None].expand_as(out.logits).clone()
        return out


class Bigram(nn.Module):
    """A causal model of transformers' kind whose next token depends on the last one alone; its calls are noted."""

    def __init__(self, follows: list[int]) -> None:
        super().__init__()
        self.logits = nn.Parameter(10.0 * nn.functional.one_hot(torch.tensor(follows), len(follows)).float())
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=len(follows)))
        self.calls: list[dict] = []
        self.eval()

    @property
    def device(self):
        return self.logits.device

    def forward(self, input_ids, cache, position_ids, **_):
        self.calls.append({"cache_before": cache.get_seq_length(), "fed": input_ids[0].tolist()})
        assert position_ids[0].tolist() == [cache.get_seq_length() + i for i in range(input_ids.shape[1])]
        cells = torch.zeros(1, 1, input_ids.shape[1], 2)
        cache.update(cells, cells, 0)
        return SimpleNamespace(logits=self.logits[input_ids])


class Judge:
    """A guider that agrees with a given number of drafts, call after call (None: with all)."""

    def __init__(self, *agrees: int | None) -> None:
        self.agrees, self.asked = list(agrees), []

    def reset(self, rows=1):
        self.asked = []

    def match(self, prefix, drafts, rule, chunk=32, *, row=0, judged=None, generator=None):
        n = self.agrees[min(len(self.asked), len(self.agrees) - 1)]
        self.asked.append((list(prefix), list(drafts)))
        number = sum(judged) if judged is not None else len(drafts)
        k = number if n is None else min(n, number)
        return MatchResult(k, None if k == number else k)


def guider_model(seed: int = 5, vocab: int = 40) -> Qwen3ForCausalLM:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = Qwen3Config(
        vocab_size=vocab, intermediate_size=48, max_position_embeddings=256, tie_word_embeddings=False, **sizes
    )
    model = Qwen3ForCausalLM(config)
    scatter(model, seed)
    return model.eval()


@pytest.fixture(scope="session")
def ar():
    return guider_model()
