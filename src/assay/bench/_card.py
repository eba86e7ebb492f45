"""Cards: what a method is, its paper, its claims. Read and checked without importing anything heavy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from assay._errors import InputError
from assay.bench._language import (
    LanguageError,
    Outline,
    check_each,
    check_names,
    parse_condition,
    parse_each,
    parse_expression,
    unknown,
)
from assay.bench._methods import method_folders

Each = tuple[str, tuple[str, ...] | None]


class CardError(InputError):
    """A card is wrong: the message names the file, the key, and what was expected."""


@dataclass(frozen=True)
class Paper:
    """Where the method comes from."""

    title: str
    id: str
    venue: str
    bibtex: str


@dataclass(frozen=True)
class Takes:
    """A kind of file that the method takes, and the command to try on it (``{path}`` stands for the file)."""

    kind: str
    command: str


@dataclass(frozen=True)
class Claim:
    """A sentence, and the inequality that decides it.

    Attributes
    ----------
    each
        ``((axis, values or None), ...)``: the condition must be true in every cell; None is every value that runs.
    """

    id: str
    says: str
    reported: str | None = None
    testable: Literal["full", "scaled", "no"] = "full"
    because: str | None = None
    experiment: str | None = None
    holds_if: tuple[str, ...] = ()
    report: str | None = None
    each: tuple[Each, ...] = ()
    in_at_least: int | None = None
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """What ``card.toml`` says."""

    name: str
    title: str
    summary: str
    fields: tuple[str, ...]
    extras: tuple[str, ...]
    paper: Paper
    takes: tuple[Takes, ...]
    claims: tuple[Claim, ...]
    folder: Path


class StudyOutline(Protocol):
    """The experiments of a ``study.py``, read without running it."""

    @property
    def experiments(self) -> Mapping[str, Outline]: ...


def load_card(folder_or_file: Path) -> Card:
    """Read a card and check it as far as that goes without its study.

    Raises
    ------
    CardError
        The file, the key, and what was expected there.
    """
    path = Path(folder_or_file)
    if path.is_dir():
        path = path / "card.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CardError(f"there is no card at {path}, expected a method's folder or its card.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CardError(f"{path} is not TOML: {error}") from None
    reader = _Reader(path, "", content)
    reader.only("name", "title", "summary", "fields", "extras", "paper", "takes", "claims")
    card = Card(
        name=reader.slug("name"),
        title=reader.text("title"),
        summary=reader.text("summary"),
        fields=reader.texts("fields"),
        extras=reader.texts("extras", needed=False),
        paper=_paper(reader.table("paper")),
        takes=tuple(_takes(t) for t in reader.tables("takes")),
        claims=tuple(_claim(t) for t in reader.tables("claims")),
        folder=path.parent,
    )
    if card.name != path.parent.name.replace("_", "-"):
        slug = path.parent.name.replace("_", "-")
        raise reader.error("name", f"is {card.name!r}, expected {slug!r}, the name of its folder with dashes")
    if not card.fields:
        raise reader.error("fields", 'is empty, expected at least one, as ["language models"]')
    if not card.claims:
        raise reader.error("claims", "are missing, expected [[claims]] for every measurable sentence of the abstract")
    seen: set[str] = set()
    for i, claim in enumerate(card.claims):
        if claim.id in seen:
            raise reader.error(f"claims[{i}].id", f"is {claim.id!r}, which another claim has: an id names one claim")
        seen.add(claim.id)
    return card


def all_cards(root: Path | None = None) -> dict[str, Card]:
    """Every method's card, ``{slug: card}``, in the order of the slugs."""
    return {slug: load_card(folder) for slug, folder in method_folders(root).items()}


def check_card(card: Card, outline: StudyOutline) -> None:
    """Check every name in a card's claims against the outline of its study.

    Raises
    ------
    CardError
        An unknown experiment, arm, measure, curve, axis or value, with the nearest name.
    """
    path = card.folder / "card.toml"
    for i, claim in enumerate(card.claims):
        if claim.experiment is None:
            continue
        where = f"{path}: claims[{i}] ({claim.id})"
        if claim.experiment not in outline.experiments:
            raise CardError(f"{where}: " + unknown("experiment", claim.experiment, outline.experiments, "study.py"))
        experiment = outline.experiments[claim.experiment]
        fixed = [axis for axis, _ in claim.each]
        key = "each"
        try:
            check_each(claim.each, experiment)
            for key in ("holds_if", "given"):
                for text in getattr(claim, key):
                    check_names(parse_condition(text), experiment, fixed)
            if claim.report is not None:
                key = "report"
                check_names(parse_expression(claim.report), experiment, fixed)
        except LanguageError as error:
            raise CardError(f"{where}: {key}: {error}") from None


def _paper(reader: _Reader) -> Paper:
    reader.only("title", "id", "venue", "bibtex")
    paper = Paper(reader.text("title"), reader.text("id"), reader.text("venue"), reader.text("bibtex", lines=True))
    if not re.match(r"\s*@\w+\s*\{", paper.bibtex):
        raise reader.error("bibtex", 'is no BibTeX entry, expected text that starts as "@inproceedings{"')
    return paper


