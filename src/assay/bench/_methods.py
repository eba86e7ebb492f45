"""Methods are found by their folders, never by import."""

from __future__ import annotations

import os
from pathlib import Path

METHODS = Path(__file__).resolve().parent.parent / "methods"


def method_roots() -> list[Path]:
    """The folders that hold methods: Assay's own, then those that ``ASSAY_METHODS`` names."""
    given = os.environ.get("ASSAY_METHODS", "").split(os.pathsep)
    return [METHODS, *(Path(folder).expanduser().absolute() for folder in given if folder)]


def method_folders(root: Path | None = None) -> dict[str, Path]:
    """Every method that is here: ``{slug: folder}``, in the order of the slugs.

    A method is a folder with a ``card.toml``; its slug is the folder's name with dashes for underscores. The first
    folder of a name counts, so nothing takes the place of a method of Assay's own.

    Parameters
    ----------
    root
        Look here alone, instead of in `method_roots`.
    """
    found: dict[str, Path] = {}
    for folder in method_roots() if root is None else [root]:
        for card in folder.glob("*/card.toml"):
            found.setdefault(card.parent.name.replace("_", "-"), card.parent)
    return dict(sorted(found.items()))
