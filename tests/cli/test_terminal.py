"""What is written fits 80 columns, and mistyped names are understood."""

import io

from hypothesis import given
from hypothesis import strategies as st

from assay.cli import _terminal
from assay.cli._terminal import nearest, paint, reflow, unknown, wrap

words = st.lists(st.from_regex(r"[a-z]{1,12}", fullmatch=True), min_size=1, max_size=60)


@given(words, st.integers(0, 20))
def test_wrapped_text_keeps_its_words_and_its_width(text, indent):
    lines = wrap(" ".join(text), indent).splitlines()
    assert " ".join(lines).split() == text
    assert all(len(line) <= 80 and line.startswith(" " * indent) for line in lines)


@given(st.lists(st.from_regex(r"[a-z]{4,10}", fullmatch=True), min_size=1, unique=True), st.data())
def test_one_swapped_pair_of_letters_is_understood(known, data):
    name = data.draw(st.sampled_from(known))
    assert nearest(name, known) == name
    assert unknown("thing", "qqqq0000", known).startswith("there is no thing 'qqqq0000'")


def test_the_sentence_for_an_unknown_name():
    assert unknown("method", "vatention", ["vattention", "sts"]) == (
        "there is no method 'vatention': did you mean 'vattention'?"
    )
    assert unknown("verb", "x", ["train", "score"]) == "there is no verb 'x': there are train, score"
    assert unknown("verb", "x", ["train"]) == "there is no verb 'x': there is train"
    assert unknown("method", "attention", ["vattention-two", "sts"]) == (
        "there is no method 'attention': did you mean 'vattention-two'?"
    )


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("holds", "green", Terminal()) == "\x1b[32mholds\x1b[0m"
    assert paint("holds", "green", io.StringIO()) == "holds"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("holds", "green", Terminal()) == "holds"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert paint("holds", "green", Terminal()) == "holds"


def test_reflow_joins_prose_and_keeps_blocks(monkeypatch):
    monkeypatch.setattr(_terminal, "width", lambda: 30)
    text = "One ``paragraph`` of\nprose.\n\n    a = block()\n\n- a list\n- of two"
    assert reflow(text) == "One paragraph of prose.\n\n    a = block()\n\n- a list\n- of two"
