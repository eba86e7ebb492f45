"""The slow, obvious version: dense arithmetic with masks, row by row, which both paths must equal."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from assay.methods.vattention._config import IndexSets, VAttentionConfig


@dataclass(frozen=True)
class Estimate:
    """One row: numerator (Dv,), denominator and output (Dv,), all float64 and relative to the largest score read, and the
    budget that the pilot asks for."""

    numerator: Tensor
    denominator: Tensor
    out: Tensor
    budget: int


def reference_row(
    q: Float[Tensor, "D"],
    k: Float[Tensor, "n D"],
    v: Float[Tensor, "n Dv"],
    visible: Bool[Tensor, "n"],
    sets: IndexSets,
    config: VAttentionConfig,
    scale: float | None = None,
) -> Estimate:
    """The estimator and the budget of one row, from given index sets, in float64.

    Parameters
    ----------
    visible
        Which keys the row sees.
    sets
        What it reads.
    config
        ``eps, delta, guarantee, tail, fpc, reuse_pilot, tight``. Not ``optimize_delta``.
    scale
        None: 1 / sqrt(D).
    """
    q, k, v = q.double(), k.double(), v.double()
    s = k @ q * (1 / math.sqrt(len(q)) if scale is None else scale)
    fixed, pilot, further = (
        torch.zeros_like(visible).index_fill(0, i, True) for i in (sets.fixed, sets.pilot, sets.further)
    )
    n_s = int((visible & ~fixed).sum())
    n_p = int(pilot.sum())
    w = (s - s[fixed | pilot | further].max()).exp()

    budget = 0
    if n_p:
        denominator = w[fixed].sum() + n_s * w[pilot].mean()
        spread_d = w[pilot].std() if n_p > 1 else w.new_zeros(())
        c = n_s * spread_d / denominator
        if config.guarantee == "denominator":
            z = _quantile(1 - config.delta / 2 if config.tail == "two" else 1 - config.delta)
            needed = (z * c / config.eps) ** 2
        else:
            terms = w[pilot, None] * v[pilot]
            numerator = (w[fixed, None] * v[fixed]).sum(0) + n_s * terms.mean(0)
            trace = terms.var(0).sum() if n_p > 1 else w.new_zeros(())
            a = n_s * trace.sqrt() / numerator.norm()
            z = _quantile(1 - config.delta / 4)
            if config.tight:
                needed = (z * (a + c + config.eps * c) / config.eps) ** 2
            else:
                needed = (z * (a + c) / (config.eps / 2)) ** 2
        asked = float(needed)
        if config.uses_fpc:
            asked = asked / (1 + asked / n_s)
        budget = min(max(math.ceil(asked), n_p), n_s)

    sample = further | pilot if config.reuse_pilot else further
    weight = fixed.double() + sample.double() * n_s / max(int(sample.sum()), 1)
    numerator, denominator = (weight * w) @ v, (weight * w).sum()
    return Estimate(numerator, denominator, numerator / denominator, budget)


def _quantile(p: float) -> float:
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
