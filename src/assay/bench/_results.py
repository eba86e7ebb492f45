"""The runs that the project stands by: ``results/<slug>.json``, and the tables that README and docs take from them.

``python -m assay.bench._results`` says which generated parts are stale, ``--write`` rewrites them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import assay
from assay._errors import InputError
from assay.bench._figures import exact, many, number, with_interval
from assay.bench._files import whole_file

VERDICTS = ("holds", "fails", "open", "measured", "not testable here")
SCALES = ("quick", "full", "paper")

_KEYS: dict[str, Any] = {
    "method": str,
    "version": str,
    "fingerprint": (str, dict),
    "date": str,
    "machine": dict,
    "versions": dict,
    "data": dict,
    "scale": str,
    "claims": list,
}
_CLAIM_KEYS = ("id", "verdict", "reported", "effect", "interval", "bar", "seeds", "per_seed", "note", "conditions")
_CONDITION_KEYS = ("test", "cell", "effect", "interval", "bar")
_MARK = re.compile(
    r"(?P<open><!-- generated: (?P<name>[a-z0-9][a-z0-9 -]*) -->\n)(?P<body>.*?)(?P<close><!-- end -->)", re.S
)
_FENCE = re.compile(r"(^ *```.*?^ *```[^\S\n]*$)", re.S | re.M)


# The files


def checkout() -> Path | None:
    """The root of the working tree that this package is run from; None for an installed wheel."""
    root = Path(assay.__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "src" / "assay").is_dir() else None


def save_result(check: Any, folder: Path | None = None) -> Path:
    """Write a run as ``<slug>.json``, beside it first and then renamed.

    Parameters
    ----------
    check : CheckResult
        A finished run with every setting and input at its default.
    folder
        Default: ``results`` of the working tree, or of the current folder for an installed package.

    Raises
    ------
    InputError
        If the run was interrupted or lacks trials, changed a setting or an input, or would take the place of a run at a
        larger scale. Trials that failed are no hindrance: the claims that need them are ``open`` and say so.
    """
    if check.partial or check.overridden:
        changed = " ".join(check.partial) or ", ".join(check.overridden)
        raise InputError(
            f"a run with {changed} cannot be saved: only whole runs with every default can, run it without"
        )
    lost = check.trials.get("missing", 0)
    if check.interrupted or lost:
        why = "was interrupted" if check.interrupted else f"lacks {many(lost, 'trial')}"
        raise InputError(
            f"a run of {check.method} that {why} cannot be saved: run the same command again to fill the gaps"
        )
    result = as_result(check)
    folder = folder or (checkout() or Path.cwd()) / "results"
    path = folder / f"{check.method}.json"
    if path.is_file():
        standing = read_result(path)["scale"]
        if SCALES.index(standing) > SCALES.index(check.scale):
            raise InputError(
                f"{path} holds a run at scale {standing!r}, and this one is {check.scale!r}: "
                f"run it with --scale {standing}, or remove the file first"
            )
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def as_result(check: Any) -> dict[str, Any]:
    """The JSON form of a run, checked."""
    result = {
        "method": check.method,
        "version": assay.__version__,
        "fingerprint": check.fingerprint,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": check.machine,
        "versions": check.versions,
        "data": check.data,
        "scale": check.scale,
        "claims": [verdict.to_json() for verdict in check.verdicts],
    }
    check_result(result, f"the run of {check.method}")
    return result


def read_result(path: Path) -> dict[str, Any]:
    """One result file, checked."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not JSON ({error}): write it with `assay check NAME --scale full --save`"
        ) from error
    check_result(result, str(path))
    if result["method"] != path.stem:
        raise InputError(f"{path} is a result of {result['method']!r}: name the file {result['method']}.json")
    return result


def load_results(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """All results, by slug: those of the working tree, else the copy inside the package.

    Returns
    -------
    ``{slug: result}``; empty where nothing was measured yet.
    """
    if folder is None:
        root = checkout()
        folder = root / "results" if root else Path(assay.__file__).parent / "results"
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))} if folder.is_dir() else {}


