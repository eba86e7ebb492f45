import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from assay.methods.uncertain_imputation import _samplers
from assay.methods.uncertain_imputation._samplers import ERRORS, residual_sampler
from assay.methods.uncertain_imputation.reference import nearest_pool


def grid(m, draws=1):
    return ((np.arange(m * draws) + 0.5) / (m * draws)).reshape(m, draws)


def test_same_z_draws_have_the_law_of_the_label_given_g_and_z():
    rng = np.random.default_rng(0)
    n = 5000
    z, fresh = rng.integers(0, 4, (2, n)).astype(float)
    error = lambda z: (z - 1) + (0.2 + z) * rng.exponential(size=n)  # noqa: E731
    sampler = residual_sampler("same-z", error(z), z[:, None])
    drawn = sampler.draw(fresh[:, None], rng.random((n, 1)))[:, 0]
    truth = error(fresh)
    for value in range(4):
        assert ks_2samp(drawn[fresh == value], truth[fresh == value]).pvalue > 0.001
    assert ks_2samp(residual_sampler("global", error(z), z[:, None]).draw(fresh[:, None], rng.random((n, 1)))[fresh == 3, 0], truth[fresh == 3]).pvalue < 1e-6  # fmt: skip


@given(st.integers(0, 10**6), st.integers(1, 10), st.booleans())
def test_nearest_pool_equals_its_loop(seed, columns, discrete):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 90))
    Z = rng.integers(0, 3, (n, columns)).astype(float) if discrete else rng.standard_normal((n, columns))
    Z[:, 0] *= 1000  # scales differ
    residuals = rng.standard_normal(n)
    sampler = residual_sampler("knn", residuals, Z)
    for z in (Z[0], rng.standard_normal(columns)):
        np.testing.assert_array_equal(sampler.pool(z), nearest_pool(residuals, Z, z))


def test_tree_and_brute_force_draw_the_same(monkeypatch):
    rng = np.random.default_rng(1)
    Z, new = rng.integers(0, 5, (400, 3)).astype(float), rng.integers(0, 6, (70, 3)).astype(float)
    residuals, uniforms = rng.standard_normal(400), rng.random((70, 2))
    by_tree = residual_sampler("knn", residuals, Z).draw(new, uniforms)
    monkeypatch.setattr(_samplers, "TREE_COLUMNS", 0)
    monkeypatch.setattr(_samplers, "CHUNK", 1000)
    np.testing.assert_array_equal(by_tree, residual_sampler("knn", residuals, Z).draw(new, uniforms))


def test_nearest_draws_are_uniform_over_the_pool():
    rng = np.random.default_rng(2)
    Z, residuals = rng.standard_normal((900, 2)), rng.standard_normal(900)
    sampler = residual_sampler("knn", residuals, Z)
    pool = sampler.pool(np.zeros(2))
    assert len(pool) == max(20, math.ceil(math.sqrt(900)))
    drawn = sampler.draw(np.zeros((300, 2)), grid(300))[:, 0]
    values, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_array_equal(values, pool)
    assert set(counts) == {10}


def test_ties_at_the_last_distance_all_enter_the_pool():
    Z = np.repeat([[0.0], [1.0]], 30, axis=0)
    sampler = residual_sampler("knn", np.arange(60.0), Z)
    np.testing.assert_array_equal(sampler.pool(np.zeros(1)), np.arange(30.0))
    assert len(residual_sampler("knn", np.arange(7.0), np.arange(7.0)[:, None]).pool(np.zeros(1))) == 7


def test_a_constant_column_is_divided_by_one():
    rng = np.random.default_rng(3)
    z = rng.standard_normal(100)
    both = residual_sampler("knn", z, np.stack([z, np.full(100, 0.1)], axis=1))
    np.testing.assert_array_equal(
        both.pool(np.array([0.0, 0.1])), residual_sampler("knn", z, z[:, None]).pool(np.zeros(1))
    )


def test_small_pools_take_in_the_nearest_values_whole_and_say_so():
    Z = np.array([[0.0]] * 5 + [[1.0]] * 10 + [[3.0]] * 40)
    residuals = np.arange(55.0)
    with pytest.warns(UserWarning, match="fewer than 20 clean reference rows"):
        drawn = residual_sampler("same-z", residuals, Z).draw(np.zeros((110, 1)), grid(110))
    assert set(drawn[:, 0]) == set(residuals)  # 5 and 10 are still too few, so the 40 come whole
    with pytest.warns(UserWarning, match="fewer than 12"):
        drawn = residual_sampler("same-z", residuals, Z, min_pool=12).draw(np.zeros((110, 1)), grid(110))
    assert set(drawn[:, 0]) == set(residuals[:15])


def test_cells_hold_like_rows():
    Z = np.repeat([[0.0], [100.0]], 60, axis=0)
    residuals = np.concatenate([np.arange(60.0), 1000 + np.arange(60.0)])
    drawn = residual_sampler("bins", residuals, Z).draw(np.array([[1.0], [99.0]]), np.full((2, 1), 0.5))[:, 0]
    assert drawn[0] < 60
    assert drawn[1] >= 1000
    assert len(residual_sampler("bins", residuals[:49], Z[:49]).centres) == 1


def test_quantile_draws_follow_the_spread_and_reach_beyond_the_last_quantile():
    rng = np.random.default_rng(4)
    z = rng.uniform(-1, 1, 3000)
    residuals = np.where(z > 0, 5.0, 1.0) * rng.standard_normal(3000)
    sampler = residual_sampler("quantile", residuals, z[:, None])
    for value, sd in ((-0.5, 1.0), (0.5, 5.0)):
        drawn = sampler.draw(np.full((2000, 1), value), grid(2000))[:, 0]
        assert np.quantile(drawn, [0.25, 0.5, 0.75]) == pytest.approx(sd * np.array([-0.674, 0, 0.674]), abs=0.35 * sd)
        assert (np.diff(drawn[150:-150]) >= -1e-12).all()
    inside = sampler.draw(np.full((2, 1), 0.5), np.array([[0.05], [0.95]]))[:, 0]
    below, above = sampler.draw(np.full((2, 1), 0.5), np.array([[0.001], [0.999]]))[:, 0]
    assert below < inside[0]
    assert above > inside[1]


@pytest.mark.parametrize("errors", ERRORS)
@pytest.mark.filterwarnings("ignore:.*clean reference rows")
def test_the_order_of_reference_rows_changes_nothing(errors):
    rng = np.random.default_rng(5)
    Z = np.stack([rng.integers(0, 4, 200).astype(float), rng.standard_normal(200)], axis=1)
    residuals, new, uniforms = rng.standard_normal(200), Z[:40] + 0.01, rng.random((40, 3))
    order = rng.permutation(200)
    first = residual_sampler(errors, residuals, Z, seed=1).draw(new, uniforms)
    np.testing.assert_array_equal(
        first, residual_sampler(errors, residuals[order], Z[order], seed=1).draw(new, uniforms)
    )
    if errors != "quantile":
        assert set(first.ravel()) <= set(residuals)


def test_an_unknown_sampler_is_refused():
    with pytest.raises(ValueError, match="errors must be one of knn"):
        residual_sampler("nearest", np.ones(3), np.ones((3, 1)))
