"""Exponents: of a failure curve in a window, of the difficulty tail from successes or votes, and how they saturate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from numpy.typing import ArrayLike
from scipy.optimize import least_squares, minimize
from scipy.special import gammaln, log_ndtr
from scipy.stats import chi2
from sklearn.base import BaseEstimator, RegressorMixin

from assay._errors import InputError
from assay.methods.lid_scaling._laws import log_success, pass_at_k_failure

Window = tuple[float | int, float | int]  # first and last k


def window_grid(window: Window, points: int = 20, whole: bool = True) -> Float[ndarray, " k"]:
    """k on a logarithmic grid in a window, rounded to whole numbers and without repeats.

    Parameters
    ----------
    window
        First and last k.
    points
        At most so many.
    whole
        Whether to round.
    """
    low, high = window
    if not 1 <= low < high or not math.isfinite(high):
        raise InputError(f"the window of k is {window}: give two numbers from 1 on, in order")
    grid = np.geomspace(low, high, points)
    return np.unique(np.round(grid)) if whole else grid


def effective_exponent(k: ArrayLike, failure: ArrayLike) -> float:
    """beta_eff: minus the least-squares slope of log L on log k.

    Parameters
    ----------
    k, failure
        A curve.

    Raises
    ------
    InputError
        If there are fewer than two k, or a failure is zero.
    """
    ks, values = np.asarray(k, dtype=np.float64), np.asarray(failure, dtype=np.float64)
    if ks.shape != values.shape or ks.ndim != 1 or len(ks) < 2:
        raise InputError("an exponent needs at least two k and the failure at each: give two arrays of one length")
    if np.any(values <= 0):
        raise InputError("a failure of zero has no logarithm: end the window before it")
    x = np.log(ks) - np.log(ks).mean()
    return -float(x @ np.log(values) / (x @ x))


def beta_eff(v: float, window: Window, *, beta: float, delta: float, fast: bool = False) -> float:
    """The exponent that the exact failure curve of the model shows in a window of k.

    Parameters
    ----------
    v
        L_gen over sigma^2.
    window
        First and last k.
    beta, delta
        Of the model, lengths over sigma.
    fast
        On the coarser grid of `pass_at_k_failure`.
    """
    ks = window_grid(window)
    return effective_exponent(ks, pass_at_k_failure(ks, beta, delta, v, fast=fast))


class SaturatingExponent(RegressorMixin, BaseEstimator):
    """beta_eff(N) = beta (1 - (N0/N)^nu) for N > N0, and 0 before: a curve that rises and saturates.

    Parameters
    ----------
    beta
        Where it saturates; None: fitted.

    Attributes
    ----------
    beta_, N0_, nu_
        Fitted.

    Source: arXiv:2601.03764, Section 4 (nu = 1.62 there; the form is our reading).
    """

    def __init__(self, beta: float | None = None) -> None:
        self.beta = beta

    def fit(self, X: ArrayLike, y: ArrayLike) -> SaturatingExponent:
        """Fit by least squares.

        Parameters
        ----------
        X : (points,) or (points, 1)
            Training sizes N.
        y : (points,)
            Exponents.
        """
        N, b = np.asarray(X, dtype=np.float64).reshape(-1), np.asarray(y, dtype=np.float64)
        if len(N) != len(b) or len(N) < 3 or np.any(N <= 0) or not np.all(np.isfinite(b)):
            raise InputError("the curve needs at least three training sizes above 0 and an exponent for each")
        free = self.beta is None
        top = float(b.max()) if free else float(self.beta or 0.0)

        def residual(p: ndarray) -> ndarray:
            found: ndarray = _saturating(N, math.exp(p[2]) if free else top, math.exp(p[0]), math.exp(p[1])) - b
            return found

        starts = [
            [math.log(N.min() / 2), shift, math.log(max(top, 1e-6))][: 3 if free else 2] for shift in (-0.7, 0.0, 0.7)
        ]
        best = min((least_squares(residual, start) for start in starts), key=lambda r: r.cost)
        self.N0_, self.nu_ = math.exp(best.x[0]), math.exp(best.x[1])
        self.beta_ = math.exp(best.x[2]) if free else top
        self.n_features_in_ = 1
        return self

    def predict(self, X: ArrayLike) -> Float[ndarray, " points"]:
        """Exponents at training sizes.

        Parameters
        ----------
        X : (points,) or (points, 1)
        """
        return _saturating(np.asarray(X, dtype=np.float64).reshape(-1), self.beta_, self.N0_, self.nu_)


def _saturating(N: ndarray, beta: float, N0: float, nu: float) -> ndarray:
    return beta * np.maximum(1 - (N0 / N) ** nu, 0.0)


def hill(s: ArrayLike, fraction: float = 0.02) -> float:
    """The tail exponent of success rates near zero: P(s <= e) ~ e^beta.

    1 / mean(log(s_(m+1) / s_(i))) over the m smallest; biased low when m reaches beyond the tail.

    Parameters
    ----------
    s : (inputs,)
        Exact success rates of one draw, above 0.
    fraction
        m over the inputs, in (0, 1).

    Source: Hill 1975.
    """
    values = np.sort(np.asarray(s, dtype=np.float64).reshape(-1))
    m = int(fraction * len(values))
    if not 0 < fraction < 1 or m < 2:
        raise InputError(f"a share of {fraction} of {len(values)} success rates is {m}: two at least make a tail")
    if values[0] <= 0 or not np.all(np.isfinite(values)):
        raise InputError(
            "a success rate is zero or not finite: Hill's estimator needs exact rates; fit_lid takes counts"
        )
    return 1 / float(np.log(values[m] / values[:m]).mean())


def bootstrap_interval(
    estimate: Callable[..., float], *arrays: ArrayLike, draws: int = 200, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Interval of any estimate by resampling inputs, such as `hill` on success rates.

    Parameters
    ----------
    estimate
        Arrays to a number.
    arrays : (inputs, ...)
        A row an input in each; rows stay together.
    draws, level, seed
        Resamples, level of the interval, seed of the resampling.
    """
    rows = [np.asarray(array) for array in arrays]
    if draws < 1 or not rows or len({len(array) for array in rows}) != 1:
        raise InputError("a bootstrap needs arrays with a row an input in each, and at least one resample")
    rng, inputs = np.random.default_rng(seed), len(rows[0])
    found = [estimate(*(array[chosen] for array in rows)) for chosen in rng.integers(0, inputs, (draws, inputs))]
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


