"""Speed of uncertain imputation: thresholds against their loops, and what an interval adds to a prediction."""

from __future__ import annotations

import time

import numpy as np

from ._harness import Ratio, interleaved


def measure() -> list[Ratio]:
    """The ratios of the specification."""

    from assay.methods.uncertain_imputation import NaiveConformal, pcp_threshold, weighted_threshold
    from assay.methods.uncertain_imputation.reference import weighted_threshold_numpy_loop

    rng = np.random.default_rng(0)
    n, level, beta = 5_000, 0.9, 0.005
    corrupted = rng.random(n) < 0.2
    weights = 1 / rng.uniform(0.05, 1, n)
    scores = rng.standard_normal(n)[~corrupted]
    stars = 1 / rng.uniform(0.05, 1, n)
    clean = weights[~corrupted]

    def loop() -> float:
        """PCP by its definition: one weighted quantile, with its own sort, for every calibration point."""
        each = np.sort(weighted_threshold_numpy_loop(scores, clean, weights, level + beta))
        return float(each[int(np.ceil((1 - beta) * (n + 1))) - 1])

    assert loop() == pcp_threshold(scores, weights, corrupted, level, beta)
    slow_stars = weighted_threshold_numpy_loop(scores, clean, stars, level)
    np.testing.assert_array_equal(slow_stars, weighted_threshold(scores, clean, stars, level))
    fast = interleaved(
        {
            "pcp": lambda: pcp_threshold(scores, weights, corrupted, level, beta),
            "wcp": lambda: weighted_threshold(scores, clean, stars, level),
        },
        rounds=20,
    )
    slow = interleaved(
        {
            "pcp": loop,
            "wcp": lambda: weighted_threshold_numpy_loop(scores, clean, stars, level),
        },
        rounds=3,
        warmup=1,
    )

    big = 1_000_000
    lost = rng.random(big) < 0.2
    big_weights, big_scores = 1 / rng.uniform(0.05, 1, big), rng.standard_normal(int((~lost).sum()))
    start = time.perf_counter()
    pcp_threshold(big_scores, big_weights, lost, level, beta)
    seconds = time.perf_counter() - start

    X = rng.standard_normal((12_000, 16))
    y = X[:, 0] + rng.standard_normal(12_000)
    method = NaiveConformal(random_state=0).fit_conformalize(X[:2_000], y[:2_000])
    model = method._models[""]
    new = X[2_000:]
    curves = [model.lower[0], model.upper[0], model.median]

    def alone() -> None:
        for curve in curves:
            curve.predict(new)

    predicted = interleaved({"interval": lambda: method.predict_interval(new), "estimator": alone}, rounds=20)
    return [
        Ratio(
            "PCP, loop over calibration points / one sort", slow["pcp"] / fast["pcp"], 50, "above", note=f"n = {n:,}"
        ),
        Ratio(
            "weighted, loop over test points / one sort",
            slow["wcp"] / fast["wcp"],
            50,
            "above",
            note=f"{n:,} points each",
        ),
        Ratio("PCP threshold of a million rows", seconds, 5, "below", unit="s", note="one core"),
        Ratio(
            "predict_interval / the estimator's three predictions",
            predicted["interval"] / predicted["estimator"],
            1.05,
            "below",
            note="10,000 rows, 16 features, gradient boosting",
        ),
    ]
