"""Rows against the sampler itself: what is recomputed is what was drawn."""

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig
from assay.methods.tracerl import build_block_slices, build_full_slices, collect_traces, target_logps

from ...mdlm.tiny import EOS, MASK, tiny

PROMPTS = [torch.arange(3, 3 + n) for n in (5, 9, 6)]
MODELS = {
    "full": {},
    "shifted": {"logit_shift": True, "qkv_bias": True},
    "block": {"attention": "block", "block_size": 4, "qk_norm": "head"},
}


def rolled_out(kind, dtype=torch.float64, prompts=PROMPTS, n=12, **config):
    """A tiny policy that likes to stop, and traces of it."""
    model = tiny(dtype=dtype, **MODELS[kind])
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 2.5
    origin = "prompt" if kind == "block" else "canvas"
    given = DiffusionGenerationConfig(
        **{
            "max_new_tokens": 14, "block_length": None if kind == "block" else 7, "schedule": "dynamic",
            "threshold": 0.6, "temperature": 1.0, "block_origin": origin, "seed": 3,
        } | config
    )  # fmt: skip
    return model, collect_traces(model, prompts, n, given)


def rows_of(kind, traces, **settings):
    settings = {"mask_token_id": MASK, "pad_token_id": EOS, "post_num": None} | settings
    return (
        build_block_slices(traces, block_size=4, **settings)
        if kind == "block"
        else build_full_slices(traces, **settings)
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 5e-4)])
@pytest.mark.parametrize("kind", MODELS)
def test_recomputed_log_probabilities_are_the_samplers(kind, dtype, tolerance):
    model, traces = rolled_out(kind, dtype)
    batch = rows_of(kind, traces)
    with torch.no_grad():
        logps = batch.dense(target_logps(model, batch, banned=(MASK,)))
    found = batch.by_response(logps, len(traces))
    recorded = torch.stack([trace.logps for trace in traces])[:, : batch.response_length].to(found.dtype)
    committed = torch.stack([trace.step_map for trace in traces])[:, : batch.response_length] > 0
    assert (~committed).any(), "no answer stopped early: the test would not see what is masked right of it"
    assert len({int(c) for c in committed.sum(1)}) > 2
    assert (found - recorded)[committed].abs().max() < tolerance
    assert recorded[committed].std() > 0.3  # there is something to agree on
