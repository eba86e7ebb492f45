"""What every estimator of the method shares: splitting rows, fitting f, g and the propensity, thresholds, sets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from assay._extras import extras
from assay.methods.uncertain_imputation._diagnostics import Diagnostics, diagnose
from assay.methods.uncertain_imputation._models import ClassModel, IntervalModel, Propensity, predict_flat
from assay.methods.uncertain_imputation._rows import Rows, join, key_columns, read_rows, read_X, row_order
from assay.methods.uncertain_imputation._samplers import ERRORS, residual_sampler
from assay.methods.uncertain_imputation._scores import (
    INTERVAL_SCORES,
    SET_SCORES,
    aps_scores,
    hps_scores,
    interval,
    interval_score,
    label_set,
    score_of_label,
)
from assay.methods.uncertain_imputation._thresholds import naive_threshold, pcp_threshold, rank, repeated_threshold

with extras("tables"):
    from sklearn.base import BaseEstimator, clone
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.exceptions import NotFittedError
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.utils import check_random_state, get_tags, metadata_routing
    from sklearn.utils._tags import ClassifierTags, RegressorTags

Score = Literal["cqr", "absolute", "normalized", "hps", "aps"]
# What each random choice draws from: the fitted seed and one of these, so that no choice moves another.
SPLIT, MODELS, DRAWS, APS_CALIBRATION, APS_PREDICTION = range(5)


Constructor = TypeVar("Constructor", bound=Callable[..., None])


def no_type_check(constructor: Constructor) -> Constructor:
    """Mark a constructor as scikit-learn wants it: it takes anything, and `fit` checks it.

    Run-time type checkers look for the mark; unlike `typing.no_type_check`, static ones still read the annotations.
    """
    constructor.__no_type_check__ = True  # type: ignore[attr-defined]
    return constructor


class _ScoreName(str):
    """The name of a score that is scikit-learn's ``score(X, y)`` too: the constructor's parameter has its name."""

    estimator: Any

    def __call__(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 (accuracy for classes) of the point prediction, over the rows that have a label."""
        y = np.asarray(y)
        known = ~np.asarray(pd.isna(y), dtype=bool)
        metric = accuracy_score if self.estimator.score in SET_SCORES else r2_score
        weight = None if sample_weight is None else np.asarray(sample_weight)[known]
        return float(metric(y[known], np.asarray(self.estimator.predict(X))[known], sample_weight=weight))


class _ScoreParameter:
    """Keeps the parameter ``score`` as it was given, and reads it as a name that can be called."""

    def __set__(self, estimator: Any, value: Any) -> None:
        estimator.__dict__["score"] = value

    def __get__(self, estimator: Any, owner: type | None = None) -> Any:
        if estimator is None:
            return self
        name = _ScoreName(estimator.__dict__["score"])
        name.estimator = estimator
        return name


class _Curves(NamedTuple):
    """Lower and upper curves (n, levels) and the spread (n,) of some rows."""

    lower: np.ndarray
    upper: np.ndarray
    scale: np.ndarray

    def score(self, y: np.ndarray, level: int) -> np.ndarray:
        return interval_score(y, self.lower[:, level], self.upper[:, level], self.scale)


class _ClassScores(NamedTuple):
    """The score of every class (n, classes) of some rows."""

    scores: np.ndarray

    def score(self, codes: np.ndarray, level: int) -> np.ndarray:
        return score_of_label(self.scores, codes)


