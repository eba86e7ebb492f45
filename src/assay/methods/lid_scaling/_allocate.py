"""How to split a budget between training inputs and draws at inference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from assay._errors import InputError
from assay.methods.lid_scaling._exponent import Window


class Allocation(NamedTuple):
    """A split, and what it is worth.

    Attributes
    ----------
    N, k
        Training inputs and draws; real numbers at the optimum, k = (C - N c_train) / c_infer.
    loss
        R L_gen(N) + L_inf(k; N).
    marginal_train, marginal_infer
        Loss saved by one more unit of cost, spent on training or on draws; equal at an interior optimum.
    regime
        ``"interior"``, ``"all training"`` (one draw is left) or ``"all inference"`` (the smallest N).
    N_whole, k_whole, loss_whole
        The best whole numbers beside it, within the budget.
    """

    N: float
    k: float
    loss: float
    marginal_train: float
    marginal_infer: float
    regime: str
    N_whole: int
    k_whole: int
    loss_whole: float


def allocate(
    budget: float,
    c_train: float,
    c_infer: float,
    R: float,
    gen_curve: Callable[[float], float],
    inf_curve: Callable[[float, float], float],
    *,
    n_min: float = 1.0,
    points: int = 300,
) -> Allocation:
    """The N and k with N c_train + k c_infer = budget that minimise R L_gen(N) + L_inf(k; N).

    A logarithmic grid over N and Brent's method around its local minima, of which there may be several.

    Parameters
    ----------
    budget
        C.
    c_train, c_infer
        Costs of a training input and of a draw.
    R
        Weight of the generalisation error; 0: only the failure of k draws counts.
    gen_curve
        N to L_gen.
    inf_curve
        k and N to L_inf.
    n_min
        Smallest N at which the curves hold.
    points
        Of the grid.

    Raises
    ------
    InputError
        If a cost is not above 0, R is below 0, or the budget does not pay for n_min and one draw.

    Source: arXiv:2601.03764, Section 5.
    """
    n_max = _largest(budget, c_train, c_infer, R, n_min)

    def k_of(N: float) -> float:
        return max((budget - N * c_train) / c_infer, 1.0)

    def loss(N: float, k: float) -> float:
        return (R * gen_curve(N) if R else 0.0) + inf_curve(k, N)

    def total(log_n: float) -> float:
        N = min(math.exp(log_n), n_max)
        return loss(N, k_of(N))

    # As dense near the end of the budget as at its beginning: there the draws run out.
    low, high = math.log(n_min), math.log(n_max)
    ends = np.log(
        np.maximum(
            n_max - np.geomspace(c_infer / c_train, max(n_max - n_min, c_infer / c_train), points) * 0.999, n_min
        )
    )
    grid = np.unique(np.clip(np.concatenate([np.linspace(low, high, points), ends]), low, high))
    values = np.array([total(float(x)) for x in grid])
    best_x, best = float(grid[values.argmin()]), float(values.min())
    before, after = np.r_[np.inf, values[:-1]], np.r_[values[1:], np.inf]
    minima = np.flatnonzero((values < before) & (values <= after))  # of a flat stretch its first point alone
    for i in minima[np.argsort(values[minima])][:5]:
        left, right = float(grid[max(i - 1, 0)]), float(grid[min(i + 1, len(grid) - 1)])
        found = minimize_scalar(total, bounds=(left, right), method="bounded", options={"xatol": 1e-10})
        if found.fun < best:
            best_x, best = float(found.x), float(found.fun)
    N = min(math.exp(best_x), n_max)
    k = k_of(N)
    step_n, step_k = max(1e-5 * N, 1e-9), 1e-5 * k
    inside_n = max(N - step_n, n_min)
    marginal_train = (loss(inside_n, k) - loss(N + step_n, k)) / (N + step_n - inside_n) / c_train
    inside_k = max(k - step_k, 1.0)
    marginal_infer = (loss(N, inside_k) - loss(N, k + step_k)) / (k + step_k - inside_k) / c_infer
    regime = "interior"
    if k <= 1 + 1e-6:
        regime = "all training"
    elif n_min * (1 + 1e-6) >= N:
        regime = "all inference"
    whole = []
    for n in {math.floor(N), math.ceil(N), math.floor(N) - 1, math.ceil(N) + 1, math.floor(n_max)}:
        draws = math.floor((budget - n * c_train) / c_infer + 1e-9)
        if n >= n_min and draws >= 1:
            whole.append((loss(float(n), float(draws)), n, draws))
    loss_whole, n_whole, k_whole = min(whole) if whole else (best, math.ceil(n_min), 1)
    return Allocation(N, k, best, marginal_train, marginal_infer, regime, n_whole, k_whole, loss_whole)


class Rule(NamedTuple):
    """What the rule of thumb says.

    Attributes
    ----------
    N, k
        The split.
    reached
        Whether training reaches the wanted exponent within the budget; else all but one draw's cost goes to training.
    exponent
        beta_eff at N, in its window.
    """

    N: float
    k: float
    reached: bool
    exponent: float


def rule_of_thumb(
    budget: float,
    c_train: float,
    c_infer: float,
    beta: float,
    exponent: Callable[[float, Window], float],
    *,
    share: float = 0.95,
    window: Window | None = None,
    n_min: float = 1.0,
) -> Rule:
    """Train until beta_eff is nearly saturated, then spend the rest on draws: the paper's rule.

    Parameters
    ----------
    budget, c_train, c_infer
        As of `allocate`.
    beta
        The exponent that beta_eff saturates at.
    exponent
        N and a window of k to beta_eff.
    share
        Of beta that is near enough.
    window
        Of k; None: the decade that ends at the k that the rest of the budget buys, at least from 1 to 10.
    n_min
        Smallest N at which the curve holds.

    Source: arXiv:2601.03764, Section 5.
    """
    n_max = _largest(budget, c_train, c_infer, 0.0, n_min)

    def seen(N: float) -> float:
        last = max((budget - N * c_train) / c_infer, 10.0)
        return exponent(N, window or (last / 10, last))

    grid = np.geomspace(n_min, n_max, 60)
    for left, right in zip(np.concatenate([[n_min], grid[:-1]]), grid, strict=True):
        if seen(float(right)) >= share * beta:
            low, high = float(left), float(right)
            for _ in range(40):
                middle = math.sqrt(low * high)
                low, high = (low, middle) if seen(middle) >= share * beta else (middle, high)
            return Rule(high, max((budget - high * c_train) / c_infer, 1.0), True, seen(high))
    return Rule(n_max, 1.0, False, seen(n_max))


def _largest(budget: float, c_train: float, c_infer: float, R: float, n_min: float) -> float:
    for name, value in (("c_train", c_train), ("c_infer", c_infer), ("n_min", n_min)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name} is {value}: give a number above 0")
    if not (R >= 0 and math.isfinite(R)):
        raise InputError(f"R is {R}, the weight of an error: give a number from 0 on")
    n_max = (budget - c_infer) / c_train
    if not math.isfinite(budget) or n_max < n_min:
        raise InputError(
            f"a budget of {budget} does not pay for {n_min:g} training inputs and one draw, which cost "
            f"{n_min * c_train + c_infer:g}: give more"
        )
    return n_max


__all__ = ["Allocation", "Rule", "allocate", "rule_of_thumb"]
