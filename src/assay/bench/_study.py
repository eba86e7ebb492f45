"""How a study is written: `experiment` and `prepare`, and the `Trial` that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

Value = str | int | float | bool
SCALES = ("quick", "full", "paper")


class Skipped(Exception):
    """Raised by `Trial.skip`: the trial is left out, with its reason."""


@dataclass(frozen=True)
class Cell:
    """One arm at one value of each axis, inside a trial that walks several (``together=``).

    ``cell.arm``, ``cell["delta"]``. An axis that the arm ignores is absent.
    """

    arm: str
    at: tuple[tuple[str, Value], ...] = ()

    def __getitem__(self, axis: str) -> Value:
        for name, value in self.at:
            if name == axis:
                return value
        raise KeyError(f"this cell has no axis {axis!r}; it has {', '.join(n for n, _ in self.at) or 'none'}")

    def get(self, axis: str, default: Any = None) -> Any:
        """The value of an axis, or the default where the arm ignores it."""
        return dict(self.at).get(axis, default)


@dataclass(frozen=True)
class Prepared:
    """What a `prepare` left: its folder, and the mapping that it returned. ``prepared / "file"`` is a path in the folder."""

    folder: Path
    result: dict[str, Any] = field(default_factory=dict)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def __fspath__(self) -> str:
        return str(self.folder)


class Trial:
    """One arm at one value of each axis under one seed: what an experiment, or a `prepare`, is given.

    Attributes
    ----------
    arm : str
        The arm, where the trial does not walk several (see `cells`).
    seed : int
    scale : {"quick", "full", "paper"}
    folder : Path
        For pictures and examples that the report shows; for a `prepare`, what its readers find.
    """

    arm: str
    seed: int
    scale: str
    folder: Path

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, or the name of the asset that an input has here."""
        raise NotImplementedError

    def input(self, name: str) -> Any:
        """The input, opened by the loader of its kind."""
        raise NotImplementedError

    def path(self, name: str) -> Path:
        """Where the input lies on this machine."""
        raise NotImplementedError

    def at(self, **by_scale: Any) -> Any:
        """The value for this scale: ``trial.at(quick=60, full=300)``. ``paper`` falls back to ``full``."""
        raise NotImplementedError

    def prepared(self, function: Callable[..., Any], **at: Value) -> Prepared:
        """What a `prepare` named in ``needs=`` left. ``at`` chooses among the values of its own settings."""
        raise NotImplementedError

    def cells(self) -> Iterator[Cell]:
        """The cells of a trial with ``together=``; return ``{cell: {name: measure}}``."""
        raise NotImplementedError

    def log(self, step: float, /, **values: float) -> None:
        """One point of each named curve. In a trial with ``together=``, pass ``cell=`` too."""
        raise NotImplementedError

    def progress(self, items: Iterable[Any] | int) -> Any:
        """Walk a sized iterable (or ``range`` of a number) and show how far it is."""
        raise NotImplementedError

    def skip(self, reason: str) -> NoReturn:
        """Leave this trial out and say why; claims that need it are then ``open``."""
        raise Skipped(reason)


@dataclass(frozen=True)
class PrepareSpec:
    """A function that makes what several trials share."""

    function: Callable[[Trial], Any]
    name: str
    per: tuple[str, ...]
    settings: Mapping[str, Value | tuple[Value, ...]]
    needs: tuple[Callable[..., Any], ...]
    minutes: float
    memory_gib: float
    threads: int
    alone: bool

    def __call__(self, job: Trial) -> Any:
        return self.function(job)


@dataclass(frozen=True)
class ExperimentSpec:
    """A function that measures, and the plan of its trials."""

    function: Callable[[Trial], Any]
    name: str
    arms: tuple[str, ...]
    measures: tuple[str, ...]
    curves: tuple[str, ...]
    inputs: Mapping[str, str | tuple[str, ...]]
    settings: Mapping[str, Value | tuple[Value, ...]]
    ignores: Mapping[str, tuple[str, ...]]
    needs: tuple[Callable[..., Any], ...]
    together: tuple[str, ...]
    alone: bool
    threads: int
    minutes: float
    memory_gib: float
    device: str | None
    derive: Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]] | None
    derived_arms: tuple[str, ...]
    seeds: int
    quick: Mapping[str, Any] | bool
    full: Mapping[str, Any] | bool
    paper: Mapping[str, Any] | bool

    def __call__(self, trial: Trial) -> Any:
        return self.function(trial)


