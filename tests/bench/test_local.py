"""Trials on this machine: what is recorded of them, however they end. Real processes throughout."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from assay.bench import Store, StoreError, check
from assay.bench._home import artifacts_folder, lock_path, log_path, prepared_folder
from assay.bench._measures import Cases, Count, Exact

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BAD_ENDS = """
import os, signal, sys, time
from assay.bench import experiment

@experiment(
    arms=("good", "raises", "exits", "leaves", "crashes", "killed", "greedy", "hungry", "slow", "skips", "no-data", "wrong"),
    measures=("loss",), seeds=1, minutes=0.05, memory_gib=0.4, inputs={},
)
def race(trial):
    arm = trial.arm
    print("this is", arm)
    (trial.folder / "picture.txt").write_text(arm)
    if arm == "raises":
        raise ValueError("a reason")
    if arm == "exits":
        sys.exit(3)
    if arm == "leaves":
        os._exit(0)
    if arm == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if arm == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if arm == "greedy":
        raise MemoryError
    if arm == "hungry":
        kept = []
        while True:
            kept.append(bytearray(os.urandom(2**20)) * 16)
            time.sleep(0.01)
    if arm == "slow":
        time.sleep(60)
    if arm == "skips":
        trial.skip("not today")
    if arm == "no-data":
        from assay.data import MissingData
        raise MissingData("the table is not here: get it")
    if arm == "wrong":
        return {"lost": 1.0}
    return {"loss": 1.0}
"""
CLAIM = """
[[claims]]
id = "first"
says = "It runs."
testable = "full"
experiment = "race"
report = "loss[good]"
"""


def rows(kind="trial"):
    with Store() as store:
        return list(store.rows(kind=kind))


@linux
def test_a_trial_that_ends_badly_costs_itself_alone(bench):
    bench.method("tiny", BAD_ENDS, CLAIM)
    result = check("tiny", scale="full", workers=2)
    found = {row.job["arm"]: row for row in rows()}
    statuses = {arm: row.status for arm, row in found.items()}
    assert statuses == {
        "good": "done", "raises": "failed", "exits": "failed", "leaves": "killed", "crashes": "killed", "killed": "killed",
        "greedy": "memory", "hungry": "memory", "slow": "timeout", "skips": "skipped", "no-data": "skipped", "wrong": "failed",
    }  # fmt: skip
    assert result.trials == {"done": 1, "reused": 0, "failed": 9, "skipped": 2, "missing": 0}
    assert found["raises"].why == "ValueError: a reason"
    assert found["raises"].traceback.rstrip().endswith("ValueError: a reason")
    assert 'raise ValueError("a reason")' in found["raises"].traceback
    assert "_worker.py" not in found["raises"].traceback
    assert found["crashes"].why == "its process was killed by SIGSEGV"
    assert "SIGKILL: the system may have run out of memory" in found["killed"].why
    assert found["slow"].why == "it took longer than its limit of 3 s"
    assert found["hungry"].why == "it took more than its limit of 0.4 GiB of memory"
    assert found["skips"].why == "not today"
    assert found["no-data"].why == "the table is not here: get it"
    assert "returned 'lost', which measures= does not name; did you mean 'loss'?" in found["wrong"].why
    # What a trial printed is kept with a failure, and in a log beside the artifacts.
    assert all(
        f"this is {arm}" in row.log
        for arm, row in found.items()
        if arm not in ("good", "leaves", "crashes", "killed", "hungry", "slow")
    )
    assert log_path(found["good"].key).read_text() == "this is good\n"
    # The fault handler's words of a crash are there too.
    assert "Segmentation fault" in found["crashes"].log
    # Artifacts of what is done, and no half of anything.
    left = [p.name for p in artifacts_folder("x").parent.iterdir() if not p.name.endswith(".log")]
    assert left == [found["good"].key]
    assert (artifacts_folder(found["good"].key) / "picture.txt").read_text() == "good"
    assert not lock_path(found["good"].key).exists()
    assert bench.processes() == []


def test_the_next_check_runs_only_what_is_not_done(bench):
    study = """
    import os
    from assay.bench import experiment

    @experiment(arms=("good", "bad"), measures=("loss",), seeds=3)
    def race(trial):
        with open(os.environ["JOURNAL"], "a") as file:
            file.write(f"{trial.arm} {trial.seed}\\n")
        if trial.arm == "bad" and trial.seed == 1 and not os.path.exists(os.environ["JOURNAL"] + ".mended"):
            raise ValueError("not yet")
        return {"loss": trial.seed / 10 + (trial.arm == "bad")}
    """
    bench.method("tiny", study)
    first = check("tiny")
    assert first.trials == {"done": 5, "reused": 0, "failed": 1, "skipped": 0, "missing": 0}
    assert first.verdicts[0].verdict == "open"
    assert first.failures == (("race[bad] seed 1", "ValueError: not yet"),)
    bench.journal.with_suffix(".mended").touch()
    second = check("tiny")
    assert second.trials == {"done": 1, "reused": 5, "failed": 0, "skipped": 0, "missing": 0}
    assert second.verdicts[0].verdict == "holds"
    assert sorted(bench.lines()) == sorted(["bad 0", "bad 1", "bad 1", "bad 2", "good 0", "good 1", "good 2"])
    # Another experiment's code does not matter, this one's does.
    bench.method("tiny", study + "\n    def other():\n        return 1\n")
    assert check("tiny").trials["reused"] == 6
    bench.method("tiny", study.replace("trial.seed / 10", "trial.seed / 11"))
    assert check("tiny", dry_run=True).trials == {"done": 0, "reused": 0, "failed": 0, "skipped": 0, "missing": 6}
    assert check("tiny").trials["done"] == 6
    bench.method("tiny", study)
    assert check("tiny").trials["reused"] == 6


EVERYTHING = """
import os, random
import numpy as np
from assay.bench import Cases, Count, Exact, experiment, prepare

