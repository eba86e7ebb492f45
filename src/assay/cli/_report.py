"""``assay report`` and ``assay export``: what the store holds, as a page and as a table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay._errors import InputError
from assay.bench._files import whole_file
from assay.bench._home import artifacts_folder, home, report_path
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

    print(write_table(asked.format, asked.path))
    return 0


def measured() -> list[CheckResult]:
    """How claims stand: for each method and scale that was checked, and for each check on a user's own terms.

    Raises
    ------
    InputError
        Where nothing was measured here yet.
    """
    from assay.bench._check import check, standing
    from assay.bench._store import Store

    with Store() as store:
        there = [(slug, scale) for slug in method_folders() for scale in SCALES if store.statuses(slug, scale)]
    own = []
    for how in _remembered():
        try:
            own.append(check(**how, dry_run=True))
        except InputError as error:  # its file is gone, or the study has changed since
            print(f"left out of the report: a check of {how['method']}, because {error}", file=sys.stderr)
    results = [standing(slug, scale) for slug, scale in there]
    shown = {(result.method, result.scale) for result in own}
    # The trials of own checks are not those of the defaults, which may never have run.
    results = [r for r in results if _ran(r) or (r.method, r.scale) not in shown] + [r for r in own if _ran(r)]
    if not results:
        raise InputError("nothing was measured here yet: run `assay tour`, or `assay check NAME`, then the report")
    return results


def remember(method: str, **how: Any) -> None:
    """Keep the terms of a check that had other settings, inputs, seeds or experiments than the study, for the report."""
    if not any(how[name] for name in ("seeds", "only", "set", "inputs")):
        return
    inputs = {name: ",".join(map(_absolute, text.split(","))) for name, text in how["inputs"].items()}
    terms = {"method": method, **how, "inputs": inputs, "only": list(how["only"])}
    kept = [other for other in _remembered() if other != terms] + [terms]
    path = home() / "checks.json"
    with whole_file(path) as file:
        file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _remembered() -> list[dict[str, Any]]:
    path = home() / "checks.json"
    if not path.exists():
        return []
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        kept = None
    keys = {"method", "scale", "seeds", "only", "set", "inputs"}
    if not isinstance(kept, list) or not all(isinstance(how, dict) and how.keys() == keys for how in kept):
        raise InputError(
            f"{path} is damaged: remove it; it holds only which checks had settings or inputs of your own, for the report"
        )
    return kept


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _ran(result: CheckResult) -> bool:
    return any(n for word, n in result.trials.items() if word != "missing")


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
