"""The cache folder: where it is, one writer at a time, and nothing half written.

Inside it: ``packages`` (unpacked registry packages), ``assets`` (what a recipe or a conversion made), ``partial`` (work
that is not finished; a killed run's is taken up or removed by the next), ``locks`` and ``digests``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.data._errors import DataError

_REMEMBER = 16 * 2**20  # bytes: the digest of a larger file is remembered with its size and time
_FOLDERS = ("packages", "assets", "partial", "digests")


def cache() -> Path:
    """The folder for fetched data: ``ASSAY_CACHE``, or the platform's cache folder."""
    if folder := os.environ.get("ASSAY_CACHE"):
        return Path(folder).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("assay", appauthor=False))


def offline() -> bool:
    """Whether ``ASSAY_OFFLINE`` forbids downloads."""
    return os.environ.get("ASSAY_OFFLINE", "") not in ("", "0")


@contextmanager
def locked(key: str) -> Iterator[None]:
    """One process at a time; the others wait. A process that dies gives the lock back."""
    import filelock

    path = cache() / "locks" / f"{key}.lock"
    with _disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=5)
    except filelock.Timeout:
        print(f"Waiting for another process that prepares {key}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def made_once(target: Path, make: Callable[[Path], None], ready: Callable[[Path], bool] = Path.exists) -> Path:
    """The target, made by ``make(path)`` unless it is there; other processes wait for it.

    Parameters
    ----------
    target
        A file or a folder inside the cache.
    make
        Writes a file or a folder at the path that it is given, which is renamed when it returns.
    ready
        Whether what lies at the target is good; what is not is removed and made again.
    """
    if ready(target):
        return target
    with locked(target.name):
        if ready(target):
            return target
        remove(target)
        beside = cache() / "partial" / target.name
        with _disk(target):
            remove(beside)  # of a run that was killed
            beside.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                make(beside)
                os.replace(beside, target)
            except BaseException:
                remove(beside)
                raise
    return target


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """A full or read-only disk, in one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left for {path.name} in {path.parent}: free some, or set ASSAY_CACHE to a folder on a larger disk"
            ) from error
        ours = str(error.filename or "").startswith(str(cache()))
        if ours and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise DataError(f"{path.parent} cannot be written: set ASSAY_CACHE to a folder that can") from error
        raise


def need_space(size: int, what: str) -> None:
    """Refuse a job that the disk of the cache has no room for.

    Parameters
    ----------
    size
        Bytes that the job will write.
    what
        Its name, for the sentence.
    """
    folder = cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DataError(
            f"{what} needs {size / 1e6:,.0f} MB and {folder} has {free / 1e6:,.0f} MB left: "
            "free some, or set ASSAY_CACHE to a folder on a larger disk"
        )


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, of the uncompressed bytes where its name ends in ``.xz``."""
    import lzma

    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def set_digest(files: Iterable[Path]) -> str:
    """One digest of several files, whatever their order: SHA-256 over lines ``name NUL sha256 LF``, names sorted."""
    lines = [f"{path.name}\0{sha256(path)}\n" for path in sorted(files, key=lambda path: path.name)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def content_digest(path: Path) -> str:
    """A digest of a user's file or folder, by content; that of a large file is remembered until the file changes."""
    if path.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{content_digest(file)}\n".encode())
        return digest.hexdigest()
    about = path.stat()
    if about.st_size <= _REMEMBER:
        return sha256(path)
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    memo = cache() / "digests" / f"{place}.json"
    state = [about.st_size, about.st_mtime_ns, about.st_ino]
    try:
        known = json.loads(memo.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        known = {}
    if known.get("state") != state:
        known = {"state": state, "sha256": sha256(path)}
        with _disk(memo):
            memo.parent.mkdir(parents=True, exist_ok=True)
            beside = memo.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps(known))
            os.replace(beside, memo)
    return known["sha256"]


def clear() -> int:
    """Remove everything that was fetched or made. Bytes freed."""
    freed = 0
    for name in _FOLDERS:
        folder = cache() / name
        if folder.is_dir():
            freed += size_of(folder)
            remove(folder)
    return freed
