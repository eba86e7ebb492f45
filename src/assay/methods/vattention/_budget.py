"""How many keys a promise needs: the central limit theorem, and how a tolerance is split between numerator and denominator."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from assay.methods.vattention._config import MAX_DELTA_OF_A_VECTOR, VAttentionConfig

#: A denominator below this is not divided by: the budget is then everything.
TINY = 1e-12
#: Steps of the golden-section search for the split of delta; the numba kernel takes as many.
GOLDEN_STEPS = 40
_RATIO = (math.sqrt(5) - 1) / 2


def z_above(chance: float | Tensor) -> Tensor:
    """What a standard normal variable exceeds with this chance, in float64.

    Not the quantile of ``1 - chance``, which is infinite for chances below 1e-16.
    """
    return -torch.special.ndtri(torch.as_tensor(chance, dtype=torch.float64))


def sampling_budget(
    spread: float | Tensor,
    total: float | Tensor,
    n_s: int | Tensor,
    *,
    eps: float | Tensor,
    delta: float | Tensor,
    tail: Literal["two", "one"] = "two",
    fpc: bool = False,
    pilot: int | Tensor = 2,
) -> Tensor:
    """Sample size with which a sum over n_s keys is within eps of its total, except with probability delta.

    ``b = (z n_s spread / (eps total))**2``, divided by ``1 + b / n_s`` where ``fpc`` asks for it, rounded up, clamped to
    ``[pilot, n_s]``. Not a bound for small samples: it rests on the central limit theorem and on a spread that was
    measured well.

    Parameters
    ----------
    spread
        Standard deviation of the n_s terms; of vectors the root of the trace of their covariance.
    total
        What the error is relative to: the denominator, or the norm of the numerator. Below 1e-12 the answer is n_s.
    n_s
        Number of terms.
    eps, delta
        The tolerance and the chance to miss it, both in (0, 1).
    tail
        ``"two"``: z(1 - delta/2), for errors of both signs. ``"one"``: z(1 - delta), the released rule.
    fpc
        Draws are without replacement, so that fewer are enough.
    pilot
        The floor: what was drawn already.

    Returns
    -------
    int64, of the common shape of the arguments.

    Raises
    ------
    ValueError
        If eps or delta lie outside (0, 1) (delta below 0.5 for one tail), a spread is not a number, or tail is neither
        "two" nor "one".

    Source: section 4 of the paper (the lemma by the central limit theorem); the correction is re-derived.
    """
    eps, delta = _between_0_and_1("eps", eps), _between_0_and_1("delta", delta)
    if tail not in ("two", "one"):
        raise ValueError(f"tail must be 'two' or 'one', got {tail!r}")
    if tail == "one" and bool((delta >= 0.5).any()):
        raise ValueError(
            f"tail='one' needs delta < 0.5, got {delta.tolist()}: its quantile is not positive from there on"
        )
    if bool((torch.as_tensor(n_s) < 0).any()):
        raise ValueError(f"n_s must be at least 0, got {torch.as_tensor(n_s).tolist()}: it counts the terms of the sum")
    z = z_above(delta / 2 if tail == "two" else delta)
    total = torch.as_tensor(total, dtype=torch.float64)
    n = torch.as_tensor(n_s, dtype=torch.float64)
    needed = (z * n * torch.as_tensor(spread, dtype=torch.float64) / (eps * total.clamp_min(TINY))) ** 2
    return round_budget(torch.where(total < TINY, torch.inf, needed), n_s, pilot=pilot, fpc=fpc)


def _between_0_and_1(name: str, value: float | Tensor) -> Tensor:
    """As float64, checked."""
    value = torch.as_tensor(value, dtype=torch.float64)
    if not bool(((value > 0) & (value < 1)).all()):
        raise ValueError(f"{name} must lie between 0 and 1, got {value.tolist()}: 0.1 is a usual choice")
    return value


def denominator_z(config: VAttentionConfig) -> float:
    """How many standard deviations the denominator's rule allows for."""
    return float(z_above(config.delta / 2 if config.tail == "two" else config.delta))


def needed_draws(a: Tensor, c: Tensor, config: VAttentionConfig) -> Tensor:
    """What the promise of a configuration needs, before rounding; a and c as for `split_tolerance`, a unused for the denominator."""
    if config.guarantee == "denominator":
        return (denominator_z(config) * c / config.eps) ** 2
    return split_tolerance(
        a, c, eps=config.eps, delta=config.delta, tight=config.tight, optimize_delta=config.optimize_delta
    ).needed


