"""`assay run lid-scaling`: counts of right answers in, the difficulty law, the curve and the split of a budget out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay._errors import InputError
from assay.bench._files import whole_file

if TYPE_CHECKING:
    from assay.methods.lid_scaling import Exponent, LIDFit, PassAtK

__all__ = ["fit"]


def fit(
    *,
    table: Path,
    out: Path,
    successes: str = "c",
    samples: str = "n",
    window: tuple[float, ...] = (),
    budget: float | None = None,
    train_cost: float = 1.0,
    sample_cost: float = 1.0,
    train_size: float | None = None,
    features: float | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> None:
    """Fit the difficulty of problems to counts of right answers, and say what more samples and more training would bring.

    Printed and saved: the failure of k samples with its interval, its exponent in a window, the exponent of the difficulty
    tail (with a test of the fit), and with --budget, --train-size and --features the best split. The folder gets report.json,
    curve.csv and curve.png.

    Parameters
    ----------
    table : PATH
        A problem a row (CSV, Parquet), or a line of a JSONL file: answers that were sampled, and how many were right.
    out : PATH
        The folder for the results.
    successes, samples
        Columns of right answers and of all answers.
    window
        First and last k of the exponent; by default 1 and the fewest samples of a problem.
    budget
        What can be spent, in the unit of the costs.
    train_cost, sample_cost
        Of one training example, and of one sampled answer a problem.
    train_size
        Training examples that the model has seen.
    features
        Its effective number of parameters: its error is taken to fall as 1 / (N - features).
    bootstrap
        Resamples of the problems for the intervals.
    seed
        Of the resampling.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: --out names a folder for the results")
    if window and len(window) != 2:
        raise InputError(f"--window has {len(window)} numbers: give the first and the last k, as 1,20")
    if budget is not None and (train_size is None or features is None):
        raise InputError("--budget needs --train-size and --features, which say how the error falls with more training")
    from assay.methods.lid_scaling import PassAtK, fit_lid, window_grid

    a, n = _counts(table, successes, samples)
    curve = PassAtK(a, n)
    fewest = int(n.min())
    chosen = (float(window[0]), float(window[1])) if window else (1.0, float(max(fewest, 2)))
    estimator = "unbiased" if chosen[1] <= fewest else "posterior"
    ks = window_grid((1.0, float(max(chosen[1], fewest, 2))), 30)
    ks = ks[ks <= fewest] if estimator == "unbiased" else ks
    values, (low, high) = curve.curve(ks, estimator), curve.bootstrap(ks, estimator, draws=bootstrap, seed=seed)
    seen = values[ks <= chosen[1]]
    exponent = curve.beta_eff(chosen, estimator, draws=bootstrap, seed=seed) if seen.min() > 0 else None
    law = fit_lid(a, n, draws=bootstrap, seed=seed) if 0 < a.sum() < n.sum() else None
    print(f"{len(a)} problems, {int(n.sum()):,} answers, {a.sum() / n.sum():.1%} right; {curve.floor:.1%} never right")
    said = [k for k in (1, 2, 5, 10, 20, 50, 100) if k <= ks[-1]]
    ends = curve.bootstrap(said, estimator, draws=bootstrap, seed=seed)
    for k, value, least, most in zip(said, curve.curve(said, estimator), *ends, strict=True):
        print(f"  pass@{k:<4} {1 - value:.3f}  ({1 - most:.3f} to {1 - least:.3f})")
    if exponent is None:
        print(
            f"no problem is left over at {int(ks[values <= 0][0])} samples: the failure has no exponent in this window"
        )
    else:
        print(
            f"failure falls as k^-{exponent.value:.3f} ({exponent.low:.3f} to {exponent.high:.3f}) over k from {chosen[0]:g} "
            f"to {chosen[1]:g}; the counts tell of k up to {exponent.supported}"
        )
    if law is None:
        print("every answer is right, or none: nothing tells how hard the problems are")
    else:
        print(
            f"difficulty: beta {law.beta:.2f} ({law.beta_interval[0]:.2f} to {law.beta_interval[1]:.2f}), tolerance "
            f"{law.delta:.3f} ({law.delta_interval[0]:.3f} to {law.delta_interval[1]:.3f}); test of the fit: p = {law.p_value:.3g}"
        )
        if law.p_value < 0.01:
            print("the model does not describe these counts: do not extrapolate by it")
    split = None
    if budget is not None:
        split = _split(budget, train_cost, sample_cost, float(train_size or 0), float(features or 0), a, n)
    report: dict[str, Any] = {
        "problems": len(a),
        "floor": curve.floor,
        "estimator": estimator,
        "exponent": None if exponent is None else exponent._asdict(),
        "law": None if law is None else law._asdict(),
        "split": split,
    }
    with whole_file(out / "report.json") as path:
        path.write_text(json.dumps(report, indent=1, default=float) + "\n", encoding="utf-8")
    with whole_file(out / "curve.csv") as path:
        rows = [
            f"{int(k)},{float(v)!r},{float(lo)!r},{float(hi)!r}"
            for k, v, lo, hi in zip(ks, values, low, high, strict=True)
        ]
        path.write_text("\n".join(["k,failure,low,high", *rows]) + "\n", encoding="utf-8")
    _plot(out / "curve.png", ks, values, low, high, curve, exponent, law)
    print(f"saved: {out}")


