"""Correlations and the area under the ROC curve, of all cases and without each group of them."""

import numpy as np
from jaxtyping import Bool, Float, Int

_CHUNK = 4_000_000  # entries of the largest array in between: 32 MB


def pearson(x: Float[np.ndarray, "case"], y: Float[np.ndarray, "case"]) -> float:
    """Pearson's correlation; nan where one side is constant."""
    return float(pearson_without(x, y, np.zeros(x.size, dtype=int), 1)[0])


def spearman(x: Float[np.ndarray, "case"], y: Float[np.ndarray, "case"]) -> float:
    """Spearman's correlation: Pearson's of the ranks, ties at their mean rank; nan where one side is constant."""
    return float(spearman_without(x, y, np.zeros(x.size, dtype=int), 1)[0])


def auc(score: Float[np.ndarray, "case"], positive: Bool[np.ndarray, "case"]) -> float:
    """The chance that a positive case scores above a negative one, ties counting half; nan without both classes."""
    return float(auc_without(score, positive, np.zeros(score.size, dtype=int), 1)[0])


def fisher_z(r: Float[np.ndarray, "*shape"], cases: int) -> Float[np.ndarray, "*shape"]:
    """Fisher's z, ``atanh(r)``, on which correlations are averaged.

    At exactly 1 and -1, where z is infinite, r counts as ``1 - 6 / (n**3 - n)``: half a step of Spearman's scale short.

    Parameters
    ----------
    r
        Correlations.
    cases
        The n that they rest on, at least two.
    """
    edge = 1 - 6 / (cases**3 - cases)
    perfect = np.abs(r) >= 1 - 1e-12
    with np.errstate(invalid="ignore"):
        return np.asarray(np.arctanh(np.where(perfect, np.sign(r) * edge, r)))


def from_fisher_z(z: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """The correlation of a z."""
    return np.asarray(np.tanh(z))


def pearson_without(
    x: Float[np.ndarray, "case"], y: Float[np.ndarray, "case"], groups: Int[np.ndarray, "case"], count: int
) -> Float[np.ndarray, "{count}+1"]:
    """Pearson's correlation of all cases, then without each group.

    Parameters
    ----------
    x, y, groups : (case,)
        The two values and the group of each case.
    count
        How many groups there are.
    """
    u, v = _standard(x), _standard(y)
    if u is None or v is None:
        return np.full(count + 1, np.nan)

    def sums(values: np.ndarray) -> np.ndarray:
        by_group = np.bincount(groups, values, count)
        return np.concatenate([[by_group.sum()], by_group.sum() - by_group])

    n, sx, sy, sxx, syy, sxy = (sums(w) for w in (np.ones_like(u), u, v, u * u, v * v, u * v))
    with np.errstate(invalid="ignore", divide="ignore"):
        vx, vy = sxx - sx * sx / n, syy - sy * sy / n
        # what is left of a variance after cancellation is no spread
        flat = (vx <= 1e-12 * n) | (vy <= 1e-12 * n)
        r = (sxy - sx * sy / n) / np.sqrt(vx * vy)
    return np.where(flat, np.nan, np.clip(r, -1, 1))


def spearman_without(
    x: Float[np.ndarray, "case"], y: Float[np.ndarray, "case"], groups: Int[np.ndarray, "case"], count: int
) -> Float[np.ndarray, "{count}+1"]:
    """Spearman's correlation of all cases, then without each group, whose cases are ranked anew.

    Parameters
    ----------
    x, y, groups : (case,)
        The two values and the group of each case.
    count
        How many groups there are.
    """
    n = x.size
    rx, ry = _ranks(x), _ranks(y)
    found = [np.array([_rank_correlation(rx, ry)])]
    # all ranks are counted double, so that those of ties are whole numbers
    double_x, double_y = (2 * rx).astype(np.int32), (2 * ry).astype(np.int32)
    step = max(1, _CHUNK // n)
    for start in range(0, count, step):
        chosen = np.arange(start, min(start + step, count))
        gone = groups[None, :] == chosen[:, None]
        centre = n - gone.sum(axis=1, keepdims=True) + 1  # double the mean of the ranks 1 to m, ties or not
        a = (double_x - _ranked_below(x, groups, chosen) - centre).astype(float)
        b = (double_y - _ranked_below(y, groups, chosen) - centre).astype(float)
        a[gone] = b[gone] = 0
        with np.errstate(invalid="ignore", divide="ignore"):
            norm = np.sqrt(np.einsum("gc,gc->g", a, a) * np.einsum("gc,gc->g", b, b))
            found.append(np.einsum("gc,gc->g", a, b) / norm)
    return np.clip(np.concatenate(found), -1, 1)


def auc_without(
    score: Float[np.ndarray, "case"], positive: Bool[np.ndarray, "case"], groups: Int[np.ndarray, "case"], count: int
) -> Float[np.ndarray, "{count}+1"]:
    """The area under the ROC curve of all cases, then without each group.

    Parameters
    ----------
    score : (case,)
        Higher means more likely positive.
    positive : (case,)
        The class.
    groups : (case,)
        The group of each case.
    count
        How many groups there are.

    Source: the Mann-Whitney statistic; without a group, its won pairs are those of all cases, less those that the group
    has part in (its pairs with everybody, where the pairs within it were taken off twice).
    """
    won = np.where(positive, _wins(score, score[~positive]), _wins(-score, -score[positive]))
    pairs_won = won[positive].sum()
    taken = np.bincount(groups, won, count)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=count))
    for g, part in enumerate(np.split(order, ends[:-1])):
        if part.size > 1:
            inside = positive[part]
            taken[g] -= _wins(score[part][inside], score[part][~inside]).sum()
    p = np.bincount(groups, positive, count)
    q = np.bincount(groups, ~positive, count)
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = pairs_won / (p.sum() * q.sum())
        return np.concatenate([[whole], (pairs_won - taken) / ((p.sum() - p) * (q.sum() - q))])


def _standard(values: np.ndarray) -> np.ndarray | None:
    """Mean 0 and deviation 1, or None where there is no spread beyond rounding."""
    centred = values - values.mean()
    deviation = centred.std()
    if not deviation > 1e-13 * np.abs(values).max(initial=0.0):
        return None
    return centred / deviation


def _ranks(values: np.ndarray) -> np.ndarray:
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right") + 1) / 2


def _rank_correlation(rx: np.ndarray, ry: np.ndarray) -> float:
    a, b = rx - rx.mean(), ry - ry.mean()
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _ranked_below(values: np.ndarray, groups: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """How much double the rank of each case falls when each chosen group leaves. (group, case)

    By two for each member below the case, by one for each that ties with it.
    """
    order = np.argsort(values, kind="stable")
    up_to = np.zeros((chosen.size, values.size + 1), np.int32)
    np.cumsum(groups[order][None, :] == chosen[:, None], axis=1, out=up_to[:, 1:], dtype=np.int32)
    ordered = values[order]
    below = up_to.take(np.searchsorted(ordered, values, "left"), axis=1)
    return below + up_to.take(np.searchsorted(ordered, values, "right"), axis=1)


def _wins(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each of one, how many of the others lie below, ties counting half."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, one, "left") + np.searchsorted(ordered, one, "right")) / 2
