"""Scaling laws of latent instance difficulty: what more training and more samples bring, together.

`pass_at_k_failure` is the model's failure curve, exactly and by three laws; `PassAtK` and `fit_lid` take counts of real answers;
`allocate` splits a budget; `LIDModel` simulates.
"""

from assay._extras import extras

with extras("tables"):
    from assay.methods.lid_scaling._allocate import Allocation, Rule, allocate, rule_of_thumb
    from assay.methods.lid_scaling._data import (
        Exponent,
        HeadResult,
        LastLayerStudy,
        PassAtK,
        PassKTable,
        check_rows,
        load_passk_jsonl,
    )
    from assay.methods.lid_scaling._exponent import (
        LIDFit,
        SaturatingExponent,
        beta_eff,
        bootstrap_interval,
        effective_exponent,
        fit_lid,
        hill,
        window_grid,
    )
    from assay.methods.lid_scaling._laws import (
        FailureTable,
        TwoTail,
        crossover_k,
        fit_two_tail,
        intrinsic_constant,
        local_slope,
        pass_at_k_failure,
    )
    from assay.methods.lid_scaling._model import LIDModel, Sample

__all__ = [
    "Allocation",
    "Exponent",
    "FailureTable",
    "HeadResult",
    "LIDFit",
    "LIDModel",
    "LastLayerStudy",
    "PassAtK",
    "PassKTable",
    "Rule",
    "Sample",
    "SaturatingExponent",
    "TwoTail",
    "allocate",
    "beta_eff",
    "bootstrap_interval",
    "check_rows",
    "crossover_k",
    "effective_exponent",
    "fit_lid",
    "fit_two_tail",
    "hill",
    "intrinsic_constant",
    "load_passk_jsonl",
    "local_slope",
    "pass_at_k_failure",
    "rule_of_thumb",
    "window_grid",
]
