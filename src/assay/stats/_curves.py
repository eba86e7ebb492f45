"""Learning curves: smoothing, and how much sooner one reaches where another ends."""

import numpy as np
from jaxtyping import Float


def running_median(values: Float[np.ndarray, "step"], window: int = 5) -> Float[np.ndarray, "step"]:
    """The median of each value and its neighbours; at the ends, of those that there are.

    Parameters
    ----------
    values : (step,)
    window
        Odd: how many values.

    Raises
    ------
    ValueError
        If the window is not odd and positive.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"a running median needs an odd window, got {window}: it has a middle")
    side = window // 2
    return np.array([np.median(values[max(0, i - side) : i + side + 1]) for i in range(values.size)])


def reached(steps: Float[np.ndarray, "step"], values: Float[np.ndarray, "step"], target: float, falls: bool) -> float:
    """The first step at which a curve is at its target or beyond; its last step where it never is.

    Parameters
    ----------
    steps, values : (step,)
        The curve, smoothed where it is noisy.
    target
        The value to reach.
    falls
        Whether lower is better.
    """
    there = values <= target if falls else values >= target
    return float(steps[np.argmax(there)] if there.any() else steps[-1])


def speedup(x: Float[np.ndarray, "xstep 2"], y: Float[np.ndarray, "ystep 2"]) -> float:
    """How many times sooner curve x reaches the last value of curve y than y does itself.

    Both are smoothed by a running median of five. Whether lower or higher is better is read off y: from its first to its
    last value. y's own time is its first step there, not its last step, so that a curve compared with itself gives 1
    even where it has been flat for long. An x that never gets there counts as its last step.

    Parameters
    ----------
    x, y : (step, 2)
        Step and value, in any order of steps.

    Returns
    -------
    Step of y over step of x: above 1 where x is sooner; inf where x is there at step 0; nan where y does not move.
    """
    x, y = (curve[np.argsort(curve[:, 0], kind="stable")] for curve in (x, y))
    smooth_x, smooth_y = running_median(x[:, 1]), running_median(y[:, 1])
    first, last = float(smooth_y[0]), float(smooth_y[-1])
    if first == last:
        return float("nan")
    falls = last < first
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.divide(reached(y[:, 0], smooth_y, last, falls), reached(x[:, 0], smooth_x, last, falls)))
