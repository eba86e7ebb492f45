"""The basis: what a subspace iteration finds, what an exchange keeps, and that a draw can be repeated."""

import pytest
import torch

from assay.methods.racs_alice import reference
from assay.methods.racs_alice._switch import (
    draw_generator,
    exchange_columns,
    iterate_subspace,
    leading_singular_vectors,
)


def basis(m, r, seed=0, dtype=torch.float32):
    return torch.linalg.qr(torch.randn(m, r, generator=torch.Generator().manual_seed(seed), dtype=dtype)).Q


def orthonormal(U):
    return torch.allclose(U.T @ U, torch.eye(U.shape[1], dtype=U.dtype), atol=1e-5)


def same_span(A, B, atol=1e-5):
    return torch.allclose(A @ A.T, B @ B.T, atol=atol)


@pytest.mark.parametrize("tracked", [True, False])
def test_one_iteration_equals_the_one_on_the_dense_matrix(tracked):
    generator = torch.Generator().manual_seed(1)
    U = basis(12, 5, dtype=torch.float64)
    G = torch.randn(12, 20, generator=generator, dtype=torch.float64)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    Q = root @ root.T if tracked else None
    A = reference.tracked_matrix(U, G, Q, 0.7)
    new, plain = iterate_subspace(U, G, Q, 0.7), reference.iterate_subspace(A, U)
    assert orthonormal(new)
    for column in range(5):  # eigenvalues are distinct here: each column by itself, but for its sign
        assert abs(new[:, column] @ plain[:, column]) == pytest.approx(1, abs=1e-8)


def test_it_also_holds_for_a_basis_that_is_not_orthonormal():
    generator = torch.Generator().manual_seed(2)
    U = torch.nn.functional.normalize(torch.randn(12, 5, generator=generator, dtype=torch.float64), dim=0)
    G = torch.randn(12, 20, generator=generator, dtype=torch.float64)
    Q = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
    plain = reference.iterate_subspace(reference.tracked_matrix(U, G, Q, 0.9), U)
    assert same_span(iterate_subspace(U, G, Q, 0.9)[:, :2], plain[:, :2], atol=1e-8)


def test_the_leading_columns_are_the_top_eigenspace_when_the_basis_was_close():
    generator = torch.Generator().manual_seed(3)
    left, right = basis(20, 20, 4, torch.float64), basis(30, 20, 5, torch.float64)
    G = left @ torch.diag(0.7 ** torch.arange(20.0, dtype=torch.float64)) @ right.T
    near = torch.linalg.qr(left[:, :8] + 1e-6 * torch.randn(20, 8, generator=generator, dtype=torch.float64)).Q
    U = exchange_columns(iterate_subspace(near, G, None, 0.0), 3, "complement", draw_generator(0, 0, 1))
    assert orthonormal(U)
    assert same_span(U[:, :3], left[:, :3])
    assert U[:, 3:].T.matmul(left[:, :8]).abs().max() < 1e-4  # the others come from outside all 8 columns


@pytest.mark.parametrize("complement", ["qr", "gaussian"])
@pytest.mark.parametrize("kind", ["complement", "full-basis", "none"])
def test_exchanges_are_orthonormal_and_keep_the_leading_columns(kind, complement):
    U = basis(30, 8)
    new = exchange_columns(U, 3, kind, draw_generator(0, 1, 2), complement)
    assert new.shape == (30, 8)
    assert orthonormal(new)
    assert torch.equal(new[:, :3], U[:, :3])
    if kind == "complement":
        assert new[:, 3:].T.matmul(U).abs().max() < 1e-5


def test_the_drawn_vectors_are_columns_of_the_complete_decomposition_and_not_the_first_ones():
    U = basis(30, 8)
    complete = torch.linalg.qr(U, mode="complete").Q[:, 8:]
    overlaps = exchange_columns(U, 3, "complement", draw_generator(0, 1, 2))[:, 3:].T @ complete
    chosen = overlaps.abs().argmax(1)
    assert torch.allclose(overlaps.abs().amax(1), torch.ones(5), atol=1e-5)
    assert len(set(chosen.tolist())) == 5
    assert chosen.tolist() != [0, 1, 2, 3, 4]
    counts = torch.zeros(22)
    for t in range(400):
        drawn = exchange_columns(U, 3, "complement", draw_generator(0, 1, t))[:, 3:]
        counts[(drawn.T @ complete).abs().argmax(1)] += 1
    assert counts.min() > 50  # each is drawn in 400 * 5 / 22 = 91 of the times
    assert counts.max() < 140


def test_full_basis_also_draws_from_the_basis_itself():
    U = basis(12, 8)
    inside = [exchange_columns(U, 2, "full-basis", draw_generator(0, 0, t))[:, 2:].T @ U[:, 2:] for t in range(30)]
    drawn = torch.stack([o.square().sum() for o in inside])  # 6 of 10 vectors are drawn, 6 of which are in U
    assert drawn.mean().item() == pytest.approx(3.6, abs=0.5)


def test_a_small_complement_is_taken_whole():
    U = basis(40, 32)
    new = exchange_columns(U, 10, "complement", draw_generator(0, 0, 1))
    assert torch.equal(new[:, :24], U[:, :24])
    assert orthonormal(new)
    assert new[:, 24:].T.matmul(U).abs().max() < 1e-5
    square = basis(6, 6)
    assert torch.equal(exchange_columns(square, 2, "complement", draw_generator(0, 0, 1)), square)


@pytest.mark.parametrize(("kind", "kept"), [("gaussian", 0), ("gaussian-mix", 3)])
def test_gaussian_columns_have_unit_norm(kind, kept):
    U = basis(30, 8)
    new = exchange_columns(U, 3, kind, draw_generator(0, 0, 1))
    assert torch.equal(new[:, :kept], U[:, :kept])
    assert torch.allclose(new.norm(dim=0), torch.ones(8))
    assert not orthonormal(new)


def test_a_draw_depends_on_seed_tensor_and_step_alone():
    U = basis(30, 8)
    first = exchange_columns(U, 3, "complement", draw_generator(1, 2, 3))
    torch.manual_seed(99)  # the global generator has no part in it
    assert torch.equal(exchange_columns(U, 3, "complement", draw_generator(1, 2, 3)), first)
    for other in ((1, 2, 4), (1, 3, 3), (2, 2, 3)):
        assert not torch.allclose(exchange_columns(U, 3, "complement", draw_generator(*other)), first)


def test_the_first_basis_is_that_of_the_singular_vectors():
    G = torch.randn(10, 15, generator=torch.Generator().manual_seed(6))
    assert same_span(leading_singular_vectors(G, 4), torch.linalg.svd(G).U[:, :4])
    assert torch.isfinite(leading_singular_vectors(G.index_fill(0, torch.tensor([1]), torch.nan), 4)).all()
