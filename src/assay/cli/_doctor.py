"""``assay doctor``: what is installed, what is missing, how to get it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import assay
from assay._extras import install_line
from assay.bench._card import all_cards
from assay.bench._check import cuda_devices
from assay.bench._figures import many, size
from assay.bench._home import home, store_path
from assay.cli._terminal import paint, wrap

_REQUIREMENT = re.compile(
    r"""^(?P<name>[A-Za-z0-9_.-]+)(?:\[(?P<inner>[^\]]+)\])?\s*(?P<bounds>[^;]*)(?:;.*extra\s*==\s*['"](?P<extra>[^'"]+)['"])?"""
)


def doctor(asked: argparse.Namespace) -> int:
    """Look at the machine and the installation; print it, or give it as JSON."""
    found = look()
    if asked.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    _about("assay", f"{found['assay']}, in {found['package']}")
    _about("python", f"{found['python']}, {found['platform']}")
    memory = found["memory_bytes"]
    _about("machine", f"{many(found['cores'], 'core')}" + (f", {size(memory)} of memory" if memory else ""))
    torch = found["torch"]
    _about("torch", f"{torch['version']}, {torch['device']}" if torch else "not installed")
    _about("offline", "yes: ASSAY_OFFLINE forbids any download" if found["offline"] else "no: missing data are fetched")
    for name, folder in found["folders"].items():
        _about(name, f"{folder['path']} ({size(folder['bytes'])}; {size(folder['free'])} free)")
    print()
    for extra, row in found["extras"].items():
        lacks = [f"{p['name']} {p['installed'] or ''}".strip() for p in row["packages"] if not p["good"]]
        if not lacks:
            print(paint(f"{extra:10}", "green") + f"complete ({many(len(row['packages']), 'package')})")
            continue
        print(paint(f"{extra:10}", "yellow") + wrap(f"lacks {', '.join(lacks)}", 10).lstrip())
        print(" " * 10 + row["install"])
    print()
    column = 2 + max(map(len, found["methods"]))
    for slug, row in found["methods"].items():
        state = "ready" if not row["lacks"] else f"needs {install_line(*row['lacks'])}"
        print(f"{slug:<{column}}{state}")
    return 0


def look() -> dict[str, Any]:
    """Everything that `assay doctor` tells, in the form of its JSON."""
    from assay.data._cache import cache, offline

    extras: dict[str, dict[str, Any]] = {
        name: {"packages": packages, "install": install_line(name)} for name, packages in _extras().items()
    }
    complete = {name for name, row in extras.items() if all(package["good"] for package in row["packages"])}
    return {
        "assay": assay.__version__,
        "package": str(Path(assay.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "torch": _torch(),
        "offline": offline(),
        "folders": {
            "home": _folder(home()),
            "store": _folder(store_path()),
            "cache": _folder(cache()),
        },
        "extras": extras,
        "methods": {
            slug: {"extras": list(card.extras), "lacks": [e for e in card.extras if e not in complete]}
            for slug, card in all_cards().items()
        },
    }


def _extras() -> dict[str, list[dict[str, Any]]]:
    """``{extra: packages}`` of the installed distribution, each with its bound, what is installed, and whether that fits."""
    own: dict[str, list[tuple[str, str]]] = {}
    inner: dict[str, list[str]] = {}
    for line in metadata.requires("assay") or []:
        parts = _REQUIREMENT.match(line)
        assert parts is not None, line
        extra = parts["extra"] or "(core)"
        if parts["name"] == "assay":
            inner.setdefault(extra, []).extend(name.strip() for name in parts["inner"].split(","))
        else:
            own.setdefault(extra, []).append((parts["name"], parts["bounds"].strip(" ()")))

    def all_of(extra: str) -> Iterator[tuple[str, str]]:
        yield from own.get(extra, [])
        for other in inner.get(extra, []):
            yield from all_of(other)

    names = [name for name in {**own, **inner} if name not in ("(core)", "dev", "docs")]
    return {name: [_package(*pair) for pair in sorted(dict(all_of(name)).items())] for name in names}


def _package(name: str, bounds: str) -> dict[str, Any]:
    try:
        installed: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        installed = None
    good = installed is not None and all(_within(installed, bound) for bound in bounds.split(",") if bound)
    return {"name": name, "bounds": bounds, "installed": installed, "good": good}


def _within(version: str, bound: str) -> bool:
    """Whether a version meets ``>=x``, ``<x`` or ``==x``, by its leading numbers."""
    relation, wanted = re.match(r"\s*([<>=!~]+)\s*(\S+)", bound).groups()  # type: ignore[union-attr]
    have, want = _numbers(version), _numbers(wanted)
    length = max(len(have), len(want))
    have, want = [x + [0] * (length - len(x)) for x in (have, want)]
    return {">=": have >= want, "<": have < want, "==": have == want}.get(relation, True)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split(".")]  # type: ignore[index]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int | None:
    """Bytes of memory, None where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _torch() -> dict[str, str] | None:
    """Torch's version and what it computes on, without importing it; None where it is not installed."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    devices = cuda_devices()
    device = many(devices, "CUDA device") if devices else "no CUDA device: it computes on the cores"
    return {"version": version, "device": device}


def _folder(path: Path) -> dict[str, Any]:
    files = [path] if path.is_file() else path.rglob("*")
    there = path
    while not there.exists():
        there = there.parent
    n_bytes = sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
    return {"path": str(path), "bytes": n_bytes, "free": shutil.disk_usage(there).free}


def _about(what: str, text: str) -> None:
    line = wrap(text, 10, first=what)
    print(paint(line[:10], "dim") + line[10:])
