"""Every statistic that Assay uses, in one place: intervals, the jackknife over cases, correlations, lines, curves.

They are small functions over numpy arrays with their source in the docstring; scipy does the special functions.
"""

from assay.stats._correlation import (
    auc,
    auc_without,
    fisher_z,
    from_fisher_z,
    pearson,
    pearson_without,
    spearman,
    spearman_without,
)
from assay.stats._curves import reached, running_median, speedup
from assay.stats._intervals import (
    clopper_pearson,
    correlation_interval,
    effective_cases,
    join,
    mean_interval,
    perfect_auc_interval,
    t_interval,
)
from assay.stats._jackknife import case_groups, jackknife, mean_without, weighted_mean
from assay.stats._lines import exponent, r2, slope, spread
from assay.stats._pass_at_k import pass_at_k

__all__ = [
    "auc",
    "auc_without",
    "case_groups",
    "clopper_pearson",
    "correlation_interval",
    "effective_cases",
    "exponent",
    "fisher_z",
    "from_fisher_z",
    "jackknife",
    "join",
    "mean_interval",
    "mean_without",
    "pass_at_k",
    "pearson",
    "pearson_without",
    "perfect_auc_interval",
    "r2",
    "reached",
    "running_median",
    "slope",
    "spearman",
    "spearman_without",
    "speedup",
    "spread",
    "t_interval",
    "weighted_mean",
]
