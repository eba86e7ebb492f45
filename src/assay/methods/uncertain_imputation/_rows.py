"""Reading what a user gives: rows of X, y, Z and corruption marks, checked, and in an order that does not depend on theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from assay._extras import extras

with extras("tables"):
    from sklearn.utils import _safe_indexing, assert_all_finite, check_consistent_length, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data


@dataclass(frozen=True)
class Rows:
    """Checked rows of one part.

    Attributes
    ----------
    X : (n, features), as given
    y : (n,)
        For a regression numbers, nan where no label was given; for classes labels.
    Z : (n, columns) of float, or None
    keys
        Columns of z that sort the rows: numbers, or ranks of text.
    corrupted : (n,) of bool
    """

    X: Any
    y: np.ndarray
    Z: np.ndarray | None
    keys: tuple[np.ndarray, ...]
    corrupted: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: np.ndarray) -> Rows:
        Z = None if self.Z is None else self.Z[index]
        keys = tuple(key[index] for key in self.keys)
        return Rows(_safe_indexing(self.X, index), self.y[index], Z, keys, self.corrupted[index])

    def clean(self) -> Rows:
        return self[np.flatnonzero(~self.corrupted)]


class PrivilegedColumns:
    """Turns privileged columns into numbers: text columns are one-hot encoded with the values that fit saw."""

    def __init__(self, Z: Any) -> None:
        frame = _as_frame(Z)
        self.width = frame.shape[1]
        self.names = list(frame.columns)
        self.levels = [
            None if pd.api.types.is_numeric_dtype(frame.iloc[:, j].dtype) else np.unique(_text(frame.iloc[:, j]))
            for j in range(self.width)
        ]

    def encode(self, Z: Any) -> np.ndarray:
        """(n, columns) of finite float."""
        frame = _as_frame(Z)
        if frame.shape[1] != self.width:
            raise ValueError(
                f"Z has {frame.shape[1]} columns, but fit saw {self.width}: give the same privileged columns"
            )
        if sorted(map(str, frame.columns)) == sorted(map(str, self.names)) and list(frame.columns) != self.names:
            raise ValueError(
                f"Z has its columns in another order than at fit: give them as {', '.join(map(str, self.names))}"
            )
        columns = []
        for j, levels in enumerate(self.levels):
            column = frame.iloc[:, j]
            if column.isna().any():
                raise ValueError(
                    f"Z contains NaN in {int(column.isna().sum())} rows of column {column.name!r}: "
                    "privileged information must be complete where it is used"
                )
            if levels is None:
                numbers = pd.to_numeric(column).to_numpy(dtype=np.float64, na_value=np.nan)[:, None]
                if not np.isfinite(numbers).all():
                    raise ValueError(
                        f"Z contains NaN or infinity in {int((~np.isfinite(numbers)).sum())} rows of column {column.name!r}: "
                        "privileged information must be complete where it is used"
                    )
                columns.append(numbers)
            else:
                columns.append((_text(column)[:, None] == levels[None, :]).astype(np.float64))
        return np.concatenate(columns, axis=1)


def read_rows(
    estimator: Any,
    X: Any,
    y: Any,
    Z: Any,
    corrupted: Any,
    *,
    classes: bool,
    reset: bool,
    needs_Z: bool,
    raw: bool = False,
) -> Rows:
    """Check what fit or conformalize was given.

    Parameters
    ----------
    estimator
        Takes ``n_features_in_`` and its privileged columns at a reset.
    classes
        Whether y holds classes.
    needs_Z
        Whether Z must be there.
    raw
        Keep the labels of corrupted rows, which are otherwise blanked at once and never read.

    Raises
    ------
    ValueError
        If shapes differ, Z is missing, a clean row has no label, or y is infinite.
    """
    X = read_X(estimator, X, reset=reset)
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None")
    y = column_or_1d(y, warn=True)
    missing = np.asarray(pd.isna(y), dtype=bool)
    corrupted = missing if corrupted is None else _read_marks(corrupted)
    if Z is None and needs_Z:
        raise ValueError(
            f"{type(estimator).__name__} needs the privileged columns Z of these rows, got None: give Z (at prediction it is not needed)"
        )
    check_consistent_length(X, y, Z, corrupted)
    if (missing & ~corrupted).any():
        raise ValueError(
            f"y is missing in {int((missing & ~corrupted).sum())} rows that `corrupted` calls clean: mark them, or leave "
            "`corrupted` out, which marks every missing label"
        )
    if raw and missing.any():
        raise ValueError(f'noisy="use" keeps the wrong labels, but {int(missing.sum())} are missing: use noisy="drop"')
    y = _read_labels(y, ~corrupted | raw, classes)
    keys: tuple[np.ndarray, ...] = ()
    numbers = None
    if Z is not None and needs_Z:
        if reset:
            estimator._privileged = PrivilegedColumns(Z)
        numbers, keys = estimator._privileged.encode(Z), tuple(key_columns(_as_frame(Z)))
    return Rows(X, y, numbers, keys, corrupted)


def read_X(estimator: Any, X: Any, *, reset: bool) -> Any:
    """Check X; a data frame stays one (its columns may be text, for the user's own pipeline), sparse stays sparse."""
    if isinstance(X, pd.DataFrame):
        if all(pd.api.types.is_numeric_dtype(dtype) for dtype in X.dtypes):
            validate_data(estimator, X, reset=reset, ensure_all_finite="allow-nan", accept_sparse=True)
        else:
            validate_data(estimator, X, reset=reset, skip_check_array=True)
        return X
    return validate_data(estimator, X, reset=reset, ensure_all_finite="allow-nan", accept_sparse="csr")


def row_order(*keys: np.ndarray) -> np.ndarray:
    """The lexicographic order of rows by their columns, the first column first."""
    return np.lexsort(keys[::-1])


def key_columns(X: Any) -> list[np.ndarray]:
    """Columns that sort rows: numbers as they are, other columns by their string; sparse rows by their content."""
    if sp.issparse(X):
        X = X.tocsr().sorted_indices()  # a copy: the caller's matrix stays as it is
        ends = X.indptr
        content = [
            (X.indices[a:b].tobytes(), X.data[a:b].tobytes()) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist())
        ]
        ranks = {row: i for i, row in enumerate(sorted(set(content)))}
        return [np.array([ranks[row] for row in content])]
    if isinstance(X, pd.DataFrame):
        return [
            column.to_numpy(dtype=np.float64, na_value=np.nan)
            if pd.api.types.is_numeric_dtype(column.dtype)
            else np.unique(_text(column), return_inverse=True)[1]
            for _, column in X.items()
        ]
    return list(np.asarray(X).T)


