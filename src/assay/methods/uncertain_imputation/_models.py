"""The fitted models behind a score: curves and their spread, class probabilities, and the chance of a clean label."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from assay._extras import extras

with extras("tables"):
    from sklearn.base import clone
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
    )
    from sklearn.frozen import FrozenEstimator
    from sklearn.utils.validation import has_fit_parameter

TEMPERATURES = np.geomspace(0.08, 4.5, 81)


class IntervalModel:
    """Lower and upper curves with a spread, for each confidence level, and a point prediction.

    "cqr": quantile curves and a spread of 1. "absolute": both curves are the mean, spread 1. "normalized": both curves
    are the mean, the spread is a second regressor of |y - mean|.

    Parameters
    ----------
    score, levels
    estimator
        For "cqr" a pair (lower, upper), a triple (lower, upper, median), an object with ``predict(X, quantiles=)``, or
        one quantile regressor whose quantile can be set, as a template. For "absolute" a regressor; for "normalized" a
        regressor or a pair (mean, spread). None for gradient boosting.
    prefit
        The estimators are fitted and used as they are.
    seed
        Of the default estimators.
    """

    def __init__(self, score: str, levels: Sequence[float], estimator: Any, prefit: bool, seed: int) -> None:
        self.score, self.levels, self.prefit = score, list(levels), prefit
        self.form = "curves"
        if score == "cqr":
            self._plan_quantiles(estimator, seed)
        else:
            self._plan_mean(estimator, seed)

    def _plan_quantiles(self, estimator: Any, seed: int) -> None:
        if estimator is None:
            estimator = HistGradientBoostingRegressor(loss="quantile", random_state=seed)
        if isinstance(estimator, tuple | list):
            if len(estimator) not in (2, 3):
                raise ValueError(
                    f"estimator has {len(estimator)} members: give (lower, upper) or (lower, upper, median)"
                )
            pair = [self._fresh(e) for e in estimator[:2]]
            self.lower, self.upper = [pair[0]], [pair[1]]
            self.median = None
            if len(estimator) == 3:
                self.median = self._fresh(estimator[2])
            elif not self.prefit and _quantile_name(estimator[0]):
                self.median = at_quantile(estimator[0], 0.5)
        elif _predicts_quantiles(estimator):
            self.form, self.forest = "forest", self._fresh(estimator)
        elif _quantile_name(estimator) and not self.prefit:
            self.lower = [at_quantile(estimator, (1 - level) / 2) for level in self.levels]
            self.upper = [at_quantile(estimator, 1 - (1 - level) / 2) for level in self.levels]
            self.median = at_quantile(estimator, 0.5)
        else:
            raise ValueError(
                f'score="cqr" cannot use {type(estimator).__name__}: give a pair (lower, upper) or a triple (lower, upper, '
                "median) of quantile models, an object with predict(X, quantiles=), or a quantile regressor to be copied"
            )

    def _plan_mean(self, estimator: Any, seed: int) -> None:
        if estimator is None:
            estimator = HistGradientBoostingRegressor(random_state=seed)
        pair = estimator if isinstance(estimator, tuple | list) else (estimator,)
        if len(pair) > (2 if self.score == "normalized" else 1):
            raise ValueError(f'score="{self.score}" got {len(pair)} estimators: give one regressor')
        if self.score == "normalized" and self.prefit and len(pair) == 1:
            raise ValueError('score="normalized" with prefit=True needs two fitted regressors: give (mean, spread)')
        self.mean = self._fresh(pair[0])
        self.spread = self._fresh(pair[-1]) if self.score == "normalized" else None

    def _fresh(self, estimator: Any) -> Any:
        return estimator if self.prefit else clone(estimator, safe=False)

    def fit(self, X: Any, y: np.ndarray, sample_weight: np.ndarray | None = None) -> IntervalModel:
        """Fit on clean rows; y (n,)."""
        if self.score == "cqr":
            models = (
                [self.forest]
                if self.form == "forest"
                else [*self.lower, *self.upper, *([] if self.median is None else [self.median])]
            )
            for model in models:
                fit_weighted(model, X, y, sample_weight)
            return self
        fit_weighted(self.mean, X, y, sample_weight)
        if self.spread is not None:
            fit_weighted(self.spread, X, np.abs(y - predict_flat(self.mean, X)), sample_weight)
        return self

    def curves(self, X: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lower and upper curves (n, levels), lower never above upper, and the spread (n,)."""
        if self.score != "cqr":
            mean = np.repeat(predict_flat(self.mean, X)[:, None], len(self.levels), axis=1)
            scale = np.ones(len(mean)) if self.spread is None else np.maximum(predict_flat(self.spread, X), 1e-8)
            return mean, mean, scale
        if self.form == "forest":
            quantiles = [q for level in self.levels for q in ((1 - level) / 2, 1 - (1 - level) / 2)]
            both = np.asarray(self.forest.predict(X, quantiles=quantiles), dtype=np.float64)
            if both.shape != (both.shape[0], len(quantiles)):
                raise ValueError(
                    f"predict(X, quantiles=) returned shape {both.shape}, expected (rows, {len(quantiles)})"
                )
            lower, upper = both[:, 0::2], both[:, 1::2]
        else:
            lower = np.stack([predict_flat(model, X) for model in self.lower], axis=1)
            upper = np.stack([predict_flat(model, X) for model in self.upper], axis=1)
            if lower.shape[1] < len(self.levels):  # a user's pair serves every level
                lower, upper = (np.repeat(a, len(self.levels), axis=1) for a in (lower, upper))
        return np.minimum(lower, upper), np.maximum(lower, upper), np.ones(len(lower))

    def point(self, X: Any) -> np.ndarray:
        """The median for "cqr" (midway between the two where a pair came without one), else the mean. (n,)."""
        if self.score != "cqr":
            return predict_flat(self.mean, X)
        if self.form == "forest":
            return np.asarray(self.forest.predict(X, quantiles=[0.5]), dtype=np.float64).reshape(-1)
        if self.median is not None:
            return predict_flat(self.median, X)
        return (predict_flat(self.lower[0], X) + predict_flat(self.upper[0], X)) / 2


