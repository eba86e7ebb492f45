"""What the store keeps of code that has changed since: found, and removed with all that lies beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from assay.bench._fingerprint import fingerprints
from assay.bench._home import artifacts_folder, lock_path, log_path, prepared_folder
from assay.bench._methods import method_folders
from assay.bench._outline import read_outline
from assay.bench._store import Store


@dataclass(frozen=True)
class Outdated:
    """Jobs of a method that no check reads any more, since the code behind them is another one now.

    Attributes
    ----------
    keys
        Of the jobs.
    size
        Bytes of what they left beside the store.
    """

    method: str
    keys: tuple[str, ...]
    size: int


def outdated(store: Store) -> list[Outdated]:
    """Every method's jobs of other code than today's, and those of methods that are gone."""
    stored = store.fingerprints()
    found = []
    for method in sorted({row.method for row in stored}):
        folder = method_folders().get(method)
        today = fingerprints(read_outline(folder)) if folder is not None else {}
        keys = tuple(row.key for row in stored if row.method == method and today.get(row.name) != row.fingerprint)
        if keys:
            found.append(Outdated(method, keys, sum(_size(path) for key in keys for path in _beside(key))))
    return found


def prune(store: Store, jobs: Iterable[Outdated]) -> int:
    """Remove jobs from the store, and what they left beside it. A job that runs at this moment stays.

    Returns
    -------
    How many were removed.
    """
    removed = 0
    for keys in (job.keys for job in jobs):
        for key in keys:
            lock_path(key).parent.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(lock_path(key), timeout=0):
                    for path in _beside(key):
                        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                    store.delete(key)
            except Timeout:
                continue
            lock_path(key).unlink(missing_ok=True)
            removed += 1
    return removed


def _beside(key: str) -> tuple[Path, ...]:
    return prepared_folder(key), artifacts_folder(key), log_path(key)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
