"""Weighing a method's claims: run what is missing of its study, and judge what the store then holds."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from assay._errors import InputError
from assay.bench._card import Card, Claim, check_card, load_card
from assay.bench._home import prepared_folder
from assay.bench._measures import to_json
from assay.bench._methods import method_folders
from assay.bench._outline import ScaledExperiment, StudyOutline, nearest, read_outline
from assay.bench._plan import Job, Plan, make_plan
from assay.bench._study import SCALES

if TYPE_CHECKING:
    from assay.bench._run import Event, OnEvent, Outcome
    from assay.bench._store import CellResult, Row, Store
    from assay.bench._verdict import Evidence, Observation, Verdict


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes
    ----------
    trials
        How many are ``done`` (in this run), ``reused`` (from the store), ``failed`` (for whatever reason), ``skipped``
        and ``missing`` (not run yet).
    verdicts
        One a claim, in the card's order.
    evidence
        What each experiment's verdicts rest on.
    overridden
        Settings and inputs off their defaults, as ``name=value``. Such a run cannot be saved.
    partial
        Experiments or seeds that were asked for in particular. Such a run cannot be saved either.
    failures
        The label and the sentence of each trial that failed.
    keys
        Of its jobs in the store.
    """

    method: str
    scale: str
    trials: Mapping[str, int]
    verdicts: tuple[Verdict, ...]
    card: Card
    evidence: Mapping[str, Evidence]
    interrupted: bool
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    data: Mapping[str, Mapping[str, str]]
    fingerprint: str
    overridden: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    failures: tuple[tuple[str, str], ...] = field(default=())
    keys: frozenset[str] = frozenset()

    @property
    def command(self) -> str:
        """The command that runs it, or goes on with it where it was interrupted."""
        parts = ["assay", "check", self.method, "--scale", self.scale, *self.partial]
        return shlex.join(parts)

    def to_json(self) -> dict[str, Any]:
        """As `assay check NAME --json` prints it, with what a result file has beside that."""
        return {
            "method": self.method,
            "scale": self.scale,
            "trials": dict(self.trials),
            "claims": [verdict.to_json() for verdict in self.verdicts],
            "interrupted": self.interrupted,
            "overridden": list(self.overridden),
            "fingerprint": self.fingerprint,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "data": {name: dict(value) for name, value in self.data.items()},
        }


def check(
    method: str,
    *,
    scale: str = "quick",
    seeds: int | None = None,
    only: Sequence[str] = (),
    set: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    engine: str = "local",
    workers: int | None = None,
    dry_run: bool = False,
    save: bool = False,
    on_event: OnEvent | None = None,
) -> CheckResult:
    """Measure a method's claims: run the trials that the store lacks, and judge.

    Parameters
    ----------
    method
        Its slug, as ``"racs-alice"``.
    scale : {"quick", "full", "paper"}
    seeds
        How many, instead of the study's own number.
    only
        Names of experiments; all, where none is named. Only their claims are judged.
    set
        ``{setting: value}`` in place of the defaults, for all experiments and prepares that have it; values as text
        (``"1000"``, several with commas) or as they are.
    inputs
        ``{input: name or path}`` in place of the defaults, several with commas.
    engine
        ``"local"``, ``"ray"`` (a Ray cluster on this machine), or the address of a cluster (``"ray://host:10001"``).
    workers
        Cores to use; by default all.
    dry_run
        Judge what is stored, and run nothing.
    save
        Write the result to results/<slug>.json.
    on_event
        Called with an `Event` whenever something happens.

    Returns
    -------
    CheckResult
        Also after Ctrl-C, with ``interrupted`` set: what finished is stored, and the same check goes on from there.

    Raises
    ------
    InputError
        For an unknown method, scale, experiment, setting or input, and for a card that does not fit its study.
    StoreError
        When the store cannot be read or written.
    ImportError, RuntimeError
        When the study, or the engine, cannot be loaded.
    """
    checked = _Check(
        method, scale, seeds=seeds, only=only, overrides=set, inputs=inputs, elsewhere=engine.startswith("ray://")
    )
    if save:
        checked.refuse_to_save_what_is_partial()
    if workers is not None and workers < 1:
        raise InputError(f"a check needs at least one worker, got {workers}: leave --workers out to use all cores")
    result = checked.run(engine, workers, on_event or _silent, dry_run=dry_run)
    if save and not dry_run and not result.interrupted:
        from assay.bench._results import save_result

        save_result(result)
    return result


def standing(method: str, scale: str = "quick") -> CheckResult:
    """How a method's claims stand by what the store holds now. Runs nothing, imports nothing heavy."""
    return _Check(method, scale).run("local", None, _silent, dry_run=True)


