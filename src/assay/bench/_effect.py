"""One inequality in one cell: its effect under each seed, and its interval at any level.

The tree is evaluated once for all cases and once without each group of cases, as one vector: entry 0 is the number
itself, the others are what the jackknife over cases needs. What is averaged as logarithms (quotients) or as Fisher's z
(correlations) is told from the form of the tree, never from the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np

from assay import stats
from assay.bench._language import (
    CHOICE,
    OVER_AXIS,
    OVER_CASES,
    Axis,
    Binary,
    Call,
    Condition,
    LanguageError,
    Negative,
    Node,
    Number,
    Reference,
    children,
    is_measured,
    references,
    unknown,
    value_of,
    walk,
)
from assay.bench._measures import Cases, Count, Exact, Measure
from assay.bench._study import Value

Status = Literal["done", "failed", "timeout", "memory", "killed", "skipped", "missing"]
Place = Mapping[str, Value]
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Observation:
    """What one arm gave at one value of each of its axes under one seed.

    An arm that ignores an axis is there once, without that axis in ``at``.
    """

    arm: str
    at: Mapping[str, Value]
    seed: int
    status: Status
    why: str = ""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------------------- data


class Data:
    """The observations of an experiment at one scale, found by arm, place and seed."""

    def __init__(self, experiment: Any, observations: Iterable[Observation]) -> None:
        self.seeds: tuple[int, ...] = tuple(experiment.seeds)
        self.arms = (*experiment.arms, *experiment.derived_arms)
        self.ignores: Mapping[str, Sequence[str]] = experiment.ignores
        # A setting or an input with one value is an axis with one value: it can be a bar, or be named in a reference.
        single = {n: (v,) for n, v in {**experiment.inputs, **experiment.settings}.items()}
        self.axes: dict[str, tuple[Value, ...]] = {**single, **experiment.axes}
        self._found: dict[str, dict[tuple[str, ...], dict[tuple[Any, ...], Observation]]] = {}
        for o in observations:
            keys = tuple(sorted(o.at))
            by_place = self._found.setdefault(o.arm, {}).setdefault(keys, {})
            by_place[(o.seed, *(o.at[k] for k in keys))] = o

    def values(self, axis: str) -> tuple[Value, ...]:
        """The values of an axis that were run."""
        if axis not in self.axes:
            raise LanguageError(unknown("axis", axis, self.axes, "the experiment"))
        return self.axes[axis]

    def find(self, arm: str, place: Place, seed: int) -> Observation:
        """The observation of an arm, whatever axes it ignores; one with the status ``missing`` where there is none."""
        for keys, by_place in self._found.get(arm, {}).items():
            if all(k in place for k in keys):
                found = by_place.get((seed, *(place[k] for k in keys)))
                if found is not None:
                    return found
        at = {k: v for k, v in place.items() if len(self.axes[k]) > 1 and k not in self.ignores.get(arm, ())}
        if arm not in self.arms:
            return Observation(arm, at, seed, "missing", "the arm is not run at this scale")
        return Observation(arm, at, seed, "missing", "not run yet")


@dataclass
class Problems:
    """Why an inequality cannot be decided, each reason once."""

    trials: dict[tuple[Any, ...], str] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.trials or self.reasons)

    def add(self, reason: str) -> None:
        self.reasons[reason] = None

    def update(self, other: Problems) -> None:
        self.trials.update(other.trials)
        self.reasons.update(other.reasons)

    def sentences(self, most: int = 4) -> list[str]:
        """The reasons; trials of the same fate are counted, and the first is named."""
        by_fate: dict[str, list[str]] = {}
        for key, why in self.trials.items():
            by_fate.setdefault(why, []).append(str(key[-1]))
        said = [
            f"{labels[0]} {why}" if len(labels) == 1 else f"{len(labels)} trials {why} (the first: {labels[0]})"
            for why, labels in by_fate.items()
        ]
        said += list(self.reasons)
        return said[:most] + ([f"and {len(said) - most} more reasons"] if len(said) > most else [])


# ------------------------------------------------------------------------------------------------------------ estimate


@dataclass(frozen=True)
class Estimate:
    """An effect with what its interval is made of.

    Attributes
    ----------
    scale : {"linear", "log", "z"}
        On which the seeds are averaged.
    per_seed : (seed,)
        On that scale.
    cases
        The intervals over the cases, as functions of the level, in the effect's own units.
    exact
        No chance in it: the interval is the value.
    """

    scale: Literal["linear", "log", "z"]
    per_seed: np.ndarray
    cases: tuple[Callable[[float], stats.Interval], ...] = ()
    exact: bool = False

    @property
    def effect(self) -> float:
        """The average over the seeds, in its own units."""
        if self.exact:
            return self.natural(float(self.per_seed[0]))
        return self.natural(float(np.mean(self.per_seed)))

    def natural(self, value: float) -> float:
        """From the scale of averaging to the reader's."""
        if self.scale == "log":
            return math.exp(value) if value < 709 else math.inf
        return math.tanh(value) if self.scale == "z" else value

    def interval(self, level: float = 0.95) -> stats.Interval | None:
        """The interval over the seeds joined with that over the cases; None where there is neither."""
        if self.exact:
            return self.effect, self.effect
        found = [interval(level) for interval in self.cases]
        if self.per_seed.size >= 2:
            low, high = stats.mean_interval(self.per_seed, level)
            found.append((self.natural(low), self.natural(high)))
        return stats.join(*found) if found else None


