"""Budgets and the split of a tolerance, by hand and by simulation."""

import inspect

import numpy as np
import pytest
import torch
from scipy import stats

from assay.methods.vattention import _kernel, sampling_budget, split_tolerance
from assay.methods.vattention._budget import round_budget, z_above


@pytest.mark.parametrize(
    ("sigma", "tail", "expected"), [(2.0, "two", 1000), (2.0, "one", 1000), (0.2, "two", 44), (0.2, "one", 27)]
)
def test_a_budget_by_hand(sigma, tail, expected):
    # z = 1.6449 or 1.2816; (z * 1000 * sigma / 50)**2 = 4329, 2628, 43.29, 26.3
    assert sampling_budget(sigma, 500.0, 1000, eps=0.1, delta=0.1, tail=tail).item() == expected


@pytest.mark.parametrize(("needed", "expected"), [(43.29, 42), (4328.9, 813)])
def test_the_finite_population_correction_by_hand(needed, expected):
    # 43.29 / 1.04329 = 41.49; 4328.9 / 5.3289 = 812.3
    assert round_budget(torch.tensor(needed, dtype=torch.float64), 1000, pilot=2, fpc=True).item() == expected


def test_the_pilot_is_a_floor_and_all_keys_a_ceiling():
    assert sampling_budget(0.0, 5.0, 1000, eps=0.1, delta=0.1, pilot=20).item() == 20
    assert sampling_budget(1e9, 5.0, 1000, eps=0.1, delta=0.1, pilot=20).item() == 1000
    assert sampling_budget(0.1, 5.0, 10, eps=0.1, delta=0.1, pilot=20).item() == 10
    assert sampling_budget(0.1, 0.0, 1000, eps=0.1, delta=0.1).item() == 1000  # nothing to divide by
    assert sampling_budget(0.1, 0.0, 1000, eps=0.1, delta=0.1, fpc=True).item() == 1000


@pytest.mark.parametrize(("eps", "delta"), [(0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (0.1, 1.5)])
def test_a_tolerance_outside_0_1_is_refused(eps, delta):
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        sampling_budget(1.0, 1.0, 10, eps=eps, delta=delta)


def test_an_unknown_tail_is_refused():
    with pytest.raises(ValueError, match="tail must be"):  # below the run-time check of types
        inspect.unwrap(sampling_budget)(1.0, 1.0, 10, eps=0.1, delta=0.1, tail="three")


def test_the_paper_splits_the_tolerance_in_proportion():
    even = split_tolerance(2.0, 2.0, eps=0.1, delta=0.1, tight=False)
    assert even.eps_n.item() == pytest.approx(0.025)
    assert even.eps_d.item() == pytest.approx(0.025)
    three = split_tolerance(3.0, 1.0, eps=0.1, delta=0.1, tight=False)
    assert (three.eps_n / three.eps_d).item() == pytest.approx(3)
    z = stats.norm.ppf(1 - 0.1 / 4)
    assert three.needed.item() == pytest.approx((z * 4 / 0.05) ** 2)


def test_the_tight_split_by_hand():
    split = split_tolerance(1.0, 1.0, eps=0.1, delta=0.1)
    assert split.eps_n.item() == pytest.approx(0.1 / 2.1)
    assert split.eps_d.item() == pytest.approx(0.1 / 2.1)
    assert split.needed.item() == pytest.approx((stats.norm.ppf(0.975) * 2.1 / 0.1) ** 2)


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 7.0])
def test_errors_within_the_split_keep_the_output_within_the_tolerance(tight, ratio):
    split = split_tolerance(ratio, 1.0, eps=0.3, delta=0.1, tight=tight)
    rng = np.random.default_rng(0)
    n, d = rng.normal(size=(10_000, 3)), rng.uniform(0.5, 2, (10_000, 1))
    direction = rng.normal(size=n.shape)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    e1, e2 = split.eps_n.item(), split.eps_d.item()
    n_hat = n + e1 * np.linalg.norm(n, axis=1, keepdims=True) * direction * rng.choice([1, rng.uniform()], (10_000, 1))
    worst = rng.choice([-1, 1], (10_000, 1))
    d_hat = d * (1 + e2 * worst)
    error = np.linalg.norm(n_hat / d_hat - n / d, axis=1) / np.linalg.norm(n / d, axis=1)
    assert error.max() <= 0.3 + 1e-12
    if tight:  # the bound is reached when both errors work together
        together = np.abs((1 + e1) / (1 - e2) - 1)
        assert together == pytest.approx(0.3)


