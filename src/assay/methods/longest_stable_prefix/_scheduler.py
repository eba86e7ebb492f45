"""The scheduler: each step commits one contiguous block at the left end of what is still masked."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import Commit, Draft, GenState, Scheduler, SchedulerError
from assay.methods.longest_stable_prefix._delimiters import (
    Characters,
    Delimiters,
    checked_ids,
    delimiter_mask,
    mask_of_ids,
    word_starts,
)
from assay.methods.longest_stable_prefix._diagnostics import Diagnostics, fragments_after
from assay.methods.longest_stable_prefix._prefix import (
    REASONS,
    NoDelimiter,
    Pick,
    PrefixRule,
    decide,
    require_whole,
)

_CARRIED = 4  # committed tokens that may hold the start of a character


class LongestStablePrefix(Scheduler):
    """Commits the longest stable prefix: one block at the left end a step, so that committed text grows like a text.

    Every step looks at all masks right of the boundary. The gap between the two largest logits, its running minimum and a
    threshold that adapts to what is left give a length; the block ends before the first prediction that has changed since
    the last step, and is snapped back to a delimiter. Inside a block of a block model, or of ``block_length``, the rule
    acts on the block's masks. Where tokens that were given lie right of the boundary (infilling), a run ends before them
    and the next begins behind them.

    Parameters
    ----------
    alpha, beta, min_commit, lookback, pick, tau_floor, no_delimiter
        See `longest_stable_prefix`. ``tau_floor`` trades calls for quality; 3.0 is a good first try.
    delimiters
        ``"text"``, ``"code"``, ``"cjk"`` or a predicate on a token's text, all of which need the tokenizer; token ids, or
        a bool mask over the vocabulary as `delimiter_mask` makes; None: no snapping.
    stability
        A place is stable if its last so many predictions equal the present one; 0: all are. Places without that much
        history are stable.
    word_safe
        Without a delimiter in the window the block ends before the last predicted word that it would begin and not end.
        Needs the tokenizer.
    tokenizer
        The model's transformers tokenizer, or the text of each id. With it no block ends inside a character of several
        tokens.

    Raises
    ------
    InputError
        If a setting is out of its range, or needs a tokenizer and there is none.

    Source: Li et al. 2026 (LSP, arXiv:2603.05454); stability, the tie rule and the knobs beyond alpha, beta, min_commit
    and lookback are ours.
    """

    def __init__(
        self,
        alpha: float = 0.25,
        beta: float = 0.5,
        min_commit: int = 1,
        lookback: int = 16,
        delimiters: Delimiters = "text",
        stability: int = 1,
        pick: Pick = "longest",
        tau_floor: float | None = None,
        no_delimiter: NoDelimiter = "keep",
        word_safe: bool = False,
        *,
        tokenizer: Any = None,
    ) -> None:
        rule = PrefixRule(
            alpha=alpha, beta=beta, min_commit=min_commit, lookback=lookback, pick=pick, tau_floor=tau_floor,
            no_delimiter=no_delimiter,
        )  # fmt: skip
        self._configure(rule, delimiters, stability, word_safe, tokenizer)

    def _configure(
        self, rule: PrefixRule, delimiters: Delimiters, stability: int, word_safe: bool, tokenizer: Any
    ) -> None:
        require_whole("stability", stability, 0, "0 (off) or how many earlier predictions must agree")
        if delimiters is None:
            rule = replace(rule, lookback=0)
        self.rule, self.stability, self.word_safe = rule, stability, word_safe
        self._ids: list[int] | None = None
        self._mask: Tensor | None = None
        self._by_profile = isinstance(delimiters, str)
        self._described = "none"
        if isinstance(delimiters, str) or callable(delimiters):
            if tokenizer is None:
                raise InputError(
                    f"delimiters={delimiters!r} are found by a tokenizer: give tokenizer=, or token ids, or None for no snapping"
                )
            self._mask = delimiter_mask(tokenizer, delimiters)
            self._described = delimiters if isinstance(delimiters, str) else getattr(delimiters, "__name__", "own")
        elif isinstance(delimiters, Tensor):
            if delimiters.dtype != torch.bool or delimiters.ndim != 1:
                raise InputError(
                    f"delimiters are a tensor of {delimiters.dtype} and shape {tuple(delimiters.shape)}, expected bool "
                    "(vocab,): give what delimiter_mask returns, or a list of ids"
                )
            self._mask = delimiters
            self._described = f"{int(delimiters.sum())} ids"
        elif delimiters is not None:
            if not isinstance(delimiters, Iterable):
                raise InputError(
                    f"delimiters is {delimiters!r}, expected a profile, ids, or a predicate: give a list of ids"
                )
            self._ids = sorted(set(checked_ids(delimiters)))
            self._described = str(self._ids) if len(self._ids) <= 8 else f"{len(self._ids)} ids"
        if word_safe and tokenizer is None:
            raise InputError("word_safe looks for words: give tokenizer=, or leave word_safe off")
        self._word_starts = word_starts(tokenizer) if word_safe else None
        characters = None if tokenizer is None else Characters(tokenizer)
        self._characters = characters if characters is not None and characters.split else None

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        rule = self.rule
        shares = f"alpha={rule.alpha}, beta={rule.beta}, pick={rule.pick}, tau_floor={rule.tau_floor}"
        return f"LongestStablePrefix({shares}, {self._common})"

    @property
    def _common(self) -> str:
        rule = self.rule
        return (
            f"min_commit={rule.min_commit}, lookback={rule.lookback}, delimiters={self._described}, "
            f"no_delimiter={rule.no_delimiter}, stability={self.stability}, word_safe={self.word_safe}"
        )

    def reset(self, state: GenState) -> None:
        """Forget earlier runs."""
        rows, device = len(state.rows), state.x.device
        # predictions of the last steps, the latest first, at their columns; -1 where there is none
        self._past = torch.full((rows, self.stability, state.length), -1, device=device)
        self._tables: tuple[Tensor, Tensor | None] | None = None
        self._diagnostics = Diagnostics(state)
        state.stats |= {name: [[] for _ in range(rows)] for name in ("tau", "candidates", "reasons", "last_tokens")}
        state.stats["snapped_share"] = None
        self._blocks = self._snapped = 0

    def candidates(self, state: GenState) -> Int[Tensor, "B 2"]:
        """From the row's boundary to the first column that is not masked, or the end of its block."""
        columns = torch.arange(state.length)
        first = state.masked.int().argmax(1)
        free = state.masked & (state.block_of == state.current_block[:, None])
        end = (free | (columns < first[:, None])).long().cumprod(1).sum(1)
        return torch.stack([first, end], 1)

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """The block of each row.

        Raises
        ------
        SchedulerError
            If the cache policy computes columns right of a row's boundary and leaves out the boundary itself.
        """
        delimiters, words = self._tables or self._make_tables(logits.shape[-1], state.eos_id, logits.device)
        flips = self._diagnostics.compare(state, draft)
        stable = self._stable(state, draft)
        margins = _margins(logits, draft.tokens)

        # Each row's candidates are contiguous: shift them to the left edge.
        count, start = draft.masked.sum(1), draft.masked.int().argmax(1)
        steps = torch.arange(draft.masked.shape[1], device=count.device)
        index = (start[:, None] + steps).clamp(max=len(steps) - 1)
        tokens = draft.tokens.gather(1, index)
        ends = None
        if state.eos_id is not None and state.config.eos_policy == "fill":
            ends = tokens == state.eos_id
        decisions = decide(
            self.rule,
            margins.gather(1, index),
            None if stable is None else stable.gather(1, index),
            delimiters[tokens],
            count,
            starts_word=None if words is None else words[tokens],
            whole=self._whole(state, tokens),
            is_eos=ends,
        )
        numbers = torch.cat([torch.stack([start, count], 1), flips, tokens], 1)
        # the one wait for the device
        found = torch.cat([decisions.packed, numbers.double()], 1).cpu()
        return self._note(state, draft.positions, found[:, :9].tolist(), found[:, 9:].long())

    def _note(
        self, state: GenState, positions: Int[Tensor, "w"], found: list[list[float]], tokens: Int[Tensor, "B w"]
    ) -> Commit:
        """The commit, from the numbers and the tokens of each row, all on the CPU; fills in the stats."""
        stats, boundary = state.stats, state.masked.int().argmax(1).tolist()
        columns, blocks, active, flips = [], [], [], []
        for place, row in enumerate(state.rows.tolist()):
            length, candidate, _, reason, tau, start, count, flipped, pairs = found[place]
            n, first = int(length), int(positions[int(start)])
            if n and first != boundary[place]:
                raise SchedulerError(
                    f"the cache policy computes columns of row {row} from {first} on, but its next column to commit is "
                    f"{boundary[place]}: use a policy whose region begins at or before the first mask"
                )
            columns.append(torch.arange(first, first + n))
            blocks.append(tokens[place, :n])
            active.append(int(count))
            flips.append((int(flipped), int(pairs)))
            if n:
                stats["tau"][row].append(tau)
                stats["candidates"][row].append(int(candidate))
                stats["reasons"][row].append(REASONS[int(reason)])
                stats["last_tokens"][row].append(int(blocks[-1][-1]))
                self._blocks += 1
                self._snapped += REASONS[int(reason)] == "delimiter"
        sizes = [len(block) for block in blocks]
        self._diagnostics.record(state, sizes, active, fragments_after(state, columns), flips)
        stats["snapped_share"] = self._snapped / self._blocks if self._blocks else None
        return Commit(columns, blocks)

    def _make_tables(self, vocab: int, eos: int | None, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Delimiters and word starts over the model's vocabulary, which may be larger than the tokenizer's."""
        if self._ids is not None:
            mask = mask_of_ids(self._ids, vocab)
        else:
            mask = torch.zeros(vocab, dtype=torch.bool)
            if self._mask is not None:
                if bool(self._mask[vocab:].any()):
                    raise InputError(
                        f"delimiter id {int(self._mask.nonzero()[-1])} lies outside the vocabulary of {vocab}: take the "
                        "model's own tokenizer"
                    )
                mask[: len(self._mask)] = self._mask[:vocab].cpu()
            if self._by_profile and eos is not None:
                mask[eos] = True  # the model's, whatever the tokenizer calls its own
        words = None
        if self._word_starts is not None:
            words = torch.ones(vocab, dtype=torch.bool)
            words[: len(self._word_starts)] = self._word_starts[:vocab]
            words = words.to(device)
        self._tables = mask.to(device), words
        return self._tables

    def _stable(self, state: GenState, draft: Draft) -> Bool[Tensor, "B w"] | None:
        """Whether each candidate's prediction has held; remembers the present ones."""
        if not self.stability:
            return None
        device = draft.tokens.device
        rows, columns = state.rows.to(device)[:, None, None], draft.positions.to(device)
        ages = torch.arange(self.stability, device=device)[:, None]
        before = self._past[rows, ages, columns]
        now = draft.tokens[:, None]
        after = torch.cat([now, before[:, :-1]], 1)
        self._past[rows, ages, columns] = torch.where(draft.masked[:, None], after, before)
        return (before < 0).any(1) | (before == now).all(1)

    def _whole(self, state: GenState, tokens: Int[Tensor, "B w"]) -> Bool[Tensor, "B w"] | None:
        """Whether a block up to each place ends on a whole character; what was committed just before may have begun one."""
        if self._characters is None:
            return None
        first = state.masked.int().argmax(1)
        columns = (first[:, None] + torch.arange(-_CARRIED, 0)).clamp(min=0).to(tokens.device)
        text = torch.cat([state.x.gather(1, columns), tokens], 1)
        return self._characters.to(tokens.device, int(self._tables[0].shape[0])).whole(text)[:, _CARRIED:]  # type: ignore[index]


def _margins(logits: Float[Tensor, "B w V"], tokens: Int[Tensor, "B w"]) -> Float[Tensor, "B w"]:
    """The token's logit minus the best other one, (B, w) in float32; infinite where there is no other.

    For the most likely token this is the gap between the two largest logits. One pass over the logits, without a copy of
    them and without a sort: the token's own logit is taken out for the moment.
    """
    logits = logits.contiguous()  # a processor may have expanded one row to all places
    own = logits.gather(-1, tokens[..., None])
    logits.scatter_(-1, tokens[..., None], -torch.inf)
    other = logits.amax(-1)
    logits.scatter_(-1, tokens[..., None], own)
    return own[..., 0].float() - other.float()
