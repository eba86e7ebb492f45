"""The policy-gradient kernel: pure functions of rewards and log-probabilities."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from assay._errors import InputError


def group_advantages(
    rewards: Float[Tensor, " B"],
    G: int,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Float[Tensor, " B"]:
    """Rewards against the mean of their own group, in units of a standard deviation.

    Parameters
    ----------
    rewards : (B,)
        Groups stand behind each other, G rows each. NaN: not scorable, left out of mean and deviation, advantage 0.
    G
        Responses a group.
    scale
        Divide by the group's deviation, by that of all scorable rewards, or not at all.
    eps
        Added to the deviation. With 0, a group of equal rewards gets 0.
    ddof
        1: the unbiased deviation (GRPO in TRL); 0: the population's (TraceRL).

    Returns
    -------
    (B,)
        0 for groups with fewer than two scorable rows.

    Raises
    ------
    InputError
        If G does not divide B, or is 1 with scale "group".

    Source: arXiv:2402.03300, section 4.1.2.
    """
    if G < 1 or len(rewards) % G:
        raise InputError(f"{len(rewards)} rewards are no groups of {G}: give G responses for every prompt")
    if scale not in ("group", "batch", "none"):
        raise InputError(f"scale is {scale!r}, expected 'group', 'batch' or 'none'")
    if scale == "group" and G == 1:
        raise InputError("a group of 1 has no baseline: sample at least 2 responses a prompt")
    groups = rewards.view(-1, G)
    scorable = ~groups.isnan()
    count = scorable.sum(1, keepdim=True)
    kept = scorable & (count > 1)
    mean = groups.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(kept, groups - mean, torch.zeros_like(groups))
    if scale == "none":
        return centred.flatten()
    if scale == "group":
        deviation = (centred.square().sum(1, keepdim=True) / (count - ddof).clamp(min=1)).sqrt()
    else:
        known = rewards[~rewards.isnan()]
        spread = (known - known.mean()).square().sum() / max(len(known) - ddof, 1)
        deviation = spread.sqrt().expand_as(mean)
    # Rounding leaves a group of equal rewards a deviation of 1e-17 or so; it says nothing about the responses.
    flat = deviation <= 1e-6 * mean.abs()
    return torch.where(flat, torch.zeros_like(centred), centred / torch.where(flat, 1.0, deviation + eps)).flatten()
