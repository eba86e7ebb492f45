"""Eigen-Adam: Adam in the eigenbasis of E[G G^T] (one-sided SOAP), the optimizer of block diagonals with shared eigenvectors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from assay.methods.racs_alice._optimizer import (
    Fallback,
    MatrixOptimizer,
    Number,
    check_betas,
    closed,
    opened,
    require,
    zeros,
)


class EigenAdam(MatrixOptimizer):
    """Adam's second moment in the eigenbasis of the rows' second moment, renewed every ``interval`` steps.

    The full-rank parent of `Alice`: the state of an m x n matrix (m <= n) is 2mn + 2m^2 numbers, and two products m m n a
    step. No bias correction.

    Parameters
    ----------
    params
        Matrices, named parameters, or the groups of `build_param_groups`.
    lr
        Step size.
    betas
        Decay of the first moment, of the second, and of E[G G^T].
    interval
        Steps between eigendecompositions (always in float32 or better).
    eps
        Added to the root of the second moment.
    weight_decay, fallback, fallback_kwargs, maximize, state_dtype, reshape_conv, check_finite
        As in `RACS`.

    Source: arXiv:2502.07752, Algorithm 7.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 1e-3,
        betas: Sequence[Number] = (0.9, 0.9, 0.999),
        interval: int = 200,
        eps: Number = 1e-8,
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
            "betas": betas,
            "interval": interval,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "reshape_conv": reshape_conv,
            "check_finite": check_finite,
        }
        super().__init__(params, defaults, fallback=fallback, fallback_kwargs=fallback_kwargs)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"], 3, "first moment, second moment, E[G G^T]")
        require(group["interval"] >= 1, "interval", "at least 1", group["interval"])

    def _shapes(self, m: int, n: int, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"U": (m, m), "Q": (m, m), "M": (m, n), "V": (m, n)}

    def _update(
        self,
        W: Float[Tensor, "m n"],
        G: Float[Tensor, "m n"],
        rate: float,
        group: dict[str, Any],
        state: dict[str, Any],
        index: int,
    ) -> None:
        if "step" not in state:
            if not bool(G.any()):  # as Alice: the start waits for a gradient that is not zero
                return
            m, n = G.shape
            shapes = self._shapes(m, n, group)
            state.update(step=0, **{name: zeros(shape, G, group) for name, shape in shapes.items()})
        state["step"] += 1
        b1, b2, b3 = group["betas"]
        U, Q, M, V = tensors = opened(state, ("U", "Q", "M", "V"), G.dtype)
        M.lerp_(G, 1 - b1)
        Q.addmm_(G, G.mT, beta=b3, alpha=1 - b3)
        if state["step"] == 1 or state["step"] % group["interval"] == 0:
            U.copy_(torch.linalg.eigh(torch.nan_to_num(Q, posinf=0.0, neginf=0.0)).eigenvectors.flip(-1))
        V.lerp_((U.mT @ G).square_(), 1 - b2)
        denominator = V.sqrt().add_(torch.where(G.any(), group["eps"], torch.inf))
        W.addmm_(U, (U.mT @ M).div_(denominator), alpha=-rate)
        closed(state, ("U", "Q", "M", "V"), tensors)
