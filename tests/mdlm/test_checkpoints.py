"""Checkpoints under their families' names give the families' logits; what does not fit is refused with its name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assay._errors import InputError  # noqa: E402
from assay.data import MissingData  # noqa: E402
from assay.mdlm import MaskedDiffusionLM, UnsupportedCheckpointError, block_causal_mask  # noqa: E402

from ..lm.conftest import cache  # noqa: E402, F401 - a fixture
from . import families  # noqa: E402
from .families import DREAM, LLADA, SDAR, llada_weights, qwen_weights, write  # noqa: E402
from .tiny import scatter, tiny  # noqa: E402

IDS = torch.randint(0, 38, (13,), generator=torch.Generator().manual_seed(3))


def opened(tmp_path: Path, config: dict[str, Any], weights: dict[str, Any], **options: Any) -> MaskedDiffusionLM:
    return MaskedDiffusionLM.from_checkpoint(write(tmp_path / "checkpoint", config, weights), **options)


def logits(model: MaskedDiffusionLM, ids: torch.Tensor = IDS, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None], **inputs).logits[0]


# --- the families against float64 references


@pytest.mark.parametrize(
    ("changes", "norm_bias"),
    [
        ({}, False),
        ({"include_qkv_bias": True, "n_kv_heads": 2, "embedding_size": 48}, False),
        ({"include_bias": True, "attention_layer_norm": True, "n_kv_heads": 2}, False),
        ({"include_bias": True, "attention_layer_norm": True, "bias_for_layer_norm": None}, True),
        ({"weight_tying": True, "scale_logits": True, "mlp_hidden_size": None}, False),
        ({"block_group_size": 2, "n_layers": 4}, False),
        ({"weight_tying": True, "include_bias": True, "rope_full_precision": False}, False),
    ],
)
def test_llada_gives_the_logits_of_its_definition(tmp_path: Path, changes: dict[str, Any], norm_bias: bool):
    config = LLADA | changes
    weights = llada_weights(config, norm_bias)
    model = opened(tmp_path, config, weights)
    expected = families.llada_logits(config, weights, IDS)
    assert expected.std() > 0.1
    assert (logits(model) - expected).abs().max() < 1e-5
    assert model.config.source_family == "llada"
    assert (model.config.attention, model.config.logit_shift) == ("full", False)
    assert (model.mask_token_id, model.config.eos_token_id, model.config.max_position_embeddings) == (39, 38, 128)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 1}, {"head_dim": 16}])
def test_dream_gives_the_logits_of_its_definition_one_column_later(tmp_path: Path, changes: dict[str, Any]):
    config = DREAM | changes
    weights = qwen_weights(config)
    raw = families.qwen_logits(config, weights, IDS)
    aligned = logits(opened(tmp_path, config, weights))
    assert (aligned[1:] - raw[:-1]).abs().max() < 1e-5
    assert (aligned[0] - raw[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "block"), [({}, None), ({"attention_bias": True, "tie_word_embeddings": True}, 3), ({}, 8)]
)
def test_sdar_gives_the_logits_of_its_definition(tmp_path: Path, changes: dict[str, Any], block: int | None):
    config = SDAR | changes
    weights = qwen_weights(config)
    model = opened(tmp_path, config, weights, mask_token_id=39, block_size=block)
    assert model.config.block_size == (block or 4)
    expected = families.qwen_logits(config, weights, IDS, families.block_visible(len(IDS), block or 4))
    assert (logits(model) - expected).abs().max() < 1e-5
    causal = families.qwen_logits(config, weights, IDS, families.block_visible(len(IDS), 1))
    assert (logits(model) - causal).abs().max() > 0.01  # the mask is not the autoregressive one


# --- peers: transformers' own models under the same weights


def dream_peer(weights: dict[str, Any], dtype: torch.dtype) -> Qwen2ForCausalLM:
    names = {key: value for key, value in DREAM.items() if key not in ("model_type", "mask_token_id")}
    # Not `.to(dtype)`, which would cast the frequencies of the rotation too.
    peer = Qwen2ForCausalLM._from_config(Qwen2Config(**names), dtype=dtype).eval()
    peer.load_state_dict(weights)
    return peer


def test_dream_is_qwen2_with_a_full_mask(tmp_path: Path):
    weights = qwen_weights(DREAM)
    with torch.no_grad():
        everything = torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool)
        raw = dream_peer(weights, torch.float32)(IDS[None], attention_mask=everything).logits[0]
    aligned = logits(opened(tmp_path, DREAM, weights))
    assert (aligned[1:] - raw[:-1]).abs().max() < 1e-5


def test_dream_in_bfloat16_is_qwen2_in_bfloat16_to_the_last_bit(tmp_path: Path):
    """The tables of the rotation are cast to bfloat16, as in the family; float32 tables drift."""
    weights = qwen_weights(DREAM)
    with torch.no_grad():
        everything = torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool)
        raw = dream_peer(weights, torch.bfloat16)(IDS[None], attention_mask=everything).logits[0]
    model = opened(tmp_path, DREAM, weights, dtype="bfloat16")
    assert torch.equal(logits(model)[1:], raw[:-1])
    model.config.rope_full_precision = True
    for layer in model.model.layers:
        layer.self_attn.full_precision = True
    assert not torch.equal(logits(model)[1:], raw[:-1])


def test_llada_in_bfloat16_rotates_in_float32(tmp_path: Path):
    model = opened(tmp_path, LLADA, llada_weights(LLADA), dtype=torch.bfloat16)
    seen: dict[str, torch.Tensor] = {}
    attention = model.model.layers[0].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, out: seen.update(q=out))
    attend = attention._attend
    attention._attend = lambda q, k, v, mask: seen.update(turned=q) or attend(q, k, v, mask)
    logits(model)
    heads = seen["q"][0].float()
    expected = torch.cat([families._turned(heads[:, 8 * h : 8 * h + 8], 500000.0) for h in range(4)], dim=1)
    turned = seen["turned"][0].transpose(0, 1).flatten(1)
    assert turned.dtype == torch.bfloat16
    # One rounding, the last: the difference to the float32 rotation is at most half a unit in the last place.
    assert ((turned.float() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


def test_sdar_is_qwen3_with_a_block_mask(tmp_path: Path):
    weights = qwen_weights(SDAR)
    names = {key: value for key, value in SDAR.items() if key != "model_type"}
    peer = Qwen3ForCausalLM(Qwen3Config(**names)).eval()
    peer.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    visible = families.block_visible(len(IDS), 4)[None, None]
    with torch.no_grad():
        expected = peer(IDS[None], attention_mask=visible).logits[0]
    assert (logits(opened(tmp_path, SDAR, weights, mask_token_id=39)) - expected).abs().max() < 1e-5


# --- files


def sharded(folder: Path) -> dict[str, str]:
    """Cut model.safetensors into three shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_shards_load_like_one_file(tmp_path: Path):
    folder = write(tmp_path / "llada", LLADA, llada_weights(LLADA))
    whole = MaskedDiffusionLM.from_checkpoint(folder).state_dict()
    places = sharded(folder)
    parts = MaskedDiffusionLM.from_checkpoint(folder).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    lost = places["model.transformer.ln_f.weight"]
    (folder / lost).unlink()
    with pytest.raises(InputError, match=f"lacks {lost}, which its index names"):
        MaskedDiffusionLM.from_checkpoint(folder)


