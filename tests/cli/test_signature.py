"""A function's signature and docstring are its command line."""

import argparse
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.cli._parser import Parser, UsageError
from assay.cli._signature import add_options, option, read_docstring


def train(
    *,
    text: Path,
    steps: int = 200,
    lr: float | None = None,
    method: Literal["alice", "racs"] = "alice",
    columns: tuple[str, ...] = (),
    levels: tuple[float, ...] = (0.1, 0.5),
    span: tuple[int, int] = (0, 9),
    audit: bool = False,
    tied: bool = True,
    lambda_: float = 1.0,
) -> None:
    """Train a model on a text.

    It is ``small``, and 100% honest.

    Parameters
    ----------
    text
        A file.
    steps, lr : int, float
        How many, and how large;
        both small.
    method : {"alice", "racs"}
        Which.

    Raises
    ------
    ValueError
        Never.

    Examples
    --------
    assay run x --text a.txt
    """


def parse(*words: str, function=train) -> argparse.Namespace:
    parser = Parser(prog="assay run x", add_help=False)
    add_options(parser, function)
    return parser.parse_args(list(words))


def test_defaults_are_those_of_the_function():
    asked = vars(parse("--text", "a.txt"))
    assert asked == {
        "text": Path("a.txt"),
        "steps": 200,
        "lr": None,
        "method": "alice",
        "columns": (),
        "levels": (0.1, 0.5),
        "span": (0, 9),
        "audit": False,
        "tied": True,
        "lambda_": 1.0,
    }


def test_values_have_the_types_of_the_signature():
    words = "--text ~/a --steps 5 --lr 1e-3 --method racs --columns a,b --levels .1,.2 --span 3,4 --audit --no-tied --lambda 2"
    asked = vars(parse(*words.split()))
    assert asked == {
        "text": Path("~/a").expanduser(),
        "steps": 5,
        "lr": 0.001,
        "method": "racs",
        "columns": ("a", "b"),
        "levels": (0.1, 0.2),
        "span": (3, 4),
        "audit": True,
        "tied": False,
        "lambda_": 2.0,
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--text is needed: see assay run x --help"),
        ("--text a --steps 2.5", "--steps: a whole number is expected, not '2.5'"),
        ("--text a --lr fast", "--lr: a number is expected, not 'fast'"),
        ("--text a --method alise", "--method: there is no choice 'alise': did you mean 'alice'?"),
        ("--text a --span 1,2,3", "--span: 2 values with commas between them are expected, not '1,2,3'"),
        ("--text a --levels .1,x", "--levels: a number is expected, not 'x'"),
        ("--text a --stesp 3", "there is no option --stesp: did you mean --steps?"),
        ("--text a --zzz=3", "there is no option --zzz: see assay run x --help"),
        ("--text a b", "'b' is one too many: see assay run x --help"),
        ("--text", "--text needs a value: see assay run x --help"),
        ("--text a --st 3", "there is no option --st: did you mean --steps?"),
    ],
)
def test_a_wrong_option_is_answered_in_one_sentence(words, sentence):
    with pytest.raises(UsageError) as raised:
        parse(*words.split())
    assert str(raised.value) == sentence
    assert raised.value.program == "assay run x"


def test_the_help_is_the_docstring(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "Train a model on a text.",
        "It is small, and 100% honest.",
        "--text PATH A file.",
        "How many, and how large; both small. (default: 200)",
        "Which. (default: alice)",
        "examples: assay run x --text a.txt",
    ):
        assert part in said, part
    assert "Raises" not in said


def test_a_type_that_cannot_be_read_is_the_commands_fault():
    def odd(*, table: dict) -> None:
        """Odd."""

    def untyped(*, table) -> None:
        """Untyped."""

    def either(*, table: int | str) -> None:
        """Either."""

    for function in (odd, untyped, either):
        with pytest.raises(TypeError, match="table"):
            parse("--table", "1", function=function)


def test_docstring_parts():
    docs = read_docstring(train.__doc__)
    assert docs.summary == "Train a model on a text."
    assert docs.prose == "It is ``small``, and 100% honest."
    assert docs.parameters["steps"] == docs.parameters["lr"] == "How many, and how large; both small."
    assert set(docs.sections) == {"Raises", "Examples"}
    assert read_docstring(None).summary == ""


names = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), min_size=1, max_size=3).map("_".join)


@given(names, st.integers())
def test_every_name_is_an_option_that_gives_its_value_back(name, value):
    def command(**kwargs: int) -> None:
        """A command."""

    parameter = __import__("inspect").Parameter(name, 3, annotation=int)
    command.__signature__ = __import__("inspect").Signature([parameter])
    command.__annotations__ = {name: int}
    assert vars(parse(f"{option(name)}={value}", function=command)) == {name: value}
