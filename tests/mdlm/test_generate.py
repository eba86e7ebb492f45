"""The loop: a row does not depend on its neighbours, the trace is what happened, rows end as the rules say, faults are named."""

import dataclasses
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from assay._errors import InputError  # noqa: E402
from assay.mdlm import (  # noqa: E402
    CachePolicy,
    Commit,
    DiffusionGenerationConfig,
    DiffusionOutput,
    DreamSchedule,
    DualCache,
    ExactBlockCache,
    ForwardPlan,
    GenState,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    NoCache,
    PrefixCache,
    Scheduler,
    SchedulerError,
    SchedulerStall,
    Sequential,
    _generate,
    block_causal_mask,
    diffusion_generate,
    positions_from_padding,
)

from .stubs import Favour, Recompute, Refreshing, Script  # noqa: E402
from .tiny import EOS, MASK, tiny  # noqa: E402

PROMPT = [3, 1, 4, 1, 5]
RAGGED = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7], [9, 3]]
BLOCK = {"attention": "block", "block_size": 4}


def generate(model: Any = None, prompts: Any = None, **settings: Any) -> DiffusionOutput:
    given = {
        name: settings.pop(name, None)
        for name in ("scheduler", "cache_policy", "logits_processor", "stopping", "streamer", "attention_mask")
    }
    config = DiffusionGenerationConfig(**{"max_new_tokens": 8, "return_trace": True, **settings})
    return diffusion_generate(
        tiny() if model is None else model, [PROMPT] if prompts is None else prompts, config, **given
    )


def answers(output: DiffusionOutput) -> list[list[int]]:
    return output.sequences[:, output.canvas_start :].tolist()


def order(output: DiffusionOutput) -> list[list[int]]:
    return output.trace.steps[:, output.canvas_start :].tolist()


# --- what every run leaves behind


@pytest.mark.parametrize("scheduler", [LowConfidenceStatic(), LowConfidenceDynamic(0.3), Sequential(), DreamSchedule()])
@pytest.mark.parametrize("form", [{}, {"logit_shift": True}, BLOCK])
def test_no_mask_is_left_and_the_prompt_is_untouched(scheduler, form):
    prompts = torch.tensor(RAGGED[:1] * 2)
    output = generate(tiny(**form), prompts, scheduler=scheduler, temperature=1.0, seed=0)
    assert (output.sequences != MASK).all()
    assert torch.equal(output.sequences[:, :7], prompts)
    assert output.canvas_start == 7


def test_as_many_steps_as_tokens_commit_one_a_step():
    output = generate(eos_policy="none", steps=8)
    assert sorted(order(output)[0]) == list(range(1, 9))
    assert (output.steps, output.forwards) == (8, 8)
    assert set(output.timings) == {"forward", "sampling", "scheduler", "policy", "total"}
    assert 0 < output.timings["forward"] < output.timings["total"]


# --- rows and their neighbours


@pytest.mark.parametrize(
    ("form", "policy"),
    [
        ({}, NoCache()),
        ({}, PrefixCache()),
        ({}, PrefixCache(2)),
        ({}, DualCache()),
        ({"logit_shift": True}, NoCache()),
        ({"logit_shift": True}, PrefixCache()),
        ({"logit_shift": True}, DualCache()),
        ({"logit_shift": True}, Refreshing()),
        (BLOCK, NoCache()),
        (BLOCK, ExactBlockCache()),
    ],
)
@pytest.mark.parametrize(
    "scheduler", [LowConfidenceStatic(), LowConfidenceDynamic(0.35), Sequential(), DreamSchedule()]
)
def test_a_row_of_a_ragged_batch_equals_its_own_run(form, policy, scheduler):
    model = tiny(dtype=torch.float64, **form)
    if isinstance(policy, ExactBlockCache) and isinstance(scheduler, DreamSchedule):
        scheduler = DreamSchedule(alg="topk_margin")
    settings = {"logits_processor": Favour(EOS, 2.5), "scheduler": scheduler, "cache_policy": policy}
    for extra in (
        [{"block_origin": origin} for origin in ("canvas", "prompt")] if form is BLOCK else [{"block_length": 4}]
    ):
        batch = generate(model, RAGGED[:3], **settings, **extra)
        assert any(EOS in row for row in answers(batch))
        for row, prompt in enumerate(RAGGED[:3]):
            alone = generate(model, [prompt], **settings, **extra)
            assert answers(batch)[row] == answers(alone)[0]
            assert order(batch)[row] == order(alone)[0]
            start = batch.canvas_start
            assert torch.allclose(batch.trace.logp[row, start:], alone.trace.logp[0, -8:], atol=1e-9, rtol=0)
            assert batch.row_steps[row] == alone.steps
            assert batch.row_forwards[row] == alone.forwards
            assert batch.row_filled[row] == alone.row_filled[0]


