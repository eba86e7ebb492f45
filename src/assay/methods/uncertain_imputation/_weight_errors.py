"""How far the weights may be wrong: the weighted threshold when a constant is added to every weight."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real

from assay.methods.uncertain_imputation._thresholds import MASS_SLACK, naive_threshold, weighted_threshold


@dataclass(frozen=True)
class WeightErrorReport:
    """What a constant error of the weights does to the threshold.

    Attributes
    ----------
    q_naive, q_weighted
        The threshold without weights, and the one with the given weights, taken for right.
    safe : (lowest, highest)
        Errors strictly between them leave the threshold at or above ``q_weighted``, so coverage does not fall. Without
        an upper end the second is infinite.
    deltas, thresholds : (m,)
        The curve of the threshold against the error.
    """

    q_naive: float
    q_weighted: float
    safe: tuple[float, float]
    deltas: np.ndarray
    thresholds: np.ndarray

    def __str__(self) -> str:
        low, high = self.safe
        return (
            f"threshold {self.q_weighted:.6g} with these weights, {self.q_naive:.6g} without any; adding a constant to "
            f"every weight does not lower it between {low:.6g} and {high:.6g}"
        )


def weight_error_report(
    scores: Real[np.ndarray, " n"],
    weights: Real[np.ndarray, " n"],
    test_weight: float,
    level: float,
    deltas: Real[np.ndarray, " m"] | None = None,
) -> WeightErrorReport:
    """The thresholds under weights w + delta, and the delta that are safe.

    With delta >= 0 the threshold lies between the weighted and the naive one. Where the naive one is the larger, every
    delta >= 0 is safe; where it is the smaller, delta > 0 is not, once the threshold moves. Below 0 the exact end is

        delta > max of -(L W - C_k) / (L (n + 1) - k)  over the k with C_k < L W and k < L (n + 1),

    C_k and k the weight and the number of the scores up to a value, W the sum of all n + 1 weights, L the level. Above
    0 the same comparison, over the k > L (n + 1), ends it.

    Parameters
    ----------
    scores, weights : (n,)
        Of the clean calibration points.
    test_weight, level
        As for `weighted_threshold`.
    deltas : (m,)
        Where to evaluate the curve; by default from just above -min w to a thousand times the mean weight.

    Raises
    ------
    ValueError
        If a delta is at most -min w, over all n + 1 weights: a weight would not be positive.

    Source: section 3 of the paper (theorems 2 and 3); the exact ends follow from the comparison of cumulated masses.
    """
    q_weighted = float(weighted_threshold(scores, weights, test_weight, level))
    scores = np.asarray(scores, dtype=np.float64)
    weights = np.asarray(weights, dtype=np.float64)
    n = len(scores)
    if not np.isfinite(test_weight):
        raise ValueError("the test weight is infinite: a weight-error report needs a finite one")
    smallest = float(min(weights.min(), test_weight))
    if deltas is None:
        mean = float((weights.sum() + test_weight) / (n + 1))
        deltas = np.concatenate([-smallest * np.linspace(0.99, 0.0, 34), mean * np.geomspace(1e-2, 1e3, 51)])
    deltas = np.asarray(deltas, dtype=np.float64)
    if (deltas <= -smallest).any():
        raise ValueError(
            f"a weight error of {deltas.min():g} makes a weight zero or negative: errors must lie above {-smallest:g}"
        )
    thresholds = np.array(
        [weighted_threshold(scores, weights + d, test_weight + d, level) for d in deltas], dtype=float
    )
    return WeightErrorReport(
        naive_threshold(scores, level),
        q_weighted,
        _safe_errors(scores, weights, test_weight, level, smallest),
        deltas,
        thresholds,
    )


def _safe_errors(
    scores: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], test_weight: float, level: float, smallest: float
) -> tuple[float, float]:
    order = np.argsort(scores)
    ordered, cumulated = scores[order], np.cumsum(weights[order])
    n = len(scores)
    needed = (level - MASS_SLACK) * (cumulated[-1] + test_weight)
    # Only whole groups of equal scores matter, and of them those whose mass does not reach the level.
    ends = np.append(ordered[1:] > ordered[:-1], True)
    count, mass = np.flatnonzero(ends) + 1, cumulated[ends]
    count, mass = count[mass < needed], mass[mass < needed]
    lacking, share = needed - mass, level * (n + 1) - count
    slack = MASS_SLACK * (n + 1)  # a count that is the level of n + 1 to rounding binds on neither side
    below, above = share > slack, share < -slack
    low = float(np.max(-lacking[below] / share[below], initial=-np.inf))
    high = float(np.min(lacking[above] / -share[above], initial=np.inf))
    return max(low, -smallest), high
