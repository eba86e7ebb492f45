"""``assay check`` and ``assay tour``: claims are measured, and their verdicts shown."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay._extras import install_line
from assay.bench._card import load_card
from assay.bench._figures import duration, many
from assay.bench._methods import method_folders
from assay.bench._outline import read_outline
from assay.bench._results import VERDICTS, save_result, spoken
from assay.cli._list import method_folder
from assay.cli._parser import UsageError
from assay.cli._progress import Progress
from assay.cli._report import remember, write
from assay.cli._terminal import paint, wrap
from assay.cli._verdicts import verdict_table

if TYPE_CHECKING:
    from assay.bench._check import CheckResult

# One of each field; together at most five minutes on two cores.
TOUR = ("uncertain-imputation", "racs-alice", "vattention")


def check(asked: argparse.Namespace) -> int:
    """Check the named methods, one after another, and print what became of their claims.

    Returns
    -------
    int
        0 where every trial ran, 1 where some failed, 130 where it was interrupted.
    """
    slugs = _methods(asked.names, asked.all)
    overrides, inputs = _pairs(asked.set, "--set"), _pairs(asked.input, "--input")
    if asked.save:
        _refuse_to_save(asked)
    status = 0
    for i, slug in enumerate(slugs):
        began = time.monotonic()
        terms = {"scale": asked.scale, "seeds": asked.seeds, "only": asked.only, "set": overrides, "inputs": inputs}
        result = _measure(slug, **terms, engine=asked.engine, workers=asked.workers, dry_run=asked.dry_run)
        if not asked.dry_run:
            remember(slug, **terms)
        if asked.json:
            print(json.dumps(result.to_json(), ensure_ascii=False), flush=True)
        if result.interrupted:
            return _interrupted(result, asked.typed)
        if not asked.json:
            if i:
                print()
            print(summary(result, time.monotonic() - began, asked.dry_run), flush=True)
        if asked.save:
            print(f"saved: {save_result(result)}", file=sys.stderr)
        if result.trials["failed"]:
            status = 1
    return status


def tour(asked: argparse.Namespace) -> int:
    """A quick check of one method from each field on real data, and the report."""
    slugs = _methods(TOUR, False)
    cards = {slug: load_card(method_folder(slug)[1]) for slug in slugs}
    print(
        wrap(
            f"A tour through {many(len(slugs), 'method')}: their claims, measured on real data with three or more seeds."
        )
    )
    for slug, card in cards.items():
        print(wrap(card.summary, 24, first=f"  {slug}"))
    print(wrap("It takes about four minutes on two cores, after the downloads; a second tour reuses what it measured."))
    print(flush=True)
    _fetch(slugs)
    status = 0
    results = []
    for slug in slugs:
        began = time.monotonic()
        result = _measure(slug, scale="quick")
        if result.interrupted:
            return _interrupted(result, asked.typed)
        results.append(result)
        print(summary(result, time.monotonic() - began) + "\n", flush=True)
        if result.trials["failed"]:
            status = 1
    path = write(results, Path(asked.out) if asked.out else None)
    print(f"The report, with every plot: {path}")
    print("What next: assay list, assay show NAME, assay check NAME --scale full")
    if shutil.which("assay") is None:
        print(f"(`assay` is in {Path(sys.executable).parent}: . {Path(sys.executable).parent / 'activate'})")
    return status


def summary(result: CheckResult, seconds: float, dry_run: bool = False) -> str:
    """What a check came to: one line of trials, the verdicts, and their count."""
    counts = result.trials
    ran = counts["done"] + counts["reused"] + counts["failed"] + counts["skipped"]
    parts = [f"{counts[word]} {word}" for word in ("reused", "failed", "skipped", "missing") if counts.get(word)]
    head = f"scale {result.scale}, {many(ran + counts['missing'], 'trial')}" + (
        f" ({', '.join(parts)})" if parts else ""
    )
    head += ", nothing was run" if dry_run else f", {duration(seconds)}"
    lines = [wrap(f"{result.card.title} ({result.method}): {head}")]
    if result.overridden:
        lines.append(paint(wrap(f"off the study's defaults: {', '.join(map(str, result.overridden))}"), "yellow"))
    reasons: dict[str, list[str]] = {}
    for label, why in result.failures:
        reasons.setdefault(why, []).append(label)
    for why, labels in list(reasons.items())[:5]:
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        lines.append(wrap(f"{labels[0]}{more}: {why}", 14, first="failed"))
    verdicts = {verdict.id: verdict.to_json() for verdict in result.verdicts}
    tally = dict.fromkeys(VERDICTS, 0)
    for verdict in result.verdicts:
        tally[verdict.verdict] += not verdict.left_out
    said = spoken({word: n for word, n in tally.items() if n})
    if later := sum(verdict.left_out for verdict in result.verdicts):
        said += f", {later} at a larger scale only"
    claims = [claim for claim in result.card.claims if claim.id in verdicts]
    return "\n".join([*lines, "", verdict_table(claims, verdicts), "", wrap(f"{result.method}: {said}")])


def _measure(slug: str, **how: Any) -> CheckResult:
    from assay.bench._check import check as measure

    try:
        with Progress(slug) as progress:
            return measure(slug, on_event=progress, **how)
    except (ImportError, RuntimeError) as error:
        missing = re.search(r"No module named '([^'.]+)", str(error))
        if missing is None or missing[1] == "assay" or "pip install" in str(error):
            raise
        line = install_line(*load_card(method_folder(slug)[1]).extras)
        raise ImportError(f"{slug} needs the package {missing[1]!r}, which is not installed: {line}") from error


def _methods(names: Sequence[str], everything: bool) -> list[str]:
    if everything and names:
        raise UsageError("assay check", "--all is every method: leave the names out, or --all")
    if everything:
        return list(method_folders())
    if not names:
        raise UsageError("assay check", "name a method of `assay list`, or say --all")
    return list(dict.fromkeys(method_folder(name)[0] for name in names))


def _pairs(given: Sequence[str], option: str) -> dict[str, str]:
    """``["a=1", "b=x"]`` as a mapping."""
    pairs: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise UsageError("assay check", f"{option} takes NAME=VALUE, got {text!r}")
        if name in pairs:
            raise UsageError("assay check", f"{option} has {name!r} twice: write several values with commas")
        pairs[name] = value
    return pairs


def _refuse_to_save(asked: argparse.Namespace) -> None:
    """Say before the work, not after it, that its result could not be kept."""
    for option in ("set", "input", "only", "seeds"):
        if getattr(asked, option) not in (None, []):
            raise UsageError("assay check", f"--save keeps runs with the study's defaults only: leave --{option} out")
    if asked.dry_run:
        raise UsageError("assay check", "--save and --dry-run exclude each other: a dry run measures nothing")


def _fetch(slugs: Sequence[str]) -> None:
    """Fetch what the quick studies of some methods read, before anything is measured."""
    from assay.data import asset, assets, describe, fetch

    known = {it.name for it in assets()}
    needed: dict[str, None] = {}
    for slug in slugs:
        for experiment in read_outline(method_folder(slug)[1]).experiments.values():
            scaled = experiment.at_scale("quick")
            if scaled is None:
                continue
            inputs = [*scaled.inputs.values()]
            inputs += [str(value) for axis in scaled.axes if axis in experiment.inputs for value in scaled.axes[axis]]
            needed |= dict.fromkeys(name for name in inputs if name in known)
    missing = [name for name in needed if describe(name)["path"] is None]
    for name in missing:
        print(f"fetching {name}: {asset(name).title}", file=sys.stderr, flush=True)
        fetch(name)


def _interrupted(result: CheckResult, typed: Sequence[str]) -> int:
    counts: Mapping[str, int] = result.trials
    kept = counts["done"] + counts["reused"]
    print(
        f"interrupted: {many(kept, 'finished trial')} of {result.method} {'is' if kept == 1 else 'are'} kept, "
        f"{counts['missing']} to go; go on with: {shlex.join(['assay', *typed])}",
        file=sys.stderr,
        flush=True,
    )
    return 130
