"""Each scheduler commits what its published rule says: an obvious loop over one row does the same."""

import math
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scipy.stats import chisquare  # noqa: E402

from assay._errors import InputError  # noqa: E402
from assay.mdlm import (  # noqa: E402
    DiffusionGenerationConfig,
    DreamSchedule,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    Scheduler,
    Sequential,
    diffusion_generate,
    num_transfer,
)

from .stubs import Script  # noqa: E402
from .tiny import MASK, tiny  # noqa: E402

PROMPT = [3, 1, 4, 1, 5]


def generate(
    scheduler: Scheduler | None, model: Any = None, processor: Any = None, prompts: Any = None, **settings: Any
):
    settings = {"max_new_tokens": 12, "eos_policy": "none", "return_trace": True, **settings}
    config = DiffusionGenerationConfig(**settings)
    model = tiny(dtype=torch.float64) if model is None else model
    return diffusion_generate(model, prompts or [PROMPT], config, scheduler=scheduler, logits_processor=processor)


def order(output: Any) -> list[int]:
    """The step at which each answer column of the first row was committed."""
    return output.trace.steps[0, output.canvas_start :].tolist()


def judged(kind: str, logits: torch.Tensor) -> tuple[int, float]:
    """Most likely token of one column and its confidence, by the definitions."""
    p = logits.double().softmax(0)
    best = sorted(p.tolist(), reverse=True)
    high = sorted(logits.tolist(), reverse=True)
    confidence = {
        "max_prob": best[0],
        "margin": best[0] - best[1],
        "neg_entropy": sum(q * math.log(q) for q in best if q > 0),
        "logit_margin": high[0] - high[1],
    }[kind]
    return int(logits.argmax()), confidence


