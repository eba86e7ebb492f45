"""Rows against the sampler itself: what is recomputed is what was drawn."""

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig
from assay.methods.tracerl import Trace, build_block_slices, build_full_slices, collect_traces, target_logps

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


def test_scoring_the_final_text_in_one_pass_is_not_the_same():
    model, traces = rolled_out("full")
    batch = rows_of("full", traces)
    with torch.no_grad():
        exact = batch.by_response(batch.dense(target_logps(model, batch, banned=(MASK,))), len(traces))
        for trace in traces:
            trace.step_map = torch.ones_like(trace.step_map)
        at_once = rows_of("full", traces)
        guess = at_once.by_response(at_once.dense(target_logps(model, at_once, banned=(MASK,))), len(traces))
    assert (exact - guess).abs().max() > 0.1


@pytest.mark.parametrize("kind", MODELS)
def test_more_left_padding_changes_no_log_probability(kind):
    model, traces = rolled_out(kind, n=2)
    alone = []
    for trace in traces:
        batch = rows_of(kind, [trace], post_num=0)
        with torch.no_grad():
            alone.append(target_logps(model, batch, banned=(MASK,)).sum())
    longer = Trace(prompt_ids=torch.arange(3, 24), response_ids=traces[0].response_ids, step_map=traces[0].step_map)
    batch = rows_of(kind, [*traces, longer], post_num=0)
    assert batch.prompt_length == 21
    with torch.no_grad():
        together = batch.dense(target_logps(model, batch, banned=(MASK,))).sum(1)
    sums = torch.zeros(len(traces) + 1, dtype=together.dtype).index_add_(0, batch.row_of_response, together)
    torch.testing.assert_close(sums[:-1], torch.stack(alone).to(sums), atol=1e-5, rtol=0)


def test_the_temperature_of_the_rollout_can_be_put_back():
    model, traces = rolled_out("full", temperature=0.5, threshold=0.9)
    batch = rows_of("full", traces)
    with torch.no_grad():
        logps = batch.dense(target_logps(model, batch, banned=(MASK,), temperature=0.5))
    committed = torch.stack([trace.step_map for trace in traces]) > 0
    gap = batch.by_response(logps, len(traces)) - torch.stack([trace.logps for trace in traces])
    assert gap[committed].abs().max() < 1e-9


def test_a_trace_says_what_was_seen_not_what_was_left():
    """Tokens right of the answer's end stay in the trace: later steps saw them."""
    _, traces = rolled_out("full", n=20)
    beyond = 0
    for trace in traces:
        end = len(trace.answer(EOS))
        later = trace.response_ids[end + 1 :]
        beyond += int((later != EOS).sum())
        assert (trace.response_ids[trace.step_map == 0] == EOS).all()
        assert trace.canvas_len == len(trace.prompt_ids) + 14
        assert not (trace.response_ids == MASK).any()
    assert beyond > 0


def test_groups_stand_together_and_a_seed_repeats_them():
    _, traces = rolled_out("full", n=3)
    assert [len(trace.prompt_ids) for trace in traces] == [5, 5, 5, 9, 9, 9, 6, 6, 6]
    again = rolled_out("full", n=3)[1]
    assert all(torch.equal(a.response_ids, b.response_ids) for a, b in zip(traces, again))
    assert len({tuple(trace.response_ids.tolist()) for trace in traces[:3]}) > 1
    other = rolled_out("full", n=3, seed=4)[1]
    assert any(not torch.equal(a.response_ids, b.response_ids) for a, b in zip(traces, other))


def test_cut_off_answers_are_marked():
    model = tiny(dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0
    given = DiffusionGenerationConfig(max_new_tokens=9, temperature=0.0, seed=0, eos_policy="suppress")
    assert all(trace.hit_limit for trace in collect_traces(model, PROMPTS, 1, given, limit_margin=None))
    _, traces = rolled_out("full", n=20)
    lengths = [len(trace.answer(EOS)) for trace in traces]
    assert [trace.hit_limit for trace in traces] == [length >= 9 for length in lengths]
    assert 0 < sum(trace.hit_limit for trace in traces) < len(traces)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_map": torch.ones(3, dtype=torch.int64)}, "4 response tokens and a step map of 3"),
        ({"step_map": torch.tensor([1, 2, -1, 0])}, "steps of 1 or more"),
        ({"logps": torch.zeros(2)}, "2 log-probabilities"),
        ({"canvas_len": 9}, "says its canvas had 9 columns"),
    ],
)
def test_a_trace_whose_parts_do_not_fit_is_refused(change, message):
    parts = {"prompt_ids": torch.tensor([1, 2]), "response_ids": torch.arange(4), "step_map": torch.arange(4)}
    with pytest.raises(InputError, match=message):
        Trace(**(parts | change))


def test_blocks_counted_from_elsewhere_are_refused():
    model, traces = rolled_out("block", block_origin="canvas")
    with pytest.raises(InputError, match="blocks counted from the canvas"):
        rows_of("block", traces)
    with pytest.raises(InputError, match="nothing to collect"):
        collect_traces(model, [], 2, DiffusionGenerationConfig(max_new_tokens=4))
    with pytest.raises(InputError, match="no traces to make"):
        rows_of("full", [])
