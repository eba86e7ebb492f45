"""The obvious, slow versions: kept keys and values are put back by hand in full forwards, and the guider reads everything anew."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.mdlm import MaskedDiffusionLM

from ._matching import MatchRule


class KeptColumns:
    """Full forwards of a model in which some columns keep the keys and values (before rotation) of an earlier forward.

    Parameters
    ----------
    model
        Its key and value projections get hooks, until `release`.
    """

    def __init__(self, model: MaskedDiffusionLM) -> None:
        self.model, self.kept, self.lent = model, 0, 0
        self.outputs: dict[tuple[int, str], Tensor] = {}
        self._handles = [
            projection.register_forward_hook(self._hook((index, name)))
            for index, layer in enumerate(model.model.layers)
            for name, projection in (("k", layer.self_attn.k_proj), ("v", layer.self_attn.v_proj))
        ]

    def _hook(self, key: tuple[int, str]) -> Callable[[Any, Any, Tensor], Tensor]:
        def put_back(module: Any, args: Any, output: Tensor) -> Tensor:
            stored, used = output.clone(), output.clone()
            if self.kept:
                stored[:, : self.kept] = self.outputs[key][:, : self.kept]
                used[:, : self.kept - self.lent] = self.outputs[key][:, : self.kept - self.lent]
            self.outputs[key] = stored
            return used

        return put_back

    def logits(self, x: Int[Tensor, "B T"], kept: int, lent: int = 0) -> Float[Tensor, "B T V"]:
        """Aligned logits of a canvas whose first ``kept`` columns have the keys and values that they had before.

        The last ``lent`` of them are fresh for this call only: the column left of a region whose logits are shifted.
        """
        self.kept, self.lent = kept, lent
        with torch.no_grad():
            return self.model(x).logits

    def release(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def block_freecache(
    model: MaskedDiffusionLM,
    prompt: Int[Tensor, " L0"],
    max_new_tokens: int,
    block_length: int,
    freeze: Literal["settled", "immediate"],
    steps: int | None = None,
) -> tuple[Int[Tensor, " T"], list[Float[Tensor, "T V"]]]:
    """FreeCache's block form as its specification reads, under the low-confidence schedule.

    Returns
    -------
    The canvas, and the logits of each forward (mask id excluded; only those right of the kept columns mean anything).

    Source: Hu et al. 2025 (arXiv:2505.21467), FreeCache.
    """
    mask = model.mask_token_id
    x = torch.cat([prompt, torch.full((max_new_tokens,), mask)])
    blocks = max_new_tokens // block_length
    in_block = (steps or max_new_tokens) // blocks
    kept, seen = KeptColumns(model), []
    try:
        for i in range(blocks):
            start = len(prompt) + i * block_length
            for j in range(in_block):
                begin = start - block_length if freeze == "settled" and i > 0 and j == 0 else start
                lent = int(model.config.logit_shift and begin == start)
                logits = kept.logits(x[None], *((0, 0) if i == j == 0 else (begin, lent)))[0]
                logits[:, mask] = -torch.inf
                seen.append(logits)
                probability, token = logits.double().softmax(1).max(1)
                probability[x != mask] = -1
                probability[:start] = -1
                probability[start + block_length :] = -1
                share = block_length // in_block + (j < block_length % in_block)
                for column in probability.argsort(descending=True, stable=True)[:share].tolist():
                    x[column] = token[column]
    finally:
        kept.release()
    return x, seen


def guided_decoding(
    model: MaskedDiffusionLM, guider: Any, prompt: Int[Tensor, " L0"], max_new_tokens: int, rule: MatchRule
) -> tuple[Int[Tensor, " T"], list[int]]:
    """Guided Diffusion without any cache: draft all masks, let the guider read everything, commit what it agrees with.

    Returns
    -------
    The canvas without an early stop, and how many drafts were agreed with at each step.

    Source: Hu et al. 2025 (arXiv:2505.21467), guided diffusion.
    """
    mask = model.mask_token_id
    x = torch.cat([prompt, torch.full((max_new_tokens,), mask)])
    accepted = []
    with torch.no_grad():
        while (masks := (x == mask).nonzero()[:, 0]).numel():
            logits = model(x[None]).logits[0, masks]
            logits[:, mask] = -torch.inf
            drafts = logits.argmax(1)
            first = int(masks[0])
            read = torch.cat([x[:first], drafts])
            probs = guider(input_ids=read[None]).logits[0, first - 1 : -1].float().softmax(1)
            agreed = rule.agrees(probs, drafts).tolist()
            k = agreed.index(False) if False in agreed else len(agreed)
            accepted.append(k)
            x[first : first + max(k, 1)] = drafts[: max(k, 1)]
    return x, accepted
