"""What a trial returns: one draw, a count, one value a case, or a number without chance in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Count:
    """k of n independent cases that are not kept one by one.

    Its sample: the seeds, and the n cases pooled over them. Not for a mean of numbers: only for yes or no.
    """

    k: int
    n: int

    def __post_init__(self) -> None:
        k, n = _whole(self.k, "k"), _whole(self.n, "n")
        if not 0 <= k <= n or n < 1:
            raise ValueError(f"Count(k, n) needs 0 <= k <= n and n >= 1, got k={k}, n={n}: count cases, not shares")
        object.__setattr__(self, "k", k)
        object.__setattr__(self, "n", n)


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """One value a test item, head, domain or clip.

    The same id is the same case in every arm and seed; without ids the position is the id.
    Its sample: the seeds, and the cases.
    """

    values: np.ndarray
    ids: tuple[str, ...] | None = None

    def __init__(self, values: Iterable[float], ids: Iterable[Any] | None = None) -> None:
        given = np.asarray(values if isinstance(values, np.ndarray | Sequence) else list(values))
        if given.dtype.kind not in "biuf":
            raise TypeError(f"Cases needs real numbers, got {given.dtype}: one number a case")
        array = given.astype(np.float64)
        if array.ndim != 1 or array.size == 0:
            raise ValueError(
                f"Cases needs a flat list with at least one value, got shape {array.shape}: one value a case"
            )
        names = None if ids is None else tuple(str(i) for i in ids)
        if names is not None and len(names) != array.size:
            raise ValueError(f"Cases got {array.size} values and {len(names)} ids: give one id a value, or none")
        if names is not None and len(set(names)) != len(names):
            raise ValueError("Cases got the same id twice: an id names one case")
        object.__setattr__(self, "values", array)
        object.__setattr__(self, "ids", names)


@dataclass(frozen=True, slots=True)
class Exact:
    """A number without chance in it: bytes, parameters, a whole benchmark solved greedily.

    It must come out the same for every seed; where it does not, the verdict is ``open`` and says so.
    """

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))


Measure = float | Count | Cases | Exact


def _whole(x: Any, name: str) -> int:
    if isinstance(x, bool) or not hasattr(x, "__int__") or not math.isfinite(x) or int(x) != x:
        raise TypeError(f"Count needs whole numbers, got {name}={x!r}: count cases, not shares")
    return int(x)


def as_measures(returned: Any, where: str) -> dict[str, Measure]:
    """Check what an experiment returned and make plain numbers floats.

    Parameters
    ----------
    returned
        ``{name: number | Count | Cases | Exact}``.
    where
        The experiment's name, for the error.
    """
    if not isinstance(returned, Mapping) or not returned:
        raise TypeError(f"{where} must return {{name: measure}} with at least one entry, got {type(returned).__name__}")
    measures: dict[str, Measure] = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise TypeError(f"{where} returned a measure named {name!r}: names are text")
        if isinstance(value, Count | Cases | Exact):
            measures[name] = value
        else:
            measures[name] = _real(value, f"{where} returned {name!r} as {type(value).__name__}")
    return measures


def _real(value: Any, what: str) -> float:
    """A number, or whatever holds a single one (a numpy scalar, a 0-d tensor), as a float."""
    plain: Any = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if not hasattr(plain, "__float__") or getattr(plain, "ndim", 0) != 0:
        raise TypeError(f"{what}: give a number, Count, Cases or Exact")
    try:
        return float(plain)
    except OverflowError:
        raise TypeError(f"{what} that no float can hold: give its logarithm") from None


def to_json(measure: Measure) -> Any:
    """The JSON form of a measure: exact for every float, with ``nan`` and ``inf`` as text."""
    if isinstance(measure, Count):
        return {"count": [measure.k, measure.n]}
    if isinstance(measure, Exact):
        return {"exact": _number(measure.value)}
    if isinstance(measure, Cases):
        return {
            "cases": [_number(v) for v in measure.values.tolist()],
            "ids": None if measure.ids is None else list(measure.ids),
        }
    return _number(measure)


def from_json(value: Any) -> Measure:
    """The measure that `to_json` wrote."""
    if isinstance(value, dict):
        if "count" in value:
            return Count(*value["count"])
        if "exact" in value:
            return Exact(float(value["exact"]))
        return Cases([float(v) for v in value["cases"]], value["ids"])
    return float(value)


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