@prepare(per=("seed", "arm"), settings={"rate": (1, 2)})
def tried(job):
    (job.folder / "rate.txt").write_text(f"{job.seed} {job.arm} {job['rate']}")
    return {"score": np.float64(job["rate"])}

@prepare(per=("seed", "arm"), needs=(tried,))
def tuned(job):
    best = max((1, 2), key=lambda rate: job.prepared(tried, rate=rate).result["score"])
    (job.folder / "best.txt").write_text((job.prepared(tried, rate=best) / "rate.txt").read_text())

def ranks(arms):
    order = sorted(arms, key=lambda arm: arms[arm]["loss"])
    more = {arm: {"rank": float(order.index(arm))} for arm in arms}
    return {**more, "mean": {"loss": sum(arms[a]["loss"] for a in arms) / len(arms)}}

@experiment(
    arms=("good", "bad"), measures=("loss", "hits", "each", "size", "threads", "luck", "rank"), curves=("l",),
    settings={"delta": (1, 2), "steps": 3}, ignores={"bad": ("delta",)}, needs=(tuned,), seeds=3, threads=2,
    derive=ranks, derived_arms=("mean",),
)
def race(trial):
    at_best = (trial.prepared(tuned) / "best.txt").read_text()
    assert at_best == f"{trial.seed} {trial.arm} 2", at_best
    assert trial.at(quick=1, full=2) == 1
    for step in trial.progress(range(trial["steps"])):
        trial.log(step, l=step / 2)
    rng = np.random.default_rng(trial.seed)
    return {
        "loss": rng.normal() + (trial.arm == "bad"),
        "hits": Count(1 + trial.seed, 9),
        "each": Cases(rng.normal(size=4), ids="abcd"),
        "size": Exact(5),
        "threads": Exact(int(os.environ["OMP_NUM_THREADS"])),
        "luck": random.random() + np.random.random(),
    }
