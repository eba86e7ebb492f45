"""The experiments behind the claims: a byte-level LLaMA trained by RACS, Alice and their rivals, each equally tuned."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from assay.bench import Cases, Count, Exact, Trial, experiment, prepare
from assay.lm._bytes import byte_tokens

from . import RACS, Alice, AliceZero, build_param_groups, empirical_fisher, fit_structure, llama_config, memory_report
from . import state_elements as elements_of
from ._training import loss_of, random_windows, spaced_windows, training, window_losses

LENGTH = 128
RANK, LEADING, INTERVAL = 16, 5, 25
TUNING_SEED = 100  # not one of the study's
QUICK_REST = 0.008
QUICK_RATE = {"adam": 0.002, "racs": 0.04, "alice": 0.04}

# The grid of each rule's matrix rate; it is extended outwards while the best is at an edge, at most twice.
ADAM_GRID = (0.001, 0.002, 0.004)
REST_GRID = (0.004, 0.008, 0.016)
GRIDS = {
    "adam": ADAM_GRID,
    "adam-one-rate": (0.001, 0.002, 0.004, 0.008, 0.016),
    "muon": (0.01, 0.02, 0.04),
    "racs": (0.02, 0.04, 0.08),
    "alice": (0.02, 0.04, 0.08),
    "alice-zero": (0.02, 0.04, 0.08),
    "galore": (0.02, 0.04, 0.08),
    "fira": (0.02, 0.04, 0.08),
    "apollo-mini": (0.02, 0.04, 0.08),
    "apollo-svd": (0.02, 0.04, 0.08),
}
# Arms that are variants of a rule use its rate.
RULE = {
    "alice-fewer-steps": "alice",
    "alice-no-compensation": "alice",
    "alice-no-switch": "alice",
    "alice-tracking-only": "alice",
    "racs-no-average": "racs",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "alice-no-compensation": {"compensation": "none"},
    "alice-no-switch": {"switch": "none"},
    "alice-tracking-only": {"switch": "none", "compensation": "none"},
    "racs-no-average": {"beta": 0.0},
}
PEERS = {"galore": "galore_torch", "fira": "fira", "apollo-mini": "apollo_torch", "apollo-svd": "apollo_torch"}


# ------------------------------------------------------------------ test bed


def new_model(job: Trial, seed: int) -> nn.Module:
    """The input's configuration with weights drawn by the seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.path("model")), dtype=torch.float32)


@prepare(per=("corpus", "model"))
def tokens(job: Trial) -> dict[str, Any]:
    """The corpus, split by document, as tokens: bytes for the byte model, else those of the model's own tokenizer."""
    from assay.data import split

    sizes = {}
    for part, documents in split(job.input("corpus")).items():
        texts = [document.text for document in documents]
        if job["model"] == "byte-llama":
            ids = byte_tokens(texts)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(job.path("model"), local_files_only=True)
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
            ids = np.fromiter(itertools.chain.from_iterable([*e, *end] for e in encoded), np.int32)
        np.save(job.folder / f"{part}.npy", ids)
        sizes[part] = len(ids)
    return sizes


def part_of(job: Trial, part: str) -> np.ndarray:
    """The tokens of a part of the corpus, mapped from disk."""
    return np.load(job.prepared(tokens) / f"{part}.npy", mmap_mode="r")


