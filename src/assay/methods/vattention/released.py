"""The arithmetic of the authors' released code, in our words: for comparison only.

It makes a full pass over the keys, so nothing is saved, and it is not exact: it draws with replacement, drops the pilot,
lets its range contain keys that are read for certain, and collapses duplicates to one, which under-counts the tail by about
b / (2 r). It bounds the denominator only, with a one-sided quantile. ``mode="exact"`` mends all of that.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.methods.vattention._attention import is_prefill, read_mask, relative_error, size_of
from assay.methods.vattention._budget import z_above
from assay.methods.vattention._config import IndexSets, VAttentionConfig, VAttentionOutput
from assay.methods.vattention._indices import group_scores
from assay.methods.vattention.baselines import attend, best_of, causal, sink_and_window

#: What the released code adds to shares, and the least sigma and product that it divides by.
_SMALL, _LEAST = 1e-6, 1e-8


def released_budget(
    sigma: Float[Tensor, "*rows"], total: Float[Tensor, "*rows"], size: int, *, eps: float, delta: float, pilot: int
) -> Int[Tensor, "*rows"]:
    """How many keys to draw: the one-sided rule, rounded down, at least the pilot and at most the range.

    Parameters
    ----------
    sigma, total : (rows)
        Standard deviation of the pilot's weights, and the estimated denominator.
    size
        Of the sampling range.
    eps, delta
        The tolerance of the denominator, and how often it may be missed.
    pilot
        Size of the pilot.
    """
    z = float(z_above(delta))
    needed = (z * sigma.clamp_min(_LEAST) * size / (eps * total).clamp_min(_LEAST)) ** 2
    return needed.clamp(1, size).long().clamp(pilot, size)


def released_attention(
    q: Float[Tensor, "B H Q D"],
    k: Float[Tensor, "B Hkv n D"],
    v: Float[Tensor, "B Hkv n Dv"],
    *,
    config: VAttentionConfig,
    scale: float,
    attn_mask: Tensor | None = None,
    seed: int = 0,
    fixed: Tensor | None = None,
    pilot_draws: Int[Tensor, "B H Q pilot"] | None = None,
    draws: Int[Tensor, "B H Q most"] | None = None,
) -> VAttentionOutput:
    """One step with the released arithmetic, the oracle as its index.

    Parameters
    ----------
    q, k, v, config, scale, attn_mask
        As for `vattention`; of the sizes, ``pilot`` is the base share of the range, and ``min_pilot`` plays no part.
    seed
        Of the draws.
    fixed : (B, H, Q, n) bool, optional
        The keys read for certain, in place of sinks, window and the best by true score.
    pilot_draws, draws
        Positions drawn with replacement, in place of our own draws; of the second, a row uses as many as its budget.
    """
    (b, h, t, _), n = q.shape, k.shape[2]
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    visible, bias = (causal(t, n, q.device), None) if attn_mask is None else read_mask(attn_mask, (b, h, t, n))
    visible = visible.expand(b, h, t, n)
    scores = group_scores(q.to(dtype), k.to(dtype)) * scale
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, -torch.inf)
    low = config.sink if isinstance(config.sink, int) else int(config.sink * n)
    high = n - (config.local if isinstance(config.local, int) else int(config.local * n))
    size = high - low
    none = torch.empty(0, dtype=torch.int64)
    if size < 2 or is_prefill(t, n, config):
        whole = visible.sum(-1)
        out = attend(scores, v, visible.to(dtype)).to(q.dtype)
        err = sets = None
        if config.audit:
            err = torch.zeros(b, h, t, dtype=dtype, device=q.device)
            sets = [IndexSets(row.nonzero()[:, 0].cpu(), none, none) for row in visible.flatten(0, 2)]
        density = torch.ones(b, h, t, device=q.device)
        return VAttentionOutput(out, density, torch.zeros_like(whole), whole, err, sets)

    if fixed is None:
        fixed = sink_and_window(visible, config.sink, config.local)
        fixed = fixed | best_of(scores.masked_fill(fixed, -torch.inf), size_of(config.heavy, visible.sum(-1)))
    w = (scores - scores.amax(-1, keepdim=True)).exp()

    generator = torch.Generator().manual_seed(seed)
    n_p = max(2, int(config.pilot * size)) if isinstance(config.pilot, float) else max(2, config.pilot)
    if pilot_draws is None:
        pilot_draws = torch.randint(low, high, (b, h, t, n_p), generator=generator).to(q.device)
    sigma = w.gather(-1, pilot_draws).std(-1)
    pilot = torch.zeros_like(visible).scatter(-1, pilot_draws, True)
    total = (w * fixed).sum(-1) / (1 + _SMALL) + (w * pilot).sum(-1) / (n_p / size + _SMALL)
    budget = released_budget(sigma, total, size, eps=config.eps, delta=config.delta, pilot=n_p)

    most = int(budget.max())
    if draws is None:
        draws = torch.randint(low, high, (b, h, t, most), generator=generator).to(q.device)
    used = torch.arange(draws.shape[-1], device=q.device) < budget[..., None]
    # A row's unused draws point behind the last key and are cut off.
    drawn = torch.zeros(b, h, t, n + 1, dtype=torch.bool, device=q.device)
    drawn = drawn.scatter(-1, torch.where(used, draws, n), True)[..., :n]
    mask = (fixed.to(dtype) + drawn * (budget.to(dtype) / size)[..., None]).clamp_max(1)
    weights = torch.where(mask > 0, 1 / (mask + _SMALL), 0)
    out = attend(scores, v, weights)
    read = (fixed | drawn) & visible
    err = sets = None
    if config.audit:
        err = relative_error(out, attend(scores, v, visible.to(dtype)))
        pairs = zip(fixed.flatten(0, 2), (drawn & ~fixed & visible).flatten(0, 2), strict=True)
        sets = [IndexSets(f.nonzero()[:, 0].cpu(), none, d.nonzero()[:, 0].cpu()) for f, d in pairs]
    density = read.sum(-1) / visible.sum(-1).clamp_min(1)
    return VAttentionOutput(out.to(q.dtype), density, budget, fixed.sum(-1), err, sets)


def collapse_bias(size: int, budget: int) -> float:
    """Expected share of the tail that the collapsed duplicates lose: 1 - (distinct draws expected) / budget."""
    return 1 - size * -math.expm1(budget * math.log1p(-1 / size)) / budget
