"""The experiments behind the claims: the model simulated, its laws, the votes of CIFAR-10H, a language model's sums, budgets."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.optimize import curve_fit

from assay.bench import Exact, Trial, experiment, prepare
from assay.stats import spearman

from . import (
    FailureTable,
    LastLayerStudy,
    LIDModel,
    PassAtK,
    SaturatingExponent,
    allocate,
    beta_eff,
    check_rows,
    effective_exponent,
    fit_two_tail,
    intrinsic_constant,
    pass_at_k_failure,
    rule_of_thumb,
    window_grid,
)

D = 50
DELTA = 0.5  # over sigma, in the simulation
WINDOW = (1e2, 1e4)


# The model, simulated ---------------------------------------------------------------------------------------------


@experiment(
    arms=("exact", "sampled"),
    measures=("slope",),
    curves=("gen_error",),
    settings={"beta": (2.5, 3.5)},
    together=("arm",),
    seeds=60,
)
def one_over_n(trial: Trial) -> dict[Any, dict[str, float]]:
    """Log-log slope of L_gen over N = 20 d .. 400 d: the mean over answers given the inputs, and one training set's own."""
    ns = [20 * D, 40 * D, 80 * D, 160 * D, 400 * D]
    model = LIDModel(D, trial["beta"], sigma=1e-3, alpha=1.0, seed=trial.seed)
    errors: dict[str, list[float]] = {"exact": [], "sampled": []}
    for N in ns:
        X, y, _ = model.sample(N)
        errors["exact"].append(model.noise_error(X))
        errors["sampled"].append(model.gen_error(model.fit_ridge(X, y)))
    found = {}
    for cell in trial.cells():
        for N, error in zip(ns, errors[cell.arm], strict=True):
            trial.log(N, cell=cell, gen_error=error)  # type: ignore[arg-type]
        found[cell] = {"slope": -effective_exponent(ns, errors[cell.arm])}
    return found


