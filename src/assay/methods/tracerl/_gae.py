"""Advantages along a trace: estimated over decoding steps, and handed back to the tokens of each step."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.methods.tracerl._traces import dense_ranks, settled


def step_gae(
    values: Float[Tensor, "B L"],
    rewards: Float[Tensor, "B L"],
    step_map: Int[Tensor, "B L"],
    trainable: Bool[Tensor, "B L"],
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Tensor, "B L"], Float[Tensor, "B L"]]:
    """Returns and advantages of every token from the values and rewards of its step and those that follow.

    V*_t and r*_t are means over the tokens of step t = 1..S. R*_t = r*_t + g R*_{t+1},
    A*_t = r*_t - V*_t + g V*_{t+1} + g l A*_{t+1}; what lies past S is 0. A token of step t has R_j = r_j + g R*_{t+1} and
    A_j = r_j - V_j + g V*_{t+1} + g l A*_{t+1}.

    Not the usual estimate along positions: tokens that were decoded together share what comes after them.

    Parameters
    ----------
    values, rewards : (B, L)
        Of each token; read where trainable.
    step_map : (B, L)
        (Collapsed) steps; only their order counts. 0: after all others.
    trainable : (B, L)
        Tokens that exist for the estimate.
    gamma, lam
        Discount and trace decay, a step.

    Returns
    -------
    returns, advantages : (B, L)
        0 where not trainable.

    Source: arXiv:2509.06949, equations 5 to 7.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise InputError(
            f"gamma {gamma} and lam {lam} must lie in [0, 1]: 1 and 1 give the plain return less the value"
        )
    length = values.shape[1]
    steps = settled(step_map)
    step = dense_ranks(
        torch.where(trainable, steps, steps.max() + 1)
    )  # tokens that are not trainable share the last one
    count = trainable.to(values.dtype)

    def mean_of_step(x: Tensor) -> Tensor:
        total = torch.zeros_like(x).scatter_add(1, step, x * count)
        return total / torch.zeros_like(x).scatter_add(1, step, count).clamp(min=1)

    def from_the_next(x: Tensor) -> Tensor:
        later = torch.nn.functional.pad(x, (0, 1))[:, 1:]
        return later.gather(1, step)

    value, reward = mean_of_step(values), mean_of_step(rewards)  # (B, L): column t is step t, 0 past the last
    next_value = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    returns = discounted_sums(reward, gamma)
    advantages = discounted_sums(reward - value + gamma * next_value, gamma * lam)
    assert returns.shape[1] == length
    token_returns = rewards + gamma * from_the_next(returns)
    token_advantages = rewards - values + gamma * from_the_next(value) + gamma * lam * from_the_next(advantages)
    return token_returns * count, token_advantages * count


def discounted_sums(x: Float[Tensor, "B S"], c: float) -> Float[Tensor, "B S"]:
    """y_t = x_t + c y_{t+1}, in log2(S) passes: after pass k each entry holds its first 2^k terms."""
    y, reach = x, 1
    while reach < x.shape[1] and c:
        y = y + c**reach * torch.nn.functional.pad(y[:, reach:], (0, reach))
        reach *= 2
    return y


def last_step(step_map: Int[Tensor, "B L"], trainable: Bool[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """The trainable tokens of each response's last step that has any: where the terminal reward lies."""
    steps = settled(step_map).masked_fill(~trainable, -1)
    return trainable & (steps == steps.amax(1, keepdim=True))
