"""The command line: a thin layer over the workbench and the methods' own commands."""

from assay.cli._main import main

__all__ = ["main"]
