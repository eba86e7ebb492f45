"""Failure after k draws in the model of latent instance difficulty: the exact integral, and three laws for it.

A test input has a precision tau ~ Gamma(beta/2) and a bias B ~ N(0, v); a draw is N(B, 1/tau), and succeeds within delta of
zero. Lengths are in units of sigma, so v = L_gen / sigma^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from numpy.typing import ArrayLike
from scipy.interpolate import RectBivariateSpline
from scipy.optimize import brentq, least_squares
from scipy.special import gammaln, kv, kve, log_ndtr

from assay._errors import InputError

_ROOT = math.sqrt(2 / math.pi)
_NARROW = 1e-4  # delta sqrt(tau) below which the window is narrower than differences of normal tails can tell
_BLOCK = 1 << 16  # nodes at once: what fits in a cache


Numbers = ndarray | Sequence[float] | Sequence[int] | float | int


def pass_at_k_failure(
    k: Numbers,
    beta: float,
    delta: float,
    v: float = 0.0,
    *,
    method: str = "quad",
    tau: float | None = None,
    kappa: float = 1.0,
    prefactor: float = 1.0,
    fast: bool = False,
    draws: int = 1_000_000,
    seed: int = 0,
) -> Float[ndarray, "*draws"]:
    """L_inf(k): the chance that none of k draws succeeds.

    Parameters
    ----------
    k
        Draws: a number or an array, at least 1; need not be whole.
    beta
        Exponent of the difficulty tail, above 0.
    delta
        Tolerance over sigma, above 0.
    v
        L_gen over sigma^2, the variance of the bias.
    method
        ``"quad"``: the integral, to 1e-8; ``"mc"``: an average over draws of tau and B; ``"intrinsic"``: P k^-beta, that of
        v = 0 for large k; ``"two-tail"``: the paper's P k^-beta + prefactor k^-(kappa/v); ``"laplace"``: P k^-beta + T(k), what the
        integral becomes for large k.
    tau
        A fixed precision in place of the Gamma (``"quad"`` and ``"mc"``).
    kappa, prefactor
        Of ``"two-tail"``, which leaves both open: see `fit_two_tail`.
    fast
        A coarser grid, to about 1e-3, at a tenth of the time.
    draws, seed
        Of ``"mc"``.

    Raises
    ------
    InputError
        If a parameter is out of its range.

    Source: arXiv:2601.03764 for the model and "two-tail"; the integral's asymptotics ("laplace") are our own.
    """
    ks = np.asarray(k, dtype=np.float64)
    check_parameters(beta, delta, v, ks)
    if tau is not None and not (tau > 0 and math.isfinite(tau)):
        raise InputError(f"tau is {tau}: give a precision above 0")
    if method == "quad":
        return _quad(ks, beta, delta, v, tau, _COARSE if fast else _FINE)
    if method == "mc":
        return _monte_carlo(ks, beta, delta, v, tau, draws, seed)
    if tau is not None:
        raise InputError(f"{method} is a law for the mixture of precisions: leave tau out, or take method='quad'")
    intrinsic = np.asarray(np.exp(_log_intrinsic(ks, beta, delta)))
    if method == "intrinsic" or (v == 0 and method in ("two-tail", "laplace")):
        return intrinsic
    if method == "two-tail":
        return np.asarray(intrinsic + prefactor * ks ** (-kappa / v))
    if method == "laplace":
        return np.asarray(intrinsic + bias_tail(ks, beta, delta, v))
    raise InputError(f"the method is {method!r}: give 'quad', 'mc', 'intrinsic', 'two-tail' or 'laplace'")


def check_parameters(beta: float, delta: float, v: float, ks: Float[ndarray, "*draws"] | None = None) -> None:
    """Refuse what the model is not defined for.

    Raises
    ------
    InputError
        With the parameter.
    """
    if not (beta > 0 and math.isfinite(beta)):
        raise InputError(f"beta is {beta}, the exponent of a tail: give a number above 0")
    if not (delta > 0 and math.isfinite(delta)):
        raise InputError(f"delta is {delta}, the tolerance of a success: give a number above 0")
    if not (v >= 0 and math.isfinite(v)):
        raise InputError(f"v is {v}, a variance: give a number from 0 on")
    if ks is not None and (not np.all(np.isfinite(ks)) or np.any(ks < 1)):
        raise InputError(f"k is {np.min(ks) if ks.size else 'empty'}, a number of draws: give finite numbers from 1 on")


def log_success(
    bias: Float[ndarray, "*inputs"], tau: Float[ndarray, "*inputs"], delta: float
) -> Float[ndarray, "*inputs"]:
    """log s of one draw: Phi((delta - B) sqrt(tau)) - Phi((-delta - B) sqrt(tau)), exact where that is tiny.

    Parameters
    ----------
    bias
        B over sigma.
    tau
        Precision.
    delta
        Tolerance over sigma.
    """
    b, wide = _window(bias, tau, delta)
    found = np.empty(b.shape)
    narrow = wide < _NARROW
    found[narrow] = _log_narrow(b[narrow], wide[narrow])
    b, wide = b[~narrow], wide[~narrow]
    upper = log_ndtr(wide - b)
    with np.errstate(divide="ignore", invalid="ignore"):
        found[~narrow] = upper + np.log(-np.expm1(np.minimum(log_ndtr(-wide - b) - upper, 0.0)))
    return found


def _window(bias: ndarray, tau: ndarray, delta: float) -> tuple[ndarray, ndarray]:
    """|B| and delta in standard deviations of a draw."""
    root = np.sqrt(tau)
    b, wide = np.broadcast_arrays(np.abs(bias) * root, delta * root)
    return b, wide


def _log_narrow(b: ndarray, wide: ndarray) -> ndarray:
    """log s of a window so narrow that the density is a straight line's exponential in it."""
    x = wide * b
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = x + np.log(-np.expm1(-2 * x)) - np.log(2 * x)  # log(sinh(x) / x): the average of exp over the window
    mean = np.where(x > 1e-3, mean, x**2 / 6)
    found: ndarray = np.log(np.maximum(wide, 1e-300) * 2) - 0.5 * b**2 - 0.5 * math.log(2 * math.pi) + mean
    return found


