"""The experiments behind the claims: run sums with an exact checker, drift, likelihood of real text, and replayed time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from assay.bench import Cases, Trial, experiment, prepare
from assay.mdlm import (
    CachePolicy,
    DiffusionGenerationConfig,
    DualCache,
    LowConfidenceDynamic,
    MDLMConfig,
    NoCache,
    PrefixCache,
    Scheduler,
    diffusion_generate,
    trace_picture,
)
from assay.testbeds import ReplayTimer, gsm8k_text, load, runsum

from . import ARGuider, FreeCache, GuidedScheduler, SpeculativeDiffusionScheduler

NEW = runsum.ANSWER_LENGTH
BLOCK = 8
WINDOW = (8, 16)
THRESHOLDS = (0.7, 0.9, 0.95)
AT_GUIDED_STEPS = {"static-prob": "max_prob", "static-margin": "margin", "static-entropy": "neg_entropy"}
LAYERS = slice(1, 4)  # the second to the fourth: the first sees no context


@dataclass(frozen=True)
class Run:
    """What one arm wrote, and what each problem cost.

    Attributes
    ----------
    answers : (problems, 40)
    steps, forwards, tokens : (problems,)
        Steps and forwards of the model, and its token-forwards.
    weighted : (problems,)
        Token-forwards, with the guider's tokens weighted by its share of the parameters.
    """

    answers: Tensor
    steps: Tensor
    forwards: Tensor
    tokens: Tensor
    weighted: Tensor


class Decoder:
    """Decodes the same prompts by any arm, under one trained seed; what several arms need is decoded once."""

    def __init__(self, name: str, seed: int, prompts: Tensor, threshold: float = 0.9) -> None:
        self.model = load(name, seed=seed)
        self.prompts, self.seed, self.threshold = prompts, seed, threshold
        self._runs: dict[str, Run] = {}

    def __call__(self, arm: str) -> Run:
        """The run of an arm."""
        if arm not in self._runs:
            self._runs[arm] = self._decoded(arm)
        return self._runs[arm]

    def _decoded(self, arm: str) -> Run:
        if arm in AT_GUIDED_STEPS:
            return self._static(self("guided").steps, AT_GUIDED_STEPS[arm])
        if arm == "ar":
            return self._autoregressive()
        if arm == "dynamic-tuned":
            return self(f"dynamic-{self.threshold:g}")
        return self._run(self.prompts, *self._plan(arm))

    def _plan(self, arm: str) -> tuple[dict[str, Any], Scheduler | None, CachePolicy]:
        """Config, scheduler and cache of an arm."""
        in_blocks: dict[str, CachePolicy] = {
            "full-blocks": NoCache(),
            "settled": FreeCache(),
            "immediate": FreeCache(freeze="immediate"),
            "prefix": PrefixCache(),
            "dual": DualCache(),
        }
        if arm == "full":
            return {}, None, NoCache()
        if arm in in_blocks:
            return {"block_length": BLOCK}, None, in_blocks[arm]
        kind, _, rest = arm.partition("-")
        if kind == "static":
            return {"steps": int(rest)}, None, NoCache()
        if kind == "dynamic":
            return {}, LowConfidenceDynamic(float(rest)), NoCache()
        guider = self.guider(arm)
        if arm.startswith("sdd"):
            exact = rest == "exact"
            return {"temperature": float(exact)}, SpeculativeDiffusionScheduler(guider, exact), NoCache()
        policy: CachePolicy = NoCache()
        if kind == "sliding":
            policy = FreeCache("sliding", window=WINDOW, keep_last_commit=rest != "dropped")
        return {}, GuidedScheduler(guider, "topk_relative" if rest == "relative" else "exact"), policy

    def guider(self, arm: str) -> ARGuider:
        """The judge of an arm: two layers; four layers, the model that this diffusion model came from; or untrained."""
        if arm == "guided-strong":
            return ARGuider(load("runsum-ar", seed=self.seed))
        trained = load("runsum-guider")
        if arm == "guided-random":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return ARGuider(type(trained)(trained.config).eval())
        return ARGuider(trained)

    def picture(self, prompt: Tensor) -> Any:
        """When each position of one answer was committed, by some of the arms; ``prompt`` (1, 35)."""
        named = {
            "one token a step": "full",
            "FreeCache, blocks of 8": "settled",
            "static, 5 steps": "static-5",
            "threshold 0.9": "dynamic-0.9",
            "guided": "guided",
            "guided, window (8, 16)": "sliding",
        }
        outputs = {}
        for name, arm in named.items():
            settings, scheduler, policy = self._plan(arm)
            config = DiffusionGenerationConfig(max_new_tokens=NEW, seed=self.seed, return_trace=True, **settings)
            outputs[name] = diffusion_generate(self.model, prompt, config, scheduler, policy)
        written = outputs["one token a step"].sequences[0, runsum.PROMPT_LENGTH :]
        return trace_picture(outputs, signs=list(runsum.text(written)), title=runsum.text(prompt[0]))

    def _run(self, prompts: Tensor, settings: dict[str, Any], scheduler: Scheduler | None, policy: CachePolicy) -> Run:
        config = DiffusionGenerationConfig(max_new_tokens=NEW, seed=self.seed, **settings)
        out = diffusion_generate(self.model, prompts, config, scheduler, policy)
        tokens = out.row_token_forwards.double()
        weighted = tokens
        if "ar_token_forwards" in out.stats:
            assert isinstance(scheduler, GuidedScheduler | SpeculativeDiffusionScheduler)
            weighted = tokens + self._price(scheduler.guider) * torch.tensor(out.stats["ar_token_forwards"])
        return Run(out.sequences[:, runsum.PROMPT_LENGTH :], out.row_steps, out.row_forwards, tokens, weighted)

    def _price(self, guider: Any) -> float:
        """Of a token of the guider, in tokens of the model."""
        return guider.parameters / sum(parameter.numel() for parameter in self.model.parameters())

    def _static(self, steps: Tensor, confidence: str) -> Run:
        """`LowConfidenceStatic` on the whole canvas, each problem with its own number of steps."""
        parts = [
            ((steps == n).nonzero()[:, 0], self._run(self.prompts[steps == n], {"steps": n, "confidence": confidence}, None, NoCache()))
            for n in steps.unique().tolist()
        ]  # fmt: skip
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return Run(
            *(
                torch.cat([getattr(run, name) for _, run in parts])[order]
                for name in ("answers", "steps", "forwards", "tokens", "weighted")
            )
        )

    @torch.no_grad()
    def _autoregressive(self) -> Run:
        guider = self.guider("ar")
        written = guider.model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=runsum.EOS,
            pad_token_id=runsum.EOS,
            suppress_tokens=[runsum.MASK],
        )[:, runsum.PROMPT_LENGTH :]
        ends = (written == runsum.EOS).int()
        steps = torch.where(ends.any(1), ends.argmax(1) + 1, written.shape[1])
        tokens = (runsum.PROMPT_LENGTH + steps - 1).double()
        return Run(written, steps, torch.zeros_like(steps), torch.zeros_like(tokens), self._price(guider) * tokens)


def problems_of(splits: Sequence[str], count: int, tuning: bool = False) -> runsum.Problems:
    """The first problems of each split, one split after the other."""
    parts = [runsum.problems(split, count, tuning=tuning) for split in splits]
    return runsum.Problems(
        torch.cat([part.prompts for part in parts]),
        torch.cat([part.answers for part in parts]),
        tuple(name for part in parts for name in part.ids),
    )


def measured(run: Run, problems: runsum.Problems) -> dict[str, Any]:
    """The measures of one arm: over all problems, and the exact matches of each split that is there."""
    exact, ids = runsum.exact_match(problems.prompts, run.answers).double().numpy(), problems.ids
    found: dict[str, Any] = {
        "exact_match": Cases(exact, ids),
        "steps": Cases(run.steps.double().numpy(), ids),
        "calls": Cases(run.forwards.double().numpy(), ids),
        "token_forwards": Cases(run.tokens.numpy(), ids),
        "weighted_tokens": Cases(run.weighted.double().numpy(), ids),
    }
    for split in ("easy", "hard"):
        rows = [row for row, name in enumerate(ids) if name.startswith(split)]
        if rows:
            found[f"exact_match_{split}"] = Cases(exact[rows], [ids[row] for row in rows])
    return found


@prepare(per=("seed", "splits", "tuning"))
def tuned(job: Trial) -> dict[str, float]:
    """The best of the three thresholds on problems of their own: most exact answers, then fewest calls."""
    problems = problems_of(job["splits"].split("+"), job["tuning"], tuning=True)
    decoder = Decoder("runsum-dlm", job.seed, problems.prompts)
    choices = []
    for threshold in THRESHOLDS:
        run = decoder(f"dynamic-{threshold:g}")
        exact = runsum.exact_match(problems.prompts, run.answers).double().mean()
        choices.append((-float(exact), float(run.forwards.double().mean()), threshold))
    return {"threshold": min(choices)[2]}


@experiment(
    arms=(
        "full", "full-blocks", "static-20", "static-10", "static-5", "static-prob", "static-margin", "static-entropy",
        "dynamic-0.7", "dynamic-0.9", "dynamic-0.95", "dynamic-tuned", "settled", "immediate", "prefix", "dual",
        "guided", "guided-relative", "sliding", "sliding-dropped", "sdd-exact", "sdd-greedy", "ar",
        "guided-random", "guided-strong",
    ),
    measures=(
        "exact_match", "exact_match_easy", "exact_match_hard", "steps", "calls", "token_forwards", "weighted_tokens",
    ),
    settings={"splits": "easy+hard", "problems": 100, "tuning": 50},
    needs=(tuned,),
    together=("arm",),
    seeds=5,
    minutes=30,
    quick={
        "seeds": 3,
        "splits": "hard",
        "problems": 24,
        "tuning": 16,
        "arms": (
            "full", "full-blocks", "static-prob", "static-margin", "static-entropy", "dynamic-0.9", "dynamic-tuned", "settled",
            "immediate", "guided", "guided-relative", "sliding", "sliding-dropped", "sdd-greedy", "ar",
        ),
    },
)  # fmt: skip
def main(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Exact answers, steps and computed tokens on run sums, by a model whose prompt hardly depends on its answer."""
    problems = problems_of(trial["splits"].split("+"), trial["problems"])
    threshold = trial.prepared(tuned).result["threshold"]
    decoder = Decoder("runsum-dlm", trial.seed, problems.prompts, threshold)
    decoder.picture(problems.prompts[-1:]).savefig(trial.folder / "decoding.svg")
    return {cell: measured(decoder(cell.arm), problems) for cell in trial.progress(list(trial.cells()))}


