"""Run the benchmarks and print one table: ``python -m benchmarks [--json FILE] [name ...]``."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks._harness import Ratio


def main() -> int:
    """Measure the named benchmarks (all, where none is named), one after another."""
    folder = Path(__file__).parent
    known = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all, where none is named")
    parser.add_argument("--json", type=Path, help="write the ratios to this file too")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    rows: dict[str, list[Ratio]] = {}
    for name in asked.names or known:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows[name] = importlib.import_module(f"benchmarks.{name}").measure()
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for name, ratios in rows.items():
        print(f"\n{name}")
        for row in ratios:
            bar = "" if row.bar is None else f"  bar {'<=' if row.better == 'below' else '>='} {row.bar:g}"
            met = {None: "", True: "  met", False: "  MISSED"}[row.met]
            print(f"  {row.ratio:9.3g} {row.unit:3s} {row.what}{bar}{met}{'  (' + row.note + ')' if row.note else ''}")
    if asked.json:
        asked.json.write_text(json.dumps({n: [asdict(r) for r in rs] for n, rs in rows.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
