"""Prediction intervals and label sets from data whose labels are partly missing or wrong.

Conformal prediction promises coverage when calibration rows are like test rows. Where labels go missing, or wrong, more
often for some rows than for others, the rows with a clean label are not. If features explain the corruption or the label
but are known for training rows only (privileged information, Z), then `UncertainImputation` replaces the corrupted labels
by guesses with a real error, `PrivilegedConformal` weights the clean rows, and `TriplyRobust` takes the union, which is
valid as long as one of its parts is. None of them needs Z at prediction. Reach for them when labels cost money, time or
consent and are not missing at random; `diagnostics_` says which assumption looks weak.
"""

from assay._extras import extras

with extras("tables"):
    from assay.methods.uncertain_imputation._corruption import Corruption, corrupt_by_privileged, wrong_labels
    from assay.methods.uncertain_imputation._diagnostics import Diagnostics
    from assay.methods.uncertain_imputation._estimators import (
        NaiveConformal,
        PrivilegedConformal,
        TriplyRobust,
        UncertainImputation,
        WeightedConformal,
        union_of_intervals,
    )
    from assay.methods.uncertain_imputation._reports import CoverageReport, coverage_report
    from assay.methods.uncertain_imputation._thresholds import naive_threshold, pcp_threshold, weighted_threshold
    from assay.methods.uncertain_imputation._weight_errors import WeightErrorReport, weight_error_report

__all__ = [
    "Corruption",
    "CoverageReport",
    "Diagnostics",
    "NaiveConformal",
    "PrivilegedConformal",
    "TriplyRobust",
    "UncertainImputation",
    "WeightErrorReport",
    "WeightedConformal",
    "corrupt_by_privileged",
    "coverage_report",
    "naive_threshold",
    "pcp_threshold",
    "union_of_intervals",
    "weight_error_report",
    "weighted_threshold",
    "wrong_labels",
]
