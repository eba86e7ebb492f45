"""What is where in a transformer of transformers: its blocks, their Linears in the order of the data, and each block alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from assay._errors import InputError

#: Groups of Linears that read the same input, in the order in which data passes them, as their names end.
_LAYOUTS = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)),  # LLaMA, Mistral, Qwen
    (("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",)),  # OPT
    (("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),  # GPT-2
)


class Inputs(NamedTuple):
    """What enters the blocks of a model for one batch.

    Attributes
    ----------
    hidden : (rows, tokens, features)
        Into the first block.
    arguments
        Of every block, besides the hidden states: masks (which differ where windows slide), positions, rotary tables.
    """

    hidden: Tensor
    arguments: tuple[dict[str, Any], ...]


def blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a causal language model: its longest list of modules.

    Raises
    ------
    InputError
        If it has none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise InputError(f"{type(model).__name__} has no list of blocks: give a transformer of transformers")
    return max(lists, key=lambda found: (len(found), sum(p.numel() for p in found.parameters())))


def groups(block: nn.Module) -> list[dict[str, nn.Module]]:
    """The Linears of a block, by their names in it: groups that share their input, in the order of the data.

    Raises
    ------
    InputError
        If its Linears are not named as those of LLaMA, Mistral, Qwen, OPT or GPT-2 are.
    """
    linears = {name: module for name, module in block.named_modules() if is_linear(module)}
    for layout in _LAYOUTS:
        found = [
            {name: linears[name] for end in group for name in linears if f".{name}".endswith(f".{end}")}
            for group in layout
        ]
        if [len(group) for group in found] == [len(group) for group in layout]:
            return found
    raise InputError(
        f"the Linears of a {type(block).__name__} are {', '.join(linears) or 'none'}: the names of LLaMA, Mistral, Qwen, OPT "
        "or GPT-2 were expected; name the targets"
    )


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear, or the transposed one of GPT-2."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def weight_of(linear: nn.Module) -> Float[Tensor, "m n"]:
    """The weight of a Linear as outputs by inputs; that of GPT-2's Conv1D is stored the other way round."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(linear, nn.Linear) else weight.T


def bias_of(linear: nn.Module) -> Float[Tensor, " m"] | None:
    """The bias of a Linear, where it has one."""
    bias = linear.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def replace(block: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module into a block in the place of the one of this name."""
    parent, _, last = name.rpartition(".")
    setattr(block.get_submodule(parent), last, module)


@torch.no_grad()
def inputs_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Inputs:
    """What a model hands to its blocks for a batch. No block is run.

    Parameters
    ----------
    batch
        ``input_ids`` and, where there is padding, ``attention_mask``.
    """
    them = blocks(model)
    names = list(inspect.signature(type(them[0]).forward).parameters)[2:]  # after self and the hidden states
    found: list[dict[str, Any]] = []
    first: list[Tensor] = []

    def entered(hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
        first.append(hidden)
        arguments = {**dict(zip(names, rest, strict=False)), **named}
        found.append({name: value for name, value in arguments.items() if name not in ("cache", "past_key_values")})
        return hidden

    with _instead(them, entered):
        _body(model)(**batch, use_cache=False)
    return Inputs(first[0], tuple(found))


@torch.no_grad()
def run_block(
    block: nn.Module, hidden: Float[Tensor, "rows tokens features"], arguments: Mapping[str, Any]
) -> Float[Tensor, "rows tokens features"]:
    """The hidden states behind a block, given those before it and the block's arguments."""
    out = block(hidden, **arguments)
    return out if isinstance(out, Tensor) else out[0]


@torch.no_grad()
def hidden_at(model: nn.Module, layer: int, **inputs: Any) -> Float[Tensor, "rows tokens features"]:
    """The residual stream behind a block; the blocks after it are not run.

    The same as ``hidden_states[layer + 1]`` of a whole forward, but for the last layer, where that is taken behind the
    final norm and this is not.

    Parameters
    ----------
    layer
        Number of the block, from 0.
    **inputs
        Of the model: ``input_ids``, ``attention_mask``, a cache.

    Raises
    ------
    InputError
        If there is no such block.
    """
    them = blocks(model)
    if not 0 <= layer < len(them):
        raise InputError(f"the model has blocks 0 to {len(them) - 1}, not {layer}: name one of them")
    caught: list[Tensor] = []

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        caught.append(out if isinstance(out, Tensor) else out[0])
        raise _Enough

    hook = them[layer].register_forward_hook(leave)
    try:
        _body(model)(**inputs)
    except _Enough:
        pass
    finally:
        hook.remove()
    return caught[0]


class _Enough(Exception):
    """Leaves a forward that has said what was asked."""


def _body(model: nn.Module) -> nn.Module:
    """The model without its head."""
    body = getattr(model, "base_model", model)
    assert isinstance(body, nn.Module)
    return body


@contextmanager
def _instead(them: nn.ModuleList, forward: Any) -> Iterator[None]:
    """Give the blocks another forward for a while."""
    for block in them:
        block.forward = forward
    try:
        yield
    finally:
        for block in them:
            del block.forward
