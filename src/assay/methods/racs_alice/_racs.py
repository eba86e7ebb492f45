"""RACS: row and column scaled SGD, the optimizer of the structure S (x) Q with both factors diagonal."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from assay.methods.racs_alice._optimizer import (
    Fallback,
    MatrixOptimizer,
    Number,
    closed,
    norm_growth_limiter,
    opened,
    require,
    zeros,
)


def rank_one_fit(P: Float[Tensor, "m n"], n_iters: int = 5) -> tuple[Float[Tensor, " n"], Float[Tensor, " m"]]:
    """The best rank-one fit q s^T of a non-negative matrix, by a fixed-point iteration from q = 1.

    Each round sets ``s = P^T q / ||q||^2``, then ``q = P s / ||s||^2``: power iteration on P, so q s^T tends to
    sigma_1 u_1 v_1^T. Not the row and column means of P, which have another scale and are not the optimum.

    Parameters
    ----------
    P : (m, n)
        Non-negative. A zero row or column gets a zero in q or s; P = 0 gives s = q = 0.
    n_iters
        Rounds; the paper uses 5.

    Returns
    -------
    s : (n,), q : (m,)
        s has the scale of P, q is of order one.

    Raises
    ------
    ValueError
        A matrix without entries, or no round.

    Source: arXiv:2502.07752, Proposition 3 and Algorithm 1, lines 3 to 5. Here s is kept in units of P's largest entry while
    it is squared, and very small P are lifted by a power of two, so that nothing vanishes in float32 but what P lost itself.
    """
    if P.ndim != 2 or P.numel() == 0:
        raise ValueError(f"P must be a matrix with at least one row and column, got shape {tuple(P.shape)}")
    require(n_iters >= 1, "n_iters", "at least 1", n_iters)
    peak = P.amax()
    tiny = torch.full_like(peak, torch.finfo(P.dtype).tiny)  # P = 0 divides by it
    lift = torch.where(peak < 2.0**-80, 2.0**100, 1.0).to(P.dtype)
    lifted = peak * lift
    q = P.new_ones(len(P))
    for _ in range(n_iters):
        s = torch.mv(P.mT, q * lift).div_(torch.addcmul(tiny, torch.dot(q, q), lifted))
        q = torch.mv(P, s * lift).div_(torch.addcmul(tiny, torch.dot(s, s), lifted))
    return s.mul_(peak), q


class RACS(MatrixOptimizer):
    """Row and column scaled SGD: a state of m + n + 1 numbers for an m x n matrix.

    The gradient is divided by the square roots of one scale a row and one a column, fitted to the squared gradient; no
    first moment, no bias correction, and a limiter on the growth of the update's norm. lr = 0.02 is the matrix rule's
    scale (the update of an entry is about lr * alpha): give Adam's groups their own, as `build_param_groups` does.

    Parameters
    ----------
    params
        Matrices, named parameters, or the groups of `build_param_groups`.
    lr, alpha
        Step size and its constant factor. The paper: 0.02 and 0.05 (0.02 for 1.3B parameters).
    beta
        Decay of the average of both scales.
    gamma
        The update's norm grows at most by this factor a step.
    n_iters
        Rounds of the fixed-point iteration.
    eps
        Added to both scales; must be far below the squared gradients.
    weight_decay
        Decoupled: W <- (1 - lr * weight_decay) W, not scaled by alpha. Applied at every step with a gradient.
    fallback, fallback_kwargs
        What happens to tensors that are not matrices: "error", or "adam" with its ``lr`` (1e-3), ``betas``, ``eps``,
        ``weight_decay``.
    maximize
        Ascend instead.
    state_dtype
        None for float32, whatever the parameter's dtype. Arithmetic is in float32 or better in any case.
    reshape_conv
        Treat a convolution's weight as (out, rest) instead of leaving it to Adam.
    check_finite
        Raise RuntimeError on a gradient that is not finite or too large to be squared (1e19), before any weight moves;
        reads one flag back per tensor. Also for Adam's groups.

    Source: arXiv:2502.07752, Algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 0.02,
        beta: Number = 0.9,
        alpha: Number = 0.05,
        gamma: Number = 1.01,
        n_iters: int = 5,
        eps: Number = 1e-30,
        weight_decay: Number = 0.0,
        fallback: Fallback = "error",
        fallback_kwargs: Mapping[str, Any] | None = None,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        reshape_conv: bool = False,
        check_finite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta": beta,
            "alpha": alpha,
            "gamma": gamma,
            "n_iters": n_iters,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "reshape_conv": reshape_conv,
            "check_finite": check_finite,
        }
        super().__init__(params, defaults, fallback=fallback, fallback_kwargs=fallback_kwargs)

    def _check_group(self, group: dict[str, Any]) -> None:
        require(0 <= group["beta"] < 1, "beta", "in [0, 1)", group["beta"])
        require(group["alpha"] >= 0, "alpha", ">= 0", group["alpha"])
        require(group["gamma"] >= 1, "gamma", ">= 1", group["gamma"])
        require(group["n_iters"] >= 1, "n_iters", "at least 1", group["n_iters"])

    def _shapes(self, m: int, n: int, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"s": (n,), "q": (m,), "phi": ()}

    def _update(
        self,
        W: Float[Tensor, "m n"],
        G: Float[Tensor, "m n"],
        rate: float,
        group: dict[str, Any],
        state: dict[str, Any],
        index: int,
    ) -> None:
        if not state:
            m, n = G.shape
            state.update({name: zeros(shape, G, group) for name, shape in self._shapes(m, n, group).items()})
        s, q, phi = tensors = opened(state, ("s", "q", "phi"), G.dtype)
        P = torch.mul(G, G, out=self._like("squares", G))
        s_now, q_now = rank_one_fit(P, group["n_iters"])
        s.lerp_(s_now, 1 - group["beta"])
        q.lerp_(q_now, 1 - group["beta"])

        # ||Gt||^2 = q^-1' P s^-1 where Gt = diag(q)^-1/2 G diag(s)^-1/2: the limiter needs no second matrix.
        rows, columns = (q + group["eps"]).reciprocal_(), (s + group["eps"]).reciprocal_()
        norm = torch.dot(rows, torch.mv(P, columns)).sqrt_()
        # A gradient whose squares are all zero (it is, or it is below 1e-22) leaves W and phi as they are.
        dead = s_now.amax() == 0
        eta = torch.where(dead, 0.0, norm_growth_limiter(norm, phi, group["gamma"]))
        phi.copy_(torch.where(dead, phi, eta * norm))
        scaled = torch.mul(G, rows.sqrt_()[:, None], out=P)
        W.addcmul_(scaled, columns.sqrt_().mul_(eta), value=-rate * group["alpha"])
        closed(state, ("s", "q", "phi"), tensors)
