"""How long a causal model takes to read a prompt, and to write a token."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from assay._errors import InputError


class Latency(NamedTuple):
    """Medians, in seconds.

    Attributes
    ----------
    prefill
        To read the context.
    decode
        A token of each row after it, with the cache.
    """

    prefill: float
    decode: float


@torch.no_grad()
def latencies(
    models: Mapping[str, nn.Module], *, context: int = 256, tokens: int = 16, batch: int = 1, rounds: int = 5
) -> dict[str, Latency]:
    """The latencies of models on the same random tokens, measured in turn so that a busy moment hits all alike.

    Parameters
    ----------
    models
        Causal models of transformers, by name.
    context
        Tokens of the prompt.
    tokens
        Written after it in a round.
    batch
        Prompts at once.
    rounds
        Of which the medians are taken; one more before them does not count.

    Raises
    ------
    InputError
        If a number is below one.
    """
    if min(context, tokens, batch, rounds) < 1:
        raise InputError("context, tokens, batch and rounds are at least one")
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            config: Any = model.config
            home = next(model.parameters()).device
            ids = torch.randint(
                config.get_text_config().vocab_size, (batch, context), generator=torch.Generator().manual_seed(0)
            ).to(home)
            keyword = _cache_keyword(model)
            begin = _now(home)
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            read = _now(home)
            for _ in range(tokens):
                chosen = out.logits[:, -1:].argmax(-1)
                out = model(input_ids=chosen, **{keyword: getattr(out, keyword)}, use_cache=True)
            written = _now(home)
            prefill[name].append(read - begin)
            decode[name].append((written - read) / tokens)
    return {
        name: Latency(
            *(float(torch.tensor(seen[name][1:], dtype=torch.float64).median()) for seen in (prefill, decode))
        )
        for name in models
    }


def _cache_keyword(model: nn.Module) -> str:
    """What transformers calls the cache: newer versions give it a new name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
