"""How often intervals cover, over all rows and within groups."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Real

from assay.stats import clopper_pearson


@dataclass(frozen=True)
class CoverageReport:
    """Coverage with its interval, over all rows and within groups.

    Attributes
    ----------
    coverage, interval
        Share of rows whose label lies in its interval, and its 95 % Clopper-Pearson interval.
    width
        Mean width; an empty set has width 0.
    n, n_empty
        Rows, and how many of them have an empty set.
    groups, sizes : data frames
        The same within each group, and within quarters of the rows by width (1 is the narrowest): columns n, coverage, lower,
        upper, width. ``groups`` is empty where none were given.
    """

    coverage: float
    interval: tuple[float, float]
    width: float
    n: int
    n_empty: int
    groups: pd.DataFrame
    sizes: pd.DataFrame

    def __str__(self) -> str:
        low, high = self.interval
        parts = [
            f"coverage {self.coverage:.4f} [{low:.4f}, {high:.4f}] over {self.n} rows, mean width {self.width:.6g}"
        ]
        if self.n_empty:
            parts.append(f"{self.n_empty} empty sets")
        for name, table in (("by group", self.groups), ("by width", self.sizes)):
            if len(table):
                parts.append(f"{name}:\n{table.to_string(float_format=lambda x: f'{x:.4g}')}")
        return "\n".join(parts)


def coverage_report(
    y: Real[np.ndarray, " n"],
    intervals: Float[np.ndarray, "n 2"] | Float[np.ndarray, "n 2 1"],
    groups: Any = None,
) -> CoverageReport:
    """Coverage and width of intervals, over all rows, within groups (bins of Z, for one), and by width.

    Not for intervals at several levels at once: pass one level, ``intervals[:, :, j]``.

    Parameters
    ----------
    y : (n,)
        Clean labels.
    intervals : (n, 2) or (n, 2, 1)
        As `predict_interval` returns them; [nan, nan] covers nothing.
    groups : (n,)
        A label for each row.

    Raises
    ------
    ValueError
        If shapes differ or a label is missing.
    """
    y, ends = np.asarray(y, dtype=np.float64), np.asarray(intervals, dtype=np.float64)
    if ends.ndim == 3 and ends.shape[2] == 1:
        ends = ends[:, :, 0]
    if y.ndim != 1 or len(y) == 0 or ends.shape != (len(y), 2):
        raise ValueError(
            f"{y.shape} labels and intervals of shape {np.shape(intervals)} do not fit: give (n,) and (n, 2)"
        )
    if np.isnan(y).any():
        raise ValueError(
            f"{int(np.isnan(y).sum())} labels are missing: coverage can only be told where the clean label is known"
        )
    covered = (ends[:, 0] <= y) & (y <= ends[:, 1])  # a comparison with nan is false
    empty = np.isnan(ends[:, 0])
    width = np.where(empty, 0.0, ends[:, 1] - ends[:, 0])
    by_group = pd.DataFrame()
    if groups is not None:
        labels = np.asarray(groups)
        if labels.shape != y.shape:
            raise ValueError(f"groups has shape {labels.shape}, expected one label for each of {len(y)} rows")
        values, member = np.unique(labels, return_inverse=True)
        by_group = _table([(value, member == i) for i, value in enumerate(values)], covered, width, "group")
    quarters = np.array_split(np.argsort(width, kind="stable"), min(4, len(y)))
    by_size = _table([(i + 1, quarter) for i, quarter in enumerate(quarters)], covered, width, "quarter")
    return CoverageReport(
        float(covered.mean()),
        clopper_pearson(float(covered.sum()), float(len(y))),
        float(width.mean()),
        len(y),
        int(empty.sum()),
        by_group,
        by_size,
    )


def _table(parts: list[tuple[Any, np.ndarray]], covered: np.ndarray, width: np.ndarray, name: str) -> pd.DataFrame:
    rows = []
    for label, rows_of in parts:
        hits, widths = covered[rows_of], width[rows_of]
        low, high = clopper_pearson(float(hits.sum()), float(len(hits)))
        rows.append(
            (label, len(hits), float(hits.mean()), low, high, float(widths.mean()) if len(widths) else math.nan)
        )
    return pd.DataFrame(rows, columns=[name, "n", "coverage", "lower", "upper", "width"]).set_index(name)