class LIDFit(NamedTuple):
    """Of `fit_lid`.

    Attributes
    ----------
    beta, delta, v
        Estimates; v is 0 where it was not fitted.
    loglik
        Log-likelihood there.
    p_value
        Of a chi-square test of the histogram of successes: small where the model does not describe the data.
    beta_interval, delta_interval
        95 %, by the bootstrap over inputs.
    """

    beta: float
    delta: float
    v: float
    loglik: float
    p_value: float
    beta_interval: tuple[float, float]
    delta_interval: tuple[float, float]


def fit_lid(
    successes: ArrayLike, samples: ArrayLike, *, with_bias: bool = False, draws: int = 1000, seed: int = 0
) -> LIDFit:
    """Maximum likelihood of the model itself: a ~ Binomial(n, s(tau)), tau ~ Gamma(beta/2), s = 2 Phi(delta sqrt(tau)) - 1.

    Parameters
    ----------
    successes, samples : (inputs,)
        a and n; n may differ.
    with_bias
        Fit the variance v of a Gaussian bias too.
    draws, seed
        Resamples for the intervals. Each is followed by one Newton step from the estimate, and not by another fit
        (Schucany and Wang 1991).

    Raises
    ------
    InputError
        If counts do not fit, or every input always or never succeeds.
    """
    a, n = np.broadcast_arrays(np.asarray(successes), np.asarray(samples))
    check_counts(a, n)
    if a.sum() == 0 or (a == n).all():
        raise InputError("every draw fails, or every one succeeds: nothing tells how hard the inputs are")
    pairs, weight = np.unique(np.stack([a, n], 1), axis=0, return_counts=True)
    a_, n_ = pairs[:, 0].astype(float), pairs[:, 1].astype(float)
    choose = gammaln(n_ + 1) - gammaln(a_ + 1) - gammaln(n_ - a_ + 1)

    def log_probability(p: ndarray) -> ndarray:
        return choose + _log_mixture(a_, n_, math.exp(p[0]), math.exp(p[1]), math.exp(p[2]) if with_bias else 0.0)

    def loss(p: ndarray) -> float:
        return -float(weight @ log_probability(p)) / float(weight.sum())

    starts = [
        [math.log(b), math.log(d), math.log(0.3)][: 3 if with_bias else 2]
        for b in (1.0, 3.0)
        for d in ((0.5,) if with_bias else (0.2, 1.0))
    ]
    bounds, options = [(-12.0, 12.0)] * len(starts[0]), {"ftol": 1e-13, "gtol": 1e-7}
    best = min(
        (minimize(loss, start, method="L-BFGS-B", bounds=bounds, options=options) for start in starts),
        key=lambda r: r.fun,
    )
    found = np.exp(best.x)
    p_value = _histogram_test(
        a, n, lambda aa, nn: np.exp(_log_choose(aa, nn) + _log_mixture(aa, nn, *_three(found))), len(best.x)
    )
    low, high = _one_step_interval(log_probability, best.x, weight, draws, seed)
    return LIDFit(
        *_three(found),
        -float(best.fun) * float(weight.sum()),
        p_value,
        (float(low[0]), float(high[0])),
        (float(low[1]), float(high[1])),
    )


