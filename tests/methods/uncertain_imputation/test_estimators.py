import math
import pickle
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse as sp
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression, QuantileRegressor, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from assay.methods.uncertain_imputation import (
    NaiveConformal,
    PrivilegedConformal,
    TriplyRobust,
    UncertainImputation,
    WeightedConformal,
    naive_threshold,
    pcp_threshold,
    union_of_intervals,
    weighted_threshold,
)

ALL = (NaiveConformal, WeightedConformal, PrivilegedConformal, UncertainImputation, TriplyRobust)
NEED_Z = ALL[1:]
WITHOUT_Z = (NaiveConformal, PrivilegedConformal, UncertainImputation, TriplyRobust)  # at prediction


class Line:
    """A fitted curve: a X[:, 0] + b."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def predict(self, X):
        return self.a * np.asarray(X)[:, 0] + self.b


class LineXZ:
    """A fitted g: X[:, 0] + Z."""

    def predict(self, X):
        return np.asarray(X)[:, 0] + np.asarray(X)[:, -1]


def data(n=400, seed=0, classes=False):
    """Rows whose labels are lost where z is high, and z moves y."""
    rng = np.random.default_rng(seed)
    X, z = rng.uniform(-1, 1, (n, 3)), rng.standard_normal(n)
    y = X[:, 0] + z + 0.3 * rng.standard_normal(n)
    if classes:
        y = (np.digitize(y, [-0.7, 0.7])).astype(float)
    corrupted = rng.random(n) < np.where(z > 0.7, 0.6, 0.05)
    return X, np.where(corrupted, np.nan, y), z[:, None], corrupted, y


def light(cls, score="absolute", **settings):
    """An estimator with linear models."""
    regression = score in ("cqr", "absolute", "normalized")
    if score == "cqr":
        settings.setdefault("estimator", HistGradientBoostingRegressor(loss="quantile", max_iter=8))
    else:
        settings.setdefault("estimator", LinearRegression() if regression else LogisticRegression())
    if cls in (UncertainImputation, TriplyRobust):
        settings.setdefault("imputer", LinearRegression() if regression else LogisticRegression())
    if cls in (WeightedConformal, PrivilegedConformal, TriplyRobust):
        settings.setdefault("propensity", LogisticRegression())
    return cls(score=score, random_state=0, **settings)


def sees(cls, Z):
    return (Z,) if cls is WeightedConformal else ()


# --- against other libraries ---


@pytest.mark.parametrize("n", [50, 97, 100, 203])
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_naive_equals_mapie(n, level):
    regression = pytest.importorskip("mapie.regression")
    rng = np.random.default_rng(n)
    X, new = rng.uniform(-1, 1, (n + 200, 2)), rng.uniform(-1, 1, (40, 2))
    y = X[:, 0] + rng.standard_normal(n + 200)
    train, held = np.arange(n, n + 200), np.arange(n)
    mean = LinearRegression().fit(X[train], y[train])
    theirs = regression.SplitConformalRegressor(mean, confidence_level=level, prefit=True).conformalize(
        X[held], y[held]
    )
    ours = NaiveConformal(mean, score="absolute", confidence_level=level, prefit=True).conformalize(X[held], y[held])
    point, ends = ours.predict_interval(new)
    np.testing.assert_allclose(point, theirs.predict(new), atol=1e-10)
    np.testing.assert_allclose(ends, theirs.predict_interval(new)[1], atol=1e-10)

    triple = [QuantileRegressor(quantile=q, alpha=0).fit(X[train], y[train]) for q in (0.1, 0.9, 0.5)]
    theirs = regression.ConformalizedQuantileRegressor(triple, confidence_level=level, prefit=True)
    theirs.conformalize(X[held], y[held])
    ours = NaiveConformal(tuple(triple), confidence_level=level, prefit=True).conformalize(X[held], y[held])
    point, ends = ours.predict_interval(new)
    their_point, their_ends = theirs.predict_interval(new, symmetric_correction=True)
    np.testing.assert_allclose(point, their_point, atol=1e-10)
    np.testing.assert_allclose(ends, their_ends, atol=1e-10)


@pytest.mark.parametrize("n", [5, 100])
def test_naive_equals_crepes(n):
    crepes = pytest.importorskip("crepes")
    rng = np.random.default_rng(n)
    X, y = rng.uniform(size=(n, 1)), rng.standard_normal(n)
    theirs = crepes.ConformalRegressor().fit(y - 0.5).predict_int(np.full(3, 0.5), confidence=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if n == 100 else "ignore")
        ours = NaiveConformal(Line(0, 0.5), score="absolute", prefit=True).conformalize(X, y)
    np.testing.assert_allclose(ours.predict_interval(X[:3])[1][:, :, 0], theirs, atol=1e-10)
    assert np.isinf(theirs).all() == (n == 5)


def test_an_object_that_predicts_quantiles_serves_every_level():
    forest = pytest.importorskip("quantile_forest").RandomForestQuantileRegressor(n_estimators=20, random_state=0)
    X, y, _, _, _ = data()
    ours = NaiveConformal(forest, confidence_level=[0.5, 0.9], random_state=0).fit_conformalize(X, y)
    point, ends = ours.predict_interval(X[:50])
    assert ends.shape == (50, 2, 2)
    assert (ends[:, 0] <= point[:, None]).all()
    assert (ends[:, 1, 1] - ends[:, 0, 1]).mean() > (ends[:, 1, 0] - ends[:, 0, 0]).mean()


# --- what the methods must be ---


@pytest.mark.parametrize("score", ["cqr", "absolute", "normalized", "hps", "aps"])
def test_ui_without_corruption_equals_naive(score):
    X, _, Z, _, y = data(classes=score in ("hps", "aps"))
    clean = np.zeros(len(y), bool)
    settings = {"score": score, "reference_size": 1 / 3, "calibration_size": 1 / 4, "confidence_level": [0.8, 0.9]}
    if score == "cqr":
        settings["estimator"] = HistGradientBoostingRegressor(loss="quantile", max_iter=5)
    ui = light(UncertainImputation, **settings).fit_conformalize(X, y, Z, clean)
    naive = light(NaiveConformal, **settings).fit_conformalize(X, y, Z, clean)
    np.testing.assert_array_equal(ui.threshold_, naive.threshold_)


def test_pcp_with_a_constant_propensity_equals_naive_at_a_raised_level():
    X, y, Z, corrupted, _ = data(800)
    shared = {"estimator": Line(1, 0), "score": "absolute", "prefit": True}
    pcp = PrivilegedConformal(propensity=lambda Z: np.full(len(Z), 0.8), beta=0.02, **shared)
    with pytest.warns(UserWarning, match="the same for every row"):
        pcp.conformalize(X, y, Z, corrupted)
    naive = NaiveConformal(confidence_level=0.92, **shared).conformalize(X, y, corrupted=corrupted)
    assert pcp.threshold_ == naive.threshold_


def test_pcp_with_true_weights_covers_on_a_discrete_law():
    """Coverage over 2,000 repeats of 60 calibration rows, where naive conformal prediction has less."""
    rng = np.random.default_rng(0)
    covered = {"pcp": [], "naive": []}
    n = 60
    for repeat in range(2000):
        Z = (rng.random(n + 1) < 0.3).astype(float)
        y = (1 + 3 * Z) * rng.standard_normal(n + 1)
        clean_chance = np.where(Z == 1, 0.25, 1.0)
        corrupted = rng.random(n) > clean_chance[:n]
        scores, weights = np.abs(y[:n])[~corrupted], clean_chance[:n].mean() / clean_chance[:n]
        thresholds = {"pcp": pcp_threshold(scores, weights, corrupted, 0.9), "naive": naive_threshold(scores, 0.9)}
        for name, threshold in thresholds.items():
            covered[name].append(abs(y[n]) <= threshold)
        if repeat < 3:
            method = PrivilegedConformal(
                Line(0, 0), lambda Z: np.where(Z[:, 0] == 1, 0.25, 1.0), score="absolute", prefit=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                method.conformalize(np.zeros((n, 1)), y[:n], Z[:n], corrupted)
            assert method.threshold_ == thresholds["pcp"]
    assert np.mean(covered["pcp"]) >= 0.9 - 3 * math.sqrt(0.09 / 2000)
    assert np.mean(covered["naive"]) < 0.9 - 3 * math.sqrt(0.09 / 2000)


def test_imputed_labels_are_a_guess_and_a_residual_of_a_clean_reference_row():
    X, _, Z, corrupted, _y = data(600)
    reference, held = np.arange(300), np.arange(300, 600)
    marked = X[:, 0] + Z[:, 0] + np.where(corrupted, 1e6, np.arange(600))  # residuals that name their row
    marked[held] = np.where(corrupted[held], np.nan, 0.0)
    ui = UncertainImputation(Line(1, 0), LineXZ(), score="absolute", prefit=True, random_state=0)
    ui.fit(X[reference], marked[reference], Z[reference], corrupted[reference])
    ui.conformalize(X[held], marked[held], Z[held], corrupted[held])
    drawn = (ui.imputed_ - X[held, 0] - Z[held, 0])[corrupted[held]]
    rows = np.round(drawn).astype(int)
    np.testing.assert_allclose(drawn, rows, atol=1e-6)
    assert (rows < 300).all()
    assert not corrupted[rows].any()
    assert np.abs(Z[rows, 0] - Z[held, 0][corrupted[held]]).mean() < 0.5  # and whose z is near
    np.testing.assert_array_equal(ui.imputed_[~corrupted[held]], 0.0)


@pytest.mark.parametrize("cls", ALL)
def test_lost_labels_are_never_read(cls):
    X, y, Z, corrupted, _ = data()
    poisoned = np.where(corrupted, np.inf, y)
    first = light(cls).fit_conformalize(X, y, Z).predict_interval(X, *sees(cls, Z))[1]
    second = light(cls).fit_conformalize(X, poisoned, Z, corrupted).predict_interval(X, *sees(cls, Z))[1]
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("score", ["cqr", "hps", "aps"])
def test_the_union_contains_its_parts(score):
    classes = score in ("hps", "aps")
    X, y, Z, corrupted, _ = data(900, classes=classes)
    shared = {"reference_size": 1 / 3, "score": score, "confidence_level": [0.7, 0.9]}
    union = light(TriplyRobust, **shared).fit_conformalize(X, y, Z, corrupted)
    parts = {
        "naive": light(NaiveConformal, **shared).fit_conformalize(X, y, Z, corrupted),
        "pcp": light(PrivilegedConformal, **shared).fit_conformalize(X, y, Z, corrupted),
        "ui": light(UncertainImputation, **shared).fit_conformalize(X, y, Z, corrupted),
    }
    for name, part in parts.items():
        np.testing.assert_array_equal(union.thresholds_[name], part.threshold_)  # one fit, one split, one u
    np.testing.assert_array_equal(union.threshold_, np.max([p.threshold_ for p in parts.values()], axis=0))
    for part in parts.values():
        if classes:
            assert (union.predict_set(X)[1] >= part.predict_set(X)[1]).all()
        else:
            wide, narrow = union.predict_interval(X)[1], part.predict_interval(X)[1]
            assert (wide[:, 0] <= narrow[:, 0]).all()
            assert (wide[:, 1] >= narrow[:, 1]).all()


def test_the_uncalibrated_interval_can_join_the_union():
    X, y, Z, _corrupted, _ = data()
    wide = {
        "estimator": (Line(1, -9), Line(1, 9)),
        "imputer": LineXZ(),
        "propensity": lambda Z: 1 - 0.5 * (Z[:, 0] > 0.7),
    }
    union = TriplyRobust(prefit=True, include_uncalibrated=True, random_state=0, **wide)
    union.fit(X[:200], y[:200], Z[:200]).conformalize(X[200:], y[200:], Z[200:])
    assert max(union.thresholds_.values()) < 0
    assert union.threshold_ == 0.0


def test_parts_with_different_f_give_a_list_of_disjoint_intervals_or_their_hull():
    X, y, Z, _corrupted, _ = data()
    f = {"naive": (Line(0, -50), Line(0, -40)), "ui": (Line(1, -2), Line(1, 2))}
    shared = {"parts": ("naive", "ui"), "estimator": f, "imputer": LineXZ(), "prefit": True, "random_state": 0}
    union = TriplyRobust(**shared).fit(X[:200], y[:200], Z[:200]).conformalize(X[200:], y[200:], Z[200:])
    _, found = union.predict_interval(X[:5])
    assert not hasattr(union, "threshold_")
    assert len(found) == 1
    for x, row in zip(X[:5], found[0]):
        parts = [
            [lower - q, upper + q]
            for (lower, upper), q in zip([(-50, -40), (x[0] - 2, x[0] + 2)], union.thresholds_.values())
        ]
        np.testing.assert_allclose(row, union_of_intervals([np.array([p]) for p in parts])[0])
    hull = TriplyRobust(hull=True, **shared).fit(X[:200], y[:200], Z[:200]).conformalize(X[200:], y[200:], Z[200:])
    ends = hull.predict_interval(X[:5])[1]
    np.testing.assert_allclose(ends[:, :, 0], [[row[0, 0], row[-1, 1]] for row in found[0]])


def test_union_of_intervals():
    sets = [
        np.array([[0.0, 1.0], [np.nan, np.nan]]),
        np.array([[3.0, 4.0], [1.0, 2.0]]),
        np.array([[0.5, 2.0], [2.0, 3.0]]),
    ]
    first, second = union_of_intervals(sets)
    np.testing.assert_array_equal(first, [[0, 2], [3, 4]])
    np.testing.assert_array_equal(second, [[1, 3]])
    assert len(union_of_intervals([np.full((1, 2), np.nan)])[0]) == 0


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("score", ["absolute", "aps"])
def test_the_order_of_calibration_rows_changes_nothing(cls, score):
    X, y, Z, _corrupted, _ = data(500, classes=score == "aps")
    method = light(cls, score, reference_size=0.4).fit(X[:300], y[:300], Z[:300])
    predict = lambda m, rows: (m.predict_set if score == "aps" else m.predict_interval)(X[rows], *sees(cls, Z[rows]))[1]  # noqa: E731
    held, test, order = np.arange(300, 450), np.arange(450, 500), np.random.default_rng(1).permutation(150)
    first = predict(method.conformalize(X[held], y[held], Z[held]), test)
    held = held[order]
    np.testing.assert_allclose(predict(method.conformalize(X[held], y[held], Z[held]), test), first, atol=1e-9)
    turned = np.random.default_rng(2).permutation(50)
    np.testing.assert_allclose(predict(method, test[turned]), first[turned], atol=1e-9)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("score", ["absolute", "normalized", "cqr"])
def test_intervals_follow_a_change_of_units(cls, score):
    X, y, Z, _corrupted, _ = data(300)
    estimator = (
        tuple(QuantileRegressor(quantile=q, alpha=0) for q in (0.05, 0.95)) if score == "cqr" else LinearRegression()
    )
    a, b = 12.5, -40.0
    first = light(cls, score, estimator=estimator).fit_conformalize(X, y, Z).predict_interval(X, *sees(cls, Z))[1]
    second = light(cls, score, estimator=estimator).fit_conformalize(X, a * y + b, Z)
    np.testing.assert_allclose(second.predict_interval(X, *sees(cls, Z))[1], a * first + b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cls", ALL)
def test_five_rows_give_infinite_intervals(cls):
    X, y, Z, _, _ = data(405)
    y = np.nan_to_num(y)
    method = light(cls, reference_size=0.5).fit(X[5:], y[5:], Z[5:])
    predicted = lambda: method.conformalize(X[:5], y[:5], Z[:5]).predict_interval(X[:3], *sees(cls, Z[:3]))[1]  # noqa: E731
    with pytest.warns(UserWarning, match="infinite"):
        ends = predicted()
    np.testing.assert_array_equal(ends[:, :, 0], [[-np.inf, np.inf]] * 3)


def test_nine_rows_are_enough():
    X, _, _, _, y = data(9)
    naive = NaiveConformal(Line(1, 0), score="absolute", prefit=True)
    assert naive.conformalize(X, y).threshold_ == np.abs(y - X[:, 0]).max()


def test_weighted_conformal_uses_the_test_rows_z():
    X, y, Z, corrupted, _ = data(500)
    e = lambda Z: np.where(Z[:, 0] > 0.7, 0.4, 0.95)  # noqa: E731
    weighted = WeightedConformal(Line(1, 0), e, score="absolute", prefit=True, confidence_level=[0.8, 0.9])
    weighted.conformalize(X[:400], y[:400], Z[:400])
    ends = weighted.predict_interval(X[400:], Z[400:])[1]
    keep = ~corrupted[:400]
    scores = np.abs(y[:400] - X[:400, 0])[keep]
    for j, level in enumerate((0.8, 0.9)):
        q = weighted_threshold(scores, 1 / e(Z[:400])[keep], 1 / e(Z[400:]), level)
        np.testing.assert_allclose(ends[:, 1, j], X[400:, 0] + q)


def test_mean_imputation_and_wrong_labels():
    X, y, Z, corrupted, truth = data(400)
    mean = NaiveConformal(Line(1, 0), LineXZ(), score="absolute", impute="mean", prefit=True).conformalize(X, y, Z)
    guess = np.where(corrupted, X[:, 0] + Z[:, 0], y)
    np.testing.assert_array_equal(mean.imputed_, guess)
    assert mean.threshold_ == naive_threshold(np.abs(guess - X[:, 0]), 0.9)
    wrong = np.where(corrupted, 7.0, truth)
    noisy = NaiveConformal(Line(1, 0), score="absolute", noisy="use", prefit=True)
    assert noisy.conformalize(X, wrong, corrupted=corrupted).threshold_ == naive_threshold(np.abs(wrong - X[:, 0]), 0.9)
    drop = NaiveConformal(Line(1, 0), score="absolute", prefit=True).conformalize(X, wrong, corrupted=corrupted)
    assert drop.threshold_ == naive_threshold(np.abs(truth - X[:, 0])[~corrupted], 0.9)


def test_several_draws_average_over_imputations():
    X, y, Z, _corrupted, _ = data(600)
    thresholds = {}
    for draws in (1, 25):
        found = []
        for seed in range(12):
            ui = UncertainImputation(
                Line(1, 0), LineXZ(), score="absolute", draws=draws, prefit=True, random_state=seed
            )
            ui.fit(X[:300], y[:300], Z[:300]).conformalize(X[300:], y[300:], Z[300:])
            found.append(ui.threshold_)
        assert ui.imputed_.shape == ((300,) if draws == 1 else (300, draws))
        thresholds[draws] = found
    assert np.std(thresholds[25]) < np.std(thresholds[1])
    assert np.mean(thresholds[25]) == pytest.approx(np.mean(thresholds[1]), rel=0.08)


def test_classes_are_drawn_from_tempered_probabilities():
    """A g that is far too sure is tempered on reference rows, so that imputed labels keep their uncertainty."""
    rng = np.random.default_rng(0)
    n = 6000
    Z = rng.integers(0, 2, (n, 1)).astype(float)
    y = (rng.random(n) < np.where(Z[:, 0] == 1, 0.7, 0.2)).astype(int)
    corrupted = rng.random(n) < 0.5

    class Sure:
        classes_ = np.array([0, 1])

        def predict_proba(self, X):
            p = np.where(X[:, -1] == 1, 0.7, 0.2)
            sharp = p**3 / (p**3 + (1 - p) ** 3)
            return np.stack([1 - sharp, sharp], axis=1)

    class Flat(Sure):
        def predict_proba(self, X):
            return np.full((len(X), 2), 0.5)

    ui = UncertainImputation(Flat(), Sure(), score="hps", prefit=True, random_state=0)
    half = n // 2
    ui.fit(Z[:half], y[:half], Z[:half], corrupted[:half]).conformalize(Z[half:], y[half:], Z[half:], corrupted[half:])
    lost = corrupted[half:]
    for value, share in ((0, 0.2), (1, 0.7)):
        rows = lost & (Z[half:, 0] == value)
        assert ui.imputed_[rows].mean() == pytest.approx(share, abs=0.06)


def test_labels_may_be_text_and_a_class_may_be_missing_from_calibration():
    X, y, Z, _corrupted, _ = data(600, classes=True)
    names = np.array(["low", "middle", "high"], dtype=object)
    text = np.array([None if np.isnan(v) else names[int(v)] for v in y], dtype=object)
    for cls in WITHOUT_Z:
        method = light(cls, "aps", reference_size=0.3).fit(X[:400], text[:400], Z[:400])
        held = np.arange(400, 600)[text[400:] != "low"]
        method.conformalize(X[held], text[held], Z[held])
        label, mask = method.predict_set(X[:20])
        assert list(method.classes_) == ["high", "low", "middle"]
        assert set(label) <= set(method.classes_)
        assert mask.shape == (20, 3, 1)
        assert 0 <= method.score(X[:20], text[:20]) <= 1
    # A label that f has never seen scores infinity; two of nine make the 90 % threshold infinite.
    few = NaiveConformal(LogisticRegression().fit(X[:200], np.nan_to_num(y[:200]) > 0), score="hps", prefit=True)
    labels = np.array([True] * 7 + [False] * 2, dtype=object)
    assert math.isfinite(few.conformalize(X[:9], labels.astype(bool)).threshold_)


def test_crossing_curves_are_sorted_and_empty_sets_are_counted():
    X = np.linspace(-1, 1, 50)[:, None]
    crossing = NaiveConformal((Line(0, 1), Line(0, -1)), prefit=True).conformalize(X, np.zeros(50))
    assert crossing.threshold_ == -1.0
    np.testing.assert_array_equal(crossing.predict_interval(X)[1][:, :, 0], np.zeros((50, 2)))
    f = (Line(1, -1), Line(-1, 1))  # narrower towards X = 1
    method = NaiveConformal(f, prefit=True).conformalize(X, np.zeros(50))
    method.threshold_ = -0.5
    with pytest.warns(UserWarning, match="sets are empty"):
        ends = method.predict_interval(X)[1][:, :, 0]
    empty = 1 - X[:, 0] < 0.5
    assert np.isnan(ends[empty]).all()
    assert not np.isnan(ends[~empty]).any()
    assert method.n_empty_ == empty.sum()


# --- the splits ---


class Seen(LinearRegression):
    """Remembers which rows it was fitted on, by their last feature; its copies report to the class."""

    rows: dict = {}  # noqa: RUF012

    def __init__(self, name="f"):
        super().__init__()
        self.name = name

    def fit(self, X, y, sample_weight=None):
        column = np.asarray(X)[:, 2]
        Seen.rows[self.name] = set(np.round(column).astype(int))
        return super().fit(X, y, sample_weight)


class SeenMarks(LogisticRegression):
    def fit(self, X, y, sample_weight=None):
        Seen.rows["propensity"] = set(np.round(np.asarray(X)[:, -1]).astype(int))
        return super().fit(X, y, sample_weight)


def test_f_g_and_propensity_see_the_first_part_alone():
    X, y, Z, corrupted, _ = data(400)
    X[:, 2] = np.arange(400)
    Z = np.column_stack([Z, np.arange(400)])
    union = TriplyRobust(estimator=Seen("f"), imputer=Seen("g"), propensity=SeenMarks(max_iter=500), score="absolute", random_state=0)  # fmt: skip
    union.fit_conformalize(X, y, Z, corrupted)
    lost = set(np.flatnonzero(corrupted))
    assert Seen.rows["f"] == Seen.rows["g"]
    assert not Seen.rows["f"] & lost
    assert len(Seen.rows["propensity"]) == 200  # 2 : 1 : 1
    assert Seen.rows["f"] == Seen.rows["propensity"] - lost
    assert union.diagnostics_["n_calibration"] == 100
    assert union.diagnostics_["n_train_clean"] == len(Seen.rows["f"])
    first = dict(Seen.rows)
    light(NaiveConformal, estimator=Seen("f"), reference_size=1 / 3).fit_conformalize(X, y, Z, corrupted)
    assert Seen.rows["f"] == first["f"]  # the same seed makes the same split in every method
    light(NaiveConformal, estimator=Seen("f")).fit_conformalize(X, y, Z, corrupted)
    assert len(Seen.rows["f"]) > len(first["f"])  # without reference rows by default


def test_train_on_imputed_labels_and_weighted_training():
    X, y, Z, corrupted, truth = data(500)
    X[:, 2] = np.arange(500)
    light(UncertainImputation, estimator=Seen("f"), train_on="imputed").fit(X, y, Z)
    assert Seen.rows["f"] & set(np.flatnonzero(corrupted))
    y, Z = truth + 4 * Z[:, 0] ** 2, Z
    y = np.where(corrupted, np.nan, y)
    plain = light(PrivilegedConformal).fit(X[:, :2], y, Z).predict(np.zeros((1, 2)))
    weighted = light(PrivilegedConformal, fit_weights="propensity").fit(X[:, :2], y, Z).predict(np.zeros((1, 2)))
    assert weighted > plain  # rows of high z, which are lost more often, count for more
    with pytest.raises(ValueError, match="takes no sample_weight"):
        light(PrivilegedConformal, estimator=KNeighborsRegressor(), fit_weights="propensity").fit(X, y, Z)


def test_propensity_options():
    X, y, Z, _corrupted, _ = data(1500)
    fitted = {}
    for name, options in {
        "z": {},
        "xz": {"propensity_features": "xz"},
        "sigmoid": {"calibrate": "sigmoid", "reference_size": 1 / 3},
        "isotonic": {"calibrate": "isotonic", "reference_size": 1 / 3},
        "default": {"propensity": None},
    }.items():
        method = light(PrivilegedConformal, **options).fit_conformalize(X, y, Z)
        fitted[name] = method.threshold_
        assert method.diagnostics_["propensity_auc"] > 0.7
    assert len(set(fitted.values())) == 5
    assert all(np.isfinite(q) for q in fitted.values())


def test_official_threshold_through_the_estimator():
    X, y, Z, corrupted, _ = data(300)
    e = lambda Z: np.where(Z[:, 0] > 0.7, 0.4, 0.95)  # noqa: E731
    method = PrivilegedConformal(Line(1, 0), e, score="absolute", compat="official", prefit=True)
    scores = np.abs(y - X[:, 0])[~corrupted]
    expected = pcp_threshold(scores, e(Z).mean() / e(Z), corrupted, 0.9, 0.005, compat="official")
    assert method.conformalize(X, y, Z).threshold_ == pytest.approx(expected, abs=1e-12)


def test_diagnostics_say_which_assumption_looks_weak():
    X, y, Z, corrupted, _ = data(1200)
    right = lambda Z: np.where(Z[:, 0] > 0.7, 0.4, 0.95)  # noqa: E731
    good = light(TriplyRobust, propensity=right).fit_conformalize(X, y, Z).diagnostics_
    assert good["imputer_r2"] > 0.8
    assert good["propensity_auc"] > 0.7
    assert 0 < good["effective_sample_size"] <= good["n_clean"]
    text = str(good)
    assert "UI looks plausible" in text
    assert "PCP looks plausible" in text
    assert "share clean" in text
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1200, 1))
    weak = light(UncertainImputation, estimator=LinearRegression()).fit_conformalize(X, np.where(corrupted, np.nan, rng.standard_normal(1200)), noise)  # fmt: skip
    assert "UI rests on its errors alone" in str(weak.diagnostics_)
    sharp = light(PrivilegedConformal, propensity=lambda Z: np.where(Z[:, 0] > 1.8, 0.02, 0.95))
    assert "PCP looks weak" in str(sharp.fit_conformalize(X, y, Z).diagnostics_)


# --- scikit-learn, and what users pass ---


def first_column(X):
    X = X.toarray() if sp.issparse(X) else np.asarray(X)
    return np.nan_to_num(X[:, :1].astype(float)) if X.ndim == 2 else None


def filled(cls):
    """A subclass that fills Z with the first column of X, for scikit-learn's checks."""

    class Filled(cls):
        def fit(self, X, y=None, Z=None, corrupted=None):
            return super().fit(X, y, first_column(X), corrupted)

    Filled.__name__ = Filled.__qualname__ = f"Filled{cls.__name__}"
    globals()[Filled.__name__] = Filled  # where pickle looks for it
    return Filled


