"""Failure curves from counts of real answers, and a linear head on real features."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from numpy.typing import ArrayLike
from scipy.special import betaln

from assay._errors import InputError
from assay.methods.lid_scaling._exponent import Window, check_counts, effective_exponent, window_grid
from assay.stats import pass_at_k, spearman

ESTIMATORS = ("raw", "unbiased", "posterior")
PRIOR = 0.1  # of each class


class Exponent(NamedTuple):
    """beta_eff of a data set in a window.

    Attributes
    ----------
    value, low, high
        Estimate and 95 % interval by the bootstrap over inputs.
    window
        First and last k.
    supported
        Largest k that the counts themselves can tell of.
    """

    value: float
    low: float
    high: float
    window: Window
    supported: int


class PassAtK:
    """Failure of k draws, from counts of successes: `PassAtK(a, n)`, or of votes for classes: `PassAtK(votes=, preds=)`.

    Parameters
    ----------
    successes, samples : (inputs,)
        a and n.
    votes : (inputs, classes)
        Votes, in place of both: a success is a vote for what was predicted.
    preds : (inputs,)
        The predicted class of each input.
    classes
        Answers that were possible, for the prior of ``"posterior"``: a Dirichlet of 0.1 for each. By default those of the
        votes; without votes 2, right and wrong.

    Raises
    ------
    InputError
        If they are no counts.
    """

    def __init__(
        self,
        successes: ArrayLike | None = None,
        samples: ArrayLike | None = None,
        *,
        votes: Int[ndarray, "inputs classes"] | None = None,
        preds: Int[ndarray, " inputs"] | None = None,
        classes: int | None = None,
    ) -> None:
        counts, given = (successes, samples), (votes, preds)
        if any(one is None for one in (counts if votes is None else given)) or (
            votes is not None and any(one is not None for one in counts)
        ):
            raise InputError("counts come as successes and samples, or as votes and preds: give one pair")
        if votes is not None:
            table, chosen = np.asarray(votes), np.asarray(preds)
            if table.ndim != 2 or chosen.shape != (len(table),):
                raise InputError(
                    f"votes of {table.shape} and predictions of {chosen.shape} do not fit: a row an input in both"
                )
            if len(chosen) and not (chosen.min() >= 0 and chosen.max() < table.shape[1]):
                raise InputError(f"a prediction is no class from 0 to {table.shape[1] - 1}")
            successes, samples = table[np.arange(len(table)), chosen], table.sum(1)
            classes = table.shape[1] if classes is None else classes
        a, n = np.broadcast_arrays(np.asarray(successes), np.asarray(samples))
        check_counts(a, n)
        self.classes = 2 if classes is None else classes
        if self.classes < 2:
            raise InputError(f"{self.classes} classes leave nothing to choose: give at least 2")
        self.successes, self.samples = a.astype(float), n.astype(float)

    @classmethod
    def from_answers(
        cls, answers: Float[ndarray, "inputs draws"], predictions: Float[ndarray, " inputs"], delta: float
    ) -> PassAtK:
        """From repeated numeric answers: a success is an answer within delta of the prediction.

        Parameters
        ----------
        answers
            nan for one that cannot be read: a failure.
        predictions
            Of each input.
        delta
            Tolerance, above 0.
        """
        drawn, predicted = np.asarray(answers, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
        if drawn.ndim != 2 or predicted.shape != (len(drawn),):
            raise InputError(
                f"answers of {drawn.shape} and predictions of {predicted.shape} do not fit: a row an input in both"
            )
        if not delta > 0:
            raise InputError(f"delta is {delta}, the tolerance of a success: give a number above 0")
        near = np.abs(drawn - predicted[:, None]) <= delta
        return cls(near.sum(1), np.full(len(drawn), drawn.shape[1]))

    @property
    def floor(self) -> float:
        """Share of the inputs without any success: below it the raw curve does not fall."""
        return float((self.successes == 0).mean())

    @property
    def supported(self) -> int:
        """Largest k that the counts tell of: the median number of samples."""
        return int(np.median(self.samples))

    def failures(self, ks: ArrayLike, estimator: str = "unbiased") -> Float[ndarray, "draws inputs"]:
        """Failure of each input at each k.

        Parameters
        ----------
        ks : (draws,)
            At least 1.
        estimator
            ``"raw"``: (1 - a/n)^k; ``"unbiased"``: without replacement, k <= n; ``"posterior"``: B(a + .1, b + k) / B(a + .1, b),
            b = n - a + .1 (classes - 1), the mean under a Dirichlet prior.

        Raises
        ------
        InputError
            If k is below 1, or above n for ``"unbiased"``.
        """
        k = np.atleast_1d(np.asarray(ks, dtype=np.float64))
        if not np.all(np.isfinite(k)) or np.any(k < 1):
            raise InputError(f"k is {k.min() if k.size else 'empty'}: give numbers of draws from 1 on")
        a, n = self.successes, self.samples
        if estimator == "raw":
            return (1 - a / n) ** k[:, None]
        if estimator == "unbiased":
            try:
                return 1 - pass_at_k(n, a, k)
            except ValueError as error:
                raise InputError(f"{error}; estimator='posterior' goes beyond") from error
        if estimator == "posterior":
            b = n - a + PRIOR * (self.classes - 1)
            return np.exp(betaln(a + PRIOR, b + k[:, None]) - betaln(a + PRIOR, b))
        raise InputError(f"the estimator is {estimator!r}: give {', '.join(ESTIMATORS)}")

    def curve(self, ks: ArrayLike, estimator: str = "unbiased") -> Float[ndarray, " draws"]:
        """L_inf at each k, the mean over inputs. Parameters as of `failures`."""
        return self.failures(ks, estimator).mean(1)

    def bootstrap(
        self, ks: ArrayLike, estimator: str = "unbiased", *, draws: int = 1000, level: float = 0.95, seed: int = 0
    ) -> Float[ndarray, "2 draws"]:
        """Lower and upper ends of the interval of the curve, by resampling inputs.

        Parameters
        ----------
        ks, estimator
            As of `failures`.
        draws
            Resamples.
        level
            Of the interval.
        seed
            Of the resampling.
        """
        return np.quantile(self._resampled(ks, estimator, draws, seed), [(1 - level) / 2, (1 + level) / 2], axis=0)

    def beta_eff(self, window: Window, estimator: str = "unbiased", *, draws: int = 1000, seed: int = 0) -> Exponent:
        """The exponent in a window, with its bootstrap interval: one resample for all k, as they share the inputs.

        Parameters
        ----------
        window
            First and last k.
        estimator
            As of `failures`.
        draws, seed
            Of the bootstrap.
        """
        ks = window_grid(window)
        value = effective_exponent(ks, self.curve(ks, estimator))
        curves = self._resampled(ks, estimator, draws, seed)
        curves = curves[(curves > 0).all(1)]
        x = np.log(ks) - np.log(ks).mean()
        slopes = -(np.log(curves) @ x) / (x @ x)
        low, high = np.quantile(slopes, [0.025, 0.975]) if len(slopes) else (math.nan, math.nan)
        return Exponent(value, float(low), float(high), window, self.supported)

    def _resampled(self, ks: ArrayLike, estimator: str, draws: int, seed: int) -> Float[ndarray, "resamples draws"]:
        if draws < 1:
            raise InputError(f"{draws} resamples are none: give at least 1")
        failures = self.failures(ks, estimator)
        rng, inputs = np.random.default_rng(seed), failures.shape[1]
        weights = rng.multinomial(inputs, np.full(inputs, 1 / inputs), size=draws)
        return weights @ failures.T / inputs


class PassKTable(NamedTuple):
    """Counts of right answers from an evaluation.

    Attributes
    ----------
    ids
        Of the problems.
    n, c
        Answers, and right ones.
    """

    ids: list[str]
    n: ndarray
    c: ndarray

    def curve(self) -> PassAtK:
        """As failure curves."""
        return PassAtK(self.c, self.n)


def load_passk_jsonl(path: str | Path) -> PassKTable:
    """Counts from a JSONL file: an object a line with ``id``, ``n`` (answers) and ``c`` (right ones).

    Parameters
    ----------
    path
        Of the file.

    Raises
    ------
    InputError
        With the line that does not fit.
    """
    ids: list[str] = []
    n, c = [], []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                ids.append(str(row["id"]))
                n.append(row["n"])
                c.append(row["c"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise InputError(f"{path}, line {number}: an object with id, n and c was expected ({error})") from error
    if not ids:
        raise InputError(f"{path} holds no problem: give a line a problem, with id, n and c")
    try:
        table = PassKTable(ids, np.array(n, dtype=float), np.array(c, dtype=float))
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: n and c are whole numbers ({error})") from error
    check_counts(table.c, table.n)
    return table


def check_rows(
    features: Float[ndarray, "inputs features"], counts: Int[ndarray, "inputs classes"], labels: Int[ndarray, " inputs"]
) -> float:
    """Whether features and votes are in the same order: images that a probe finds hard divide people too.

    Parameters
    ----------
    features, counts, labels
        A row an input in each.

    Returns
    -------
    float
        The within-class rank correlation of a probe's held-out loss with the entropy of the votes.

    Raises
    ------
    InputError
        If it is not above 0.1.
    """
    x, votes, y = np.asarray(features, dtype=np.float64), np.asarray(counts, dtype=np.float64), np.asarray(labels)
    if not len(x) == len(votes) == len(y):
        raise InputError(f"{len(x)} features, {len(votes)} votes and {len(y)} labels: one row an input in each")
    share = votes / votes.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(share > 0, share * np.log(share), 0.0).sum(1)
    loss = np.empty(len(x))
    half = np.arange(len(x)) % 2 == 0
    for fit, judge in ((half, ~half), (~half, half)):
        design = np.hstack([x[fit] / x.std(), np.ones((fit.sum(), 1))])
        target = np.eye(votes.shape[1])[y[fit]]
        theta = np.linalg.solve(
            design.T @ design / len(design) + 0.1 * np.eye(design.shape[1]), design.T @ target / len(design)
        )
        found = np.hstack([x[judge] / x.std(), np.ones((judge.sum(), 1))]) @ theta
        loss[judge] = ((found - np.eye(votes.shape[1])[y[judge]]) ** 2).sum(1)
    within = [float(spearman(loss[y == c], entropy[y == c])) for c in np.unique(y) if (y == c).sum() > 10]
    mean = float(np.mean(within)) if within else 0.0
    if not mean > 0.1:
        raise InputError(
            f"features and votes do not seem to be of the same inputs: a probe's loss and the entropy of the votes correlate by "
            f"{mean:.2f} within a class, where more than 0.1 was expected; check their order"
        )
    return mean


class HeadResult(NamedTuple):
    """Of one seed and one N.

    Attributes
    ----------
    N, seed
    gen_error
        Mean squared distance of predicted vectors from vote shares, on test inputs.
    accuracy
        Against the labels.
    lam
        Ridge that was used.
    curve
        Votes for the predictions.
    """

    N: int
    seed: int
    gen_error: float
    accuracy: float
    lam: float
    curve: PassAtK


class LastLayerStudy:
    """A linear head on frozen features, trained on one vote an image, judged by the votes of others.

    Parameters
    ----------
    features : (inputs, features)
        Divided by one common scale; an intercept is added.
    counts : (inputs, classes)
        Votes.
    labels : (inputs,)
        Classes that are held for true.
    ns
        Training sizes, in rising order.
    head
        ``"ridge"``, or ``"logistic"``.
    lam
        Ridge; ``"tuned"``: of seven from 0.001 to 3, by five-fold validation.
    test
        Inputs that are kept to judge.
    seeds
        Of `run`.
    """

    LAMS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

    def __init__(
        self,
        features: Float[ndarray, "inputs features"],
        counts: Int[ndarray, "inputs classes"],
        labels: Int[ndarray, " inputs"],
        ns: Sequence[int],
        head: str = "ridge",
        lam: float | str = 1e-9,
        test: int = 2000,
        seeds: Sequence[int] = (0,),
    ) -> None:
        x = np.asarray(features, dtype=np.float64)
        if head not in ("ridge", "logistic"):
            raise InputError(f"the head is {head!r}: give 'ridge' or 'logistic'")
        if isinstance(lam, str) and lam != "tuned":
            raise InputError(f"lam is {lam!r}: give a number, or 'tuned'")
        if list(ns) != sorted(set(ns)) or not ns or ns[0] < 1 or ns[-1] + test > len(x):
            raise InputError(
                f"training sizes {list(ns)} with {test} test inputs do not fit {len(x)} inputs: rising, from 1 on"
            )
        if not np.all(np.isfinite(x)):
            raise InputError("a feature is not finite: fill or leave out such inputs")
        self.X = np.hstack([x / x.std(), np.ones((len(x), 1))])
        self.counts, self.labels = np.asarray(counts), np.asarray(labels)
        self.ns, self.head, self.lam, self.test, self.seeds = list(ns), head, lam, test, tuple(seeds)

    def run(self) -> list[HeadResult]:
        """All seeds, one after the other: of each a split, and one drawn vote for each training input."""
        return [result for seed in self.seeds for result in self._run(seed)]

    def _run(self, seed: int) -> list[HeadResult]:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(self.X))
        test, train = order[: self.test], order[self.test :][: self.ns[-1]]
        shares = self.counts / self.counts.sum(1, keepdims=True)
        drawn = (rng.random((len(train), 1)) > shares[train].cumsum(1)).sum(1).clip(max=shares.shape[1] - 1)
        target = np.eye(shares.shape[1])[drawn]
        found = []
        G = np.zeros((self.X.shape[1],) * 2)
        M = np.zeros((self.X.shape[1], shares.shape[1]))
        done = 0
        for N in self.ns:
            part = self.X[train[done:N]]
            G += part.T @ part
            M += part.T @ target[done:N]
            done = N
            lam = self._tuned(train[:N], target[:N], G, M) if self.lam == "tuned" else float(self.lam)
            if self.head == "ridge":
                predicted = self.X[test] @ _solve(G, M, N, [lam])[0]
            else:
                predicted = _logistic(self.X[train[:N]], drawn[:N], self.X[test], shares.shape[1], lam)
            chosen = predicted.argmax(1)
            found.append(
                HeadResult(
                    N,
                    seed,
                    float(((predicted - shares[test]) ** 2).sum(1).mean()),
                    float((chosen == self.labels[test]).mean()),
                    lam,
                    PassAtK(votes=self.counts[test], preds=chosen),
                )
            )
        return found

    def _tuned(self, rows: ndarray, target: ndarray, G: ndarray, M: ndarray) -> float:
        if len(rows) < 10:
            return self.LAMS[-1]
        losses = np.zeros(len(self.LAMS))
        for fold in range(5):
            out = np.arange(len(rows)) % 5 == fold
            X, y = self.X[rows[out]], target[out]
            for i, theta in enumerate(_solve(G - X.T @ X, M - X.T @ y, int((~out).sum()), self.LAMS)):
                losses[i] += float(((X @ theta - y) ** 2).sum())
        return self.LAMS[int(losses.argmin())]


def _solve(G: ndarray, M: ndarray, N: int, lams: Sequence[float]) -> list[ndarray]:
    """Ridge for several lam from one eigendecomposition of the Gram matrix."""
    values, vectors = np.linalg.eigh(G / N)
    inner = vectors.T @ M / N
    return [vectors @ (inner / (values.clip(min=0) + lam)[:, None]) for lam in lams]


def _logistic(X: ndarray, y: ndarray, X_test: ndarray, classes: int, lam: float) -> ndarray:
    from sklearn.linear_model import LogisticRegression

    found = np.zeros((len(X_test), classes))
    seen = np.unique(y)
    if len(seen) == 1:
        found[:, seen] = 1.0
        return found
    model: Any = LogisticRegression(C=1 / max(lam * len(X), 1e-6), max_iter=500).fit(X[:, :-1], y)
    found[:, model.classes_] = model.predict_proba(X_test[:, :-1])
    return found