def optimizers_of(arm: str, model: nn.Module, rate: float, rest: float, seed: int) -> list[Optimizer]:
    """An arm: its rule on the matrices at ``rate``, Adam on the rest at ``rest``. The same groups for all."""
    matrices, others = build_param_groups(model, "alice", lr=rate, adam_lr=rest)
    adam = {"params": others["params"], "lr": rest, "betas": (0.9, 0.999), "eps": 1e-8}
    rule = RULE.get(arm, arm)
    if rule == "racs":
        return [RACS([matrices, others], **VARIANTS.get(arm, {}))]
    if rule in ("alice", "alice-zero"):
        make: Callable[..., Optimizer] = Alice if rule == "alice" else AliceZero
        settings = {"rank": RANK, "leading": LEADING, "interval": INTERVAL, "seed": seed}
        return [make([matrices, others], **settings, **VARIANTS.get(arm, {}))]
    if rule == "adam":
        return [torch.optim.Adam([{"params": matrices["params"], "lr": rate}, adam], betas=(0.9, 0.999), eps=1e-8)]
    if rule == "adam-one-rate":
        return [torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.999), eps=1e-8)]
    if rule == "muon":
        return [torch.optim.Muon(matrices["params"], lr=rate, weight_decay=0.0), torch.optim.Adam([adam])]
    peer: dict[str, Any] = {"params": matrices["params"], "lr": rate, "update_proj_gap": INTERVAL, "proj_type": "std"}
    # Their eps is 1e-6 on raw gradients, which damps small ones.
    common: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.999), "eps": 1e-8, "no_deprecation_warning": True}
    if rule == "galore":
        from galore_torch import GaLoreAdamW

        return [GaLoreAdamW([{**peer, "rank": RANK, "scale": 0.3}, adam], **common)]
    if rule == "fira":
        from fira import FiraAdamW

        return [FiraAdamW([{**peer, "rank": RANK, "alpha": 0.3}, adam], **common)]
    from apollo_torch import APOLLOAdamW

    if rule == "apollo-mini":
        special = {"rank": 1, "proj": "random", "scale_type": "tensor", "scale": 128}
    else:
        special = {"rank": RANK, "proj": "svd", "scale_type": "channel", "scale": 1}
    return [APOLLOAdamW([{**peer, **special}, adam], **common)]


