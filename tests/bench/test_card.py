"""Cards: what is read, and the sentence for everything that can be wrong in one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from assay.bench._card import Card, CardError, Claim, Paper, Takes, all_cards, check_card, load_card
from assay.bench._methods import method_folders

HEAD = '''
name    = "vattention"
title   = "vAttention"
summary = "Sparse decode attention with an error bound that you choose."
fields  = ["language models", "inference"]
extras  = ["lm"]

[paper]
title = "The paper"
id    = "arXiv:2510.05688"
venue = "ICLR 2026"
bibtex = """@inproceedings{v,
  title = {The paper}
}"""

[[takes]]
kind    = "language model"
command = "assay run vattention --model {path}"
'''
CLAIM = """
[[claims]]
id         = "guarantee"
says       = "The error exceeds its tolerance with probability at most delta."
reported   = "holds on Llama-3.1-8B, RULER"
testable   = "scaled"
because    = "SmolLM2-135M at 4k tokens"
experiment = "attention_error"
holds_if   = ["missed[vattention] <= delta", "error[vattention] < error[top-k]"]
each       = ["delta", "table=house|bio"]
in_at_least = 3
given      = "error[top-k] <= 1"
"""
CANNOT = """
[[claims]]
id       = "on-llama"
says     = "It holds on a model with eight billion parameters."
testable = "no"
because  = "no such model here"
"""


@pytest.fixture
def write(tmp_path):
    folder = tmp_path / "vattention"
    folder.mkdir()

    def write(text: str):
        (folder / "card.toml").write_text(text, encoding="utf-8")
        return folder

    return write


def test_a_card_is_read_as_it_is_written(write):
    folder = write(HEAD + CLAIM + CANNOT)
    card = load_card(folder)
    assert card == load_card(folder / "card.toml")
    assert card == Card(
        name="vattention",
        title="vAttention",
        summary="Sparse decode attention with an error bound that you choose.",
        fields=("language models", "inference"),
        extras=("lm",),
        paper=Paper("The paper", "arXiv:2510.05688", "ICLR 2026", "@inproceedings{v,\n  title = {The paper}\n}"),
        takes=(Takes("language model", "assay run vattention --model {path}"),),
        claims=(
            Claim(
                id="guarantee",
                says="The error exceeds its tolerance with probability at most delta.",
                reported="holds on Llama-3.1-8B, RULER",
                testable="scaled",
                because="SmolLM2-135M at 4k tokens",
                experiment="attention_error",
                holds_if=("missed[vattention] <= delta", "error[vattention] < error[top-k]"),
                each=(("delta", None), ("table", ("house", "bio"))),
                in_at_least=3,
                given=("error[top-k] <= 1",),
            ),
            Claim(
                id="on-llama",
                says="It holds on a model with eight billion parameters.",
                testable="no",
                because="no such model here",
            ),
        ),
        folder=folder,
    )


def test_a_single_text_stands_for_a_list_of_one(write):
    text = (HEAD + CLAIM).replace('["missed[vattention] <= delta", "error[vattention] < error[top-k]"]', '"a[b] < 1"')
    assert load_card(write(text)).claims[0].holds_if == ("a[b] < 1",)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name    = "vattention"', 'name = "v-attention"', "name is 'v-attention', expected 'vattention'"),
        ('name    = "vattention"', 'name = "V A"', "name is 'V A', expected small letters"),
        ('title   = "vAttention"', "", "title is missing, expected text"),
        ('title   = "vAttention"', "title = 3", "title is 3, expected text"),
        ('title   = "vAttention"', 'title = "v"\nsumary = "x"', "unknown key 'sumary'.*did you mean 'summary'"),
        ('["language models", "inference"]', "[]", "fields is empty"),
        ('["language models", "inference"]', '"inference"', "fields is 'inference', expected a list of text"),
        ("[paper]", "[papers]", "unknown key 'papers'.*did you mean 'paper'"),
        ('venue = "ICLR 2026"', "", "paper.venue is missing"),
        ('venue = "ICLR 2026"', 'venue = "x"\nyear = 2026', "unknown key 'year' in paper"),
        ("@inproceedings", "inproceedings", "paper.bibtex is no BibTeX"),
        ("{path}", "PATH", r"takes\[0\].command"),
        ("[[takes]]", "[takes]", "takes is .*expected tables"),
        ('id         = "guarantee"', 'id = "on-llama"', r"claims\[1\].id is 'on-llama', which another claim has"),
        ('testable   = "scaled"', 'testable = "maybe"', r"claims\[0\] \(guarantee\).testable is 'maybe', expected"),
        ('because    = "SmolLM2-135M at 4k tokens"', "", "because is missing, expected what is smaller"),
        ('because  = "no such model here"', "", "because is missing, expected what is missing"),
        ('experiment = "attention_error"', "", "experiment is missing"),
        ("holds_if   = [", 'report = "a[b]"\nholds_if = [', "report stands beside"),
        ("holds_if   = [", "# [", "holds_if is missing"),
        ("missed[vattention] <= delta", "missed[vattention] <= delta and 1", "holds_if: .*list of conditions"),
        ("missed[vattention] <= delta", "1 <= delta", "holds_if: .*measured"),
        ("table=house|bio", "table=", "each: 'table='"),
        ("table=house|bio", "delta=0.1", "each names an axis twice"),
        ("in_at_least = 3", "in_at_least = 0", "in_at_least is 0, expected a whole number"),
        ("in_at_least = 3", "in_at_least = true", "in_at_least is True"),
        ('each       = ["delta", "table=house|bio"]', "", "in_at_least needs `each`"),
        ("error[top-k] <= 1", "error[top-k] = 1", "given: "),
        ("[paper]", "[paper", "is not TOML"),
    ],
)
def test_an_error_names_the_file_the_key_and_what_was_expected(write, old, new, sentence):
    text = HEAD + CLAIM + CANNOT
    assert old in text
    folder = write(text.replace(old, new))
    with pytest.raises(CardError, match=sentence) as wrong:
        load_card(folder)
    assert str(folder / "card.toml") in str(wrong.value)


def test_a_report_is_an_expression(write):
    old = 'holds_if   = ["missed[vattention] <= delta", "error[vattention] < error[top-k]"]'
    text = (HEAD + CLAIM).replace(old, 'report = "error[vattention]"').replace("in_at_least = 3", "")
    assert load_card(write(text)).claims[0].report == "error[vattention]"
    with pytest.raises(CardError, match=r"report: .*holds_if"):
        load_card(write(text.replace('"error[vattention]"', '"error[vattention] < 1"')))


def test_no_card_and_no_claims_are_told(tmp_path, write):
    with pytest.raises(CardError, match="no card at"):
        load_card(tmp_path / "nowhere")
    with pytest.raises(CardError, match="claims are missing"):
        load_card(write(HEAD))


def outline(**changes):
    experiment = {
        "arms": ("vattention", "top-k"),
        "derived_arms": (),
        "measures": ("missed", "error"),
        "curves": (),
        "inputs": {"table": ("house", "bio")},
        "settings": {"delta": (0.05, 0.1)},
        "quick": True,
        "full": True,
        "paper": True,
    }
    return SimpleNamespace(experiments={"attention_error": SimpleNamespace(**(experiment | changes))})


def test_a_card_fits_its_study(write):
    check_card(load_card(write(HEAD + CLAIM + CANNOT)), outline())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arms": ("vattention", "topk")}, r"\(guarantee\): holds_if: unknown arm 'top-k'.*did you mean 'topk'"),
        ({"measures": ("misses", "error")}, "holds_if: unknown measure 'missed'.*did you mean 'misses'"),
        ({"settings": {"dleta": (0.1, 0.2)}}, "each: unknown axis 'delta'.*did you mean 'dleta'"),
        ({"inputs": {"table": ("houses", "bio")}}, "each: unknown value of table 'house'.*did you mean 'houses'"),
    ],
)
def test_a_name_that_the_study_lacks_is_told_with_the_nearest(write, changes, sentence):
    with pytest.raises(CardError, match=sentence):
        check_card(load_card(write(HEAD + CLAIM)), outline(**changes))


def test_an_unknown_experiment_is_told(write):
    card = load_card(write((HEAD + CLAIM).replace("attention_error", "atention_error")))
    with pytest.raises(CardError, match=r"unknown experiment 'atention_error'.*did you mean 'attention_error'"):
        check_card(card, outline())


def test_a_premise_is_checked_like_a_condition(write):
    card = load_card(write((HEAD + CLAIM).replace("error[top-k] <= 1", "error[topk] <= 1")))
    with pytest.raises(CardError, match="given: unknown arm 'topk'"):
        check_card(card, outline())


def test_methods_are_found_by_their_folders(tmp_path):
    for name in ("one_method", "another", "no_card"):
        (tmp_path / name).mkdir()
    for name in ("one_method", "another"):
        (tmp_path / name / "card.toml").write_text(
            (HEAD + CANNOT).replace('"vattention"', f'"{name.replace("_", "-")}"', 1)
        )
    assert method_folders(tmp_path) == {"another": tmp_path / "another", "one-method": tmp_path / "one_method"}
    assert [card.name for card in all_cards(tmp_path).values()] == ["another", "one-method"]


def test_reading_cards_imports_no_numpy():
    code = "import sys; from assay.bench._card import all_cards; all_cards(); print([m for m in ('numpy', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "vattention").mkdir()
    (tmp_path / "vattention" / "card.toml").write_text(HEAD + CANNOT, encoding="utf-8-sig")
    assert load_card(tmp_path / "vattention").name == "vattention"


def test_an_error_shows_no_more_of_a_value_than_a_line_or_three(write):
    with pytest.raises(CardError) as raised:
        load_card(write((HEAD + CANNOT).replace('["lm"]', f'"{"x" * 100_000}"')))
    assert len(str(raised.value)) < 600
    assert "..., expected a list of text" in str(raised.value)


@pytest.mark.parametrize("text", ['"vAttention"', '"lm"'])
def test_what_would_steer_a_terminal_is_refused(write, text):
    with pytest.raises(CardError, match=r"is .*\\x1b.*, expected "):
        load_card(write((HEAD + CANNOT).replace(text, text[:-1] + '\\u001b[2J"')))
