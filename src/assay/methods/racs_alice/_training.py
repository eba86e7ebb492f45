"""Training a small language model the paper's way: random windows, warm-up and cosine, loss on evenly spaced windows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
    for part in windows.to(next(model.parameters()).device).split(batch):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        each = nn.functional.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none")
        losses.append(each.mean(1))
    model.train(was_training)
    return torch.cat(losses).double().cpu().numpy()


def training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    tokens: np.ndarray,
    *,
    steps: int,
    batch: int,
    length: int,
    seed: int,
    start: int = 0,
    accumulate: int = 1,
    bf16: bool = False,
) -> Iterator[int]:
    """Train in place, a step for each turn; yields how many are done.

    The batches depend on ``seed`` and the step alone: rivals of one seed see the same ones, and so does a run that resumes.

    Parameters
    ----------
    optimizers
        Their groups' rates are multiplied by `schedule`.
    tokens
        The training text; may be mapped from disk.
    start
        Steps that were done before, with these optimizers' states.
    accumulate
        Batches whose gradients are averaged for one step.
    bf16
        Compute the loss under bfloat16 autocast; weights and states keep their precision.
    """
    device = next(model.parameters()).device
    model.train()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])  # travels in the state dict: a resumed run scales the same rate
    for step in range(start, steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule(step, steps)
            optimizer.zero_grad()
        for part in range(accumulate):
            windows = random_windows(tokens, batch, length, (seed, step, part)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = loss_of(model, windows)
            (loss / accumulate).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield step + 1
