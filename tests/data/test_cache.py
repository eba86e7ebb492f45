"""The cache holds whole things or nothing."""

from __future__ import annotations

import errno
import lzma
import os
from pathlib import Path

import pytest

from assay.data import DataError, _cache

from .conftest import digest


def test_a_thing_is_made_once(cache: Path):
    target, calls = cache / "assets" / "thing", []

    def make(path: Path) -> None:
        calls.append(path)
        assert not target.exists(), "it must be written beside its place"
        path.write_text("whole")

    for _ in range(2):
        assert _cache.made_once(target, make).read_text() == "whole"
    assert len(calls) == 1


def test_a_maker_that_fails_leaves_nothing(cache: Path):
    def make(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _cache.made_once(cache / "assets" / "thing", make)
    assert not list((cache / "partial").iterdir())
    assert not (cache / "assets" / "thing").exists()


def test_what_a_killed_maker_left_is_removed_first(cache: Path):
    half = cache / "partial" / "thing"
    half.mkdir(parents=True)
    (half / "half").write_text("half")

    def make(path: Path) -> None:
        path.mkdir()
        (path / "whole").write_text("whole")

    made = _cache.made_once(cache / "assets" / "thing", make)
    assert [p.name for p in made.iterdir()] == ["whole"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(cache: Path):
    def make(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.raises(DataError, match=r"no space left for thing .*ASSAY_CACHE"):
        _cache.made_once(cache / "assets" / "thing", make)
    assert not list((cache / "partial").iterdir())


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "cache" / "locks"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match=r"cannot be written: set ASSAY_CACHE"):
        _cache.made_once(tmp_path / "cache" / "assets" / "thing", lambda _: None)


def test_the_digest_of_an_xz_file_is_that_of_what_is_in_it(tmp_path: Path):
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"held"))
    assert _cache.sha256(tmp_path / "a.xz") == digest(b"held")


def test_a_set_digest_is_that_of_its_lines_whatever_the_order(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    lines = f"a\0{digest(b'a')}\nb\0{digest(b'b')}\n"
    assert _cache.set_digest([tmp_path / "b", tmp_path / "a"]) == digest(lines.encode())


def test_a_large_file_is_read_once_until_it_changes(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_cache, "_REMEMBER", 3)
    file, reads, read = tmp_path / "large", [], _cache.sha256
    monkeypatch.setattr(_cache, "sha256", lambda path: reads.append(path) or read(path))
    file.write_bytes(b"first")
    assert _cache.content_digest(file) == _cache.content_digest(file) == digest(b"first")
    assert len(reads) == 1
    file.write_bytes(b"other")
    os.utime(file, ns=(0, 0))
    assert _cache.content_digest(file) == digest(b"other")


def test_a_folder_is_another_one_when_a_file_is_renamed(cache: Path, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("x")
    before = _cache.content_digest(folder)
    (folder / "a").rename(folder / "b")
    assert _cache.content_digest(folder) != before


def test_clearing_removes_what_was_made_and_nothing_else(cache: Path):
    _cache.made_once(cache / "assets" / "thing", lambda path: path.write_text("1234") and None)
    (cache / "mine").write_text("keep")
    assert _cache.clear() == 4
    assert (cache / "mine").exists()
    assert not (cache / "assets").exists()