def prepare(
    per: Sequence[str] = (),
    *,
    settings: Mapping[str, Value | tuple[Value, ...]] | None = None,
    needs: Sequence[Callable[..., Any]] = (),
    minutes: float = 30,
    memory_gib: float = 8,
    threads: int = 1,
    alone: bool = False,
) -> Callable[[Callable[[Trial], Any]], PrepareSpec]:
    """Mark a function that makes what many trials share: a tuned rate, a fine-tuned start, a captured prefill.

    It runs once for each combination of what ``per`` names, before the trials that need it, and writes into
    ``job.folder``; a mapping that it returns is kept beside the folder and shown in the report.

    Parameters
    ----------
    per
        Everything it depends on: ``"seed"``, ``"arm"``, the names of settings and inputs of the experiment that needs
        it. The job can read these and nothing else, so that a result is never shared between trials that differ in it.
    settings
        Settings of its own. One with several values is an axis: the job runs once a value, and its reader says which
        it wants: ``trial.prepared(tuned, rate=0.01)``.
    needs
        Other prepares that it reads.
    minutes, memory_gib, threads, alone
        As for `experiment`.
    """

    def mark(function: Callable[[Trial], Any]) -> PrepareSpec:
        return PrepareSpec(
            function,
            function.__name__,
            tuple(per),
            dict(settings or {}),
            tuple(needs),
            minutes,
            memory_gib,
            threads,
            alone,
        )

    return mark


def experiment(
    *,
    arms: Sequence[str],
    measures: Sequence[str],
    curves: Sequence[str] = (),
    inputs: Mapping[str, str | tuple[str, ...]] | None = None,
    settings: Mapping[str, Value | tuple[Value, ...]] | None = None,
    ignores: Mapping[str, Sequence[str]] | None = None,
    needs: Sequence[Callable[..., Any]] = (),
    together: Sequence[str] = (),
    alone: bool = False,
    threads: int = 1,
    minutes: float = 20,
    memory_gib: float = 8,
    device: str | None = None,
    derive: Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]] | None = None,
    derived_arms: Sequence[str] = (),
    seeds: int = 5,
    quick: Mapping[str, Any] | bool = True,
    full: Mapping[str, Any] | bool = True,
    paper: Mapping[str, Any] | bool = True,
) -> Callable[[Callable[[Trial], Any]], ExperimentSpec]:
    """Mark a function that measures arms against each other.

    The arguments are read from the source without running it (so that a card is checked before anything heavy is
    imported): write them as literals, or as names of module-level literals; functions by their names.

    Parameters
    ----------
    arms
        The method and its rivals.
    measures
        The names that a trial returns, those that ``derive`` adds included. ``seconds`` and ``peak_bytes`` are there
        without being named.
    curves
        The names that `Trial.log` keeps and a claim's ``speedup`` may use.
    inputs
        ``{name: asset}``; several assets (a tuple) make an axis.
    settings
        ``{name: value}``; several values (a tuple) make an axis.
    ignores
        ``{arm: axes}`` that make no difference to an arm: it is run once and stands at all their values.
    needs
        The prepares that a trial reads.
    together
        Axes (``"arm"`` is one) that one trial walks by `Trial.cells`.
    alone
        Nothing else runs meanwhile: for timings.
    threads
        Of torch, BLAS and OpenMP, whatever the machine has: results do not depend on it.
    minutes, memory_gib
        The limits of one trial.
    device
        ``"cuda"``: where there is none, the claims are not testable here.
    derive, derived_arms
        ``{arm: measures} -> {arm: more measures}``, called once for each seed and cell, for what needs all arms at
        once; and the arms that it adds.
    seeds
        How many: the seeds are 0, 1, ...
    quick, full, paper
        What is different at a scale: ``{"seeds": 3, "arms": (...), axis: values, setting: value, input: assets}``;
        False leaves the experiment out of it.
    """

    def mark(function: Callable[[Trial], Any]) -> ExperimentSpec:
        return ExperimentSpec(
            function=function,
            name=function.__name__,
            arms=tuple(arms),
            measures=tuple(measures),
            curves=tuple(curves),
            inputs=dict(inputs or {}),
            settings=dict(settings or {}),
            ignores={arm: tuple(axes) for arm, axes in (ignores or {}).items()},
            needs=tuple(needs),
            together=tuple(together),
            alone=alone,
            threads=threads,
            minutes=minutes,
            memory_gib=memory_gib,
            device=device,
            derive=derive,
            derived_arms=tuple(derived_arms),
            seeds=seeds,
            quick=quick,
            full=full,
            paper=paper,
        )

    return mark