# The union runs the code of PCP and of UI: on their own they are checked among the slow tests.
@pytest.mark.parametrize(
    "cls",
    [pytest.param(c, marks=pytest.mark.slow) if c in (PrivilegedConformal, UncertainImputation) else c for c in ALL],
)
def test_scikit_learn_checks(cls):
    made = cls if cls is NaiveConformal else filled(cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(light(made, estimator=LinearRegression(), **({"imputer": LinearRegression()} if cls in (UncertainImputation, TriplyRobust) else {})), on_fail=None)  # fmt: skip
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert sum(r["status"] == "passed" for r in results) >= 48


@pytest.mark.slow
@pytest.mark.parametrize("cls", ALL)
def test_scikit_learn_checks_with_the_default_models(cls):
    made = cls if cls is NaiveConformal else filled(cls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(made(), on_fail=None)
    assert not {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}


@pytest.mark.parametrize("cls", ALL)
def test_clone_parameters_and_pickle(cls):
    method = light(cls, confidence_level=[0.8, 0.9])
    assert method.get_params()["score"] == "absolute"
    assert method.score == "absolute"
    again = clone(method)
    assert again.get_params() == {**method.get_params(), **{k: v for k, v in again.get_params().items() if hasattr(v, "fit")}}  # fmt: skip
    X, y, Z, _, _ = data()
    first = method.fit_conformalize(X, y, Z).predict_interval(X, *sees(cls, Z))[1]
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(method)).predict_interval(X, *sees(cls, Z))[1], first)
    np.testing.assert_array_equal(again.fit_conformalize(X, y, Z).predict_interval(X, *sees(cls, Z))[1], first)


