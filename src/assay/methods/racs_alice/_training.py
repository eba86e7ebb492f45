"""Training a small language model the paper's way: random windows, warm-up and cosine, loss on evenly spaced windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rate at a step (from 0): linear warm-up over the first tenth, cosine to a tenth.

    Source: arXiv:2502.07752, Appendix, "Experiment details".
    """
    warmup = max(1, round(0.1 * steps))
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - 1 - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


def random_windows(tokens: np.ndarray, count: int, length: int, seed: Sequence[int]) -> Tensor:
    """(count, length + 1) token windows at random places, which depend on ``seed`` alone."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length, size=count)
    return _windows(tokens, starts, length)


def spaced_windows(tokens: np.ndarray, count: int, length: int) -> Tensor:
    """(count, length + 1) evenly spaced windows: always the same ones."""
    starts = np.linspace(0, len(tokens) - length - 1, min(count, max(1, len(tokens) - length))).astype(np.int64)
    return _windows(tokens, starts, length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    if len(tokens) <= length:
        raise ValueError(
            f"a text of {len(tokens)} tokens has no window of {length + 1}: give a longer text, or shorter windows"
        )
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean negative log likelihood a token, in nats."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def window_losses(model: nn.Module, windows: Tensor, batch: int = 64) -> np.ndarray:
    """Mean negative log likelihood a token of each window, in nats."""
    was_training = model.training
    model.eval()
    losses = []
    for part in windows.split(batch):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        each = nn.functional.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none")
        losses.append(each.mean(1))
    model.train(was_training)
    return torch.cat(losses).double().numpy()


def train(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tokens: np.ndarray,
    *,
    steps: int,
    batch: int,
    length: int,
    seed: int,
    walk: Callable[[int], Iterator[int]] | None = None,
    every: int = 0,
    look: Callable[[int], Any] | None = None,
) -> None:
    """Train in place; the batches depend on ``seed`` and the step alone, so rivals of one seed see the same ones.

    Parameters
    ----------
    optimizers
        Their groups' rates are multiplied by `schedule`.
    tokens
        The training text.
    walk
        ``trial.progress``, or another wrapper of the number of steps.
    every, look
        ``look(step)`` is called after each ``every`` steps and after the last.
    """
    base = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
    model.train()
    for step in walk(steps) if walk else range(steps):
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step, steps)
            optimizer.zero_grad()
        loss_of(model, random_windows(tokens, batch, length, (seed, step))).backward()
        for optimizer in optimizers:
            optimizer.step()
        if look and every and ((step + 1) % every == 0 or step + 1 == steps):
            look(step + 1)
