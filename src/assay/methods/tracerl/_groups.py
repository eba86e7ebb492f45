"""Which responses count as right, and which tasks say anything."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from assay._errors import InputError

ROUNDING = 1e-9  # a group with exactly a fifth right is kept


def counted_and_kept(
    rewards: Float[Tensor, " B"],
    cut_off: Bool[Tensor, " B"],
    G: int,
    band: tuple[float, float] | None,
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " tasks"]]:
    """Rewards in which cut-off responses count as wrong, and the tasks that are neither too hard nor too easy.

    Parameters
    ----------
    rewards : (B,)
        Groups of G behind each other; NaN: not scorable.
    cut_off : (B,)
        Responses that hit the length limit: their reward becomes 0, or stays where it is lower.
    G
        Responses a task.
    band
        A task is kept if its mean reward lies in it, ends included; None: all are.

    Source: arXiv:2509.06949, section 5.1 and released code.
    """
    if len(rewards) % G:
        raise InputError(f"{len(rewards)} rewards are no groups of {G}: give G responses for every prompt")
    counted = torch.where(cut_off, rewards.clamp(max=0.0), rewards)
    groups = counted.view(-1, G)
    if band is None:
        return counted, torch.ones(len(groups), dtype=torch.bool)
    mean = groups.nanmean(1)  # NaN where nothing is scorable: not kept
    return counted, (mean >= band[0] - ROUNDING) & (mean <= band[1] + ROUNDING)