def test_missing_unexpected_and_misshaped_weights_are_listed_in_one_error(tmp_path: Path):
    weights = qwen_weights(DREAM)
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.layers.0.self_attn.k_proj.bias"]
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    weights["model.norm.weight"] = torch.ones(31)
    with pytest.raises(UnsupportedCheckpointError) as caught:
        opened(tmp_path, DREAM, weights)
    said = str(caught.value)
    assert "missing: model.layers.0.self_attn.k_proj.bias, model.layers.1.mlp.up_proj.weight;" in said
    assert "not expected: model.layers.0.self_attn.o_proj.bias;" in said
    assert "of another shape: model.norm.weight (31,) in place of (32,)" in said


def test_a_head_beside_tied_embeddings_is_not_expected(tmp_path: Path):
    config = DREAM | {"tie_word_embeddings": True}
    with pytest.raises(UnsupportedCheckpointError, match=r"not expected: lm_head\.weight$"):
        opened(tmp_path, config, qwen_weights(DREAM))


def test_weights_take_the_dtype_that_is_asked(tmp_path: Path):
    folder = write(tmp_path / "dream", DREAM, qwen_weights(DREAM))
    assert MaskedDiffusionLM.from_checkpoint(folder).dtype == torch.float32
    assert MaskedDiffusionLM.from_checkpoint(folder, dtype="float16").dtype == torch.float16
    assert {p.dtype for p in MaskedDiffusionLM.from_checkpoint(folder, dtype=torch.bfloat16).parameters()} == {
        torch.bfloat16
    }
    with pytest.raises(InputError, match=r"dtype 'int8' is not one"):
        MaskedDiffusionLM.from_checkpoint(folder, dtype="int8")


