"""How long a prefix of the drafts the guider agrees with: the rules, draft by draft, and what a match says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError

Match = Literal["exact", "topk_relative", "topk", "threshold", "stochastic"]
_TOP_K = {"topk_relative": 2, "topk": 5}


@dataclass(frozen=True)
class MatchRule:
    """Whether the guider agrees with a draft, given its own distribution at that place.

    Parameters
    ----------
    kind
        ``"exact"``: the draft is the guider's most likely token (the lowest id on ties). ``"topk"``: it is among the
        ``top_k`` most likely. ``"topk_relative"``: the same, and its probability is at least ``rho`` times the largest.
        ``"threshold"``: its probability is above ``threshold``. ``"stochastic"``: a uniform number is below it.
    top_k
        None: 2 for ``"topk_relative"``, 5 for ``"topk"``. What ties with the k-th largest counts in.
    rho
        In [0, 1]. With ``top_k`` 2 and ``rho`` 0.5 the relative rule is the paper's "top2relative50".
    threshold
        In [0, 1).

    Raises
    ------
    InputError
        If the kind is unknown or a number is out of its range.

    Source: Hu et al. 2025 (arXiv:2505.21467), guided diffusion; rules of the released verifier.
    """

    kind: Match = "exact"
    top_k: int | None = None
    rho: float = 0.5
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Match):
            raise InputError(
                f"match is {self.kind!r}, expected one of {', '.join(get_args(Match))}: choose one of them"
            )
        if self.top_k is None:
            object.__setattr__(self, "top_k", _TOP_K.get(self.kind))
        elif self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}, expected at least 1: the guider's most likely token must count")
        if not 0 <= self.rho <= 1:
            raise InputError(f"rho is {self.rho}, expected a share of the largest probability, from 0 to 1")
        if not 0 <= self.threshold < 1:
            raise InputError(f"threshold is {self.threshold}, expected a probability of at least 0 and below 1")

    @property
    def random(self) -> bool:
        """Whether it needs uniform numbers."""
        return self.kind == "stochastic"

    def __str__(self) -> str:
        settings = {
            "topk": f", top_k={self.top_k}",
            "topk_relative": f", top_k={self.top_k}, rho={self.rho}",
            "threshold": f", threshold={self.threshold}",
        }
        return f"match={self.kind}{settings.get(self.kind, '')}"

    def agrees(
        self, probs: Float[Tensor, "n V"], drafts: Int[Tensor, " n"], uniform: Float[Tensor, " n"] | None = None
    ) -> Bool[Tensor, " n"]:
        """Each draft by itself.

        Parameters
        ----------
        probs : (n, V)
            The guider's distribution at each draft's place.
        drafts : (n,)
            Token ids below V.
        uniform : (n,)
            U(0, 1), for ``"stochastic"``.

        Returns
        -------
        (n,) bool
        """
        if self.kind == "exact":
            return drafts == probs.argmax(1)
        own = probs.gather(1, drafts[:, None])[:, 0]
        if self.kind == "threshold":
            return own > self.threshold
        if self.kind == "stochastic":
            if uniform is None:
                raise InputError("the stochastic rule needs a uniform number for each draft: give uniform (n,)")
            return uniform < own
        assert self.top_k is not None
        largest = probs.topk(min(self.top_k, probs.shape[1]), dim=1).values
        among = own >= largest[:, -1]
        return among & (own >= self.rho * largest[:, 0]) if self.kind == "topk_relative" else among


@dataclass(frozen=True, eq=False)
class MatchResult:
    """How far a guider agreed.

    Attributes
    ----------
    k
        Drafts of the agreeing prefix (only those that were to be judged are counted).
    rejected_at
        Index of the first draft that was refused, or None.
    probs : (judged, V), or None
        The guider's distributions (float32) at the places up to the refusal, in order.
    forwards, tokens
        Calls of the guider's model, and tokens that were fed to it.
    """

    k: int
    rejected_at: int | None
    probs: Float[Tensor, "judged V"] | None = None
    forwards: int = 0
    tokens: int = 0


@runtime_checkable
class Rule(Protocol):
    """What says whether a draft is agreed with: `MatchRule`, or a rule of one's own."""

    @property
    def random(self) -> bool:
        """Whether it needs uniform numbers."""
        ...

    def agrees(
        self, probs: Float[Tensor, "n V"], drafts: Int[Tensor, " n"], uniform: Float[Tensor, " n"] | None = None
    ) -> Bool[Tensor, " n"]:
        """Each draft by itself; see `MatchRule.agrees`. A guider asks about its drafts in order, a chunk at a time."""
        ...


@runtime_checkable
class Guider(Protocol):
    """What judges drafts: `ARGuider`, or anything with these two calls."""

    def reset(self, rows: int = 1) -> None:
        """Forget everything; so many sequences will be judged, each under its row number."""
        ...

    def match(
        self,
        prefix: Sequence[int],
        drafts: Sequence[int],
        rule: Rule,
        chunk: int = 32,
        *,
        row: int = 0,
        judged: Sequence[bool] | None = None,
        generator: torch.Generator | None = None,
    ) -> MatchResult:
        """How long a prefix of the drafts agrees; see `ARGuider.match`."""
        ...


def uniform_numbers(count: int, generator: torch.Generator | None, device: Any) -> Float[Tensor, " count"]:
    """U(0, 1) in float32, drawn where the generator lives."""
    source = generator.device if generator is not None else device
    return torch.rand(count, generator=generator, device=source).to(device)
