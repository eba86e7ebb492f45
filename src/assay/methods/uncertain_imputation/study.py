"""The experiments behind the claims: tables and laws with lost labels, wrong weights, classes, and how each method fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import entr
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from assay.bench import Count, Trial, experiment
from assay.methods.uncertain_imputation import (
    Corruption,
    NaiveConformal,
    PrivilegedConformal,
    TriplyRobust,
    UncertainImputation,
    WeightedConformal,
    weighted_threshold,
    wrong_labels,
)
from assay.methods.uncertain_imputation._conformal import split_rows
from assay.methods.uncertain_imputation._laws import PRIVILEGED_SLOPE, bands, revealed, spread, synthetic, vee
from assay.methods.uncertain_imputation._models import Propensity

LEVEL = 0.9
ROWS, TEST_ROWS = 12_000, 9_600  # I1, I3 and I2 together, split 2 : 1 : 1, and the test rows
TARGET = {"house": "price", "bio": "RMSD"}
PRIVILEGED = {"house": "sqft_living,grade", "bio": "F3,F4"}
DROPPED = {"house": ("id", "date")}
ARMS = (
    "uncalibrated",
    "naive",
    "mean-imputation",
    "ui-knn",
    "ui-global",
    "pcp-true",
    "pcp-estimated",
    "wcp-oracle",
    "triply",
    "oracle",
    "naive-noisy-shrink",
    "naive-noisy-disperse",
)
MEASURES = ("coverage", "width", "coverage_low_z", "coverage_middle_z", "coverage_high_z")
RIGHT = ("none", "f", "propensity", "imputer", "f-propensity", "f-imputer", "propensity-imputer", "all")


@dataclass
class Parts:
    """The rows of a trial, its models, and what every arm is given alike.

    ``clean_*`` are the labels before corruption. Row sets: ``train`` is I1, ``reference`` I3, ``held`` I2.
    """

    X: np.ndarray
    clean_y: np.ndarray
    Z: np.ndarray
    corrupted: np.ndarray
    chance: Callable[[np.ndarray], np.ndarray]
    seed: int
    train: np.ndarray
    reference: np.ndarray
    held: np.ndarray
    test: np.ndarray
    f: tuple[Any, Any] = field(init=False)
    g: Any = field(init=False)

    def __post_init__(self) -> None:
        self.y = np.where(self.corrupted, np.nan, self.clean_y)  # no arm can read a lost label
        seen = self.train[~self.corrupted[self.train]]
        boosted: dict[str, Any] = {"max_iter": 80, "early_stopping": False, "random_state": self.seed}
        lower, upper = (
            HistGradientBoostingRegressor(loss="quantile", quantile=q, **boosted).fit(self.X[seen], self.y[seen])
            for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
        )
        self.f = (_Remembered(lower), _Remembered(upper))
        both = np.column_stack([self.X, self.Z])
        self.g = HistGradientBoostingRegressor(**boosted).fit(both[seen], self.y[seen])

    @property
    def shared(self) -> dict[str, Any]:
        return {"estimator": self.f, "prefit": True, "confidence_level": LEVEL, "random_state": self.seed}

    def at(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.X[rows], self.y[rows], self.Z[rows], self.corrupted[rows]

    def estimated(self) -> Propensity:
        return Propensity(None, False, self.seed).fit(self.Z[self.train], self.corrupted[self.train])

    def true(self, Z: np.ndarray) -> np.ndarray:
        return 1.0 - self.chance(Z)

    def fit(self, method: Any) -> Any:
        """Fit on I3 and find the threshold on I2."""
        return method.fit(*self.at(self.reference)).conformalize(*self.at(self.held))

    def ui(self, errors: str = "knn") -> Any:
        return self.fit(UncertainImputation(imputer=self.g, errors=cast(Any, errors), **self.shared))

    def pcp(self, propensity: Any) -> Any:
        return self.fit(PrivilegedConformal(propensity=propensity, **self.shared))

    def intervals(self, arm: str) -> np.ndarray:
        """The intervals (n, 2) of an arm on the test rows."""
        X, Z = self.X[self.test], self.Z[self.test]
        if arm == "uncalibrated":
            return np.sort(np.stack([f.predict(X) for f in self.f], axis=1), axis=1)
        if arm == "wcp-oracle":
            return self.fit(WeightedConformal(propensity=self.true, **self.shared)).predict_interval(X, Z)[1][:, :, 0]
        return self.method(arm).predict_interval(X)[1][:, :, 0]

    def method(self, arm: str) -> Any:
        if arm == "naive":
            return self.fit(NaiveConformal(**self.shared))
        if arm == "mean-imputation":
            return self.fit(NaiveConformal(imputer=self.g, impute="mean", **self.shared))
        if arm in ("ui-knn", "ui-global"):
            return self.ui(arm.removeprefix("ui-"))
        if arm == "pcp-true":
            return self.pcp(self.true)
        if arm == "pcp-estimated":
            return self.pcp(self.estimated())
        if arm == "pcp-logistic":
            model = LogisticRegression().fit(self.Z[self.train], self.corrupted[self.train].astype(int))
            return self.pcp(model)
        if arm == "triply":
            return self.fit(TriplyRobust(imputer=self.g, propensity=self.estimated(), **self.shared))
        held = self.held
        if arm == "oracle":
            return NaiveConformal(**self.shared).conformalize(self.X[held], self.clean_y[held])
        if arm.startswith("naive-noisy-"):
            wrong = wrong_labels(self.clean_y, self.corrupted, arm.removeprefix("naive-noisy-"), self.seed)
            method = NaiveConformal(noisy="use", **self.shared)
            return method.conformalize(self.X[held], wrong[held], corrupted=self.corrupted[held])
        raise ValueError(f"no arm {arm!r}")

    def measures(self, arm: str) -> dict[str, Any]:
        """Coverage, over all test rows and by thirds of z, and width in standard deviations of y."""
        ends, y = self.intervals(arm), self.clean_y[self.test]
        covered = (ends[:, 0] <= y) & (y <= ends[:, 1])
        z = self.Z[self.test]
        thirds = np.array_split(np.argsort((z / z.std(axis=0)).mean(axis=1), kind="stable"), 3)
        width = np.where(np.isnan(ends[:, 0]), 0.0, ends[:, 1] - ends[:, 0])
        return {
            "coverage": Count(int(covered.sum()), len(y)),
            "width": float(width.mean() / self.clean_y.std()),
            **{
                f"coverage_{name}_z": Count(int(covered[third].sum()), len(third))
                for name, third in zip(("low", "middle", "high"), thirds)
            },
        }


class _Remembered:
    """A fitted curve that predicts the same rows once, whichever arm asks."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: list[tuple[np.ndarray, np.ndarray]] = []

    def predict(self, X: np.ndarray) -> np.ndarray:
        for rows, predicted in self.known:
            if rows.shape == X.shape and np.array_equal(rows, X):
                return predicted
        self.known.append((X, self.model.predict(X)))
        return self.known[-1][1]


