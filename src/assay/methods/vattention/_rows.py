"""All rows of one layer at once, in dense arithmetic: how the study measures many settings on the same captured keys.

Nothing is saved here. A random order of the keys that are not read for certain stands for the draws: its first n_p keys are
the pilot, its first b keys the sample, as in `vattention` with ``reuse_pilot=True``; a test holds the two equal.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay.methods.vattention._attention import pilot_size, size_of
from assay.methods.vattention._budget import TINY, needed_draws, round_budget
from assay.methods.vattention._config import VAttentionConfig
from assay.methods.vattention._indices import SimHashIndex
from assay.methods.vattention.baselines import attend, best_of, sink_and_window


@dataclass(eq=False)
class LayerRows:
    """Scores and dense attention of some queries of one layer.

    Parameters
    ----------
    q : (H, T, D)
        The last T queries.
    k, v : (Hkv, n, D)
    queries
        Which of the T are used.
    scale
        Of the scores; None: 1 / sqrt(D).
    """

    q: Float[Tensor, "H T D"]
    k: Float[Tensor, "Hkv n D"]
    v: Float[Tensor, "Hkv n Dv"]
    queries: tuple[int, ...]
    scale: float | None = None

    def __post_init__(self) -> None:
        h, t, d = self.q.shape
        n = self.k.shape[1]
        at = torch.tensor(self.queries)
        scale = 1 / math.sqrt(d) if self.scale is None else self.scale
        self.used = self.q[:, at]
        grouped = self.used.reshape(self.k.shape[0], -1, d)
        scores = (grouped @ self.k.transpose(1, 2)).reshape(h, len(at), n) * scale
        self.visible: Bool[Tensor, "H T n"] = (torch.arange(n) < (n - t + 1 + at)[:, None]).expand_as(scores)
        self.scores: Float[Tensor, "H T n"] = scores.masked_fill(~self.visible, -torch.inf)
        self.count: Int[Tensor, "H T"] = self.visible.sum(-1)

    @cached_property
    def w(self) -> Float[Tensor, "H T n"]:
        """``exp(score - largest)``."""
        return (self.scores - self.scores.amax(-1, keepdim=True)).exp()

    @cached_property
    def total(self) -> Float[Tensor, "H T"]:
        """The true denominator."""
        return self.w.sum(-1)

    @cached_property
    def out(self) -> Float[Tensor, "H T Dv"]:
        """Dense attention."""
        return self.times_v(self.w) / self.total[..., None]

    @cached_property
    def flatness(self) -> Float[Tensor, "H T"]:
        """Entropy of the attention weights over its largest possible value: 1 where all keys weigh the same."""
        p = self.w / self.total[..., None]
        return torch.special.entr(p).sum(-1) / self.count.double().log().to(p.dtype)

    def times_v(self, weights: Float[Tensor, "*draws H T n"]) -> Float[Tensor, "*draws H T Dv"]:
        """``weights V``, each query head with its key head."""
        *lead, h, t, n = weights.shape
        grouped = weights.reshape(*lead, self.v.shape[0], -1, n)
        return (grouped @ self.v).reshape(*lead, h, t, -1)

    def fixed(
        self, heavy: int | float, sink: int = 4, local: int = 4, simhash: SimHashIndex | None = None
    ) -> Bool[Tensor, "H T n"]:
        """Sinks, window, and the ``heavy`` best of the rest by true score, or by matching bits."""
        always = sink_and_window(self.visible, sink, local)
        number = torch.minimum(size_of(heavy, self.count), self.count - always.sum(-1))
        if simhash is None:
            return always | best_of(self.scores.masked_fill(always, -torch.inf), number)
        chosen = simhash.topk(self.used[None], number[None], (~self.visible | always)[None])[0]
        hit = torch.zeros(*always.shape[:2], always.shape[2] + 1, dtype=torch.bool)
        hit.scatter_(-1, torch.where(chosen < 0, always.shape[2], chosen), True)
        return always | hit[..., :-1]

    def error_of(self, weights: Float[Tensor, "H T n"]) -> Float[Tensor, "H T"]:
        """Relative error of a rule that reads keys with these weights."""
        return self.error(attend(self.scores[None], self.v[None], weights[None])[0])

    def error(self, out: Float[Tensor, "*draws H T Dv"]) -> Float[Tensor, "*draws H T"]:
        """``|out - dense| / |dense|``."""
        return (out - self.out).norm(dim=-1) / self.out.norm(dim=-1).clamp_min(TINY)


@dataclass
class Sampler:
    """Random orders of the keys outside of ``fixed``, and what a sample of the first b of them gives.

    Parameters
    ----------
    rows
        The layer.
    fixed : (H, T, n)
        Keys read for certain.
    draws
        Independent orders.
    generator
        Of the orders.
    """

    rows: LayerRows
    fixed: Bool[Tensor, "H T n"]
    draws: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        rest = self.rows.visible & ~self.fixed
        n = rest.shape[-1]
        self.n_s: Int[Tensor, "H T"] = rest.sum(-1)
        self.n_f: Int[Tensor, "H T"] = self.fixed.sum(-1)
        key = torch.rand(self.draws, *rest.shape, generator=self.generator).masked_fill_(~rest, 2)
        self.order: Int[Tensor, "R H T n"] = key.argsort(dim=-1)
        self.rank: Int[Tensor, "R H T n"] = torch.empty_like(self.order)
        self.rank.scatter_(-1, self.order, torch.arange(n).expand_as(self.order))
        self.rank.masked_fill_(~rest, n)  # what is read for certain ranks behind all that can be drawn
        self._drawn_w = self.rows.w.expand_as(self.order).gather(-1, self.order)
        self._w_fixed = self.rows.w * self.fixed
        self._d_fixed = self._w_fixed.sum(-1)

    @cached_property
    def _n_fixed(self) -> Tensor:
        return self.rows.times_v(self._w_fixed)

    @cached_property
    def _drawn_total(self) -> Float[Tensor, "R H T n"]:
        """Sum of w over the first 1, 2, ... keys of each order, in float64."""
        return self._drawn_w.double().cumsum(-1)

    def spread(self, config: VAttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
        """From the pilot: its size (H, T), and the relative standard deviations of N and D at one draw (R, H, T).

        The first is infinite where N or D all but vanish.
        """
        n_p = pilot_size(self.n_s, config)
        most, dof = int(n_p.max()), (n_p - 1).clamp_min(1)
        pilot = torch.arange(most) < n_p[..., None]
        w = torch.where(pilot, self._drawn_w[..., :most], 0)
        mean = w.sum(-1) / n_p.clamp_min(1)
        off = torch.where(pilot, w - mean[..., None], 0)
        sigma = (off.square().sum(-1) / dof).sqrt().double()
        total = (self._d_fixed + self.n_s * mean).double()
        c = self.n_s * sigma / total.clamp_min(TINY)
        if config.guarantee == "denominator":
            return n_p, torch.zeros_like(c), torch.where(total < TINY, torch.inf, c)
        h = torch.arange(len(self.fixed)) // (len(self.fixed) // len(self.rows.v))
        terms = w[..., None] * self.rows.v[h[:, None, None], self.order[..., :most]]  # (R, H, T, pilot, Dv)
        center = terms.sum(-2) / n_p.clamp_min(1)[..., None]
        off = torch.where(pilot[..., None], terms - center[..., None, :], 0)
        trace = off.square().sum((-1, -2)).double() / dof
        norm = (self._n_fixed + self.n_s[..., None] * center).norm(dim=-1).double()
        a = self.n_s * trace.sqrt() / norm.clamp_min(TINY)
        return n_p, torch.where((norm < TINY) | (total < TINY), torch.inf, a), c

    def budget(
        self, config: VAttentionConfig, spread: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Int[Tensor, "R H T"]:
        """How many keys the promise needs in each order."""
        n_p, a, c = self.spread(config) if spread is None else spread
        return round_budget(needed_draws(a, c, config), self.n_s, pilot=n_p, fpc=config.uses_fpc)

    def density(self, b: Int[Tensor, "R H T"]) -> Float[Tensor, "R H T"]:
        """Distinct keys read over keys visible."""
        return (self.n_f + b) / self.rows.count

    def weights(self, b: Int[Tensor, "R H T"]) -> Float[Tensor, "R H T n"]:
        """``w`` of what is read, the sample's times n_s / b: their sum estimates D, their product with V estimates N."""
        return self._w_fixed + self.rows.w * (self.rank < b[..., None]) * (self.n_s / b.clamp_min(1))[..., None]

    def denominator(self, b: Int[Tensor, "R H T"]) -> Float[Tensor, "R H T"]:
        """The estimate of D."""
        drawn = self._drawn_total.gather(-1, (b - 1).clamp_min(0)[..., None])[..., 0]
        return (self._d_fixed + torch.where(b > 0, drawn * self.n_s / b.clamp_min(1), 0)).to(self.rows.w.dtype)

    def output(self, b: Int[Tensor, "R H T"]) -> Float[Tensor, "R H T Dv"]:
        """The estimate of the output."""
        weights = self.weights(b)
        return self.rows.times_v(weights) / weights.sum(-1, keepdim=True).clamp_min(TINY)
