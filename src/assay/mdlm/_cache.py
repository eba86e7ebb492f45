"""Keys and values of a canvas that keeps its length, written in place by region."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay._errors import InputError

Span = tuple[int, int]
Write = Literal["all", "none"] | Span


class FrozenRegionError(RuntimeError):
    """A frozen column would have been written."""


class RegionCache:
    """Keys (rotated) and values of every layer, for all columns of one canvas.

    A token's rotary angle never changes while it stays on its column, so rotated keys may be kept. A forward computes a
    region of columns and reads the others here; which columns hold something, and which must not change any more, is
    shared by the rows of a batch.

    Parameters
    ----------
    num_layers, batch, max_len, kv_heads, head_dim
        Sizes; ``max_len`` is the length of the canvas.
    dtype, device
        Those of the model.

    Attributes
    ----------
    keys, values : (num_layers, B, kv_heads, max_len, head_dim)
    valid : (max_len,) bool, on the CPU
        Columns that were written.
    frozen : (max_len,) bool, on the CPU
        Columns that may not be written.
    version : (max_len,) int64, on the CPU
        The step at which each column was last written; -1 for never.
    step : int
        What `version` records for the next write. Whoever drives the model sets it.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, batch, kv_heads, max_len, head_dim)
        if min(shape) < 1:
            raise InputError(f"a cache of shape {shape} holds nothing: every size must be at least 1")
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.valid = torch.zeros(max_len, dtype=torch.bool)
        self.frozen = torch.zeros(max_len, dtype=torch.bool)
        self.version = torch.full((max_len,), -1, dtype=torch.int64)
        self.step = 0
        self._rows: Tensor | None = None  # of the tensors, those that are this cache's; None: all

    @property
    def max_len(self) -> int:
        """Columns of the canvas."""
        return self.keys.shape[3]

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.keys.shape[1] if self._rows is None else len(self._rows)

    def select(self, rows: Int[Tensor, " k"]) -> "RegionCache":
        """Some rows as a cache of their own, which nothing is copied for: a forward with it reads and writes them here.

        It shares the record of what is valid and frozen; its `keys` and `values` are those of all rows.
        """
        part = copy.copy(self)
        part._rows = rows if self._rows is None else self._rows[rows]
        return part

    def keep(self, rows: Int[Tensor, " k"]) -> None:
        """Let the other rows go, and their memory."""
        rows = rows if self._rows is None else self._rows[rows]
        self.keys, self.values, self._rows = self.keys[:, rows], self.values[:, rows], None

    def bytes(self) -> int:
        """Memory of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def trim(self, hi: int) -> None:
        """Forget the columns from ``hi`` on; a freeze there ends."""
        self._check_span((hi, self.max_len), "trim")
        self.valid[hi:] = False
        self.frozen[hi:] = False
        self.version[hi:] = -1

    def freeze(self, lo: int, hi: int) -> None:
        """From now on a write to a column of [lo, hi) raises `FrozenRegionError`."""
        self._check_span((lo, hi), "freeze")
        if not bool(self.valid[lo:hi].all()):
            raise InputError(
                f"columns [{lo}, {hi}) cannot be frozen before all of them are written: run a forward over them"
            )
        self.frozen[lo:hi] = True

    def _check_span(self, span: Span, what: str) -> None:
        if not 0 <= span[0] <= span[1] <= self.max_len:
            raise InputError(f"{what} [{span[0]}, {span[1]}) does not lie in the cache of {self.max_len} columns")

    def visit(self, region: Span, computed: Span, see: Span, write: Write) -> "Visit":
        """Begin a forward that computes the columns ``computed`` (``region``, widened where logits are shifted)."""
        lo, hi = region if write == "all" else (region[0], region[0]) if write == "none" else write
        if not (region[0] <= lo <= hi <= region[1]):
            raise InputError(
                f"write [{lo}, {hi}) does not lie in region [{region[0]}, {region[1]}): only fresh columns can be stored"
            )
        if bool(self.frozen[lo:hi].any()):
            column = lo + int(self.frozen[lo:hi].int().argmax())
            raise FrozenRegionError(
                f"write [{lo}, {hi}) would change column {column}, which is frozen: start the region behind it, or "
                "write a part of the region"
            )
        return Visit(self, computed, see, (lo, hi))


class Visit:
    """One forward's use of a cache.

    Attributes
    ----------
    window : (lo, hi)
        The columns that attention reads, as one slice.
    seen : (hi - lo,) bool, on the CPU
        Which of them count: written before or computed now, and inside ``see``.
    """

    def __init__(self, cache: RegionCache, computed: Span, see: Span, stored: Span) -> None:
        self._cache = cache
        self._computed = computed
        self._stored = stored
        seen = torch.zeros(cache.max_len, dtype=torch.bool)
        seen[see[0] : see[1]] = cache.valid[see[0] : see[1]]
        seen[computed[0] : computed[1]] = True
        columns = seen.nonzero()
        self.window: Span = (int(columns[0]), int(columns[-1]) + 1)
        self.seen = seen[self.window[0] : self.window[1]]
        # Until all layers are written the columns belong to no state of the canvas.
        cache.valid[stored[0] : stored[1]] = False

    @contextmanager
    def layer(
        self,
        index: int,
        keys: Float[Tensor, "batch kv_heads fresh head_dim"],
        values: Float[Tensor, "batch kv_heads fresh head_dim"],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The layer's keys and values over the window, with the fresh ones in their places for the time of the call.

        They are written into the cache itself, so that attention reads one slice of it and nothing is concatenated; what
        is not to be stored is put back afterwards. Only selected rows are copied, a layer's window at a time.
        """
        (first, last), (lo, hi) = self._computed, self._stored
        layer = (self._cache.keys[index], self._cache.values[index])
        rows = self._cache._rows
        if rows is not None:
            begin, end = self.window
            copies = [held[rows, :, begin:end] for held in layer]
            for held, seen, fresh in zip(layer, copies, (keys, values)):
                seen[:, :, first - begin : last - begin] = fresh
                held[rows, :, lo:hi] = fresh[:, :, lo - first : hi - first]
            yield copies[0], copies[1]
            return
        lent = [span for span in ((first, lo), (hi, last)) if span[0] < span[1]] if lo < hi else [(first, last)]
        kept = [[held[:, :, a:b].clone() for held in layer] for a, b in lent]
        for held, fresh in zip(layer, (keys, values)):
            held[:, :, first:last] = fresh
        try:
            yield layer[0][:, :, self.window[0] : self.window[1]], layer[1][:, :, self.window[0] : self.window[1]]
        finally:
            for (a, b), old in zip(lent, kept):
                for held, before in zip(layer, old):
                    held[:, :, a:b] = before

    def close(self) -> None:
        """All layers are done: what was stored counts."""
        lo, hi = self._stored
        self._cache.valid[lo:hi] = True
        self._cache.version[lo:hi] = self._cache.step
