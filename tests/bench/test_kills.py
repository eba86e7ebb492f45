"""A check that is killed at any moment loses no finished trial, and two checks at once share the work."""

import os
import random
import signal
import sqlite3
import sys
import time

import pytest

from assay.bench import Store
from assay.bench._home import artifacts_folder, prepared_folder, store_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STUDY = """
import os, time
from assay.bench import experiment, prepare

def note(word, job):
    with open(os.environ["JOURNAL"], "a") as file:
        file.write(f"{word} {job.seed} {job._job.key}\\n")

@prepare(per=("seed",))
def start(job):
    note("prepare", job)
    (job.folder / "a.txt").write_text("a" * 1000)
    time.sleep(0.01)
    (job.folder / "b.txt").write_text("b" * 1000)

@experiment(arms=("good", "bad"), measures=("loss",), settings={"delta": (1, 2)}, needs=(start,), seeds=SEEDS)
def race(trial):
    note("trial", trial)
    assert len((trial.prepared(start) / "a.txt").read_text() + (trial.prepared(start) / "b.txt").read_text()) == 2000
    (trial.folder / "picture.txt").write_text("x" * 1000)
    time.sleep(0.05)
    return {"loss": trial.seed}
"""


def done():
    if not store_path().exists():
        return set()
    with Store() as store:
        return {row.key for row in store.rows(kind=None) if row.status == "done"}


def wait_for_a_trial(bench, seen):
    deadline = time.monotonic() + 30
    while len(bench.lines()) == seen:
        assert time.monotonic() < deadline, "no trial started"
        time.sleep(0.005)


def kill_again_and_again(bench, times, seeds, rng):
    """Kill a check ``times`` times, look at what it left each time, then let one finish."""
    bench.method("tiny", STUDY.replace("SEEDS", str(seeds)))
    stored: set[str] = set()
    seen = 0
    progress = 0
    for turn in range(times):
        process = bench.start("check('tiny', workers=2)")
        # At any moment: before the store is there, while the server starts, in the middle of trials.
        if turn % 2:
            time.sleep(rng.uniform(0.0, 1.0))
        else:
            wait_for_a_trial(bench, seen)
            time.sleep(rng.uniform(0.0, 0.4))
        assert process.poll() is None, process.communicate()[1] or "it finished: give it more trials"
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + 10
        while bench.processes():
            assert time.monotonic() < deadline, "something outlived the check"
            time.sleep(0.01)
        now = done()
        assert stored <= now, "a finished trial was lost"
        started = bench.lines()[seen:]
        again = {line.split()[2] for line in started} & stored
        assert not again, "a finished trial was run again"
        progress += len(now) > len(stored)
        stored, seen = now, len(bench.lines())
        if store_path().exists():
            with sqlite3.connect(store_path()) as db:
                assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    process = bench.start("print(dict(check('tiny', workers=2).trials))")
    out, err = process.communicate(timeout=240)
    total = 4 * seeds
    with Store() as store:
        rows = list(store.rows())
    assert len(rows) == total, err
    before = len({row.key for row in rows} & stored)
    assert out.strip() == str({"done": total - before, "reused": before, "failed": 0, "skipped": 0, "missing": 0}), err
    again = {line.split()[2] for line in bench.lines()[seen:]} & stored
    assert not again, "the last check ran a finished trial again"
    # No half of a folder is left, and every whole one is whole.
    for root in (artifacts_folder("x").parent, prepared_folder("x").parent):
        assert not list(root.glob("*.part-*"))
    assert all((artifacts_folder(row.key) / "picture.txt").stat().st_size == 1000 for row in rows)
    return progress


def test_a_check_that_is_killed_at_any_moment_loses_no_finished_trial(bench):
    progress = kill_again_and_again(bench, times=22, seeds=120, rng=random.Random())
    # The kills did fall among running trials, not all before the first.
    assert progress >= 3


@pytest.mark.slow
def test_the_same_with_a_hundred_kills(bench):
    kill_again_and_again(bench, times=100, seeds=500, rng=random.Random())


def test_two_checks_at_once_do_each_trial_once(bench):
    bench.method("tiny", STUDY.replace("SEEDS", "10"))
    checks = [bench.start("print(dict(check('tiny', workers=2).trials))") for _ in range(3)]
    ends = [process.communicate(timeout=120) for process in checks]
    assert all(process.returncode == 0 for process in checks), ends
    counts = [eval(out) for out, _ in ends]
    assert all(c["done"] + c["reused"] == 40 and c["failed"] == c["missing"] == 0 for c in counts)
    assert sum(c["done"] for c in counts) == 40
    assert sum(c["done"] > 0 for c in counts) >= 2, "they did not share the work"
    keys = [line.split()[2] for line in bench.lines()]
    assert len(keys) == len(set(keys)) == 50
    with sqlite3.connect(store_path()) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
