"""What TraceRL is weighed against: rows with random masks, with a mask and its complement, and with the whole response
hidden; and the objectives of supervised fine-tuning.

All make the same `SliceBatch` as the trace does, so that loss, optimizer and budget are the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from assay._errors import InputError
from assay.methods.tracerl._slices import Responses, SliceBatch, trainable
from assay.methods.tracerl._traces import Trace


def masked_rows(
    traces: Sequence[Trace],
    row_of_response: Int[Tensor, "R"],
    masked: Bool[Tensor, "R L1"],
    *,
    mask_token_id: int,
    pad_token_id: int,
    block_size: int | None = None,
    post_num: int | None = 0,
    prompt_masked: Bool[Tensor, "R L0"] | None = None,
) -> SliceBatch:
    """Rows with given masks: what is masked is a target, but for pads beyond ``post_num`` of the response.

    Parameters
    ----------
    traces
        Whose order of decoding is not looked at.
    row_of_response : (R,)
        The response that each row shows.
    masked : (R, L1)
        What it hides.
    mask_token_id, pad_token_id, block_size, post_num
        As in `build_full_slices` and `build_block_slices`; a block size makes two-stream rows.
    prompt_masked : (R, L0), or None
        Tokens of the (left-padded) prompt that are hidden too; never targets.
    """
    side = Responses.of(traces, pad_token_id, block_size)
    targets = masked & trainable(side, post_num)[row_of_response]
    return side.rows(row_of_response, masked, targets, mask_token_id, block_size, prompt_masked)


def random_rows(
    traces: Sequence[Trace],
    *,
    generator: torch.Generator,
    masks_per_sample: int | None = None,
    mask_rate: tuple[float, float] = (0.1, 0.9),
    **settings: Any,
) -> SliceBatch:
    """Rows with random masks: a rate a row for full attention, a rate a position (so half of them) for block attention.

    Parameters
    ----------
    traces
        The responses.
    generator
        Of the draws.
    masks_per_sample
        Rows a response; None: as released, 35 for full attention and 1 for block attention.
    mask_rate
        Ends of the uniform law of the rate.
    **settings
        Of `masked_rows`.

    Source: arXiv:2509.06949, section 5.3 (random masking) and released code.
    """
    owner, masked = _drawn(traces, generator, masks_per_sample, mask_rate, settings)
    return masked_rows(traces, owner, masked, **settings)


def coupled_rows(
    traces: Sequence[Trace],
    *,
    generator: torch.Generator,
    masks_per_sample: int | None = None,
    mask_rate: tuple[float, float] = (0.1, 0.9),
    **settings: Any,
) -> SliceBatch:
    """Each random mask of `random_rows` and its complement: every position is a target once a pair.

    Parameters
    ----------
    traces, generator, mask_rate, **settings
        As in `random_rows`.
    masks_per_sample
        Pairs a response.

    Source: arXiv:2506.20639 (coupled sampling), as released with TraceRL.
    """
    owner, masked = _drawn(traces, generator, masks_per_sample, mask_rate, settings)
    return masked_rows(traces, torch.cat([owner, owner]), torch.cat([masked, ~masked]), **settings)


def one_step_rows(
    traces: Sequence[Trace],
    *,
    generator: torch.Generator,
    masks_per_sample: int | None = None,
    prompt_rate: float = 0.15,
    **settings: Any,
) -> SliceBatch:
    """The whole response hidden, and some of the prompt: log-probabilities of one step from nothing.

    Parameters
    ----------
    traces, generator
        As in `random_rows`.
    masks_per_sample
        Rows a response, each with its own draw of the prompt; None: 1.
    prompt_rate
        Chance that a prompt token is hidden.
    **settings
        Of `masked_rows`, for full attention.

    Source: arXiv:2504.12216 (d1, diffu-GRPO).
    """
    if settings.get("block_size") is not None:
        raise InputError(
            "one_step hides the whole response, which a block model never sees: use a full-attention model"
        )
    side = Responses.of(traces, settings["pad_token_id"], None)
    owner = torch.arange(len(traces)).repeat_interleave(masks_per_sample or 1)
    hidden = torch.rand(len(owner), side.prompts.shape[1], generator=generator) < prompt_rate
    # The first token stays: a model with shifted logits has nothing before it, and others do not miss it.
    first = (side.prompt_real.int().cumsum(1) == 1)[owner]
    hidden &= side.prompt_real[owner] & ~first
    masked = torch.ones(len(owner), side.responses.shape[1], dtype=torch.bool)
    return masked_rows(traces, owner, masked, prompt_masked=hidden, **settings)


def _drawn(
    traces: Sequence[Trace],
    generator: torch.Generator,
    masks_per_sample: int | None,
    mask_rate: tuple[float, float],
    settings: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    low, high = mask_rate
    if not 0 <= low <= high <= 1:
        raise InputError(f"mask_rate {mask_rate} is no range of shares: give (low, high) with 0 <= low <= high <= 1")
    block = settings.get("block_size")
    side = Responses.of(traces, settings["pad_token_id"], block)
    rows = (35 if block is None else 1) if masks_per_sample is None else masks_per_sample
    owner = torch.arange(len(traces)).repeat_interleave(rows)
    shape = (len(owner), side.responses.shape[1])
    rates = torch.rand(shape if block is not None else (shape[0], 1), generator=generator) * (high - low) + low
    return owner, torch.rand(shape, generator=generator) <= rates
