"""The length of a block: the worked examples, and the vectorised rule against the rule told place by place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay._errors import InputError
from assay.methods.longest_stable_prefix import LSPDecision, longest_stable_prefix, reference
from assay.methods.longest_stable_prefix._prefix import REASONS, PrefixRule, decide


def of(margins, stable=None, delimiters=(), **settings):
    """A decision, delimiters given by their places from 1."""
    is_delim = torch.zeros(len(margins), dtype=torch.bool)
    is_delim[[place - 1 for place in delimiters]] = True
    held = None if stable is None else torch.tensor(stable)
    return longest_stable_prefix(torch.tensor(margins, dtype=torch.float32), held, is_delim, **settings)


def test_the_block_ends_where_the_running_minimum_drops():
    margins = [5, 4, 3, 2, 1, 1, 1, 1]
    assert of(margins) == LSPDecision(4, 4, 2.0, False, "breakpoint")
    assert of(margins, pick="strict") == LSPDecision(2, 2, 4.0, False, "breakpoint")
    # reachable are 1, 2, 3, 7 and 8: in the range [2, 4] the last is 3
    assert of([5, 4, 3, 2, 2, 2, 2, 1]) == LSPDecision(3, 3, 3.0, False, "breakpoint")


def test_flat_margins_are_cut_at_beta():
    assert of([1] * 8) == LSPDecision(4, 4, 1.0, False, "flat")
    # after a clear first place the minimum never moves again
    assert of([1, 9, 9, 9]) == LSPDecision(2, 2, 1.0, False, "flat")


@pytest.mark.parametrize(
    ("alpha", "beta", "n", "lo", "hi"),
    [(0.25, 0.5, 12, 3, 6), (0.3, 0.3, 5, 1, 1), (0.25, 0.5, 3, 1, 1), (0.25, 0.5, 1, 1, 1), (0.1, 0.7, 10, 1, 7), (1.0, 1.0, 6, 6, 6)],
)  # fmt: skip
def test_the_range_is_rounded_inwards_and_holds_a_place(alpha, beta, n, lo, hi):
    falling = list(range(n, 0, -1))
    assert of(falling, alpha=alpha, beta=beta).length == hi
    assert of(falling, alpha=alpha, beta=beta, pick="strict").length == lo


def test_a_delimiter_in_the_window_ends_the_block():
    margins = [2] * 10 + [1] * 10
    assert of(margins, delimiters=(3, 7), lookback=4) == LSPDecision(7, 10, 2.0, True, "delimiter")
    assert of(margins, delimiters=(3, 7), lookback=3).length == 7
    assert of(margins, delimiters=(3, 7), lookback=2) == LSPDecision(10, 10, 2.0, False, "breakpoint")
    assert of(margins, delimiters=(3, 7), lookback=2, no_delimiter="min", min_commit=2).length == 2
    assert of(margins, delimiters=(3, 7), lookback=4, min_commit=8) == LSPDecision(8, 10, 2.0, False, "min_commit")
    assert of(margins, delimiters=(3, 7, 10, 11), lookback=4) == LSPDecision(10, 10, 2.0, True, "delimiter")
    assert of(margins, delimiters=(3, 10), lookback=0) == LSPDecision(10, 10, 2.0, False, "breakpoint")
    assert of(margins, delimiters=(3, 10), lookback=0, no_delimiter="min").length == 10


def test_the_floor_goes_below_alpha_but_not_below_the_minimum():
    margins = [9, 8, 2, 2, 2, 2, 2, 1]
    assert of(margins, tau_floor=8.5) == LSPDecision(1, 1, 9.0, False, "tau_floor")
    assert of(margins, tau_floor=10.0) == LSPDecision(1, 1, 9.0, False, "min_commit")
    assert of(margins, tau_floor=3.0, min_commit=3) == LSPDecision(3, 3, 2.0, False, "min_commit")


def test_the_block_ends_before_the_first_prediction_that_changed():
    margins = [5, 4, 3, 2, 1, 1, 1, 1]
    assert of(margins, [True, False] + [True] * 6) == LSPDecision(1, 1, 5.0, False, "stability")
    assert of(margins, [False] * 8, min_commit=2) == LSPDecision(2, 2, 4.0, False, "min_commit")
    assert of(margins, [True] * 8).reason == "breakpoint"


def test_infinite_margins_are_the_largest_and_count_as_flat():
    found = of([math.inf] * 4)
    assert found.length == 2
    assert found.tau == torch.finfo(torch.float32).max
    assert of([math.inf, 3.0, 2.0, 1.0], pick="strict").length == 1


def test_nothing_left_commits_nothing():
    assert of([]).length == 0


cases = st.integers(1, 14).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-2, 6).map(float), min_size=n, max_size=n),
        st.none() | st.lists(st.booleans(), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)
rules = st.builds(
    PrefixRule,
    alpha=st.sampled_from([0.05, 0.25, 0.3, 0.5]),
    beta=st.sampled_from([0.5, 0.6, 1.0]),
    min_commit=st.integers(1, 4),
    lookback=st.integers(0, 6),
    pick=st.sampled_from(["longest", "strict"]),
    tau_floor=st.none() | st.integers(0, 5).map(float),
    no_delimiter=st.sampled_from(["keep", "min"]),
)


def settings_of(rule):
    return {name: getattr(rule, name) for name in PrefixRule.__dataclass_fields__ if name != "fixed_tau"}


@given(case=cases, rule=rules)
def test_the_vectorised_rule_is_the_rule_told_place_by_place(case, rule):
    margins, stable, delimiters = case
    found = longest_stable_prefix(
        torch.tensor(margins),
        None if stable is None else torch.tensor(stable),
        torch.tensor(delimiters),
        **settings_of(rule),
    )
    assert found == reference.longest_stable_prefix(margins, stable, delimiters, rule)
    assert min(rule.min_commit, len(margins)) <= found.length <= max(found.candidate, rule.min_commit)
    assert found.length <= len(margins)


@settings(max_examples=50)
@given(
    rows=st.lists(cases, min_size=1, max_size=3),
    rule=rules,
    fixed=st.none() | st.integers(-1, 5).map(float),
    use=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    data=st.data(),
)
def test_ragged_rows_with_every_extra_are_decided_one_by_one(rows, rule, fixed, use, data):
    rule = PrefixRule(**settings_of(rule), fixed_tau=fixed)
    width = max(len(margins) for margins, _, _ in rows)
    extra = [[data.draw(st.lists(st.booleans(), min_size=len(m), max_size=len(m))) for _ in use] for m, _, _ in rows]

    def padded(lists, filler):
        return torch.tensor([list(x) + [filler] * (width - len(x)) for x in lists])

    held = [[True] * len(margins) if stable is None else stable for margins, stable, _ in rows]
    names = ("starts_word", "whole", "is_eos")
    found = decide(
        rule,
        padded([margins for margins, _, _ in rows], math.nan),
        padded(held, True),
        padded([delimiters for _, _, delimiters in rows], True),
        torch.tensor([len(margins) for margins, _, _ in rows]),
        **{name: padded([e[i] for e in extra], True) for i, name in enumerate(names) if use[i]},
    )
    for row, (margins, _, delimiters) in enumerate(rows):
        expected = reference.longest_stable_prefix(
            margins,
            held[row],
            delimiters,
            rule,
            **{name: extra[row][i] for i, name in enumerate(names) if use[i]},
        )
        length, candidate, snapped, reason, tau = found.packed[row].tolist()
        assert LSPDecision(int(length), int(candidate), tau, bool(snapped), REASONS[int(reason)]) == expected


def test_rows_without_places_get_length_zero_beside_others():
    found = decide(PrefixRule(), torch.ones(2, 4), None, torch.zeros(2, 4, dtype=torch.bool), torch.tensor([0, 4]))
    assert found.length.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.6}, "alpha is 0.6 and beta 0.5"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"beta": 1.5}, "beta 1.5"),
        ({"min_commit": 0}, "min_commit is 0"),
        ({"lookback": -1}, "lookback is -1"),
        ({"min_commit": True}, "min_commit is True, expected a whole number"),
        ({"lookback": True}, "lookback is True, expected a whole number"),
        ({"tau_floor": math.nan}, "tau_floor is not a number"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(settings, message):
    with pytest.raises(InputError, match=message):
        of([1, 2], **settings)


def test_margins_that_are_no_numbers_are_refused():
    with pytest.raises(InputError, match="margin is NaN"):
        of([1.0, math.nan])
    with pytest.raises(
        Exception, match=r"another length|is_delim"
    ):  # the shapes of the signature are checked first here
        longest_stable_prefix(torch.ones(3), None, torch.ones(2, dtype=torch.bool))
