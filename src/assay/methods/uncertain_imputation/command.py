"""`assay run uncertain-imputation`: intervals, or label sets, for a table whose target is partly missing or wrong."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay._errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

__all__ = ["predict"]

MOST_TEXT_VALUES = 100  # a text column with more is a name or a date, not a feature


def predict(
    *,
    table: Path,
    target: str,
    privileged: tuple[str, ...],
    out: Path,
    predict: Path | None = None,
    corrupted: str | None = None,
    drop: tuple[str, ...] = (),
    level: float = 0.9,
    method: Literal["ui", "pcp", "naive", "triply"] = "ui",
    task: Literal["regression", "classification"] | None = None,
    seed: int = 0,
) -> None:
    """Prediction intervals, or label sets, that keep their coverage although some labels are missing or wrong.

    Half of the rows train the models, a quarter measures how far imputed labels are off, and a quarter calibrates.
    Printed: the thresholds of all three methods and which of their assumptions looks weak. The folder gets intervals.csv
    (row, point, lower, upper), or sets.csv (row, label, set), report.json and a picture.

    Parameters
    ----------
    table : PATH
        A CSV, TSV or Parquet file. Columns of text are one-hot encoded.
    target
        The column to predict. Rows where it is missing are the corrupted ones, unless --corrupted says which are.
    privileged
        Columns that explain the corruption or the target, known for these rows and not needed for new ones.
    out : PATH
        The folder for the results.
    predict : PATH
        New rows, without the privileged columns. Without it a fifth of the clean rows is held out and predicted.
    corrupted
        A column of 0 and 1: 1 where the target is wrong or missing.
    drop
        Columns to leave out: names, dates, numbers of rows.
    level
        The share of new rows whose target should lie in its interval.
    method
        ui imputes lost labels with a real error, pcp weights the clean rows, naive does neither, triply is the union.
    task
        What the target is; needed where it is text, or a few whole numbers.
    seed
        Of the split, the models and the imputed labels.
    """
    import numpy as np

    from assay._extras import extras
    from assay.data import read_table

    with extras("tables"):
        from assay.methods.uncertain_imputation import TriplyRobust

    if not 0 < level < 1:
        raise InputError(f"--level must lie between 0 and 1, got {level}: 0.9 for 90 % coverage")
    if not privileged:
        raise InputError("--privileged names no column: say which columns explain the corruption or the target")
    if seed < 0:
        raise InputError(f"--seed must be a whole number of at least 0, got {seed}")
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise InputError(f"{place} is a file: --out must name a folder")
    rows = read_table(table)
    columns = _columns(rows, table, target, privileged, corrupted, drop)
    y, lost = _labels(rows, target, corrupted)
    kind = _task(y[~lost], target, task)
    features = _Features.fit(rows, columns)
    X, Z = features.encode(rows, str(table)), rows[list(privileged)]
    for name in privileged:
        if Z[name].isna().any():
            raise InputError(
                f"privileged column {name!r} is missing in {int(Z[name].isna().sum())} rows of {table}: leave those rows out"
            )
        if not _is_number(Z[name]):
            if Z[name].nunique() > MOST_TEXT_VALUES:
                raise InputError(
                    f"privileged column {name!r} is text with {Z[name].nunique()} values: choose others, and --drop {name}"
                )
            print(f"privileged column {name!r} is text: one-hot encoded")

    known = np.arange(len(rows))
    if predict is None:
        clean = np.flatnonzero(~lost)
        held = np.random.default_rng(seed).permutation(clean)[: len(clean) // 5]
        if len(held) == 0:
            raise InputError(f"{table} has {len(clean)} rows with a clean target: at least 5 are needed, better 500")
        known = np.setdiff1d(known, held)
        new, new_rows = X.iloc[held], held
    else:
        other = read_table(predict)
        special = [target, *privileged, *([corrupted] if corrupted else [])]
        ignored = [name for name in special if name in other.columns]
        if ignored:
            print(f"{predict}: {', '.join(ignored)} ignored, as new rows do not need them")
        new = features.encode(other, str(predict))
        new_rows = np.arange(len(other))

    print(f"{len(rows)} rows, {int(lost.sum())} of them with a corrupted {target}; {X.shape[1]} features")
    model = TriplyRobust(
        confidence_level=level,
        score="cqr" if kind == "regression" else "aps",
        beta=min(0.005, (1 - level) / 2),  # below alpha at every level
        reference_size=1 / 3,
        random_state=seed,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        model.fit_conformalize(X.iloc[known], y[known], Z.iloc[known], lost[known])
    for warning in dict.fromkeys(str(w.message) for w in said if w.category is UserWarning):
        print(f"note: {warning}")
    thresholds = {**{name: float(q) for name, q in model.thresholds_.items()}, "triply": float(model.threshold_)}
    model.threshold_ = thresholds[method]  # the parts share one f, so a part is the union at its own threshold

    found = _Sets.regression(model, new, new_rows) if kind == "regression" else _Sets.classes(model, new, new_rows)
    report: dict[str, Any] = {
        "table": str(table),
        "target": target,
        "privileged": list(privileged),
        "method": method,
        "task": kind,
        "level": level,
        "seed": seed,
        "thresholds": thresholds,
        "diagnostics": dict(model.diagnostics_),
        "splits": {
            "training, clean": model.diagnostics_["n_train_clean"],
            "reference, clean": model.diagnostics_["n_reference_clean"],
            "calibration": model.diagnostics_["n_calibration"],
            "calibration, clean": model.diagnostics_["n_clean"],
            "predicted": len(new_rows),
        },
        "mean_size": found.mean_size,
        "empty": found.empty,
    }
    for name, threshold in thresholds.items():
        print(f"threshold {name:7s} {threshold:.6g}{'   <- used' if name == method else ''}")
    for sentence in model.diagnostics_["advice"]:
        print(sentence)
    if predict is None:
        report["held_out"] = _held_out(found, y[new_rows])
    out.mkdir(parents=True, exist_ok=True)
    _write(out / found.name, lambda path: found.frame.to_csv(path, index=False))
    stale = out / ("sets.csv" if found.name == "intervals.csv" else "intervals.csv")
    if stale.exists() and (out / "report.json").exists():  # an earlier run's, of the other task
        print(f"{stale} is of an earlier run: removed")
        stale.unlink()
    _write(out / "report.json", lambda path: path.write_text(json.dumps(_plain(report), indent=2) + "\n"))
    _write(out / "intervals.png", lambda path: _draw(path, found, target, level))
    print(
        f"{len(new_rows)} rows predicted, mean size {found.mean_size:.6g}: {out / found.name}, report.json, intervals.png"
    )


def _columns(
    rows: pd.DataFrame,
    table: Path,
    target: str,
    privileged: tuple[str, ...],
    corrupted: str | None,
    drop: tuple[str, ...],
) -> list[str]:
    """The feature columns: all but the target, the privileged, the marks and the dropped."""
    special = [target, *privileged, *([corrupted] if corrupted else []), *drop]
    for name in special:
        if name not in rows.columns:
            raise InputError(f"{table} has no column {name!r}: it has {', '.join(map(str, rows.columns))}")
    if len(set(special)) < len(special):
        raise InputError(
            "a column is named twice among target, privileged, corrupted and drop: each has one part to play"
        )
    columns = [str(name) for name in rows.columns if name not in special]
    if not columns:
        raise InputError(f"{table} has no column left to predict from")
    return columns


def _labels(rows: pd.DataFrame, target: str, corrupted: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The target as it stands, and which of it is missing or wrong."""
    import numpy as np

    missing = rows[target].isna().to_numpy()
    lost = missing
    if corrupted:
        marks = rows[corrupted]
        if marks.isna().any() or not set(marks.unique()) <= {0, 1}:
            raise InputError(f"column {corrupted!r} must hold 0 and 1 only: 1 where {target} is wrong or missing")
        lost = marks.to_numpy().astype(bool)
        if (missing & ~lost).any():
            raise InputError(
                f"{target} is missing in {int((missing & ~lost).sum())} rows that {corrupted!r} calls clean"
            )
    if lost.all():
        raise InputError(f"no row has a clean {target}: some labels must be known")
    if not lost.any():
        print(f"no {target} is corrupted: this is ordinary conformal prediction")
    values = rows[target]
    return (values.to_numpy(np.float64) if _is_number(values) else values.to_numpy(object)), lost


