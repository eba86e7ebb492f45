"""Replayed times: a replay makes the forwards of the run whose trace it was given, and adds up what their shapes take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.mdlm.tiny import tiny

from assay._errors import InputError
from assay.mdlm import (
    CachePolicy,
    DiffusionGenerationConfig,
    DualCache,
    ExactBlockCache,
    MDLMConfig,
    NoCache,
    PrefixCache,
    diffusion_generate,
)
from assay.testbeds import ReplayTimer, scaled_trace
from assay.testbeds._replay import Shape


def config(**settings: Any) -> MDLMConfig:
    return MDLMConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mask_token_id=3, **settings
    )


POLICIES = [(NoCache, 8), (NoCache, None), (PrefixCache, 4), (lambda: PrefixCache(horizon=3), 4), (DualCache, 8)]


@pytest.mark.parametrize(("policy", "block"), POLICIES)
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("run", [{"steps": 8}, {"schedule": "dynamic", "threshold": 0.1}, {}])
def test_a_replay_makes_the_forwards_of_the_run(policy, block, shift, run):
    model = tiny(logit_shift=shift)
    settings = DiffusionGenerationConfig(
        max_new_tokens=16, block_length=block, eos_policy="none", return_trace=True, **run
    )
    output = diffusion_generate(model, torch.arange(5)[None], settings, cache_policy=policy())
    replayed = ReplayTimer(config(logit_shift=shift), clock=lambda: 0.0).replay(
        output.trace.steps[0, 5:], 5, policy(), block
    )
    assert replayed.forwards == output.forwards
    assert replayed.token_forwards == output.token_forwards
    assert replayed.kv_columns == output.kv_columns


def test_a_block_model_is_replayed_too():
    model = tiny(attention="block", block_size=4)
    settings = DiffusionGenerationConfig(max_new_tokens=12, eos_policy="none", return_trace=True)
    output = diffusion_generate(model, torch.arange(6)[None], settings, cache_policy=ExactBlockCache())
    timer = ReplayTimer(config(attention="block", block_size=4), clock=lambda: 0.0)
    replayed = timer.replay(output.trace.steps[0, 6:], 6, ExactBlockCache())
    assert (replayed.forwards, replayed.token_forwards) == (output.forwards, output.token_forwards)


class Counted(ReplayTimer):
    """Takes a time from a formula, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__(config())
        self.asked: list[tuple[str, int, int]] = []

    def _timed(self, part: str, canvas: int, width: int) -> float:
        self.asked.append((part, canvas, width))
        return {"head": 1e-6, "whole": 1e-3, "own": 5e-4}[part] * width


def test_times_of_shapes_are_added_up_and_each_width_is_timed_once():
    timer = Counted()
    steps = torch.arange(1, 41)
    replayed = timer.replay(steps, 35, PrefixCache(), 8)
    shapes = timer.shapes(steps, 35, PrefixCache(), 8)
    expected = sum(1e-3 * shape.computed + 1e-6 * shape.heads for shape in shapes)
    assert replayed.seconds == pytest.approx(expected, rel=1e-9)  # linear in the width: nothing is lost in between
    assert len(timer.asked) == len(set(timer.asked)) <= 16
    timer.replay(steps, 35, DualCache(), 8)
    assert len(timer.asked) == len(set(timer.asked)) <= 16
    assert {canvas for _, canvas, _ in timer.asked} == {75}


def test_fewer_keys_take_less_time():
    timer = Counted()
    whole = timer.seconds(Shape(computed=10, attended=75, heads=0, canvas=75))
    own = timer.seconds(Shape(computed=10, attended=10, heads=0, canvas=75))
    between = timer.seconds(Shape(computed=10, attended=(75 + 10) // 2, heads=0, canvas=75))
    assert own == pytest.approx(whole / 2, rel=0.01)
    assert own < between < whole


def test_real_forwards_of_every_part_are_timed():
    ticks = iter(range(10_000))
    timer = ReplayTimer(config(logit_shift=True), repeats=2, clock=lambda: float(next(ticks)))
    assert timer.seconds(Shape(computed=4, attended=20, heads=3, canvas=20)) == 2.0  # body and head, a tick each
    assert timer.seconds(Shape(computed=4, attended=9, heads=3, canvas=20)) == 2.0


def test_a_trace_is_stretched_with_as_many_steps_or_as_many_tokens_a_step():
    steps = torch.tensor([1, 3, 2, 3])
    assert scaled_trace(steps, 2).tolist() == [1, 1, 3, 3, 2, 2, 3, 3]
    assert scaled_trace(steps, 2, as_many_a_step=True).tolist() == [1, 2, 5, 6, 3, 4, 5, 6]
    one_a_step = torch.randperm(6) + 1
    longer = scaled_trace(one_a_step, 4, as_many_a_step=True)
    assert sorted(longer.tolist()) == list(range(1, 25))


def test_what_the_eos_rule_filled_counts_as_committed_at_the_end():
    timer = Counted()
    filled = timer.shapes(torch.tensor([1, 2, 3, 0, 0, 0]), 4, NoCache())
    assert len(filled) == 3


def test_a_scheduler_that_commits_from_the_left_asks_for_the_rest():
    steps = torch.tensor([1, 1, 2, 3, 3, 4])
    assert [shape.heads for shape in Counted().shapes(steps, 4, NoCache())] == [6, 6, 6, 6]
    assert [shape.heads for shape in Counted().shapes(steps, 4, NoCache(), asks_for="rest")] == [6, 4, 3, 1]


def test_what_is_no_trace_is_refused():
    with pytest.raises(InputError, match="a trace holds"):
        Counted().shapes(torch.tensor([-1, 1]), 4, NoCache())
    with pytest.raises(InputError, match="a trace holds"):
        Counted().shapes(torch.tensor([0, 0]), 4, NoCache())
    with pytest.raises(InputError, match="asks_for"):
        Counted().shapes(torch.tensor([1, 2]), 4, NoCache(), asks_for="all")
    with pytest.raises(InputError, match="factor of 0"):
        scaled_trace(torch.tensor([1]), 0)
    with pytest.raises(InputError, match="repeats"):
        ReplayTimer(config(), repeats=0)


def test_a_policy_that_is_asked_for_more_than_it_computes_takes_more_forwards():
    """A trace that commits beyond a policy's region is committed as the region reaches it, and never lost."""

    class Narrow(CachePolicy):
        def plan(self, state: Any) -> Any:
            from assay.mdlm import ForwardPlan

            first = int(state.masked[0].int().argmax())
            everything = state.step == 1 and state.cache is None
            return ForwardPlan(region=(0, state.length) if everything else (first, min(first + 2, state.length)))

    shapes = Counted().shapes(torch.tensor([1, 2, 2, 2, 2]), 3, Narrow())
    assert [shape.computed for shape in shapes] == [8, 2, 2]


def test_what_the_eos_rule_filled_stays_filled_in_a_longer_trace():
    steps = torch.tensor([2, 1, 0])
    assert scaled_trace(steps, 2).tolist() == [2, 2, 1, 1, 0, 0]
    assert scaled_trace(steps, 2, as_many_a_step=True).tolist() == [3, 4, 1, 2, 0, 0]
