"""Where the workbench keeps its store, what trials share, what they leave, and the report."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The workbench's folder: ``ASSAY_HOME``, by default the platform's user data folder. Not made here."""
    if given := os.environ.get("ASSAY_HOME"):
        return Path(given).expanduser().absolute()
    from platformdirs import user_data_dir

    return Path(user_data_dir("assay"))


def store_path() -> Path:
    """The store of finished trials, a SQLite file."""
    return home() / "assay.sqlite"


def prepared_folder(key: str) -> Path:
    """What a prepare left for its trials."""
    return home() / "prepared" / key


def artifacts_folder(key: str) -> Path:
    """Pictures and examples that a trial left for the report. Absent where it left none."""
    return home() / "artifacts" / key


def log_path(key: str) -> Path:
    """What a trial printed. Absent where it printed nothing."""
    return home() / "artifacts" / f"{key}.log"


def lock_path(key: str) -> Path:
    """The file that whoever runs a job holds locked."""
    return home() / "locks" / f"{key}.lock"


def report_path() -> Path:
    """The report over all methods."""
    return home() / "report.html"
