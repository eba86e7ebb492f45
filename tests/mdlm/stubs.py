"""Stand-ins at the plug points: scripted logits, and policies that only serve a test."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from assay.mdlm import CachePolicy, ForwardPlan, GenState


class Script:
    """A logits processor that says which token each column proposes, and how surely.

    Parameters
    ----------
    tokens, sureness
        For the answer's columns, from the first on: the proposed token and its logit (all others have 0).
    """

    def __init__(self, tokens: Sequence[int], sureness: Sequence[float]) -> None:
        self.tokens, self.sureness = tokens, sureness

    def __call__(self, state: GenState, positions: Tensor, logits: Tensor) -> Tensor:
        scripted = torch.zeros_like(logits)
        scripted[..., state.mask_id] = -torch.inf
        for place, column in enumerate(positions.tolist()):
            if column >= state.canvas_start:
                at = column - state.canvas_start
                scripted[:, place, self.tokens[at]] = self.sureness[at]
        return scripted


class Favour:
    """A logits processor that adds to the logit of one token, so that some rows end early."""

    def __init__(self, token: int, by: float) -> None:
        self.token, self.by = token, by

    def __call__(self, state: GenState, positions: Tensor, logits: Tensor) -> Tensor:
        logits[..., self.token] += self.by
        return logits


class Recompute(CachePolicy):
    """Everything anew in every forward, but through the cache."""

    def plan(self, state: GenState) -> ForwardPlan:
        return ForwardPlan(region=(0, state.length))


class Refreshing(CachePolicy):
    """Before every forward that commits, one that only writes the prompt."""

    def reset(self, state: GenState, model: Any) -> None:
        self.refresh = False

    def plan(self, state: GenState) -> ForwardPlan:
        self.refresh = not self.refresh
        if self.refresh:
            return ForwardPlan(region=(0, state.canvas_start), see=(0, state.canvas_start))
        return ForwardPlan(region=(0, state.length))
