"""The autoregressive judge: one causal language model, a KV cache for each sequence, and its roll-back."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from assay._errors import InputError

from ._matching import MatchResult, Rule, uniform_numbers


class ARGuider:
    """A causal language model that says how much of a drafted continuation it agrees with.

    It keeps the keys and values of what it has read. A call feeds only what is new, and afterwards the cells of refused
    drafts are dropped: the cache then holds the prefix and all agreed drafts but the last, which is fed next time.

    Parameters
    ----------
    model
        Any causal language model of transformers whose cache can be cut (no recurrent state), in evaluation mode.
    tokenizer
        Its tokenizer, for `TokenAligner`. None: ids are those of the diffusion model.
    device
        Where to run it. None: where it is.

    Raises
    ------
    InputError
        If the model is in training mode, where dropout would make it judge at random.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None, device: Any = None) -> None:
        if model.training:
            raise InputError(
                "the guider is in training mode, where dropout blurs its judgement: call model.eval() first"
            )
        self.model: Any = model if device is None else model.to(device)
        self.tokenizer = tokenizer
        config: Any = model.config
        self.vocabulary: int = config.get_text_config().vocab_size
        self.reset()

    @property
    def parameters(self) -> int:
        """Parameters of the model, for the price of a token."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def reset(self, rows: int = 1) -> None:
        """Forget everything.

        Parameters
        ----------
        rows
            How many sequences will be judged.
        """
        self._caches: list[DynamicCache] = [DynamicCache() for _ in range(rows)]
        self._held: list[list[int]] = [[] for _ in range(rows)]  # the tokens whose cells each cache holds

    def held(self, row: int = 0) -> tuple[list[int], DynamicCache]:
        """The tokens that a row's cache holds, and the cache."""
        return list(self._held[row]), self._caches[row]

    def rollback(self, cells: int, row: int = 0) -> None:
        """Keep the first so many cells of a row's cache."""
        surplus = len(self._held[row]) - cells
        if surplus > 0:
            _cut(self._caches[row], surplus)
            del self._held[row][cells:]

    @torch.no_grad()
    def match(
        self,
        prefix: Sequence[int],
        drafts: Sequence[int],
        rule: Rule,
        chunk: int = 32,
        *,
        row: int = 0,
        judged: Sequence[bool] | None = None,
        generator: torch.Generator | None = None,
    ) -> MatchResult:
        """How long a prefix of the drafts it agrees with.

        It reads ``chunk`` drafts at a time and goes on to the next chunk only if it agreed with a whole one. A draft that
        is not in its vocabulary is refused; such a token in the prefix is not read.

        Parameters
        ----------
        prefix
            The tokens before the first draft; at least one.
        drafts
            Proposed next tokens, in order.
        rule
            When it agrees with a draft.
        chunk
            Drafts a forward.
        row
            Which sequence this is; see `reset`.
        judged
            False for tokens among the drafts that are given, not proposed: they are read and not judged.
        generator
            Of the uniform numbers of the stochastic rule.

        Returns
        -------
        MatchResult
        """
        known = [token for token in prefix if 0 <= token < self.vocabulary]
        if not known:
            raise InputError(
                "the guider knows no token of what stands before the drafts: give a prompt of at least one token of its "
                "vocabulary, or an aligner"
            )
        wanted = [True] * len(drafts) if judged is None else list(judged)
        foreign = next((i for i, token in enumerate(drafts) if not 0 <= token < self.vocabulary), len(drafts))
        fed = forwards = 0

        held = self._held[row]
        same = next((i for i, (a, b) in enumerate(zip(held, known)) if a != b), min(len(held), len(known)))
        self.rollback(min(same, len(known) - 1), row)
        if missing := known[len(held) : -1]:
            self._read(missing, 1, row)
            fed, forwards = len(missing), 1

        whole = [*known, *drafts[:foreign]]
        agreed, seen = 0, []
        while agreed < foreign:
            begin, end = agreed, min(agreed + chunk, foreign)
            logits = self._read(whole[len(known) - 1 + begin : len(known) - 1 + end], end - begin, row)
            fed, forwards = fed + end - begin, forwards + 1
            probs = logits.float().softmax(1)
            uniform = uniform_numbers(end - begin, generator, probs.device) if rule.random else None
            proposed = torch.tensor(drafts[begin:end], device=probs.device)
            free = ~torch.tensor(wanted[begin:end], device=probs.device)
            good = (rule.agrees(probs, proposed, uniform) | free).tolist()
            run = good.index(False) if False in good else len(good)
            seen.append(probs[: run + 1])
            agreed += run
            if run < len(good):
                break

        k = sum(wanted[:agreed])
        # the canvas takes the agreed drafts, or the first alone; its last new token is read next time
        places = [i for i, flag in enumerate(wanted) if flag]
        if places:
            self.rollback(len(known) + places[max(k, 1) - 1], row)
        refused = agreed if agreed < len(drafts) else None
        return MatchResult(k, refused, torch.cat(seen) if seen else None, forwards, fed)

    def next_distribution(self, tokens: Sequence[int], row: int = 0) -> tuple[Float[Tensor, " V"], int]:
        """The distribution (V,) behind a sequence, and how many tokens had to be read for it."""
        held = self._held[row]
        same = next((i for i, (a, b) in enumerate(zip(held, tokens)) if a != b), min(len(held), len(tokens)))
        self.rollback(min(same, len(tokens) - 1), row)
        fresh = list(tokens[len(held) :])
        return self._read(fresh, 1, row)[-1].float().softmax(0), len(fresh)

    @torch.no_grad()
    def _read(self, tokens: Sequence[int], logits: int, row: int) -> Float[Tensor, "logits V"]:
        """Feed tokens behind what is held; the raw logits (logits, V) of the last ones."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        begin = len(self._held[row])
        out: Any = self.model(
            input_ids=ids,
            cache=self._caches[row],
            use_cache=True,
            position_ids=torch.arange(begin, begin + len(tokens), device=ids.device)[None],
            logits_to_keep=logits,
        )
        self._held[row].extend(tokens)
        return out.logits[0, -logits:]


def _cut(cache: DynamicCache, cells: int) -> None:
    """Drop the last cells of a cache: `DynamicCache.crop` takes a negative number since transformers 5, before that a length."""
    length = cache.get_seq_length()
    cache.crop(-cells)
    if cache.get_seq_length() != length - cells:
        raise InputError(
            f"the guider's cache cannot be rolled back by {cells} tokens: use a model that keeps all keys and values "
            "(no recurrent state, no sliding window)"
        )
