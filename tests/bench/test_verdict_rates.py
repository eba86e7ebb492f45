"""How often verdicts are wrong, by simulation: coverage of the intervals, false `holds` and false `fails`.

A wrong verdict is allowed at a rate; what is asserted is that the rate is not above its nominal value by more than the
simulation's own error (three standard deviations).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from assay.bench import Cases, Count
from assay.stats import clopper_pearson, fisher_z, jackknife, mean_interval, mean_without

from .evidence import Experiment, decide

ONE = Experiment(("a",))
TWO = Experiment(("a", "b"))


@pytest.fixture(params=[100, pytest.param(1500, marks=pytest.mark.slow)])
def runs(request) -> int:
    return request.param


def at_most(hits: int, runs: int, rate: float) -> bool:
    return hits <= runs * rate + 3 * math.sqrt(runs * rate * (1 - rate)) + 1


def count(runs, make, words=("holds", "fails", "open")):
    """How often each word comes out of ``make(rng)``, which gives a verdict."""
    found = dict.fromkeys(words, 0)
    for run in range(runs):
        found[make(np.random.default_rng(run)).verdict] += 1
    return found


def cases_of(rng, items, seeds, noise, n=60, seed_count=5):
    """(seed, case): an effect of 0 seen through items that all seeds share, seeds, and noise."""
    return (
        items * rng.normal(size=n) + seeds * rng.normal(size=(seed_count, 1)) + noise * rng.normal(size=(seed_count, n))
    )


# ----------------------------------------------------------------------------------------------------------- coverage


@pytest.mark.parametrize(
    ("items", "seeds", "noise"),
    [(1.0, 0.0, 1.0), (1.0, 0.0, 3.0), (0.5, 0.15, 1.0), (0.3, 0.5, 1.0), (0.0, 0.3, 1.0)],
)
def test_the_wider_of_both_covers_where_either_alone_may_not(items, seeds, noise, runs):
    covered = over_seeds = over_cases = 0
    for run in range(runs):
        x = cases_of(np.random.default_rng(run), items, seeds, noise)

        def measures(arm, at, seed, x=x):
            return {"x": Cases(x[seed])}

        low, high = decide(ONE, measures, "x[a] >= 0").interval
        own, other = mean_interval(x.mean(axis=1)), mean_interval(x.mean(axis=0))
        covered += low <= 0 <= high
        over_seeds += own[0] <= 0 <= own[1]
        over_cases += other[0] <= 0 <= other[1]
        assert (low, high) == pytest.approx((min(own[0], other[0]), max(own[1], other[1])))
    assert at_most(runs - covered, runs, 0.05)
    if items == 1.0 and noise == 1.0:
        assert over_seeds / runs < 0.85  # seeds cannot see the luck of items that they share
    if seeds >= 0.3:
        assert over_cases / runs < 0.85  # cases cannot see the luck of seeds that they share


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.98])
def test_a_count_covers(rate, runs):
    missed = 0
    for run in range(runs):
        k = np.random.default_rng(run).binomial(80, rate, 5)
        low, high = decide(ONE, lambda arm, at, seed, k=k: {"x": Count(int(k[seed]), 80)}, "x[a] >= 0").interval
        missed += not low <= rate <= high
    assert at_most(missed, runs, 0.05)


@pytest.mark.parametrize(("pa", "pb"), [(0.98, 0.97), (0.9, 0.8), (0.6, 0.6)])
def test_a_difference_of_yes_and_no_covers(pa, pb, runs):
    """Greedy answers: the same for every seed, so that the cases are all the sample there is."""
    missed = 0
    for run in range(runs):
        luck = np.random.default_rng(run).random((2, 80))
        luck[1] = np.where(luck[0] < 0.5, luck[1], luck[0])  # the arms agree more often than chance
        hits = {"a": (luck[0] < pa).astype(float), "b": (luck[1] < pb).astype(float)}
        low, high = decide(TWO, lambda arm, at, seed, h=hits: {"x": Cases(h[arm])}, "x[a] >= x[b]").interval
        truth = pa - (pb / 2 + pb - 0.5)
        missed += not low <= truth <= high
    assert at_most(missed, runs, 0.05)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_a_correlation_covers(rho, runs):
    missed = 0
    for run in range(runs):
        rng = np.random.default_rng(run)
        x = rng.normal(size=30)
        y = rho * x + math.sqrt(1 - rho**2) * rng.normal(size=30)
        low, high = decide(
            ONE, lambda arm, at, seed, x=x, y=y: {"x": Cases(x), "y": Cases(y)}, "pearson(x[a], y[a]) >= 0"
        ).interval
        missed += not low <= rho <= high
    # the jackknife of Fisher's z is a large-sample interval: with 30 cases it may miss a little more often
    assert at_most(missed, runs, 0.075)


# --------------------------------------------------------------------------------------------------- false verdicts


def test_a_number_at_its_bar_is_decided_in_one_run_of_twenty(runs):
    found = count(3 * runs, lambda rng: decide(ONE, numbers(rng.normal(size=(5, 1))), "x[a] >= 0"))
    assert at_most(found["holds"], 3 * runs, 0.025)
    assert at_most(found["fails"], 3 * runs, 0.025)
    assert found["holds"] + found["fails"] > 3 * runs * 0.05 * 0.5  # and no interval is wider than it must be


def numbers(draws):
    return lambda arm, at, seed: {"x": float(draws[seed, at.get("n", 0)])}


def test_many_cells_at_their_bars_fail_no_more_often_than_one(runs):
    experiment = Experiment(("a",), {"n": tuple(range(12))})
    found = count(runs, lambda rng: decide(experiment, numbers(rng.normal(size=(5, 12))), "x[a] >= 0", each="n"))
    assert at_most(found["fails"], runs, 0.025)
    assert found["holds"] == 0


def test_at_95_percent_a_cell_they_would_fail_often():
    """Why the level is 1 - 0.05 / m."""
    wrong = 0
    for run in range(600):
        draws = np.random.default_rng(run).normal(size=(5, 12))
        wrong += any(mean_interval(draws[:, n])[1] < 0 for n in range(12))
    assert wrong / 600 > 0.15


@pytest.mark.parametrize(("k", "true"), [(2, 1), (1, 0), (4, 3)])
def test_in_at_least_holds_falsely_in_one_run_of_twenty(k, true, runs):
    """As many cells are far on the claim's side as leave it just false; the others lie at the bar."""
    experiment = Experiment(("a",), {"n": tuple(range(5))})
    shift = np.array([100.0] * true + [0.0] * (5 - true))

    def make(rng):
        return decide(experiment, numbers(rng.normal(size=(5, 5)) + shift), "x[a] > 0", each="n", in_at_least=k)

    found = count(runs, make)
    assert at_most(found["holds"], runs, 0.05)