def test_z_reaches_the_method_inside_a_pipeline_and_a_grid_search():
    X, y, Z, corrupted, _truth = data(300)
    with config_context(enable_metadata_routing=True):
        method = light(UncertainImputation, estimator=Ridge()).set_fit_request(Z=True, corrupted=True)
        pipeline = make_pipeline(StandardScaler(), method).fit(X, y, Z=Z, corrupted=corrupted)
        assert pipeline.predict(X).shape == (300,)
        search = GridSearchCV(method, {"estimator__alpha": [0.1, 1e4]}, cv=3, error_score="raise")
        search.fit(X, y, Z=Z, corrupted=corrupted)
    assert search.best_params_ == {"estimator__alpha": 0.1}  # scored by R^2 over the rows that have a label
    held = search.best_estimator_.conformalize(X, y, Z, corrupted)
    assert held.predict_interval(X)[1].shape == (300, 2, 1)


def test_data_frames_keep_their_index_and_text_columns_reach_the_users_pipeline():
    X, y, Z, _corrupted, _ = data(400)
    frame = pd.DataFrame(X, columns=list("abc"), index=[f"row {i}" for i in range(400)])
    frame["kind"] = np.where(X[:, 1] > 0, "left", "right")
    hidden = pd.DataFrame({"z": Z[:, 0], "source": np.where(Z[:, 0] > 0, "lab", "web")}, index=frame.index)
    columns = make_column_transformer((OneHotEncoder(), ["kind"]), remainder="passthrough")
    method = light(UncertainImputation, estimator=make_pipeline(columns, LinearRegression()), imputer=make_pipeline(columns, LinearRegression()))  # fmt: skip
    method.fit_conformalize(frame, pd.Series(y, index=frame.index), hidden)
    assert method.predict_interval(frame)[1].shape == (400, 2, 1)
    method.set_output(transform="pandas")
    point, ends = method.predict_interval(frame)
    assert list(ends.columns) == ["lower", "upper"]
    assert (ends.index == frame.index).all()
    assert (point.index == frame.index).all()
    assert (ends["lower"] <= point).all()