class AtTheirPace(LowConfidenceDynamic):
    """From each row's first mask on: in one region some rows ask for its first column, others not."""

    def candidates(self, state):
        blocks = super().candidates(state)
        return torch.stack([state.masked.int().argmax(1), blocks[:, 1]], dim=1)


@pytest.mark.parametrize("policy", [PrefixCache(), PrefixCache(2), DualCache()])
@pytest.mark.parametrize("scheduler", [AtTheirPace(0.35), DreamSchedule()])
def test_a_row_is_computed_as_alone_whoever_asks_for_the_first_column(scheduler, policy):
    model = tiny(dtype=torch.float64, logit_shift=True)
    settings = {"scheduler": scheduler, "cache_policy": policy, "block_length": 8, "max_new_tokens": 16}
    for guidance in (0.0, 0.7):
        settings["cfg_scale"] = guidance
        batch = generate(model, RAGGED, **settings)
        for row, prompt in enumerate(RAGGED):
            alone = generate(model, [prompt], **settings)
            assert order(batch)[row] == order(alone)[0]
            found = batch.trace.logp[row, batch.canvas_start :]
            assert torch.allclose(found, alone.trace.logp[0, alone.canvas_start :], atol=1e-9)


@pytest.mark.parametrize(
    "policy", [NoCache(), PrefixCache(), PrefixCache(2), DualCache(), Recompute(), ExactBlockCache()]
)
@pytest.mark.parametrize("scheduler", [LowConfidenceDynamic(0.2), Sequential(), DreamSchedule()])
def test_guided_infilling_of_a_ragged_batch_equals_its_rows(scheduler, policy):
    block = isinstance(policy, ExactBlockCache)
    if block and isinstance(scheduler, DreamSchedule):
        scheduler = DreamSchedule(alg="topk_margin")
    model = tiny(dtype=torch.float64, **(BLOCK if block else {"logit_shift": True}))
    prompts = [[3, MASK, 4, MASK, 5, 9, 2], [6, 5], [3, MASK, MASK], [9, 3, 3, MASK, 1]]
    settings = {
        "scheduler": scheduler,
        "cache_policy": policy,
        "logits_processor": Favour(EOS, 2.0),
        "cfg_scale": 0.7,
        "allow_masks_in_prompt": True,
        "block_length": None if block else 4,
    }
    batch = generate(model, prompts, **settings)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], **settings)
        own = slice(batch.canvas_start - len(prompt), None)
        assert batch.sequences[row, own].tolist() == alone.sequences[0].tolist()
        assert batch.trace.steps[row, own].tolist() == alone.trace.steps[0].tolist()


def test_a_shifted_model_is_guided_under_its_own_schedule():
    output = generate(tiny(logit_shift=True), RAGGED, schedule="dream", cfg_scale=0.5)
    assert MASK not in output.sequences


def test_padded_tensors_and_separate_prompts_are_the_same_batch():
    separate = generate(prompts=RAGGED)
    width = max(map(len, RAGGED))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in RAGGED])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in RAGGED])
    padded = generate(prompts=ids, attention_mask=mask)
    assert answers(separate) == answers(padded)
    assert torch.equal(padded.sequences[:, :width], ids)
    assert torch.equal(padded.trace.steps[:, :width], torch.full((4, width), -1))


