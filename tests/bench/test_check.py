"""From a method's name to its verdicts."""

import subprocess
import sys

import pytest

from assay._errors import InputError
from assay.bench import check, standing

STUDY = """
from assay.bench import experiment

@experiment(
    arms=("good", "bad"), measures=("loss",), settings={"delta": (1, 2), "steps": 10}, seeds=4,
    inputs={"corpus": ("shakespeare", "moby-dick")},
    quick={"seeds": 3, "corpus": ("shakespeare",)},
)
def race(trial):
    if trial["corpus"].endswith("mine.txt"):
        assert "words" in trial.path("corpus").read_text()
    return {"loss": (trial.arm == "bad") * trial["delta"] + trial.seed / 100 + trial["steps"] / 1000}

@experiment(arms=("good",), measures=("loss",), seeds=3, quick=False)
def walk(trial):
    return {"loss": trial.seed}

@experiment(arms=("good",), measures=("loss",), seeds=3, device="cuda")
def fly(trial):
    return {"loss": trial.seed}
"""
CLAIMS = """
[[claims]]
id = "better"
says = "It is better everywhere."
testable = "full"
experiment = "race"
holds_if = "loss[good] < loss[bad]"
each = ["delta", "corpus"]

[[claims]]
id = "at-one"
says = "It is better by one at one."
testable = "full"
experiment = "race"
holds_if = "loss[bad, delta=1] - loss[good, delta=1] >= 2"

[[claims]]
id = "on-shakespeare"
says = "It is better on Shakespeare."
testable = "full"
experiment = "race"
holds_if = "loss[good, corpus=shakespeare] < loss[bad, corpus=shakespeare]"

[[claims]]
id = "walks"
says = "It walks."
testable = "full"
experiment = "walk"
holds_if = "loss[good] < 10"

[[claims]]
id = "flies"
says = "It flies."
testable = "full"
experiment = "fly"
holds_if = "loss[good] < 10"

[[claims]]
id = "scales"
says = "It works on a thousand machines."
testable = "no"
because = "a thousand machines"
"""


@pytest.fixture
def tiny(bench, monkeypatch):
    monkeypatch.setattr("assay.bench._check.cuda_devices", lambda: 0)
    bench.method("tiny", STUDY, CLAIMS)
    return bench


def words(result):
    return {verdict.id: verdict.verdict for verdict in result.verdicts}


def test_a_check_gives_a_verdict_for_each_claim(tiny):
    before = standing("tiny")
    assert before.trials == {"done": 0, "reused": 0, "failed": 0, "skipped": 0, "missing": 12}
    assert words(before)["better"] == "open"
    result = check("tiny")
    assert result.trials == {"done": 12, "reused": 0, "failed": 0, "skipped": 0, "missing": 0}
    assert words(result) == {
        "better": "holds",
        "at-one": "fails",
        "on-shakespeare": "holds",
        "walks": "open",
        "flies": "not testable here",
        "scales": "not testable here",
    }
    after = standing("tiny")
    assert words(after) == words(result)
    assert after.trials["reused"] == 12
    printed = result.to_json()
    assert (printed["method"], printed["scale"], printed["trials"]) == ("tiny", "quick", result.trials)
    assert [claim["id"] for claim in printed["claims"]] == [claim.id for claim in result.card.claims]
    assert result.versions["python"] == sys.version.split()[0]
    assert result.machine["cores"] >= 1
    assert result.data["shakespeare"]["kind"] == "documents"


def test_an_input_of_the_users_own_takes_the_place_of_the_defaults(tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("words of my own, " * 100)
    result = check("tiny", inputs={"corpus": str(tmp_path / "mine.txt")}, only=("race",))
    assert result.trials["done"] == 12
    # A claim over every corpus is about mine; one that names Shakespeare is not measured.
    assert words(result) == {"better": "holds", "at-one": "fails", "on-shakespeare": "open"}
    note = next(v.note for v in result.verdicts if v.id == "on-shakespeare")
    assert "corpus" in note
    assert result.overridden == (f"corpus={tmp_path / 'mine.txt'}",)
    # Another content under the same name is other data.
    (tmp_path / "mine.txt").write_text("other words of my own, " * 100)
    assert check("tiny", inputs={"corpus": str(tmp_path / "mine.txt")}, only=("race",)).trials["done"] == 12


def test_an_input_of_another_kind_is_refused(tiny, tmp_path):
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"mine\.csv"):
        check("tiny", inputs={"corpus": str(tmp_path / "mine.csv")}, only=("race",))
    with pytest.raises(InputError, match="neither an asset nor a path that exists"):
        check("tiny", inputs={"corpus": "shakespere"}, only=("race",))


