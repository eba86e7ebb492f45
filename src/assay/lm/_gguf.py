"""A GGUF file as a transformers folder, converted once.

transformers reads GGUF, but expands the quantised weights anew at every call (20 to 50 s for 135 million parameters) and
refuses to save what it has read. Here the weights are moved into an ordinary model of the same configuration, which is
saved; the copy opens in half a second and gives the same logits to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay._extras import extras
from assay.data import DataError
from assay.data._cache import cache, content_digest, made_once, need_space

VERSION = 1  # of the conversion, in the name of the folder; the `version` of assets made by the recipe


def recipe(parts: Mapping[str, Path], target: Path) -> None:
    """The recipe of an asset whose one part is a GGUF file."""
    (source,) = parts.values()
    convert(source, target)


def converted(gguf: Path) -> Path:
    """The transformers folder of a GGUF file of the user's: made in the cache on the first call."""
    target = cache() / "assets" / f"{gguf.stem}-{content_digest(gguf)[:16]}-{VERSION}"

    def make(folder: Path) -> None:
        print(f"Converting {gguf.name} into the cache, once", file=sys.stderr)
        convert(gguf, folder)

    return made_once(target, make)


def convert(gguf: Path, folder: Path) -> None:
    """Write configuration, float32 weights (safetensors) and tokenizer of a GGUF file into a new folder."""
    with extras("lm"):
        import torch
        from gguf import GGUFReader
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        parameters = sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise DataError(f"{gguf} is not a whole GGUF file ({error}): download it again") from error
    need_space(4 * parameters, f"{gguf.name}, expanded to float32,")
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
            read = AutoModelForCausalLM.from_pretrained(gguf.parent, **place, dtype=torch.float32)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise DataError(f"{gguf} cannot be opened as a language model: {reason}") from error

    # `save_pretrained` refuses what counts as quantised, and the copy is no longer that.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers, for the time of a call."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
