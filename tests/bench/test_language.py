"""The condition language: what it lets through, what it refuses, and that it never runs what a card says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.bench._language import (
    FUNCTIONS,
    Axis,
    Binary,
    Call,
    Condition,
    LanguageError,
    Negative,
    Number,
    Reference,
    check_each,
    check_names,
    parse_condition,
    parse_each,
    parse_expression,
    references,
    value_of,
    values_by_axis,
)


@dataclass
class Outline:
    arms: tuple[str, ...] = ("vattention", "top-k", "static-prob")
    derived_arms: tuple[str, ...] = ("best",)
    measures: tuple[str, ...] = ("missed", "error", "return")
    curves: tuple[str, ...] = ("rmse",)
    inputs: dict[str, Any] = field(default_factory=lambda: {"table": ("house", "bio"), "model": "smollm2"})
    settings: dict[str, Any] = field(default_factory=lambda: {"delta": (0.05, 0.1), "eps": (0.1, 0.2), "lambda": 2})
    quick: Any = field(default_factory=lambda: {"delta": (0.1,), "seeds": 3})
    full: Any = True
    paper: Any = field(default_factory=lambda: {"model": ("llama-8b", "mistral-7b")})


# ------------------------------------------------------------------------------------------------------------- parsing


def test_a_condition_is_its_sides_and_relations():
    tree = parse_condition("missed[vattention] <= 0.5 * delta")
    assert tree == Condition(
        (Reference("missed", ("vattention",)), Binary("*", Number(0.5), Axis("delta"))),
        ("<=",),
    )


def test_names_of_arms_and_values_are_free_text():
    (reference,) = references(parse_condition("err[top-k@0.1 v2, model=meta/Llama-3.2 | b, d=0.1] < 1"))
    assert reference == Reference("err", ("top-k@0.1 v2",), (("model", ("meta/Llama-3.2", "b")), ("d", ("0.1",))))


@pytest.mark.parametrize("word", ["return", "lambda", "class", "import", "None"])
def test_words_of_python_are_fine_names(word):
    tree = parse_condition(f"{word}[a] < {word}")
    assert tree == Condition((Reference(word, ("a",)), Axis(word)), ("<",))


def test_a_chain_is_all_its_links():
    chain = parse_condition("nll[a] < nll[b] <= nll[c]")
    assert [str(link) for link in chain.links()] == ["nll[a] < nll[b]", "nll[b] <= nll[c]"]


def test_signs_bind_as_in_python():
    assert parse_condition("a[x] - b[x] - c[x] * -2 / d[x] < 1").sides[0] == Binary(
        "-",
        Binary("-", Reference("a", ("x",)), Reference("b", ("x",))),
        Binary("/", Binary("*", Reference("c", ("x",)), Negative(Number(2))), Reference("d", ("x",))),
    )


def test_each_names_an_axis_and_perhaps_its_values():
    assert parse_each("eps") == ("eps", None)
    assert parse_each("table = house| bio") == ("table", ("house", "bio"))


@pytest.mark.parametrize("text", ["", "=a", "table=", "table=a||b", "a b", "table=a|a", "x-y"])
def test_each_refuses_what_is_no_axis(text):
    with pytest.raises(LanguageError):
        parse_each(text)


REFUSED = {
    # Python that is not in the language
    "__import__('os').system('true') < a[x]": "unknown function",
    "a[x] < (lambda: 1)()": "no such sign",
    "open(a[x]) < 1": "unknown function 'open'",
    "a[x].real < 1": "no such sign",
    "a[x] < 1 and b[x] < 2": "list of conditions",
    "a[x] if b[x] else 1 < 2": "list of conditions",
    "a[x] == 1": "no such sign",
    "a[x] != 1": "no such sign",
    "a[x] ** 2 < 1": "not",
    "a[x] // 2 < 1": "not",
    "a[x] % 2 < 1": "no such sign",
    "+a[x] < 1": "not",
    "abs(*a[x]) < 1": "not",
    "(a[x], b[x]) < 1": "not",
    "a[x] < 1j": "not",
    "a[x] < 1_0": "not",
    "a[x] < 0x10": "not",
    "a[x] < 1e999": "not",
    "a[x] < " + "9" * 400: "not read",
    "a[x] < 'b'": "no such sign",
    "a[x][y] < 1": "no such sign",
    "a[b[x]] < 1": "no such sign",
    "a[x] < é": "no such sign",
    "a[x] < 1; b": "no such sign",
    "a[x] <": "not read",
    "": "empty",
    "a b < 1": "not read",
    "(" * 250 + "a[x]" + ")" * 250 + " < 1": "not read",
    "-" * 200 + "a[x] < 1": "deep",
    "a[x] + " * 200 + "1 < 1": "characters",
    # in the signs of the language, without a meaning
    "a[x]": "compares nothing",
    "1 < 2": "measured",
    "delta < 2": "measured",
    "a[x] < b[x] < 1 < 2": "measured",
    "(a[x] < 1) < 2": "comparison",
    "(a[x] < 1) + 1 < 2": "condition where a number",
    "a[] < 1": "no arm",
    "a[axis=1] < 1": "no arm",
    "a[x, y] < 1": "axis=value",
    "a[x|x] < 1": "twice",
    "a[x, d=1, d=2] < 1": "twice",
    "a[x|y] < 1": "several arms",
    "abs(a[x|y]) < 1": "several arms",
    "max(abs(a[x|y]), 0) < 1": "several arms",
    "max(a[x]) < 1": "nothing to choose",
    "abs(a[x], b[x]) < 1": "1",
    "pearson(a[x]) < 1": "expected 2",
    "share(a[x]) < 1": "share\\(condition\\)",
    "share(share(a[x] < 1) < 1) < 1": "inside share",
    "pearson(speedup(a[x], b[x]), a[x]) < 1": "inside pearson",
    "abs(a[x] < 1) < 1": "condition where",
    "slope(a[x], 2) < 1": "for an axis",
    "slope(a[x], b[x]) < 1": "for an axis",
    "slope(2, delta) < 1": "measure",
    "share(1 < 2) < 1": "measure",
    "speedup(a[x] + 1, b[x]) < 1": "expected speedup",
    "speedup(a[x|y], b[x]) < 1": "expected speedup",
    "speedup(a[x, t=u|v], b[x]) < 1": "several curves",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_is_outside_the_language_is_refused_in_one_sentence(text):
    with pytest.raises(LanguageError, match=REFUSED[text]) as refused:
        parse_condition(text)
    assert "\n" not in str(refused.value)


def test_the_nearest_function_is_named():
    with pytest.raises(LanguageError, match="did you mean 'spearman'"):
        parse_condition("spearmen(a[x], b[x]) > 0")


def test_an_expression_has_no_relation():
    assert parse_expression("a[x] / b[x]") == Binary("/", Reference("a", ("x",)), Reference("b", ("x",)))
    with pytest.raises(LanguageError, match="holds_if"):
        parse_expression("a[x] < 1")
    with pytest.raises(LanguageError, match="measured"):
        parse_expression("1 + delta")


# -- every tree of the language can be written and read back ----------------------------------------------------------

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda s: s not in (*FUNCTIONS, "and", "or", "not", "in", "is", "if", "else", "for")
)
arms = st.from_regex(r"[a-z][a-z0-9.+@/-]{0,8}", fullmatch=True)
places = st.dictionaries(names, st.lists(arms, min_size=1, max_size=2, unique=True).map(tuple), max_size=2)
one_arm = st.builds(lambda m, a, at: Reference(m, (a,), tuple(at.items())), names, arms, places)
one_curve = st.builds(lambda m, a: Reference(m, (a,)), names, arms)
numbers = st.floats(0, 1e12, allow_nan=False).map(Number)
axes = names.map(Axis)


def _sums(inner):
    return st.one_of(
        st.builds(Binary, st.sampled_from("+-*/"), inner, inner),
        st.builds(Negative, inner),
        st.builds(lambda f, x: Call(f, (x,)), st.sampled_from(["abs", "log", "exp"]), inner),
        st.builds(lambda f, x, y: Call(f, (x, y)), st.sampled_from(["min", "max"]), inner, inner),
        st.builds(
            lambda f, x, r, a: Call(f, (Binary("+", r, x), a)),
            st.sampled_from(["slope", "spread", "r2"]),
            inner,
            one_arm,
            axes,
        ),
    )


per_case = st.recursive(st.one_of(one_arm, numbers, axes), _sums, max_leaves=5)
relations = st.sampled_from(["<", "<=", ">", ">="])
overall = st.recursive(
    st.one_of(
        one_arm,
        numbers,
        axes,
        st.builds(lambda r, x, s: Call("share", (Condition((r, x), (s,)),)), one_arm, per_case, relations),
        st.builds(lambda f, r, x: Call(f, (r, x)), st.sampled_from(["pearson", "spearman", "auc"]), one_arm, per_case),
        st.builds(lambda r, s: Call("speedup", (r, s)), one_curve, one_curve),
    ),
    _sums,
    max_leaves=6,
)
conditions = st.builds(lambda r, x, sign: Condition((Binary("+", r, x), x), (sign,)), one_arm, overall, relations)


@given(conditions)
@settings(max_examples=150, deadline=None)
def test_a_tree_written_and_parsed_is_the_same_tree(tree):
    text = str(tree)
    if len(text) > 1000:
        return
    assert parse_condition(text) == tree


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_parses_or_is_refused(text):
    try:
        tree = parse_condition(text)
    except LanguageError:
        return
    assert parse_condition(str(tree)) == tree


@given(
    st.lists(
        st.sampled_from(
            ["a[x]", "delta", "1", "<", ">=", "(", ")", "+", "-", "*", "/", ",", "max", "share", "lambda", "print"]
        ),
        max_size=12,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_row_of_the_languages_own_words_parses_or_is_refused(words):
    try:
        tree = parse_condition(" ".join(words))
    except LanguageError:
        return
    assert parse_condition(str(tree)) == tree


def test_parsing_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (
        "open('made', 'w') < a[x]",
        "exec(a[x]) < 1",
        "a[x] < eval(made)",
        "a[__import__('os').mkdir('made')] < 1",
    ):
        try:
            parse_condition(text)
        except LanguageError:
            continue
        # what looks like code inside the brackets is an arm's name, and nothing else
        assert references(parse_condition(text))[0].arms == ("__import__('os').mkdir('made')",)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ checking


@pytest.mark.parametrize(
    "text",
    [
        "missed[vattention] <= delta",
        "error[top-k, delta=0.10, table=house|bio] < error[best]",
        "max(return[top-k|static-prob]) < seconds[vattention] + lambda",
        "slope(error[vattention], delta) > 0",
        "spread(error[vattention], table) < 1",
        "speedup(rmse[vattention], rmse[top-k, table=bio]) > 1",
        "peak_bytes[vattention, model=llama-8b] < 1e9",
    ],
)
def test_what_the_experiment_has_is_accepted(text):
    check_names(parse_condition(text), Outline())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mised[vattention] < 1", "unknown measure 'mised'.*did you mean 'missed'"),
        ("missed[vatention] < 1", "unknown arm 'vatention'.*did you mean 'vattention'"),
        ("missed[top-k] < max(error[top-k|static-prop])", "unknown arm 'static-prop'.*did you mean 'static-prob'"),
        ("missed[top-k] < dleta", "unknown axis 'dleta'.*did you mean 'delta'"),
        ("missed[top-k, tabel=bio] < 1", "unknown axis 'tabel'.*did you mean 'table'"),
        ("missed[top-k, table=hose] < 1", "unknown value of table 'hose'.*did you mean 'house'"),
        ("missed[top-k, delta=0.3] < 1", "unknown value of delta '0.3'.*expected one of 0.05, 0.1"),
        ("missed[top-k] < table", "no numbers"),
        ("slope(missed[top-k], table) < 1", "no numbers"),
        ("slope(missed[top-k], lambda) < 1", "one value"),
        ("slope(missed[top-k, delta=0.1], delta) < 1", "leave it out"),
        ("slope(missed[top-k], eps) < 1", "`each` fixes"),
        ("rmse[top-k] < 1", "curve"),
        ("speedup(rmes[top-k], rmse[top-k]) < 1", "unknown curve 'rmes'.*did you mean 'rmse'"),
        ("speedup(rmse[topk], rmse[top-k]) < 1", "unknown arm 'topk'.*did you mean 'top-k'"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(text, sentence):
    with pytest.raises(LanguageError, match=sentence):
        check_names(parse_condition(text), Outline(), fixed=["eps"])


def test_each_is_checked_against_the_values_of_any_scale():
    check_each([("delta", ("0.1",)), ("model", ("llama-8b", "smollm2"))], Outline())
    with pytest.raises(LanguageError, match=r"unknown axis 'deta'.*did you mean 'delta'"):
        check_each([("deta", None)], Outline())
    with pytest.raises(LanguageError, match="unknown value of table 'boi'"):
        check_each([("table", ("boi",))], Outline())


def test_values_are_gathered_over_all_scales():
    assert values_by_axis(Outline())["model"] == ("smollm2", "llama-8b", "mistral-7b")


def test_a_value_is_found_by_its_meaning():
    assert value_of("1e-1", (0.05, 0.1)) == 0.1
    assert value_of("true", (False, True)) is True
    assert value_of("1", ("1", "2")) == "1"
    assert value_of("bio", (1, 2)) is None
