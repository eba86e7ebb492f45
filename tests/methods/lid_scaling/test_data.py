"""Estimators from counts against brute force, integrals and coverage; allocation against its conditions."""

from __future__ import annotations

import json
import math
from itertools import combinations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta as beta_law
from scipy.stats import norm

from assay._errors import InputError
from assay.methods.lid_scaling import (
    LastLayerStudy,
    PassAtK,
    SaturatingExponent,
    allocate,
    beta_eff,
    bootstrap_interval,
    check_rows,
    effective_exponent,
    fit_lid,
    hill,
    load_passk_jsonl,
    rule_of_thumb,
    window_grid,
)


def test_the_unbiased_estimate_is_the_average_over_subsets():
    for a in range(9):
        answers = [True] * a + [False] * (8 - a)
        for k in range(1, 9):
            want = np.mean([not any(chosen) for chosen in combinations(answers, k)])
            assert PassAtK([a], [8]).curve([k])[0] == pytest.approx(want)


@pytest.mark.parametrize(("a", "n", "k"), [(0, 50, 3), (7, 50, 20), (50, 50, 2), (3, 9, 40)])
def test_the_posterior_mean_is_the_integral(a, n, k):
    law = beta_law(a + 0.1, n - a + 0.9)
    want, _ = quad(lambda s: (1 - s) ** k * law.pdf(s), 0, 1, points=[1e-6, 1e-3], limit=400)
    assert PassAtK([a], [n], classes=10).curve([k], "posterior")[0] == pytest.approx(want, rel=1e-4)


def test_raw_is_raw_and_the_floor_is_its_limit():
    table = PassAtK([0, 5, 10], [10, 10, 10])
    assert table.curve([2], "raw")[0] == pytest.approx((1 + 0.25 + 0) / 3)
    assert table.floor == pytest.approx(1 / 3)
    assert table.curve([1e6], "raw")[0] == pytest.approx(table.floor)
    assert table.supported == 10


def test_votes_become_successes():
    votes = np.array([[3, 1], [0, 4]])
    table = PassAtK(votes=votes, preds=np.array([0, 0]))
    assert table.successes.tolist() == [3, 0]
    assert table.samples.tolist() == [4, 4]
    assert table.classes == 2


def test_answers_near_the_prediction_become_successes():
    answers = np.array([[1.0, 1.4, 2.1, np.nan], [0.0, np.nan, np.nan, np.nan]])
    table = PassAtK.from_answers(answers, np.array([1.5, 9.0]), 0.5)
    assert table.successes.tolist() == [2, 0]
    assert table.samples.tolist() == [4, 4]


def test_the_interval_covers_the_true_exponent():
    """200 sets of 300 inputs with known success rates."""
    rng = np.random.default_rng(0)
    window, covered = (1, 20), 0
    ks = window_grid(window)
    big = rng.beta(0.6, 1.5, 400_000)
    truth = effective_exponent(ks, [((1 - big) ** k).mean() for k in ks])
    for seed in range(200):
        s = rng.beta(0.6, 1.5, 300)
        a = rng.binomial(50, s)
        found = PassAtK(a, np.full(300, 50)).beta_eff(window, draws=200, seed=seed)
        covered += found.low <= truth <= found.high
    assert covered >= 180


def lid_counts(beta, delta, n, seed, v=0.0):
    rng = np.random.default_rng(seed)
    tau = rng.gamma(beta / 2, size=len(n))
    bias = math.sqrt(v) * rng.standard_normal(len(n))
    root = np.sqrt(tau)
    s = norm.cdf((delta - bias) * root) - norm.cdf((-delta - bias) * root)
    return rng.binomial(n, s), s


@pytest.mark.parametrize(("beta", "delta"), [(1.5, 0.5), (2.5, 0.2), (4.0, 1.0)])
def test_the_model_is_found_in_its_own_counts(beta, delta):
    n = np.full(20_000, 50)
    n[::3] = 30
    a, _ = lid_counts(beta, delta, n, 1)
    found = fit_lid(a, n)
    assert found.beta == pytest.approx(beta, rel=0.04)
    assert found.delta == pytest.approx(delta, rel=0.04)
    assert found.p_value > 0.001
    assert found.v == 0
    assert found.beta_interval[0] < found.beta < found.beta_interval[1]


