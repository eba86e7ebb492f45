"""What is pruned is what no check reads: jobs of other code, and of methods that are gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from assay.bench import _prune
from assay.bench._fingerprint import fingerprints
from assay.bench._home import artifacts_folder, lock_path, log_path, prepared_folder
from assay.bench._outline import read_outline
from assay.bench._store import Row, Store

STUDY = """
from assay.bench import Exact, Trial, experiment

@experiment(arms=("a",), measures=("x",))
def one(trial: Trial) -> dict:
    return {"x": Exact(1)}
"""


@pytest.fixture
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))
    folder = tmp_path / "methods" / "tiny_one"
    folder.mkdir(parents=True)
    (folder / "study.py").write_text(STUDY)
    monkeypatch.setattr(_prune, "method_folders", lambda: {"tiny-one": folder})
    return folder


def row(key: str, fingerprint: str, method: str = "tiny-one", name: str = "one") -> Row:
    return Row(key, "trial", method, name, "quick", 0, key, {}, fingerprint, "done")


def test_jobs_of_todays_code_stay_and_all_others_go(method: Path):
    today = fingerprints(read_outline(method))["one"]
    with Store() as store:
        store.write(
            row("new", today),
            row("old", "0" * 64),
            row("gone", today, method="no-more"),
            row("renamed", today, name="two"),
        )
        artifacts_folder("old").mkdir(parents=True)
        (artifacts_folder("old") / "picture.png").write_bytes(b"1234")
        log_path("old").write_text("said")
        prepared_folder("new").mkdir(parents=True)
        found = _prune.outdated(store)
        assert {one.method: (set(one.keys), one.size) for one in found} == {
            "no-more": ({"gone"}, 0),
            "tiny-one": ({"old", "renamed"}, 8),
        }
        assert _prune.prune(store, found) == 3
        assert [one.key for one in store.fingerprints()] == ["new"]
        assert _prune.outdated(store) == []
    assert not artifacts_folder("old").exists()
    assert not log_path("old").exists()
    assert prepared_folder("new").is_dir()


def test_a_comment_outdates_nothing_and_a_change_does(method: Path):
    with Store() as store:
        store.write(row("new", fingerprints(read_outline(method))["one"]))
        (method / "study.py").write_text(STUDY + "\n# a remark\n")
        assert _prune.outdated(store) == []
        (method / "study.py").write_text(STUDY.replace("Exact(1)", "Exact(2)"))
        assert [one.keys for one in _prune.outdated(store)] == [("new",)]


def test_a_job_that_runs_at_this_moment_stays(method: Path):
    with Store() as store:
        store.write(row("old", "0" * 64), replace(row("running", "0" * 64)))
        lock_path("running").parent.mkdir(parents=True)
        with FileLock(lock_path("running")):
            assert _prune.prune(store, _prune.outdated(store)) == 1
        assert [one.key for one in store.fingerprints()] == ["running"]
