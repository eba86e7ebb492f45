"""The workbench: a store with 10,000 trials, the check that finds them all there, and what a trial costs beside its work."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from assay.bench import Store, check
from assay.bench._check import _Check
from assay.bench._measures import Cases, Count
from assay.bench._plan import Job
from assay.bench._store import CellResult, Row
from assay.bench._worker import make_row
from benchmarks._harness import Ratio

CARD = """
name = "tiny"
title = "Tiny"
summary = "A method for this benchmark."
fields = ["benchmarks"]
extras = []
[paper]
title = "A paper"
id = "arXiv:0000.00000"
venue = "ICLR 2026"
bibtex = "@misc{paper, title={A paper}}"
[[claims]]
id = "first"
says = "It is better."
testable = "full"
experiment = "race"
holds_if = "loss[good] < loss[bad]"
"""
STUDY = """
from assay.bench import experiment
@experiment(arms=("good", "bad"), measures=("loss", "hits", "each"), settings={"delta": tuple_}, seeds=SEEDS)
def race(trial):
    return {"loss": trial.seed + (trial.arm == "bad")}
"""


@contextmanager
def _method(cells: int, seeds: int) -> Iterator[None]:
    """A tiny method, in a home of its own, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        method = Path(folder) / "methods" / "tiny"
        method.mkdir(parents=True)
        (method / "__init__.py").touch()
        (method / "card.toml").write_text(CARD)
        study = STUDY.replace("tuple_", repr(tuple(range(cells)))).replace("SEEDS", str(seeds))
        (method / "study.py").write_text(textwrap.dedent(study))
        before = {name: os.environ.get(name) for name in ("ASSAY_METHODS", "ASSAY_HOME")}
        os.environ |= {"ASSAY_METHODS": str(method.parent), "ASSAY_HOME": str(Path(folder) / "home")}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _row(job: Job, rng: np.random.Generator) -> Row:
    measures = {"loss": rng.normal() + (job.arm == "bad"), "hits": Count(3, 9), "each": Cases(rng.normal(size=32))}
    curves = {"l": [(float(i), float(i) / 3) for i in range(20)]}
    return make_row(job, "done", cells=(CellResult(job.arm or "", dict(job.at), measures, curves),), seconds=1.0)


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure() -> list[Ratio]:
    """Plain seconds; their sizes stand in the notes."""
    found = []
    with _method(cells=1000, seeds=5):
        jobs = _Check("tiny", "quick").plan.trials()
        rng = np.random.default_rng(0)
        rows = [_row(job, rng) for job in jobs]
        note = f"{len(jobs)} trials, each with 32 cases and a curve of 20 points"
        with Store() as store:
            at_once = _timed(lambda: store.write(*rows[:9000]))
            one_by_one = _timed(lambda: [store.write(row) for row in rows[9000:]])
            found.append(Ratio("write 9,000 trials in one transaction", at_once, unit="s", note=note))
            found.append(Ratio("write one trial", one_by_one, unit="ms", note="safe on disk; mean of 1,000"))
            found.append(Ratio("read all", _timed(lambda: list(store.rows())), unit="s", note=note))
            size = sum(f.stat().st_size for f in store.path.parent.glob("assay.sqlite*")) / 2**20
            found.append(Ratio("size of the store", size, unit="MiB", note=note))
        planned = _timed(lambda: _Check("tiny", "quick"))
        found.append(Ratio("read card and study, plan", planned, unit="s", note=note))
        judged = _timed(lambda: check("tiny"))
        found.append(Ratio("a check that finds them all stored, judging included", judged, unit="s", note=note))
    with _method(cells=20, seeds=5):
        started = _timed(lambda: check("tiny", only=("race",), seeds=1, set={"delta": 0}, workers=1))
        many = _timed(lambda: check("tiny", workers=1))
    overhead = (many - started) / (2 * 20 * 5 - 2)
    found.append(
        Ratio("overhead of a trial", overhead, bar=0.1, unit="s", note="one at a time, 198 trials, fork server")
    )
    return found
