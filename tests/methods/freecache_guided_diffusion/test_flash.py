"""One call puts the parts together, and says what the run cost."""

import pytest
import torch

from assay.mdlm import MaskedDiffusionLM, NoCache
from assay.methods.freecache_guided_diffusion import (
    ARGuider,
    FreeCache,
    TokenAligner,
    TokenizerMismatchError,
    flash_generate,
)

from ...mdlm.tiny import tiny
from .test_aligner import A, B

PROMPT = torch.randint(0, 38, (1, 9), generator=torch.Generator().manual_seed(4))
ACCOUNT = {
    "steps", "forwards", "ar_forwards", "token_forwards", "kv_columns", "time_dlm", "time_ar", "time_other",
    "scheduler", "policy",
}  # fmt: skip


def test_without_a_guider_it_is_the_block_form():
    out = flash_generate(tiny(), PROMPT, max_new_tokens=12, block_length=4, eos_policy="none")
    assert out.stats["policy"] == "FreeCache(mode=block, freeze=settled)"
    assert out.stats["scheduler"].startswith("LowConfidenceStatic(block_length=4")
    assert out.stats.keys() == ACCOUNT
    assert (out.stats["steps"], out.stats["forwards"], out.stats["ar_forwards"]) == (12, 12, 0)
    assert out.stats["token_forwards"] == out.token_forwards < 12 * 21
    assert 0 < out.stats["time_dlm"] <= out.timings["total"]
    assert out.stats["time_ar"] == 0


def test_with_a_guider_it_is_the_sliding_form(ar):
    model = tiny()
    outs = [flash_generate(model, PROMPT, guider, max_new_tokens=12, window=(3, 6)) for guider in (ar, ARGuider(ar))]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[0].stats["policy"] == "FreeCache(mode=sliding, window=(3, 6), keep_last_commit=True)"
    assert outs[0].stats["scheduler"] == "GuidedScheduler(match=exact, verify_chunk=32)"
    assert outs[0].stats.keys() == ACCOUNT | {"accepted", "ar_token_forwards"}
    assert outs[0].stats["time_ar"] > 0
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 0


def test_policies_by_name():
    model = tiny()

    def policy(name, **more):
        options = {"max_new_tokens": 8, "block_length": 8, **more}
        return flash_generate(model, PROMPT, policy=name, **options).stats["policy"]

    assert policy("none") == "NoCache"
    assert policy("auto", crossover=18) == "NoCache"
    assert policy("auto", crossover=17).startswith("FreeCache")
    assert policy(NoCache()) == "NoCache"
    assert policy(FreeCache(freeze="immediate")) == "FreeCache(mode=block, freeze=immediate)"


def test_drift_is_in_the_account():
    out = flash_generate(tiny(), PROMPT, max_new_tokens=8, block_length=4, drift_probe=3, eos_policy="none")
    assert [probe["step"] for probe in out.stats["drift"]] == [4, 7]


def test_options_reach_the_generation():
    out = flash_generate(
        tiny(), PROMPT, max_new_tokens=8, block_length=4, steps=4, return_trace=True, eos_policy="none"
    )
    assert out.steps == 4
    assert out.trace is not None
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    padded = flash_generate(tiny(), PROMPT, max_new_tokens=8, block_length=4, attention_mask=mask)
    alone = flash_generate(tiny(), PROMPT[:, 3:], max_new_tokens=8, block_length=4)
    assert torch.equal(padded.sequences[:, 3:], alone.sequences)


def test_blocks_must_divide_the_answer():
    with pytest.raises(ValueError, match="no multiple of block_length 32"):
        flash_generate(tiny(), PROMPT, max_new_tokens=40)


def test_a_guider_with_another_vocabulary_needs_an_aligner(ar):
    with pytest.raises(TokenizerMismatchError, match="id 0"):
        flash_generate(tiny(), PROMPT, ARGuider(ar, B), max_new_tokens=8, tokenizer=A)
    with pytest.raises(ValueError, match="give tokenizer="):
        flash_generate(tiny(), PROMPT, ARGuider(ar, B), max_new_tokens=8)
    same = flash_generate(tiny(), PROMPT, ARGuider(ar, A), max_new_tokens=8, tokenizer=A)
    bare = flash_generate(tiny(), PROMPT, ar, max_new_tokens=8)
    assert torch.equal(same.sequences, bare.sequences)
    given = flash_generate(tiny(), PROMPT, ARGuider(ar, B), max_new_tokens=8, aligner=TokenAligner(A, A))
    assert torch.equal(given.sequences, bare.sequences)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llada", {"num_key_value_heads": 4}),
        ("dream", {"logit_shift": True, "qkv_bias": True}),
    ],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_checkpoints_of_the_families_in_bfloat16(family, settings, batch, tmp_path, ar):
    tiny(**settings).export_family(family, tmp_path)
    model = MaskedDiffusionLM.from_checkpoint(tmp_path, dtype=torch.bfloat16)
    prompts = PROMPT.expand(batch, -1)
    for guider in (None, ar):
        out = flash_generate(model, prompts, guider, max_new_tokens=8, block_length=4)
        assert out.sequences.shape == (batch, 17)
        assert not (out.sequences == model.mask_token_id).any()
        assert (out.sequences == out.sequences[0]).all()
