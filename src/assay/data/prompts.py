"""Prompts of the user's, and those that come with Assay: one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assay.data._errors import DataError
from assay.data.tables import uncompressed


def read_prompts(path_or_name: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, or of an asset of prompts (``"gsm8k-test"``), in their order.

    Blank lines are skipped; ``.jsonl.gz``, ``.jsonl.xz`` and ``.jsonl.bz2`` are read as they are.

    Raises
    ------
    DataError
        If there is no such file, it has no record, is not UTF-8, or a line is no JSON object.
    """
    path = Path(path_or_name)
    if not path.exists():
        from assay.data._fetch import resolve

        path = resolve(path_or_name, "prompts").path
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a JSONL file of prompts")
    try:
        text = uncompressed(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (at byte {error.start}): save it as UTF-8 JSONL") from error
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"line {number} of {path} is not JSON ({error}): give one object a line") from error
        if not isinstance(record, dict):
            raise DataError(
                f"line {number} of {path} is a {type(record).__name__}, a JSON object was expected: give one a line"
            )
        records.append(record)
    if not records:
        raise DataError(f"{path} has no records: give at least one JSON object")
    return records
