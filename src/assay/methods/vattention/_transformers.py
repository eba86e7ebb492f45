"""vAttention inside transformers: an attention implementation by name, and the state that each layer keeps.

No cache object reaches an attention function, so a layer's index is tied to its module, and trusted only while the keys
continue those that it has seen.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from assay.methods.vattention._attention import is_prefill, vattention
from assay.methods.vattention._config import VAttentionConfig
from assay.methods.vattention._indices import TopKIndex, make_index

log = logging.getLogger("assay.vattention")


class UnsupportedModelError(TypeError):
    """The model does not take its attention from transformers' interface."""


@dataclass(frozen=True)
class LayerSparsity:
    """What one layer read, means over steps and batch for each query head.

    Attributes
    ----------
    layer : int
    steps : int
        Decode steps (queries) since the last reset.
    density : (H,)
        Distinct keys read over keys visible.
    budget : (H,)
        Sampled keys.
    err : (H,) or None
        With ``audit``: ``|out - dense| / |dense|``.
    path : str
        ``"kernel"``, ``"torch"`` or ``"dense"`` (fewer keys than ``min_keys``), of the last step.
    memory_bytes : int
        What the index holds.
    """

    layer: int
    steps: int
    density: Tensor
    budget: Tensor
    err: Tensor | None
    path: str
    memory_bytes: int


@dataclass
class _LayerState:
    """The index of a layer with what proves that it fits the keys, and the sums for the report."""

    config: VAttentionConfig | None = None
    index: TopKIndex | None = None
    n_seen: int = 0
    probes: tuple[Tensor, ...] = ()
    same_length: int = 0
    layer: int = 0
    steps: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    path: str = ""
    memory_bytes: int = 0

    def drop(self) -> None:
        """Forget the index, keep the report."""
        self.index, self.n_seen, self.probes = None, 0, ()

    def index_for(self, config: VAttentionConfig, key: Tensor, new: int, device: torch.device) -> TopKIndex:
        """The index over all keys: grown by the new ones where it is still valid, else built again."""
        n = key.shape[2]
        if self.index is not None and self.config is config and n == self.n_seen + new and self._continues(key):
            self.index.append(key[:, :, self.n_seen :].to(device))
        else:
            if self.index is not None and n == self.n_seen:
                self.same_length += 1
                if self.same_length == 2:  # once may be a crop
                    log.warning(
                        "the keys of a layer keep their length (StaticCache, or a cache that holds a sliding window only), "
                        "so that its index is built again at every step: use GrowingKVCache()"
                    )
            self.index = make_index(config, self.layer)
            self.index.build(key.to(device))
            self.config = config
        self.n_seen = n
        self.probes = tuple(key[:, :, at].clone() for at in (0, n // 2, n - 1))
        return self.index

    def _continues(self, key: Tensor) -> bool:
        """Whether the keys begin with those that were seen: three of them are bit-equal. Catches another request, beam
        reordering and cropping; where it errs, the index only predicts worse."""
        at = (0, self.n_seen // 2, self.n_seen - 1)
        return all(
            p.shape == (*key.shape[:2], key.shape[3])
            and p.dtype == key.dtype
            and p.device == key.device
            and torch.equal(key[:, :, i], p)
            for i, p in zip(at, self.probes, strict=True)
        )

    def count(self, path: str, **values: Tensor | None) -> None:
        """Add a step's values (B, H, Q) to the report."""
        self.path = path
        self.memory_bytes = 0 if self.index is None else self.index.memory_bytes
        for name, value in values.items():
            if value is not None:
                total = value.double().mean(0).sum(-1)
                self.sums[name] = self.sums[name] + total if name in self.sums else total
                self.steps += value.shape[2] if name == "density" else 0


_states: WeakKeyDictionary[nn.Module, _LayerState] = WeakKeyDictionary()
#: The attention functions that were made here.
_ours: WeakSet[Callable[..., tuple[Tensor, None]]] = WeakSet()


def _attention_function(config: VAttentionConfig | None) -> Callable[..., tuple[Tensor, None]]:
    config = VAttentionConfig() if config is None else config
    if not isinstance(config, VAttentionConfig):
        raise TypeError(f"config must be a VAttentionConfig, got {type(config).__name__}: VAttentionConfig(eps=0.1)")

    @torch.compiler.disable  # how much is read depends on what is read
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if kwargs.get("output_attentions"):
            raise ValueError("vattention computes no attention weights: call without output_attentions=True")
        if module.training and dropout > 0:
            raise ValueError("vattention has no attention dropout: call model.eval() before generating")
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no layer_idx, which vattention needs to tell layers apart"
            )
        state = _states.setdefault(module, _LayerState())
        queries, n = query.shape[2], key.shape[2]
        for name in (
            "softcap",
            "s_aux",
        ):  # of the prefill too: SDPA has neither, and leaves out the second without a word
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} asks for {name}, which neither vattention nor SDPA computes: leave this model dense"
                )
        prefill = is_prefill(queries, n, config) or (queries > 1 and _sees_only_itself(attention_mask, queries))
        if prefill or layer in config.dense_layers:
            state.drop()
            key, value = key.to(query.device), value.to(query.device)
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        if kwargs.get("position_bias") is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} asks for position_bias, which vattention does not compute: "
                f"name layer {layer} in dense_layers"
            )
        state.layer = layer
        if n < config.min_keys:
            state.drop()
            shape = (*query.shape[:3],)
            zero = torch.zeros(shape, device=query.device)
            state.count("dense", density=zero + 1, budget=zero, err=zero if config.audit else None)
            key, value = key.to(query.device), value.to(query.device)
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        with torch.no_grad():
            index = state.index_for(config, key, queries, query.device) if config.mode == "exact" else None
            out = vattention(
                query,
                key,
                value,
                config=config,
                scale=scaling,
                attn_mask=attention_mask,
                index_state=index,
                layer=layer,
            )
        state.count(out.path, density=out.density, budget=out.budget, err=out.err)
        return out.out.transpose(1, 2).contiguous(), None

    _ours.add(attend)
    return attend


