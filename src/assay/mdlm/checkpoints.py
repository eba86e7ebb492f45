"""Weights by their families' own names: LLaDA, Dream and SDAR, and the autoregressive models that conversion starts from.

No code of a checkpoint is run: its config.json is read as text, and its safetensors are matched with the parameters of
`MaskedDiffusionLM` name by name and shape by shape. What does not fit is an error, never a warning.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from assay._errors import InputError
from assay.mdlm._config import MDLMConfig
from assay.mdlm._model import MaskedDiffusionLM

log = logging.getLogger("assay.mdlm")

DIFFUSION_FAMILIES = ("llada", "dream", "sdar")
AUTOREGRESSIVE_FAMILIES = ("llama", "qwen2", "qwen3")

# Of the released checkpoints, where a file does not say: [MASK], end of text (also the padding).
_RELEASED_IDS = {"llada": (126336, 126081), "dream": (151666, 151643), "sdar": (151669, 151643)}
_MASK_TOKENS = {"llada": "<|mdm_mask|>", "dream": "<|mask|>", "sdar": "<|MASK|>"}
_SDAR_BLOCK = 4  # not in its config.json
_DREAM_LENGTH = 2048  # trained; its config.json names the 131072 of the model it was made from


class UnsupportedCheckpointError(InputError):
    """A checkpoint is of no known family, has a setting that this model cannot follow, or lacks or adds a weight."""


def from_checkpoint(
    path: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    family: str | None = None,
    mask_token_id: int | None = None,
    block_size: int | None = None,
) -> MaskedDiffusionLM:
    """A masked-diffusion model of any family, in evaluation mode.

    Parameters
    ----------
    path
        A folder with config.json and model.safetensors, or its shards and their index: LLaDA, Dream (DiffuCoder), SDAR
        (TraDo), or what ``save_pretrained`` of `MaskedDiffusionLM` wrote.
    dtype
        Of the weights. None: float32 on the CPU, bfloat16 elsewhere (float16 overflows in SDAR after a few steps).
    device
        Where the weights go.
    family
        ``"llada"``, ``"dream"``, ``"sdar"`` or ``"assay"``. None: what config.json says.
    mask_token_id
        For a checkpoint that does not name its [MASK], neither in config.json nor in its tokenizer (SDAR alone). Without
        it the id of the released models is taken. The logger ``assay.mdlm`` says which one was used.
    block_size
        For SDAR, whose config.json does not hold it. None: 4, as released.

    Returns
    -------
    MaskedDiffusionLM

    Raises
    ------
    UnsupportedCheckpointError
        If the family is unknown, a setting is not supported, or keys or shapes differ from those of the model: all of
        them are listed.
    InputError
        If the folder lacks files, or a special id does not fit the vocabulary.
    """
    folder = Path(path)
    raw = _read_config(folder)
    family = family or _family(raw)
    if family in AUTOREGRESSIVE_FAMILIES:
        raise UnsupportedCheckpointError(
            f"{folder} is an autoregressive model of the family {family!r}: convert it with from_autoregressive, which asks "
            "for the id that becomes [MASK]"
        )
    if block_size is not None and family != "sdar":
        raise InputError(f"block_size is for SDAR, and {folder} is of the family {family!r}: leave it out")
    shapes = _stored_shapes(folder)
    if family == "assay":
        config = MDLMConfig.from_dict(raw)
        if mask_token_id not in (None, config.mask_token_id):
            log.warning("the mask id is %s, from config.json; %d is not used", config.mask_token_id, mask_token_id)
    elif family in DIFFUSION_FAMILIES:
        fields = _READERS[family](raw)
        fields |= _special_ids(raw, folder, family, mask_token_id)
        if family == "llada":  # the released code gives its norms a bias with include_bias; some exports do not
            fields["norm_bias"] = "model.transformer.ln_f.bias" in shapes
        if family == "sdar":
            fields["block_size"] = (raw.get("block_size") or _SDAR_BLOCK) if block_size is None else block_size
        config = MDLMConfig(**fields, source_family=family)
    else:
        known = ", ".join(DIFFUSION_FAMILIES)
        raise UnsupportedCheckpointError(f"the family {family!r} is not known: use one of {known}, or assay")
    return _loaded(config, folder, shapes, _names(family, raw), dtype, device)


def from_autoregressive(
    model_or_path: Any,
    mask_token_id: int,
    logit_shift: bool = True,
    gguf_file: str | None = None,
    mask_init: str = "keep",
) -> MaskedDiffusionLM:
    """An autoregressive LLaMA, Qwen2 or Qwen3 model with full attention: the start of a masked-diffusion model.

    All weights are kept, and so is the shift of the logits: the output of position i - 1 goes on predicting token i.

    Parameters
    ----------
    model_or_path
        A model of transformers (its weights are copied), a folder, a GGUF file, or the name of an asset.
    mask_token_id
        An id of the vocabulary that is idle, which becomes [MASK].
    logit_shift
        False: the output of position i predicts token i, which the model then has to learn anew (LLaDA's form).
    gguf_file
        The name of a GGUF file inside ``model_or_path``, as in transformers.
    mask_init
        ``"keep"``: the embedding of [MASK] stays what it is. ``"mean"``: the mean of all rows, for an id that training
        never touched (with tied embeddings its row of the head too).

    Raises
    ------
    UnsupportedCheckpointError
        If the model is of another family, or has a setting that is not supported (scaled RoPE, sliding windows).
    InputError
        If ``mask_token_id`` does not fit.

    Source: DiffuLLaMA, section 3 (attention and shift).
    """
    if mask_init not in ("keep", "mean"):
        raise InputError(f"mask_init must be 'keep' or 'mean', got {mask_init!r}")
    source = model_or_path if isinstance(model_or_path, PreTrainedModel) else _opened(model_or_path, gguf_file)
    raw = source.config.to_dict() if isinstance(source, PreTrainedModel) else _read_config(source)
    family = _family(raw)
    if family not in AUTOREGRESSIVE_FAMILIES:
        raise UnsupportedCheckpointError(
            f"the family {family!r} is not one that a diffusion model is made from: use {', '.join(AUTOREGRESSIVE_FAMILIES)}"
        )
    fields = _READERS[family](raw)
    eos = _first(raw.get("eos_token_id"))
    pad = _first(raw.get("pad_token_id"))
    fields |= {"mask_token_id": mask_token_id, "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}
    config = MDLMConfig(**fields, logit_shift=logit_shift, source_family=family)
    if isinstance(source, PreTrainedModel):
        model = _like_state(config, source)
    else:
        model = _loaded(config, source, _stored_shapes(source), _names(family, raw), None, "cpu")
    if mask_init == "mean":
        with torch.no_grad():
            rows = model.model.embed_tokens.weight
            rows[mask_token_id] = rows.float().mean(0).to(rows.dtype)
    return model


def export_family(model: MaskedDiffusionLM, family: str, folder: str | Path) -> None:
    """Write config.json and weights under a family's own names, so that its own code, or `from_checkpoint`, reads them.

    The code and the tokenizer of the family are not written. SDAR's config.json gets two keys of ours, ``block_size`` and
    ``mask_token_id``, which its own code ignores.

    Parameters
    ----------
    model
        One that the family can express.
    family
        ``"llada"``, ``"dream"`` or ``"sdar"``.
    folder
        New or empty.

    Raises
    ------
    InputError
        If the model has what the family lacks (each is named), or the folder holds something.
    """
    from huggingface_hub import save_torch_state_dict

    if family not in DIFFUSION_FAMILIES:
        raise InputError(f"the family {family!r} cannot be written: use one of {', '.join(DIFFUSION_FAMILIES)}")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: name a new or an empty folder")
    raw = _WRITERS[family](model.config)
    rename = _names(family, raw)
    state = {rename(name): tensor.contiguous() for name, tensor in _own_state(model).items()}
    raw["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir()
    try:
        save_torch_state_dict(state, beside, metadata={"format": "pt"})
        (beside / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


# --- files -----------------------------------------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, Any]:
    place = folder / "config.json"
    if not place.is_file():
        raise InputError(f"{folder} is no checkpoint: a folder with config.json and model.safetensors is expected")
    raw = _read_json(place)
    if raw.get("quantization_config"):
        raise UnsupportedCheckpointError(
            f"{place} has a quantization_config: use the checkpoint's full-precision weights"
        )
    return raw


def _read_json(place: Path) -> dict[str, Any]:
    try:
        raw = json.loads(place.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{place} is no JSON ({error}): download it again") from error
    if not isinstance(raw, dict):
        raise InputError(f"{place} holds a {type(raw).__name__}, expected a JSON object: download it again")
    return raw


def _family(raw: Mapping[str, Any]) -> str:
    kind = str(raw.get("model_type"))
    family = {"Dream": "dream", "assay_mdlm": "assay"}.get(kind, kind)
    if family not in (*DIFFUSION_FAMILIES, *AUTOREGRESSIVE_FAMILIES, "assay"):
        known = ", ".join((*DIFFUSION_FAMILIES, *AUTOREGRESSIVE_FAMILIES))
        raise UnsupportedCheckpointError(
            f"model_type {kind!r} is of no known family ({known}): name the one it follows"
        )
    return family


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = _read_json(index).get("weight_map")
        if not named:
            raise InputError(f"{index} names no weights under 'weight_map': download it again")
        names = sorted(set(named.values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        instead = "only pickled weights, which can run code" if pickled else "no weights"
        raise InputError(
            f"{folder} has {instead}: model.safetensors, or model.safetensors.index.json and its shards, is expected"
        )
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise InputError(
            f"{folder} lacks {', '.join(absent)}, which its index names: download the rest of the checkpoint"
        )
    return [folder / name for name in names]


def _opened_shards(folder: Path) -> Iterator[Any]:
    for shard in _shards(folder):
        try:
            with safe_open(shard, framework="pt", device="cpu") as file:
                yield file
        except SafetensorError as error:
            raise InputError(f"{shard} is no whole safetensors file ({error}): download it again") from error


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every stored tensor, from the files' headers."""
    return {name: tuple(file.get_slice(name).get_shape()) for file in _opened_shards(folder) for name in file.keys()}  # noqa: SIM118


def _loaded(
    config: MDLMConfig,
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    rename: Callable[[str], str],
    dtype: torch.dtype | str | None,
    device: torch.device | str,
) -> MaskedDiffusionLM:
    """Check all names and shapes first, then read shard by shard, straight into the parameters."""
    device = torch.device(device)
    dtype = _dtype(dtype, device)
    with torch.device("meta"):
        model = MaskedDiffusionLM(config)
    wanted = {rename(name): tuple(tensor.shape) for name, tensor in _own_state(model).items()}
    _compare(wanted, shapes, str(folder))
    torch.nn.Module.to(model, dtype).to_empty(device=device)
    model.tie_weights()
    places = {rename(name): tensor for name, tensor in _own_state(model).items()}
    for file in _opened_shards(folder):
        for name in file.keys():  # noqa: SIM118 - not a dict
            stored = file.get_tensor(name)
            if not stored.is_floating_point():
                raise UnsupportedCheckpointError(
                    f"{name} in {folder} is {stored.dtype}: weights must be floating point"
                )
            places[name].copy_(stored)
    return model.eval()


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise InputError(f"dtype {dtype!r} is not one that weights are held in: use float32, bfloat16 or float16")
    return known


def _own_state(model: MaskedDiffusionLM) -> dict[str, Tensor]:
    """The parameters by our names, a tied head left out."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


def _compare(wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], where: str) -> None:
    """One error for everything that does not fit."""
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted]
    misshaped = [
        f"{name} {stored[name]} in place of {wanted[name]}"
        for name in wanted
        if stored.get(name, wanted[name]) != wanted[name]
    ]
    found = [
        f"{what}: {_listed(names)}"
        for what, names in (("missing", missing), ("not expected", extra), ("of another shape", misshaped))
        if names
    ]
    if found:
        raise UnsupportedCheckpointError(
            f"the weights of {where} are not those that its config.json describes: {'; '.join(found)}"
        )


def _listed(names: Iterable[str], most: int = 40) -> str:
    names = sorted(names)
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _opened(path: Any, gguf_file: str | None) -> PreTrainedModel | Path:
    """A folder in the names of transformers as it is; anything else as a model, by way of `assay.lm`."""
    place = Path(path)
    if gguf_file is None and (place / "config.json").is_file():
        return place
    from assay.lm import load

    if gguf_file is None or (place / gguf_file).is_file():
        return load(place / gguf_file if gguf_file else path).model
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, gguf_file=gguf_file, dtype=torch.float32)


def _like_state(config: MDLMConfig, source: PreTrainedModel) -> MaskedDiffusionLM:
    """A model with a copy of another's weights, in its dtype and on its device."""
    state = dict(source.state_dict())
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    with torch.device("meta"):
        model = MaskedDiffusionLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _compare({name: tuple(tensor.shape) for name, tensor in _own_state(model).items()}, shapes, type(source).__name__)
    first = next(iter(state.values()))
    torch.nn.Module.to(model, first.dtype).to_empty(device=first.device)
    model.tie_weights()
    for name, tensor in _own_state(model).items():
        tensor.copy_(state[name])
    return model.eval()


# --- names -----------------------------------------------------------------------------------------------------------

_LLADA_OUTER = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
_LLADA_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def _names(family: str, raw: Mapping[str, Any]) -> Callable[[str], str]:
    """From the names of our parameters to a family's. All but LLaDA use ours."""
    if family != "llada":
        return lambda name: name
    group = raw.get("block_group_size") or 1

    def rename(name: str) -> str:
        module, _, kind = name.rpartition(".")
        if module in _LLADA_OUTER:
            return f"model.transformer.{_LLADA_OUTER[module]}.{kind}"
        index, _, inner = module.removeprefix("model.layers.").partition(".")
        block = f"blocks.{index}" if group == 1 else f"block_groups.{int(index) // group}.{int(index) % group}"
        return f"model.transformer.{block}.{_LLADA_INNER[inner]}.{kind}"

    return rename


# --- configurations --------------------------------------------------------------------------------------------------


def _demand(raw: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Settings that must have one of the given values where they are named at all."""
    for key, values in allowed.items():
        if key in raw and raw[key] not in values:
            raise UnsupportedCheckpointError(
                f"config.json has {key} = {raw[key]!r}, but only {values[0]!r} is supported"
            )


def _needed(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise UnsupportedCheckpointError(
            f"config.json does not hold {key}, which is needed: take the checkpoint's own file"
        )
    return raw[key]


def _first(token: Any) -> int | None:
    """A token id; of several, the first."""
    return (token[0] if token else None) if isinstance(token, list) else token


def _read_llada(raw: Mapping[str, Any]) -> dict[str, Any]:
    _demand(
        raw,
        block_type=("llama",),
        layer_norm_type=("rms",),
        activation_type=("silu",),
        rope=(True,),
        alibi=(False,),
        input_emb_norm=(False,),
        layer_norm_with_affine=(True,),
        bias_for_layer_norm=(None, False),
        multi_query_attention=(None, False),
        clip_qkv=(None,),
        rope_scaling=(None,),
    )
    if raw.get("attention_layer_norm"):
        _demand(raw, attention_layer_norm_with_affine=(True,))
    width, heads = _needed(raw, "d_model"), _needed(raw, "n_heads")
    every, tied = bool(raw.get("include_bias")), bool(raw.get("weight_tying"))
    inner = raw.get("mlp_hidden_size")
    return {
        "vocab_size": raw.get("embedding_size") or _needed(raw, "vocab_size"),
        "hidden_size": width,
        "num_hidden_layers": _needed(raw, "n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("n_kv_heads") or heads,
        "head_dim": width // heads,
        "intermediate_size": inner if inner is not None else int(_needed(raw, "mlp_ratio") * width),
        "rms_norm_eps": _needed(raw, "rms_norm_eps"),
        "rope_theta": _needed(raw, "rope_theta"),
        "rope_full_precision": raw.get("rope_full_precision", True),
        "max_position_embeddings": _needed(raw, "max_sequence_length"),
        "tie_word_embeddings": tied,
        "qkv_bias": every or bool(raw.get("include_qkv_bias")),
        "output_bias": every,
        "mlp_bias": every,
        "head_bias": every and not tied,
        "qk_norm": "full" if raw.get("attention_layer_norm") else None,
        "scale_logits": bool(raw.get("scale_logits")),
    }


def _write_llada(config: MDLMConfig) -> dict[str, Any]:
    every = config.mlp_bias
    _express(
        config,
        "llada",
        attention="full",
        logit_shift=False,
        qk_norm=(None, "full"),
        head_dim=config.hidden_size // config.num_attention_heads,
        output_bias=every,
        head_bias=every and not config.tie_word_embeddings,
        qkv_bias=(True,) if every else (True, False),
        norm_bias=(True, False) if every else (False,),
    )
    return {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "vocab_size": config.vocab_size,
        "embedding_size": config.vocab_size,
        "d_model": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "mlp_hidden_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_full_precision": config.rope_full_precision,
        "max_sequence_length": config.max_position_embeddings,
        "weight_tying": config.tie_word_embeddings,
        "include_bias": every,
        "include_qkv_bias": config.qkv_bias,
        "attention_layer_norm": config.qk_norm == "full",
        "attention_layer_norm_with_affine": True,
        "scale_logits": config.scale_logits,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": None if config.norm_bias else False,
        "activation_type": "silu",
        "rope": True,
        "alibi": False,
        "input_emb_norm": False,
        "multi_query_attention": None,
    }


def _read_like_qwen(raw: Mapping[str, Any], qkv: bool, output: bool, mlp: bool, qk_norm: str | None) -> dict[str, Any]:
    """The names of settings that Dream, SDAR, LLaMA and Qwen share."""
    _demand(raw, hidden_act=("silu",), use_sliding_window=(False, None))
    for key in ("rope_scaling", "rope_parameters"):
        kind = (raw.get(key) or {}).get("rope_type", (raw.get(key) or {}).get("type", "default"))
        if kind != "default":
            raise UnsupportedCheckpointError(f"config.json has {key} of type {kind!r}, but only 'default' is supported")
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise UnsupportedCheckpointError(
            "config.json has layer_types with 'sliding_attention', but only 'full_attention' is supported"
        )
    rope = raw.get("rope_parameters") or {}
    heads = _needed(raw, "num_attention_heads")
    return {
        "vocab_size": _needed(raw, "vocab_size"),
        "hidden_size": _needed(raw, "hidden_size"),
        "num_hidden_layers": _needed(raw, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or _needed(raw, "hidden_size") // heads,
        "intermediate_size": _needed(raw, "intermediate_size"),
        "rms_norm_eps": _needed(raw, "rms_norm_eps"),
        "rope_theta": rope["rope_theta"] if "rope_theta" in rope else _needed(raw, "rope_theta"),
        "max_position_embeddings": _needed(raw, "max_position_embeddings"),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings")),
        "qkv_bias": qkv,
        "output_bias": output,
        "mlp_bias": mlp,
        "qk_norm": qk_norm,
    }


def _read_dream(raw: Mapping[str, Any]) -> dict[str, Any]:
    fields = _read_like_qwen(raw, qkv=True, output=False, mlp=False, qk_norm=None) | {"logit_shift": True}
    fields["max_position_embeddings"] = min(fields["max_position_embeddings"], _DREAM_LENGTH)
    return fields


def _read_sdar(raw: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return _read_like_qwen(raw, qkv=bias, output=bias, mlp=False, qk_norm="head") | {"attention": "block"}


def _read_llama(raw: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return _read_like_qwen(raw, qkv=bias, output=bias, mlp=bool(raw.get("mlp_bias")), qk_norm=None)


def _read_qwen2(raw: Mapping[str, Any]) -> dict[str, Any]:
    return _read_like_qwen(raw, qkv=True, output=False, mlp=False, qk_norm=None)


def _read_qwen3(raw: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return _read_like_qwen(raw, qkv=bias, output=bias, mlp=False, qk_norm="head")


def _write_like_qwen(config: MDLMConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "use_sliding_window": False,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


_PLAIN = {
    "mlp_bias": False,
    "head_bias": False,
    "norm_bias": False,
    "scale_logits": False,
    "rope_full_precision": False,
}


def _write_dream(config: MDLMConfig) -> dict[str, Any]:
    _express(
        config, "dream", attention="full", logit_shift=True, qk_norm=(None,), qkv_bias=True, output_bias=False, **_PLAIN
    )
    head_dim = config.hidden_size // config.num_attention_heads
    _express(config, "dream", head_dim=head_dim)
    return {"model_type": "Dream", "architectures": ["DreamModel"], **_write_like_qwen(config)}


def _write_sdar(config: MDLMConfig) -> dict[str, Any]:
    _express(
        config, "sdar", attention="block", logit_shift=False, qk_norm="head", output_bias=config.qkv_bias, **_PLAIN
    )
    ours = {"block_size": config.block_size, "attention_bias": config.qkv_bias}
    return {"model_type": "sdar", "architectures": ["SDARForCausalLM"], **_write_like_qwen(config), **ours}


def _express(config: MDLMConfig, family: str, **needed: Any) -> None:
    """Settings that a model must have to be written as one of a family."""
    unlike = []
    for key, value in needed.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if getattr(config, key) not in allowed:
            unlike.append(f"{key} = {getattr(config, key)!r} in place of {' or '.join(map(repr, allowed))}")
    if unlike:
        raise InputError(
            f"the model cannot be written as {family!r}, it has {', '.join(unlike)}: choose another family"
        )


def _special_ids(raw: Mapping[str, Any], folder: Path, family: str, argument: int | None) -> dict[str, int | None]:
    """[MASK], end and padding: from config.json, the tokenizer, the argument, the released models, in this order."""
    released_mask, released_end = _RELEASED_IDS[family]
    sign = _MASK_TOKENS[family]
    sources = (
        ("config.json", _first(raw.get("mask_token_id"))),
        (f"the tokenizer's {sign}", _token_id(folder, sign)),
        ("the argument mask_token_id", argument),
        (f"the released {family} models", released_mask),
    )
    source, mask = next((source, token) for source, token in sources if token is not None)
    if argument is not None and argument != mask:
        log.warning("the mask id is %d, from %s; the argument mask_token_id %d is not used", mask, source, argument)
    elif source == sources[-1][0]:
        log.warning("the checkpoint does not name its [MASK]: the mask id is %d, as in %s", mask, source)
    else:
        log.info("the mask id is %d, from %s", mask, source)
    eos = _first(raw.get("eos_token_id"))
    if eos is None and released_end < (raw.get("embedding_size") or raw.get("vocab_size") or 0):
        eos = released_end
    pad = _first(raw.get("pad_token_id"))
    return {"mask_token_id": mask, "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}


def _token_id(folder: Path, token: str) -> int | None:
    """The id of a special token, from the tokenizer's files."""
    places: tuple[tuple[str, Callable[[Any], Mapping[str, int]]], ...] = (
        ("added_tokens.json", lambda read: read),
        (
            "tokenizer_config.json",
            lambda read: {entry["content"]: int(key) for key, entry in read.get("added_tokens_decoder", {}).items()},
        ),
        ("tokenizer.json", lambda read: {entry["content"]: entry["id"] for entry in read.get("added_tokens", [])}),
        ("vocab.json", lambda read: read),
    )
    for name, ids in places:
        if (folder / name).is_file():
            known = ids(_read_json(folder / name))
            if token in known:
                return known[token]
    return None


_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llada": _read_llada,
    "dream": _read_dream,
    "sdar": _read_sdar,
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
}
_WRITERS = {"llada": _write_llada, "dream": _write_dream, "sdar": _write_sdar}
