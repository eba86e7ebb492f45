"""From the outline of a study to its jobs: trials, the prepares that they need, and derivations, each under its key.

A job's key is a hash of everything that its result depends on: its code, scale, seed, arm, axes, settings, inputs and
threads. Two experiments whose prepares agree in all of that share them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from assay._errors import InputError
from assay.bench._fingerprint import fingerprints
from assay.bench._outline import MOST_SEEDS, PrepareOutline, ScaledExperiment, StudyOutline, nearest, parse_setting
from assay.bench._study import Value


@dataclass(frozen=True)
class Need:
    """A prepared folder that a job may read: whose, at which values, under which key."""

    name: str
    at: Mapping[str, Value]
    key: str


@dataclass(frozen=True)
class Job:
    """One process's work: everything that it needs to know, so that it can run on any machine.

    ``at`` are the axes that are fixed for the job, ``cells`` the arms and remaining axes that a trial walks.
    """

    key: str
    kind: str
    method: str
    folder: str
    name: str
    scale: str
    seed: int | None
    arm: str | None
    at: Mapping[str, Value]
    cells: tuple[tuple[str, Mapping[str, Value]], ...]
    settings: Mapping[str, Value]
    inputs: Mapping[str, str]
    defaults: Mapping[str, str]
    hidden: Mapping[str, str]
    walks: tuple[str, ...]
    measures: tuple[str, ...]
    curves: tuple[str, ...]
    needs: tuple[Need, ...]
    reads: tuple[str, ...]
    fingerprint: str
    threads: int
    minutes: float
    memory_gib: float
    alone: bool
    device: str | None

    @property
    def label(self) -> str:
        """The job in words: ``pretrain[alice, rate=0.01] seed 2``."""
        walked = () if self.arm is None else (self.arm,)
        values = ", ".join([*walked, *(f"{k}={v}" for k, v in self.at.items())])
        seed = "" if self.seed is None else f" seed {self.seed}"
        return f"{self.name}{f'[{values}]' if values else ''}{seed}"

    def to_json(self) -> dict[str, Any]:
        """For the process that runs it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Job:
        """The job that `to_json` wrote."""
        needs = tuple(Need(**n) for n in value["needs"])
        cells = tuple((arm, at) for arm, at in value["cells"])
        lists = {k: tuple(value[k]) for k in ("walks", "measures", "curves", "reads")}
        return cls(**{**value, **lists, "needs": needs, "cells": cells})

    def described(self) -> dict[str, Any]:
        """What the store keeps of it, for readers of the store."""
        return {
            "arm": self.arm,
            "at": dict(self.at),
            "cells": [[arm, dict(at)] for arm, at in self.cells],
            "settings": dict(self.settings),
            "inputs": dict(self.inputs),
            "needs": [need.key for need in self.needs],
        }


@dataclass
class Plan:
    """The jobs of one check, prepares before the trials that read them, seed by seed."""

    method: str
    scale: str
    experiments: dict[str, ScaledExperiment | None]
    jobs: dict[str, Job] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    overridden: tuple[str, ...] = ()

    def trials(self, experiment: str | None = None) -> list[Job]:
        """The trials, of one experiment or of all."""
        return [j for j in self.jobs.values() if j.kind == "trial" and experiment in (None, j.name)]

    def derivations(self, experiment: str) -> list[Job]:
        """The calls of an experiment's ``derive=``, one a seed."""
        name = (self.experiments[experiment] or _NOTHING).derive
        return [
            j for j in self.jobs.values() if j.kind == "derive" and j.name == name and j.settings["of"] == experiment
        ]


class _Nothing:
    derive = None


_NOTHING = _Nothing()


