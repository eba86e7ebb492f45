"""vAttention: sparse decode attention with an error bound that you choose (Desai et al., ICLR 2026).

Decoding over a long KV cache is bound by reading keys and values. vAttention reads the keys that matter for certain (the
first ones, the last ones, those that an index predicts) and a uniform sample of the rest, whose size follows from the
tolerance that you state: with probability at least 1 - delta the relative error of each head stays below eps.

Reach for it when contexts are long and you want a knob with a meaning in place of a fixed number of keys::

    with sparse_decoding(model, VAttentionConfig(eps=0.1, delta=0.1, guarantee="output")):
        model.generate(**inputs, cache=GrowingKVCache())
    sparsity_report(model)
"""

from assay._extras import extras

with extras("lm"):
    from assay.methods.vattention._attention import vattention
    from assay.methods.vattention._budget import Split, sampling_budget, split_tolerance
    from assay.methods.vattention._cache import GrowingKVCache, OffloadedKVCache
    from assay.methods.vattention._config import IndexSets, VAttentionConfig, VAttentionOutput
    from assay.methods.vattention._indices import (
        DoubleSparsityIndex,
        HashIndex,
        HashWeights,
        OracleIndex,
        QuestIndex,
        SimHashIndex,
        TopKIndex,
        load_hash_weights,
    )
    from assay.methods.vattention._transformers import (
        LayerSparsity,
        UnsupportedModelError,
        register,
        reset_report,
        sparse_decoding,
        sparsity_report,
    )

__all__ = [
    "DoubleSparsityIndex",
    "GrowingKVCache",
    "HashIndex",
    "HashWeights",
    "IndexSets",
    "LayerSparsity",
    "OffloadedKVCache",
    "OracleIndex",
    "QuestIndex",
    "SimHashIndex",
    "Split",
    "TopKIndex",
    "UnsupportedModelError",
    "VAttentionConfig",
    "VAttentionOutput",
    "load_hash_weights",
    "register",
    "reset_report",
    "sampling_budget",
    "sparse_decoding",
    "sparsity_report",
    "split_tolerance",
    "vattention",
]
