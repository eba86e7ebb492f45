"""A straight line through a few points, many lines at once."""

import numpy as np
from jaxtyping import Float


def slope(x: Float[np.ndarray, "point"], y: Float[np.ndarray, "point *lines"]) -> Float[np.ndarray, "*lines"]:
    """The least-squares slope of y over x.

    Parameters
    ----------
    x : (point,)
        At least two different values.
    y : (point, ...)
        One line for each of the trailing places.

    Raises
    ------
    ValueError
        Where x has fewer than two different values.
    """
    centred = _centred(x)
    return np.asarray(np.tensordot(centred, y - y.mean(axis=0), axes=1) / (centred @ centred))


def exponent(x: Float[np.ndarray, "point"], y: Float[np.ndarray, "point *lines"]) -> Float[np.ndarray, "*lines"]:
    """The b of y = a x**b: the least-squares slope of log y over log x; nan where an x or y is not positive.

    Parameters
    ----------
    x : (point,)
        At least two different values.
    y : (point, ...)
        One line for each of the trailing places.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return slope(np.log(x), np.log(np.where(y > 0, y, np.nan)))


def r2(x: Float[np.ndarray, "point"], y: Float[np.ndarray, "point *lines"]) -> Float[np.ndarray, "*lines"]:
    """How straight y is over x: the share of its variance that the least-squares line takes; nan where y is constant.

    Parameters
    ----------
    x : (point,)
        At least two different values.
    y : (point, ...)
        One line for each of the trailing places.
    """
    centred = _centred(x)
    deviations = y - y.mean(axis=0)
    total = np.sum(deviations * deviations, axis=0)
    flat = total <= 1e-24 * np.max(np.abs(y), axis=0) ** 2
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.tensordot(centred, deviations, axes=1) ** 2 / (centred @ centred) / total
    return np.asarray(np.where(flat, np.nan, np.minimum(share, 1.0)))


def spread(y: Float[np.ndarray, "point *lines"]) -> Float[np.ndarray, "*lines"]:
    """The largest minus the smallest of the points. Noise makes it grow: it is never negative.

    Parameters
    ----------
    y : (point, ...)
    """
    return np.asarray(y.max(axis=0) - y.min(axis=0))


def _centred(x: np.ndarray) -> np.ndarray:
    if np.unique(x).size < 2:
        raise ValueError(f"a line needs at least two different values of x, got {x.tolist()}")
    return x - x.mean()
