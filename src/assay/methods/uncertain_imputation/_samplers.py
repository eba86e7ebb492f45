"""Residual samplers: a label's error, drawn from the reference rows whose privileged information is like the row's own.

Each sampler is built from the residuals and the privileged columns of clean reference rows, and turns uniform numbers
into residuals. Pools are sorted by residual, so that a uniform number means the same residual in whatever order the
reference rows came.
"""

import math
import warnings
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist

from assay._extras import extras

with extras("tables"):
    from sklearn.cluster import KMeans
    from sklearn.ensemble import HistGradientBoostingRegressor

ERRORS = ("knn", "same-z", "bins", "global", "quantile")
TREE_COLUMNS = 8  # a k-d tree up to here, chunked brute force above
CHUNK = 4_000_000  # distances held at a time
TIE = 1.0 + 1e-12  # distances that differ by less are the same distance, summed in another order


@runtime_checkable
class ResidualSampler(Protocol):
    """Turns uniform numbers into residuals."""

    def draw(self, Z: Float[np.ndarray, "m columns"], uniforms: Float[np.ndarray, "m draws"]) -> np.ndarray:
        """Residuals (m, draws) for rows with these privileged columns, one for each uniform number in [0, 1)."""


def residual_sampler(
    errors: str,
    residuals: Float[np.ndarray, " n"],
    Z: Float[np.ndarray, "n columns"],
    *,
    min_pool: int = 20,
    seed: int = 0,
) -> ResidualSampler:
    """The sampler of a name.

    Parameters
    ----------
    errors
        "knn", "same-z", "bins", "global" or "quantile".
    residuals, Z : (n,), (n, columns)
        Of the clean reference rows, in any order.
    min_pool
        Of "same-z".
    seed
        Of the k-means cells and of the quantile sampler's two halves.
    """
    order = np.lexsort((*Z.T[::-1], residuals))  # by residual, then by z: nothing below depends on the rows' order
    residuals, Z = residuals[order], Z[order]
    if errors == "knn":
        return NearestResiduals(residuals, Z)
    if errors == "same-z":
        return SameZResiduals(residuals, Z, min_pool)
    if errors == "bins":
        return CellResiduals(residuals, Z, seed)
    if errors == "global":
        return AnyResidual(residuals)
    if errors == "quantile":
        return QuantileResiduals(residuals, Z, seed)
    raise ValueError(f"errors must be one of {', '.join(ERRORS)}, got {errors!r}")