def test_frames_arrays_polars_and_sparse_give_the_same_intervals():
    X, y, Z, corrupted, _ = data(300)
    expected = light(UncertainImputation).fit_conformalize(X, y, Z, corrupted)
    kinds = {
        "pandas": (pd.DataFrame(X), pd.Series(y), pd.DataFrame(Z), pd.Series(corrupted)),
        "polars": (pl.DataFrame(X), pl.Series(y), pl.DataFrame(Z), pl.Series(corrupted)),
        "flat z, 0/1 marks": (X, y, Z[:, 0], corrupted.astype(int)),
        "sparse": (sp.csr_matrix(X), y, Z, corrupted),
    }
    for name, (x, labels, hidden, marks) in kinds.items():
        found = light(UncertainImputation).fit_conformalize(x, labels, hidden, marks)
        if name != "sparse":  # ties in the order of draws are broken by content, which differs for sparse rows
            np.testing.assert_allclose(found.threshold_, expected.threshold_, rtol=1e-9, err_msg=name)
        assert found.predict_interval(x)[1].shape == (300, 2, 1)


def test_y_of_one_column_is_ravelled_with_a_warning_and_more_are_refused():
    X, _, _, _, y = data(100)
    flat = light(NaiveConformal).fit_conformalize(X, y)
    with pytest.warns(DataConversionWarning, match="column-vector"):
        column = light(NaiveConformal).fit_conformalize(X, y[:, None])
    assert column.threshold_ == flat.threshold_
    with pytest.raises(ValueError, match="1d array"):
        light(NaiveConformal).fit(X, np.stack([y, y], axis=1))


