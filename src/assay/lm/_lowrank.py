"""A Linear as two thin ones, and the plain ways to find them: SVD, FWSVD, ASVD and SVD-LLM."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from assay._errors import InputError

log = logging.getLogger("assay.lm")

LARGEST_EXACT = 4096  # beyond this smaller side the leading singular triplets are found by random projections
_RAISES = 5  # times that a ridge is made ten times as large before a factorisation is given up


class Factors(NamedTuple):
    """A (m, r) and B (r, n) in place of W (m, n), torch's layout: outputs by inputs."""

    A: Tensor
    B: Tensor

    @property
    def product(self) -> Tensor:
        """A B, (m, n)."""
        return self.A @ self.B


class LowRankLinear(nn.Module):
    """y = A (B x) + bias: a Linear of rank r, as two Linears, so that autocast, LoRA and quantisers find what they know.

    Parameters
    ----------
    in_features, out_features, rank
        n, m and r.
    bias
        Whether there is one.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool = False) -> None:
        super().__init__()
        if not 1 <= rank <= min(in_features, out_features):
            raise InputError(
                f"a Linear of {in_features} inputs and {out_features} outputs has no rank {rank}: give 1 to "
                f"{min(in_features, out_features)}"
            )
        self.B = nn.Linear(in_features, rank, bias=False)
        self.A = nn.Linear(rank, out_features, bias=bias)

    @classmethod
    def from_factors(
        cls, A: Float[Tensor, "m r"], B: Float[Tensor, "r n"], bias: Float[Tensor, " m"] | None = None
    ) -> LowRankLinear:
        """A module of these factors, in their dtype and on their device."""
        made = cls(B.shape[1], A.shape[0], B.shape[0], bias is not None).to(device=A.device, dtype=A.dtype)
        with torch.no_grad():
            made.A.weight.copy_(A)
            made.B.weight.copy_(B)
            if bias is not None:
                made.A.bias.copy_(bias)
        return made

    @property
    def rank(self) -> int:
        """r."""
        return self.B.out_features

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch m"]:
        """The output for inputs (..., n)."""
        return self.A(self.B(x))

    def dense_weight(self) -> Float[Tensor, "m n"]:
        """A B, the weight of the one Linear that it stands for."""
        return self.A.weight @ self.B.weight

    def extra_repr(self) -> str:
        """Shown in the model's description."""
        return f"rank={self.rank}"


def rank_for(ratio: float, out_features: int, in_features: int) -> int:
    """The largest rank whose factors have at most a share 1 - ratio of a Linear's parameters.

    Parameters
    ----------
    ratio
        Share of the parameters to be removed, in (0, 1).

    Raises
    ------
    InputError
        If the ratio is no share, or leaves no rank at all.
    """
    if not 0 < ratio < 1:
        raise InputError(f"the ratio is {ratio}, the share of parameters to remove: give a number between 0 and 1")
    rank = int((1 - ratio) * out_features * in_features / (out_features + in_features))
    if rank < 1:
        raise InputError(
            f"a ratio of {ratio} leaves no rank to a Linear of {out_features} x {in_features}: give a smaller one"
        )
    return rank


def svd_factors(W: Float[Tensor, "m n"], rank: int) -> Factors:
    """The best factors in the plain norm of W; each takes the root of the singular values.

    Parameters
    ----------
    W : (m, n)
        Computed in float64, returned in its own dtype.
    """
    _check_rank(W, rank)
    u, s, v = top_svd(W.double(), rank)
    root = s.sqrt()
    return Factors((u * root).to(W.dtype), (root[:, None] * v).to(W.dtype))


def fwsvd_factors(W: Float[Tensor, "m n"], importance: Float[Tensor, " inputs"], rank: int) -> Factors:
    """Factors of W with its input features weighted by their importance.

    Parameters
    ----------
    importance : (n,)
        d_j = sqrt(sum over outputs of E[gradient_ij^2]); values under 1e-8 of the mean are raised to it.

    Source: Hsu et al. 2022, "Language model compression with weighted low-rank factorization".
    """
    return _scaled_factors(W, importance, rank, "importance")


def asvd_factors(W: Float[Tensor, "m n"], mean_abs: Float[Tensor, " inputs"], rank: int, power: float = 0.5) -> Factors:
    """Factors of W with its input features weighted by the size of the activations.

    Parameters
    ----------
    mean_abs : (n,)
        Mean of |x_j| over the calibration.
    power
        Of it; the paper's 0.5.

    Source: Yuan et al. 2023, "ASVD: Activation-aware singular value decomposition".
    """
    return _scaled_factors(W, mean_abs.double() ** power, rank, "mean_abs")