@dataclass(frozen=True)
class Measured:
    """One inequality (or one report) in one cell, as far as it could be measured."""

    test: str
    cell: dict[str, Value]
    relation: str | None
    bar: float | None
    estimate: Estimate | None
    seeds: tuple[int | None, ...]
    problems: Problems
    remarks: tuple[str, ...]

    @property
    def per_seed(self) -> list[float | None]:
        """The effect under each seed of the scale, None where a trial lacks."""
        if self.estimate is None:
            return [None] * len(self.seeds)
        values = iter(self.estimate.per_seed)
        return [None if seed is None else self.estimate.natural(float(next(values))) for seed in self.seeds]

    def side(self, level: float) -> int:
        """1 where the whole interval is on the claim's side, -1 where it is on the other, else 0."""
        interval = None if self.estimate is None else self.estimate.interval(level)
        if interval is None or self.bar is None or self.relation is None:
            return 0
        low, high = interval
        if self.relation in (">", ">="):
            low, high, bar = -high, -low, -self.bar
        else:
            bar = self.bar
        strict = self.relation in ("<", ">")
        if high < bar or (high == bar and not strict):
            return 1
        return -1 if low > bar or (low == bar and strict) else 0

    @property
    def margin(self) -> float:
        """How far the bar is, in half widths of the interval; below 0 on the wrong side."""
        interval = None if self.estimate is None else self.estimate.interval(0.95)
        if self.estimate is None or interval is None or self.bar is None or self.relation is None:
            return -math.inf
        ahead = self.estimate.effect - self.bar if self.relation in (">", ">=") else self.bar - self.estimate.effect
        half = (interval[1] - interval[0]) / 2
        if half > 0 and math.isfinite(half):
            return ahead / half
        return 0.0 if not math.isfinite(half) else math.copysign(math.inf, self.side(0.95) or -1)


# ------------------------------------------------------------------------------------------------------- the form told


def turned(link: Condition) -> tuple[Node, str, Node]:
    """Effect, relation and bar of ``left relation right``: left minus right where both sides are measured."""
    left, right = link.sides
    (relation,) = link.relations
    if is_measured(left) and is_measured(right):
        return Binary("-", left, right), relation, Number(0.0)
    if is_measured(left):
        return left, relation, right
    return right, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}[relation], left


def scale_of(node: Node) -> Literal["linear", "log", "z"]:
    """On which scale an effect is averaged: quotients as logarithms, correlations as Fisher's z, the rest as it is.

    A quotient of what may be negative, as the relative gain ``(a - b) / b``, has no logarithm and is averaged as it is.
    """
    inner = node.of if isinstance(node, Negative) else node
    if isinstance(inner, Call) and inner.function in ("pearson", "spearman"):
        return "z"
    over, under = _factors(node)
    if not any(is_measured(n) for n in under) and not any(
        isinstance(n, Call) and n.function == "speedup" for n in over
    ):
        return "linear"
    return "log" if all(_unsigned(n) for n in (*over, *under)) else "linear"


def _factors(node: Node) -> tuple[list[Node], list[Node]]:
    """A product of quotients as what is above and below its line."""
    if isinstance(node, Binary) and node.operator in "*/":
        over, under = _factors(node.left)
        more_over, more_under = _factors(node.right)
        if node.operator == "/":
            more_over, more_under = more_under, more_over
        return over + more_over, under + more_under
    return [node], []


def _unsigned(node: Node) -> bool:
    if isinstance(node, Call):
        if node.function in CHOICE:
            return all(_unsigned(a) for a in node.arguments)
        return node.function in ("abs", "exp", "share", "auc", "speedup", "spread", "r2")
    if isinstance(node, Binary):
        return node.operator != "-" and _unsigned(node.left) and _unsigned(node.right)
    return not isinstance(node, Negative)


# ---------------------------------------------------------------------------------------------------------- evaluation


def measure(node: Node, bar: Node | None, relation: str | None, test: str, cell: Place, data: Data) -> Measured:
    """Measure an effect in one cell of ``each``.

    Parameters
    ----------
    node
        The effect, as `turned` gives it.
    bar, relation
        What it is held against, or None for a report.
    test
        The inequality as text.
    cell
        The axes that are fixed.
    data
        The observations.
    """
    if bar is not None and any(
        isinstance(n, Axis) and len(data.values(n.name)) > 1 and n.name not in cell for n in walk(bar)
    ):
        # the bar differs between the places that are averaged over: what is averaged is the distance from it
        node, bar = Binary("-", node, bar), Number(0.0)
    work = _Evaluation(node, cell, data)
    estimate = work.estimate()
    limit = None if bar is None else work.constant(bar)
    if limit is not None and not math.isfinite(limit):
        work.problems.add(f"the bar {bar} is not a finite number")
    return Measured(test, dict(cell), relation, limit, estimate, work.seeds_used, work.problems, tuple(work.remarks))


