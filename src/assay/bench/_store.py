"""The store of finished trials: one SQLite file that several checks may read and write at once."""

from __future__ import annotations

import base64
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from assay.bench._home import store_path
from assay.bench._measures import Cases, Measure, from_json, to_json

SCHEMA = 1
_APPLICATION = 0x41535341  # "ASSA": tells the store from other SQLite files
_TABLES = """
CREATE TABLE IF NOT EXISTS rows (
    key         TEXT PRIMARY KEY,   -- hash of everything that the result depends on
    kind        TEXT NOT NULL,      -- trial | prepare | derive
    method      TEXT NOT NULL,
    name        TEXT NOT NULL,      -- the experiment, or the prepare
    scale       TEXT NOT NULL,
    seed        INTEGER,
    label       TEXT NOT NULL,      -- the job in words
    job         TEXT NOT NULL,      -- arm, axes, settings and inputs, as JSON
    fingerprint TEXT NOT NULL,      -- of the code that ran
    status      TEXT NOT NULL,      -- done | failed | timeout | memory | killed | skipped
    why         TEXT NOT NULL,
    traceback   TEXT NOT NULL,
    log         TEXT NOT NULL,      -- the end of what it printed, where it did not finish
    payload     BLOB NOT NULL,      -- what it returned: JSON, compressed
    seconds     REAL,
    peak_bytes  INTEGER,
    threads     INTEGER NOT NULL,
    versions    TEXT NOT NULL,
    machine     TEXT NOT NULL,
    finished    REAL NOT NULL       -- seconds since 1970
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_method ON rows (method, scale, key, status, finished);
"""
_COLUMNS = [part.split()[0] for part in _TABLES.splitlines() if part.startswith("    ")]


class StoreError(RuntimeError):
    """The store cannot be read or written; the message says in one sentence why, and what to do."""


@dataclass(frozen=True)
class CellResult:
    """What one arm returned at one value of each axis.

    ``curves`` is ``{name: [(step, value), ...]}``.
    """

    arm: str
    at: Mapping[str, Any]
    measures: Mapping[str, Measure]
    curves: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One finished job, however it ended.

    ``cells`` is what a trial or a derivation returned, ``result`` what a prepare returned.
    """

    key: str
    kind: str
    method: str
    name: str
    scale: str
    seed: int | None
    label: str
    job: Mapping[str, Any]
    fingerprint: str
    status: str
    why: str = ""
    traceback: str = ""
    log: str = ""
    cells: tuple[CellResult, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    peak_bytes: int | None = None
    threads: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    finished: float = 0.0


class Stored(NamedTuple):
    """Which code a job ran."""

    key: str
    method: str
    name: str
    fingerprint: str


class Store:
    """The finished jobs of all methods.

    Parameters
    ----------
    path
        The SQLite file, by default ``assay.sqlite`` in the workbench's home. Made where it is missing.

    Raises
    ------
    StoreError
        Where the file is damaged, of a newer Assay, not a store, or not writable; later, where the disk is full.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = store_path() if path is None else Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the store's folder {self.path.parent} cannot be made ({error.strerror}): set ASSAY_HOME to a folder that you may write"
            ) from None
        with self._spoken():
            # Autocommit: each write is one transaction of its own. A writer waits a minute for the others.
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            self._open()

    def _open(self) -> None:
        db = self._db
        schema = db.execute("PRAGMA user_version").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        if schema > SCHEMA:
            raise StoreError(
                f"the store {self.path} was written by a newer Assay (schema {schema}, this one knows {SCHEMA}): "
                "upgrade Assay, or set ASSAY_HOME to another folder"
            )
        if schema == SCHEMA and application == _APPLICATION:
            return
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] and application != _APPLICATION:
            raise StoreError(f"{self.path} is not a store of Assay: move it away, or set ASSAY_HOME to another folder")
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id={_APPLICATION}; PRAGMA user_version={SCHEMA}; COMMIT;"
        )

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        """SQLite's errors as one sentence."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(self._sentence(str(error))) from error

    def _sentence(self, error: str) -> str:
        if "full" in error:
            return f"the disk that holds {self.path} is full: free some space and check again; finished trials are kept"
        if "readonly" in error or "read-only" in error or "unable to open" in error:
            return f"the store {self.path} cannot be written: make it writable, or set ASSAY_HOME to a folder that you may write"
        if "locked" in error:
            return f"the store {self.path} has been locked by another program for a minute: close that program and check again"
        if "not a database" in error or "malformed" in error or "corrupt" in error:
            return (
                f"the store {self.path} is damaged ({error}): move it away and check again, or restore it from a copy"
            )
        return f"the store {self.path} cannot be used ({error}): check the disk, or set ASSAY_HOME to another folder"

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, *rows: Row) -> None:
        """Keep finished jobs, in one transaction. A job that is done is never replaced by one that is not."""
        columns = ", ".join(_COLUMNS)
        changes = ", ".join(f"{c}=excluded.{c}" for c in _COLUMNS if c != "key")
        statement = (
            f"INSERT INTO rows ({columns}) VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT (key) DO UPDATE SET {changes} "
            "WHERE excluded.status = 'done' OR rows.status != 'done'"
        )
        with self._spoken():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(statement, (_to_sql(row) for row in rows))
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def statuses(self, method: str, scale: str) -> dict[str, tuple[str, float]]:
        """``{key: (status, when)}`` of a method's jobs at a scale."""
        with self._spoken():
            found = self._db.execute(
                "SELECT key, status, finished FROM rows WHERE method = ? AND scale = ?", (method, scale)
            ).fetchall()
        return {key: (status, finished) for key, status, finished in found}

    def get(self, key: str) -> Row | None:
        """One job, or None."""
        with self._spoken():
            found = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM rows WHERE key = ?", (key,)).fetchone()
        return None if found is None else _from_sql(found)

    def get_all(self, keys: Iterable[str]) -> dict[str, Row]:
        """Those of the named jobs that are there."""
        wanted = list(keys)
        found: dict[str, Row] = {}
        for start in range(0, len(wanted), 500):
            some = wanted[start : start + 500]
            with self._spoken():
                rows = self._db.execute(
                    f"SELECT {', '.join(_COLUMNS)} FROM rows WHERE key IN ({', '.join('?' * len(some))})", some
                ).fetchall()
            found.update((row[0], _from_sql(row)) for row in rows)
        return found

    def fingerprints(self) -> list[Stored]:
        """Of every job, by which code it ran."""
        with self._spoken():
            found = self._db.execute("SELECT key, method, name, fingerprint FROM rows ORDER BY key").fetchall()
        return [Stored(*row) for row in found]

    def delete(self, key: str) -> None:
        """Forget a job."""
        with self._spoken():
            self._db.execute("DELETE FROM rows WHERE key = ?", (key,))

    def rows(self, method: str | None = None, kind: str | None = "trial") -> Iterator[Row]:
        """All jobs of a kind (None: of every kind), of one method or of all, oldest first."""
        where, values = ["1"], []
        for column, value in (("method", method), ("kind", kind)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        with self._spoken():
            found = self._db.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM rows WHERE {' AND '.join(where)} ORDER BY finished, key", values
            )
            for row in found:
                yield _from_sql(row)


