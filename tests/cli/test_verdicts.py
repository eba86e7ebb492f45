"""The table of verdicts: the word, the sentence, the effect with its interval against the bar, the note."""

from types import SimpleNamespace

import pytest

from assay.cli._verdicts import measured, verdict_table


def result(**changes):
    base = {
        "id": "guarantee",
        "verdict": "holds",
        "effect": 0.03124,
        "interval": [0.0213, 0.0431],
        "bar": 0.05,
        "note": "",
        "conditions": [
            {"test": "a[x] <= 1", "cell": {}, "effect": 0.5, "interval": [0.4, 0.6], "bar": 1},
            {
                "test": "missed[vattention] <= delta",
                "cell": {"eps": 0.1, "delta": 0.05},
                "effect": 0.03124,
                "interval": [0.0213, 0.0431],
                "bar": 0.05,
            },
        ],
    }
    return {**base, **changes}


def claim(**changes):
    base = {"id": "guarantee", "says": "It is rarely wrong.", "reported": None, "testable": "full", "because": None}
    return SimpleNamespace(**{**base, **changes})


def test_the_deciding_condition_stands_beside_its_numbers():
    assert measured(result()) == (
        "0.031 (0.021 to 0.043) against 0.05: missed[vattention] <= delta, at eps=0.1, delta=0.05"
    )


def test_a_report_has_no_bar():
    assert measured(result(bar=None, conditions=[])) == "0.031 (0.021 to 0.043)"


@pytest.mark.parametrize("word", ["holds", "fails", "open", "measured"])
def test_a_row_has_the_word_the_sentence_the_paper_and_the_note(word):
    claims = [claim(reported="0.02 on Llama", testable="scaled", because="a small model")]
    lines = verdict_table(claims, {"guarantee": result(verdict=word, note="fewer than three seeds")}).splitlines()
    assert lines[0] == f"{word:14}It is rarely wrong."
    assert lines[1].startswith(" " * 14 + "0.031 (0.021 to 0.043) against 0.05")
    assert lines[-3:] == [
        " " * 14 + "paper: 0.02 on Llama",
        " " * 14 + "scaled, in the full study: a small model",
        " " * 14 + "fewer than three seeds",
    ]
    assert max(map(len, lines)) <= 80


def test_what_cannot_be_tested_here_comes_last():
    claims = [claim(id="far", testable="no", because="needs 80 GB"), claim()]
    lines = verdict_table(claims, {"guarantee": result()}).splitlines()
    assert lines[0].startswith("holds")
    assert lines[-3:] == ["not testable here", " " * 14 + "It is rarely wrong.", " " * 14 + "needs 80 GB"]


def test_numbers_in_text_form_are_read():
    assert measured(result(effect="inf", interval=None, conditions=[])) == "∞ against 0.05"


@pytest.mark.parametrize(
    "note", ["its experiment is not run at this scale", "table=bio is not run here (table is house)"]
)
def test_what_the_scale_leaves_out_is_named_at_the_end_in_short(note):
    claims = [claim(id="small"), claim(id="large")]
    left = result(
        id="large", verdict="open", effect=None, interval=None, bar=None, conditions=[], note=note, left_out=True
    )
    lines = verdict_table(claims, {"small": result(id="small"), "large": left}).splitlines()
    assert lines[0].startswith("holds")
    assert lines[-2:] == ["at a larger scale only", " " * 14 + "large"]
    assert note not in "\n".join(lines)


def test_a_reason_that_stands_above_is_not_repeated():
    claims = [
        claim(id="one", testable="scaled", because="a small model"),
        claim(id="two", testable="scaled", because="a small model"),
        claim(id="three", testable="scaled", because="another"),
    ]
    table = verdict_table(claims, {c.id: result(id=c.id) for c in claims})
    assert [table.count(f"scaled, in the full study: {why}") for why in ("a small model", "another")] == [1, 1]


def test_what_is_missing_for_another_reason_keeps_its_row():
    left = result(
        verdict="open", effect=None, interval=None, bar=None, conditions=[], note="3 trials missing (not run yet)"
    )
    assert "3 trials missing (not run yet)" in verdict_table([claim()], {"guarantee": left})
