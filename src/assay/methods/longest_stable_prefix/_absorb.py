"""The cache policy: a cache that only appends."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from assay._errors import InputError
from assay.mdlm import CachePolicy, ForwardPlan, GenState
from assay.methods.longest_stable_prefix._prefix import require_whole


class PrefixAbsorbCache(CachePolicy):
    """Keeps the keys and values of all that was committed before the last step; the rest is recomputed.

    The first forward computes the whole canvas. A block that was just committed is computed once more in the next forward,
    now as tokens in place of masks, and then frozen: forward k computes the N_k active columns and the L_(k-1) of the last
    block. With `LongestStablePrefix` at stability 0 and lookback 0 all forwards together compute at most
    L0 + N/alpha + N columns. Under any other scheduler it is correct too: what is left of both the last commit and the
    first mask is kept.

    Parameters
    ----------
    freeze
        ``"settled"``: as described. ``"immediate"``: a block keeps the keys and values that it had as masks, which saves its
        recomputation and costs quality: an ablation.
    horizon
        Computed and seen are so many columns right of the boundary, and no more. None: all.

    Raises
    ------
    InputError
        If a setting is unknown or out of its range.

    Source: Li et al. 2026 (LSP, arXiv:2603.05454), the idea; when a block is frozen is ours.
    """

    def __init__(self, freeze: Literal["settled", "immediate"] = "settled", horizon: int | None = None) -> None:
        if freeze not in ("settled", "immediate"):
            raise InputError(f"freeze is {freeze!r}, expected 'settled' or 'immediate': choose one of them")
        if horizon is not None:
            require_whole("horizon", horizon, 1, "at least 1 column right of the boundary, or None for all")
        self.freeze, self.horizon = freeze, horizon

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"PrefixAbsorbCache(freeze={self.freeze}, horizon={self.horizon})"

    def reset(self, state: GenState, model: Any) -> None:
        """Nothing is kept between runs."""

    def plan(self, state: GenState) -> Sequence[ForwardPlan]:
        """One plan a row; rows with the same boundaries share a forward."""
        boundary = state.masked.int().argmax(1)
        start = boundary if self.freeze == "immediate" else torch.minimum(boundary, state.last_commit[:, 0])
        start = torch.where(state.commits == 0, 0, start)
        plans = []
        for first, here in zip(start.tolist(), boundary.tolist(), strict=True):
            end = state.length if self.horizon is None else min(state.length, here + self.horizon)
            plans.append(ForwardPlan(region=(first, end), see=(0, end), freeze=(0, here)))
        return plans
