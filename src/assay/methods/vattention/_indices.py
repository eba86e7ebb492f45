"""Who predicts the heavy keys: the plug point `TopKIndex` and five predictors.

An index only decides which keys are read for certain. A poor or stale one costs density or accuracy at a fixed budget, never
the promise: the rest is sampled whatever the index says.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay.methods.vattention._config import VAttentionConfig


@runtime_checkable
class TopKIndex(Protocol):
    """Predicts which keys have the largest scores, without reading all keys.

    ``build(k)`` starts anew from keys (B, Hkv, n, D); ``append(k_new)`` adds those that came since.
    ``topk(q, m, exclude)`` returns for queries (B, H, Q, D) the predicted best ``m`` (B, H, Q) positions outside of
    ``exclude`` (B, 1 or H, Q, n), as int64 (B, H, Q, max m), distinct in a row, padded with -1.
    ``memory_bytes`` is what it keeps.
    """

    def build(self, k: Tensor) -> None: ...

    def append(self, k_new: Tensor) -> None: ...

    def topk(self, q: Tensor, m: Tensor, exclude: Tensor) -> Tensor: ...

    @property
    def memory_bytes(self) -> int: ...


class Growing:
    """A tensor that grows along its third axis in place: capacity doubles, nothing is copied at most steps."""

    def __init__(self, first: Tensor) -> None:
        self._buffer = first.contiguous()
        self.length = first.shape[2]

    @property
    def view(self) -> Tensor:
        """What is filled, (.., .., length, ..), without a copy."""
        return self._buffer[:, :, : self.length]

    def append(self, more: Tensor) -> None:
        """Add entries at the end."""
        end = self.length + more.shape[2]
        if end > self._buffer.shape[2] or not writable(self._buffer):
            shape = list(self._buffer.shape)
            shape[2] = max(end, 2 * shape[2])
            buffer = self._buffer.new_empty(shape)
            buffer[:, :, : self.length] = self.view
            self._buffer = buffer
        self._buffer[:, :, self.length : end] = more
        self.length = end

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return self._buffer.numel() * self._buffer.element_size()


def writable(x: Tensor) -> bool:
    """Whether a tensor may be written in place: one that was made in inference mode may not outside of it."""
    return torch.is_inference_mode_enabled() or not x.is_inference()


def check_holds(kept: Tensor, k: Tensor) -> None:
    """Refuse an index that holds (B, Hkv, n, ..) other keys than k: too few, too many, or of another batch."""
    if kept.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"the index holds keys of (batch, heads, length) {tuple(kept.shape[:3])}, k has {tuple(k.shape[:3])}: "
            "append the new keys, or build it again"
        )


def group_scores(q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B Hkv n D"]) -> Float[Tensor, "B H Q n"]:
    """``q . k``, each query head against its key head."""
    _check_grouped(q, k)
    b, h, t, d = q.shape
    grouped = q.reshape(b, k.shape[1], -1, d)  # (B, Hkv, group * Q, D)
    return (grouped.to(k.dtype) @ k.transpose(2, 3)).reshape(b, h, t, k.shape[2])


def _check_grouped(q: Tensor, k: Tensor) -> None:
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"queries {tuple(q.shape)} do not fit the keys {tuple(k.shape)} of this index: same batch, query heads a "
            "multiple of its heads"
        )


def best(score: Tensor, m: Int[Tensor, "B H Q"], exclude: Bool[Tensor, "B _ Q n"]) -> Int[Tensor, "B H Q M"]:
    """Positions of the m largest scores of each row outside of ``exclude``, -1 where there are none."""
    if score.shape[-1] != exclude.shape[-1]:
        raise ValueError(
            f"the index holds {score.shape[-1]} keys, k has {exclude.shape[-1]}: append the new keys, or build it again"
        )
    lowest = -torch.inf if score.is_floating_point() else torch.iinfo(score.dtype).min
    score = score.masked_fill(exclude, lowest)
    most = min(int(m.max()), score.shape[-1])
    values, positions = score.topk(most, dim=-1)
    wanted = torch.arange(most, device=score.device) < m[..., None]
    return torch.where(wanted & (values > lowest), positions, -1)


class OracleIndex:
    """The true scores. Reads every key: for measurement, never faster than dense attention."""

    def __init__(self) -> None:
        self._keys: Growing | None = None

    def build(self, k: Float[Tensor, "B Hkv n D"]) -> None:
        """Keep the keys."""
        self._keys = Growing(k.to(torch.promote_types(k.dtype, torch.float32)))

    def append(self, k_new: Float[Tensor, "B Hkv new D"]) -> None:
        """Keep more keys."""
        _built(self._keys).append(k_new)

    def topk(self, q: Float[Tensor, "B H Q D"], m: Int[Tensor, "B H Q"], exclude: Bool[Tensor, "B _ Q n"]) -> Tensor:
        """The keys with the largest ``q . k``."""
        return best(group_scores(q, _built(self._keys).view), m, exclude)

    @property
    def memory_bytes(self) -> int:
        """Bytes kept: as much as the keys."""
        return _bytes(self._keys)


class SimHashIndex:
    """Random hyperplanes: 128 signs a key, packed; the score is the number of matching signs. No training.

    Keys are centred on their mean at build, which stays fixed; queries are not. The hyperplanes are seeded Gaussians, one
    set a key head. Among equal scores the newer key wins.

    Parameters
    ----------
    bits
        Hyperplanes, a multiple of 64.
    seed
        Of the hyperplanes.
    """

    def __init__(self, bits: int = 128, seed: int = 0) -> None:
        if bits < 64 or bits % 64:
            raise ValueError(f"bits must be a multiple of 64, got {bits}: 128 is the default")
        self.bits, self.seed = bits, seed
        self._codes: Growing | None = None

    def build(self, k: Float[Tensor, "B Hkv n D"]) -> None:
        """Hash the keys."""
        generator = torch.Generator().manual_seed(self.seed)
        planes = torch.randn(k.shape[1], k.shape[3], self.bits, generator=generator)
        self._planes = planes.to(k.device)
        self._mean = k.float().mean(2, keepdim=True)
        self._codes = Growing(self._hash(k))

    def append(self, k_new: Float[Tensor, "B Hkv new D"]) -> None:
        """Hash more keys, against the mean at build."""
        _built(self._codes).append(self._hash(k_new))

    def _hash(self, k: Tensor) -> Tensor:
        return pack_bits(_project(k.float() - self._mean, self._planes) > 0)

    def query_codes(self, q: Float[Tensor, "B H Q D"]) -> Int[Tensor, "B H Q words"]:
        """The packed signs of the queries."""
        _check_grouped(q, self.codes)
        grouped = q.float().reshape(q.shape[0], self._planes.shape[0], -1, q.shape[3])
        return pack_bits(_project(grouped, self._planes) > 0).reshape(*q.shape[:3], -1)

    @property
    def codes(self) -> Int[Tensor, "B Hkv n words"]:
        """The packed signs of the keys."""
        return _built(self._codes).view

    def topk(self, q: Float[Tensor, "B H Q D"], m: Int[Tensor, "B H Q"], exclude: Bool[Tensor, "B _ Q n"]) -> Tensor:
        """The keys with the most matching signs."""
        return best(newest_first(matches(self.query_codes(q), self.codes, self.bits)), m, exclude)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the packed signs: 16 a key with 128 hyperplanes."""
        return _bytes(self._codes)