class _Curve:
    """A known function in the place of a fitted model."""

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self.function = function

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.function(X)


def _constant(value: float) -> _Curve:
    return _Curve(lambda rows: np.full(len(rows), value))


def _quantile(x: np.ndarray, z: float) -> np.ndarray:
    """The quantile of the law `revealed` at x, z standard deviations from its middle."""
    return PRIVILEGED_SLOPE * x[:, 0] + z * 2 * spread(x[:, 0])


def split(n: int, test: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Test rows, and the others as the library splits them: I2 a quarter, I3 a third of the rest."""
    order = generator.permutation(n)
    rows = order[: n - test]
    held, rest = split_rows(len(rows), 1 / 4, generator)
    reference, train = split_rows(len(rest), 1 / 3, generator)
    return {
        "train": rows[rest[train]],
        "reference": rows[rest[reference]],
        "held": rows[held],
        "test": order[n - test :],
    }


def read(trial: Trial) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X, y and Z of the trial's table: text columns one-hot encoded, rows without target or Z left out."""
    table = trial.input("table")
    target = trial["target"] or TARGET.get(trial["table"], "")
    names = [name for name in str(trial["privileged"] or PRIVILEGED.get(trial["table"], "")).split(",") if name]
    missing = [name for name in [target, *names] if name not in table.columns]
    if not target or not names or missing:
        raise ValueError(
            f"the table's target and privileged columns are not known ({', '.join(filter(None, missing)) or 'none given'}): "
            "say --set target=COLUMN --set privileged=COLUMN,COLUMN"
        )
    table = table.drop(columns=list(DROPPED.get(trial["table"], ()))).dropna(subset=[target, *names])
    # A column of quoted numbers is a column of numbers.
    for name in table.columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            numbers = pd.to_numeric(table[name], errors="coerce")
            if numbers.notna().equals(table[name].notna()):
                table[name] = numbers
    X = pd.get_dummies(table.drop(columns=[target, *names])).to_numpy(np.float64)
    return X, table[target].to_numpy(np.float64), table[names].to_numpy(np.float64)


def table_parts(trial: Trial, strength: float = 0.0) -> Parts:
    """Rows of a table with labels lost by the rule; the chance that methods are told leaves out ``strength``.

    With a strength s > 0 the true chance is min(a p0 exp(s (y - mean) / sd), 0.95): then Z does not explain it.
    """
    X, y, Z = read(trial)
    generator = np.random.default_rng([trial.seed, 1])
    rate = float(trial["rate"])
    rule = Corruption.fit(Z, rate)
    probability = rule.probability(Z)
    if strength:
        tilt = probability * np.exp(strength * (y - y.mean()) / y.std())
        scale = brentq(lambda a: np.minimum(a * tilt, 0.95).mean() - rate, 1e-6, 1e3)
        probability = np.minimum(scale * tilt, 0.95)
    drawn = generator.permutation(len(y))[: ROWS + TEST_ROWS]
    corrupted = generator.random(len(drawn)) < probability[drawn]
    test = min(TEST_ROWS, round(len(drawn) * TEST_ROWS / (ROWS + TEST_ROWS)))
    rows = split(len(drawn), test, generator)
    return Parts(X[drawn], y[drawn], Z[drawn], corrupted, rule.probability, trial.seed, **rows)


def law_parts(law: Callable[..., Any], seed: int, **options: Any) -> Parts:
    """Rows of a law, with labels lost by its own chance."""
    generator = np.random.default_rng([seed, 2])
    X, y, Z, chance = law(ROWS + TEST_ROWS, generator, **options)
    corrupted = generator.random(len(y)) < chance(Z)
    return Parts(X, y, Z, corrupted, chance, seed, **split(len(y), TEST_ROWS, generator))


@experiment(
    arms=ARMS,
    measures=MEASURES,
    inputs={"table": ("house", "bio")},
    settings={"rate": 0.2, "target": "", "privileged": ""},
    together=("arm",),
    seeds=30,
    quick={"table": ("house",), "seeds": 10},
)
def tables(trial: Trial) -> dict:
    """Two of the paper's tables with a fifth of the labels lost, or made wrong, where the privileged columns are high."""
    parts = table_parts(trial)
    return {cell: parts.measures(cell.arm) for cell in trial.cells()}


@experiment(
    arms=ARMS,
    measures=MEASURES,
    settings={"rate": 0.2},
    together=("arm",),
    seeds=30,
    quick={"seeds": 10},
)
def synthetic_law(trial: Trial) -> dict:
    """The released generator: Z moves both the middle and the spread of y."""
    parts = law_parts(synthetic, trial.seed, rate=float(trial["rate"]))
    return {cell: parts.measures(cell.arm) for cell in trial.cells()}


@experiment(
    arms=("naive", "ui-knn", "pcp-logistic", "pcp-estimated"),
    measures=MEASURES,
    together=("arm",),
    seeds=30,
    quick=False,
)
def weights_are_hard(trial: Trial) -> dict:
    """The law "vee": labels are lost at both ends of z, which a logistic propensity cannot learn."""
    parts = law_parts(vee, trial.seed)
    return {cell: parts.measures(cell.arm) for cell in trial.cells()}


@experiment(
    arms=("naive", "ui-knn", "pcp-estimated"),
    measures=MEASURES,
    together=("arm",),
    seeds=30,
    quick=False,
)
def imputation_is_hard(trial: Trial) -> dict:
    """The law "bands": labels are lost in narrow bands of z, where the imputer has few rows to learn from."""
    parts = law_parts(bands, trial.seed)
    return {cell: parts.measures(cell.arm) for cell in trial.cells()}


@experiment(
    arms=("naive", "pcp", "ui", "triply"),
    measures=("coverage", "width"),
    settings={"right": RIGHT},
    together=("arm", "right"),
    seeds=30,
    quick=False,
)
def robustness_grid(trial: Trial) -> dict:
    """The union where f, the propensity and the imputer are each the truth or a constant."""
    return {cell: grid_measures(trial.seed, str(cell["right"]), cell.arm) for cell in trial.cells()}


def grid_measures(seed: int, right: str, arm: str, rows: int = 8_000) -> dict[str, Any]:
    """One arm in one cell of the grid, on ``rows`` rows and as many test rows."""
    generator = np.random.default_rng([seed, 3])
    X, y, Z, chance = revealed(2 * rows, generator)
    corrupted = generator.random(len(y)) < chance(Z)
    part = split(len(y), rows, generator)
    seen = y[part["train"]][~corrupted[part["train"]]]
    named = set(right.split("-")) if right != "all" else {"f", "propensity", "imputer"}
    f: tuple[Any, Any]
    if "f" in named:
        f = (_Curve(lambda x: _quantile(x, -1.645)), _Curve(lambda x: _quantile(x, 1.645)))
    else:
        f = (_constant(np.quantile(seen, 0.05)), _constant(np.quantile(seen, 0.95)))
    fraction = 1.0 - float(corrupted[part["train"]].mean())
    propensity = _Curve(lambda Z: 1.0 - chance(Z)) if "propensity" in named else _constant(fraction)
    if "imputer" in named:
        g, errors = _Curve(lambda xz: PRIVILEGED_SLOPE * xz[:, -1]), "knn"
    else:
        g, errors = _constant(seen.mean()), "global"
    union = TriplyRobust(
        parts=("naive", "pcp", "ui") if arm == "triply" else (arm,),
        estimator=f,
        imputer=g,
        propensity=propensity.predict,
        errors=cast(Any, errors),
        confidence_level=LEVEL,
        prefit=True,
        random_state=seed,
    )
    lost = np.where(corrupted, np.nan, y)
    at = [(X[r], lost[r], Z[r], corrupted[r]) for r in (part["reference"], part["held"])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the propensity is the same")  # as this cell means it to be
        union.fit(*at[0]).conformalize(*at[1])
    ends = union.predict_interval(X[part["test"]])[1][:, :, 0]
    truth = y[part["test"]]
    covered = (ends[:, 0] <= truth) & (truth <= ends[:, 1])
    return {
        "coverage": Count(int(covered.sum()), len(truth)),
        "width": float(np.nanmean(ends[:, 1] - ends[:, 0]) / y.std()),
    }


@experiment(
    arms=("wcp",),
    measures=("coverage",),
    settings={"law": ("synthetic", "mirror"), "delta": (-0.9, -0.6, 0.5, 1.0, 3.0)},
    together=("delta",),
    seeds=30,
    quick=False,
)
def weight_errors(trial: Trial) -> dict:
    """A constant added to every true weight: delta times the smallest weight below zero, times the mean weight above."""
    parts = law_parts(synthetic, trial.seed, mirror=trial["law"] == "mirror")
    held = np.concatenate([parts.held, parts.reference])
    held, y = held[~parts.corrupted[held]], parts.clean_y
    curves = {name: np.sort([f.predict(parts.X[rows]) for f in parts.f], axis=0) for name, rows in
              (("held", held), ("test", parts.test))}  # fmt: skip
    scores = {
        name: np.maximum(curves[name][0] - y[rows], y[rows] - curves[name][1])
        for name, rows in (("held", held), ("test", parts.test))
    }
    weights, stars = (0.8 / parts.true(parts.Z[rows]) for rows in (held, parts.test))
    found = {}
    for cell in trial.cells():
        delta = float(cast(float, cell["delta"]))
        delta *= float(weights.min()) if delta < 0 else float(weights.mean())
        threshold = weighted_threshold(scores["held"], weights + delta, stars + delta, LEVEL)
        found[cell] = {"coverage": Count(int((scores["test"] <= threshold).sum()), len(parts.test))}
    return found


@experiment(
    arms=("naive", "argmax-imputation", "ui", "pcp-estimated", "oracle"),
    measures=("coverage", "size", "accuracy"),
    inputs={"votes": "cifar10h"},
    settings={"score": ("hps", "aps")},
    together=("arm", "score"),
    seeds=30,
    quick=False,
)
def classes(trial: Trial) -> dict:
    """CIFAR-10H: labels are lost where annotators disagree; Z is their entropy and one annotator's label."""
    votes = trial.input("votes")
    generator = np.random.default_rng([trial.seed, 4])
    share = np.asarray(votes.counts, dtype=np.float64)
    share /= share.sum(axis=1, keepdims=True)
    entropy = entr(share).sum(axis=1)
    said = (generator.random((len(share), 1)) >= np.cumsum(share, axis=1)[:, :-1]).sum(axis=1)
    Z = np.column_stack([entropy, np.eye(share.shape[1])[said]])
    X, y = np.asarray(votes.features, dtype=np.float64), np.asarray(votes.labels).astype(int)
    corrupted = generator.random(len(y)) < np.minimum(2.597 * entropy, 0.95)
    order = generator.permutation(len(y))
    train, reference, held, test = np.split(order[:10_000], [4000, 6000, 8000])
    seen = train[~corrupted[train]]

    def logistic(features: np.ndarray) -> Any:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        return model.fit(features[seen], y[seen])

    f, g = logistic(X), logistic(np.column_stack([X, Z]))
    propensity = Propensity(None, False, trial.seed).fit(Z[train], corrupted[train])
    found = {}
    for cell in trial.cells():
        shared: dict[str, Any] = {
            "estimator": f,
            "prefit": True,
            "confidence_level": LEVEL,
            "random_state": trial.seed,
            "score": cell["score"],
        }
        method: Any = {
            "naive": NaiveConformal(**shared),
            "argmax-imputation": NaiveConformal(imputer=g, impute="mean", **shared),
            "ui": UncertainImputation(imputer=g, **shared),
            "pcp-estimated": PrivilegedConformal(propensity=propensity, **shared),
            "oracle": NaiveConformal(**shared),
        }[cell.arm]
        lost = np.zeros_like(corrupted) if cell.arm == "oracle" else corrupted
        method.fit(X[reference], y[reference], Z[reference], lost[reference])
        method.conformalize(X[held], y[held], Z[held], lost[held])
        label, mask = method.predict_set(X[test])
        hits = mask[np.arange(len(test)), y[test], 0]
        found[cell] = {
            "coverage": Count(int(hits.sum()), len(test)),
            "size": float(mask.sum(axis=1).mean()),
            "accuracy": Count(int((label == y[test]).sum()), len(test)),
        }
    return found


@experiment(
    arms=("naive", "ui-knn", "pcp-true"),
    measures=MEASURES,
    inputs={"table": "house"},
    settings={"strength": (0.0, 0.25, 0.5, 1.0), "rate": 0.2, "target": "", "privileged": ""},
    together=("arm",),
    seeds=30,
    quick=False,
)
def hidden_dependence(trial: Trial) -> dict:
    """Labels are lost by their own value as well, which Z does not tell: no method's assumption holds."""
    parts = table_parts(trial, float(trial["strength"]))
    return {cell: parts.measures(cell.arm) for cell in trial.cells()}
