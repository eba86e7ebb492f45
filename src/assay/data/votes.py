"""Items that many people have labelled, with features of each item: CIFAR-10H."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from assay.data._errors import DataError


class Votes(NamedTuple):
    """How often each class was given to each item, the label that is held for true, and features.

    ``counts`` (items, classes), ``labels`` (items,), ``features`` (items, features): arrays.
    """

    counts: Any
    labels: Any
    features: Any


def read_votes(path: str | Path) -> Votes:
    """Votes from a folder: an ``.npz`` with ``counts`` and ``labels``, and the features as ``.npy``; rows in one order.

    A single ``.npz`` with ``counts``, ``labels`` and ``features`` is read as well.
    """
    import numpy as np

    path = Path(path)
    tables = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    features = sorted(path.glob("*.npy")) if path.is_dir() else []
    if len(tables) != 1 or len(features) > 1:
        raise DataError(
            f"{path} must hold one .npz (counts, labels) and one .npy (features): it holds {len(tables)} and {len(features)}"
        )
    try:
        with np.load(tables[0], allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        if features:
            held["features"] = np.load(features[0], allow_pickle=False)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): .npz and .npy files of numbers are expected") from error
    missing = [name for name in Votes._fields if name not in held]
    if missing:
        raise DataError(
            f"{path} has no array {missing[0]!r}: counts (items, classes), labels (items,) and features (items, ...) are expected"
        )
    votes = Votes(*(held[name] for name in Votes._fields))
    if len({len(array) for array in votes}) != 1:
        raise DataError(
            f"{path} has {', '.join(f'{len(a)} {n}' for n, a in zip(Votes._fields, votes))}: one row an item is expected in each"
        )
    return votes