def test_the_searched_split_of_delta_needs_no_more_than_two_halves():
    a, c = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.2], dtype=torch.float64)
    half = split_tolerance(a, c, eps=0.1, delta=0.1)
    best = split_tolerance(a, c, eps=0.1, delta=0.1, optimize_delta=True)
    assert (best.needed <= half.needed + 1e-6).all()
    assert torch.allclose(best.delta_n + best.delta_d, torch.tensor(0.1, dtype=torch.float64))
    grid = torch.linspace(1e-4, 0.0999, 2000, dtype=torch.float64)[:, None]
    every = ((z_above(grid / 2) * a + 1.1 * z_above((0.1 - grid) / 2) * c) / 0.1) ** 2
    assert torch.allclose(best.needed, every.min(0).values, rtol=1e-4)


def test_too_large_a_share_of_delta_is_refused_and_the_share_of_eps_stays_below_a_half():
    with pytest.raises(ValueError, match="share of delta"):
        split_tolerance(1.0, 1.0, eps=0.1, delta=0.6)
    for tight in (True, False):  # all of it for the denominator, which the lemma wants below 1/2
        assert split_tolerance(0.0, 1.0, eps=0.9999, delta=0.1, tight=tight).eps_d < 0.5


def test_the_bound_is_neither_vacuous_nor_broken():
    rng = np.random.default_rng(1)
    w = rng.lognormal(0, 1, 50_000)
    total = w.sum()
    rate = {}
    for tail in ("two", "one"):
        b = sampling_budget(float(w.std()), float(total), len(w), eps=0.1, delta=0.1, tail=tail).item()
        sums = np.array([len(w) * w[rng.integers(0, len(w), b)].mean() for _ in range(4000)])
        rate[tail] = float((np.abs(sums - total) > 0.1 * total).mean())
    assert 0.08 <= rate["two"] <= 0.12
    assert 0.15 <= rate["one"] <= 0.24


def test_the_bound_by_the_trace_holds_for_values_along_one_direction():
    rng = np.random.default_rng(2)
    terms = rng.lognormal(0, 1, 50_000) * (1 + rng.normal(size=50_000))
    b = sampling_budget(float(terms.std()), abs(float(terms.sum())), len(terms), eps=0.1, delta=0.1).item()
    sums = np.array([len(terms) * terms[rng.integers(0, len(terms), b)].mean() for _ in range(4000)])
    assert 0.06 <= float((np.abs(sums - terms.sum()) > 0.1 * abs(terms.sum())).mean()) <= 0.13


def test_the_kernels_quantile_and_search_agree_with_torchs():
    p = np.concatenate([np.linspace(0.001, 0.5, 200), np.logspace(-300, -3, 100)])
    assert np.allclose([_kernel._z_above(x) for x in p], stats.norm.isf(p), rtol=1e-12, atol=1e-12)
    for a, c in ((0.1, 1.0), (1.0, 1.0), (5.0, 0.2)):
        for optimize in (False, True):
            mine = _kernel._needed(a, c, True, 0.1, 0.1, 0.0, 1.1, 0.1, optimize)
            assert mine == pytest.approx(
                split_tolerance(a, c, eps=0.1, delta=0.1, optimize_delta=optimize).needed.item()
            )


def test_a_quantile_of_a_tiny_chance_is_finite():
    assert z_above(0.025).item() == pytest.approx(1.959964, abs=1e-6)
    assert z_above(1e-17).item() == pytest.approx(8.493793, abs=1e-5)  # 1 - 1e-17 is 1
    assert sampling_budget(0.0, 1.0, 100, eps=0.1, delta=1e-17) == 2


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        ((float("nan"), 1.0, 100), {}, "is not a number"),
        ((1.0, float("nan"), 100), {"fpc": True}, "is not a number"),
        ((1.0, 1.0, -100), {}, "n_s must be at least 0"),
        ((1.0, 1.0, 100), {"delta": 0.9, "tail": "one"}, "needs delta < 0.5"),
        ((1.0, 1.0, 100), {"eps": float("nan")}, "eps must lie between"),
    ],
)
def test_a_budget_of_what_is_no_number_is_refused(values, more, message):
    with pytest.raises(ValueError, match=message):
        sampling_budget(*values, **{"eps": 0.1, "delta": 0.1, **more})


@pytest.mark.parametrize("values", [{"eps": -1.0}, {"eps": float("nan")}, {"delta": 0.0}, {"delta": 1.0}])
def test_a_tolerance_outside_of_0_and_1_is_not_split(values):
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        split_tolerance(1.0, 1.0, **{"eps": 0.1, "delta": 0.1, **values})