class ClassModel:
    """Class probabilities in the order of ``classes``.

    Parameters
    ----------
    estimator
        A classifier with ``predict_proba``; None for gradient boosting.
    """

    def __init__(self, estimator: Any, prefit: bool, seed: int) -> None:
        if estimator is None:
            estimator = HistGradientBoostingClassifier(random_state=seed)
        if not hasattr(estimator, "predict_proba"):
            raise ValueError(
                f"{type(estimator).__name__} has no predict_proba: sets need a classifier with probabilities"
            )
        self.model = estimator if prefit else clone(estimator, safe=False)
        self.temperature = 1.0

    @property
    def classes(self) -> np.ndarray:
        return np.asarray(self.model.classes_)

    def fit(self, X: Any, y: np.ndarray, sample_weight: np.ndarray | None = None) -> ClassModel:
        fit_weighted(self.model, X, y, sample_weight)
        return self

    def probabilities(self, X: Any, classes: np.ndarray) -> np.ndarray:
        """Tempered probabilities (n, classes) in the order of ``classes``; 0 for a class the model does not know."""
        p = np.asarray(self.model.predict_proba(X), dtype=np.float64)
        own = self.classes
        aligned = np.zeros((len(p), len(classes)))
        for column, label in enumerate(own):
            (at,) = np.nonzero(classes == label)
            if len(at):
                aligned[:, at[0]] = p[:, column]
        return aligned if self.temperature == 1.0 else tempered(aligned, self.temperature)

    def calibrate(self, X: Any, codes: np.ndarray, classes: np.ndarray) -> ClassModel:
        """Choose the temperature of least log loss on held-out clean rows; rows of unknown classes do not take part."""
        self.temperature = 1.0
        known = codes >= 0
        if not known.any():
            return self
        p = self.probabilities(X, classes)[known]
        right = codes[known]
        losses = [
            -np.log(np.maximum(tempered(p, t)[np.arange(len(p)), right], 1e-300)).mean() for t in TEMPERATURES.tolist()
        ]
        self.temperature = float(TEMPERATURES[int(np.argmin(losses))])
        return self


