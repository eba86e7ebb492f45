import csv
import json
import math
import sqlite3

import pytest

from assay._errors import InputError
from assay.bench._export import COLUMNS, export, tidy
from assay.bench._measures import Cases, Count, Exact
from assay.bench._store import CellResult, Row, Store


def row(key: str, seed: int = 0, status: str = "done", cells: tuple = (), **more) -> Row:
    job = {"arm": "ours", "at": {"table": "house"}, "settings": {"steps": 100}, "inputs": {"corpus": "english"}}
    fields = {"why": "", "seconds": 2.5, "peak_bytes": 10**9, "threads": 2, "finished": 1_750_000_000.0} | more
    return Row(
        key=key, kind="trial", method="a-method", name="race", scale="quick", seed=seed, label="race[ours]", job=job,
        fingerprint="f" * 8, status=status, cells=cells, versions={"numpy": "2"}, machine={"cores": 2}, **fields,
    )  # fmt: skip


CELL = CellResult(
    "ours",
    {"delta": 0.1},
    {"loss": 0.1 + 0.2, "hits": Count(3, 12), "error": Cases([1.0, 2.0, 6.0], ["a", "b", "ü"]), "bytes": Exact(8.0)},
    {"train/loss": [(0, 2.0), (10, 1.5), (20, 1.25)], "by time": [(0.5, 1.0), (1.5, math.nan)]},
)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "assay.sqlite") as store:
        store.write(row("k0", cells=(CELL,)), row("k1", seed=1, status="failed", why='it, "broke"\nhere'))
        yield store


def test_the_table_has_every_measure_and_curve_and_the_failures(store):
    entries = list(tidy(store.rows()))
    assert all(set(e) == set(COLUMNS) for e in entries)
    by_name = {e["measure"]: e for e in entries}
    assert by_name["loss"]["value"] == 0.1 + 0.2
    assert (by_name["hits"]["kind"], by_name["hits"]["value"], by_name["hits"]["n"]) == ("count", 0.25, 12)
    assert (by_name["error"]["value"], by_name["error"]["values"], by_name["error"]["ids"]) == (
        3.0,
        [1.0, 2.0, 6.0],
        ["a", "b", "ü"],
    )
    assert (by_name["train/loss"]["value"], by_name["train/loss"]["steps"]) == (1.25, [0.0, 10.0, 20.0])
    assert json.loads(by_name["loss"]["at"]) == {"table": "house", "delta": 0.1}
    failed = by_name[None]
    assert (failed["seed"], failed["status"], failed["value"]) == (1, "failed", None)


def test_csv_reads_back_exactly(store, tmp_path):
    export("csv", tmp_path / "deep" / "trials.csv", store=store)
    with (tmp_path / "deep" / "trials.csv").open(newline="", encoding="utf-8") as file:
        entries = list(csv.DictReader(file))
    assert tuple(entries[0]) == COLUMNS
    by_name = {e["measure"]: e for e in entries}
    assert float(by_name["loss"]["value"]) == 0.1 + 0.2
    assert json.loads(by_name["error"]["ids"]) == ["a", "b", "ü"]
    assert by_name[""]["why"] == 'it, "broke"\nhere'
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trials.csv"]


def test_parquet_reads_back_exactly(store, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    export("parquet", tmp_path / "trials.parquet", store=store)
    entries = pq.read_table(tmp_path / "trials.parquet").to_pylist()
    by_name = {e["measure"]: e for e in entries}
    assert by_name["loss"]["value"] == 0.1 + 0.2
    assert by_name["error"]["values"] == [1.0, 2.0, 6.0]
    assert by_name["train/loss"]["steps"] == [0.0, 10.0, 20.0]
    assert math.isnan(by_name["by time"]["values"][1])
    assert by_name[None]["value"] is None
    assert by_name["loss"]["seed"] == 0


def test_mlflow_gets_runs_with_params_metrics_steps_and_status(store, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    from mlflow.tracking import MlflowClient

    uri = export("mlflow", tmp_path / "runs.db", store=store)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("assay/a-method/race")
    runs = {r.data.params["seed"]: r for r in client.search_runs([experiment.experiment_id])}
    done = runs["0"]
    assert done.info.status == "FINISHED"
    assert done.data.params == {"arm": "ours", "seed": "0", "scale": "quick", "steps": "100", "corpus": "english", "table": "house", "delta": "0.1"}  # fmt: skip
    assert done.data.metrics["loss"] == 0.1 + 0.2
    assert done.data.metrics["hits"] == 0.25
    assert done.data.metrics["hits.n"] == 12
    assert done.data.metrics["seconds"] == 2.5
    curve = client.get_metric_history(done.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in sorted(curve, key=lambda m: m.step)] == [(0, 2.0), (10, 1.5), (20, 1.25)]
    assert [m.step for m in client.get_metric_history(done.info.run_id, "by time")] == [0, 1]
    assert done.info.end_time - done.info.start_time == 2500
    assert runs["1"].info.status == "FAILED"
    assert runs["1"].data.tags["assay.why"] == 'it, "broke"\nhere'
    assert not any("verdict" in tag for tag in done.data.tags)

    # A second export adds only what is new, and what failed before and is done now.
    store.write(row("k1", seed=1, cells=(CELL,)), row("k2", seed=2, cells=(CELL,)))
    assert export("mlflow", uri, store=store) == uri
    again = client.search_runs([experiment.experiment_id])
    assert sorted((r.data.params["seed"], r.info.status) for r in again) == [
        ("0", "FINISHED"), ("1", "FAILED"), ("1", "FINISHED"), ("2", "FINISHED"),
    ]  # fmt: skip
    with sqlite3.connect(tmp_path / "runs.db") as db:
        assert db.execute("select count(*) from runs").fetchone() == (4,)


def test_what_cannot_be_exported_is_said_in_one_sentence(store, tmp_path):
    with pytest.raises(InputError, match="there is no export format 'xlsx': choose one of csv, parquet, mlflow"):
        export("xlsx", tmp_path / "x", store=store)
    with Store(tmp_path / "empty.sqlite") as empty, pytest.raises(InputError, match="holds no trial"):
        export("csv", tmp_path / "x.csv", store=empty)
    assert not (tmp_path / "x.csv").exists()


def test_a_broken_export_leaves_nothing_half_written(store, tmp_path, monkeypatch):
    (tmp_path / "trials.csv").write_text("before")
    monkeypatch.setattr("assay.bench._export._flat", lambda measure: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export("csv", tmp_path / "trials.csv", store=store)
    assert (tmp_path / "trials.csv").read_text() == "before"
    assert not list(tmp_path.glob(".trials*"))
