"""Votes are read without unpickling, one row an item."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assay.data import DataError, MissingData, fetch, read_votes


def test_votes_come_from_a_folder_or_one_file(tmp_path: Path):
    counts, labels, features = np.eye(3, dtype="uint8"), np.arange(3), np.ones((3, 2))
    np.savez(tmp_path / "one.npz", counts=counts, labels=labels, features=features)
    np.testing.assert_array_equal(read_votes(tmp_path / "one.npz").counts, counts)
    folder = tmp_path / "two"
    folder.mkdir()
    np.savez(folder / "v.npz", counts=counts, labels=labels)
    np.save(folder / "f.npy", features)
    votes = read_votes(folder)
    np.testing.assert_array_equal(votes.features, features)
    np.testing.assert_array_equal(votes.labels, labels)
    np.save(folder / "f.npy", features[:2])
    with pytest.raises(DataError, match="3 counts, 3 labels, 2 features: one row an item"):
        read_votes(folder)
    (folder / "f.npy").unlink()
    with pytest.raises(DataError, match="no array 'features'"):
        read_votes(folder)


def test_votes_that_hide_code_are_refused(tmp_path: Path):
    np.savez(tmp_path / "v.npz", counts=np.array([{}], dtype=object), labels=np.zeros(1), features=np.zeros(1))
    with pytest.raises(DataError, match="cannot be read"):
        read_votes(tmp_path / "v.npz")


def test_cifar10h_is_what_it_is_known_to_be():
    try:
        votes = read_votes(fetch("cifar10h"))
    except MissingData as error:
        pytest.skip(str(error))
    assert votes.counts.shape == (10_000, 10)
    assert votes.features.shape == (10_000, 192)
    assert (votes.counts.argmax(1) != votes.labels).sum() == 79
    assert set(np.bincount(votes.labels)) == {1000}
