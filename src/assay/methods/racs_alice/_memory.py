"""How much an optimizer keeps: counted in a running one, or foretold for a model."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from assay.methods.racs_alice._groups import build_param_groups
from assay.methods.racs_alice._optimizer import require

Method = Literal["adam", "racs", "alice", "alice-zero", "eigen-adam", "galore", "fira", "apollo-mini", "apollo-svd"]


def state_elements(optimizer: Optimizer) -> dict[str, int]:
    """How many numbers the optimizer keeps for each parameter, step counters left out.

    Parameters
    ----------
    optimizer
        Any; after its first step, since states are made then.

    Returns
    -------
    dict
        Parameter name (``group.index`` where the optimizer was not given names) to count. RACS keeps m + n + 1 for an
        m x n matrix, Alice 2nr + mr + n + r^2 + 1, Adam 2mn.
    """
    counts: dict[str, int] = {}
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{g}.{i}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            state = optimizer.state.get(p, {})
            counts[name] = sum(v.numel() for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step")
    return counts


def matrix_state(method: Method, m: int, n: int, rank: int) -> int:
    """Numbers kept for one m x n matrix by a method; the orientation does not matter.

    Raises
    ------
    ValueError
        An unknown method, or a rank below 1.

    Source: arXiv:2502.07752, Table 1; GaLore's and Fira's basis is counted, as is Apollo's where it is not drawn anew
    from a seed.
    """
    m, n = min(m, n), max(m, n)
    r = min(rank, m)
    require(rank >= 1, "rank", "at least 1", rank)
    numbers = {
        "adam": 2 * m * n,
        "racs": m + n + 1,
        "alice": 2 * n * r + m * r + n + r * r + 1,
        "alice-zero": 2 * n * r + m * r + n + 1,
        "eigen-adam": 2 * m * n + 2 * m * m,
        "galore": 2 * n * r + m * r,
        "fira": 2 * n * r + m * r + 1,
        "apollo-mini": 2 * n + 2,
        "apollo-svd": 2 * n * r + m * r + 1,
    }
    require(method in numbers, "method", f"one of {', '.join(numbers)}", repr(method))
    return numbers[method]


def memory_report(
    model: nn.Module,
    method: Method,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rank: int = 128,
    last_layer: Literal["adam", "method"] = "adam",
) -> int:
    """Bytes of weights and optimizer states, everything in one dtype, as in the paper's Table 3.

    Gradients and activations are not counted. A model on the meta device will do: nothing is allocated.

    Parameters
    ----------
    model
        Its linear layers are the method's, the rest Adam's; see `build_param_groups`.
    method
        One of the four of this package, or "adam", "galore", "fira", "apollo-mini", "apollo-svd".
    dtype
        Of weights and states; the paper's figures are in bfloat16. The optimizers here keep float32 unless told otherwise.
    rank
        Of the low-rank methods.
    last_layer
        As in `build_param_groups`.

    Raises
    ------
    ValueError
        As `matrix_state` and `build_param_groups`.
    """
    groups = build_param_groups(model, "alice", last_layer=last_layer)
    numbers = sum(p.numel() for p in model.parameters())
    for group in groups:
        for p in group["params"]:
            numbers += (
                matrix_state(method, p.shape[0], p.shape[1], rank) if group["rule"] == "matrix" else 2 * p.numel()
            )
    return numbers * dtype.itemsize
