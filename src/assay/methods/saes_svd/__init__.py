"""SAES-SVD: language models made of thin layers, each aligned with what the original network would be given.

`compress_model` compresses a whole model; `cealc` is the closed form for one Linear and `aces_beta` the choice of its
weight. `assay.methods.saes_svd.baselines` has what the rivals add.
"""

from assay._extras import extras

with extras("lm"):
    from assay.methods.saes_svd._closed import (
        Candidate,
        Coefficients,
        FactorResult,
        Whitened,
        aces_beta,
        cealc,
        factorise,
        tail_ratio,
    )
    from assay.methods.saes_svd._compress import METHODS, compress_model

__all__ = [
    "METHODS",
    "Candidate",
    "Coefficients",
    "FactorResult",
    "Whitened",
    "aces_beta",
    "cealc",
    "compress_model",
    "factorise",
    "tail_ratio",
]