def test_tied_embeddings_are_one_tensor_after_loading(tmp_path: Path):
    config = SDAR | {"tie_word_embeddings": True}
    model = opened(tmp_path, config, qwen_weights(config), mask_token_id=39)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda folder: (folder / "config.json").unlink(), "is no checkpoint"),
        (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "only pickled weights"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 40), "is no whole safetensors file"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, prepare: Any, sentence: str):
    folder = write(tmp_path / "dream", DREAM, qwen_weights(DREAM))
    prepare(folder)
    with pytest.raises(InputError, match=sentence):
        MaskedDiffusionLM.from_checkpoint(folder)


# --- settings


@pytest.mark.parametrize(
    ("family", "key", "value", "wanted"),
    [
        ("llada", "block_type", "sequential", "'llama'"),
        ("llada", "layer_norm_type", "default", "'rms'"),
        ("llada", "activation_type", "gelu", "'silu'"),
        ("llada", "rope", False, "True"),
        ("llada", "alibi", True, "False"),
        ("llada", "input_emb_norm", True, "False"),
        ("llada", "layer_norm_with_affine", False, "True"),
        ("llada", "bias_for_layer_norm", True, "None"),
        ("llada", "multi_query_attention", True, "None"),
        ("dream", "hidden_act", "gelu", "'silu'"),
        ("dream", "use_sliding_window", True, "False"),
        ("dream", "rope_scaling", {"type": "yarn", "factor": 4.0}, "'default'"),
        ("sdar", "rope_scaling", {"rope_type": "linear", "factor": 2.0}, "'default'"),
        ("sdar", "hidden_act", "relu", "'silu'"),
    ],
)
def test_a_setting_that_the_model_cannot_follow_is_named_with_both_values(
    tmp_path: Path, family: str, key: str, value: Any, wanted: str
):
    base = {"llada": LLADA, "dream": DREAM, "sdar": SDAR}[family]
    weights = llada_weights(base) if family == "llada" else qwen_weights(base)
    with pytest.raises(UnsupportedCheckpointError) as caught:
        opened(tmp_path, base | {key: value}, weights)
    shown = value.get("type", value.get("rope_type")) if isinstance(value, dict) else value
    assert all(part in str(caught.value) for part in (key, repr(shown), wanted))


def test_a_rope_scaling_of_type_default_is_accepted(tmp_path: Path):
    weights = qwen_weights(DREAM)
    plain = logits(opened(tmp_path, DREAM, weights))
    assert torch.equal(logits(opened(tmp_path, DREAM | {"rope_scaling": {"type": "default"}}, weights)), plain)
    named = DREAM | {"rope_parameters": {"rope_type": "default", "rope_theta": DREAM["rope_theta"]}}
    del named["rope_theta"]
    assert torch.equal(logits(opened(tmp_path, named, weights)), plain)


