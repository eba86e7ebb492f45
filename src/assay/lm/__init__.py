"""Language models: opened from a transformers folder, the model hub, a GGUF file, or by the name of an asset."""

from assay.lm._load import LanguageModel, load

__all__ = ["LanguageModel", "load"]
