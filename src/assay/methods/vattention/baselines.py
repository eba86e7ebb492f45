"""Sparse attention rules to compare with: oracle top-k and top-p, uniform sampling, MagicPig, Quest.

Written for measuring quality: all scores are computed, and a rule says which keys it would have read and how it weights
them. What they would cost is their density, the share of the visible keys that they read.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay.methods.vattention._attention import check_shapes, read_mask, size_of
from assay.methods.vattention._budget import TINY
from assay.methods.vattention._config import checked_size
from assay.methods.vattention._indices import group_scores, page_bounds, page_scores


@dataclass(frozen=True)
class SparseOutput:
    """What a rule gives: ``out`` (B, H, Q, Dv), ``density`` (B, H, Q), ``weights`` (B, H, Q, n), 0 where a key is not read."""

    out: Tensor
    density: Tensor
    weights: Tensor


def causal(queries: int, n: int, device: torch.device | None = None) -> Bool[Tensor, "1 1 Q n"]:
    """Row t sees the first n - Q + t + 1 keys."""
    at = torch.arange(n, device=device)
    return (at < torch.arange(n - queries + 1, n + 1, device=device)[:, None])[None, None]


def sink_and_window(visible: Bool[Tensor, "*rows n"], sink: int | float, local: int | float) -> Bool[Tensor, "*rows n"]:
    """The first ``sink`` and the last ``local`` visible keys of each row, always the newest; shares are rounded down."""
    rank = visible.cumsum(-1) - 1
    count = visible.sum(-1, keepdim=True)
    first, last = (size_of(checked_size(name, size), count) for name, size in (("sink", sink), ("local", local)))
    return visible & ((rank < first) | (rank >= count - last.clamp_min(1)))


def best_of(scores: Float[Tensor, "*rows n"], number: int | Int[Tensor, "*rows"]) -> Bool[Tensor, "*rows n"]:
    """The ``number`` largest finite scores of each row; among equal ones the earlier key."""
    number = number if isinstance(number, int) else number[..., None]
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    )
    return (rank < number) & (scores > -torch.inf)


def attend(
    scores: Float[Tensor, "B H Q n"], v: Float[Tensor, "B Hkv n Dv"], weights: Float[Tensor, "B H Q n"]
) -> Float[Tensor, "B H Q Dv"]:
    """``sum weights exp(score) V / sum weights exp(score)``; zero where nothing is read."""
    top = torch.where(weights > 0, scores, -torch.inf).amax(-1, keepdim=True)
    w = torch.where(weights > 0, weights * (scores - torch.where(top.isinf(), 0, top)).exp(), 0)
    b, h, t, n = w.shape
    summed = w.reshape(b, v.shape[1], -1, n) @ v.to(w.dtype)
    return summed.reshape(b, h, t, -1) / w.sum(-1, keepdim=True).clamp_min(TINY)


def top_p_set(scores: Float[Tensor, "*rows n"], fixed: Bool[Tensor, "*rows n"], p: float) -> Bool[Tensor, "*rows n"]:
    """The smallest set with a share of at least ``p`` of the softmax: ``fixed``, then the largest weights.

    Among equal weights the earlier key. (The released code takes all keys that tie with the last one, and goes on until
    the share *exceeds* p.)
    """
    weight = scores.softmax(-1)
    rest = weight.masked_fill(fixed, 0)
    held = (weight * fixed).sum(-1, keepdim=True)
    order = rest.masked_fill(fixed, -1).argsort(dim=-1, descending=True, stable=True)
    ranked = rest.gather(-1, order)
    before = held + ranked.cumsum(-1) - ranked
    # A key is needed while the share before it is short of p; the slack forgives the rounding of a long sum.
    needed = (before < p * (1 - 1e-6)) & (ranked > 0)
    return fixed | torch.zeros_like(fixed).scatter(-1, order, needed)


def topk_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    heavy: int | float,
    sink: int | float = 128,
    local: int | float = 128,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
) -> SparseOutput:
    """Oracle top-k: sinks, window, and the ``heavy`` keys (count, or share of the visible ones) with the largest scores.

    Parameters
    ----------
    q, k, v, scale, attn_mask
        As for `vattention`.
    heavy, sink, local
        Counts, or shares of the visible keys, rounded down.
    """
    scores, visible = _scores(q, k, v, scale, attn_mask)
    fixed = sink_and_window(visible, sink, local)
    number = size_of(checked_size("heavy", heavy), visible.sum(-1))
    read = fixed | best_of(scores.masked_fill(fixed, -torch.inf), number)
    return _output(scores, v, read.to(scores.dtype), visible)


def topp_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    p: float,
    sink: int | float = 128,
    local: int | float = 128,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
) -> SparseOutput:
    """Oracle top-p: sinks, window, and the fewest further keys that bring the softmax share to ``p``.

    Parameters
    ----------
    q, k, v, scale, attn_mask
        As for `vattention`.
    p
        The share, in (0, 1].
    sink, local
        Counts, or shares of the visible keys.

    Raises
    ------
    ValueError
        If p is outside of (0, 1].
    """
    if not 0 < p <= 1:
        raise ValueError(f"p must lie in (0, 1], got {p}: 0.95 keeps 95 % of the softmax")
    scores, visible = _scores(q, k, v, scale, attn_mask)
    read = top_p_set(scores, sink_and_window(visible, sink, local), p)
    return _output(scores, v, read.to(scores.dtype), visible)


def uniform_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    budget: int | float,
    sink: int | float = 128,
    local: int | float = 128,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> SparseOutput:
    """Sinks, window, and a uniform sample of the rest, drawn without replacement and weighted by n_s / b.

    Parameters
    ----------
    q, k, v, scale, attn_mask
        As for `vattention`.
    budget
        Sampled keys: a count, or a share of the visible keys that are neither sink nor window (at least one).
    sink, local
        Counts, or shares of the visible keys.
    generator
        Of the draws.
    """
    scores, visible = _scores(q, k, v, scale, attn_mask)
    fixed = sink_and_window(visible, sink, local)
    rest = (visible & ~fixed).expand_as(scores)
    n_s = rest.sum(-1)
    b = torch.minimum(size_of(checked_size("budget", budget), n_s).clamp_min(1), n_s)
    draw = torch.rand(scores.shape, generator=generator, device=scores.device).masked_fill(~rest, -torch.inf)
    weights = fixed + best_of(draw, b) * (n_s / b.clamp_min(1))[..., None]
    return _output(scores, v, weights.to(scores.dtype), visible)


def collision_probability(cosine: Tensor, bits: int, tables: int, hits: int = 2) -> Tensor:
    """Chance that a key is hit in at least ``hits`` of the tables: a bit agrees with probability 1 - angle / pi.

    With p = (1 - angle/pi)^bits: 1 - (1 - p)^L for one hit, less L p (1 - p)^(L-1) for two.
    """
    p = (1 - cosine.clamp(-1, 1).arccos() / math.pi) ** bits
    none = (1 - p) ** tables
    return 1 - none if hits == 1 else 1 - none - tables * p * (1 - p) ** (tables - 1)


@dataclass(frozen=True)
class MagicPigSpace:
    """Centred queries (B, H, Q, D + 1) and lifted keys (B, Hkv, n, D + 1) on the unit sphere, and their cosines (B, H, Q, n)."""

    queries: Tensor
    keys: Tensor
    cosine: Tensor

    @staticmethod
    def of(q: Float[Tensor, "B H Q D"], k: Float[Tensor, "B Hkv n D"]) -> "MagicPigSpace":
        """The details of the released code (after Chen et al. 2024).

        The mean key is taken from keys and queries. Keys are scaled by the largest norm, and lifted to the unit sphere by
        one more coordinate, so that inner products become cosines; queries get a zero there.
        """
        centre = k.mean(2, keepdim=True)
        keys = k - centre
        keys = keys / keys.norm(dim=-1).amax().clamp_min(TINY)
        lift = (1 - keys.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
        keys = torch.cat([keys, lift], -1)
        queries = q - centre.repeat_interleave(q.shape[1] // k.shape[1], 1)
        queries = torch.cat([queries, torch.zeros_like(queries[..., :1])], -1)
        queries = queries / queries.norm(dim=-1, keepdim=True).clamp_min(TINY)
        return MagicPigSpace(queries, keys, group_scores(queries, keys))

    def collide(self, planes: Float[Tensor, "D1 bits"]) -> Bool[Tensor, "B H Q n"]:
        """Whether query and key lie on the same side of all planes of one table."""
        place = 2 ** torch.arange(planes.shape[1], device=planes.device)
        key_codes, query_codes = (((x @ planes > 0) * place).sum(-1) for x in (self.keys, self.queries))
        group = self.queries.shape[1] // self.keys.shape[1]
        return query_codes[..., None] == key_codes.repeat_interleave(group, 1)[:, :, None]


def magicpig_collisions(
    space: MagicPigSpace, projection: Float[Tensor, "D1 columns"], bits: int
) -> Int[Tensor, "B H Q n"]:
    """In how many tables each key collides; table l owns the columns ``l bits .. (l + 1) bits - 1`` of the projection."""
    collisions = torch.zeros_like(space.cosine, dtype=torch.int16)
    for planes in projection.split(bits, 1):
        collisions += space.collide(planes)
    return collisions


def magicpig_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    tables: int = 150,
    bits: int = 10,
    hits: int = 2,
    sink: int | float = 4,
    local: int | float = 64,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    projection: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> SparseOutput:
    """MagicPig: keys whose SimHash collides with the query's in at least ``hits`` tables, weighted by 1 / probability.

    Parameters
    ----------
    q, k, v, scale, attn_mask
        As for `vattention`.
    tables, bits
        L and K of the paper.
    hits
        Tables in which a key must collide: 2 in the paper, 1 in the code released with vAttention.
    sink, local
        Counts, or shares of the visible keys: read for certain.
    projection : (D + 1, tables bits)
        The hyperplanes; drawn from ``generator`` where not given.

    Raises
    ------
    ValueError
        If ``hits`` is neither 1 nor 2, or ``tables`` or ``bits`` is less than 1.
    """
    if hits not in (1, 2) or tables < 1 or bits < 1:
        raise ValueError(f"magicpig needs hits 1 or 2, tables >= 1 and bits >= 1, got {hits}, {tables}, {bits}")
    scores, visible = _scores(q, k, v, scale, attn_mask)
    if projection is None:
        drawn = torch.randn(q.shape[3] + 1, tables * bits, generator=generator, dtype=torch.float64)
        projection = drawn.to(scores.device, scores.dtype)
    space = MagicPigSpace.of(q.to(scores.dtype), k.to(scores.dtype))
    collisions = magicpig_collisions(space, projection.to(scores.dtype), bits)
    fixed = sink_and_window(visible, sink, local)
    hit = (collisions >= hits) & visible & ~fixed
    chance = collision_probability(space.cosine, bits, tables, hits)
    return _output(scores, v, fixed + hit / (chance + 1e-6), visible)


def quest_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    heavy: int,
    page_size: int = 16,
    sink: int | float = 0,
    local: int | float = 1,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
) -> SparseOutput:
    """Quest: the pages whose channel-wise bounds allow the largest scores.

    Parameters
    ----------
    q, k, v, scale, attn_mask
        As for `vattention`.
    heavy
        Keys to read by pages: ``max(3, heavy // page_size)`` pages, as released.
    page_size
        Keys of a page.
    sink, local
        Counts, or shares of the visible keys, read beside the pages.

    Raises
    ------
    ValueError
        If ``page_size`` is less than 1, or ``heavy`` negative.
    """
    if page_size < 1 or heavy < 0:
        raise ValueError(
            f"quest needs page_size >= 1 and heavy >= 0, got {page_size} and {heavy}: pages of 16 are usual"
        )
    scores, visible = _scores(q, k, v, scale, attn_mask)
    low, high = page_bounds(k.to(scores.dtype), page_size)
    bound = page_scores(q.to(scores.dtype), low, high)
    pages = best_of(bound, max(3, heavy // page_size))
    chosen = pages.repeat_interleave(page_size, -1)[..., : k.shape[2]]
    read = (chosen & visible) | sink_and_window(visible, sink, local)
    return _output(scores, v, read.to(scores.dtype), visible)


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float | None, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores (B, H, Q, n), -inf where hidden, and what is visible."""
    check_shapes(q, k, v)
    (b, h, t, d), n = q.shape, k.shape[2]
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    scores = group_scores(q.to(dtype), k.to(dtype)) * (1 / math.sqrt(d) if scale is None else scale)
    visible, bias = (causal(t, n, q.device), None) if attn_mask is None else read_mask(attn_mask, (b, h, t, n))
    if bias is not None:
        scores = scores + bias
    visible = visible.expand(b, h, t, n)
    return scores.masked_fill(~visible, -torch.inf), visible


def _output(scores: Tensor, v: Tensor, weights: Tensor, visible: Tensor) -> SparseOutput:
    density = (weights > 0).sum(-1) / visible.sum(-1).clamp_min(1)
    return SparseOutput(attend(scores, v, weights), density, weights)
