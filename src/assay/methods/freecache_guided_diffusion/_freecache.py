"""FreeCache: which columns of the canvas a forward still computes, and a probe of how far the kept ones have drifted."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from assay._errors import InputError
from assay.mdlm import CachePolicy, Counters, ForwardPlan, GenState, RegionCache

Mode = Literal["block", "sliding"]
Freeze = Literal["settled", "immediate"]


class UnsupportedPolicyError(InputError):
    """A cache policy was asked of a model that it does not fit."""


class FreeCache(CachePolicy):
    """Keys and values of the prompt and of finished tokens are computed once and kept; only what is active is recomputed.

    The first forward computes the whole canvas, and its logits serve the first commit. Afterwards:

    ``mode="block"``
        From the row's current block to the end of the canvas. What is left of it is frozen: the window shrinks block by
        block. With a single block this is prompt caching. Any block scheduler goes with it.
    ``mode="sliding"``
        Around the last committed column p: [p - w_left, p + w_right). Columns left of it are read as they were last
        written, columns right of it are neither computed nor seen. For schedulers that commit from the left
        (`GuidedScheduler`, `Sequential`), whose masks follow p without a gap.

    Parameters
    ----------
    mode
        The form.
    block_length
        Of the block form. None: the blocks of the generation config.
    window
        (w_left, w_right) of the sliding form, at least (0, 2). It holds the masks p + 1 to p + w_right - 1; how many masks
        the model sees changes when it ends its answer, so w_right is part of the result's identity.
    freeze
        Of the block form. ``"settled"``: a finished block stays in the region for the first forward of the next one and is
        frozen then, when all its tokens have been read. ``"immediate"``: it is frozen as the forward of its last step left
        it, with the tokens of that step still read as masks (as in the released code).
    keep_last_commit
        Of the sliding form. The region reaches back to the first column of the last commit, however far that is. False
        (as released): a commit of more than w_left + 1 tokens leaves keys and values of masks behind for good.
    full_query
        Ablation, an option of the released code: the kept columns attend too, at every forward. As their keys and values
        are fixed in every layer, nothing of it reaches another column: the logits are the same, the whole attention is
        paid.
    drift_probe
        Every so many steps compare what is kept with a full recompute, at the price of one more forward that is not
        counted; see `kv_drift`. ``stats["drift"]`` gets one entry a probe. 0: never.

    Raises
    ------
    InputError
        If a setting is out of its range.

    Source: Hu et al. 2025 (FlashDLM, arXiv:2505.21467), FreeCache; block and sliding form of the released code.
    """

    def __init__(
        self,
        mode: Mode = "block",
        block_length: int | None = None,
        window: tuple[int, int] = (256, 256),
        freeze: Freeze = "settled",
        keep_last_commit: bool = True,
        full_query: bool = False,
        drift_probe: int = 0,
    ) -> None:
        for name, value, kind in (("mode", mode, Mode), ("freeze", freeze, Freeze)):
            if value not in get_args(kind):
                raise InputError(f"{name} is {value!r}, expected {' or '.join(get_args(kind))}: choose one of them")
        if block_length is not None and block_length < 1:
            raise InputError(f"block_length is {block_length}, expected at least 1, or None for the config's blocks")
        left, right = window
        if left < 0 or right < 2:
            raise InputError(
                f"window is ({left}, {right}), expected w_left of at least 0 and w_right of at least 2: it starts at the last "
                "committed column and must reach the mask behind it"
            )
        if drift_probe < 0:
            raise InputError(f"drift_probe is {drift_probe}, expected a number of steps, or 0 for no probe")
        self.mode, self.block_length, self.window, self.freeze = mode, block_length, (left, right), freeze
        self.keep_last_commit, self.full_query, self.drift_probe = keep_last_commit, full_query, drift_probe

    @property
    def name(self) -> str:
        """What it is, with the settings that make its result."""
        if self.mode == "block":
            blocks = "" if self.block_length is None else f", block_length={self.block_length}"
            settings = f"mode=block{blocks}, freeze={self.freeze}"
        else:
            settings = f"mode=sliding, window={self.window}, keep_last_commit={self.keep_last_commit}"
        return f"FreeCache({settings}{', full_query=True' if self.full_query else ''})"

    def reset(self, state: GenState, model: Any) -> None:
        """Forget earlier runs.

        Raises
        ------
        UnsupportedPolicyError
            If the sliding form meets a model that attends block by block.
        InputError
            If the block length does not divide the answer's length.
        """
        if self.mode == "sliding" and model.config.attention == "block":
            raise UnsupportedPolicyError(
                "FreeCache's sliding form is for models with full attention: use ExactBlockCache for this block model"
            )
        new = state.config.max_new_tokens
        if self.mode == "block" and self.block_length is not None and new % self.block_length:
            raise InputError(
                f"max_new_tokens {new} is no multiple of FreeCache's block_length {self.block_length}: change one of them"
            )
        self._model = model
        self._start: list[int | None] = [None] * len(state.rows)  # of the block of each row's last forward
        self._kept = [0] * len(state.rows)  # columns left of each row's next region
        if self.drift_probe:
            state.stats["drift"] = []

    def plan(self, state: GenState) -> Sequence[ForwardPlan]:
        """One plan a row."""
        plans = self._blocks(state) if self.mode == "block" else self._windows(state)
        for row, plan in zip(state.rows.tolist(), plans, strict=True):
            self._kept[row] = plan.region[0]
        if state.cache is not None:
            if self.full_query:
                self._attend_from_kept(state)
            if self.drift_probe and state.step > 1 and (state.step - 1) % self.drift_probe == 0:
                state.stats["drift"].append({"step": state.step, **self._probe(state)})
        return plans

    def _blocks(self, state: GenState) -> list[ForwardPlan]:
        if self.block_length is None:
            starts, _ = state.span(state.current_block)
        else:
            first = state.masked.int().argmax(1) - state.canvas_start
            starts = state.canvas_start + first.div(self.block_length, rounding_mode="floor") * self.block_length
        plans = []
        for row, start in zip(state.rows.tolist(), starts.clamp(min=0).tolist(), strict=True):
            before = self._start[row]
            if before is None:
                begin = 0
            elif self.freeze == "settled":
                begin = before  # the block itself, or the one that was finished since
            else:
                begin = start
            self._start[row] = start
            # A row whose answer is complete has no block, and its plan is ignored.
            begin, start = min(begin, state.length - 1), min(start, state.length - 1)
            plans.append(ForwardPlan(region=(begin, state.length), freeze=(0, start) if start else None))
        return plans

    def _windows(self, state: GenState) -> list[ForwardPlan]:
        left, right = self.window
        last = state.masked.int().argmax(1) - 1
        plans = []
        for row, p, commit in zip(state.rows.tolist(), last.tolist(), state.last_commit[:, 0].tolist(), strict=True):
            if self._start[row] is None:
                self._start[row] = 0
                plans.append(ForwardPlan(region=(0, state.length)))
                continue
            begin = min(p - left, commit) if self.keep_last_commit else p - left
            end = min(state.length, p + right)
            plans.append(ForwardPlan(region=(max(0, begin), end), see=(0, end)))
        return plans

    def _attend_from_kept(self, state: GenState) -> None:
        """The attention of the kept columns over all keys, layer by layer. Which queries they are does not matter to it."""
        cache, heads = state.cache, self._model.config.num_attention_heads
        kept = max(self._kept[row] for row in state.rows.tolist())
        for keys, values in zip(cache.keys, cache.values):
            queries = keys[:, :, :kept].repeat_interleave(heads // keys.shape[1], 1)
            scaled_dot_product_attention(queries, keys, values, enable_gqa=heads != keys.shape[1])

    @torch.no_grad()
    def _probe(self, state: GenState) -> dict[str, list[float]]:
        model = self._model
        columns = torch.arange(state.length)
        kept = torch.tensor([self._kept[row] for row in state.rows.tolist()])
        compared = (columns >= state.pad[:, None]) & (columns < kept[:, None])
        fresh = model.new_cache(len(state.rows), state.length)
        real = None
        if state.pad.any():
            real = (columns >= state.pad[:, None]).to(state.x.device)
        before, model.counters = model.counters, Counters()
        try:
            nothing = torch.zeros(0, dtype=torch.long, device=state.x.device)
            model(state.x, attention_mask=real, position_ids=state.position_ids, cache=fresh, logits_for=nothing)
        finally:
            model.counters = before
        return kv_drift(state.cache, fresh, compared)


def kv_drift(kept: RegionCache, fresh: RegionCache, columns: Bool[Tensor, "B T"]) -> dict[str, list[float]]:
    """How far keys and values that were kept are from those of a full recompute, layer by layer.

    Parameters
    ----------
    kept
        The cache of a run. With guidance its first rows count.
    fresh
        A cache of the same canvas that was just written in full.
    columns : (B, T) bool
        What is compared; at least one column.

    Returns
    -------
    dict
        ``"cosine_keys"``, ``"cosine_values"``: mean cosine similarity over rows, columns and heads, one number a layer.
        ``"error_keys"``, ``"error_values"``: Frobenius norm of the difference over that of the fresh ones.

    Raises
    ------
    InputError
        If no column is to be compared.

    Notes
    -----
    A mean cosine near one is no proof of safety: it is a mean over columns, and a few of them may decide an answer.
    """
    if not bool(columns.any()):
        raise InputError("no column is to be compared: give at least one")
    rows, places = columns.nonzero(as_tuple=True)
    found: dict[str, list[float]] = {}
    for name in ("keys", "values"):
        old, new = (getattr(cache, name)[:, rows, :, places].double() for cache in (kept, fresh))
        # indexing by two tensors puts the places first: (places, layers, heads, width)
        found[f"cosine_{name}"] = cosine_similarity(old, new, dim=-1).mean((0, 2)).tolist()
        difference, size = ((x**2).sum((0, 2, 3)) for x in (old - new, new))
        found[f"error_{name}"] = (difference / size).sqrt().tolist()
    return found
