"""Log-probabilities and values at the targets of training rows, a few rows of like lengths at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.methods.tracerl._slices import SliceBatch


def target_logps(
    model: Any, batch: SliceBatch, *, temperature: float = 1.0, banned: Sequence[int] = ()
) -> Float[Tensor, " targets"]:
    """Log-probability of the label at each target, row-major, in float32 at least.

    The head runs at the targets alone: rows times vocabulary never exist.

    Parameters
    ----------
    model
        A `MaskedDiffusionLM`, or its wrapper.
    batch
        On the model's device.
    temperature
        Divides the logits.
    banned
        Tokens that the sampler never draws ([MASK] at least): their probability is 0.
    """
    if not len(batch):
        return torch.zeros(0, device=batch.input_ids.device)
    batch = batch.trimmed()
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attn,
        position_ids=batch.position_ids,
        logits_for=batch.logits_for,
    ).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if banned:
        logits = logits.index_fill(1, torch.tensor(list(banned), device=logits.device), -torch.inf)
    if temperature != 1:
        logits = logits / temperature
    return logits.gather(1, batch.labels[batch.p_mask][:, None])[:, 0] - logits.logsumexp(1)


def target_values(model: Any, batch: SliceBatch) -> Float[Tensor, " targets"]:
    """Value at each target, row-major, in float32 at least.

    Parameters
    ----------
    model
        A `DiffusionValueModel`, or its wrapper.
    batch
        On the model's device.
    """
    batch = batch.trimmed()
    values = model(batch.input_ids, attention_mask=batch.attn, position_ids=batch.position_ids)
    return values[batch.logits_for].to(torch.promote_types(values.dtype, torch.float32))


def micro_batches(batch: SliceBatch, rows: Int[Tensor, " rows"], size: int) -> list[Int[Tensor, "_"]]:
    """Rows in groups of at most ``size`` whose lengths are alike, so that little of a forward is padding."""
    prompt, response = batch.lengths()
    width = response if batch.block_size is None else 2 * response
    order = (prompt + width)[rows].argsort(stable=True)
    return list(rows[order].split(size))


@torch.no_grad()
def scored(
    batch: SliceBatch,
    size: int,
    device: torch.device | str,
    score: Callable[[SliceBatch], Tensor],
) -> Float[Tensor, "R L1"]:
    """A score of every target of all rows, 0 elsewhere, on the CPU.

    Parameters
    ----------
    batch
        On the CPU.
    size
        Rows a forward.
    device
        Where ``score`` wants its rows.
    score
        ``rows -> (targets,)``, row-major.
    """
    out: Tensor | None = None
    for rows in micro_batches(batch, torch.arange(len(batch)), size):
        part = batch.select(rows)
        values = score(part.to(device)).cpu()
        if out is None:
            out = values.new_zeros(batch.p_mask.shape)
        out[rows] = part.dense(values)
    return torch.zeros(batch.p_mask.shape) if out is None else out
