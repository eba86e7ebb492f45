"""Step-level advantages the slow, obvious way: the twin that `step_gae` must equal."""

from collections.abc import Sequence


def step_gae_loops(
    values: Sequence[float],
    rewards: Sequence[float],
    step_map: Sequence[int],
    trainable: Sequence[bool],
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[float], list[float]]:
    """Returns and advantages of one response, token by token and step by step.

    Parameters
    ----------
    values, rewards, step_map, trainable : (L,)
        As in `step_gae`, of one response; steps of 1 or more.
    gamma, lam
        Discount and trace decay.

    Source: arXiv:2509.06949, equations 5 to 7.
    """
    length = len(values)
    steps = sorted({step_map[j] for j in range(length) if trainable[j]})
    members = {step: [j for j in range(length) if trainable[j] and step_map[j] == step] for step in steps}
    returns, advantages = [0.0] * length, [0.0] * length
    next_value = next_return = next_advantage = 0.0
    for step in reversed(steps):
        tokens = members[step]
        value = sum(values[j] for j in tokens) / len(tokens)
        reward = sum(rewards[j] for j in tokens) / len(tokens)
        for j in tokens:
            returns[j] = rewards[j] + gamma * next_return
            advantages[j] = rewards[j] - values[j] + gamma * next_value + gamma * lam * next_advantage
        next_return = reward + gamma * next_return
        next_advantage = reward - value + gamma * next_value + gamma * lam * next_advantage
        next_value = value
    return returns, advantages
