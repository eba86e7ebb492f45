"""Tiny methods in a folder of their own, checked in a home of their own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CARD = """
name    = "{name}"
title   = "{name}"
summary = "A method for tests."
fields  = ["tests"]
extras  = []

[paper]
title  = "A paper"
id     = "arXiv:0000.00000"
venue  = "ICLR 2026"
bibtex = "@misc{{paper, title={{A paper}}}}"
"""
CLAIM = """
[[claims]]
id         = "first"
says       = "The good arm is better."
testable   = "full"
experiment = "race"
holds_if   = "loss[good] < loss[bad]"
"""


class Bench:
    """Writes tiny methods and checks them, here or in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.methods = folder / "methods"
        self.home = folder / "home"
        self.journal = folder / "journal"
        self.methods.mkdir()

    def method(self, name: str, study: str, claims: str = CLAIM, **files: str) -> str:
        """Write a method; returns its slug. ``files`` are further files, ``_py`` standing for ``.py``."""
        folder = self.methods / name
        folder.mkdir(exist_ok=True)
        (folder / "card.toml").write_text(CARD.format(name=name.replace("_", "-")) + textwrap.dedent(claims))
        (folder / "__init__.py").touch()
        (folder / "study.py").write_text(textwrap.dedent(study))
        for file, text in files.items():
            (folder / file.replace("_py", ".py")).write_text(textwrap.dedent(text))
        return name.replace("_", "-")

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "ASSAY_METHODS": str(self.methods),
            "ASSAY_HOME": str(self.home),
            "JOURNAL": str(self.journal),
        }

    def start(self, code: str, **variables: str) -> subprocess.Popen:
        """Run Python in a process of its own, with ``check`` imported."""
        command = [sys.executable, "-c", "from assay.bench import check\n" + textwrap.dedent(code)]
        return subprocess.Popen(
            command,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def lines(self) -> list[str]:
        """What the trials wrote to the journal."""
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def processes(self) -> list[int]:
        """The living processes that work in this home (Linux)."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and f"ASSAY_HOME={self.home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setenv("ASSAY_METHODS", str(made.methods))
    monkeypatch.setenv("ASSAY_HOME", str(made.home))
    monkeypatch.setenv("JOURNAL", str(made.journal))
    return made
