import json

import numpy as np
import pandas as pd
import pytest

from assay._errors import InputError
from assay.methods.uncertain_imputation import corrupt_by_privileged
from assay.methods.uncertain_imputation.command import predict


def table(n=700, seed=0):
    """Rows whose y depends on a hidden z, by which a fifth of the labels is lost; one feature is text."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(n)
    kind = rng.choice(["left", "right"], n)
    x = rng.uniform(-1, 1, n)
    y = x + 2 * z + (kind == "left") + 0.3 * rng.standard_normal(n)
    _, lost = corrupt_by_privileged(z, 0.2, seed)
    frame = pd.DataFrame({"x": x, "kind": kind, "z": z, "y": y, "wrong": lost.astype(int)})
    return frame.assign(y=frame["y"].where(~lost)), frame


def write(frame, path):
    frame.to_csv(path, index=False)
    return path


def test_new_rows_get_intervals_without_their_privileged_columns(tmp_path, capsys):
    lost, truth = table(900)
    train = write(lost.iloc[:700].drop(columns="wrong"), tmp_path / "train.csv")
    new = write(truth.iloc[700:].drop(columns=["y", "wrong"]), tmp_path / "new.csv")
    predict(table=train, target="y", privileged=("z",), predict=new, method="triply", out=tmp_path / "out")
    found = pd.read_csv(tmp_path / "out" / "intervals.csv")
    assert list(found.columns) == ["row", "point", "lower", "upper"]
    assert (found["row"] == np.arange(200)).all()
    y = truth["y"].to_numpy()[700:]
    assert ((found["lower"] <= y) & (y <= found["upper"])).mean() > 0.8
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["thresholds"]["triply"] == max(report["thresholds"][p] for p in ("naive", "pcp", "ui"))
    assert report["splits"]["calibration"] == 175
    assert report["seed"] == 0
    assert (tmp_path / "out" / "intervals.png").stat().st_size > 1000
    assert not list((tmp_path / "out").glob("*.partial"))
    printed = capsys.readouterr().out
    assert "'kind' is text: one-hot encoded, 2 values" in printed
    assert "new.csv: z ignored" in printed
    assert "UI looks plausible" in printed
    assert "held-out" not in printed
    # The same seed gives the same intervals, and a narrower method narrower ones.
    predict(table=train, target="y", privileged=("z",), predict=new, method="naive", out=tmp_path / "naive")
    narrow = pd.read_csv(tmp_path / "naive" / "intervals.csv")
    np.testing.assert_array_equal(narrow["point"], found["point"])
    assert (narrow["lower"] >= found["lower"]).all()


def test_without_new_rows_clean_rows_are_held_out_with_a_warning(tmp_path, capsys):
    _, truth = table()
    truth.loc[truth["wrong"] == 1, "y"] = 1e6  # wrong labels, which must not be read
    path = write(truth, tmp_path / "all.csv")
    predict(table=path, target="y", privileged=("z",), corrupted="wrong", out=tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = pd.read_csv(tmp_path / "out" / "intervals.csv")
    assert report["held_out"]["rows"] == len(found) == (truth["wrong"] == 0).sum() // 5
    assert truth["wrong"].iloc[found["row"]].sum() == 0
    assert report["held_out"]["clean_rows_only"]
    assert found["upper"].max() < 1e3
    assert "coverage on clean rows only, not on all" in capsys.readouterr().out


def test_classes_get_label_sets(tmp_path):
    lost, _ = table()
    lost["y"] = pd.cut(lost["y"], [-np.inf, -1, 1, np.inf], labels=["low", "middle", "high"]).astype(object)
    path = write(lost.drop(columns="wrong"), tmp_path / "classes.csv")
    with pytest.raises(InputError, match="say --task classification"):
        predict(table=path, target="y", privileged=("z",), out=tmp_path / "out")
    predict(table=path, target="y", privileged=("z",), task="classification", out=tmp_path / "out")
    found = pd.read_csv(tmp_path / "out" / "sets.csv", keep_default_na=False)
    assert set(found["label"]) <= {"low", "middle", "high"}
    assert {name for text in found["set"] for name in text.split("|")} <= {"low", "middle", "high", ""}
    assert json.loads((tmp_path / "out" / "report.json").read_text())["held_out"]["coverage"] > 0.75


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "price"}, "has no column 'price'"),
        ({"privileged": ()}, "names no column"),
        ({"privileged": ("z", "z")}, "named twice"),
        ({"level": 1.5}, "--level must lie between 0 and 1"),
        ({"corrupted": "x"}, "must hold 0 and 1 only"),
        ({"drop": ("x", "kind", "wrong", "few", "none")}, "no column left"),
        ({}, "'none' is empty: leave it out"),
        ({"target": "few"}, "3 distinct whole numbers: say --task"),
        ({"task": "classification"}, "not whole"),
        ({"target": "kind", "task": "regression"}, "is text"),
        ({"target": "none"}, "no row has a clean none"),
        ({"seed": -1}, "--seed must be a whole number"),
        ({"privileged": ("gaps",), "drop": ("none",)}, "'gaps' is missing in 60 rows"),
        ({"privileged": ("name",), "drop": ("none", "gaps")}, "'name' is text with 120 values"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, change, message):
    frame, _ = table(120)
    frame["few"], frame["none"] = np.arange(120) % 3, np.nan
    if "gaps" in str(change):
        frame["gaps"], frame["name"] = ["a", None] * 60, [f"row {i}" for i in range(120)]
        if change["privileged"] == ("gaps",):
            frame = frame.drop(columns="name")
    path = write(frame, tmp_path / "t.csv")
    settings = {"table": path, "target": "y", "privileged": ("z",), "out": tmp_path / "out", **change}
    with pytest.raises(InputError, match=message):
        predict(**settings)
    assert not (tmp_path / "out").exists()


def test_names_and_missing_features_are_refused(tmp_path):
    frame, truth = table(150)
    frame["name"] = [f"row {i}" for i in range(150)]
    path = write(frame.drop(columns="wrong"), tmp_path / "t.csv")
    with pytest.raises(InputError, match="150 values: leave it out with --drop name"):
        predict(table=path, target="y", privileged=("z",), out=tmp_path / "out")
    new = write(truth[["x"]], tmp_path / "new.csv")
    with pytest.raises(InputError, match="no column 'kind'"):
        predict(table=path, target="y", privileged=("z",), drop=("name",), predict=new, out=tmp_path / "out")


def test_a_file_is_no_folder_and_says_so_before_any_work(tmp_path, capsys):
    path = write(table(120)[0], tmp_path / "t.csv")
    for out in (path, path / "inside"):
        with pytest.raises(InputError, match=r"t\.csv is a file: --out must name a folder"):
            predict(table=path, target="y", privileged=("z",), out=out)
    assert capsys.readouterr().out == ""


def test_a_folder_of_an_earlier_run_holds_the_last_run_alone(tmp_path):
    path = write(table(120)[0].drop(columns="wrong"), tmp_path / "t.csv")
    out = tmp_path / "out"
    predict(table=path, target="kind", privileged=("z",), drop=("y",), task="classification", level=0.999, out=out)
    assert (out / "sets.csv").exists()
    predict(table=path, target="y", privileged=("z",), level=0.999, out=out)  # beta stays below alpha
    assert sorted(p.name for p in out.iterdir()) == ["intervals.csv", "intervals.png", "report.json"]
    assert json.loads((out / "report.json").read_text())["thresholds"]["naive"] == "inf"
