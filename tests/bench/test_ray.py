"""Ray runs the same trials with the same results, to the last bit. A real cluster on this machine."""

import sys

import pytest

from assay.bench import Cases, Store, check
from assay.bench._home import artifacts_folder, prepared_folder

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the workbench forks")

STUDY = """
import os
import numpy as np
from assay.bench import Cases, experiment, prepare

@prepare(per=("seed",))
def start(job):
    np.save(job.folder / "x.npy", np.random.default_rng(job.seed).normal(size=50))
    return {"n": 50}

@prepare(per=("seed", "arm"), needs=(start,))
def tuned(job):
    x = np.load(job.prepared(start) / "x.npy")
    return {"scale": float(np.sum(np.sin(x)) * (2 if job.arm == "bad" else 1))}

def ranks(arms):
    return {arm: {"rank": float(m["loss"] > 1)} for arm, m in arms.items()}

@experiment(
    arms=("good", "bad", "raises", "leaves", "slow"), measures=("loss", "each", "threads", "luck", "rank"), curves=("l",),
    needs=(start, tuned), seeds=2, threads=2, minutes=0.05, quick={"arms": ("good", "bad")}, derive=ranks,
)
def race(trial):
    if trial.arm == "raises":
        print("some words")
        raise ValueError("a reason")
    if trial.arm == "leaves":
        os._exit(1)
    if trial.arm == "slow":
        import time
        time.sleep(60)
    x = np.load(trial.prepared(start) / "x.npy")
    (trial.folder / "picture.txt").write_text(trial.arm)
    trial.log(1, l=x[0])
    a = np.outer(x, x) + np.eye(50)
    return {
        "loss": float(np.linalg.slogdet(a)[1]) * trial.prepared(tuned).result["scale"],
        "each": Cases(np.linalg.eigvalsh(a)),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "luck": np.random.random(),
    }
"""
CLAIM = """
[[claims]]
id = "first"
says = "It runs."
testable = "full"
experiment = "race"
report = "loss[good]"
"""


@pytest.fixture(scope="module")
def cluster():
    """One cluster for several checks, which leave it running. Its workers know nothing of the tests' homes."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    assert ray.is_initialized()
    ray.shutdown()


def bits(result):
    def plain(m):
        return m.values.tobytes() if isinstance(m, Cases) else m

    return {
        (o.arm, o.seed): ({n: plain(m) for n, m in o.measures.items() if n not in ("seconds", "peak_bytes")}, o.curves)
        for o in result.evidence["race"].observations
    }


def compare(bench, monkeypatch):
    bench.method("tiny", STUDY, CLAIM)
    here = check("tiny", workers=2)
    assert here.trials["done"] == 4
    monkeypatch.setenv("ASSAY_HOME", str(bench.home) + "-2")
    events = []
    there = check("tiny", engine="ray", workers=2, on_event=events.append)
    assert there.failures == ()
    assert there.trials["done"] == 4
    assert bits(there) == bits(here)
    assert there.to_json()["claims"] == here.to_json()["claims"]
    assert {e.kind for e in events} >= {"planned", "started", "finished"}
    with Store() as store:
        rows = list(store.rows(kind=None))
    for row in rows:
        if row.kind == "prepare":
            assert (prepared_folder(row.key) / "result.json").is_file()
        if row.kind == "trial":
            assert (artifacts_folder(row.key) / "picture.txt").read_text() == row.job["arm"]
    assert not list((bench.home.parent / "home-2").glob("ray-*"))
    # The same store serves both engines.
    assert check("tiny", workers=2).trials["reused"] == 4


def test_ray_gives_what_this_machine_gives_to_the_last_bit(bench, monkeypatch):
    compare(bench, monkeypatch)
    assert not ray.is_initialized()


def test_and_so_it_does_on_machines_that_share_no_disk(bench, monkeypatch, cluster):
    monkeypatch.setenv("ASSAY_RAY_APART", "1")
    compare(bench, monkeypatch)


def test_on_ray_too_a_trial_that_ends_badly_costs_itself_alone(bench, cluster):
    bench.method("tiny", STUDY, CLAIM)
    result = check("tiny", scale="full", seeds=1, engine="ray", workers=2)
    assert result.trials == {"done": 2, "reused": 0, "failed": 3, "skipped": 0, "missing": 0}
    with Store() as store:
        found = {row.job["arm"]: row for row in store.rows()}
    assert {arm: row.status for arm, row in found.items()} == {
        "good": "done",
        "bad": "done",
        "raises": "failed",
        "leaves": "killed",
        "slow": "timeout",
    }
    assert found["raises"].why == "ValueError: a reason"
    assert "some words" in found["raises"].log


def test_a_study_that_cannot_be_imported_is_told(bench, cluster):
    bench.method("tiny", STUDY.replace("import numpy as np\n", "import no_such_package\n", 1), CLAIM)
    with pytest.raises(RuntimeError, match="cannot be imported"):
        check("tiny", engine="ray", workers=2)
