"""Confidence intervals: Student's t, Clopper-Pearson, Fisher's z, and what stands in where a sample shows no spread."""

import math

import numpy as np
from jaxtyping import Float
from scipy import special

Interval = tuple[float, float]


def t_interval(centre: float, standard_error: float, freedom: int | float, level: float = 0.95) -> Interval:
    """``centre`` plus and minus Student's t quantile times the standard error.

    Parameters
    ----------
    centre, standard_error
        An estimate and its standard error (0 or more).
    freedom
        Degrees of freedom, more than 0.
    level
        Nominal coverage, between 0 and 1.

    Raises
    ------
    ValueError
        If ``freedom`` or ``level`` is out of range.
    """
    if freedom <= 0:
        raise ValueError(f"a t interval needs more than 0 degrees of freedom, got {freedom}: a spread takes two values")
    half = float(special.stdtrit(freedom, 0.5 + _checked(level) / 2)) * standard_error
    return centre - half, centre + half


def mean_interval(values: Float[np.ndarray, "sample"], level: float = 0.95) -> Interval:
    """The t interval of a mean, from independent values.

    For two arms under the same seeds or cases, give the differences: that is the paired interval.

    Parameters
    ----------
    values : (sample,)
        At least two.
    level
        Nominal coverage.

    Raises
    ------
    ValueError
        With fewer than two values.
    """
    n = values.size
    if n < 2:
        raise ValueError(f"an interval over a sample needs at least two values, got {n}: draw more")
    return t_interval(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(n), n - 1, level)


def clopper_pearson(k: int | float, n: int | float, level: float = 0.95) -> Interval:
    """The exact interval for a share, k of n.

    Covers at least ``level`` whatever the share is, also at 0 and 1. Not the Wald interval, which has no width there.

    Parameters
    ----------
    k, n
        Successes and cases, 0 <= k <= n, n > 0. They need not be whole: a share of weighted or averaged cases is k / n
        of its effective cases, and the beta quantiles interpolate.
    level
        Nominal coverage.

    Raises
    ------
    ValueError
        If k is not between 0 and n, or n is not positive.

    Source: Clopper and Pearson 1934, by beta quantiles.
    """
    if not (n > 0 and 0 <= k <= n):
        raise ValueError(f"a share needs 0 <= k <= n and n > 0, got k={k}, n={n}")
    tail = (1 - _checked(level)) / 2
    low = 0.0 if k <= 0 else float(special.betaincinv(k, n - k + 1, tail))
    high = 1.0 if k >= n else float(special.betaincinv(k + 1, n - k, 1 - tail))
    return low, high


def effective_cases(weights: Float[np.ndarray, "count"], cases: Float[np.ndarray, "count"]) -> float:
    """How many cases a weighted mean of shares rests on: ``1 / sum(w**2 / n)``, for weights that sum to one.

    Equal weights over equal counts give the sum of the counts; the variance of the mean is p (1 - p) over this number.

    Parameters
    ----------
    weights, cases : (count,)
        Weight of each share in the mean, and the cases that it was counted over.
    """
    return float(1 / np.sum(np.square(weights / weights.sum()) / cases))


def correlation_interval(r: float, n: int, level: float = 0.95) -> Interval:
    """The large-sample interval of a correlation over n cases, on Fisher's z: ``z +- q / sqrt(n - 3)``.

    Wanted where r is 1 or -1: there every case that is left out changes nothing, and the jackknife has no width. Such an
    r counts as half a step of Spearman's scale short of 1 (see `assay.stats.fisher_z`).

    Parameters
    ----------
    r
        The correlation.
    n
        Cases, at least four.

    Returns
    -------
    (low, high), as correlations.

    Raises
    ------
    ValueError
        With fewer than four cases, where Fisher's z has no variance.

    Source: Fisher 1921.
    """
    from assay.stats._correlation import fisher_z

    if n < 4:
        raise ValueError(f"the interval of a correlation needs at least four cases, got {n}")
    half = float(special.ndtri(0.5 + _checked(level) / 2)) / math.sqrt(n - 3)
    z = float(fisher_z(np.array(float(r)), n))
    return math.tanh(z - half), math.tanh(z + half)


def perfect_auc_interval(positives: int, negatives: int, level: float = 0.95) -> Interval:
    """What an area under the ROC curve of exactly 1 says: the Clopper-Pearson interval of m of m.

    m is the smaller class. The jackknife and DeLong's variance are 0 there, as if two separated cases proved that all
    are. (For an area of exactly 0, mirror it.)

    Parameters
    ----------
    positives, negatives
        Cases of each class, at least one.

    Source: the rule of three (Hanley and Lippman-Hand 1983), applied to the smaller class.
    """
    smaller = min(positives, negatives)
    return clopper_pearson(smaller, smaller, level)


def join(*intervals: Interval) -> Interval:
    """The smallest interval that holds all of them.

    Raises
    ------
    ValueError
        With none.
    """
    if not intervals:
        raise ValueError("there is no interval to join: give at least one")
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _checked(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"a level is between 0 and 1, got {level}: 0.95 for 95 %")
    return level
