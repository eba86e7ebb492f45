"""One job in a process of its own: the trial as a study sees it, and what is recorded of it."""

from __future__ import annotations

import errno
import importlib
import json
import os
import platform
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from assay.bench._home import artifacts_folder, home, lock_path, log_path, prepared_folder
from assay.bench._measures import Measure, as_measures
from assay.bench._outline import nearest
from assay.bench._plan import Job
from assay.bench._store import CellResult, Row, Store, StoreError, row_to_json
from assay.bench._study import Cell, Prepared, Skipped, Trial, Value

Emit = Callable[[dict[str, Any]], None]
_RESULT = "result.json"
_LONGEST = 2000  # characters of an error's sentence
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def load_study(folder: Path) -> ModuleType:
    """Import a method's study. A method that lies outside the package is imported as if it lay inside."""
    import assay.methods

    root = str(Path(folder).parent)
    if root not in list(assay.methods.__path__):
        assay.methods.__path__.append(root)
    return importlib.import_module(f"assay.methods.{Path(folder).name}.study")


class RunningTrial(Trial):
    """The trial that an experiment or a prepare is given while it runs."""

    def __init__(self, job: Job, folder: Path, emit: Emit) -> None:
        self._job = job
        self._emit = emit
        self._opened: dict[str, Any] = {}
        self._said = 0.0
        self.scale = job.scale
        self.folder = folder
        self.curves: dict[Cell, dict[str, list[tuple[float, float]]]] = {}

    @property
    def arm(self) -> str:  # type: ignore[override]
        """The arm; a trial that walks several has it in its cells."""
        if self._job.arm is None:
            raise AttributeError(f"{self._job.name} {self._missing('arm')}")
        return self._job.arm

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed."""
        if self._job.seed is None:
            raise AttributeError(f"{self._job.name} {self._missing('seed')}")
        return self._job.seed

    def _missing(self, name: str) -> str:
        if name in self._job.walks:
            return f"walks {name!r}: read it from the cells of trial.cells()"
        if name in self._job.hidden:
            reason = self._job.hidden[name]
            return f"cannot read {name!r}, which {reason}"
        known = [*self._job.settings, *self._job.inputs]
        return f"has no setting or input {name!r}{nearest(name, known)}"

    def __getitem__(self, name: str) -> Any:
        if name in self._job.settings:
            return self._job.settings[name]
        if name in self._job.inputs:
            return self._job.inputs[name]
        raise LookupError(f"{self._job.name} {self._missing(name)}")

    def _resolved(self, name: str) -> Any:
        if name not in self._job.inputs:
            raise LookupError(f"{self._job.name} {self._missing(name)}")
        return resolved_input(self._job.inputs[name], self._job.defaults.get(name))

    def input(self, name: str) -> Any:
        if name not in self._opened:
            from assay.data import open_input

            self._opened[name] = open_input(self._resolved(name))
        return self._opened[name]

    def path(self, name: str) -> Path:
        return Path(self._resolved(name).path)

    def at(self, **by_scale: Any) -> Any:
        if unknown := [name for name in by_scale if name not in ("quick", "full", "paper")]:
            raise TypeError(f"trial.at() takes quick=, full= and paper=, got {unknown[0]!r}")
        scale = "full" if self.scale == "paper" and "paper" not in by_scale else self.scale
        if scale not in by_scale:
            raise LookupError(f"trial.at() of {self._job.name} has no value for the scale {scale!r}: add {scale}=")
        return by_scale[scale]

    def prepared(self, function: Callable[..., Any], **at: Value) -> Prepared:
        name = getattr(function, "name", getattr(function, "__name__", str(function)))
        mine = [need for need in self._job.needs if need.name == name]
        if not mine:
            raise LookupError(f"{self._job.name} does not read the prepare {name!r}: add it to needs=")
        for key in at:
            if all(key not in need.at for need in mine):
                raise LookupError(f"the prepare {name!r} does not depend on {key!r}{nearest(key, mine[0].at)}")
        fitting = [need for need in mine if all(need.at.get(k, v) == v for k, v in at.items())]
        if not fitting:
            raise LookupError(f"the prepare {name!r} was not made at {_words(at)}: it was at {_choices(mine)}")
        if len(fitting) > 1:
            raise LookupError(f"the prepare {name!r} has several results here: say which of {_choices(fitting)}")
        folder = prepared_folder(fitting[0].key)
        result = folder / _RESULT
        return Prepared(folder, json.loads(result.read_text()) if result.exists() else {})

    def cells(self) -> Iterator[Cell]:
        if not self._job.walks:
            raise TypeError(f"{self._job.name} has no together=: its trial is one cell")
        yield from cells_of(self._job)

    def log(self, step: float, /, **values: Any) -> None:
        cell = values.pop("cell", None)
        if self._job.walks and cell is None:
            raise TypeError(f"{self._job.name} walks several cells: pass cell= to trial.log")
        curves = self.curves.setdefault(cell if self._job.walks else Cell(self._job.arm or ""), {})
        for name, value in values.items():
            if self._job.kind == "trial" and name not in self._job.curves:
                raise TypeError(
                    f"{self._job.name} logs {name!r}, which curves= does not name{nearest(name, self._job.curves)}"
                )
            curves.setdefault(name, []).append((float(step), float(value)))

    def progress(self, items: Iterable[Any] | int) -> Any:
        walked: Any = range(items) if isinstance(items, int) else items
        total = len(walked) if hasattr(walked, "__len__") else None
        for done, item in enumerate(walked):
            self._say(done, total)
            yield item
        self._say(total, total)

    def _say(self, done: int | None, total: int | None) -> None:
        now = time.monotonic()
        if now - self._said > 0.2 or done == total:
            self._said = now
            self._emit({"progress": [done, total]})


def resolved_input(name: str, default: str | None) -> Any:
    """Where an input lies; what is the user's own is opened as the kind of the default that it replaces."""
    from assay.data import assets, resolve

    kinds = {it.name: it.kind for it in assets()}
    return resolve(name, None if name in kinds or default is None else kinds.get(default))


