"""The jackknife: the textbook standard error of a mean, every shortcut against leaving the cases out one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from sklearn.metrics import roc_auc_score

from assay.stats import (
    auc,
    auc_without,
    case_groups,
    fisher_z,
    from_fisher_z,
    jackknife,
    mean_without,
    pearson,
    pearson_without,
    spearman,
    spearman_without,
)

sizes = st.integers(8, 40)


def _deal(n: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(np.arange(n) % groups)


def test_up_to_500_cases_each_is_a_group_of_its_own():
    assert case_groups(500).tolist() == list(range(500))


def test_more_cases_are_dealt_evenly_and_always_the_same():
    groups = case_groups(1234)
    counts = np.bincount(groups)
    assert counts.size == 250
    assert counts.max() - counts.min() == 1
    assert np.array_equal(groups, case_groups(1234))
    # no order of the data survives in the groups: an alternating class is not the parity of a group
    assert abs(np.corrcoef(np.arange(1234) % 2, groups % 2)[0, 1]) < 0.1


@given(sizes, st.integers(0, 999))
def test_the_jackknife_of_a_mean_is_the_textbook_standard_error(n, seed):
    x = np.random.default_rng(seed).normal(3, 2, n)
    means = mean_without(x, np.arange(n), n)
    centre, error, freedom = jackknife(float(means[0]), means[1:], np.ones(n, dtype=int))
    assert centre == pytest.approx(x.mean())
    assert error == pytest.approx(x.std(ddof=1) / np.sqrt(n))
    assert freedom == n - 1


def test_it_takes_out_the_bias_of_a_variance():
    x = np.random.default_rng(0).normal(size=12)
    without = np.array([np.delete(x, i).var() for i in range(12)])
    assert jackknife(x.var(), without, np.ones(12, dtype=int))[0] == pytest.approx(x.var(ddof=1))


def test_groups_of_unequal_sizes_give_the_right_standard_error_on_average():
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(40), [1, 2, 3, 4] * 10)
    n = groups.size
    errors = []
    for _ in range(400):
        means = mean_without(rng.normal(size=n), groups, 40)
        errors.append(jackknife(float(means[0]), means[1:], np.bincount(groups))[1])
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(1 / np.sqrt(n), rel=0.03)


def test_a_large_mean_does_not_drown_its_spread():
    x = 1e9 + np.random.default_rng(0).normal(size=50)
    means = mean_without(x, np.arange(50), 50)
    error = jackknife(float(means[0]), means[1:], np.ones(50, dtype=int))[1]
    assert error == pytest.approx(x.std(ddof=1) / np.sqrt(50), rel=1e-4)


def test_fewer_than_two_groups_are_refused():
    with pytest.raises(ValueError, match="at least two groups"):
        jackknife(1.0, np.array([1.0]), np.array([3]))


def test_a_group_without_cases_here_leaves_the_mean_and_the_last_group_leaves_nothing():
    assert mean_without(np.array([1.0, 3.0]), np.array([0, 0]), 2).tolist()[::2] == [2.0, 2.0]
    assert np.isnan(mean_without(np.array([1.0, 3.0]), np.array([0, 0]), 2)[1])


# -- each statistic without a group is that statistic of what is left -------------------------------------------------


def _pairs(n: int, seed: int, ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, n))
    y = y + 0.5 * x
    if ties:
        x, y = np.round(x), np.round(2 * y) / 2
    count = int(rng.integers(2, n + 1))
    return x, y, _deal(n, count, rng), count


@given(sizes, st.integers(0, 10_000), st.booleans())
def test_pearson_without_each_group(n, seed, ties):
    x, y, groups, count = _pairs(n, seed, ties)
    found = pearson_without(x, y, groups, count)
    for g, r in enumerate(found):
        kept = groups != g - 1
        if kept.sum() > 2 and np.ptp(x[kept]) > 0 and np.ptp(y[kept]) > 0:
            assert r == pytest.approx(scipy_stats.pearsonr(x[kept], y[kept])[0], abs=1e-9)
    assert pearson(x, y) == pytest.approx(found[0], nan_ok=True)


@given(sizes, st.integers(0, 10_000), st.booleans())
def test_spearman_without_each_group(n, seed, ties):
    x, y, groups, count = _pairs(n, seed, ties)
    found = spearman_without(x, y, groups, count)
    for g, r in enumerate(found):
        kept = groups != g - 1
        if kept.sum() > 2 and np.ptp(x[kept]) > 0 and np.ptp(y[kept]) > 0:
            assert r == pytest.approx(scipy_stats.spearmanr(x[kept], y[kept])[0], abs=1e-9)
    assert spearman(x, y) == pytest.approx(found[0], nan_ok=True)


@given(sizes, st.integers(0, 10_000), st.booleans())
def test_auc_without_each_group(n, seed, ties):
    x, y, groups, count = _pairs(n, seed, ties)
    label = y > np.median(y)
    found = auc_without(x, label, groups, count)
    for g, area in enumerate(found):
        kept = groups != g - 1
        if 0 < label[kept].sum() < kept.sum():
            assert area == pytest.approx(roc_auc_score(label[kept], x[kept]), abs=1e-9)
        else:
            assert np.isnan(area)
    assert auc(x, label) == pytest.approx(found[0], nan_ok=True)


def test_spearman_over_many_cases_is_worked_in_pieces(monkeypatch):
    x, y, groups, count = _pairs(37, 5, True)
    whole = spearman_without(x, y, groups, count)
    monkeypatch.setitem(spearman_without.__globals__, "_CHUNK", 100)
    assert np.array_equal(whole, spearman_without(x, y, groups, count))


@pytest.mark.parametrize("statistic", [pearson, spearman])
def test_a_constant_side_has_no_correlation(statistic):
    assert np.isnan(statistic(np.full(9, 0.1), np.arange(9.0)))


def test_fishers_z_and_back():
    r = np.array([-0.9, 0.0, 0.5])
    assert from_fisher_z(fisher_z(r, 20)) == pytest.approx(r)
    assert from_fisher_z(fisher_z(np.array([1.0, -1.0]), 10)) == pytest.approx([1 - 6 / 990, -1 + 6 / 990])