def test_what_is_of_no_family_or_lacks_a_setting_is_refused(tmp_path: Path):
    weights = qwen_weights(DREAM)
    with pytest.raises(UnsupportedCheckpointError, match=r"model_type 'gpt2' is of no known family"):
        opened(tmp_path, DREAM | {"model_type": "gpt2"}, weights)
    with pytest.raises(UnsupportedCheckpointError, match=r"autoregressive.*from_autoregressive"):
        opened(tmp_path, DREAM | {"model_type": "qwen2"}, weights)
    with pytest.raises(UnsupportedCheckpointError, match=r"does not hold rope_theta"):
        opened(tmp_path, DREAM | {"rope_theta": None}, weights)
    with pytest.raises(UnsupportedCheckpointError, match="quantization_config"):
        opened(tmp_path, DREAM | {"quantization_config": {"bits": 4}}, weights)
    with pytest.raises(UnsupportedCheckpointError, match="family 'mamba' is not known"):
        opened(tmp_path, DREAM, weights, family="mamba")
    with pytest.raises(InputError, match=r"block_size is for SDAR, and .* is of the family 'dream'"):
        opened(tmp_path, DREAM, weights, block_size=4)
    assert opened(tmp_path, DREAM | {"model_type": "DiffuCoder"}, weights, family="dream").config.logit_shift


def test_dream_is_not_believed_that_it_was_trained_on_131072_positions(tmp_path: Path):
    config = DREAM | {"max_position_embeddings": 131072}
    assert opened(tmp_path, config, qwen_weights(config)).config.max_position_embeddings == 2048


def test_the_mask_id_comes_from_config_tokenizer_argument_or_release(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    weights = qwen_weights(SDAR)
    folder = write(tmp_path / "sdar", SDAR, weights)
    caplog.set_level(logging.INFO, logger="assay.mdlm")
    with pytest.raises(InputError, match="mask_token_id 151669 lies outside the vocabulary of 40"):
        MaskedDiffusionLM.from_checkpoint(folder)
    assert "as in the released sdar models" in caplog.text
    assert MaskedDiffusionLM.from_checkpoint(folder, mask_token_id=37).mask_token_id == 37
    assert "the mask id is 37, from the argument" in caplog.text
    tokenizer = {"added_tokens_decoder": {"35": {"content": "<|MASK|>"}, "36": {"content": "<|mask|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert MaskedDiffusionLM.from_checkpoint(folder).mask_token_id == 35
    assert "the mask id is 35, from the tokenizer's <|MASK|>" in caplog.text
    assert MaskedDiffusionLM.from_checkpoint(folder, mask_token_id=37).mask_token_id == 35
    assert "the argument mask_token_id 37 is not used" in caplog.text
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 34, "content": "<|MASK|>"}]}))
    assert MaskedDiffusionLM.from_checkpoint(folder).mask_token_id == 34


def test_a_padding_id_that_equals_the_mask_id_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="pad_token_id equals mask_token_id 39"):
        opened(tmp_path, DREAM | {"pad_token_id": 39}, qwen_weights(DREAM))


# --- export

EXPORTABLE = [
    ("llada", {"rope_full_precision": True, "num_key_value_heads": 4}),
    ("llada", {"qkv_bias": True, "qk_norm": "full", "scale_logits": True, "tie_word_embeddings": True}),
    (
        "llada",
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "head_bias": True, "norm_bias": True},
    ),
    ("dream", {"qkv_bias": True, "logit_shift": True}),
    ("sdar", {"attention": "block", "block_size": 6, "qk_norm": "head", "head_dim": 16, "tie_word_embeddings": True}),
    ("sdar", {"attention": "block", "block_size": 4, "qk_norm": "head", "qkv_bias": True, "output_bias": True}),
]


@pytest.mark.parametrize(("family", "settings"), EXPORTABLE)
def test_an_exported_model_comes_back_the_same(tmp_path: Path, family: str, settings: dict[str, Any]):
    model = tiny(**settings)
    model.export_family(family, tmp_path / "out")
    back = MaskedDiffusionLM.from_checkpoint(tmp_path / "out")
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert back.config.to_dict() == model.config.to_dict() | {"source_family": family}
    assert torch.equal(logits(back), logits(model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"].lower() == family


@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
def test_an_exported_checkpoint_holds_exactly_the_keys_and_weights_it_was_read_from(tmp_path: Path, family: str):
    config = {"llada": LLADA, "dream": DREAM, "sdar": SDAR}[family]
    weights = llada_weights(config) if family == "llada" else qwen_weights(config)
    model = opened(tmp_path, config, weights, mask_token_id=39)
    model.export_family(family, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name].float()) for name in weights)


