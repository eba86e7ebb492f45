"""The experiments behind the claims: run sums with an exact checker, the decay on real text, and replayed time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay.bench import Cases, Count, Trial, experiment, prepare
from assay.mdlm import (
    CachePolicy,
    DiffusionGenerationConfig,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    MDLMConfig,
    PrefixCache,
    Scheduler,
    diffusion_generate,
)
from assay.testbeds import ReplayTimer, gsm8k_text, load, runsum, scaled_trace

from . import LongestStablePrefix, PrefixAbsorbCache, Watched, delimiter_mask
from .baselines import FixedThresholdPrefix, ProphetEarlyCommit, ScatteredSizes

NEW_TOKENS = runsum.ANSWER_LENGTH
DELIMITERS = (runsum.STEP_END, runsum.EOS)
FLOORS = (1.0, 3.0, 5.0)
DYNAMIC = ("dynamic-cached-0.7", "dynamic-cached-0.8", "dynamic-cached-0.9", "dynamic-cached-0.95")
LSP_POINTS = ("lsp-cached", "lsp-floor-1-cached", "lsp-floor-3-cached", "lsp-floor-5-cached")


# Run sums ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a decoded batch gave, a row a problem."""

    answers: Tensor  # (rows, NEW_TOKENS)
    calls: Tensor  # (rows,)
    token_forwards: Tensor  # (rows,)
    seconds: float
    flips: int
    pairs: int
    commit_lengths: list[list[int]]
    last_tokens: list[list[int]] | None  # of each block, for prefix schedulers
    tau: list[list[float]] | None


def decode(
    model: Any, prompts: Tensor, scheduler: Scheduler, policy: CachePolicy | None = None, **settings: Any
) -> Run:
    """Answer all prompts, watched."""
    config = DiffusionGenerationConfig(max_new_tokens=NEW_TOKENS, seed=0, **settings)
    watched = scheduler if isinstance(scheduler, LongestStablePrefix) else Watched(scheduler)
    out = diffusion_generate(model, prompts, config, watched, policy)
    return Run(
        answers=out.sequences[:, out.canvas_start :],
        calls=out.row_forwards,
        token_forwards=out.row_token_forwards,
        seconds=out.timings["total"],
        flips=sum(out.stats["flips"]),
        pairs=sum(out.stats["flip_pairs"]),
        commit_lengths=out.stats["commit_lengths"],
        last_tokens=out.stats.get("last_tokens"),
        tau=out.stats.get("tau"),
    )


def static_at(model: Any, prompts: Tensor, calls: Tensor) -> Run:
    """`LowConfidenceStatic` on the whole canvas, each problem with its own number of steps."""
    parts: dict[int, tuple[Tensor, Run]] = {}
    for steps in calls.unique().tolist():
        rows = (calls == steps).nonzero()[:, 0]
        parts[steps] = rows, decode(model, prompts[rows], LowConfidenceStatic(), steps=steps)
    order = torch.cat([rows for rows, _ in parts.values()]).argsort()
    runs = [run for _, run in parts.values()]
    sizes = [sizes for run in runs for sizes in run.commit_lengths]
    return Run(
        answers=torch.cat([run.answers for run in runs])[order],
        calls=torch.cat([run.calls for run in runs])[order],
        token_forwards=torch.cat([run.token_forwards for run in runs])[order],
        seconds=sum(run.seconds for run in runs),
        flips=sum(run.flips for run in runs),
        pairs=sum(run.pairs for run in runs),
        commit_lengths=[sizes[place] for place in order.tolist()],
        last_tokens=None,
        tau=None,
    )


def lsp(**settings: Any) -> LongestStablePrefix:
    """The default scheduler with the delimiters of the run sums, and some settings changed."""
    return LongestStablePrefix(**{"delimiters": DELIMITERS, **settings})


