"""How well a model predicts texts, and how far it is from another: losses, perplexity, KL divergence, agreement, cosines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from assay._errors import InputError
from assay.lm._blocks import blocks

Tokens = Int[Tensor, " _"] | Sequence[int]


class Losses(NamedTuple):
    """Of each document.

    Attributes
    ----------
    nll : (documents,) float64
        Mean nats a token, the first token not counted.
    tokens : (documents,)
        How many were counted.
    """

    nll: Tensor
    tokens: Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean over all tokens."""
        return float(((self.nll * self.tokens).sum() / self.tokens.sum()).exp())


class Distances(NamedTuple):
    """How far a model's next-token distributions are from another's, document by document.

    Attributes
    ----------
    kl : (documents,) float64
        Mean of KL(original, model) in nats a token.
    agreement : (documents,) float64
        Share of tokens at which both find the same token the most likely.
    """

    kl: Tensor
    agreement: Tensor


@torch.no_grad()
def perplexity(
    model: nn.Module,
    documents: Sequence[Tokens],
    *,
    length: int = 2048,
    stride: int | None = None,
    batch_size: int = 8,
    autocast: bool = False,
) -> Losses:
    """The loss of a causal model on documents.

    A document longer than ``length`` is read in windows; each token is scored once, in the first window that holds it. With
    a stride shorter than the window it then has at least ``length - stride`` tokens before it.

    Parameters
    ----------
    documents
        Token ids of each, at least two.
    length
        Of a window, in tokens.
    stride
        From one window to the next; None: ``length``, no overlap.
    batch_size
        Windows a forward.
    autocast
        Multiply in bfloat16: faster where the processor can; the losses move a little.

    Raises
    ------
    InputError
        If there is no document, one is shorter than two tokens, or length and stride do not fit each other.
    """
    stride = length if stride is None else stride
    if length < 2 or not 1 <= stride <= length:
        raise InputError(f"windows of {length} tokens, {stride} apart, leave gaps: give a stride of 1 to {length}")
    ids = _as_tensors(documents)
    windows: list[tuple[int, Tensor, int]] = []  # document, tokens, from which token on the loss counts
    for number, document in enumerate(ids):
        scored = 1
        for begin in range(0, len(document), stride):
            # Without overlap the last token of a window also stands before the first of the next.
            first = max(0, begin - (stride == length and begin > 0))
            part = document[first : begin + length]
            if begin + len(part) > scored and len(part) > 1:
                windows.append((number, part, max(1, scored - first)))
                scored = first + len(part)
            if begin + length >= len(document):
                break
    sums = torch.zeros(len(ids), dtype=torch.float64)
    counts = torch.zeros(len(ids), dtype=torch.int64)
    for batch in _batches(windows, batch_size):
        with _precision(model, autocast):
            logits = model(**_padded([part for _, part, _ in batch], model), use_cache=False).logits
        for row, (number, part, begin) in enumerate(batch):
            loss = cross_entropy(
                logits[row, begin - 1 : len(part) - 1].float(), part[begin:].to(logits.device), reduction="sum"
            )
            sums[number] += float(loss)
            counts[number] += len(part) - begin
    return Losses(sums / counts, counts)


@torch.no_grad()
def distances(
    model: nn.Module, original: nn.Module, documents: Sequence[Tokens], *, batch_size: int = 8, autocast: bool = False
) -> Distances:
    """How a model's predictions differ from those of the one that it was made from.

    Parameters
    ----------
    documents
        Token ids of each, read whole.
    """
    ids = _as_tensors(documents)
    kl, agreement = [], []
    for batch in _batches(ids, batch_size):
        with _precision(model, autocast):
            found = [m(**_padded(batch, m), use_cache=False).logits for m in (original, model)]
        for row, document in enumerate(batch):
            p, q = (logits[row, : len(document) - 1].float().log_softmax(-1).cpu() for logits in found)
            kl.append(float((p.exp() * (p - q)).sum(-1).double().mean()))
            agreement.append(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    return Distances(torch.tensor(kl, dtype=torch.float64), torch.tensor(agreement, dtype=torch.float64))


@torch.no_grad()
def cosine_by_block(
    model: nn.Module, original: nn.Module, documents: Sequence[Tokens], *, batch_size: int = 8
) -> Float[Tensor, " blocks"]:
    """Mean cosine, over tokens, of the residual stream behind each block with that of the original at the same place."""
    ids = _as_tensors(documents)
    if len(blocks(model)) != len(blocks(original)):
        raise InputError(f"the models have {len(blocks(model))} and {len(blocks(original))} blocks: none to compare")
    sums = torch.zeros(len(blocks(model)), dtype=torch.float64)
    count = 0
    for batch in _batches(ids, batch_size):
        streams = []
        for m in (model, original):
            behind: list[Tensor] = []
            hooks = [
                block.register_forward_hook(
                    lambda _, __, out, behind=behind: behind.append(out if isinstance(out, Tensor) else out[0])
                )
                for block in blocks(m)
            ]
            try:
                m(**_padded(batch, m), use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
            streams.append(behind)
        for row, document in enumerate(batch):
            for number, (ours, theirs) in enumerate(zip(*streams, strict=True)):
                here, there = (stream[row, : len(document)].float().cpu() for stream in (ours, theirs))
                sums[number] += float(cosine_similarity(here, there, dim=-1).double().sum())
            count += len(document)
    return sums / count


def _as_tensors(documents: Sequence[Tokens]) -> list[Tensor]:
    ids = [torch.as_tensor(document, dtype=torch.int64) for document in documents]
    if not ids:
        raise InputError("there is no document: give at least one")
    for number, document in enumerate(ids):
        if document.ndim != 1 or len(document) < 2:
            raise InputError(
                f"document {number} has the shape {tuple(document.shape)}: give at least two tokens in a row"
            )
    return ids


def _batches(items: Sequence, size: int) -> Iterator[list]:
    if size < 1:
        raise InputError(f"a batch of {size} is none: give at least 1")
    for begin in range(0, len(items), size):
        yield list(items[begin : begin + size])


def _padded(rows: Sequence[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rows as one batch, padded on the right, where a causal model does not look."""
    device = next(model.parameters()).device
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _precision(model: nn.Module, autocast: bool) -> AbstractContextManager:
    device = next(model.parameters()).device.type
    return torch.autocast(device, torch.bfloat16) if autocast else nullcontext()
