"""Guided Diffusion: the diffusion model drafts, a small autoregressive model says how much of the draft to keep."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import Commit, Draft, GenState, Scheduler

from ._aligner import TokenAligner
from ._matching import Guider, Match, MatchResult, MatchRule


@dataclass(frozen=True)
class DraftedRow:
    """What one row of the canvas puts before a guider.

    Attributes
    ----------
    prefix
        The row's tokens left of its first mask, without pads.
    tokens
        The drafts from the first mask on, and between them the tokens that are given.
    judged
        Which of them are drafts.
    places
        Where each draft stands among the columns of `Draft`.
    """

    prefix: list[int]
    tokens: list[int]
    judged: list[bool]
    places: list[int]

    @classmethod
    def of(
        cls, state: GenState, draft: Draft, drafted: Int[Tensor, "B w"], masked: Bool[Tensor, "B w"], row: int
    ) -> "DraftedRow | None":
        """Row number ``row`` of the state; None if it has no candidate. ``drafted``, ``masked``: the draft's, on the CPU."""
        if not bool(masked[row].any()):
            return None
        canvas, pad = state.host[row], int(state.pad[row])
        first = int((canvas == state.mask_id).int().argmax())
        proposed = {
            column: (place, token)
            for place, (column, token, is_candidate) in enumerate(
                zip(draft.positions.tolist(), drafted[row].tolist(), masked[row].tolist(), strict=True)
            )
            if is_candidate
        }
        if first not in proposed:
            raise InputError(
                f"guidance commits from the left, but column {first}, the first mask, is not computed: use NoCache or "
                "FreeCache with it"
            )
        tokens, judged, places = [], [], []
        for column in range(first, max(proposed) + 1):
            given = int(canvas[column])
            if column in proposed:
                place, token = proposed[column]
                tokens.append(token)
                judged.append(True)
                places.append(place)
            elif given == state.mask_id:
                break  # a mask that is not computed: nothing right of it can be read in order
            else:
                tokens.append(given)
                judged.append(False)
        while judged and not judged[-1]:
            tokens.pop()
            judged.pop()
        return cls(canvas[pad:first].tolist(), tokens, judged, places)

    @property
    def drafts(self) -> list[int]:
        """The drafts alone."""
        return [token for token, drafted in zip(self.tokens, self.judged) if drafted]


class GuidedScheduler(Scheduler):
    """Commits the longest prefix of the drafts that the guider agrees with, and at least the first draft.

    All committed tokens are the diffusion model's own. Where the guider agrees with none, the first is committed all the
    same: what the guider decides is how many tokens a step takes.

    Fills ``stats["accepted"]`` (for each row of the call a list with the number of agreed drafts of each of its steps, 0
    where the first was refused), ``"ar_forwards"``, ``"ar_token_forwards"`` (a list, one number a row) and ``"time_ar"``
    (seconds).

    Parameters
    ----------
    guider
        `ARGuider`, or anything with its two calls.
    match, top_k, rho, threshold
        The rule; see `MatchRule`.
    verify_chunk
        Drafts that the guider reads at a time; it goes on only if it agreed with a whole chunk.
    aligner
        Between the two vocabularies. None: the same ids mean the same in both.

    Raises
    ------
    InputError
        If a setting is out of its range.

    Source: Hu et al. 2025 (FlashDLM, arXiv:2505.21467), guided diffusion, and its released code. Draft temperature and
    filters are those of the generation config.
    """

    def __init__(
        self,
        guider: Guider,
        match: Match = "exact",
        top_k: int | None = None,
        rho: float = 0.5,
        threshold: float = 0.1,
        verify_chunk: int = 32,
        aligner: TokenAligner | None = None,
    ) -> None:
        if verify_chunk < 1:
            raise InputError(f"verify_chunk is {verify_chunk}, expected at least one draft a forward")
        self.guider, self.verify_chunk, self.aligner = guider, verify_chunk, aligner
        self.rule = MatchRule(match, top_k, rho, threshold)

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"GuidedScheduler({self.rule}, verify_chunk={self.verify_chunk})"

    def reset(self, state: GenState) -> None:
        """Forget earlier runs."""
        begin_account(state)
        self.guider.reset(len(state.rows))

    def candidates(self, state: GenState) -> Int[Tensor, "B 2"]:
        """From the leftmost mask of each row to the end."""
        return left_to_right(state)

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """The agreed prefix of each row's drafts, or its first draft; nothing right of an EOS."""
        drafted, masked = draft.tokens.cpu(), draft.masked.cpu()
        chosen = torch.zeros_like(masked)
        for row in range(len(masked)):
            asked = DraftedRow.of(state, draft, drafted, masked, row)
            if asked is None:
                continue
            start = time.perf_counter()
            result = self._judge(state, asked, row)
            note(state, row, result, time.perf_counter() - start)
            count = max(result.k, 1)
            if state.config.eos_policy == "fill" and state.eos_id in asked.drafts[:count]:
                count = asked.drafts.index(state.eos_id) + 1
            chosen[row, asked.places[:count]] = True
        return Commit.where(draft, chosen)

    def _judge(self, state: GenState, asked: DraftedRow, row: int) -> MatchResult:
        how: dict[str, Any] = {
            "row": int(state.rows[row]),
            "judged": asked.judged,
            "generator": state.generator,
        }
        if self.aligner is not None:
            return self.aligner.judge(self.guider, asked.prefix, asked.tokens, self.rule, self.verify_chunk, **how)
        return self.guider.match(asked.prefix, asked.tokens, self.rule, self.verify_chunk, **how)


def left_to_right(state: GenState) -> Int[Tensor, "B 2"]:
    """(B, 2): from the leftmost mask of each row to the end of the canvas."""
    first = state.masked.int().argmax(1)
    return torch.stack([first, torch.full_like(first, state.length)], dim=1)


def begin_account(state: GenState) -> None:
    """The stats of a run with a guider."""
    rows = len(state.rows)
    state.stats |= {
        "accepted": [[] for _ in range(rows)],
        "ar_forwards": 0,
        "ar_token_forwards": [0] * rows,
        "time_ar": 0.0,
    }


def note(state: GenState, row: int, result: MatchResult, seconds: float) -> None:
    """Add what one row's match said and cost."""
    stats, number = state.stats, int(state.rows[row])
    stats["accepted"][number].append(result.k)
    stats["ar_forwards"] += result.forwards
    stats["ar_token_forwards"][number] += result.tokens
    stats["time_ar"] += seconds
