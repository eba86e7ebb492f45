"""Sampling primitives of masked diffusion: Gumbel noise, filters, confidences, transfer counts, stable ranks.

The law of the draws and the ranks of confidences are computed in float64: low precision Gumbel noise lowers the quality of
samples (Zheng et al. 2024, arXiv:2409.02908).
"""

from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError

Number = TypeVar("Number", int, Tensor)


def add_gumbel(
    logits: Float[Tensor, "*batch V"], temperature: float, generator: torch.Generator | None = None
) -> Float[Tensor, "*batch V"]:
    """Logits with noise, whose argmax is a draw from softmax(logits / temperature).

    In logarithms, where nothing overflows: the argmax is that of exp(logits) / (-log u)**temperature.

    Parameters
    ----------
    logits : (..., V)
    temperature
        0 returns the logits as they are.
    generator
        One U(0, 1) is drawn for each logit, in order, in float64.

    Returns
    -------
    (..., V), float64 unless the temperature is 0.

    Source: Nie et al. 2025 (LLaDA, arXiv:2502.09992), released sampler.
    """
    if temperature == 0:
        return logits
    noise = torch.rand(logits.shape, generator=generator, device=logits.device, dtype=torch.float64)
    return logits.double() - noise.log_().neg_().log_().mul_(temperature)


def filter_logits(
    logits: Float[Tensor, "n V"],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    first: Literal["top_k", "top_p"] = "top_k",
) -> Float[Tensor, "n V"]:
    """Logits over temperature, with what the filters exclude at -inf.

    Parameters
    ----------
    logits : (n, V)
    temperature
        0 leaves the logits undivided.
    top_k
        Keeps the k largest logits; of equal ones, those with lower ids.
    top_p
        Keeps the most likely tokens up to and including the first at which their sum exceeds top_p.
    first
        Which filter is applied first; the second sees what the first has left.

    Returns
    -------
    (n, V); the argument itself if there is nothing to do.
    """
    if temperature not in (0, 1):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if first == "top_k":
        return _keep_top_p(_keep_top_k(logits, top_k), top_p)
    return _keep_top_k(_keep_top_p(logits, top_p), top_k)


def _keep_top_k(logits: Float[Tensor, "n V"], k: int | None) -> Float[Tensor, "n V"]:
    if k is None or k >= logits.shape[1]:
        return logits
    least = logits.topk(k).values[:, -1:]
    more, equal = logits > least, logits == least
    room = k - more.sum(1, keepdim=True)
    return logits.masked_fill(~(more | equal & (equal.cumsum(1) <= room)), -torch.inf)


def _keep_top_p(logits: Float[Tensor, "n V"], p: float | None) -> Float[Tensor, "n V"]:
    if p is None or p == 1:
        return logits
    order = logits.argsort(dim=1, descending=True, stable=True)
    probability = logits.gather(1, order).double().softmax(1)
    within = probability.cumsum(1) - probability <= p
    return logits.masked_fill(~torch.empty_like(within).scatter_(1, order, within), -torch.inf)


def log_probability(logits: Float[Tensor, "n V"], tokens: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Log-probability of one token a row, from a float64 softmax. (n,), at most 0; NaN where a logit is NaN."""
    wide = logits.double()
    return wide.gather(1, tokens[:, None])[:, 0] - wide.logsumexp(1)


def confidence(
    kind: str, logits: Float[Tensor, "n V"], tokens: Int[Tensor, "n"], generator: torch.Generator | None = None
) -> Float[Tensor, "n"]:
    """How sure the model is of each candidate. Larger is surer.

    Parameters
    ----------
    kind
        With p the float64 softmax of the logits z and v the sampled token: ``"max_prob"`` p(v); ``"margin"`` p1 - p2 of
        the two largest; ``"neg_entropy"`` the sum of p log p (at most 0); ``"logit_margin"`` z1 - z2 of the two largest;
        ``"random"`` U(0, 1).
    logits : (n, V)
        Of the distribution that is judged; -inf for tokens that it excludes.
    tokens : (n,)
        The sampled tokens.
    generator
        For ``"random"``.

    Returns
    -------
    (n,), float64.

    Raises
    ------
    InputError
        If the kind is unknown.

    Source: max_prob of LLaDA and Fast-dLLM, margin and neg_entropy of Dream (released samplers; the sign of the entropy
    is that of "surer", which one of them has wrong).
    """
    if kind == "max_prob":
        return log_probability(logits, tokens).exp()
    if kind == "margin":
        top = logits.double().softmax(1).topk(2).values
        return top[:, 0] - top[:, 1]
    if kind == "neg_entropy":
        return -torch.special.entr(logits.double().softmax(1)).sum(1)
    if kind == "logit_margin":
        top = logits.topk(2).values.double()
        return (top[:, 0] - top[:, 1]).clamp(max=torch.finfo(torch.float64).max)
    if kind == "random":
        return torch.rand(len(logits), generator=generator, device=logits.device, dtype=torch.float64)
    raise InputError(
        f"confidence {kind!r} is unknown, expected max_prob, margin, neg_entropy, logit_margin or random: choose one"
    )


def num_transfer(masked: int, steps: int) -> list[int]:
    """How many of so many masks each step commits: equal shares, the first steps one more.

    Fewer masks than steps give zeros at the end; such steps commit nothing and need no forward.

    Source: Nie et al. 2025 (LLaDA), released sampler.
    """
    return [share(masked, steps, step) for step in range(steps)]


def share(masked: Number, steps: Number, step: Number) -> Number:
    """What step number ``step`` (from 0) of ``steps`` commits of ``masked`` masks; ints, or tensors with an entry a row."""
    return masked // steps + (step < masked % steps)


def most_confident(confidence: Float[Tensor, "B w"], count: Int[Tensor, "B"]) -> Bool[Tensor, "B w"]:
    """The count[i] largest entries of row i above -inf; of equal ones, those further left."""
    order = confidence.argsort(dim=1, descending=True, stable=True)
    within = torch.arange(confidence.shape[1], device=confidence.device) < count.to(confidence.device)[:, None]
    return torch.empty_like(within).scatter_(1, order, within) & (confidence > -torch.inf)