@pytest.mark.parametrize("with_bias", [False, True])
def test_one_step_intervals_are_those_of_refitting(with_bias):
    n = np.full(1500, 25)
    a, _ = lid_counts(2.5, 0.5, n, 5, v=0.3 if with_bias else 0.0)
    found, rng = fit_lid(a, n, with_bias=with_bias, draws=4000), np.random.default_rng(0)
    if with_bias:  # refitting all three costs too much here: the interval must be wider than that of two parameters
        alone = fit_lid(lid_counts(2.5, 0.5, n, 5)[0], n)
        assert np.diff(found.beta_interval)[0] > np.diff(alone.beta_interval)[0]
        return
    refits = []
    for _ in range(40):
        chosen = rng.integers(0, len(a), len(a))
        again = fit_lid(a[chosen], n[chosen], draws=1)
        refits.append([math.log(again.beta), math.log(again.delta)])
    for interval, sd in zip((found.beta_interval, found.delta_interval), np.std(refits, axis=0), strict=True):
        assert np.diff(np.log(interval))[0] / (2 * 1.96) == pytest.approx(sd, rel=0.3)


def test_a_bootstrap_keeps_rows_together():
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(lambda a, b: float((a + b).mean()), x, -x + 1.0, draws=50)
    assert (low, high) == pytest.approx((1.0, 1.0))
    low, high = bootstrap_interval(np.mean, x, draws=500)
    assert (high - low) / (2 * 1.96) == pytest.approx(x.std() / 20, rel=0.15)


def test_a_bias_is_found_too():
    n = np.full(20_000, 40)
    a, _ = lid_counts(2.5, 0.5, n, 2, v=0.5)
    found = fit_lid(a, n, with_bias=True)
    assert found.v == pytest.approx(0.5, rel=0.25)
    assert found.beta == pytest.approx(2.5, rel=0.15)
    assert fit_lid(a, n).p_value < 1e-6  # without it the model does not fit


def test_other_counts_are_told_not_to_fit():
    rng = np.random.default_rng(3)
    a = rng.binomial(50, rng.beta(0.5, 0.5, 20_000))
    assert fit_lid(a, np.full(20_000, 50)).p_value < 1e-6


@pytest.mark.parametrize(("beta", "delta"), [(1.5, 0.1), (2.5, 0.1), (4.0, 0.1)])
def test_hill_finds_the_tail_of_exact_rates(beta, delta):
    found = [hill(lid_counts(beta, delta, np.full(20_000, 1), seed)[1], 0.02) for seed in range(5)]
    assert np.mean(found) == pytest.approx(beta, rel=0.2)


def test_hill_on_a_pure_power_is_its_exponent():
    s = np.random.default_rng(0).random(50_000) ** (1 / 3.0)
    assert hill(s, 0.1) == pytest.approx(3.0, rel=0.05)


def test_exponents_of_powers_and_of_the_model():
    ks = window_grid((10, 1000))
    assert effective_exponent(ks, 7 * ks**-1.3) == pytest.approx(1.3)
    assert (np.diff(ks) > 0).all()
    assert len(window_grid((1, 5))) == 5
    assert beta_eff(1e-5, (1e2, 1e4), beta=2.5, delta=0.5) == pytest.approx(2.5, abs=0.02)
    rising = [beta_eff(v, (1e2, 1e4), beta=2.5, delta=0.5, fast=True) for v in (1.0, 0.3, 0.1, 0.01)]
    assert rising == sorted(rising)


def test_a_saturating_curve_is_recovered():
    N = np.geomspace(60, 5000, 12)
    curve = SaturatingExponent().fit(N, 2.5 * (1 - (50 / N) ** 1.62))
    assert (curve.beta_, curve.N0_, curve.nu_) == pytest.approx((2.5, 50, 1.62), rel=1e-3)
    assert curve.predict([10.0, 1e9]) == pytest.approx([0.0, 2.5], abs=1e-3)
    known = SaturatingExponent(beta=2.5).fit(N, 2.5 * (1 - (50 / N) ** 1.62))
    assert known.nu_ == pytest.approx(1.62, rel=1e-3)


# Allocation


def test_at_an_interior_optimum_both_marginals_are_equal():
    found = allocate(1e4, 1.0, 5.0, 2.0, lambda N: 30 / N, lambda k, N: 4 * k**-1.2 + 1 / N)
    assert found.regime == "interior"
    assert found.marginal_train == pytest.approx(found.marginal_infer, rel=1e-3)
    assert found.N + 5 * found.k == pytest.approx(1e4)
    grid = np.linspace(10, 9990, 4000)
    loss = 2 * 30 / grid + 4 * ((1e4 - grid) / 5) ** -1.2 + 1 / grid
    assert found.loss <= loss.min() * (1 + 1e-9)
    assert found.N_whole + 5 * found.k_whole <= 1e4
    assert found.loss_whole == pytest.approx(found.loss, rel=1e-3)


