"""The workbench: what a study is written with, and what weighs its claims.

A study uses `experiment`, `prepare`, `Trial`, `Cases`, `Count` and `Exact`; a program that weighs claims uses `check`.
"""

from assay.bench._measures import Cases, Count, Exact
from assay.bench._study import Cell, Prepared, Trial, experiment, prepare

__all__ = ["Cases", "Cell", "Count", "Exact", "Prepared", "Trial", "experiment", "prepare"]
