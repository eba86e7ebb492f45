"""Which of the three guarantees is plausible: what the fitted parts say about their own assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Diagnostics(dict):
    """Numbers by name, and ``advice``, a sentence on each assumption; prints as text."""

    def __str__(self) -> str:
        lines = [
            f"{name.replace('_', ' ')}: {value:.4g}"
            if isinstance(value, float)
            else f"{name.replace('_', ' ')}: {value}"
            for name, value in self.items()
            if name != "advice"
        ]
        return "\n".join([*lines, *self["advice"]])


def diagnose(
    *,
    method: str,
    n_train_clean: int,
    n_reference_clean: int,
    n_calibration: int,
    n_clean: int,
    imputer: Mapping[str, float],
    weights: Mapping[str, float],
    shift: Mapping[str, float],
) -> Diagnostics:
    """Put the numbers beside each other, and say in a sentence which assumption looks weak.

    The limits are rules of thumb: an effective sample below 30 % of the clean rows, a calibration error of 0.05 more than chance,
    an R^2 of g below 0.2, a score shift above 0.1.
    """
    advice = []
    if weights:
        share = weights["effective_sample_size"] / n_clean
        auc = weights["propensity_auc"]
        error = weights["propensity_calibration_error"] - weights["propensity_calibration_chance"]
        if share < 0.3:
            advice.append(
                f"PCP looks weak: a few rows carry the weights (effective sample {share:.0%} of the clean rows, largest "
                f"weight {weights['largest_weight']:.1f} times the mean)."
            )
        elif error > 0.05:
            advice.append(f"PCP looks weak: the propensity is off by {error:.2f} on average; try calibrate=.")
        else:
            advice.append("PCP looks plausible: the propensity is calibrated and its weights are not too uneven.")
        if not math.isnan(auc) and auc < 0.55:
            advice.append(
                "Z hardly tells which labels are corrupted: naive conformal prediction may be valid as it is."
            )
    if imputer:
        ((name, quality),) = imputer.items()
        what = "R^2" if name == "imputer_r2" else "accuracy"
        if quality < 0.2:
            advice.append(f"UI rests on its errors alone: g has an {what} of {quality:.2f} on clean reference rows.")
        else:
            advice.append(f"UI looks plausible: g has an {what} of {quality:.2f} on clean reference rows.")
    if shift:
        distance = shift["score_shift"]
        advice.append(
            f"Naive looks weak: imputed scores differ from clean ones (distance {distance:.2f})."
            if distance > 0.1
            else f"Naive looks plausible: imputed scores are like clean ones (distance {distance:.2f})."
        )
    if not advice:
        advice.append("Valid only if labels are corrupted regardless of the score: nothing here can check that.")
    else:
        advice.append("That corruption depends on the label through Z alone cannot be checked by any data.")
    return Diagnostics(
        method=method,
        n_train_clean=n_train_clean,
        n_reference_clean=n_reference_clean,
        n_calibration=n_calibration,
        n_clean=n_clean,
        share_clean=n_clean / n_calibration,
        **imputer,
        **weights,
        **shift,
        advice=advice,
    )