def make_plan(
    study: StudyOutline,
    method: str,
    scale: str,
    *,
    seeds: int | None = None,
    only: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    digest: Callable[[str], str] = lambda name: "",
) -> Plan:
    """All jobs of a check.

    Parameters
    ----------
    study, method, scale
        What is checked.
    seeds, only, overrides, inputs
        As for `assay.bench.check`.
    digest
        ``name or path of an input -> what identifies its content``.

    Raises
    ------
    InputError
        For an unknown experiment, setting or input, with the nearest name.
    """
    if seeds is not None and seeds < 1:
        raise InputError(f"a check needs at least one seed, got {seeds}: leave --seeds out for the study's own number")
    if seeds is not None and seeds > MOST_SEEDS:
        raise InputError(f"a check has at most {MOST_SEEDS} seeds, got {seeds}: fewer say as much")
    for name in only:
        if name not in study.experiments:
            known = ", ".join(study.experiments) or "none"
            raise InputError(f"{method} has no experiment {name!r}{nearest(name, study.experiments)} (it has {known})")
    wanted = [e for e in study.experiments.values() if not only or e.name in only]
    settings = {n for e in wanted for n in e.settings} | {n for p in study.prepares.values() for n in p.settings}
    replaceable = {n for e in wanted for n in e.inputs}
    for name in overrides or {}:
        if name not in settings:
            if name in replaceable:
                raise InputError(f"{name!r} is an input of {method}, not a setting: write --input {name}=...")
            raise InputError(f"{method} has no setting {name!r}{nearest(name, settings)} (it has {_list(settings)})")
    for name in inputs or {}:
        if name not in replaceable:
            if name in settings:
                raise InputError(f"{name!r} is a setting of {method}, not an input: write --set {name}=...")
            raise InputError(
                f"{method} has no input {name!r}{nearest(name, replaceable)} (it has {_list(replaceable)})"
            )
    inputs = {name: _absolute(value) for name, value in (inputs or {}).items()}
    scaled = {e.name: e.at_scale(scale, seeds=seeds, overrides=overrides, inputs=inputs) for e in wanted}
    changed = dict.fromkeys(text for e in scaled.values() if e is not None for text in e.overridden)
    for prepare in study.prepares.values():
        for name, value in (overrides or {}).items():
            if (
                name in prepare.settings
                and parse_setting(name, value, prepare.settings[name]) != prepare.settings[name]
            ):
                changed[f"{name}={value}"] = None
    plan = Plan(method, scale, scaled, fingerprints=fingerprints(study), overridden=tuple(changed))
    planner = _Planner(study, plan, dict(overrides or {}), digest)
    found: list[tuple[int, bool, Job]] = []
    for e in scaled.values():
        if e is not None:
            found.extend((seed, e.alone, job) for seed in e.seeds for job in planner.trials(e, seed))
    # Seed by seed, and in a seed what needs an empty machine after what does not; otherwise in the study's order.
    for _, _, job in sorted(found, key=lambda t: (t[0], t[1])):
        for key in planner.needs_first(job):
            plan.jobs.setdefault(key, planner.prepared[key])
        plan.jobs[job.key] = job
    for e in scaled.values():
        if e is not None and e.derive is not None:
            for seed in e.seeds:
                job = planner.derivation(e, seed)
                plan.jobs[job.key] = job
    return plan