"""


def measured(result, name="race"):
    def plain(m):
        return m.values.tolist() if isinstance(m, Cases) else m

    return {
        (o.arm, tuple(o.at.items()), o.seed): {
            n: plain(m) for n, m in o.measures.items() if n not in ("seconds", "peak_bytes")
        }
        for o in result.evidence[name].observations
    }


def test_prepares_curves_measures_and_what_is_derived(bench):
    bench.method("tiny", EVERYTHING)
    events = []
    result = check("tiny", on_event=events.append, workers=2)
    assert result.failures == ()
    assert result.trials["done"] == 9
    found = measured(result)
    # Three seeds of: good at two deltas, bad once, and the derived arm at two deltas.
    assert len(found) == 3 * (2 + 1 + 2)
    one = found["good", (("delta", 1),), 1]
    assert one["hits"] == Count(2, 9)
    assert one["size"] == Exact(5)
    assert one["threads"] == Exact(2)
    assert one["rank"] == 0.0
    assert found["bad", (), 1]["rank"] == 1.0
    assert found["mean", (("delta", 2),), 1]["loss"] == pytest.approx((one["loss"] + found["bad", (), 1]["loss"]) / 2)
    # The same seed is the same luck for both arms, even for a library that draws from the global generators.
    assert one["luck"] == found["bad", (), 1]["luck"] != found["bad", (), 2]["luck"]
    observation = result.evidence["race"].observations[0]
    assert observation.curves == {"l": [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]}
    assert 0 < observation.measures["seconds"] < 10
    assert 0 <= observation.measures["peak_bytes"] < 2**30
    # Prepares: per seed and arm at two rates, then one each.
    assert len(rows("prepare")) == 3 * 2 * 3
    assert {e.kind for e in events} == {"planned", "started", "progress", "finished"}
    assert [e.done for e in events if e.job_kind == "trial" and e.kind == "finished"] == list(range(1, 10))
    # And all of it again from the store, without a process.
    before = time.perf_counter()
    again = check("tiny")
    assert time.perf_counter() - before < 1
    assert again.trials["reused"] == 9
    assert measured(again) == found


def test_a_fresh_interpreter_gives_the_same_to_the_last_bit(bench, monkeypatch):
    bench.method("tiny", EVERYTHING)
    forked = measured(check("tiny", seeds=1))
    monkeypatch.setenv("ASSAY_HOME", str(bench.home) + "-2")
    monkeypatch.setenv("ASSAY_START", "fresh")
    assert measured(check("tiny", seeds=1)) == forked


def test_overrides_reach_trials_and_are_told(bench):
    bench.method("tiny", EVERYTHING)
    result = check("tiny", set={"steps": "5"}, seeds=1)
    assert result.overridden == ("steps=5",)
    assert len(result.evidence["race"].observations[0].curves["l"]) == 5
    with pytest.raises(ValueError, match="cannot be saved"):
        check("tiny", set={"steps": "5"}, save=True)


def test_a_prepare_that_fails_is_the_failure_of_its_readers(bench):
    bench.method(
        "tiny",
        """
        from assay.bench import experiment, prepare
        @prepare(per=("arm",))
        def tuned(job):
            if job.arm == "bad":
                raise ValueError("no rate works")
            if job.arm == "away":
                job.skip("its package is missing")
        @experiment(arms=("good", "bad", "away"), measures=("loss",), needs=(tuned,), seeds=2)
        def race(trial):
            return {"loss": trial.seed}
        """,
    )
    result = check("tiny")
    assert result.trials == {"done": 2, "reused": 0, "failed": 2, "skipped": 2, "missing": 0}
    whys = {(o.arm, o.status): o.why for o in result.evidence["race"].observations}
    assert whys["bad", "failed"] == "what it reads, tuned[bad], was not made: ValueError: no rate works"
    assert whys["away", "skipped"] == "its package is missing"
    # The same from the store alone.
    stored = check("tiny", dry_run=True)
    assert {(o.arm, o.status): o.why for o in stored.evidence["race"].observations} == whys


def test_a_prepared_folder_that_was_removed_is_made_again(bench):
    bench.method("tiny", EVERYTHING)
    check("tiny", seeds=1)
    for row in rows("prepare"):
        folder = prepared_folder(row.key)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert check("tiny", seeds=1).trials["reused"] == 3  # nothing needs them
    assert check("tiny", seeds=1, set={"steps": 4}).trials["done"] == 3


def test_a_trial_reads_only_what_its_result_is_kept_under(bench):
    bench.method(
        "tiny",
        """
        from assay.bench import experiment, prepare
        @prepare(per=("arm",))
        def tuned(job):
            return {"x": job["delta"]}
        @experiment(arms=("good", "bad"), measures=("loss",), settings={"delta": (1, 2)}, ignores={"bad": ("delta",)}, seeds=1)
        def race(trial):
            return {"loss": trial["delta"]}
        @experiment(arms=("good",), measures=("loss",), settings={"delta": (1, 2)}, needs=(tuned,), seeds=1)
        def walk(trial):
            return {"loss": 1}
        """,
    )
    result = check("tiny")
    whys = dict(result.failures)
    assert "cannot read 'delta', which is an axis that 'bad' ignores" in whys["race[bad] seed 0"]
    assert "cannot read 'delta', which is not in per= of 'tuned'" in whys["walk[good, delta=1] seed 0"]


def test_cells_that_are_walked_together(bench):
    bench.method(
        "tiny",
        """
        from assay.bench import experiment
        @experiment(
            arms=("good", "bad"), measures=("loss",), curves=("l",), settings={"delta": (1, 2)},
            together=("arm", "delta"), alone=True, seeds=3,
        )
        def race(trial):
            found = {}
            for cell in trial.cells():
                trial.log(0, l=cell["delta"], cell=cell)
                if (cell.arm, cell["delta"], trial.seed) != ("bad", 2, 2):
                    found[cell] = {"loss": cell["delta"] + 10 * (cell.arm == "bad") + trial.seed / 100}
            return found
        """,
    )
    result = check("tiny")
    assert result.trials["done"] == 3
    found = {(o.arm, o.at["delta"], o.seed): o for o in result.evidence["race"].observations}
    assert len(found) == 12
    assert found["bad", 1, 1].measures == {"loss": 11.01}
    assert found["good", 2, 0].curves == {"l": [(0.0, 2.0)]}
    assert found["bad", 2, 2].status == "skipped"


def test_alone_means_alone_and_threads_fit_the_cores(bench):
    bench.method(
        "tiny",
        """
        import os, time
        from assay.bench import experiment
        def work(trial, name):
            start = time.time()
            time.sleep(0.05)
            with open(os.environ["JOURNAL"], "a") as file:
                file.write(f"{name} {start} {time.time()}\\n")
            return {"loss": trial.seed}
        @experiment(arms=("good", "bad"), measures=("loss",), seeds=2, alone=True)
        def race(trial):
            return work(trial, "alone")
        @experiment(arms=("good", "bad"), measures=("loss",), seeds=2)
        def walk(trial):
            return work(trial, "one")
        @experiment(arms=("good", "bad"), measures=("loss",), seeds=2, threads=2)
        def run(trial):
            return work(trial, "two")
        """,
    )
    assert check("tiny", workers=3).trials["done"] == 12
    spans = [(name, float(a), float(b)) for name, a, b in (line.split() for line in bench.lines())]
    weight = {"alone": 3, "one": 1, "two": 2}
    for _, start, _ in spans:
        assert sum(weight[name] for name, a, b in spans if a <= start < b) <= 3


def test_a_study_that_cannot_be_imported_is_told(bench):
    study = (
        "from assay.bench import experiment\nimport no_such_package\n" + BAD_ENDS.partition("import experiment\n")[2]
    )
    bench.method("tiny", study, CLAIM)
    with pytest.raises(RuntimeError, match=r"cannot be imported: .*No module named 'no_such_package'"):
        check("tiny")
    assert rows() == []


SLOW = """
import os, time
from assay.bench import experiment
@experiment(arms=("good", "bad"), measures=("loss",), seeds=3)
def race(trial):
    with open(os.environ["JOURNAL"], "a") as file:
        file.write(f"{trial.arm} {trial.seed} {os.getppid()}\\n")
    time.sleep(60 if trial.seed == 1 and not os.path.exists(os.environ["JOURNAL"] + ".mended") else 0)
    return {"loss": trial.seed}