def _one_step_interval(
    log_probability: Callable[[ndarray], ndarray], at: ndarray, weight: ndarray, draws: int, seed: int
) -> ndarray:
    """Ends of the 95 % intervals of exp(parameters): inputs resampled, one Newton step each from the estimate."""
    if draws < 1:
        raise InputError(f"{draws} resamples are none: give at least 1")
    size, step = len(at), 2e-3 * np.eye(len(at))
    here = log_probability(at)
    up, down = ([log_probability(at + sign * one) for one in step] for sign in (1, -1))
    score = np.array([(u - d) / 4e-3 for u, d in zip(up, down, strict=True)])
    hessian = np.empty((size, size, len(weight)))
    for i in range(size):
        hessian[i, i] = (up[i] - 2 * here + down[i]) / 4e-6
        for j in range(i):
            both = log_probability(at + step[i] + step[j]) + log_probability(at - step[i] - step[j])
            hessian[i, j] = hessian[j, i] = (both - up[i] - up[j] - down[i] - down[j] + 2 * here) / 8e-6
    counts = np.random.default_rng(seed).multinomial(int(weight.sum()), weight / weight.sum(), size=draws)
    steps = [
        np.linalg.lstsq(-hessian @ one, score @ one, rcond=1e-8)[0]  # a parameter that nothing tells of stays
        for one in counts
    ]
    return np.exp(np.quantile(at + np.clip(steps, -3, 3), [0.025, 0.975], axis=0))


def _three(found: ndarray) -> tuple[float, float, float]:
    return float(found[0]), float(found[1]), float(found[2]) if len(found) > 2 else 0.0


def _log_choose(a: ndarray, n: ndarray) -> ndarray:
    return gammaln(n + 1) - gammaln(a + 1) - gammaln(n - a + 1)


