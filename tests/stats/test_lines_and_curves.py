"""Lines through a few points, and the speed-up between two curves."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from assay.stats import exponent, r2, reached, running_median, slope, speedup, spread

rng = np.random.default_rng(0)
X = np.array([1.0, 2.0, 4.0, 7.0])
Y = rng.normal(size=(4, 3)) + X[:, None]


def test_slope_and_r2_are_those_of_statsmodels():
    fits = [sm.OLS(Y[:, i], sm.add_constant(X)).fit() for i in range(3)]
    assert slope(X, Y) == pytest.approx([fit.params[1] for fit in fits])
    assert r2(X, Y) == pytest.approx([fit.rsquared for fit in fits])


@given(st.floats(-3, 3), st.floats(0.1, 10))
def test_the_exponent_of_a_power_law_is_its_power(power, factor):
    assert exponent(X, factor * X**power) == pytest.approx(power, abs=1e-9)


def test_what_has_no_logarithm_has_no_exponent():
    assert np.isnan(exponent(X, np.array([1.0, 0.0, 1.0, 1.0])))
    assert np.isnan(exponent(np.array([0.0, 1.0]), np.array([1.0, 1.0])))


def test_a_constant_has_a_slope_and_no_straightness():
    assert slope(X, np.full(4, 0.1)) == pytest.approx(0, abs=1e-15)
    assert np.isnan(r2(X, np.full(4, 0.1)))
    assert r2(X, 3 * X - 1) == pytest.approx(1)


def test_a_line_needs_two_places():
    with pytest.raises(ValueError, match="two different values"):
        slope(np.array([1.0, 1.0]), np.array([1.0, 2.0]))


def test_spread_is_largest_minus_smallest():
    assert spread(np.array([[1.0, -1.0], [4.0, -3.0], [2.0, 0.0]])).tolist() == [3.0, 3.0]


@given(hnp.arrays(float, st.integers(1, 20), elements=st.floats(-1e3, 1e3)))
def test_the_running_median_is_that_of_pandas(values):
    expected = pd.Series(values).rolling(5, center=True, min_periods=1).median().to_numpy()
    assert running_median(values) == pytest.approx(expected)


def test_an_even_window_has_no_middle():
    with pytest.raises(ValueError, match="odd"):
        running_median(np.ones(3), 4)


def test_never_reached_counts_as_the_last_step():
    steps, values = np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 2.5])
    assert reached(steps, values, 2.2, falls=True) == 2
    assert reached(steps, values, 1.0, falls=True) == 3
    assert reached(steps, values, 2.9, falls=False) == 1


def _curve(values) -> np.ndarray:
    return np.column_stack([np.arange(1.0, len(values) + 1), values])


def test_a_curve_four_times_as_fast():
    y = _curve(1 / np.arange(1.0, 401))
    x = _curve(1 / (4 * np.arange(1.0, 401)))
    assert speedup(x, y) == pytest.approx(4, rel=0.02)
    assert speedup(y, x) == pytest.approx(1, rel=0.02)  # y never gets to where x ends: as long as its last step


def test_higher_is_better_where_the_rival_rises():
    assert speedup(_curve(2 * np.arange(100.0)), _curve(np.arange(100.0))) == pytest.approx(2, rel=0.03)


@given(st.integers(0, 99))
def test_a_curve_is_no_faster_than_itself(seed):
    curve = _curve(np.random.default_rng(seed).normal(size=30))
    assert speedup(curve, curve) == 1
    assert speedup(curve[::-1], curve) == 1  # whatever the order in which its points were logged


def test_a_single_outlier_reaches_nothing():
    y = _curve(np.linspace(10, 1, 50))
    x = y.copy()
    x[3, 1] = 0.0
    assert speedup(x, y) == 1


def test_a_rival_that_does_not_move_gives_no_speedup():
    assert np.isnan(speedup(_curve(np.linspace(1, 0, 9)), _curve(np.ones(9))))
