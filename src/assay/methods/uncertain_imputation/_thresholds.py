"""Every threshold of the method: exact ranks, weighted quantiles, PCP with and without the released code's habits.

A score says how badly a label fits; a prediction set is {y: score <= Q}. This file turns calibration scores into Q.
"""

import math
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Real

RANK_SLACK = 1e-12  # relative, of a rank: 0.55 * 100 is 55.00000000000001 in floating point, and rank 56 would be wrong
MASS_SLACK = 1e-10  # of the total mass, wherever cumulated masses are compared


def rank(level: float, n: int) -> int:
    """The rank ceil(level (n + 1)) of a conformal quantile, counted from 1.

    Not plain ``ceil`` of the floating-point product, which is one too high for some levels (0.55 and n = 99).

    Parameters
    ----------
    level
        In (0, 1).
    n
        Number of calibration scores.

    Returns
    -------
    In 1 .. n + 1; n + 1 means that the quantile is infinite.
    """
    return max(1, math.ceil(level * (n + 1) * (1.0 - RANK_SLACK)))


def naive_threshold(scores: Real[np.ndarray, " n"], level: float) -> float:
    """The ceil(level (n + 1))-th smallest score; infinite where that exceeds n.

    Not numpy's quantile, which interpolates and is always finite.

    Parameters
    ----------
    scores : (n,)
        Of the calibration points, in any order.
    level
        1 - alpha, in (0, 1).

    Raises
    ------
    ValueError
        If there is no score, one is not a number, or the level is out of range.

    Source: section 2 of the paper (split conformal prediction).
    """
    _check_level(level)
    scores = _check_scores(scores)
    r = rank(level, len(scores))
    return float(np.partition(scores, r - 1)[r - 1]) if r <= len(scores) else math.inf


def repeated_threshold(scores: Real[np.ndarray, " n_draws"], draws: int, level: float) -> float:
    """The threshold of n points that each have ``draws`` scores: the average of the draws' empirical laws.

    Q is the smallest score q with (number of scores <= q) / draws >= level (n + 1). With one draw it is
    `naive_threshold`.

    Parameters
    ----------
    scores : (n * draws,)
        In any order; a point whose label is known has its score ``draws`` times.
    draws, level

    Raises
    ------
    ValueError
        If the number of scores is not a multiple of ``draws``.
    """
    _check_level(level)
    scores = _check_scores(scores)
    if draws < 1 or len(scores) % draws:
        raise ValueError(
            f"{len(scores)} scores are not {draws} for each point: give every point the same number of draws"
        )
    n = len(scores) // draws
    r = max(1, math.ceil(draws * (level * (n + 1) * (1.0 - RANK_SLACK))))
    return float(np.partition(scores, r - 1)[r - 1]) if r <= len(scores) else math.inf


def weighted_threshold(
    scores: Real[np.ndarray, " n"],
    weights: Real[np.ndarray, " n"],
    test_weight: float | Real[np.ndarray, " m"],
    level: float,
) -> float | Float[np.ndarray, " m"]:
    """Weighted conformal quantile, with the test point's own mass at +infinity.

    Not numpy's weighted quantile: nothing is interpolated, and the test point's atom is never a finite score.

    Parameters
    ----------
    scores, weights : (n,)
        Of the clean calibration points. Only ratios of weights matter.
    test_weight
        Weight of the test point, or of m test points: one sort serves them all.
    level
        In (0, 1), usually 1 - alpha.

    Returns
    -------
    Smallest score whose cumulated mass w_i / (sum w + test_weight) reaches the level; infinite where none does.
    A float for a single test weight, else (m,).

    Raises
    ------
    ValueError
        If a weight is negative or not a number, if all calibration weights are zero, or if shapes differ.

    Source: Tibshirani et al. 2019, lemma 3; section 2 of the paper.
    """
    _check_level(level)
    scores, weights = _check_scores(scores), _check_weights(weights, len(scores))
    star = np.asarray(test_weight, dtype=np.float64)
    if np.isnan(star).any() or (star < 0).any():
        raise ValueError("a test weight is negative or not a number: weights are likelihood ratios, at least 0")
    order = np.argsort(scores)
    cumulated = np.cumsum(weights[order])
    if not cumulated[-1] > 0:
        raise ValueError("all calibration weights are zero: at least one clean point must have a positive weight")
    k = np.searchsorted(cumulated, (level - MASS_SLACK) * (cumulated[-1] + star), side="left")
    quantile = np.append(scores[order], math.inf)[k]
    return float(quantile) if star.ndim == 0 else quantile