"""


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@linux
def test_ctrl_c_stops_the_trials_and_leaves_the_rest_to_the_next_check(bench):
    bench.method("tiny", SLOW)
    process = bench.start("r = check('tiny', workers=2); print(r.interrupted, dict(r.trials), r.command)")
    wait_for(lambda: len(bench.lines()) == 4)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert out.startswith(
        "True {'done': 2, 'reused': 0, 'failed': 0, 'skipped': 0, 'missing': 4} assay check tiny --scale quick"
    )
    assert bench.processes() == []
    assert not list(artifacts_folder("x").parent.glob("*.part-*"))
    bench.journal.with_suffix(".mended").touch()
    assert check("tiny").trials == {"done": 4, "reused": 2, "failed": 0, "skipped": 0, "missing": 0}


@linux
def test_a_fork_server_that_dies_costs_what_it_ran(bench):
    bench.method("tiny", SLOW)

    def kill_it():
        wait_for(lambda: len(bench.lines()) == 4)
        bench.journal.with_suffix(".mended").touch()
        os.kill(int(bench.lines()[-1].split()[2]), signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    result = check("tiny", workers=2)
    killer.join()
    assert result.trials == {"done": 4, "reused": 0, "failed": 2, "skipped": 0, "missing": 0}
    assert all("the process that it was forked from ended" in why for _, why in result.failures)
    assert check("tiny").trials["reused"] == 4


def test_what_a_trial_leaves_running_is_ended(bench):
    bench.method(
        "tiny",
        """
        import subprocess
        from assay.bench import experiment
        @experiment(arms=("good",), measures=("loss",), seeds=1)
        def race(trial):
            subprocess.Popen(["sleep", "300"], close_fds=False)
            return {"loss": 1}
        """,
        CLAIM,
    )
    assert check("tiny").trials["done"] == 1
    if sys.platform == "linux":
        wait_for(lambda: bench.processes() == [])


def test_a_full_disk_is_told_in_one_sentence_and_what_finished_stays(bench):
    bench.home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(bench.home)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        bench.method(
            "tiny",
            """
            import numpy as np
            from assay.bench import Cases, experiment
            @experiment(arms=("good", "bad"), measures=("loss",), seeds=30)
            def race(trial):
                return {"loss": Cases(np.random.default_rng(trial.seed).normal(size=3000))}
            """,
        )
        with pytest.raises(StoreError) as error:
            check("tiny", workers=2)
        assert str(error.value).endswith("is full: free some space and check again; finished trials are kept")
        assert "\n" not in str(error.value)
        kept = {row.key for row in rows()}
        assert len(kept) >= 3
        subprocess.run(["mount", "-o", "remount,size=30m", str(bench.home)], check=True)
        result = check("tiny", workers=2)
        assert result.trials == {"done": 60 - len(kept), "reused": len(kept), "failed": 0, "skipped": 0, "missing": 0}
    finally:
        wait_for(lambda: bench.processes() == [])
        subprocess.run(["umount", str(bench.home)], check=True)


UNRULY = """
import os, signal, subprocess, sys
from assay.bench import experiment

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

