"""A cache of its own for each test, and registry clients that reach no network."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; nothing on ASSAY_DATA_PATH; downloads allowed."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ASSAY_DATA_PATH", raising=False)
    monkeypatch.delenv("ASSAY_OFFLINE", raising=False)
    return tmp_path / "cache"


def tarball(files: dict[str, bytes]) -> bytes:
    """A .tgz file, the same bytes each time."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=0) as file:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return held.getvalue()


def wheel(name: str, version: str, files: dict[str, bytes]) -> bytes:
    """A wheel that pip accepts."""
    held = io.BytesIO()
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(held, "w") as file:
        for path, content in files.items():
            file.writestr(path, content)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return held.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for npm, first on PATH: copies ``package.tgz`` of this folder, and writes a line to ``calls``.

    It waits as many seconds as the file ``wait`` says, with half of the package written.
    """
    folder = tmp_path / "npm"
    folder.mkdir()
    script = folder / "npm"
    script.write_text(
        "#!/bin/sh\n"
        f'echo call >> "{folder}/calls"\n'
        f'[ -f "{folder}/fail" ] && {{ cat "{folder}/fail" >&2; exit 1; }}\n'
        f'head -c 40 "{folder}/package.tgz" > "$4/package.tgz"\n'
        f'[ -f "{folder}/wait" ] && sleep "$(cat "{folder}/wait")"\n'
        f'cp "{folder}/package.tgz" "$4/package.tgz"\n'
    )
    script.chmod(0o755)
    (folder / "package.tgz").write_bytes(tarball({"package/a.txt": b"one", "package/b/c.txt": b"two"}))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder
