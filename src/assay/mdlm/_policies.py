"""The standard cache policies: what each forward recomputes."""

from collections.abc import Sequence
from typing import Any

import torch

from assay._errors import InputError
from assay.mdlm._state import CachePolicy, ForwardPlan, GenState


class NoCache(CachePolicy):
    """Every forward recomputes the whole canvas."""

    @property
    def name(self) -> str:
        """What it is."""
        return "NoCache"

    def plan(self, state: GenState) -> ForwardPlan:
        """The whole canvas, without a cache."""
        return ForwardPlan(region=(0, state.length), use_cache=False)


class _RefreshedAtBlocks(CachePolicy):
    """At a row's first forward of a block the whole canvas is computed and written; afterwards what `within` says."""

    def reset(self, state: GenState, model: Any) -> None:
        """Forget earlier runs.

        Raises
        ------
        InputError
            If the model attends block by block: its later blocks do not change the earlier ones' keys and values.
        """
        if model.config.attention == "block":
            raise InputError(f"{self.name} is for models with full attention: use ExactBlockCache for this block model")
        self._block = torch.full((len(state.rows),), -(2**31))

    def plan(self, state: GenState) -> Sequence[ForwardPlan]:
        """One plan a row."""
        block = state.current_block
        new = (block != self._block[state.rows]).tolist()
        self._block[state.rows] = block
        starts, ends = state.span(block)
        everything = ForwardPlan(region=(0, state.length))
        return [
            everything if fresh else self.within(start, end, state.length)
            for fresh, start, end in zip(new, starts.tolist(), ends.tolist(), strict=True)
        ]

    def within(self, start: int, end: int, length: int) -> ForwardPlan:
        """The later forwards of a block in columns [start, end) of a canvas of so many columns."""
        raise NotImplementedError


class PrefixCache(_RefreshedAtBlocks):
    """Keeps what is left of the current block; the block and what is right of it are recomputed.

    At a block's first forward everything is computed, and its logits already commit the block's first tokens.

    Parameters
    ----------
    horizon
        So many columns right of the block are computed, and nothing beyond them is seen. None: all.

    Source: Wu et al. 2025 (Fast-dLLM, arXiv:2505.22618), prefix cache; the horizon: dLLM-RL, released sampler.
    """

    def __init__(self, horizon: int | None = None) -> None:
        if horizon is not None and horizon < 0:
            raise InputError(
                f"horizon is {horizon}, expected 0 or more columns right of the block, or None for all of them"
            )
        self.horizon = horizon

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"PrefixCache(horizon={self.horizon})"

    def within(self, start: int, end: int, length: int) -> ForwardPlan:
        """From the block to the horizon. Nothing is written: it is computed anew each time."""
        if self.horizon is not None:
            length = min(length, end + self.horizon)
        return ForwardPlan(region=(start, length), see=(0, length), write="none")


class DualCache(_RefreshedAtBlocks):
    """Keeps what is left and right of the current block; only the block is recomputed.

    Source: Wu et al. 2025 (Fast-dLLM, arXiv:2505.22618), dual cache.
    """

    @property
    def name(self) -> str:
        """What it is."""
        return "DualCache"

    def within(self, start: int, end: int, length: int) -> ForwardPlan:
        """The block alone, under the cached rest."""
        return ForwardPlan(region=(start, end), write="none")


class ExactBlockCache(CachePolicy):
    """The cache of a block model: exact, since nothing that a finished block sees changes any more.

    The prompt's whole blocks are computed and written once. A block is then denoised under the cached blocks left of it,
    without writing; when it is full, one more forward writes it. The last block is not written. A prompt's last, partial
    block is denoised together with the first new tokens.

    Source: Cheng et al. 2025 (SDAR, arXiv:2510.06303), released sampler.
    """

    @property
    def name(self) -> str:
        """What it is."""
        return "ExactBlockCache"

    def reset(self, state: GenState, model: Any) -> None:
        """Forget earlier runs.

        Raises
        ------
        InputError
            If the model has full attention, where this cache would not be exact.
        """
        if model.config.attention != "block":
            raise InputError(
                "ExactBlockCache is for block models, and this one has full attention: use PrefixCache or NoCache"
            )
        self._written = [0] * len(state.rows)  # columns left of it are in the cache

    def plan(self, state: GenState) -> Sequence[ForwardPlan]:
        """One plan a row: write what is full and not yet written, else denoise the current block."""
        plans = []
        starts, ends = state.span(state.current_block)
        rows = zip(state.rows.tolist(), state.pad.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for row, pad, start, end in rows:
            written = self._written[row]
            if max(written, pad) < start:
                plans.append(ForwardPlan(region=(written, start), see=(0, start), freeze=(0, start)))
                self._written[row] = start
            else:
                plans.append(ForwardPlan(region=(start, end), see=(0, end), write="none"))
        return plans
