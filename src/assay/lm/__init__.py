"""Language models: opened from a transformers folder, the model hub, a GGUF file or by an asset's name; measured and compressed.

``load`` opens one. `perplexity`, `distances` and `cosine_by_block` say how good it is and how far from another;
`LayerStats` gathers what a Linear is fed, the factorisations make it thin, and `walk` goes with both through a network.
`save_compressed` writes what came out as a folder of transformers, and importing `assay.lm` is what lets transformers'
Auto classes open that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from assay._extras import extras
from assay.lm import _compressed_config
from assay.lm._load import LanguageModel, load

if TYPE_CHECKING:
    from assay.lm._blocks import blocks, groups, hidden_at
    from assay.lm._calibrate import Site, walk, windows
    from assay.lm._compressed import (
        Kind,
        load_compressed,
        mark_compressed,
        merge_to_dense,
        register_kind,
        save_compressed,
    )
    from assay.lm._fisher import feature_importance
    from assay.lm._latency import Latency, latencies
    from assay.lm._lowrank import (
        Factors,
        LowRankLinear,
        asvd_factors,
        fwsvd_factors,
        rank_for,
        svd_factors,
        svd_llm_factors,
    )
    from assay.lm._perplexity import Distances, Losses, cosine_by_block, distances, perplexity
    from assay.lm._report import CompressionReport
    from assay.lm._stats import LayerStats

_HOMES = {
    "CompressionReport": "_report",
    "Distances": "_perplexity",
    "Factors": "_lowrank",
    "Kind": "_compressed",
    "Latency": "_latency",
    "LayerStats": "_stats",
    "Losses": "_perplexity",
    "LowRankLinear": "_lowrank",
    "Site": "_calibrate",
    "asvd_factors": "_lowrank",
    "blocks": "_blocks",
    "cosine_by_block": "_perplexity",
    "distances": "_perplexity",
    "feature_importance": "_fisher",
    "fwsvd_factors": "_lowrank",
    "groups": "_blocks",
    "hidden_at": "_blocks",
    "latencies": "_latency",
    "load_compressed": "_compressed",
    "mark_compressed": "_compressed",
    "merge_to_dense": "_compressed",
    "perplexity": "_perplexity",
    "rank_for": "_lowrank",
    "register_kind": "_compressed",
    "save_compressed": "_compressed",
    "svd_factors": "_lowrank",
    "svd_llm_factors": "_lowrank",
    "walk": "_calibrate",
    "windows": "_calibrate",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import assay.lm` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras("lm"):
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


_compressed_config.announce()

__all__ = [
    "CompressionReport",
    "Distances",
    "Factors",
    "Kind",
    "LanguageModel",
    "Latency",
    "LayerStats",
    "Losses",
    "LowRankLinear",
    "Site",
    "asvd_factors",
    "blocks",
    "cosine_by_block",
    "distances",
    "feature_importance",
    "fwsvd_factors",
    "groups",
    "hidden_at",
    "latencies",
    "load",
    "load_compressed",
    "mark_compressed",
    "merge_to_dense",
    "perplexity",
    "rank_for",
    "register_kind",
    "save_compressed",
    "svd_factors",
    "svd_llm_factors",
    "walk",
    "windows",
]
