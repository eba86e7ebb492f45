import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.methods.uncertain_imputation._thresholds import (
    naive_threshold,
    pcp_threshold,
    pcp_weight,
    rank,
    repeated_threshold,
    weighted_threshold,
)
from assay.methods.uncertain_imputation.reference import (
    exact_rank,
    pcp_threshold_loop,
    weighted_threshold_loop,
    weighted_threshold_numpy_loop,
)

GOLDEN = Path(__file__).parents[2] / "data" / "uncertain-imputation"
LEVELS = ("0.55", "0.7", "0.8", "0.9", "0.95", "0.99", "0.905", "0.805")


@pytest.mark.parametrize("level", LEVELS)
def test_rank_equals_exact_arithmetic(level):
    exact, value = Fraction(level), float(level)
    for n in [*range(1, 2001), *range(10**8 - 200, 10**8 + 201)]:
        assert rank(value, n) == math.ceil(exact * (n + 1)), n
    assert rank(value, 99) == exact_rank(level, 99)


def test_rank_of_a_level_that_was_added_up():
    for n in range(1, 2001):
        assert rank(0.9 + 0.005, n) == math.ceil(Fraction("0.905") * (n + 1)), n
        assert rank(1 - 0.005, n) == math.ceil(Fraction("0.995") * (n + 1)), n


def test_plain_ceil_would_be_wrong():
    assert math.ceil(0.55 * 100) == 56
    assert rank(0.55, 99) == 55


def test_five_points_give_an_infinite_threshold_and_nine_the_largest_score():
    assert naive_threshold(np.arange(5.0), 0.9) == math.inf
    assert naive_threshold(np.arange(8.0), 0.9) == math.inf
    assert naive_threshold(np.arange(9.0), 0.9) == 8.0
    assert weighted_threshold(np.arange(5.0), np.ones(5), 1.0, 0.9) == math.inf
    with np.errstate(all="raise"):
        assert pcp_threshold(np.arange(5.0), np.ones(5), np.zeros(5, bool), 0.9, 0.005) == math.inf


@pytest.mark.parametrize("weight", [1.0, 0.1, 1 / 7, 3.3])
@pytest.mark.parametrize("n", [9, 99, 999, 99_999, 999_999])
def test_equal_weights_give_the_naive_rank(weight, n):
    scores = np.arange(1.0, n + 1)
    for level in ("0.55", "0.8", "0.9", "0.905", "0.99"):
        r = exact_rank(level, n)
        expected = float(r) if r <= n else math.inf
        assert weighted_threshold(scores, np.full(n, weight), weight, float(level)) == expected


@given(st.data())
def test_integer_weights_repeat_points(data):
    n = data.draw(st.integers(1, 12))
    scores = np.array(data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), dtype=float)
    weights = np.array(data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)))
    star = data.draw(st.integers(1, 5))
    level = data.draw(st.sampled_from([0.5, 0.8, 0.9]))
    repeated = np.sort(np.append(np.repeat(scores, weights), [math.inf] * star))
    expected = repeated[math.ceil(Fraction(str(level)) * len(repeated)) - 1]
    assert weighted_threshold(scores, weights, float(star), level) == expected


@given(st.integers(0, 10**6), st.floats(0.01, 100.0))
def test_weighted_threshold_ignores_the_scale_of_weights_and_rises_with_test_weight_and_level(seed, scale):
    rng = np.random.default_rng(seed)
    scores, weights = rng.integers(0, 8, 30).astype(float), rng.exponential(size=30)
    stars = np.sort(rng.exponential(size=20) * 3)
    levels = (0.5, 0.7, 0.9, 0.95)
    table = np.stack([weighted_threshold(scores, weights, stars, level) for level in levels])
    assert all(a <= b for row in table for a, b in itertools.pairwise(row))
    assert all(a <= b for column in table.T for a, b in itertools.pairwise(column))
    np.testing.assert_array_equal(table[2], weighted_threshold(scores, weights * scale, stars * scale, 0.9))


@given(st.integers(0, 10**6))
def test_weighted_threshold_equals_its_loop(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 40))
    scores, weights = rng.integers(0, 10, n).astype(float), rng.exponential(size=n)
    stars = rng.exponential(size=7) * 4
    fast = weighted_threshold(scores, weights, stars, 0.8)
    np.testing.assert_array_equal(fast, weighted_threshold_loop(scores, weights, stars, 0.8))
    np.testing.assert_array_equal(fast, weighted_threshold_numpy_loop(scores, weights, stars, 0.8))
    assert weighted_threshold(scores, weights, float(stars[0]), 0.8) == fast[0]


