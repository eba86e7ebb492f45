"""The workbench: what a study is written with, and what weighs its claims.

A study uses `experiment`, `prepare`, `Trial`, `Cases`, `Count` and `Exact`; a program that weighs claims uses `check`.
The names are imported when they are first used, so that reading a card (`assay list`) does not pay for numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.bench._measures import Cases, Count, Exact
    from assay.bench._study import Cell, Prepared, Trial, experiment, prepare

_HOME = {
    "Cases": "_measures",
    "Count": "_measures",
    "Exact": "_measures",
    "Cell": "_study",
    "Prepared": "_study",
    "Trial": "_study",
    "experiment": "_study",
    "prepare": "_study",
}
__all__ = ["Cases", "Cell", "Count", "Exact", "Prepared", "Trial", "experiment", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'assay.bench' has no attribute {name!r}")
    value = getattr(import_module(f"assay.bench.{_HOME[name]}"), name)
    globals()[name] = value
    return value
