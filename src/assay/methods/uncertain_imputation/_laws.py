"""The laws that the studies draw from: X, y, Z and the chance of corruption, each known exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from assay.methods.uncertain_imputation._corruption import Corruption

PRIVILEGED_SLOPE = 0.8
_B = np.random.default_rng(0).random(15)
COEFFICIENTS = _B / _B.sum()  # of the released generator's 15 features: drawn once, sum 1


class Draw(NamedTuple):
    """Rows of a law: X (n, features), y (n,), Z (n, 1), and P(M = 1 | Z) as a function of Z."""

    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    corruption: Callable[[np.ndarray], np.ndarray]


def spread(z: np.ndarray) -> np.ndarray:
    """u(z): 0.5 below -3, 1 up to 1, 4 from there."""
    return np.where(z < -3, 0.5, np.where(z < 1, 1.0, 4.0))


def response(x: np.ndarray, z: np.ndarray, noise: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """y of the released generator: a line in x and z, with noise whose spread depends on z."""
    return 0.3 * (x @ coefficients) + PRIVILEGED_SLOPE * z + 0.2 + 2 * spread(z) * noise


def synthetic(n: int, generator: np.random.Generator, rate: float = 0.2, *, mirror: bool = False) -> Draw:
    """The released generator: Z explains y and the spread of y, and X does not.

    Parameters
    ----------
    mirror
        Corrupt by -z: then clean rows have the larger scores, and naive conformal prediction over-covers.

    Source: github.com/Shai128/pcp, PartiallyLinearDataGenerator.
    """
    x = generator.uniform(1, 5, (n, 15))
    counts = generator.poisson(np.cos(generator.standard_normal(n)) ** 2 + 0.1)
    z = counts * generator.uniform(-1, 1, n) + 2 * generator.standard_normal(n)
    y = response(x, z, generator.standard_normal(n), COEFFICIENTS)
    sign = -1.0 if mirror else 1.0
    rule = Corruption.fit(sign * z, rate, standardize=False)
    return Draw(x, y, z[:, None], lambda Z: rule.probability(sign * Z))


def vee(n: int, generator: np.random.Generator) -> Draw:
    """Labels are lost at both ends of z: a propensity that is monotone in z cannot learn it."""
    x, z = generator.uniform(1, 5, (n, 5)), 2 * generator.standard_normal(n)
    y = 0.3 * x.mean(axis=1) + 0.5 * np.abs(z) + (0.5 + 0.5 * np.abs(z)) * generator.standard_normal(n)
    return Draw(x, y, z[:, None], lambda Z: np.where(np.abs(Z[:, 0]) > 2.2, 0.7, 0.05))


def bands(n: int, generator: np.random.Generator) -> Draw:
    """Labels are lost in narrow bands of z where y is larger: there the imputer has little to learn from."""
    x, z = generator.uniform(1, 5, (n, 5)), generator.random(n)
    inside = _in_band(z)
    y = 0.3 * x.mean(axis=1) + 3 * inside + 0.5 * (1 + inside) * generator.standard_normal(n)
    return Draw(x, y, z[:, None], lambda Z: np.where(_in_band(Z[:, 0]), 0.8, 0.0))


def revealed(n: int, generator: np.random.Generator, rate: float = 0.2) -> Draw:
    """Z is X: the true quantiles of y given X make naive conformal prediction valid."""
    z = 2 * generator.standard_normal(n)
    y = PRIVILEGED_SLOPE * z + 2 * spread(z) * generator.standard_normal(n)
    rule = Corruption.fit(z, rate, standardize=False)
    return Draw(z[:, None], y, z[:, None], rule.probability)


def _in_band(z: np.ndarray) -> np.ndarray:
    return (12.5 * z) % 1 < 0.25