def test_a_model_is_not_written_as_a_family_that_cannot_express_it(tmp_path: Path):
    with pytest.raises(InputError, match=r"as 'dream'.*logit_shift = False in place of True.*qkv_bias = False"):
        tiny().export_family("dream", tmp_path / "out")
    with pytest.raises(InputError, match=r"as 'llada'.*qk_norm = 'head' in place of None or 'full'"):
        tiny(qk_norm="head").export_family("llada", tmp_path / "out")
    with pytest.raises(InputError, match=r"as 'sdar'.*attention = 'full' in place of 'block'"):
        tiny(qk_norm="head").export_family("sdar", tmp_path / "out")
    with pytest.raises(InputError, match="family 'qwen2' cannot be written"):
        tiny().export_family("qwen2", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        tiny().export_family("llada", tmp_path / "full")


@pytest.mark.parametrize("tied", [False, True])
def test_our_own_format_loads_both_ways(tmp_path: Path, tied: bool):
    model = tiny(qk_norm="head", logit_shift=True, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "own")
    for back in (
        MaskedDiffusionLM.from_checkpoint(tmp_path / "own"),
        MaskedDiffusionLM.from_pretrained(tmp_path / "own"),
    ):
        assert torch.equal(logits(back), logits(model))
        settings = {**back.config.to_dict(), "architectures": None, "dtype": None, "_name_or_path": None}
        expected = {**model.config.to_dict(), "architectures": None, "dtype": None, "_name_or_path": None}
        assert settings == expected


# --- from autoregressive models

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": [38, 37],
    "pad_token_id": None,
    "bos_token_id": None,
}
AUTOREGRESSIVE = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, attention_bias=True)),
}


def autoregressive(family: str) -> Any:
    model = AUTOREGRESSIVE[family]().eval()
    scatter(model)
    return model


CAUSAL = torch.ones(13, 13, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_converted_model_with_a_causal_mask_gives_the_logits_it_came_from(tmp_path: Path, family: str, saved: bool):
    source = autoregressive(family)
    if saved:
        source.save_pretrained(tmp_path / "source")
    model = MaskedDiffusionLM.from_autoregressive(tmp_path / "source" if saved else source, mask_token_id=39)
    with torch.no_grad():
        raw = source(IDS[None]).logits[0]
    aligned = logits(model, attention_mask=CAUSAL)
    assert (aligned[1:] - raw[:-1]).abs().max() < 1e-5
    assert (logits(model)[1:] - raw[:-1]).abs().max() > 0.01  # its own attention is full
    config = model.config
    assert (config.attention, config.logit_shift, config.source_family) == ("full", True, family)
    assert (config.mask_token_id, config.eos_token_id, config.pad_token_id) == (39, 38, 38)
    unshifted = MaskedDiffusionLM.from_autoregressive(source, mask_token_id=39, logit_shift=False)
    assert (logits(unshifted, attention_mask=CAUSAL) - raw).abs().max() < 1e-5


@pytest.mark.parametrize("by", ["file", "folder and name"])
def test_a_gguf_file_is_converted(cache: Path, tiny_gguf: Path, by: str):  # noqa: F811
    source = transformers.AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    ids = torch.arange(13)
    with torch.no_grad():
        raw = source.eval()(ids[None]).logits[0]
    if by == "file":
        model = MaskedDiffusionLM.from_autoregressive(tiny_gguf, mask_token_id=4)
    else:
        model = MaskedDiffusionLM.from_autoregressive(tiny_gguf.parent, mask_token_id=4, gguf_file=tiny_gguf.name)
    assert (logits(model, ids, attention_mask=CAUSAL)[1:] - raw[:-1]).abs().max() < 1e-5
    assert model.config.source_family == "llama"


def test_the_weights_are_copied_and_keep_their_dtype():
    source = autoregressive("qwen3").to(torch.bfloat16)
    model = MaskedDiffusionLM.from_autoregressive(source, mask_token_id=39)
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    assert source.model.embed_tokens.weight.abs().max() > 0


def test_the_row_of_the_mask_is_kept_or_set_to_the_mean():
    source = autoregressive("qwen3")
    rows = source.model.embed_tokens.weight.detach()
    kept = MaskedDiffusionLM.from_autoregressive(source, mask_token_id=39).model.embed_tokens.weight
    assert torch.equal(kept, rows)
    mean = MaskedDiffusionLM.from_autoregressive(source, mask_token_id=4, mask_init="mean").model.embed_tokens.weight
    assert torch.allclose(mean[4], rows.mean(0))
    assert torch.equal(mean[5:], rows[5:])
    assert torch.equal(mean[:4], rows[:4])


def test_what_cannot_be_converted_is_refused():
    source = autoregressive("qwen2")
    with pytest.raises(InputError, match="mask_token_id 40 lies outside the vocabulary of 40"):
        MaskedDiffusionLM.from_autoregressive(source, mask_token_id=40)
    with pytest.raises(InputError, match="eos_token_id equals mask_token_id 38"):
        MaskedDiffusionLM.from_autoregressive(source, mask_token_id=38)
    with pytest.raises(InputError, match="mask_init must be 'keep' or 'mean'"):
        MaskedDiffusionLM.from_autoregressive(source, mask_token_id=39, mask_init="zero")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedCheckpointError, match=r"model_type 'gpt2' is of no known family"):
        MaskedDiffusionLM.from_autoregressive(gpt2, mask_token_id=39)
    scaled = LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedCheckpointError, match=r"rope_parameters of type 'linear'"):
        MaskedDiffusionLM.from_autoregressive(LlamaForCausalLM(scaled), mask_token_id=39)


