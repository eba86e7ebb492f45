"""One call that opens a language model, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from assay._extras import extras
from assay.data import DataError, resolve
from assay.lm._gguf import converted, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = ("float32", "bfloat16", "float16")


class LanguageModel(NamedTuple):
    """A causal language model of transformers, its tokenizer, and the folder that both came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path


def load(path_or_name: str | Path, dtype: str = "float32") -> LanguageModel:
    """A causal language model, in evaluation mode on the CPU.

    Parameters
    ----------
    path_or_name
        An asset (``"smollm2-135m-instruct"``), a transformers folder with safetensors weights, a GGUF file, or an id of
        the model hub. A GGUF file is converted once into the cache: the first call takes 20 to 50 s, later ones half a
        second, with the same logits to the last bit.
    dtype
        Of the weights: float32, bfloat16 or float16. A GGUF file's quantised weights are expanded to float32 first.

    Returns
    -------
    ``(model, tokenizer, path)``

    Raises
    ------
    DataError
        If it is no causal language model, has no tokenizer, or its weights are not safetensors (pickled weights are
        not opened: they can run code).
    """
    if dtype not in _DTYPES:
        raise DataError(f"dtype {dtype!r} is not one that weights are loaded in: use {', '.join(_DTYPES)}")
    path = resolve(path_or_name, "language model").path
    if path.is_file():
        path = converted(path)
    with extras("lm"):
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer
    _check_folder(path)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "use_safetensors": True, "local_files_only": True}
    try:
        with quiet():
            opened: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise DataError(f"{path} cannot be opened as a causal language model: {reason}") from error
    model, about = opened
    if lacking := sorted(about["missing_keys"]):
        raise DataError(
            f"{path} lacks {len(lacking)} of the model's tensors ({lacking[0]} is one), which transformers would draw at "
            "random: give the whole model"
        )
    return LanguageModel(model.eval(), tokenizer, path)


def _check_folder(path: Path) -> None:
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
        instead = "only pickled weights, which can run code" if pickled else "no weights"
        raise DataError(f"{path} has {instead}: give a folder with .safetensors weights (save_pretrained writes them)")
    if not any(
        (path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        raise DataError(f"{path} has no tokenizer: save the model's tokenizer into the same folder")