@pytest.mark.parametrize("policy", [NoCache(), DualCache()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_leaving_finished_rows_out_saves_work_and_changes_nothing(policy, temperature):
    settings = {"prompts": RAGGED * 2, "logits_processor": Favour(EOS, 2.0), "temperature": temperature, "seed": 5}
    settings |= {"scheduler": LowConfidenceDynamic(0.6), "block_length": 4, "cache_policy": policy}
    left_out, kept = generate(drop_finished=True, **settings), generate(drop_finished=False, **settings)
    assert torch.equal(left_out.sequences, kept.sequences)
    assert torch.equal(left_out.trace.steps, kept.trace.steps)
    assert torch.allclose(left_out.trace.logp, kept.trace.logp, atol=1e-5)
    assert torch.equal(left_out.row_steps, kept.row_steps)
    assert len(left_out.row_steps.unique()) > 1
    assert left_out.token_forwards < kept.token_forwards
    assert left_out.token_forwards == left_out.row_token_forwards.sum()


def test_counts_of_the_batch_are_the_sums_of_its_rows():
    model = tiny()
    model.counters.reset()
    output = generate(model, RAGGED, scheduler=LowConfidenceDynamic(0.3), cache_policy=PrefixCache(), block_length=4)
    assert output.token_forwards == model.counters.token_forwards == output.row_token_forwards.sum()
    assert output.kv_columns == model.counters.kv_columns == output.row_kv_columns.sum()
    assert output.forwards == model.counters.calls
    assert output.steps == output.row_steps.max()


# --- the trace


def replayed(model: Any, output: DiffusionOutput, temperature: float, origin: str | None) -> Any:
    """Log-probabilities of the committed tokens, each from the canvas that its step saw."""
    steps, tokens = output.trace.steps, output.trace.tokens
    real = torch.arange(steps.shape[1]) >= (steps[:, : output.canvas_start] == -2).sum(1, keepdim=True)
    positions = positions_from_padding(real)
    mask = None
    if origin is not None:
        mask = block_causal_mask(positions, 4, real, origin, torch.full((len(steps),), output.canvas_start))
    logp = torch.zeros(steps.shape, dtype=torch.float64)
    for step in range(1, int(steps.max()) + 1):
        x = torch.where((steps == 0) | (steps >= step), MASK, tokens)
        logits = model(x, attention_mask=mask, position_ids=positions).logits
        logits[..., MASK] = -math.inf
        every = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        logp = torch.where(steps == step, every, logp)
    return logp


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize(
    ("form", "origin", "policy"),
    [
        ({}, None, None),
        ({"logit_shift": True}, None, None),
        (BLOCK, "canvas", None),
        (BLOCK, "prompt", ExactBlockCache()),
    ],
)
def test_the_trace_replays_to_the_recorded_log_probabilities(form, origin, policy, temperature):
    model = tiny(dtype=torch.float64, **form)
    model.lm_head.weight.data[EOS] += 0.4 * model.lm_head.weight.data.mean(0)  # rows end at different places
    prompts = torch.randint(0, 30, (12, 5), generator=torch.Generator().manual_seed(1))
    settings = {} if origin is None else {"block_origin": origin}
    output = generate(
        model,
        prompts,
        scheduler=LowConfidenceDynamic(0.4),
        cache_policy=policy,
        temperature=temperature,
        seed=0,
        max_new_tokens=12,
        **settings,
    )
    logp = replayed(model, output, temperature, origin)
    assert torch.allclose(output.trace.logp, logp, atol=1e-9, rtol=0)
    assert (output.trace.logp[output.trace.steps > 0] < 0).all()
    assert (output.trace.steps[:, :5] == -1).all()


def test_the_trace_keeps_what_was_decoded_right_of_the_end():
    # column 2 is surest, then 3 (the end), then 0, then 1, then 4
    script = Script([10, 11, 12, EOS, 14], [4.0, 3.0, 6.0, 5.0, 2.0])
    output = generate(logits_processor=script, max_new_tokens=5)
    assert order(output) == [[3, 4, 1, 2, 0]]
    assert output.trace.tokens[0, 5:].tolist() == [10, 11, 12, EOS, EOS]
    late = Script([10, 11, EOS, 13, 14], [4.0, 3.0, 5.0, 6.0, 2.0])
    output = generate(logits_processor=late, max_new_tokens=5)
    assert order(output) == [[3, 4, 2, 1, 0]]
    assert answers(output) == [[10, 11, EOS, EOS, EOS]]
    assert output.trace.tokens[0, 5:].tolist() == [10, 11, EOS, 13, EOS]
    assert output.row_filled.tolist() == [2]


# --- ends


def test_a_row_ends_once_all_left_of_its_eos_is_committed():
    script = Script([10, 11, EOS, 13, 14, 15], [1.0, 2.0, 9.0, 3.0, 4.0, 5.0])
    output = generate(logits_processor=script, max_new_tokens=6)
    # the end is committed first; the columns right of it come before those left of it, and only then the row is finished
    assert output.steps == 6
    assert answers(output) == [[10, 11, EOS, EOS, EOS, EOS]]
    early = Script([10, 11, EOS, 13, 14, 15], [7.0, 8.0, 9.0, 3.0, 4.0, 5.0])
    output = generate(logits_processor=early, max_new_tokens=6)
    assert (output.steps, output.forwards) == (3, 3)
    assert answers(output) == [[10, 11, EOS, EOS, EOS, EOS]]
    assert order(output) == [[3, 2, 1, 0, 0, 0]]
    assert output.row_filled.tolist() == [3]


@pytest.mark.parametrize("at", [0, 3, 5])
def test_the_end_may_stand_anywhere(at):
    tokens = [10, 11, 12, 13, 14, 15]
    tokens[at] = EOS
    output = generate(logits_processor=Script(tokens, [5.0] * 6), scheduler=Sequential(), max_new_tokens=6)
    assert answers(output) == [tokens[: at + 1] + [EOS] * (5 - at)]
    assert output.steps == at + 1


def test_without_early_stop_every_position_is_committed():
    script = Script([10, EOS, 12, 13], [5.0] * 4)
    output = generate(logits_processor=script, max_new_tokens=4, eos_policy="none")
    assert answers(output) == [[10, EOS, 12, 13]]
    assert output.steps == 4
    assert output.row_filled.tolist() == [0]


def test_a_suppressed_eos_is_never_committed():
    settings = {"prompts": RAGGED, "temperature": 1.0, "seed": 0, "logits_processor": Favour(EOS, 3.0)}
    assert any(EOS in row for row in answers(generate(**settings)))
    settings["logits_processor"] = None
    assert not any(EOS in row for row in answers(generate(eos_policy="suppress", max_new_tokens=40, **settings)))


def test_a_model_without_eos_decodes_to_the_end():
    model = tiny(eos_token_id=None, pad_token_id=None)
    assert generate(model, logits_processor=Favour(EOS, 50.0)).steps == 8
    with pytest.raises(InputError, match="no eos_token_id"):
        generate(model, stopping=lambda state: state.finished)


def test_an_eos_in_the_prompt_ends_nothing():
    prompt = [3, EOS, MASK, 5]
    output = generate(
        prompts=[prompt], allow_masks_in_prompt=True, logits_processor=Script([7] * 4, [5.0] * 4), max_new_tokens=4
    )
    assert output.steps == 5
    assert answers(output) == [[7] * 4]


def test_a_stopped_row_is_filled_from_its_first_mask():
    def after_two(state: GenState) -> Any:
        return (state.rows == 1) & (state.commits >= 2)

    script = Script([10, 11, 12, 13], [5.0] * 4)
    output = generate(
        prompts=[PROMPT, PROMPT, PROMPT],
        logits_processor=script,
        scheduler=Sequential(),
        stopping=after_two,
        max_new_tokens=4,
    )
    assert answers(output) == [[10, 11, 12, 13], [10, 11, EOS, EOS], [10, 11, 12, 13]]
    assert output.row_steps.tolist() == [4, 2, 4]
    assert output.row_filled.tolist() == [0, 2, 0]


# --- infilling


def test_masks_of_the_prompt_are_filled_where_they_stand():
    prompts = [[3, MASK, 4, MASK, 5], [MASK, 9, 2, 6]]
    output = generate(prompts=prompts, allow_masks_in_prompt=True, max_new_tokens=4)
    given = [[3, None, 4, None, 5], [None, 9, 2, 6]]
    for row, prompt in enumerate(given):
        found = output.sequences[row, 5 - len(prompt) : 5].tolist()
        assert MASK not in found
        assert [a for a, b in zip(found, prompt) if b is not None] == [b for b in prompt if b is not None]
    assert sorted(output.trace.steps[0].tolist()) == [-1] * 3 + list(range(1, 7))
    assert output.row_steps.tolist() == [6, 5]


def test_infilling_goes_from_left_to_right_by_blocks():
    settings = {"prompts": [[3, MASK, 4, MASK, 5]], "allow_masks_in_prompt": True, "max_new_tokens": 4}
    for scheduler, extra in ((Sequential(), {}), (LowConfidenceStatic(), {"block_length": 1})):
        steps = generate(scheduler=scheduler, eos_policy="none", **settings, **extra).trace.steps[0].tolist()
        assert steps == [-1, 1, -1, 2, -1, 3, 4, 5, 6]


def test_an_end_may_be_filled_into_a_prompt_without_an_answer():
    output = generate(
        prompts=[[3, MASK, 4]], max_new_tokens=0, allow_masks_in_prompt=True, logits_processor=Favour(EOS, 100.0)
    )
    assert output.sequences.tolist() == [[3, EOS, 4]]


def test_a_canvas_without_masks_costs_nothing():
    model = tiny()
    output = generate(model, max_new_tokens=0, allow_masks_in_prompt=True)
    assert output.sequences.tolist() == [PROMPT]
    assert (output.steps, output.forwards, model.counters.calls) == (0, 0, 0)
    some = generate(model, [PROMPT, [3, MASK, 4]], max_new_tokens=0, allow_masks_in_prompt=True)
    assert some.row_forwards.tolist() == [0, 1]
    assert (some.sequences != MASK).all()


# --- guidance


@torch.no_grad()
def test_guidance_moves_away_from_the_model_without_its_prompt():
    seen = []

    def look(state: GenState, positions: Any, logits: Any) -> Any:
        seen.append((positions, logits.clone()))
        return logits

    model = tiny(dtype=torch.float64)
    output = generate(model, cfg_scale=1.5, logits_processor=look, steps=1)
    masked = torch.tensor([PROMPT + [MASK] * 8])
    conditional, unconditional = model(masked).logits, model(torch.full_like(masked, MASK)).logits
    guided = unconditional + 2.5 * (conditional - unconditional)
    guided[..., MASK] = -math.inf
    positions, logits = seen[0]
    assert positions.tolist() == list(range(5, 13))
    assert torch.allclose(logits, guided[:, 5:])
    assert output.token_forwards == 2 * 13
    assert answers(output) == [guided[0, 5:].argmax(-1).tolist()] or EOS in answers(output)[0]


@pytest.mark.parametrize("policy", [NoCache(), Recompute(), PrefixCache(), DualCache()])
@pytest.mark.parametrize("shift", [False, True])
def test_guided_rows_equal_their_own_runs_too(policy, shift):
    model = tiny(dtype=torch.float64, logit_shift=shift)
    settings = {"cfg_scale": 0.7, "cache_policy": policy, "block_length": 4, "scheduler": LowConfidenceDynamic(0.5)}
    settings["logits_processor"] = Favour(EOS, 2.0)
    batch = generate(model, RAGGED, **settings)
    assert len(batch.row_steps.unique()) > 1
    for row, prompt in enumerate(RAGGED):
        alone = generate(model, [prompt], **settings)
        assert (answers(batch)[row], order(batch)[row]) == (answers(alone)[0], order(alone)[0])
    assert answers(generate(model, RAGGED, **{**settings, "cfg_scale": 0.0})) != answers(batch)


# --- draws


def test_a_seed_fixes_the_draws_and_none_leaves_them_to_torch():
    settings = {"prompts": RAGGED, "temperature": 1.0}
    one, same, other = (answers(generate(seed=seed, **settings)) for seed in (1, 1, 2))
    assert one == same != other
    torch.manual_seed(0)
    first, second = answers(generate(**settings)), answers(generate(**settings))
    torch.manual_seed(0)
    assert first == answers(generate(**settings)) != second


def test_the_only_token_that_a_filter_leaves_is_drawn():
    greedy = answers(generate(prompts=RAGGED, scheduler=Sequential()))
    for filters in ({"top_k": 1}, {"top_p": 1e-6}):
        assert answers(generate(prompts=RAGGED, scheduler=Sequential(), temperature=1.0, seed=0, **filters)) == greedy


def test_sampled_tokens_follow_the_model():
    script = Script([1], [2.0])
    output = generate(prompts=[PROMPT] * 4000, logits_processor=script, max_new_tokens=1, temperature=1.0, seed=0)
    share = (torch.tensor(answers(output))[:, 0] == 1).double().mean().item()
    p = math.exp(2) / (math.exp(2) + 38)
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 4000)


# --- processors and streamers


def test_a_processor_sees_the_window_and_nothing_else():
    seen = []

    def look(state: GenState, positions: Any, logits: Any) -> Any:
        seen.append((positions.tolist(), tuple(logits.shape)))
        assert (logits[..., MASK] == -math.inf).all()
        return logits

    generate(prompts=[PROMPT, PROMPT], block_length=4, logits_processor=look, eos_policy="none")
    assert seen == [(list(range(5, 9)), (2, 4, 40))] * 4 + [(list(range(9, 13)), (2, 4, 40))] * 4


class Listener:
    """What a streamer of transformers is."""

    def __init__(self) -> None:
        self.parts, self.ended = [], False

    def put(self, value: Any) -> None:
        self.parts.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_each_token_once_all_left_of_it_is_committed():
    listener = Listener()
    script = Script([10, 11, 12, EOS, 14, 15], [4.0, 6.0, 5.0, 3.0, 9.0, 1.0])
    generate(logits_processor=script, streamer=listener, max_new_tokens=6)
    assert listener.parts == [PROMPT, [10, 11, 12], [EOS]]
    assert listener.ended
    with pytest.raises(InputError, match="a single row, got 2"):
        generate(prompts=[PROMPT, PROMPT], streamer=Listener())


# --- a forward that commits nothing


def test_a_refresh_is_a_forward_and_no_step():
    plain, refreshed = generate(eos_policy="none"), generate(eos_policy="none", cache_policy=Refreshing())
    assert (refreshed.steps, refreshed.forwards) == (8, 16)
    assert refreshed.token_forwards == 8 * (5 + 13)
    assert answers(refreshed) == answers(plain)
    assert order(refreshed) == order(plain)


def test_a_policy_that_never_reaches_the_candidates_is_a_stall():
    class Stuck(CachePolicy):
        name = "Stuck"

        def plan(self, state: GenState) -> ForwardPlan:
            return ForwardPlan(region=(0, state.canvas_start), see=(0, state.canvas_start))

    with pytest.raises(SchedulerStall, match="Stuck made 14 forwards in a row"):
        generate(cache_policy=Stuck())


def test_candidates_outside_the_region_are_dropped():
    class Half(CachePolicy):
        def plan(self, state: GenState) -> ForwardPlan:
            middle = state.canvas_start + 4
            return ForwardPlan(region=(0, middle) if state.masked[:, :middle].any() else (0, state.length))

    script = Script(range(8), [float(j) for j in range(8)])  # the surest stand on the right
    output = generate(logits_processor=script, cache_policy=Half())
    assert order(output) == [[4, 3, 2, 1, 8, 7, 6, 5]]
    assert answers(output) == [list(range(8))]


# --- faults of a scheduler


class Faulty(Sequential):
    """Spoils the commit of the second step."""

    def __init__(self, spoil: Any) -> None:
        self.spoil = spoil

    def commit(self, state: GenState, logits: Any, draft: Any) -> Commit:
        commit = super().commit(state, logits, draft)
        return commit if state.step == 1 else self.spoil(commit)


def of(columns: list[int], tokens: list[int]) -> Any:
    columns, tokens = torch.tensor(columns, dtype=torch.long), torch.tensor(tokens, dtype=torch.long)
    return lambda commit: Commit(positions=[columns], tokens=[tokens])


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (of([5], [1]), SchedulerError, "column 5 of row 0 at step 2, which is committed already"),
        (of([7], [1]), SchedulerError, "column 7 of row 0 at step 2.*outside the window"),
        (of([2], [1]), SchedulerError, "column 2 of row 0"),
        (of([13], [1]), SchedulerError, "columns 13 to 13 at step 2 of a canvas of 13"),
        (of([-1], [1]), SchedulerError, "columns -1 to -1"),
        (of([6, 6], [1, 2]), SchedulerError, "a column twice at step 2"),
        (of([6], [MASK]), SchedulerError, "other than the mask's 39"),
        (of([6], [40]), SchedulerError, "tokens from 40 to 40 at step 2, expected ids below 40"),
        (of([6], [1, 2]), SchedulerError, "1 positions and 2 tokens"),
        (of([], []), SchedulerStall, "committed nothing in row 0 at step 2"),
        (lambda commit: Commit(positions=[], tokens=[]), SchedulerError, "0 rows of positions"),
    ],
)
def test_a_commit_that_may_not_be_is_named(spoil, error, says):
    with pytest.raises(error, match=says):
        generate(scheduler=Faulty(spoil))