def cells_of(job: Job) -> list[Cell]:
    """The cells that a trial walks: arm and walked axes."""
    return [Cell(arm, tuple(at.items())) for arm, at in job.cells]


def _words(at: Mapping[str, Value]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in at.items()) or "nothing"


def _choices(needs: Iterable[Any]) -> str:
    return "; ".join(_words(need.at) for need in needs)


def perform(job: Job, emit: Emit, *, deliver: str, since: float) -> None:
    """Run a job and record it: called once, in a process of its own.

    Parameters
    ----------
    job
        What to run.
    emit
        Told ``{"busy": True}`` where another check runs this job, ``{"stored": True}`` where it is finished already,
        ``{"progress": [done, total]}``, ``{"ended": status, ...}``, and ``{"store_error": sentence}``.
    deliver : {"store", "pipe"}
        Whether the process writes its row to the store itself, or gives it to ``emit``.
    since
        When the check started: a failure newer than that is another check's, and is not tried again.
    """
    try:
        if deliver == "pipe":
            row = _run(job, emit)
            emit({"ended": row.status, "row": row_to_json(row)})
            return
        lock_path(job.key).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_path(job.key))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            emit({"busy": True})
            return
        with Store() as store:
            before = store.get(job.key)
            if (
                before is not None
                and is_settled(job, before.status, before.finished, since)
                and not _outdated(job, before, store)
            ):
                emit({"stored": True})
                return
        row = _run(job, emit)
        with Store() as store:
            store.write(row)
        # Whoever opened this file before sees the row after it gets the lock, so it may go.
        lock_path(job.key).unlink(missing_ok=True)
        emit({"ended": row.status, "seconds": row.seconds, "why": row.why})
    except StoreError as error:
        emit({"store_error": str(error)})
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        emit(
            {
                "store_error": f"{home()} cannot be written ({error.strerror}): free some space, or set ASSAY_HOME to another folder"
            }
        )


def is_settled(job: Job, status: str, finished: float, since: float) -> bool:
    """Whether a stored job need not run: it is done and its folder is there, or it failed during this check."""
    if status == "done":
        return job.kind != "prepare" or prepared_folder(job.key).is_dir()
    return finished >= since


def _outdated(job: Job, row: Row, store: Store) -> bool:
    """A derivation is, when other trials are done than those it was made from."""
    return job.kind == "derive" and list(row.result.get("from", ())) != _done(job, store)


def _done(job: Job, store: Store) -> list[str]:
    rows = store.get_all(job.reads)
    return [key for key in job.reads if key in rows and rows[key].status == "done"]