def _log_mixture(a: ndarray, n: ndarray, beta: float, delta: float, v: float) -> ndarray:
    """log E[s^a (1 - s)^(n - a)] over tau, and over the bias where v > 0."""
    grid = np.linspace(min(-60.0 / max(beta, 0.3), -20.0), math.log(60 + 5 * beta), 160 if v > 0 else 500)
    log_w = beta / 2 * grid - np.exp(grid) - gammaln(beta / 2) + math.log(grid[1] - grid[0])
    tau = np.exp(grid)
    if v > 0:
        z = np.linspace(0, 7, 71)  # success is even in the bias
        w = 2 * np.exp(-0.5 * z**2) * (z[1] - z[0]) * np.where(z == 0, 0.5, 1.0)
        tau = np.repeat(tau, len(z))
        bias = np.tile(math.sqrt(v) * z, len(grid))
        log_w = np.repeat(log_w, len(z)) + np.tile(np.log(w / math.sqrt(2 * math.pi)), len(grid))
        keep = log_w > log_w.max() - 60
        tau, bias, log_w = tau[keep], bias[keep], log_w[keep]
        log_s = np.minimum(log_success(bias, tau, delta), -1e-16)
        log_f = np.log(-np.expm1(log_s))
    else:
        root = delta * np.sqrt(tau)
        log_s, log_f = (
            np.log(np.maximum(-np.expm1(math.log(2) + log_ndtr(-root)), 1e-300)),
            math.log(2) + log_ndtr(-root),
        )
    inner = np.outer(a, log_s) + np.outer(n - a, log_f) + log_w
    top = inner.max(1)
    found: ndarray = top + np.log(np.exp(inner - top[:, None]).sum(1))
    return found


def _histogram_test(
    a: ndarray, n: ndarray, probability: Callable[[ndarray, ndarray], ndarray], parameters: int
) -> float:
    """Chi-square of the counts of successes against a model, cells joined until five are expected in each."""
    observed, expected = [], []
    for one in np.unique(n):
        these = a[n == one]
        values = np.arange(one + 1.0)
        seen = np.bincount(these.astype(int), minlength=int(one) + 1)
        expect = len(these) * probability(values, np.full(len(values), float(one)))
        part_seen = part_expect = 0.0
        for s, e in zip(seen, expect, strict=True):
            part_seen, part_expect = part_seen + s, part_expect + e
            if part_expect >= 5:
                observed.append(part_seen)
                expected.append(part_expect)
                part_seen = part_expect = 0.0
        if expected and part_expect:
            observed[-1] += part_seen
            expected[-1] += part_expect
    freedom = len(observed) - len(np.unique(n)) - parameters
    if freedom < 1:
        return math.nan
    o, e = np.array(observed), np.array(expected)
    return float(chi2.sf(((o - e) ** 2 / e).sum(), freedom))


def check_counts(a: Int[ndarray, " inputs"] | ndarray, n: Int[ndarray, " inputs"] | ndarray) -> None:
    """Refuse what are no counts of successes among samples.

    Parameters
    ----------
    a, n
        Successes and samples.

    Raises
    ------
    InputError
        With the first bad row.
    """
    if a.ndim != 1 or not a.size:
        raise InputError(f"counts of the shape {a.shape}: give a row an input, at least one")
    for name, values in (("successes", a), ("samples", n)):
        wrong = ~np.isfinite(values.astype(float)) | (values < 0) | (values != np.floor(values.astype(float)))
        if wrong.any():
            raise InputError(f"row {int(np.argmax(wrong))} has {values[wrong][0]} {name}: give whole numbers from 0 on")
    if (a > n).any():
        row = int(np.argmax(a > n))
        raise InputError(f"row {row} has {a[row]} successes among {n[row]} samples: at most all succeed")
    if (n < 1).any():
        raise InputError(f"row {int(np.argmax(n < 1))} has no sample: leave such inputs out")


__all__ = [
    "LIDFit",
    "SaturatingExponent",
    "beta_eff",
    "bootstrap_interval",
    "check_counts",
    "effective_exponent",
    "fit_lid",
    "hill",
    "window_grid",
]