def log_failure(
    bias: Float[ndarray, "*inputs"], tau: Float[ndarray, "*inputs"], delta: float
) -> Float[ndarray, "*inputs"]:
    """log(1 - s) of one draw, exact at both ends. Parameters as of `log_success`."""
    log_s = log_success(bias, tau, delta)
    found = np.empty(log_s.shape)
    small = log_s < -0.5
    found[small] = np.log1p(-np.exp(log_s[small]))
    b, wide = (array[~small] for array in _window(bias, tau, delta))
    found[~small] = np.logaddexp(log_ndtr(b - wide), log_ndtr(-b - wide))
    return found


_FINE, _COARSE = (2400, 500), (800, 120)  # nodes in log tau and in the bias


def _precisions(
    ks: Float[ndarray, "*draws"], beta: float, delta: float, tau: float | None, count: int
) -> tuple[ndarray, ndarray]:
    """Nodes and log weights in tau: equal steps of log tau, from where no draw of k could succeed."""
    if tau is not None:
        return np.array([tau]), np.zeros(1)
    most = float(ks.max()) * _ROOT * min(delta, 1.0)
    low = min(-2 * math.log(max(most, 2.0)) - 50.0 / beta, -50.0 / beta)
    grid = np.linspace(low, math.log(150.0 + 10 * beta), count)
    return np.exp(grid), math.log(grid[1] - grid[0]) + beta / 2 * grid - np.exp(grid) - gammaln(beta / 2)


def _biases(v: float, count: int) -> tuple[ndarray, ndarray]:
    """Nodes and log weights in |B|: Gauss-Legendre between edges."""
    narrow = min(1.0, 1 / math.sqrt(v))  # where a bias begins to hurt, in its standard deviations
    edges = [0.0, 0.5 * narrow, 2.0 * narrow, 5.0, 14.0]
    z, log_z = [], []
    for left, right, share in zip(edges[:-1], edges[1:], (0.15, 0.2, 0.4, 0.25), strict=True):
        x, w = np.polynomial.legendre.leggauss(int(share * count))
        points = (right + left) / 2 + (right - left) / 2 * x
        z.append(points)
        log_z.append(np.log(w * (right - left) / 2) - 0.5 * points**2 + 0.5 * math.log(2 / math.pi))
    return math.sqrt(v) * np.concatenate(z), np.concatenate(log_z)