class Propensity:
    """P(M = 0 | Z), the chance that a label is clean, from a classifier of the corruption.

    Parameters
    ----------
    propensity
        A classifier, fitted here to the corruption marks (class 0 is clean); a function of Z that returns P(M = 0 | Z)
        for each row; None for a regularised gradient boosting.
    """

    def __init__(self, propensity: Any, prefit: bool, seed: int) -> None:
        self.function: Callable[[Any], Any] | None = None
        self.model: Any = None
        self.constant: float | None = None
        self.default = propensity is None
        if propensity is None:
            # Few leaves of many rows: a propensity near 0 in one corner of Z would decide PCP's threshold.
            self.model = HistGradientBoostingClassifier(
                learning_rate=0.05, max_iter=200, min_samples_leaf=50, early_stopping=True, random_state=seed
            )
        elif hasattr(propensity, "predict_proba"):
            self.model = propensity if prefit else clone(propensity)
        elif callable(propensity):
            self.function = propensity
        else:
            raise ValueError(
                f"propensity must be a classifier with predict_proba or a function of Z, got {type(propensity).__name__}"
            )
        self.fitted = (prefit and not self.default) or self.function is not None

    def fit(self, features: Any, corrupted: np.ndarray) -> Propensity:
        """Fit to the corruption marks of the training rows; without any difference among them it is a constant."""
        if self.fitted:
            return self
        if corrupted.all() or not corrupted.any():
            self.constant = float(1.0 - corrupted.mean())
            return self
        if self.default and min(corrupted.sum(), (~corrupted).sum()) < 20:
            self.model.set_params(early_stopping=False)  # a tenth of so few rows would hold none of one kind
        self.model.fit(features, corrupted.astype(int))
        return self

    def calibrate(self, method: str, features: Any, corrupted: np.ndarray) -> Propensity:
        """Recalibrate on held-out rows: "sigmoid" or "isotonic"."""
        if self.model is None or self.constant is not None:
            return self
        if corrupted.all() or not corrupted.any():
            raise ValueError(
                f'calibrate="{method}" needs clean and corrupted reference rows (I3), and all {len(corrupted)} are of one '
                "kind: set a larger reference_size, or leave calibrate out"
            )
        self.model = CalibratedClassifierCV(FrozenEstimator(self.model), method=method)
        self.model.fit(features, corrupted.astype(int))
        return self

    def __call__(self, features: Any) -> np.ndarray:
        """P(M = 0) of each row, (n,)."""
        if self.constant is not None:
            return np.full(features.shape[0], self.constant)
        if self.function is not None:
            e = np.asarray(self.function(features), dtype=np.float64).reshape(-1)
            if len(e) != features.shape[0]:
                raise ValueError(f"the propensity function returned {len(e)} values for {features.shape[0]} rows")
        else:
            classes = list(self.model.classes_)
            if 0 not in classes:
                raise ValueError(f"the propensity classifier knows {classes}: class 0 must be the clean labels")
            e = np.asarray(self.model.predict_proba(features), dtype=np.float64)[:, classes.index(0)]
        if not ((e >= 0) & (e <= 1)).all():
            raise ValueError("a propensity lies outside [0, 1]: it is the chance that a label is clean, given Z")
        return e


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities p**(1 / temperature), normalised, by rows."""
    with np.errstate(divide="ignore"):
        logits = np.log(p) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    q = np.exp(logits)
    return q / q.sum(axis=1, keepdims=True)


def at_quantile(estimator: Any, quantile: float) -> Any:
    """A copy of a quantile regressor for another quantile."""
    return clone(estimator).set_params(**{str(_quantile_name(estimator)): float(quantile)})


def _quantile_name(estimator: Any) -> str | None:
    """The parameter by which a regressor's quantile is set: ``quantile``, or ``alpha`` of a quantile loss."""
    if not hasattr(estimator, "get_params"):
        return None
    parameters = estimator.get_params(deep=False)
    if "quantile" in parameters and parameters.get("loss", "quantile") == "quantile":
        return "quantile"
    return (
        "alpha"
        if "alpha" in parameters and "quantile" in (parameters.get("loss"), parameters.get("objective"))
        else None
    )


def _predicts_quantiles(estimator: Any) -> bool:
    predict = getattr(estimator, "predict", None)
    return predict is not None and "quantiles" in inspect.signature(predict).parameters


def fit_weighted(model: Any, X: Any, y: np.ndarray, sample_weight: np.ndarray | None) -> None:
    """Fit, with row weights where they are given; a model that cannot use them is an error."""
    if not hasattr(model, "fit"):
        raise ValueError(
            f"estimator has a {type(model).__name__} that cannot be fitted: give a model with fit and predict"
        )
    if sample_weight is None:
        model.fit(X, y)
    elif has_fit_parameter(model, "sample_weight"):
        model.fit(X, y, sample_weight=sample_weight)
    else:
        raise ValueError(
            f'{type(model).__name__} takes no sample_weight: fit_weights="propensity" needs an estimator that does'
        )


def predict_flat(model: Any, X: Any) -> np.ndarray:
    """A model's prediction as a flat float64 array; (n, 1) is ravelled."""
    y = np.asarray(model.predict(X), dtype=np.float64)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != (X.shape[0],):
        raise ValueError(
            f"{type(model).__name__}.predict returned shape {y.shape}, expected one value for {X.shape[0]} rows"
        )
    return y
