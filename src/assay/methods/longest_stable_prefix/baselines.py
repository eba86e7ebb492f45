"""Rivals: Prophet's early full commit, a fixed threshold, and the same commit sizes scattered over the canvas.

Semi-autoregressive blocks need nothing here: `LowConfidenceDynamic` with a ``block_length``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import Commit, Draft, GenState, LowConfidenceStatic, Scheduler, most_confident
from assay.mdlm._state import Confidence
from assay.methods.longest_stable_prefix._delimiters import Delimiters
from assay.methods.longest_stable_prefix._prefix import NoDelimiter, PrefixRule
from assay.methods.longest_stable_prefix._scheduler import LongestStablePrefix


class FixedThresholdPrefix(LongestStablePrefix):
    """`LongestStablePrefix` with one threshold for all steps: commits while the running minimum of the margins is at least tau.

    Parameters
    ----------
    tau
        In logits.
    min_commit, lookback, delimiters, stability, no_delimiter, word_safe, tokenizer
        As for `LongestStablePrefix`.

    Source: Li et al. 2026 (LSP, arXiv:2603.05454), ablation.
    """

    def __init__(
        self,
        tau: float,
        min_commit: int = 1,
        lookback: int = 16,
        delimiters: Delimiters = "text",
        stability: int = 1,
        no_delimiter: NoDelimiter = "keep",
        word_safe: bool = False,
        *,
        tokenizer: Any = None,
    ) -> None:
        rule = PrefixRule(min_commit=min_commit, lookback=lookback, no_delimiter=no_delimiter, fixed_tau=tau)
        self._configure(rule, delimiters, stability, word_safe, tokenizer)

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"FixedThresholdPrefix(tau={self.rule.fixed_tau}, {self._common})"


class ProphetEarlyCommit(Scheduler):
    """A scattered schedule that stops early: once the model is sure of all masks on average, they are committed at once.

    Sure means that the mean gap between the two largest logits, over all of the row's masks, reaches a threshold that
    falls with the share of masks already committed.

    Parameters
    ----------
    scheduler
        Decides until then. None: `LowConfidenceStatic`.
    thresholds
        The threshold of each equal part of the progress, here thirds; in logits.

    Raises
    ------
    InputError
        If there is no threshold, or one is NaN.

    Source: Li et al. 2025 (Prophet, arXiv:2508.19982). The thresholds are quoted from memory and not verified; progress
    counts masks where the paper counts steps, which is the same under a static schedule.
    """

    def __init__(self, scheduler: Scheduler | None = None, thresholds: Sequence[float] = (7.5, 5.0, 2.5)) -> None:
        if not thresholds:
            raise InputError("thresholds is empty, expected at least one: the gap at which all masks are committed")
        self.scheduler = LowConfidenceStatic() if scheduler is None else scheduler
        self.thresholds = tuple(float(threshold) for threshold in thresholds)
        if any(math.isnan(threshold) for threshold in self.thresholds):
            raise InputError(f"thresholds are {self.thresholds}, one of them not a number: give gaps in logits")

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"ProphetEarlyCommit({self.scheduler.name}, thresholds={self.thresholds})"

    def reset(self, state: GenState) -> None:
        """Count the masks."""
        self.scheduler.reset(state)
        self._masks = state.masked.sum(1).clamp(min=1)

    def candidates(self, state: GenState) -> Int[Tensor, "B 2"]:
        """All masks."""
        window = self.scheduler.candidates(state)
        self._window = window.cpu() if isinstance(window, Tensor) else torch.tensor([window] * len(state.rows))
        masked = state.masked
        first = masked.int().argmax(1)
        end = state.length - masked.flip(1).int().argmax(1)
        return torch.stack([first, torch.where(masked.any(1), end, first)], 1)

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """All masks of the rows that are sure; of the others, what the scheduler chooses in its own window."""
        gap = draft.confidence("logit_margin", "raw").clamp(min=0)
        mean = torch.where(draft.masked, gap, 0).sum(1) / draft.masked.sum(1).clamp(min=1)
        progress = 1 - state.masked.sum(1) / self._masks[state.rows]
        part = (progress * len(self.thresholds) + 1e-6).long().clamp(max=len(self.thresholds) - 1)
        sure = mean >= torch.tensor(self.thresholds, dtype=mean.dtype)[part].to(mean.device)
        everything = Commit.where(draft, draft.masked & sure[:, None])
        others = draft.masked & ~sure[:, None]
        inside = (draft.positions >= self._window[:, :1]) & (draft.positions < self._window[:, 1:])
        rest = self.scheduler.commit(state, logits, _restricted(draft, others & inside.to(others.device)))
        return Commit(
            [a if len(a) else b for a, b in zip(everything.positions, rest.positions)],
            [a if len(a) else b for a, b in zip(everything.tokens, rest.tokens)],
        )


def _restricted(draft: Draft, masked: Bool[Tensor, "B w"]) -> Draft:
    """The same draft with fewer candidates."""
    rows, places = masked.nonzero(as_tuple=True)
    filtered = None if draft.filtered is None else draft.filtered[draft.of_candidates(masked)]
    return Draft(
        positions=draft.positions,
        masked=masked,
        tokens=draft.tokens,
        raw=draft.raw,
        generator=draft.generator,
        filtered=filtered,
        where=(rows, places),
    )


class ScatteredSizes(Scheduler):
    """Commits given numbers of tokens, each step the most confident masks anywhere: prefix commits without the prefix.

    Parameters
    ----------
    sizes
        Of each row of the call, the numbers that its steps commit, as in the stats of a `LongestStablePrefix` run
        (``commit_lengths``). The last step commits all that is left: what that run's EOS rule filled.
    confidence
        What ranks the masks.

    Source: Li et al. 2026 (LSP, arXiv:2603.05454), ablation.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], confidence: Confidence = "max_prob") -> None:
        self.sizes, self.confidence = [list(row) for row in sizes], confidence

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"ScatteredSizes(confidence={self.confidence})"

    def reset(self, state: GenState) -> None:
        """Check that there are sizes for each row.

        Raises
        ------
        InputError
            If not, or a row's sizes are empty or not positive.
        """
        if len(self.sizes) != len(state.rows):
            raise InputError(
                f"there are sizes for {len(self.sizes)} rows and {len(state.rows)} prompts: give a list a row"
            )
        if not all(row and min(row) >= 1 for row in self.sizes):
            raise InputError("a row's sizes are empty or hold a number below 1: give what each step commits")

    def candidates(self, state: GenState) -> tuple[int, int]:
        """The whole canvas."""
        return 0, state.length

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """The most confident masks, as many as are due."""
        due = []
        for row, step in zip(state.rows.tolist(), state.commits.tolist()):
            sizes = self.sizes[row]
            due.append(sizes[step] if step < len(sizes) - 1 else state.length)
        confidence = draft.confidence(self.confidence, "raw")
        return Commit.where(draft, most_confident(confidence, torch.tensor(due)))
