from pathlib import Path

import numpy as np
import pytest

from assay.methods.uncertain_imputation import Corruption, corrupt_by_privileged, wrong_labels
from assay.methods.uncertain_imputation._corruption import POWERS

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "uncertain-imputation" / "corruption.npz")


@pytest.mark.parametrize("i", range(5))
def test_rule_equals_the_released_code(i):
    z = GOLDEN[f"z{i}"]
    rule = Corruption.fit(z, float(GOLDEN[f"rate{i}"]), standardize=False)
    np.testing.assert_allclose(rule.probability(z), GOLDEN[f"probability{i}"], atol=1e-12)
    np.testing.assert_array_equal(GOLDEN[f"uniform{i}"] < rule.probability(z), GOLDEN[f"corrupted{i}"])
    info = [rule.shift, rule.q75, rule.q85, rule.q90, rule.extreme, rule.power]
    np.testing.assert_allclose(info, GOLDEN[f"info{i}"], rtol=1e-12)


def test_one_column_may_be_standardised_or_not():
    """Shift and scale make no difference where the 5 % quantile is negative; case 2 is two raw gamma columns."""
    for i in (0, 1, 3, 4):
        rule = Corruption.fit(GOLDEN[f"z{i}"], float(GOLDEN[f"rate{i}"]))
        np.testing.assert_allclose(rule.probability(GOLDEN[f"z{i}"]), GOLDEN[f"probability{i}"], atol=1e-12)
    rule = Corruption.fit(GOLDEN["z2"], float(GOLDEN["rate2"]))
    assert np.abs(rule.probability(GOLDEN["z2"]) - GOLDEN["probability2"]).max() > 0.05


@pytest.mark.parametrize(("rate", "mean"), [(0.1, 0.1), (0.15, 0.1499), (0.2, 0.2)])
def test_mean_probability_on_normal_z(rate, mean):
    z = np.random.default_rng(0).standard_normal(20_000)
    probability, corrupted = corrupt_by_privileged(z, rate, 1)
    assert probability.mean() == pytest.approx(mean, abs=5e-4)
    assert (probability[z < np.quantile(z, 0.75)] == 0).all()
    assert not corrupted[z < np.quantile(z, 0.75)].any()
    assert corrupted.mean() == pytest.approx(probability.mean(), abs=4 * np.sqrt(0.16 / 20_000))


def test_power_is_the_nearest_of_the_grid():
    z = np.random.default_rng(2).gamma(2.0, size=700)
    rule = Corruption.fit(z, 0.13, standardize=False)
    v = np.where(z < rule.q75, 0, np.minimum(z, rule.q85) / rule.q90)
    misses = [abs(np.where(v > 0, v, 0.0)[v > 0].__pow__(k).sum() / len(z) - 0.13) for k in POWERS]
    assert rule.power == POWERS[int(np.argmin(misses))]


@pytest.mark.parametrize("rate", [0.02, 0.4])
def test_a_rate_out_of_reach_names_the_range(rate):
    z = np.random.default_rng(0).standard_normal(20_000)
    with pytest.raises(ValueError, match=r"between 0\.08\d+ and 0\.249"):
        corrupt_by_privileged(z, rate, 0)


def test_columns_count_alike_whatever_their_scale():
    rng = np.random.default_rng(3)
    Z = rng.standard_normal((2000, 2))
    p, corrupted = corrupt_by_privileged(Z, 0.2, 7)
    q, same = corrupt_by_privileged(Z * [1000, 0.1] + [5, -3], 0.2, 7)
    np.testing.assert_allclose(p, q, atol=1e-9)
    np.testing.assert_array_equal(corrupted, same)


def test_constant_and_broken_z_are_refused():
    with pytest.raises(ValueError, match="90th percentile"):
        corrupt_by_privileged(np.zeros(100), 0.2, 0)
    with pytest.raises(ValueError, match="finite numbers"):
        corrupt_by_privileged(np.array([1.0, np.nan]), 0.2, 0)


def test_wrong_labels():
    rng = np.random.default_rng(4)
    y, corrupted = rng.standard_normal(5000) + 3, rng.random(5000) < 0.5
    shrunk = wrong_labels(y, corrupted, "shrink")
    np.testing.assert_array_equal(shrunk[~corrupted], y[~corrupted])
    np.testing.assert_allclose(shrunk[corrupted], (y[corrupted] + y.mean()) / 2)
    spread = wrong_labels(y, corrupted, "disperse", 0)
    np.testing.assert_array_equal(spread[~corrupted], y[~corrupted])
    assert (spread - y)[corrupted].std() == pytest.approx(5 * y.std(), rel=0.05)
    with pytest.raises(ValueError, match="noise must be"):
        wrong_labels(y, corrupted, "flip")
