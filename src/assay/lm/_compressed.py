"""A compressed language model as a folder of transformers, and back: what took the place of what stands in its config.

A compressed model is of a subclass of its own class, and its config says ``model_type: "assay-compressed"``: everything
that transformers, peft or a trainer does with it goes on as before, its own ``save_pretrained`` included, and software that
does not know this type refuses the folder instead of filling it with random weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from assay._errors import InputError
from assay.data import DataError
from assay.lm._blocks import weight_of
from assay.lm._compressed_config import MODEL_TYPE, announce
from assay.lm._lowrank import LowRankLinear

FORMAT = 1

# Their names alone: to look a class up by itself would import every model of transformers.
_AUTO_CLASSES = (
    (AutoModelForCausalLM, set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())),
    (AutoModelForImageTextToText, set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())),
)


class Kind(NamedTuple):
    """Something that may stand where a module of a model was.

    Attributes
    ----------
    module
        Its class.
    describe
        What has to be known, as JSON, to build it again before its weights are read.
    build
        From the module that was there (perhaps on the meta device) and the description: one of the right shapes.
    dense
        The plain module that computes the same; None where there is none.
    needs
        The import that makes this kind known.
    """

    module: type[nn.Module]
    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[nn.Module, Mapping[str, Any]], nn.Module]
    dense: Callable[[Any], nn.Module] | None
    needs: str


_KINDS: dict[str, Kind] = {}


def register_kind(name: str, kind: Kind) -> None:
    """Make a kind of module known, so that models with it are saved and loaded.

    Raises
    ------
    InputError
        If another one has that name.
    """
    if name in _KINDS and _KINDS[name].module is not kind.module:
        raise InputError(f"a kind {name!r} is known already: give another name")
    _KINDS[name] = kind


def _low_rank_at(module: nn.Module, about: Mapping[str, Any]) -> LowRankLinear:
    weight = weight_of(module)
    out_features, in_features = weight.shape
    return LowRankLinear(in_features, out_features, about["rank"], module.bias is not None).to(weight.dtype)


def _as_linear(module: LowRankLinear) -> nn.Linear:
    weight = module.dense_weight().detach()
    made = nn.Linear(weight.shape[1], weight.shape[0], module.A.bias is not None, weight.device, weight.dtype)
    with torch.no_grad():
        made.weight.copy_(weight)
        if module.A.bias is not None:
            made.bias.copy_(module.A.bias)
    return made


register_kind(
    "low-rank", Kind(LowRankLinear, lambda module: {"rank": module.rank}, _low_rank_at, _as_linear, "assay.lm")
)


def replaced(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The modules of a model that took the place of others: by name, their kind and what rebuilds them."""
    found = {}
    for name, module in model.named_modules():
        for kind, about in _KINDS.items():
            if type(module) is about.module:
                found[name] = {"kind": kind, **about.describe(module)}
    return found


def mark_compressed(model: PreTrainedModel, **about: Any) -> PreTrainedModel:
    """Tell a model, in place, that it is compressed, so that its own ``save_pretrained`` writes what can be loaded.

    Parameters
    ----------
    **about
        Of the compression, JSON: kept in the config.

    Raises
    ------
    InputError
        If nothing in it is compressed.
    """
    modules = replaced(model)
    if not modules:
        raise InputError(f"nothing in this {type(model).__name__} is compressed: compress it first")
    config = model.config
    if isinstance(model, _Compressed):
        config.compressed = {**config.compressed, **about, "modules": modules}
        return model
    needs = sorted({_KINDS[module["kind"]].needs for module in modules.values()})
    base = type(model)
    config.compressed = {
        **about,
        "format": FORMAT,
        "model_type": config.model_type,
        "architecture": base.__name__,
        "needs": needs,
        "modules": modules,
    }
    config_class, model_class = classes(type(config), base)
    config.__class__ = config_class  # the blocks hold the same config
    model.__class__ = model_class
    return model


class _Compressed:
    """What the classes of compressed models have in common."""

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        _rebuild(self, config.compressed)  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As of transformers; a tensor that is missing, unknown or of another shape is an error.

        Raises
        ------
        DataError
            With the names.
        """
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # all of them are listed below
        model, about = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        wrong = {
            word: sorted(str(key) for key in about[f"{word}_keys"])
            for word in ("missing", "unexpected", "mismatched")
            if about[f"{word}_keys"]
        }
        if wrong:
            said = "; ".join(f"{word}: {', '.join(keys[:5])} ({len(keys)} in all)" for word, keys in wrong.items())
            raise DataError(f"{args[0]} does not hold the weights that its config describes ({said}): save it again")
        return (model, about) if output_loading_info else model


_CLASSES: dict[tuple[type, type], tuple[type, type]] = {}


def classes(config: type[PretrainedConfig], model: type[PreTrainedModel]) -> tuple[type, type]:
    """The compressed counterparts of a config's and a model's class, known to transformers' Auto classes."""
    if (config, model) in _CLASSES:
        return _CLASSES[config, model]
    config_class = type(
        f"Compressed{config.__name__}",
        (config,),
        {"model_type": MODEL_TYPE, "__module__": __name__},
    )
    model_class = type(
        f"Compressed{model.__name__}",
        (_Compressed, model),
        {"config_class": config_class, "__module__": __name__},
    )
    globals().update({made.__name__: made for made in (config_class, model_class)})  # where pickle looks for them
    for auto, names in _AUTO_CLASSES:
        if model.__name__ in names:
            auto.register(config_class, model_class, exist_ok=True)
    _CLASSES[config, model] = config_class, model_class
    return config_class, model_class