@pytest.mark.parametrize(("k", "true"), [(2, 1), (3, 2)])
def test_in_at_least_fails_falsely_in_one_run_of_twenty(k, true, runs):
    """As many cells as wanted are true by nothing at all, the others are far off."""
    experiment = Experiment(("a",), {"n": tuple(range(5))})
    shift = np.array([0.0] * k + [-100.0] * (5 - k))

    def make(rng):
        return decide(experiment, numbers(rng.normal(size=(5, 5)) + shift), "x[a] >= 0", each="n", in_at_least=k)

    found = count(runs, make)
    assert at_most(found["fails"], runs, 0.05)


def test_perfect_scores_of_few_cases_do_not_prove_equality(runs):
    """b is right in all cases and a in 95 %: within 0.02 is false, and often nothing in the sample shows it."""

    def make(rng):
        hits = (rng.random((5, 10)) < 0.95).astype(float)
        return decide(
            TWO, lambda arm, at, seed: {"x": Cases(hits[seed] if arm == "a" else np.ones(10))}, "x[a] - x[b] >= -0.02"
        )

    assert at_most(count(runs, make)["holds"], runs, 0.025)

    def counts(rng):
        k = rng.binomial(10, 0.95, 5)
        return decide(
            TWO, lambda arm, at, seed: {"x": Count(int(k[seed]) if arm == "a" else 10, 10)}, "x[a] - x[b] >= -0.02"
        )

    assert at_most(count(runs, counts)["holds"], runs, 0.025)


