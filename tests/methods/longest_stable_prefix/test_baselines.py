"""The rivals do what they are rivals for."""

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import LowConfidenceStatic, SchedulerStall, diffusion_generate
from assay.methods.longest_stable_prefix import LongestStablePrefix
from assay.methods.longest_stable_prefix.baselines import FixedThresholdPrefix, ProphetEarlyCommit, ScatteredSizes

from .scripted import Scripted, config, sharp, tiny

PROMPT = torch.tensor([[1, 2, 3]])


def growing(x, call):
    """Gaps of 1, 2, 3, ... at the successive calls."""
    return sharp(torch.full_like(x, 7), float(call))


@pytest.mark.parametrize(
    ("thresholds", "calls"),
    [
        ((4.0,), 4),
        # 3 of 12 masks a step: progress 0, 1/4, 1/2, 3/4 meets the thresholds of the thirds 1, 1, 2, 3
        ((9.0, 3.0, 1.0), 3),
        ((9.0, 9.0, 9.0), 4),
        ((1.0, 9.0, 9.0), 1),
    ],
)
def test_prophet_commits_all_once_the_mean_gap_reaches_its_threshold(thresholds, calls):
    out = diffusion_generate(
        Scripted(growing), PROMPT, config(12, steps=4, eos_policy="none"), ProphetEarlyCommit(thresholds=thresholds)
    )
    assert out.forwards == calls
    assert (out.sequences[:, 3:] == 7).all()


def test_prophet_never_sure_is_its_schedule():
    model = tiny(seed=5)
    for length in (None, 4):
        settings = config(16, steps=8, block_length=length, eos_policy="none")
        theirs = diffusion_generate(model, PROMPT, settings, LowConfidenceStatic())
        ours = diffusion_generate(model, PROMPT, settings, ProphetEarlyCommit(thresholds=(1e9,)))
        assert torch.equal(theirs.sequences, ours.sequences)
        assert ours.forwards == theirs.forwards


def test_prophet_judges_each_row_by_itself_and_by_all_its_masks():
    def script(x, call):
        gaps = torch.ones(x.shape)
        gaps[x[:, 0] == 8] = 6.0
        return sharp(torch.full_like(x, 7), gaps)

    prompts = [torch.tensor([8, 1]), torch.tensor([9, 1])]
    out = diffusion_generate(
        Scripted(script),
        prompts,
        config(8, steps=4, block_length=4, eos_policy="none"),
        ProphetEarlyCommit(thresholds=(5.0,)),
    )
    assert out.row_forwards.tolist() == [1, 4]


def test_a_fixed_threshold_commits_all_that_is_clear_however_much():
    margins = torch.tensor([0, 0, 0, 9, 8, 7, 6, 5, 9, 9, 1, 1, 1.0])
    model = Scripted(lambda x, call: sharp(torch.full_like(x, 7), margins))
    scheduler = FixedThresholdPrefix(4.5, lookback=0, delimiters=None)
    out = diffusion_generate(model, PROMPT, config(10), scheduler)
    # seven are clear; then one a step
    assert out.stats["commit_lengths"] == [[7, 1, 1, 1]]
    assert out.stats["reasons"] == [["fixed_tau", "min_commit", "min_commit", "min_commit"]]
    assert "tau=4.5" in out.stats["scheduler"]
    assert "alpha" not in out.stats["scheduler"]


def test_scattered_sizes_are_those_of_the_prefix_run_at_other_places():
    model, prompts = tiny(seed=2), [torch.arange(1, 1 + n) for n in (4, 6)]
    settings = config(20, eos_policy="none", return_trace=True)
    prefix = diffusion_generate(model, prompts, settings, LongestStablePrefix(delimiters=None))
    sizes = prefix.stats["commit_lengths"]
    scattered = diffusion_generate(model, prompts, settings, ScatteredSizes(sizes))
    assert scattered.row_forwards.tolist() == prefix.row_forwards.tolist()
    for row, expected in enumerate(sizes):
        steps = scattered.trace.steps[row, scattered.canvas_start :]
        assert [(steps == step + 1).sum() for step in range(len(expected))] == expected
    assert not torch.equal(scattered.trace.steps, prefix.trace.steps)
    # the first step takes the surest places
    canvas = torch.cat([prompts[1], torch.full((20,), 39)])[None]
    logits = model(canvas).logits[0, 6:].double()
    logits[:, 39] = -torch.inf
    best = logits.softmax(-1).max(-1).values.argsort(descending=True)[: sizes[1][0]]
    assert set(best.tolist()) == set((scattered.trace.steps[1, 6:] == 1).nonzero()[:, 0].tolist())


def test_the_last_scattered_step_takes_what_an_eos_filled():
    out = diffusion_generate(tiny(), PROMPT, config(10, eos_policy="none"), ScatteredSizes([[2, 3]]))
    assert out.forwards == 2


@pytest.mark.parametrize("sizes", [[[2], [3]], [[]], [[2, 0]]])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises((InputError, SchedulerStall), match="sizes"):
        diffusion_generate(tiny(), PROMPT, config(4), ScatteredSizes(sizes))


def test_prophet_needs_a_threshold():
    with pytest.raises(InputError, match="thresholds is empty"):
        ProphetEarlyCommit(thresholds=())
    with pytest.raises(InputError, match="one of them not a number"):
        ProphetEarlyCommit(thresholds=(5.0, float("nan")))
