"""The closed form against optimisers, limits and other routes to the same factors."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay._errors import InputError
from assay.lm import LayerStats, svd_llm_factors
from assay.methods.saes_svd import Whitened, aces_beta, cealc, tail_ratio
from assay.methods.saes_svd._closed import leading
from assay.methods.saes_svd.baselines import adasvd_factors


def draw(m: int, n: int, N: int = 40, seed: int = 0, apart: float = 0.3):
    """W, X, X^f and the two moments, in float64."""
    g = torch.Generator().manual_seed(seed)
    W, X, noise = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((m, n), (n, N), (n, N)))
    reference = X + apart * noise @ torch.randn(N, N, generator=g, dtype=torch.float64) / math.sqrt(N)
    return W, X, reference, X @ X.T, (reference - X) @ X.T


def objective(A, B, W, X, reference, alpha):
    return float(((A @ B - W) @ X).square().sum() + alpha * (A @ B @ X - W @ reference).square().sum())


@pytest.mark.parametrize("alpha", [0.0, 1.0, 9.0])
def test_no_alternating_least_squares_does_better(alpha):
    W, X, reference, H, Delta = draw(6, 5)
    found = cealc(W, H, Delta, 2, beta=alpha / (1 + alpha), ridge=0.0)
    ours = objective(found.A, found.B, W, X, reference, alpha)
    target = (W @ X + alpha * W @ reference) / (1 + alpha)  # both terms are least squares in A B X
    best = math.inf
    for seed in range(20):
        B = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for _ in range(300):
            A = torch.linalg.lstsq((B @ X).T, target.T).solution.T
            B = torch.linalg.pinv(A) @ target @ torch.linalg.pinv(X)
        best = min(best, objective(A, B, W, X, reference, alpha))
    assert ours <= best + 1e-8


@pytest.mark.parametrize(("m", "n"), [(4, 7), (6, 6), (9, 5)])
@pytest.mark.parametrize("ridge", [0.0, 1e-4, 0.3])
def test_without_alignment_it_is_svd_llm_by_every_route(m, n, ridge):
    W, _, _, H, Delta = draw(m, n)
    found = cealc(W, H, Delta, 3, beta=0.0, ridge=ridge)
    product = found.A @ found.B
    torch.testing.assert_close(product, svd_llm_factors(W, H, 3, ridge).product, rtol=1e-8, atol=1e-8)
    other = cealc(W, H, Delta, 3, beta=0.0, ridge=ridge, whitener="eigh")
    torch.testing.assert_close(other.A @ other.B, product, rtol=1e-8, atol=1e-8)
    lam = ridge * H.diagonal().mean()
    R = torch.linalg.cholesky(H + lam * torch.eye(n, dtype=H.dtype))
    U = torch.linalg.svd(W @ R).U[:, :3]
    torch.testing.assert_close(product, U @ U.T @ W, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.A.norm(dim=0), (torch.linalg.svdvals(W @ R)[:3]).sqrt(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("m", "n"), [(4, 7), (6, 6), (9, 5)])
@pytest.mark.parametrize("target", ["weight", "zero"])
def test_the_written_formula_gives_the_same_factors(m, n, target):
    """G = W (H + beta Delta [+ lam I]) L with the symmetric root, an SVD, and B = S^1/2 V^T L."""
    W, _, _, H, Delta = draw(m, n)
    lam = 0.05 * H.diagonal().mean()
    values, vectors = torch.linalg.eigh(H + lam * torch.eye(n, dtype=H.dtype))
    L = (vectors / values.sqrt()) @ vectors.T
    G = W @ (H + 0.6 * Delta + (lam * torch.eye(n, dtype=H.dtype) if target == "weight" else 0)) @ L
    u, s, v = torch.linalg.svd(G, full_matrices=False)
    want = (u[:, :3] * s[:3]) @ v[:3] @ L
    for whitener in ("cholesky", "eigh"):
        found = cealc(W, H, Delta, 3, beta=0.6, ridge=0.05, ridge_target=target, whitener=whitener)
        torch.testing.assert_close(found.A @ found.B, want, rtol=1e-8, atol=1e-8)
        assert found.retained == pytest.approx(float(s[:3].square().sum() / s.square().sum()), abs=1e-12)
        assert found.ridge_used == pytest.approx(float(lam))


def test_the_ridge_towards_zero_solves_its_normal_equations():
    W, _, _, H, Delta = draw(4, 6, N=3)  # three directions of six were seen
    found = cealc(W, H, Delta, 4, beta=0.5, ridge=0.1, ridge_target="zero")
    lam = 0.1 * H.diagonal().mean()
    want = torch.linalg.solve(H + lam * torch.eye(6, dtype=H.dtype), (W @ (H + 0.5 * Delta)).T).T
    torch.testing.assert_close(found.A @ found.B, want)


def test_equal_inputs_make_beta_irrelevant():
    W, _, _, H, _ = draw(6, 5)
    zero = torch.zeros_like(H)
    found = [cealc(W, H, zero, 2, beta=beta) for beta in (0.0, 0.5, "aces", "exact")]
    for one in found:
        torch.testing.assert_close(one.A @ one.B, found[0].A @ found[0].B)
        assert one.beta_irrelevant
    assert [one.beta for one in found] == [0.0, 0.5, 0.25, 0.25]
    assert not cealc(W, H, 1e-6 * H, 2).beta_irrelevant


def test_known_limits():
    W, X, reference, H, Delta = draw(6, 5)
    eye = torch.eye(5, dtype=H.dtype)
    plain = cealc(W, eye, Delta, 2, beta=0.0, ridge=0.0)
    u, s, v = torch.linalg.svd(W, full_matrices=False)
    torch.testing.assert_close(plain.A @ plain.B, (u[:, :2] * s[:2]) @ v[:2])
    aligned = cealc(W, H, Delta, 5, beta=1 - 1e-13, ridge=0.0)
    torch.testing.assert_close(aligned.A @ aligned.B, W @ reference @ X.T @ torch.linalg.inv(H))


def test_batches_and_halves_give_the_same_factors():
    W, X, reference, H, Delta = draw(6, 5, N=45)
    want = cealc(W, H, Delta, 2, beta=0.4)
    stats = LayerStats(5, torch.float64)
    for a, b in ((0, 1), (1, 9), (9, 10), (10, 30), (30, 31), (31, 44), (44, 45)):
        stats.update(X.T[a:b], reference.T[a:b])
    halves = [LayerStats(5, torch.float64) for _ in range(2)]
    halves[0].update(X.T[:20], reference.T[:20])
    halves[1].update(X.T[20:], reference.T[20:])
    for one in (stats, halves[0].merge(halves[1])):
        torch.testing.assert_close(one.H, 2 / 45 * H)
        found = cealc(W, one.H, one.Delta, 2, beta=0.4)
        torch.testing.assert_close(found.A @ found.B, want.A @ want.B)


@pytest.mark.parametrize(("m", "n"), [(8, 6), (5, 9)])
def test_value_and_slope_of_the_model_are_exact_at_zero(m, n):
    W, _, _, H, Delta = draw(m, n)
    S, D = Whitened.of(H, Delta, 0.0).pair(W)
    _, _, coefficients = aces_beta(S, D, 3, bounds=(0.0, 1.0))

    def true(beta):
        s2 = torch.linalg.svdvals(S + beta * D).square()
        return float(s2[3:].sum() / s2.sum())

    assert coefficients.rho(0.0) == pytest.approx(true(0.0), abs=1e-12)
    step = 1e-5
    slope = (coefficients.rho(step) - coefficients.rho(-step)) / (2 * step)
    assert slope == pytest.approx((true(step) - true(-step)) / (2 * step), rel=1e-4)
    assert tail_ratio(S, D, 3)(0.7) == pytest.approx(true(0.7), abs=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    m=st.integers(2, 8),
    n=st.integers(2, 8),
    apart=st.floats(0.01, 3.0),
    objective=st.sampled_from(["ratio", "energy"]),
    refine=st.booleans(),
)
def test_no_beta_of_a_fine_grid_beats_the_chosen_root(seed, m, n, apart, objective, refine):
    W, _, _, H, Delta = draw(m, n, seed=seed, apart=apart)
    S, D = Whitened.of(H, Delta).pair(W)
    beta, candidates, k = aces_beta(S, D, max(1, min(m, n) - 1), bounds=(0.1, 0.9), objective=objective, refine=refine)
    loss = k.rho if objective == "ratio" else k.tail
    assert loss(beta) <= min(loss(x) for x in np.linspace(0.1, 0.9, 1001)) + 1e-9
    assert beta in [c.beta for c in candidates]


def test_the_exact_choice_is_the_best_of_a_fine_grid():
    W, _, _, H, Delta = draw(8, 6, apart=1.0)
    S, D = Whitened.of(H, Delta).pair(W)
    beta, _, _ = aces_beta(S, D, 3, bounds=(0.0, 1.0), exact=True)
    true = tail_ratio(S, D, 3)
    assert true(beta) <= min(true(x) for x in np.linspace(0, 0.99, 500)) + 1e-7


def test_refining_uses_the_subspaces_of_the_first_choice():
    W, _, _, H, Delta = draw(8, 6, apart=2.0)
    S, D = Whitened.of(H, Delta).pair(W)
    first, _, _ = aces_beta(S, D, 3, bounds=(0.0, 0.9))
    left, right, _ = leading(S + first * D, 3)
    P, Q = torch.eye(8, dtype=S.dtype) - left @ left.T, torch.eye(6, dtype=S.dtype) - right @ right.T
    _, _, k = aces_beta(S, D, 3, bounds=(0.0, 0.9), refine=True)
    Sp, Dp = P @ S @ Q, P @ D @ Q
    want = [Sp.square().sum(), (Sp * Dp).sum(), Dp.square().sum(), S.square().sum(), (S * D).sum(), D.square().sum()]
    assert list(k) == pytest.approx([float(x) for x in want])


def test_guard_rails_bounds_and_their_kind():
    W, _, _, H, Delta = draw(6, 5, apart=1.0)
    S, D = Whitened.of(H, Delta).pair(W)
    assert aces_beta(S, D, 2, bounds=(0.7, 0.7))[0] == 0.7
    assert aces_beta(S, D, 2, bounds=(1.0, 1.0), cap=0.8)[0] == 0.8
    assert aces_beta(S, D, 2, bounds=(0.6, 0.6), shrink=0.5)[0] == pytest.approx(0.3)
    assert aces_beta(S, D, 2, bounds=(3.0, 3.0), bounds_on="alpha")[0] == pytest.approx(0.75)
    assert cealc(W, H, Delta, 2, bounds=(0.0, math.inf), bounds_on="alpha").beta <= 0.99


def test_what_was_not_seen_keeps_the_weight_or_goes_to_zero():
    W, X, _, H, Delta = draw(6, 5, N=2)
    kept = cealc(W, H, Delta, 5, beta=0.0, ridge=1e-10)
    torch.testing.assert_close(kept.A @ kept.B, W, rtol=1e-6, atol=1e-6)
    zeroed = cealc(W, H, Delta, 5, beta=0.0, ridge=1e-10, ridge_target="zero")
    away = torch.eye(5, dtype=W.dtype) - X @ torch.linalg.pinv(X)
    assert (zeroed.A @ zeroed.B @ away).abs().max() < 1e-6
    torch.testing.assert_close(zeroed.A @ zeroed.B @ X, W @ X, rtol=1e-6, atol=1e-6)
    dead = torch.zeros_like(H)
    none = cealc(W, dead, dead, 2)
    assert none.A.isfinite().all()
    assert none.B.isfinite().all()


def test_reported_errors_are_those_of_the_activations():
    W, X, reference, H, Delta = draw(6, 5)
    for target in ("weight", "zero"):
        found = cealc(W, H, Delta, 2, beta=0.5, ridge=0.0, ridge_target=target)
        AB, size = found.A @ found.B, (W @ X).square().sum()
        assert found.local == pytest.approx(float(((AB - W) @ X).square().sum() / size))
        gained = (AB @ X - W @ reference).square().sum() - (W @ X - W @ reference).square().sum()
        assert found.alignment == pytest.approx(float(gained / size))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), m=st.integers(2, 7), n=st.integers(2, 7), beta=st.floats(0, 0.9))
def test_a_higher_rank_never_retains_less(seed, m, n, beta):
    W, _, _, H, Delta = draw(m, n, seed=seed)
    kept = [cealc(W, H, Delta, r, beta=beta).retained for r in range(1, min(m, n) + 1)]
    assert all(a <= b + 1e-12 for a, b in pairwise(kept))
    assert kept[-1] == pytest.approx(1.0)


def test_sweeps_of_least_squares_cannot_beat_the_minimum():
    W, X, _, H, Delta = draw(6, 5)
    moments = Whitened.of(H, Delta, 0.0)
    closed = cealc(W, H, Delta, 2, beta=0.0, ridge=0.0)
    swept = adasvd_factors(W, moments, 2, sweeps=3)
    error = float(((swept.product - W) @ X).square().sum())
    assert error >= float(((closed.A @ closed.B - W) @ X).square().sum()) - 1e-9
    torch.testing.assert_close(swept.product, closed.A @ closed.B)


def test_factors_come_in_the_dtype_of_the_weight_and_huge_values_stay_finite():
    W, _, _, H, Delta = draw(6, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = cealc(W.to(dtype), H.float(), Delta.float(), 2, beta=0.5)
        assert found.A.dtype == found.B.dtype == dtype
    huge = cealc(W, H * 1e30, Delta * 1e30, 2, beta=0.5)
    usual = cealc(W, H, Delta, 2, beta=0.5)
    torch.testing.assert_close(huge.A @ huge.B, usual.A @ usual.B)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rank": 0}, "has no rank 0: give 1 to 5"),
        ({"rank": 6}, "has no rank 6"),
        ({"beta": 1.0}, r"beta is 1.0, .* \[0, 1\)"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": "best"}, "beta is 'best'"),
        ({"bounds": (0.5, 0.2)}, "bounds of beta are"),
        ({"bounds": (0.5, 1.2)}, "bounds of beta are"),
        ({"bounds_on": "gamma"}, "bounds_on is 'gamma'"),
        ({"cap": 1.0}, "cap is 1.0"),
        ({"shrink": 0.0}, "shrink is 0.0"),
        ({"objective": "area"}, "the objective is 'area'"),
        ({"ridge": -1.0}, "the ridge is -1.0"),
        ({"ridge_target": "one"}, "ridge_target='one'"),
        ({"whitener": "qr"}, "whitener='qr'"),
        ({"H": torch.full((5, 5), torch.nan, dtype=torch.float64)}, "not finite"),
        ({"Delta": torch.full((5, 5), torch.inf, dtype=torch.float64)}, "not finite"),
        ({"W": torch.full((6, 5), torch.nan, dtype=torch.float64)}, "the weight is not finite"),
        ({"W": torch.ones(6, 4, dtype=torch.float64)}, "do not fit a weight of 6 x 4"),
    ],
)
def test_what_does_not_fit_is_said(change, sentence):
    W, _, _, H, Delta = draw(6, 5)
    with pytest.raises(InputError, match=sentence):
        cealc(**({"W": W, "H": H, "Delta": Delta, "rank": 2} | change))
