"""The slow, obvious versions that the fast ones must equal."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from assay.methods.uncertain_imputation._thresholds import MASS_SLACK


def exact_rank(level: str, n: int) -> int:
    """ceil(level (n + 1)) in exact arithmetic; the level as text, "0.905"."""
    return math.ceil(Fraction(level) * (n + 1))


def weighted_threshold_loop(
    scores: np.ndarray, weights: np.ndarray, test_weights: np.ndarray, level: float
) -> np.ndarray:
    """One weighted quantile, with its own sort, for each test weight."""
    thresholds = []
    for star in test_weights:
        order = np.argsort(scores)
        total = weights.sum() + star
        mass, threshold = 0.0, math.inf
        for i in order:
            mass += weights[i]
            if mass >= (level - MASS_SLACK) * total:
                threshold = scores[i]
                break
        thresholds.append(threshold)
    return np.array(thresholds)


def pcp_threshold_loop(
    scores: np.ndarray, weights: np.ndarray, corrupted: np.ndarray, level: float, beta: float
) -> float:
    """PCP by its definition: Q(Z_i) for every calibration point i, then the ceil((1 - beta)(n + 1))-th smallest of them.

    Where that rank exceeds n, the largest.
    """
    each = np.sort(weighted_threshold_loop(scores, weights[~corrupted], weights, level + beta))
    r = math.ceil(round((1 - beta) * (len(weights) + 1), 9))
    return float(each[min(r, len(each)) - 1])


def weighted_threshold_numpy_loop(
    scores: np.ndarray, weights: np.ndarray, test_weights: np.ndarray, level: float
) -> np.ndarray:
    """As `weighted_threshold_loop`, each quantile in numpy: what a plain implementation does for every test point."""
    thresholds = []
    for star in test_weights:
        order = np.argsort(scores)
        reached = np.flatnonzero(np.cumsum(weights[order]) >= (level - MASS_SLACK) * (weights.sum() + star))
        thresholds.append(scores[order][reached[0]] if len(reached) else math.inf)
    return np.array(thresholds)


def safe_errors_search(
    scores: np.ndarray, weights: np.ndarray, test_weight: float, level: float, deltas: np.ndarray
) -> np.ndarray:
    """Whether each constant weight error leaves the weighted threshold at or above the one without error."""
    right = weighted_threshold_loop(scores, weights, np.array([test_weight]), level)[0]
    return np.array(
        [weighted_threshold_loop(scores, weights + d, np.array([test_weight + d]), level)[0] >= right for d in deltas]
    )


def nearest_pool(residuals: np.ndarray, Z: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The sorted residuals of the k nearest rows in standardised Z, ties at the k-th distance included."""
    sd = np.array([s if s > 0 else 1.0 for s in Z.std(axis=0)])
    distance = np.sqrt((((Z - z) / sd) ** 2).sum(axis=1))
    k = min(len(residuals), max(20, math.ceil(math.sqrt(len(residuals)))))
    return np.sort(residuals[distance <= np.sort(distance)[k - 1] * (1 + 1e-12)])


def aps_score_loop(probabilities: np.ndarray, u: float, label: int) -> float:
    """The randomised adaptive score of one label, class by class."""
    score = 0.0
    for c in sorted(range(len(probabilities)), key=lambda c: (-probabilities[c], c)):
        if c == label:
            return score + u * probabilities[c]
        score += probabilities[c]
    raise ValueError(f"label {label} is not a class")


__all__ = [
    "aps_score_loop",
    "exact_rank",
    "nearest_pool",
    "pcp_threshold_loop",
    "safe_errors_search",
    "weighted_threshold_loop",
    "weighted_threshold_numpy_loop",
]