def _sees_only_itself(mask: Tensor | None, queries: int) -> bool:
    """Whether several queries see no earlier key: the prefill of an empty static cache, whose keys are longer.

    No mask is transformers' sign for that.
    """
    if mask is None:
        return True
    last = mask[..., -1, :]
    visible = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
    return int(visible.sum(-1).max()) <= queries


def register(name: str = "assay_vattention", config: VAttentionConfig | None = None) -> str:
    """Make vAttention an attention implementation of transformers: then ``model.set_attn_implementation(name)``.

    Prefill stays transformers' own SDPA. Registering a name again replaces its configuration. On a CPU the kernel is
    compiled now (some seconds the first time).

    Parameters
    ----------
    name
        The implementation's name. The mask function of SDPA is registered under it too, without which transformers drops
        padding masks silently.
    config
        None: the defaults.

    Returns
    -------
    The name.

    Raises
    ------
    ValueError
        If the name belongs to another implementation, such as sdpa.
    """
    if name == "eager" or (name in ALL_ATTENTION_FUNCTIONS and ALL_ATTENTION_FUNCTIONS[name] not in _ours):
        raise ValueError(f"the name {name!r} belongs to another attention implementation: choose another one")
    AttentionInterface.register(name, _attention_function(config))
    AttentionMaskInterface.register(name, sdpa_mask)
    if not torch.cuda.is_available():
        _warm_up()
    return name


_number = itertools.count()


@contextmanager
def sparse_decoding(model: Any, config: VAttentionConfig | None = None) -> Iterator[Any]:
    """Inside, the model decodes sparsely; prefill stays dense. Afterwards, and after an error, all is as before.

    May be nested. Nothing stays registered.

    Parameters
    ----------
    model
        Any transformers model that takes its attention from `AttentionInterface`.
    config
        None: the defaults.

    Raises
    ------
    UnsupportedModelError
        If the model computes its attention in its own way.
    """
    check_supported(model)
    attend = _attention_function(config)
    top = model.config
    parts = {key: getattr(top, key, None) for key in getattr(top, "sub_configs", {})}
    before = {"": top._attn_implementation, **{k: c._attn_implementation for k, c in parts.items() if c is not None}}
    name = f"assay_vattention_{next(_number)}"
    ALL_ATTENTION_FUNCTIONS[name] = attend
    # Global: transformers looks for the mask function there only, and drops padding masks where it finds none.
    AttentionMaskInterface.register(name, sdpa_mask)
    if model.device.type == "cpu" and model.dtype == torch.float32:
        _warm_up()
    try:
        model.set_attn_implementation(name)
        yield model
    finally:
        model.set_attn_implementation(before if len(before) > 1 else before[""])
        del ALL_ATTENTION_FUNCTIONS[name], AttentionMaskInterface._global_mapping[name]
        for module in model.modules():
            if module in _states:
                _states[module].drop()


def check_supported(model: Any) -> None:
    """Raise `UnsupportedModelError` where a model's attention cannot be swapped."""
    if not isinstance(model, PreTrainedModel) or not type(model)._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface: "
            "use a model that does (Llama, Qwen, Mistral, ...), or call vattention() yourself"
        )


def sparsity_report(model: nn.Module) -> list[LayerSparsity]:
    """What each layer of a model read since the last `reset_report`, in order of layers.

    Parameters
    ----------
    model
        Any module; its attention layers are found by what they kept.

    Returns
    -------
    One `LayerSparsity` a layer. Empty before the first decode step. Layers in ``dense_layers`` are left out.
    """
    found = [_states[m] for m in model.modules() if m in _states and _states[m].steps]
    return [
        LayerSparsity(
            layer=s.layer,
            steps=s.steps,
            density=s.sums["density"] / s.steps,
            budget=s.sums["budget"] / s.steps,
            err=s.sums["err"] / s.steps if "err" in s.sums else None,
            path=s.path,
            memory_bytes=s.memory_bytes,
        )
        for s in sorted(found, key=lambda s: s.layer)
    ]


def reset_report(model: nn.Module) -> None:
    """Start the report of a model anew.

    Parameters
    ----------
    model
        Any module, as for `sparsity_report`.
    """
    for module in model.modules():
        if module in _states:
            _states[module].steps, _states[module].sums = 0, {}


def _warm_up() -> None:
    from assay.methods.vattention._kernel import warm_up

    warm_up()
