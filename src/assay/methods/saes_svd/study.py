"""The experiments behind the claims: SmolLM2 compressed by every method, few tokens, the choice of beta, the clock."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from assay.bench import Cases, Trial, experiment, prepare
from assay.lm import CompressionReport, LowRankLinear, blocks, latencies, perplexity, rank_for, walk, windows
from assay.lm._blocks import bias_of, groups, replace, weight_of

from . import Whitened, aces_beta, compress_model, tail_ratio

CALIBRATION = (16, 256)  # windows, and tokens of each: twice as many as the widest Linear has inputs, and more
RECIPES: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd"},
    "fwsvd": {"method": "fwsvd"},
    "asvd": {"method": "asvd"},
    "svd-llm": {"method": "svd-llm"},
    "cealc-25": {"method": "cealc", "beta": 0.25},
    "cealc-50": {"method": "cealc", "beta": 0.5},
    "saes-svd": {"method": "saes-svd"},
    "saes-0-100": {"method": "saes-svd", "bounds": (0.0, 1.0)},
    "saes-10-90": {"method": "saes-svd", "bounds": (0.1, 0.9)},
    "saes-40-60": {"method": "saes-svd", "bounds": (0.4, 0.6)},
    "adasvd": {"method": "adasvd"},
    "dobi": {"method": "dobi"},
}


# Texts ------------------------------------------------------------------------------------------------------------


def parts(documents: Sequence[Any], *names: str) -> list[str]:
    """The texts of parts of a corpus: train, validation, test."""
    from assay.data import split

    found = split(documents)
    return [document.text for name in names for document in found[name]]


def calibration(trial: Trial, tokenizer: Any, tokens: int | None = None) -> Tensor:
    """Windows of training documents, others for each seed."""
    count, length = CALIBRATION
    texts = parts(trial.input("text"), "train")
    return windows(texts, tokenizer, count if tokens is None else tokens // length, length, seed=trial.seed)


def sentences(texts: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Sentences of 8 to 30 words, at most three a document: what stands before the last word, and that word.

    A sentence ends with its line or at a mark before a capital; the last word has three letters at least, and its full stop
    may stand apart, as in Brown.
    """
    found = []
    for text in texts:
        fitting = []
        for piece in re.split(r"\n+|(?<=[a-z]{3}[.!?])\s+(?=[A-Z])", text):
            ended = re.fullmatch(r"([A-Z].*[a-z]{3}) ?\.", piece.strip())
            words = ended.group(1).split() if ended else []
            if 8 <= len(words) <= 30 and words[-1].isalpha():
                fitting.append((" ".join(words[:-1]), " " + words[-1]))
        found += fitting[:3]
    return found[:count]


# Evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def states(model: nn.Module, documents: Tensor, batch_size: int = 6) -> tuple[Tensor, Tensor]:
    """Behind the last block, and into the head: two (documents, tokens, features)."""
    behind: list[Tensor] = []
    body: Any = model.base_model
    hook = blocks(model)[-1].register_forward_hook(
        lambda _, __, out: behind.append(out if isinstance(out, Tensor) else out[0])
    )
    try:
        into = [body(input_ids=batch, use_cache=False).last_hidden_state for batch in documents.split(batch_size)]
    finally:
        hook.remove()
    return torch.cat(behind), torch.cat(into)


