"""The closed form of SAES-SVD: one Linear, its second moments, and the weight of the original network's inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from assay._errors import InputError
from assay.lm._lowrank import LARGEST_EXACT, top_svd, whitener

Beta = float | str

BOUNDS = (0.25, 0.75)  # of beta, the best of the paper's table
CAP = 0.99
IRRELEVANT = 1e-12  # D below this share of S: there is no difference between the networks to be suppressed
_GOLDEN = (math.sqrt(5) - 1) / 2


class FactorResult(NamedTuple):
    """The factors of one Linear.

    Attributes
    ----------
    A, B : (m, r), (r, n)
        In the dtype of the weight, balanced.
    beta
        That was used, alpha / (1 + alpha).
    retained
        Share of the energy of G(beta) in its r largest singular values.
    rho_surrogate
        Share lost by the first-order model of `aces_beta`; nan where beta was given.
    ridge_used
        lam, added to the diagonal of H.
    beta_irrelevant
        The inputs are those of the original network: every beta gives the same factors.
    local
        Squared error of A B on the inputs X, over \\|W X\\|^2 (H with its ridge).
    alignment
        \\|A B X - W X^f\\|^2 less \\|W X - W X^f\\|^2, over \\|W X\\|^2: below zero, the output is nearer to the original's than the
        dense layer's would be.
    """

    A: Tensor
    B: Tensor
    beta: float
    retained: float
    rho_surrogate: float
    ridge_used: float
    beta_irrelevant: bool
    local: float
    alignment: float


class Coefficients(NamedTuple):
    """Of the tail's energy, a + 2 b beta + c beta^2, and of all, A + 2 B beta + C beta^2."""

    a: float
    b: float
    c: float
    A: float
    B: float
    C: float

    def tail(self, beta: float) -> float:
        """The modelled energy that a rank-r truncation loses."""
        return self.a + 2 * self.b * beta + self.c * beta**2

    def rho(self, beta: float) -> float:
        """The modelled share of the energy that a rank-r truncation loses."""
        whole = self.A + 2 * self.B * beta + self.C * beta**2
        return self.tail(beta) / whole if whole > 0 else 0.0


class Candidate(NamedTuple):
    """A beta that was considered, and what it was judged by (less is better)."""

    beta: float
    loss: float


