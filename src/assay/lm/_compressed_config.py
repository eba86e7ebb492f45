"""What transformers asks first of a folder with a compressed model: which config it has.

Importing `assay.lm` makes the type known to ``AutoConfig`` without importing transformers: where that is not imported yet,
it happens as soon as its Auto classes are.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODEL_TYPE = "assay-compressed"
_AUTO = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Make the type known to transformers: now, or when its Auto classes are imported."""
    if _AUTO in sys.modules:
        _register(sys.modules[_AUTO])
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register(auto: ModuleType) -> None:
    from transformers.configuration_utils import PretrainedConfig

    class CompressedConfig(PretrainedConfig):
        """Turns what stands in the folder into the config of the class that was compressed."""

        model_type = MODEL_TYPE

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            from assay.lm._compressed import config_class_of

            return config_class_of(config_dict.get("compressed", {})).from_dict(config_dict, **kwargs)

    CompressedConfig.__module__ = __name__
    globals()["CompressedConfig"] = CompressedConfig
    auto.AutoConfig.register(MODEL_TYPE, CompressedConfig, exist_ok=True)


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds the module of the Auto classes as everybody else does, and registers once it has been executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = and_register  # type: ignore[method-assign]
        return spec
