"""How much the loss hangs on each input of each Linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from assay.lm._blocks import weight_of


def feature_importance(
    model: nn.Module, sequences: Int[Tensor, "rows tokens"] | Sequence[Int[Tensor, " _"]], linears: Iterable[nn.Module]
) -> dict[nn.Module, Tensor]:
    """d_j = sqrt(sum over outputs of E[g_ij^2]), g the gradient of a sequence's mean next-token loss.

    One backward pass a sequence; gradients of other weights are not kept, those of the Linears not longer than a pass.

    Parameters
    ----------
    sequences
        Token ids; the expectation is over them.
    linears
        Of the model.

    Returns
    -------
    dict of (n,) tensors

    Source: Hsu et al. 2022, the diagonal Fisher information summed over a row.
    """
    wanted = list(linears)
    weights: list[nn.Parameter] = [linear.get_parameter("weight") for linear in wanted]
    sums = [torch.zeros(weight_of(linear).shape[1], device=weight_of(linear).device) for linear in wanted]
    home = next(model.parameters()).device
    asked = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for parameter, _ in asked:
            parameter.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        for row in sequences:
            ids = row.to(home)[None]
            logits = model(input_ids=ids, use_cache=False).logits
            loss = cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            for total, linear, gradient in zip(sums, wanted, torch.autograd.grad(loss, weights), strict=True):
                total += (gradient if isinstance(linear, nn.Linear) else gradient.T).float().square().sum(0)
    finally:
        for parameter, before in asked:
            parameter.requires_grad_(before)
    return {linear: (total / len(sequences)).sqrt() for linear, total in zip(wanted, sums, strict=True)}
