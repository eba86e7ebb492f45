"""The corruption of the experiments: labels go missing, or wrong, with a chance that privileged columns explain."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Real

POWERS = np.arange(1, 1000) / 100.0  # the grid of the released code
RATE_TOLERANCE = 0.005


@dataclass(frozen=True)
class Corruption:
    """A chance of corruption that rises with z: zero below the 75th percentile, then a power of z.

    Attributes
    ----------
    mean, sd : (columns,)
        What each column of Z is standardised by before the columns are averaged to z.
    shift, q75, q85, q90, extreme
        Of z; all but ``shift`` after the shift. ``extreme`` is 1.2 times the 99.9th percentile.
    power
        The k of (z / q90)**k that gives the rate.

    Source: github.com/Shai128/pcp, DefaultDataCorruptionMasker and ZMeanReducer; theirs averages raw columns.
    """

    mean: np.ndarray
    sd: np.ndarray
    shift: float
    q75: float
    q85: float
    q90: float
    extreme: float
    power: float

    @classmethod
    def fit(cls, Z: Any, rate: float, *, standardize: bool = True) -> "Corruption":
        """The rule whose mean over the rows of Z is ``rate``.

        Parameters
        ----------
        Z : (n,) or (n, columns)
        rate
            Mean chance of corruption. Only a quarter of the rows can be corrupted, so it must stay below 0.25.
        standardize
            Standardise each column before averaging; False averages the raw columns, as the released code does.

        Raises
        ------
        ValueError
            If no power on the grid comes within 0.005 of the rate, with the range that is reachable.
        """
        columns = _as_columns(Z)
        mean = columns.mean(axis=0) if standardize else np.zeros(columns.shape[1])
        sd = columns.std(axis=0) if standardize else np.ones(columns.shape[1])
        sd = np.where(sd > 0, sd, 1.0)
        z = ((columns - mean) / sd).mean(axis=1)
        shift = min(float(np.quantile(z, 0.05)), 0.0)
        z = z - shift
        q75, q85, q90, q999 = (float(q) for q in np.quantile(z, [0.75, 0.85, 0.9, 0.999]))
        if q90 <= 0:
            raise ValueError(
                "the 90th percentile of z is not above its 5th: no rate is reachable with this Z, choose others"
            )
        base = np.where(z < q75, 0.0, np.minimum(z, q85) / q90)
        touched = base[base > 0]
        # The mean falls as the power grows, so the nearest power of the grid is found by bisection.
        means: dict[int, float] = {}

        def mean_at(i: int) -> float:
            if i not in means:
                means[i] = float(np.sum(touched ** POWERS[i]) / len(z))
            return means[i]

        low, high = 0, len(POWERS) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if mean_at(middle) >= rate else (low, middle)
        nearest = min((low, high), key=lambda i: abs(mean_at(i) - rate))
        if not abs(mean_at(nearest) - rate) <= RATE_TOLERANCE:
            raise ValueError(
                f"a corruption rate of {rate:g} is out of reach with this Z: choose one between "
                f"{mean_at(len(POWERS) - 1):.4f} and {mean_at(0):.4f}"
            )
        return cls(mean, sd, shift, q75, q85, q90, 1.2 * q999, float(POWERS[nearest]))

    def probability(self, Z: Any) -> Float[np.ndarray, " n"]:
        """The chance that a row with these privileged columns is corrupted.

        Parameters
        ----------
        Z : (n,) or (n, columns)
        """
        z = ((_as_columns(Z) - self.mean) / self.sd).mean(axis=1) - self.shift
        base = np.where(z < self.q75, 0.0, np.minimum(z, self.q85) / self.q90)
        probability = np.where(base > 0, np.power(base, self.power, where=base > 0, out=np.zeros_like(base)), 0.0)
        beyond = z > self.extreme
        probability[beyond] = 0.95 + 0.05 * (1.0 - self.extreme / z[beyond])
        return probability


def corrupt_by_privileged(
    Z: Any, rate: float = 0.2, random_state: Any = None, *, standardize: bool = True
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Decide which rows lose their label, by a chance that the privileged columns explain.

    Parameters
    ----------
    Z : (n,) or (n, columns)
        The rule is set on these rows.
    rate
        Mean chance, below 0.25: only the upper quarter of z can be corrupted.
    random_state
        Seed, or numpy generator.
    standardize
        Standardise each column before they are averaged to z.

    Returns
    -------
    probability, corrupted : (n,), (n,)

    Raises
    ------
    ValueError
        If the rate is out of reach, with the reachable range.

    Source: the paper's experiments, after the released code of PCP.
    """
    probability = Corruption.fit(Z, rate, standardize=standardize).probability(Z)
    return probability, np.random.default_rng(random_state).random(len(probability)) < probability


def wrong_labels(
    y: Real[np.ndarray, " n"],
    corrupted: Bool[np.ndarray, " n"],
    noise: str,
    random_state: Any = None,
) -> Float[np.ndarray, " n"]:
    """The labels with those of corrupted rows made wrong.

    Parameters
    ----------
    y, corrupted : (n,)
    noise
        "shrink": half-way to the mean of y; "disperse": y plus five standard deviations of normal noise.
    random_state
        Seed, or numpy generator.
    """
    y = np.asarray(y, dtype=np.float64)
    if noise == "shrink":
        wrong = (y + y.mean()) / 2
    elif noise == "disperse":
        wrong = y + 5 * y.std() * np.random.default_rng(random_state).standard_normal(len(y))
    else:
        raise ValueError(f'noise must be "shrink" or "disperse", got {noise!r}')
    return np.where(corrupted, wrong, y)


def _as_columns(Z: Any) -> np.ndarray:
    columns = np.asarray(Z, dtype=np.float64)
    columns = columns[:, None] if columns.ndim == 1 else columns
    if columns.ndim != 2 or columns.size == 0 or not np.isfinite(columns).all():
        raise ValueError(f"Z must be finite numbers, one row a point, got shape {np.shape(Z)}")
    return columns
