"""What a trial may return, and the sentence for what it may not."""

import datetime

import numpy as np
import pytest

from assay.bench._measures import Cases, Count, as_measures


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), True])
def test_whatever_holds_one_real_number_is_a_number(value):
    found = as_measures({"loss": value}, "race")["loss"]
    assert type(found) is float
    assert found == float(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "2",
        b"2",
        1j,
        np.complex128(2 + 1j),
        np.array("2"),
        np.array(None),
        np.array([2.0]),
        [2.0],
        object(),
        np.datetime64("2020-01-01"),
        datetime.date(2020, 1, 1),
    ],
)
def test_what_holds_no_real_number_is_refused_by_its_name(value):
    with pytest.raises(TypeError, match=f"race returned 'loss' as {type(value).__name__}: give a number"):
        as_measures({"loss": value}, "race")


def test_a_whole_number_beyond_every_float_is_refused():
    with pytest.raises(TypeError, match="race returned 'loss' as int that no float can hold"):
        as_measures({"loss": 10**400}, "race")


@pytest.mark.parametrize("values", [["1", "2"], [1, None], [1j, 2], np.array(["2020-01-01"], dtype="datetime64[D]")])
def test_cases_are_real_numbers(values):
    with pytest.raises(TypeError, match="Cases needs real numbers"):
        Cases(values)


@pytest.mark.parametrize("k", [0.5, float("nan"), float("inf"), "1", None, True])
def test_a_count_is_of_whole_cases(k):
    with pytest.raises(TypeError, match="Count needs whole numbers, got k="):
        Count(k, 2)