class Conformal(BaseEstimator):
    """What all five share: reading rows, splitting them, fitting f, g and the propensity, and making sets."""

    score = _ScoreParameter()
    __metadata_request__predict = {"Z": metadata_routing.UNUSED}  # noqa: RUF012 - scikit-learn's own form

    # What a class needs: "imputer" (g), "reference" (clean rows of I3), "propensity".
    def _needs(self) -> set[str]:
        raise NotImplementedError

    def _sees_Z_at_prediction(self) -> bool:
        return False

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name, ``score`` as it was given."""
        parameters = super().get_params(deep=deep)
        if "score" in parameters:
            parameters["score"] = self.__dict__["score"]
        return parameters

    def set_output(self, *, transform: Literal["default", "pandas"] | None = None) -> Conformal:
        """ "pandas" returns Series and DataFrames that keep the index of X; "default" arrays."""
        if transform not in (None, "default", "pandas"):
            raise ValueError(f'transform must be "default" or "pandas", got {transform!r}')
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        if self.score in SET_SCORES:
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        else:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        tags.target_tags.required = True
        several = self.estimator.values() if isinstance(self.estimator, dict) else [self.estimator]
        models = [m for e in several for m in (e if isinstance(e, tuple | list) else [e])]
        known = [get_tags(m).input_tags for m in models if hasattr(m, "__sklearn_tags__")]
        tags.input_tags.allow_nan = all(t.allow_nan for t in known)  # the default models accept nan
        tags.input_tags.sparse = bool(known) and all(t.sparse for t in known)
        return tags

    # --- reading the settings ---

    @property
    def _classes_task(self) -> bool:
        return self.score in SET_SCORES

    @property
    def _levels(self) -> list[float]:
        level = self.confidence_level
        try:
            return [float(q) for q in level] if np.ndim(level) else [float(level)]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"confidence_level must be a number or a list of numbers between 0 and 1, got {level!r}"
            ) from error

    def _check_settings(self) -> None:
        if self.score not in INTERVAL_SCORES + SET_SCORES:
            raise ValueError(f"score must be one of {', '.join(INTERVAL_SCORES + SET_SCORES)}, got {str(self.score)!r}")
        levels = self._levels
        if not levels or not all(0 < level < 1 for level in levels):
            raise ValueError(
                f"confidence_level must lie between 0 and 1, got {self.confidence_level}: 0.9 for 90 % coverage"
            )
        self._check_numbers("reference_size", "calibration_size")
        if not 0 <= self.reference_size < 1:
            raise ValueError(f"reference_size must lie in [0, 1), got {self.reference_size}")
        if not 0 < self.calibration_size < 1:
            raise ValueError(f"calibration_size must lie between 0 and 1, got {self.calibration_size}")
        if self.train_on not in ("clean", "imputed"):
            raise ValueError(f'train_on must be "clean" or "imputed", got {self.train_on!r}')
        if self.train_on == "imputed" and not self.prefit and not self._reads_Z():
            raise ValueError('train_on="imputed" needs a method that sees Z at fit')
        needs = self._needs()
        if "reference" in needs:
            self._check_numbers("draws", "min_pool")
            if self.draws < 1 or self.draws % 1:
                raise ValueError(f"draws must be a whole number of at least 1, got {self.draws!r}")
            if self.errors not in ERRORS:
                raise ValueError(f"errors must be one of {', '.join(ERRORS)}, got {self.errors!r}")
        if "reference" in needs and self.reference_size == 0 and not self.prefit:
            raise ValueError(f"{type(self).__name__} needs reference rows: set reference_size above 0, by default 1/3")
        if "propensity" in needs:
            self._check_propensity_settings(levels)
        if self.prefit:
            if self.estimator is None:
                raise ValueError("prefit=True needs fitted models: give estimator")
            for name in ("imputer", "propensity"):
                if name in needs and getattr(self, name) is None:
                    raise ValueError(f"prefit=True needs fitted models: give {name} too")

    def _check_numbers(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"{name} must be a number, got {value!r}")

    def _check_propensity_settings(self, levels: Sequence[float]) -> None:
        self._check_numbers("clip", *(["beta"] if hasattr(self, "beta") else []))
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip must lie in (0, 1], got {self.clip}: propensities below it are raised to it")
        if self.propensity_features not in ("z", "xz"):
            raise ValueError(f'propensity_features must be "z" or "xz", got {self.propensity_features!r}')
        if self.calibrate not in (None, "sigmoid", "isotonic"):
            raise ValueError(f'calibrate must be None, "sigmoid" or "isotonic", got {self.calibrate!r}')
        if self.calibrate is not None and self.reference_size == 0 and not self.prefit:
            raise ValueError("calibrate= needs reference rows: set reference_size above 0")
        if self.fit_weights not in (None, "propensity"):
            raise ValueError(f'fit_weights must be None or "propensity", got {self.fit_weights!r}')
        beta = getattr(self, "beta", None)
        if beta is not None and not all(0 < beta < 1 - level for level in levels):
            alpha = min(1 - level for level in levels)
            raise ValueError(f"beta must lie between 0 and alpha = {alpha:.4g}, got {beta}: the default is 0.005")
        if beta is not None and self.small_n not in ("largest-weight", "inf"):
            raise ValueError(f'small_n must be "largest-weight" or "inf", got {self.small_n!r}')
        if beta is not None and self.compat not in (None, "official"):
            raise ValueError(f'compat must be None or "official", got {self.compat!r}')

    def _reads_Z(self) -> bool:
        return bool(self._needs() & {"imputer", "propensity"})

    # --- fitting ---

    def fit(self, X: Any, y: Any, Z: Any = None, corrupted: Any = None) -> Any:
        """Fit the models on I1, and what the method needs of the held-out reference rows I3.

        Parameters
        ----------
        X : (n, features)
            Array, data frame or sparse; what the estimator accepts, NaN included.
        y : (n,)
            Labels. Those of corrupted rows may be missing and are never read.
        Z : (n, columns)
            Privileged columns. Text columns are one-hot encoded.
        corrupted : (n,) of bool
            Which labels are missing or wrong; by default those that are missing.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            If a split has no clean row, Z is missing where it is needed, shapes differ, or a setting is wrong.
        """
        self._check_settings()
        rows = self._read(X, y, Z, corrupted, reset=True)
        return self._fit(rows)

    def conformalize(self, X: Any, y: Any, Z: Any = None, corrupted: Any = None) -> Any:
        """Find the threshold on the calibration rows I2: rows that fit has not seen.

        Parameters and errors as for `fit`.
        """
        if not hasattr(self, "_seed"):
            if not (self.prefit and "reference" not in self._needs()):
                raise NotFittedError(f"this {type(self).__name__} is not fitted yet: call fit, or fit_conformalize")
            self._check_settings()
            rows = self._read(X, y, Z, corrupted, reset=True)
            self._fit(rows[np.empty(0, dtype=np.intp)])
        return self._conformalize(self._read(X, y, Z, corrupted, reset=False, calibration=True))

    def fit_conformalize(self, X: Any, y: Any, Z: Any = None, corrupted: Any = None) -> Any:
        """`fit` and `conformalize` in one call: a share ``calibration_size`` of the rows, at random, becomes I2.

        Parameters and errors as for `fit`.
        """
        self._check_settings()
        rows = self._read(X, y, Z, corrupted, reset=True, calibration=True)
        seed = self._draw_seed()
        held, rest = split_rows(len(rows), self.calibration_size, np.random.default_rng([seed, SPLIT, 1]))
        self._fit(rows[rest], seed)
        return self._conformalize(rows[held])

    def _read(self, X: Any, y: Any, Z: Any, corrupted: Any, *, reset: bool, calibration: bool = False) -> Rows:
        return read_rows(
            self,
            X,
            y,
            Z,
            corrupted,
            classes=self._classes_task,
            reset=reset,
            needs_Z=self._reads_Z(),
            raw=calibration and getattr(self, "noisy", "drop") == "use",
        )

    def _draw_seed(self) -> int:
        if isinstance(self.random_state, np.random.Generator):
            return int(self.random_state.integers(2**31 - 1))
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _fit(self, rows: Rows, seed: int | None = None) -> Any:
        self._seed = self._draw_seed() if seed is None else seed
        needs = self._needs()
        self._fitted_for = self._levels, self.__dict__["score"]
        self._forget_threshold()
        if self.prefit:
            train, reference = None, rows
        else:
            held, rest = split_rows(len(rows), self.reference_size, np.random.default_rng([self._seed, SPLIT, 0]))
            train, reference = rows[rest], rows[held]
            if train.corrupted.all():
                raise ValueError(
                    f"none of the {len(train)} training rows (I1) has a clean label: give rows with labels"
                )
        self._n_train_clean = 0 if train is None else int((~train.corrupted).sum())
        self._n_reference_clean = int((~reference.corrupted).sum())
        if "reference" in needs and self._n_reference_clean == 0:
            raise ValueError(
                f"none of the {len(reference)} reference rows (I3) has a clean label (n_samples={len(rows)}): give more rows, "
                "or a larger reference_size"
            )
        models_seed = int(np.random.default_rng([self._seed, MODELS]).integers(2**31 - 1))
        if "propensity" in needs:
            self._propensity = Propensity(self.propensity, self.prefit, models_seed)
            if train is not None:
                self._propensity.fit(self._propensity_rows(train), train.corrupted)
            if self.calibrate is not None:
                self._propensity.calibrate(self.calibrate, self._propensity_rows(reference), reference.corrupted)
        self._fit_estimators(train, models_seed)
        if "imputer" in needs:
            self._fit_imputer(train, models_seed)
        if "reference" in needs:
            self._fit_errors(reference.clean(), models_seed)
        return self

    def _propensity_rows(self, rows: Rows) -> Any:
        assert rows.Z is not None
        return join(rows.X, rows.Z) if self.propensity_features == "xz" else rows.Z

    def _fit_estimators(self, train: Rows | None, seed: int) -> None:
        self._models = {"": self._fit_estimator(self.estimator, train, seed)}

    def _model(self, part: str) -> Any:
        return self._models[part] if part in self._models else self._models[""]

    def _fit_estimator(self, estimator: Any, train: Rows | None, seed: int) -> Any:
        """f, from X alone: on the clean rows of I1, or on all of them with labels imputed by a linear model."""
        model: Any
        if self._classes_task:
            model = ClassModel(estimator, self.prefit, seed)
        else:
            model = IntervalModel(str(self.score), self._levels, estimator, self.prefit, seed)
        if train is not None:
            clean = train.clean()
            X, y, weight = clean.X, clean.y, None
            if self.train_on == "imputed":
                assert train.Z is not None
                assert clean.Z is not None
                linear = LogisticRegression(max_iter=1000) if self._classes_task else LinearRegression()
                linear.fit(join(clean.X, clean.Z), clean.y)
                y = np.where(train.corrupted, linear.predict(join(train.X, train.Z)), train.y)
                X = train.X
            elif getattr(self, "fit_weights", None) == "propensity":
                weight = 1.0 / np.clip(self._propensity(self._propensity_rows(clean)), self.clip, 1.0)
            model.fit(X, y, weight)
        if self._classes_task:
            self.classes_ = model.classes
        return model

    def _fit_imputer(self, train: Rows | None, seed: int) -> None:
        """g, from X and Z, on the clean rows of I1."""
        if self._classes_task:
            self._imputer = ClassModel(self.imputer, self.prefit, seed)
        elif self.prefit:
            self._imputer = self.imputer
        else:
            default = HistGradientBoostingRegressor(random_state=seed)
            self._imputer = clone(default if self.imputer is None else self.imputer, safe=False)
        if train is not None:
            clean = train.clean()
            assert clean.Z is not None
            if not hasattr(self._imputer, "fit"):
                raise ValueError(
                    f"imputer is a {type(self._imputer).__name__} that cannot be fitted: give a model with fit and predict"
                )
            self._imputer.fit(join(clean.X, clean.Z), clean.y)

    def _fit_errors(self, reference: Rows, seed: int) -> None:
        """What the clean rows of I3 say about g: its residuals, or its temperature."""
        assert reference.Z is not None
        joined = join(reference.X, reference.Z)
        if self._classes_task:
            codes = encode(reference.y, self.classes_)
            self._imputer.calibrate(joined, codes, self.classes_)
            guessed = self._imputer.probabilities(joined, self.classes_).argmax(axis=1)
            self._imputer_check = {"imputer_accuracy": float((guessed == codes).mean())}
            return
        guessed = predict_flat(self._imputer, joined)
        residuals = reference.y - guessed
        self._sampler = residual_sampler(self.errors, residuals, reference.Z, min_pool=self.min_pool, seed=seed)
        spread = float(np.var(reference.y))
        self._imputer_check = {"imputer_r2": 1.0 - float(np.mean(residuals**2)) / spread if spread > 0 else math.nan}

    # --- the threshold ---

    def _forget_threshold(self) -> None:
        for name in ("threshold_", "thresholds_", "imputed_", "diagnostics_", "n_clean_", "n_empty_"):
            self.__dict__.pop(name, None)

    def _conformalize(self, rows: Rows) -> Any:
        self._check_unchanged()
        self._forget_threshold()
        clean = ~rows.corrupted
        if not clean.any():
            raise ValueError(f"none of the {len(rows)} calibration rows (I2) has a clean label: give rows with labels")
        self._n_calibration = len(rows)
        self._labels = encode(rows.y, self.classes_) if self._classes_task else rows.y
        if self._classes_task and (self._labels[clean] < 0).all():
            raise ValueError(
                f"no clean calibration label is a class that the classifier knows ({', '.join(map(str, self.classes_))}): "
                "give labels as it was fitted on"
            )
        self._draws = {}
        if self._classes_task and self.score == "aps":
            keys = [*key_columns(rows.X), np.where(clean, self._labels, -2)]
            self._draws["u"] = ordered_uniforms(row_order(*keys), 1, [self._seed, APS_CALIBRATION])[:, 0]
        self._weights_check: dict[str, float] = {}
        self._shift_check: dict[str, float] = {}
        self._find_thresholds(rows)
        self.diagnostics_: Diagnostics = diagnose(
            method=type(self).__name__,
            n_train_clean=self._n_train_clean,
            n_reference_clean=self._n_reference_clean,
            n_calibration=len(rows),
            n_clean=int(clean.sum()),
            imputer=getattr(self, "_imputer_check", {}),
            weights=self._weights_check,
            shift=self._shift_check,
        )
        del self._labels, self._draws
        self.n_clean_ = int(clean.sum())  # last: with it there is a threshold
        return self

    def _check_unchanged(self) -> None:
        if (self._levels, self.__dict__["score"]) != self._fitted_for:
            raise ValueError("confidence_level or score was changed after fit: call fit again, or fit_conformalize")

    def _find_thresholds(self, rows: Rows) -> None:
        raise NotImplementedError

    def _outline(self, model: Any, X: Any, u: np.ndarray | None) -> Any:
        """What scores any label of these rows."""
        if not self._classes_task:
            return _Curves(*model.curves(X))
        p = model.probabilities(X, self.classes_)
        return _ClassScores(hps_scores(p) if u is None else aps_scores(p, u))

    def _calibration_outline(self, part: str, rows: Rows) -> Any:
        return self._outline(self._model(part), rows.X, self._draws.get("u"))

    def _naive_thresholds(self, rows: Rows) -> list[float]:
        outline = self._calibration_outline("naive", rows)
        labels, keep = self._labels, ~rows.corrupted
        if getattr(self, "noisy", "drop") == "use":
            keep = np.ones(len(rows), dtype=bool)
        if getattr(self, "impute", "none") == "mean":
            labels, keep = self._mean_imputed(rows), np.ones(len(rows), dtype=bool)
            self.imputed_ = self._decode(labels)
        found = [naive_threshold(outline.score(labels, j)[keep], level) for j, level in enumerate(self._levels)]
        self._warn_if_infinite(found, int(keep.sum()))
        return found

    def _mean_imputed(self, rows: Rows) -> np.ndarray:
        assert rows.Z is not None
        joined = join(rows.X, rows.Z)
        if self._classes_task:
            guess = self._imputer.probabilities(joined, self.classes_).argmax(axis=1)
        else:
            guess = predict_flat(self._imputer, joined)
        return np.where(rows.corrupted, guess, self._labels)

    def _weights(self, rows: Rows) -> np.ndarray:
        """w = P(M = 0) / P(M = 0 | Z) of every calibration row."""
        e = self._propensity(self._propensity_rows(rows))
        self._mean_propensity = float(e.mean())
        self._weights_check = _check_propensity(e, rows.corrupted, self.clip)
        if np.ptp(e) == 0:
            warnings.warn(
                "the propensity is the same for every row: the weights are equal, and the threshold is the naive one",
                stacklevel=4,
            )
        if getattr(self, "compat", None) != "official":
            e = np.clip(e, self.clip, 1.0)
        return self._mean_propensity / e

    def _pcp_thresholds(self, rows: Rows) -> list[float]:
        outline, weights, clean = self._calibration_outline("pcp", rows), self._weights(rows), ~rows.corrupted
        n = len(rows)
        if self.compat is None and rank(1.0 - self.beta, n) > n:
            warnings.warn(
                f"{n} calibration rows are too few for the {1 - self.beta:g} quantile of the weights: "
                + (
                    "the threshold is infinite"
                    if self.small_n == "inf"
                    else f'the largest weight takes its place (small_n="inf" is strictly valid; {math.ceil(1 / self.beta) - 1} rows are enough)'
                ),
                stacklevel=3,
            )
        found = [
            pcp_threshold(
                outline.score(self._labels, j)[clean],
                weights,
                rows.corrupted,
                level,
                self.beta,
                small_n=self.small_n,
                compat=self.compat,
            )
            for j, level in enumerate(self._levels)
        ]
        self._warn_if_infinite(found, int(clean.sum()))
        return found

    def _ui_thresholds(self, rows: Rows) -> list[float]:
        outline, draws = self._calibration_outline("ui", rows), int(self.draws)
        labels = np.repeat(self._labels[:, None], draws, axis=1)
        labels[rows.corrupted] = self._imputed(rows[np.flatnonzero(rows.corrupted)], draws)
        self.imputed_ = self._decode(labels[:, 0] if draws == 1 else labels)
        found = []
        for j, level in enumerate(self._levels):
            scores = np.stack([outline.score(labels[:, r], j) for r in range(draws)], axis=1)
            found.append(repeated_threshold(scores.ravel(), draws, level))
            if j == 0:
                self._shift_check = _check_shift(scores[:, 0], rows.corrupted)
        self._warn_if_infinite(found, len(rows))
        return found

    def _imputed(self, rows: Rows, draws: int) -> np.ndarray:
        """Labels (n, draws) for corrupted rows: g(X, Z) with an error, or a draw from g's probabilities."""
        assert rows.Z is not None
        if len(rows) == 0:
            return np.empty((0, draws))
        uniforms = ordered_uniforms(row_order(*rows.keys, *key_columns(rows.X)), draws, [self._seed, DRAWS])
        joined = join(rows.X, rows.Z)
        if not self._classes_task:
            return predict_flat(self._imputer, joined)[:, None] + self._sampler.draw(rows.Z, uniforms)
        cumulated = np.cumsum(self._imputer.probabilities(joined, self.classes_), axis=1)
        chosen = (uniforms[:, :, None] * cumulated[:, None, -1:] >= cumulated[:, None, :]).sum(axis=2)
        return np.minimum(chosen, len(self.classes_) - 1)

    def _decode(self, labels: np.ndarray) -> np.ndarray:
        return self.classes_[labels] if self._classes_task else labels

    def _keep_thresholds(self, found: Sequence[float] | np.ndarray) -> float | np.ndarray:
        return np.asarray(found, dtype=np.float64) if np.ndim(self.confidence_level) else float(found[0])

    def _warn_if_infinite(self, found: Sequence[float], n: int) -> None:
        for level, threshold in zip(self._levels, found):
            if math.isinf(threshold) and threshold > 0:
                alpha = 1 - level
                needed = math.ceil(level / alpha - 1e-9)
                warnings.warn(
                    f"the threshold at level {level:g} is infinite with {n} calibration points (at least {needed} are needed, "
                    "more where weights are uneven): every set is the whole space",
                    stacklevel=4,
                )

    # --- prediction ---

    def predict(self, X: Any, Z: Any = None) -> Any:
        """The point prediction (n,): the median for "cqr", else the mean, or the most probable class.

        Z is not used, and refused where the method must not see it.
        """
        self._check_prediction(Z, point=True)
        return self._output(self._point(read_X(self, X, reset=False)), X)

    def _check_prediction(self, Z: Any, *, point: bool = False) -> None:
        if not hasattr(self, "_seed"):
            raise NotFittedError(
                f"this {type(self).__name__} is not fitted yet: call fit and conformalize, or fit_conformalize"
            )
        if not point and not hasattr(self, "n_clean_"):
            raise NotFittedError(f"this {type(self).__name__} has no threshold yet: call conformalize")
        self._check_unchanged()
        if Z is not None and not self._sees_Z_at_prediction():
            raise ValueError(
                f"{type(self).__name__} must not see Z at prediction: leave it out (WeightedConformal is the method that uses it)"
            )

    def _point(self, X: Any) -> np.ndarray:
        model = next(iter(self._models.values()))
        if self._classes_task:
            return self.classes_[model.probabilities(X, self.classes_).argmax(axis=1)]
        return model.point(X)

    def predict_interval(self, X: Any, Z: Any = None) -> tuple[Any, Any]:
        """Point predictions and intervals.

        Parameters
        ----------
        X : (n, features)
        Z
            Only for `WeightedConformal`.

        Returns
        -------
        point : (n,)
        intervals : (n, 2, levels)
            Lower and upper ends; [nan, nan] where the set is empty (counted in ``n_empty_``), infinite ends where the
            calibration rows are too few for the level.
        """
        self._check_prediction(Z)
        if self._classes_task:
            raise ValueError(f'score="{self.score}" makes label sets: call predict_set')
        rows = read_X(self, X, reset=False)
        curves = self._outline(self._model(""), rows, None)
        thresholds = self._thresholds_for(rows, Z)
        intervals = np.stack(
            [interval(curves.lower[:, j], curves.upper[:, j], curves.scale, q) for j, q in enumerate(thresholds)],
            axis=2,
        )
        self._count_empty(intervals)
        return self._output(self._point(rows), X), self._output(intervals, X)

    def predict_set(self, X: Any, Z: Any = None) -> tuple[Any, Any]:
        """The most probable label and the label set of each row.

        Returns
        -------
        label : (n,)
        mask : (n, classes, levels) of bool
            In the order of ``classes_``.
        """
        self._check_prediction(Z)
        if not self._classes_task:
            raise ValueError(f'score="{self.score}" makes intervals: call predict_interval')
        rows = read_X(self, X, reset=False)
        u = self._prediction_uniforms(rows)
        outline = self._outline(self._model(""), rows, u)
        thresholds = self._thresholds_for(rows, Z)
        mask = np.stack([label_set(outline.scores, q) for q in thresholds], axis=2)
        return self._output(self._point(rows), X), self._output(mask, X)

    def _prediction_uniforms(self, X: Any) -> np.ndarray | None:
        if self.score != "aps":
            return None
        return ordered_uniforms(row_order(*key_columns(X)), 1, [self._seed, APS_PREDICTION])[:, 0]

    def _thresholds_for(self, X: Any, Z: Any) -> list[Any]:
        """One threshold a level, or one for each row."""
        return list(np.atleast_1d(self.threshold_))

    def _count_empty(self, intervals: np.ndarray) -> None:
        empty = np.isnan(intervals[:, 0]).sum(axis=0)
        self.n_empty_ = empty if np.ndim(self.confidence_level) else int(empty[0])
        if empty.any():
            warnings.warn(
                f"{int(empty.max())} of {len(intervals)} sets are empty (a negative threshold is wider than the interval): "
                "they are [nan, nan] and cover nothing",
                stacklevel=3,
            )

    def _output(self, values: np.ndarray, X: Any) -> Any:
        if getattr(self, "_sklearn_output_config", {}).get("transform") != "pandas":
            return values
        index = X.index if isinstance(X, pd.DataFrame) else None
        if values.ndim == 1:
            return pd.Series(values, index=index, name="prediction")
        names = ["lower", "upper"] if not self._classes_task else list(self.classes_)
        several = len(self._levels) > 1
        frames = [
            pd.DataFrame(
                values[:, :, j], index=index, columns=[f"{name}_{level:g}" for name in names] if several else names
            )
            for j, level in enumerate(self._levels)
        ]
        return pd.concat(frames, axis=1)


