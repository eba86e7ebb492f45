"""The prompts of a data set: their tokens, their columns, and which are asked at a step."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from assay._errors import InputError
from assay.methods.tracerl._draws import generator_for


class Prompts:
    """Examples with a ``prompt`` and columns for the rewards.

    Parameters
    ----------
    examples
        Mappings with ``prompt``: text, chat messages, or token ids. A `datasets.Dataset` is one.
    processing_class
        A tokenizer of transformers, or what is called like one; None where prompts are token ids.
    mask_token_id
        No prompt may hold it.
    max_length
        Longer prompts are left out, in tokens; None: none are.

    Raises
    ------
    InputError
        If nothing is left, or a prompt is missing, empty, or holds the mask id.
    """

    def __init__(
        self,
        examples: Iterable[Mapping[str, Any]],
        processing_class: Any,
        mask_token_id: int,
        max_length: int | None = None,
    ) -> None:
        self.examples: list[Mapping[str, Any]] = []
        self.ids: list[Tensor] = []
        dropped = 0
        for number, example in enumerate(examples):
            if "prompt" not in example:
                raise InputError(
                    f"example {number} has no 'prompt', only {', '.join(example) or 'nothing'}: add that column"
                )
            ids = token_ids(example["prompt"], processing_class, f"the prompt of example {number}")
            if bool((ids == mask_token_id).any()):
                raise InputError(
                    f"the prompt of example {number} holds the mask id {mask_token_id}: leave it out of prompts"
                )
            if max_length is not None and len(ids) > max_length:
                dropped += 1
                continue
            self.examples.append(example)
            self.ids.append(ids)
        if dropped:
            warnings.warn(f"{dropped} prompts are longer than {max_length} tokens and were dropped", stacklevel=3)
        if not self.examples:
            raise InputError(
                f"there is no prompt left to ask ({dropped} were too long): give more, or raise max_prompt_length"
            )

    def __len__(self) -> int:
        return len(self.examples)

    def at_step(self, step: int, count: int, seed: int) -> Int[Tensor, " count"]:
        """Which examples a step asks: each once an epoch, in an order that depends on the seed and the epoch alone."""
        size = len(self)
        if count > size:
            raise InputError(
                f"a step asks {count} prompts, and the data set has {size}: lower tasks_per_step, or give more"
            )
        first, last = step * count, (step + 1) * count
        orders = {
            epoch: torch.randperm(size, generator=generator_for(seed, epoch, "order"))
            for epoch in range(first // size, (last - 1) // size + 1)
        }
        return torch.stack([orders[at // size][at % size] for at in range(first, last)])

    def columns(self, which: Sequence[int]) -> dict[str, list[Any]]:
        """The columns of some examples, except for the prompt."""
        names = [name for name in self.examples[which[0]] if name != "prompt"]
        return {name: [self.examples[i].get(name) for i in which] for name in names}


def token_ids(prompt: Any, processing_class: Any, what: str) -> Int[Tensor, " prompt"]:
    """The tokens of a prompt: text, chat messages, or token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping)):
        if processing_class is None:
            raise InputError(f"{what} is text, and there is no tokenizer: give processing_class, or token ids")
        if isinstance(prompt, str):
            ids = processing_class(prompt)["input_ids"]
        else:
            ids = processing_class.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    else:
        ids = prompt
    tensor = torch.as_tensor(ids)
    if tensor.ndim != 1 or len(tensor) == 0 or tensor.is_floating_point():
        raise InputError(f"{what} has no tokens, or is not a flat list of them: give text, chat messages or token ids")
    return tensor.to(torch.int64)