@experiment(
    arms=("good", "moves", "forgets", "closes", "removes", "lines", "surrogate", "long", "mute", "real-time", "daemons"),
    measures=("loss",), seeds=1, minutes=0.2,
)
def race(trial):
    arm = trial.arm
    if arm == "moves":
        os.chdir("/")
    if arm == "forgets":
        os.environ.clear()
    if arm == "closes":
        print("a last word")
        sys.stdout.close()
        sys.stderr.close()
    if arm == "removes":
        trial.folder.rmdir()
    if arm == "lines":
        raise ValueError("one\\ntwo \\x1b[31mred")
    if arm == "surrogate":
        raise ValueError("\\udce9")
    if arm == "long":
        raise ValueError("x" * 100_000)
    if arm == "mute":
        raise Mute
    if arm == "real-time":
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
    if arm == "daemons":
        for _ in range(3):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
    return {"loss": 1.0}
"""


@linux
def test_what_a_study_does_to_its_process_does_not_mislead_the_workbench(bench, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_HOME", "home")  # found from the current folder, which a trial may leave
    bench.method("tiny", UNRULY, CLAIM)
    check("tiny", scale="full", workers=2)
    found = {row.job["arm"]: row for row in rows()}
    assert {arm for arm, row in found.items() if row.status == "done"} == {
        "good", "moves", "forgets", "closes", "daemons",
    }  # fmt: skip
    assert "removed its own folder" in found["removes"].why
    assert found["lines"].why == "ValueError: one two \\x1b[31mred"
    assert found["surrogate"].why == "ValueError: \\udce9"
    assert found["long"].why == f"ValueError: {'x' * 2000} ..."
    assert found["mute"].why == "Mute: its text cannot be had (RuntimeError)"
    assert found["real-time"].why == f"its process was killed by signal {signal.SIGRTMIN + 1}"
    # What a trial starts in a session of its own ends with it too.
    command = b"sleep\0" + b"600\0"
    left = [p for p in Path("/proc").glob("[0-9]*/environ") if f"JOURNAL={bench.journal}".encode() in _read(p)]
    assert [p for p in left if _read(p.with_name("cmdline")) == command] == []


def _read(path):
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