@experiment(
    arms=("noisy", "noisy-tuned", "quiet"),
    measures=("half", "at_d", "double"),
    settings={"beta": (2.5, 6.0)},
    seeds=20,
    quick=False,
)
def peak(trial: Trial) -> dict[str, float]:
    """L_gen at N = d/2, d and 2 d: isotropic with sigma 1, with a tuned ridge, and the paper's sigma = 1e-3 with a falling spectrum."""
    quiet = trial.arm == "quiet"
    found = {}
    for name, N in (("half", D // 2), ("at_d", D), ("double", 2 * D)):
        model = LIDModel(D, trial["beta"], sigma=1e-3 if quiet else 1.0, alpha=1.0 if quiet else None, seed=trial.seed)
        X, y, _ = model.sample(N)
        lam = 1e-9
        if trial.arm == "noisy-tuned":
            held = model.sample(400)
            lams = [0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
            lam = min(lams, key=lambda one: float(np.median((held.X @ model.fit_ridge(X, y, one) - held.y) ** 2)))
        found[name] = model.gen_error(model.fit_ridge(X, y, lam))
    return found


@experiment(
    arms=("simulation",),
    measures=("beta_eff", "nu"),
    curves=("exponent",),
    settings={"beta": (2.5, 3.5)},
    seeds=20,
    quick={"seeds": 5},
)
def saturation(trial: Trial) -> dict[str, float]:
    """beta_eff over k from 100 to 10,000, by the exact integral at the v of a sampled student; the claim is on N = 20,000."""
    model = LIDModel(D, trial["beta"], sigma=1.0, alpha=1.0, seed=trial.seed)
    ns = (100, 250, 500, 1000, 2000, 5000, 20_000)
    exponents = []
    for N in ns:
        X, y, _ = model.sample(N)
        v = model.gen_error(model.fit_ridge(X, y))
        exponents.append(beta_eff(v, WINDOW, beta=trial["beta"], delta=DELTA, fast=True))
        trial.log(N, exponent=exponents[-1])
    curve = SaturatingExponent(beta=trial["beta"]).fit(np.array(ns), np.array(exponents))
    return {"beta_eff": exponents[-1], "nu": curve.nu_}


@experiment(
    arms=("exact",),
    measures=("ratio", "ratio_late"),
    settings={"beta": (1.5, 2.5, 4.0), "delta": (0.1, 0.5)},
    seeds=3,
)
def constant(trial: Trial) -> dict[str, Exact]:
    """L_inf over P k^-beta without bias, at k = 10,000 and a million."""
    beta, delta = trial["beta"], trial["delta"]
    ks = np.array([1e4, 1e6])
    ratio = pass_at_k_failure(ks, beta, delta) / (intrinsic_constant(beta, delta) * ks**-beta)
    return {"ratio": Exact(float(ratio[0])), "ratio_late": Exact(float(ratio[1]))}


# Which law the failures follow ------------------------------------------------------------------------------------


def slope_errors(vs: ndarray, beta: float, delta: float) -> tuple[dict[str, float], list[float]]:
    """Root mean square error of each law's slope over k = 1e5 .. 1e8, of what it knows from k = 1e2 .. 1e5; and the slopes."""
    early, late = np.geomspace(1e2, 1e5, 13), np.geomspace(1e5, 1e8, 13)
    known = np.array([pass_at_k_failure(early, beta, delta, float(v)) for v in vs])
    true = [effective_exponent(late, pass_at_k_failure(late, beta, delta, float(v))) for v in vs]
    joint = fit_two_tail(early, known, vs, beta, delta)
    said: dict[str, list[float]] = {"laplace": [], "two-tail": [], "two-tail-free": []}
    for i, v in enumerate(vs):
        said["laplace"].append(
            effective_exponent(late, pass_at_k_failure(late, beta, delta, float(v), method="laplace"))
        )
        said["two-tail"].append(
            effective_exponent(late, joint.curve(late, beta, delta, float(v), float(joint.prefactors[i])))
        )
        alone = fit_two_tail(early, known[i : i + 1], vs[i : i + 1], beta, delta)
        said["two-tail-free"].append(
            effective_exponent(late, alone.curve(late, beta, delta, float(v), float(alone.prefactors[0])))
        )
    errors = {name: float(np.sqrt(np.mean((np.array(s) - true) ** 2))) for name, s in said.items()}
    return errors, [float(x) for x in true]


@experiment(
    arms=("laplace", "two-tail", "two-tail-free"),
    measures=("rmse",),
    together=("arm",),
    seeds=3,
    quick=False,
)
def laws(trial: Trial) -> dict[Any, dict[str, Exact]]:
    """Error of the predicted slopes at v = 0.1, 0.3 and 1, against the exact integral (beta 2.5, delta 0.1)."""
    errors, _ = slope_errors(np.array([0.1, 0.3, 1.0]), 2.5, 0.1)
    return {cell: {"rmse": Exact(errors[cell.arm])} for cell in trial.cells()}


@experiment(
    arms=("laplace", "two-tail", "two-tail-free"),
    measures=("rmse",),
    together=("arm",),
    seeds=20,
    quick=False,
)
def laws_sampled(trial: Trial) -> dict[Any, dict[str, float]]:
    """The same at the v of students trained on 2,000, 700 and 250 inputs (sigma 1), where v is about 0.1, 0.3 and 1."""
    model = LIDModel(D, 2.5, sigma=1.0, alpha=1.0, seed=trial.seed)
    vs = []
    for N in (2000, 700, 250):
        X, y, _ = model.sample(N)
        vs.append(model.gen_error(model.fit_ridge(X, y)))
    errors, _ = slope_errors(np.sort(np.array(vs)), 2.5, 0.1)
    return {cell: {"rmse": errors[cell.arm]} for cell in trial.cells()}


@experiment(
    arms=("exact",),
    measures=("slope",),
    settings={"v": (0.1, 0.3, 1.0, 3.0)},
    seeds=3,
    quick=False,
)
def slopes(trial: Trial) -> dict[str, Exact]:
    """Slope of the exact integral over the decade around k = 6e7: how it depends on v."""
    ks = 6e7 * 10 ** np.linspace(-0.5, 0.5, 5)
    return {"slope": Exact(effective_exponent(ks, pass_at_k_failure(ks, 2.5, 0.1, trial["v"])))}


# Votes on images --------------------------------------------------------------------------------------------------


@experiment(
    arms=("fixed", "tuned"),
    measures=(
        "rise",
        "late",
        "excess",
        "rise_posterior",
        "excess_posterior",
        "order",
        "floor",
        "accuracy",
        "without_floor",
        "gen_power",
        "gen_limit",
    ),
    curves=("beta_eff", "gen_error"),
    inputs={"votes": "cifar10h"},
    settings={"test": 2000, "n_max": 8000},
    seeds=30,
    minutes=5,
    quick={"arms": ("fixed",)},
)
def votes(trial: Trial) -> dict[str, Any]:
    """A ridge head on frozen features and one vote an image: beta_eff over k = 1 .. 50 against the training size."""
    counts, labels, features = trial.input("votes")
    if trial.seed == 0:
        check_rows(features, counts, labels)
    ns = [n for n in (50, 100, 200, 300, 500, 1000, 2000, 4000, 8000) if n <= trial["n_max"]]
    lam = 1e-9 if trial.arm == "fixed" else "tuned"
    study = LastLayerStudy(features, counts, labels, ns, lam=lam, test=trial["test"], seeds=(trial.seed,))
    ks = window_grid((1, 50))
    found: dict[int, dict[str, float]] = {}
    last = None
    for result in study.run():
        raw = effective_exponent(ks, result.curve.curve(ks, "raw"))
        found[result.N] = {
            "raw": raw,
            "posterior": effective_exponent(ks, result.curve.curve(ks, "posterior")),
            "gen_error": result.gen_error,
        }
        trial.log(result.N, beta_eff=raw, gen_error=result.gen_error)
        last = result
    assert last is not None
    first, before, end = (300 if 300 in found else ns[0]), ns[-2], ns[-1]
    seen = last.curve.successes > 0
    without = PassAtK(last.curve.successes[seen], last.curve.samples[seen])
    beyond = [n for n in ns if n >= 1.5 * (features.shape[1] + 1)]

    def rise(estimator: str) -> tuple[float, float]:
        whole = found[end][estimator] - found[first][estimator]
        return whole, found[end][estimator] - found[before][estimator]

    # L_gen = floor + c (N - d - 1)^-p beyond the interpolation peak: p is 1 for least squares on Gaussian inputs.
    d = features.shape[1] + 1  # the intercept is a feature
    sizes = np.array([n for n in ns if n >= 2 * d], dtype=float)
    errors = np.array([found[int(n)]["gen_error"] for n in sizes])
    power = gen_limit = math.nan
    if len(sizes) > 3:
        (power, gen_limit, _), _ = curve_fit(
            lambda n, power, floor, scale: floor + scale * n**-power,
            (sizes - d - 1) / 500,
            errors,
            p0=(1.0, 0.9 * errors[-1], errors[0] - errors[-1]),
            maxfev=5000,
        )

    (whole, late), (whole_posterior, late_posterior) = rise("raw"), rise("posterior")
    return {
        "rise": whole,
        "late": late,
        "excess": late - 0.1 * whole,
        "rise_posterior": whole_posterior,
        "excess_posterior": late_posterior - 0.1 * whole_posterior,
        "order": float(
            spearman(
                np.array([found[n]["raw"] for n in beyond]), -np.log(np.array([found[n]["gen_error"] for n in beyond]))
            )
        ),
        "floor": last.curve.floor,
        "accuracy": last.accuracy,
        "without_floor": effective_exponent(window_grid((1, 20)), without.curve(window_grid((1, 20)), "raw")),
        "gen_power": float(power),
        "gen_limit": float(gen_limit),
    }


# A language model's sums ------------------------------------------------------------------------------------------

SHOTS = "55 - 65 = -10\n12 + 30 = 42\n81 - 20 + 11 = 72\n40 - 13 = 27\n"


def first_integer(text: str) -> float | None:
    """The answer: the first whole number before the line ends."""
    found = re.match(r"\s*(-?\d{1,9})\b", text.split("\n")[0])
    return float(found.group(1)) if found else None


@prepare(per=("model", "questions", "answers", "layer"), minutes=60, memory_gib=10)
def teacher(job: Trial) -> dict[str, float]:
    """Answers of a language model to sums, sampled at 0.8, and its hidden state behind each question."""
    import torch

    from assay.lm import hidden_at

    try:
        import reasoning_gym
    except ModuleNotFoundError:
        job.skip('the sums are those of reasoning-gym: pip install "assay[reasoning]"')
    model, tokenizer, _ = job.input("model")
    made = reasoning_gym.create_dataset(
        "chain_sum", size=job["questions"], seed=7, min_terms=2, max_terms=3, min_digits=2, max_digits=2
    )
    asked = [f"{SHOTS}{row['metadata']['expression']} =" for row in made]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked]
    features = np.zeros((len(ids), model.config.hidden_size))
    answers = np.full((len(ids), job["answers"]), np.nan)
    by_length: dict[int, list[int]] = {}
    for number, one in enumerate(ids):
        by_length.setdefault(len(one), []).append(number)
    batches = [rows[i : i + 8] for rows in by_length.values() for i in range(0, len(rows), 8)]
    generator = torch.Generator().manual_seed(11)
    with torch.inference_mode():
        for rows in job.progress(batches):
            prompt = torch.tensor([ids[i] for i in rows])
            features[rows] = hidden_at(model, job["layer"], input_ids=prompt)[:, -1].double().numpy()
            out = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
            cache = out.cache if hasattr(out, "cache") else out.past_key_values
            cache.batch_repeat_interleave(job["answers"])
            logits = out.logits[:, -1].repeat_interleave(job["answers"], 0)
            written = []
            for step in range(4):
                chosen = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
                written.append(chosen)
                if step < 3:
                    out = model(input_ids=chosen, cache=cache, use_cache=True)
                    logits = out.logits[:, -1]
            texts = tokenizer.batch_decode(torch.cat(written, 1))
            for place, text in enumerate(texts):
                value = first_integer(text)
                if value is not None:
                    answers[rows[place // job["answers"]], place % job["answers"]] = value
    truth = np.array([float(row["answer"]) for row in made])
    np.savez(job.folder / "sums.npz", features=features, answers=answers, truth=truth)
    right = answers == truth[:, None]
    return {
        "parsed": float(np.isfinite(answers).mean()),
        "right": float(right.mean()),
        "never_right": float((~right.any(1)).mean()),
    }


@experiment(
    arms=("fixed", "tuned"),
    measures=("order", "rise", "parsed"),
    curves=("beta_eff", "gen_error"),
    inputs={"model": "smollm2-135m-instruct"},
    settings={"questions": 1000, "answers": 24, "layer": 20, "components": 64, "test": 200},
    needs=(teacher,),
    seeds=30,
    quick=False,
)
def sums(trial: Trial) -> dict[str, Any]:
    """A ridge student of one sampled answer a question; a success is a fresh answer near the student's."""
    with np.load(trial.prepared(teacher) / "sums.npz") as kept:
        features, answers = kept["features"], kept["answers"]
    rng = np.random.default_rng(trial.seed)
    order = rng.permutation(len(features))
    test, train = order[: trial["test"]], order[trial["test"] :]
    z = np.sign(answers) * np.log1p(np.abs(answers))
    train = train[np.isfinite(z[train]).any(1)]
    centre = features[train].mean(0)
    _, _, vt = np.linalg.svd(features[train] - centre, full_matrices=False)
    X = (features - centre) @ vt[: trial["components"]].T
    X = np.hstack([X / X[train].std(), np.ones((len(X), 1))])
    weights = np.isfinite(z[train]) / np.isfinite(z[train]).sum(1, keepdims=True)
    picked = (rng.random((len(train), 1)) > weights.cumsum(1)).sum(1).clip(max=z.shape[1] - 1)
    y = z[train, picked]
    delta = 0.5 * float(np.median(np.nanstd(z[test], axis=1)))
    mean = np.nanmean(z[test], axis=1)
    usable = np.isfinite(mean)
    ns = [n for n in (20, 40, 100, 150, 200, 400, 800) if n <= len(train)]
    ks = window_grid((1, min(20, z.shape[1])))
    exponents, errors = [], []
    for N in ns:
        theta = _student(X[train[:N]], y[:N], trial.arm == "tuned")
        predicted = X[test] @ theta
        curve = PassAtK.from_answers(z[test], predicted, delta)  # an answer that cannot be read is no success
        exponents.append(effective_exponent(ks, curve.curve(ks, "unbiased")))
        errors.append(float(((predicted - mean)[usable] ** 2).mean()))
        trial.log(N, beta_eff=exponents[-1], gen_error=errors[-1])
    beyond = [i for i, n in enumerate(ns) if n >= 100]
    return {
        "order": float(spearman(np.array(exponents)[beyond], -np.log(np.array(errors)[beyond]))),
        "rise": exponents[-1] - exponents[beyond[0]],
        "parsed": Exact(trial.prepared(teacher).result["parsed"]),
    }


def _student(X: ndarray, y: ndarray, tuned: bool) -> ndarray:
    """Ridge at 1e-9, or at the best of seven by five folds."""

    def fit(X: ndarray, y: ndarray, lam: float) -> ndarray:
        u, s, vt = np.linalg.svd(X, full_matrices=False)
        found: ndarray = vt.T @ ((u.T @ y) * s / (s**2 + len(X) * lam))
        return found

    if not tuned:
        return fit(X, y, 1e-9)
    fold = np.arange(len(X)) % 5
    losses = {
        lam: sum(
            float(((X[fold == f] @ fit(X[fold != f], y[fold != f], lam) - y[fold == f]) ** 2).sum()) for f in range(5)
        )
        for lam in LastLayerStudy.LAMS
    }
    return fit(X, y, min(losses, key=lambda lam: losses[lam]))


# Budgets ----------------------------------------------------------------------------------------------------------

BUDGETS = (4.0, 4.5, 5.0, 5.5, 6.0, 6.5)
COSTS = (1.0, 10.0, 100.0)
NOISE = 4.0  # E[1/tau] at beta 2.5


def gen_error(N: float) -> float:
    """Exact mean of L_gen for least squares with d = 50 and sigma = 1."""
    return NOISE * D / (N - D - 1)


def best(table: FailureTable, log_c: float, c_infer: float, R: float) -> Any:
    """The optimum of one budget."""
    return allocate(10**log_c, 1.0, c_infer, R, gen_error, lambda k, N: float(table(k, gen_error(N))), n_min=D + 2.0)


@experiment(
    arms=("optimum",),
    measures=("share",),
    settings={"log_c": (4.0, 4.5, 5.0, 5.5, 6.0, 6.5), "c_infer": (1.0, 10.0, 100.0), "R": (0.0, 1.0)},
    together=("log_c", "c_infer", "R"),
    seeds=3,
    minutes=20,
    quick=False,
)
def budgets(trial: Trial) -> dict[Any, dict[str, Exact]]:
    """The share of the best split that goes to inference (beta 2.5, delta 0.5, d 50)."""
    table = FailureTable(2.5, 0.5, v=(1e-5, 1e3), k=1e7)
    found = {}
    for cell in trial.cells():
        split = best(table, float(cell["log_c"]), float(cell["c_infer"]), float(cell["R"]))
        found[cell] = {"share": Exact(split.k * float(cell["c_infer"]) / 10 ** float(cell["log_c"]))}
    return found


@experiment(
    arms=("rule", "rule-98", "rule-fixed-window"),
    measures=("median_excess",),
    settings={"R": (0.0, 1.0)},
    together=("arm",),
    seeds=3,
    minutes=30,
    quick=False,
)
def rules(trial: Trial) -> dict[Any, dict[str, Exact]]:
    """Median over 18 budgets and costs of what the rule of thumb loses against the optimum, as a share of its loss."""
    table = FailureTable(2.5, 0.5, v=(1e-5, 1e3), k=1e7)

    def exponent(N: float, window: tuple[float, float]) -> float:
        ks = np.geomspace(window[0], window[1], 12)
        return effective_exponent(ks, table(ks, gen_error(N)))

    options: dict[str, dict[str, Any]] = {
        "rule": {},
        "rule-98": {"share": 0.98},
        "rule-fixed-window": {"window": (1e2, 1e4)},
    }
    found = {}
    for cell in trial.cells():
        excess = []
        for log_c in BUDGETS:
            for c_infer in COSTS:
                split = best(table, log_c, c_infer, trial["R"])
                rule = rule_of_thumb(10**log_c, 1.0, c_infer, 2.5, exponent, n_min=D + 2.0, **options[cell.arm])
                loss = trial["R"] * gen_error(rule.N) + float(table(rule.k, gen_error(rule.N)))
                excess.append(loss / split.loss - 1)
        found[cell] = {"median_excess": Exact(float(np.median(excess)))}
    return found
