"""How often at least one of k answers is right, from n that were sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Counts = np.ndarray | Sequence[float] | Sequence[int] | float | int


def pass_at_k(n: Counts, c: Counts, k: Counts) -> NDArray[np.float64]:
    """1 - C(n - c, k) / C(n, k), of each problem: the unbiased estimate of the chance that k fresh answers hold a right one.

    Parameters
    ----------
    n : (problems,)
        Answers that were sampled; may differ from problem to problem.
    c : (problems,)
        Of them right.
    k
        Answers drawn: a number, or (draws,).

    Returns
    -------
    (problems,) for one k, (draws, problems) for several

    Raises
    ------
    ValueError
        If a count is negative or no whole number, c exceeds n, or k is not within 1 and every n.

    Source: Chen et al. 2021, "Evaluating large language models trained on code", equation 1.
    """
    n, c = np.broadcast_arrays(np.asarray(n, dtype=np.float64), np.asarray(c, dtype=np.float64))
    draws = np.asarray(k, dtype=np.float64)
    for name, values in (("n", n), ("c", c), ("k", draws)):
        if not np.all(np.isfinite(values)) or np.any(values != np.floor(values)) or np.any(values < 0):
            raise ValueError(f"{name} has a value that is no count: give whole numbers from 0 on")
    if np.any(c > n):
        raise ValueError(f"{int((c > n).sum())} problems have more right answers than answers: c is at most n")
    if np.any(draws < 1):
        raise ValueError(f"k is {draws.min():g}: give at least 1")
    if n.size and draws.max(initial=0) > n.min():
        few = int((n < draws.max()).sum())
        raise ValueError(
            f"k is {draws.max():g}, but {few} problems have fewer answers (row {int(np.argmin(n))} has {n.min():g}): draws "
            "without replacement need k <= n"
        )
    drawn = draws[..., None] if draws.ndim else draws
    fewer, more, n = np.broadcast_arrays(
        np.minimum(c, drawn), np.maximum(c, drawn), n
    )  # the ratio is symmetric in c and k
    log = np.zeros(n.shape)
    with np.errstate(divide="ignore"):  # as many draws as wrong answers, and one more
        for i in range(int(fewer.max(initial=0))):
            log += np.where(i < fewer, np.log1p(-np.minimum(more / np.maximum(n - i, 1), 1.0)), 0.0)
    return np.asarray(-np.expm1(log))


__all__ = ["pass_at_k"]
