import numpy as np
import pytest
from scipy.stats import binomtest

from assay.methods.uncertain_imputation import coverage_report


def test_coverage_width_and_groups():
    y = np.arange(12.0)
    ends = np.stack([y - 1, y + np.arange(12)], axis=1)
    ends[0] = np.nan  # an empty set covers nothing
    ends[1] = [5, 6]  # a miss
    groups = np.array(["a", "b"] * 6)
    report = coverage_report(y, ends[:, :, None], groups)
    assert report.coverage == 10 / 12
    assert report.n_empty == 1
    exact = binomtest(10, 12).proportion_ci(method="exact")
    assert report.interval == pytest.approx((exact.low, exact.high))
    widths = np.array([0, 1, *np.arange(3, 13)], dtype=float)
    assert report.width == pytest.approx(widths.mean())
    assert report.groups.loc["a", "coverage"] == 5 / 6
    assert report.groups.loc["a", "width"] == pytest.approx(widths[::2].mean())
    assert report.groups.loc["b", "n"] == 6
    np.testing.assert_allclose(report.sizes["coverage"], [1 / 3, 1, 1, 1])
    np.testing.assert_allclose(
        report.sizes["width"], [widths[:3].mean(), widths[3:6].mean(), widths[6:9].mean(), widths[9:].mean()]
    )
    assert list(report.sizes.columns) == list(report.groups.columns) == ["n", "coverage", "lower", "upper", "width"]
    assert "1 empty sets" in str(report)
    assert len(coverage_report(y, ends).groups) == 0


def test_infinite_intervals_cover():
    report = coverage_report(np.zeros(3), np.array([[-np.inf, np.inf]] * 3))
    assert report.coverage == 1
    assert report.width == np.inf


def test_missing_labels_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="labels are missing"):
        coverage_report(np.array([np.nan, 1.0]), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="one label for each"):
        coverage_report(np.zeros(2), np.zeros((2, 2)), np.zeros(3))