def test_an_unrelated_order_of_few_domains_is_rarely_taken_for_a_correlation(runs):
    def make(rng):
        x, y = rng.normal(size=(2, 5))
        return decide(ONE, lambda arm, at, seed: {"x": Cases(x), "y": Cases(y)}, "spearman(x[a], y[a]) > 0")

    found = count(runs, make)
    assert at_most(found["holds"], runs, 0.05)


def test_the_best_of_many_equal_rivals_is_not_beaten_by_luck(runs):
    """Chosen once: the choice makes the best rival look better than it is, which works against the claim, not for it."""
    rivals = tuple("bcdef")
    experiment = Experiment(("a", *rivals))

    def make(rng):
        draws = dict(zip(("a", *rivals), rng.normal(size=(6, 5)), strict=True))
        return decide(experiment, lambda arm, at, seed: {"x": float(draws[arm][seed])}, "x[a] > max(x[b|c|d|e|f])")

    assert at_most(count(runs, make)["holds"], runs, 0.025)


def test_a_true_effect_is_found():
    """The other side of caution: half a deviation over 200 cases and five seeds is nearly always seen."""

    def make(rng):
        x = cases_of(rng, 1.0, 0.05, 0.5, n=200) + 0.5
        return decide(ONE, lambda arm, at, seed: {"x": Cases(x[seed])}, "x[a] > 0")

    assert count(60, make)["holds"] > 55


# ------------------------------------------------------------------------------------------- larger, on wanted only


@pytest.mark.slow
@pytest.mark.parametrize("seed_count", [3, 5, 10])
@pytest.mark.parametrize(
    ("spread", "miss"),
    [((1, 0, 1), 0.05), ((0, 0.5, 1), 0.05), ((1, 0.1, 1), 0.065), ((0.5, 0.3, 1), 0.08), ((1, 0.3, 1), 0.11)],
)
def test_coverage_over_many_designs(seed_count, spread, miss):
    """95 % where items or seeds outweigh each other; down to 89 % where both weigh the same.

    Each interval sees one of two variances that add up, and the wider of two is less than their sum. It is furthest
    below where ten seeds and a hundred cases give the mean equal variances (the last design).
    """
    runs, missed = 4000, 0
    for run in range(runs):
        x = cases_of(np.random.default_rng(run), *spread, n=100, seed_count=seed_count)
        own, other = mean_interval(x.mean(axis=1)), mean_interval(x.mean(axis=0))
        missed += not min(own[0], other[0]) <= 0 <= max(own[1], other[1])
    assert at_most(missed, runs, miss)


@pytest.mark.slow
def test_coverage_of_quotients_and_exact_shares():
    runs, missed, shares = 4000, 0, 0
    for run in range(runs):
        rng = np.random.default_rng(run)
        a, b = rng.lognormal(size=(2, 60))
        n = np.arange(60)
        logs = np.log(mean_without(a, n, 60) / mean_without(b, n, 60))
        centre, error, _ = jackknife(float(logs[0]), logs[1:], np.ones(60, dtype=int))
        missed += abs(centre) > 2.0 * error
        low, high = clopper_pearson(int(rng.binomial(60, 0.1)), 60)
        shares += not low <= 0.1 <= high
    assert at_most(missed, runs, 0.06)
    assert at_most(shares, runs, 0.05)
    assert np.isfinite(fisher_z(np.array([1.0]), 5)).all()