def svd_llm_factors(
    W: Float[Tensor, "m n"], H: Float[Tensor, "inputs inputs"], rank: int, ridge: float = 1e-4
) -> Factors:
    """The factors that keep W x best for inputs of these second moments.

    min tr((AB - W)(H + lam I)(AB - W)^T): with R R^T = H + lam I it is the SVD of W R, and B <- B R^-1. In directions that
    the calibration did not see, A B stays as near to W as the rank allows.

    Parameters
    ----------
    H : (n, n)
        Second moments of the inputs, up to a factor; see `LayerStats`.
    ridge
        lam over the mean of H's diagonal.

    Source: Wang et al. 2024, "SVD-LLM: Truncation-aware singular value decomposition".
    """
    _check_rank(W, rank)
    if H.shape != (W.shape[1], W.shape[1]):
        raise InputError(f"second moments of the shape {tuple(H.shape)} do not fit a weight of {tuple(W.shape)}")
    root, _ = whitener(H, ridge)
    u, s, v = top_svd(W.double() @ root, rank)
    half = s.sqrt()
    B = torch.linalg.solve_triangular(root, half[:, None] * v, upper=False, left=False)
    return Factors((u * half).to(W.dtype), B.to(W.dtype))


def whitener(H: Float[Tensor, "n n"], ridge: float = 1e-4) -> tuple[Float[Tensor, "n n"], float]:
    """The lower Cholesky factor R of H + lam I in float64, and lam.

    lam starts at ridge times the mean of the diagonal (of 1 where that is zero) and is raised tenfold, five times at most,
    while the factorisation fails; that is logged.

    Raises
    ------
    InputError
        If H holds a value that is not finite, or cannot be factorised even so.
    """
    wide = H.double()
    if not bool(wide.isfinite().all()):
        raise InputError("the second moments are not finite: look for NaN in the calibration")
    mean = float(wide.diagonal().mean())
    lam = ridge * (mean if mean > 0 else 1.0)
    eye = torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    for attempt in range(_RAISES + 1):
        root, failed = torch.linalg.cholesky_ex(wide + lam * eye)
        if not int(failed):
            if attempt:
                log.warning("second moments of %d inputs needed a ridge of %.3g", len(wide), lam)
            return root, lam
        lam = lam * 10 if lam else 1e-10 * max(mean, 1.0)
    raise InputError(
        f"second moments of {len(wide)} inputs cannot be factorised with a ridge of {lam / 10:.3g}: are they symmetric, "
        "and from enough tokens?"
    )


def top_svd(
    M: Float[Tensor, "m n"], rank: int, oversampling: int = 16, iterations: int = 6
) -> tuple[Float[Tensor, "m r"], Float[Tensor, " r"], Float[Tensor, "r n"]]:
    """The leading singular triplets U, S, V^T of a matrix.

    Exact where its smaller side has at most 4,096 entries; beyond, by random projections with power iterations, which are
    repeated until M V = U S holds to 1e-3 of the largest value.

    Raises
    ------
    RuntimeError
        If random projections do not get there.

    Source: Halko, Martinsson and Tropp 2011, Algorithm 4.4.
    """
    if min(M.shape) <= LARGEST_EXACT:
        u, s, v = torch.linalg.svd(M, full_matrices=False)
        return u[:, :rank], s[:rank], v[:rank]
    generator = torch.Generator(M.device).manual_seed(0)
    width = min(rank + oversampling, min(M.shape))
    basis = torch.randn(M.shape[1], width, generator=generator, dtype=M.dtype, device=M.device)
    for _ in range(4):
        for _ in range(iterations):
            basis = torch.linalg.qr(M.T @ torch.linalg.qr(M @ basis).Q).Q
        u, s, w = torch.linalg.svd(M @ basis, full_matrices=False)
        u, s, v = u[:, :rank], s[:rank], (w @ basis.T)[:rank]
        residual = float((M.T @ u - v.T * s).norm(dim=0).max())
        if residual <= 1e-3 * float(s[0]):
            return u, s, v
    raise RuntimeError(
        f"the leading {rank} singular values of a {M.shape[0]} x {M.shape[1]} matrix did not settle (residual "
        f"{residual / float(s[0]):.2g} of the largest): they lie too close together, choose another rank"
    )


def _scaled_factors(W: Tensor, scale: Tensor, rank: int, name: str) -> Factors:
    _check_rank(W, rank)
    if scale.shape != (W.shape[1],) or not bool(scale.isfinite().all()) or bool((scale < 0).any()):
        raise InputError(f"{name} must be {W.shape[1]} numbers of 0 or more, one an input, got {tuple(scale.shape)}")
    wide = scale.double()
    mean = float(wide.mean())
    wide = wide.clamp(min=1e-8 * mean) if mean > 0 else torch.ones_like(wide)
    u, s, v = top_svd(W.double() * wide, rank)
    root = s.sqrt()
    return Factors((u * root).to(W.dtype), (root[:, None] * v / wide).to(W.dtype))


def _check_rank(W: Tensor, rank: int) -> None:
    if W.ndim != 2:
        raise InputError(f"a weight has two axes, got the shape {tuple(W.shape)}")
    if not bool(W.isfinite().all()):
        raise InputError("the weight holds values that are not finite: there is nothing to factorise")
    if not 1 <= rank <= min(W.shape):
        raise InputError(f"a weight of {W.shape[0]} x {W.shape[1]} has no rank {rank}: give 1 to {min(W.shape)}")
