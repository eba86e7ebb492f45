"""One call that opens a masked-diffusion model with its text: a checkpoint's folder, or a model of the run sums by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import MaskedDiffusionLM
from assay.testbeds import _runsum_models, runsum

#: What a run-sum model's tokens look like, as a list of strings that stands for a tokenizer.
SIGNS = [*runsum.SIGNS, *"~" * (runsum.VOCABULARY - len(runsum.SIGNS))]


class TextModel:
    """A model and the way from text to tokens and back.

    Attributes
    ----------
    model : MaskedDiffusionLM
    tokenizer
        The checkpoint's transformers tokenizer; None for a model of the run sums.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def encode(self, prompt: str | Sequence[dict[str, str]], chat: bool = True) -> Tensor:
        """Tokens (n,) of a prompt.

        Parameters
        ----------
        prompt
            A text, or the messages of a chat. A run sum is written in its signs (see `runsum.text`).
        chat
            Put a text into the tokenizer's chat template, if it has one.

        Raises
        ------
        InputError
            If messages are given and there is no template, or the prompt is empty.
        """
        if self.tokenizer is None:
            if not isinstance(prompt, str):
                raise InputError("a model of the run sums takes no chat: give the worksheet as one text of its signs")
            ids = runsum.tokens(prompt)
        elif not isinstance(prompt, str) or (chat and getattr(self.tokenizer, "chat_template", None)):
            if getattr(self.tokenizer, "chat_template", None) is None:
                raise InputError("the tokenizer has no chat template: give a prompt as text, not as messages")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        else:
            ids = torch.tensor(self.tokenizer(prompt)["input_ids"])
        if not len(ids):
            raise InputError("a prompt has no tokens: give at least a word")
        return ids

    def decode(self, tokens: Tensor) -> str:
        """The text of an answer up to its first EOS."""
        eos = self.model.config.eos_token_id
        ends = (tokens == eos).nonzero() if eos is not None else []
        tokens = tokens[: int(ends[0])] if len(ends) else tokens
        if self.tokenizer is None:
            return runsum.text(tokens)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def decode_one(self, token: int) -> str:
        """The text of one token, special ones included."""
        return SIGNS[token] if self.tokenizer is None else str(self.tokenizer.decode([token]))


def open_model(
    path_or_name: str, seed: int = 0, device: str = "cpu", dtype: str = "auto", family: str | None = None
) -> TextModel:
    """A masked-diffusion model by its folder or name, in evaluation mode.

    Parameters
    ----------
    path_or_name
        A checkpoint's folder (LLaDA, Dream, SDAR, TraDo, or saved by Assay) with its tokenizer, or ``runsum-dlm`` and the
        other masked-diffusion models of `assay.testbeds.load`.
    seed
        Of the training of a run-sum model.
    device
        ``"cpu"`` or ``"cuda"``.
    dtype
        ``"auto"``: bfloat16 on a GPU, float32 on the CPU; or ``"float32"``, ``"bfloat16"``. A run-sum model is float32.
    family
        Whose names the checkpoint has, where its config.json does not tell.

    Raises
    ------
    InputError
        If there is neither such a folder nor such a model, or the model is no masked-diffusion model.
    """
    if path_or_name in _runsum_models.RECIPES:
        model = _runsum_models.load(path_or_name, seed)
        if not isinstance(model, MaskedDiffusionLM):
            raise InputError(
                f"{path_or_name} is a causal model: use runsum-dlm or another of the masked-diffusion ones"
            )
        return TextModel(model.to(torch.device(device)), None)  # type: ignore[arg-type] # torch's own wrapper of `to`
    folder = Path(path_or_name)
    if not folder.is_dir():
        names = ", ".join(name for name in _runsum_models.RECIPES if "dlm" in name)
        raise InputError(f"there is no folder {path_or_name}: give that of a checkpoint, or one of {names}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} has no tokenizer that transformers can open without running code of its own: {error}"
        ) from error
    model = MaskedDiffusionLM.from_checkpoint(
        folder, dtype=None if dtype == "auto" else dtype, device=device, family=family
    )
    return TextModel(model, tokenizer)