def _counts(table: Path, successes: str, samples: str) -> tuple[Any, Any]:
    import numpy as np

    from assay.methods.lid_scaling import load_passk_jsonl

    if table.suffix == ".jsonl" and (successes, samples) == ("c", "n"):
        held = load_passk_jsonl(table)
        return held.c, held.n
    from assay.data import read_table

    frame = read_table(table)
    for column in (successes, samples):
        if column not in frame:
            raise InputError(f"{table} has no column {column!r}: it has {', '.join(map(str, frame.columns[:10]))}")
    try:
        return frame[successes].to_numpy(dtype=np.float64), frame[samples].to_numpy(dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{table}: {successes} and {samples} are counts ({error})") from error


def _split(
    budget: float, train_cost: float, sample_cost: float, train_size: float, features: float, a: Any, n: Any
) -> dict[str, Any]:
    """The best split of a budget: the bias that the counts show now, shrinking as one over the training size."""
    from assay.methods.lid_scaling import FailureTable, allocate, fit_lid

    if not 0 < a.sum() < n.sum():
        raise InputError("every answer is right, or none: there is no law to split a budget by; give other problems")
    if not 1 <= features < train_size:
        raise InputError(
            f"--features is {features:g} and --train-size {train_size:g}: more examples than features are needed"
        )
    law = fit_lid(a, n, with_bias=True)
    table = FailureTable(law.beta, law.delta, v=(1e-6, 1e3), k=max(budget / sample_cost, 10.0))

    def failure(k: float, N: float) -> float:
        return float(table(k, max(law.v * (train_size - features) / (N - features), 1e-6)))

    found = allocate(budget, train_cost, sample_cost, 0.0, lambda N: 0.0, failure, n_min=features + 1)
    left = (budget - train_size * train_cost) / sample_cost
    now = failure(left, train_size) if left >= 1 else math.nan
    print(
        f"a budget of {budget:g}: {found.N_whole:,} training examples and {found.k_whole:,} samples a problem "
        f"({found.regime}); expected failure {found.loss_whole:.3g}"
        + (f", {now:.3g} with the training as it is" if math.isfinite(now) else "")
    )
    if law.p_value < 0.01:
        print(
            f"the law behind this split does not describe these counts (p = {law.p_value:.3g}): take it for no more than a hint"
        )
    return {**found._asdict(), "failure_as_it_is": now if math.isfinite(now) else None, "law": law._asdict()}


def _plot(
    path: Path, ks: Any, values: Any, low: Any, high: Any, curve: PassAtK, exponent: Exponent | None, law: LIDFit | None
) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    from assay.methods.lid_scaling import pass_at_k_failure

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.fill_between(ks, low, high, alpha=0.25, linewidth=0, color="C0")
    axes.plot(ks, values, "o-", markersize=3, color="C0", label="counted")
    if law is not None:
        more = np.geomspace(1, 10 * float(ks[-1]), 40)
        fitted = pass_at_k_failure(more, law.beta, law.delta, law.v, fast=True)
        axes.plot(more, fitted, "--", color="C1", label=f"the model, beta {law.beta:.2f}")
    if curve.floor:
        axes.axhline(curve.floor, color="0.6", linewidth=0.8, label="share never right")
    axes.set(xscale="log", yscale="log", xlabel="samples a problem, k", ylabel="share of problems that fail")
    if exponent is not None:
        first, last = exponent.window
        axes.set_title(f"failure ~ k^-{exponent.value:.2f} over k from {first:g} to {last:g}", fontsize=10)
    axes.legend(frameon=False)
    with whole_file(path) as target:
        figure.savefig(target, dpi=150, format="png")
    plt.close(figure)