def _run(job: Job, emit: Emit) -> Row:
    """Carry the job out; whatever it raises is in the row."""
    final = prepared_folder(job.key) if job.kind == "prepare" else artifacts_folder(job.key)
    final.parent.mkdir(parents=True, exist_ok=True)
    log_path(job.key).parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f"{job.key}.part-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = final.with_name(f"{job.key}.part-{os.getpid()}")
    folder.mkdir()
    place, variables = os.getcwd(), dict(os.environ)
    log = os.open(log_path(job.key), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    status, why, trace = "done", "", ""
    cells: tuple[CellResult, ...] = ()
    result: dict[str, Any] = {}
    start = time.perf_counter()
    before, seconds = _peak(), None
    try:
        study = load_study(Path(job.folder))
        seed_all(job.seed)
        before = _peak_now()
        start = time.perf_counter()
        if job.kind == "derive":
            cells, result = _derive(job, study)
        else:
            trial = RunningTrial(job, folder, emit)
            returned = getattr(study, job.name).function(trial)
            seconds = time.perf_counter() - start
            if job.kind == "prepare":
                result = _as_result(returned, job.name)
                (folder / _RESULT).write_text(json.dumps(result))
            else:
                cells = _as_cells(job, returned, trial, seconds, _peak() - before)
    except BaseException as error:  # noqa: BLE001 -- a process's outermost frame: whatever a study raises is recorded
        status, why = _classified(error)
        trace = "" if status == "skipped" else _traceback(error)
        cells, result = (), {}
    if seconds is None:
        seconds = time.perf_counter() - start
    peak = _peak() - before
    _flush()
    # The home is found by the environment and the current folder, both of which a study may have changed.
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(place)
    if status == "done" and not folder.is_dir():
        status, why, cells, result = "failed", f"{job.name} removed its own folder, {folder}: leave it there", (), {}
    if status == "done":
        shutil.rmtree(final, ignore_errors=True)
        if job.kind == "prepare" or any(folder.iterdir()):
            folder.rename(final)
        else:
            folder.rmdir()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    log_text = log_tail(job.key)
    if not log_text:
        log_path(job.key).unlink(missing_ok=True)
    return make_row(
        job,
        status,
        why,
        traceback=trace,
        log="" if status == "done" else log_text,
        cells=cells,
        result=result,
        seconds=seconds,
        peak_bytes=peak,
        versions=loaded_versions(),
        machine=machine(),
    )


def make_row(job: Job, status: str, why: str = "", **more: Any) -> Row:
    """The row of a job that ended in ``status``."""
    return Row(
        key=job.key,
        kind=job.kind,
        method=job.method,
        name=job.name,
        scale=job.scale,
        seed=job.seed,
        label=job.label,
        job=job.described(),
        fingerprint=job.fingerprint,
        status=status,
        why=why,
        threads=job.threads,
        finished=time.time(),
        **more,
    )


def log_tail(key: str, characters: int = 4000) -> str:
    """The end of what a job printed."""
    try:
        with log_path(key).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - characters))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def seed_all(seed: int | None) -> None:
    """Seed the global generators, for libraries that draw from them without being asked."""
    value = 0 if seed is None else seed
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 -- it is the legacy global state that needs the seed
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)


def _classified(error: BaseException) -> tuple[str, str]:
    """A failure's status and sentence."""
    if isinstance(error, Skipped):
        return "skipped", _said(error) or "the study left it out"
    data = sys.modules.get("assay.data._errors") or sys.modules.get("assay.data")
    missing = getattr(data, "MissingData", None)
    if missing is not None and isinstance(error, missing):
        return "skipped", _said(error)
    said = _said(error)
    sentence = f"{type(error).__name__}: {said}" if said else type(error).__name__
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return ("memory" if out_of_memory else "failed"), sentence


def _said(error: BaseException) -> str:
    """What an error says, on one line that every store and terminal takes."""
    try:
        text = str(error)
    except Exception as fault:  # noqa: BLE001 -- an error whose own text raises is still an error of the study
        text = f"its text cannot be had ({type(fault).__name__})"
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _flush() -> None:
    """Write out what was printed; a study may have closed either stream."""
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()


