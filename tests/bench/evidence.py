"""Evidence made up for the tests of verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from assay.bench._card import Claim
from assay.bench._language import parse_each
from assay.bench._verdict import Evidence, Observation, Verdict, judge


@dataclass
class Experiment:
    """As much of an experiment at one scale as a verdict reads."""

    arms: tuple[str, ...]
    axes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    ignores: dict[str, tuple[str, ...]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    derived_arms: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    narrowed: dict[str, tuple[Any, ...]] = field(default_factory=dict)


def claim(holds_if=(), **keys: Any) -> Claim:
    conditions = (holds_if,) if isinstance(holds_if, str) else tuple(holds_if)
    each = keys.pop("each", ())
    keys["each"] = tuple(parse_each(e) for e in ((each,) if isinstance(each, str) else each))
    given = keys.pop("given", ())
    keys["given"] = (given,) if isinstance(given, str) else tuple(given)
    return Claim("id", "It is so.", experiment="study", holds_if=conditions, **keys)


def observe(
    experiment: Experiment,
    measures: Callable[..., dict[str, Any]],
    curves: Callable[..., dict[str, Any]] = lambda arm, at, seed: {},
) -> list[Observation]:
    """Every arm at every value of the axes that it does not ignore, under every seed."""
    found = []
    for arm in experiment.arms:
        axes = {k: v for k, v in experiment.axes.items() if k not in experiment.ignores.get(arm, ())}
        for values in product(*axes.values()):
            at = dict(zip(axes, values, strict=True))
            found += [
                Observation(arm, at, seed, "done", "", measures(arm, at, seed), curves(arm, at, seed))
                for seed in experiment.seeds
            ]
    return found


def decide(
    experiment: Experiment, measures: Callable[..., dict[str, Any]], holds_if=(), curves=None, **keys: Any
) -> Verdict:
    curves = curves or (lambda arm, at, seed: {})
    return judge(claim(holds_if, **keys), Evidence(experiment, observe(experiment, measures, curves)))
