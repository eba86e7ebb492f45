"""The command on a user's counts: what it leaves, what it says, what it refuses."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from assay._errors import InputError
from assay.methods.lid_scaling import PassAtK, command


def counts(beta=2.5, delta=0.4, v=0.2, problems=300, n=40, seed=0):
    rng = np.random.default_rng(seed)
    root, bias = np.sqrt(rng.gamma(beta / 2, size=problems)), math.sqrt(v) * rng.standard_normal(problems)
    s = norm.cdf((delta - bias) * root) - norm.cdf((-delta - bias) * root)
    return rng.binomial(n, s), np.full(problems, n)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "counts.jsonl"
    path.write_text(
        "\n".join(json.dumps({"id": i, "n": int(n), "c": int(c)}) for i, (c, n) in enumerate(zip(*counts())))
    )
    return path


def test_it_leaves_the_curve_the_law_and_a_picture(table, tmp_path, capsys):
    out = tmp_path / "a" / "out"
    command.fit(table=table, out=out, bootstrap=200)
    said = capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {"report.json", "curve.csv", "curve.png"}
    curve = PassAtK(*counts())
    with (out / "curve.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        assert float(row["failure"]) == pytest.approx(curve.curve([int(row["k"])])[0])
        assert float(row["low"]) <= float(row["failure"]) <= float(row["high"])
    report = json.loads((out / "report.json").read_text())
    assert report["exponent"]["value"] == pytest.approx(curve.beta_eff((1, 40), draws=10).value)
    low, high = report["law"]["beta_interval"]
    assert low < report["law"]["beta"] < high
    assert f"pass@1    {1 - curve.curve([1])[0]:.3f}" in said
    assert "the counts tell of k up to 40" in said
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_columns_of_a_csv_and_a_window_beyond_the_counts(tmp_path, capsys):
    path = tmp_path / "counts.csv"
    path.write_text("right,all\n" + "\n".join(f"{c},{n}" for c, n in zip(*counts())))
    command.fit(table=path, out=tmp_path / "out", successes="right", samples="all", window=(1.0, 200.0), bootstrap=50)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["estimator"] == "posterior"
    assert report["exponent"]["window"] == [1.0, 200.0]
    assert "over k from 1 to 200; the counts tell of k up to 40" in capsys.readouterr().out


def test_a_budget_is_split_where_both_sides_gain_alike(tmp_path, capsys):
    table = tmp_path / "counts.csv"
    table.write_text("c,n\n" + "\n".join(f"{c},{n}" for c, n in zip(*counts(n=10))))
    command.fit(
        table=table,
        out=tmp_path / "out",
        budget=20_000.0,
        train_size=2000.0,
        features=200.0,
        sample_cost=5.0,
        bootstrap=20,
    )
    split = json.loads((tmp_path / "out" / "report.json").read_text())["split"]
    assert split["N_whole"] + 5 * split["k_whole"] <= 20_000
    assert split["loss"] <= split["failure_as_it_is"]
    if split["regime"] == "interior":
        assert split["marginal_train"] == pytest.approx(split["marginal_infer"], rel=0.05)
    assert "samples a problem" in capsys.readouterr().out


def test_all_right_is_told_and_not_fitted(tmp_path, capsys):
    path = tmp_path / "counts.csv"
    path.write_text("c,n\n" + "4,5\n" * 3 + "5,5\n")
    command.fit(table=path, out=tmp_path / "one", bootstrap=20, window=(1.0, 2.0))
    path.write_text("c,n\n" + "0,5\n" * 3)
    command.fit(table=path, out=tmp_path / "none", bootstrap=20)
    assert "every answer is right, or none" in capsys.readouterr().out
    assert json.loads((tmp_path / "none" / "report.json").read_text())["law"] is None


def test_what_is_refused(table, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.csv").write_text("c,n\n3,2\n")
    (tmp_path / "text.csv").write_text("c,n\nx,2\n")
    for change, sentence in (
        ({"out": tmp_path / "file"}, "is a file"),
        ({"window": (1.0,)}, "--window has 1 numbers"),
        ({"budget": 10.0}, "--budget needs --train-size and --features"),
        ({"budget": 10.0, "train_size": 5.0, "features": 9.0}, "more examples than features"),
        ({"table": tmp_path / "bad.csv"}, "row 0 has 3.0 successes among 2.0"),
        ({"table": tmp_path / "text.csv"}, "are counts"),
        ({"table": tmp_path / "bad.csv", "successes": "right"}, "no column 'right'"),
    ):
        with pytest.raises(InputError, match=sentence):
            command.fit(**({"table": table, "out": tmp_path / "out", "bootstrap": 10} | change))
    assert not (tmp_path / "out").exists()