def _traceback(error: BaseException) -> str:
    """The traceback from the study on, without the workbench's own frames above it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).encode("utf-8", "backslashreplace").decode()
    return text if len(text) < 20_000 else text[:10_000] + "\n...\n" + text[-10_000:]


def _as_result(returned: Any, name: str) -> dict[str, Any]:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TypeError(f"the prepare {name} must return nothing or a mapping, got {type(returned).__name__}")
    return dict(json.loads(json.dumps(dict(returned), default=_as_plain)))


def _as_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a prepare's mapping holds numbers, texts and lists, got {type(value).__name__}: write it to job.folder"
    )


def _as_cells(job: Job, returned: Any, trial: RunningTrial, seconds: float, peak: int) -> tuple[CellResult, ...]:
    if not job.walks:
        measures = _named(job, returned, job.name)
        measures.setdefault("seconds", seconds)
        measures.setdefault("peak_bytes", float(peak))
        arm = job.arm or ""
        return (CellResult(arm, dict(job.at), measures, trial.curves.get(Cell(arm), {})),)
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"{job.name} walks cells and must return {{cell: {{name: measure}}}}, got {type(returned).__name__}"
        )
    known = cells_of(job)
    for cell in returned:
        if cell not in known:
            raise TypeError(
                f"{job.name} returned {cell!r}, which is none of its cells: use those of trial.cells() as they come"
            )
    return tuple(
        CellResult(
            cell.arm,
            {**job.at, **dict(cell.at)},
            _named(job, returned[cell], f"{job.name} at {cell.arm}"),
            trial.curves.get(cell, {}),
        )
        for cell in known
        if cell in returned
    )


def _named(job: Job, returned: Any, where: str) -> dict[str, Measure]:
    measures = as_measures(returned, where)
    for name in measures:
        if name not in job.measures and name not in ("seconds", "peak_bytes"):
            raise TypeError(f"{where} returned {name!r}, which measures= does not name{nearest(name, job.measures)}")
    return measures


def _derive(job: Job, study: ModuleType) -> tuple[tuple[CellResult, ...], dict[str, Any]]:
    """Call ``derive=`` in each cell of a seed where all arms are done; the job's cells are all that there are."""
    spec = getattr(study, str(job.settings["of"]))
    with Store() as store:
        rows = store.get_all(job.reads)
    done = [key for key in job.reads if key in rows and rows[key].status == "done"]
    measured = [cell for key in done for cell in rows[key].cells]
    arms = list(dict.fromkeys(arm for arm, _ in job.cells))
    known = [*arms, *spec.derived_arms]
    found: list[CellResult] = []
    for at in {json.dumps(at): at for _, at in job.cells}.values():
        # An arm that ignores an axis has fewer of them, and stands at all its values.
        here = {c.arm: c for c in measured if all(at.get(k) == v for k, v in c.at.items())}
        if set(here) != set(arms):
            continue
        more = spec.derive({arm: dict(here[arm].measures) for arm in arms})
        if not isinstance(more, Mapping):
            raise TypeError(f"{job.name} must return {{arm: {{name: measure}}}}, got {type(more).__name__}")
        for arm, measures in more.items():
            if arm not in known:
                raise TypeError(f"{job.name} returned the arm {arm!r}{nearest(arm, known)}: add it to derived_arms=")
            if measures:
                found.append(CellResult(arm, dict(at), _named(job, measures, f"{job.name} at {arm}")))
    return tuple(found), {"from": done}


def _peak() -> int:
    """The peak resident size of this process in bytes (``ru_maxrss``: KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_now() -> int:
    """The same, after the kernel was asked to forget earlier peaks where it can."""
    if sys.platform == "linux":
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass  # a sandbox without /proc/self/clear_refs: the growth is then over an earlier peak
    return _peak()


_PACKAGES = (
    "numpy",
    "scipy",
    "pandas",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "sklearn",
    "numba",
    "pyarrow",
    "mapie",
    "crepes",
    "quantile_forest",
    "galore_torch",
    "apollo_torch",
    "fira",
    "pytorch_optimizer",
    "peft",
    "accelerate",
    "ray",
)


def loaded_versions() -> dict[str, str]:
    """Versions of Python, Assay and the packages that are loaded."""
    import assay

    found = {"python": platform.python_version(), "assay": assay.__version__}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """What this machine is, as far as a result may depend on it."""
    cpu = platform.processor()
    gpu: list[str] = []
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
        for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            gpu += [
                line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("Model")
            ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu or "unknown",
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory),
        "gpu": ", ".join(gpu) or None,
    }