def round_budget(needed: Tensor, n_s: int | Tensor, *, pilot: int | Tensor, fpc: bool) -> Tensor:
    """Correct for the finite population, round up, and clamp to [pilot, n_s].

    Parameters
    ----------
    needed
        float64, may be inf.
    n_s, pilot
        The clamp; a pilot above n_s gives n_s.
    fpc
        Whether ``b`` becomes ``b / (1 + b / n_s)``.

    Raises
    ------
    ValueError
        If a budget is not a number.
    """
    if bool(needed.isnan().any()):
        raise ValueError("a budget is not a number: the spread or the total that it follows from is NaN")
    n = torch.as_tensor(n_s, dtype=torch.float64)
    if fpc:
        needed = torch.where(needed.isinf(), n, needed / (1 + needed / n.clamp_min(1)))
    floor = torch.minimum(torch.as_tensor(pilot, dtype=torch.float64), n)
    return torch.minimum(torch.maximum(needed.ceil(), floor), n).to(torch.int64)


@dataclass(frozen=True)
class Split:
    """A tolerance shared out, all float64.

    Attributes
    ----------
    eps_n, delta_n
        Tolerance of the numerator, and how often it may be missed.
    eps_d, delta_d
        The same for the denominator.
    needed
        The budget, before rounding, that meets both at once.
    """

    eps_n: Tensor
    eps_d: Tensor
    delta_n: Tensor
    delta_d: Tensor
    needed: Tensor


def split_tolerance(
    a: float | Tensor,
    c: float | Tensor,
    *,
    eps: float,
    delta: float,
    tight: bool = True,
    optimize_delta: bool = False,
) -> Split:
    """Share a tolerance of the output between numerator and denominator so that both need the same, least budget.

    If N is within ``e1 |N|`` and D within ``e2 D``, the output N / D is within ``(e1 + e2) / (1 - e2)`` of itself. With
    ``tight`` that is set equal to eps. Without, it is the paper's weaker ``2 (e1 + e2) = eps``, for e2 < 1/2 (which eps < 1 sees to).

    Parameters
    ----------
    a, c
        ``n_s sqrt(trace) / |N|`` and ``n_s sigma / D``: the relative standard deviations of N and D at one draw.
    eps, delta
        The tolerance of the output.
    tight
        The bound of the proof, about a fourth of the samples.
    optimize_delta
        Search the split of delta that needs the fewest samples; else two halves.

    Returns
    -------
    `Split` of float64.

    Raises
    ------
    ValueError
        If eps or delta lie outside (0, 1), or the numerator's share of delta exceeds 0.21 (its bound by the trace is not
        safe there).

    Source: section 4 of the paper, Theorem 4.3; the optimiser is re-derived.
    """
    for name, value in (("eps", eps), ("delta", delta)):
        _between_0_and_1(name, value)
    a_n, c_d = torch.broadcast_tensors(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(c, dtype=torch.float64))
    # e1 = z1 a / sqrt(b), e2 = z2 c / sqrt(b); tight: e1 + (1 + eps) e2 = eps, else e1 + e2 = eps / 2.
    by_c, room = (1 + eps, eps) if tight else (1.0, eps / 2)
    if optimize_delta:
        delta_n = _search(lambda d: z_above(d / 2) * a_n + z_above((delta - d) / 2) * by_c * c_d, a_n, delta)
    else:
        delta_n = torch.full_like(a_n, delta / 2)
    if bool((delta_n > MAX_DELTA_OF_A_VECTOR).any()):
        raise ValueError(
            f"the numerator's share of delta is {delta_n.max().item():.3g}, above {MAX_DELTA_OF_A_VECTOR}: "
            "its normal bound is not safe there, choose a smaller delta"
        )
    za, zc = z_above(delta_n / 2) * a_n, z_above((delta - delta_n) / 2) * c_d
    root = (za + by_c * zc) / room
    eps_n, eps_d = za / root.clamp_min(TINY), zc / root.clamp_min(TINY)
    return Split(eps_n, eps_d, delta_n, delta - delta_n, root**2)


def _search(cost: Callable[[Tensor], Tensor], like: Tensor, delta: float) -> Tensor:
    """Golden-section search of delta_n in (0, delta); the cost is convex in it."""
    low = torch.full_like(like, delta * 1e-6)
    high = torch.full_like(like, min(delta * (1 - 1e-6), MAX_DELTA_OF_A_VECTOR))
    for _ in range(GOLDEN_STEPS):
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        better = cost(left) < cost(right)
        high, low = torch.where(better, right, high), torch.where(better, low, left)
    return (low + high) / 2