def trained(
    job: Trial, arm: str, rate: float, rest: float, seed: int, *, steps: int, watched: bool = False
) -> nn.Module:
    """A model of this seed, trained by an arm; a watched one has a validation curve and a bar."""
    model = new_model(job, seed)
    validation = spaced_windows(part_of(job, "validation"), 64, LENGTH)
    optimizers = optimizers_of(arm, model, rate, rest, seed)
    text = part_of(job, "train")
    done = training(model, optimizers, text, steps=steps, batch=int(job["batch"]), length=LENGTH, seed=seed)
    if not watched:
        for _ in done:
            pass
        return model
    every = max(1, int(job["steps"]) // 10)
    for _, step in zip(job.progress(steps), done, strict=False):
        if step % every == 0 or step == steps:
            job.log(step, validation=float(window_losses(model, validation).mean()))
    return model


# -------------------------------------------------------------------- tuning


@prepare(
    per=("corpus", "model", "steps", "batch"),
    settings={"matrix_rate": ADAM_GRID, "rest_rate": REST_GRID},
    needs=(tokens,),
)
def rest_run(job: Trial) -> dict[str, float]:
    """Adam with one pair of rates, on the seed of tuning; not at the quick scale, where the rates are fixed."""
    if job.scale == "quick":
        return {}
    rate, rest = float(job["matrix_rate"]), float(job["rest_rate"])
    return {"validation": tuning_loss(job, "adam", rate, rest)}


def tuning_loss(job: Trial, arm: str, rate: float, rest: float) -> float:
    """Validation loss at the end of a run on the seed of tuning; infinite where it diverged."""
    model = trained(job, arm, rate, rest, TUNING_SEED, steps=int(job["steps"]))
    loss = float(window_losses(model, spaced_windows(part_of(job, "validation"), 64, LENGTH)).mean())
    return loss if np.isfinite(loss) else float("inf")


@prepare(
    per=("corpus", "model", "steps", "batch"),
    settings={"rule": ("adam", "racs", "alice", "galore")},
    needs=(tokens, rest_run),
    minutes=60,
)
def tuned(job: Trial) -> dict[str, Any]:
    """The rates of the four rules that are compared first."""
    return tuned_rule(job)


@prepare(
    per=("corpus", "model", "steps", "batch"),
    settings={"rule": ("adam-one-rate", "muon", "fira", "apollo-mini", "apollo-svd", "alice-zero")},
    needs=(tokens, rest_run),
    minutes=60,
)
def tuned_more(job: Trial) -> dict[str, Any]:
    """The rates of the other rules."""
    return tuned_rule(job)


def tuned_rule(job: Trial) -> dict[str, Any]:
    """The matrix rate of a rule: its grid, extended outwards by factors of 2 while the best is at an edge, at most twice."""
    rule = job["rule"]
    if job.scale == "quick":
        return {"rate": QUICK_RATE.get(rule), "rest": QUICK_REST}
    if lacking := missing_peer(rule):
        return {"lacking": lacking}
    pairs = {
        (a, b): job.prepared(rest_run, matrix_rate=a, rest_rate=b).result["validation"]
        for a in ADAM_GRID
        for b in REST_GRID
    }
    rest = min(pairs, key=lambda pair: pairs[pair])[1]
    known = {a: loss for (a, b), loss in pairs.items() if b == rest} if rule == "adam" else {}
    losses = searched(GRIDS[rule], lambda rate: known[rate] if rate in known else tuning_loss(job, rule, rate, rest))
    rate = min(losses, key=lambda r: losses[r])
    return {
        "rate": rate,
        "rest": rest,
        "losses": {f"{r:g}": losses[r] for r in sorted(losses)},
        "pairs": {f"{a:g}/{b:g}": loss for (a, b), loss in pairs.items()},
    }


def searched(grid: Iterable[float], loss: Callable[[float], float]) -> dict[float, float]:
    """The losses of a grid, and of up to two rates outside while the best lies at an edge."""
    losses = {rate: loss(rate) for rate in grid}
    for _ in range(2):
        best = min(losses, key=lambda rate: losses[rate])
        if best == max(losses):
            losses[2 * best] = loss(2 * best)
        elif best == min(losses):
            losses[best / 2] = loss(best / 2)
        else:
            break
    return losses


def missing_peer(rule: str) -> str | None:
    """The package that an arm needs and that is not installed."""
    needed = PEERS.get(rule)
    if needed is None:
        return None
    # galore-torch and apollo-torch import bitsandbytes without declaring it.
    return next((name for name in (needed, "bitsandbytes") if find_spec(name) is None), None)


def rates(trial: Trial) -> tuple[float, float]:
    """The tuned rates of a trial's arm; the trial is left out where its peer is not installed."""
    rule = RULE.get(trial.arm, trial.arm)
    where = tuned if rule in ("adam", "racs", "alice", "galore") else tuned_more
    found = trial.prepared(where, rule=rule).result
    if lacking := missing_peer(rule) or found.get("lacking"):
        trial.skip(f'the package {lacking} is not installed: pip install "assay[peers]"')
    return float(found["rate"]), float(found["rest"])


def finished(trial: Trial) -> dict[str, Any]:
    """One run of an arm: its test loss, window by window."""
    rate, rest = rates(trial)
    steps = int(trial["steps"])
    if trial.arm == "alice-fewer-steps":
        steps = steps * 2 // 3
    started = time.process_time()
    model = trained(trial, trial.arm, rate, rest, trial.seed, steps=steps, watched=True)
    return {
        "nll": Cases(window_losses(model, spaced_windows(part_of(trial, "test"), 256, LENGTH))),
        "rate": Exact(rate),
        "rest_rate": Exact(rest),
        "cpu_seconds": time.process_time() - started,
    }


# --------------------------------------------------------------- experiments


@experiment(
    arms=("adam", "racs", "alice", "galore", "alice-fewer-steps"),
    measures=("nll", "rate", "rest_rate", "cpu_seconds"),
    curves=("validation",),
    inputs={"corpus": "english", "model": "byte-llama"},
    settings={"steps": 150, "batch": 32},
    needs=(tokens, tuned),
    seeds=6,
    quick={"arms": ("adam", "racs", "alice"), "corpus": "shakespeare", "steps": 120, "batch": 8, "seeds": 3},
)
def pretrain(trial: Trial) -> dict[str, Any]:
    """A small LLaMA over bytes, trained from scratch; the test loss in nats a byte. Adam with a rate of its own for the matrices."""
    return finished(trial)


@experiment(
    arms=(
        "racs",
        "alice",
        "adam-one-rate",
        "muon",
        "fira",
        "apollo-mini",
        "apollo-svd",
        "alice-zero",
        "alice-no-compensation",
        "alice-no-switch",
        "alice-tracking-only",
        "racs-no-average",
    ),
    measures=("nll", "rate", "rest_rate", "cpu_seconds"),
    curves=("validation",),
    inputs={"corpus": "english", "model": "byte-llama"},
    settings={"steps": 150, "batch": 32},
    needs=(tokens, tuned, tuned_more),
    seeds=3,
    quick=False,
)
def rivals(trial: Trial) -> dict[str, Any]:
    """The same training: more rivals, and RACS and Alice without one of their parts, at the rate of the whole."""
    return finished(trial)


@experiment(
    arms=("adam", "racs", "alice"),
    measures=("step_seconds", "step_seconds_p90"),
    inputs={"corpus": "english", "model": "byte-llama"},
    settings={"batch": 32, "timed_steps": 50},
    needs=(tokens,),
    together=("arm",),
    alone=True,
    seeds=3,
    quick=False,
)
def step_time(trial: Trial) -> dict[Any, Any]:
    """A whole training step: the arms take turns in one process; the median, basis updates included."""
    text = part_of(trial, "train")
    models, optimizers = {}, {}
    for cell in trial.cells():
        models[cell] = new_model(trial, trial.seed)
        optimizers[cell] = optimizers_of(cell.arm, models[cell], 1e-3, 1e-3, trial.seed)
    seconds: dict[Any, list[float]] = {cell: [] for cell in models}
    for step in trial.progress(int(trial["timed_steps"]) + 2):
        windows = random_windows(text, int(trial["batch"]), LENGTH, (trial.seed, step, 0))
        order = list(models)
        for cell in order[step % len(order) :] + order[: step % len(order)]:
            start = time.perf_counter()
            for optimizer in optimizers[cell]:
                optimizer.zero_grad()
            loss_of(models[cell], windows).backward()
            for optimizer in optimizers[cell]:
                optimizer.step()
            if step >= 2:  # the first makes states and bases
                seconds[cell].append(time.perf_counter() - start)
    return {
        cell: {
            "step_seconds": statistics.median(each),
            "step_seconds_p90": float(np.quantile(each, 0.9)),
        }
        for cell, each in seconds.items()
    }


@experiment(
    arms=("racs", "alice"),
    measures=("elements", "formula", "share_of_adam"),
    inputs={"model": "byte-llama"},
    together=("arm",),
    seeds=3,
)
def state_size(trial: Trial) -> dict[Any, Any]:
    """How many numbers the optimizer keeps for the matrices of the test bed, after a step."""
    return {cell: counted(new_model(trial, trial.seed), cell.arm, trial.seed) for cell in trial.cells()}


def counted(model: nn.Module, arm: str, seed: int) -> dict[str, Exact]:
    """The numbers an arm keeps after a step on random gradients, and what the paper's table says."""
    (optimizer,) = optimizers_of(arm, model, 1e-3, 1e-3, seed)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    group = optimizer.param_groups[0]
    kept = elements_of(optimizer)
    formula = adam = 0
    for p in group["params"]:
        m, n = sorted(p.shape)
        r = min(RANK, m)
        formula += m + n + 1 if arm == "racs" else 2 * n * r + m * r + n + r * r + 1
        adam += 2 * m * n
    elements = sum(kept[name] for name in group["param_names"])
    return {"elements": Exact(elements), "formula": Exact(formula), "share_of_adam": Exact(elements / adam)}


@experiment(
    arms=("adam", "galore", "racs", "alice", "sgd"),
    measures=("gigabytes",),
    settings={"size": ("60m", "130m", "350m", "1.3b")},
    together=("arm", "size"),
    seeds=3,
)
def memory(trial: Trial) -> dict[Any, Any]:
    """Weights and states of the paper's LLaMAs in bfloat16, all linear layers under the method; counted, nothing is allocated. GiB."""
    from transformers import LlamaForCausalLM

    from ._configs import ALICE

    models = {}
    measures = {}
    for cell in trial.cells():
        size = str(cell["size"])
        if size not in models:
            with torch.device("meta"):
                models[size] = LlamaForCausalLM(llama_config(size))  # type: ignore[arg-type]
        model, rank = models[size], ALICE[size]["rank"]
        if cell.arm == "sgd":  # no state for the matrices, Adam's for the rest
            matrices, others = build_param_groups(model, "racs")
            weights, rest = (sum(p.numel() for p in group["params"]) for group in (matrices, others))
            bytes_ = 2 * (weights + 3 * rest)
        else:
            head: Any = "adam" if cell.arm == "racs" else "method"  # as the paper's Table 3
            bytes_ = memory_report(model, cell.arm, torch.bfloat16, rank=rank, last_layer=head)  # type: ignore[arg-type]
        measures[cell] = {"gigabytes": Exact(bytes_ / 2**30)}
    return measures


@experiment(
    arms=("diagonal", "kronecker", "whitening", "column", "row-column", "eigen", "soap"),
    measures=("implied", "not_improved"),
    together=("arm",),
    seeds=3,
)
def framework(trial: Trial) -> dict[Any, Any]:
    """Fits to a Fisher matrix of 64 sampled gradients (3 x 4): the update each implies, and 500 neighbours in its family."""
    return {cell: fitted(cell.arm, trial.seed) for cell in trial.cells()}


def fitted(structure: str, seed: int) -> dict[str, Any]:
    """For how many gradients the update is the natural one to 1e-8, and how many neighbours do not fit better."""
    m, n = 3, 4
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    samples = normal(m, m) @ ((0.2 + torch.rand(m, n, generator=generator, dtype=torch.float64)) * normal(64, m, n))
    F = empirical_fisher(samples)
    fit = fit_structure(samples, structure)  # type: ignore[arg-type]
    values, vectors = torch.linalg.eigh(fit.matrix())
    agree = 0
    for _ in range(300):
        G = normal(m, n)
        natural = (vectors @ (vectors.mT @ G.mT.reshape(-1) * values.rsqrt())).reshape(n, m).mT
        agree += bool((fit.update(G) - natural).abs().max() <= 1e-8 * natural.abs().max())
    implied = Count(agree, 300)
    if structure == "kronecker":  # Shampoo minimises a bound, not the distance
        return {"implied": implied}
    best = float(fit.objective(F))
    worse = sum(float((neighbour(structure, fit.factors, normal) - F).square().sum()) >= best for _ in range(500))
    return {"implied": implied, "not_improved": Count(worse, 500)}


def neighbour(structure: str, factors: Mapping[str, torch.Tensor], normal: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A matrix of the same family, a twentieth away. A basis found in one pass stays as it is."""

    def near(x: torch.Tensor) -> torch.Tensor:
        return x + 0.05 * x.abs().mean() * normal(*x.shape)

    if structure == "diagonal":
        return torch.diag(near(factors["v"]).mT.reshape(-1))
    if structure == "whitening":
        noise = near(factors["M"]) - factors["M"]
        return torch.kron(torch.eye(4, dtype=torch.float64), factors["M"] + (noise + noise.mT) / 2)
    if structure == "column":
        return torch.kron(torch.diag(near(factors["S"])), torch.eye(3, dtype=torch.float64))
    if structure == "row-column":
        return torch.kron(torch.diag(near(factors["S"])), torch.diag(near(factors["Q"])))
    if structure == "eigen":
        D = near(factors["D"])
        return torch.block_diag(*(factors["U"] @ torch.diag(D[:, j]) @ factors["U"].mT for j in range(D.shape[1])))
    basis = torch.kron(factors["U_R"], factors["U_L"])
    return basis @ torch.diag(near(factors["D"]).mT.reshape(-1)) @ basis.mT


@experiment(
    arms=("racs", "alice"),
    measures=("loss_before", "loss_after", "state_bytes", "reported_bytes"),
    inputs={"corpus": "shakespeare", "model": "smollm2-135m-instruct"},
    settings={"finetune_steps": 10, "matrix_rate": (0.002, 0.0005)},
    seeds=3,
    memory_gib=12,
    quick=False,
)
def finetune(trial: Trial) -> dict[str, Any]:
    """Pre-training of SmolLM2-135M continued for ten steps of two windows of 64 tokens, at a tenth and at a fortieth of the paper's rate."""
    model, tokenizer, _ = trial.input("model")
    text = "\n".join(document.text for document in trial.input("corpus"))[:400_000]
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    held, shown = ids[: len(ids) // 10], ids[len(ids) // 10 :]
    windows = spaced_windows(held, 16, 64)
    rate = float(trial["matrix_rate"])
    groups = build_param_groups(model, trial.arm, lr=rate, adam_lr=1e-4)  # type: ignore[arg-type]
    optimizer = RACS(groups) if trial.arm == "racs" else Alice(groups, seed=trial.seed)
    before = float(window_losses(model, windows, 4).mean())
    steps = int(trial["finetune_steps"])
    done = training(model, [optimizer], shown, steps=steps, batch=2, length=64, seed=trial.seed)
    for _ in zip(trial.progress(steps), done, strict=False):
        pass
    after = float(window_losses(model, windows, 4).mean())
    state = sum(
        value.numel() * value.element_size()
        for each in optimizer.state.values()
        for key, value in each.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    reported = memory_report(model, trial.arm, torch.float32) - weights  # type: ignore[arg-type]
    (trial.folder / "memory.json").write_text(json.dumps({"weights": weights, "states": state}))
    return {
        "loss_before": Exact(before),  # the same weights and windows under every seed
        "loss_after": after,
        "state_bytes": Exact(state),
        "reported_bytes": Exact(reported),
    }
