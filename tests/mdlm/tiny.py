"""A masked-diffusion model small enough for any test, with weights that make every part of it matter."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.mdlm import MaskedDiffusionLM, MDLMConfig

MASK = 39
EOS = 38


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> MaskedDiffusionLM:
    """Two layers of width 32, 40 tokens; ``overrides`` are fields of `MDLMConfig`. In evaluation mode."""
    settings: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    model = MaskedDiffusionLM(MDLMConfig(**{**settings, **overrides}))
    scatter(model, seed)
    return model.to(dtype).eval()


def scatter(model: torch.nn.Module, seed: int = 0) -> None:
    """Random weights at a scale where attention is sharp and no bias or norm is idle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / math.sqrt(parameter.shape[1]))
