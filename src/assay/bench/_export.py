"""The store's trials for other programs: one tidy table as CSV or Parquet, or runs in MLflow."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from assay._errors import InputError
from assay._extras import extras
from assay.bench._files import whole_file
from assay.bench._measures import Cases, Count, Exact, Measure
from assay.bench._store import CellResult, Row, Store

FORMATS = ("csv", "parquet", "mlflow")
COLUMNS = (
    "method", "experiment", "scale", "seed", "arm", "at", "status", "why", "measure", "kind", "value", "n", "values", "steps",
    "ids", "seconds", "peak_bytes", "threads", "settings", "inputs", "fingerprint", "finished", "key",
)  # fmt: skip
_LISTS = ("values", "steps", "ids")


def export(format: str, path: str | Path, *, store: Store | None = None, method: str | None = None) -> str:
    """Write every trial of the store, those that failed included.

    Parameters
    ----------
    format : {"csv", "parquet", "mlflow"}
        The first two write one row a measure and curve of each trial and cell (`tidy`).
    path
        The file; for MLflow a SQLite file, or the address of a store or server (``sqlite:///runs.db``,
        ``http://host:5000``).
    store
        Default: the one in Assay's home.
    method
        Only this one.

    Returns
    -------
    str
        Where it was written.

    Raises
    ------
    InputError
        For an unknown format, or where the store holds no trial.
    ImportError
        Naming what to install for Parquet or MLflow.
    """
    if format not in FORMATS:
        raise InputError(f"there is no export format {format!r}: choose one of {', '.join(FORMATS)}")
    own = store or Store()
    try:
        rows = (row for row in own.rows(method, kind=None) if row.kind != "prepare")
        first = next(rows, None)
        if first is None:
            raise InputError("the store holds no trial to export: run `assay check NAME` first")
        every = _chain(first, rows)
        if format == "mlflow":
            return _to_mlflow(every, str(path))
        write = _to_csv if format == "csv" else _to_parquet
        with whole_file(Path(path)) as file:
            write(tidy(every), file)
        return str(path)
    finally:
        if store is None:
            own.close()


def tidy(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """One dict a measure and curve of each trial and cell, with the keys of `COLUMNS`.

    ``value`` is the number, the share of a count, the mean of cases, the last value of a curve; ``n`` how many cases,
    draws or points it has; ``values`` the cases or the curve, with their ``ids`` or ``steps``. A trial that did not
    finish has one entry without a measure, and says why.
    """
    for row in rows:
        same = {
            "method": row.method,
            "experiment": _experiment_of(row),
            "scale": row.scale,
            "seed": row.seed,
            "status": row.status,
            "why": row.why,
            "seconds": row.seconds,
            "peak_bytes": row.peak_bytes,
            "threads": row.threads,
            "settings": _json(row.job.get("settings", {})),
            "inputs": _json(row.job.get("inputs", {})),
            "fingerprint": row.fingerprint,
            "finished": datetime.fromtimestamp(row.finished, UTC).isoformat(timespec="seconds"),
            "key": row.key,
        }
        empty = dict.fromkeys(COLUMNS) | same
        if not row.cells:
            yield empty | {"arm": row.job.get("arm"), "at": _json(row.job.get("at", {}))}
        for cell in row.cells:
            here = empty | {"arm": cell.arm, "at": _json(_where(row, cell))}
            for name, measure in cell.measures.items():
                yield here | {"measure": name} | _flat(measure)
            for name, points in cell.curves.items():
                steps, values = [p[0] for p in points], [p[1] for p in points]
                last = values[-1] if values else None
                curve = {"kind": "curve", "value": last, "n": len(points), "values": values, "steps": steps}
                yield here | {"measure": name} | curve


def _experiment_of(row: Row) -> str:
    """A derivation stands under the experiment that it belongs to."""
    return str(row.job["settings"]["of"]) if row.kind == "derive" else row.name


def _where(row: Row, cell: CellResult) -> dict[str, Any]:
    return {**row.job.get("at", {}), **cell.at}


def _flat(measure: Measure) -> dict[str, Any]:
    if isinstance(measure, Count):
        return {"kind": "count", "value": measure.k / measure.n, "n": measure.n}
    if isinstance(measure, Exact):
        return {"kind": "exact", "value": measure.value}
    if isinstance(measure, Cases):
        ids = None if measure.ids is None else list(measure.ids)
        values = measure.values
        return {"kind": "cases", "value": float(values.mean()), "n": values.size, "values": values.tolist(), "ids": ids}
    return {"kind": "number", "value": measure}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _chain(first: Row, rest: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rest


def _to_csv(entries: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for entry in entries:
            for name in _LISTS:
                if entry[name] is not None:
                    entry[name] = json.dumps(entry[name], ensure_ascii=False)
            table.writerow(entry)


def _to_parquet(entries: Iterator[dict[str, Any]], path: Path) -> None:
    with extras("tables"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys(COLUMNS, pa.string()),
        **dict.fromkeys(("value", "seconds"), pa.float64()),
        **dict.fromkeys(("seed", "n", "peak_bytes", "threads"), pa.int64()),
        **dict.fromkeys(("values", "steps"), pa.list_(pa.float64())),
        "ids": pa.list_(pa.string()),
    }
    schema = pa.schema([(name, kinds[name]) for name in COLUMNS])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for some in batches(entries, 5000):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))


def batches(entries: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of at most so many entries."""
    some: list[Any] = []
    for entry in entries:
        some.append(entry)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


# MLflow


def _to_mlflow(rows: Iterable[Row], place: str) -> str:
    """An experiment a method and experiment, a run a trial and cell. A second export adds only what is new.

    The arm, the seed, axes, settings and inputs are parameters; measures are metrics (a count its share, cases their
    mean), curves are metrics with their steps. Verdicts are not written: they belong to all runs of a claim together.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = place if "://" in place else f"sqlite:///{Path(place).absolute()}"
    with extras("mlflow"):
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        faults: tuple[type[Exception], ...] = (MlflowException,)
        if uri.startswith("sqlite:"):  # MLflow's SQLite store needs both, and asks for neither
            import alembic  # noqa: F401
            import sqlalchemy.exc

            faults += (sqlalchemy.exc.SQLAlchemyError,)
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    try:
        client = MlflowClient(tracking_uri=uri)
        known: dict[str, tuple[str, set[str]]] = {}
        for row in rows:
            name = f"assay/{row.method}/{_experiment_of(row)}"
            if name not in known:
                known[name] = _experiment(client, name)
            experiment, there = known[name]
            for cell in row.cells or (CellResult(row.job.get("arm") or "all arms", {}, {}),):
                identity = f"{row.key}/{cell.arm}/{_json(dict(cell.at))}/{row.status}"
                if identity not in there:
                    _run(client, experiment, row, cell, identity)
    except faults as error:
        raise InputError(f"MLflow's store {uri} cannot be used ({str(error).splitlines()[0]}): name another") from error
    return uri


def _experiment(client: Any, name: str) -> tuple[str, set[str]]:
    """An experiment's id, and which trials it has already."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return client.create_experiment(name), set()
    there, token = set(), None
    while True:
        page = client.search_runs([found.experiment_id], max_results=1000, page_token=token)
        there |= {run.data.tags["assay.trial"] for run in page if "assay.trial" in run.data.tags}
        token = page.token
        if not token:
            return found.experiment_id, there


def _run(client: Any, experiment: str, row: Row, cell: CellResult, identity: str) -> None:
    from mlflow.entities import Metric, Param, RunTag

    at = _where(row, cell)
    start, end = round((row.finished - (row.seconds or 0)) * 1000), round(row.finished * 1000)
    label = ", ".join([cell.arm, *(f"{k}={v}" for k, v in at.items())])
    seed = {} if row.seed is None else {"seed": row.seed}
    params = {
        "arm": cell.arm,
        **seed,
        "scale": row.scale,
        **row.job.get("settings", {}),
        **row.job.get("inputs", {}),
        **at,
    }
    tags = {
        "assay.trial": identity,
        "assay.status": row.status,
        "assay.fingerprint": row.fingerprint,
        "assay.threads": str(row.threads),
        "assay.versions": _json(dict(row.versions)),
        "assay.machine": _json(dict(row.machine)),
    }
    if row.why:
        tags["assay.why"] = row.why
    metrics = []
    for name, measure in cell.measures.items():
        flat = _flat(measure)
        metrics.append(Metric(_key(name), flat["value"], end, 0))
        if "n" in flat:
            metrics.append(Metric(_key(f"{name}.n"), flat["n"], end, 0))
    for name, value in (("seconds", row.seconds), ("peak_bytes", row.peak_bytes)):
        if value is not None and name not in cell.measures:
            metrics.append(Metric(name, float(value), end, 0))
    for name, points in cell.curves.items():
        whole = all(float(step).is_integer() for step, _ in points)
        name = f"curve.{name}" if name in cell.measures else name
        if not whole:
            tags[f"assay.steps.{_key(name)}"] = "points are numbered: their steps are no whole numbers"
        metrics += [Metric(_key(name), y, end, int(x) if whole else i) for i, (x, y) in enumerate(points)]
    run = client.create_run(experiment, start_time=start, run_name=f"{label}{f', seed {row.seed}' if seed else ''}")
    log: Callable[..., None] = client.log_batch
    log(
        run.info.run_id,
        params=[Param(_key(k), str(v)[:6000]) for k, v in params.items()][:100],
        tags=[RunTag(k, v[:5000]) for k, v in tags.items()],
    )
    for some in batches(metrics, 1000):
        log(run.info.run_id, metrics=some)
    client.set_terminated(run.info.run_id, "FINISHED" if row.status == "done" else "FAILED", end_time=end)


def _key(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", str(name), flags=re.ASCII)
