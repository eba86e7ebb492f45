"""Each factorisation is the optimum of what it promises, and a thin Linear does what its product says."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import linear

from assay._errors import InputError
from assay.lm import _lowrank
from assay.lm._lowrank import (
    LowRankLinear,
    asvd_factors,
    fwsvd_factors,
    rank_for,
    svd_factors,
    svd_llm_factors,
    top_svd,
    whitener,
)

SHAPES = [(6, 9), (8, 8), (10, 5)]


def weight(m: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(n: int, tokens: int = 50) -> torch.Tensor:
    return weight(tokens, n, 1) * torch.logspace(0, -2, n, dtype=torch.float64)


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_plain_svd_leaves_the_tail_of_the_singular_values(m, n):
    W = weight(m, n)
    factors = svd_factors(W, 3)
    tail = torch.linalg.svdvals(W)[3:].square().sum()
    torch.testing.assert_close((factors.product - W).square().sum(), tail)
    torch.testing.assert_close(factors.A.norm(dim=0), factors.B.norm(dim=1))  # balanced


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("ridge", [0.0, 1e-4, 1e-1])
def test_svd_llm_is_the_best_for_its_inputs(m, n, ridge):
    """Against the SVD of W times the symmetric root, another whitener, and against perturbations."""
    W, X = weight(m, n), inputs(n)
    H = X.T @ X
    factors = svd_llm_factors(W, H, 3, ridge)
    lam = ridge * H.diagonal().mean()
    values, vectors = torch.linalg.eigh(H + lam * torch.eye(n))
    root = vectors * values.sqrt() @ vectors.T
    u = torch.linalg.svd(W @ root).U[:, :3]
    torch.testing.assert_close(factors.product, u @ u.T @ W)

    def loss(P):
        return ((P - W) @ root).square().sum()

    best = loss(factors.product)
    for seed in range(20):
        other = (factors.A + 1e-3 * weight(m, 3, seed)) @ (factors.B + 1e-3 * weight(3, n, seed + 100))
        assert loss(other) > best


def test_without_a_preference_svd_llm_is_the_plain_svd_and_at_full_rank_the_weight():
    W = weight(6, 9)
    torch.testing.assert_close(svd_llm_factors(W, torch.eye(9), 3).product, svd_factors(W, 3).product)
    singular = torch.outer(torch.arange(9.0), torch.arange(9.0))  # of rank one: eight directions were never seen
    torch.testing.assert_close(svd_llm_factors(W, singular, 6).product, W)


def test_weighted_factors_are_best_in_the_weighted_norm():
    W, d = weight(6, 9), weight(1, 9, 5)[0].abs() + 0.1
    product = fwsvd_factors(W, d, 3).product
    torch.testing.assert_close(((product - W) * d).square().sum(), torch.linalg.svdvals(W * d)[3:].square().sum())
    torch.testing.assert_close(asvd_factors(W, d**2, 3).product, product)
    torch.testing.assert_close(asvd_factors(W, d, 3, power=1.0).product, product)


def test_features_without_importance_break_nothing():
    W, d = weight(6, 9), torch.zeros(9)
    assert torch.equal(fwsvd_factors(W, d, 3).product, svd_factors(W, 3).product)
    d[4] = 1.0
    product = fwsvd_factors(W, d, 3).product
    assert product.isfinite().all()
    torch.testing.assert_close(product[:, 4], W[:, 4])  # the one that counts is kept


def test_a_ridge_is_raised_until_it_helps_and_that_is_said(caplog):
    bad = torch.eye(4, dtype=torch.float64)
    bad[3, 3] = -1e-3  # as rounding leaves it, but larger
    with caplog.at_level(logging.WARNING, "assay.lm"):
        root, lam = whitener(bad, 1e-4)
    torch.testing.assert_close(root @ root.T, bad + lam * torch.eye(4, dtype=torch.float64))
    assert lam > 1e-3
    assert "needed a ridge" in caplog.text
    with pytest.raises(InputError, match="cannot be factorised"):
        whitener(-torch.eye(4) * 100, 1e-9)
    with pytest.raises(InputError, match="not finite"):
        whitener(torch.full((3, 3), torch.nan))
    assert whitener(torch.zeros(3, 3))[1] == 1e-4  # nothing was seen: the plain norm


def test_random_projections_find_what_the_exact_way_finds(monkeypatch):
    left, right = torch.linalg.qr(weight(60, 60)).Q, torch.linalg.qr(weight(80, 60, 1)).Q
    M = left * 0.9 ** torch.arange(60) @ right.T
    exact = top_svd(M, 10)
    monkeypatch.setattr(_lowrank, "LARGEST_EXACT", 20)
    u, s, v = top_svd(M, 10)
    torch.testing.assert_close(s, exact[1], rtol=1e-8, atol=0)
    torch.testing.assert_close((u * s) @ v, (exact[0] * exact[1]) @ exact[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("out", "into"), [(576, 576), (192, 576), (1536, 576), (576, 1536)])
@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.8])
def test_the_rank_is_the_largest_that_the_ratio_allows(out, into, ratio):
    rank = rank_for(ratio, out, into)
    assert rank * (out + into) <= (1 - ratio) * out * into < (rank + 1) * (out + into)


def test_a_thin_linear_is_its_product():
    W, bias, x = weight(6, 9), weight(1, 6, 7)[0], weight(4, 9, 8)
    factors = svd_factors(W, 4)
    layer = LowRankLinear.from_factors(factors.A, factors.B, bias)
    torch.testing.assert_close(layer.dense_weight(), factors.product)
    torch.testing.assert_close(layer(x), linear(x, factors.product, bias))
    assert set(layer.state_dict()) == {"A.weight", "A.bias", "B.weight"}
    assert (layer.rank, layer.A.weight.dtype) == (4, torch.float64)
    again = LowRankLinear(9, 6, 4, bias=True).double()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    parameters = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
    names = [name for name, _ in layer.named_parameters()]
    assert torch.autograd.gradcheck(
        lambda x, *values: torch.func.functional_call(layer, dict(zip(names, values)), x),
        (x.requires_grad_(), *parameters),
    )


def test_single_precision_goes_in_and_out_and_double_is_between():
    W, X = weight(8, 8).float(), inputs(8).float()
    factors = svd_llm_factors(W, X.T @ X, 3)
    assert factors.A.dtype == torch.float32
    wide = svd_llm_factors(W.double(), (X.T @ X).double(), 3)
    torch.testing.assert_close(factors.product, wide.product.float(), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_is_refused():
    W = weight(6, 9)
    for call, sentence in (
        (lambda: svd_factors(W, 7), "has no rank 7: give 1 to 6"),
        (lambda: svd_factors(W, 0), "has no rank 0"),
        (lambda: svd_factors(W * torch.nan, 2), "not finite"),
        (lambda: svd_llm_factors(W, torch.eye(6), 2), "do not fit a weight"),
        (lambda: fwsvd_factors(W, torch.ones(6), 2), "importance must be 9 numbers"),
        (lambda: asvd_factors(W, -torch.ones(9), 2), "mean_abs must be 9 numbers of 0 or more"),
        (lambda: LowRankLinear(9, 6, 7), "has no rank 7"),
        (lambda: rank_for(1.0, 6, 9), "between 0 and 1"),
        (lambda: rank_for(0.9, 6, 9), "leaves no rank"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()