def _project(x: Float[Tensor, "B Hkv m D"], planes: Float[Tensor, "Hkv D bits"]) -> Float[Tensor, "B Hkv m bits"]:
    """``x @ planes``. A few rows on a CPU by a plain loop: waking BLAS's threads for them costs milliseconds."""
    if x.device.type == "cpu" and x.numel() * planes.shape[2] < 2**20:
        return torch.from_numpy(np.einsum("bhmd,hdc->bhmc", x.detach().numpy(), planes.numpy()))
    return x @ planes


class HashIndex:
    """HashAttention: two small networks a head map queries and keys to bits; the score is the number of matching bits.

    A key is hashed once for each query head, since the networks belong to query heads.

    Parameters
    ----------
    query_matrix, key_matrix
        Three layers, each (H, in, out), with SiLU between them; the signs of the last are the bits.
    query_bias, key_bias
        Three layers, each (H, out).
    """

    def __init__(
        self, query_matrix: list[Tensor], query_bias: list[Tensor], key_matrix: list[Tensor], key_bias: list[Tensor]
    ) -> None:
        for name, matrices, biases in (("query", query_matrix, query_bias), ("key", key_matrix, key_bias)):
            if len(matrices) != len(biases) or not matrices:
                raise ValueError(
                    f"{name}_matrix and {name}_bias need one tensor a layer, got {len(matrices)} and {len(biases)}"
                )
            for i, (w, b) in enumerate(zip(matrices, biases, strict=True)):
                if w.ndim != 3 or b.shape != (w.shape[0], w.shape[2]):
                    raise ValueError(
                        f"{name} layer {i} needs a matrix (H, in, out) and a bias (H, out), got {tuple(w.shape)} and {tuple(b.shape)}"
                    )
        self._query, self._key = list(zip(query_matrix, query_bias)), list(zip(key_matrix, key_bias))
        self._codes: Growing | None = None

    def build(self, k: Float[Tensor, "B Hkv n D"]) -> None:
        """Hash the keys for each query head."""
        self._codes = Growing(self._hash_keys(k))

    def append(self, k_new: Float[Tensor, "B Hkv new D"]) -> None:
        """Hash more keys."""
        _built(self._codes).append(self._hash_keys(k_new))

    def _hash_keys(self, k: Tensor) -> Tensor:
        heads = self._key[0][0].shape[0]
        if heads % k.shape[1]:
            raise ValueError(
                f"hash weights for {heads} query heads do not fit {k.shape[1]} key heads: load those of this model"
            )
        return pack_bits(self.bits_of(k.repeat_interleave(heads // k.shape[1], 1), self._key))

    @staticmethod
    def bits_of(x: Float[Tensor, "B H n D"], layers: list[tuple[Tensor, Tensor]]) -> Bool[Tensor, "B H n bits"]:
        """The signs of the last layer, True where positive."""
        for i, (w, b) in enumerate(layers):
            x = x.to(w.dtype) @ w.to(x.device) + b.to(x.device)[:, None]
            if i < len(layers) - 1:
                x = torch.nn.functional.silu(x)
        return x > 0

    def topk(self, q: Float[Tensor, "B H Q D"], m: Int[Tensor, "B H Q"], exclude: Bool[Tensor, "B _ Q n"]) -> Tensor:
        """The keys with the most matching bits."""
        return best(newest_first(self.scores(q)), m, exclude)

    def scores(self, q: Float[Tensor, "B H Q D"]) -> Int[Tensor, "B H Q n"]:
        """Matching bits."""
        bits = self._query[-1][0].shape[2]
        return matches(pack_bits(self.bits_of(q, self._query)), _built(self._codes).view, bits)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the packed bits."""
        return _bytes(self._codes)


class HashWeights:
    """HashAttention's weights of all layers: ``VAttentionConfig(index=load_hash_weights(path))``.

    Parameters
    ----------
    layers
        ``{layer: {name: three tensors}}`` with the names of the released files: ``query_matrix``, ``query_bias``,
        ``key_matrix``, ``key_bias``.
    """

    def __init__(self, layers: dict[int, dict[str, list[Tensor]]]) -> None:
        self.layers = layers

    def for_layer(self, layer: int) -> HashIndex:
        """An index for one layer.

        Raises
        ------
        ValueError
            If the file holds no weights for that layer.
        """
        if layer not in self.layers:
            raise ValueError(
                f"the hash weights have no layer {layer}, only {sorted(self.layers)}: name it in dense_layers"
            )
        return HashIndex(**self.layers[layer])


_PARTS = ("query_matrix", "query_bias", "key_matrix", "key_bias")


class _TensorsOnly(pickle.Unpickler):
    """Reads dicts, lists, numbers and tensors; any other object in the file is an error, and nothing of it is run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")}:
            return super().find_class(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def load_hash_weights(path: str | Path) -> HashWeights:
    """Read HashAttention weights: a safetensors file, a torch file, or the released pickle.

    Nothing in the file is executed: pickles are read by an unpickler that knows tensors and containers only.

    Parameters
    ----------
    path
        ``.safetensors`` with names ``LAYER.query_matrix.0`` and so on, else a file of the released layout
        ``{layer: {"query_matrix": [3 tensors (H, in, out)], "query_bias": ..., "key_matrix": ..., "key_bias": ...}}``.

    Raises
    ------
    ValueError
        If the file holds something else.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        layers: dict[int, dict[str, list[Tensor]]] = {}
        for name, tensor in sorted(load_file(path).items(), key=lambda item: _natural(item[0])):
            parts = name.split(".")
            if len(parts) != 3 or parts[1] not in _PARTS or not parts[0].isdigit():
                raise ValueError(
                    f"{path} holds {name!r}, expected names such as '0.query_matrix.2': is it a hash file?"
                )
            layers.setdefault(int(parts[0]), {}).setdefault(parts[1], []).append(tensor)
    else:
        try:
            if path.open("rb").read(2) == b"PK":  # a torch.save archive
                raw = torch.load(path, weights_only=True, map_location="cpu")
            else:
                with path.open("rb") as file:
                    raw = _TensorsOnly(file).load()
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds more than tensors ({error}): it was not opened, convert it to safetensors"
            ) from error
        if not isinstance(raw, dict):
            raise ValueError(f"{path} holds a {type(raw).__name__}, expected {{layer: weights}}: is it a hash file?")
        layers = {int(layer): dict(weights) for layer, weights in raw.items()}
    for layer, weights in layers.items():
        if set(weights) != set(_PARTS):
            raise ValueError(
                f"layer {layer} of {path} has {sorted(weights)}, expected {sorted(_PARTS)}: is it a hash file?"
            )
        for name in _PARTS:
            weights[name] = [torch.as_tensor(t) for t in weights[name]]
    return HashWeights(layers)


def _natural(name: str) -> tuple[str, int]:
    head, _, last = name.rpartition(".")
    return head, int(last) if last.isdigit() else -1


class DoubleSparsityIndex:
    """A few channels of the keys stand for all of them (Yang et al. 2024).

    Parameters
    ----------
    channels
        (H, r) or (Hkv, r) channel numbers, most important first. None: the ``count`` channels with the largest mean
        square over the keys at build.
    count
        How many channels.
    bits
        Below 16, queries and keys are rounded to that many bits between the least and the largest of their channels.
    dtype
        Of the kept channels; None: as the keys.
    """

    def __init__(
        self, channels: Tensor | None = None, count: int = 16, bits: int = 16, dtype: torch.dtype | None = None
    ) -> None:
        if count < 1 or bits < 1:
            raise ValueError(
                f"double sparsity needs count >= 1 and bits >= 1, got {count} and {bits}: 16 are the defaults"
            )
        self.channels, self.count, self.bits, self.dtype = channels, count, bits, dtype
        self._labels: Growing | None = None

    def build(self, k: Float[Tensor, "B Hkv n D"]) -> None:
        """Keep the chosen channels."""
        if self.channels is None:
            chosen = k.float().square().mean((0, 2)).topk(min(self.count, k.shape[3])).indices
        else:
            chosen = self.channels[:, : self.count].to(k.device)
            if chosen.shape[0] % k.shape[1]:
                raise ValueError(
                    f"channels of {chosen.shape[0]} heads do not fit {k.shape[1]} key heads: give one row a head"
                )
            if int(chosen.min()) < 0 or int(chosen.max()) >= k.shape[3]:
                raise ValueError(
                    f"channels must lie between 0 and {k.shape[3] - 1}, got {chosen.min()} to {chosen.max()}"
                )
        self._chosen = chosen
        self._labels = Growing(self._pick(k))

    def append(self, k_new: Float[Tensor, "B Hkv new D"]) -> None:
        """Keep the channels of more keys."""
        _built(self._labels).append(self._pick(k_new))

    def _pick(self, x: Tensor) -> Tensor:
        heads = self._chosen.shape[0]
        if x.shape[1] < heads:
            x = x.repeat_interleave(heads // x.shape[1], 1)
        chosen = self._chosen if x.shape[1] == heads else self._chosen.repeat_interleave(x.shape[1] // heads, 0)
        picked = x.gather(3, chosen[None, :, None].expand(x.shape[0], -1, x.shape[2], -1))
        picked = picked if self.bits >= 16 else _rounded(picked, self.bits)
        return picked if self.dtype is None else picked.to(self.dtype)

    def scores(self, q: Float[Tensor, "B H Q D"]) -> Float[Tensor, "B H Q n"]:
        """The scores on the chosen channels, over the root of their number."""
        labels = _built(self._labels).view
        return group_scores(
            self._pick(q) / math.sqrt(self._chosen.shape[1]), labels
        )  # divided first: float16 overflows

    def topk(self, q: Float[Tensor, "B H Q D"], m: Int[Tensor, "B H Q"], exclude: Bool[Tensor, "B _ Q n"]) -> Tensor:
        """The keys with the largest scores on the chosen channels."""
        return best(self.scores(q), m, exclude)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the kept channels."""
        return _bytes(self._labels)


def _rounded(x: Tensor, bits: int) -> Tensor:
    """Min-max rounding along the last axis to 2**bits levels."""
    low = x.amin(-1, keepdim=True)
    span = x.amax(-1, keepdim=True) - low
    step = torch.where(span == 0, 1.0, span) / (2**bits - 1)
    return ((x - low) / step).round() * step + low


class QuestIndex:
    """Pages of keys bounded by their channel-wise least and largest values (Tang et al. 2024).

    Parameters
    ----------
    page_size
        Keys of a page.
    """

    def __init__(self, page_size: int = 16) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}: 16 is the default")
        self.page_size = page_size
        self._low: Growing | None = None
        self._high: Growing | None = None
        self._n = 0

    def build(self, k: Float[Tensor, "B Hkv n D"]) -> None:
        """Bound the pages."""
        low, high = page_bounds(k, self.page_size)
        self._low, self._high, self._n = Growing(low), Growing(high), k.shape[2]

    def append(self, k_new: Float[Tensor, "B Hkv new D"]) -> None:
        """Widen the last page and add more."""
        low, high = _built(self._low), _built(self._high)
        into = min(-self._n % self.page_size, k_new.shape[2])  # room in the last page
        if into:
            for bounds in (low, high):
                bounds.append(bounds.view[:, :, :0])  # makes it writable
            part = k_new[:, :, :into]
            low.view[:, :, -1] = torch.minimum(low.view[:, :, -1], part.amin(2))
            high.view[:, :, -1] = torch.maximum(high.view[:, :, -1], part.amax(2))
        if into < k_new.shape[2]:
            more = page_bounds(k_new[:, :, into:], self.page_size)
            low.append(more[0])
            high.append(more[1])
        self._n += k_new.shape[2]

    def topk(self, q: Float[Tensor, "B H Q D"], m: Int[Tensor, "B H Q"], exclude: Bool[Tensor, "B _ Q n"]) -> Tensor:
        """The keys of the pages with the largest bounds."""
        pages = page_scores(q, _built(self._low).view, _built(self._high).view)
        return best(pages.repeat_interleave(self.page_size, -1)[..., : self._n], m, exclude)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the bounds: 2 / page_size of the keys."""
        return _bytes(self._low) + _bytes(self._high)


def page_bounds(k: Float[Tensor, "B Hkv n D"], size: int) -> tuple[Tensor, Tensor]:
    """Channel-wise least and largest values of each page, (B, Hkv, pages, D); the last page may be shorter."""
    pages = math.ceil(k.shape[2] / size)
    last = k[:, :, -1:].expand(-1, -1, pages * size - k.shape[2], -1)  # repeats a key of the page: bounds unchanged
    paged = torch.cat([k, last], 2).unflatten(2, (pages, size))
    return paged.amin(3), paged.amax(3)


def page_scores(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Largest ``q . k`` that a key within the bounds could have: (B, H, Q, pages)."""
    low, high = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (low, high))  # a float16 sum overflows
    positive, negative = q.clamp_min(0), q.clamp_max(0)
    return group_scores(positive, high) + group_scores(negative, low)


def pack_bits(bits: Bool[Tensor, "*rows bits"]) -> Int[Tensor, "*rows words"]:
    """Pack booleans into int64 words, 64 to a word, zeros behind the last."""
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 64)).unflatten(-1, (-1, 64))
    return (bits.long() << torch.arange(64, device=bits.device)).sum(-1)


