"""Running the jobs of a plan on an engine: what starts when, what waits for what, and what is told about it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from filelock import FileLock, Timeout

from assay.bench._home import artifacts_folder, lock_path, prepared_folder
from assay.bench._plan import Job, Plan
from assay.bench._store import Store, StoreError, row_from_json
from assay.bench._worker import is_settled, log_tail, make_row

# How often a job that another check runs is looked after, in seconds.
_LOOK_AGAIN = 0.3


@dataclass(frozen=True)
class Event:
    """Something that happened in a check.

    Attributes
    ----------
    kind : {"planned", "started", "progress", "finished", "reused", "failed", "skipped", "waiting"}
    job_kind : {"trial", "prepare", "derive", ""}
    key, label, experiment
        The job, its words, and the experiment (or prepare) that it belongs to.
    done, total
        For ``progress`` how far the job is; for all others how many trials of the check have ended, of how many.
    seconds
        How long a job took.
    why
        The sentence of a failure, a skip or a wait.
    """

    kind: str
    job_kind: str = ""
    key: str = ""
    label: str = ""
    experiment: str = ""
    done: int | None = None
    total: int | None = None
    seconds: float | None = None
    why: str = ""


OnEvent = Callable[[Event], None]


class Engine(Protocol):
    """Where jobs run: on this machine, or on a cluster."""

    cores: int
    delivers: str

    def start(self, job: Job, since: float) -> None:
        """Start a job; its messages follow."""

    def messages(self, timeout: float) -> list[dict[str, Any]]:
        """What running jobs have said; empty after ``timeout`` seconds without a word."""

    def close(self) -> None:
        """Kill what still runs and give everything back."""


@dataclass
class Outcome:
    """What became of a run: failures that are not in the store, and whether it was interrupted."""

    ran: set[str]
    blocked: dict[str, tuple[str, str]]
    interrupted: bool = False


def run_jobs(
    plan: Plan, wanted: Iterable[str], engine: Engine, store: Store, since: float, on_event: OnEvent
) -> Outcome:
    """Run the wanted jobs of a plan.

    Parameters
    ----------
    plan
        All jobs; those that are not wanted count as finished.
    wanted
        Keys, in the order in which to start them.
    engine, store
        Where they run, and where their results go.
    since
        When the check started.
    on_event
        Told what happens.

    Raises
    ------
    StoreError
        When results cannot be kept.
    ImportError, RuntimeError
        When the study cannot be imported.
    """
    return _Run(plan, wanted, engine, store, since, on_event).run()


class _Run:
    def __init__(
        self, plan: Plan, wanted: Iterable[str], engine: Engine, store: Store, since: float, on_event: OnEvent
    ) -> None:
        self.plan, self.engine, self.store, self.since, self.on_event = plan, engine, store, since, on_event
        self.pending = {key: plan.jobs[key] for key in wanted}
        self.running: dict[str, Job] = {}
        self.waiting: dict[str, float] = {}
        self.locks: dict[str, FileLock] = {}
        self.outcome = Outcome(set(), {})
        self.total = len(plan.trials())
        self.ended = self.total - sum(job.kind == "trial" for job in self.pending.values())

    def run(self) -> Outcome:
        sweep()
        try:
            while self.pending or self.running:
                self._start_what_fits()
                if not self.running and not self.waiting:
                    break
                for message in self.engine.messages(_LOOK_AGAIN if self.waiting else 5.0):
                    self._hear(message)
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        finally:
            self.engine.close()
            for key, job in self.running.items():
                remove_parts(job)
                self._unlock(key)
        return self.outcome

    def tell(self, kind: str, job: Job, **more: Any) -> None:
        more.setdefault("done", self.ended)
        more.setdefault("total", self.total)
        experiment = str(job.settings["of"]) if job.kind == "derive" else job.name
        self.on_event(Event(kind, job.kind, job.key, job.label, experiment, **more))

    def _start_what_fits(self) -> None:
        now = time.monotonic()
        for key, job in list(self.pending.items()):
            if self.waiting.get(key, 0.0) > now:
                continue
            if not self._ready(job):
                continue
            if key in self.waiting and not _is_free(key):
                self.waiting[key] = now + _LOOK_AGAIN
                continue
            if not self._fits(job):
                break  # nothing overtakes it, or it would wait for ever
            if self.engine.delivers == "pipe" and not self._take(job):
                continue
            self.waiting.pop(key, None)
            del self.pending[key]
            self.running[key] = job
            self.tell("started", job)
            self.engine.start(job, self.since)

    def _ready(self, job: Job) -> bool:
        """Whether what a job reads is there; where it never will be, the job ends here."""
        reads = job.reads if job.kind == "derive" else [need.key for need in job.needs]
        if any(key in self.pending or key in self.running for key in reads):
            return False
        for need in job.needs:
            failure = self.outcome.blocked.get(need.key)
            if failure is None and need.key in self.plan.jobs:
                row = self.store.get(need.key)
                if row is None or row.status != "done":
                    failure = ("failed", "it left no result") if row is None else (row.status, row.why)
            if failure is not None:
                status, why = blocked_by(self.plan.jobs[need.key], *failure)
                del self.pending[job.key]
                self.waiting.pop(job.key, None)
                self.outcome.blocked[job.key] = (status, why)
                self.ended += job.kind == "trial"
                self.tell("skipped" if status == "skipped" else "failed", job, why=why)
                return False
        return True

    def _fits(self, job: Job) -> bool:
        if not self.running:
            return True
        if job.alone or any(other.alone for other in self.running.values()):
            return False
        if job.device == "cuda" and any(other.device == "cuda" for other in self.running.values()):
            return False
        return job.threads + sum(other.threads for other in self.running.values()) <= self.engine.cores

    def _take(self, job: Job) -> bool:
        """For an engine whose jobs cannot lock the store themselves: lock, and look again whether the job is needed."""
        path = lock_path(job.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            self._wait(job)
            return False
        row = self.store.get(job.key)
        if row is not None and job.kind != "derive" and is_settled(job, row.status, row.finished, self.since):
            lock.release()
            del self.pending[job.key]
            self._settle(job, row.status, row.why, None)
            return False
        self.locks[job.key] = lock
        return True

    def _unlock(self, key: str) -> None:
        if key in self.locks:
            lock_path(key).unlink(missing_ok=True)
            self.locks.pop(key).release()

    def _wait(self, job: Job) -> None:
        if job.key not in self.waiting:
            self.tell("waiting", job, why="another check runs it")
        self.waiting[job.key] = time.monotonic() + _LOOK_AGAIN

    def _hear(self, message: dict[str, Any]) -> None:
        job = self.running.get(message["key"])
        if job is None:
            return
        if "progress" in message:
            done, total = message["progress"]
            self.tell("progress", job, done=done, total=total)
            return
        if "store_error" in message:
            raise StoreError(message["store_error"])
        del self.running[job.key]
        if "busy" in message:
            # It goes back to its place at the front: others are started before it only while it is locked.
            self.pending = {job.key: job, **self.pending}
            self._wait(job)
            return
        if "stored" in message:
            row = self.store.get(job.key)
            if row is not None:
                self._settle(job, row.status, row.why, None)
            return
        status, why = message["ended"], message.get("why", "")
        seconds = message.get("seconds", message.get("elapsed"))
        if "row" in message:
            row = row_from_json(message["row"])
            self.store.write(row)
            why, seconds = row.why, row.seconds
        elif status in ("timeout", "memory", "killed") and "seconds" not in message:
            # The process could not write this itself.
            self.store.write(make_row(job, status, why, log=log_tail(job.key), seconds=seconds))
            remove_parts(job)
            row = self.store.get(job.key)
            if row is not None and row.status == "done":
                status, why = "done", ""  # it was killed after it had kept its result
        self._unlock(job.key)
        self.outcome.ran.add(job.key)
        self._settle(job, status, why, seconds)

    def _settle(self, job: Job, status: str, why: str, seconds: float | None) -> None:
        self.ended += job.kind == "trial"
        if status == "done":
            kind = "finished" if job.key in self.outcome.ran else "reused"
        else:
            kind = "skipped" if status == "skipped" else "failed"
        self.tell(kind, job, why=why, seconds=seconds)


def blocked_by(prepare: Job, status: str, why: str) -> tuple[str, str]:
    """The status and the sentence of a job whose prepare did not succeed."""
    if status == "skipped":
        return status, why
    return "failed", f"what it reads, {prepare.label}, was not made: {why}"


def remove_parts(job: Job) -> None:
    """Remove the unfinished folder of a job that was killed."""
    final = prepared_folder(job.key) if job.kind == "prepare" else artifacts_folder(job.key)
    for part in final.parent.glob(f"{job.key}.part-*"):
        shutil.rmtree(part, ignore_errors=True)


def sweep() -> None:
    """Remove the unfinished folders of checks that were killed: those whose job nobody runs."""
    for root in (prepared_folder("x").parent, artifacts_folder("x").parent):
        for part in root.glob("*.part-*"):
            key = part.name.partition(".part-")[0]
            lock_path(key).parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(lock_path(key))
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            shutil.rmtree(part, ignore_errors=True)
            lock_path(key).unlink(missing_ok=True)
            lock.release()


def _is_free(key: str) -> bool:
    path = lock_path(key)
    if not path.exists():
        return True
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    lock.release()
    return True
