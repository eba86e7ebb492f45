"""The failure of k draws as its definition has it: an adaptive double integral, one k at a time."""

from __future__ import annotations

import math

from scipy.integrate import dblquad
from scipy.special import gammaln, ndtr


def failure(k: float | int, beta: float, delta: float, v: float, tolerance: float = 1e-6) -> float:
    """E[(1 - s)^k] over log tau and the bias in its standard deviations. The slow twin of `pass_at_k_failure`.

    Parameters
    ----------
    k
        Draws.
    beta, delta, v
        Of the model, lengths over sigma.
    tolerance
        Relative, of the integrator.
    """

    def integrand(z: float, log_tau: float) -> float:
        root, bias = math.exp(log_tau / 2), math.sqrt(v) * z
        success = ndtr((delta - bias) * root) - ndtr((-delta - bias) * root)
        density = math.exp(beta / 2 * log_tau - math.exp(log_tau) - gammaln(beta / 2))
        return float((1 - success) ** k * density * 2 * math.exp(-z * z / 2) / math.sqrt(2 * math.pi))

    lowest = -2 * math.log(k) - 50 / beta  # below, no draw succeeds, and hardly an input is that hard
    return float(dblquad(integrand, max(lowest, -30.0), 4, 0, 9, epsabs=0, epsrel=tolerance)[0])