def test_several_levels_share_one_fit():
    X, y, _Z, _, _ = data(400)
    method = light(NaiveConformal, "cqr", confidence_level=(0.5, 0.8, 0.9)).fit_conformalize(X, y)
    ends = method.predict_interval(X)[1]
    assert ends.shape == (400, 2, 3)
    assert method.threshold_.shape == (3,)
    width = (ends[:, 1] - ends[:, 0]).mean(axis=0)
    assert width[0] < width[1] < width[2]
    single = light(NaiveConformal, "cqr", confidence_level=0.8).fit_conformalize(X, y)
    np.testing.assert_allclose(single.predict_interval(X)[1][:, :, 0], ends[:, :, 1])
    assert isinstance(single.threshold_, float)


@pytest.mark.parametrize("cls", NEED_Z)
def test_z_is_needed_at_fit_and_refused_at_prediction(cls):
    X, y, Z, _, _ = data()
    with pytest.raises(ValueError, match=f"{cls.__name__} needs the privileged columns Z"):
        light(cls).fit(X, y)
    method = light(cls).fit_conformalize(X, y, Z)
    if cls is WeightedConformal:
        with pytest.raises(ValueError, match="needs Z at prediction"):
            method.predict_interval(X)
        with pytest.raises(ValueError, match="one row of Z for each"):
            method.predict_interval(X, Z[:5])
    else:
        for call in (method.predict, method.predict_interval):
            with pytest.raises(ValueError, match="must not see Z at prediction"):
                call(X, Z)


