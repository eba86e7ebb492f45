"""Every command line in the documentation and in the README parses."""

import re
import shlex
from pathlib import Path

import pytest

import assay
from assay.bench._methods import METHODS, method_folders
from assay.cli._main import build_parser
from assay.cli._run import choose, commands

ROOT = Path(assay.__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINES = sorted(
    {
        line.strip().removeprefix("$ ")
        for page in PAGES
        if page.is_file()
        for line in re.findall(
            r"^\s*\$ assay .*$|^assay .*$", page.read_text(encoding="utf-8").replace("\\\n", " "), re.M
        )
    }
)


@pytest.mark.parametrize("line", LINES)
def test_a_documented_command_parses(line):
    words = shlex.split(line.partition(" > ")[0].partition(" | ")[0].partition(" >> ")[0], comments=True)
    if words[1:] in (["--help"], ["--version"]):
        return
    if words[-1] == "--help":
        words.pop()
    asked = build_parser().parse_args(words[1:])
    if asked.command != "run" or not asked.rest:
        return
    folder = method_folders(METHODS).get(asked.name)
    if folder is None or not (folder / "command.py").is_file():
        pytest.skip(f"{asked.name} is not here")
    _, parser, rest = choose(asked.name, commands(folder), asked.rest)
    parser.parse_args(rest)