def split_rows(n: int, share: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two disjoint parts of n rows at random: a share of them, and the rest; each in rising order."""
    order = generator.permutation(n)
    held = round(n * share)
    return np.sort(order[:held]), np.sort(order[held:])


def ordered_uniforms(order: np.ndarray, draws: int, seed: Sequence[int]) -> np.ndarray:
    """Uniform numbers (n, draws), handed to the rows in the given order, so that permuted rows keep theirs."""
    uniforms = np.empty((len(order), draws))
    uniforms[order] = np.random.default_rng(list(seed)).random((len(order), draws))
    return uniforms


def encode(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The index of each label among the classes; -1 for one that is not there."""
    order = np.argsort(classes, kind="stable")  # a user's own classifier may have them in any order
    at = order[np.minimum(np.searchsorted(classes, y, sorter=order), len(classes) - 1)]
    return np.where(classes[at] == y, at, -1)


def _check_propensity(e: np.ndarray, corrupted: np.ndarray, clip: float) -> dict[str, float]:
    """How well the propensity tells clean rows from corrupted ones, and what its weights leave of the clean rows."""
    from sklearn.metrics import roc_auc_score

    weights = 1.0 / np.clip(e[~corrupted], clip, 1.0)
    check = {
        "effective_sample_size": float(weights.sum() ** 2 / (weights**2).sum()),
        "largest_weight": float(weights.max() / weights.mean()),
        "propensity_auc": math.nan,
        "propensity_calibration_error": math.nan,
        "propensity_calibration_chance": math.nan,
    }
    if corrupted.any():
        check["propensity_auc"] = float(roc_auc_score(~corrupted, e))
        bins = np.array_split(np.argsort(e, kind="stable"), min(10, len(e)))
        gaps = [abs(float(e[b].mean() - (~corrupted[b]).mean())) * len(b) for b in bins]
        check["propensity_calibration_error"] = sum(gaps) / len(e)
        # What a perfect propensity would show with as many rows: the mean absolute error of each bin's share.
        chance = [math.sqrt(2 / math.pi * float((e[b] * (1 - e[b])).sum())) for b in bins]
        check["propensity_calibration_chance"] = sum(chance) / len(e)
    return check


def _check_shift(scores: np.ndarray, corrupted: np.ndarray) -> dict[str, float]:
    """How far the scores of imputed rows lie from those of clean rows: the Kolmogorov-Smirnov distance."""
    from scipy.stats import ks_2samp

    if not corrupted.any() or corrupted.all() or not np.isfinite(scores).all():
        return {}
    return {"score_shift": float(ks_2samp(scores[corrupted], scores[~corrupted]).statistic)}
