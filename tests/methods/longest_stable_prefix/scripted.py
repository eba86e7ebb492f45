"""Models whose logits a test writes, and one that attends causally."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from assay.mdlm import DiffusionGenerationConfig, MaskedDiffusionLM, MDLMOutput

from ...mdlm.tiny import EOS, MASK, scatter, tiny

__all__ = ["EOS", "MASK", "Causal", "Scripted", "config", "tiny"]


def config(n: int, **settings: object) -> DiffusionGenerationConfig:
    """N new tokens, seed 0."""
    return DiffusionGenerationConfig(max_new_tokens=n, **{"seed": 0, **settings})


class Scripted(MaskedDiffusionLM):
    """Logits (B, T, V) of a script ``(canvas (B, T), call from 1) -> logits``."""

    def __init__(self, script: Callable[[Tensor, int], Tensor], **overrides: object) -> None:
        super().__init__(tiny(**overrides).config)
        self.script, self.regions = script, []
        self.eval()

    def forward(self, input_ids=None, region=None, logits_for=None, see=None, cache=None, write="all", **rest):
        self.counters.calls += 1
        a, e = region or (0, input_ids.shape[1])
        self.regions.append((a, e))
        self.counters.token_forwards += (e - a) * len(input_ids)
        if cache is not None:
            cache.visit((a, e), (a, e), see or (0, cache.max_len), write).close()
        logits = self.script(input_ids, self.counters.calls)
        return MDLMOutput(logits=logits[:, a:e] if logits_for is None else logits[:, logits_for])


def sharp(tokens: Tensor, margins: Tensor | float, vocab: int = 40) -> Tensor:
    """Logits (B, T, V) that are largest at the tokens (B, T), by the margins, and equal elsewhere."""
    logits = torch.zeros(*tokens.shape, vocab)
    gaps = torch.as_tensor(margins, dtype=torch.float32).expand(tokens.shape)
    return logits.scatter_(2, tokens[..., None], gaps[..., None].contiguous())


class Causal(MaskedDiffusionLM):
    """A masked-diffusion model in which no token sees what is right of it: a frozen prefix is exact there."""

    def __init__(self, seed: int = 0, **overrides: object) -> None:
        super().__init__(tiny(**overrides).config)
        scatter(self, seed)
        self.eval()

    def forward(self, input_ids=None, attention_mask=None, **rest):
        length = input_ids.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril().expand(len(input_ids), 1, -1, -1)
        if attention_mask is not None:
            visible = visible & (attention_mask != 0)[:, None, None]
        return super().forward(input_ids=input_ids, attention_mask=visible, **rest)
