"""``assay completion``: a script that completes commands, methods, options and choices."""

from __future__ import annotations

import argparse

from assay.bench._methods import method_folders
from assay.cli._main import build_parser
from assay.cli._parser import Parser


def completion(asked: argparse.Namespace) -> int:
    """Print the script for a shell. It knows the methods that are here when it is printed."""
    import shtab

    print(shtab.complete(full_parser(), asked.shell))
    return 0


def full_parser() -> Parser:
    """The parser of every command, with the methods as choices and their commands' options below ``run``."""
    from assay.cli._run import commands, parser_of
    from assay.data import assets

    parser = build_parser()
    folders = method_folders()
    subparsers = parser.subcommands()
    for name in ("show", "check", "cite"):
        subparsers[name].suggest("name" if name == "show" else "names", folders)
    data = subparsers["data"].subcommands()
    for verb, dest in (("show", "name"), ("get", "names"), ("clean", "names")):
        data[verb].suggest(dest, [asset.name for asset in assets()])
    run = subparsers["run"]
    run.forget("name", "rest")
    methods = run.add_subparsers(dest="name", parser_class=Parser)
    for slug, folder in folders.items():
        if not (folder / "command.py").is_file():
            continue
        verbs = commands(folder)
        if len(verbs) == 1:
            (function,) = verbs.values()
            _copy(parser_of(function, f"assay run {slug}"), methods.add_parser(slug, help=slug))
        else:
            below = methods.add_parser(slug, help=slug).add_subparsers(dest="method_verb", parser_class=Parser)
            for verb, function in verbs.items():
                _copy(parser_of(function, f"assay run {slug} {verb}"), below.add_parser(verb, help=verb))
    return parser


def _copy(source: Parser, target: Parser) -> None:
    """Give a parser another's options, as far as completion needs them: names, choices, files."""
    import shtab

    for action in source._actions:
        if action.dest == "help":
            continue
        names = action.option_strings
        if action.nargs == 0:
            target.add_argument(*names, dest=action.dest, action="store_true")
            continue
        added = target.add_argument(*names, dest=action.dest, choices=source.options.get(names[0]))
        if action.metavar == "PATH":
            added.complete = shtab.FILE  # type: ignore[attr-defined]