def test_corners_are_found_and_named():
    only_training = allocate(100.0, 1.0, 1.0, 1.0, lambda N: 1 / N, lambda k, N: 1.0)
    assert only_training.regime == "all training"
    assert only_training.k == pytest.approx(1.0)
    only_draws = allocate(100.0, 1.0, 1.0, 0.0, lambda N: 1.0, lambda k, N: 1 / k, n_min=5.0)
    assert only_draws.regime == "all inference"
    assert pytest.approx(5.0) == only_draws.N


def test_the_better_of_two_minima_is_taken():
    def dips(N: float) -> float:
        return -math.exp(-((math.log(N) - 2) ** 2) * 20) - 1.5 * math.exp(-((math.log(N) - 7) ** 2) * 20)

    found = allocate(5000.0, 1.0, 1.0, 1.0, dips, lambda k, N: 0.0)
    assert pytest.approx(math.exp(7), rel=1e-3) == found.N


def test_the_rule_of_thumb_trains_until_the_exponent_is_near():
    rule = rule_of_thumb(1e5, 1.0, 1.0, 2.0, lambda N, window: 2 * (1 - 100 / N), n_min=101.0)
    assert rule.reached
    assert pytest.approx(2000, rel=0.01) == rule.N
    assert rule.k == pytest.approx(1e5 - rule.N)
    short = rule_of_thumb(1000.0, 1.0, 1.0, 2.0, lambda N, window: 0.5, n_min=10.0)
    assert not short.reached
    assert (short.N, short.k) == (999, 1.0)
    seen = []
    rule_of_thumb(1e4, 1.0, 1.0, 2.0, lambda N, window: seen.append((N, window)) or 9.0)
    assert seen[0][1] == ((1e4 - seen[0][0]) / 10, 1e4 - seen[0][0])


def test_the_model_itself_can_be_allocated(table):

    def gen(N: float) -> float:
        return 4 * 50 / (N - 51)

    found = allocate(1e4, 1.0, 1.0, 0.0, gen, lambda k, N: float(table(k, gen(N))), n_min=300.0)
    assert found.regime == "interior"
    assert 0.5 < found.k / 1e4 < 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": 0.5}, "does not pay for 1 training inputs and one draw"),
        ({"budget": math.inf}, "does not pay"),
        ({"c_train": 0.0}, "c_train is 0"),
        ({"c_infer": -1.0}, "c_infer is -1"),
        ({"R": -1.0}, "R is -1"),
        ({"n_min": 0.0}, "n_min is 0"),
    ],
)
def test_budgets_that_buy_nothing_are_refused(change, sentence):
    arguments = {"budget": 10.0, "c_train": 1.0, "c_infer": 1.0, "R": 1.0, "n_min": 1.0} | change
    with pytest.raises(InputError, match=sentence):
        allocate(gen_curve=lambda N: 1 / N, inf_curve=lambda k, N: 1 / k, **arguments)


# Real features


def made_up(inputs=600, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, inputs)
    hard = rng.random(inputs)
    features = np.eye(4)[labels] * (1.3 - hard[:, None]) + 0.3 * rng.standard_normal((inputs, 4))
    chance = np.eye(4)[labels] * (1 - 0.7 * hard[:, None]) + 0.7 * hard[:, None] / 4
    counts = np.array([rng.multinomial(50, p / p.sum()) for p in chance])
    return features, counts, labels


def test_the_head_is_ridge_on_one_vote_an_image():
    features, counts, labels = made_up()
    study = LastLayerStudy(features, counts, labels, [50, 200], lam=0.1, test=300, seeds=[3])
    first, last = study.run()
    rng = np.random.default_rng(3)
    order = rng.permutation(600)
    test, train = order[:300], order[300:500]
    shares = counts / counts.sum(1, keepdims=True)
    drawn = np.array(
        [np.searchsorted(p.cumsum(), u, "left") for p, u in zip(shares[train], rng.random((200, 1))[:, 0])]
    )
    X = np.hstack([features / features.std(), np.ones((600, 1))])
    theta = np.linalg.solve(X[train].T @ X[train] / 200 + 0.1 * np.eye(5), X[train].T @ np.eye(4)[drawn] / 200)
    found = X[test] @ theta
    assert last.gen_error == pytest.approx(((found - shares[test]) ** 2).sum(1).mean(), rel=1e-6)
    assert last.accuracy == pytest.approx((found.argmax(1) == labels[test]).mean())
    assert last.curve.successes.tolist() == counts[test, found.argmax(1)].tolist()
    assert last.gen_error < first.gen_error
    again = LastLayerStudy(features, counts, labels, [200], lam=0.1, test=300, seeds=[3, 4]).run()
    assert [(one.seed, one.N) for one in again] == [(3, 200), (4, 200)]
    assert again[0].gen_error == pytest.approx(last.gen_error)
    assert again[1].gen_error != again[0].gen_error


