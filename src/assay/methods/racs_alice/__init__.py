"""RACS and Alice: optimizers from structured approximations of the Fisher matrix.

Reach for them when Adam's two moments a weight do not fit. `RACS` keeps m + n + 1 numbers for an m x n matrix, `Alice` a
low-rank basis with Adam's moments in it (about GaLore's memory) and a compensation for what the basis leaves out;
`AliceZero` drops the tracking, `EigenAdam` is Alice's full-rank parent. All are `torch.optim.Optimizer`s with two rules:
matrices by the method, everything else by Adam at a rate of its own. `build_param_groups` sorts a model's weights,
`memory_report` says what it will cost, `state_elements` what it costs.

    optimizer = RACS(build_param_groups(model, "racs", lr=0.02, adam_lr=1e-3))

`fit_structure` is the framework behind them: state a structure of the Fisher matrix, get its best fit and its optimizer.
Gong, Scetbon, Ma and Meeds, arXiv:2502.07752.
"""

from assay._extras import extras

with extras("torch"):
    from assay.methods.racs_alice._alice import Alice, AliceZero
    from assay.methods.racs_alice._configs import llama_config, paper_settings
    from assay.methods.racs_alice._eigen_adam import EigenAdam
    from assay.methods.racs_alice._fisher import FisherFit, compensation_scale, empirical_fisher, fit_structure
    from assay.methods.racs_alice._groups import build_param_groups
    from assay.methods.racs_alice._memory import memory_report, state_elements
    from assay.methods.racs_alice._racs import RACS, rank_one_fit

__all__ = [
    "RACS",
    "Alice",
    "AliceZero",
    "EigenAdam",
    "FisherFit",
    "build_param_groups",
    "compensation_scale",
    "empirical_fisher",
    "fit_structure",
    "llama_config",
    "memory_report",
    "paper_settings",
    "rank_one_fit",
    "state_elements",
]
