"""Structured approximations of the empirical Fisher matrix, and the optimizer that follows from each.

F = E[g g^T] with g = Vec(G), columns stacked. A structure's best fit in the Frobenius norm gives a matrix F~, and the
square-root natural gradient Mat(F~^(-1/2) g) gives an update: Adam, Shampoo, whitening, RACS, Eigen-Adam and SOAP are
what comes out for seven of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from assay.methods.racs_alice._optimizer import require
from assay.methods.racs_alice._racs import rank_one_fit

Structure = Literal["diagonal", "kronecker", "whitening", "column", "row-column", "eigen", "soap", "block"]
NAMES = {
    "diagonal": "Diag(v): Adam's second moment",
    "kronecker": "R^(1/2) (x) L^(1/2): Shampoo",
    "whitening": "I (x) M: whitening, as Muon and SWAN",
    "column": "S (x) I: column normalisation",
    "row-column": "S (x) Q, both diagonal: RACS",
    "eigen": "block diagonal {U D_i U^T}: Eigen-Adam",
    "soap": "(U_R (x) U_L) D (U_R (x) U_L)^T: SOAP",
    "block": "block diagonal {M_i}",
}


@dataclass(frozen=True)
class FisherFit:
    """A fitted structure: its matrix, how far that is from a Fisher matrix, and the update that follows.

    Attributes
    ----------
    structure : str
    shape : (m, n)
    factors : dict of str to Tensor
        The fitted parts, by the letters of the table in `fit_structure`.
    """

    structure: str
    shape: tuple[int, int]
    factors: dict[str, Tensor]
    _matrix: Callable[[], Tensor]
    _update: Callable[[Tensor], Tensor]

    def matrix(self) -> Float[Tensor, "mn mn"]:
        """F~ in full, over columns stacked: m^2 n^2 numbers, for small sizes only."""
        return self._matrix()

    def objective(self, F: Float[Tensor, "mn mn"]) -> Float[Tensor, ""]:
        """||F~ - F||_F^2."""
        size = self.shape[0] * self.shape[1]
        if tuple(F.shape) != (size, size):
            raise ValueError(
                f"gradients of shape {self.shape} have a Fisher matrix of {size} x {size}, got {tuple(F.shape)}"
            )
        return (self.matrix() - F).square().sum()

    def update(self, G: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Mat(F~^(-1/2) Vec(G)), computed with the factors alone; where F~ is singular, with its pseudo-inverse."""
        if tuple(G.shape) != self.shape:
            raise ValueError(f"the structure was fitted to gradients of shape {self.shape}, got {tuple(G.shape)}")
        return self._update(G)


def empirical_fisher(G_samples: Float[Tensor, "samples m n"]) -> Float[Tensor, "mn mn"]:
    """E[g g^T] with g = Vec(G), columns stacked.

    Parameters
    ----------
    G_samples : (samples, m, n)

    Returns
    -------
    (mn, mn)
    """
    _check_samples(G_samples)
    g = G_samples.mT.reshape(len(G_samples), -1)
    return g.mT @ g / len(g)