@pytest.mark.parametrize(
    ("lost", "message"),
    [("I1", r"training rows \(I1\)"), ("I2", r"calibration rows \(I2\)"), ("I3", r"reference rows \(I3\)")],
)
def test_a_split_without_a_clean_label_is_named(lost, message):
    X, _, Z, _, y = data(90)
    if lost == "I1":
        with pytest.raises(ValueError, match=message):
            light(NaiveConformal).fit(X, y, corrupted=np.ones(90))
        return
    method = UncertainImputation(Line(1, 0), LineXZ(), score="absolute", prefit=True)
    with pytest.raises(ValueError, match=message):
        method.fit(X, y, Z, np.full(90, lost == "I3")).conformalize(X, y, Z, np.full(90, lost == "I2"))


WRONG = [
    (NaiveConformal, {"score": "crps"}, "score must be one of cqr"),
    (NaiveConformal, {"confidence_level": 1.0}, "confidence_level must lie between 0 and 1"),
    (NaiveConformal, {"confidence_level": []}, "confidence_level must lie between 0 and 1"),
    (NaiveConformal, {"confidence_level": None}, "must be a number or a list of numbers"),
    (NaiveConformal, {"confidence_level": [[0.9]]}, "must be a number or a list of numbers"),
    (NaiveConformal, {"reference_size": "third"}, "reference_size must be a number"),
    (NaiveConformal, {"estimator": 3}, "estimator has a int that cannot be fitted"),
    (NaiveConformal, {"impute": "median"}, "impute must be"),
    (NaiveConformal, {"noisy": "keep"}, "noisy must be"),
    (NaiveConformal, {"impute": "mean", "noisy": "use"}, "choose one"),
    (NaiveConformal, {"reference_size": 1.0}, r"reference_size must lie in \[0, 1\)"),
    (NaiveConformal, {"calibration_size": 0.0}, "calibration_size"),
    (NaiveConformal, {"train_on": "all"}, "train_on must be"),
    (NaiveConformal, {"train_on": "imputed"}, "sees Z at fit"),
    (NaiveConformal, {"estimator": Ridge(), "score": "cqr"}, "give a pair"),
    (NaiveConformal, {"estimator": (Ridge(),), "score": "cqr"}, "has 1 members"),
    (NaiveConformal, {"estimator": (Ridge(), Ridge())}, "give one regressor"),
    (NaiveConformal, {"estimator": Ridge(), "score": "hps"}, "no predict_proba"),
    (NaiveConformal, {"estimator": None, "prefit": True}, "give estimator"),
    (NaiveConformal, {"estimator": Ridge(), "score": "normalized", "prefit": True}, "two fitted regressors"),
    (PrivilegedConformal, {"beta": 0.1}, "beta must lie between 0 and alpha"),
    (PrivilegedConformal, {"beta": 0.06, "confidence_level": [0.8, 0.95]}, "beta must lie between 0 and alpha"),
    (PrivilegedConformal, {"beta": None}, "beta must be a number"),
    (PrivilegedConformal, {"clip": 0.0}, "clip must lie"),
    (PrivilegedConformal, {"compat": "paper"}, "compat must be"),
    (PrivilegedConformal, {"small_n": "zero"}, "small_n must be"),
    (PrivilegedConformal, {"propensity_features": "x"}, "propensity_features must be"),
    (PrivilegedConformal, {"calibrate": "platt"}, "calibrate must be"),
    (PrivilegedConformal, {"calibrate": "sigmoid"}, "needs reference rows"),
    (PrivilegedConformal, {"fit_weights": "yes"}, "fit_weights must be"),
    (PrivilegedConformal, {"propensity": 0.8}, "propensity must be a classifier"),
    (PrivilegedConformal, {"propensity": lambda Z: Z[:, 0]}, r"outside \[0, 1\]"),
    (PrivilegedConformal, {"propensity": None, "prefit": True}, "give propensity too"),
    (UncertainImputation, {"imputer": None, "prefit": True}, "give imputer too"),
    (UncertainImputation, {"errors": "nearest"}, "errors must be one of"),
    (UncertainImputation, {"draws": 0}, "draws must be"),
    (UncertainImputation, {"draws": math.nan}, "draws must be a number"),
    (UncertainImputation, {"min_pool": None}, "min_pool must be a number"),
    (UncertainImputation, {"imputer": 3}, "imputer is a int that cannot be fitted"),
    (UncertainImputation, {"reference_size": 0.0}, "needs reference rows"),
    (TriplyRobust, {"parts": ("naive", "wcp")}, "parts must be some of"),
    (TriplyRobust, {"estimator": {"naive": Ridge()}}, "give one for each of"),
    (TriplyRobust, {"score": "hps", "include_uncalibrated": True}, "label sets have none"),
]


