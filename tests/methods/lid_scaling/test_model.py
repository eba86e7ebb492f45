"""The simulated model: known means of its error, and ridge by every route."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from assay._errors import InputError
from assay.methods.lid_scaling import LIDModel, local_slope, pass_at_k_failure


def test_least_squares_has_the_known_mean_error():
    errors = []
    model = LIDModel(6, 8.0, sigma=0.7, alpha=0.5, seed=0)
    for _ in range(2000):
        X, y, _ = model.sample(20)
        errors.append(model.gen_error(model.fit_ridge(X, y, 0.0)))
    z = (np.mean(errors) - model.expected_gen_error(20)) / (np.std(errors) / math.sqrt(2000))
    assert abs(z) < 4
    assert model.expected_gen_error(20) == pytest.approx(0.49 / 3 * 6 / 13)


def test_given_the_inputs_the_mean_over_answers_is_the_trace():
    model = LIDModel(5, 6.0, sigma=1.0, alpha=1.0, seed=1)
    X, _, _ = model.sample(30)
    errors = []
    for _ in range(4000):
        tau = model._rng.gamma(3.0, size=30)
        y = model.draws(X, tau, 1)[:, 0]
        errors.append(model.gen_error(model.fit_ridge(X, y, 0.0)))
    z = (np.mean(errors) - model.noise_error(X)) / (np.std(errors) / math.sqrt(4000))
    assert abs(z) < 4


@pytest.mark.parametrize("N", [10, 40, 200])
@pytest.mark.parametrize("lam", [0.02, 0.5])
def test_the_deterministic_equivalent_is_near_the_mean(N, lam):
    model = LIDModel(40, 8.0, sigma=0.5, alpha=0.5, seed=2)
    errors = []
    for _ in range(150):
        X, y, _ = model.sample(N)
        errors.append(model.gen_error(model.fit_ridge(X, y, lam)))
    assert model.expected_gen_error(N, lam) == pytest.approx(np.mean(errors), rel=0.15)


@pytest.mark.parametrize("N", [8, 12, 40])
def test_ridge_is_primal_dual_and_sklearns(N):
    model = LIDModel(12, 4.0, sigma=0.3, seed=3)
    X, y, _ = model.sample(N)
    found = model.fit_ridge(X, y, 0.05)
    primal = np.linalg.solve(X.T @ X / N + 0.05 * np.eye(12), X.T @ y / N)
    dual = X.T @ np.linalg.solve(X @ X.T / N + 0.05 * np.eye(N), y) / N
    theirs = Ridge(alpha=N * 0.05, fit_intercept=False, tol=1e-12).fit(X, y).coef_
    for other in (primal, dual, theirs):
        assert found == pytest.approx(other, rel=1e-6, abs=1e-9)
    with pytest.warns(UserWarning, match="interpolation peak") if N == 12 else nullcontext():
        least = model.fit_ridge(X, y, 0.0)
    assert least == pytest.approx(np.linalg.lstsq(X, y, rcond=None)[0], rel=1e-6, abs=1e-9)


def test_the_error_is_the_mean_square_of_the_bias():
    model = LIDModel(5, 4.0, alpha=1.0, seed=4)
    theta = model.theta + 0.1
    X = np.random.default_rng(0).standard_normal((400_000, 5)) * np.sqrt(model.spectrum)
    squares = (X @ (theta - model.theta)) ** 2
    assert model.gen_error(theta) == pytest.approx(squares.mean(), abs=4 * squares.std() / math.sqrt(len(X)))


def test_the_peak_at_d_needs_noise():
    for sigma, peak in ((1.0, True), (1e-3, False)):
        medians = []
        for N in (25, 50, 100):
            model = LIDModel(50, 6.0, sigma=sigma, seed=5)
            errors = []
            for _ in range(15):
                X, y, _ = model.sample(N)
                errors.append(model.gen_error(model.fit_ridge(X, y, 1e-9)))
            medians.append(np.median(errors))
        assert (medians[1] > 5 * max(medians[0], medians[2])) == peak, medians


def test_units_do_not_matter():
    small, large = LIDModel(5, 4.0, sigma=1.0, seed=6), LIDModel(5, 4.0, sigma=10.0, seed=6)
    v_small = small.expected_gen_error(50) / small.sigma**2
    v_large = large.expected_gen_error(50) / large.sigma**2
    assert v_small == pytest.approx(v_large)
    assert pass_at_k_failure(9, 4.0, 2.0 / 1.0, v_small) == pytest.approx(
        pass_at_k_failure(9, 4.0, 20.0 / 10.0, v_large)
    )


def test_expected_errors_fall_as_one_over_n():
    model = LIDModel(50, 2.5)
    ns = np.array([1000.0, 20_000.0])
    assert local_slope(ns, [model.expected_gen_error(int(n)) for n in ns])[0] == pytest.approx(1, abs=0.02)
    assert model.expected_gen_error(50) == math.inf
    assert LIDModel(50, 2.5, sigma=1e-9, alpha=1.0).expected_gen_error(25) > 0


def test_warnings_and_errors():
    with pytest.warns(UserWarning, match="mean variance of an answer is infinite"):
        assert math.isnan(LIDModel(3, 2.0).expected_gen_error(10))
    model = LIDModel(3, 4.0)
    X, y, _ = model.sample(3)
    with pytest.warns(UserWarning, match="interpolation peak"):
        model.fit_ridge(X, y, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit_ridge(X, y, 1e-9)
    for bad in (
        lambda: model.sample(0),
        lambda: model.fit_ridge(X, y, -1.0),
        lambda: model.noise_error(X),
        lambda: LIDModel(0, 4.0),
        lambda: LIDModel(3, 0.0),
        lambda: LIDModel(3, 4.0, sigma=0.0),
        lambda: LIDModel(3, 4.0, alpha=-1.0),
        lambda: LIDModel(3, 4.0, theta=np.ones(2)),
        lambda: model.expected_gen_error(0),
    ):
        with pytest.raises((InputError, TypeError)):
            bad()
