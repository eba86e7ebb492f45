"""Training losses of masked and of block diffusion, and a likelihood by Monte Carlo.

Both losses are upper bounds of the negative log likelihood. A token is masked with probability p, and the cross entropy
of a masked token counts 1/p times, so that the expectation does not depend on how the rates p are drawn.
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from assay._errors import InputError
from assay.mdlm._masks import positions_from_padding, two_stream_mask

EPS = 1e-3  # of the smallest rate: 1/p stays below 1,000

Spread = Literal["uniform", "stratified", "antithetic"]
Weighting = Literal["inverse", "cart"]


class Noised(NamedTuple):
    """Tokens of which some are masked: ``input_ids`` and ``masked``, both (rows, columns)."""

    input_ids: Tensor
    masked: Tensor


def mask_rates(
    count: int,
    *,
    spread: Spread = "uniform",
    span: tuple[float, float] = (0.0, 1.0),
    eps: float = EPS,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " count"]:
    """Draw masking rates p = (1 - eps) t + eps, where each t by itself is uniform over ``span``.

    Parameters
    ----------
    count
        How many: one a row, or one a block.
    spread
        How the t of one call lie to each other: *uniform* independent; *stratified* one in each of ``count`` equal parts
        of the span, in random order; *antithetic* in pairs whose mean is the middle of the span.
    span
        Of t, within [0, 1].
    generator
        The source of chance; by default torch's own.

    Source: arXiv:2502.09992, section 2.2 and appendix A (eps in its released code).
    """
    low, high = span
    if not 0 <= low < high <= 1:
        raise InputError(f"the span {span} of t is not within 0 and 1: give (low, high) with 0 <= low < high <= 1")
    if not 0 < eps < 1:
        raise InputError(f"eps {eps} is no smallest masking rate: give one between 0 and 1")
    uniform = torch.rand(count, generator=generator)
    if spread == "stratified":
        uniform = (torch.randperm(count, generator=generator) + uniform) / count
    elif spread == "antithetic":
        pairs = uniform[: (count + 1) // 2]
        uniform = torch.cat([pairs, 1 - pairs])[:count]
    elif spread != "uniform":
        raise InputError(f"there is no way {spread!r} to spread t: use uniform, stratified or antithetic")
    t = low + (high - low) * uniform
    return (1 - eps) * t + eps


def mask_tokens(
    input_ids: Int[Tensor, "rows columns"],
    maskable: Bool[Tensor, "rows columns"],
    rates: Float[Tensor, "rows columns"],
    mask_token_id: int,
    *,
    generator: torch.Generator | None = None,
) -> Noised:
    """Mask each maskable token with its own probability, independently of the others."""
    chance = torch.rand(input_ids.shape, generator=generator).to(input_ids.device)
    masked = maskable & (chance < rates)
    return Noised(torch.where(masked, mask_token_id, input_ids), masked)


def cart_weights(
    masked: Bool[Tensor, "rows columns"], visible: Bool[Tensor, "rows columns"] | None = None, *, share: float = 0.3
) -> Float[Tensor, "rows columns"]:
    """Weights that are large where clean tokens are near; 0 where nothing is masked.

    w(n) = 1/2 sum over unmasked i of q (1 - q)^(abs(n - i) - 1), with q = ``share``: a two-sided geometric law of the
    distance.

    Parameters
    ----------
    masked
        Which tokens are masked.
    visible
        Which are there at all: padding is no context. By default all.

    Source: arXiv:2508.15487 (context-adaptive noise rescheduling at token level).
    """
    if not 0 < share < 1:
        raise InputError(f"the share {share} of a geometric law is not between 0 and 1")
    place = torch.arange(masked.shape[1], device=masked.device)
    distance = (place[:, None] - place).abs()
    kernel = 0.5 * share * (1 - share) ** (distance - 1).double()
    kernel.fill_diagonal_(0.0)
    clean = ~masked if visible is None else ~masked & visible
    return ((clean.double() @ kernel) * masked).float()


def cut_rows(
    attention_mask: Bool[Tensor, "rows columns"], *, share: float = 0.01, generator: torch.Generator | None = None
) -> Bool[Tensor, "rows columns"]:
    """Shorten a few pre-training rows to a random length, so that a model sees texts that end early.

    Parameters
    ----------
    attention_mask
        Which tokens are there.
    share
        Of the rows that are cut. The length of a cut row is uniform from 1 to all columns.

    Source: arXiv:2502.09992, section 2.2: 1 % of the rows.
    """
    rows, columns = attention_mask.shape
    cut = torch.rand(rows, generator=generator) < share
    length = torch.randint(1, columns + 1, (rows,), generator=generator)
    length = torch.where(cut, length, columns).to(attention_mask.device)
    return attention_mask & (torch.arange(columns, device=attention_mask.device) < length[:, None])


def masked_diffusion_loss(
    model: Any,
    input_ids: Int[Tensor, "rows columns"],
    maskable: Bool[Tensor, "rows columns"],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Int[Tensor, "rows columns"] | None = None,
    spread: Spread = "uniform",
    span: tuple[float, float] = (0.0, 1.0),
    eps: float = EPS,
    weighting: Weighting = "inverse",
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """The masked diffusion loss of a batch, in nats a token.

    Mean over rows of: sum over masked tokens of weight times cross entropy, divided by the row's maskable tokens. With
    all tokens maskable this is the pre-training loss, with the response's alone that of fine-tuning.

    Parameters
    ----------
    model
        A `MaskedDiffusionLM`, or what is called like one.
    input_ids
        Clean tokens.
    maskable
        Those that may be masked. Fillers after a response belong to it: from them a model learns to stop. A shifted
        model has nothing that predicts the first visible token of a row: it is never masked there.
    attention_mask, position_ids
        As the model takes them.
    spread, span, eps
        Of the masking rates, one a row: `mask_rates`.
    weighting
        *inverse* (1/p, a bound of the likelihood) or *cart* (`cart_weights`).
    generator
        The source of chance; by default torch's own.

    Raises
    ------
    InputError
        If a row has nothing to mask, or the model attends block by block (`block_diffusion_loss` is for those).

    Source: arXiv:2502.09992, equations 3 and 5.
    """
    if model.config.attention == "block":
        raise InputError("this model attends block by block: train it with block_diffusion_loss")
    if model.config.logit_shift:
        maskable = maskable & ~_first_visible(attention_mask, input_ids)
    size = maskable.sum(1)
    if not bool(size.all()):
        row = int((size == 0).nonzero()[0])
        raise InputError(f"row {row} has no token that may be masked: leave it out, or mark its response as maskable")
    rates = mask_rates(len(input_ids), spread=spread, span=span, eps=eps, generator=generator).to(input_ids.device)
    noised = mask_tokens(
        input_ids, maskable, rates[:, None].expand(input_ids.shape), model.config.mask_token_id, generator=generator
    )
    if weighting == "inverse":
        weights = (1 / rates)[:, None].expand(input_ids.shape)
    elif weighting == "cart":
        padding_mask = attention_mask is not None and attention_mask.dim() == 2
        weights = cart_weights(noised.masked, attention_mask.bool() if padding_mask else None)  # type: ignore[union-attr]
    else:
        raise InputError(f"there is no weighting {weighting!r}: use inverse or cart")
    logits = model(
        input_ids=noised.input_ids, attention_mask=attention_mask, position_ids=position_ids, logits_for=noised.masked
    ).logits
    return (_row_sums(logits, input_ids, noised.masked, weights) / size).mean()


def block_diffusion_loss(
    model: Any,
    input_ids: Int[Tensor, "rows columns"],
    prompt_length: int,
    *,
    block_size: int | None = None,
    attention_mask: Bool[Tensor, "rows columns"] | None = None,
    spread: Spread = "uniform",
    span: tuple[float, float] = (0.0, 1.0),
    eps: float = EPS,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """The block diffusion loss of a batch, in nats a response token: every block given the clean blocks before it.

    One forward gives all blocks: the model reads the clean text followed by a noisy copy of the response, whose blocks
    see the clean blocks before them and themselves. Each block has a masking rate of its own.

    Parameters
    ----------
    model
        A `MaskedDiffusionLM` without logit shift.
    input_ids
        Clean prompt and response. Prompts of different lengths are padded on the left.
    prompt_length
        Columns of the prompt, padding included.
    block_size
        Tokens a block, counted from the start of the response; by default the model's. The last block may be short.
    attention_mask
        False at padding.
    spread, span, eps, generator
        Of the masking rates, one a block: `mask_rates`.

    Raises
    ------
    InputError
        If the model is shifted, or no response is left, or no block size is known.

    Source: arXiv:2503.09573, section 3; arXiv:2510.06303.
    """
    if model.config.logit_shift:
        raise InputError("block diffusion asks for the token at its own place: this model is shifted by one")
    size = model.config.block_size if block_size is None else block_size
    if not size or size < 1:
        raise InputError(f"a block size of {size} is none: give block_size, the tokens of a block")
    rows, columns = input_ids.shape
    length = columns - prompt_length
    if not 0 <= prompt_length < columns:
        raise InputError(f"a prompt of {prompt_length} of {columns} columns leaves no response to learn from")

    blocks = -(-length // size)
    rates = mask_rates(rows * blocks, spread=spread, span=span, eps=eps, generator=generator)
    rates = rates.view(rows, blocks).repeat_interleave(size, dim=1)[:, :length].to(input_ids.device)
    response = input_ids[:, prompt_length:]
    noised = mask_tokens(
        response, torch.ones_like(response, dtype=torch.bool), rates, model.config.mask_token_id, generator=generator
    )
    asked = torch.cat([torch.zeros_like(input_ids, dtype=torch.bool), noised.masked], 1)
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
    positions = positions_from_padding(real)
    logits = model(
        input_ids=torch.cat([input_ids, noised.input_ids], 1),
        attention_mask=two_stream_mask(positions, prompt_length, size, real),
        position_ids=torch.cat([positions, positions[:, prompt_length:]], 1),
        logits_for=asked,
    ).logits
    return _row_sums(logits, response, noised.masked, 1 / rates).sum() / (rows * length)


@torch.no_grad()
def log_likelihood(
    model: Any,
    prompt: Int[Tensor, " prompt"],
    answer: Int[Tensor, " answer"],
    n_mc: int = 128,
    *,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> float:
    """An estimate of log p(answer | prompt), in nats: a lower bound in expectation.

    The mean over draws of L/k times the log probabilities of k masked tokens of the answer, given all others. k is
    uniform over 1 to L, stratified over the draws; which tokens are masked is uniform too. It has less variance than
    masking with a random rate.

    Parameters
    ----------
    prompt, answer
        Tokens. The prompt may be empty for a model without shift.
    n_mc
        Draws. For an answer of one token a single one is exact.
    batch_size
        Draws a forward.

    Raises
    ------
    InputError
        If the answer is empty, the model is a block model, or a shifted model has no prompt.

    Source: arXiv:2502.09992, equation 6 and appendix B.
    """
    length, start = len(answer), len(prompt)
    if not length or n_mc < 1:
        raise InputError(
            f"an answer of {length} tokens and {n_mc} draws give no likelihood: at least 1 of each is needed"
        )
    if model.config.attention == "block":
        raise InputError("this model attends block by block: its bound is block_diffusion_loss")
    if model.config.logit_shift and not start:
        raise InputError("a shifted model says nothing of the first token: give a prompt of at least one token")
    strata = (torch.arange(n_mc) + torch.rand(n_mc, generator=generator)) / n_mc
    masks = (strata * length).long().clamp(max=length - 1) + 1
    order = torch.rand(n_mc, length, generator=generator).argsort(1).argsort(1)  # a random rank of each token
    chosen = order < masks[:, None]
    weights = (length / masks)[:, None].expand(chosen.shape)

    text = torch.cat([prompt, answer])
    total = 0.0
    for rows, scale in zip(chosen.split(batch_size), weights.split(batch_size)):
        masked = torch.cat([torch.zeros(len(rows), start, dtype=torch.bool), rows], 1).to(text.device)
        clean = text.expand(len(rows), -1)
        noisy = torch.where(masked, model.config.mask_token_id, clean)
        logits = model(input_ids=noisy, logits_for=masked).logits
        sums = _row_sums(logits, clean[:, start:], masked[:, start:], scale.to(text.device))
        total -= float(sums.double().sum())
    return total / n_mc


def _row_sums(
    logits: Float[Tensor, "masked vocabulary"],
    input_ids: Int[Tensor, "rows columns"],
    masked: Bool[Tensor, "rows columns"],
    weights: Float[Tensor, "rows columns"],
) -> Float[Tensor, " rows"]:
    """Weighted cross entropy of each row's masked tokens; half precisions are summed in float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    each = cross_entropy(logits, input_ids[masked].long(), reduction="none") * weights[masked]
    return each.new_zeros(len(input_ids)).index_add(0, masked.nonzero()[:, 0], each)


def _first_visible(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """True at the first token of each row that is no padding."""
    first = torch.zeros_like(input_ids, dtype=torch.bool)
    if attention_mask is None or attention_mask.dim() != 2:
        first[:, 0] = True
        return first
    return first.scatter(1, attention_mask.long().argmax(1, keepdim=True), True)