def test_a_tuned_ridge_and_a_logistic_head_learn_too():
    features, counts, labels = made_up()
    tuned = LastLayerStudy(features, counts, labels, [200], lam="tuned", test=300).run()[0]
    fixed = LastLayerStudy(features, counts, labels, [200], lam=3.0, test=300).run()[0]
    assert tuned.lam in LastLayerStudy.LAMS
    assert tuned.gen_error < fixed.gen_error
    logistic = LastLayerStudy(features, counts, labels, [200], head="logistic", lam=1e-3, test=300).run()[0]
    assert logistic.accuracy > 0.8


def test_rows_out_of_order_are_noticed():
    features, counts, labels = made_up(2000)
    assert check_rows(features, counts, labels) > 0.1
    shuffled = counts.copy()
    for c in range(4):
        these = np.flatnonzero(labels == c)
        shuffled[these] = counts[np.random.default_rng(c).permutation(these)]
    with pytest.raises(InputError, match="do not seem to be of the same inputs"):
        check_rows(features, shuffled, labels)


def test_tables_of_an_evaluation_are_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "n": 10 + i, "c": i}) for i in range(4)) + "\n\n")
    table = load_passk_jsonl(path)
    assert table.ids == ["0", "1", "2", "3"]
    assert table.curve().samples.tolist() == [10, 11, 12, 13]
    for line, sentence in (
        ("{", "line 1: an object"),
        ('{"id": 1, "n": 3}', "line 1: an object with id, n and c"),
        ('{"id": 1, "n": 3, "c": 4}', "row 0 has 4.0 successes among 3.0"),
        ('{"id": 1, "n": 3, "c": "x"}', "whole numbers"),
        ('{"id": 1, "n": 3, "c": 1.5}', "row 0 has 1.5 successes"),
        ("", "holds no problem"),
    ):
        path.write_text(line)
        with pytest.raises(InputError, match=sentence):
            load_passk_jsonl(path)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: PassAtK([1, 2], [2, 1]), "row 1 has 2 successes among 1"),
        (lambda: PassAtK([0], [0]), "has no sample"),
        (lambda: PassAtK([], []), "at least one"),
        (lambda: PassAtK([1], [2]).curve([3]), "k is 3, but 1 problems have fewer answers"),
        (lambda: PassAtK([1], [2]).curve([0]), "k is 0"),
        (lambda: PassAtK([1], [2]).curve([1], "guess"), "the estimator is 'guess'"),
        (lambda: PassAtK([1], [2], classes=1), "1 classes"),
        (lambda: PassAtK([1], [2]).bootstrap([1], draws=0), "0 resamples"),
        (lambda: PassAtK(votes=np.ones((2, 3), int), preds=np.array([0, 3])), "no class from 0 to 2"),
        (lambda: PassAtK([1]), "give one pair"),
        (lambda: PassAtK([1], [2], votes=np.ones((2, 3), int), preds=np.array([0, 1])), "give one pair"),
        (lambda: PassAtK.from_answers(np.ones((2, 3)), np.ones(2), 0.0), "delta is 0"),
        (lambda: fit_lid([1, 3], [5, 5], draws=0), "0 resamples"),
        (lambda: bootstrap_interval(np.mean, [1.0], [1.0, 2.0]), "a row an input"),
        (lambda: hill([0.0, 0.1, 0.2] * 50, 0.1), "a success rate is zero"),
        (lambda: hill([0.1], 0.5), "two at least"),
        (lambda: fit_lid([0, 0], [5, 5]), "every draw fails"),
        (lambda: window_grid((5, 2)), "the window of k"),
        (lambda: effective_exponent([1.0], [0.5]), "at least two k"),
        (lambda: effective_exponent([1.0, 2.0], [0.5, 0.0]), "failure of zero"),
        (lambda: SaturatingExponent().fit([1.0], [1.0]), "at least three"),
        (lambda: LastLayerStudy(*made_up(), ns=[10, 5]), "training sizes"),
        (lambda: LastLayerStudy(*made_up(), ns=[10], test=600), "training sizes"),
        (lambda: LastLayerStudy(*made_up(), ns=[10], head="tree", test=10), "the head is 'tree'"),
        (lambda: LastLayerStudy(*made_up(), ns=[10], lam="best", test=10), "lam is 'best'"),
    ],
)
def test_bad_input_is_said(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
