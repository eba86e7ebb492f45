"""What the closed form is compared with: SVD, FWSVD, ASVD, SVD-LLM, AdaSVD and ranks that are learned (Dobi-SVD's idea).

The factorisations of the first four are in `assay.lm`; here is what AdaSVD and Dobi-SVD add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from assay._errors import InputError
from assay.lm._blocks import bias_of, blocks, inputs_of, replace, run_block, weight_of
from assay.lm._calibrate import Site, walk
from assay.lm._lowrank import Factors
from assay.methods.saes_svd._closed import Whitened, leading

_WIDTH = 10.0  # tau, of a gate, in ranks


def adasvd_factors(W: Float[Tensor, "m n"], moments: Whitened, rank: int, sweeps: int = 3) -> Factors:
    """Least squares for A, then for B, again and again, from SVD-LLM's factors.

    They minimise \\|(A B - W) X\\|, of which SVD-LLM's factors are the minimum already: with the same second moments the sweeps
    change nothing but rounding. What is AdaSVD's own are the ratios of `adasvd_ratios`.

    Source: Li et al. 2025, "AdaSVD: Adaptive singular value decomposition for large language models".
    """
    target = W.double() @ moments.R
    left, right, values = leading(target, rank)
    A, BR = left * values, right.T
    for _ in range(sweeps):
        A = target @ torch.linalg.pinv(BR)
        BR = torch.linalg.pinv(A) @ target
    return Factors(A.to(W.dtype), moments.back(BR).to(W.dtype))


@torch.no_grad()
def adasvd_ratios(model: nn.Module, batches: Sequence[Int[Tensor, "_ _"]], ratio: float) -> list[float]:
    """A ratio for each block: less is removed where the block changes its input more.

    importance = 1 - mean cosine of a block's input and output, over its mean; ratio * (2 - importance), within half and one and a
    half of the ratio, then shifted so that the mean is the ratio.
    """
    importance = torch.zeros(len(blocks(model)), dtype=torch.float64)
    for batch in batches:
        entering = inputs_of(model, {"input_ids": batch})
        hidden = entering.hidden
        for number, (block, arguments) in enumerate(zip(blocks(model), entering.arguments, strict=True)):
            after = run_block(block, hidden, arguments)
            importance[number] += float((1 - cosine_similarity(hidden.float(), after.float(), dim=-1)).mean()) * len(
                batch
            )
            hidden = after
    wanted = ratio * (2 - importance / importance.mean())
    low, high = 0.5 * ratio, min(1.5 * ratio, 0.99)
    found = wanted.clamp(low, high)
    for _ in range(50):  # clipping moves the mean, and moving it back clips again
        found = (found + (ratio - found.mean())).clamp(low, high)
    return [float(x) for x in found]


class Learned(NamedTuple):
    """Of `learn_ranks`.

    Attributes
    ----------
    factors
        Of each Linear, by block and name; None where it stays dense.
    losses
        Of the steps, language-model loss alone.
    """

    factors: dict[tuple[int, str], Factors | None]
    losses: list[float]


def learn_ranks(
    model: nn.Module,
    batches: Sequence[Int[Tensor, "_ _"]],
    ratio: float,
    *,
    steps: int = 100,
    rows: int = 4,
    length: int = 128,
    rate: float = 0.1,
    seed: int = 0,
    autocast: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> Learned:
    """A rank for each Linear by gradient: every truncation becomes a smooth gate whose place is learned. The model is not changed.

    With U the eigenvectors of W H W^T (original inputs) a Linear computes U diag(g) U^T W x, g_i = (1 + tanh((k - i) / 10)) / 2.
    Adam moves one real k a Linear on the language-model loss and 10 (ratio reached - ratio wanted)^2; then k is rounded. There is
    no differentiation through an SVD, as there is in Dobi-SVD: this is its idea, reimplemented small.

    Parameters
    ----------
    batches
        Token ids; steps draw windows of ``length`` from their rows.
    rate
        Of Adam, in shares of the uniform rank.

    Source: Qinsi et al. 2025, "Dobi-SVD: Differentiable SVD for LLM compression".
    """
    bases: dict[tuple[int, str], tuple[Tensor, Tensor, nn.Module]] = {}

    def visit(site: Site) -> None:
        W = weight_of(site.linear).detach()
        m, n = W.shape
        whole = W.double() @ site.stats.H.double() @ W.double().T
        _, vectors = torch.linalg.eigh(whole)
        U = vectors.flip(1)[:, : max(1, m * n // (m + n))].to(W.dtype)  # a larger rank would save nothing
        bases[site.block, site.name] = (U, U.T @ W, site.linear)

    walk(model, batches, visit, inputs="original")
    tokens = torch.cat([batch.reshape(-1, batch.shape[-1]) for batch in batches])
    length = min(length, tokens.shape[1])
    home = next(model.parameters()).device
    sizes = torch.tensor([[U.shape[0], P.shape[1]] for U, P, _ in bases.values()], dtype=torch.float64)
    costs, dense = sizes.sum(1), sizes.prod(1)
    uniform = (1 - ratio) * dense / costs
    most = dense / costs  # from here on a Linear is smaller as it was
    shares = nn.Parameter(torch.ones(len(bases)))  # of the uniform rank
    gated = [_Gated(U, P, linear) for U, P, linear in bases.values()]
    optimiser = torch.optim.Adam([shares], lr=rate)
    generator = torch.Generator().manual_seed(seed)
    asked = [(p, p.requires_grad) for p in model.parameters()]
    losses = []
    try:
        for parameter, _ in asked:
            parameter.requires_grad_(False)
        for (number, name), gate in zip(bases, gated, strict=True):
            replace(blocks(model)[number], name, gate)
        for step in range(steps):
            picked = torch.randint(len(tokens), (rows,), generator=generator)
            begin = int(torch.randint(tokens.shape[1] - length + 1, (1,), generator=generator))
            ids = tokens[picked, begin : begin + length].to(home)
            ranks = shares * uniform.float()
            for gate, rank in zip(gated, ranks, strict=True):
                gate.rank = rank
            with torch.autocast(home.type, torch.bfloat16, enabled=autocast):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            reached = 1 - (ranks * costs.float()).sum() / dense.float().sum()
            optimiser.zero_grad()
            (loss + 10 * (reached - ratio) ** 2).backward()
            optimiser.step()
            with torch.no_grad():
                shares.clamp_(torch.full_like(shares, 0.05), (most / uniform).float())
            losses.append(float(loss))
            if on_step is not None:
                on_step(step, steps)
    finally:
        for number, name in bases:
            replace(blocks(model)[number], name, bases[number, name][2])
        for parameter, before in asked:
            parameter.requires_grad_(before)
    wanted = shares.detach().double() * uniform
    for _ in range(50):  # to the budget; what reaches its most leaves the rest to the others
        wanted = (wanted * (1 - ratio) * dense.sum() / (wanted * costs).sum()).minimum(most)
    factors: dict[tuple[int, str], Factors | None] = {}
    for place, ((where, (U, P, _)), rank) in enumerate(zip(bases.items(), wanted.tolist(), strict=True)):
        whole = max(1, round(rank))
        factors[where] = None if whole * costs[place] >= dense[place] else Factors(U[:, :whole], P[:whole])
    return Learned(factors, losses)


class _Gated(nn.Module):
    """U diag(g) P x + bias."""

    def __init__(self, U: Tensor, P: Tensor, linear: nn.Module) -> None:
        super().__init__()
        if U.shape[1] != P.shape[0]:
            raise InputError(f"bases of {tuple(U.shape)} and {tuple(P.shape)} do not fit")
        self.U, self.P = U, P
        self.bias = bias_of(linear)
        self.rank: Tensor = torch.tensor(float(P.shape[0]))
        self.index = torch.arange(P.shape[0], dtype=torch.float32, device=P.device)

    def forward(self, x: Tensor) -> Tensor:
        gate = (1 + torch.tanh((self.rank - self.index) / _WIDTH)) / 2
        inner = nn.functional.linear(x, self.P) * gate.to(x.dtype)
        return nn.functional.linear(inner, self.U, self.bias)


__all__ = ["Learned", "adasvd_factors", "adasvd_ratios", "learn_ranks"]
