"""Who sees whom: left padding, block-causal attention with blocks counted from either origin, the two-stream mask.

Everything counts the *position ids* of a row, not its columns, so that left padding changes nothing.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from assay._errors import InputError

BlockOrigin = Literal["canvas", "prompt"]


def positions_from_padding(attention_mask: Tensor) -> Int[Tensor, "batch canvas"]:
    """Positions that start at 0 at the first real token of each row; padding gets 1.

    Parameters
    ----------
    attention_mask : (B, T)
        1 for a token, 0 for padding.
    """
    real = attention_mask != 0
    return (real.long().cumsum(-1) - 1).masked_fill(~real, 1)


def block_index(
    position_ids: Int[Tensor, "batch canvas"],
    block_size: int,
    block_origin: BlockOrigin = "canvas",
    prompt_len: Int[Tensor, " batch"] | int | None = None,
) -> Int[Tensor, "batch canvas"]:
    """The block of every position.

    Parameters
    ----------
    position_ids : (B, T)
    block_size
        Positions a block.
    block_origin
        ``"canvas"``: blocks are counted from position 0 (SDAR's generator). ``"prompt"``: block 0 starts behind the
        prompt, and the prompt is cut into blocks -1, -2, ... backwards (dLLM-RL's training). The two cut the canvas
        alike where ``prompt_len`` is a multiple of ``block_size``.
    prompt_len : (B,) or int
        For ``"prompt"``: the real tokens of each row's prompt, without its padding.
    """
    if block_size < 1:
        raise InputError(f"block_size must be at least 1, got {block_size}")
    if block_origin == "canvas":
        return position_ids.div(block_size, rounding_mode="floor")
    if block_origin != "prompt":
        raise InputError(f"block_origin must be 'canvas' or 'prompt', got {block_origin!r}")
    if prompt_len is None:
        raise InputError(
            "block_origin 'prompt' counts from each row's prompt: give prompt_len, its tokens without padding"
        )
    start = torch.as_tensor(prompt_len, device=position_ids.device).reshape(-1, 1)
    return (position_ids - start).div(block_size, rounding_mode="floor")


def block_causal_mask(
    position_ids: Int[Tensor, "batch canvas"],
    block_size: int,
    attention_mask: Tensor | None = None,
    block_origin: BlockOrigin = "canvas",
    prompt_len: Int[Tensor, " batch"] | int | None = None,
) -> Bool[Tensor, "batch 1 canvas canvas"]:
    """True where a query (row) sees a key (column): its own block and the blocks before it, padding left out.

    Parameters
    ----------
    position_ids, block_size, block_origin, prompt_len
        As in `block_index`.
    attention_mask : (B, T) or None
        1 for a token, 0 for padding.

    Source: SDAR, section 3; the two origins are those of its generator and of dLLM-RL's trainer.
    """
    blocks = block_index(position_ids, block_size, block_origin, prompt_len)
    visible = blocks[:, None, :, None] >= blocks[:, None, None, :]
    if attention_mask is not None:
        visible = visible & (attention_mask != 0)[:, None, None, :]
    return visible


def two_stream_mask(
    position_ids: Int[Tensor, "batch canvas"],
    response_start: int,
    block_size: int,
    attention_mask: Tensor | None = None,
    block_origin: BlockOrigin = "prompt",
    prompt_len: Int[Tensor, " batch"] | int | None = None,
) -> Bool[Tensor, "batch 1 both both"]:
    """The mask of block diffusion training, where one forward serves all blocks.

    The input is the clean canvas (prompt and response, T columns) followed by a noisy copy of the response (L1 columns,
    with the positions of the response). A clean token of block b sees the clean columns of the blocks up to and with b;
    a noisy token of block b sees the clean columns of the blocks before b and the noisy columns of block b.

    Parameters
    ----------
    position_ids : (B, T)
        Of the clean canvas.
    response_start
        Column where the response begins: the same for all rows, whose prompts are left-padded to it.
    block_size
        Positions a block.
    attention_mask : (B, T) or None
        1 for a token, 0 for padding, of the clean canvas.
    block_origin, prompt_len
        As in `block_index`; ``prompt_len`` None means the real tokens before ``response_start``.

    Returns
    -------
    (B, 1, T + L1, T + L1), True where the query (row) sees the key (column).

    Source: BD3LM, section 4.1; SDAR, section 3.1.
    """
    canvas = position_ids.shape[1]
    if not 0 <= response_start < canvas:
        raise InputError(f"response_start must be a column of the canvas of {canvas}, got {response_start}")
    real = torch.ones_like(position_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if prompt_len is None:
        prompt_len = real[:, :response_start].sum(-1)
    clean = block_index(position_ids, block_size, block_origin, prompt_len)
    noisy = clean[:, response_start:]
    both = torch.cat([clean, noisy], dim=1)
    is_noisy = torch.arange(both.shape[1], device=both.device) >= canvas
    query, key = both[:, :, None], both[:, None, :]
    sees_clean = torch.where(is_noisy[:, None], key < query, key <= query)
    sees_noisy = is_noisy[:, None] & (key == query)
    visible = torch.where(is_noisy[None, None, :], sees_noisy, sees_clean)
    kept = torch.cat([real, real[:, response_start:]], dim=1)
    return (visible & kept[:, None, :])[:, None]
