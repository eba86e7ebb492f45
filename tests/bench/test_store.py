"""The store keeps what trials returned to the last bit, and says in one sentence what is wrong with it."""

import math
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.bench._measures import Cases, Count, Exact
from assay.bench._store import (
    SCHEMA,
    CellResult,
    Row,
    Store,
    StoreError,
    cell_from_json,
    cell_to_json,
    pack,
    row_from_json,
    row_to_json,
    unpack,
)

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
MEASURES = st.one_of(
    FLOATS,
    st.integers(0, 50).flatmap(lambda k: st.integers(max(k, 1), 60).map(lambda n: Count(k, n))),
    FLOATS.map(Exact),
    st.lists(FLOATS, min_size=1, max_size=9).map(Cases),
    st.lists(st.tuples(st.text(max_size=3), FLOATS), min_size=1, max_size=5, unique_by=lambda p: p[0]).map(
        lambda pairs: Cases([v for _, v in pairs], [i for i, _ in pairs])
    ),
)


def bits(x):
    """Everything that tells one measure from another, NaN included."""
    if isinstance(x, Cases):
        return ("cases", x.values.tobytes(), x.ids)
    if isinstance(x, Count):
        return ("count", x.k, x.n)
    value = x.value if isinstance(x, Exact) else x
    return (type(x).__name__, "nan" if math.isnan(value) else np.float64(value).tobytes())


def row(key="k", status="done", **more):
    given = {
        "kind": "trial", "method": "m", "name": "race", "scale": "quick", "seed": 0, "label": "race seed 0",
        "job": {"arm": "good"}, "fingerprint": "f", **more,
    }  # fmt: skip
    return Row(key=key, status=status, **given)


@given(st.dictionaries(st.text(max_size=4), MEASURES, max_size=4), st.lists(st.tuples(FLOATS, FLOATS), max_size=4))
def test_a_cell_comes_back_to_the_last_bit(measures, points):
    cell = CellResult("good", {"delta": 0.1}, measures, {"loss": points})
    again = cell_from_json(unpack(pack(cell_to_json(cell))))
    assert {n: bits(m) for n, m in again.measures.items()} == {n: bits(m) for n, m in measures.items()}
    assert np.array(again.curves["loss"]).tobytes() == np.array(points, dtype=float).tobytes() or any(
        math.isnan(v) for p in points for v in p
    )
    assert (again.arm, again.at) == ("good", {"delta": 0.1})


def test_a_row_comes_back(tmp_path):
    cell = CellResult("good", {}, {"loss": 0.1, "hits": Count(1, 3)}, {"l": [(0.0, 1.5)]})
    kept = row(
        cells=(cell,), result={"rate": 0.1}, seconds=1.5, peak_bytes=7, versions={"numpy": "2"}, log="end", why="so"
    )
    with Store(tmp_path / "a.sqlite") as store:
        store.write(kept)
    with Store(tmp_path / "a.sqlite") as store:
        assert store.get("k") == kept
        assert list(store.rows()) == [kept]
        assert store.get("other") is None
        assert store.get_all(["k", "other"]) == {"k": kept}
    assert row_from_json(row_to_json(kept)) == kept


def test_what_is_done_stays_done(tmp_path):
    with Store(tmp_path / "a.sqlite") as store:
        store.write(row(status="failed"))
        store.write(row(status="done", finished=1.0))
        store.write(row(status="killed", finished=2.0))
        assert store.get("k").status == "done"
        assert store.statuses("m", "quick") == {"k": ("done", 1.0)}


def test_many_keys_at_once(tmp_path):
    with Store(tmp_path / "a.sqlite") as store:
        store.write(*(row(key=str(i)) for i in range(1203)))
        assert len(store.get_all(str(i) for i in range(2000))) == 1203


def test_processes_write_at_once_and_nothing_is_lost(tmp_path):
    code = """
import sys
from assay.bench._store import Row, Store
with Store(sys.argv[1]) as store:
    for i in range(40):
        store.write(Row(f"{sys.argv[2]}-{i}", "trial", "m", "e", "quick", i, "l", {}, "f", "done"))
"""
    path = tmp_path / "new" / "a.sqlite"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(w)]) for w in range(4)]
    assert [w.wait() for w in writers] == [0, 0, 0, 0]
    with Store(path) as store:
        assert len(store.statuses("m", "quick")) == 160


def sentence(path, action=lambda store: None):
    with pytest.raises(StoreError) as error, Store(path) as store:
        action(store)
    said = str(error.value)
    assert "\n" not in said
    assert str(path) in said
    return said


def test_a_file_that_is_no_database_is_told(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    assert "is damaged" in sentence(path)


def test_a_damaged_file_is_told(tmp_path):
    path = tmp_path / "a.sqlite"
    with Store(path) as store:
        store.write(*(row(key=str(i), log="x" * 500) for i in range(500)))
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    assert "is damaged" in sentence(path, lambda store: store.get_all(str(i) for i in range(500)))


def test_a_newer_schema_is_told_and_left_alone(tmp_path):
    path = tmp_path / "a.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={SCHEMA + 1}")
    before = path.read_bytes()
    assert "was written by a newer Assay" in sentence(path)
    assert path.read_bytes() == before


def test_another_programs_database_is_told_and_left_alone(tmp_path):
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    assert "is not a store of Assay" in sentence(path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path):
    path = tmp_path / "a.sqlite"

    def fill(store):
        store.write(row(key="first"))
        store._db.execute("PRAGMA max_page_count=20")  # SQLite's own full disk
        for i in range(1000):
            store.write(row(key=str(i), log=os.urandom(2000).hex()))

    assert "is full: free some space and check again; finished trials are kept" in sentence(path, fill)
    with Store(path) as store:
        assert store.get("first").status == "done"


AS_NOBODY = """
import os, sys
from assay.bench._store import Row, Store, StoreError
if os.getuid() == 0:
    os.setuid(65534)
try:
    with Store(sys.argv[1]) as store:
        store.write(Row("k", "trial", "m", "e", "quick", 0, "l", {}, "f", "done"))
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("there", [True, False])
def test_a_store_that_may_not_be_written_is_told(tmp_path, there):
    # As another user than root, whom no permission stops.
    for folder in [tmp_path, *list(tmp_path.parents)[:2]]:
        folder.chmod(0o755)
    path = tmp_path / "a.sqlite"
    if there:
        Store(path).close()
        path.chmod(0o444)
    tmp_path.chmod(0o555)
    said = subprocess.run([sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True)
    tmp_path.chmod(0o755)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == (
        f"the store {path} cannot be written: make it writable, or set ASSAY_HOME to a folder that you may write"
    )


@pytest.mark.parametrize(
    ("column", "value"), [("payload", b"\0"), ("payload", pack([])), ("job", "{"), ("machine", b"\xff")]
)
def test_a_row_that_cannot_be_read_is_a_damaged_store(tmp_path, monkeypatch, column, value):
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    with Store() as store:
        store.write(row())
        store._db.execute(f"UPDATE rows SET {column} = ?", (value,))
        with pytest.raises(StoreError, match=r"assay.sqlite is damaged \(its row k cannot be read\): move it away"):
            store.get("k")
