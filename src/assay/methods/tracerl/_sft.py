"""Supervised fine-tuning of a masked-diffusion model: random masks, block after block, or along a teacher's trace."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import mask_rates
from assay.methods.tracerl._scores import target_logps
from assay.methods.tracerl._slices import Responses, SliceBatch, build_full_slices, trainable
from assay.methods.tracerl._traces import Trace

Objective = Literal["random", "semi_ar", "trace"]


class SFTRows(NamedTuple):
    """Rows and what the cross entropy of each target counts: ``batch``, and ``weights`` (R, L1)."""

    batch: SliceBatch
    weights: Tensor


def sft_rows(
    traces: Sequence[Trace],
    objective: Objective | str,
    *,
    mask_token_id: int,
    pad_token_id: int,
    generator: torch.Generator | None = None,
    block_length: int = 8,
    shrink: int = 1,
    post_num: int | None = None,
) -> SFTRows:
    """Training rows of right answers, for full attention.

    Parameters
    ----------
    traces
        Answers. Only "trace" looks at their steps, so for the others any step map does.
    objective
        "random": one row an answer, masked at a rate of its own, a target counts 1/(rate times length). "semi_ar": one row an
        answer, a random block masked at a rate of its own, clean before it and hidden after it. "trace": one row a step, all
        targets of a row together count 1.
    mask_token_id, pad_token_id, post_num
        As in `build_full_slices`; by default all pads are learned, so that the model learns to stop.
    generator
        Of the masks.
    block_length
        Of "semi_ar".
    shrink
        Of "trace".

    Source: arXiv:2509.06949, section 4.2 (trace-aligned fine-tuning, and what it is compared with); arXiv:2502.09992, eq. 5.
    """
    ids: dict[str, Any] = {"mask_token_id": mask_token_id, "pad_token_id": pad_token_id}
    if objective == "trace":
        batch = build_full_slices(traces, shrink=shrink, post_num=post_num, **ids)
        return SFTRows(batch, batch.p_mask / batch.p_mask.sum(1, keepdim=True))
    side = Responses.of(traces, pad_token_id, None)
    allowed = trainable(side, post_num)
    count, length = allowed.shape
    rates = mask_rates(count, spread="stratified", generator=generator)[:, None]
    drawn = torch.rand(count, length, generator=generator) < rates
    if objective == "random":
        masked, targets = drawn & allowed, drawn & allowed
        size = allowed.sum(1, keepdim=True)
    elif objective == "semi_ar":
        if block_length < 1:
            raise InputError(f"block_length must be at least 1, got {block_length}: 8 or 32 are usual")
        block = torch.arange(length) // block_length
        chosen = torch.randint(int(block[-1]) + 1, (count, 1), generator=generator)
        targets = drawn & allowed & (block == chosen)
        masked = targets | (block > chosen)
        size = (allowed & (block == chosen)).sum(1, keepdim=True)
    else:
        raise InputError(f"there is no objective {objective!r}: use random, semi_ar or trace")
    kept = targets.any(1)
    batch = side.rows(torch.arange(count), masked, targets, mask_token_id, None)
    return SFTRows(batch, (targets / (rates * size.clamp(min=1)))[kept])


def sft_loss(model: Any, rows: SFTRows) -> Float[Tensor, ""]:
    """Weighted cross entropy of the targets, as a mean over rows.

    Parameters
    ----------
    model
        A `MaskedDiffusionLM`.
    rows
        As `sft_rows` gives them, or some of them.
    """
    batch = rows.batch
    logps = batch.dense(target_logps(model, batch))
    return -(logps * rows.weights.to(logps)).sum(1).mean()
