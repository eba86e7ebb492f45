"""What loop, schedulers and policies hand each other: blocks of a row, drafts of candidates, commits, a config that fits."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from assay._errors import InputError  # noqa: E402
from assay.mdlm import (  # noqa: E402
    CachePolicy,
    Commit,
    DiffusionGenerationConfig,
    Draft,
    ForwardPlan,
    GenState,
    NoCache,
    Scheduler,
    Sequential,
    diffusion_generate,
)

from .tiny import MASK, tiny  # noqa: E402


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"max_new_tokens": 4, "block_length": 0}, "block_length is 0"),
        ({"max_new_tokens": 4, "steps": 0}, "steps is 0"),
        ({"max_new_tokens": 4, "temperature": -0.1}, "temperature is -0.1"),
        ({"max_new_tokens": 4, "temperature": 1e-40}, "temperature is 1e-40"),
        ({"max_new_tokens": 4, "temperature": float("inf")}, "temperature is inf"),
        ({"max_new_tokens": 4, "threshold": float("nan")}, "threshold is nan"),
        ({"max_new_tokens": 4, "top_k": 0}, "top_k is 0"),
        ({"max_new_tokens": 4, "top_p": 0.0}, "top_p is 0.0"),
        ({"max_new_tokens": 4, "top_p": 1.5}, "top_p is 1.5"),
        ({"max_new_tokens": 4, "alg_temp": -1.0}, "alg_temp is -1.0"),
        ({"max_new_tokens": 4, "cfg_scale": -1.0}, "cfg_scale is -1.0"),
    ],
)
def test_a_value_out_of_its_range_is_named(wrong, says):
    with pytest.raises(InputError, match=says):
        DiffusionGenerationConfig(**wrong)


def test_a_source_of_confidence_that_is_none_is_named():
    config = DiffusionGenerationConfig(max_new_tokens=4)
    config.confidence_from = "logits"
    with pytest.raises(InputError, match="confidence_from is 'logits', expected raw or filtered"):
        config.__post_init__()


def test_only_infilling_needs_no_new_tokens():
    assert DiffusionGenerationConfig(max_new_tokens=0, allow_masks_in_prompt=True).max_new_tokens == 0


class Spy(Sequential):
    """Keeps the state of the first iteration."""

    def reset(self, state: GenState) -> None:
        super().reset(state)
        self.blocks, self.current = state.block_of.clone(), state.current_block
        self.spans = [
            tuple(edge.tolist() for edge in state.span(torch.full_like(state.rows, b))) for b in (-1, 0, 1, 9)
        ]
        self.pad, self.prompt_len, self.positions = state.pad, state.prompt_len, state.position_ids.clone()


def spied(prompts: list[list[int]], model: Any = None, **settings: Any) -> Spy:
    spy = Spy()
    config = DiffusionGenerationConfig(**{"max_new_tokens": 6, **settings})
    diffusion_generate(tiny() if model is None else model, prompts, config, scheduler=spy)
    return spy


def test_blocks_of_full_attention_start_behind_the_prompt():
    spy = spied([[1, 2, 3], [1, 2, 3, 4, 5]], block_length=3)
    pads = -(2**31)
    assert spy.blocks.tolist() == [
        [pads, pads, -1, -1, -1, 0, 0, 0, 1, 1, 1],
        [-2, -2, -1, -1, -1, 0, 0, 0, 1, 1, 1],
    ]
    assert spy.current.tolist() == [0, 0]
    assert spy.spans == [([2, 2], [5, 5]), ([5, 5], [8, 8]), ([8, 8], [11, 11]), ([11, 11], [11, 11])]
    assert (spy.pad.tolist(), spy.prompt_len.tolist()) == ([2, 0], [3, 5])
    assert spy.positions[0].tolist() == [1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_without_a_block_length_one_block_reaches_from_the_first_mask_to_the_end():
    spy = spied([[1, 2, 3], [1, MASK, 3]], allow_masks_in_prompt=True)
    assert spy.blocks.tolist() == [[-1, -1, -1] + [0] * 6, [-1] + [0] * 8]


def test_blocks_of_a_block_model_follow_its_origin():
    model = tiny(attention="block", block_size=4)
    pads = -(2**31)
    canvas = spied([[1, 2], [1, 2, 3, 4, 5]], model)
    assert canvas.blocks.tolist() == [
        [pads] * 3 + [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2],
    ]
    assert canvas.current.tolist() == [0, 1]
    prompt = spied([[1, 2], [1, 2, 3, 4, 5]], model, block_origin="prompt")
    assert prompt.blocks.tolist() == [
        [pads] * 3 + [-1, -1, 0, 0, 0, 0, 1, 1],
        [-2, -1, -1, -1, -1, 0, 0, 0, 0, 1, 1],
    ]


def draft(masked: list[list[bool]]) -> Draft:
    chosen = torch.tensor(masked)
    raw = torch.randn(*chosen.shape, 5, dtype=torch.float64)
    where = None if chosen.all() else chosen.nonzero(as_tuple=True)
    tokens = raw.argmax(-1).masked_fill(~chosen, 4)
    columns = torch.arange(chosen.shape[1]) + 10
    return Draft(positions=columns, masked=chosen, tokens=tokens, raw=raw, generator=torch.Generator(), where=where)


@pytest.mark.parametrize("masked", [[[True, True], [True, True]], [[True, False], [False, False], [True, True]]])
def test_a_draft_judges_its_candidates_and_nothing_else(masked):
    made = draft(masked)
    p = made.raw.softmax(-1).gather(-1, made.tokens[..., None])[..., 0]
    expected = torch.where(made.masked, p, -math.inf)
    assert torch.allclose(made.confidence("max_prob", "raw"), expected)
    assert torch.allclose(made.logp, torch.where(made.masked, p.log(), 0.0))
    assert made.logits is made.raw


@pytest.mark.parametrize("masked", [[[True, True], [True, True]], [[True, False], [False, False], [True, True]]])
def test_a_filtered_draft_tells_raw_from_filtered(masked):
    made = draft(masked)
    candidates = made.of_candidates(made.raw)
    made.filtered = candidates / 0.25
    raw, filtered = made.confidence("max_prob", "raw"), made.confidence("max_prob", "filtered")
    assert (filtered > raw)[made.masked].all()
    assert torch.allclose(made.logp[made.masked], filtered[made.masked].log())
    assert torch.equal(made.logits[made.masked], made.filtered)


def test_a_commit_lists_the_chosen_places_of_each_row():
    made = draft([[True, True, True], [True, True, True], [True, True, True]])
    commit = Commit.where(made, torch.tensor([[True, False, True], [False] * 3, [False, True, False]]))
    assert [columns.tolist() for columns in commit.positions] == [[10, 12], [], [11]]
    assert [tokens.tolist() for tokens in commit.tokens] == [
        made.tokens[0, [0, 2]].tolist(),
        [],
        [made.tokens[2, 1].item()],
    ]


def test_whatever_has_the_methods_fits_the_plug_points():
    assert isinstance(Sequential(), Scheduler)
    assert isinstance(NoCache(), CachePolicy)
    assert not isinstance(NoCache(), Scheduler)
    assert ForwardPlan(region=(0, 4)) == ForwardPlan(region=(0, 4), see=None, write="all")
    assert len({ForwardPlan(region=(0, 4)), ForwardPlan(region=(0, 4)), ForwardPlan(region=(1, 4))}) == 2
