"""Methods are found by their folders, never by import."""

from __future__ import annotations

from pathlib import Path

METHODS = Path(__file__).resolve().parent.parent / "methods"


def method_folders(root: Path = METHODS) -> dict[str, Path]:
    """Every method that is here: ``{slug: folder}``, in the order of the slugs.

    A method is a folder with a ``card.toml``; its slug is the folder's name with dashes for underscores.
    """
    return {card.parent.name.replace("_", "-"): card.parent for card in sorted(root.glob("*/card.toml"))}
