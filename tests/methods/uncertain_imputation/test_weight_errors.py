import itertools
import math

import numpy as np
import pytest

from assay.methods.uncertain_imputation import naive_threshold, weight_error_report, weighted_threshold
from assay.methods.uncertain_imputation.reference import safe_errors_search


def problem(rng, n=None, ties=False):
    n = int(rng.integers(4, 40)) if n is None else n
    scores = rng.integers(0, 7, n).astype(float) if ties else rng.standard_normal(n)
    weights = rng.exponential(size=n) + 0.05
    if rng.random() < 0.5:  # large scores with large weights, or with small ones: naive under- or over-covers
        weights = np.sort(weights)[np.argsort(np.argsort(scores))]
    elif rng.random() < 0.5:
        weights = np.sort(weights)[::-1][np.argsort(np.argsort(scores))]
    return scores, weights, float(rng.exponential() + 0.05), float(rng.choice([0.5, 0.7, 0.8]))


def test_the_threshold_moves_monotonically_from_the_weighted_to_the_naive_one():
    rng = np.random.default_rng(0)
    deltas = np.concatenate([[0.0], np.geomspace(1e-3, 1e6, 30), [1e13]])
    for _ in range(150):
        scores, weights, star, level = problem(rng)
        report = weight_error_report(scores, weights, star, level, deltas)
        assert report.thresholds[0] == report.q_weighted == weighted_threshold(scores, weights, star, level)
        assert report.thresholds[-1] == report.q_naive == naive_threshold(scores, level)
        if abs(level * (len(scores) + 1) - round(level * (len(scores) + 1))) > 1e-3:  # else two ranks tie in the limit
            assert report.thresholds[-2] == report.q_naive
        path = report.thresholds if report.q_naive >= report.q_weighted else report.thresholds[::-1]
        assert all(a <= b for a, b in itertools.pairwise(path))


def test_safe_errors_agree_with_a_direct_search():
    rng = np.random.default_rng(1)
    unsafe_negative = unsafe_though_naive_is_lower = bounded_above = 0
    for i in range(1000):
        scores, weights, star, level = problem(rng, ties=i % 3 == 0)
        smallest = min(weights.min(), star)
        report = weight_error_report(scores, weights, star, level, np.zeros(1))
        low, high = report.safe
        tried = np.concatenate(
            [-smallest * (1 - np.geomspace(1e-6, 1, 12)), weights.mean() * np.geomspace(1e-3, 300, 12)]
        )
        for edge in (low, high):
            if math.isfinite(edge) and edge != 0:
                tried = np.append(tried, [edge - 1e-6 * abs(edge), edge + 1e-6 * abs(edge)])
        tried = tried[tried > -smallest]
        safe = safe_errors_search(scores, weights, star, level, tried)
        np.testing.assert_array_equal(safe, (tried > low) & (tried < high), err_msg=str(i))
        unsafe_negative += low > -smallest
        unsafe_though_naive_is_lower += low > -smallest and report.q_naive <= report.q_weighted
        bounded_above += math.isfinite(high)
        if report.q_naive >= report.q_weighted:
            assert high == math.inf  # theorem 2: over-coverage without weights makes every positive error safe
    assert unsafe_negative > 100
    assert unsafe_though_naive_is_lower > 3
    assert bounded_above > 100


def test_report_curve_and_text():
    scores, weights, star, level = problem(np.random.default_rng(5), 30)
    report = weight_error_report(scores, weights, star, level)
    assert report.deltas.min() > -min(weights.min(), star)
    for delta, threshold in zip(report.deltas, report.thresholds):
        assert threshold == weighted_threshold(scores, weights + delta, star + delta, level)
    assert "does not lower it between" in str(report)


def test_errors_that_make_a_weight_negative_are_refused():
    with pytest.raises(ValueError, match=r"errors must lie above -0\.5"):
        weight_error_report(np.arange(3.0), np.ones(3), 0.5, 0.5, np.array([-0.5]))
    with pytest.raises(ValueError, match="infinite"):
        weight_error_report(np.arange(3.0), np.ones(3), math.inf, 0.5)
