"""Sampling primitives of masked diffusion: Gumbel noise, filters, confidences, transfer counts, stable ranks.

The law of the draws and the ranks of confidences are computed in float64: low precision Gumbel noise lowers the quality of
samples (Zheng et al. 2024, arXiv:2409.02908).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay._errors import InputError


def log_probability(logits: Float[Tensor, "n V"], tokens: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Log-probability of a token a row, from a float64 softmax. (n,), at most 0; NaN where a logit is NaN."""
    wide = logits.double()
    return wide.gather(1, tokens[:, None])[:, 0] - wide.logsumexp(1)


def confidence(
    kind: str, logits: Float[Tensor, "n V"], tokens: Int[Tensor, "n"], generator: torch.Generator | None = None
) -> Float[Tensor, "n"]:
    """How sure the model is of each candidate. Larger is surer.

    Parameters
    ----------
    kind
        With p the float64 softmax of the logits and v the sampled token: ``"max_prob"`` p(v); ``"margin"`` p1 - p2 of the
        two largest; ``"neg_entropy"`` sum of p log p (at most 0); ``"logit_margin"`` z1 - z2 of the two largest logits;
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