def _takes(reader: _Reader) -> Takes:
    reader.only("kind", "command")
    takes = Takes(reader.text("kind"), reader.text("command"))
    if not takes.command.startswith("assay ") or "{path}" not in takes.command:
        raise reader.got("command", "a command as 'assay run name --text {path}'")
    return takes


def _claim(reader: _Reader) -> Claim:
    reader.only(
        "id",
        "says",
        "reported",
        "testable",
        "because",
        "experiment",
        "holds_if",
        "report",
        "each",
        "in_at_least",
        "given",
    )
    testable = reader.text("testable")
    if testable not in ("full", "scaled", "no"):
        raise reader.got("testable", '"full", "scaled" or "no"')
    claim = Claim(
        id=reader.slug("id"),
        says=reader.text("says"),
        reported=reader.text("reported", needed=False),
        testable=cast(Literal["full", "scaled", "no"], testable),
        because=reader.text("because", needed=False),
        experiment=reader.text("experiment", needed=False),
        holds_if=reader.parsed("holds_if", parse_condition),
        report=reader.text("report", needed=False),
        each=tuple(parse_each(text) for text in reader.parsed("each", parse_each)),
        in_at_least=reader.whole("in_at_least"),
        given=reader.parsed("given", parse_condition),
    )
    reader.parsed("report", parse_expression)
    if testable != "full" and claim.because is None:
        what = "what is smaller than in the paper" if testable == "scaled" else "what is missing here"
        raise reader.error("because", f'is missing, expected {what} for testable = "{testable}"')
    if claim.holds_if and claim.report is not None:
        raise reader.error("report", "stands beside `holds_if`, expected one of the two: a report has no bar")
    decided = bool(claim.holds_if) or claim.report is not None
    if testable != "no" and not decided:
        raise reader.error("holds_if", "is missing, expected a condition, or a `report` for a number without a bar")
    if (testable != "no" or decided) and claim.experiment is None:
        raise reader.error("experiment", "is missing, expected the name of a function in study.py")
    axes = [axis for axis, _ in claim.each]
    if len(set(axes)) < len(axes):
        raise reader.error("each", "names an axis twice: write axis=value|value")
    if claim.in_at_least is not None and not (claim.each and claim.holds_if):
        raise reader.error(
            "in_at_least", "needs `each` and `holds_if`: it counts the cells in which the condition is true"
        )
    return claim


class _Reader:
    """One table of a card, with the errors of its keys."""

    def __init__(self, path: Path, at: str, table: Mapping[str, Any]) -> None:
        self.path, self.at, self._table = path, at, table

    def error(self, key: str, sentence: str) -> CardError:
        return CardError(f"{self.path}: {self.at}{key} {sentence}")

    def got(self, key: str, expected: str) -> CardError:
        """The error of a value that is of the wrong kind."""
        shown = repr(self._table[key])
        return self.error(key, f"is {shown if len(shown) < 200 else shown[:200] + ' ...'}, expected {expected}")

    def only(self, *keys: str) -> None:
        for key in self._table:
            if key not in keys:
                raise CardError(f"{self.path}: " + unknown("key", f"{key}", keys, self.at.rstrip(".") or "the card"))

    def text(self, key: str, *, needed: bool = True, lines: bool = False) -> Any:
        value = self._table.get(key)
        if value is None:
            if needed:
                raise self.error(key, "is missing, expected text")
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.got(key, "text")
        if not _is_shown(value):
            raise self.got(key, "text without control characters")
        return value.strip() if lines else " ".join(value.split())

    def slug(self, key: str) -> str:
        value = self.text(key)
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", value):
            raise self.got(key, "small letters and digits joined by dashes")
        return cast(str, value)

    def texts(self, key: str, *, needed: bool = True) -> tuple[str, ...]:
        value = self._table.get(key)
        if value is None:
            if needed:
                raise self.error(key, "is missing, expected a list of text")
            return ()
        if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() and _is_shown(v) for v in value):
            raise self.got(key, "a list of text")
        return tuple(value)

    def whole(self, key: str) -> int | None:
        value = self._table.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise self.got(key, "a whole number of at least 1")
        return value

    def table(self, key: str) -> _Reader:
        value = self._table.get(key)
        if value is None:
            raise self.error(key, f"is missing, expected a table [{key}]")
        if not isinstance(value, dict):
            raise self.got(key, f"a table [{key}]")
        return _Reader(self.path, f"{self.at}{key}.", value)

    def tables(self, key: str) -> list[_Reader]:
        value = self._table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise self.got(key, f"tables [[{key}]]")
        return [_Reader(self.path, f"{self.at}{key}[{i}]{_name(v)}.", v) for i, v in enumerate(value)]

    def parsed(self, key: str, parse: Any) -> tuple[str, ...]:
        """A text or a list of texts, each of which must parse."""
        value = self._table.get(key)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise self.got(key, "text or a list of text")
        for text in texts:
            try:
                parse(text)
            except LanguageError as error:
                raise CardError(f"{self.path}: {self.at}{key}: {error}") from None
        return tuple(" ".join(t.split()) for t in texts)


def _name(table: Mapping[str, Any]) -> str:
    """A claim is found faster by its id than by its number."""
    return f" ({table['id']})" if isinstance(table.get("id"), str) else ""


def _is_shown(text: str) -> bool:
    """Whether a terminal shows a text, and does nothing else with it."""
    return all(c.isprintable() or c.isspace() for c in text)
