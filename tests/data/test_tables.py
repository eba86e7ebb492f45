"""A table is read as it is, or refused in a sentence that names the file."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from assay.data import DataError, UnknownAsset, read_table, resolve


@pytest.mark.parametrize(
    ("name", "shape", "target", "mean"),
    [("house", (21_613, 21), "price", 540_088.14), ("bio", (45_730, 10), "RMSD", 7.7485)],
)
def test_tables_that_come_with_assay(name: str, shape: tuple[int, int], target: str, mean: float):
    table = read_table(name)
    assert table.shape == shape
    assert table[target].mean() == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("ending", ["", ".xz", ".gz"])
def test_the_separator_is_the_headers_and_compression_is_undone(tmp_path: Path, separator: str, ending: str):
    text = "\ufeff" + "\r\n".join(separator.join(row) for row in (["x", "y z"], ["1", "2.5"], ["3", ""])) + "\r\n"
    pack = {"": lambda b: b, ".xz": lzma.compress, ".gz": gzip.compress}[ending]
    file = tmp_path / f"a.csv{ending}"
    file.write_bytes(pack(text.encode()))
    table = read_table(file)
    assert list(table.columns) == ["x", "y z"]
    np.testing.assert_array_equal(table.to_numpy(), [[1, 2.5], [3, np.nan]])


def test_text_in_a_column_of_numbers_shows_in_its_type(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\nabc,4\n")
    table = read_table(tmp_path / "a.csv")
    kinds = [np.issubdtype(dtype, np.number) if isinstance(dtype, np.dtype) else False for dtype in table.dtypes]
    assert kinds == [False, True]
    assert table["x"].tolist() == ["1", "abc"]


def test_a_parquet_file_keeps_its_types(tmp_path: Path):
    pd, pq = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    pd.DataFrame({"x": np.array([1, 2], "int16"), "y": ["a", "b"]}).to_parquet(tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    assert table["x"].dtype == np.int16
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet is not a Parquet file"):
        read_table(tmp_path / "cut.parquet")
    twice = pq.table([pq.array([1]), pq.array([2])], names=["x", "x"])
    pytest.importorskip("pyarrow.parquet").write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="the column 'x' 2 times"):
        read_table(tmp_path / "twice.parquet")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"x,y\n", r"a\.csv has 2 columns and no rows"),
        (b"", r"a\.csv is empty"),
        (b"x,y,x\n1,2,3\n", r"a\.csv has the column 'x' 2 times"),
        (b"x,y\n1,caf\xe9\n", r"a\.csv is not UTF-8 text \(byte 0xe9 at 9\)"),
        (b"x,y\n1,2\n1,2,3\n", r"a\.csv is not a table.*as many cells as the header"),
        (b"\x89PNG\r\n\x1a\n\0\0", r"a\.csv is not UTF-8"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, sentence: str):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        read_table(tmp_path / "a.csv")
    assert "\n" not in str(caught.value)


def test_a_cut_archive_is_named(tmp_path: Path):
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(b"x\n" + b"1\n" * 1000)[:-30])
    with pytest.raises(DataError, match=r"a\.csv\.xz is cut short"):
        read_table(tmp_path / "a.csv.xz")


def test_what_is_no_table_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="is a folder"):
        read_table(tmp_path)
    with pytest.raises(UnknownAsset, match="did you mean house"):
        read_table("hause")
    with pytest.raises(DataError, match="shakespeare is documents, but a table is expected"):
        read_table("shakespeare")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("long.csv", b"a,b\n1,2,3\n4,5,6\n", "more cells than its header"),
        ("wide.csv", b'"' + b"x" * 200_000 + b'",b\n1,2\n', "is not a table"),
        ("cut.csv.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 40, "is cut short or not a .gz file"),
    ],
)
def test_a_damaged_table_gives_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read_table(path)


def test_old_line_ends_are_line_ends(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes(b"a,b\r1,2\r3,4\r")
    assert read_table(path).to_dict("list") == {"a": [1, 3], "b": [2, 4]}


def test_an_empty_name_is_no_input():
    with pytest.raises(DataError, match="empty"):
        resolve("")
