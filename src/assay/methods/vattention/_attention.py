"""One decode step: `vattention`, and its torch path. The numba path is in `_kernel`.

The torch path treats all rows (batch, head, query) at once. It works in ranks among the keys that a row sees, and reads
rows of K and V by gathers over groups of rows of similar size, so that one row with a large budget does not pad the others.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.methods.vattention._budget import TINY, needed_draws, round_budget
from assay.methods.vattention._config import IndexSets, VAttentionConfig, VAttentionOutput
from assay.methods.vattention._indices import TopKIndex, make_index
from assay.methods.vattention._sampling import FURTHER, PAD, draw_distinct, ragged_groups, row_keys, signed, splitmix64

#: Padded entries of K or V that one gather may hold: 64 MB in float32.
GATHER = 2**24


@torch.compiler.disable  # how much is read depends on what is read
def vattention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    config: VAttentionConfig,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    index_state: TopKIndex | None = None,
    generator: torch.Generator | None = None,
    index_sets: Sequence[IndexSets] | None = None,
    layer: int = 0,
    path: Literal["auto", "kernel", "torch"] = "auto",
) -> VAttentionOutput:
    """Attention of a few queries over a long KV cache that reads only as many keys as the promise needs.

    Not for prefill: with more than ``config.max_query`` queries, or as many queries as keys, every row is dense.

    Parameters
    ----------
    q : (B, H, Q, D)
    k, v : (B, Hkv, n, D), (B, Hkv, n, Dv)
        H is a multiple of Hkv. They may lie on another device than q; only what is read is moved.
    config
        The sizes, the promise, the index.
    scale
        Of the scores; None: 1 / sqrt(D).
    attn_mask : broadcastable to (B, H, Q, n)
        Bool, True where visible, or additive: -inf (or below half the most negative number) hides a key, other
        numbers are added to the scores of what is read. None: row t sees the first n - Q + t + 1 keys.
    index_state
        An index built over k, all of it. None: built here, which reads all keys.
    generator
        Gives the seed of the draws; None: ``config.seed``.
    index_sets
        What to read, one a row in the order (b, h, t), in place of index, budget and draws: visible keys, each once (with
        ``reuse_pilot=False`` the further draws may hold the pilot's).
    layer
        Number of the layer: part of the draws' seed, and named in errors.
    path
        ``"kernel"`` (numba, float32 on the CPU), ``"torch"``, or ``"auto"``: the kernel where it applies.

    Returns
    -------
    `VAttentionOutput`

    Raises
    ------
    ValueError
        If shapes do not fit, the index holds other keys than k, the index sets do not fit, what was read is not finite, or
        ``path="kernel"`` does not apply.
    TypeError
        If ``config`` is not one.
    """
    if not isinstance(config, VAttentionConfig):
        raise TypeError(f"config must be a VAttentionConfig, got {type(config).__name__}: VAttentionConfig(eps=0.1)")
    if path not in ("auto", "kernel", "torch"):
        raise ValueError(f"path must be 'auto', 'kernel' or 'torch', got {path!r}")
    check_shapes(q, k, v)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    seed = config.seed
    if generator is not None:
        seed = int(torch.randint(0, 2**63 - 1, (1,), generator=generator, device=generator.device))
    if config.mode == "released":
        from assay.methods.vattention.released import released_attention

        out = released_attention(q, k, v, config=config, scale=scale, attn_mask=attn_mask, seed=seed)
        bad = ~out.out.isfinite().all(-1)
        if bool(bad.any()):
            raise ValueError(not_finite("an output", layer, int(bad.nonzero()[0, 1])))
        return out

    rows = Rows.of(q, k, attn_mask)
    if bool((rows.count == 0).any()):
        warnings.warn("the attention mask hides every key of a row: its output is zero", stacklevel=2)
    sizes = Sizes.of(rows.count, config, dense=is_prefill(q.shape[2], k.shape[2], config))

    obstacle = _kernel_obstacle(q, k, v, rows, config)
    if path == "kernel" and obstacle:
        raise ValueError(f"path='kernel' does not apply to {obstacle}: use path='auto'")
    if index_state is None and index_sets is None and bool((sizes.heavy > 0).any()):
        index_state = make_index(config, layer)
        index_state.build(k)
    given = None if index_sets is None else given_ranks(index_sets, rows, config)
    if path != "torch" and not obstacle:
        from assay.methods.vattention._kernel import kernel_step

        out = kernel_step(q, k, v, rows, sizes, config, scale, seed, layer, index_state, given)
    else:
        out = _torch_step(q, k, v, rows, sizes, config, scale, seed, layer, index_state, given)
    if config.audit:
        err = relative_error(out.out, dense_attention(q, k, v, scale, attn_mask))
        out = VAttentionOutput(out.out, out.density, out.budget, out.n_det, err, out.sets, out.path)
    return out


def is_prefill(queries: int, keys: int, config: VAttentionConfig) -> bool:
    """Whether a call is a prefill, which is always dense."""
    return queries > config.max_query or queries == keys


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values that do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have four axes (batch, heads, length, width), got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
        if not x.numel():
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} is empty: attention needs at least one query and one key"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and length, got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit k {tuple(k.shape)}: same batch and width, query heads a multiple of key heads"
        )
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries need at least as many keys, got {k.shape[2]}: k must hold the queries' own keys"
        )


@dataclass
class Rows:
    """The rows (b, h, t) of a step, flattened, and which keys each one sees.

    ``batch, head, group, query, start, count`` are (R,). A row sees the keys ``start .. start + count - 1``, or those in
    its row of ``table`` (R, n) where a mask has holes. ``bias`` (B, 1 or H, Q, n) is added to the scores.
    """

    shape: tuple[int, int, int]
    n: int
    batch: Int[Tensor, "R"]
    head: Int[Tensor, "R"]
    group: Int[Tensor, "R"]
    query: Int[Tensor, "R"]
    start: Int[Tensor, "R"]
    count: Int[Tensor, "R"]
    table: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(q: Tensor, k: Tensor, attn_mask: Tensor | None) -> "Rows":
        """Read the mask."""
        (b, h, t), n = q.shape[:3], k.shape[2]
        at = torch.arange(b * h * t, device=q.device)
        batch, head, query = at // (h * t), at // t % h, at % t
        table = bias = None
        if attn_mask is None:
            start, count = torch.zeros_like(at), n - t + query + 1
        else:
            visible, bias = read_mask(attn_mask, (b, h, t, n))
            number = visible.sum(-1)
            first = visible.int().argmax(-1)  # of the first maximum
            last = n - 1 - visible.flip(-1).int().argmax(-1)
            count, start = (x.expand(b, h, t).reshape(-1).contiguous() for x in (number, first))
            if bool(((number > 0) & (last - first + 1 != number)).any()):
                positions = torch.arange(n, device=q.device).expand(visible.shape)
                table = (
                    torch.where(visible, positions, PAD).sort(-1).values.expand(b, h, t, n).reshape(-1, n).contiguous()
                )
        return Rows((b, h, t), n, batch, head, head // (h // k.shape[1]), query, start, count, table, bias)

    def positions(self, rows: Tensor, ranks: Tensor) -> Tensor:
        """Key positions of ranks (r, m) without padding, of the given rows."""
        return self.start[rows, None] + ranks if self.table is None else self.table[rows].gather(1, ranks)

    def ranks(self, positions: Tensor) -> Tensor:
        """Ranks of key positions (R, m); `PAD` where a row does not see that key."""
        if self.table is None:
            ranks = positions - self.start[:, None]
            seen = (ranks >= 0) & (ranks < self.count[:, None])
        else:
            ranks = torch.searchsorted(self.table, positions.contiguous())
            seen = (positions < PAD) & (self.table.gather(1, ranks.clamp_max(self.n - 1)) == positions)
        return torch.where(seen, ranks, PAD)

    def excluded(self, sink: Tensor, local: Tensor) -> Tensor:
        """What an index must not choose: hidden keys, sinks and window. Bool, (B, 1 or H, Q, n)."""
        b, h, t = self.shape
        per_head = self.table is not None or bool((self.start.view(b, h, t) != self.start.view(b, h, t)[:, :1]).any())
        per_head = per_head or bool((self.count.view(b, h, t) != self.count.view(b, h, t)[:, :1]).any())
        heads = slice(None) if per_head else slice(0, 1)

        def pick(x: Tensor) -> Tensor:
            return x.view(b, h, t)[:, heads].reshape(-1, 1)

        at = torch.arange(self.n, device=self.start.device)
        first, number = pick(self.start), pick(self.count)
        low, high = pick(sink), number - pick(local)
        if self.table is None:
            rank = at - first
            chosen = (rank >= low) & (rank < high)
        else:
            rank = at.expand(b * h * t, -1)
            inner = (rank >= low) & (rank < high)
            chosen = torch.zeros(b * h * t, self.n + 1, dtype=torch.bool, device=at.device)
            chosen = chosen.scatter_(1, self.table.clamp_max(self.n), inner)[:, : self.n]
        return ~chosen.view(b, -1, t, self.n)


def read_mask(attn_mask: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor | None]:
    """A mask as (visible, bias or None), each (B or 1, H or 1, Q, n)."""
    b, h, t, n = shape
    if attn_mask.ndim > 4 or any(
        have not in (1, want) for have, want in zip(reversed(attn_mask.shape), (n, t, h, b), strict=False)
    ):
        raise ValueError(
            f"attn_mask of shape {tuple(attn_mask.shape)} does not broadcast to {shape} (batch, heads, queries, keys)"
        )
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    mask = mask.expand(mask.shape[0], mask.shape[1], t, n)
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(f"attn_mask must be bool or floating point, got {mask.dtype}")
    if bool(mask.isnan().any()):
        raise ValueError("attn_mask holds NaN: give 0 where a key is visible and -inf where it is hidden")
    visible = mask > torch.finfo(mask.dtype).min / 2
    return visible, mask if bool((visible & (mask != 0)).any()) else None


@dataclass
class Sizes:
    """How many keys each row reads for certain, and how many as a pilot; all (R,). ``dense`` rows read everything."""

    sink: Int[Tensor, "R"]
    local: Int[Tensor, "R"]
    heavy: Int[Tensor, "R"]
    dense: Tensor

    @staticmethod
    def of(count: Tensor, config: VAttentionConfig, *, dense: bool = False) -> "Sizes":
        """Apply counts and shares to the number of visible keys."""
        sink = torch.minimum(size_of(config.sink, count), count)
        local = torch.minimum(size_of(config.local, count).clamp_min(1), count - sink)
        whole = (count <= sink + local + 2) | (count < config.min_keys) | dense
        heavy = torch.minimum(size_of(config.heavy, count), count - sink - local)
        whole |= count - sink - local - heavy < 2
        return Sizes(sink, local, torch.where(whole, 0, heavy), whole)


def size_of(size: int | float, count: Tensor) -> Tensor:
    """A count, or a share of ``count`` rounded down (a hair above, so that 0.1 * 30 is 3)."""
    return torch.full_like(count, size) if isinstance(size, int) else (size * count.double() + 1e-9).long()


def pilot_size(n_s: Tensor, config: VAttentionConfig) -> Tensor:
    """``max(min_pilot, ceil(pilot n_s))``, at least 2, at most n_s."""
    if isinstance(config.pilot, int):
        share = torch.full_like(n_s, config.pilot)
    else:
        share = (config.pilot * n_s.double() - 1e-9).ceil().long()
    return torch.minimum(share.clamp_min(max(2, config.min_pilot)), n_s)


def fixed_budget(n_s: Tensor, config: VAttentionConfig) -> Tensor | None:
    """The budget that the user fixed, at most n_s; None where the promise decides."""
    if config.budget is None:
        return None
    return torch.minimum(size_of(config.budget, n_s).clamp_min(2), n_s)


def _kernel_obstacle(q: Tensor, k: Tensor, v: Tensor, rows: Rows, config: VAttentionConfig) -> str:
    """Why the numba kernel does not apply; empty where it does."""
    if any(x.device.type != "cpu" for x in (q, k, v)):
        return "tensors off the CPU"
    if any(x.dtype != torch.float32 for x in (q, k, v)):
        return "other dtypes than float32"
    if any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled():
        return "tensors that need a gradient"
    if rows.table is not None:
        return "a mask with holes"
    if rows.bias is not None:
        return "an additive mask with finite numbers"
    if config.share_group:
        return "share_group=True"
    if any(s % x.shape[3] for x in (k, v) for s in x.stride()[:3]) or k.stride(3) != 1 or v.stride(3) != 1:
        return "keys or values whose rows are not contiguous"
    return ""


class Reader:
    """Reads rows of K and V for the rows of a step: gathers, never a pass over all keys."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> None:
        self.dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
        self.q = q.reshape(-1, q.shape[3]).to(self.dtype)
        self.k, self.v, self.rows, self.scale = k, v, rows, scale

    def _gather(self, x: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        b, g = self.rows.batch[rows, None], self.rows.group[rows, None]
        at = (i.to(x.device) for i in (b, g, positions))
        return x[tuple(at)].to(self.q.device, self.dtype)

    def _groups(self, ranks: Tensor, width: int):
        """Groups of rows with their unpadded ranks; where a row is shorter, its first entry is read again."""
        for rows in ragged_groups((ranks < PAD).sum(1), most=max(1, GATHER // width)):
            part = ranks[rows]
            part = part[:, : int((part < PAD).sum(1).max())]
            real = part < PAD
            yield rows, self.rows.positions(rows, torch.where(real, part, part[:, :1])), real

    def scores(self, ranks: Int[Tensor, "R m"]) -> Tensor:
        """Scores of each row's ranks; -inf where padded."""
        out = torch.full(ranks.shape, -torch.inf, dtype=self.dtype, device=self.q.device)
        for rows, positions, real in self._groups(ranks, self.k.shape[3]):
            part = (self._gather(self.k, rows, positions) @ self.q[rows, :, None])[..., 0] * self.scale
            if self.rows.bias is not None:
                bias = self.rows.bias.expand(*self.rows.shape, -1)
                at = (i[rows, None] for i in (self.rows.batch, self.rows.head, self.rows.query))
                part = part + bias[(*at, positions)]
            out[rows[:, None], torch.arange(real.shape[1], device=out.device)] = part.masked_fill(~real, -torch.inf)
        return out

    def weighted_sum(self, ranks: Int[Tensor, "R m"], weights: Tensor) -> Float[Tensor, "R Dv"]:
        """Sum of ``weights V`` over each row's ranks."""
        out = torch.zeros(len(ranks), self.v.shape[3], dtype=self.dtype, device=self.q.device)
        for rows, positions, real in self._groups(ranks, self.v.shape[3]):
            w = torch.where(real, weights[rows][:, : real.shape[1]], 0)
            out[rows] = (w[:, None] @ self._gather(self.v, rows, positions))[:, 0]
        return out

    def moments(self, ranks: Int[Tensor, "R m"], weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (R, Dv) of ``weights V`` over each row's ranks, and the trace (R,) of its sample covariance (two passes)."""
        mean = torch.zeros(len(ranks), self.v.shape[3], dtype=self.dtype, device=self.q.device)
        trace = torch.zeros(len(ranks), dtype=self.dtype, device=self.q.device)
        for rows, positions, real in self._groups(ranks, self.v.shape[3]):
            terms = weights[rows][:, : real.shape[1], None] * self._gather(self.v, rows, positions)
            number = real.sum(1, keepdim=True)
            mean[rows] = torch.where(real[..., None], terms, 0).sum(1) / number
            off = torch.where(real[..., None], terms - mean[rows, None], 0)
            trace[rows] = off.square().sum((1, 2)) / (number[:, 0] - 1).clamp_min(1)
        return mean, trace


def _torch_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    sizes: Sizes,
    config: VAttentionConfig,
    scale: float,
    seed: int,
    layer: int,
    index: TopKIndex | None,
    given: tuple[Tensor, Tensor, Tensor] | None,
) -> VAttentionOutput:
    """Section 3.4b of the method, all rows at once."""
    reader = Reader(q, k, v, rows, scale)
    if given is None:
        fixed = fixed_ranks(q, rows, sizes, index, config.share_group)
    else:
        fixed = given[0]
    n_f = (fixed < PAD).sum(1)
    n_s = rows.count - n_f

    head = rows.group * (q.shape[1] // k.shape[1]) if config.share_group else rows.head
    keys = row_keys(seed, layer, rows.batch, head, rows.count)
    if given is None:
        draws, fixed_b = pilot_size(n_s, config), fixed_budget(n_s, config)
        if fixed_b is not None and config.reuse_pilot:
            draws = torch.minimum(draws, fixed_b)
        pilot = draw_distinct(keys, rows.count, fixed, draws)
    else:
        pilot = given[1]
    n_p = (pilot < PAD).sum(1)
    s_f, s_p = reader.scores(fixed), reader.scores(pilot)
    top = _largest(_largest(reader.q.new_full((len(fixed),), -torch.inf), s_f), s_p)
    _check_finite(top, rows, layer)

    if given is None:
        # With a fixed budget the pilot is looked at all the same, so that the speed measured is that of the real thing.
        b = _budget(reader, fixed, pilot, s_f, s_p, top, n_s, n_p, config, layer)
        b = b if fixed_b is None else fixed_b
        if config.share_group:
            by_group = b.view(rows.shape[0], k.shape[1], -1, rows.shape[2])
            b = torch.minimum(by_group.amax(2, keepdim=True).expand_as(by_group).reshape(-1), n_s)
        held = torch.cat([fixed, pilot], 1).sort(1).values if config.reuse_pilot else fixed
        more = b - n_p if config.reuse_pilot else b  # b = n_s draws all that is left: exact
        further = draw_distinct(splitmix64(keys ^ signed(FURTHER)), rows.count, held, more)
    else:
        further = given[2]
        b = (further < PAD).sum(1) + (n_p if config.reuse_pilot else 0)

    # Log-sum-exp merge: a further draw may exceed the maximum so far, then all weights are rescaled.
    s_q = reader.scores(further)
    top = _largest(top, s_q)
    _check_finite(top, rows, layer)
    times = (n_s / b.clamp_min(1)).to(reader.dtype)[:, None]
    used = [(fixed, s_f, torch.ones_like(times)), (further, s_q, times)]
    if config.reuse_pilot:
        used.append((pilot, s_p, times))
    safe = torch.where(top.isinf(), 0, top)[:, None]  # -inf where a row sees nothing
    ranks, order = torch.cat([r for r, _, _ in used], 1).sort(1)
    weights = torch.cat([(s - safe).exp() * c for _, s, c in used], 1).gather(1, order)
    out = reader.weighted_sum(ranks, weights) / weights.sum(1, keepdim=True).clamp_min(TINY)
    _check_values(out.isfinite().all(1), rows, layer)

    read = (ranks < PAD).sum(1)
    if not config.reuse_pilot:
        both = torch.cat([further, pilot], 1).sort(1).values
        again = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] < PAD)).sum(1)
        read = read + n_p - again
    shape = rows.shape
    return VAttentionOutput(
        out.view(*shape, -1).to(q.dtype),
        (read / rows.count.clamp_min(1)).view(shape),
        b.view(shape),
        n_f.view(shape),
        sets=_sets(rows, fixed, pilot, further) if config.audit else None,
        path="torch",
    )


def fixed_ranks(
    q: Tensor, rows: Rows, sizes: Sizes, index: TopKIndex | None, share_group: bool = False
) -> Int[Tensor, "R m"]:
    """Sinks, window and the index's choice, or everything in a dense row: ranks, sorted, distinct, padded."""
    live = torch.where(sizes.dense, 0, 1)
    sink, local = sizes.sink * live, sizes.local * live
    at = torch.arange(int(sink.max()), device=q.device)
    sinks = torch.where(at < sink[:, None], at, PAD)
    at = torch.arange(int(local.max()), device=q.device)
    window = torch.where(at < local[:, None], rows.count[:, None] - local[:, None] + at, PAD)
    parts = [sinks, window]
    if bool(sizes.dense.any()):
        at = torch.arange(int(rows.count[sizes.dense].max()), device=q.device)
        parts.append(torch.where(sizes.dense[:, None] & (at < rows.count[:, None]), at, PAD))
    if index is not None and bool((sizes.heavy > 0).any()):
        chosen = index.topk(q, sizes.heavy.view(rows.shape), rows.excluded(sizes.sink, sizes.local))
        if chosen.shape[:-1] != rows.shape or chosen.dtype != torch.int64:
            raise ValueError(
                f"{type(index).__name__}.topk returned {chosen.dtype} of shape {tuple(chosen.shape)}: "
                f"it must return int64 of shape {rows.shape} and one more axis"
            )
        chosen = chosen.to(q.device)
        if share_group and chosen.shape[-1]:
            b, h, t = rows.shape
            grouped = chosen.view(b, int(rows.group.max()) + 1, -1, t, chosen.shape[-1])  # (B, Hkv, group, Q, m)
            union = grouped.movedim(2, 3).flatten(3)[:, :, None]
            chosen = union.expand(-1, -1, grouped.shape[2], -1, -1).reshape(b, h, t, -1)
        parts.append(rows.ranks(chosen.flatten(0, 2)))
    ranks = torch.cat(parts, 1).sort(1).values
    # A group's heads may choose the same key, and a careless index sinks, the window, or a key twice.
    twice = torch.zeros_like(ranks, dtype=torch.bool)
    twice[:, 1:] = ranks[:, 1:] == ranks[:, :-1]
    ranks = torch.where(twice, PAD, ranks).sort(1).values
    return ranks[:, : max(int((ranks < PAD).sum(1).max()), 0)]


def _budget(
    reader: Reader,
    fixed: Tensor,
    pilot: Tensor,
    s_f: Tensor,
    s_p: Tensor,
    top: Tensor,
    n_s: Tensor,
    n_p: Tensor,
    config: VAttentionConfig,
    layer: int,
) -> Tensor:
    """The budget of each row, from its pilot."""
    safe = torch.where(top.isinf(), 0, top)[:, None]
    w_f, w_p = (s_f - safe).exp(), (s_p - safe).exp()
    real = pilot < PAD
    mean = w_p.sum(1) / n_p.clamp_min(1)
    off = torch.where(real, w_p - mean[:, None], 0)
    sigma = (off.square().sum(1) / (n_p - 1).clamp_min(1)).sqrt().double()
    total = w_f.sum(1).double() + n_s * mean.double()
    a = c = n_s * sigma / total.clamp_min(TINY)
    least = total
    if config.guarantee == "output":
        center, trace = reader.moments(pilot, w_p)
        norm = (reader.weighted_sum(fixed, w_f) + n_s[:, None] * center).double().norm(dim=1)
        a = n_s * trace.double().sqrt() / norm.clamp_min(TINY)
        least = torch.minimum(total, norm)
        _check_values(~a.isnan(), reader.rows, layer)
    needed = torch.where(least < TINY, torch.inf, needed_draws(a, c, config))
    return round_budget(needed, n_s, pilot=n_p, fpc=config.uses_fpc)


def _largest(top: Tensor, scores: Tensor) -> Tensor:
    return torch.maximum(top, scores.amax(1)) if scores.shape[1] else top


def _check_finite(top: Tensor, rows: Rows, layer: int) -> None:
    """The largest score read must be a number; -inf means that none of them is."""
    bad = (rows.count > 0) & ~top.isfinite()
    if bool(bad.any()):
        raise ValueError(not_finite("a score", layer, int(rows.head[bad.nonzero()[0, 0]])))


def _check_values(good: Tensor, rows: Rows, layer: int) -> None:
    if not bool(good.all()):
        raise ValueError(not_finite("an output", layer, int(rows.head[(~good).nonzero()[0, 0]])))


def not_finite(what: Literal["a score", "an output"], layer: int, head: int) -> str:
    """The sentence for what is not a number."""
    cause = "queries or keys" if what == "a score" else "values"
    return f"{what} of layer {layer}, head {head} is not finite: the {cause} hold NaN or infinity"


def given_ranks(sets: Sequence[IndexSets], rows: Rows, config: VAttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Index sets as ranks, sorted and padded: fixed, pilot, further.

    Raises
    ------
    ValueError
        If there is not one a row, or a row is given a key twice, one that it does not see, or none though it sees some.
    """
    if len(sets) != len(rows.count):
        raise ValueError(f"index_sets must hold one set a row, got {len(sets)} for {len(rows.count)} rows (b, h, t)")
    fixed, pilot, further = (
        rows.ranks(_pad([getattr(s, part) for s in sets], rows.count.device)) for part in ("fixed", "pilot", "further")
    )
    apart = [(fixed, pilot, further)] if config.reuse_pilot else [(fixed, pilot), (fixed, further)]
    for parts in apart:
        every = torch.cat(parts, 1).sort(1).values
        if bool(((every[:, 1:] == every[:, :-1]) & (every[:, 1:] < PAD)).any()):
            raise ValueError("index_sets name a key twice in a row: fixed, pilot and further must be distinct")
    told = torch.tensor([len(s.fixed) + len(s.pilot) + len(s.further) for s in sets], device=rows.count.device)
    seen = sum((x < PAD).sum(1) for x in (fixed, pilot, further))
    if bool(((seen != told) | ((told == 0) & (rows.count > 0))).any()):
        raise ValueError("index_sets must name keys that their row sees, and at least one: give positions in k")
    return fixed, pilot, further


def _pad(sets: list[Tensor], device: torch.device) -> Tensor:
    out = torch.full((len(sets), max(len(s) for s in sets)), PAD, dtype=torch.int64)
    for row, s in zip(out, sets, strict=True):
        row[: len(s)] = s.sort().values
    return out.to(device)


def _sets(rows: Rows, fixed: Tensor, pilot: Tensor, further: Tensor) -> list[IndexSets]:
    every = torch.arange(len(fixed), device=fixed.device)

    def positions(ranks: Tensor) -> list[Tensor]:
        real = ranks < PAD
        at = rows.positions(every, torch.where(real, ranks, 0)) if ranks.shape[1] else ranks
        return [at[r, real[r]].cpu() for r in range(len(ranks))]

    return [IndexSets(f, p, d) for f, p, d in zip(positions(fixed), positions(pilot), positions(further), strict=True)]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attn_mask: Tensor | None
) -> Float[Tensor, "B H Q Dv"]:
    """Attention over all visible keys, in float32 or wider, head by head; zero where a row sees nothing.

    Not a fast path: for audits.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    b, h, t, _ = q.shape
    n, group = k.shape[2], h // k.shape[1]
    if attn_mask is None:
        visible, bias = (torch.arange(n) < torch.arange(n - t + 1, n + 1)[:, None]).to(q.device)[None, None], None
    else:
        visible, bias = read_mask(attn_mask, (b, h, t, n))
    out = torch.empty(b, h, t, v.shape[3], dtype=dtype, device=q.device)
    for head in range(h):
        keys, values = (x[:, head // group].to(q.device, dtype) for x in (k, v))
        scores = q[:, head].to(dtype) @ keys.transpose(1, 2) * scale
        pick = head if visible.shape[1] > 1 else 0
        if bias is not None:
            scores = scores + bias[:, pick]
        seen = visible[:, pick]
        values = values.masked_fill(~seen.any(1)[..., None], 0)  # what no row sees may hold anything
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[:, head] = torch.where(seen.any(-1, keepdim=True), weights, 0) @ values
    return out


def relative_error(out: Tensor, truth: Tensor) -> Float[Tensor, "B H Q"]:
    """``|out - truth| / |truth|`` over the last axis."""
    return (out.to(truth.dtype) - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(TINY)