def test_a_value_that_the_run_does_not_have_is_not_judged(tiny):
    result = check("tiny", set={"delta": "3"}, only=("race",))
    assert words(result) == {"better": "holds", "at-one": "open", "on-shakespeare": "holds"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "tinny"}, "there is no method 'tinny'; did you mean 'tiny'?"),
        ({"method": "tiny", "scale": "ful"}, "there is no scale 'ful'; did you mean 'full'?"),
        ({"method": "tiny", "only": ("rase",)}, "no experiment 'rase'; did you mean 'race'?"),
        ({"method": "tiny", "set": {"stepps": "1"}}, "no setting 'stepps'; did you mean 'steps'?"),
        ({"method": "tiny", "set": {"steps": "few"}}, "steps is a whole number (by default 10), got 'few'"),
        ({"method": "tiny", "inputs": {"corpora": "x"}}, "no input 'corpora'; did you mean 'corpus'?"),
        ({"method": "tiny", "workers": 0}, "at least one worker, got 0"),
        ({"method": "tiny", "engine": "spark"}, "there is no engine 'spark'"),
        ({"method": "tiny", "save": True, "seeds": 3}, "a run with --seeds 3 cannot be saved"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(tiny, given, sentence):
    with pytest.raises(InputError) as error:
        check(**given)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_study_imports_nothing_that_only_a_check_needs():
    code = "import assay.bench, sys; print([m for m in ('sqlite3', 'scipy', 'torch', 'pandas', 'filelock') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_claims_over_what_is_derived(bench):
    bench.method(
        "tiny",
        """
        from assay.bench import experiment

        def ranks(arms):
            order = sorted(arms, key=lambda arm: arms[arm]["loss"])
            more = {arm: {"rank": float(order.index(arm))} for arm in arms}
            return {**more, "best": {"loss": arms[order[0]]["loss"] - 0.5}}

        @experiment(
            arms=("good", "bad"), measures=("loss", "rank"), settings={"delta": (0, 2)}, ignores={"bad": ("delta",)},
            derive=ranks, derived_arms=("best",), seeds=3,
        )
        def race(trial):
            # The bad arm ignores delta, and is the better one where delta is 2.
            return {"loss": 1 + trial.seed / 10 if trial.arm == "bad" else trial["delta"] + trial.seed / 10}
        """,
        """
        [[claims]]
        id = "rank-at-0"
        says = "First at 0, second at 2."
        testable = "full"
        experiment = "race"
        holds_if = ["rank[bad, delta=0] - rank[good, delta=0] >= 0.9", "rank[good, delta=2] - rank[bad, delta=2] >= 0.9"]

        [[claims]]
        id = "best"
        says = "The best is better than the bad arm everywhere."
        testable = "full"
        experiment = "race"
        holds_if = "loss[best] < loss[bad]"
        each = "delta"
        """,
    )
    result = check("tiny")
    at = {
        (o.arm, o.at.get("delta")): o.measures.get("rank") for o in result.evidence["race"].observations if o.seed == 1
    }
    # What was derived for the bad arm differs between the values of the axis that it ignores.
    assert at == {
        ("good", 0): 0.0,
        ("good", 2): 1.0,
        ("bad", 0): 1.0,
        ("bad", 2): 0.0,
        ("best", 0): None,
        ("best", 2): None,
    }
    found = {v.id: (v.verdict, v.note) for v in result.verdicts}
    assert found["best"][0] == "holds", found
    assert found["rank-at-0"][0] in ("holds", "open"), found
    assert [c.effect for v in result.verdicts if v.id == "rank-at-0" for c in v.conditions] == [1.0, 1.0]
