"""``assay report`` and ``assay export``: what the store holds, as a page and as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay._errors import InputError
from assay.bench._home import artifacts_folder, report_path
from assay.bench._methods import method_folders
from assay.bench._study import SCALES

if TYPE_CHECKING:
    from assay.bench._check import CheckResult
    from assay.bench._report import Extra


def report(asked: argparse.Namespace) -> int:
    """Write the page over everything that was measured here."""
    path = write(measured(), Path(asked.out) if asked.out else None)
    print(path)
    if asked.open:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            print("no browser could be started here: open the file yourself", file=sys.stderr)
    return 0


def export(asked: argparse.Namespace) -> int:
    """Write every trial of the store into a table."""
    from assay.bench._export import export as write_table

    written = write_table(asked.format, asked.path)
    print(written if written is not None else asked.path)
    return 0


def measured() -> list[CheckResult]:
    """How claims stand, for each method and scale that the store has trials of.

    Raises
    ------
    InputError
        Where nothing was measured here yet.
    """
    from assay.bench._check import standing
    from assay.bench._store import Store

    with Store() as store:
        there = [(slug, scale) for slug in method_folders() for scale in SCALES if store.statuses(slug, scale)]
    if not there:
        raise InputError("nothing was measured here yet: run `assay tour`, or `assay check NAME`, then the report")
    return [standing(slug, scale) for slug, scale in there]


def write(results: Sequence[CheckResult], path: Path | None = None) -> Path:
    """Write the page of some checks, with what their prepares found and what their trials left to look at."""
    from assay.bench._report import write_report

    extra = {result.method: _extra(result) for result in results}
    return write_report(path or report_path(), results, extra=extra)


def _extra(result: CheckResult) -> Extra:
    from assay.bench._report import Extra
    from assay.bench._store import Store

    with Store() as store:
        rows = [row for row in store.rows(result.method, kind=None) if row.key in result.keys and row.status == "done"]
    prepared = [
        {"name": row.name, "at": _where(row.job), "result": dict(row.result)} for row in rows if row.kind == "prepare"
    ]
    artifacts = [
        (row.label, file)
        for row in rows
        if row.kind == "trial"
        for file in sorted(artifacts_folder(row.key).glob("*"))
        if file.is_file()
    ]
    return Extra(prepared=[entry for entry in prepared if entry["result"]], artifacts=artifacts)


def _where(job: Mapping[str, Any]) -> dict[str, Any]:
    arm = {"arm": job["arm"]} if job.get("arm") else {}
    return {**arm, **job["at"]}
