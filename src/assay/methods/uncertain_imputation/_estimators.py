"""The estimators: naive, weighted, privileged and uncertain-imputation conformal prediction, and their triply robust union."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from assay.methods.uncertain_imputation._conformal import Conformal, Score, no_type_check
from assay.methods.uncertain_imputation._rows import Rows, join, read_X
from assay.methods.uncertain_imputation._scores import interval, label_set
from assay.methods.uncertain_imputation._thresholds import weighted_threshold

PARTS = ("naive", "pcp", "ui")


class NaiveConformal(Conformal):
    """Split conformal prediction on the clean rows alone, and the two ways of going wrong with the others.

    Not valid where the corruption depends on the label through Z; the baseline of every comparison.

    Parameters
    ----------
    estimator
        f, from X. For "cqr" a pair (lower, upper), a triple (lower, upper, median), an object with
        ``predict(X, quantiles=)``, or one quantile regressor that is copied for each quantile; for "absolute" a
        regressor; for "normalized" a regressor or a pair (mean, spread); for "hps" and "aps" a classifier. By default
        histogram gradient boosting.
    imputer
        g, from X and Z: for ``impute="mean"``.
    confidence_level
        1 - alpha, or several.
    score
        "cqr", "absolute", "normalized" for intervals; "hps", "aps" for label sets.
    impute
        "none", or "mean": a corrupted label of the calibration rows becomes g(X, Z), without an error.
    noisy
        "drop", or "use": the wrong labels of the calibration rows are taken as they are.
    reference_size
        Share of the rows given to `fit` that is held out, so that methods can be compared on the same split.
    calibration_size
        Share that `fit_conformalize` holds out for calibration.
    prefit
        The estimators are fitted, and used as they are.
    train_on
        "clean": f learns from the clean rows; "imputed": from all rows, with labels imputed by a linear model of X, Z.
    random_state
        Seed, or numpy generator.

    Attributes
    ----------
    threshold_ : float, or (levels,)
    n_clean_ : int
        Clean calibration rows.
    imputed_ : (n,)
        Calibration labels, imputed where they were corrupted.
    diagnostics_ : dict
        Prints as a few sentences.
    n_empty_ : int, or (levels,)
        Empty sets of the last `predict_interval`.
    """

    @no_type_check
    def __init__(
        self,
        estimator: Any = None,
        imputer: Any = None,
        confidence_level: float | Sequence[float] = 0.9,
        score: Score = "cqr",
        impute: Literal["none", "mean"] = "none",
        noisy: Literal["drop", "use"] = "drop",
        reference_size: float = 0.0,
        calibration_size: float = 1 / 4,
        prefit: bool = False,
        train_on: Literal["clean", "imputed"] = "clean",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.imputer = imputer
        self.confidence_level = confidence_level
        self.score = score
        self.impute = impute
        self.noisy = noisy
        self.reference_size = reference_size
        self.calibration_size = calibration_size
        self.prefit = prefit
        self.train_on = train_on
        self.random_state = random_state

    def _needs(self) -> set[str]:
        return {"imputer"} if self.impute == "mean" else set()

    def _check_settings(self) -> None:
        if self.impute not in ("none", "mean"):
            raise ValueError(f'impute must be "none" or "mean", got {self.impute!r}')
        if self.noisy not in ("drop", "use"):
            raise ValueError(f'noisy must be "drop" or "use", got {self.noisy!r}')
        if self.impute == "mean" and self.noisy == "use":
            raise ValueError('impute="mean" replaces the labels that noisy="use" would keep: choose one')
        super()._check_settings()

    def _find_thresholds(self, rows: Rows) -> None:
        self.threshold_ = self._keep_thresholds(self._naive_thresholds(rows))


class WeightedConformal(Conformal):
    """Weighted conformal prediction with weights P(M = 0) / P(M = 0 | Z): needs Z at prediction too.

    Where Z is known only for training rows, use `PrivilegedConformal`.

    Parameters
    ----------
    estimator, confidence_level, score, reference_size, calibration_size, prefit, train_on, random_state
        As for `NaiveConformal`.
    propensity
        P(M = 0 | Z): a classifier of the corruption (class 0 is clean), a function of Z that returns it for each row,
        or None for a regularised gradient boosting.
    clip
        Propensities below it are raised to it.
    propensity_features
        "z", which the method's assumption makes sufficient, or "xz".
    calibrate
        None, "sigmoid" or "isotonic": recalibrate the propensity on the reference rows.
    fit_weights
        "propensity" trains f with weights 1 / P(M = 0 | Z).
    """

    @no_type_check
    def __init__(
        self,
        estimator: Any = None,
        propensity: Any = None,
        confidence_level: float | Sequence[float] = 0.9,
        score: Score = "cqr",
        clip: float = 0.01,
        propensity_features: Literal["z", "xz"] = "z",
        calibrate: Literal["sigmoid", "isotonic"] | None = None,
        fit_weights: Literal["propensity"] | None = None,
        reference_size: float = 0.0,
        calibration_size: float = 1 / 4,
        prefit: bool = False,
        train_on: Literal["clean", "imputed"] = "clean",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.propensity = propensity
        self.confidence_level = confidence_level
        self.score = score
        self.clip = clip
        self.propensity_features = propensity_features
        self.calibrate = calibrate
        self.fit_weights = fit_weights
        self.reference_size = reference_size
        self.calibration_size = calibration_size
        self.prefit = prefit
        self.train_on = train_on
        self.random_state = random_state

    def _needs(self) -> set[str]:
        return {"propensity"}

    def _sees_Z_at_prediction(self) -> bool:
        return True

    def _find_thresholds(self, rows: Rows) -> None:
        outline, clean = self._calibration_outline("", rows), ~rows.corrupted
        self._clean_weights = self._weights(rows)[clean]
        self._clean_scores = [outline.score(self._labels, j)[clean] for j in range(len(self._levels))]

    def _thresholds_for(self, X: Any, Z: Any) -> list[Any]:
        if Z is None:
            raise ValueError(
                "WeightedConformal needs Z at prediction: give it, or use PrivilegedConformal, which does not"
            )
        numbers = self._privileged.encode(Z)
        if len(numbers) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} rows and Z {len(numbers)}: give one row of Z for each")
        features = join(X, numbers) if self.propensity_features == "xz" else numbers
        star = self._mean_propensity / np.clip(self._propensity(features), self.clip, 1.0)
        found = [
            weighted_threshold(scores, self._clean_weights, star, level)
            for scores, level in zip(self._clean_scores, self._levels)
        ]
        unbounded = max(int(np.isinf(q).sum()) for q in found)
        if unbounded:
            warnings.warn(
                f"{unbounded} of {len(star)} rows have an infinite threshold: their weight is too large for "
                f"{self.n_clean_} clean calibration rows",
                stacklevel=3,
            )
        return found


class PrivilegedConformal(Conformal):
    """Privileged conformal prediction (PCP): weights from Z, which prediction does not need.

    Valid where (X, Y) is independent of the corruption given Z and P(M = 0 | Z) is estimated well.

    Parameters
    ----------
    estimator, confidence_level, score, reference_size, calibration_size, prefit, train_on, random_state
        As for `NaiveConformal`.
    propensity, clip, propensity_features, calibrate, fit_weights
        As for `WeightedConformal`.
    beta
        In (0, alpha): the share of the calibration weights that may exceed the one given to the test point.
    small_n
        With fewer than 1 / beta - 1 calibration rows: "largest-weight", or "inf", which is strictly valid.
    compat
        "official" for the threshold of the released code (interpolated, unclipped propensities).

    Source: Feldman and Romano 2024; section 2 of the paper.
    """

    @no_type_check
    def __init__(
        self,
        estimator: Any = None,
        propensity: Any = None,
        confidence_level: float | Sequence[float] = 0.9,
        score: Score = "cqr",
        beta: float = 0.005,
        clip: float = 0.01,
        compat: Literal["official"] | None = None,
        small_n: Literal["largest-weight", "inf"] = "largest-weight",
        propensity_features: Literal["z", "xz"] = "z",
        calibrate: Literal["sigmoid", "isotonic"] | None = None,
        fit_weights: Literal["propensity"] | None = None,
        reference_size: float = 0.0,
        calibration_size: float = 1 / 4,
        prefit: bool = False,
        train_on: Literal["clean", "imputed"] = "clean",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.propensity = propensity
        self.confidence_level = confidence_level
        self.score = score
        self.beta = beta
        self.clip = clip
        self.compat = compat
        self.small_n = small_n
        self.propensity_features = propensity_features
        self.calibrate = calibrate
        self.fit_weights = fit_weights
        self.reference_size = reference_size
        self.calibration_size = calibration_size
        self.prefit = prefit
        self.train_on = train_on
        self.random_state = random_state

    def _needs(self) -> set[str]:
        return {"propensity"}

    def _find_thresholds(self, rows: Rows) -> None:
        self.threshold_ = self._keep_thresholds(self._pcp_thresholds(rows))


class UncertainImputation(Conformal):
    """Uncertain imputation (UI): corrupted calibration labels are replaced by a guess with a real error.

    Then ordinary split conformal prediction on all calibration rows. Valid where the error of g, given Z, depends
    neither on g's prediction nor on where the set lies; needs no weights.

    Parameters
    ----------
    estimator, confidence_level, score, calibration_size, prefit, train_on, random_state
        As for `NaiveConformal`.
    imputer
        g, from X and Z: a regressor, or a classifier with probabilities. By default histogram gradient boosting.
    errors
        Where the error of an imputed label comes from: "knn", the clean reference rows nearest in Z; "same-z", those of
        equal Z; "bins", those of its k-means cell; "global", any; "quantile", boosted quantiles given Z. Classes are
        drawn from g's tempered probabilities instead.
    draws
        Imputations of each label. More than one lowers the variance of the threshold.
    reference_size
        Share of the rows given to `fit` on which g's errors are measured: rows that g has not seen.
    min_pool
        Of "same-z": the least number of residuals to draw from.

    Attributes
    ----------
    threshold_, n_clean_, diagnostics_, n_empty_
        As for `NaiveConformal`.
    imputed_ : (n,), or (n, draws)
        Calibration labels, imputed where they were corrupted.

    Source: section 3 of the paper, theorem 4. The sampler for a continuous Z and the version for classes are ours.
    """

    @no_type_check
    def __init__(
        self,
        estimator: Any = None,
        imputer: Any = None,
        confidence_level: float | Sequence[float] = 0.9,
        score: Score = "cqr",
        errors: Literal["knn", "same-z", "bins", "global", "quantile"] = "knn",
        draws: int = 1,
        reference_size: float = 1 / 3,
        calibration_size: float = 1 / 4,
        prefit: bool = False,
        min_pool: int = 20,
        train_on: Literal["clean", "imputed"] = "clean",
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.imputer = imputer
        self.confidence_level = confidence_level
        self.score = score
        self.errors = errors
        self.draws = draws
        self.reference_size = reference_size
        self.calibration_size = calibration_size
        self.prefit = prefit
        self.min_pool = min_pool
        self.train_on = train_on
        self.random_state = random_state

    def _needs(self) -> set[str]:
        return {"imputer", "reference"}

    def _find_thresholds(self, rows: Rows) -> None:
        self.threshold_ = self._keep_thresholds(self._ui_thresholds(rows))


class TriplyRobust(Conformal):
    """The union of the naive, the PCP and the UI sets: valid as long as one of them is.

    With one f the three sets are nested, and the union has the largest of the three thresholds.

    Parameters
    ----------
    parts
        Of "naive", "pcp", "ui".
    estimator
        f, shared by the parts; or a dict with one for each part, and then the union is taken of the sets.
    imputer, errors, draws, min_pool
        As for `UncertainImputation`.
    propensity, beta, clip, compat, small_n, propensity_features, calibrate, fit_weights
        As for `PrivilegedConformal`.
    include_uncalibrated
        Add the interval of f itself (threshold 0): the valid one where f's quantiles are right but Z still moves the
        spread of Y.
    hull
        Where the parts have different f: one interval around the union, in place of a list of disjoint ones.
    confidence_level, score, reference_size, calibration_size, prefit, train_on, random_state
        As for `UncertainImputation`.

    Attributes
    ----------
    threshold_ : float, or (levels,)
        The largest of the parts'. Absent where the parts have different f.
    thresholds_ : dict
        Of each part.

    Source: section 4 of the paper.
    """

    @no_type_check
    def __init__(
        self,
        parts: Sequence[str] = PARTS,
        estimator: Any = None,
        imputer: Any = None,
        propensity: Any = None,
        confidence_level: float | Sequence[float] = 0.9,
        score: Score = "cqr",
        errors: Literal["knn", "same-z", "bins", "global", "quantile"] = "knn",
        draws: int = 1,
        beta: float = 0.005,
        clip: float = 0.01,
        compat: Literal["official"] | None = None,
        small_n: Literal["largest-weight", "inf"] = "largest-weight",
        propensity_features: Literal["z", "xz"] = "z",
        calibrate: Literal["sigmoid", "isotonic"] | None = None,
        fit_weights: Literal["propensity"] | None = None,
        include_uncalibrated: bool = False,
        hull: bool = False,
        reference_size: float = 1 / 3,
        calibration_size: float = 1 / 4,
        prefit: bool = False,
        min_pool: int = 20,
        train_on: Literal["clean", "imputed"] = "clean",
        random_state: Any = None,
    ) -> None:
        self.parts = parts
        self.estimator = estimator
        self.imputer = imputer
        self.propensity = propensity
        self.confidence_level = confidence_level
        self.score = score
        self.errors = errors
        self.draws = draws
        self.beta = beta
        self.clip = clip
        self.compat = compat
        self.small_n = small_n
        self.propensity_features = propensity_features
        self.calibrate = calibrate
        self.fit_weights = fit_weights
        self.include_uncalibrated = include_uncalibrated
        self.hull = hull
        self.reference_size = reference_size
        self.calibration_size = calibration_size
        self.prefit = prefit
        self.min_pool = min_pool
        self.train_on = train_on
        self.random_state = random_state

    def _needs(self) -> set[str]:
        needs: set[str] = set()
        if "pcp" in self.parts:
            needs |= {"propensity"}
        if "ui" in self.parts:
            needs |= {"imputer", "reference"}
        return needs

    def _check_settings(self) -> None:
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise ValueError(f"parts must be some of {', '.join(PARTS)}, got {self.parts!r}")
        if isinstance(self.estimator, dict) and set(self.estimator) != set(self.parts):
            raise ValueError(
                f"estimator has an f for {sorted(self.estimator)}: give one for each of {sorted(self.parts)}"
            )
        if self.include_uncalibrated and self._classes_task:
            raise ValueError("include_uncalibrated adds the interval of f itself: label sets have none")
        super()._check_settings()

    def _fit_estimators(self, train: Rows | None, seed: int) -> None:
        if not isinstance(self.estimator, dict):
            super()._fit_estimators(train, seed)
            return
        self._models = {}
        known: list[Any] = []
        for part in self.parts:
            self._models[part] = self._fit_estimator(self.estimator[part], train, seed)
            known.append(getattr(self, "classes_", None))
        if self._classes_task and any(len(k) != len(known[0]) or (k != known[0]).any() for k in known):
            raise ValueError("the parts' classifiers know different classes: fit them on the same labels")

    def _find_thresholds(self, rows: Rows) -> None:
        find = {"naive": self._naive_thresholds, "pcp": self._pcp_thresholds, "ui": self._ui_thresholds}
        found = {part: find[part](rows) for part in self.parts}
        self.thresholds_ = {part: self._keep_thresholds(q) for part, q in found.items()}
        if isinstance(self.estimator, dict):
            return
        if self.include_uncalibrated:
            found["uncalibrated"] = [0.0] * len(self._levels)
        self.threshold_ = self._keep_thresholds(np.max(list(found.values()), axis=0))

    def predict_interval(self, X: Any, Z: Any = None) -> tuple[Any, Any]:
        """Point predictions and intervals, as of every other class where the parts share f.

        Returns
        -------
        point : (n,)
        intervals
            (n, 2, levels) where the parts share f, or with ``hull=True``. Else, for each level, a list of n arrays
            (intervals, 2): the disjoint intervals of the union, in order.
        """
        if not isinstance(self.estimator, dict) or self._classes_task:
            return super().predict_interval(X, Z)
        self._check_prediction(Z)
        rows = read_X(self, X, reset=False)
        unions = []
        for j in range(len(self._levels)):
            sets = []
            for part in self.parts:
                curves = self._outline(self._models[part], rows, None)
                q = np.atleast_1d(self.thresholds_[part])[j]
                sets.append(interval(curves.lower[:, j], curves.upper[:, j], curves.scale, q))
                if self.include_uncalibrated:
                    sets.append(interval(curves.lower[:, j], curves.upper[:, j], curves.scale, 0.0))
            unions.append(union_of_intervals(sets))
        point = self._output(self._point(rows), X)
        if not self.hull:
            self.n_empty_ = [sum(len(u) == 0 for u in union) for union in unions]
            return point, unions
        intervals = np.stack(
            [[(u[0, 0], u[-1, 1]) if len(u) else (np.nan, np.nan) for u in union] for union in unions], axis=2
        )
        self._count_empty(intervals)
        return point, self._output(intervals, X)

    def predict_set(self, X: Any, Z: Any = None) -> tuple[Any, Any]:
        """The most probable label and the union of the parts' label sets; as for every other class."""
        if not isinstance(self.estimator, dict) or not self._classes_task:
            return super().predict_set(X, Z)
        self._check_prediction(Z)
        rows = read_X(self, X, reset=False)
        u = self._prediction_uniforms(rows)
        masks = []
        for part in self.parts:
            outline = self._outline(self._models[part], rows, u)
            masks.append(
                np.stack([label_set(outline.scores, q) for q in np.atleast_1d(self.thresholds_[part])], axis=2)
            )
        return self._output(self._point(rows), X), self._output(np.any(masks, axis=0), X)


def union_of_intervals(sets: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The union of several intervals in each row, as disjoint intervals in order.

    Parameters
    ----------
    sets
        Arrays (n, 2); [nan, nan] is the empty set.

    Returns
    -------
    n arrays (intervals, 2).
    """
    unions = []
    for row in np.stack(sets, axis=1):
        merged: list[list[float]] = []
        for low, high in sorted(row[~np.isnan(row[:, 0])].tolist()):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        unions.append(np.array(merged).reshape(-1, 2))
    return unions
