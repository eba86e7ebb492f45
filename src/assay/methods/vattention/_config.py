"""What a user states, and what a step returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

INDEX_NAMES = ("simhash", "oracle", "double_sparsity", "quest")


def checked_size(name: str, value: Any) -> int | float:
    """A size as a count or a share of keys; numpy's numbers become Python's.

    Raises
    ------
    ValueError
        If it is neither.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not value >= 0 or (value > 1 and not isinstance(value, Integral)):
        raise ValueError(f"{name} must be a count (int >= 0) or a share (float from 0 to 1), got {value!r}")
    return int(value) if isinstance(value, Integral) else float(value)


def check_index(index: Any) -> None:
    """Refuse what predicts no heavy keys.

    Raises
    ------
    ValueError
        If it is a name that is not known, or ``"hash"``, which needs weights.
    TypeError
        If it is an object without ``build``, ``append``, ``topk`` and ``memory_bytes``.
    """
    if index == "hash":
        raise ValueError("index='hash' needs trained weights: pass index=load_hash_weights(path)")
    if isinstance(index, str):
        if index not in INDEX_NAMES:
            raise ValueError(f"index must be a TopKIndex or one of {', '.join(INDEX_NAMES)}, got {index!r}")
        return
    if isinstance(index, type):
        raise TypeError(f"index must be a TopKIndex, got the class {index.__name__}: make one, {index.__name__}(...)")
    parts = ("build", "append", "topk", "memory_bytes")
    if not hasattr(index, "for_layer") and not all(hasattr(index, part) for part in parts):
        raise TypeError(f"index must be a TopKIndex, got {type(index).__name__}: it needs {', '.join(parts)}")