def fit_structure(G_samples: Float[Tensor, "samples m n"], structure: Structure, n_iters: int = 200) -> FisherFit:
    """Fit a structure to the empirical Fisher matrix of sampled gradients, without forming that matrix.

    =============  ================================  =====================================================  ====================
    structure      F~                                best fit                                               update
    =============  ================================  =====================================================  ====================
    "diagonal"     Diag(v)                           v = E[g^2]                                             Adam's second moment
    "kronecker"    R^(1/2) (x) L^(1/2)               of an upper bound: R = E[G'G]/m, L = E[GG']/n          Shampoo
    "whitening"    I (x) M                           M = E[GG']/n                                           whitening
    "column"       S (x) I                           S_jj = E||g_j||^2 / m                                  column normalisation
    "row-column"   S (x) Q, both diagonal            rank-one fit of E[G.^2]                                RACS
    "eigen"        block diagonal {U D_i U'}         U = eigvecs(E[GG']), D = E[(U'G).^2]: one pass         Eigen-Adam
    "soap"         (U_R (x) U_L) D (U_R (x) U_L)'    U_R, U_L = eigvecs, D = E[(U_L' G U_R).^2]: one pass   SOAP
    "block"        block diagonal {M_i}              M_i = E[g_i g_i']                                      O(n m^3), reference
    =============  ================================  =====================================================  ====================

    Parameters
    ----------
    G_samples : (samples, m, n)
        Use float64 for exact comparisons.
    structure
        One of the table.
    n_iters
        Rounds of the fixed-point iteration of "row-column".

    Returns
    -------
    FisherFit

    Raises
    ------
    ValueError
        An unknown structure, or samples that are not a stack of matrices.

    Source: arXiv:2502.07752, Table 1 and Section 3.
    """
    if structure not in NAMES:
        raise ValueError(f"structure is one of {', '.join(NAMES)}, got {structure!r}")
    require(n_iters >= 1, "n_iters", "at least 1", n_iters)
    _check_samples(G_samples)
    G = G_samples
    count, m, n = G.shape
    left, right = (G @ G.mT).mean(0), (G.mT @ G).mean(0)
    eye = torch.eye

    if structure == "diagonal":
        v = G.square().mean(0)
        return FisherFit(structure, (m, n), {"v": v}, lambda: torch.diag(_vec(v)), lambda g: g * _inverse_root(v))
    if structure == "kronecker":
        R, L = right / m, left / n
        return FisherFit(
            structure,
            (m, n),
            {"R": R, "L": L},
            lambda: torch.kron(_power(R, 0.5), _power(L, 0.5)),
            lambda g: _power(L, -0.25) @ g @ _power(R, -0.25),
        )
    if structure == "whitening":
        M = left / n
        return FisherFit(
            structure, (m, n), {"M": M}, lambda: torch.kron(eye(n).to(M), M), lambda g: n**0.5 * _power(left, -0.5) @ g
        )
    if structure == "column":
        energy = G.square().sum(1).mean(0)
        return FisherFit(
            structure,
            (m, n),
            {"S": energy / m},
            lambda: torch.kron(torch.diag(energy / m), eye(m).to(energy)),
            lambda g: m**0.5 * g * _inverse_root(energy),
        )
    if structure == "row-column":
        s, q = rank_one_fit(G.square().mean(0), n_iters)
        return FisherFit(
            structure,
            (m, n),
            {"S": s, "Q": q},
            lambda: torch.kron(torch.diag(s), torch.diag(q)),
            lambda g: _inverse_root(q)[:, None] * g * _inverse_root(s),
        )
    if structure == "eigen":
        U = torch.linalg.eigh(left).eigenvectors.flip(-1)
        D = (U.mT @ G).square().mean(0)
        return FisherFit(
            structure,
            (m, n),
            {"U": U, "D": D},
            lambda: torch.block_diag(*(U @ torch.diag(D[:, i]) @ U.mT for i in range(n))),
            lambda g: U @ (U.mT @ g * _inverse_root(D, m)),
        )
    if structure == "soap":
        U_L, U_R = torch.linalg.eigh(left).eigenvectors.flip(-1), torch.linalg.eigh(right).eigenvectors.flip(-1)
        D = (U_L.mT @ G @ U_R).square().mean(0)
        return FisherFit(
            structure,
            (m, n),
            {"U_L": U_L, "U_R": U_R, "D": D},
            lambda: torch.kron(U_R, U_L) @ torch.diag(_vec(D)) @ torch.kron(U_R, U_L).mT,
            lambda g: U_L @ (U_L.mT @ g @ U_R * _inverse_root(D, m + n)) @ U_R.mT,
        )
    blocks = torch.einsum("kai,kbi->iab", G, G) / count
    return FisherFit(
        structure,
        (m, n),
        {"M": blocks},
        lambda: torch.block_diag(*blocks),
        lambda g: torch.stack([_power(blocks[i], -0.5) @ g[:, i] for i in range(n)], dim=1),
    )


def compensation_scale(G_samples: Float[Tensor, "samples m n"], U: Float[Tensor, "m r"]) -> Float[Tensor, " n"]:
    """The optimal diag(S) of Alice's compensation C = (G - U U^T G) S.

    It minimises ||S^-2 (x) P_c - F_c||_F, P_c = I - U U^T, over diagonal S, F_c with diagonal blocks
    E[P_c g_j g_j^T P_c]: each S_jj^-2 is the trace of P_c F_c,jj over m - r.

    Parameters
    ----------
    G_samples : (samples, m, n)
    U : (m, r)
        Orthonormal, r < m.

    Source: arXiv:2502.07752, Theorem 5.1.
    """
    m, r = U.shape
    if r >= m:
        raise ValueError(f"a basis of {r} columns in {m} rows leaves nothing to compensate: give one with r < m")
    _check_samples(G_samples)
    residual = G_samples.square().sum(1) - (U.mT @ G_samples).square().sum(1)
    return (m - r) ** 0.5 * residual.mean(0).clamp_min(0).rsqrt()  # infinite where the basis leaves nothing


def _vec(A: Float[Tensor, "m n"]) -> Float[Tensor, " mn"]:
    """Columns stacked."""
    return A.mT.reshape(-1)


def _power(A: Float[Tensor, "k k"], exponent: float) -> Float[Tensor, "k k"]:
    """A power of a symmetric positive semidefinite matrix; eigenvalues that are only rounding count as zero, and stay zero."""
    values, vectors = torch.linalg.eigh(A)
    nonzero = values > values.amax() * len(A) * torch.finfo(A.dtype).eps
    powers = torch.where(nonzero, torch.where(nonzero, values, 1.0) ** exponent, 0.0)
    return vectors @ torch.diag(powers) @ vectors.mT


def _inverse_root(energy: Tensor, terms: int = 0) -> Tensor:
    """energy^(-1/2), and 0 where there is none: no more than the squared rounding of sums of so many terms."""
    floor = energy.amax() * (terms * torch.finfo(energy.dtype).eps) ** 2
    return torch.where(energy > floor, energy.rsqrt(), 0.0)


def _check_samples(G_samples: Tensor) -> None:
    if not (isinstance(G_samples, Tensor) and G_samples.ndim == 3 and G_samples.is_floating_point()):
        got = (
            f"{G_samples.dtype} of shape {tuple(G_samples.shape)}" if isinstance(G_samples, Tensor) else type(G_samples)
        )
        raise ValueError(f"G_samples is a floating tensor of shape (samples, m, n), got {got}: stack the gradients")
    if G_samples.numel() == 0:
        raise ValueError(f"G_samples is empty, shape {tuple(G_samples.shape)}: give at least one gradient with entries")