def pcp_weight(weights: Real[np.ndarray, " n"], beta: float, small_n: str = "largest-weight") -> float:
    """The weight that PCP gives to the test point: the ceil((1 - beta)(n + 1))-th smallest of all calibration weights.

    Parameters
    ----------
    weights : (n,)
        Of all calibration points, corrupted ones too.
    beta
        In (0, 1).
    small_n
        What stands for it where the rank exceeds n: "largest-weight", or "inf", which makes the threshold infinite.
    """
    n = len(weights)
    r = rank(1.0 - beta, n)
    if r <= n:
        return float(np.partition(weights, r - 1)[r - 1])
    return math.inf if small_n == "inf" else float(np.max(weights))


def pcp_threshold(
    scores: Real[np.ndarray, " clean"],
    weights: Real[np.ndarray, " n"],
    corrupted: Any,
    level: float,
    beta: float = 0.005,
    *,
    small_n: Literal["largest-weight", "inf"] = "largest-weight",
    compat: Literal["official"] | None = None,
) -> float:
    """The threshold of privileged conformal prediction.

    Each calibration point in turn lends its Z to the test point: that gives one weighted quantile a point, and Q is
    the (1 - beta) quantile of them. As a weighted quantile does not fall when the test weight grows, Q is the one
    weighted quantile at the (1 - beta) quantile of the weights: one sort in place of n (`reference.pcp_threshold_loop`).

    Parameters
    ----------
    scores : (clean,)
        Of the clean calibration points, in their order.
    weights : (n,)
        P(M = 0) / P(M = 0 | Z) of every calibration point.
    corrupted : (n,) of bool
    level
        1 - alpha; the weighted quantile is taken at level + beta.
    beta
        In (0, 1 - level).
    small_n
        As in `pcp_weight`.
    compat
        "official" for the quantile of the released code, which interpolates and puts the test point's mass at the
        largest clean score, and so may under-cover.

    Source: Feldman and Romano 2024, algorithm 1; section 2 of the paper; github.com/Shai128/pcp for "official".
    """
    _check_level(level)
    scores = _check_scores(scores)
    weights = _check_weights(weights, None)
    corrupted = np.asarray(corrupted, dtype=bool)
    if corrupted.shape != weights.shape or (~corrupted).sum() != len(scores):
        raise ValueError(
            f"{len(weights)} weights, {corrupted.size} corruption marks of which {(~corrupted).sum()} clean, and "
            f"{len(scores)} clean scores do not fit: give one weight and mark a row, and one score a clean row"
        )
    if not 0.0 < beta < 1.0 - level:
        raise ValueError(f"beta must lie between 0 and alpha = {1.0 - level:.4g}, got {beta}: the default is 0.005")
    if compat == "official":
        return _official_pcp_threshold(scores, weights, corrupted, level, beta)
    if compat is not None:
        raise ValueError(f'compat must be None or "official", got {compat!r}')
    star = pcp_weight(weights, beta, small_n)
    quantile = weighted_threshold(scores, weights[~corrupted], star, level + beta)
    return float(quantile)


def _official_pcp_threshold(
    scores: np.ndarray, weights: np.ndarray, corrupted: np.ndarray, level: float, beta: float
) -> float:
    """PCP as released: interpolated quantiles, the test point's mass at the largest clean score."""
    n = len(weights)
    star = float(np.quantile(weights, 1.0 - beta))
    points, mass = np.append(scores, scores.max()), np.append(weights[~corrupted], star)
    order = np.argsort(points, kind="stable")  # the test point's atom stays behind the score that it equals
    points, mass = points[order], mass[order] / mass.sum()
    middle = np.cumsum(mass) - mass / 2
    middle = (middle - middle[0]) / (middle[-1] - middle[0])
    raised = min(max(level + beta * n / (n + 1) + 1 / (n + 1), 0.0), 1.0)
    return float(np.interp(raised, middle, points))


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"a level must lie between 0 and 1, got {level}: 0.9 for 90 % coverage")


def _check_scores(scores: Any) -> np.ndarray:
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"scores must be a flat array with at least one value, got shape {scores.shape}")
    if np.isnan(scores).any():
        raise ValueError(f"{int(np.isnan(scores).sum())} scores are not a number: leave out the points without a label")
    return scores


def _check_weights(weights: Any, n: int | None) -> np.ndarray:
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim != 1 or (n is not None and len(weights) != n):
        raise ValueError(
            f"weights must be a flat array with one weight a score, got shape {weights.shape} for {n} scores"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError("a weight is negative, infinite or not a number: weights are likelihood ratios, at least 0")
    return weights