def by_hand(rule: Any, kind: str, blocks: int, new: int) -> tuple[list[int], list[int]]:
    """Decode one row block by block; ``rule(step, masks at the start, ranked candidates)`` says which to commit."""
    model = tiny(dtype=torch.float64)
    x = torch.tensor([PROMPT + [MASK] * new])
    steps, step, width = [0] * new, 0, new // blocks
    for block in range(blocks):
        first = len(PROMPT) + block * width
        inside = 0
        while (open_ := [j for j in range(first, first + width) if x[0, j] == MASK]) != []:
            logits = model(x).logits[0]
            logits[:, MASK] = -math.inf
            drafted = {j: judged(kind, logits[j]) for j in open_}
            ranked = sorted(open_, key=lambda j: (-drafted[j][1], j))
            step += 1
            for j in rule(inside, width, [(j, drafted[j][1]) for j in ranked]):
                x[0, j] = drafted[j][0]
                steps[j - len(PROMPT)] = step
            inside += 1
    return x[0, len(PROMPT) :].tolist(), steps


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "blocks", "steps"),
    [("max_prob", 4, 12), ("max_prob", 1, 1), ("margin", 1, 5), ("neg_entropy", 3, 6), ("logit_margin", 2, 6)],
)
def test_static_commits_its_share_of_the_most_confident_in_each_block(kind, blocks, steps):
    share = num_transfer(12 // blocks, steps // blocks)
    tokens, expected = by_hand(lambda step, masks, ranked: [j for j, _ in ranked[: share[step]]], kind, blocks, 12)
    output = generate(LowConfidenceStatic(), block_length=12 // blocks, steps=steps, confidence=kind)
    assert order(output) == expected
    assert output.sequences[0, len(PROMPT) :].tolist() == tokens
    assert (output.steps, output.forwards) == (steps, steps)


@torch.no_grad()
@pytest.mark.parametrize(("threshold", "blocks"), [(0.2, 1), (0.4, 3), (2.0, 3)])
def test_dynamic_commits_all_above_the_threshold_and_at_least_one(threshold, blocks):
    def rule(step, masks, ranked):
        return [j for j, confidence in ranked if confidence > threshold] or [ranked[0][0]]

    tokens, expected = by_hand(rule, "max_prob", blocks, 12)
    output = generate(LowConfidenceDynamic(threshold), block_length=12 // blocks)
    assert order(output) == expected
    assert output.sequences[0, len(PROMPT) :].tolist() == tokens
    if threshold == 2.0:
        assert output.steps == 12


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.2, 0.9])
def test_the_dynamic_schedule_of_sdar_commits_at_least_what_static_would(threshold):
    share = num_transfer(6, 3)

    def rule(step, masks, ranked):
        sure = [j for j, confidence in ranked if confidence > threshold]
        return sure if len(sure) >= share[step] else [j for j, _ in ranked[: share[step]]]

    tokens, expected = by_hand(rule, "max_prob", 2, 12)
    output = generate(LowConfidenceDynamic(threshold, at_least="schedule"), block_length=6, steps=6)
    assert order(output) == expected
    assert output.sequences[0, len(PROMPT) :].tolist() == tokens


def test_the_default_threshold_is_the_configs_then_that_of_the_papers():
    assert "threshold=0.9" in generate(LowConfidenceDynamic()).stats["scheduler"]
    assert "threshold=0.5" in generate(LowConfidenceDynamic(), threshold=0.5).stats["scheduler"]
    assert "threshold=0.7" in generate(LowConfidenceDynamic(0.7), threshold=0.5).stats["scheduler"]


def test_equal_confidences_go_from_left_to_right():
    script = Script([7] * 12, [5.0] * 12)
    assert order(generate(LowConfidenceStatic(), processor=script)) == list(range(1, 13))
    assert order(generate(LowConfidenceStatic(), processor=script, steps=4)) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_sequential_goes_from_left_to_right_whatever_the_confidence():
    script = Script(range(12), [float(j) for j in range(12)])
    assert order(generate(Sequential(), processor=script)) == list(range(1, 13))
    assert order(generate(Sequential(), processor=script, steps=5)) == [1] * 3 + [2] * 3 + [3] * 2 + [4] * 2 + [5] * 2
    assert (
        order(generate(Sequential(), processor=script, steps=4, block_length=6))
        == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    )


def test_a_position_right_of_the_block_is_never_eligible():
    script = Script(range(12), [float(j) for j in range(12)])  # the surest stand on the right
    assert order(generate(LowConfidenceStatic(), processor=script, block_length=4)) == [
        4,
        3,
        2,
        1,
        8,
        7,
        6,
        5,
        12,
        11,
        10,
        9,
    ]


def test_random_confidence_differs_by_seed_and_not_within_one():
    first = generate(LowConfidenceStatic(), confidence="random", seed=1)
    again = generate(LowConfidenceStatic(), confidence="random", seed=1)
    other = generate(LowConfidenceStatic(), confidence="random", seed=2)
    assert order(first) == order(again) != order(other)
    assert sorted(order(first)) == list(range(1, 13))


def test_where_the_confidence_is_taken_from_matters():
    # At temperature 0.01 every filtered distribution is certain; the raw ones are not.
    script = Script(range(12), [1.0 + 0.1 * j for j in range(12)])
    settings = {"processor": script, "temperature": 0.01, "seed": 0}
    assert order(generate(LowConfidenceDynamic(0.9), confidence_from="filtered", **settings)) == [1] * 12
    assert order(generate(LowConfidenceDynamic(0.9), confidence_from="raw", **settings)) == list(range(12, 0, -1))
    assert "from raw" in generate(LowConfidenceStatic()).stats["scheduler"]
    assert "from filtered" in generate(DreamSchedule()).stats["scheduler"]


@pytest.mark.parametrize(
    ("scheduler", "settings", "says"),
    [
        (LowConfidenceStatic(), {"block_length": 5}, "max_new_tokens 12 is no multiple of block_length 5"),
        (LowConfidenceStatic(), {"block_length": 4, "steps": 7}, "steps 7 is no multiple of the 3 blocks"),
        (LowConfidenceDynamic(at_least="schedule"), {"block_length": 5, "steps": 6}, "no multiple of block_length 5"),
        (DreamSchedule(), {"confidence": "logit_margin"}, "knows no confidence 'logit_margin'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(scheduler, settings, says):
    with pytest.raises(InputError, match=says):
        generate(scheduler, **settings)


def test_arguments_that_do_not_exist_are_refused():
    # where signatures are checked, their checker is first
    with pytest.raises((InputError, TypeError), match="at_least"):
        LowConfidenceDynamic(at_least="two")
    with pytest.raises(InputError, match=r"eps is 1\.0"):
        DreamSchedule(eps=1.0)
    with pytest.raises((InputError, TypeError), match="alg"):
        DreamSchedule(alg="greedy")


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("static", LowConfidenceStatic),
        ("dynamic", LowConfidenceDynamic),
        ("dream", DreamSchedule),
        ("sequential", Sequential),
    ],
)
def test_the_config_names_its_scheduler(schedule, kind):
    by_name, by_hand = generate(None, schedule=schedule), generate(kind())
    assert by_name.stats["scheduler"] == by_hand.stats["scheduler"]
    assert order(by_name) == order(by_hand)


def test_on_a_block_model_the_dynamic_schedule_is_that_of_sdar():
    output = generate(None, tiny(attention="block", block_size=4), schedule="dynamic")
    assert "at_least=schedule" in output.stats["scheduler"]
    assert "from filtered" in output.stats["scheduler"]


# --- Dream


def dream_counts(masks: int, steps: int, eps: float) -> list[int]:
    """What the steps commit, those that commit nothing left out."""
    times = [1 + (eps - 1) * i / steps for i in range(steps + 1)]
    counts = []
    for i, (t, s) in enumerate(pairwise(times)):
        count = masks if i == steps - 1 else int(masks * (1 - s / t))
        counts += [count] * (count > 0)
        masks -= count
    return counts


@pytest.mark.parametrize(("steps", "eps"), [(1, 1e-3), (3, 0.3), (5, 1e-3), (12, 1e-3), (40, 0.3)])
def test_dream_commits_by_its_times_and_passes_over_empty_steps(steps, eps):
    output = generate(DreamSchedule(eps=eps), steps=steps)
    counts = dream_counts(12, steps, eps)
    assert [order(output).count(step + 1) for step in range(len(counts))] == counts
    assert output.steps == output.forwards == len(counts)


@pytest.mark.parametrize(
    ("alg", "kind"), [("maskgit_plus", "max_prob"), ("topk_margin", "margin"), ("entropy", "neg_entropy")]
)
@torch.no_grad()
def test_dream_takes_the_most_confident_of_the_whole_canvas(alg, kind):
    counts = iter(dream_counts(12, 5, 1e-3))
    tokens, expected = by_hand(lambda step, masks, ranked: [j for j, _ in ranked[: next(counts)]], kind, 1, 12)
    output = generate(DreamSchedule(alg=alg), steps=5)
    assert order(output) == expected
    assert output.sequences[0, len(PROMPT) :].tolist() == tokens
    assert order(generate(DreamSchedule(), steps=5, confidence=kind)) == expected


def test_each_row_counts_its_own_masks():
    long = [3, MASK, MASK, MASK, 5]
    both = generate(DreamSchedule(), prompts=[PROMPT, long], steps=4, allow_masks_in_prompt=True)
    for row, masks in enumerate((12, 15)):
        counts = dream_counts(masks, 4, 1e-3)
        assert [both.trace.steps[row].tolist().count(step + 1) for step in range(len(counts))] == counts


@pytest.mark.parametrize("alg", ["maskgit_plus", "origin"])
def test_without_a_number_of_steps_each_row_has_as_many_as_masks(alg):
    short, long = [3, 1, 5], [3, MASK, MASK, MASK, MASK, 5]
    settings = {"max_new_tokens": 2, "allow_masks_in_prompt": True, "seed": 0}
    both = generate(DreamSchedule(alg=alg), prompts=[short, long], **settings)
    assert both.row_steps[0] <= 2
    if alg == "maskgit_plus":
        alone = generate(DreamSchedule(alg=alg), prompts=[short], **settings)
        assert both.trace.steps[0, 3:].tolist() == alone.trace.steps[0].tolist()


def test_origin_moves_each_mask_by_itself_with_the_probability_of_its_time():
    steps, rows, new = 4, 100, 40
    script = Script([1] * new, [1.0] * new)
    output = generate(
        DreamSchedule(alg="origin", eps=0.1),
        processor=script,
        prompts=[PROMPT] * rows,
        steps=steps,
        max_new_tokens=new,
        seed=0,
    )
    taken = output.trace.steps[:, len(PROMPT) :].flatten()
    times = [1 - 0.9 * i / steps for i in range(steps)] + [0]
    expected = [rows * new * (t - s) for t, s in pairwise(times)]
    assert chisquare(torch.bincount(taken, minlength=steps + 1)[1:].numpy(), expected).pvalue > 0.001


def test_origin_runs_no_forward_for_a_step_that_moves_nothing():
    output = generate(DreamSchedule(alg="origin"), steps=200, max_new_tokens=6, seed=3)
    assert output.forwards == output.steps <= 6
    assert sorted(set(order(output))) == list(range(1, output.steps + 1))


def test_a_temperature_of_positions_draws_them_by_their_weights():
    # Of three columns the first step commits one, by softmax(confidence / alg_temp).
    script = Script([1, 1, 1], [2.0, 1.0, 0.0])
    settings = {
        "processor": script,
        "prompts": [PROMPT] * 2000,
        "max_new_tokens": 3,
        "steps": 2,
        "alg_temp": 0.1,
        "seed": 0,
    }
    output = generate(DreamSchedule(alg="maskgit_plus", eps=0.1), **settings)
    assert output.row_steps.unique().tolist() == [2]
    first = (output.trace.steps[:, len(PROMPT) :] == 1).sum(0)
    weights = torch.tensor(
        [math.exp(z) / (math.exp(z) + 38) / 0.1 for z in (2.0, 1.0, 0.0)], dtype=torch.float64
    ).softmax(0)
    assert chisquare(first.numpy(), (2000 * weights).numpy()).pvalue > 0.001
