"""Reinforcement learning for language models: advantages of groups, and how reward functions are called.

Pure functions without a model inside; a method brings its own loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from assay._extras import extras

if TYPE_CHECKING:
    from assay.rl.losses import group_advantages
    from assay.rl.rewards import call_reward, outcome_rewards

_HOMES = {"call_reward": "rewards", "group_advantages": "losses", "outcome_rewards": "rewards"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import assay.rl` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras("torch"):
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


__all__ = ["call_reward", "group_advantages", "outcome_rewards"]
