"""The documentation: its code runs, its commands parse, its site builds without a warning."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import assay.methods
from assay.bench._methods import method_folders
from assay.cli._main import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.S | re.M)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, *kinds: str) -> list[tuple[int, str, str]]:
    """``(line, info, body)`` of the fenced blocks of some kinds."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: m.start("body")].count("\n"), m["info"].strip(), textwrap.dedent(m["body"]))
        for m in FENCE.finditer(text)
        if m["kind"] in kinds
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder and home, offline, with methods of the page's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASSAY_METHODS", str(tmp_path))
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(assay.methods, "__path__", [*assay.methods.__path__, str(tmp_path)])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write_titled(page: Path, folder: Path) -> None:
    """The files that a page shows, where their titles say."""
    for _, info, body in blocks(page, "python", "toml"):
        if title := re.search(r'title="([^"]+)"', info):
            path = folder / title[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body, encoding="utf-8")


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_python_block_runs(page, folder):
    write_titled(page, folder)
    names: dict = {"__name__": "page"}
    for line, info, body in blocks(page, "python"):
        if "title=" not in info:
            exec(compile("\n" * line + body, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_is_one(page, tmp_path):
    parser = build_parser()
    methods = set(method_folders())
    for _, info, body in blocks(page, "toml"):
        if "card.toml" in info:
            methods.add(re.search(r'^name\s*=\s*"([^"]+)"', body, re.M)[1])
    lines = [line[2:] for _, _, body in blocks(page, "console") for line in body.splitlines() if line.startswith("$ ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[0] != "assay" or words[-1] == "--help":
            continue
        asked = parser.parse_args([w for w in words[1:] if w not in (">>", ">")])
        named = getattr(asked, "names", None) or [getattr(asked, "name", None)]
        if asked.command in ("check", "cite", "show", "run"):
            assert {n for n in named if n and n != "NAME"} <= methods, line


def test_the_page_about_adding_a_method_works_from_the_command_line(folder):
    write_titled(ROOT / "docs" / "add-a-method.md", folder)
    (folder / "data.csv").write_text("x\n" + "\n".join(map(str, range(1, 11))) + "\n1000000\n")

    def assay_(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "from assay.cli import main; raise SystemExit(main())", *words],
            capture_output=True,
            text=True,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "A mean that a few wild values cannot move." in assay_("show", "winsor-mean")
    assert "11 values" in assay_("run", "winsor-mean", "--table", "data.csv", "--column", "x")
    assert "winsor-mean" in assay_("check", "winsor-mean", "--dry-run")


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for path in (tmp_path / "site").rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=[\"']?(https?://[^\"' >]+)", page)
        assert [url for url in fetched if "rel=canonical" not in url] == [], path
        assert 'class="arithmatex"' not in page, path
        assert "<!-- generated" not in html.unescape(re.sub(r"<code.*?</code>|<!--.*?-->", "", page, flags=re.S)), path


def test_every_method_has_a_page_and_every_page_a_method():
    pages = {p.stem for p in (ROOT / "docs" / "methods").glob("*.md")} - {"index"}
    assert pages == set(method_folders())
