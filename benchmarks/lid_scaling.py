"""Latent instance difficulty: the integral against scipy's adaptive one and a simulation, and a head on CIFAR-10H-sized data.

``python -m benchmarks.lid_scaling docs/methods/lid-scaling-laws.svg`` draws the failure and its local slope by the exact
integral, the paper's law and ours.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from assay.methods.lid_scaling import LastLayerStudy, fit_two_tail, local_slope, pass_at_k_failure
from assay.methods.lid_scaling.reference import failure
from benchmarks._harness import Ratio, interleaved

BETA, DELTA, V = 2.5, 0.1, 1.0


def measure() -> list[Ratio]:
    """All ratios."""
    ks = np.geomspace(1, 1e8, 20)
    seconds = interleaved(
        {
            "quad": lambda: pass_at_k_failure(ks, BETA, DELTA, V),
            "fast": lambda: pass_at_k_failure(ks, BETA, DELTA, V, fast=True),
            "mc": lambda: pass_at_k_failure(ks, BETA, DELTA, V, method="mc"),
        },
        3,
    )
    begin = time.perf_counter()
    slow = np.array([failure(float(k), BETA, DELTA, V, 1e-8) for k in ks])
    adaptive = time.perf_counter() - begin
    fine = pass_at_k_failure(ks, BETA, DELTA, V)
    apart = float(np.abs(slow / fine - 1).max())
    coarse = float(np.abs(pass_at_k_failure(ks, BETA, DELTA, V, fast=True) / fine - 1).max())
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 10_000)
    features = rng.standard_normal((10_000, 192)) + 0.5 * np.eye(10, 192)[labels]
    counts = np.array([rng.multinomial(50, np.full(10, 0.02) + 0.8 * np.eye(10)[y]) for y in labels])
    sizes = [50, 100, 150, 200, 300, 500, 800, 1200, 2000, 3000, 5000, 8000]
    study = LastLayerStudy(features, counts, labels, sizes, seeds=range(10))
    begin = time.perf_counter()
    study.run()
    head = time.perf_counter() - begin
    return [
        Ratio("the integral, 20 k from 1 to 1e8", seconds["quad"], 0.3, "below", "s", "relative error below 1e-8"),
        Ratio("the same on the coarse grid", seconds["fast"], unit="s", note=f"relative error {coarse:.1e}"),
        Ratio("a simulation of a million draws", seconds["mc"], 2.0, "below", "s", "20 k"),
        Ratio(
            "scipy's dblquad / ours", adaptive / seconds["quad"], 100, "above", note=f"20 k; they agree to {apart:.0e}"
        ),
        Ratio(
            "a head for 12 training sizes and 10 seeds", head, 30, "below", "s", "10,000 x 192, one Gram matrix a seed"
        ),
    ]


def draw(path: Path) -> None:
    """Failure and local slope against k at three variances: exact, by the paper's law fitted up to 1e5, and by ours."""
    import matplotlib.pyplot as plt

    vs, ks = np.array([0.1, 0.3, 1.0]), np.geomspace(30, 1e8, 53)
    early = (ks >= 1e2) & (ks <= 1e5)
    exact = np.array([pass_at_k_failure(ks, BETA, DELTA, float(v)) for v in vs])
    fit = fit_two_tail(ks[early], exact[:, early], vs, BETA, DELTA)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    middle = np.sqrt(ks[1:] * ks[:-1])
    for i, v in enumerate(vs):
        curves = {
            "exact": (exact[i], "-", 2.0),
            "two power laws, fitted up to 1e5": (
                fit.curve(ks, BETA, DELTA, float(v), float(fit.prefactors[i])),
                ":",
                1.5,
            ),
            "ours, nothing fitted": (pass_at_k_failure(ks, BETA, DELTA, float(v), method="laplace"), "--", 1.2),
        }
        for name, (curve, style, width) in curves.items():
            left.plot(ks, curve, style, color=f"C{i}", linewidth=width, label=name if i == 0 else None)
            right.plot(
                middle,
                local_slope(ks, curve),
                style,
                color=f"C{i}",
                linewidth=width,
                label=f"v = {v:g}" if style == "-" else None,
            )
    right.axhline(BETA, color="0.7", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="draws, k", ylabel="failure", ylim=(1e-8, 2))
    right.set(xscale="log", xlabel="draws, k", ylabel="local slope", ylim=(0, 2.8))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
