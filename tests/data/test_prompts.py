"""Prompts are the records of a JSONL file, or refused in a sentence that names the line."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from assay.data import DataError, UnknownAsset, open_input, read_prompts, resolve


def test_gsm8k_comes_with_assay():
    test = read_prompts("gsm8k-test")
    assert (len(test), len(read_prompts("gsm8k-train"))) == (1319, 7473)
    assert all(set(record) == {"question", "answer"} for record in test)
    assert open_input(resolve("gsm8k-test", "prompts")) == test
    with pytest.raises(DataError, match="gsm8k-test is prompts, but a table is expected"):
        resolve("gsm8k-test", "table")


@pytest.mark.parametrize("ending", ["", ".xz", ".gz"])
def test_records_keep_their_order_and_blank_lines_are_skipped(tmp_path: Path, ending: str):
    text = '\ufeff{"prompt": "a\\u2028b \u2028 c"}\r\n\r\n{"prompt": [1, 2], "n": 3}\n'
    pack = {"": lambda b: b, ".xz": lzma.compress, ".gz": gzip.compress}[ending]
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(pack(text.encode()))
    # A line separator of Unicode inside a string does not end a line.
    assert read_prompts(file) == [{"prompt": "a\u2028b \u2028 c"}, {"prompt": [1, 2], "n": 3}]


def test_what_is_no_record_is_said_with_its_line(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    for content, sentence in (
        (b'{"prompt": "a"}\n{"prompt": ', r"line 2 of .*a\.jsonl is not JSON"),
        (b'{"prompt": "a"}\n[1]\n', r"line 2 of .*a\.jsonl is a list, a JSON object was expected"),
        (b"\n \n", "has no records"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            read_prompts(file)
    with pytest.raises(DataError, match="is a folder"):
        read_prompts(tmp_path)
    with pytest.raises(UnknownAsset):
        read_prompts("no-such-prompts")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-9])
    with pytest.raises(DataError, match="is cut short"):
        read_prompts(tmp_path / "cut.jsonl.gz")
