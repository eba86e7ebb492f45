"""Alice: low-rank Eigen-Adam with tracking, switching and compensation. Alice-0: the same without tracking."""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from assay.methods.racs_alice._optimizer import (
    Fallback,
    MatrixOptimizer,
    Number,
    check_betas,
    closed,
    logger,
    norm_growth_limiter,
    opened,
    require,
    zeros,
)
from assay.methods.racs_alice._switch import (
    SWITCHES,
    Complement,
    Switch,
    draw_generator,
    exchange_columns,
    iterate_subspace,
    leading_singular_vectors,
)

Compensation = Literal["optimal", "none", "fira", "fira+"]
COMPENSATIONS = ("optimal", "none", "fira", "fira+")
BLOCK = 2**17  # entries
P_EPS = 1e-30  # far below any squared gradient


class Alice(MatrixOptimizer):
    """Adam's moments in a basis of r directions, which is tracked and switched, and the rest of the gradient scaled by column.

    The state of an m x n matrix (m <= n) is 2nr + mr + n + r^2 + 1 numbers, two products m n r a step and a cheap basis
    update every ``interval`` steps. lr = 0.02 is the matrix rule's scale: give Adam's groups their own, as
    `build_param_groups` does. The usable rate falls as the rank nears m.

    Parameters
    ----------
    params
        Matrices, named parameters, or the groups of `build_param_groups`.
    lr, alpha, alpha_c
        W <- W - lr * alpha * (low-rank update + alpha_c * compensation).
    rank, leading
        Directions of the basis, and how many leading ones a switch keeps. A rank above a matrix's smaller side is clipped.
    betas
        Decay of the first moment (and of the compensation's scale), of the second, and of the tracked matrix.
        betas[2] = 0 is Alice-0.
    interval
        Steps between basis updates.
    gamma
        The norm of the compensation grows at most by this factor a step.
    tracking
        False drops the tracked r x r matrix: Alice-0.
    switch : {"complement", "full-basis", "gaussian", "gaussian-mix", "none"}
        How the trailing columns are exchanged; see `exchange_columns`.
    compensation : {"optimal", "none", "fira", "fira+"}
        "fira" scales the residual's columns by ||omega_j|| / ||sigma_j||, "fira+" gives that the norm of the low-rank
        update, times ``alpha_c``.
    reproject
        At a basis update, turn the tracked matrix and the first moment into the new coordinates. The paper leaves them.
    eps
        Added to the root of the second moment.
    weight_decay
        Decoupled: W <- (1 - lr * weight_decay) W, not scaled by alpha. Applied at every step with a gradient.
    seed
        Of the draws; with it, the tensor's place in the optimizer and its step, a draw is always the same.
    fallback, fallback_kwargs
        What happens to tensors that are not matrices: "error", or "adam" with its ``lr`` (1e-3), ``betas``, ``eps``,
        ``weight_decay``.
    stagger
        Spread the basis updates of different tensors over the interval: same cost, no spike.
    complement : {"qr", "gaussian"}
        How vectors of the complement are drawn; "gaussian" needs no m x m matrix.
    maximize, state_dtype, reshape_conv, check_finite
        As in `RACS`.

    Source: arXiv:2502.07752, Algorithms 2, 3, 4 and 10; Theorem 5.1 for the compensation.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 0.02,
        rank: int = 128,
        leading: int = 40,
        betas: Sequence[Number] = (0.9, 0.9, 0.999),
        alpha: Number = 0.3,
        alpha_c: Number = 0.4,
        interval: int = 200,
        gamma: Number = 1.01,
        tracking: bool = True,
        switch: Switch = "complement",
        compensation: Compensation = "optimal",
        reproject: bool = False,
        eps: Number = 1e-8,
        weight_decay: Number = 0.0,
        seed: int = 0,
        fallback: Fallback = "error",
        fallback_kwargs: Mapping[str, Any] | None = None,
        stagger: bool = False,
        complement: Complement = "qr",
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        reshape_conv: bool = False,
        check_finite: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "rank": rank,
            "leading": leading,
            "betas": betas,
            "alpha": alpha,
            "alpha_c": alpha_c,
            "interval": interval,
            "gamma": gamma,
            "tracking": tracking,
            "switch": switch,
            "compensation": compensation,
            "reproject": reproject,
            "eps": eps,
            "weight_decay": weight_decay,
            "seed": seed,
            "stagger": stagger,
            "complement": complement,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "reshape_conv": reshape_conv,
            "check_finite": check_finite,
        }
        self._warned = False
        super().__init__(params, defaults, fallback=fallback, fallback_kwargs=fallback_kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_warned": self._warned}

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"], 3, "first moment, second moment, tracked matrix")
        require(group["rank"] >= 1, "rank", "at least 1", group["rank"])
        require(
            0 <= group["leading"] <= group["rank"], "leading", f"between 0 and rank ({group['rank']})", group["leading"]
        )
        require(group["alpha"] >= 0, "alpha", ">= 0", group["alpha"])
        require(group["alpha_c"] >= 0, "alpha_c", ">= 0", group["alpha_c"])
        require(group["gamma"] >= 1, "gamma", ">= 1", group["gamma"])
        require(group["interval"] >= 1, "interval", "at least 1", group["interval"])
        require(-(2**63) <= group["seed"] < 2**63, "seed", "of 64 bits", group["seed"])
        require(group["switch"] in SWITCHES, "switch", f"one of {', '.join(SWITCHES)}", repr(group["switch"]))
        require(
            group["compensation"] in COMPENSATIONS,
            "compensation",
            f"one of {', '.join(COMPENSATIONS)}",
            repr(group["compensation"]),
        )
        require(
            group["complement"] in ("qr", "gaussian"), "complement", "'qr' or 'gaussian'", repr(group["complement"])
        )

    def _shapes(self, m: int, n: int, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        r = min(group["rank"], m)
        tracked: dict[str, tuple[int, ...]] = {"Q": (r, r)} if group["tracking"] else {}
        return {"U": (m, r), "M": (r, n), "V": (r, n), "p": (n,), "phi": (), **tracked}

    def _before_step(self) -> None:
        """Which tensors are whose turn: with stagger, the i-th of N matrices is floor(i K / N) steps early."""
        self._turns: dict[int, int] = {}
        matrices = sum(len(group["params"]) for group in self.param_groups if group["rule"] == "matrix")
        index = number = 0
        for group in self.param_groups:
            for _ in group["params"]:
                if group["rule"] == "matrix":
                    self._turns[index] = number * group["interval"] // matrices if group["stagger"] else 0
                    number += 1
                index += 1
        self._updates, self._update_seconds = 0, 0.0

    def _after_step(self) -> None:
        """Basis updates are logged with their cost (`logging`, level INFO): GaLore's users take that pause for a hang."""
        if self._updates:
            logger.info("updated the basis of %d matrices in %.3f s", self._updates, self._update_seconds)

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
            # The start waits for a gradient that is not zero: there is no basis in a zero matrix.
            if not bool(G.any()):
                return
            self._start(G, group, state)
        state["step"] += 1
        names = ("U", "M", "V", "p", "phi") + (("Q",) if group["tracking"] else ())
        tensors = opened(state, names, G.dtype)
        U, M, V, p, phi = tensors[:5]
        Q = tensors[5] if group["tracking"] else None
        t = state["step"]
        if t == 1 or (t + self._turns[index]) % group["interval"] == 0:
            began = time.perf_counter()
            self._switch(U, G, Q, M, group, index, t)
            self._updates += 1
            self._update_seconds += time.perf_counter() - began

        b1, b2, b3 = group["betas"]
        m, r = U.shape
        sigma = torch.mm(U.mT, G, out=self._buffer("sigma", (r, G.shape[1]), G))
        if Q is not None:
            Q.addmm_(sigma, sigma.mT, beta=b3, alpha=1 - b3)
        M.lerp_(sigma, 1 - b1)
        squares = torch.mul(sigma, sigma, out=self._buffer("squares", (r, G.shape[1]), G))
        V.lerp_(squares, 1 - b2)
        inside = torch.mv(squares.mT, squares.new_ones(r))
        total = self._column_energy(G)
        orthonormal = group["switch"] not in ("gaussian", "gaussian-mix")
        residual = total - inside if orthonormal else self._column_energy(torch.addmm(G, U, sigma, alpha=-1))
        # A column that lies in the basis (few tokens, or one that dominates it) leaves only rounding: below this share of
        # its energy the difference means nothing, and a scale made of it would be anything up to 1e15.
        residual = torch.maximum(residual, total * (8 * torch.finfo(G.dtype).eps))
        alive = total.amax() != 0
        # After an all-zero gradient the moments decay and W stays: dividing by infinity gives that without a branch.
        root = torch.sqrt(V, out=squares).add_(torch.where(alive, group["eps"], torch.inf))
        omega = torch.div(M, root, out=root)
        p.lerp_(residual, 1 - b1)

        kind = group["compensation"]
        step = -rate * group["alpha"]
        if kind == "none":
            W.addmm_(U, omega, alpha=step)
        else:
            if kind == "optimal":
                scale = (p + P_EPS).rsqrt_().mul_((m - r) ** 0.5)
            else:
                scale = torch.where(inside > 0, omega.norm(dim=0) / inside.sqrt(), 0.0)
            # ||C||^2 = sum_j scale_j^2 residual_j: known before C is, so C is never formed.
            norm = torch.dot(scale.square(), residual).sqrt_()
            if kind == "fira+":
                target = omega.norm() if orthonormal else (U @ omega).norm()
                factor = torch.where(norm > 0, target / norm, torch.zeros_like(norm))
                limited = target
            else:
                factor = norm_growth_limiter(norm, phi, group["gamma"])
                limited = factor * norm
            phi.copy_(torch.where(alive, limited, phi))
            scale.mul_(factor * (1.0 if kind == "fira" else group["alpha_c"]))
            # U omega + (G - U sigma) diag(scale) = U (omega - sigma diag(scale)) + G diag(scale)
            W.addmm_(U, omega.addcmul_(sigma, scale, value=-1), alpha=step)
            W.addcmul_(G, scale, value=step)
        closed(state, names, tensors)

    def _column_energy(self, G: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
        """Sums of squares of the columns, by blocks of rows that fit a cache: several times faster than a norm over rows."""
        rows = len(G) if G.is_cuda else max(1, BLOCK // G.shape[1])
        ones = G.new_ones(rows)
        energy = G.new_zeros(G.shape[1])
        for block in G.split(rows):
            squares = torch.mul(block, block, out=self._like("block", block))
            energy.addmv_(squares.mT, ones[: len(block)])
        return energy

    def _start(self, G: Float[Tensor, "m n"], group: dict[str, Any], state: dict[str, Any]) -> None:
        m, n = G.shape
        if group["rank"] >= m and not self._warned:
            self._warned = True
            warnings.warn(
                f"rank {group['rank']} is not below the {m} rows of a {m} x {n} matrix: it is clipped to {m}, and nothing is "
                "left to switch or compensate (this is Eigen-Adam)",
                stacklevel=5,
            )
        shapes = self._shapes(m, n, group)
        state.update(step=0, **{name: zeros(shape, G, group) for name, shape in shapes.items()})

    def _switch(
        self,
        U: Float[Tensor, "m r"],
        G: Float[Tensor, "m n"],
        Q: Float[Tensor, "r r"] | None,
        M: Float[Tensor, "r n"],
        group: dict[str, Any],
        index: int,
        t: int,
    ) -> None:
        """A new basis in place of U; after an all-zero gradient the old one stays."""
        r = U.shape[1]
        if t == 1:
            new = leading_singular_vectors(G, r)
        else:
            new = iterate_subspace(U, G, Q, group["betas"][2])
        generator = draw_generator(group["seed"], index, t)
        new = exchange_columns(new, min(group["leading"], r), group["switch"], generator, group["complement"])
        new = torch.where(G.any(), new, U)
        if group["reproject"] and t > 1:
            R = new.mT @ U
            M.copy_(R @ M)
            if Q is not None:
                Q.copy_(R @ Q @ R.mT)
        U.copy_(new)


class AliceZero(Alice):
    """Alice without tracking: the basis comes from the gradient of the switching step alone.

    The state of an m x n matrix is 2nr + mr + n + 1 numbers. Parameters as in `Alice`; ``betas`` are (first, second).

    Source: arXiv:2502.07752, Section 5, "Alice-0".
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Number = 0.02,
        rank: int = 128,
        leading: int = 40,
        betas: Sequence[Number] = (0.9, 0.9),
        **settings: Any,
    ) -> None:
        if settings.pop("tracking", False):
            raise ValueError("AliceZero has no tracking: use Alice")
        three = (*betas, 0.0) if isinstance(betas, tuple | list) and len(betas) == 2 else betas
        super().__init__(params, lr, rank, leading, three, tracking=False, **settings)
