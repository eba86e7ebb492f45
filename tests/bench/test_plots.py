import re
import xml.etree.ElementTree as ET

import pytest

from assay.bench._plots import curve_plot, forest_row, seed_strip, side, thin


@pytest.mark.parametrize(
    ("test", "way"),
    [
        ("missed[vattention] <= delta", -1),
        ("0.895 <= coverage[pcp-true]", 1),
        ("coverage[pcp-true] <= 0.93", -1),
        ("0.5 >= error[a]", -1),
        ("a[x] - b[y] > 0", 1),
        ("share(error[a] <= error[b]) >= 0.7", 1),
        ("share(error[a] >= error[b]) < 0.7", -1),
        ("m[a, axis=1|2] / m[b] < 2", -1),
    ],
)
def test_a_condition_points_to_the_side_of_its_measured_number(test, way):
    assert side(test) == way


def mark_x(svg: str) -> float:
    return float(re.search(r'class="mark" transform="translate\(([\d.]+)', svg)[1])


def span(svg: str) -> tuple[float, float]:
    left, right = re.search(r'class="span" d="M([\d.]+) [\d.]+H([\d.]+)"', svg).groups()
    return float(left), float(right)


@pytest.mark.parametrize("way", [1, -1])
def test_the_claims_side_is_always_on_the_right_of_the_bar(way):
    bar, effect = 2.0, 2.0 + way * 0.5
    svg = forest_row("holds", effect, [effect - 0.2, effect + 0.2], bar, way)
    assert mark_x(svg) > 120
    assert min(span(svg)) > 120
    against = forest_row("fails", bar - way * 0.5, [bar - way * 0.5 - 0.2, bar - way * 0.5 + 0.2], bar, way)
    assert max(span(against)) < 120


def test_an_interval_that_straddles_the_bar_is_drawn_on_both_sides_to_scale():
    left, right = span(forest_row("open", 1.1, [0.8, 1.4], 1.0, 1))
    assert left < 120 < right
    assert (right - 120) / (120 - left) == pytest.approx(0.4 / 0.2, rel=0.02)


def test_an_endless_interval_stays_inside_the_drawing():
    left, right = span(forest_row("open", 0.2, [0.1, float("inf")], 0.0, 1))
    assert 0 <= left < right <= 240


@pytest.mark.parametrize("effect", [None, float("nan")])
def test_no_figure_is_no_drawing(effect):
    assert not forest_row("open", effect, None, 0.0, 1)


def test_every_drawing_is_well_formed_and_says_what_it_shows():
    drawings = [
        forest_row("holds", 1.0, [1.0, 1.0], 1.0, 1, [1.0, 1.0]),
        forest_row("measured", 5.0, [4.0, 6.0], None, 1, [5.0]),
        seed_strip("fails", [0.1, 0.2, float("nan")], 0.15, [0.1, 0.2], 0.3),
        seed_strip("measured", [0.0, 0.0, 0.0], 0.0, [0.0, 0.0], None),
        curve_plot("<loss>", {"a & b": [[(0, 1.0), (1, 0.5)]], "c": [[(0, 3.0)]]}, {"a & b": 0, "c": 9}, 50),
    ]
    for drawing in drawings:
        root = ET.fromstring(str(drawing))
        assert root.get("aria-label")


def test_thinning_keeps_both_ends_and_every_peak():
    curve = [(float(i), 0.0) for i in range(5000)]
    curve[2345] = (2345.0, 9.0)
    curve[3456] = (3456.0, -9.0)
    kept = thin(curve, 100)
    assert len(kept) <= 102
    assert kept[0] == curve[0]
    assert kept[-1] == curve[-1]
    assert (2345.0, 9.0) in kept
    assert (3456.0, -9.0) in kept
    assert kept == sorted(kept)
    assert thin(curve[:100], 100) == curve[:100]


def test_a_first_spike_does_not_flatten_a_curve():
    calm = [(float(i), 1.0 + 0.5 * (i % 2)) for i in range(1, 200)]
    svg = curve_plot("loss", {"a": [[(0.0, 1e6), *calm]]}, {"a": 0}, 400)
    heights = [float(dy) for dy in re.findall(r"l[-\d.]+ ([-\d.]+)", re.search(r'class="all c0" d="([^"]+)"', svg)[1])]
    assert max(map(abs, heights[5:])) > 15


def test_what_is_not_finite_is_left_out_of_a_curve():
    svg = curve_plot("loss", {"a": [[(0, 1.0), (1, float("nan")), (2, float("inf")), (3, 2.0)]]}, {"a": 0}, 50)
    assert "nan" not in svg
    assert "inf" not in svg
    assert not curve_plot("loss", {"a": [[(0, float("nan"))]]}, {"a": 0}, 50)
