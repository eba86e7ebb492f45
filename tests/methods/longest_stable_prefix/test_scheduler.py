"""The scheduler in the generation loop: how many calls, what is committed, and that rows do not know of each other."""

import math

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import ForwardPlan, NoCache, SchedulerError, Sequential, diffusion_generate
from assay.methods.longest_stable_prefix import LongestStablePrefix, PrefixAbsorbCache, Watched

from .scripted import EOS, MASK, Causal, Scripted, config, sharp, tiny

PROMPT = torch.tensor([[1, 2, 3]])


def answer(output):
    return output.sequences[:, output.canvas_start :]


def closed_form(n, step):
    """How many calls until nothing is left, each taking ``step(n)``."""
    calls = 0
    while n:
        n -= step(n)
        calls += 1
    return calls


@pytest.mark.parametrize("n", [1, 2, 7, 32, 50])
@pytest.mark.parametrize("beta", [0.25, 0.5, 1.0])
def test_a_perfectly_confident_model_halves_what_is_left(n, beta):
    model = Scripted(lambda x, call: sharp(torch.full_like(x, 7), 4.0))
    scheduler = LongestStablePrefix(alpha=0.25, beta=beta, delimiters=None)
    out = diffusion_generate(model, PROMPT, config(n), scheduler)
    assert out.forwards == out.steps == closed_form(n, lambda left: max(1, math.floor(beta * left)))
    assert (answer(out) == 7).all()
    assert out.stats["flip_rate"] in (0.0, None)


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_model_that_always_changes_its_mind_still_ends(minimum):
    n = 21
    model = Scripted(lambda x, call: sharp(torch.full_like(x, call % 2), 1.0))
    scheduler = LongestStablePrefix(lookback=0, min_commit=minimum, delimiters=None)
    out = diffusion_generate(model, PROMPT, config(n), scheduler)
    rest = n - n // 2
    assert out.forwards == 1 + math.ceil(rest / minimum)
    assert out.stats["flip_rate"] == 1.0
    assert out.stats["commit_lengths"][0][:2] == [n // 2, minimum]


def test_a_block_ends_before_the_first_changed_prediction_at_its_absolute_column():
    # predictions are (5, 6, 7, 8, ...) by column; at the second call column 6 says something else, at the third all agree
    def script(x, call):
        tokens = torch.arange(x.shape[1]).expand_as(x) % 30
        if call == 2:
            tokens = tokens.clone()
            tokens[:, 6] = 33
        return sharp(tokens, torch.linspace(9, 1, x.shape[1]))

    scheduler = LongestStablePrefix(alpha=0.25, beta=0.25, delimiters=None)
    out = diffusion_generate(Scripted(script), PROMPT, config(12), scheduler)
    # 3 of 12; then 2 of 9 would be due, and column 6 (the first) has changed: the minimum
    assert out.stats["commit_lengths"][0][:2] == [3, 1]
    assert out.stats["reasons"][0][:2] == ["breakpoint", "min_commit"]
    two = diffusion_generate(
        Scripted(script), PROMPT, config(12), LongestStablePrefix(alpha=0.25, beta=0.25, delimiters=None, stability=2)
    )
    # the second call has one earlier prediction: not enough history to be unstable; the third sees both
    assert two.stats["commit_lengths"][0][:2] == [3, 2]
    off = diffusion_generate(
        Scripted(script), PROMPT, config(12), LongestStablePrefix(alpha=0.25, beta=0.25, delimiters=None, stability=0)
    )
    assert off.stats["commit_lengths"][0][:2] == [3, 2]


def test_everything_at_once_is_greedy_decoding_of_one_forward():
    model = tiny()
    out = diffusion_generate(
        model,
        PROMPT,
        config(16, eos_policy="none"),
        LongestStablePrefix(1.0, 1.0, lookback=0, stability=0, delimiters=None),
    )
    canvas = torch.cat([PROMPT, torch.full((1, 16), MASK)], 1)
    logits = model(canvas).logits
    logits[..., MASK] = -torch.inf
    assert out.forwards == 1
    assert torch.equal(answer(out), logits.argmax(-1)[:, 3:])


@pytest.mark.parametrize("shift", [False, True])
def test_one_token_a_step_is_sequential_decoding(shift):
    model = tiny(logit_shift=shift)
    ours = diffusion_generate(
        model, PROMPT, config(12, eos_policy="none"), LongestStablePrefix(1 / 12, 1 / 12, delimiters=None)
    )
    theirs = diffusion_generate(model, PROMPT, config(12, eos_policy="none"), Sequential())
    assert ours.forwards == 12
    assert torch.equal(ours.sequences, theirs.sequences)


def test_every_step_leaves_one_frozen_run():
    out = diffusion_generate(
        tiny(),
        PROMPT,
        config(40, eos_policy="none"),
        LongestStablePrefix(delimiters=range(0, 38, 5)),
        PrefixAbsorbCache(),
    )
    assert set(out.stats["fragments"][0]) == {1}
    lengths, active = out.stats["commit_lengths"][0], out.stats["active_lengths"][0]
    assert active == [40 - sum(lengths[:k]) for k in range(len(lengths))]
    assert sum(lengths) == 40
    snapped = [
        token % 5 == 0 for token, why in zip(out.stats["last_tokens"][0], out.stats["reasons"][0]) if why == "delimiter"
    ]
    assert all(snapped)
    assert out.stats["snapped_share"] == pytest.approx(len(snapped) / len(lengths))


def script_with_eos(place):
    """Sure of tokens 5, and of EOS from a place of the answer on."""

    def script(x, call):
        tokens = torch.full_like(x, 5)
        tokens[:, 3 + place :] = EOS
        return sharp(tokens, 5.0)

    return script


def test_the_first_eos_ends_block_and_row():
    out = diffusion_generate(Scripted(script_with_eos(3)), PROMPT, config(10), LongestStablePrefix(delimiters=[EOS]))
    assert out.forwards == 1
    assert out.stats["commit_lengths"] == [[4]]  # of five
    assert out.stats["reasons"] == [["eos"]]
    assert answer(out)[0].tolist() == [5] * 3 + [EOS] * 7
    assert out.row_filled.tolist() == [6]


def test_an_eos_as_first_prediction_gives_an_empty_answer_in_one_call():
    out = diffusion_generate(Scripted(script_with_eos(0)), PROMPT, config(10), LongestStablePrefix(delimiters=None))
    assert out.forwards == 1
    assert (answer(out) == EOS).all()


def test_without_an_early_stop_an_eos_is_a_token_like_any():
    out = diffusion_generate(
        Scripted(script_with_eos(3)), PROMPT, config(8, eos_policy="none"), LongestStablePrefix(delimiters=None)
    )
    assert out.stats["commit_lengths"] == [[4, 2, 1, 1]]


PROMPTS = [torch.arange(1, 1 + n) for n in (5, 2, 9, 5)]


@pytest.mark.parametrize("policy", [NoCache, PrefixAbsorbCache, lambda: PrefixAbsorbCache("immediate", horizon=9)])
@pytest.mark.parametrize("shift", [False, True])
def test_ragged_rows_equal_their_single_runs(policy, shift):
    model = tiny(seed=6, logit_shift=shift)

    def run(prompts):
        return diffusion_generate(model, prompts, config(12), LongestStablePrefix(delimiters=[1, 4, 9]), policy())

    together = run(PROMPTS)
    assert len(set(together.row_forwards.tolist())) > 1  # rows of different pace
    for row, prompt in enumerate(PROMPTS):
        alone = run([prompt])
        assert torch.equal(answer(alone)[0], answer(together)[row])
        assert alone.forwards == together.row_forwards[row]
        for name in ("commit_lengths", "reasons", "flips", "flip_pairs", "last_tokens", "fragments"):
            assert alone.stats[name][0] == together.stats[name][row]
        assert alone.stats["tau"][0] == pytest.approx(together.stats["tau"][row], abs=1e-4)


def test_equal_seeds_draw_equal_texts():
    def run(seed):
        settings = config(12, temperature=1.0, seed=seed)
        return diffusion_generate(tiny(), PROMPTS[:2], settings, LongestStablePrefix(delimiters=None)).sequences

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_at_a_temperature_the_margin_is_that_of_the_drawn_token_before_filters():
    # one token is drawn by force (top_k 1 leaves the best); the margin ignores temperature and filter
    model = Scripted(lambda x, call: sharp(torch.full_like(x, 7), 4.0))
    settings = config(4, temperature=2.0, top_k=1)
    out = diffusion_generate(model, PROMPT, settings, LongestStablePrefix(delimiters=None))
    assert out.stats["tau"][0] == [4.0] * out.forwards

    # a drawn token that is not the best has a negative margin: the minimum is committed
    def ban(state, positions, logits):
        return logits

    low = diffusion_generate(
        Scripted(lambda x, call: sharp(torch.full_like(x, 7), 1.0)),
        PROMPT,
        config(16, temperature=5.0),
        LongestStablePrefix(delimiters=None, tau_floor=0.5),
        logits_processor=ban,
    )
    assert min(low.stats["tau"][0]) == -1.0


def test_a_processor_that_leaves_one_token_makes_it_certain():
    def only(state, positions, logits):
        kept = torch.full_like(logits, -torch.inf)
        kept[..., 3] = logits[..., 3]
        return kept

    out = diffusion_generate(
        tiny(), PROMPT, config(8, eos_policy="none"), LongestStablePrefix(delimiters=None), logits_processor=only
    )
    assert (answer(out) == 3).all()
    assert out.stats["tau"][0] == [torch.finfo(torch.float32).max] * 4


def test_a_processor_may_expand_one_row_to_all_places():
    def same(state, positions, logits):
        return (torch.arange(40) * 2.0).index_fill(0, torch.tensor([MASK, EOS]), -1.0).expand_as(logits)

    out = diffusion_generate(tiny(), PROMPT, config(8), LongestStablePrefix(delimiters=None), logits_processor=same)
    assert out.stats["tau"][0] == [2.0] * 4


def test_without_delimiters_nothing_snaps_back_to_the_minimum():
    model = Scripted(lambda x, call: sharp(torch.full_like(x, 7), 4.0))
    plain, least = (
        diffusion_generate(model, PROMPT, config(8), LongestStablePrefix(delimiters=None, no_delimiter=rule))
        for rule in ("keep", "min")
    )
    assert plain.stats["commit_lengths"] == least.stats["commit_lengths"] == [[4, 2, 1, 1]]


def test_the_logits_are_left_as_they_were():
    seen = []

    class Looks(LongestStablePrefix):
        def commit(self, state, logits, draft):
            before = logits.clone()
            found = super().commit(state, logits, draft)
            seen.append(torch.equal(before, logits))
            return found

    diffusion_generate(tiny(), PROMPTS, config(8), Looks(delimiters=None))
    assert seen
    assert all(seen)


def test_infilling_stops_before_what_is_given_and_jumps_over_it():
    prompt = torch.tensor([[1, MASK, MASK, MASK, MASK, 9, 9, MASK, MASK, 2]])
    model = Scripted(lambda x, call: sharp(torch.full_like(x, 7), 4.0))
    scheduler = LongestStablePrefix(1.0, 1.0, delimiters=None)
    out = diffusion_generate(model, prompt, config(0, allow_masks_in_prompt=True), scheduler)
    assert out.sequences.tolist() == [[1, 7, 7, 7, 7, 9, 9, 7, 7, 2]]
    assert out.stats["commit_lengths"] == [[4, 2]]
    cached = diffusion_generate(tiny(), prompt, config(0, allow_masks_in_prompt=True), scheduler, PrefixAbsorbCache())
    assert not (cached.sequences == MASK).any()


def test_in_a_block_model_the_rule_acts_on_the_rest_of_the_block():
    model = tiny(attention="block", block_size=8)
    out = diffusion_generate(
        model,
        torch.tensor([[1, 2, 3, 4]]),
        config(20, eos_policy="none"),
        LongestStablePrefix(delimiters=None, stability=0),
    )
    # the prompt's tail shares a block with the first four
    active = out.stats["active_lengths"][0]
    ends = [i for i, (a, c) in enumerate(zip(active, out.stats["commit_lengths"][0])) if a == c]
    assert [active[0], *(active[i + 1] for i in ends[:-1])] == [4, 8, 8]


def test_a_policy_that_leaves_the_boundary_out_is_named():
    class Behind(NoCache):
        def plan(self, state):
            return ForwardPlan(region=(5, state.length)) if state.step > 1 else ForwardPlan(region=(0, state.length))

    with pytest.raises(SchedulerError, match="its next column to commit is 4"):
        diffusion_generate(
            tiny(),
            PROMPT,
            config(12, eos_policy="none"),
            LongestStablePrefix(1 / 12, 1 / 12, delimiters=None),
            Behind(),
        )


def test_a_canvas_without_masks_needs_no_call():
    out = diffusion_generate(
        tiny(), PROMPT, config(0, allow_masks_in_prompt=True), LongestStablePrefix(delimiters=None)
    )
    assert out.forwards == 0
    assert torch.equal(out.sequences, PROMPT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stability": -1, "delimiters": None}, "stability is -1"),
        ({"stability": True, "delimiters": None}, "stability is True, expected a whole number"),
        ({"delimiters": [True, False]}, "id True is not a whole number"),
        ({"alpha": 0.9, "delimiters": None}, "alpha is 0.9 and beta 0.5"),
        ({}, "give tokenizer="),
        ({"word_safe": True, "delimiters": None}, "word_safe looks for words"),
        ({"delimiters": torch.ones(3)}, "expected bool"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        LongestStablePrefix(**settings)


@pytest.mark.parametrize("delimiters", [[40], [-1], torch.ones(41, dtype=torch.bool)])
def test_a_delimiter_outside_the_vocabulary_is_refused(delimiters):
    with pytest.raises(InputError, match="outside the vocabulary of 40"):
        diffusion_generate(tiny(), PROMPT, config(4), LongestStablePrefix(delimiters=delimiters))


def test_watching_a_scheduler_changes_nothing_and_counts_flips_and_islands():
    model = tiny(seed=1)
    plain = diffusion_generate(model, PROMPT, config(16, steps=8, eos_policy="none"))
    from assay.mdlm import LowConfidenceStatic

    seen = diffusion_generate(
        model, PROMPT, config(16, steps=8, eos_policy="none", return_trace=True), Watched(LowConfidenceStatic())
    )
    assert torch.equal(plain.sequences, seen.sequences)
    assert seen.stats["scheduler"] == plain.stats["scheduler"]
    assert seen.stats["commit_lengths"] == [[2] * 8]
    steps = seen.trace.steps[0, 3:]
    expected = []
    for step in range(1, 9):
        frozen = [s <= step for s in steps.tolist()]
        expected.append(sum(now and not before for before, now in zip([False, *frozen], frozen)))
    assert seen.stats["fragments"] == [expected]
    assert seen.stats["flip_pairs"] == [sum(16 - 2 * k for k in range(1, 8))]

    # flips by hand: predictions of consecutive forwards at places that are masked in both
    before, flips = None, 0
    canvas = torch.cat([PROMPT, torch.full((1, 16), MASK)], 1)
    for step in range(1, 9):
        x = torch.where((seen.trace.steps < step) & (seen.trace.steps != 0), seen.trace.tokens, canvas)
        logits = model(x).logits
        logits[..., MASK] = -torch.inf
        now = logits.argmax(-1)[0]
        if before is not None:
            flips += int(((now != before) & (x[0] == MASK)).sum())
        before = now
    assert seen.stats["flips"] == [flips]


def test_the_stats_say_what_ran():
    out = diffusion_generate(
        Causal(), PROMPT, config(8), LongestStablePrefix(tau_floor=2.0, delimiters=[3]), PrefixAbsorbCache()
    )
    assert "tau_floor=2.0" in out.stats["scheduler"]
    assert "delimiters=[3]" in out.stats["scheduler"]
    assert out.stats["policy"] == "PrefixAbsorbCache(freeze=settled, horizon=None)"
    assert out.stats["max_new_tokens"] == 8


def test_it_takes_the_window_that_a_sliding_cache_leaves_it():
    from assay.methods.freecache_guided_diffusion import FreeCache

    out = diffusion_generate(
        tiny(),
        PROMPT,
        config(32, eos_policy="none"),
        LongestStablePrefix(delimiters=None),
        FreeCache("sliding", window=(4, 12)),
    )
    assert not (answer(out) == MASK).any()
    assert max(out.stats["active_lengths"][0][1:]) <= 12  # the first forward computes the whole canvas
    assert set(out.stats["fragments"][0]) == {1}
