"""Intervals against statsmodels and scipy, at their limits, and by how often they cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW

from assay.stats import (
    clopper_pearson,
    correlation_interval,
    effective_cases,
    join,
    mean_interval,
    perfect_auc_interval,
    t_interval,
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.sampled_from([0.5, 0.95, 0.999]))
def test_the_interval_of_a_mean_is_that_of_statsmodels(values, level):
    array = np.array(values)
    assert mean_interval(array, level) == pytest.approx(DescrStatsW(array).tconfint_mean(1 - level), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("seeds", "deviations"), [(3, 2.484), (5, 1.242), (10, 0.715)])
def test_the_half_width_in_standard_deviations(seeds, deviations):
    values = np.random.default_rng(seeds).normal(size=seeds)
    low, high = mean_interval(values)
    assert (high - low) / 2 / values.std(ddof=1) == pytest.approx(deviations, abs=1e-3)


@given(st.data(), st.integers(1, 400), st.sampled_from([0.8, 0.95, 0.999]))
def test_clopper_pearson_is_that_of_statsmodels(data, n, level):
    k = data.draw(st.integers(0, n))
    assert clopper_pearson(k, n, level) == pytest.approx(proportion_confint(k, n, 1 - level, method="beta"), abs=1e-9)


def test_clopper_pearson_at_the_edges_is_a_power():
    low, high = clopper_pearson(20, 20)
    assert (low, high) == (pytest.approx(0.025 ** (1 / 20)), 1.0)
    assert clopper_pearson(0, 20) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))


def test_clopper_pearson_between_whole_numbers_lies_between():
    below, between, above = (clopper_pearson(k, 20) for k in (7, 7.5, 8))
    assert below[0] < between[0] < above[0]
    assert below[1] < between[1] < above[1]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.97])
def test_clopper_pearson_covers(share):
    n = 40
    covered = [low <= share <= high for low, high in (clopper_pearson(k, n) for k in range(n + 1))]
    assert scipy_stats.binom.pmf(np.arange(n + 1), n, share)[covered].sum() >= 0.95


def test_equal_shares_rest_on_all_their_cases_and_unequal_ones_on_fewer():
    assert effective_cases(np.full(5, 0.2), np.full(5, 40.0)) == pytest.approx(200)
    weights, cases = np.array([0.5, 0.5]), np.array([10.0, 1000.0])
    # the variance of the mean of two shares at p = 1/2, by its definition
    variance = 0.25 * 0.25 / 10 + 0.25 * 0.25 / 1000
    assert effective_cases(weights, cases) == pytest.approx(0.25 / variance)


@pytest.mark.parametrize(("r", "n"), [(0.3, 20), (-0.8, 50)])
def test_the_interval_of_a_correlation_is_scipys(r, n):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, n))
    x = (x - x.mean()) / x.std()
    y -= y.mean()
    y -= (x @ y) / n * x
    y = r * x + np.sqrt(1 - r * r) * y / y.std()
    expected = scipy_stats.pearsonr(x, y).confidence_interval(0.95)
    assert correlation_interval(r, n) == pytest.approx(tuple(expected), abs=1e-9)


def test_a_perfect_correlation_of_few_cases_is_no_certainty():
    low, high = correlation_interval(1.0, 4)
    assert low < 0 < 0.99 < high < 1
    assert correlation_interval(1.0, 200)[0] > 0.999


def test_a_perfect_area_says_as_much_as_its_smaller_class():
    assert perfect_auc_interval(10, 1000) == clopper_pearson(10, 10)


def test_joined_intervals_hold_each_other():
    assert join((0.0, 1.0), (0.5, 2.0), (0.2, 0.3)) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: join(), "at least one"),
        (lambda: mean_interval(np.array([1.0])), "at least two values, got 1"),
        (lambda: t_interval(0.0, 1.0, 0), "degrees of freedom"),
        (lambda: t_interval(0.0, 1.0, 3, 95.0), "between 0 and 1"),
        (lambda: clopper_pearson(3, 2), "0 <= k <= n"),
        (lambda: clopper_pearson(0, 0), "n > 0"),
        (lambda: correlation_interval(0.5, 3), "at least four"),
    ],
)
def test_what_has_no_interval_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
