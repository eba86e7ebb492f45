"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay._errors import InputError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its name when it is whole; its folder is made.

    A link keeps pointing where it does, and a device or a pipe (``/dev/stdout``) is written into, never replaced.

    Raises
    ------
    InputError
        Where the path is a folder.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file in it")
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
