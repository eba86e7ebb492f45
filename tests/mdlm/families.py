"""Tiny checkpoints under the families' own names, and what they compute, written out from the families' definitions.

Nothing here uses `assay.mdlm`: plain float64 loops over heads, one function a family.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]

LLADA: dict[str, Any] = {
    "model_type": "llada",
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": None,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "vocab_size": 40,
    "embedding_size": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_full_precision": True,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "weight_tying": False,
    "scale_logits": False,
    "max_sequence_length": 128,
    "mask_token_id": 39,
    "eos_token_id": 38,
    "pad_token_id": 38,
    "block_type": "llama",
    "block_group_size": 1,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "activation_type": "silu",
    "rope": True,
    "alibi": False,
    "input_emb_norm": False,
    "multi_query_attention": None,
    "flash_attention": False,
    "attention_dropout": 0.0,
    "init_std": 0.02,
    "precision": "amp_bf16",
    "use_cache": False,
}

_QWEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 38,
    "pad_token_id": 38,
}
DREAM: dict[str, Any] = {"model_type": "Dream", **_QWEN, "mask_token_id": 39}
SDAR: dict[str, Any] = {"model_type": "sdar", **_QWEN, "head_dim": 16, "attention_bias": False}


def write(folder: Path, config: dict[str, Any], weights: Weights) -> Path:
    """A checkpoint folder with one file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


class _Drawn:
    """Random weights by name: matrices sharp enough for attention to matter, norms around one, nothing zero."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {}

    def _noise(self, *shape: int) -> Tensor:
        # Exact in float32, so that the file and the float64 reference hold the same numbers.
        return torch.randn(*shape, generator=self.generator).double()

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        self.weights[f"{name}.weight"] = (1.5 / math.sqrt(columns) * self._noise(rows, columns)).float().double()
        if bias:
            self.weights[f"{name}.bias"] = (0.3 * self._noise(rows)).float().double()

    def norm(self, name: str, width: int, bias: bool = False) -> None:
        self.weights[f"{name}.weight"] = (1 + 0.2 * self._noise(width)).float().double()
        if bias:
            self.weights[f"{name}.bias"] = (0.3 * self._noise(width)).float().double()


def llada_weights(config: dict[str, Any], norm_bias: bool = False) -> Weights:
    """Random weights under LLaDA's names, those that its released code would create."""
    drawn, d, every = _Drawn(), config["d_model"], config["include_bias"]
    rows = config["embedding_size"] or config["vocab_size"]
    kv = d // config["n_heads"] * (config["n_kv_heads"] or config["n_heads"])
    inner = config["mlp_hidden_size"] or config["mlp_ratio"] * d
    drawn.linear("model.transformer.wte", rows, d)
    group = config["block_group_size"]
    for i in range(config["n_layers"]):
        block = f"model.transformer.blocks.{i}"
        if group > 1:
            block = f"model.transformer.block_groups.{i // group}.{i % group}"
        drawn.norm(f"{block}.attn_norm", d, norm_bias)
        drawn.norm(f"{block}.ff_norm", d, norm_bias)
        for name, width in (("q_proj", d), ("k_proj", kv), ("v_proj", kv)):
            drawn.linear(f"{block}.{name}", width, d, every or config["include_qkv_bias"])
        if config["attention_layer_norm"]:
            drawn.norm(f"{block}.q_norm", d, norm_bias)
            drawn.norm(f"{block}.k_norm", kv, norm_bias)
        drawn.linear(f"{block}.attn_out", d, d, every)
        drawn.linear(f"{block}.ff_proj", inner, d, every)
        drawn.linear(f"{block}.up_proj", inner, d, every)
        drawn.linear(f"{block}.ff_out", d, inner, every)
    drawn.norm("model.transformer.ln_f", d, norm_bias)
    if not config["weight_tying"]:
        drawn.linear("model.transformer.ff_out", rows, d, every)
    return drawn.weights