def matches(q: Int[Tensor, "B H Q words"], k: Int[Tensor, "B Hk n words"], bits: int) -> Int[Tensor, "B H Q n"]:
    """How many of the bits agree, each query head against its key head."""
    _check_grouped(q, k)
    b, h, t, words = q.shape
    grouped = q.reshape(b, k.shape[1], -1, words)
    differ = sum(popcount(grouped[..., None, w] ^ k[:, :, None, :, w]) for w in range(words))
    return (bits - differ).reshape(b, h, t, k.shape[2])  # type: ignore[operator, union-attr]


def popcount(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Bits set in each int64 (torch has no instruction for it). Arithmetic shifts are harmless here: the masks clear the sign."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


def newest_first(score: Int[Tensor, "*rows n"]) -> Int[Tensor, "*rows n"]:
    """Scores without ties: among equal ones the newer key wins, as in the numba kernel."""
    return (score << 32) + torch.arange(score.shape[-1], device=score.device)


def make_index(config: VAttentionConfig, layer: int = 0) -> TopKIndex:
    """A fresh index for one layer."""
    index = config.index
    if isinstance(index, str):
        named: dict[str, Callable[[], TopKIndex]] = {
            "simhash": lambda: SimHashIndex(seed=config.seed),
            "oracle": OracleIndex,
            "double_sparsity": DoubleSparsityIndex,
            "quest": QuestIndex,
        }
        return named[index]()
    if hasattr(index, "for_layer"):
        return index.for_layer(layer)
    return copy.deepcopy(index)


def _bytes(part: Growing | None) -> int:
    return 0 if part is None else part.memory_bytes


def _built(part: Any) -> Any:
    if part is None:
        raise RuntimeError("this index holds no keys yet: call build(k) first")
    return part