def _task(y: np.ndarray, target: str, task: str | None) -> str:
    """Regression or classification; asks where the target could be either."""
    import numpy as np

    text = y.dtype == object
    if text and task == "regression":
        raise InputError(f"{target} is text: say --task classification")
    if task:
        if task == "classification" and not text and not (y == np.round(y)).all():
            raise InputError(f"{target} has values that are not whole: say --task regression")
        return task
    if text:
        raise InputError(f"{target} is text: say --task classification, or give a column of numbers")
    if (y == np.round(y)).all() and len(np.unique(y)) <= 20:
        raise InputError(
            f"{target} has {len(np.unique(y))} distinct whole numbers: say --task regression, or --task classification"
        )
    return "regression"


@dataclass(frozen=True)
class _Features:
    """Columns that become features, and the values of those that are text."""

    columns: list[str]
    values: dict[str, list[str]]

    @classmethod
    def fit(cls, rows: pd.DataFrame, columns: list[str]) -> _Features:
        values = {}
        for name in columns:
            if rows[name].isna().all():
                raise InputError(f"column {name!r} is empty: leave it out with --drop {name}")
            if _is_number(rows[name]):
                continue
            known = sorted(rows[name].dropna().astype(str).unique())
            if len(known) > MOST_TEXT_VALUES:
                raise InputError(f"column {name!r} is text with {len(known)} values: leave it out with --drop {name}")
            print(f"column {name!r} is text: one-hot encoded, {len(known)} values")
            values[name] = known
        return cls(columns, values)

    def encode(self, rows: pd.DataFrame, where: str) -> pd.DataFrame:
        import pandas as pd

        missing = [name for name in self.columns if name not in rows.columns]
        if missing:
            raise InputError(f"{where} has no column {missing[0]!r}: new rows need the features that the table has")
        parts = []
        for name in self.columns:
            column = rows[name]
            if name not in self.values:
                if not _is_number(column):
                    raise InputError(f"column {name!r} of {where} holds text, but numbers in the table")
                parts.append(column.astype(float).rename(name))
                continue
            text = column.astype(str).where(column.notna())
            unknown = int((~text.dropna().isin(self.values[name])).sum())
            if unknown:
                print(f"{where}: {unknown} values of {name!r} are not in the table and count as none of them")
            parts += [(text == value).astype(float).rename(f"{name}={value}") for value in self.values[name]]
        return pd.concat(parts, axis=1)


