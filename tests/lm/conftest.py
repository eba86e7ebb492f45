"""A tiny language model, as a GGUF file and as a transformers folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers with a byte-pair tokenizer, in float32."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    rng = np.random.default_rng(0)
    hidden, heads, kv_heads, inner = 32, 4, 2, 48
    words = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "the"]

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_merges(["t h", "th e"])
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    shapes = {"token_embd.weight": (len(words), hidden), "output_norm.weight": (hidden,)}
    for layer in range(2):
        block = f"blk.{layer}"
        shapes |= {
            f"{block}.attn_q.weight": (hidden, hidden),
            f"{block}.attn_k.weight": (hidden * kv_heads // heads, hidden),
            f"{block}.attn_v.weight": (hidden * kv_heads // heads, hidden),
            f"{block}.attn_output.weight": (hidden, hidden),
            f"{block}.ffn_gate.weight": (inner, hidden),
            f"{block}.ffn_up.weight": (inner, hidden),
            f"{block}.ffn_down.weight": (hidden, inner),
            f"{block}.attn_norm.weight": (hidden,),
            f"{block}.ffn_norm.weight": (hidden,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.normal(0, 0.3, shape).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no downloads."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    return tmp_path / "cache"
