"""Scores and the sets they make: intervals from a lower and an upper curve, label sets from class probabilities."""

import numpy as np
from jaxtyping import Bool, Float, Int

INTERVAL_SCORES = ("cqr", "absolute", "normalized")
SET_SCORES = ("hps", "aps")


def interval_score(
    y: Float[np.ndarray, " n"],
    lower: Float[np.ndarray, " n"],
    upper: Float[np.ndarray, " n"],
    scale: Float[np.ndarray, " n"] | float = 1.0,
) -> Float[np.ndarray, " n"]:
    """How far y lies outside [lower, upper], in units of scale; negative inside.

    With quantile curves this is CQR (Romano et al. 2019); with lower = upper = mu the absolute residual; with a
    spread as scale the normalized residual. The caller sorts curves that cross.
    """
    return np.maximum(lower - y, y - upper) / scale


def interval(
    lower: Float[np.ndarray, " n"],
    upper: Float[np.ndarray, " n"],
    scale: Float[np.ndarray, " n"] | float,
    threshold: float | Float[np.ndarray, " n"],
) -> Float[np.ndarray, "n 2"]:
    """The interval {y: interval_score(y) <= threshold}; [nan, nan] where it is empty, as a negative threshold can make it."""
    ends = np.stack([lower - threshold * scale, upper + threshold * scale], axis=1)
    ends[ends[:, 0] > ends[:, 1]] = np.nan
    return ends


def hps_scores(probabilities: Float[np.ndarray, "n classes"]) -> Float[np.ndarray, "n classes"]:
    """1 - p of each class (Sadinle et al. 2019)."""
    return 1.0 - probabilities


def aps_scores(
    probabilities: Float[np.ndarray, "n classes"], u: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "n classes"]:
    """Randomised adaptive scores: the mass of the classes ranked above, plus u of the class's own.

    Ranked by falling probability, ties by class index; u is one uniform draw on [0, 1) a row. With u = 1 it is the
    score without randomisation.

    Source: Romano, Sesia and Candes 2020, eq. 4 to 7.
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=1)
    above = np.cumsum(ranked, axis=1) - ranked
    scores = np.empty_like(probabilities)
    np.put_along_axis(scores, order, above + u[:, None] * ranked, axis=1)
    return scores


def score_of_label(all_scores: Float[np.ndarray, "n classes"], codes: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The score of each row's label; infinite for a label that the classifier does not know (code -1)."""
    picked = np.take_along_axis(all_scores, np.maximum(codes, 0)[:, None], axis=1)[:, 0]
    return np.where(codes >= 0, picked, np.inf)


def label_set(
    all_scores: Float[np.ndarray, "n classes"], threshold: float | Float[np.ndarray, " n"]
) -> Bool[np.ndarray, "n classes"]:
    """The set {y: score <= threshold} of each row."""
    return all_scores <= np.reshape(threshold, (-1, 1))