@experiment(
    arms=("full", "settled", "prefix", "sliding"),
    measures=(
        "exact_match", "exact_match_easy", "exact_match_hard", "steps", "calls", "token_forwards", "weighted_tokens",
    ),
    settings={"problems": 100},
    together=("arm",),
    seeds=5,
    minutes=20,
    quick=False,
)  # fmt: skip
def plain(trial: Trial) -> dict[Any, dict[str, Any]]:
    """The same by a model whose prompt may depend on its answer, which a cache then does not see."""
    problems = problems_of(("easy", "hard"), trial["problems"])
    decoder = Decoder("runsum-dlm-plain", trial.seed, problems.prompts)
    return {cell: measured(decoder(cell.arm), problems) for cell in trial.progress(list(trial.cells()))}


# Drift ------------------------------------------------------------------------------------------------------------


@experiment(
    arms=("prompt", "masked", "committed"),
    measures=("cosine",),
    settings={"model": ("runsum-dlm", "runsum-dlm-plain"), "splits": "easy+hard", "problems": 50},
    together=("arm",),
    seeds=5,
    minutes=10,
    quick={"model": ("runsum-dlm",), "seeds": 3, "splits": "hard", "problems": 12},
)
def drift(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Cosine of keys and values between forwards of a full recompute, layers 2 to 4.

    Of the prompt's and of still masked columns: the first forward against three later ones. Of committed columns: one
    forward against the next.
    """
    problems = problems_of(trial["splits"].split("+"), trial["problems"])
    model = load(trial["model"], seed=trial.seed)
    found = drifts(model, problems.prompts)
    return {cell: {"cosine": Cases(found[cell.arm].numpy(), problems.ids)} for cell in trial.cells()}


@torch.no_grad()
def drifts(model: Any, prompts: Tensor) -> dict[str, Tensor]:
    """The three mean cosines of each problem (problems,)."""
    config = DiffusionGenerationConfig(max_new_tokens=NEW, return_trace=True, seed=0)
    trace = diffusion_generate(model, prompts, config).trace
    assert trace is not None

    def held(step: int) -> tuple[Tensor, Tensor]:
        """Keys and values (2 * layers, problems, heads, columns, width) before a step, and what was masked then."""
        masked = (trace.steps == 0) | (trace.steps >= step)
        cache = model.new_cache(len(prompts), trace.steps.shape[1])
        nothing = torch.zeros(0, dtype=torch.long)
        model(torch.where(masked, model.mask_token_id, trace.tokens), cache=cache, logits_for=nothing)
        return torch.cat([cache.keys[LAYERS], cache.values[LAYERS]]), masked

    first, open_at_first = held(1)
    found: dict[str, list[Tensor]] = {"prompt": [], "masked": [], "committed": []}
    for step in (8, 16, 24):
        now, masked = held(step)
        after, _ = held(step + 1)
        since = cosine_similarity(first, now, dim=-1).double().mean((0, 2))  # (problems, columns)
        next_step = cosine_similarity(now, after, dim=-1).double().mean((0, 2))
        found["prompt"].append(since[:, : prompts.shape[1]].mean(1))
        found["masked"].append(_mean_where(since, masked))
        found["committed"].append(_mean_where(next_step, open_at_first & ~masked))
    return {name: torch.stack(values).nanmean(0) for name, values in found.items()}


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    return values.masked_fill(~chosen, torch.nan).nanmean(1)


# Real text --------------------------------------------------------------------------------------------------------

TEXT_POLICIES: Mapping[str, CachePolicy] = {
    "full": NoCache(),
    "settled": FreeCache(),
    "immediate": FreeCache(freeze="immediate"),
}


@experiment(
    arms=("full", "settled", "immediate"),
    measures=("nll", "token_forwards"),
    settings={"problems": 100, "block": 16},
    together=("arm",),
    seeds=5,
    minutes=20,
    quick=False,
)
def text(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Nats a token of the true answers of GSM8K, walked from left to right in blocks, one forward a block."""
    model = gsm8k_text.load()
    problems = gsm8k_text.sample(gsm8k_text.texts("test"), trial["problems"], trial.seed)
    found = {}
    for cell in trial.progress(list(trial.cells())):
        said = gsm8k_text.teacher_forced_nll(model, TEXT_POLICIES[cell.arm], problems, trial["block"])
        found[cell] = {
            "nll": Cases([float(nll.mean()) for nll in said.nll], problems.ids),
            "token_forwards": Cases(said.token_forwards, problems.ids),
        }
    return found


# Replayed time ----------------------------------------------------------------------------------------------------

REPLAYED: Mapping[str, CachePolicy] = {
    "full": NoCache(),
    "settled": FreeCache(),
    "immediate": FreeCache(freeze="immediate"),
    "prefix": PrefixCache(),
}


@experiment(
    arms=("full", "settled", "immediate", "prefix"),
    measures=("replay_seconds", "token_forwards"),
    settings={"length": (256, 512, 1024, 2048), "block": 32},
    together=("arm", "length"),
    alone=True,
    threads=1,
    seeds=5,
    minutes=20,
    quick=False,
)
def replay(trial: Trial) -> dict[Any, dict[str, Any]]:
    """Seconds of a run's forwards on a model of d 768 and 12 layers; half of the canvas is prompt, one token a step.

    In blocks of one token a step the shapes of the forwards do not depend on which token of the block is committed when,
    so the trace is that of the order of the columns.
    """
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
        half = int(cell["length"]) // 2
        replayed = timer.replay(torch.arange(1, half + 1), half, REPLAYED[cell.arm], trial["block"])
        found[cell] = {"replay_seconds": replayed.seconds, "token_forwards": float(np.float64(replayed.token_forwards))}
    return found
