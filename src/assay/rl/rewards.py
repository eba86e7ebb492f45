"""How reward functions are called: TRL's convention, with checks that name the function at fault."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from assay._errors import InputError

RewardFunction = Callable[..., Sequence[Any]]


def call_reward(
    function: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> list[Any]:
    """What a reward function says of each completion.

    Parameters
    ----------
    function
        Called as ``function(prompts=..., completions=..., **columns)``; answers one entry a completion, None where it does
        not apply.
    prompts, completions
        Of equal length.
    columns
        What else it may read, one entry a completion: ``completion_ids`` and the columns of the data set.

    Raises
    ------
    InputError
        If it does not answer one entry a completion: the message names it.

    Source: the calling convention of TRL's ``reward_funcs``.
    """
    given = function(prompts=list(prompts), completions=list(completions), **(columns or {}))
    try:
        answered = list(given)
    except TypeError:
        raise InputError(
            f"the reward {name_of(function)} returned {type(given).__name__}, expected a list with one reward a completion"
        ) from None
    if len(answered) != len(completions):
        raise InputError(
            f"the reward {name_of(function)} returned {len(answered)} rewards for {len(completions)} completions: "
            "return one for each, None where it does not apply"
        )
    return answered


def outcome_rewards(answered: Sequence[Any], function: RewardFunction) -> Float[Tensor, " B"]:
    """One number a completion, float64, NaN for None.

    Raises
    ------
    InputError
        If an entry is neither a number nor None.
    """
    numbers = []
    for row, value in enumerate(answered):
        if value is None:
            numbers.append(math.nan)
            continue
        try:
            numbers.append(float(value))
        except (TypeError, ValueError):
            raise InputError(
                f"the reward {name_of(function)} returned {value!r} for completion {row}, expected a number or None"
            ) from None
    return torch.tensor(numbers, dtype=torch.float64)


def name_of(function: Any) -> str:
    """What a reward function is called in messages and logs."""
    return str(getattr(function, "__name__", type(function).__name__))
