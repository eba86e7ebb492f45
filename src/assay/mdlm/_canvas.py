"""From prompts to the canvas on which an answer is generated."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from assay._errors import InputError
from assay.mdlm._masks import block_index, positions_from_padding
from assay.mdlm._state import DiffusionGenerationConfig, GenState

if TYPE_CHECKING:
    from assay.mdlm._model import MaskedDiffusionLM


def fitting(config: DiffusionGenerationConfig, model: "MaskedDiffusionLM") -> DiffusionGenerationConfig:
    """The config with the block length of a block model filled in."""
    if model.config.attention != "block":
        return config
    if config.block_length not in (None, model.config.block_size):
        raise InputError(
            f"block_length is {config.block_length}, and the model's blocks have {model.config.block_size} tokens: leave "
            "block_length out"
        )
    return dataclasses.replace(config, block_length=model.config.block_size)


def padded_canvas(
    model: "MaskedDiffusionLM",
    input_ids: Tensor | Sequence[Any],
    attention_mask: Tensor | None,
    config: DiffusionGenerationConfig,
) -> tuple[Tensor, Tensor]:
    """Padded prompts with masks behind them, and which columns are real: (B, T) both, on the CPU."""
    mask_id = model.mask_token_id
    if isinstance(input_ids, Tensor):
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            raise InputError(
                f"input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}, expected (B, L0) token ids: a single "
                "prompt is (1, L0)"
            )
        prompts = input_ids.cpu().long()
        real = torch.ones_like(prompts, dtype=torch.bool) if attention_mask is None else attention_mask.cpu() != 0
        if real.shape != prompts.shape:
            raise InputError(
                f"attention_mask has shape {tuple(real.shape)}, expected that of input_ids, {tuple(prompts.shape)}"
            )
    else:
        if attention_mask is not None:
            raise InputError("attention_mask goes with padded input_ids, and these are separate prompts: leave it out")
        given = [_ids(prompt, row) for row, prompt in enumerate(input_ids)]
        width = max((len(prompt) for prompt in given), default=0)
        prompts = torch.full((len(given), width), _pad_id(model))
        real = torch.zeros(len(given), width, dtype=torch.bool)
        for row, prompt in enumerate(given):
            prompts[row, width - len(prompt) :] = prompt
            real[row, width - len(prompt) :] = True
    if len(prompts) == 0:
        raise InputError("there is no prompt: give at least one")
    if (real[:, :-1] & ~real[:, 1:]).any():
        raise InputError(
            "attention_mask has pads right of tokens, expected pads on the left only: pad prompts on the left"
        )
    if (prompts[~real] == mask_id).any():
        raise InputError(
            f"prompts are padded with the mask id {mask_id}, which would be generated: pad with another id"
        )
    masks = (prompts == mask_id).sum(1)
    if masks.any() and not config.allow_masks_in_prompt:
        worst = int(masks.argmax())
        raise InputError(
            f"prompt {worst} already holds {int(masks[worst])} mask ids ({mask_id}): set allow_masks_in_prompt to fill them in"
        )
    if prompts.numel() and not 0 <= int(prompts.min()) <= int(prompts.max()) < model.config.vocab_size:
        raise InputError(
            f"prompts hold ids from {int(prompts.min())} to {int(prompts.max())}, expected 0 to {model.config.vocab_size - 1}"
        )
    answers = torch.full((len(prompts), config.max_new_tokens), mask_id)
    canvas = torch.cat([prompts, answers], dim=1)
    real = torch.cat([real, torch.ones_like(answers, dtype=torch.bool)], dim=1)
    longest, limit = int(real.sum(1).max()), model.config.max_position_embeddings
    if longest > limit:
        raise InputError(
            f"prompt and answer have {longest} tokens, and the model takes {limit}: shorten the prompt or max_new_tokens"
        )
    if model.config.logit_shift:
        first = real.int().argmax(1, keepdim=True)
        if canvas.shape[1] and (canvas.gather(1, first) == mask_id).any():
            raise InputError(
                "a row starts with a mask, and this model predicts each token from the one before: start it with a token"
            )
    return canvas, real


def _ids(prompt: Any, row: int) -> Tensor:
    """One prompt's tokens (n,), on the CPU."""
    ids = torch.as_tensor(prompt).cpu()
    if ids.ndim != 1 or (len(ids) and ids.is_floating_point()):
        raise InputError(
            f"prompt {row} is {ids.dtype} of shape {tuple(ids.shape)}, expected a list or (n,) tensor of token ids"
        )
    return ids.long()


def _pad_id(model: "MaskedDiffusionLM") -> int:
    for token in (model.config.pad_token_id, model.config.eos_token_id):
        if token is not None:
            return token
    return 0 if model.mask_token_id != 0 else 1


def first_state(
    model: "MaskedDiffusionLM", canvas: Tensor, real: Tensor, config: DiffusionGenerationConfig
) -> GenState:
    device = model.device
    batch, length = canvas.shape
    start = length - config.max_new_tokens
    pad = (~real).sum(1)
    positions = positions_from_padding(real)
    generator = torch.Generator(device)
    generator.manual_seed(int(torch.randint(2**63 - 1, ())) if config.seed is None else config.seed)
    x = canvas.to(device)
    masked = canvas == model.mask_token_id
    return GenState(
        x=x,
        host=x if device.type == "cpu" else canvas,
        rows=torch.arange(batch),
        prompt_len=start - pad,
        pad=pad,
        canvas_start=start,
        position_ids=positions.to(device),
        block_of=_blocks(model, masked, positions, start, pad, config).masked_fill(~real, -(2**31)),
        step=1,
        commits=torch.zeros(batch, dtype=torch.long),
        last_commit=torch.full((batch, 2), start),
        finished=~masked.any(1),
        generator=generator,
        mask_id=model.mask_token_id,
        eos_id=model.config.eos_token_id,
        config=config,
    )


def _blocks(
    model: "MaskedDiffusionLM",
    masked: Tensor,
    positions: Tensor,
    start: int,
    pad: Tensor,
    config: DiffusionGenerationConfig,
) -> Tensor:
    """The block of each column (B, T), as `GenState.block_of` says."""
    batch, length = masked.shape
    if model.config.attention == "block":
        assert config.block_length is not None
        return block_index(positions, config.block_length, config.block_origin, start - pad)
    columns = torch.arange(length).expand(batch, -1)
    if config.block_length is not None:
        return (columns - start).div(config.block_length, rounding_mode="floor")
    return torch.where(masked.cumsum(1) > 0, 0, -1)