def config_class_of(about: Mapping[str, Any]) -> type[PretrainedConfig]:
    """The class of the config of a folder, from what stands in that; it makes the model's class known.

    Raises
    ------
    DataError
        If the folder is of another format, or of a model that this transformers does not know.
    """
    if about.get("format") != FORMAT:
        raise DataError(
            f"the compressed model is of format {about.get('format')}, this Assay reads {FORMAT}: update it"
        )
    if about["model_type"] not in CONFIG_MAPPING:
        raise DataError(f"transformers does not know models of type {about['model_type']!r}: update it")
    config = CONFIG_MAPPING[about["model_type"]]
    model = getattr(transformers, about["architecture"], None)
    if isinstance(model, type) and issubclass(model, PreTrainedModel):
        return classes(config, model)[0]
    raise DataError(
        f"transformers has no {about['architecture']} for models of type {about['model_type']!r}: update it"
    )


def save_compressed(model: PreTrainedModel, folder: str | Path, tokenizer: Any = None, **about: Any) -> Path:
    """Write a compressed model as a folder of transformers: config, safetensors and, where given, the tokenizer.

    Parameters
    ----------
    tokenizer
        Or processor: anything with ``save_pretrained``.
    **about
        Of the compression, JSON: kept in the config.

    Raises
    ------
    InputError
        If nothing in the model is compressed.
    """
    mark_compressed(model, **about)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return Path(folder)


def load_compressed(
    folder: str | Path, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A compressed model from its folder, in evaluation mode.

    Raises
    ------
    DataError
        If it is none, a kind of module in it is not known (with the import that makes it so), or its weights are not
        those that its config describes.
    """
    if not (Path(folder) / "config.json").is_file():
        raise DataError(f"{folder} has no config.json: give a folder that save_compressed wrote")
    announce()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if not hasattr(config, "compressed"):
        raise DataError(
            f"{folder} holds a model of type {config.model_type!r} that is not compressed: open it with assay.lm.load"
        )
    auto = next((auto for auto, names in _AUTO_CLASSES if config.compressed["architecture"] in names), None)
    if auto is None:
        raise DataError(
            f"{folder} holds a {config.compressed['architecture']}, which no Auto class opens: use its own class"
        )
    model = auto.from_pretrained(folder, config=config, dtype=dtype or "auto", local_files_only=True)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model.eval()


def merge_to_dense(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model that computes the same: a copy with the factors multiplied out. Nothing is gained by it but a reference.

    Raises
    ------
    InputError
        If something in the model has no plain counterpart.
    """
    plain = copy.deepcopy(model)
    for name, about in replaced(plain).items():
        kind = _KINDS[about["kind"]]
        if kind.dense is None:
            raise InputError(
                f"{name} is of the kind {about['kind']!r}, which has no plain counterpart: keep the model as it is"
            )
        parent, _, last = name.rpartition(".")
        setattr(plain.get_submodule(parent), last, kind.dense(plain.get_submodule(name)))
    if isinstance(plain, _Compressed):
        config_class, model_class = type(plain.config).__mro__[1], type(plain).__mro__[2]
        del plain.config.compressed
        plain.config.__class__ = config_class
        plain.__class__ = model_class
    return plain


def _rebuild(model: nn.Module, about: Mapping[str, Any]) -> None:
    """Put modules of the described shapes where they belong; their weights are read later."""
    for name, module in about["modules"].items():
        kind = _KINDS.get(module["kind"])
        if kind is None:
            raise DataError(
                f"{name} is of the kind {module['kind']!r}, which is not known: import {' and '.join(about['needs'])} first"
            )
        parent, _, last = name.rpartition(".")
        there = model.get_submodule(name)
        made = kind.build(there, module)
        setattr(model.get_submodule(parent), last, made.to(next(there.parameters()).device))


__all__ = [
    "Kind",
    "load_compressed",
    "mark_compressed",
    "merge_to_dense",
    "register_kind",
    "replaced",
    "save_compressed",
]