def check_result(result: Any, where: str) -> None:
    """Check the form of a result, and what a verdict needs to be one.

    Raises
    ------
    InputError
        Naming the place, the key and what was expected there.
    """

    def wrong(what: str, expected: str) -> InputError:
        return InputError(
            f"{where}: {what}, expected {expected}: write it again with `assay check NAME --scale full --save`"
        )

    if not isinstance(result, dict):
        raise wrong(f"a result is a {type(result).__name__}", "an object")
    for key, kind in _KEYS.items():
        if key not in result:
            raise wrong(f"no {key!r}", f"the keys {', '.join(_KEYS)}")
        if not isinstance(result[key], kind):
            raise wrong(
                f"{key!r} is {result[key]!r}", "text" if kind is str else getattr(kind, "__name__", "text or object")
            )
    if result["scale"] not in SCALES:
        raise wrong(f"scale {result['scale']!r}", " or ".join(SCALES))
    try:
        datetime.fromisoformat(result["date"])
    except ValueError as error:
        raise wrong(f"date {result['date']!r}", "an ISO date such as 2026-05-01") from error
    seen = set()
    for i, claim in enumerate(result["claims"]):
        at = f"claim {claim.get('id', i)!r}" if isinstance(claim, dict) else f"claim {i}"
        if not isinstance(claim, dict) or (missing := [k for k in _CLAIM_KEYS if k not in claim]):
            raise wrong(
                f"{at} lacks {', '.join(missing) if isinstance(claim, dict) else 'keys'}",
                "the keys " + ", ".join(_CLAIM_KEYS),
            )
        if claim["id"] in seen:
            raise wrong(f"{at} twice", "one entry a claim")
        seen.add(claim["id"])
        if claim["verdict"] not in VERDICTS:
            raise wrong(f"{at} has the verdict {claim['verdict']!r}", " or ".join(VERDICTS))
        for j, condition in enumerate(claim["conditions"]):
            if not isinstance(condition, dict) or any(k not in condition for k in _CONDITION_KEYS):
                raise wrong(f"condition {j} of {at} lacks keys", "the keys " + ", ".join(_CONDITION_KEYS))
        for part in (claim, *claim["conditions"]):
            if not all(_is_number(part[k]) for k in ("effect", "bar")):
                raise wrong(f"{at} has effect {part['effect']!r} and bar {part['bar']!r}", "numbers or null")
            if part["interval"] is not None and not _is_interval(part["interval"]):
                raise wrong(f"{at} has the interval {part['interval']!r}", "[low, high] with low <= high, or null")
        if claim["verdict"] in ("holds", "fails"):
            if any(claim[k] is None for k in ("effect", "interval", "bar")):
                raise wrong(f"{at} {claim['verdict']} without effect, interval and bar", "all three")
            if _count(claim["seeds"]) < 3:
                raise wrong(f"{at} {claim['verdict']} on {_count(claim['seeds'])} seeds", "at least three")


def _is_number(x: Any) -> bool:
    return x is None or (isinstance(x, int | float) and not isinstance(x, bool)) or x in ("inf", "-inf", "nan")


def _is_interval(x: Any) -> bool:
    if not (isinstance(x, list | tuple) and len(x) == 2 and all(_is_number(v) and v is not None for v in x)):
        return False
    return not float(x[0]) > float(x[1])


def _count(seeds: Any) -> int:
    return seeds if isinstance(seeds, int) else len(seeds)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


# What a method's claims come to


def tally(card: Any, result: Mapping[str, Any] | None) -> dict[str, int]:
    """How many claims of a card have each verdict, with ``"not measured yet"`` for those without one.

    A claim that no machine here can test needs no run to be counted.
    """
    found = {c["id"]: c["verdict"] for c in result["claims"]} if result else {}
    words = Counter(
        "not testable here" if claim.testable == "no" else found.get(claim.id, "not measured yet")
        for claim in card.claims
    )
    return {word: words[word] for word in (*VERDICTS, "not measured yet") if words[word]}


def spoken(counts: Mapping[str, int]) -> str:
    """``4 hold, 1 fails, 2 open``."""
    verbs = {"holds": ("holds", "hold"), "fails": ("fails", "fail")}
    return ", ".join(f"{n} {verbs.get(word, (word, word))[n != 1]}" for word, n in counts.items()) or "no claims"


# Tables in Markdown


