"""Tables of the user's, and those that come with Assay, as data frames."""

from __future__ import annotations

import csv
import io
import lzma
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay._extras import extras
from assay.data._errors import DataError

if TYPE_CHECKING:
    import pandas as pd


def read_table(path_or_name: str | Path) -> pd.DataFrame:
    """A CSV, TSV or Parquet file, or an asset that is a table (``"house"``), as a data frame.

    A column whose cells are all numbers or empty is numeric; one with any text in it has dtype ``str`` (``object``
    before pandas 3). The separator is the one of comma, semicolon and tab that the header has most of.
    ``.csv.gz``, ``.csv.xz`` and ``.csv.bz2`` are read as they are.

    Raises
    ------
    DataError
        If there is no such file, it has no rows, a column name stands twice, or it is not what its name says.
    """
    path = Path(path_or_name)
    if not path.exists():
        from assay.data._fetch import resolve

        path = resolve(path_or_name, "table").path
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a CSV, TSV or Parquet file")
    table = _parquet(path) if path.suffix in (".parquet", ".pq") else _text(path)
    if table.shape[1] == 0 or table.shape[0] == 0:
        raise DataError(f"{path} has {table.shape[1]} columns and no rows: give a table with rows")
    return table


def _parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    with extras("tables"):
        import pyarrow as pa
        import pyarrow.parquet
    try:
        names = pyarrow.parquet.read_schema(path).names
        _once(path, names)
        return pd.read_parquet(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a Parquet file that can be read ({error}): write it again") from error


def _text(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        text = uncompressed(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): save it as UTF-8 CSV"
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    header = text.lstrip("\n").split("\n", 1)[0]
    if not header.strip():
        raise DataError(f"{path} is empty: give a table with a header line and rows")
    try:
        separator = max(",;\t", key=lambda mark: len(next(csv.reader([header], delimiter=mark))))
        names = next(csv.reader([header], delimiter=separator))
        _once(path, names)
        with warnings.catch_warnings():
            # Without index_col=False, cells beyond the header would make the first column the rows' names.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(io.StringIO(text), sep=separator, index_col=False)
    except pd.errors.ParserWarning as error:
        raise DataError(f"{path} has rows with more cells than its header names: give every column a name") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a table ({reason}): every row must have as many cells as the header") from error


def uncompressed(path: Path) -> bytes:
    """A file's bytes, unpacked where its name ends in ``.xz``, ``.gz`` or ``.bz2``."""
    import bz2
    import gzip
    import zlib

    opener: Any = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            return file.read()
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{path} is cut short or not a {path.suffix} file: write it again") from error


def _once(path: Path, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{path} has the column {twice[0]!r} {Counter(names)[twice[0]]} times: rename them, so that a name says which"
        )
