"""A small LLaMA over bytes: a vocabulary that needs no training, and an architecture that trains in half a minute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt16

from assay._extras import extras
from assay.lm._gguf import quiet

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

END = 0  # ends a document; byte b is token b + 1
VOCABULARY = 257


def byte_tokens(texts: Iterable[str]) -> UInt16[np.ndarray, " tokens"]:
    """UTF-8 bytes plus one, with a 0 after each text: 20 MB in a tenth of a second."""
    parts: list[np.ndarray] = [np.empty(0, np.uint16)]
    for text in texts:
        tokens = np.zeros(len(encoded := text.encode()) + 1, np.uint16)
        np.add(np.frombuffer(encoded, np.uint8), 1, out=tokens[:-1], dtype=np.uint16)
        parts.append(tokens)
    return np.concatenate(parts)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokens as a tokenizer of transformers, so that a byte model can be saved, loaded and sampled like any other."""
    with extras("lm"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode
    signs = bytes_to_unicode()
    vocabulary = {"<|end|>": END, **{signs[b]: b + 1 for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def byte_llama_config(**changes: Any) -> LlamaConfig:
    """Four layers of width 64 (0.2 million parameters in the blocks), embeddings and head untied."""
    with extras("lm"):
        from transformers import LlamaConfig
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    return LlamaConfig(**{**settings, **changes})


def recipe(parts: Mapping[str, Path], target: Path) -> None:
    """The recipe of the asset byte-llama: configuration, untrained weights of seed 0, tokenizer."""
    with extras("lm"):
        import torch
        from transformers import LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(byte_llama_config())
    with quiet():
        model.save_pretrained(target)
        byte_tokenizer().save_pretrained(target)
