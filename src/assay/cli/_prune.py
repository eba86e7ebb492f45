"""``assay prune``: stored trials of code that has changed since."""

from __future__ import annotations

import argparse
import sys

from assay._errors import InputError
from assay.bench._figures import many, size


def prune(asked: argparse.Namespace) -> int:
    """Say what is outdated, ask, and delete it."""
    from assay.bench import _prune
    from assay.bench._home import store_path
    from assay.bench._store import Store

    if not store_path().exists():
        print("nothing is stored")
        return 0
    with Store() as store:
        found = _prune.outdated(store)
        for one in found:
            print(f"{one.method}: {many(len(one.keys), 'job')} of older code, {size(one.size)} beside the store")
        if not found:
            print("nothing is outdated")
        if not found or asked.dry_run:
            return 0
        if not asked.yes:
            if not sys.stdin.isatty():
                raise InputError("this deletes stored trials: say --yes where nobody can be asked")
            if input("Delete them? [y/N] ").strip().lower() not in ("y", "yes"):
                print("nothing was deleted")
                return 0
        print(f"{many(_prune.prune(store, found), 'job')} deleted")
    return 0