def _silent(event: Event) -> None:
    pass


class _Check:
    """One check: its card, its plan, and what became of it."""

    def __init__(
        self,
        method: str,
        scale: str,
        *,
        seeds: int | None = None,
        only: Sequence[str] = (),
        overrides: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        elsewhere: bool = False,
    ) -> None:
        folders = method_folders()
        if method not in folders:
            raise InputError(f"there is no method {method!r}{nearest(method, folders)} (assay list shows them all)")
        if scale not in SCALES:
            raise InputError(f"there is no scale {scale!r}{nearest(scale, SCALES)}: choose one of {', '.join(SCALES)}")
        if isinstance(only, str):
            only = (only,)
        self.method, self.scale, self.only = method, scale, tuple(only)
        self.card = load_card(folders[method])
        self.study: StudyOutline = read_outline(folders[method])
        check_card(self.card, self.study)
        self.plan: Plan = make_plan(
            self.study,
            method,
            scale,
            seeds=seeds,
            only=self.only,
            overrides=overrides,
            inputs=inputs,
            digest=self._digest,
        )
        if inputs:
            self._check_kinds(inputs)
        self.blocked: dict[str, str] = {}
        for e in self.plan.experiments.values():
            if e is not None and e.device == "cuda" and not elsewhere and not cuda_devices():
                self.blocked[e.name] = "no CUDA device"
        for key, job in list(self.plan.jobs.items()):
            name = job.settings["of"] if job.kind == "derive" else job.name
            if name in self.blocked:
                del self.plan.jobs[key]
        needed = {need for job in self.plan.trials() for need in _transitive(self.plan, job)}
        for key, job in list(self.plan.jobs.items()):
            if job.kind == "prepare" and key not in needed:
                del self.plan.jobs[key]
        self.partial: tuple[str, ...] = ()
        if seeds is not None:
            self.partial += ("--seeds", str(seeds))
        for name in self.only:
            self.partial += ("--only", name)
        for name, value in (overrides or {}).items():
            self.partial += ("--set", f"{name}={_spelled(value)}")
        for name, value in (inputs or {}).items():
            self.partial += ("--input", f"{name}={_spelled(value)}")

    def refuse_to_save_what_is_partial(self) -> None:
        """A result file holds whole runs."""
        if self.partial:
            raise InputError(
                f"a run with {' '.join(self.partial)} cannot be saved: --save keeps whole runs with the study's own settings"
            )

    def _digest(self, name: str) -> str:
        """What identifies an input's content, known without fetching it."""
        from assay.data import resolve

        return str(resolve(name).digest)

    def _check_kinds(self, inputs: Mapping[str, Any]) -> None:
        """A user's input must be of the kind of the default that it replaces."""
        from assay.data import assets, resolve

        kinds = {it.name: it.kind for it in assets()}
        pairs = {(job.inputs[n], job.defaults[n]) for job in self.plan.trials() for n in inputs if n in job.inputs}
        for given, default in sorted(pairs):
            resolve(given, kinds.get(default))

    # Running -----------------------------------------------------------------------------------------------------

    def run(self, engine: str, workers: int | None, on_event: OnEvent, *, dry_run: bool) -> CheckResult:
        from assay.bench._run import Event, Outcome, run_jobs
        from assay.bench._store import Store

        since = time.time()
        with Store() as store:
            wanted = self._wanted(store)
            trials = [job for job in self.plan.trials() if job.key not in wanted]
            total = len(self.plan.trials())
            on_event(Event("planned", done=len(trials), total=total))
            outcome = Outcome(set(), {})
            if wanted and not dry_run:
                started = _engine(engine, workers, self.plan)
                outcome = run_jobs(self.plan, wanted, started, store, since, on_event)
            return self._judged(store, outcome, dry_run=dry_run)

    def _wanted(self, store: Store) -> list[str]:
        """The keys of the jobs that must run, in order."""
        stored = store.statuses(self.method, self.scale)
        done = {key for key, (status, _) in stored.items() if status == "done"}
        trials = {job.key for job in self.plan.trials() if job.key not in done}
        wanted = set(trials)
        todo = [self.plan.jobs[key] for key in trials]
        while todo:
            for need in todo.pop().needs:
                if need.key not in wanted and not (need.key in done and prepared_folder(need.key).is_dir()):
                    wanted.add(need.key)
                    todo.append(self.plan.jobs[need.key])
        for job in self.plan.jobs.values():
            if job.kind == "derive":
                now = [key for key in job.reads if key in done]
                outdated = bool(now) and (job.key not in done or _made_from(store, job) != now)
                if outdated or any(key in trials for key in job.reads):
                    wanted.add(job.key)
        return [key for key in self.plan.jobs if key in wanted]

    # Judging -----------------------------------------------------------------------------------------------------

    def _judged(self, store: Store, outcome: Outcome, *, dry_run: bool) -> CheckResult:
        from assay.bench._verdict import judge

        rows = store.get_all(self.plan.jobs)
        counts = dict.fromkeys(("done", "reused", "failed", "skipped", "missing"), 0)
        failures: list[tuple[str, str]] = []
        for job in self.plan.jobs.values():
            status, why = self._ended(job, rows, outcome)
            if status not in ("done", "missing", "skipped") and job.kind != "prepare":
                failures.append((job.label, why))
            if job.kind == "trial":
                if status == "done":
                    counts["done" if job.key in outcome.ran else "reused"] += 1
                elif status in ("missing", "skipped"):
                    counts[status] += 1
                else:
                    counts["failed"] += 1
            elif job.kind == "derive" and status not in ("done", "missing", "skipped"):
                counts["failed"] += 1
        evidence = {e.name: self._evidence(e, rows, outcome) for e in self.plan.experiments.values() if e is not None}
        verdicts = []
        for claim in self.card.claims:
            if self.only and claim.experiment not in self.only:
                continue
            found = evidence.get(claim.experiment or "")
            if found is not None:
                named = _replaced_values(claim, self.plan.experiments[str(claim.experiment)])
                if named:
                    found = replace(found, blocked=named)
            verdicts.append(judge(claim, found))
        done = [rows[job.key] for job in self.plan.trials() if job.key in rows and rows[job.key].status == "done"]
        whole = hashlib.sha256("".join(f"{n}{f}" for n, f in sorted(self.plan.fingerprints.items())).encode())
        return CheckResult(
            method=self.method,
            scale=self.scale,
            trials=counts,
            verdicts=tuple(verdicts),
            card=self.card,
            evidence=evidence,
            interrupted=outcome.interrupted,
            versions=_joined(row.versions for row in done),
            machine=_joined(row.machine for row in done),
            data=self._data(),
            fingerprint=whole.hexdigest(),
            overridden=self.plan.overridden,
            partial=self.partial,
            failures=tuple(failures),
            keys=frozenset(self.plan.jobs),
        )

    def _ended(self, job: Job, rows: Mapping[str, Row], outcome: Outcome) -> tuple[Any, str]:
        """A job's status and sentence; one without a row is as good as what it reads."""
        from assay.bench._run import blocked_by

        if job.key in rows and rows[job.key].status == "done":
            return "done", ""
        if job.key in outcome.blocked:
            return outcome.blocked[job.key]
        if job.key in rows:
            return rows[job.key].status, rows[job.key].why
        for need in job.needs:
            status, why = self._ended(self.plan.jobs[need.key], rows, outcome)
            if status not in ("done", "missing"):
                return blocked_by(self.plan.jobs[need.key], status, why)
        return "missing", "not run yet"

    def _evidence(self, e: ScaledExperiment, rows: Mapping[str, Row], outcome: Outcome) -> Evidence:
        from assay.bench._verdict import Evidence, Observation

        if e.name in self.blocked:
            return Evidence(e, [], self.blocked[e.name])
        found: list[Observation] = []
        for job in self.plan.trials(e.name):
            assert job.seed is not None
            status, why = self._ended(job, rows, outcome)
            for arm, walked in job.cells:
                at: dict[str, Any] = {**job.at, **walked}
                if status != "done":
                    found.append(Observation(arm, at, job.seed, status, why, {}, {}))
                    continue
                cell = _cell(rows[job.key], arm, walked)
                if cell is None:
                    found.append(Observation(arm, at, job.seed, "skipped", "its trial returned nothing for it", {}, {}))
                else:
                    found.append(Observation(arm, at, job.seed, "done", "", dict(cell.measures), dict(cell.curves)))
        if e.derive is None:
            return Evidence(e, found, None)
        for job in self.plan.derivations(e.name):
            assert job.seed is not None
            status, why = self._ended(job, rows, outcome)
            if status == "done":
                e, found = _with_derived(e, found, rows[job.key].cells, job.seed)
            known = {(o.arm, _text(o.at)) for o in found if o.seed == job.seed}
            points = {_text(at): at for _, at in job.cells}
            for arm in e.derived_arms:
                for text, point in points.items():
                    if (arm, text) not in known:
                        reason = why if status != "done" else f"{e.derive} needs every arm, and gave nothing here"
                        missing: Any = "missing" if status == "done" else status
                        found.append(Observation(arm, dict(point), job.seed, missing, reason, {}, {}))
        return Evidence(e, found, None)

    def _data(self) -> dict[str, dict[str, str]]:
        """What the inputs are: digest and licence by name."""
        from assay.data import resolve

        names = dict.fromkeys(name for job in self.plan.trials() for name in _input_names(job, self.plan))
        found = {}
        for name in names:
            resolved = resolve(name)
            found[name] = {"sha256": str(resolved.digest), "kind": resolved.kind, "licence": resolved.licence}
        return found