def _quad(
    ks: Float[ndarray, "*draws"],
    beta: float,
    delta: float,
    v: float,
    tau: float | None,
    counts: tuple[int, int] = _FINE,
) -> ndarray:
    if not ks.size:
        return np.zeros(ks.shape)
    flat = ks.reshape(-1)
    taus, weights = _precisions(ks, beta, delta, tau, counts[0])
    log_f = log_failure(np.zeros_like(taus), taus, delta)
    total = np.array([np.exp(one * log_f + weights).sum() for one in flat])
    if v > 0:
        # Bias only adds failures, so what is without it bounds the sum from below: much lighter nodes cannot count.
        with np.errstate(divide="ignore"):
            lightest = max(float(np.log(total.min())) - 45.0, -745.0)
        total = np.zeros(len(flat))
        # At small tau a draw is so wide that bias hardly matters: there a quarter of the nodes in it do.
        turn = int(np.searchsorted(taus, 5e-5 / v))
        for side, count in ((slice(0, turn), counts[1] // 4), (slice(turn, None), counts[1])):
            biases, log_z = _biases(v, count)
            rows = max(_BLOCK // len(biases), 1)
            for begin in range(0, len(taus[side]), rows):
                part = slice(begin, begin + rows)
                log_w = weights[side][part, None] + log_z
                row, column = np.nonzero(log_w > lightest)
                log_f = log_failure(biases[column], taus[side][part][row], delta)
                w = np.exp(log_w[row, column])
                for i, one in enumerate(flat):
                    total[i] += np.exp(one * log_f) @ w
    return np.minimum(total, 1.0).reshape(ks.shape)


def _monte_carlo(
    ks: Float[ndarray, "*draws"], beta: float, delta: float, v: float, tau: float | None, draws: int, seed: int
) -> ndarray:
    if draws < 1:
        raise InputError(f"{draws} draws are none: give at least 1")
    rng = np.random.default_rng(seed)
    total, left = np.zeros(ks.size), draws
    while left:
        count = min(left, _BLOCK)
        taus = rng.gamma(beta / 2, size=count) if tau is None else np.full(count, tau)
        log_f = log_failure(math.sqrt(v) * rng.standard_normal(count), np.maximum(taus, 1e-300), delta)
        total += [np.exp(one * log_f).sum() for one in ks.reshape(-1)]
        left -= count
    return (total / draws).reshape(ks.shape)


def intrinsic_constant(beta: float, delta: float) -> float:
    """P of L_inf ~ P k^-beta without bias: Gamma(beta + 1) / Gamma(beta/2 + 1) (sqrt(2/pi) delta)^-beta.

    Parameters
    ----------
    beta
        Exponent of the difficulty tail.
    delta
        Tolerance over sigma.
    """
    check_parameters(beta, delta, 0.0)
    return math.exp(gammaln(beta + 1) - gammaln(beta / 2 + 1) - beta * math.log(_ROOT * delta))


def _log_intrinsic(ks: Float[ndarray, "*draws"], beta: float, delta: float) -> ndarray:
    return np.asarray(gammaln(beta + 1) - gammaln(beta / 2 + 1) - beta * np.log(_ROOT * delta * ks))


def bias_tail(ks: Float[ndarray, "*draws"], beta: float, delta: float, v: float) -> Float[ndarray, "*draws"]:
    """T(k), the part of the inputs whose bias is large: about exp(-2 sqrt(log k / v)), no power of k.

    [2 / Gamma(beta/2)] sqrt(v / (pi l)) (l/v)^((beta+1)/4) K_((beta+1)/2)(2 sqrt(l/v)), where l = log(k c sqrt(sqrt(l/v))),
    c = sqrt(2/pi) delta and K is the modified Bessel function. Leading order for large k.

    Parameters
    ----------
    ks
        Draws.
    beta, delta, v
        Of the model, lengths over sigma.
    """
    c = _ROOT * delta
    base = np.log(np.asarray(ks, dtype=np.float64) * c)
    depth = np.maximum(base, 1.0)
    for _ in range(60):
        depth = np.maximum(base + 0.25 * np.log(np.maximum(depth, 1e-12) / v), 1e-3)
    argument = 2 * np.sqrt(depth / v)
    order = (beta + 1) / 2
    bessel = np.where(argument < 700, kv(order, np.minimum(argument, 700)), kve(order, argument) * np.exp(-argument))
    return np.asarray(
        2 / math.exp(gammaln(beta / 2)) * np.sqrt(v / (math.pi * depth)) * (depth / v) ** ((beta + 1) / 4) * bessel
    )


def local_slope(k: ArrayLike, failure: ArrayLike) -> Float[ndarray, " between"]:
    """Minus d log L / d log k between neighbours, one number fewer than there are k.

    Parameters
    ----------
    k, failure
        Of the curve, in order.

    Raises
    ------
    InputError
        If k does not rise, or a failure is zero.
    """
    ks, values = np.asarray(k, dtype=np.float64), np.asarray(failure, dtype=np.float64)
    if ks.ndim != 1 or ks.shape != values.shape or len(ks) < 2 or np.any(np.diff(ks) <= 0):
        raise InputError("a slope needs two rising k and the failure at each: give two arrays of one length")
    if np.any(values <= 0):
        raise InputError("a failure of zero has no logarithm: end the curve before it")
    return -np.diff(np.log(values)) / np.diff(np.log(ks))


def crossover_k(beta: float, v: float, delta: float = 0.1) -> float:
    """k at which the biased inputs fail as often as the difficult ones: P k^-beta = T(k). Beyond it the slope leaves beta.

    Parameters
    ----------
    beta, v, delta
        Of the model, lengths over sigma.

    Returns
    -------
    float
        1 where the bias rules from the first draw on, infinity where it does not within 1e300.
    """
    check_parameters(beta, delta, v)
    if v == 0:
        return math.inf

    def apart(log_k: float) -> float:
        ks = np.array([math.exp(log_k)])
        return float(_log_intrinsic(ks, beta, delta)[0] - np.log(bias_tail(ks, beta, delta, v))[0])

    # Near k = 1/delta neither tail describes anything: look from where the intrinsic one is on top.
    grid = max(0.0, -math.log(_ROOT * delta)) + np.concatenate(
        [np.linspace(0.0, 40.0, 401), np.linspace(41.0, 650.0, 610)]
    )
    signs = [apart(float(x)) > 0 for x in grid]
    if not any(signs):
        return 1.0
    first = signs.index(True)
    after = next((i for i in range(first, len(grid)) if not signs[i]), None)
    return math.inf if after is None else math.exp(brentq(apart, float(grid[after - 1]), float(grid[after])))


class TwoTail(NamedTuple):
    """A fit of the paper's law.

    Attributes
    ----------
    kappa
        gamma = kappa / v.
    prefactors : (variances,)
        Of the second tail, one for each v.
    """

    kappa: float
    prefactors: ndarray

    def curve(self, k: Numbers, beta: float, delta: float, v: float, prefactor: float) -> ndarray:
        """The law at one v."""
        return pass_at_k_failure(k, beta, delta, v, method="two-tail", kappa=self.kappa, prefactor=prefactor)


def fit_two_tail(
    k: Float[ndarray, " draws"],
    failure: Float[ndarray, "variances draws"],
    v: Float[ndarray, " variances"],
    beta: float,
    delta: float,
) -> TwoTail:
    """kappa and the prefactors of L = P k^-beta + prefactor(v) k^-(kappa/v), by least squares of logarithms.

    Parameters
    ----------
    k, failure, v
        Curves at several v on one grid of k.
    beta, delta
        Of the model.
    """
    intrinsic = np.exp(_log_intrinsic(k, beta, delta))
    target = np.log(failure)

    def residual(p: ndarray) -> ndarray:
        tail = np.exp(p[1:, None] - np.exp(p[0]) / v[:, None] * np.log(k))
        found: ndarray = (np.log(intrinsic + tail) - target).ravel()
        return found

    slopes = -(target[:, -1] - target[:, 0]) / math.log(k[-1] / k[0])
    start = np.concatenate(
        [[math.log(max(float(np.median(slopes * v)), 1e-3))], target[:, 0] + slopes * math.log(k[0])]
    )
    best = min(
        (least_squares(residual, start + np.r_[shift, np.zeros(len(v))]) for shift in (-1.0, 0.0, 1.0)),
        key=lambda r: r.cost,
    )
    return TwoTail(float(np.exp(best.x[0])), np.exp(best.x[1:]))


class FailureTable:
    """L_inf(k; v) between nodes of one beta and delta: splines of logarithms, for optimisers that ask a thousand times.

    Parameters
    ----------
    beta, delta
        Of the model.
    v
        Smallest and largest; beyond, the nearest is taken.
    k
        Largest.
    """

    def __init__(self, beta: float, delta: float, v: tuple[float, float] = (1e-6, 1e2), k: float = 1e8) -> None:
        self.beta, self.delta = beta, delta
        self._v = np.linspace(math.log(v[0]), math.log(v[1]), 70)
        self._k = np.linspace(0.0, math.log(k), 60)
        values = np.log([pass_at_k_failure(np.exp(self._k), beta, delta, math.exp(x), fast=True) for x in self._v])
        self._spline = RectBivariateSpline(self._v, self._k, values)

    def __call__(self, k: Numbers, v: Numbers) -> Float[ndarray, "*points"]:
        """L_inf at these k and v, together."""
        log_v = np.clip(np.log(np.asarray(v, dtype=np.float64)), self._v[0], self._v[-1])
        log_k = np.clip(np.log(np.asarray(k, dtype=np.float64)), 0.0, self._k[-1])
        return np.asarray(np.exp(self._spline.ev(*np.broadcast_arrays(log_v, log_k))))