def test_pcp_equals_the_loop_over_all_points():
    rng = np.random.default_rng(3)
    for problem in range(200):
        n = int(rng.integers(5, 260))
        scores = rng.standard_normal(n) if problem % 2 else rng.integers(0, 9, n).astype(float)  # ties
        weights = 1 / rng.uniform(0.05, 1, n)
        if problem % 3 == 0:
            weights = rng.integers(1, 4, n).astype(float)
        corrupted = rng.random(n) < 0.3
        corrupted[0] = False
        level, beta = float(rng.choice([0.8, 0.9])), float(rng.choice([0.005, 0.03]))
        fast = pcp_threshold(scores[~corrupted], weights, corrupted, level, beta)
        assert fast == pcp_threshold_loop(scores[~corrupted], weights, corrupted, level, beta), problem


def test_pcp_weight_with_few_rows():
    weights = np.array([1.0, 3.0, 2.0])
    assert pcp_weight(weights, 0.005) == 3.0
    assert pcp_weight(weights, 0.005, "inf") == math.inf
    assert pcp_weight(weights, 0.5) == 2.0
    assert math.isfinite(pcp_weight(np.arange(1.0, 200.0), 0.005, "inf"))  # 199 rows are enough
    assert pcp_weight(np.arange(1.0, 199.0), 0.005, "inf") == math.inf
    assert pcp_threshold(np.arange(100.0), np.ones(100), np.zeros(100, bool), 0.8, 0.005, small_n="inf") == math.inf
    assert math.isfinite(pcp_threshold(np.arange(100.0), np.ones(100), np.zeros(100, bool), 0.8, 0.005))


@pytest.mark.parametrize(("n", "rank_", "coverage"), [(39, 36, 0.9), (42, 39, 39 / 43)])
def test_marginal_coverage_is_exactly_rank_over_n_plus_one(n, rank_, coverage):
    rng = np.random.default_rng(n)
    assert rank(0.9, n) == rank_
    scores = rng.standard_normal((4000, n + 1))
    hits = [row[-1] <= naive_threshold(row[:-1], 0.9) for row in scores]
    assert abs(np.mean(hits) - coverage) < 3 * math.sqrt(coverage * (1 - coverage) / 4000)


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_repeated_threshold_averages_the_draws(seed, draws):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 40))
    scores = rng.integers(0, 12, n * draws).astype(float)
    needed = draws * 0.8 * (n + 1) * (1 - 1e-12)
    enough = [q for q in np.sort(scores) if (scores <= q).sum() >= needed]
    assert repeated_threshold(scores, draws, 0.8) == (enough[0] if enough else math.inf)
    if draws == 1:
        assert repeated_threshold(scores, 1, 0.8) == naive_threshold(scores, 0.8)
    with pytest.raises(ValueError, match="same number of draws"):
        repeated_threshold(np.arange(5.0), 2, 0.8)


def test_draws_that_agree_give_the_threshold_of_one():
    scores = np.random.default_rng(0).standard_normal(57)
    assert repeated_threshold(np.repeat(scores, 5), 5, 0.9) == naive_threshold(scores, 0.9)


def official(scores, weights, corrupted, level, beta):
    """The released quantile, written again from its description: midpoints of the masses, rescaled to 0 .. 1."""
    clean = [(s, w) for s, w, c in zip(scores, weights, corrupted) if not c]
    ordered = sorted(weights)
    position = (1 - beta) * (len(ordered) - 1)
    below = math.floor(position)
    star = ordered[below] + (position - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])
    points = [*sorted(clean, key=lambda p: p[0]), (max(s for s, _ in clean), star)]
    total = sum(w for _, w in points)
    middles, running = [], 0.0
    for _, w in points:
        middles.append((running + w / 2) / total)
        running += w
    middles = [(m - middles[0]) / (middles[-1] - middles[0]) for m in middles]
    n = len(weights)
    target = min(max(level + beta * n / (n + 1) + 1 / (n + 1), 0), 1)
    for (left, a), (right, b) in zip(zip(middles, points), zip(middles[1:], points[1:])):
        if left <= target <= right:
            return a[0] + (target - left) / (right - left) * (b[0] - a[0])
    raise AssertionError


