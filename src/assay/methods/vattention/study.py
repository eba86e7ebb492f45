"""The experiments behind the claims: captured keys of a real model, the whole model, a pass key, and the clock."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from assay.bench import Cases, Count, Trial, experiment, prepare

from . import GrowingKVCache, VAttentionConfig, reset_report, sparse_decoding, sparsity_report, vattention
from ._indices import SimHashIndex, page_bounds, page_scores
from ._rows import LayerRows, Sampler
from .baselines import MagicPigSpace, best_of, collision_probability, sink_and_window, top_p_set, topk_attention

TABLES = 300  # of MagicPig, at most
QUERIES = 16  # captured a layer: the last ones of a context
USED = (0, 5, 10, 15)  # those that part A uses
DRAWS = 16  # of each row: the worst layer is chosen by the first half and counted on the other
STARTS = {"shakespeare": "shakespeare/hamlet", "moby": "moby/chapter_1", "brown": "brown/ca01", "sotu": "sotu/2010"}
APART = 8192  # tokens between two contexts of one text
LEVELS = {0.1: (0.05, 0.025, 0.26), 0.05: (0.025, 0.0125, 0.62)}  # density: heavy, pilot, eps of part B
SAMPLED: dict[str, dict[str, Any]] = {
    "denominator": {"guarantee": "denominator"},
    "output": {"guarantee": "output"},
    "denominator-small-pilot": {"guarantee": "denominator", "min_pilot": 2},
    "output-small-pilot": {"guarantee": "output", "min_pilot": 2},
    "one-sided": {"guarantee": "denominator", "tail": "one"},
}


# Contexts ---------------------------------------------------------------------------------------------------------


def context_tokens(documents: Sequence[Any], tokenizer: Any, seed: int, n: int) -> Tensor:
    """The context (1, n) of a seed: texts take turns, and a text gives its next context 8,192 tokens further on.

    A text is the documents whose ids share what stands before the slash, in their order, from the start that `STARTS`
    names, joined by a blank line.
    """
    texts: dict[str, list[Any]] = {}
    for document in documents:
        texts.setdefault(document.id.partition("/")[0], []).append(document)
    names = [name for name in STARTS if name in texts] or list(texts)
    name, at = names[seed % len(names)], APART * (seed // len(names))
    parts = texts[name]
    start = STARTS.get(name, parts[0].id)
    first = next((i for i, d in enumerate(parts) if d.id == start or d.id.startswith(start + "_")), 0)
    text, enough = "", 8 * (at + n) + 10_000  # characters: no tokenizer makes tokens of more than eight on average
    for document in parts[first:]:
        text += document.text + "\n\n"
        if len(text) > enough:
            break
    ids = tokenizer(text[:enough], return_tensors="pt", add_special_tokens=False)["input_ids"]
    if ids.shape[1] < at + n:
        raise ValueError(
            f"the text {name!r} has {ids.shape[1]} tokens, but seed {seed} needs {at + n}: give a longer text or fewer seeds"
        )
    return ids[:, at : at + n]


@contextmanager
def attention_by(model: Any, name: str, function: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Let a model compute its attention by a function, and put the former one back."""
    before = model.config._attn_implementation
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@prepare(per=("seed", "model", "corpus", "n"))
def captured(job: Trial) -> None:
    """Keys, values and the last queries of every layer after one long prefill, as the cache holds them (after RoPE)."""
    model, tokenizer, _ = job.input("model")
    kept: dict[str, Tensor] = {}

    def capture(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        layer = module.layer_idx
        if layer in wanted:
            for what, x in (("q", query[:, :, -QUERIES:]), ("k", key), ("v", value)):
                kept[f"{what}{layer}"] = x[0].to(torch.float16).contiguous()
        return sdpa_attention_forward(module, query, key, value, mask, **more)

    layers = model.model.layers
    wanted = set(job.at(quick=[i for i in (1, 4, 7, 10) if i < len(layers)], full=list(range(len(layers)))))
    del layers[max(wanted) + 1 :]
    tokens = context_tokens(job.input("corpus"), tokenizer, job.seed, job["n"])
    with torch.inference_mode(), attention_by(model, "assay_capture", capture):
        model.model(tokens, use_cache=False)
    save_file(kept, job.folder / "qkv.safetensors")


def layers_of(trial: Trial, every: int = 1) -> Iterator[tuple[int, LayerRows]]:
    """The captured layers, or every so-many-th of them."""
    tensors = load_file(trial.prepared(captured) / "qkv.safetensors")
    numbers = sorted(int(name[1:]) for name in tensors if name.startswith("q"))
    for layer in numbers[:: every if trial.scale != "quick" else 1]:
        q, k, v = (tensors[f"{what}{layer}"].float() for what in "qkv")
        yield layer, LayerRows(q, k, v, USED)


def generator_of(seed: int, layer: int) -> torch.Generator:
    """The draws of a layer under a seed."""
    return torch.Generator().manual_seed(1000 * seed + layer)


# Part A: attention on captured keys -------------------------------------------------------------------------------


@experiment(
    arms=("denominator", "output", "denominator-small-pilot", "output-small-pilot", "one-sided"),
    measures=("missed", "missed_worst_layer", "density"),
    inputs={"model": "smollm2-135m-instruct", "corpus": "english"},
    settings={"eps": (0.05, 0.1, 0.2), "delta": (0.05, 0.1, 0.2), "n": 4096},
    needs=(captured,),
    together=("arm", "eps", "delta"),
    seeds=8,
    quick={"corpus": "shakespeare", "n": 1024, "seeds": 3, "arms": ("denominator", "output"), "eps": (0.05, 0.1), "delta": (0.05, 0.1)},
)  # fmt: skip
def promise(trial: Trial) -> dict[Any, dict[str, Any]]:
    """How often the stated tolerance is missed, over all rows and draws, and in the worst layer."""
    missed: dict[Any, list[Tensor]] = {cell: [] for cell in trial.cells()}
    density: dict[Any, list[float]] = {cell: [] for cell in trial.cells()}
    for layer, rows in trial.progress(list(layers_of(trial))):
        sampler = Sampler(rows, rows.fixed(0.02), DRAWS, generator_of(trial.seed, layer))
        spreads: dict[str, Any] = {}
        for cell in trial.cells():
            config = VAttentionConfig(
                sink=4, local=4, eps=float(cell["eps"]), delta=float(cell["delta"]), **SAMPLED[cell.arm]
            )
            if cell.arm not in spreads:
                spreads[cell.arm] = sampler.spread(config)
            b = sampler.budget(config, spreads[cell.arm])
            if config.guarantee == "output":
                error = rows.error(sampler.output(b))
            else:
                error = (sampler.denominator(b) - rows.total).abs() / rows.total
            missed[cell].append((error > config.eps).flatten(1))
            density[cell].append(float(sampler.density(b).mean()))
    found = {}
    for cell, layers in missed.items():
        draws = torch.stack(layers)  # (layer, draw, row)
        worst = int(draws[:, : DRAWS // 2].double().mean((1, 2)).argmax())
        counted = draws[worst, DRAWS // 2 :]
        found[cell] = {
            "missed": Count(int(draws.sum()), draws.numel()),
            "missed_worst_layer": Count(int(counted.sum()), counted.numel()),
            "density": float(np.mean(density[cell])),
        }
    return found


@experiment(
    arms=("output", "denominator"),
    measures=("correlation", "linear"),
    curves=("error",),
    inputs={"model": "smollm2-135m-instruct", "corpus": "english"},
    settings={"n": 4096},
    needs=(captured,),
    seeds=8,
    quick=False,
)
def error_by_tolerance(trial: Trial) -> dict[str, Any]:
    """How straight the line is from the stated tolerance to the error that is seen, layer by layer."""
    tolerances = np.geomspace(0.025, 0.4, 8)
    errors, names = [], []
    for layer, rows in trial.progress(list(layers_of(trial))):
        sampler = Sampler(rows, rows.fixed(0.02), 4, generator_of(trial.seed, layer))
        config = VAttentionConfig(sink=4, local=4, min_pilot=2, **SAMPLED[trial.arm])
        spread = sampler.spread(config)
        line = []
        for eps in tolerances:
            at = VAttentionConfig(sink=4, local=4, min_pilot=2, eps=float(eps), **SAMPLED[trial.arm])
            line.append(float(rows.error(sampler.output(sampler.budget(at, spread))).mean()))
        errors.append(line)
        names.append(layer)
    for eps, error in zip(tolerances, np.mean(errors, axis=0)):
        trial.log(float(eps), error=float(error))
    r = np.array([np.corrcoef(tolerances, line)[0, 1] for line in errors])
    return {"correlation": Cases(r, names), "linear": Cases((r >= 0.95).astype(float), names)}


@experiment(
    arms=("vattention", "denominator", "top-k", "top-p", "uniform", "magicpig", "quest", "vattention-simhash", "top-k-simhash"),
    measures=("error", "error_later", "error_flat", "error_peaked", "error_p95", "density_read"),
    inputs={"model": "smollm2-135m-instruct", "corpus": "english"},
    settings={"density": (0.1, 0.2), "n": 4096},
    needs=(captured,),
    together=("arm", "density"),
    seeds=8,
    quick={"corpus": "shakespeare", "n": 1024, "seeds": 3, "density": (0.2,), "arms": ("vattention", "top-k", "top-p", "uniform")},
)  # fmt: skip
def equal_density(trial: Trial) -> dict[Any, dict[str, Any]]:
    """The output's error where every rule reads the same share of the keys (sinks and window of 4 included).

    A rule's own knob (tolerance, share, tables, pages) is set by bisection on these layers; MagicPig's bits are chosen
    among 6, 8 and 10 by the error on every second one.
    """
    return compare(trial, lambda cell: float(cell["density"]))


@experiment(
    arms=("vattention", "top-k", "top-p", "uniform"),
    measures=("error", "error_later", "error_flat", "error_peaked", "error_p95", "density_read"),
    inputs={"model": "smollm2-135m-instruct", "corpus": "english"},
    settings={"density": 0.05, "n": 4096},
    needs=(captured,),
    together=("arm",),
    seeds=8,
    quick=False,
)
def lowest_density(trial: Trial) -> dict[Any, dict[str, Any]]:
    """The same at 5 % of the keys, where a quarter of them, the pilot, is few."""
    return compare(trial, lambda _: trial["density"])


def compare(trial: Trial, density: Callable[[Any], float]) -> dict[Any, dict[str, Any]]:
    """Errors of all arms at the density of their cell, over the heads and queries of every third layer."""
    layers = list(layers_of(trial, every=3))
    flat = torch.cat([rows.flatness.flatten() for _, rows in layers])
    low, high = flat.quantile(0.25), flat.quantile(0.75)
    at = [(layer, h, t) for layer, rows in layers for h in range(rows.q.shape[0]) for t in USED]
    ids = np.array([f"{layer}-{h}-{t}" for layer, h, t in at])
    later = np.array([layer > 0 for layer, _, _ in at])
    found = {}
    for cell in trial.progress(list(trial.cells())):
        rule = _rule(cell.arm, density(cell), layers, trial.seed)
        errors, read = zip(*(rule(layer, rows) for layer, rows in layers), strict=True)
        every = torch.cat([e.flatten(1) for e in errors], 1)  # (draws, rows)
        error = every.mean(0)
        found[cell] = {
            "error": Cases(error.numpy(), ids),
            "error_later": Cases(error.numpy()[later], ids[later]),
            "error_flat": Cases(error[flat >= high].numpy(), ids[(flat >= high).numpy()]),
            "error_peaked": Cases(error[flat <= low].numpy(), ids[(flat <= low).numpy()]),
            "error_p95": float(every.quantile(0.95)),
            "density_read": float(torch.cat([d.flatten() for d in read]).mean()),
        }
    return found


Rule = Callable[[int, LayerRows], tuple[Tensor, Tensor]]


def _rule(arm: str, target: float, tuning: Sequence[tuple[int, LayerRows]], seed: int) -> Rule:
    """A rule that gives errors (draws, H, T) and densities at the target: its knob is set on the tuning layers."""
    if arm in ("vattention", "denominator", "vattention-simhash"):
        return _sampled_rule(arm, target, tuning, seed)
    if arm in ("top-k", "top-k-simhash"):

        def top_k(layer: int, rows: LayerRows) -> tuple[Tensor, Tensor]:
            number = int(target * int(rows.count.max())) - 8  # sinks and window
            return _read(rows, rows.fixed(max(number, 0), simhash=_simhash(rows) if arm == "top-k-simhash" else None))

        return top_k
    if arm == "uniform":

        def uniform(layer: int, rows: LayerRows) -> tuple[Tensor, Tensor]:
            sampler = Sampler(rows, sink_and_window(rows.visible, 4, 4), 4, generator_of(seed, layer))
            b = (target * rows.count - sampler.n_f).long().clamp_min(1).expand(4, -1, -1)
            return rows.error(sampler.output(b)), sampler.density(b)

        return uniform
    if arm == "top-p":
        held = [_held_before(rows) for _, rows in tuning]

        def density(x: float) -> float:
            p = (1 - math.exp(x)) * (1 - 1e-6)
            return float(np.mean([float(((h < p).sum(-1) / rows.count).mean()) for h, (_, rows) in zip(held, tuning)]))

        # What matters of p is how near it comes to 1.
        p = 1 - math.exp(_bisect(density, -16.0, -1e-3, target, rising=False))
        return lambda layer, rows: _read(rows, top_p_set(rows.scores, sink_and_window(rows.visible, 4, 4), p))
    if arm == "quest":
        pages = _bisect_whole(lambda m: _mean_density(_quest(m), tuning), 1, len(tuning[0][1].k[0]) // 16, target)
        return _quest(pages)
    if arm == "magicpig":

        def tables_of(bits: int, some: Sequence[tuple[int, LayerRows]]) -> int:
            second = [_second_hit(layer, rows, bits, seed)[0] for layer, rows in some]

            def read(tables: int) -> float:
                parts = [
                    ((s <= tables) | sink_and_window(r.visible, 4, 4)).sum(-1) / r.count
                    for s, (_, r) in zip(second, some)
                ]
                return float(torch.cat(parts).mean())

            return _bisect_whole(read, 1, TABLES, target)

        half = tuning[::2]
        by_bits = {bits: _magicpig(tables_of(bits, half), bits, seed) for bits in (6, 8, 10)}
        bits = min(
            by_bits, key=lambda b: float(torch.cat([by_bits[b](la, rows)[0].flatten() for la, rows in half]).mean())
        )
        return _magicpig(tables_of(bits, tuning), bits, seed)
    raise ValueError(f"there is no rule for the arm {arm!r}")


def _sampled_rule(arm: str, target: float, tuning: Sequence[tuple[int, LayerRows]], seed: int) -> Rule:
    """vAttention with half of the density for heavy keys, a quarter for the pilot, and the tolerance that fits."""
    guarantee = "denominator" if arm == "denominator" else "output"

    def config(eps: float) -> VAttentionConfig:
        return VAttentionConfig(sink=4, local=4, pilot=target / 4, min_pilot=2, eps=eps, guarantee=guarantee)  # type: ignore[arg-type]

    def sampler(layer: int, rows: LayerRows) -> Sampler:
        simhash = _simhash(rows) if arm == "vattention-simhash" else None
        return Sampler(rows, rows.fixed(target / 2, simhash=simhash), 4, generator_of(seed, layer))

    samplers = {layer: sampler(layer, rows) for layer, rows in tuning}
    spreads = {layer: s.spread(config(0.1)) for layer, s in samplers.items()}

    def density(x: float) -> float:
        at = config(math.exp(x))
        return float(np.mean([float(s.density(s.budget(at, spreads[la])).mean()) for la, s in samplers.items()]))

    eps = math.exp(_bisect(density, math.log(1e-3), math.log(0.95), target, rising=False))

    def rule(layer: int, rows: LayerRows) -> tuple[Tensor, Tensor]:
        s = samplers[layer]
        b = s.budget(config(eps), spreads[layer])
        return rows.error(s.output(b)), s.density(b)

    return rule


def _simhash(rows: LayerRows) -> SimHashIndex:
    index = SimHashIndex(seed=0)
    index.build(rows.k[None])
    return index


def _read(rows: LayerRows, read: Tensor) -> tuple[Tensor, Tensor]:
    return rows.error_of(read.float())[None], read.sum(-1) / rows.count


def _quest(pages: int) -> Rule:
    def quest(layer: int, rows: LayerRows) -> tuple[Tensor, Tensor]:
        low, high = page_bounds(rows.k[None], 16)
        chosen = best_of(page_scores(rows.used[None], low, high), pages).repeat_interleave(16, -1)[0]
        chosen = chosen[..., : rows.k.shape[1]] & rows.visible
        return _read(rows, chosen | sink_and_window(rows.visible, 4, 4))

    return quest


def _held_before(rows: LayerRows) -> Tensor:
    """Share of the softmax that is held before each key is read: sinks and window first, then by weight (2 where hidden)."""
    p, fixed = rows.w / rows.total[..., None], sink_and_window(rows.visible, 4, 4)
    ranked = p.masked_fill(fixed, 0).sort(dim=-1, descending=True).values
    before = (p * fixed).sum(-1, keepdim=True) + ranked.cumsum(-1) - ranked
    # The fixed keys are read whatever is held, and stand at the end of the order, where their weight is 0.
    before = torch.where(ranked > 0, before, 2)
    return torch.cat([before, torch.where(fixed, -1.0, 2.0)], -1)


@cache
def _second_hit(layer: int, rows: LayerRows, bits: int, seed: int) -> tuple[Tensor, Tensor]:
    """In which of the tables each key collides for the second time (`TABLES` + 1: in none), and the cosines."""
    planes = torch.randn(rows.q.shape[2] + 1, TABLES * bits, generator=generator_of(seed, layer))
    hashed = MagicPigSpace.of(rows.used[None], rows.k[None])
    hits = torch.zeros(rows.scores.shape, dtype=torch.int16)
    second = torch.full(rows.scores.shape, TABLES + 1, dtype=torch.int16)
    for table in range(TABLES):
        hits += hashed.collide(planes[:, table * bits : (table + 1) * bits])[0]
        second.masked_fill_((hits >= 2) & (second > TABLES), table + 1)
    return second.masked_fill(~rows.visible, TABLES + 1), hashed.cosine[0]


def _magicpig(tables: int, bits: int, seed: int) -> Rule:
    def magicpig(layer: int, rows: LayerRows) -> tuple[Tensor, Tensor]:
        second, cosine = _second_hit(layer, rows, bits, seed)
        fixed = sink_and_window(rows.visible, 4, 4)
        hit = (second <= tables) & ~fixed
        weights = fixed + hit / (collision_probability(cosine, bits, tables) + 1e-6)
        return rows.error_of(weights)[None], (fixed | hit).sum(-1) / rows.count

    return magicpig


def _mean_density(rule: Rule, tuning: Sequence[tuple[int, LayerRows]]) -> float:
    return float(torch.cat([rule(layer, rows)[1].flatten() for layer, rows in tuning]).mean())


def _bisect(density: Callable[[float], float], low: float, high: float, target: float, *, rising: bool) -> float:
    """A knob at which the density is within 0.5 % of its target, or as near as it gets."""
    for _ in range(30):
        middle = (low + high) / 2
        d = density(middle)
        if abs(d / target - 1) < 0.005:
            break
        if (d < target) == rising:
            low = middle
        else:
            high = middle
    return middle


def _bisect_whole(density: Callable[[int], float], low: int, high: int, target: float) -> int:
    """The whole number whose density, which rises with it, is nearest to the target."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if density(middle) < target else (low, middle)
    return min((low, high), key=lambda m: abs(density(m) - target))


# Part B: the whole model ------------------------------------------------------------------------------------------


def decode_config(density: float, seed: int) -> VAttentionConfig:
    """The setting of part B that reads about this share of the keys."""
    heavy, pilot, eps = LEVELS[density]
    return VAttentionConfig(
        sink=4, local=4, heavy=heavy, pilot=pilot, min_pilot=2, eps=eps, guarantee="output", index="oracle", seed=seed
    )


def top_k_by(density: float) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers: oracle top-k at this density."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        heavy = max(int(density * key.shape[2]) - 8, 0)
        out = topk_attention(query, key, value, heavy=heavy, sink=4, local=4, scale=scaling, attn_mask=mask)
        return out.out.transpose(1, 2).contiguous(), None

    return attend


def mean_density(model: Any) -> float:
    """What `sparse_decoding` read, over layers and heads."""
    return float(np.mean([float(layer.density.mean()) for layer in sparsity_report(model)]))


@contextmanager
def sparse(model: Any, arm: str, density: float, seed: int) -> Iterator[None]:
    """A model in which an arm computes the attention of what follows, with a report of its own."""
    reset_report(model)
    if arm == "vattention":
        with sparse_decoding(model, decode_config(density, seed)):
            yield
    elif arm == "top-k":
        with attention_by(model, "assay_top_k", top_k_by(density)):
            yield
    else:
        yield


@experiment(
    arms=("vattention", "top-k"),
    measures=("rise", "kl", "density_read"),
    inputs={"model": "smollm2-135m-instruct", "corpus": "english"},
    settings={"density": (0.1, 0.05), "context": 2048, "sparse_tokens": 128},
    together=("arm", "density"),
    seeds=8,
    quick=False,
)
def next_token(trial: Trial) -> dict[Any, dict[str, Any]]:
    """What sparse attention changes of the model's next-token distributions, over the last 128 tokens of a context.

    The context before them is dense. top-k is given the density that vAttention read in the same context.
    """
    model, tokenizer, _ = trial.input("model")
    n, last = trial["context"], trial["sparse_tokens"]
    tokens = context_tokens(trial.input("corpus"), tokenizer, trial.seed, n + 1)
    found: dict[Any, dict[str, Any]] = {}
    with torch.inference_mode():
        cache = DynamicCache()
        model(tokens[:, : n - last], past_key_values=cache, logits_to_keep=1)

        def distributions() -> Tensor:
            here = copy.deepcopy(cache)
            parts = [model(tokens[:, at : at + 64], past_key_values=here).logits[0] for at in range(n - last, n, 64)]
            return log_softmax(torch.cat(parts).float(), -1)

        wanted = tokens[0, n - last + 1 :, None]
        dense = distributions()
        read: dict[float, float] = {}
        for cell in sorted(trial.cells(), key=lambda c: c.arm == "top-k"):
            density = float(cell["density"])
            with sparse(model, cell.arm, density if cell.arm == "vattention" else read[density], trial.seed):
                ours = distributions()
                if cell.arm == "vattention":
                    read[density] = mean_density(model)
            found[cell] = {
                "rise": float((dense.gather(1, wanted) - ours.gather(1, wanted)).mean()),
                "kl": float(kl_div(ours, dense, log_target=True, reduction="none").sum(-1).mean()),
                "density_read": read[density],
            }
    return found


@experiment(
    arms=("dense", "vattention", "top-k"),
    measures=("exact_match", "density_read"),
    inputs={"model": "smollm2-135m-instruct", "corpus": "moby-dick"},
    settings={"context": 2048, "prompts": 5},
    together=("arm",),
    seeds=8,
    quick=False,
)
def pass_key(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Whether a five-digit key, told once at a random place of a long text, is found again (greedy, text dense)."""
    model, tokenizer, _ = trial.input("model")
    draw = np.random.default_rng(trial.seed)
    right: dict[str, list[float]] = {cell.arm: [] for cell in trial.cells()}
    read: list[float] = []
    question = tokenizer(" The pass key is", return_tensors="pt", add_special_tokens=False)["input_ids"]
    long = context_tokens(trial.input("corpus"), tokenizer, 0, 60_000)
    for _ in trial.progress(trial["prompts"]):
        key = int(draw.integers(10_000, 100_000))
        told = tokenizer(
            f" The pass key is {key}. Remember it. {key} is the pass key.",
            return_tensors="pt",
            add_special_tokens=False,
        )["input_ids"]
        room = trial["context"] - told.shape[1] - question.shape[1]
        start, at = int(draw.integers(long.shape[1] - room)), int(draw.integers(room))
        window = long[:, start : start + room]
        with torch.inference_mode():
            cache = DynamicCache()
            model(torch.cat([window[:, :at], told, window[:, at:]], 1), past_key_values=cache, logits_to_keep=1)
            for arm, hits in right.items():
                with sparse(model, arm, 0.1, trial.seed):
                    answer = _greedy(model, question, copy.deepcopy(cache), 8)
                    if arm == "vattention":
                        read.append(mean_density(model))
                number = re.match(r"\D*(\d+)", tokenizer.decode(answer))
                hits.append(float(number is not None and int(number[1]) == key))
    names = [f"{trial.seed}-{i}" for i in range(trial["prompts"])]
    density = {"dense": 1.0, "vattention": float(np.mean(read)) if read else 0.1, "top-k": 0.1}
    return {
        cell: {"exact_match": Cases(right[cell.arm], names), "density_read": density[cell.arm]}
        for cell in trial.cells()
    }


def _greedy(model: Any, tokens: Tensor, cache: Any, more: int) -> list[int]:
    """The most probable continuation."""
    found = []
    for _ in range(more):
        tokens = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        found.append(int(tokens))
    return found


# Part C: the clock ------------------------------------------------------------------------------------------------


@experiment(
    arms=("dense", "vattention"),
    measures=("milliseconds", "density_read"),
    settings={"n": (16_384, 65_536, 262_144), "density": (0.025, 0.05, 0.1, 0.2), "rounds": 30},
    ignores={"dense": ("density",)},
    together=("arm", "n", "density"),
    alone=True,
    threads=2,
    seeds=5,
    quick=False,
)
def step_time(trial: Trial) -> dict[Any, dict[str, Any]]:
    """One decode step of one layer (8 heads of 64, float32), a prebuilt simhash index, at fixed densities.

    Index query, pilot and budget are timed too. ``dense`` is the faster of SDPA and softmax between two products. All take
    turns; medians.
    """
    by_n: dict[int, list[Any]] = {}
    for cell in trial.cells():
        by_n.setdefault(int(cell["n"]), []).append(cell)
    found: dict[Any, dict[str, Any]] = {}
    for n, cells in by_n.items():
        g = torch.Generator().manual_seed(trial.seed)
        q = torch.randn(1, 8, 1, 64, generator=g)
        k, v = torch.randn(1, 8, n, 64, generator=g), torch.randn(1, 8, n, 64, generator=g)
        k, v = GrowingKVCache().update(k, v, 0)  # where they lie in use, for all
        calls: dict[Any, Callable[[], Any]] = {
            "sdpa": partial(scaled_dot_product_attention, q, k, v),
            "products": partial(_two_products, q, k, v),
        }
        index = SimHashIndex(seed=trial.seed)
        index.build(k)
        for cell in cells:
            if cell.arm != "vattention":
                continue
            rest = int(float(cell["density"]) * n) - 256  # beside sinks and window
            config = VAttentionConfig(heavy=rest // 2, budget=rest - rest // 2, seed=trial.seed)
            calls[cell] = partial(vattention, q, k, v, config=config, index_state=index)
            found[cell] = {"density_read": float(calls[cell]().density.mean())}
        with torch.inference_mode():
            seconds = _medians(calls, trial["rounds"])
        for cell in cells:
            if cell.arm == "vattention":
                found[cell]["milliseconds"] = 1000 * seconds[cell]
            else:
                found[cell] = {"milliseconds": 1000 * min(seconds["sdpa"], seconds["products"]), "density_read": 1.0}
    return found


def _two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).softmax(-1) @ v


def _medians(calls: dict[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Median seconds of each call, taken in turns, with a breath between them: torch's threads spin for a while after a
    dense call, on the core that the next one needs."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            time.sleep(0.01)
            start = time.perf_counter()
            call()
            if turn >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken)) for name, taken in times.items()}


@experiment(
    arms=("dense", "vattention"),
    measures=("tokens_per_second", "density_read"),
    inputs={"model": "smollm2-135m-instruct", "corpus": "english"},
    settings={"context": (4096, 8000), "new_tokens": 32},
    together=("arm", "context"),
    alone=True,
    threads=2,
    seeds=3,
    quick=False,
)
def decode_speed(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Tokens a second of a whole model behind a long context, both with a cache that grows in place."""
    model, tokenizer, _ = trial.input("model")
    found: dict[Any, dict[str, Any]] = {}
    for cell in trial.cells():
        n = int(cell["context"])
        tokens = context_tokens(trial.input("corpus"), tokenizer, trial.seed, n)
        with torch.inference_mode():
            cache = GrowingKVCache()
            model(tokens[:, :-1], past_key_values=cache, logits_to_keep=1)
            density = 1.0
            if cell.arm == "vattention":
                reset_report(model)
                with sparse_decoding(model, VAttentionConfig(sink=16, local=64, seed=trial.seed)):
                    _greedy(model, tokens[:, -1:], cache, 2)  # builds the index
                    start = time.perf_counter()
                    _greedy(model, tokens[:, -1:], cache, trial["new_tokens"])
                    seconds = time.perf_counter() - start
                    density = mean_density(model)
            else:
                _greedy(model, tokens[:, -1:], cache, 2)
                start = time.perf_counter()
                _greedy(model, tokens[:, -1:], cache, trial["new_tokens"])
                seconds = time.perf_counter() - start
        found[cell] = {"tokens_per_second": trial["new_tokens"] / seconds, "density_read": density}
    return found
