"""``assay data``: the models and data sets behind the studies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from assay._errors import InputError
from assay.bench._figures import size
from assay.cli._terminal import paint, wrap


def data(asked: argparse.Namespace) -> int:
    """Do what the verb says."""
    return {"list": _list, "show": _show, "get": _get, "clean": _clean}[asked.verb](asked)


def _list(asked: argparse.Namespace) -> int:
    from assay.data import assets, describe

    rows = [describe(asset.name) for asset in assets()]
    if asked.json:
        print(json.dumps([_plain(row) for row in rows], indent=1, ensure_ascii=False))
        return 0
    indent = max(len(row["name"]) for row in rows) + 2
    for row in rows:
        here = size(row["bytes"]) if row["path"] else "not here"
        lines = wrap(row["title"], indent, first=row["name"])
        print(paint(lines[:indent], "bold") + lines[indent:])
        print(paint(wrap(f"{row['kind']}, {here}; {row['licence']}", indent), "dim"))
    return 0


def _show(asked: argparse.Namespace) -> int:
    from assay.data import describe

    row = describe(asked.name)
    if asked.json:
        print(json.dumps(_plain(row), indent=1, ensure_ascii=False))
        return 0
    print(paint(row["name"], "bold") + f": {row['title']}")
    for key in ("kind", "licence", "attribution", "sha256"):
        if row[key]:
            print(wrap(str(row[key]), 13, first=key))
    for i, place in enumerate(row["places"]):
        print(wrap(place, 13, first="places" if i == 0 else ""))
    print(wrap(f"{row['path']} ({size(row['bytes'])})" if row["path"] else "not here", 13, first="lies at"))
    if row["missing"]:
        print(wrap(row["missing"], 13, first="to get it"))
    return 0


def _get(asked: argparse.Namespace) -> int:
    from assay.data import asset, fetch

    for name in asked.names:  # a mistyped last name must not cost the downloads before it
        asset(name)
    for name in asked.names:
        print(f"{name}: {fetch(name)}", flush=True)
    return 0


def _clean(asked: argparse.Namespace) -> int:
    from assay.data import asset, clean

    for name in asked.names:
        asset(name)
    what = ", ".join(asked.names) if asked.names else "every download, and what studies prepared from them"
    if not asked.yes:
        if not sys.stdin.isatty():
            raise InputError(f"this deletes {what}: say --yes where nobody can be asked")
        if input(f"Delete {what}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 0
    freed = sum(clean(name) for name in asked.names) if asked.names else clean() + _clean_prepared()
    print(f"{size(freed)} freed")
    return 0


def _clean_prepared() -> int:
    """Remove what `prepare` functions left: it is made again where a trial needs it. Returns the bytes freed."""
    import shutil

    from assay.bench._home import home

    folder = home() / "prepared"
    freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder, ignore_errors=not folder.exists())
    return freed


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "path": str(row["path"]) if row["path"] else None}