@dataclass(frozen=True)
class VAttentionConfig:
    """How vAttention reads a KV cache.

    A size given as an int is a count of keys; as a float it is the share of the keys that the query sees, rounded down.

    Parameters
    ----------
    sink, local
        The first keys and the last ones, always read. The newest key is always among them.
    heavy
        How many keys the index predicts to matter most, among the rest.
    pilot, min_pilot
        The sample from which the budget is estimated: ``pilot`` is a share of the keys that are not read for certain
        (or a count), never fewer than ``min_pilot`` of them. What counts is the number of pilot keys, not their
        share: with 40 of them the promise breaks at small deltas, with 200 it held everywhere it was measured.
    eps, delta
        The promise: a relative error above ``eps`` has probability at most ``delta``, for every head and query.
    guarantee
        What the promise is about. ``"output"``: the attention output. ``"denominator"``: the softmax denominator
        only, as in the released code; it reads less, and the output's error is *not* bounded by ``eps``.
    tail
        For ``"denominator"``: ``"two"`` counts errors of both signs, which the promise needs. ``"one"`` is the released
        code's quantile, whose violation rate is up to ``2 delta``; it needs delta < 0.5.
    index
        Who predicts the heavy keys: a name (simhash, oracle, double_sparsity, quest), a `TopKIndex`, or an object with
        ``for_layer(layer)`` that gives one, such as `load_hash_weights`.
    min_keys
        A query that sees fewer keys than this is computed densely.
    max_query
        More queries at once than this are a prefill: dense.
    fpc
        Finite-population correction of the budget. None: on for ``"output"``, off for ``"denominator"``, where the slack
        hides the pilot's error in sigma.
    reuse_pilot
        Keep the pilot as part of the sample (saves reading it twice).
    tight
        For ``"output"``: the bound of the lemma's proof. False: the paper's constant 2, about four times the samples.
    optimize_delta
        For ``"output"``: split ``delta`` between numerator and denominator by a search in place of two halves.
    budget
        A fixed number of sampled keys (int), or share of the keys not read for certain (float), in place of the
        promise: no guarantee then.
    share_group
        One union of heavy keys, and one sample, for all query heads of a key head: fewer scattered reads, promise kept.
    mode
        ``"released"``: the arithmetic of the authors' released code, a full pass, for comparison only. It knows no
        guarantee of the output, no fixed budget and no shared group.
    dense_layers
        Layers of a model that stay dense.
    seed
        Of the draws. The same seed and the same cache give the same output.
    audit
        Also compute dense attention and keep what was read: ``err`` and ``indices``. Costs a full pass.

    Raises
    ------
    ValueError
        If a value lies outside its range, or two do not go together.
    TypeError
        If the index is not one.
    """

    sink: int | float = 128
    local: int | float = 128
    heavy: int | float = 0.02
    pilot: int | float = 0.02
    min_pilot: int = 200
    eps: float = 0.1
    delta: float = 0.1
    guarantee: Literal["denominator", "output"] = "denominator"
    tail: Literal["two", "one"] = "two"
    index: Any = "simhash"
    min_keys: int = 512
    max_query: int = 64
    fpc: bool | None = None
    reuse_pilot: bool = True
    tight: bool = True
    optimize_delta: bool = False
    budget: int | float | None = None
    share_group: bool = False
    mode: Literal["exact", "released"] = "exact"
    dense_layers: tuple[int, ...] = ()
    seed: int = 0
    audit: bool = False

    def __post_init__(self) -> None:
        for name in ("eps", "delta"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < float(value) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value!r}: 0.1 is a usual choice")
            object.__setattr__(self, name, float(value))
        for name in ("sink", "local", "heavy", "pilot"):
            object.__setattr__(self, name, checked_size(name, getattr(self, name)))
        if self.budget is not None:
            object.__setattr__(self, "budget", checked_size("budget", self.budget))
            if not self.budget or (isinstance(self.budget, int) and self.budget < 2):
                raise ValueError(f"budget must be a count (int >= 2) or a share (float in (0, 1]), got {self.budget!r}")
        for name, allowed in (
            ("guarantee", ("denominator", "output")),
            ("tail", ("two", "one")),
            ("mode", ("exact", "released")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, least in (("min_pilot", 2), ("min_keys", 0), ("max_query", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 2**63:
                raise ValueError(f"{name} must be at least {least} (int), got {value!r}")
            object.__setattr__(self, name, int(value))
        check_index(self.index)
        if self.tail == "one" and self.delta >= 0.5:
            raise ValueError(
                f"tail='one' needs delta < 0.5, got {self.delta}: its quantile is not positive from there on"
            )
        if self.guarantee == "output" and self.tail == "one":
            raise ValueError("tail='one' is the released rule for the denominator: guarantee='output' needs tail='two'")
        if self.guarantee == "output" and self.delta / 2 > MAX_DELTA_OF_A_VECTOR:
            raise ValueError(
                f"guarantee='output' needs delta <= {2 * MAX_DELTA_OF_A_VECTOR}, got {self.delta}: "
                "for a vector the normal bound by its trace is safe only for z >= 1.24"
            )
        if self.mode == "released" and (self.guarantee == "output" or self.budget is not None or self.share_group):
            raise ValueError(
                "mode='released' bounds the denominator, by its own arithmetic: "
                "leave guarantee, budget and share_group at their defaults"
            )
        if isinstance(self.dense_layers, str) or not isinstance(self.dense_layers, Iterable):
            raise ValueError(f"dense_layers must be numbers of layers such as (0, 1), got {self.dense_layers!r}")
        object.__setattr__(self, "dense_layers", tuple(int(layer) for layer in self.dense_layers))

    @property
    def uses_fpc(self) -> bool:
        """Whether the finite-population correction is on."""
        return self.guarantee == "output" if self.fpc is None else self.fpc


#: z(1 - delta/2) >= 1.24, where Pr(|error| > z RMS) of any Gaussian vector is at most that of one dimension.
MAX_DELTA_OF_A_VECTOR = 0.21


@dataclass(frozen=True)
class IndexSets:
    """The key positions that one row read, each int64 and sorted.

    Attributes
    ----------
    fixed
        Read for certain: sinks, window, and the index's choice.
    pilot
        Drawn first, to estimate the budget.
    further
        Drawn after it.
    """

    fixed: Tensor
    pilot: Tensor
    further: Tensor

    @property
    def union(self) -> Tensor:
        """The distinct positions, sorted."""
        return torch.cat([self.fixed, self.pilot, self.further]).unique()


@dataclass(frozen=True)
class VAttentionOutput:
    """What a step returns. Shapes: B batch rows, H query heads, Q queries, D width of a value.

    Attributes
    ----------
    out : (B, H, Q, D), in the dtype of the query
    density : (B, H, Q)
        Distinct keys read over keys visible.
    budget : (B, H, Q)
        Size of the sample.
    n_det : (B, H, Q)
        Keys read for certain; all of them where a row was computed densely.
    err : (B, H, Q) or None
        With ``audit``: ``|out - dense| / |dense|``.
    sets : list of `IndexSets` or None
        With ``audit``: what each row read, rows in the order (b, h, t).
    path : str
        ``"kernel"`` or ``"torch"``.
    """

    out: Tensor
    density: Tensor
    budget: Tensor
    n_det: Tensor
    err: Tensor | None = None
    sets: list[IndexSets] | None = None
    path: str = "torch"

    @property
    def indices(self) -> list[Tensor] | None:
        """With ``audit``: the distinct positions that each row read, int64, sorted."""
        return None if self.sets is None else [s.union for s in self.sets]
