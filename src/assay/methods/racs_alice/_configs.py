"""The LLaMA sizes of the paper and its settings for them."""

from __future__ import annotations

from typing import Any, Literal

from assay._extras import extras

Size = Literal["60m", "130m", "350m", "1.3b"]

# hidden, feed-forward, heads, layers. For 1.3B the paper prints (4096, 5461, 24, 32), which is neither divisible by its
# heads nor 1.3B; these are GaLore's, whose set-up it follows.
SIZES: dict[str, tuple[int, int, int, int]] = {
    "60m": (512, 1376, 8, 8),
    "130m": (768, 2048, 12, 12),
    "350m": (1024, 2736, 16, 24),
    "1.3b": (2048, 5461, 32, 24),
}
ALICE: dict[str, dict[str, Any]] = {
    "60m": {"rank": 128, "leading": 40, "alpha": 0.3, "alpha_c": 0.4},
    "130m": {"rank": 256, "leading": 40, "alpha": 0.3, "alpha_c": 0.4},
    "350m": {"rank": 256, "leading": 40, "alpha": 0.3, "alpha_c": 0.4},
    "1.3b": {"rank": 512, "leading": 160, "alpha": 0.25, "alpha_c": 0.2},
}
STEPS = {"60m": 10_000, "130m": 20_000, "350m": 60_000, "1.3b": 100_000}


def llama_config(size: Size, vocab_size: int = 32_000) -> Any:
    """The `transformers.LlamaConfig` of one of the paper's models: context 256, input and output embeddings untied.

    Parameters
    ----------
    size : {"60m", "130m", "350m", "1.3b"}
    vocab_size
        Of the tokenizer; the paper's has 32,000 tokens.

    Source: arXiv:2502.07752, Appendix, "Experiment details".
    """
    if size not in SIZES:
        raise ValueError(f"the paper's sizes are {', '.join(SIZES)}, got {size!r}")
    with extras("lm"):
        from transformers import LlamaConfig
    hidden, ffn, heads, layers = SIZES[size]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=layers,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def paper_settings(method: Literal["racs", "alice", "alice-zero"], size: Size) -> dict[str, Any]:
    """The keyword arguments that the paper trains a size with: ``Alice(groups, **paper_settings("alice", "130m"))``.

    Parameters
    ----------
    method : {"racs", "alice", "alice-zero"}
    size : {"60m", "130m", "350m", "1.3b"}

    Source: arXiv:2502.07752, Appendix, the tables of hyperparameters.
    """
    if size not in SIZES:
        raise ValueError(f"the paper's sizes are {', '.join(SIZES)}, got {size!r}")
    if method not in ("racs", "alice", "alice-zero"):
        raise ValueError(f"the paper has settings of racs, alice and alice-zero, got {method!r}")
    if method == "racs":
        return {"lr": 0.02, "beta": 0.9, "alpha": 0.02 if size == "1.3b" else 0.05}
    betas = (0.9, 0.9, 0.999) if method == "alice" else (0.9, 0.9)
    return {"lr": 0.02, "betas": betas, "interval": 200, **ALICE[size]}
