"""Language models: opened from a transformers folder, the model hub, a GGUF file or by an asset's name; measured and compressed.

``load`` opens one. `perplexity`, `distances` and `cosine_by_block` say how good it is and how far from another;
`LayerStats` gathers what a Linear is fed, and the factorisations make it thin.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from assay._extras import extras
from assay.lm._load import LanguageModel, load

if TYPE_CHECKING:
    from assay.lm._blocks import blocks, groups, hidden_at
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
    from assay.lm._stats import LayerStats

_HOMES = {
    "Distances": "_perplexity",
    "Factors": "_lowrank",
    "LayerStats": "_stats",
    "Losses": "_perplexity",
    "LowRankLinear": "_lowrank",
    "asvd_factors": "_lowrank",
    "blocks": "_blocks",
    "cosine_by_block": "_perplexity",
    "distances": "_perplexity",
    "fwsvd_factors": "_lowrank",
    "groups": "_blocks",
    "hidden_at": "_blocks",
    "perplexity": "_perplexity",
    "rank_for": "_lowrank",
    "svd_factors": "_lowrank",
    "svd_llm_factors": "_lowrank",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import assay.lm` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras("lm"):
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


__all__ = [
    "Distances",
    "Factors",
    "LanguageModel",
    "LayerStats",
    "Losses",
    "LowRankLinear",
    "asvd_factors",
    "blocks",
    "cosine_by_block",
    "distances",
    "fwsvd_factors",
    "groups",
    "hidden_at",
    "load",
    "perplexity",
    "rank_for",
    "svd_factors",
    "svd_llm_factors",
]
