"""Schedulers and cache policies of all methods on the same run sums: exact answers, calls, computed tokens, seconds.

The main model of seed 0, the first 50 problems of each split, decoded one by one on one thread as a user would wait for
them. A table, not a contest with bars: a study judges its own method, and this is where they stand side by side.
``python -m benchmarks.decoding FILE`` draws one answer, scheduler by scheduler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.mdlm import (
    CachePolicy,
    DiffusionGenerationConfig,
    DreamSchedule,
    DualCache,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    NoCache,
    PrefixCache,
    Scheduler,
    Sequential,
    diffusion_generate,
    trace_picture,
)
from assay.methods.freecache_guided_diffusion import ARGuider, FreeCache, GuidedScheduler
from assay.methods.longest_stable_prefix import LongestStablePrefix, PrefixAbsorbCache
from assay.methods.longest_stable_prefix.baselines import ProphetEarlyCommit
from assay.testbeds import load, runsum
from benchmarks._harness import Ratio

PROBLEMS = 50
DELIMITERS = (runsum.STEP_END, runsum.EOS)


@dataclass(frozen=True)
class Row:
    """One scheduler under one cache policy, both made anew for each problem."""

    name: str
    scheduler: Callable[[], Scheduler]
    policy: Callable[[], CachePolicy] = NoCache
    settings: dict[str, Any] = field(default_factory=dict)


def _lsp(**settings: Any) -> LongestStablePrefix:
    return LongestStablePrefix(delimiters=DELIMITERS, **settings)


def _rows() -> list[Row]:
    guider = ARGuider(load("runsum-guider"))
    blocks = {"block_length": 8}
    return [
        Row("one token a step", LowConfidenceStatic),
        Row("one token a step + PrefixCache, blocks of 8", LowConfidenceStatic, PrefixCache, blocks),
        Row("one token a step + DualCache, blocks of 8", LowConfidenceStatic, DualCache, blocks),
        Row("one token a step + FreeCache, blocks of 8", LowConfidenceStatic, FreeCache, blocks),
        Row("static, 20 steps", LowConfidenceStatic, settings={"steps": 20}),
        Row("static, 5 steps", LowConfidenceStatic, settings={"steps": 5}),
        Row("dynamic 0.9", lambda: LowConfidenceDynamic(0.9)),
        Row("dynamic 0.9 + PrefixCache", lambda: LowConfidenceDynamic(0.9), PrefixCache),
        Row("dynamic 0.9 + PrefixCache, blocks of 8", lambda: LowConfidenceDynamic(0.9), PrefixCache, blocks),
        Row("Prophet", ProphetEarlyCommit),
        Row("LSP", _lsp),
        Row("LSP + PrefixAbsorbCache", _lsp, PrefixAbsorbCache),
        Row("LSP, tau_floor 3", lambda: _lsp(tau_floor=3.0)),
        Row("LSP, tau_floor 3 + PrefixAbsorbCache", lambda: _lsp(tau_floor=3.0), PrefixAbsorbCache),
        Row("guided", lambda: GuidedScheduler(guider)),
        Row("guided + FreeCache, sliding (8, 16)", lambda: GuidedScheduler(guider), lambda: FreeCache("sliding", window=(8, 16))),
    ]  # fmt: skip


def _decoded(row: Row, model: Any, split: str) -> Ratio:
    problems = runsum.problems(split, PROBLEMS)
    config = DiffusionGenerationConfig(max_new_tokens=runsum.ANSWER_LENGTH, seed=0, **row.settings)
    answers, calls, tokens = [], 0, 0
    start = time.perf_counter()
    for prompt in problems.prompts:
        out = diffusion_generate(model, prompt[None], config, row.scheduler(), row.policy())
        answers.append(out.sequences[0, out.canvas_start :])
        calls += out.forwards
        tokens += out.token_forwards
    seconds = time.perf_counter() - start
    exact = float(runsum.exact_match(problems.prompts, torch.stack(answers)).double().mean())
    return Ratio(
        f"exact match, {split}: {row.name}",
        exact,
        unit="",
        note=f"{calls / PROBLEMS:.1f} calls, {tokens / PROBLEMS:.0f} token-forwards, {seconds / PROBLEMS * 1e3:.0f} ms",
    )


def measure() -> list[Ratio]:
    """Every row on both splits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load("runsum-dlm")
        return [_decoded(row, model, split) for split in ("easy", "hard") for row in _rows()]
    finally:
        torch.set_num_threads(before)


def picture(path: str) -> None:
    """Draw at which step each scheduler commits each position of one hard run sum; wrong answers are named so."""
    guider = ARGuider(load("runsum-guider"))
    strips: dict[str, tuple[Scheduler, dict[str, Any]]] = {
        "Sequential": (Sequential(), {}),
        "static, 40 steps": (LowConfidenceStatic(), {}),
        "static, 8 steps": (LowConfidenceStatic(), {"steps": 8}),
        "Dream, 8 steps": (DreamSchedule(), {"steps": 8}),
        "dynamic 0.9": (LowConfidenceDynamic(0.9), {}),
        "Longest Stable Prefix": (_lsp(), {}),
        "the same, tau_floor 3": (_lsp(tau_floor=3.0), {}),
        "guided": (GuidedScheduler(guider), {}),
    }
    model, problem = load("runsum-dlm"), runsum.problems("hard", 1)
    drawn = {}
    for name, (scheduler, settings) in strips.items():
        config = DiffusionGenerationConfig(max_new_tokens=runsum.ANSWER_LENGTH, seed=0, return_trace=True, **settings)
        out = diffusion_generate(model, problem.prompts, config, scheduler)
        right = bool(runsum.exact_match(problem.prompts, out.sequences[:, out.canvas_start :]).all())
        drawn[name if right else f"{name} (wrong)"] = out
    signs = list(runsum.text(problem.answers[0]))
    trace_picture(drawn, signs=signs, title=runsum.text(problem.prompts[0])).savefig(path)


if __name__ == "__main__":
    picture(*sys.argv[1:])
