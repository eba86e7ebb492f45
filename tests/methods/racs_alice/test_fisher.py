"""Fitted structures: the updates they imply, and that no neighbour in the family fits better."""

from inspect import unwrap

import pytest
import torch
from scipy.optimize import minimize

from assay.methods.racs_alice import compensation_scale, empirical_fisher, fit_structure
from assay.methods.racs_alice._fisher import NAMES

M, N = 3, 4


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(M, N, generator=generator, dtype=torch.float64) + 0.2
    mix = torch.randn(M, M, generator=generator, dtype=torch.float64)
    return mix @ (scales * torch.randn(64, M, N, generator=generator, dtype=torch.float64))


def test_the_empirical_fisher_matrix_stacks_columns(samples):
    F = torch.zeros(M * N, M * N, dtype=torch.float64)
    for G in samples:
        g = torch.cat([G[:, j] for j in range(N)])
        F += torch.outer(g, g) / 64
    assert torch.allclose(empirical_fisher(samples), F)


@pytest.mark.parametrize("structure", NAMES)
def test_the_update_is_the_square_root_natural_gradient(samples, structure):
    fit = fit_structure(samples, structure)
    G = torch.randn(M, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(fit.matrix())
    g = torch.cat([G[:, j] for j in range(N)])
    natural = vectors @ (vectors.T @ g * values**-0.5)
    assert torch.allclose(fit.update(G), natural.reshape(N, M).T, rtol=1e-8, atol=1e-8)


def perturbed(structure, factors, generator):
    """A neighbour in the family, as a full matrix."""

    def near(x):
        return x + 0.05 * x.abs().mean() * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def symmetric(x):
        noise = near(x) - x
        return x + (noise + noise.mT) / 2

    eye_m, eye_n = torch.eye(M, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
    if structure == "diagonal":
        return torch.diag(near(factors["v"]).T.reshape(-1))
    if structure == "whitening":
        return torch.kron(eye_n, symmetric(factors["M"]))
    if structure == "column":
        return torch.kron(torch.diag(near(factors["S"])), eye_m)
    if structure == "row-column":
        return torch.kron(torch.diag(near(factors["S"])), torch.diag(near(factors["Q"])))
    if structure == "eigen":  # the basis stays: it comes from one pass and is not the optimum
        D = near(factors["D"])
        return torch.block_diag(*(factors["U"] @ torch.diag(D[:, j]) @ factors["U"].T for j in range(N)))
    if structure == "soap":
        basis = torch.kron(factors["U_R"], factors["U_L"])
        return basis @ torch.diag(near(factors["D"]).T.reshape(-1)) @ basis.T
    return torch.block_diag(*symmetric(factors["M"]))


@pytest.mark.parametrize("structure", [s for s in NAMES if s != "kronecker"])  # Shampoo minimises a bound
def test_no_neighbour_in_the_family_fits_better(samples, structure):
    F = empirical_fisher(samples)
    fit = fit_structure(samples, structure)
    best = fit.objective(F)
    generator = torch.Generator().manual_seed(2)
    for _ in range(500):
        assert (perturbed(structure, fit.factors, generator) - F).square().sum() >= best


def test_the_finer_structure_fits_better(samples):
    F = empirical_fisher(samples)
    error = {name: fit_structure(samples, name).objective(F).item() for name in NAMES}
    assert error["block"] < error["eigen"] < error["whitening"]
    assert error["diagonal"] < error["row-column"] < error["column"]


def test_the_compensation_is_the_best_of_its_form():
    m, n, r = 4, 3, 2
    generator = torch.Generator().manual_seed(3)
    G = torch.randn(64, m, n, generator=generator, dtype=torch.float64)
    U = torch.linalg.qr(torch.randn(m, r, generator=generator, dtype=torch.float64)).Q
    P = torch.eye(m, dtype=torch.float64) - U @ U.T
    F = torch.block_diag(*(torch.einsum("ka,kb->ab", G[:, :, j] @ P, G[:, :, j] @ P) / 64 for j in range(n)))

    def distance(logs):
        S = torch.tensor(logs).exp()
        return (torch.kron(torch.diag(S**-2), P) - F).square().sum().item()

    found = minimize(distance, [0.0] * n, method="L-BFGS-B", options={"ftol": 1e-16, "gtol": 1e-10})
    assert torch.allclose(compensation_scale(G, U), torch.tensor(found.x).exp(), rtol=1e-4)


def test_wrong_input_is_refused(samples):
    with pytest.raises(ValueError, match="structure is one of"):
        fit_structure.__wrapped__(samples, "adam") if hasattr(fit_structure, "__wrapped__") else fit_structure(
            samples, "adam"
        )
    with pytest.raises(ValueError, match="fitted to gradients of shape"):
        fit_structure(samples, "diagonal").update(samples[0].T)
    with pytest.raises(ValueError, match="nothing to compensate"):
        compensation_scale(samples, torch.eye(M, dtype=torch.float64))


@pytest.mark.parametrize(
    "structure", ["diagonal", "kronecker", "whitening", "column", "row-column", "eigen", "soap", "block"]
)
def test_a_singular_fit_moves_along_its_range_and_nowhere_else(structure):
    for dtype in (torch.float32, torch.float64):
        one = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
        dead = torch.randn(20, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        dead[:, 1], dead[:, :, 2] = 0, 0
        for G in (one, one.mT.contiguous(), dead, torch.zeros(4, 3, 5, dtype=dtype)):
            fit = fit_structure(G, structure)
            F = fit.matrix()
            assert torch.isfinite(F).all()
            values, vectors = torch.linalg.eigh(F.double())
            roots = torch.where(values > values.amax() * 1e-5, values.clamp_min(1e-300).rsqrt(), 0.0)
            g = G[0].mT.reshape(-1).double()
            expected = (vectors @ (roots * (vectors.mT @ g))).reshape(G.shape[2], G.shape[1]).mT
            assert torch.allclose(fit.update(G[0]).double(), expected, rtol=1e-2, atol=1e-2)


def test_what_is_no_stack_of_gradients_is_refused():
    for bad in (torch.randn(3, 4), torch.ones(2, 3, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="stack"):
            unwrap(fit_structure)(bad, "soap")
        with pytest.raises(ValueError, match="stack"):
            unwrap(empirical_fisher)(bad)
    with pytest.raises(ValueError, match="empty"):
        fit_structure(torch.randn(0, 3, 4), "soap")
    with pytest.raises(ValueError, match="12 x 12"):
        fit_structure(torch.randn(4, 3, 4), "soap").objective(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="n_iters"):
        fit_structure(torch.randn(4, 3, 4), "row-column", n_iters=0)
