"""The integral against simulation, limits and known slopes; the laws against the integral."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from assay._errors import InputError
from assay.methods.lid_scaling import (
    crossover_k,
    fit_two_tail,
    intrinsic_constant,
    local_slope,
    pass_at_k_failure,
)
from assay.methods.lid_scaling._laws import _quad, bias_tail, log_failure, log_success
from assay.methods.lid_scaling.reference import failure


@pytest.mark.parametrize("beta", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("delta", [0.1, 0.5])
def test_without_bias_the_tail_is_a_power_with_the_known_constant(beta, delta):
    ks = np.array([1e4, 1e6, 1e8])
    ratio = pass_at_k_failure(ks, beta, delta) / (intrinsic_constant(beta, delta) * ks**-beta)
    assert np.all(np.abs(ratio - 1) < 0.01)
    assert abs(ratio[-1] - 1) < 1e-4


@pytest.mark.parametrize(
    ("beta", "at_1e3", "at_1e4"), [(1.5, 0.9975, 0.9998), (2.5, 0.9943, 0.9995), (4.0, 0.9870, 0.9990)]
)
def test_approach_to_the_constant(beta, at_1e3, at_1e4):
    ks = np.array([1e3, 1e4])
    ratio = pass_at_k_failure(ks, beta, 0.1) / pass_at_k_failure(ks, beta, 0.1, method="intrinsic")
    assert ratio == pytest.approx([at_1e3, at_1e4], abs=1e-4)


@pytest.mark.parametrize("v", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("tau", [None, 0.7])
def test_the_integral_is_what_a_simulation_finds(v, tau):
    ks = np.array([1.0, 3.0, 30.0])
    exact = pass_at_k_failure(ks, 2.5, 0.4, v, tau=tau)
    runs = np.array([pass_at_k_failure(ks, 2.5, 0.4, v, tau=tau, method="mc", draws=50_000, seed=s) for s in range(20)])
    error = runs.std(0, ddof=1) / math.sqrt(20)
    assert np.all(np.abs(runs.mean(0) - exact) < 4 * error + 1e-12)


def test_the_simulation_is_that_of_the_model():
    """Draws themselves, not the success rate: an input fails if k answers miss."""
    rng = np.random.default_rng(0)
    inputs, k, beta, delta, v = 100_000, 4, 2.5, 0.5, 0.3
    tau = rng.gamma(beta / 2, size=inputs)
    bias = math.sqrt(v) * rng.standard_normal(inputs)
    answers = bias[:, None] + rng.standard_normal((inputs, k)) / np.sqrt(tau)[:, None]
    missed = (np.abs(answers) > delta).all(1)
    assert pass_at_k_failure(k, beta, delta, v) == pytest.approx(
        missed.mean(), abs=4 * missed.std() / math.sqrt(inputs)
    )


@pytest.mark.parametrize(("beta", "delta", "v", "k"), [(2.5, 0.3, 0.5, 50), (4.0, 0.8, 0.05, 7)])
def test_the_integral_equals_its_slow_twin(beta, delta, v, k):
    assert pass_at_k_failure(k, beta, delta, v) == pytest.approx(failure(k, beta, delta, v), rel=1e-5)


@pytest.mark.parametrize(("v", "slope"), [(0.3, 3.372), (1.0, 1.029), (3.0, 0.357)])
def test_slopes_at_a_fixed_precision(v, slope):
    ks = np.array([1e9, 1e10]) * 10**-0.0228787  # the decade around 3e9
    found = local_slope(ks, pass_at_k_failure(ks, 2.5, 0.1, v, tau=1.0))[0]
    assert found == pytest.approx(slope, abs=0.005)
    c = math.sqrt(2 / math.pi) * 0.1
    assert found == pytest.approx(1 / v + 1 / (2 * math.log(c * 3e9)), abs=0.015)


@pytest.mark.parametrize(("v", "slope", "crude"), [(0.3, 0.461, 0.432), (1.0, 0.248, 0.237), (3.0, 0.141, 0.137)])
def test_slopes_of_the_mixture_fall_as_one_over_a_root(v, slope, crude):
    ks = 6e7 * 10 ** np.array([-0.25, 0.25])
    exact = local_slope(ks, pass_at_k_failure(ks, 2.5, 0.1, v))[0]
    assert exact == pytest.approx(slope, abs=0.005)
    assert local_slope(ks, pass_at_k_failure(ks, 2.5, 0.1, v, method="laplace"))[0] == pytest.approx(exact, rel=0.1)
    assert 1 / math.sqrt(v * math.log(6e7)) == pytest.approx(crude, abs=0.001)


def test_the_closed_form_is_of_leading_order():
    for v, (low, high) in {1.0: (0.69, 0.77), 0.03: (0.98, 1.01)}.items():
        ks = np.array([1e3, 1e5, 1e8])
        ratio = pass_at_k_failure(ks, 2.5, 0.1, v) / pass_at_k_failure(ks, 2.5, 0.1, v, method="laplace")
        assert np.all((low < ratio) & (ratio < high)), (v, ratio)


def test_small_bias_is_no_bias():
    ks = np.geomspace(1, 1e5, 8)
    none = pass_at_k_failure(ks, 2.5, 0.3)
    assert pass_at_k_failure(ks, 2.5, 0.3, 1e-12) == pytest.approx(none, rel=1e-6)
    for method in ("two-tail", "laplace"):
        assert pass_at_k_failure(ks, 2.5, 0.3, 0.0, method=method) == pytest.approx(
            pass_at_k_failure(ks, 2.5, 0.3, method="intrinsic")
        )


@settings(max_examples=10, deadline=None)
@given(
    beta=st.floats(0.3, 6),
    delta=st.floats(1e-3, 3),
    v=st.floats(0, 50),
    log_k=st.floats(0, 18),
    more=st.floats(1.1, 10),
)
def test_failure_falls_with_draws_and_tolerance_and_rises_with_bias(beta, delta, v, log_k, more):
    k = math.exp(log_k)
    here = pass_at_k_failure(k, beta, delta, v, fast=True)
    assert 0 < here <= 1
    assert pass_at_k_failure(k * more, beta, delta, v, fast=True) <= here * (1 + 1e-9)
    assert pass_at_k_failure(k, beta, delta * more, v, fast=True) <= here * (1 + 1e-3)
    assert pass_at_k_failure(k, beta, delta, v * more + 0.01, fast=True) >= here * (1 - 1e-3)


def test_extremes_are_finite_and_positive():
    for v in (0.0, 0.1, 10.0):
        found = pass_at_k_failure([1e12], 2.5, 1e-6, v)
        assert 0 < found[0] < 1
        assert 0 < pass_at_k_failure([1e12], 2.5, 1.0, v)[0] < (1e-20 if v == 0 else 0.1)
    assert pass_at_k_failure([], 2.5, 0.1).shape == (0,)
    assert pass_at_k_failure(7, 2.5, 0.1).shape == ()


def test_one_draw_fails_with_the_mean_chance():
    tau = np.random.default_rng(0).gamma(1.25, size=400_000)
    want = 1 - (2 * norm.cdf(0.5 * np.sqrt(tau)) - 1)
    assert pass_at_k_failure(1, 2.5, 0.5) == pytest.approx(want.mean(), abs=4 * want.std() / math.sqrt(len(tau)))


@pytest.mark.parametrize(("beta", "delta", "v"), [(2.5, 0.1, 1.0), (2.5, 0.5, 0.03), (0.4, 0.28, 19.0)])
def test_finer_grids_change_nothing(beta, delta, v):
    ks = np.geomspace(1, 1e8, 5)
    base = pass_at_k_failure(ks, beta, delta, v)
    assert base == pytest.approx(_quad(ks, beta, delta, v, None, (3701, 620)), rel=1e-8)
    assert pass_at_k_failure(ks, beta, delta, v, fast=True) == pytest.approx(base, rel=5e-3)


def test_success_rates_are_exact_where_they_are_tiny():
    bias, tau = np.array([0.0, 1.0, 8.0, 30.0, 200.0]), np.array([1.0, 1e-12, 4.0, 1.0, 1e-3])
    from mpmath import erfc, mp, mpf

    mp.dps = 60
    for b, t in zip(bias, tau, strict=True):
        root = mpf(float(t)) ** 0.5
        low, high = (-mpf(0.1) - mpf(float(b))) * root, (mpf(0.1) - mpf(float(b))) * root
        s = (erfc(-high / mpf(2) ** 0.5) - erfc(-low / mpf(2) ** 0.5)) / 2
        found = log_success(np.array([b]), np.array([t]), 0.1)[0]
        assert found == pytest.approx(float(mp.log(s)), rel=1e-8)
        assert log_failure(np.array([b]), np.array([t]), 0.1)[0] == pytest.approx(float(mp.log(1 - s)), rel=1e-8)


def test_the_crossover_is_where_both_tails_are_equal():
    for v in (0.03, 0.1):
        k = crossover_k(2.5, v)
        assert intrinsic_constant(2.5, 0.1) * k**-2.5 == pytest.approx(
            bias_tail(np.array([k]), 2.5, 0.1, v)[0], rel=1e-6
        )
        assert 0.2 < math.log(0.08 * k) / (4 / (v * 2.5**2)) < 3
    assert crossover_k(2.5, 0.0) == math.inf
    assert crossover_k(2.5, 0.01) > crossover_k(2.5, 0.03) > crossover_k(2.5, 0.1)


def test_the_two_tail_law_is_recovered_from_itself():
    ks, v = np.geomspace(1e2, 1e6, 12), np.array([0.4, 0.8, 2.0])
    curves = np.array([pass_at_k_failure(ks, 2.5, 0.1, x, method="two-tail", kappa=0.6, prefactor=0.3) for x in v])
    fit = fit_two_tail(ks, curves, v, 2.5, 0.1)
    assert fit.kappa == pytest.approx(0.6, rel=1e-3)
    assert fit.prefactors == pytest.approx([0.3] * 3, rel=1e-3)
    assert fit.curve(ks, 2.5, 0.1, 0.4, 0.3) == pytest.approx(curves[0], rel=1e-3)


def test_the_table_interpolates(table):
    for k, v in ((1, 0.02), (33, 0.7), (5000, 0.002), (9e4, 4.9)):
        assert table(k, v) == pytest.approx(pass_at_k_failure(k, 2.5, 0.5, v), rel=2e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"beta": 0.0}, "beta is 0"),
        ({"beta": -1.0}, "beta is -1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"delta": 0.0}, "delta is 0"),
        ({"v": -0.1}, "v is -0.1"),
        ({"v": math.inf}, "v is inf"),
        ({"k": 0.5}, "k is 0.5"),
        ({"k": [1.0, math.nan]}, "k is nan"),
        ({"tau": 0.0}, "tau is 0"),
        ({"method": "guess"}, "the method is 'guess'"),
        ({"method": "laplace", "tau": 1.0}, "leave tau out"),
        ({"method": "mc", "draws": 0}, "0 draws are none"),
    ],
)
def test_what_is_out_of_range_is_said(change, sentence):
    arguments = {"k": 2.0, "beta": 2.5, "delta": 0.1, "v": 0.2} | change
    with pytest.raises(InputError, match=sentence):
        pass_at_k_failure(**arguments)


def test_slopes_need_a_curve():
    with pytest.raises(InputError, match="rising k"):
        local_slope([2, 1], [0.1, 0.2])
    with pytest.raises(InputError, match="failure of zero"):
        local_slope([1, 2], [0.1, 0.0])