def methods_table(cards: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """README: one row a method with its verdicts as counts."""
    rows = ["| method | what it is for | field | its claims, measured |", "|---|---|---|---|"]
    rows += [
        f"| [{_cell(card.title)}](docs/methods/{slug}.md) | {_cell(card.summary)} | {_cell(card.fields[0])} | "
        f"{_counts_cell(card, results.get(slug))} |"
        for slug, card in sorted(cards.items())
    ]
    return "\n".join(rows) + "\n" if cards else "No method yet.\n"


def methods_index(cards: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Docs: the methods under their fields."""
    by_field: dict[str, list[str]] = {}
    for slug, card in sorted(cards.items()):
        by_field.setdefault(card.fields[0], []).append(slug)
    parts = []
    for name in sorted(by_field):
        parts += [
            f"## {name[:1].upper()}{name[1:]}",
            "",
            "| method | what it is for | its claims, measured |",
            "|---|---|---|",
        ]
        parts += [
            f"| [{_cell(cards[slug].title)}]({slug}.md) | {_cell(cards[slug].summary)} | "
            f"{_counts_cell(cards[slug], results.get(slug))} |"
            for slug in by_field[name]
        ]
        parts.append("")
    return "\n".join(parts) if parts else "No method yet.\n"


def claims_table(card: Any, result: Mapping[str, Any] | None) -> str:
    """Docs page of a method: the paper's figure beside ours, claim by claim."""
    found = {c["id"]: c for c in result["claims"]} if result else {}
    rows = ["| claim | the paper | measured here | bar | verdict |", "|---|---|---|---|---|"]
    for claim in card.claims:
        got = found.get(claim.id)
        word = got["verdict"] if got else "not measured yet"
        if claim.testable == "no":
            word = "not testable here"
        says = _cell(claim.says)
        if claim.because:
            says += f"<br><small>{'not tested' if claim.testable == 'no' else 'scaled'}: {_cell(claim.because)}</small>"
        ours, bar = "–", "–"
        if got and got["effect"] is not None:
            interval = got["interval"] and [number(v) for v in got["interval"]]
            effect, span = with_interval(number(got["effect"]), interval)
            ours = f"**{effect}**" + (f"<br><small>{span}</small>" if interval else "")
            bar = exact(number(got["bar"]))
        note = f"<br><small>{_cell(got['note'])}</small>" if got and got["note"] else ""
        rows.append(f"| {says} | {_cell(claim.reported or '–')} | {ours} | {bar} | {_badge(word)}{note} |")
    lines = ["\n".join(rows), ""]
    if result:
        seeds = sorted({_count(c["seeds"]) for c in result["claims"] if _count(c["seeds"])})
        over = f", {'–'.join(str(s) for s in {min(seeds): 0, max(seeds): 0})} seeds" if seeds else ""
        machine = _machine(result["machine"])
        lines += [
            f"Measured on {result['date'][:10]} at scale `{result['scale']}`{over}, Assay {result['version']}"
            + (f" ({machine})" if machine else "")
            + ". In small: the 95 % interval.",
            "",
        ]
        again = f"`assay check {card.name} --scale {result['scale']}`"
    else:
        again = f"`assay check {card.name} --scale full`"
    lines += [f"Measure it yourself: {again}.", ""]
    return "\n".join(lines)


def _machine(facts: Mapping[str, Any]) -> str:
    """``AMD EPYC, 2 cores, 24 GiB, no GPU, Linux x86_64``; facts that are not there are left out."""
    parts = [
        facts.get("cpu"),
        "cores" in facts and many(facts["cores"], "core"),
        "memory_gib" in facts and f"{facts['memory_gib']} GiB",
        "gpu" in facts and (facts["gpu"] or "no GPU"),
        facts.get("system"),
    ]
    return ", ".join(_cell(part) for part in parts if part)


def _counts_cell(card: Any, result: Mapping[str, Any] | None) -> str:
    counts = tally(card, result)
    if result is None and "not measured yet" in counts:
        return f"{many(len(card.claims), 'claim')}, not measured yet"
    return spoken(counts) + (" (quick)" if result and result["scale"] == "quick" else "")


def _badge(word: str) -> str:
    return f'<span class="verdict {word.split()[0]}">{word}</span>'


def _cell(text: Any) -> str:
    """Text that stays inside its table cell and is not read as HTML."""
    plain = " ".join(str(text).split())
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


# The generated parts


def fill(text: str, part: Any, where: str) -> str:
    """Replace what lies between ``<!-- generated: NAME -->`` and ``<!-- end -->`` by ``part(NAME)``.

    Marks in a code block, as in a page that explains them, are left alone.
    """
    pieces = _FENCE.split(text)
    for i in range(0, len(pieces), 2):
        plain = re.sub(r"`[^`\n]*`", "", pieces[i])
        if plain.count("<!-- generated:") != len(_MARK.findall(plain)):
            raise InputError(f"{where} has a generated part without its end: close it with a line <!-- end -->")
        pieces[i] = _MARK.sub(lambda m: m["open"] + "\n" + part(m["name"]).strip("\n") + "\n\n" + m["close"], pieces[i])
    return "".join(pieces)


def pages(root: Path, cards: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[tuple[Path, str, str]]:
    """Every page: its path, its text, and its text with the generated parts as they should be."""

    def part(where: Path, name: str) -> str:
        kind, _, slug = name.partition(" ")
        if kind == "claims" and slug in cards:
            return claims_table(cards[slug], results.get(slug))
        if name == "methods":
            return (methods_index if root / "docs" in where.parents else methods_table)(cards, results)
        known = ["methods", *(f"claims {slug}" for slug in cards)]
        raise InputError(f"{where} asks for a generated part {name!r}: there are {', '.join(known)}")

    readme = [root / "README.md"] if (root / "README.md").is_file() else []
    for path in readme + sorted((root / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        yield path, text, fill(text, lambda name, path=path: part(path, name), str(path))


def main(argv: list[str] | None = None) -> int:
    """Say which pages are stale (exit status 1), or rewrite them."""
    parser = argparse.ArgumentParser(prog="python -m assay.bench._results", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the generated parts of README.md and docs")
    asked = parser.parse_args(argv)
    root = checkout()
    if root is None:
        raise InputError("there is no working tree here: install Assay with `pip install -e .` from its repository")
    from assay.bench._card import all_cards

    stale = [(path, new) for path, old, new in pages(root, all_cards(), load_results(root / "results")) if old != new]
    for path, new in stale:
        if asked.write:
            _write(path, new)
        print(f"{path.relative_to(root)} {'rewritten' if asked.write else 'is stale'}")
    if not stale:
        print("every generated part is fresh")
    return int(bool(stale) and not asked.write)


if __name__ == "__main__":
    sys.exit(main())
