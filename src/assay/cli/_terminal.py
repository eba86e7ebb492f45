"""How the command line writes: width, colour, wrapped text, and the nearest name to a mistyped one."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
VERDICT_COLOURS = {"holds": "green", "fails": "red", "open": "yellow", "measured": "cyan", "not testable here": "dim"}


def width() -> int:
    """Columns to write in: the terminal's, at most 100; 80 where the output is not a terminal."""
    if not sys.stdout.isatty():
        return 80
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, 100))


def colourful(stream: TextIO) -> bool:
    """Whether to colour: on a terminal that is not dumb, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in a colour of `_COLOURS`, or as it is where the stream takes none."""
    if not colourful(stream or sys.stdout):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def wrap(text: str, indent: int = 0, first: str | None = None) -> str:
    """One paragraph, wrapped; ``first`` takes the place of the first line's indent."""
    lead = " " * indent if first is None else first.ljust(indent)
    return textwrap.fill(
        " ".join(text.split()),
        width(),
        initial_indent=lead,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def plain(docstring: str) -> str:
    """A docstring's text without its markup: backticks and the double colon of a block."""
    return re.sub(r"``?([^`]+)``?", r"\1", docstring).replace("::\n", ":\n")


def reflow(text: str) -> str:
    """Wrap the paragraphs of a docstring to the terminal; indented blocks and lists stay as they are."""
    blocks = []
    for block in re.split(r"\n\s*\n", plain(text).strip("\n")):
        kept = any(line.startswith((" ", "-", "*", "$", ">>>", "|")) for line in block.splitlines())
        blocks.append(block if kept else wrap(block))
    return "\n\n".join(blocks)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one most likely means; None where none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    if near:
        return near[0]
    inside = [n for n in names if len(name) >= 3 and name.lower() in n.lower()]
    return inside[0] if len(inside) == 1 else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist: what was meant, or what there is."""
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"there is no {what} {name!r}: did you mean {near!r}?"
    return f"there is no {what} {name!r}: there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
