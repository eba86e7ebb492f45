"""Eigen-Adam against Adam, and against its own formula."""

import pytest
import torch

from assay.methods.racs_alice import EigenAdam


def test_gradients_with_orthogonal_rows_give_adam_without_bias_correction():
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(5, 9, dtype=torch.float64))
    optimizer = EigenAdam([p], lr=1.0, interval=10**6, eps=1e-8, state_dtype=torch.float64)
    rows = torch.linalg.qr(torch.randn(9, 5, generator=generator, dtype=torch.float64)).Q.T
    first = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None] * rows  # G G^T is diagonal, with distinct entries
    m = v = torch.zeros(5, 9, dtype=torch.float64)
    for t in range(10):
        G = first if t == 0 else torch.randn(5, 9, generator=generator, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * G, 0.9 * v + 0.1 * G**2
        before = p.detach().clone()
        p.grad = G
        optimizer.step()
        assert torch.allclose(p.detach() - before, -m / (v.sqrt() + 1e-8), rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_equals_the_paper_s_algorithm_step_by_step(shape):
    generator = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = EigenAdam([p], lr=0.5, betas=(0.8, 0.9, 0.7), interval=3, state_dtype=torch.float64)
    W, M, Q = torch.zeros(6, 10).double(), torch.zeros(6, 10).double(), torch.zeros(6, 6).double()
    V = torch.zeros(6, 10).double()
    for t in range(1, 9):
        G = torch.randn(shape, generator=generator, dtype=torch.float64)
        p.grad = G
        optimizer.step()
        G = G if shape == (6, 10) else G.T
        M, Q = 0.8 * M + 0.2 * G, 0.7 * Q + 0.3 * G @ G.T
        if t == 1 or t % 3 == 0:
            U = torch.linalg.eigh(Q).eigenvectors.flip(-1)
        V = 0.9 * V + 0.1 * (U.T @ G) ** 2
        W = W - 0.5 * U @ ((U.T @ M) / (V.sqrt() + 1e-8))
        assert torch.allclose(p if shape == (6, 10) else p.T, W, rtol=1e-8, atol=1e-9)


def test_a_zero_gradient_moves_nothing():
    p = torch.nn.Parameter(torch.randn(5, 9))
    optimizer = EigenAdam([p], interval=2)
    for G in (torch.zeros(5, 9), torch.randn(5, 9), torch.zeros(5, 9), torch.randn(5, 9)):
        before = p.detach().clone()
        p.grad = G
        optimizer.step()
        assert torch.equal(p, before) == (not G.any())
    assert optimizer.state[p]["step"] == 3  # the zero before the first gradient is not counted


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="betas"):
        EigenAdam([torch.nn.Parameter(torch.zeros(5, 9))], betas=(0.9, 0.9, 1.0))
    with pytest.raises(ValueError, match="interval"):
        EigenAdam([torch.nn.Parameter(torch.zeros(5, 9))], interval=0)
