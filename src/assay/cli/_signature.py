"""A method's command: from a function's signature and docstring to the options of the command line.

``def train(*, text: Path, steps: int = 200, method: Literal["alice", "racs"] = "alice") -> None`` becomes
``--text PATH [--steps INT] [--method {alice,racs}]``; the numpy docstring's Parameters section is the help.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from assay.cli._parser import Parser
from assay.cli._terminal import plain, reflow, unknown

_SECTION = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n-{3,}\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """A numpy docstring, taken apart: the summary line, the prose, each parameter's text, and the other sections."""

    summary: str
    prose: str
    parameters: dict[str, str]
    sections: dict[str, str]


def read_docstring(text: str | None) -> Docstring:
    """Take a numpy docstring apart.

    Parameters
    ----------
    text
        As written, or None.

    Returns
    -------
    Docstring
        A parameter line may name several (``n, k``): they share the text.
    """
    whole = inspect.cleandoc(text or "")
    headings = list(_SECTION.finditer(whole))
    ends = [h.start() for h in headings[1:]] + [len(whole)]
    sections = {h["title"]: whole[h.end() : end].strip("\n") for h, end in zip(headings, ends)}
    head = whole[: headings[0].start()] if headings else whole
    summary, _, prose = head.strip().partition("\n\n")
    parameters: dict[str, str] = {}
    names: list[str] = []
    for line in sections.pop("Parameters", "").splitlines():
        if line and not line[0].isspace():
            names = [name.strip().lstrip("*") for name in line.partition(" :")[0].split(",")]
            parameters |= dict.fromkeys(names, "")
        else:
            for name in names:
                parameters[name] = f"{parameters[name]} {line.strip()}".strip()
    return Docstring(" ".join(summary.split()), prose.strip(), parameters, sections)


def option(name: str) -> str:
    """The option of a parameter: ``max_new_tokens`` is ``--max-new-tokens``, ``lambda_`` is ``--lambda``."""
    return "--" + name.strip("_").replace("_", "-")


def add_options(parser: Parser, function: Callable[..., Any]) -> None:
    """Give a parser one option for each parameter of a command.

    Parameters
    ----------
    parser
        Made without ``--help``, which stands last. Gets the options, the description and the examples.
    function
        Its parameters are keyword-only and typed: Path, str, int, float, bool, a Literal, ``tuple[X, ...]`` (separated
        by commas), or one of these ``| None``. A bool is a flag. Without a default the option is required.

    Raises
    ------
    TypeError
        Where a parameter has another type: the command is then at fault, not its user.
    """
    docs = read_docstring(function.__doc__)
    hints = get_type_hints(function)
    parser.description = reflow("\n\n".join(part for part in (docs.summary, docs.prose) if part))
    if "Examples" in docs.sections:
        parser.epilog = "examples:\n" + textwrap.indent(plain(inspect.cleandoc(docs.sections["Examples"])), "  ")
    required = parser.add_argument_group("required")
    optional = parser.add_argument_group("options")
    optional.add_argument("-h", "--help", action="help", help="show this and exit")
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"{function.__module__}.{function.__name__}({name})"
        if name not in hints:
            raise TypeError(f"{where} has no type, and the command line needs one: annotate it")
        must = parameter.default is inspect.Parameter.empty
        said = plain(docs.parameters.get(name, "")).replace("%", "%%")
        group, default = (required, None) if must else (optional, parameter.default)
        if hints[name] is bool:
            if must or default is True:
                group.add_argument(
                    option(name),
                    dest=name,
                    action=argparse.BooleanOptionalAction,
                    required=must,
                    default=default,
                    help=said,
                )
            else:
                group.add_argument(option(name), dest=name, action="store_true", help=said)
            continue
        shown = (
            "" if must or default is None or default == () else f" (default: {_spelled(default)})".replace("%", "%%")
        )
        kind = _without_none(hints[name], where)
        choices = [str(value) for value in get_args(kind)] if get_origin(kind) is Literal else None
        group.add_argument(
            option(name),
            dest=name,
            required=must,
            default=default,
            type=_reader(kind, where),
            metavar="{" + ",".join(choices) + "}" if choices else _metavar(kind),
            help=(said + shown).strip(),
        )
        if choices:  # for shell completion; the reader has the say, and suggests the nearest
            parser.options[option(name)] = choices


def _without_none(hint: Any, where: str) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if len(kinds) != 1:
        raise TypeError(f"{where} may have several types, and the command line can read only one: {hint}")
    return kinds[0]


def _reader(kind: Any, where: str) -> Callable[[str], Any]:
    """What turns an option's text into a value; raises ArgumentTypeError with a sentence."""
    if kind is str:
        return str
    if kind is Path:
        return lambda text: Path(text).expanduser()
    if kind is int:
        return _whole
    if kind is float:
        return _number
    if get_origin(kind) is Literal:
        values = {str(value): value for value in get_args(kind)}
        return lambda text: _one_of(text, values)
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if len(parts) == 2 and parts[1] is Ellipsis:
            each = _reader(parts[0], where)
            return lambda text: tuple(each(part.strip()) for part in text.split(",") if part.strip())
        readers = [_reader(part, where) for part in parts]
        return lambda text: _exactly(text, readers)
    raise TypeError(f"{where} has the type {kind}, which the command line cannot read")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number is expected, not {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number is expected, not {text!r}") from None


def _one_of(text: str, values: dict[str, Any]) -> Any:
    if text not in values:
        raise argparse.ArgumentTypeError(unknown("choice", text, values))
    return values[text]


def _exactly(text: str, readers: list[Callable[[str], Any]]) -> tuple[Any, ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != len(readers):
        raise argparse.ArgumentTypeError(f"{len(readers)} values with commas between them are expected, not {text!r}")
    return tuple(read(part) for read, part in zip(readers, parts))


def _metavar(kind: Any) -> str:
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        inner = _metavar(parts[0])
        return f"{inner},..." if parts[-1] is Ellipsis else ",".join(_metavar(part) for part in parts)
    return {Path: "PATH", str: "TEXT", int: "INT", float: "NUMBER"}.get(kind, "VALUE")


def _spelled(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