def test_a_block_mask_of_the_library_is_the_one_that_the_model_makes(tmp_path: Path):
    model = opened(tmp_path, SDAR, qwen_weights(SDAR), mask_token_id=39)
    mask = block_causal_mask(torch.arange(13)[None], 4)
    assert torch.equal(logits(model, attention_mask=mask), logits(model))


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_is_converted_by_its_name_and_keeps_its_logits():
    from assay.lm import load

    try:
        source, tokenizer, _ = load("smollm2-135m-instruct")
    except MissingData as error:
        pytest.skip(str(error))
    model = MaskedDiffusionLM.from_autoregressive("smollm2-135m-instruct", mask_token_id=4, mask_init="mean")
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.rope_theta) == (2, 2, 100000.0)
    ids = tokenizer("The capital of France is Paris, and the capital of", return_tensors="pt").input_ids
    causal = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    with torch.no_grad():
        raw = source(ids).logits[0]
        aligned = model(ids, attention_mask=causal).logits[0]
    others = torch.arange(raw.shape[1]) != 4  # the head is tied: the row of [MASK] is the mean now
    assert (aligned[1:] - raw[:-1])[:, others].abs().max() < 1e-3 * raw.std()
    rows = source.model.embed_tokens.weight
    assert torch.allclose(model.model.embed_tokens.weight[4], rows.mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("model.safetensors.index.json", '{"weight_map": {"a"', "is no JSON"),
        ("model.safetensors.index.json", "{}", "names no weights"),
        ("config.json", "[1]", "holds a list, expected a JSON object"),
        ("tokenizer.json", '{"added', "is no JSON"),
    ],
)
def test_a_file_that_was_cut_short_is_named(tmp_path, name, text, says):
    tiny(attention="block", block_size=4, qk_norm="head").export_family("sdar", tmp_path / "sdar")
    (tmp_path / "sdar" / name).write_text(text)
    with pytest.raises(InputError, match=f"{name} {says}"):
        MaskedDiffusionLM.from_checkpoint(tmp_path / "sdar")


def test_a_block_of_no_tokens_is_not_the_released_one(tmp_path):
    tiny(attention="block", block_size=8, qk_norm="head").export_family("sdar", tmp_path / "sdar")
    assert MaskedDiffusionLM.from_checkpoint(tmp_path / "sdar").config.block_size == 8
    assert MaskedDiffusionLM.from_checkpoint(tmp_path / "sdar", block_size=2).config.block_size == 2
    with pytest.raises(InputError, match="block_size of at least 1, got 0"):
        MaskedDiffusionLM.from_checkpoint(tmp_path / "sdar", block_size=0)
