"""The solvable model: a linear teacher whose inputs differ in how noisy their answers are."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import brentq

from assay._errors import InputError
from assay.methods.lid_scaling._laws import check_parameters


class Sample(NamedTuple):
    """Training data.

    Attributes
    ----------
    X : (N, d)
    y : (N,)
        One answer an input.
    tau : (N,)
        Precisions, which a learner does not see.
    """

    X: ndarray
    y: ndarray
    tau: ndarray


class LIDModel:
    """x ~ N(0, Lambda), tau ~ Gamma(beta/2), Y ~ N(x . theta, sigma^2 / tau): the difficulty of an input is its 1/tau.

    Parameters
    ----------
    d
        Features.
    beta
        Exponent of the difficulty tail: P(tau <= t) ~ t^(beta/2). At most 2, the mean variance of an answer is infinite.
    sigma
        Scale of the noise.
    alpha
        Of the spectrum lambda_j = j^-(1 + alpha); None: isotropic.
    theta : (d,)
        The teacher; None: drawn, of a length near one.
    seed
        Of everything that is drawn.

    Raises
    ------
    InputError
        If a parameter is out of its range.

    Source: arXiv:2601.03764, Section 2.
    """

    def __init__(
        self,
        d: int,
        beta: float,
        sigma: float = 1e-3,
        alpha: float | None = None,
        theta: Float[ndarray, " d"] | None = None,
        seed: int = 0,
    ) -> None:
        check_parameters(beta, 1.0, 0.0)
        if d < 1 or not (sigma > 0 and math.isfinite(sigma)):
            raise InputError(f"d is {d} and sigma {sigma}: give at least one feature, and a noise above 0")
        if alpha is not None and not alpha > 0:
            raise InputError(f"alpha is {alpha}, of a spectrum that can be summed: give a number above 0, or None")
        if beta <= 2:
            warnings.warn(
                f"beta is {beta}: at most 2, the mean variance of an answer is infinite, and L_gen with it",
                stacklevel=2,
            )
        self.d, self.beta, self.sigma, self.alpha = d, beta, sigma, alpha
        self._rng = np.random.default_rng(seed)
        self.spectrum = np.ones(d) if alpha is None else np.arange(1, d + 1.0) ** -(1 + alpha)
        self.theta = (
            self._rng.standard_normal(d) / math.sqrt(d) if theta is None else np.asarray(theta, dtype=np.float64)
        )
        if self.theta.shape != (d,) or not np.all(np.isfinite(self.theta)):
            raise InputError(f"theta has the shape {self.theta.shape}: give {d} finite numbers")

    @property
    def noise(self) -> float:
        """sigma^2 E[1/tau], infinite for beta <= 2."""
        return self.sigma**2 / (self.beta / 2 - 1) if self.beta > 2 else math.inf

    def sample(self, N: int) -> Sample:
        """Training inputs, with one answer each.

        Parameters
        ----------
        N
            How many, at least 1.
        """
        if N < 1:
            raise InputError(f"N is {N}, the number of training inputs: give at least 1")
        X = self._rng.standard_normal((N, self.d)) * np.sqrt(self.spectrum)
        tau = np.maximum(self._rng.gamma(self.beta / 2, size=N), 1e-300)
        return Sample(X, self.draws(X, tau, 1)[:, 0], tau)

    def draws(self, X: Float[ndarray, "N d"], tau: Float[ndarray, " N"], k: int) -> Float[ndarray, "N k"]:
        """Fresh answers.

        Parameters
        ----------
        X, tau
            Inputs and their precisions.
        k
            Answers an input.
        """
        noise = self._rng.standard_normal((len(X), k)) * (self.sigma / np.sqrt(tau))[:, None]
        return (X @ self.theta)[:, None] + noise

    def fit_ridge(self, X: Float[ndarray, "N d"], y: Float[ndarray, " N"], lam: float = 1e-9) -> Float[ndarray, " d"]:
        """theta = (X^T X / N + lam I)^-1 X^T y / N, by singular values: the same below, at and above N = d.

        Parameters
        ----------
        X, y
            Inputs and answers.
        lam
            Ridge; 0: least squares of least norm (with a warning at N = d, where that is nearly singular).
        """
        if lam < 0:
            raise InputError(f"lam is {lam}, a ridge: give a number from 0 on")
        N, d = X.shape
        if lam == 0 and d == N:
            warnings.warn(f"without a ridge, N = d = {d} is the interpolation peak: give lam", stacklevel=2)
        u, s, vt = np.linalg.svd(X, full_matrices=False)
        if lam == 0:
            s = np.where(s > s.max() * max(N, d) * np.finfo(float).eps, s, np.inf)
        return vt.T @ ((u.T @ y) * s / (s**2 + N * lam) if lam else (u.T @ y) / s)

    def gen_error(self, theta_hat: Float[ndarray, " d"]) -> float:
        """L_gen = E_x[(x . theta_hat - x . theta)^2], exactly: the variance of the bias over inputs.

        Parameters
        ----------
        theta_hat
            What was learned.
        """
        return float(((theta_hat - self.theta) ** 2) @ self.spectrum)

    def expected_gen_error(self, N: int, lam: float = 0.0) -> float:
        """The mean of L_gen over training sets.

        Without a ridge and for N > d + 1 it is exactly sigma^2 E[1/tau] d / (N - d - 1), for every Gaussian x; elsewhere the
        deterministic equivalent of ridge regression. nan for beta <= 2.

        Parameters
        ----------
        N
            Training inputs.
        lam
            Ridge.
        """
        if N < 1 or lam < 0:
            raise InputError(f"N is {N} and lam {lam}: give at least one input and a ridge from 0 on")
        if self.beta <= 2:
            return math.nan
        if lam == 0 and self.d + 1 < N:
            return self.noise * self.d / (N - self.d - 1)
        if lam == 0 and self.d - 1 <= N:
            return math.inf  # the interpolation peak
        spectrum = self.spectrum

        def off(kappa: float) -> float:
            return kappa - lam - kappa * float((spectrum / (spectrum + kappa)).sum()) / N

        high = lam + float(spectrum.sum()) / N + 1e-12
        kappa = brentq(off, 1e-300 if lam == 0 else lam * (1 - 1e-12), high, xtol=1e-18) if off(high) > 0 else high
        shrunk = spectrum / (spectrum + kappa)
        share = float((shrunk**2).sum()) / N
        bias = kappa**2 * float((spectrum * self.theta**2 / (spectrum + kappa) ** 2).sum())
        return (bias + self.noise * share) / (1 - share)

    def noise_error(self, X: Float[ndarray, "N d"]) -> float:
        """The mean of L_gen over answers, these inputs given: sigma^2 E[1/tau] tr(Lambda (X^T X)^-1), for N > d.

        Parameters
        ----------
        X
            Training inputs.
        """
        if len(X) <= self.d:
            raise InputError(f"{len(X)} inputs do not determine {self.d} features: give more")
        return self.noise * float(np.trace(np.linalg.solve(X.T @ X, np.diag(self.spectrum))))