def test_a_scheduler_may_commit_tokens_of_its_own():
    class Own(Scheduler):
        def candidates(self, state: GenState) -> tuple[int, int]:
            return 0, state.length

        def commit(self, state: GenState, logits: Any, draft: Any) -> Commit:
            columns = [state.masked[row].nonzero()[:1, 0] for row in range(len(state.rows))]
            return Commit(positions=columns, tokens=[torch.full_like(column, 7) for column in columns])

    output = generate(prompts=RAGGED, scheduler=Own())
    assert answers(output) == [[7] * 8] * 4
    assert (output.trace.logp[output.trace.steps > 0] <= 0).all()


# --- faults of a user


@pytest.mark.parametrize(
    ("form", "settings", "says"),
    [
        ({}, {"prompts": [[3, MASK, 4]]}, r"prompt 0 already holds 1 mask ids \(39\)"),
        ({}, {"prompts": [[3, 40]]}, "ids from 3 to 40, expected 0 to 39"),
        ({}, {"prompts": []}, "there is no prompt"),
        ({}, {"prompts": torch.tensor([1, 2])}, r"shape \(2,\), expected \(B, L0\)"),
        ({}, {"prompts": torch.tensor([[1.0, 2.5]])}, "float32 of shape"),
        ({}, {"prompts": [[1.5, 2]]}, "prompt 0 is torch.float32"),
        ({}, {"prompts": [1, 2]}, r"prompt 0 is torch.int64 of shape \(\)"),
        ({}, {"max_new_tokens": 252}, "have 257 tokens, and the model takes 256"),
        (
            {},
            {"prompts": torch.tensor([[3, 4, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])},
            "pads right of tokens",
        ),
        (
            {},
            {"prompts": torch.tensor([[MASK, 4]]), "attention_mask": torch.tensor([[0, 1]])},
            "padded with the mask id 39",
        ),
        ({}, {"prompts": [PROMPT], "attention_mask": torch.tensor([[1] * 5])}, "these are separate prompts"),
        ({}, {"prompts": torch.tensor([PROMPT]), "attention_mask": torch.tensor([[1, 1]])}, r"shape \(1, 2\)"),
        ({"logit_shift": True}, {"prompts": [[MASK, 4]], "allow_masks_in_prompt": True}, "a row starts with a mask"),
        ({"logit_shift": True}, {"prompts": [[], [4]]}, "a row starts with a mask"),
        (BLOCK, {"block_length": 8}, "block_length is 8, and the model's blocks have 4"),
    ],
)
def test_input_that_cannot_be_is_named(form, settings, says):
    with pytest.raises(InputError, match=says):
        generate(tiny(**form), **settings)


def test_an_unshifted_model_needs_no_prompt():
    assert len(answers(generate(prompts=[[], [4]]))) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unsound_logits_name_step_and_layer_and_commit_nothing(bad):
    model = tiny()

    class Breaking(Sequential):
        def candidates(self, state: GenState) -> Any:
            if state.step == 3:
                model.model.layers[1].mlp.up_proj.weight.data[0] = bad
            return super().candidates(state)

    with pytest.raises(FloatingPointError, match=r"at step 3, first in model\.layers\.1"):
        generate(model, scheduler=Breaking())


def test_unsound_logits_of_a_processor_are_told_from_those_of_the_model():
    def spoil(state: GenState, positions: Any, logits: Any) -> Any:
        return logits.fill_(-math.inf)

    with pytest.raises(FloatingPointError, match="look at guidance and logits_processor"):
        generate(logits_processor=spoil)


@pytest.mark.parametrize("settings", [{}, {"cfg_scale": 0.5, "cache_policy": DualCache()}])
def test_the_copy_on_the_cpu_of_a_canvas_on_a_device_follows_it(settings, monkeypatch):
    class Comparing(LowConfidenceDynamic):
        def candidates(self, state: GenState) -> Any:
            assert state.host is not state.x
            assert torch.equal(state.host, state.x)
            return super().candidates(state)

    settings |= {"prompts": RAGGED, "logits_processor": Favour(EOS, 2.0), "block_length": 4}
    on_cpu = generate(scheduler=LowConfidenceDynamic(0.6), **settings)
    first_state = _generate.first_state
    apart = lambda *given: (state := first_state(*given), setattr(state, "host", state.host.clone()))[0]  # noqa: E731
    monkeypatch.setattr(_generate, "first_state", apart)
    mirrored = generate(scheduler=Comparing(0.6), **settings)
    assert torch.equal(on_cpu.sequences, mirrored.sequences)
    assert torch.equal(on_cpu.trace.steps, mirrored.trace.steps)
    assert mirrored.row_filled.any()


def test_the_dream_schedule_filters_by_probability_first():
    # p = .4 .3 .2 .1: by top_p .5 then top_k 2, two tokens are left; the other way round, one
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])

    def fixed(state: GenState, positions: Any, logits: Any) -> Any:
        logits[:] = -math.inf
        logits[..., :4] = p.log()
        return logits

    settings = {
        "logits_processor": fixed,
        "top_k": 2,
        "top_p": 0.5,
        "temperature": 1.0,
        "seed": 0,
        "max_new_tokens": 60,
    }
    assert set(answers(generate(scheduler=LowConfidenceStatic(), **settings))[0]) == {0}
    assert set(answers(generate(scheduler=DreamSchedule(), **settings))[0]) == {0, 1}


def test_a_config_is_not_changed_by_a_run():
    config = DiffusionGenerationConfig(max_new_tokens=8)
    before = dataclasses.asdict(config)
    diffusion_generate(tiny(**BLOCK), [PROMPT], config)
    assert dataclasses.asdict(config) == before
