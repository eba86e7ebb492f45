"""KV caches that grow in place. transformers' `DynamicCache` copies all keys and values at every step, which costs as
much as dense attention and hides what a sparse step saves."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer, get_layer_types_and_kwargs

from assay.methods.vattention._indices import writable

LARGE = 2**22  # bytes from which large pages are worth asking for


def _empty_on_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory in large pages, where the system gives them on request (Linux).

    A sparse step reads keys that lie anywhere. In pages of 4 kB nearly each of them costs a walk through the page tables.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them: ordinary pages
        pass
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class _GrowingLayer(DynamicLayer):
    """Buffers of doubled capacity; `update` writes at the end and returns views.

    ``keys`` and ``values`` are views of what is filled. Setting them (as beam search of transformers does) replaces the
    content and keeps the spare capacity.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._length = 0
        super().__init__(**kwargs)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self._k is None else self._k[:, :, : self._length]

    @keys.setter
    def keys(self, x: Tensor | None) -> None:
        self._k = self._replaced(self._k, x)
        self._length = 0 if x is None else x.shape[2]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self._v is None else self._v[:, :, : self._length]

    @values.setter
    def values(self, x: Tensor | None) -> None:
        self._v = self._replaced(self._v, x)

    def _replaced(self, buffer: Tensor | None, x: Tensor | None) -> Tensor | None:
        if x is None or buffer is None or not self._fits(buffer, x) or x.shape[2] > buffer.shape[2]:
            return x
        if x.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            x = x.clone()  # a part of the buffer itself
        buffer[:, :, : x.shape[2]] = x
        return buffer

    @staticmethod
    def _fits(buffer: Tensor, x: Tensor) -> bool:
        same = (buffer.shape[:2], buffer.shape[3], buffer.dtype) == (x.shape[:2], x.shape[3], x.dtype)
        return same and writable(buffer)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take device and dtype from the first keys."""
        self.device = key_states.device
        self.dtype = key_states.dtype
        self._length = 0
        self.is_initialized = True

    def _room(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        if buffer is not None:
            have, want = ((*x.shape[:2], x.shape[3], x.dtype) for x in (buffer, new))
            if have != want:
                raise ValueError(
                    f"the cache holds (batch, heads, width, dtype) {have}, but {want} came: "
                    "use a new cache for another batch, or call batch_repeat_interleave first"
                )
            if end <= buffer.shape[2] and writable(buffer):
                return buffer
        size = end + 64 if buffer is None else max(end, 2 * buffer.shape[2])
        grown = self._empty((new.shape[0], new.shape[1], size, new.shape[3]), new)
        if buffer is not None:
            grown[:, :, : self._length] = buffer[:, :, : self._length]
        return grown

    def _empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return _empty_on_cpu(shape, like.dtype) if like.device.type == "cpu" else like.new_empty(shape)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write at the end; return views of everything so far.

        Shapes: (batch, key heads, new, width) in, (batch, key heads, length, width) out.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[2]
        self._k = self._room(self._k, key_states, end)
        self._v = self._room(self._v, value_states, end)
        self._k[:, :, self._length : end] = key_states
        self._v[:, :, self._length : end] = value_states
        self._length = end
        return self._k[:, :, :end], self._v[:, :, :end]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens (a negative number, as in transformers); nothing is copied."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        self._length = max(0, self._length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch for beam search, in place."""
        if self._k is not None and self._v is not None and self._length:
            at = beam_idx.to(self._k.device)
            self.keys, self.values = self._k[:, :, : self._length][at], self._v[:, :, : self._length][at]

    def reset(self) -> None:
        """Forget everything."""
        self._k = self._v = None
        self._length = 0
        self.is_initialized = False

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.to("cpu", non_blocking=True), self._v.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Move the buffers back."""
        if self._k is not None and self._v is not None and self._k.device != self.device:
            self._k, self._v = self._k.to(self.device, non_blocking=True), self._v.to(self.device, non_blocking=True)


class _OffloadedLayer(_GrowingLayer):
    """Keys and values on the CPU, pinned where there is CUDA. The prefill gets back what it brought."""

    def _empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if torch.cuda.is_available():
            return torch.empty(shape, dtype=like.dtype, pin_memory=True)
        return _empty_on_cpu(shape, like.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write to the CPU. The first call returns the new keys where they are, later ones views on the CPU."""
        first = self._length == 0
        views = super().update(key_states, value_states)
        return (key_states, value_states) if first else views

    def prefetch(self) -> None:
        """Nothing: the buffers stay on the CPU."""


class GrowingKVCache(Cache):
    """A KV cache whose buffers double when they are full, so that a step writes one row and copies nothing.

    Works with any attention implementation; pass it as ``cache=`` to ``generate`` or to a forward.

    Parameters
    ----------
    config
        The model's configuration. Needed for models with sliding windows or other special layers, which then keep
        transformers' own layers. None: every layer grows.
    """

    _layer: type[_GrowingLayer] = _GrowingLayer

    def __init__(self, config: Any = None) -> None:
        if config is None:
            super().__init__(layer_class_to_replicate=self._layer)
            return
        types, kwargs = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        super().__init__(
            layers=[
                self._layer(**k) if t == "full_attention" else DYNAMIC_LAYER_TYPE_MAPPING[t](**k)
                for t, k in zip(types, kwargs, strict=True)
            ]
        )


class OffloadedKVCache(GrowingKVCache):
    """Keys and values stay in the memory of the CPU; a sparse step moves only the rows that it reads to the device.

    The index lives on the device. Dense attention over such a cache moves everything: use it with `sparse_decoding`.
    """

    _layer = _OffloadedLayer
