from pathlib import Path

import numpy as np
import pytest

from assay.bench import Count
from assay.methods.uncertain_imputation import study
from assay.methods.uncertain_imputation._laws import bands, response, revealed, spread, synthetic, vee

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "uncertain-imputation" / "synthetic_response.npz")


def test_response_equals_the_released_generator():
    y = response(GOLDEN["x"], GOLDEN["z"][:, 0], GOLDEN["noise"], GOLDEN["b"])
    np.testing.assert_allclose(y, GOLDEN["y"], atol=1e-10)
    np.testing.assert_array_equal(spread(np.array([-3.1, -3.0, 0.9, 1.0])), [0.5, 1, 1, 4])


@pytest.mark.parametrize(("law", "rate"), [(synthetic, 0.2), (revealed, 0.2), (vee, 0.226), (bands, 0.2)])
def test_laws_lose_the_share_of_labels_that_they_say(law, rate):
    draw = law(20_000, np.random.default_rng(0))
    chance = draw.corruption(draw.Z)
    assert chance.mean() == pytest.approx(rate, abs=0.006)
    assert len(draw.X) == len(draw.y) == len(draw.Z) == 20_000


def test_mirrored_corruption_loses_low_z():
    draw = synthetic(5000, np.random.default_rng(0), mirror=True)
    chance = draw.corruption(draw.Z)
    assert (chance[draw.Z[:, 0] > 0] == 0).all()
    assert chance[draw.Z[:, 0] < -3].min() > 0.4


def test_parts_are_disjoint_and_no_arm_can_read_a_lost_label():
    parts = study.law_parts(synthetic, 0)
    sizes = [len(parts.train), len(parts.reference), len(parts.held), len(parts.test)]
    assert sizes == [6000, 3000, 3000, 9600]
    assert len(np.unique(np.concatenate([parts.train, parts.reference, parts.held, parts.test]))) == 21_600
    assert np.isnan(parts.y[parts.corrupted]).all()
    ours, known = parts.method("ui-knn"), parts.at(parts.held)[3]
    assert np.isfinite(ours.imputed_[known]).all()
    measured = {arm: parts.measures(arm) for arm in ("naive", "ui-knn", "oracle", "triply")}
    share = {arm: m["coverage"].k / m["coverage"].n for arm, m in measured.items()}
    assert isinstance(measured["naive"]["coverage"], Count)
    assert share["naive"] < 0.85 < share["ui-knn"]
    assert abs(share["oracle"] - 0.9) < 0.02
    assert measured["triply"]["width"] >= measured["ui-knn"]["width"]


def test_naive_covers_less_than_imputation_where_weights_are_hard(monkeypatch):
    """The law "vee" at three seeds, on half of the study's rows."""
    monkeypatch.setattr(study, "ROWS", 6_000)
    monkeypatch.setattr(study, "TEST_ROWS", 4_800)
    shares = {"naive": [], "ui-knn": [], "pcp-logistic": []}
    for seed in range(3):
        parts = study.law_parts(vee, seed)
        for arm, found in shares.items():
            found.append(parts.measures(arm)["coverage"].k / 4_800)
        assert shares["naive"][-1] < shares["ui-knn"][-1]
    assert np.mean(shares["naive"]) < np.mean(shares["ui-knn"]) - 0.02
    assert np.mean(shares["pcp-logistic"]) < 0.89
    assert abs(np.mean(shares["ui-knn"]) - 0.9) < 0.02


def test_the_union_covers_where_the_imputer_alone_is_right():
    shares = {}
    for arm in ("naive", "pcp", "ui", "triply"):
        counts = [study.grid_measures(seed, "imputer", arm)["coverage"] for seed in range(3)]
        shares[arm] = np.mean([c.k / c.n for c in counts])
    assert abs(shares["triply"] - 0.9) < 0.02
    assert shares["naive"] < 0.84
    assert shares["pcp"] < 0.84
    assert study.grid_measures(0, "none", "triply")["coverage"].k / 8000 < 0.85
