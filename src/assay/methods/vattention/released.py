"""The arithmetic of the authors' released code, for comparison only: a full pass over all keys, nothing is saved.

It differs from `vattention` in what the paper's lemmas rest on: draws are with replacement and may fall on keys that are
read anyway, duplicates collapse, the pilot is dropped, and the quantile is one-sided. The tail comes out too small by about
b / (2 r) of itself.

Source: github.com/xAlg-ai/sparse-attention-hub, commit 1a048c9, Apache-2.0, read and restated.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.methods.vattention._attention import read_mask, relative_error, size_of
from assay.methods.vattention._budget import normal_quantile
from assay.methods.vattention._config import IndexSets, VAttentionConfig, VAttentionOutput
from assay.methods.vattention._indices import best, group_scores

_EPS = 1e-6  # beside every sampling probability
_FLOOR = 1e-8  # of sigma, and of eps D


def released_budget(
    sigma: Float[Tensor, "*rows"], total: Float[Tensor, "*rows"], r: Int[Tensor, "*rows"], *, eps: float, delta: float
) -> Int[Tensor, "*rows"]:
    """``int(clamp((z(1 - delta) sigma r / max(eps D, 1e-8))**2, 1, r))``: one-sided, rounded down, pilot not yet its floor.

    Parameters
    ----------
    sigma, total
        Sample deviation of the pilot's weights, and the estimated denominator.
    r
        Keys in the sampling range.
    """
    z = normal_quantile(1 - delta).to(sigma.dtype)
    needed = (z * sigma * r / (eps * total).clamp_min(_FLOOR)) ** 2
    return torch.minimum(needed.clamp_min(1), r.to(needed.dtype)).long()


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
    pilot_draws: Tensor | None = None,
    further_draws: list[Tensor] | None = None,
) -> VAttentionOutput:
    """One step of the released code with oracle top-k. ``min_pilot`` plays no part in it.

    The sampling range is the same for all rows of a chunk: from the sinks to the window of the *last* visible key. Without
    a mask only; a padded batch has no released meaning.

    Parameters
    ----------
    config
        ``sink, local, heavy, pilot`` (its share of the range), ``eps, delta, seed``.
    fixed : bool (B, H, Q, n), optional
        The keys read for certain, in place of sinks, window and oracle top-k.
    pilot_draws : int64 (B, H, Q, n_p), optional
        Key positions of the pilot, in place of random ones.
    further_draws : list of int64, optional
        Key positions of the second draws, one tensor a row in the order (b, h, t).

    Returns
    -------
    `VAttentionOutput`; ``density`` is the share of distinct keys with a weight.
    """
    b, h, t, _ = q.shape
    n = k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if attn_mask is not None and not bool(
        (read_mask(attn_mask, (b, h, t, n))[0] == (torch.arange(n) < torch.arange(n - t + 1, n + 1)[:, None]).to(q.device)).all()
    ):
        raise ValueError("mode='released' has no padding or other masks: use mode='exact', or one unpadded request")
    visible = (torch.arange(n) < torch.arange(n - t + 1, n + 1)[:, None]).to(q.device)
    scores = (group_scores(q.to(dtype), k.to(q.device, dtype)) * scale).masked_fill(~visible, -torch.inf)
    if fixed is None:
        fixed = released_fixed(scores, config)
    begin, end = int(size_of(config.sink, torch.tensor(n))), n - int(size_of(config.local, torch.tensor(n)))
    r = end - begin
    generator = torch.Generator(device=q.device).manual_seed(seed % 2**63)
    w = (scores - scores.amax(-1, keepdim=True)).exp()
    n_p = max(2, config.pilot if isinstance(config.pilot, int) else int(config.pilot * r))
    if r < 2:
        mask, budget = visible.to(dtype).expand(b, h, t, n), torch.zeros(b, h, t, dtype=torch.int64, device=q.device)
    else:
        if pilot_draws is None:
            pilot_draws = torch.randint(begin, end, (b, h, t, n_p), generator=generator, device=q.device)
        sample = w.gather(3, pilot_draws)
        sigma = sample.std(-1, correction=1).clamp_min(_FLOOR)
        drawn = torch.zeros(b, h, t, n, dtype=torch.bool, device=q.device).scatter_(3, pilot_draws, True)
        # A pilot key that is also read for certain keeps its certain weight.
        share = torch.where(fixed, 1.0, drawn.to(dtype) * (n_p / r))
        total = torch.where(share > 0, w / (share + _EPS), 0).sum(-1)
        at_most = torch.full_like(total, r).long()
        budget = released_budget(sigma, total, at_most, eps=config.eps, delta=config.delta).clamp(min(n_p, r), r)
        drawn = torch.zeros_like(drawn)
        rows = drawn.view(-1, n)
        for row, number in enumerate(budget.reshape(-1).tolist()):
            if further_draws is None:
                rows[row, torch.randint(begin, end, (number,), generator=generator, device=q.device)] = True
            else:
                rows[row, further_draws[row]] = True
        mask = (fixed.to(dtype) + drawn.to(dtype) * (budget / r)[..., None]).clamp_max(1)
    weights = torch.where((mask > 0) & visible, w / (mask + _EPS), 0)
    grouped = weights.reshape(b, k.shape[1], -1, n) @ v.to(q.device, dtype)
    out = grouped.reshape(b, h, t, -1) / weights.sum(-1, keepdim=True)
    read = weights > 0
    err = sets = None
    if config.audit:
        full = (w.reshape(b, k.shape[1], -1, n) @ v.to(q.device, dtype)).reshape(b, h, t, -1) / w.sum(-1, keepdim=True)
        err = relative_error(out, full)
        none = torch.zeros(0, dtype=torch.int64)
        sets = [IndexSets(row.nonzero()[:, 0].cpu(), none, none) for row in read.reshape(-1, n)]
    return VAttentionOutput(
        out.to(q.dtype), read.sum(-1) / visible.sum(-1), budget, (fixed & visible).sum(-1).expand(b, h, t), err, sets, "torch"
    )


def released_fixed(scores: Float[Tensor, "B H Q n"], config: VAttentionConfig) -> Tensor:
    """Sinks, window and oracle top-k of each row of a chunk, as a bool mask."""
    n, t = scores.shape[3], scores.shape[2]
    at, count = torch.arange(n, device=scores.device), torch.arange(n - t + 1, n + 1, device=scores.device)[:, None]
    sink, local = size_of(config.sink, count), size_of(config.local, count)
    fixed = (at < sink) | ((at >= count - local) & (at < count))
    heavy = torch.minimum(size_of(config.heavy, count), (count - sink - local).clamp_min(0))
    whole = count <= sink + local + 2
    fixed = torch.where(whole, at < count, fixed).expand(scores.shape)
    if int(heavy.max()):
        m = torch.where(whole, 0, heavy)[:, 0].expand(scores.shape[:3])
        chosen = best(scores, m, fixed | ~scores.isfinite())
        fixed = torch.cat([fixed, torch.zeros_like(fixed[..., :1])], 3).scatter(3, torch.where(chosen < 0, n, chosen), True)[..., :n]
    return fixed
