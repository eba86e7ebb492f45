"""``assay run``: a method on a user's own files."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from assay._errors import InputError
from assay._extras import install_line
from assay.bench._card import load_card
from assay.cli._list import method_folder
from assay.cli._parser import Parser, UsageError
from assay.cli._signature import add_options, read_docstring
from assay.cli._terminal import reflow, unknown


def run(asked: argparse.Namespace) -> int:
    """Parse the method's own options and call its command.

    Raises
    ------
    ImportError
        Where a package is missing; names the pip command of the card's extras.
    """
    slug, folder = method_folder(asked.name)
    try:
        verbs = commands(folder)
        verb, parser, rest = choose(slug, verbs, list(asked.rest))
        options = vars(parser.parse_args(rest))
        verbs[verb](**options)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "assay"):
            raise
        line = install_line(*load_card(folder).extras)
        raise ImportError(
            f"{slug} needs the package {package!r}, which is not installed: {line}", name=package
        ) from error
    return 0


def commands(folder: Path) -> dict[str, Callable[..., Any]]:
    """``{verb: function}`` of a method's command.py, in the order of its ``__all__``.

    Raises
    ------
    InputError
        Where the method has no command.
    """
    if not (folder / "command.py").is_file():
        raise InputError(f"{folder.name.replace('_', '-')} has no command of its own: use it in code, see `assay show`")
    module = _load(folder / "command.py", f"assay.methods.{folder.name}.command")
    verbs = [str(name) for name in getattr(module, "__all__", ())]
    if not verbs or not all(callable(getattr(module, name, None)) for name in verbs):
        raise InputError(f"{folder / 'command.py'} has no verbs: name its functions in __all__")
    return {name.replace("_", "-"): getattr(module, name) for name in verbs}


def _load(path: Path, name: str) -> ModuleType:
    """Import a module without the package that it lies in, which may need packages that the options do not."""
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SyntaxError):
            raise InputError(f"{path}, line {error.lineno}, is not Python: {error.msg}") from error
        raise
    return module


def choose(slug: str, verbs: dict[str, Callable[..., Any]], rest: list[str]) -> tuple[str, Parser, list[str]]:
    """The verb, the parser of its options, and what is left to parse. A lone verb is not typed.

    Raises
    ------
    UsageError
        Where one of several verbs had to be named and was not.
    """
    program = f"assay run {slug}"
    if len(verbs) == 1:
        (verb,) = verbs
        return verb, parser_of(verbs[verb], program), rest
    if rest and rest[0] in verbs:
        return rest[0], parser_of(verbs[rest[0]], f"{program} {rest[0]}"), rest[1:]
    if not rest or rest[0] in ("-h", "--help"):
        parser = Parser(prog=program, usage=f"{program} VERB OPTIONS", description=_overview(program, verbs))
        parser.print_help()
        raise SystemExit(0 if rest else 2)
    if rest[0].startswith("-"):
        raise UsageError(program, f"a verb comes first, one of {', '.join(verbs)}: see {program} --help")
    raise UsageError(program, unknown("verb", rest[0], verbs))


def parser_of(function: Callable[..., Any], program: str) -> Parser:
    """The parser of one verb."""
    parser = Parser(prog=program, add_help=False)
    add_options(parser, function)
    return parser


def _overview(program: str, verbs: dict[str, Callable[..., Any]]) -> str:
    module = inspect.getmodule(next(iter(verbs.values())))
    head = reflow(inspect.getdoc(module) or "") if module else ""
    column = max(map(len, verbs)) + 2
    lines = [f"  {verb:<{column}}{read_docstring(function.__doc__).summary}" for verb, function in verbs.items()]
    return f"{head}\n\nverbs:\n" + "\n".join(lines) + f"\n\n{program} VERB --help explains one."
