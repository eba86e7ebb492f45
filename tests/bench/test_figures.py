import pytest

from assay.bench._figures import duration, exact, figure, many, number, places, size, tick_labels, ticks, with_interval


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.90812, "0.908"),
        (12.345, "12.3"),
        (-0.5, "−0.500"),
        (1234567.0, "1.23e6"),
        (0.0000123, "1.23e−5"),
        (12345.0, "12\u202f345"),
        (float("inf"), "∞"),
        (float("-inf"), "−∞"),
        (float("nan"), "not a number"),
        (0.0, "0"),
        (None, "–"),
    ],
)
def test_a_figure_has_three_digits_and_true_signs(x, text):
    assert figure(x) == text


def test_a_rounded_zero_has_no_sign():
    assert figure(-0.0001, 2) == "0.00"


def test_an_interval_says_how_many_digits_its_effect_is_worth():
    assert with_interval(0.90812, [0.90312, 0.91312]) == ("0.908", "0.903 to 0.913")
    assert with_interval(0.90812, [0.8951, 0.9211]) == ("0.908", "0.895 to 0.921")
    assert with_interval(1.92, [1.71, 2.15]) == ("1.92", "1.71 to 2.15")
    assert with_interval(120.3, [100.2, 140.7]) == ("120", "100 to 141")
    assert with_interval(0.5, None) == ("0.500", "–")
    assert places([0.1, 0.1]) is None


def test_an_exact_figure_keeps_its_digits():
    assert with_interval(1.0031, [1.0031, 1.0031]) == ("1.0031", "no spread")
    assert exact(0.05) == "0.05"
    assert exact(-2.0) == "−2"


def test_an_endless_interval_is_written_with_infinity():
    assert with_interval(0.5, [float("-inf"), 0.7]) == ("0.500", "−∞ to 0.700")


def test_numbers_are_read_back_from_their_json_text():
    assert number("inf") == float("inf")
    assert number(None) is None


def test_times_and_sizes_have_units_that_fit():
    assert [duration(s) for s in (0.0123, 12.34, 250, 7500)] == ["12.3 ms", "12.3 s", "4 min 10 s", "2 h 05 min"]
    assert [size(b) for b in (512, 1536, 3 * 2**30, 5 * 2**40)] == ["512 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
    assert many(1, "claim") == "1 claim"
    assert many(0, "claim") == "0 claims"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 8.1), (1e-6, 9e-6), (0.884, 0.906), (1e5, 9.7e8)])
def test_ticks_are_round_inside_and_told_apart(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 9
    assert all(low - 1e-12 <= t <= high * (1 + 1e-9) for t in found)
    assert len(set(tick_labels(found))) == len(found)
