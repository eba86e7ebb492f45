"""What the four optimizers share: two rules in one optimizer, orientation, dtypes, errors, and the norm-growth limiter."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

Fallback = Literal["error", "adam"]
Number = float | int
logger = logging.getLogger("assay.methods.racs_alice")

ADAM_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
STATE_DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # float16 ends at 6e-8: squared gradients vanish in it
WHOLE = ("rank", "leading", "interval", "n_iters", "seed")
REAL = ("beta", "alpha", "alpha_c", "gamma", "eps", "weight_decay")


def norm_growth_limiter(norm: Float[Tensor, ""], previous: Float[Tensor, ""], gamma: float) -> Float[Tensor, ""]:
    """The factor that keeps a norm from growing by more than ``gamma`` a step; it may shrink freely.

    Parameters
    ----------
    norm : ()
        The norm before limiting.
    previous : ()
        The norm *after* limiting of the step before; 0 where there was none, and then nothing is limited.
    gamma
        At least 1.

    Returns
    -------
    (), in (0, 1]: multiply the update by it. Stays on the device: no value is read back.

    Source: arXiv:2502.07752, Algorithm 1, line 7; the limiter is that of Fira (arXiv:2410.01623).
    """
    limited = gamma / torch.clamp_min(norm / previous, gamma)
    return torch.where(previous > 0, limited, torch.ones_like(norm))


class MatrixOptimizer(Optimizer):
    """A matrix rule for some parameter groups, Adam for the others.

    A group carries ``rule="matrix"`` (the default) or ``rule="adam"``. A subclass writes `_check_group`, `_shapes` (of
    its state) and `_update`, which sees one weight with at most as many rows as columns, in at least float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        fallback: str,
        fallback_kwargs: Mapping[str, Any] | None,
    ) -> None:
        if fallback not in ("error", "adam"):
            raise ValueError(
                f"fallback is 'error' or 'adam', got {fallback!r}: choose what happens to tensors that are not matrices"
            )
        unknown = set(fallback_kwargs or {}) - set(ADAM_DEFAULTS)
        if unknown:
            raise ValueError(
                f"fallback_kwargs knows {', '.join(ADAM_DEFAULTS)}, got {', '.join(sorted(unknown))}: leave it out"
            )
        self._fallback = fallback
        self._adam = {**ADAM_DEFAULTS, **(fallback_kwargs or {})}
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        super().__init__(params, {"rule": "matrix", **defaults})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fallback": self._fallback, "_adam": self._adam, "_scratch": {}}

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; with ``rule="adam"`` it is Adam's, with its own ``lr``, ``betas``, ``eps`` and ``weight_decay``.

        Raises
        ------
        ValueError
            A tensor that is not a matrix in a matrix group (unless ``fallback="adam"``), or a hyperparameter out of range.
        TypeError
            A complex parameter.
        """
        group = dict(param_group)  # torch writes into what it is given: two optimizers may share a list of groups
        group.setdefault("rule", "matrix")
        if group["rule"] not in ("matrix", "adam"):
            raise ValueError(f"a group's rule is 'matrix' or 'adam', got {group['rule']!r}: use build_param_groups")
        if group["rule"] == "adam":
            for key, value in self._adam.items():
                group.setdefault(key, value)
        super().add_param_group(group)
        group = self.param_groups.pop()  # back in only when all of it is checked
        for position, p in enumerate(group["params"]):
            if p.is_complex():
                raise TypeError(
                    f"{_label(group, position)} is complex, expected a real tensor: split it into two real ones"
                )
        if group["rule"] == "adam":
            self.param_groups.append(self._adam_group(group))
            return

        self._check_common(group)
        self._check_group(group)
        for position, p in enumerate(group["params"]):
            _refuse_flattened(p, _label(group, position))
        matrix = [p.ndim == 2 or (group["reshape_conv"] and p.ndim > 2) for p in group["params"]]
        others = [position for position, is_matrix in enumerate(matrix) if not is_matrix]
        if others and self._fallback == "error":
            named = ", ".join(_label(group, position) for position in others[:4]) + (", ..." if len(others) > 4 else "")
            raise ValueError(
                f"{type(self).__name__} takes matrices, got {len(others)} tensors that are not ({named}): pass "
                "build_param_groups(model, ...), or fallback='adam' to give them to Adam (a sharded model: see fully_shard)"
            )
        if others:
            rest = {k: v for k, v in group.items() if k not in self.defaults and k not in ("params", "param_names")}
            rest = self._adam_group({**rest, "rule": "adam", **self._adam, **_take(group, others)})
            group |= _take(group, [position for position, is_matrix in enumerate(matrix) if is_matrix])
            if group["params"]:
                self.param_groups.append(group)
            self.param_groups.append(rest)
        else:
            self.param_groups.append(group)

    def _adam_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Without the matrix rule's settings, which torch filled in."""
        keep = {"rule", "params", "param_names", "initial_lr", *ADAM_DEFAULTS}
        group = {k: v for k, v in group.items() if k in keep or k not in self.defaults}
        self._check_common(group, " of an adam group")
        check_betas(group["betas"], 2, "first moment, second moment", " of an adam group")
        return group

    def _check_common(self, group: dict[str, Any], where: str = "") -> None:
        for name in WHOLE:
            if name in group:
                require(isinstance(group[name], Integral), name + where, "a whole number", repr(group[name]))
        for name in REAL:
            if name in group:
                fine = isinstance(group[name], Real) and math.isfinite(group[name])
                require(fine, name + where, "a finite number", repr(group[name]))
        lr = group["lr"]
        require(
            isinstance(lr, Real) or (isinstance(lr, Tensor) and lr.numel() == 1), "lr" + where, "a number", repr(lr)
        )
        require(0 <= float(lr) < math.inf, "lr" + where, "finite and >= 0", lr)
        require(group["eps"] >= 0, "eps" + where, ">= 0", group["eps"])
        require(group["weight_decay"] >= 0, "weight_decay" + where, ">= 0", group["weight_decay"])
        if group["rule"] == "adam":
            return
        if group["state_dtype"] is not None and group["state_dtype"] not in STATE_DTYPES:
            raise ValueError(
                f"state_dtype is float32 (None), bfloat16 or float64, got {group['state_dtype']}: choose one whose range "
                "holds squared gradients"
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _shapes(self, m: int, n: int, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The state tensors of an m x n matrix, m <= n."""
        raise NotImplementedError

    # ------------------------------------------------------------------ step

    @torch._disable_dynamo  # as in torch's own optimizers: a compiled training step breaks its graph here
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient are left alone.

        Parameters
        ----------
        closure
            Evaluates the model anew and returns the loss, which is then returned.

        Raises
        ------
        RuntimeError
            A sparse gradient; or, with ``check_finite=True``, one that is not finite or too large to be squared. No
            weight has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_finite = group.get("check_finite", self.defaults["check_finite"])
            for position, p in enumerate(group["params"]):
                if p.grad is not None:
                    _check_gradient(p.grad, group, position, check_finite)
        self._before_step()
        index = 0
        for group in self.param_groups:
            if group["rule"] == "adam":
                self._adam_step(group)
            else:
                for position, p in enumerate(group["params"]):
                    if p.grad is not None and p.numel():
                        self._matrix_step(p, group, index + position)
            index += len(group["params"])
        self._scratch.clear()
        self._after_step()
        return loss

    def _before_step(self) -> None:
        """For what depends on all groups together."""

    def _after_step(self) -> None:
        """For what is told once a step."""

    def _matrix_step(self, p: Tensor, group: dict[str, Any], index: int) -> None:
        """Bring weight and gradient into the rule's form (two axes, rows <= columns, at least float32) and update."""
        dtype = torch.promote_types(torch.promote_types(group["state_dtype"] or torch.float32, torch.float32), p.dtype)
        whole = _whole(p)
        gradient = _whole(p.grad).reshape(len(p), -1).to(dtype)
        work = whole.reshape(len(p), -1).to(dtype)
        rate, decay = float(group["lr"]), group["weight_decay"]
        if decay:
            work.mul_(1 - rate * decay)
        rate = -rate if group["maximize"] else rate
        if len(work) > work.shape[1]:
            self._update(work.mT, gradient.mT, rate, group, self.state[p], index)
        else:
            self._update(work, gradient, rate, group, self.state[p], index)
        if whole is not p:
            p.copy_(_sharded_like(p, work.view(p.shape)))
        elif work.data_ptr() != p.data_ptr():  # a lower precision, or a convolution in channels-last order
            p.copy_(work.view(p.shape))

    def _update(
        self,
        W: Float[Tensor, "m n"],
        G: Float[Tensor, "m n"],
        rate: float,
        group: dict[str, Any],
        state: dict[str, Any],
        index: int,
    ) -> None:
        raise NotImplementedError

    def _adam_step(self, group: dict[str, Any]) -> None:
        """torch's own Adam with decoupled decay, on float32 copies where a parameter is of lower precision."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                dtype = torch.promote_types(p.dtype, torch.float32)
                self.state[p].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(p, dtype=dtype),
                    exp_avg_sq=torch.zeros_like(p, dtype=dtype),
                )
        work = [
            p if p.dtype == self.state[p]["exp_avg"].dtype else p.to(self.state[p]["exp_avg"].dtype) for p in params
        ]
        adam(
            work,
            [p.grad.to(w.dtype) for p, w in zip(params, work, strict=True)],  # type: ignore[union-attr]
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            foreach=True,
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group.get("maximize", self.defaults["maximize"]),
        )
        for p, w in zip(params, work, strict=True):
            if w is not p:
                p.copy_(w)

    # ----------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but every state tensor keeps its own dtype: float32 states of a bfloat16 model stay exact.

        Raises
        ------
        ValueError
            The state of another optimizer, or of a model of other shapes. Nothing is loaded then.
        """
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(saved, self._parameters(), strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    device = value.device if key == "step" else p.device
                    self.state[p][key] = value.detach().to(device=device, copy=True)

    def _check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that the next step would stumble over; how many groups and parameters there are torch checks."""
        who = type(self).__name__
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            needed = {"rule", *(ADAM_DEFAULTS if own["rule"] == "adam" else self.defaults)}
            if not needed <= set(saved) or saved["rule"] != own["rule"]:
                raise ValueError(
                    f"the state has a group that is not {who}'s ({own['rule']} rule): load one that {who} saved, with the "
                    "same groups"
                )
            for position, (p, i) in enumerate(zip(own["params"], saved["params"], strict=False)):
                state = state_dict["state"].get(i)
                if not state:
                    continue
                if own["rule"] == "adam":
                    shapes: dict[str, tuple[int, ...]] = {"exp_avg": tuple(p.shape), "exp_avg_sq": tuple(p.shape)}
                else:
                    m, n = sorted((len(p), p.numel() // max(1, len(p))))
                    shapes = self._shapes(m, n, saved)
                found = {k: tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor) and k != "step"}
                if found != shapes:
                    raise ValueError(
                        f"the state of {_label(own, position)} is {_listed(found)}, {who} expects {_listed(shapes)}: load "
                        f"one that {who} saved for the same model"
                    )

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _buffer(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Working memory of this shape, shared by all tensors of one step: fresh pages cost more than the arithmetic."""
        key = (name, like.dtype, like.device)
        count = shape[0] * shape[1]
        if key not in self._scratch or self._scratch[key].numel() < count:
            self._scratch[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return self._scratch[key][:count].view(shape)

    def _like(self, name: str, A: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        """Working memory of a matrix's size and layout."""
        m, n = A.shape
        return self._buffer(name, (m, n), A) if A.stride(1) == 1 else self._buffer(name, (n, m), A).mT


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items())) or "empty"


def zeros(shape: tuple[int, ...], like: Tensor, group: dict[str, Any]) -> Tensor:
    """A state tensor in the group's state dtype."""
    return torch.zeros(shape, dtype=group["state_dtype"] or torch.float32, device=like.device)


def opened(state: dict[str, Any], names: tuple[str, ...], dtype: torch.dtype) -> list[Tensor]:
    """The state in the precision of the arithmetic: the tensors themselves, or copies where they are kept lower."""
    return [state[name].to(dtype) for name in names]


def closed(state: dict[str, Any], names: tuple[str, ...], tensors: list[Tensor]) -> None:
    """Write back what `opened` had to copy."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not state[name]:
            state[name].copy_(tensor)


def check_betas(betas: Any, count: int, meaning: str, where: str = "") -> None:
    """Raise ValueError unless there are ``count`` numbers in [0, 1)."""
    fine = isinstance(betas, tuple | list) and len(betas) == count and all(isinstance(b, Real) for b in betas)
    require(fine, "betas" + where, f"{count} numbers ({meaning})", betas)
    require(all(0 <= b < 1 for b in betas), "betas" + where, "in [0, 1)", betas)


def require(fine: bool, name: str, expected: str, got: object) -> None:
    """Raise the ValueError of a hyperparameter that is out of range."""
    if not fine:
        raise ValueError(f"{name} must be {expected}, got {got}")


def _label(group: Mapping[str, Any], position: int) -> str:
    """How an error names a parameter: by its name where the group knows it, and its shape."""
    shape = tuple(group["params"][position].shape)
    names = group.get("param_names")
    return f"{names[position]} of shape {shape}" if names else f"parameter {position} of shape {shape}"


def _take(group: Mapping[str, Any], positions: list[int]) -> dict[str, Any]:
    lists = ("params", "param_names") if "param_names" in group else ("params",)
    return {key: [group[key][position] for position in positions] for key in lists}


def _refuse_flattened(p: Tensor, label: str) -> None:
    """A flattened weight has no rows and columns to work on: say so before the first step."""
    if getattr(p, "_is_flat_param", False) or type(p).__name__ == "FlatParameter":
        raise ValueError(
            f"{label} was flattened by FullyShardedDataParallel, a matrix rule needs 2-D weights: use fully_shard, which "
            "shards each parameter by itself, or DistributedDataParallel"
        )


def _whole(p: Any) -> Tensor:
    """All of a DTensor (`fully_shard`), gathered for the moment of its update; any other tensor itself."""
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def _sharded_like(p: Any, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds, laid out as the DTensor ``p``; nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim).redistribute(
        placements=p.placements
    )


def _check_gradient(gradient: Tensor, group: Mapping[str, Any], position: int, check_finite: bool) -> None:
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {_label(group, position)} is sparse, expected a dense one: build the embedding with sparse=False"
        )
    if check_finite:
        energy = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().sum()
        if not bool(torch.isfinite(_whole(energy))):
            raise RuntimeError(
                f"the gradient of {_label(group, position)} is not finite, or too large to be squared: lower the learning "
                "rate, clip, or skip the step"
            )