def join(X: Any, Z: np.ndarray) -> Any:
    """X and Z side by side, in X's kind: an array, a data frame, or sparse."""
    if sp.issparse(X):
        return sp.hstack([X, sp.csr_matrix(Z)], format="csr")
    if isinstance(X, pd.DataFrame):
        text = all(isinstance(name, str) for name in X.columns)  # scikit-learn wants names all of text, or none
        first = 0 if text else X.shape[1]
        names: list[Any] = [f"privileged_{j}" if text else j for j in range(first, first + Z.shape[1])]
        while set(names) & set(X.columns):  # a column of X may have such a name itself
            names = [f"{name}_" if text else name + 1 for name in names]
        named = pd.DataFrame(Z, index=X.index, columns=names)
        return pd.concat([X, named], axis=1)
    return np.concatenate([X, Z], axis=1)


def _text(column: pd.Series) -> np.ndarray:
    """A column's values as text, missing ones too."""
    return column.astype(object).map(str).to_numpy(dtype=object)


def _as_frame(Z: Any) -> pd.DataFrame:
    if isinstance(Z, pd.DataFrame):
        return Z.infer_objects()
    if isinstance(Z, pd.Series):
        return Z.to_frame().infer_objects()
    array = Z.toarray() if sp.issparse(Z) else np.asarray(Z)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"Z must have one row a point and at least one column, got shape {array.shape}")
    if np.iscomplexobj(array):
        raise ValueError("Z holds complex numbers: give their parts as columns of real ones")
    return pd.DataFrame(array).infer_objects()


def _read_marks(corrupted: Any) -> np.ndarray:
    marks = column_or_1d(corrupted)
    if marks.dtype != bool:
        if pd.isna(marks).any() or not np.isin(marks, (0, 1)).all():
            raise ValueError("corrupted must hold True and False, or 1 and 0: 1 where the label is missing or wrong")
        marks = marks.astype(bool)
    return marks


def _read_labels(y: np.ndarray, read: np.ndarray, classes: bool) -> np.ndarray:
    """Labels of the rows in ``read``; the others are blanked, whatever they hold."""
    known = y[read]
    if classes:
        if len(known):
            check_classification_targets(np.asarray(known.tolist()))
        if known.dtype == object and len(known):
            labels = np.asarray(known.tolist())  # text or numbers, as the classifier will see them
        elif known.dtype.kind == "f" and (known == known.astype(np.int64)).all():
            labels = known.astype(np.int64)  # whole numbers that missing labels made floats
        else:
            labels = known
        blanked = np.zeros(len(y), dtype=labels.dtype)
        blanked[read] = labels
        return blanked
    if known.dtype.kind not in "fiub":
        try:
            known = known.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'y holds labels that are not numbers ({error}): use score="hps" or "aps" for classes'
            ) from error
    numbers = np.full(len(y), np.nan)
    numbers[read] = known.astype(np.float64)
    assert_all_finite(numbers[read], input_name="y")
    return numbers