class Decoder:
    """Decodes the same prompts by any arm; what several arms need is decoded once."""

    def __init__(self, model: Any, prompts: Tensor, tau: float, floor: float) -> None:
        self.model, self.prompts, self.tau, self.floor = model, prompts, tau, floor
        self._runs: dict[str, Run] = {}

    def __call__(self, arm: str) -> Run:
        """The run of an arm."""
        if arm not in self._runs:
            self._runs[arm] = self._decoded(arm)
        return self._runs[arm]

    def _decoded(self, arm: str) -> Run:
        if arm.startswith("lsp-tuned"):
            return self(arm.replace("tuned", f"floor-{self.floor:g}"))
        if arm == "static":
            return static_at(self.model, self.prompts, self("lsp").calls)
        scheduler, policy, settings = self.plan(arm)
        return decode(self.model, self.prompts, scheduler, policy, **settings)

    def plan(self, arm: str) -> tuple[Scheduler, CachePolicy | None, dict[str, Any]]:
        """Scheduler, cache and config of an arm."""
        if arm == "one-token":
            return LowConfidenceStatic(), None, {}
        if arm == "scattered-equal":
            return ScatteredSizes(self("lsp").commit_lengths), None, {}
        if arm == "prophet":
            return ProphetEarlyCommit(), None, {}
        if arm.startswith("blocks-"):
            return LowConfidenceDynamic(0.9), None, {"block_length": int(arm.removeprefix("blocks-"))}
        if arm.startswith("dynamic-"):
            threshold = float(arm.rpartition("-")[2])
            prompt_cache = PrefixCache() if "cached" in arm else None
            return LowConfidenceDynamic(threshold), prompt_cache, {"block_length": 8} if "blocks" in arm else {}
        if arm == "lsp-immediate":
            return lsp(), PrefixAbsorbCache("immediate"), {}
        policy = PrefixAbsorbCache() if arm.endswith("-cached") else None
        variant = arm.removesuffix("-cached")
        if variant == "fixed-threshold":
            return FixedThresholdPrefix(self.tau, delimiters=DELIMITERS), policy, {}
        changes: dict[str, dict[str, Any]] = {
            "lsp": {},
            "lsp-no-stability": {"stability": 0},
            "lsp-strict": {"pick": "strict"},
            "lsp-no-snap": {"lookback": 0},
            **{f"lsp-floor-{floor:g}": {"tau_floor": floor} for floor in FLOORS},
        }
        return lsp(**changes[variant]), policy, {}


def both_splits(count: int, tuning: bool = False) -> runsum.Problems:
    """The first problems of easy, then of hard."""
    easy, hard = (runsum.problems(split, count, tuning=tuning) for split in ("easy", "hard"))
    return runsum.Problems(
        torch.cat([easy.prompts, hard.prompts]), torch.cat([easy.answers, hard.answers]), (*easy.ids, *hard.ids)
    )


@prepare(per=("seed", "model", "tuning"))
def tuned(job: Trial) -> dict[str, float]:
    """The fixed threshold and the floor, chosen on problems of their own without a cache.

    The threshold is the median of the margins that the default scheduler saw at the ends of its blocks; the floor is that
    with the most exact answers, among equal ones that with the fewest calls.
    """
    model, problems = load(job["model"], seed=job.seed), both_splits(job["tuning"], tuning=True)
    default = decode(model, problems.prompts, lsp())
    assert default.tau is not None
    choices = []
    for floor in FLOORS:
        run = decode(model, problems.prompts, lsp(tau_floor=floor))
        exact = runsum.exact_match(problems.prompts, run.answers).double().mean()
        choices.append((-float(exact), float(run.calls.double().mean()), floor))
    return {"tau": float(np.median([tau for row in default.tau for tau in row])), "floor": min(choices)[2]}


