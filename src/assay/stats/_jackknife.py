"""The jackknife over cases: what a number would be without each case, and the standard error that this gives.

Every function ``<statistic>_without`` gives the statistic of all cases first, then without each group of cases in turn.
A group is one case as long as there are at most 500; a jackknife over more costs time and tells no more.
"""

import numpy as np
from jaxtyping import Float, Int, Num

SINGLE_CASES = 500  # up to here each case is a group of its own
GROUPS = 250  # beyond, this many groups: the standard error is then known to about 4 %


def case_groups(cases: int) -> Int[np.ndarray, "case"]:
    """The group of each case: its own up to 500 cases, else one of 250 groups of equal size (within one).

    Cases are dealt out in a fixed random order, so that an order in the data (by layer, by class) does not end up in
    the groups, and the same number of cases always gives the same groups.

    Parameters
    ----------
    cases
        How many, at least one.
    """
    if cases <= SINGLE_CASES:
        return np.arange(cases)
    return np.random.default_rng(0).permutation(np.arange(cases) % GROUPS)


def mean_without(
    values: Float[np.ndarray, "case"], groups: Int[np.ndarray, "case"], count: int
) -> Float[np.ndarray, "{count}+1"]:
    """The mean of all cases, then without each of the groups 0 to count - 1.

    A group without cases here leaves the mean as it is; where nothing is left it is nan.

    Parameters
    ----------
    values, groups : (case,)
        The value and the group of each case.
    count
        How many groups there are.
    """
    return weighted_mean(np.bincount(groups, values, count), np.bincount(groups, minlength=count))


def weighted_mean(sums: Float[np.ndarray, "group"], sizes: Num[np.ndarray, "group"]) -> Float[np.ndarray, "group+1"]:
    """The mean of all groups together, then without each, from their sums and sizes."""
    total, cases = sums.sum(), sizes.sum()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.concatenate([[total / cases], (total - sums) / (cases - sizes)])


def jackknife(
    whole: float, without: Float[np.ndarray, "group"], sizes: Int[np.ndarray, "group"]
) -> tuple[float, float, int]:
    """Centre, standard error and degrees of freedom of a statistic, from its values without each group of cases.

    The centre is the mean of the pseudo-values, which takes out the bias of order 1/n. With one case a group this is the
    ordinary jackknife, and for a mean it is the textbook standard error.

    Parameters
    ----------
    whole
        The statistic of all cases.
    without : (group,)
        The statistic without each group.
    sizes : (group,)
        Cases in each group; groups may differ in size.

    Returns
    -------
    centre, standard error, degrees of freedom (groups - 1).

    Raises
    ------
    ValueError
        With fewer than two groups.

    Source: Tukey 1958; for groups of unequal sizes Busing, Meijer and van der Leeden 1999, eqs. 3 and 5.
    """
    count = without.size
    if count < 2:
        raise ValueError(f"a jackknife needs at least two groups of cases, got {count}")
    ratio = sizes.sum() / sizes
    # written as differences from the whole, so that nothing is lost where the statistic is large and its spread small
    shift = (ratio - 1) * (whole - without)
    centre_shift = float(np.sum(shift / ratio))
    variance = float(np.mean(np.square(shift - centre_shift) / (ratio - 1)))
    return whole + centre_shift, float(np.sqrt(variance)), count - 1