class _Evaluation:
    """Evaluates one tree in one cell over all seeds and over the places that the tree leaves open."""

    def __init__(self, node: Node, cell: Place, data: Data) -> None:
        self.data = data
        self.cell = dict(cell)
        for axis, values in data.axes.items():
            if len(values) == 1:
                self.cell.setdefault(axis, values[0])
        self.problems = Problems()
        self.remarks: dict[str, None] = {}
        self.groups: dict[tuple[int, str], np.ndarray] | None = None  # None: only the number itself
        self.count = 0  # of groups of cases
        self.made_up: dict[Node, int] = {}  # leaf -> which way its made-up cases count
        self.shift: dict[Reference, float] = {}
        self.kept: dict[tuple[int, str], np.ndarray] = {}
        self.places = self._open_places(node)
        self.needed = self._needed(node)
        complete = [s for s in data.seeds if self._complete(s)]
        self.seeds = tuple(complete)
        self.seeds_used = tuple(s if s in complete else None for s in data.seeds)
        self.node = self._chosen(node) if complete else node

    # -- which observations ----------------------------------------------------------------------------------------

    def _open_axes(self, node: Node, walked: frozenset[str] = frozenset()) -> set[str]:
        """The axes that the tree leaves open: not fixed by the cell, by a reference, or walked by a function."""
        if isinstance(node, Reference):
            named = {axis for axis, _ in node.at}
            by_all = [a for a in self.data.axes if all(a in self.data.ignores.get(arm, ()) for arm in node.arms)]
            return set(self.data.axes) - set(self.cell) - named - walked - set(by_all)
        if isinstance(node, Axis):
            self.data.values(node.name)
            return {node.name} - set(self.cell) - walked
        if isinstance(node, Call) and node.function in OVER_AXIS:
            assert isinstance(node.arguments[1], Axis)
            return self._open_axes(node.arguments[0], walked | {node.arguments[1].name})
        return set().union(*(self._open_axes(child, walked) for child in children(node)))

    def _open_places(self, node: Node) -> list[dict[str, Value]]:
        axes = [a for a in self.data.axes if a in self._open_axes(node)]
        return [
            {**self.cell, **dict(zip(axes, values, strict=True))}
            for values in product(*(self.data.axes[a] for a in axes))
        ]

    def _where(self, reference: Reference, place: Place) -> list[dict[str, Value]]:
        """The places of a reference: one, or several for ``axis=a|b``; none where a value is not run."""
        axes: list[str] = []
        values: list[list[Value]] = []
        for axis, texts in reference.at:
            known = self.data.values(axis)
            found = [(text, value_of(text, known)) for text in texts]
            for text, value in found:
                if value is None:
                    here = ", ".join(map(str, known))
                    self.problems.add(f"{axis}={text} is not run here ({axis} is {here})")
            axes.append(axis)
            values.append([value for _, value in found if value is not None])
        return [{**place, **dict(zip(axes, chosen, strict=True))} for chosen in product(*values)]

    def _leaves(self, node: Node, place: Place) -> Iterator[tuple[Reference, bool, dict[str, Value]]]:
        """Every reference of a tree with each place at which it is read, and whether as a curve."""
        if isinstance(node, Reference):
            for at in self._where(node, place):
                yield node, False, at
        elif isinstance(node, Call) and node.function == "speedup":
            for argument in node.arguments:
                assert isinstance(argument, Reference)
                for at in self._where(argument, place):
                    yield argument, True, at
        elif isinstance(node, Call) and node.function in OVER_AXIS:
            assert isinstance(node.arguments[1], Axis)
            axis = node.arguments[1].name
            for value in self.data.values(axis):
                yield from self._leaves(node.arguments[0], {**place, axis: value})
        else:
            for child in children(node):
                yield from self._leaves(child, place)

    def _needed(self, node: Node) -> list[tuple[str, str, bool, dict[str, Value]]]:
        """What must be there: (arm, measure, as a curve, place), each once."""
        found: dict[tuple[Any, ...], tuple[str, str, bool, dict[str, Value]]] = {}
        for place in self.places:
            for reference, curve, at in self._leaves(node, place):
                for arm in reference.arms:
                    seen = {k: v for k, v in at.items() if k not in self.data.ignores.get(arm, ())}
                    found[(arm, reference.measure, curve, tuple(sorted(seen.items(), key=lambda kv: kv[0])))] = (
                        arm,
                        reference.measure,
                        curve,
                        at,
                    )
        for arm, name, curve, at in found.values():
            self._same_over_seeds(arm, name, curve, at)
        return list(found.values())

    def _complete(self, seed: int) -> bool:
        """Whether a seed has everything; what lacks is written down."""
        complete = True
        for arm, name, curve, at in self.needed:
            o = self.data.find(arm, at, seed)
            label = ", ".join([arm, *(f"{k}={v}" for k, v in o.at.items()), f"seed {seed}"])
            key = (arm, tuple(sorted((k, str(v)) for k, v in o.at.items())), seed)
            if o.status != "done":
                fate = {"missing": "missing", "timeout": "ran out of time", "memory": "ran out of memory"}.get(
                    o.status, o.status
                )
                self.problems.trials[(*key, label)] = f"{fate}{f' ({o.why})' if o.why else ''}"
                complete = False
                continue
            values = o.curves.get(name) if curve else o.measures.get(name)
            if values is None or (curve and not len(values)):  # type: ignore[arg-type]
                kind = "logged no curve" if curve else "did not return"
                self.problems.trials[(*key, name, label)] = f"{kind} {name}"
                complete = False
            elif not _finite(values):
                self.problems.trials[(*key, name, label)] = f"has a {name} that is not finite"
                complete = False
        return complete

    def _same_over_seeds(self, arm: str, name: str, curve: bool, at: Place) -> None:
        """Bare numbers must differ between seeds, exact ones must not, and kinds stay the same."""
        found = [self.data.find(arm, at, seed) for seed in self.data.seeds]
        label = f"{name}[{', '.join([arm, *(f'{k}={v}' for k, v in found[0].at.items())])}]"
        if curve:
            curves = [tuple(map(tuple, o.curves[name])) for o in found if o.status == "done" and o.curves.get(name)]
            if len(curves) > 1 and len(set(curves)) == 1:
                self.problems.add(f"{label} is the same curve under every seed: does the seed reach the experiment?")
            return
        values = [o.measures[name] for o in found if o.status == "done" and name in o.measures]
        if (
            len(
                {type(v) for v in values if not isinstance(v, int | float)}
                | {float for v in values if isinstance(v, int | float)}
            )
            > 1
        ):
            self.problems.add(f"{label} is not the same kind of measure under every seed")
        elif values and isinstance(values[0], Exact):
            if len({v.value for v in values if isinstance(v, Exact)}) > 1:
                self.problems.add(f"{label} is Exact and differs between the seeds: return a plain number")
        else:
            bare = [_bare(v) for v in values]
            if len(values) > 1 and None not in bare and len(set(bare)) == 1:
                self.problems.add(
                    f"{label} is {bare[0]:g} under every seed and not Exact: does the seed reach the experiment?"
                )

    # -- min and max: chosen once ----------------------------------------------------------------------------------

    def _chosen(self, node: Node) -> Node:
        """The tree with every min() and max() replaced by the side that it takes, by the mean over all seeds."""
        if isinstance(node, Call) and node.function in CHOICE:
            sides: list[Node] = []
            for argument in node.arguments:
                if isinstance(argument, Reference):
                    sides += [Reference(argument.measure, (arm,), argument.at) for arm in argument.arms]
                else:
                    sides.append(self._chosen(argument))
            means = [self._mean(side) for side in sides]
            if not np.any(np.isfinite(means)):
                self.problems.add(f"{node} has no finite side to choose")
                return sides[0]
            best = int(np.nanargmax(means) if node.function == "max" else np.nanargmin(means))
            chosen = sides[best]
            self.remarks[f"{node} is {chosen}"] = None
            return chosen
        if isinstance(node, Call):
            return Call(node.function, tuple(map(self._chosen, node.arguments)))
        if isinstance(node, Binary):
            return Binary(node.operator, self._chosen(node.left), self._chosen(node.right))
        if isinstance(node, Negative):
            return Negative(self._chosen(node.of))
        if isinstance(node, Condition):
            return Condition(tuple(map(self._chosen, node.sides)), node.relations)
        return node

    def _mean(self, node: Node) -> float:
        places = self._open_places(node)
        with np.errstate(all="ignore"):
            return float(np.mean([[np.mean(self._value(node, p, s)) for p in places] for s in self.seeds]))

    # -- cases -----------------------------------------------------------------------------------------------------

    def _observed(self, reference: Reference, place: Place, seed: int) -> list[Observation]:
        return [self.data.find(reference.arms[0], at, seed) for at in self._where(reference, place)]

    def _group_cases(self) -> int:
        """Number the cases over all seeds and arms, keep those that arms share, and deal them into groups."""
        used: dict[tuple[int, str], Cases] = {}
        rivals: dict[tuple[Any, ...], dict[tuple[int, str], None]] = {}
        for seed in self.seeds:
            for place in self.places:
                for reference, curve, at in self._leaves(self.node, place):
                    o = self.data.find(reference.arms[0], at, seed)
                    cases = None if curve else o.measures.get(reference.measure)
                    if isinstance(cases, Cases):
                        key = (id(o), reference.measure)
                        used[key] = cases
                        where = tuple(sorted((k, str(v)) for k, v in at.items()))
                        rivals.setdefault((seed, reference.measure, where), {})[key] = None
        numbers = _numbered(list(used.values()))
        kept = {key: np.arange(cases.values.size) for key, cases in used.items()}
        number = dict(zip(used, numbers, strict=True))
        for (seed, name, _), keys in rivals.items():
            sets = [number[key] for key in keys]
            if len(sets) < 2 or all(np.array_equal(s, sets[0]) for s in sets[1:]):
                continue
            common = sets[0]
            for s in sets[1:]:
                common = np.intersect1d(common, s)
            if common.size == 0:
                self.problems.add(f"{name} has no case in common between the arms at seed {seed}: give the same ids")
                continue
            sizes = sorted({s.size for s in sets})
            self.remarks[
                f"{name} is compared on the {common.size} cases that the arms share, of {' and '.join(map(str, sizes))}"
            ] = None
            for key in keys:
                # an arm that ignores an axis meets rivals at each of its values: what it keeps is in all of them
                kept[key] = kept[key][np.isin(number[key][kept[key]], common)]
        self.kept = kept
        alive = [number[key][kept[key]] for key in used]
        if not alive or min(a.size for a in alive) < 2:
            if alive:
                self.remarks["the interval is over the seeds alone, as a measure has a single case"] = None
            return 0
        every = np.unique(np.concatenate(alive))
        group = stats.case_groups(every.size)
        self.count = int(group.max()) + 1
        self.numbers = {key: np.searchsorted(every, a) for key, a in zip(used, alive, strict=True)}
        self.groups = {key: group[n] for key, n in self.numbers.items()}
        self.sizes = np.bincount(group, minlength=self.count)
        self.group_of = group
        return int(every.size)

    def _cases(self, o: Observation, name: str) -> np.ndarray:
        cases = o.measures[name]
        assert isinstance(cases, Cases)
        chosen = self.kept.get((id(o), name))
        return cases.values if chosen is None else cases.values[chosen]

    # -- values ----------------------------------------------------------------------------------------------------

    def _value(self, node: Node, place: Place, seed: int) -> Any:
        """The value of a tree: a number, or one for all cases and one without each group."""
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Axis):
            return _as_number(node.name, place[node.name])
        if isinstance(node, Reference):
            parts = [self._leaf(node, o) for o in self._observed(node, place, seed)]
            return sum(parts) / len(parts) if parts else math.nan
        if isinstance(node, Negative):
            return -self._value(node.of, place, seed)
        if isinstance(node, Binary):
            return _combine(node.operator, self._value(node.left, place, seed), self._value(node.right, place, seed))
        assert isinstance(node, Call)
        name, arguments = node.function, node.arguments
        if name in OVER_CASES:
            return self._over_cases(node, place, seed)
        if name in OVER_AXIS:
            return self._over_axis(node, lambda at: self._value(arguments[0], at, seed), place)
        if name == "speedup":
            return stats.speedup(*(self._curve(a, place, seed) for a in arguments))
        return _apply(name, [self._value(a, place, seed) for a in arguments])

    def _leaf(self, reference: Reference, o: Observation) -> Any:
        value = o.measures[reference.measure]
        if isinstance(value, Count):
            return value.k / value.n + self.shift.get(reference, 0.0)
        if isinstance(value, Exact):
            return value.value
        if not isinstance(value, Cases):
            return float(value)
        values = self._cases(o, reference.measure)
        if self.groups is None:
            return float(np.mean(values))
        return self._mean_without(values, self.groups[(id(o), reference.measure)], self.made_up.get(reference))

    def _mean_without(self, values: np.ndarray, groups: np.ndarray, way: int | None) -> np.ndarray:
        sums = np.bincount(groups, values, self.count)
        sizes = np.bincount(groups, minlength=self.count).astype(float)
        if self.made_up:
            # Two made-up cases: one for this side and not the other, one the other way round. Where the seeds have
            # different cases, each seed holds its share of the two, so that they are two among all cases.
            share = values.size / self.group_of.size if way is not None else 0.0
            sums = np.append(sums, [share, 0.0] if way is not None and way > 0 else [0.0, share])
            sizes = np.append(sizes, [share, share])
        return stats.weighted_mean(sums, sizes)

    def _over_axis(self, node: Call, value: Callable[[Place], Any], place: Place) -> Any:
        assert isinstance(node.arguments[1], Axis)
        axis = node.arguments[1].name
        values = self.data.values(axis)
        points = np.stack(np.broadcast_arrays(*(np.asarray(value({**place, axis: v}), dtype=float) for v in values)))
        if len(values) < 2:
            self.problems.add(f"{node} needs at least two values of {axis}, and {len(values)} is run at this scale")
            return np.full(points.shape[1:], math.nan)
        if node.function == "spread":
            return stats.spread(points)
        x = np.array([_as_number(axis, v) for v in values])
        return {"slope": stats.slope, "exponent": stats.exponent, "r2": stats.r2}[node.function](x, points)

    def _curve(self, node: Node, place: Place, seed: int) -> np.ndarray:
        assert isinstance(node, Reference)
        observed = self._observed(node, place, seed)
        if len(observed) != 1:
            raise LanguageError(f"'{node}' is several curves, expected one: name one value of each axis")
        return np.asarray(observed[0].curves[node.measure], dtype=float)

    # -- over cases ------------------------------------------------------------------------------------------------

    def _shared(self, node: Node, place: Place, seed: int) -> np.ndarray | None:
        """The cases (their numbers) that every part of a function over cases has."""
        found = []
        for reference, _, at in self._leaves(node, place):
            o = self.data.find(reference.arms[0], at, seed)
            if isinstance(o.measures[reference.measure], Cases):
                found.append(self._number(o, reference.measure))
        if not found:
            self.problems.add(f"{node} is over cases, and none of its measures is Cases: return one value a case")
            return None
        common = np.sort(found[0])
        for numbers in found[1:]:
            if not np.array_equal(common, numbers):
                common = np.intersect1d(common, numbers)
        whole = max(n.size for n in found)
        if common.size < whole:
            self.remarks[f"{node} is over the {common.size} cases that all its measures have, of {whole}"] = None
        return common

    def _number(self, o: Observation, name: str) -> np.ndarray:
        if self.groups is not None:
            return self.numbers[(id(o), name)]
        # without groups (one case, or while choosing a side) the cases are numbered as they stand
        cases = o.measures[name]
        assert isinstance(cases, Cases)
        numbers = _plain_numbers(cases, self._plain)
        kept = self.kept.get((id(o), name))
        return numbers if kept is None else numbers[kept]

    _plain: dict[str, int]

    def _over_cases(self, node: Call, place: Place, seed: int) -> Any:
        self._plain = {}
        shared = self._shared(node, place, seed)
        if shared is None or shared.size == 0:
            return math.nan
        extra = 2 if self.made_up else 0
        if self.groups is None:
            groups, count = np.zeros(shared.size, dtype=int), 0
        else:
            groups, count = self.group_of[shared], self.count + extra

        def side(part: Node) -> np.ndarray:
            value = np.asarray(self._per_case(part, place, seed, shared), dtype=float)
            return np.broadcast_to(value, shared.shape).copy()

        if node.function == "share":
            condition = node.arguments[0]
            assert isinstance(condition, Condition)
            sides = [side(s) for s in condition.sides]
            if not all(np.all(np.isfinite(s)) for s in sides):
                return math.nan
            true = np.logical_and.reduce(
                [_RELATIONS[r](a, b) for r, a, b in zip(condition.relations, sides, sides[1:])]
            ).astype(float)
            if self.groups is None:
                return float(true.mean())
            return self._mean_without(true, groups, self.made_up.get(node))
        x, y = side(node.arguments[0]), side(node.arguments[1])
        if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
            return math.nan
        if node.function == "auc":
            if not np.all((y == 0) | (y == 1)):
                self.problems.add(f"{node} needs labels of 0 and 1")
                return math.nan
            found = stats.auc_without(x, y == 1, groups, count)
        else:
            if shared.size < 4:
                self.problems.add(f"{node} rests on {shared.size} cases, expected at least four for a correlation")
            if node.function == "pearson":
                found = stats.pearson_without(x, y, groups, count)
            else:
                found = stats.spearman_without(x, y, groups, count)
        return float(found[0]) if self.groups is None else found

    def _per_case(self, node: Node, place: Place, seed: int, shared: np.ndarray) -> Any:
        """The value of a tree for each of the shared cases."""
        if isinstance(node, Reference):
            parts = []
            for o in self._observed(node, place, seed):
                if isinstance(o.measures[node.measure], Cases):
                    numbers, values = self._number(o, node.measure), self._cases(o, node.measure)
                    if not np.array_equal(numbers, shared):
                        order = np.argsort(numbers)
                        values = values[order[np.searchsorted(numbers[order], shared)]]
                    parts.append(values)
                else:
                    parts.append(self._leaf(node, o))
            return sum(parts) / len(parts) if parts else math.nan
        if isinstance(node, Negative):
            return -self._per_case(node.of, place, seed, shared)
        if isinstance(node, Binary):
            left, right = (self._per_case(n, place, seed, shared) for n in (node.left, node.right))
            return _combine(node.operator, left, right)
        if isinstance(node, Call) and node.function in OVER_AXIS:
            return self._over_axis(node, lambda at: self._per_case(node.arguments[0], at, seed, shared), place)
        if isinstance(node, Call):
            return _apply(node.function, [self._per_case(a, place, seed, shared) for a in node.arguments])
        return self._value(node, place, seed)

    # -- the estimate ----------------------------------------------------------------------------------------------

    def constant(self, node: Node) -> float:
        """The value of a side without measures."""
        with np.errstate(all="ignore"):
            return float(self._value(node, self.cell, 0))

    def estimate(self) -> Estimate | None:
        """The effect with its intervals, or None where it is not there."""
        if not self.seeds or not self.places or self._gone():
            return None
        cases = self._group_cases()
        if any("no case in common" in reason for reason in self.problems.reasons):
            return None
        kinds = self._kinds()
        if kinds == {Exact}:
            values = self._grid(lambda v: v)[:, :, 0].mean(axis=1)
            if not np.all(np.isfinite(values)):
                self.problems.add(f"{self.node} is not a finite number")
                return None
            return Estimate("linear", values, exact=True)
        scale = scale_of(self.node)
        smallest = cases if cases else 2

        def onto(values: np.ndarray) -> np.ndarray:
            if scale == "log":
                return np.log(np.where(values > 0, values, np.nan))
            return stats.fisher_z(values, max(smallest, 2)) if scale == "z" else values

        grid = self._grid(onto)
        per_seed = grid.mean(axis=1)
        if not np.all(np.isfinite(per_seed[:, 0])):
            self.problems.add(self._undefined(scale))
            return None
        own = Estimate(scale, per_seed[:, 0])
        intervals: list[Callable[[float], stats.Interval]] = []
        if self.count:
            intervals += self._over_all_cases(own, per_seed, scale, onto, cases)
        elif Count in kinds:
            intervals += self._over_counts(own, scale)
        return Estimate(scale, per_seed[:, 0], tuple(intervals))

    def _gone(self) -> bool:
        return any(not self._where(r, p) for p in self.places for r in references(self.node))

    def _kinds(self) -> set[type]:
        kinds: set[type] = set()
        for place in self.places:
            for reference, curve, at in self._leaves(self.node, place):
                value = self.data.find(reference.arms[0], at, self.seeds[0]).measures.get(reference.measure)
                kinds.add(tuple if curve else type(value) if isinstance(value, Count | Cases | Exact) else float)
        return kinds

    def _grid(self, onto: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(seed, place, 1 + groups), on the scale of averaging."""
        with np.errstate(all="ignore"):
            values = [
                [np.atleast_1d(self._value(self.node, p, s)).astype(float) for p in self.places] for s in self.seeds
            ]
            width = max(v.size for row in values for v in row)
            return onto(np.array([[np.broadcast_to(v, width) for v in row] for row in values]))

    def _undefined(self, scale: str) -> str:
        if scale == "log":
            return f"{self.node} has no logarithm under every seed: write a - c * b <= 0 where a measure may be 0"
        if any(isinstance(n, Call) and n.function in ("pearson", "spearman", "r2") for n in walk(self.node)):
            return f"{self.node} is not defined under every seed: one of its sides is constant"
        return f"{self.node} is not a finite number under every seed"

    def _over_all_cases(
        self,
        own: Estimate,
        per_seed: np.ndarray,
        scale: str,
        onto: Callable[[np.ndarray], np.ndarray],
        cases: int,
    ) -> list[Callable[[float], stats.Interval]]:
        """The interval over the cases: Clopper-Pearson for a share, else t over jackknife values."""
        linear = self._linear()
        shares = linear is not None and all(self._is_share(leaf) for leaf in linear[0])
        if linear is not None and shares and len(linear[0]) == 1:
            ((factor),), offset = linear[0].values(), linear[1]
            share = float(np.clip((own.effect - offset) / factor, 0, 1)) if factor else 0.0
            n = self._distinct(*linear[0])
            return [lambda level: _affine(stats.clopper_pearson(share * n, n, level), factor, offset)]
        sizes, average = self.sizes, per_seed.mean(axis=0)
        signs = self._signs(linear) if (shares or scale == "log") else None
        if signs is not None:
            self.made_up = signs
            sizes = np.concatenate([sizes, [1, 1]])
            average = self._grid(onto).mean(axis=(0, 1))
            self.made_up = {}
        if not np.all(np.isfinite(average)):
            self.problems.add(f"{self.node} is not defined without one of its cases: it rests on too few")
            return []
        centre, error, freedom = stats.jackknife(float(average[0]), average[1:], sizes)
        if error <= 1e-14 * max(1.0, abs(centre)):
            floor = self._without_spread(own, cases)
            if floor is not None:
                return [floor]

        def over_cases(level: float) -> stats.Interval:
            low, high = stats.t_interval(centre, error, freedom, level)
            return own.natural(low), own.natural(high)

        return [over_cases]

    def _distinct(self, leaf: Node) -> int:
        """How many different cases a share rests on, over all seeds and places."""
        found = []
        for place in self.places:
            for seed in self.seeds:
                if isinstance(leaf, Reference):
                    found += [self._number(o, leaf.measure) for o in self._observed(leaf, place, seed)]
                else:
                    shared = self._shared(leaf, place, seed)
                    found += [] if shared is None else [shared]
        return int(np.unique(np.concatenate(found)).size)

    def _without_spread(self, own: Estimate, cases: int) -> Callable[[float], stats.Interval] | None:
        """A perfect ranking has no spread over the cases and is still a sample."""
        inner = self.node.of if isinstance(self.node, Negative) else self.node
        if not isinstance(inner, Call):
            return None
        if inner.function in ("pearson", "spearman") and cases >= 4 and abs(own.effect) > 1 - 7 / (cases**3 - cases):
            return lambda level: stats.correlation_interval(math.copysign(1.0, own.effect), cases, level)
        if inner.function == "auc" and inner is self.node and own.effect in (0.0, 1.0):
            classes = []
            for place in self.places:
                for seed in self.seeds:
                    shared = self._shared(inner, place, seed)
                    if shared is not None:
                        label = np.broadcast_to(self._per_case(inner.arguments[1], place, seed, shared), shared.shape)
                        classes.append((int(label.sum()), int(shared.size - label.sum())))
            positives, negatives = min(p for p, _ in classes), min(n for _, n in classes)

            def perfect(level: float) -> stats.Interval:
                low, high = stats.perfect_auc_interval(positives, negatives, level)
                return (low, high) if own.effect == 1.0 else (1 - high, 1 - low)

            return perfect
        return None

    def _is_share(self, leaf: Node) -> bool:
        """Whether a leaf is a share of cases: share(...), or Cases of 0 and 1 everywhere."""
        if isinstance(leaf, Call):
            return leaf.function == "share"
        assert isinstance(leaf, Reference)
        for seed in self.seeds:
            for place in self.places:
                for o in self._observed(leaf, place, seed):
                    value = o.measures[leaf.measure]
                    if not isinstance(value, Cases) or not np.all((value.values == 0) | (value.values == 1)):
                        return False
        return True

    def _linear(self) -> tuple[dict[Node, float], float] | None:
        """The tree as a weighted sum of references and shares, ``({leaf: factor}, offset)``; None where it is not one."""
        found: dict[Node, float] | None = None
        offsets = []
        for place in self.places:
            parts = _linear_parts(self.node, self._is_constant, lambda n, at=place: self._value(n, at, self.seeds[0]))  # type: ignore[misc]
            if parts is None or (found is not None and parts[0] != found):
                return None
            found = parts[0]
            offsets.append(parts[1])
        return None if not found else (found, float(np.mean(offsets)))

    def _is_constant(self, node: Node) -> bool:
        """Whether there is no chance in a tree: no reference, or only to what is Exact."""
        if any(isinstance(n, Call) and n.function == "speedup" for n in walk(node)):
            return False
        return all(self._holds_only(reference, Exact) for reference in references(node))

    def _holds_only(self, reference: Reference, kind: type) -> bool:
        """Whether a reference is of this kind wherever it is read."""
        places = (
            at
            for place in self.places
            for r, curve, at in self._leaves(self.node, place)
            if r == reference and not curve
        )
        return all(
            isinstance(self.data.find(reference.arms[0], at, self.seeds[0]).measures.get(reference.measure), kind)
            for at in places
        )

    def _signs(self, linear: tuple[dict[Node, float], float] | None) -> dict[Node, int] | None:
        """Which way each share pulls, in a weighted sum or a quotient of shares; None for anything else."""
        if linear is not None:
            return {leaf: 1 if factor > 0 else -1 for leaf, factor in linear[0].items()}
        signs: dict[Node, int] = {}
        for way, side in zip((1, -1), _factors(self.node)):
            for factor in side:
                if not is_measured(factor):
                    continue
                if not isinstance(factor, Reference | Call) or factor in signs or not _leaf_like(factor):
                    return None
                if not self._is_share(factor):
                    return None
                signs[factor] = way
        return signs or None

    # -- counts ----------------------------------------------------------------------------------------------------

    def _over_counts(self, own: Estimate, scale: str) -> list[Callable[[float], stats.Interval]]:
        """Clopper-Pearson over the pooled cases of one count; for several counts the seeds alone.

        Counts that are the same under every seed leave no spread over the seeds. Then each count's own interval stands
        in, at its worst corner, so that perfect agreement is not taken for certainty.
        """
        linear = self._linear()
        leaves = [leaf for leaf in references(self.node) if self._holds_only(leaf, Count)]
        if linear is not None and len(linear[0]) == 1 and leaves == list(linear[0]):
            factor, offset = linear[0][leaves[0]], linear[1]
            share, n = self._pooled(leaves[0])
            return [lambda level: _affine(stats.clopper_pearson(share * n, n, level), factor, offset)]
        if np.ptp(own.per_seed) > 0 or len(leaves) > 6:
            return []
        pooled = {leaf: self._pooled(leaf) for leaf in leaves}

        def corners(level: float) -> stats.Interval:
            ends = []
            for leaf, (share, n) in pooled.items():
                low, high = stats.clopper_pearson(share * n, n, level)
                ends.append([(leaf, low - share), (leaf, high - share)])
            found = []
            for corner in product(*ends):
                self.shift = dict(corner)
                with np.errstate(all="ignore"):
                    values = np.array([[float(self._value(self.node, p, s)) for p in self.places] for s in self.seeds])
                    found.append(own.natural(float(np.mean(np.log(values) if scale == "log" else values))))
            self.shift = {}
            if not np.all(np.isfinite(found)):
                return -math.inf, math.inf
            return min(found), max(found)

        return [corners]

    def _pooled(self, leaf: Reference) -> tuple[float, float]:
        """The average share of a count, and the cases that it rests on; an observation that stands at many places counts once."""
        weight: dict[int, float] = {}
        counts: dict[int, Count] = {}
        for seed in self.seeds:
            for place in self.places:
                observed = self._observed(leaf, place, seed)
                for o in observed:
                    count = o.measures[leaf.measure]
                    assert isinstance(count, Count)
                    counts[id(o)] = count
                    weight[id(o)] = weight.get(id(o), 0.0) + 1 / len(observed)
        weights = np.array(list(weight.values()))
        n = np.array([float(c.n) for c in counts.values()])
        shares = np.array([c.k / c.n for c in counts.values()])
        return float(np.clip(np.average(shares, weights=weights), 0, 1)), stats.effective_cases(weights, n)


_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


def _linear_parts(
    node: Node, is_constant: Callable[[Node], bool], value: Callable[[Node], Any]
) -> tuple[dict[Node, float], float] | None:
    if is_constant(node):
        return {}, float(np.ravel(value(node))[0])
    if _leaf_like(node):
        return {node: 1.0}, 0.0
    if isinstance(node, Negative):
        inner = _linear_parts(node.of, is_constant, value)
        return None if inner is None else ({leaf: -f for leaf, f in inner[0].items()}, -inner[1])
    if not isinstance(node, Binary):
        return None
    left, right = (_linear_parts(n, is_constant, value) for n in (node.left, node.right))
    if left is None or right is None:
        return None
    if node.operator in "+-":
        sign = 1.0 if node.operator == "+" else -1.0
        total = dict(left[0])
        for leaf, factor in right[0].items():
            total[leaf] = total.get(leaf, 0.0) + sign * factor
        return total, left[1] + sign * right[1]
    if node.operator == "*" and not left[0]:
        left, right = right, left
    if right[0] or (node.operator == "/" and right[1] == 0):
        return None
    by = right[1] if node.operator == "*" else 1 / right[1]
    return {leaf: f * by for leaf, f in left[0].items()}, left[1] * by


def _leaf_like(node: Node) -> bool:
    return isinstance(node, Reference) or (isinstance(node, Call) and node.function == "share")


def _affine(interval: stats.Interval, factor: float, offset: float) -> stats.Interval:
    ends = (interval[0] * factor + offset, interval[1] * factor + offset)
    return min(ends), max(ends)


def _combine(operator: str, a: Any, b: Any) -> Any:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    return a * b if operator == "*" else np.divide(a, b)


def _apply(name: str, values: list[Any]) -> Any:
    if name in CHOICE:  # of numbers without chance in them
        return (np.maximum if name == "max" else np.minimum).reduce(np.broadcast_arrays(*values))
    return {"abs": np.abs, "log": np.log, "exp": np.exp}[name](values[0])


def _as_number(axis: str, value: Value) -> float:
    if isinstance(value, bool | str):
        raise LanguageError(f"the axis {axis} has the value {value!r}, expected a number where it stands for one")
    return float(value)


def _bare(measure: Measure) -> float | None:
    """The number that a measure is, where it is a bare one: a float, or a single case."""
    if isinstance(measure, Cases):
        return float(measure.values[0]) if measure.values.size == 1 else None
    return None if isinstance(measure, Count | Exact) else float(measure)


def _finite(values: Any) -> bool:
    if isinstance(values, Count):
        return True
    if isinstance(values, Cases):
        return bool(np.all(np.isfinite(values.values)))
    if isinstance(values, Exact):
        return math.isfinite(values.value)
    return bool(np.all(np.isfinite(np.asarray(values, dtype=float))))


def _plain_numbers(cases: Cases, seen: dict[str, int]) -> np.ndarray:
    names = cases.ids if cases.ids is not None else map(str, range(cases.values.size))
    return np.array([seen.setdefault(name, len(seen)) for name in names])


def _numbered(every: list[Cases]) -> list[np.ndarray]:
    """A number for each case: the same id has the same number everywhere."""
    if all(c.ids is None for c in every):
        return [np.arange(c.values.size) for c in every]
    first = every[0].ids
    if all(c.ids == first for c in every):
        return [np.arange(c.values.size) for c in every]
    seen: dict[str, int] = {}
    return [_plain_numbers(c, seen) for c in every]