@dataclass(frozen=True)
class _Sets:
    """What is written for the new rows, and which of them cover a label."""

    name: str
    frame: pd.DataFrame
    mean_size: float
    empty: int
    covers: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def regression(cls, model: Any, new: pd.DataFrame, rows: np.ndarray) -> _Sets:
        import numpy as np
        import pandas as pd

        point, ends = model.predict_interval(new)
        lower, upper = ends[:, 0, 0], ends[:, 1, 0]
        frame = pd.DataFrame({"row": rows, "point": point, "lower": lower, "upper": upper})
        width = np.where(np.isnan(lower), 0.0, upper - lower)
        return cls(
            "intervals.csv",
            frame,
            float(width.mean()),
            int(np.isnan(lower).sum()),
            lambda y: (lower <= y.astype(float)) & (y.astype(float) <= upper),
        )

    @classmethod
    def classes(cls, model: Any, new: pd.DataFrame, rows: np.ndarray) -> _Sets:
        import pandas as pd

        label, mask = model.predict_set(new)
        mask = mask[:, :, 0]
        names = [str(c) for c in model.classes_]
        sets = ["|".join(name for name, inside in zip(names, row) if inside) for row in mask]
        frame = pd.DataFrame({"row": rows, "label": label, "set": sets})
        size = mask.sum(axis=1)
        held = (model.classes_[None, :], mask)
        return cls(
            "sets.csv",
            frame,
            float(size.mean()),
            int((size == 0).sum()),
            lambda y: (held[1] & (held[0] == y[:, None])).any(axis=1),
        )


def _held_out(found: _Sets, y: np.ndarray) -> dict[str, Any]:
    """Coverage of held-out clean rows, said with what it is not."""
    from assay.stats import clopper_pearson

    hits = found.covers(y)
    low, high = clopper_pearson(float(hits.sum()), float(len(hits)))
    print(f"held-out clean rows: {hits.mean():.4f} covered [{low:.4f}, {high:.4f}], {len(hits)} rows")
    print("warning: that is coverage on clean rows only, not on all; where labels are lost, coverage differs")
    return {"coverage": float(hits.mean()), "interval": [low, high], "rows": len(hits), "clean_rows_only": True}


def _draw(path: Path, found: _Sets, target: str, level: float) -> None:
    """Intervals of at most 200 rows in the order of their points, or how large the sets are."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    if found.name == "intervals.csv":
        shown = found.frame.sort_values("point").iloc[:: max(1, len(found.frame) // 200)]
        at = np.arange(len(shown))
        finite = np.isfinite(shown["lower"].to_numpy()) & np.isfinite(shown["upper"].to_numpy())
        axes.vlines(at[finite], shown["lower"][finite], shown["upper"][finite], color="#7aa5d2", linewidth=1.5)
        axes.plot(at, shown["point"], ".", color="#1f3b5c", markersize=3)
        axes.set(xlabel="rows, in the order of their point prediction", ylabel=target)
    else:
        sizes = found.frame["set"].map(lambda text: len(text.split("|")) if text else 0)
        counts = sizes.value_counts().sort_index()
        axes.bar(counts.index, counts.to_numpy(), color="#7aa5d2")
        axes.set(xlabel="labels in the set", ylabel="rows")
    axes.set_title(f"{target}: sets at level {level:g}")
    figure.savefig(path, format="png", dpi=120)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside, then rename: a reader never finds half a file."""
    beside = path.with_name(path.name + ".partial")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """JSON has no infinity and no nan: they become text."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(column: pd.Series) -> bool:
    import pandas as pd

    return bool(pd.api.types.is_numeric_dtype(column.dtype))