def test_official_quantile_equals_an_independent_computation():
    rng = np.random.default_rng(11)
    for problem in range(200):
        n = int(rng.integers(12, 300))
        scores = rng.standard_normal(n) if problem % 2 else np.round(rng.standard_normal(n), 1)
        corrupted = rng.random(n) < 0.25
        corrupted[:2] = False
        e = rng.uniform(0.1, 1, n)
        weights = e.mean() / e
        ours = pcp_threshold(scores[~corrupted], weights, corrupted, 0.9, 0.02, compat="official")
        assert ours == pytest.approx(official(scores, weights, corrupted, 0.9, 0.02), abs=1e-10)


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "pcp_official.json").read_text())["cases"], ids=lambda c: c["name"]
)
def test_official_quantile_equals_the_released_code(case):
    corrupted = np.array(case["corrupted"], dtype=bool)
    scores = np.array(case["scores"])
    e = 1 - np.array(case["corruption_probability_used"])
    weights = e.mean() / e
    np.testing.assert_allclose(weights, case["weights"], rtol=1e-12)
    np.testing.assert_allclose(
        scores, np.maximum(np.array(case["intervals"])[:, 0] - case["y"], case["y"] - np.array(case["intervals"])[:, 1])
    )
    assert np.quantile(weights, 1 - case["beta"]) == pytest.approx(case["w_star"], rel=1e-12)
    ours = pcp_threshold(scores[~corrupted], weights, corrupted, 1 - case["alpha"], case["beta"], compat="official")
    assert ours == pytest.approx(case["Q_stable_sort"], rel=1e-12)


def test_released_quantiles_are_finite_where_a_valid_one_is_infinite():
    cases = json.loads((GOLDEN / "pcp_official.json").read_text())["cases"]
    small = next(c for c in cases if c["n"] == 12)
    corrupted = np.array(small["corrupted"], dtype=bool)
    with np.errstate(all="raise"):
        ours = pcp_threshold(np.array(small["scores"])[~corrupted], np.array(small["weights"]), corrupted, 0.9, 0.005)
    assert ours == math.inf
    assert math.isfinite(small["Q_stable_sort"])


def test_weighted_quantile_beside_the_released_one():
    """The released one interpolates between midpoints and puts the test point's mass at the largest clean score."""
    golden = json.loads((GOLDEN / "wcp_official.json").read_text())
    scores = np.array(golden["scores"])[~np.array(golden["corrupted"], dtype=bool)]
    weights, stars = np.array(golden["clean_weights"]), np.array(golden["test_weights"])
    exact = weighted_threshold(scores, weights, stars, 1 - golden["alpha"])
    np.testing.assert_array_equal(exact, weighted_threshold_loop(scores, weights, stars, 0.9))
    for star, released, ours in zip(stars, golden["Q"], exact):
        points = np.append(np.sort(scores), scores.max())
        mass = np.append(weights[np.argsort(scores)], star)
        middles = (np.cumsum(mass) - mass / 2) / mass.sum()
        assert released == pytest.approx(np.interp(0.9, middles, points), rel=1e-12)
        assert ours == math.inf if star / mass.sum() > 0.1 else math.isfinite(ours)
    assert np.isinf(exact).sum() == 2  # where the released one answers with the largest clean score
    assert golden["Q"][-1] == pytest.approx(scores.max())


@pytest.mark.parametrize(
    ("weights", "star", "message"),
    [
        ([1.0, -1.0], 1.0, "negative"),
        ([0.0, 0.0], 1.0, "all calibration weights are zero"),
        ([1.0, np.nan], 1.0, "not a number"),
        ([1.0, 1.0], -1.0, "test weight"),
    ],
)
def test_wrong_weights_are_refused(weights, star, message):
    with pytest.raises(ValueError, match=message):
        weighted_threshold(np.array([1.0, 2.0]), np.array(weights), star, 0.9)


def test_wrong_levels_betas_and_shapes_are_refused():
    scores, clean = np.arange(20.0), np.zeros(20, bool)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        naive_threshold(scores, 1.0)
    for beta in (0.1, 0.2, 0.0):
        with pytest.raises(ValueError, match="beta must lie between 0 and alpha"):
            pcp_threshold(scores, np.ones(20), clean, 0.9, beta)
    with pytest.raises(ValueError, match="one score a clean row"):
        pcp_threshold(scores, np.ones(20), np.ones(20, bool), 0.9)
    with pytest.raises(ValueError, match="not a number"):
        naive_threshold(np.array([1.0, np.nan]), 0.9)
    with pytest.raises(ValueError, match="at least one value"):
        naive_threshold(np.empty(0), 0.9)