def against_dynamic(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Exact match of the prefix scheduler's points minus that of the dynamic threshold at as many token-forwards.

    The dynamic threshold's sweep is joined by straight lines and held at its ends.
    """
    sweep = sorted((float(found[arm]["token_forwards"].values.mean()), arm) for arm in DYNAMIC)
    at = [tokens for tokens, _ in sweep]
    curve = np.stack([found[arm]["exact_match"].values for _, arm in sweep])
    gains = []
    for arm in LSP_POINTS:
        tokens = float(found[arm]["token_forwards"].values.mean())
        weights = np.array([np.interp(tokens, at, np.eye(len(at))[i]) for i in range(len(at))])
        gains.append(found[arm]["exact_match"].values - weights @ curve)
    return {"lsp-cached": {"gain": Cases(np.mean(gains, axis=0), found["lsp-cached"]["exact_match"].ids)}}


@experiment(
    arms=(
        "lsp", "lsp-no-stability", "lsp-strict", "lsp-no-snap", "lsp-floor-1", "lsp-floor-3", "lsp-floor-5", "lsp-tuned",
        "fixed-threshold",
        "lsp-cached", "lsp-no-stability-cached", "lsp-strict-cached", "lsp-no-snap-cached", "lsp-floor-1-cached",
        "lsp-floor-3-cached", "lsp-floor-5-cached", "lsp-tuned-cached", "fixed-threshold-cached", "lsp-immediate",
        "one-token", "static", "scattered-equal", "prophet", "blocks-4", "blocks-8",
        "dynamic-0.7", "dynamic-0.8", "dynamic-0.9", "dynamic-0.95",
        "dynamic-cached-0.7", "dynamic-cached-0.8", "dynamic-cached-0.9", "dynamic-cached-0.95",
        "dynamic-blocks-cached-0.7", "dynamic-blocks-cached-0.8", "dynamic-blocks-cached-0.9", "dynamic-blocks-cached-0.95",
    ),
    measures=(
        "exact_match", "exact_match_easy", "exact_match_hard", "calls", "token_forwards", "milliseconds", "flip_rate",
        "ends_on_delimiter", "gain",
    ),
    settings={"model": "runsum-dlm", "problems": 100, "tuning": 50},
    needs=(tuned,),
    together=("arm",),
    derive=against_dynamic,
    seeds=5,
    minutes=20,
    quick={
        "seeds": 3,
        "problems": 32,
        "tuning": 16,
        "arms": (
            "lsp", "lsp-no-snap", "lsp-tuned", "lsp-cached", "lsp-no-snap-cached", "lsp-floor-1-cached",
            "lsp-floor-3-cached", "lsp-floor-5-cached", "one-token", "static", "scattered-equal", "dynamic-0.9",
            "dynamic-cached-0.7", "dynamic-cached-0.8", "dynamic-cached-0.9", "dynamic-cached-0.95",
        ),
    },
)  # fmt: skip
def run_sums(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Exact answers, calls and computed tokens of every scheduler on the same run sums, easy and hard, under one model."""
    chosen = trial.prepared(tuned).result
    problems = both_splits(trial["problems"])
    decoder = Decoder(load(trial["model"], seed=trial.seed), problems.prompts, chosen["tau"], chosen["floor"])
    return {cell: measured(decoder(cell.arm), problems) for cell in trial.progress(list(trial.cells()))}


def measured(run: Run, problems: runsum.Problems) -> dict[str, Any]:
    """The measures of one arm."""
    exact = runsum.exact_match(problems.prompts, run.answers).double().numpy()
    ids, half = problems.ids, len(problems.ids) // 2
    found: dict[str, Any] = {
        "exact_match": Cases(exact, ids),
        "exact_match_easy": Cases(exact[:half], ids[:half]),
        "exact_match_hard": Cases(exact[half:], ids[half:]),
        "calls": Cases(run.calls.double().numpy(), ids),
        "token_forwards": Cases(run.token_forwards.double().numpy(), ids),
        "milliseconds": 1000 * run.seconds / len(ids),
        # a run of one call has no two forwards to compare
        "flip_rate": Count(run.flips, max(run.pairs, 1)),
    }
    if run.last_tokens is not None:
        ends = [token in DELIMITERS for row in run.last_tokens for token in row]
        found["ends_on_delimiter"] = Count(sum(ends), len(ends))
    return found


# Real text --------------------------------------------------------------------------------------------------------

TEXT_ARMS: Mapping[str, dict[str, Any]] = {
    "lsp": {},
    "lsp-snapping": {"stability": 0},
    "lsp-plain": {"stability": 0, "lookback": 0},
}
ALPHA = 0.25


def text_delimiters() -> Tensor:
    """The delimiters of the tokenizer of the real text."""
    from transformers import PreTrainedTokenizerFast

    mask = delimiter_mask(PreTrainedTokenizerFast(tokenizer_object=gsm8k_text.tokenizer()), "text")
    mask[gsm8k_text.END] = True
    return mask


def text_prompts(count: int, seed: int) -> tuple[list[Tensor], tuple[str, ...]]:
    """Questions of a seed as tokens without pads, and their names."""
    drawn = gsm8k_text.sample(gsm8k_text.texts("test"), count, seed)
    return [prompt[visible] for prompt, visible in zip(drawn.prompts, drawn.visible)], drawn.ids


def decay(active: Sequence[int]) -> float:
    """Slope of the logarithm of the active length over the calls, by least squares."""
    return float(np.polyfit(np.arange(len(active)), np.log(active), 1)[0]) if len(active) > 1 else -math.inf


@experiment(
    arms=("lsp", "lsp-snapping", "lsp-plain", "one-token"),
    measures=("decay", "calls", "calls_over_bound", "token_forwards", "attention_work", "flip_rate"),
    settings={"n": (32, 64, 128), "problems": 100},
    together=("arm", "n"),
    seeds=5,
    minutes=20,
    quick=False,
)
def real_text(trial: Trial) -> dict[Any, dict[str, Any]]:
    """How fast the active suffix shrinks on real text, with the cache that appends; the text itself is not judged."""
    model, delimiters = gsm8k_text.load(), text_delimiters()
    prompts, ids = text_prompts(trial["problems"], trial.seed)
    found: dict[Any, dict[str, Any]] = {}
    for cell in trial.progress(list(trial.cells())):
        n = int(cell["n"])
        if cell.arm == "one-token":  # known without decoding: n calls, each over the whole canvas
            each = np.ones(len(ids))
            found[cell] = {"calls": Cases(n * each, ids), "attention_work": Cases(float(n) ** 3 * each, ids)}
            continue
        config = DiffusionGenerationConfig(max_new_tokens=n, eos_policy="none", seed=trial.seed)
        scheduler = LongestStablePrefix(alpha=ALPHA, delimiters=delimiters, **TEXT_ARMS[cell.arm])
        runs = [diffusion_generate(model, [prompt], config, scheduler, PrefixAbsorbCache()) for prompt in prompts]
        active = [run.stats["active_lengths"][0] for run in runs]
        calls = np.array([run.forwards for run in runs], dtype=float)
        bound = 1 + math.log(n) / -math.log(1 - ALPHA)
        found[cell] = {
            "decay": Cases([decay(lengths) for lengths in active], ids),
            "calls": Cases(calls, ids),
            "calls_over_bound": Cases(calls - bound, ids),
            "token_forwards": Cases([run.token_forwards for run in runs], ids),
            # queries times keys within the answer, whose length is what grows
            "attention_work": Cases([float(n * sum(lengths)) for lengths in active], ids),
            "flip_rate": Count(sum(run.stats["flips"][0] for run in runs), max(sum(run.stats["flip_pairs"][0] for run in runs), 1)),
        }  # fmt: skip
    return found


# Replayed time ----------------------------------------------------------------------------------------------------


@prepare(per=("seed", "traces"))
def traces(job: Trial) -> None:
    """When the default scheduler, and the static one with as many calls, committed each token of some real answers."""
    model, delimiters = gsm8k_text.load(), text_delimiters()
    prompts, _ = text_prompts(job["traces"], job.seed)
    kept: dict[str, Tensor] = {}
    for row, prompt in enumerate(prompts):
        config = DiffusionGenerationConfig(
            max_new_tokens=gsm8k_text.ANSWER_LENGTH, eos_policy="none", return_trace=True, seed=0
        )
        ours = diffusion_generate(
            model,
            [prompt],
            config,
            LongestStablePrefix(alpha=ALPHA, delimiters=delimiters),
            PrefixAbsorbCache(),
        )
        static = diffusion_generate(model, [prompt], replace(config, steps=ours.steps))
        for name, out in (("lsp", ours), ("static", static)):
            assert out.trace is not None
            kept[f"{name}-{row}"] = out.trace.steps[0, out.canvas_start :].contiguous()
    save_file(kept, job.folder / "traces.safetensors")


@experiment(
    arms=("lsp", "static"),
    measures=("replayed_seconds", "calls", "token_forwards"),
    settings={"length": (256, 512, 1024, 2048), "traces": 10},
    needs=(traces,),
    together=("arm", "length"),
    alone=True,
    threads=1,
    seeds=5,
    minutes=20,
    quick=False,
)
def replayed(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Seconds of a run's forwards on a model of d 768 and 12 layers: the shapes are real, scaled; each is timed once a seed.

    Half of the canvas is prompt. LSP appends to its cache; the static schedule keeps the prompt (PrefixCache).
    """
    steps = load_file(trial.prepared(traces) / "traces.safetensors")
    timer = ReplayTimer(
        MDLMConfig(
            vocab_size=1024,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=2048,
            mask_token_id=1023,
            max_position_embeddings=2048,
        ),
        repeats=1,
    )
    found = {}
    for cell in trial.progress(list(trial.cells())):
        length = int(cell["length"])
        factor = length // 2 // gsm8k_text.ANSWER_LENGTH
        policy: CachePolicy = PrefixAbsorbCache() if cell.arm == "lsp" else PrefixCache()
        runs = [
            timer.replay(scaled_trace(steps[f"{cell.arm}-{row}"], factor), length // 2, policy)
            for row in range(trial["traces"])
        ]
        found[cell] = {
            "replayed_seconds": Cases([run.seconds for run in runs]),
            "calls": Cases([run.forwards for run in runs]),
            "token_forwards": Cases([run.token_forwards for run in runs]),
        }
    return found
