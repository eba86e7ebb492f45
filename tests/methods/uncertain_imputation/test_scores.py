import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.methods.uncertain_imputation._scores import (
    aps_scores,
    hps_scores,
    interval,
    interval_score,
    label_set,
    score_of_label,
)
from assay.methods.uncertain_imputation._thresholds import naive_threshold
from assay.methods.uncertain_imputation.reference import aps_score_loop

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "uncertain-imputation" / "naive_official.json").read_text())[
    "cases"
]


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_adaptive_scores_equal_their_loop(seed, classes):
    rng = np.random.default_rng(seed)
    p = rng.integers(0, 4, (5, classes)) + 0.25  # ties
    p = p / p.sum(axis=1, keepdims=True)
    u = rng.random(5)
    scores = aps_scores(p, u)
    for i in range(5):
        for label in range(classes):
            assert scores[i, label] == pytest.approx(aps_score_loop(p[i], u[i], label), abs=1e-12)


def test_adaptive_scores_are_uniform_where_the_probabilities_are_right():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 20000)
    labels = (rng.random((20000, 1)) > np.cumsum(p, axis=1)).sum(axis=1)
    scores = score_of_label(aps_scores(p, rng.random(20000)), labels)
    np.testing.assert_allclose(np.quantile(scores, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.012)


@given(st.integers(0, 10**6), st.floats(-1.5, 3.0))
def test_an_interval_holds_exactly_the_labels_whose_score_is_at_most_the_threshold(seed, q):
    rng = np.random.default_rng(seed)
    lower = rng.standard_normal(50)
    upper, scale, y = lower + rng.exponential(size=50), rng.uniform(0.5, 2, 50), 3 * rng.standard_normal(50)
    ends = interval(lower, upper, scale, q)
    inside = (ends[:, 0] <= y) & (y <= ends[:, 1])
    score = interval_score(y, lower, upper, scale)
    sure = np.abs(score - q) > 1e-9
    np.testing.assert_array_equal(inside[sure], (score <= q)[sure])
    assert (np.isnan(ends).all(axis=1) == (lower - q * scale > upper + q * scale)).all()


def test_an_unknown_label_scores_infinity():
    scores = hps_scores(np.array([[0.7, 0.3], [0.2, 0.8]]))
    np.testing.assert_allclose(score_of_label(scores, np.array([-1, 1])), [np.inf, 0.2])


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: str(c["seed"]))
def test_scores_and_sets_equal_the_released_code(case):
    clean = ~np.array(case["corrupted"], dtype=bool)
    p, labels = np.array(case["class_probabilities"]), np.array(case["label"])
    ones = np.ones(len(p))
    aps, hps = aps_scores(p, ones), hps_scores(p)  # theirs is not randomised: u = 1
    kept = clean if len(case["aps_scores"]) == clean.sum() else np.ones(len(p), bool)
    np.testing.assert_allclose(score_of_label(aps, labels)[kept], case["aps_scores"], atol=1e-10)
    np.testing.assert_allclose(score_of_label(hps, labels)[kept], case["hps_scores"], atol=1e-10)
    new = np.array(case["test_probabilities"])
    np.testing.assert_array_equal(label_set(hps_scores(new), case["Q_hps"]), np.array(case["hps_sets"], bool))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: str(c["seed"]))
def test_the_released_cqr_quantile_interpolates_between_two_ranks_around_ours(case):
    clean = ~np.array(case["corrupted"], dtype=bool)
    ends, y = np.array(case["intervals"]), np.array(case["y"])
    scores = interval_score(y, ends[:, 0], ends[:, 1])[clean]
    level = 1 - case["alpha"]
    released = np.quantile(scores, min(level + 1 / (len(scores) + 1), 1))
    assert case["Q_cqr"] == pytest.approx(released, rel=1e-10)
    ordered = np.sort(scores)
    at = int(np.searchsorted(ordered, naive_threshold(scores, level)))
    assert ordered[max(at - 1, 0)] - 1e-12 <= case["Q_cqr"] <= ordered[min(at + 1, len(ordered) - 1)] + 1e-12


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: str(c["seed"]))
def test_released_adaptive_sets_are_ours_at_their_quantile_which_is_at_most_one_rank_above(case):
    new = np.array(case["test_probabilities"])
    sets = label_set(aps_scores(new, np.ones(len(new))), case["Q_aps"] + 1e-12)
    np.testing.assert_array_equal(sets, np.array(case["aps_sets"], bool))
    scores = np.sort(np.array(case["aps_scores"])[~np.array(case["corrupted"], bool)])
    ours = int(np.searchsorted(scores, naive_threshold(scores, 1 - case["alpha"])))
    theirs = int(np.argmin(np.abs(scores - case["Q_aps"])))
    assert theirs in (ours, ours + 1)
