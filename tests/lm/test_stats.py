"""Second moments do not depend on how the tokens came, and hold what the formulas say."""

from __future__ import annotations

import pytest
import torch

from assay._errors import InputError
from assay.lm._stats import LayerStats

torch.manual_seed(0)
X, REF = torch.randn(45, 6, dtype=torch.float64), torch.randn(45, 6, dtype=torch.float64)


def gathered(*batches: tuple[torch.Tensor, torch.Tensor]) -> LayerStats:
    stats = LayerStats(6, torch.float64)
    for x, ref in batches:
        stats.update(x, ref)
    return stats


def test_they_are_twice_the_means_of_the_products():
    stats = gathered((X, REF))
    torch.testing.assert_close(stats.H, 2 / 45 * sum(torch.outer(x, x) for x in X))
    torch.testing.assert_close(stats.Delta, 2 / 45 * sum(torch.outer(r - x, x) for x, r in zip(X, REF)))
    assert stats.n == 45


def test_batches_halves_and_shapes_make_no_difference():
    whole = gathered((X, REF))
    uneven = gathered(*((X[a:b], REF[a:b]) for a, b in ((0, 1), (1, 8), (8, 8), (8, 30), (30, 45))))
    cubes = gathered((X.view(5, 9, 6), REF.view(5, 9, 6)))
    merged = gathered((X[:20], REF[:20])).merge(gathered((X[20:], REF[20:])))
    for other in (uneven, cubes, merged, merged.merge(LayerStats(6, torch.float64))):
        torch.testing.assert_close(other.H, whole.H)
        torch.testing.assert_close(other.Delta, whole.Delta)
        assert other.n == 45


def test_padding_on_either_side_does_not_count():
    plain = gathered((X[:14], REF[:14]))
    padded, reference = (
        torch.full((2, 10, 6), torch.nan, dtype=torch.float64),
        torch.zeros(2, 10, 6, dtype=torch.float64),
    )
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 3:], mask[1, :7] = True, True  # seven tokens behind padding, seven before it
    padded[mask], reference[mask] = X[:14], REF[:14]
    stats = LayerStats(6, torch.float64)
    stats.update(padded, reference, mask)
    torch.testing.assert_close(stats.H, plain.H)
    torch.testing.assert_close(stats.Delta, plain.Delta)


def test_half_precision_is_summed_in_single():
    stats = LayerStats(6)
    small = (X * 1e-3).to(torch.bfloat16)
    stats.update(small)
    torch.testing.assert_close(stats.H, 2 / 45 * small.float().T @ small.float(), rtol=1e-5, atol=1e-12)
    assert not stats.Delta.any()


def test_what_does_not_fit_is_refused_and_adds_nothing():
    stats = gathered((X, REF))
    before = stats.H.clone()
    for wrong, sentence in (
        ((X[:, :5],), "came to a layer of 6 inputs"),
        ((X, REF[:9]), "came to a layer of 6 inputs"),
        ((X, None, torch.ones(44, dtype=torch.bool)), "a mask of the shape"),
        ((X * torch.nan,), "is not finite"),
        ((X, REF / 0), "is not finite"),
    ):
        with pytest.raises(InputError, match=sentence):
            stats.update(*wrong)
    assert torch.equal(stats.H, before)
    assert stats.n == 45
    with pytest.raises(InputError, match="no moments in common"):
        stats.merge(LayerStats(5))
    with pytest.raises(InputError, match=r"use torch\.float32"):
        LayerStats(6, torch.bfloat16)