@pytest.mark.parametrize(("cls", "settings", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else None)
def test_wrong_settings_are_refused_at_fit(cls, settings, message):
    X, y, Z, _, _ = data(200, classes=settings.get("score") in ("hps", "aps"))
    method = light(cls).set_params(**settings)
    with pytest.raises(ValueError, match=message):
        method.fit_conformalize(X, y, Z)


def test_wrong_rows_are_refused():
    X, y, Z, corrupted, truth = data(100)
    naive, ui = light(NaiveConformal), light(UncertainImputation)
    with pytest.raises(ValueError, match="Input y contains infinity"):
        naive.fit(X, np.where(np.arange(100) == 3, np.inf, truth))
    with pytest.raises(ValueError, match="y is missing in 1 rows that `corrupted` calls clean"):
        naive.fit(X, np.where(np.arange(100) == 3, np.nan, truth), corrupted=np.zeros(100))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        ui.fit(X, y, Z[:50])
    with pytest.raises(ValueError, match="corrupted must hold"):
        naive.fit(X, y, corrupted=np.full(100, 2))
    with pytest.raises(ValueError, match="Z contains NaN"):
        ui.fit(X, y, np.where(np.arange(100)[:, None] == 0, np.nan, Z))
    with pytest.raises(ValueError, match="Input X contains NaN"):
        naive.fit(np.where(np.arange(100)[:, None] == 0, np.nan, X), y)  # the estimator's own sentence
    with pytest.raises(ValueError, match="labels that are not numbers"):
        naive.fit(X, np.array(["a", "b"] * 50, dtype=object))
    with pytest.raises(ValueError, match='noisy="use" keeps the wrong labels'):
        light(NaiveConformal, noisy="use").fit_conformalize(X, y)
    with pytest.raises(ValueError, match="fit saw 1"):
        ui.fit(X, y, Z).conformalize(X, y, np.hstack([Z, Z]))
    two = pd.DataFrame({"u": Z[:, 0], "v": X[:, 0]})
    with pytest.raises(ValueError, match="another order than at fit: give them as u, v"):
        ui.fit(X, y, two).conformalize(X, y, two[["v", "u"]])
    with pytest.raises(ValueError, match="Z contains NaN in 25 rows of column 'text'"):
        ui.fit(X, y, pd.DataFrame({"text": ["a", None, "b", "b"] * 25}))
    with pytest.raises(ValueError, match="complex"):
        ui.fit(X, y, Z + 1j)
    fitted = {"estimator": LinearRegression().fit(X, truth), "propensity": LogisticRegression().fit(Z, corrupted)}
    with pytest.raises(ValueError, match="all 100 are of one kind"):
        light(PrivilegedConformal, calibrate="sigmoid", prefit=True, **fitted).fit(X, truth, Z)
    assert light(NaiveConformal, estimator=HistGradientBoostingRegressor(max_iter=3)).fit(
        np.where(X > 0.9, np.nan, X), y
    )


def test_the_order_of_calls_is_explained():
    X, y, Z, _, _ = data(100)
    with pytest.raises(NotFittedError, match="call fit"):
        light(UncertainImputation).conformalize(X, y, Z)
    with pytest.raises(NotFittedError, match="call fit and conformalize"):
        light(UncertainImputation).predict(X)
    fitted = light(UncertainImputation).fit(X, y, Z)
    with pytest.raises(NotFittedError, match="call conformalize"):
        fitted.predict_interval(X)
    fitted.conformalize(X, y, Z)
    with pytest.raises(ValueError, match="call predict_interval"):
        fitted.predict_set(X)
    fitted.fit(X, y, Z)
    assert not hasattr(fitted, "threshold_")
    classes = light(NaiveConformal, "hps").fit_conformalize(X, X[:, 0] > 0)
    with pytest.raises(ValueError, match="call predict_set"):
        classes.predict_interval(X)


@pytest.mark.parametrize("cls", ALL)
def test_a_calibration_that_fails_leaves_no_threshold(cls):
    X, y, Z, _, _ = data(200)
    fitted = light(cls).fit_conformalize(X, y, Z)
    with pytest.raises(ValueError, match="calibration rows"):
        fitted.conformalize(X, np.full(200, np.nan), Z)
    with pytest.raises(NotFittedError, match="call conformalize"):
        fitted.predict_interval(X, *sees(cls, Z))


@pytest.mark.parametrize("cls", ALL)
def test_a_level_changed_after_fit_is_not_believed(cls):
    X, y, Z, _, _ = data(200)
    fitted = light(cls).fit_conformalize(X, y, Z).set_params(confidence_level=[0.5, 0.8])
    for call in (lambda: fitted.conformalize(X, y, Z), lambda: fitted.predict_interval(X, *sees(cls, Z))):
        with pytest.raises(ValueError, match="changed after fit"):
            call()
    intervals = fitted.fit_conformalize(X, y, Z).predict_interval(X, *sees(cls, Z))[1]
    assert intervals.shape == (200, 2, 2)


@pytest.mark.parametrize("cls", ALL)
def test_what_is_given_stays_as_it_is(cls):
    X, y, Z, corrupted, truth = data(200, classes=True)
    rows = sp.csr_matrix(np.where(X > 0, X, 0))
    for a, b in zip(rows.indptr[:-1], rows.indptr[1:]):  # unsorted, as scipy allows
        rows.indices[a:b], rows.data[a:b] = rows.indices[a:b][::-1].copy(), rows.data[a:b][::-1].copy()
    rows.has_sorted_indices = False
    before = rows.indices.copy()
    fitted = light(cls, "aps").fit_conformalize(rows, truth, Z, corrupted)
    fitted.predict_set(rows, *sees(cls, Z))
    np.testing.assert_array_equal(rows.indices, before)
    frozen = [a.copy() for a in (X, y, Z, corrupted)]
    for a in frozen:
        a.setflags(write=False)
    light(cls).fit_conformalize(*frozen).predict_interval(frozen[0], *sees(cls, Z))


@pytest.mark.parametrize("cls", [NaiveConformal, TriplyRobust])
@pytest.mark.parametrize("score", ["absolute", "aps"])
def test_text_features_may_be_missing(cls, score):
    X, y, Z, _, _ = data(200, classes=score == "aps")
    frame = pd.DataFrame({"x": X[:, 0], "text": ["u", None, "w", np.nan] * 50})

    def with_text(model):
        return make_pipeline(
            make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ["text"]), remainder="passthrough"), model
        )

    model = LinearRegression() if score == "absolute" else LogisticRegression()
    imputer = {"imputer": with_text(model)} if cls is TriplyRobust else {}
    method = light(cls, score, estimator=with_text(model), **imputer).fit_conformalize(frame, y, Z)
    assert len(method.predict(frame)) == 200
    assert method.n_clean_ > 0