def qwen_weights(config: dict[str, Any]) -> Weights:
    """Random weights under the names of Dream or SDAR."""
    drawn, d = _Drawn(1), config["hidden_size"]
    sdar = config["model_type"] == "sdar"
    width = config.get("head_dim") or d // config["num_attention_heads"]
    qkv_bias, output_bias = (config["attention_bias"], config["attention_bias"]) if sdar else (True, False)
    drawn.linear("model.embed_tokens", config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        drawn.norm(f"{layer}.input_layernorm", d)
        drawn.norm(f"{layer}.post_attention_layernorm", d)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            drawn.linear(f"{layer}.self_attn.{name}", count * width, d, qkv_bias)
        drawn.linear(f"{layer}.self_attn.o_proj", d, heads * width, output_bias)
        if sdar:
            drawn.norm(f"{layer}.self_attn.q_norm", width)
            drawn.norm(f"{layer}.self_attn.k_norm", width)
        for name, rows, columns in (
            ("gate_proj", config["intermediate_size"], d),
            ("up_proj", config["intermediate_size"], d),
            ("down_proj", d, config["intermediate_size"]),
        ):
            drawn.linear(f"{layer}.mlp.{name}", rows, columns)
    drawn.norm("model.norm", d)
    if not config["tie_word_embeddings"]:
        drawn.linear("lm_head", config["vocab_size"], d)
    return drawn.weights


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def _norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    out = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def _turned(x: Tensor, theta: float) -> Tensor:
    """One head (T, width): the pair (i, i + width/2) of position p turns by p / theta^(2i/width)."""
    half = x.shape[1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.arange(len(x), dtype=torch.float64) / theta ** (2 * i / x.shape[1])
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + half] = b * angle.cos() + a * angle.sin()
    return out


def _heads(q: Tensor, k: Tensor, v: Tensor, theta: float, width: int, visible: Tensor) -> Tensor:
    """Attention of (T, heads * width) queries over (T, kv_heads * width) keys, head by head."""
    heads, kv_heads = q.shape[1] // width, k.shape[1] // width
    outs = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        query = _turned(q[:, h * width : (h + 1) * width], theta)
        key = _turned(k[:, g * width : (g + 1) * width], theta)
        scores = (query @ key.T / math.sqrt(width)).masked_fill(~visible, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, g * width : (g + 1) * width])
    return torch.cat(outs, dim=1)


def llada_logits(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    """LLaDA on one row of ids (T,): (T, V), float64, full attention."""
    d, eps, group = config["d_model"], config["rms_norm_eps"], config["block_group_size"]
    width = d // config["n_heads"]
    everything = torch.ones(len(ids), len(ids), dtype=torch.bool)
    x = weights["model.transformer.wte.weight"][ids]
    for i in range(config["n_layers"]):
        block = f"model.transformer.blocks.{i}"
        if group > 1:
            block = f"model.transformer.block_groups.{i // group}.{i % group}"
        h = _norm(x, weights, f"{block}.attn_norm", eps)
        q, k, v = (_linear(h, weights, f"{block}.{name}") for name in ("q_proj", "k_proj", "v_proj"))
        if config["attention_layer_norm"]:
            q, k = _norm(q, weights, f"{block}.q_norm", eps), _norm(k, weights, f"{block}.k_norm", eps)
        x = x + _linear(_heads(q, k, v, config["rope_theta"], width, everything), weights, f"{block}.attn_out")
        h = _norm(x, weights, f"{block}.ff_norm", eps)
        gate = _linear(h, weights, f"{block}.ff_proj")
        x = x + _linear(gate * gate.sigmoid() * _linear(h, weights, f"{block}.up_proj"), weights, f"{block}.ff_out")
    x = _norm(x, weights, "model.transformer.ln_f", eps)
    if config["weight_tying"]:
        logits = x @ weights["model.transformer.wte.weight"].T
    else:
        logits = _linear(x, weights, "model.transformer.ff_out")
    return logits / math.sqrt(d) if config["scale_logits"] else logits


def qwen_logits(config: dict[str, Any], weights: Weights, ids: Tensor, visible: Tensor | None = None) -> Tensor:
    """Dream or SDAR on one row of ids (T,): raw logits (T, V), float64. ``visible`` (T, T): default all."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    eps = config["rms_norm_eps"]
    if visible is None:
        visible = torch.ones(len(ids), len(ids), dtype=torch.bool)
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = _norm(x, weights, f"{layer}.input_layernorm", eps)
        q, k, v = (_linear(h, weights, f"{layer}.self_attn.{name}") for name in ("q_proj", "k_proj", "v_proj"))
        if config["model_type"] == "sdar":
            q, k = (
                _norm(y.reshape(len(ids), -1, width), weights, f"{layer}.self_attn.{name}", eps).reshape(len(ids), -1)
                for y, name in ((q, "q_norm"), (k, "k_norm"))
            )
        x = x + _linear(_heads(q, k, v, config["rope_theta"], width, visible), weights, f"{layer}.self_attn.o_proj")
        h = _norm(x, weights, f"{layer}.post_attention_layernorm", eps)
        gate = _linear(h, weights, f"{layer}.mlp.gate_proj")
        x = x + _linear(
            gate * gate.sigmoid() * _linear(h, weights, f"{layer}.mlp.up_proj"), weights, f"{layer}.mlp.down_proj"
        )
    x = _norm(x, weights, "model.norm", eps)
    return (
        x @ weights["model.embed_tokens.weight"].T if config["tie_word_embeddings"] else _linear(x, weights, "lm_head")
    )


def block_visible(length: int, block: int) -> Tensor:
    """(T, T) bool: within a block all, between blocks only backwards."""
    return torch.tensor([[key // block <= query // block for key in range(length)] for query in range(length)])