@torch.no_grad()
def against(model: nn.Module, documents: Tensor, behind: Tensor, into: Tensor) -> dict[str, Cases]:
    """Losses of a model on documents and its distances from the original, of which the states are given; a case a document."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    found: dict[str, list[float]] = {"nll": [], "kl": [], "agreement": [], "cosine": []}
    ours_behind, ours_into = states(model, documents)
    for ids, here, there, z, z_original in zip(documents, ours_behind, behind, ours_into, into, strict=True):
        q, p = (head(x[:-1]).float().log_softmax(-1) for x in (z, z_original))
        found["nll"].append(float(cross_entropy(q, ids[1:])))
        found["kl"].append(float((p.exp() * (p - q)).sum(-1).mean()))
        found["agreement"].append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        found["cosine"].append(float(cosine_similarity(here, there, dim=-1).mean()))
    return {name: Cases(np.array(values)) for name, values in found.items()}


@torch.no_grad()
def cloze(model: nn.Module, tokenizer: Any, asked: Sequence[tuple[str, str]]) -> Cases:
    """Whether the last word of a sentence is what the model finds most likely, token by token."""
    right = []
    for before, word in asked:
        first = tokenizer(before, add_special_tokens=False)["input_ids"]
        last = tokenizer(word, add_special_tokens=False)["input_ids"]
        logits = model(input_ids=torch.tensor([first + last]), use_cache=False, logits_to_keep=len(last) + 1).logits
        right.append(float(logits[0, :-1].argmax(-1).tolist() == last))
    return Cases(np.array(right))


def test_documents(job: Trial, tokenizer: Any) -> dict[str, Tensor]:
    """Held-out windows in the domain of the calibration and outside it, the same for every seed."""
    length = job["length"]
    return {
        "in": windows(
            parts(job.input("text"), "validation", "test"), tokenizer, job["documents"], length, seed=None, skip=200
        ),
        "out": windows(
            parts(job.input("outside"), "validation", "test"),
            tokenizer,
            job["documents"] // 2,
            length,
            seed=None,
            skip=200,
        ),
    }


def evaluated(trial: Trial, model: nn.Module, tokenizer: Any, original: Any) -> dict[str, Cases]:
    """All that is measured of a compressed model on held-out text."""
    kept = np.load(original / "states.npz")
    found: dict[str, Cases] = {}
    for name, documents in test_documents(trial, tokenizer).items():
        behind, into = (torch.from_numpy(kept[f"{name}_{what}"]) for what in ("behind", "into"))
        measured = against(model, documents, behind, into)
        found |= measured if name == "in" else {"nll_out": measured["nll"]}
    asked = sentences(parts(trial.input("text"), "validation", "test"), trial["sentences"])
    return {**found, "cloze": cloze(model, tokenizer, asked)}


PER = ("model", "text", "outside", "documents", "length", "sentences")


@prepare(per=PER, minutes=10)
def original_states(job: Trial) -> None:
    """Hidden states of the original on the held-out text, and what it scores there."""
    model, tokenizer, _ = job.input("model")
    kept: dict[str, Any] = {}
    for name, documents in test_documents(job, tokenizer).items():
        behind, into = states(model, documents)
        kept |= {f"{name}_behind": behind.numpy(), f"{name}_into": into.numpy()}
    np.savez(job.folder / "states.npz", **kept)
    save(job, evaluated(job, model, tokenizer, job.folder))


@prepare(per=(*PER, "ratio"), needs=(original_states,), minutes=10)
def plain_svd(job: Trial) -> None:
    """SVD of the weights alone, which no seed changes."""
    model, tokenizer, _ = job.input("model")
    compress_model(model, method="svd", ratio=job["ratio"])
    save(job, evaluated(job, model, tokenizer, job.prepared(original_states).folder))


def save(job: Trial, found: dict[str, Cases]) -> None:
    """Keep cases for the trials that read them."""
    values: dict[str, Any] = {name: cases.values for name, cases in found.items()}
    np.savez(job.folder / "found.npz", **values)


def saved(prepared: Any) -> dict[str, Cases]:
    """What `save` kept."""
    with np.load(prepared / "found.npz") as found:
        return {name: Cases(found[name]) for name in found}


@prepare(per=("seed", "model", "text"), minutes=10)
def better_inputs(job: Trial) -> dict[str, Any]:
    """Whether SVD-LLM does better with inputs of the compressed or of the original network, on held-out calibration text."""
    losses = {}
    original, tokenizer, _ = job.input("model")
    for inputs in ("compressed", "original"):
        model = copy.deepcopy(original)
        compress_model(model, calibration(job, tokenizer), method="svd-llm", ratio=0.2, limit=4, inputs=inputs)
        # the windows after those of the calibration, in the same order of the same documents
        more = windows(parts(job.input("text"), "train"), tokenizer, 24, CALIBRATION[1], seed=job.seed)[16:, :128]
        losses[inputs] = float(perplexity(model, list(more), length=128).nll.mean())
    return {**losses, "inputs": min(losses, key=lambda name: losses[name])}


# A: every method on the whole model -------------------------------------------------------------------------------


def compressed(trial: Trial, arm: str, inputs: str | None = None) -> tuple[nn.Module, Any, CompressionReport]:
    """The model, compressed by a recipe."""
    model, tokenizer, _ = trial.input("model")
    recipe = {**RECIPES[arm], **({"inputs": inputs} if inputs else {})}
    report = compress_model(
        model,
        calibration(trial, tokenizer),
        ratio=trial["ratio"],
        source=trial["text"],
        seed=trial.seed,
        on_block=lambda number, count: None,
        **recipe,
    )
    report.to_frame().to_csv(trial.folder / "layers.csv", index=False)
    return model, tokenizer, report


def described(report: CompressionReport) -> dict[str, float]:
    """What a report says of the choice of beta."""
    frame = report.to_frame()
    if "beta" not in frame:
        return {}
    found = {"retained": float(frame.retained.mean())}
    free = frame[~frame.beta_irrelevant.astype(bool)]  # of SVD-LLM none is
    if not len(free):
        return found
    low, high = report.settings.get("bounds", (0.25, 0.75))
    return {
        **found,
        "beta": float(free.beta.mean()),
        "at_bound": float(
            ((free.beta - low).abs() < 1e-9).mean() + ((free.beta - min(high, 0.99)).abs() < 1e-9).mean()
        ),
    }


@experiment(
    arms=("dense", "svd", "fwsvd", "asvd", "svd-llm", "cealc-25", "cealc-50", "saes-svd", "saes-0-100"),
    measures=(
        "nll",
        "nll_out",
        "kl",
        "agreement",
        "cosine",
        "cloze",
        "retained",
        "beta",
        "at_bound",
        "compress_seconds",
    ),
    inputs={"model": "smollm2-135m-instruct", "text": "brown", "outside": "sotu"},
    settings={"ratio": (0.2, 0.4), "documents": 24, "length": 128, "sentences": 60},
    needs=(original_states, plain_svd, better_inputs),
    seeds=3,
    minutes=15,
    quick=False,
)
def models(trial: Trial) -> dict[str, Any]:
    """SmolLM2-135M, all 30 blocks compressed: loss on held-out Brown documents and outside, distances from the original."""
    if trial.arm == "dense":
        return saved(trial.prepared(original_states))
    if trial.arm == "svd":
        return saved(trial.prepared(plain_svd))
    if trial["ratio"] != 0.2 and (trial.arm == "saes-0-100" or (trial.arm in ("fwsvd", "asvd") and trial.seed)):
        trial.skip("not measured at this ratio: it decides nothing there")
    inputs = trial.prepared(better_inputs).result["inputs"] if trial.arm == "svd-llm" else None
    model, tokenizer, report = compressed(trial, trial.arm, inputs)
    found = evaluated(trial, model, tokenizer, trial.prepared(original_states))
    return {**found, **described(report), "compress_seconds": report.seconds}


@experiment(
    arms=("saes-10-90", "saes-40-60", "adasvd", "dobi"),
    measures=(
        "nll",
        "nll_out",
        "kl",
        "agreement",
        "cosine",
        "cloze",
        "retained",
        "beta",
        "at_bound",
        "compress_seconds",
    ),
    inputs={"model": "smollm2-135m-instruct", "text": "brown", "outside": "sotu"},
    settings={"ratio": 0.2, "documents": 24, "length": 128, "sentences": 60},
    needs=(original_states,),
    seeds=1,
    minutes=30,
    quick=False,
)
def others(trial: Trial) -> dict[str, Any]:
    """One seed of what is reported without a verdict: other bounds, AdaSVD, learned ranks."""
    model, tokenizer, report = compressed(trial, trial.arm)
    found = evaluated(trial, model, tokenizer, trial.prepared(original_states))
    return {**found, **described(report), "compress_seconds": report.seconds}


# B: the first four blocks -----------------------------------------------------------------------------------------


def four_blocks(trial: Trial, arm: str, ratio: float, tokens: int) -> dict[str, Any]:
    """Blocks 0 to 3 compressed, the rest as it is."""
    model, tokenizer, _ = trial.input("model")
    report = compress_model(model, calibration(trial, tokenizer, tokens), ratio=ratio, limit=4, **RECIPES[arm])
    documents = windows(
        parts(trial.input("text"), "validation", "test"),
        tokenizer,
        trial["documents"],
        trial["length"],
        seed=None,
        skip=200,
    )
    losses = perplexity(model, list(documents), length=trial["length"])
    return {"nll": Cases(losses.nll.numpy()), **({"cosine": report.cosine[-1]} if report.cosine else {})}


@experiment(
    arms=("svd-llm", "saes-svd"),
    measures=("nll", "cosine"),
    inputs={"model": "smollm2-135m-instruct", "text": "brown"},
    settings={"ratio": 0.4, "documents": 12, "length": 128},
    seeds=3,
    minutes=10,
    quick={"text": "shakespeare"},
)
def shallow(trial: Trial) -> dict[str, Any]:
    """The first four blocks at 0.4: loss on held-out text."""
    return four_blocks(trial, trial.arm, trial["ratio"], CALIBRATION[0] * CALIBRATION[1])


@experiment(
    arms=("svd-llm", "cealc-50", "saes-svd"),
    measures=("nll", "cosine"),
    inputs={"model": "smollm2-135m-instruct", "text": "brown"},
    settings={"tokens": (1024, 2048, 4096), "ratio": 0.2, "documents": 24, "length": 128},
    seeds=1,
    minutes=10,
    quick=False,
)
def few_tokens(trial: Trial) -> dict[str, Any]:
    """The first four blocks at 0.2, by the tokens of the calibration: the widest Linear has 1,536 inputs."""
    return four_blocks(trial, trial.arm, trial["ratio"], trial["tokens"])


# C: the choice of beta --------------------------------------------------------------------------------------------


@experiment(
    arms=("aces",),
    measures=("close", "distance", "span", "exact_at_bound"),
    inputs={"model": "smollm2-135m-instruct", "text": "brown"},
    settings={"ratio": 0.2, "every": 5},
    seeds=3,
    minutes=15,
    quick=False,
)
def choice(trial: Trial) -> dict[str, Any]:
    """Every fifth block: the tail ratio at the beta of ACES between the best and the worst of a grid of 21 (regret <= 0.1 is close)."""
    from . import factorise

    model, tokenizer, _ = trial.input("model")
    rows: list[dict[str, float]] = []
    held: list[Any] = []
    last = (len(blocks(model)) - 1) // trial["every"] * trial["every"]

    def visit(site: Any) -> nn.Module:
        if not held or held[0] is not site.stats:
            held[:] = [site.stats, Whitened.of(site.stats.H, site.stats.Delta)]
        W = weight_of(site.linear).detach()
        rank = rank_for(trial["ratio"], *W.shape)
        if site.block and site.block % trial["every"] == 0:
            S, D = held[1].pair(W)
            beta, _, _ = aces_beta(S, D, rank, bounds=(0.0, 1.0))
            true = tail_ratio(S, D, rank)
            grid = [true(i / 20) for i in range(21)]
            span = max(grid) - min(grid)
            best = min(range(21), key=lambda i: grid[i]) / 20
            rows.append(
                {
                    "regret": (true(beta) - min(grid)) / span if span > 0 else 0.0,
                    "distance": abs(beta - best),
                    "span": span,
                    "bound": float(best in (0.0, 1.0)),
                }
            )
        found = factorise(W, held[1], rank, bounds=(0.0, 1.0))
        return LowRankLinear.from_factors(found.A, found.B, bias_of(site.linear))

    walk(model, list(calibration(trial, tokenizer).split(8)), visit, limit=last + 1)
    return {
        "close": Cases(np.array([float(row["regret"] <= 0.1) for row in rows])),
        "distance": Cases(np.array([row["distance"] for row in rows])),
        "span": Cases(np.array([row["span"] for row in rows])),
        "exact_at_bound": Cases(np.array([row["bound"] for row in rows])),
    }


# D: the clock -----------------------------------------------------------------------------------------------------


@experiment(
    arms=("dense", "factored"),
    measures=("prefill_seconds", "decode_seconds", "megabytes"),
    inputs={"model": "smollm2-135m-instruct"},
    settings={"ratio": (0.2, 0.4, 0.6), "context": 256, "tokens": 16},
    together=("arm",),
    alone=True,
    seeds=3,
    minutes=10,
    quick=False,
)
def speed(trial: Trial) -> dict[Any, dict[str, float]]:
    """Seconds to read a prompt and to write a token, dense and in two factors (whose values do not matter to the clock)."""
    model, _, _ = trial.input("model")
    thin = copy.deepcopy(model)
    for block in blocks(thin):
        for group in groups(block):
            for name, linear in group.items():
                m, n = weight_of(linear).shape
                replace(block, name, LowRankLinear(n, m, rank_for(trial["ratio"], m, n), bias_of(linear) is not None))
    them = {"dense": model, "factored": thin}
    found = latencies(them, context=trial["context"], tokens=trial["tokens"])
    return {
        cell: {
            "prefill_seconds": found[cell.arm].prefill,
            "decode_seconds": found[cell.arm].decode,
            "megabytes": sum(p.numel() * p.element_size() for p in them[cell.arm].parameters()) / 1e6,
        }
        for cell in trial.cells()
    }
