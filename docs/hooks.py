"""What MkDocs does with these pages beside its settings: one entry a method, and formulas without a script."""

import re
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</\1>', re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of docs/methods under "Methods", in the order of their names."""
    pages = sorted(p.name for p in (Path(config.docs_dir) / "methods").glob("*.md") if p.name != "index.md")
    for entry in config.nav or []:
        if "Methods" in entry:
            entry["Methods"] = ["methods/index.md", *(f"methods/{name}" for name in pages)]
    return config


def on_page_content(html: str, **_: object) -> str:
    """Formulas as MathML, which browsers draw themselves."""

    def formula(found: re.Match[str]) -> str:
        display = "block" if found["open"] == "[" else "inline"
        return convert(unescape(found["tex"]).strip(), display=display)

    return _FORMULA.sub(formula, html)