class AnyResidual:
    """Any residual: valid only where the error does not depend on Z."""

    def __init__(self, residuals: np.ndarray) -> None:
        self.residuals = residuals

    def draw(self, Z: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return _pick(self.residuals, uniforms)


class NearestResiduals:
    """A residual of the k nearest rows in standardised Z; rows that tie at the k-th distance are all in the pool."""

    def __init__(self, residuals: np.ndarray, Z: np.ndarray) -> None:
        self.residuals = residuals
        self.scaling = _Scaling(Z)
        self.points = self.scaling(Z)
        n = len(residuals)
        self.k = min(n, max(20, math.ceil(math.sqrt(n))))
        self.tree = KDTree(self.points) if Z.shape[1] <= TREE_COLUMNS else None

    def draw(self, Z: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        unique, member = np.unique(Z, axis=0, return_inverse=True)  # equal rows of Z are looked up once
        member = member.reshape(-1)
        drawn = np.empty_like(uniforms)
        order = np.argsort(member, kind="stable")
        ends = np.cumsum(np.bincount(member, minlength=len(unique)))
        for row, (pool, end) in enumerate(zip(self._pools(self.scaling(unique)), ends)):
            rows = order[ends[row - 1] if row else 0 : end]
            drawn[rows] = _pick(self.residuals[pool], uniforms[rows])
        return drawn

    def pool(self, z: np.ndarray) -> np.ndarray:
        """The sorted residuals from which a row with these privileged columns draws."""
        return self.residuals[next(self._pools(self.scaling(np.reshape(z, (1, -1)))))]

    def _pools(self, points: np.ndarray):
        """Sorted indices of each point's pool."""
        n, k = len(self.residuals), self.k
        if self.tree is None:
            step = max(1, CHUNK // n)
            for start in range(0, len(points), step):
                distance = cdist(points[start : start + step], self.points)
                furthest = np.partition(distance, k - 1, axis=1)[:, k - 1]
                for row, limit in zip(distance, furthest):
                    yield np.flatnonzero(row <= limit * TIE)
            return
        step = max(1, CHUNK // (k + 1))
        for start in range(0, len(points), step):
            chunk = points[start : start + step]
            distance, index = self.tree.query(chunk, k=range(1, min(k + 1, n) + 1))
            for z, d, near in zip(chunk, distance, index):
                limit = d[k - 1] * TIE
                if k < n and d[k] <= limit:  # a tie: fetch all of them
                    near = np.asarray(self.tree.query_ball_point(z, limit))
                else:
                    near = near[:k]
                yield np.sort(near)


class SameZResiduals:
    """A residual of a row with equal Z; a pool that is too small takes in the pools nearest in standardised Z, whole.

    Source: section 3 of the paper, which defines the error given Z for discrete Z.
    """

    def __init__(self, residuals: np.ndarray, Z: np.ndarray, min_pool: int) -> None:
        self.residuals, self.min_pool = residuals, min_pool
        self.scaling = _Scaling(Z)
        self.values, member = np.unique(Z, axis=0, return_inverse=True)
        self.members = [np.flatnonzero(member.reshape(-1) == i) for i in range(len(self.values))]
        self.sizes = np.array([len(m) for m in self.members])

    def draw(self, Z: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        unique, member = np.unique(Z, axis=0, return_inverse=True)
        member = member.reshape(-1)
        drawn = np.empty_like(uniforms)
        enlarged = 0
        for i, z in enumerate(unique):
            pool, alone = self._pool(z)
            enlarged += not alone
            rows = member == i
            drawn[rows] = _pick(self.residuals[pool], uniforms[rows])
        if enlarged:
            warnings.warn(
                f"{enlarged} of {len(unique)} values of Z have fewer than {self.min_pool} clean reference rows: their "
                'pools were filled from the nearest values (errors="knn" suits a Z with many values)',
                stacklevel=3,
            )
        return drawn

    def _pool(self, z: np.ndarray) -> tuple[np.ndarray, bool]:
        distance = cdist(self.scaling(z[None]), self.scaling(self.values))[0]
        nearest = np.argsort(distance, kind="stable")
        enough = int(np.searchsorted(np.cumsum(self.sizes[nearest]), self.min_pool)) + 1
        chosen = nearest[:enough]
        alone = len(chosen) == 1 and bool((self.values[chosen[0]] == z).all())
        return np.sort(np.concatenate([self.members[i] for i in chosen])), alone


class CellResiduals:
    """A residual of the row's k-means cell of standardised Z, about 50 reference rows a cell."""

    def __init__(self, residuals: np.ndarray, Z: np.ndarray, seed: int) -> None:
        self.residuals = residuals
        self.scaling = _Scaling(Z)
        points = self.scaling(Z)
        cells = min(max(1, len(residuals) // 50), len(np.unique(points, axis=0)))
        self.centres = KMeans(cells, n_init=1, random_state=seed).fit(points).cluster_centers_
        own = self._cell(points)
        filled = np.unique(own)
        self.centres, own = self.centres[filled], np.searchsorted(filled, own)
        self.members = [np.flatnonzero(own == i) for i in range(len(self.centres))]

    def draw(self, Z: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        cell = self._cell(self.scaling(Z))
        drawn = np.empty_like(uniforms)
        for i in np.unique(cell):
            drawn[cell == i] = _pick(self.residuals[self.members[i]], uniforms[cell == i])
        return drawn

    def _cell(self, points: np.ndarray) -> np.ndarray:
        step = max(1, CHUNK // len(self.centres))
        nearest = [cdist(points[i : i + step], self.centres).argmin(axis=1) for i in range(0, len(points), step)]
        return np.concatenate(nearest)


class QuantileResiduals:
    """Boosted quantiles of the residual given Z, 0.05 to 0.95, joined by straight lines; tails from held-out excesses."""

    levels = np.arange(1, 20) / 20.0

    def __init__(self, residuals: np.ndarray, Z: np.ndarray, seed: int) -> None:
        half = np.random.default_rng(seed).permutation(len(residuals)) < (len(residuals) + 1) // 2
        # Small trees of large leaves: a quantile that follows single residuals is too narrow.
        self.models = [
            HistGradientBoostingRegressor(
                loss="quantile",
                quantile=level,
                max_iter=50,
                max_leaf_nodes=8,
                min_samples_leaf=50,
                early_stopping=False,
                random_state=seed,
            ).fit(Z[half], residuals[half])
            for level in self.levels
        ]
        self.below = self.above = np.empty(0)
        if (~half).any():
            quantiles = self._quantiles(Z[~half])
            low, high = residuals[~half] - quantiles[:, 0], residuals[~half] - quantiles[:, -1]
            self.below, self.above = np.sort(low[low < 0]), np.sort(high[high > 0])

    def draw(self, Z: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        quantiles = self._quantiles(Z)
        drawn = np.empty_like(uniforms)
        for row, (q, u) in enumerate(zip(quantiles, uniforms)):
            drawn[row] = np.interp(u, self.levels, q)
        first, last = self.levels[0], self.levels[-1]
        if len(self.below):
            tail = uniforms < first
            drawn[tail] += _pick(self.below, uniforms[tail] / first)
        if len(self.above):
            tail = uniforms > last
            drawn[tail] += _pick(self.above, (uniforms[tail] - last) / (1.0 - last))
        return drawn

    def _quantiles(self, Z: np.ndarray) -> np.ndarray:
        return np.sort(np.stack([model.predict(Z) for model in self.models], axis=1), axis=1)


class _Scaling:
    """Standardise by mean and standard deviation; a constant column is divided by 1."""

    def __init__(self, Z: np.ndarray) -> None:
        self.mean, sd = Z.mean(axis=0), Z.std(axis=0)
        # A constant column can have a spread of rounding errors.
        self.sd = np.where(sd > 1e-12 * np.abs(self.mean), sd, 1.0)

    def __call__(self, Z: np.ndarray) -> np.ndarray:
        return (Z - self.mean) / self.sd


def _pick(pool: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """The member of a pool that each uniform number in [0, 1) names; all alike."""
    return pool[np.minimum((uniforms * len(pool)).astype(np.intp), len(pool) - 1)]
