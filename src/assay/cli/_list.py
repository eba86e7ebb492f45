"""``assay list``, ``assay show`` and ``assay cite``: what the cards say. Nothing heavy is imported on this path."""

from __future__ import annotations

import argparse
import ast
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay._errors import InputError
from assay._extras import install_line
from assay.bench._card import Card, all_cards, load_card
from assay.bench._methods import method_folders
from assay.bench._results import load_results, spoken, tally
from assay.cli._terminal import paint, reflow, unknown, wrap
from assay.cli._verdicts import verdict_table


def method_folder(name: str) -> tuple[str, Path]:
    """The slug and the folder of a method; underscores are taken for dashes.

    Raises
    ------
    InputError
        Where there is no such method; names the nearest.
    """
    folders = method_folders()
    slug = name.replace("_", "-")
    if slug not in folders:
        raise InputError(unknown("method", name, folders))
    return slug, folders[slug]


def list_methods(asked: argparse.Namespace) -> int:
    """Every method with its field and how its claims stand; with ``--for``, those that take a file."""
    cards, results = all_cards(), load_results()
    if asked.field is not None:
        fields = {field for card in cards.values() for field in card.fields}
        if asked.field not in fields:
            raise InputError(unknown("field", asked.field, sorted(fields)))
        cards = {slug: card for slug, card in cards.items() if asked.field in card.fields}
    commands: dict[str, list[str]] = {}
    if asked.file is not None:
        commands = _commands_for(asked.file, cards)
        cards = {slug: card for slug, card in cards.items() if slug in commands}
    if asked.json:
        rows = [_entry(card, results.get(slug)) | {"commands": commands.get(slug, [])} for slug, card in cards.items()]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    indent = max(map(len, cards), default=0) + 2
    for slug, card in cards.items():
        lines = wrap(card.summary, indent, first=slug)
        print(paint(lines[: len(slug)], "bold") + lines[len(slug) :])
        if asked.file is None:
            print(paint(wrap(f"{', '.join(card.fields)}: {_standing(card, results.get(slug))}", indent), "dim"))
        for command in commands.get(slug, []):
            print(" " * indent + command)
    return 0


def show(asked: argparse.Namespace) -> int:
    """A method's card."""
    slug, folder = method_folder(asked.name)
    card = load_card(folder)
    result = load_results().get(slug)
    if asked.json:
        shown = {**asdict(card), "folder": str(card.folder), "measured": result, "use": _use(folder)}
        print(json.dumps(shown, indent=1, ensure_ascii=False))
        return 0
    print(paint(card.title, "bold") + f"  ({slug})")
    print(wrap(card.summary))
    print()
    _about("paper", f"{card.paper.title}. {card.paper.venue}, {card.paper.id}")
    _about("fields", ", ".join(card.fields))
    _about("needs", install_line(*card.extras) if card.extras else "nothing beyond assay itself")
    for takes in card.takes:
        _about("takes", f"{takes.kind}: {takes.command.replace('{path}', 'FILE')}")
    use = _use(folder)
    if use["names"]:
        _about("in code", f"from {use['module']} import {', '.join(use['names'])}")
    _about("command", f"assay run {slug} --help")
    print("\n" + reflow(use["doc"]) + "\n")
    print(paint("Claims", "bold") + (f", measured at scale {result['scale']} on {result['date']}" if result else ""))
    print()
    print(verdict_table(card.claims, {claim["id"]: claim for claim in result["claims"]} if result else {}))
    print()
    print(wrap(f"Measure them here: assay check {slug}" + (f" --scale {result['scale']}" if result else "")))
    return 0


def cite(asked: argparse.Namespace) -> int:
    """BibTeX entries, with a blank line between them."""
    cards = [load_card(method_folder(name)[1]) for name in asked.names]
    print("\n\n".join(card.paper.bibtex.strip() for card in cards))
    return 0


def _commands_for(file: str, cards: Mapping[str, Card]) -> dict[str, list[str]]:
    """``{slug: commands}`` of the methods that take a file, by its kind."""
    from assay.data import kind_of

    path = Path(file).expanduser()
    if not path.exists():
        raise InputError(f"{file} does not exist: give a file, or a model's folder")
    kinds = kind_of(path)
    commands = {}
    for slug, card in cards.items():
        fitting = list(dict.fromkeys(takes.command for takes in card.takes if takes.kind in kinds))
        if fitting:
            commands[slug] = [command.replace("{path}", shlex.quote(file)) for command in fitting]
    if not commands:
        looks = f"it looks like {' or '.join(kinds)}" if kinds else "its kind is not one that Assay knows"
        raise InputError(f"no method takes {file}: {looks}; `assay show NAME` tells what a method takes")
    return commands


def _entry(card: Card, result: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "name": card.name,
        "title": card.title,
        "summary": card.summary,
        "fields": list(card.fields),
        "extras": list(card.extras),
        "paper": {"title": card.paper.title, "id": card.paper.id, "venue": card.paper.venue},
        "takes": [asdict(takes) for takes in card.takes],
        "claims": tally(card, result),
        "scale": result["scale"] if result else None,
    }


def _standing(card: Card, result: Mapping[str, Any] | None) -> str:
    counts = spoken(tally(card, result))
    return counts + (" (quick scale)" if result and result["scale"] == "quick" else "")


def _about(what: str, text: str) -> None:
    line = wrap(text, 10, first=what)
    print(paint(line[:10], "dim") + line[10:])


def _use(folder: Path) -> dict[str, Any]:
    """A method's module, public names and docstring, read from its ``__init__.py`` without importing it."""
    path = folder / "__init__.py"
    names: list[str] = []
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                names = [str(name) for name in ast.literal_eval(node.value)]
    except (SyntaxError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): write Python whose __all__ is a list of names") from error
    return {"module": f"assay.methods.{folder.name}", "names": names, "doc": ast.get_docstring(tree) or ""}