@pytest.mark.parametrize("names", [["privileged_0", "b", "c"], [3, 4, 9]])
def test_names_of_features_may_be_those_of_joined_columns(names):
    X, y, Z, _, _ = data(200)
    frame = pd.DataFrame(X, columns=names)
    found = light(UncertainImputation).fit_conformalize(frame, y, Z).predict_interval(frame)[1]
    np.testing.assert_allclose(found, light(UncertainImputation).fit_conformalize(X, y, Z).predict_interval(X)[1])


class Turned:
    """A fitted classifier whose classes come in falling order."""

    def __init__(self, model):
        self.model, self.classes_ = model, model.classes_[::-1]

    def predict_proba(self, X):
        return self.model.predict_proba(X)[:, ::-1]


def test_the_order_of_a_classifiers_classes_changes_nothing():
    X, _, _, _, truth = data(200, classes=True)
    model = LogisticRegression().fit(X, truth)
    found = [
        NaiveConformal(f, score="hps", prefit=True, random_state=0).conformalize(X, truth)
        for f in (model, Turned(model))
    ]
    assert found[0].threshold_ == found[1].threshold_ < 1
    np.testing.assert_array_equal(found[0].predict_set(X)[1], found[1].predict_set(X)[1][:, ::-1])
    with pytest.raises(ValueError, match="no clean calibration label is a class that the classifier knows"):
        found[0].conformalize(X, np.array(["low", "middle", "high"])[truth.astype(int)])