@dataclass
class Whitened:
    """The moments of one group of Linears, factorised once.

    R R^T = H + lam I. A weight W becomes S = W (H + lam I) R^-T (``ridge_target="weight"``, that is W R) or W H R^-T
    (``"zero"``), and D = W Delta R^-T.

    Parameters
    ----------
    R, Delta : (n, n)
        float64.
    lam
        The ridge.
    ridge_target
        ``"weight"`` or ``"zero"``.
    triangular
        Whether R is.
    inverse : (n, n)
        Of R, where it is no triangle.
    """

    R: Tensor
    Delta: Tensor
    lam: float
    ridge_target: str
    triangular: bool
    inverse: Tensor | None  # of R, where it is no triangle

    @classmethod
    def of(
        cls,
        H: Float[Tensor, "n n"],
        Delta: Float[Tensor, "n n"],
        ridge: float = 1e-4,
        ridge_target: str = "weight",
        whitener_name: str = "cholesky",
    ) -> Whitened:
        """Factorise second moments.

        Parameters
        ----------
        whitener_name
            ``"cholesky"``, which falls back on the other where no ridge helps, or ``"eigh"``: the symmetric root, its
            eigenvalues not below the ridge.

        Raises
        ------
        InputError
            If an option is not known, the shapes do not fit, or a moment is not finite.
        """
        if ridge_target not in ("weight", "zero") or whitener_name not in ("cholesky", "eigh"):
            raise InputError(
                f"ridge_target={ridge_target!r} and whitener={whitener_name!r}: the first is 'weight' or 'zero', the second "
                "'cholesky' or 'eigh'"
            )
        if H.ndim != 2 or H.shape[0] != H.shape[1] or Delta.shape != H.shape:
            raise InputError(
                f"second moments of {tuple(H.shape)} and {tuple(Delta.shape)} are not two squares of one size"
            )
        if ridge < 0:
            raise InputError(f"the ridge is {ridge}: give zero or more")
        if not bool(Delta.isfinite().all()):
            raise InputError("the second moments are not finite: look for NaN in the calibration")
        if whitener_name == "cholesky":
            try:
                R, lam = whitener(H, ridge)
            except InputError:
                if not bool(H.isfinite().all()):
                    raise
            else:
                return cls(R, Delta.double(), lam, ridge_target, True, None)
        values, vectors = torch.linalg.eigh(H.double())
        mean = float(values.mean())
        lam = ridge * (mean if mean > 0 else 1.0)
        floor = max(lam, torch.finfo(torch.float64).eps * len(values) * float(values.abs().max()))
        root = (values.clamp_min(0) + lam).clamp_min(floor).sqrt()
        return cls((vectors * root) @ vectors.T, Delta.double(), lam, ridge_target, False, (vectors / root) @ vectors.T)

    def behind(self, M: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """M R^-T."""
        if self.inverse is not None:
            return M @ self.inverse.T
        return torch.linalg.solve_triangular(self.R.T, M, upper=True, left=False)

    def back(self, M: Float[Tensor, "r n"]) -> Float[Tensor, "r n"]:
        """M R^-1."""
        if self.inverse is not None:
            return M @ self.inverse
        return torch.linalg.solve_triangular(self.R, M, upper=False, left=False)

    def pair(self, W: Float[Tensor, "m n"]) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"]]:
        """S and D of a weight."""
        wide = W.double()
        S = wide @ self.R
        if self.ridge_target == "zero":
            S = S - self.lam * self.behind(wide)
        return S, self.behind(wide @ self.Delta)


def cealc(
    W: Float[Tensor, "m n"],
    H: Float[Tensor, "inputs inputs"],
    Delta: Float[Tensor, "inputs inputs"],
    rank: int,
    beta: Beta = "aces",
    ridge: float = 1e-4,
    ridge_target: str = "weight",
    bounds: tuple[float, float] = BOUNDS,
    bounds_on: str = "beta",
    refine: bool = False,
    cap: float = CAP,
    shrink: float = 1.0,
    objective: str = "ratio",
    whitener: str = "cholesky",
) -> FactorResult:
    """The factors that keep a layer's output, and pull it towards the original network's.

    min \\|(A B - W) X\\|^2 + alpha \\|A B X - W X^f\\|^2 with beta = alpha / (1 + alpha): the r leading singular triplets of
    G = W (H + beta Delta) R^-T with R R^T = H + lam I.

    Parameters
    ----------
    W : (m, n)
        Outputs by inputs.
    H, Delta : (n, n)
        X X^T and (X^f - X) X^T up to one common factor; see `assay.lm.LayerStats`.
    rank
        r.
    beta
        A number in [0, 1), used as it is; ``"aces"``: chosen by `aces_beta`; ``"exact"``: by the singular values
        of G(beta) themselves, on a grid of 21 and by golden section.
    ridge
        lam over the mean of H's diagonal; raised where the factorisation fails.
    ridge_target
        Where A B goes in directions that the calibration did not see: ``"weight"`` keeps W (and beta = 0 is SVD-LLM),
        ``"zero"`` is the paper's formula.
    bounds, bounds_on
        Of the choice: of ``"beta"``, or of ``"alpha"``.
    refine
        Choose once more with the subspaces at the first choice.
    cap, shrink
        Guard rails of the choice: beta becomes shrink * min(beta, cap).
    objective
        ``"ratio"``: the lost share of the energy; ``"energy"``: the lost energy.
    whitener
        ``"cholesky"`` or ``"eigh"``.

    Raises
    ------
    InputError
        If shapes, rank or an option do not fit, or a value is not finite.

    Source: arXiv:2602.03051, Section 4.1 and Algorithms 2 and 3.
    """
    return factorise(
        W,
        Whitened.of(H, Delta, ridge, ridge_target, whitener),
        rank,
        beta=beta,
        bounds=bounds,
        bounds_on=bounds_on,
        refine=refine,
        cap=cap,
        shrink=shrink,
        objective=objective,
    )


def factorise(
    W: Float[Tensor, "m n"], moments: Whitened, rank: int, *, beta: Beta = "aces", **choice: Any
) -> FactorResult:
    """As `cealc`, for moments that were factorised before: the Linears of a group share them.

    Parameters
    ----------
    W : (m, n)
        Outputs by inputs.
    moments
        Of the inputs.
    rank
        r.
    beta
        A number in [0, 1), ``"aces"`` or ``"exact"``.
    **choice
        Of `aces_beta`.
    """
    m, n = W.shape
    if moments.R.shape[0] != n:
        raise InputError(f"moments of {moments.R.shape[0]} inputs do not fit a weight of {m} x {n}")
    if not 1 <= rank <= min(m, n):
        raise InputError(f"a Linear of {n} inputs and {m} outputs has no rank {rank}: give 1 to {min(m, n)}")
    if not bool(W.isfinite().all()):
        raise InputError("the weight is not finite: look for NaN in the model")
    S, D = moments.pair(W)
    rho = math.nan
    irrelevant = bool(D.norm() <= IRRELEVANT * S.norm())
    if isinstance(beta, str):
        if beta not in ("aces", "exact"):
            raise InputError(f"beta is {beta!r}: give 'aces', 'exact' or a number in [0, 1)")
        used, _, coefficients = aces_beta(S, D, rank, exact=beta == "exact", **choice)
        rho = coefficients.rho(used)
    else:
        used = float(beta)
        if not 0 <= used < 1:
            raise InputError(f"beta is {beta}, the share of the alignment: give a number in [0, 1), 'aces' or 'exact'")
    G = S if irrelevant or not used else S + used * D
    left, right, values = leading(G, rank)
    whole = float(G.square().sum())
    inner = right.T
    root = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    B = moments.back(inner) * root[:, None]
    A = left * root
    WR = S if moments.ridge_target == "weight" else W.double() @ moments.R
    ours = left.T @ WR  # the error's parts, from products of r rows
    kept = values[:, None] * inner
    size = float(WR.square().sum()) or 1.0
    local = size + float(values.square().sum()) - 2 * float((kept * ours).sum())
    cross = float((kept * (left.T @ D)).sum()) - float((WR * D).sum())
    return FactorResult(
        A.to(W.dtype),
        B.to(W.dtype),
        used,
        float(values.square().sum()) / whole if whole else 1.0,
        rho,
        moments.lam,
        irrelevant,
        max(local, 0.0) / size,
        (max(local, 0.0) - 2 * cross) / size,
    )


def aces_beta(
    S: Float[Tensor, "m n"],
    D: Float[Tensor, "m n"],
    rank: int,
    *,
    bounds: tuple[float, float] = BOUNDS,
    bounds_on: str = "beta",
    refine: bool = False,
    cap: float = CAP,
    shrink: float = 1.0,
    objective: str = "ratio",
    exact: bool = False,
) -> tuple[float, list[Candidate], Coefficients]:
    """The beta at which a truncation of S + beta D to rank r loses the smallest share of the energy.

    With the r leading singular subspaces of S frozen, the lost energy is a + 2 b beta + c beta^2 and the whole
    A + 2 B beta + C beta^2; their ratio is least at a root of (cB - bC) beta^2 + (cA - aC) beta + (bA - aB) or at a bound. Value
    and slope at beta = 0 are exact, the error elsewhere is of the second order in beta \\|D\\| over the gap of the
    singular values.

    Parameters
    ----------
    S, D : (m, n)
        The whitened weight and its correction.
    rank
        r.
    bounds, bounds_on, refine, cap, shrink, objective
        As of `cealc`.
    exact
        By the singular values of S + beta D instead.

    Returns
    -------
    beta, the candidates, and the coefficients of the model

    Raises
    ------
    InputError
        If bounds or an option do not fit.

    Source: arXiv:2602.03051, Theorem 4.2 and Algorithm 3.
    """
    low, high = _bounds(bounds, bounds_on, cap)
    if not 0 < shrink <= 1:
        raise InputError(f"shrink is {shrink}: give a number in (0, 1]")
    if objective not in ("ratio", "energy"):
        raise InputError(f"the objective is {objective!r}: give 'ratio' or 'energy'")
    S, D = S.double(), D.double()
    if D.norm() <= IRRELEVANT * S.norm():
        coefficients = _coefficients(S, torch.zeros_like(S), rank, S)
        return shrink * min(low, cap), [Candidate(low, coefficients.rho(low))], coefficients
    coefficients = _coefficients(S, D, rank, S)
    if exact:
        candidates = _search(tail_ratio(S, D, rank), low, high)
    else:
        candidates = _candidates(coefficients, low, high, objective)
        if refine:
            first = min(candidates, key=lambda c: c.loss).beta
            coefficients = _coefficients(S, D, rank, S + first * D)
            candidates = _candidates(coefficients, low, high, objective)
    best = min(candidates, key=lambda c: c.loss)
    return shrink * min(best.beta, cap), candidates, coefficients


def tail_ratio(S: Float[Tensor, "m n"], D: Float[Tensor, "m n"], rank: int) -> Callable[[float], float]:
    """The true share of the energy of S + beta D outside its r largest singular values, as a function of beta.

    Parameters
    ----------
    S, D : (m, n)
        The whitened weight and its correction.
    rank
        r.
    """
    if S.shape[0] > S.shape[1]:
        S, D = S.T, D.T
    SS, SD, DD = S @ S.T, S @ D.T, D @ D.T
    SD = SD + SD.T

    def at(beta: float) -> float:
        values = torch.linalg.eigvalsh(SS + beta * SD + beta**2 * DD).clamp_min(0)
        whole = float(values.sum())
        return float(values[: len(values) - rank].sum()) / whole if whole else 0.0

    return at


def leading(
    G: Float[Tensor, "m n"], rank: int
) -> tuple[Float[Tensor, "m r"], Float[Tensor, "n r"], Float[Tensor, " r"]]:
    """The r leading left and right singular vectors and values, from an eigendecomposition of the smaller Gram matrix.

    Beyond 4,096 rows and columns by random projections.
    """
    if min(G.shape) > LARGEST_EXACT:
        u, s, v = top_svd(G, rank)
        return u, v.T, s
    if G.shape[0] > G.shape[1]:
        right, left, values = leading(G.T, rank)
        return left, right, values
    _, vectors = torch.linalg.eigh(G @ G.T)
    left = vectors[:, -rank:].flip(1)
    image = G.T @ left
    # Orthonormal even where singular values are tiny, which a division by them would not be.
    right, triangle = torch.linalg.qr(image)
    signs = triangle.diagonal().sign()
    signs[signs == 0] = 1
    return left, right * signs, (triangle.diagonal() * signs)


def _coefficients(S: Tensor, D: Tensor, rank: int, at: Tensor) -> Coefficients:
    """Energies outside the leading subspaces of ``at``, without forming a projector."""
    left, right, _ = leading(at, rank)
    US, UD = left.T @ S, left.T @ D
    SV, DV = S @ right, D @ right
    USV, UDV = US @ right, UD @ right

    def outside(whole: float, u: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor], both: tuple[Tensor, Tensor]) -> float:
        return whole - float((u[0] * u[1]).sum()) - float((v[0] * v[1]).sum()) + float((both[0] * both[1]).sum())

    A, B, C = (float((x * y).sum()) for x, y in ((S, S), (S, D), (D, D)))
    return Coefficients(
        max(outside(A, (US, US), (SV, SV), (USV, USV)), 0.0),
        outside(B, (US, UD), (SV, DV), (USV, UDV)),
        max(outside(C, (UD, UD), (DV, DV), (UDV, UDV)), 0.0),
        A,
        B,
        C,
    )