class _Planner:
    def __init__(
        self, study: StudyOutline, plan: Plan, overrides: dict[str, Any], digest: Callable[[str], str]
    ) -> None:
        self.study, self.plan, self.overrides, self.digest = study, plan, overrides, digest
        self.prepared: dict[str, Job] = {}
        self._prepares: dict[str, list[Need]] = {}
        self._digests: dict[str, str] = {}

    def trials(self, e: ScaledExperiment, seed: int) -> Iterable[Job]:
        """The trials of one seed: cells that differ only in the axes of ``together=`` are one trial."""
        groups: dict[str, tuple[str | None, dict[str, Value], list[tuple[str, dict[str, Value]]]]] = {}
        for arm in e.arms:
            axes = {name: values for name, values in e.axes.items() if name not in e.ignores.get(arm, ())}
            for values in product(*axes.values()):
                at = dict(zip(axes, values))
                fixed = {name: value for name, value in at.items() if name not in e.together}
                walked = {name: value for name, value in at.items() if name in e.together}
                head = None if "arm" in e.together else arm
                group = groups.setdefault(json.dumps([head, fixed]), (head, fixed, []))
                group[2].append((arm, walked))
        default = self.study.experiments[e.name]
        for head, at, cells in groups.values():
            context = {**e.settings, **e.inputs, **at}
            walks = tuple(a for a in e.together if a == "arm" or any(a in cell for _, cell in cells))
            needs: dict[str, Need] = {}
            for cell_arm, walked in cells:
                everything = {"seed": seed, "arm": cell_arm, **context, **walked}
                for name in e.needs:
                    for need in self._prepare(name, everything, e):
                        needs[need.key] = need
            input_axes = [n for n in default.inputs if n in e.axes]
            hidden = {
                n: f"is an axis that {cells[0][0]!r} ignores" for n in e.axes if n not in context and n not in walks
            }
            yield self._job(
                kind="trial",
                name=e.name,
                seed=seed,
                arm=head,
                at=at,
                cells=tuple(cells),
                settings={**e.settings, **{n: v for n, v in at.items() if n not in input_axes}},
                inputs={**e.inputs, **{n: str(v) for n, v in at.items() if n in input_axes}},
                walked_inputs={str(w[n]) for _, w in cells for n in input_axes if n in w},
                defaults=_defaults(default.inputs),
                hidden=hidden,
                walks=walks,
                measures=e.measures,
                curves=e.curves,
                needs=tuple(needs.values()),
                limits=e,
                device=e.device,
            )

    def _prepare(self, name: str, context: dict[str, Value], e: ScaledExperiment) -> list[Need]:
        """A prepare's jobs in one context of its reader: one for each combination of its own settings."""
        p = self.study.prepares[name]
        own = {n: self._own(p, n) for n in p.settings}
        # An axis that the reader's arm ignores is absent from its context, and so from the prepare's.
        per = {n: context[n] for n in p.per if n in context and n not in own}
        known = json.dumps([name, e.name, per])
        if known in self._prepares:
            return self._prepares[known]
        axes = {n: v for n, v in own.items() if isinstance(v, tuple)}
        single = {n: v for n, v in own.items() if not isinstance(v, tuple)}
        default = self.study.experiments[e.name]
        found = []
        for values in product(*axes.values()):
            at = dict(zip(axes, values))
            inner = {**per, **single, **at}
            needs: dict[str, Need] = {}
            for need in p.needs:
                for n in self._prepare(need, inner, e):
                    needs[n.key] = n
            input_names = [n for n in per if n in default.inputs]
            setting_names = [n for n in per if n in default.settings]
            hidden = {n: f"is not in per= of {name!r}" for n in [*default.settings, *default.inputs] if n not in inner}
            hidden |= {n: f"is not in per= of {name!r}" for n in ("seed", "arm") if n not in per}
            arm, seed = per.get("arm"), per.get("seed")
            job = self._job(
                kind="prepare",
                name=name,
                seed=None if seed is None else int(seed),
                arm=None if arm is None else str(arm),
                at={**{n: per[n] for n in [*setting_names, *input_names]}, **at},
                cells=(),
                settings={**{n: per[n] for n in setting_names}, **single, **at},
                inputs={n: str(per[n]) for n in input_names},
                walked_inputs=set(),
                defaults=_defaults(default.inputs),
                hidden=hidden,
                walks=(),
                measures=(),
                curves=(),
                needs=tuple(needs.values()),
                limits=p,
                device=e.device,
            )
            self.prepared.setdefault(job.key, job)
            found.append(Need(name, {**per, **at}, job.key))
        self._prepares[known] = found
        return found

    def _own(self, p: PrepareOutline, name: str) -> Any:
        value = p.settings[name]
        return parse_setting(name, self.overrides[name], value) if name in self.overrides else value

    def needs_first(self, job: Job) -> list[str]:
        """The keys of the prepares that a job needs, each after those that it needs itself."""
        found: dict[str, None] = {}
        for need in job.needs:
            for key in self.needs_first(self.prepared[need.key]):
                found[key] = None
            found[need.key] = None
        return list(found)

    def derivation(self, e: ScaledExperiment, seed: int) -> Job:
        """The call of ``derive=`` over all trials of a seed."""
        assert e.derive is not None
        trials = [j for j in self.plan.trials(e.name) if j.seed == seed]
        points = [dict(zip(e.axes, values)) for values in product(*e.axes.values())]
        return self._job(
            kind="derive",
            name=e.derive,
            seed=seed,
            arm=None,
            at={},
            cells=tuple((arm, at) for arm in e.arms for at in points),
            settings={"of": e.name},
            inputs={},
            walked_inputs=set(),
            defaults={},
            hidden={},
            walks=(),
            measures=e.measures,
            curves=(),
            needs=(),
            limits=PrepareOutline(e.derive, ""),
            device=None,
            reads=tuple(t.key for t in trials),
        )

    def _job(
        self,
        *,
        limits: ScaledExperiment | PrepareOutline,
        walked_inputs: set[str],
        reads: tuple[str, ...] = (),
        **given: Any,
    ) -> Job:
        fingerprint = self.plan.fingerprints[given["name"]]
        names = sorted({*given["inputs"].values(), *walked_inputs})
        identity = {
            "fingerprint": fingerprint,
            "method": self.plan.method,
            "scale": self.plan.scale,
            "threads": limits.threads,
            "digests": [self._digest(n) for n in names],
            "reads": reads,
            **{k: given[k] for k in ("kind", "name", "seed", "arm", "cells", "settings", "inputs", "device")},
        }
        text = json.dumps(identity, sort_keys=True)
        return Job(
            key=hashlib.sha256(text.encode()).hexdigest()[:32],
            method=self.plan.method,
            folder=str(self.study.folder),
            scale=self.plan.scale,
            fingerprint=fingerprint,
            threads=limits.threads,
            minutes=limits.minutes,
            memory_gib=limits.memory_gib,
            alone=limits.alone,
            reads=reads,
            **given,
        )

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = self.digest(name)
        return self._digests[name]


def _defaults(inputs: Mapping[str, Any]) -> dict[str, str]:
    """An asset that stands for each input's kind."""
    return {name: value[0] if isinstance(value, tuple) else value for name, value in inputs.items()}


def _absolute(value: Any) -> tuple[str, ...]:
    """Names as they are, paths in full: a job may run in another folder."""
    values = value.split(",") if isinstance(value, str) else [str(v) for v in value]
    return tuple(str(Path(v).expanduser().absolute()) if _is_path(v) else v for v in values)


def _is_path(value: str) -> bool:
    return value.startswith(("~", ".", os.sep)) or (value != "" and Path(value).exists())


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