def _to_sql(row: Row) -> tuple[Any, ...]:
    payload = pack({"cells": [cell_to_json(c) for c in row.cells], "result": dict(row.result)})
    texts = {name: json.dumps(getattr(row, name), sort_keys=True) for name in ("job", "versions", "machine")}
    return tuple(payload if c == "payload" else texts[c] if c in texts else getattr(row, c) for c in _COLUMNS)


def _from_sql(values: tuple[Any, ...]) -> Row:
    found = dict(zip(_COLUMNS, values))
    try:
        payload = unpack(found.pop("payload"))
        for name in ("job", "versions", "machine"):
            found[name] = json.loads(found[name])
        return Row(cells=tuple(cell_from_json(c) for c in payload["cells"]), result=payload["result"], **found)
    except (zlib.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise StoreError(
            f"the store {store_path()} is damaged (its row {found['key']} cannot be read): "
            "move it away and check again, or restore it from a copy"
        ) from error


def row_to_json(row: Row) -> list[Any]:
    """A row that travels from one process to another as JSON."""
    return [base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in _to_sql(row)]


def row_from_json(values: list[Any]) -> Row:
    """The row that `row_to_json` wrote."""
    return _from_sql(tuple(base64.b64decode(v) if c == "payload" else v for c, v in zip(_COLUMNS, values)))


def cell_to_json(cell: CellResult) -> dict[str, Any]:
    """The JSON form of a cell: cases as the bytes of their float64 values, everything else readable."""
    measures: dict[str, Any] = {}
    for name, measure in cell.measures.items():
        if isinstance(measure, Cases):
            raw = base64.b64encode(measure.values.astype("<f8").tobytes()).decode()
            measures[name] = {"float64": raw, "ids": None if measure.ids is None else list(measure.ids)}
        else:
            measures[name] = to_json(measure)
    curves = {name: [[_plain(x), _plain(y)] for x, y in points] for name, points in cell.curves.items()}
    return {"arm": cell.arm, "at": dict(cell.at), "measures": measures, "curves": curves}


def cell_from_json(value: dict[str, Any]) -> CellResult:
    """The cell that `cell_to_json` wrote."""
    measures: dict[str, Measure] = {}
    for name, measure in value["measures"].items():
        if isinstance(measure, dict) and "float64" in measure:
            measures[name] = Cases(np.frombuffer(base64.b64decode(measure["float64"]), dtype="<f8"), measure["ids"])
        else:
            measures[name] = from_json(measure)
    curves = {name: [(float(x), float(y)) for x, y in points] for name, points in value["curves"].items()}
    return CellResult(value["arm"], value["at"], measures, curves)


def _plain(x: float) -> float | str:
    value = to_json(float(x))
    assert isinstance(value, float | str)
    return value


def pack(value: Any) -> bytes:
    """JSON, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), 1)


def unpack(blob: bytes) -> Any:
    """What `pack` packed."""
    return json.loads(zlib.decompress(blob))