def _candidates(k: Coefficients, low: float, high: float, objective: str) -> list[Candidate]:
    if objective == "energy":
        inside = [-k.b / k.c] if k.c > 0 else []
    else:
        inside = _roots(k.c * k.B - k.b * k.C, k.c * k.A - k.a * k.C, k.b * k.A - k.a * k.B)
    betas = (low, high, *(x for x in inside if low < x < high))
    return [Candidate(beta, k.tail(beta) if objective == "energy" else k.rho(beta)) for beta in betas]


def _roots(square: float, linear: float, constant: float) -> list[float]:
    """Real roots of a quadratic that may be none, without cancellation."""
    if square == 0:
        return [-constant / linear] if linear else []
    discriminant = linear**2 - 4 * square * constant
    if discriminant < 0:
        return []
    q = -(linear + math.copysign(math.sqrt(discriminant), linear)) / 2
    return [q / square, constant / q] if q else [0.0]


def _search(loss: Callable[[float], float], low: float, high: float) -> list[Candidate]:
    """A grid of 21, and golden section around its best."""
    grid = [low + (high - low) * i / 20 for i in range(21)]
    found = [Candidate(beta, loss(beta)) for beta in grid]
    best = min(range(21), key=lambda i: found[i].loss)
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, 20)]
    inner, outer = right - _GOLDEN * (right - left), left + _GOLDEN * (right - left)
    at_inner, at_outer = loss(inner), loss(outer)
    while right - left > 1e-4:
        if at_inner <= at_outer:
            right, outer, at_outer = outer, inner, at_inner
            inner = right - _GOLDEN * (right - left)
            at_inner = loss(inner)
        else:
            left, inner, at_inner = inner, outer, at_outer
            outer = left + _GOLDEN * (right - left)
            at_outer = loss(outer)
    return [*found, Candidate(inner, at_inner), Candidate(outer, at_outer)]


def _bounds(bounds: tuple[float, float], on: str, cap: float) -> tuple[float, float]:
    if on not in ("beta", "alpha"):
        raise InputError(f"bounds_on is {on!r}: give 'beta' or 'alpha'")
    if not 0 < cap < 1:
        raise InputError(f"cap is {cap}: give a number in (0, 1)")
    low, high = bounds if on == "beta" else tuple(1.0 if math.isinf(x) else x / (1 + x) for x in bounds)
    if not 0 <= low <= high <= 1:
        raise InputError(f"the bounds of {on} are {bounds}: give two numbers in order, those of beta from 0 to 1")
    return low, high
