"""Random numbers that depend on what they are for, not on what was drawn before: a run that stops goes on alike."""

import zlib

import numpy as np
import torch


def seed_for(seed: int, step: int, purpose: str, rank: int = 0) -> int:
    """A seed of a run's step for one purpose, below 2**62."""
    state = np.random.SeedSequence([seed, step, zlib.crc32(purpose.encode()), rank]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(2))


def generator_for(seed: int, step: int, purpose: str, rank: int = 0) -> torch.Generator:
    """A generator on the CPU with `seed_for` as its seed."""
    return torch.Generator().manual_seed(seed_for(seed, step, purpose, rank))