def _engine(name: str, workers: int | None, plan: Plan) -> Any:
    if name == "local":
        from assay.bench._local import LocalEngine

        return LocalEngine(workers)
    if name == "ray" or name.startswith("ray://"):
        from assay.bench._ray import RayEngine

        return RayEngine(None if name == "ray" else name, workers)
    raise InputError(f"there is no engine {name!r}: use local, ray, or the address of a Ray cluster (ray://host:10001)")


def _made_from(store: Store, job: Job) -> list[str]:
    row = store.get(job.key)
    return [] if row is None else list(row.result.get("from", ()))


def _transitive(plan: Plan, job: Job) -> Iterable[str]:
    for need in job.needs:
        yield need.key
        yield from _transitive(plan, plan.jobs[need.key])


def _input_names(job: Job, plan: Plan) -> list[str]:
    e = plan.experiments[job.name]
    walked = [str(at[n]) for _, at in job.cells for n in at if e is not None and n in job.defaults]
    return [*job.inputs.values(), *walked]


def _cell(row: Row, arm: str, walked: Mapping[str, Any]) -> CellResult | None:
    for cell in row.cells:
        if cell.arm == arm and all(cell.at.get(k) == v for k, v in walked.items()):
            return cell
    return None


def _text(at: Mapping[str, Any]) -> str:
    return repr(sorted(at.items()))


