"""The workbench: what a study is written with, and what weighs its claims.

A study uses `experiment`, `prepare`, `Trial`, `Cases`, `Count` and `Exact`; a program that weighs claims uses `check`
(run what is missing, then judge), `standing` (judge what is stored) and the `Store` of finished trials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.bench._check import CheckResult, check, standing
    from assay.bench._home import home
    from assay.bench._measures import Cases, Count, Exact
    from assay.bench._run import Event
    from assay.bench._store import Store, StoreError
    from assay.bench._study import Cell, Prepared, Trial, experiment, prepare

__all__ = [
    "Cases",
    "Cell",
    "CheckResult",
    "Count",
    "Event",
    "Exact",
    "Prepared",
    "Store",
    "StoreError",
    "Trial",
    "check",
    "experiment",
    "home",
    "prepare",
    "standing",
]

# Each name is loaded when it is asked for: reading a card (`assay list`) does not pay for numpy, nor a trial's process
# for what weighs claims.
_LAZY = {
    "Cases": "_measures",
    "Count": "_measures",
    "Exact": "_measures",
    "Cell": "_study",
    "Prepared": "_study",
    "Trial": "_study",
    "experiment": "_study",
    "prepare": "_study",
    "CheckResult": "_check",
    "check": "_check",
    "standing": "_check",
    "home": "_home",
    "Event": "_run",
    "Store": "_store",
    "StoreError": "_store",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