def _with_derived(
    e: ScaledExperiment, found: list[Observation], cells: Iterable[CellResult], seed: int
) -> tuple[ScaledExperiment, list[Observation]]:
    """Add what ``derive=`` gave for one seed.

    An arm that ignores an axis stands at all its values; where what was derived for it differs between them, it is
    listed at each of them.
    """
    from assay.bench._verdict import Observation

    by_arm: dict[str, list[CellResult]] = {}
    for cell in cells:
        by_arm.setdefault(cell.arm, []).append(cell)
    for arm, derived in by_arm.items():
        if arm not in e.arms:
            found = found + [Observation(arm, dict(c.at), seed, "done", "", dict(c.measures), {}) for c in derived]
            continue
        ignores = dict(e.ignores)
        kept = []
        for o in found:
            here = [
                c for c in derived if o.arm == arm and o.seed == seed and all(c.at.get(k) == v for k, v in o.at.items())
            ]
            values = {repr({n: to_json(m) for n, m in sorted(c.measures.items())}) for c in here}
            if len(values) <= 1:
                more = dict(here[0].measures) if here else {}
                kept.append(replace(o, measures={**o.measures, **more}))
            else:
                ignores.pop(arm, None)
                kept += [replace(o, at=dict(c.at), measures={**o.measures, **c.measures}) for c in here]
        found = kept
        e = replace(e, ignores=ignores)
    return e, found


def _replaced_values(claim: Claim, e: ScaledExperiment | None) -> str:
    """The axes whose value a claim names, where the run has other values there; empty where there are none."""
    from assay.bench._language import parse_condition, parse_expression, references, value_of

    if e is None:
        return ""
    named: list[tuple[str, tuple[str, ...]]] = [(axis, values) for axis, values in claim.each if values is not None]
    trees: list[Any] = [parse_condition(text) for text in (*claim.holds_if, *claim.given)]
    if claim.report is not None:
        trees.append(parse_expression(claim.report))
    for tree in trees:
        named += [pair for reference in references(tree) for pair in reference.at]
    gone: dict[str, None] = {}
    for axis, values in named:
        if axis in e.replaced and any(value_of(v, e.axes.get(axis, ())) is None for v in values):
            gone[axis] = None
    return f"replaced: {', '.join(gone)}" if gone else ""


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One mapping over all trials; where they differ, all values."""
    found: dict[str, dict[Any, None]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, {})[value] = None
    return {
        name: next(iter(values)) if len(values) == 1 else ", ".join(str(v) for v in values if v is not None)
        for name, values in sorted(found.items())
    }


def _spelled(value: Any) -> str:
    return ",".join(str(v) for v in value) if isinstance(value, tuple | list) else str(value)


def cuda_devices() -> int:
    """How many CUDA devices the driver sees; asked of the driver itself, so that nothing heavy is imported."""
    import ctypes
    from importlib import metadata

    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
        driver = ctypes.CDLL("libcuda.so.1")
    except (metadata.PackageNotFoundError, OSError):
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
