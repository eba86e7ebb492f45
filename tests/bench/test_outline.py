"""A study's plan is read from its source, and agrees with what the decorators hold when it is run."""

import dataclasses
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay._errors import InputError
from assay.bench._outline import parse_setting, read_outline
from assay.bench._worker import load_study

STUDY = '''
"""A study."""
from assay.bench import experiment, prepare

RATES = (0.1, 0.2)
ARMS = ("good", "bad")
LIMITS = {"minutes": 2 * 3, "memory_gib": 1.5}

@prepare(("seed", "delta"), settings={"rate": RATES, "steps": 10})
def tuned(job):
    """Tune."""

def ranks(arms):
    return {}

@experiment(
    arms=(*ARMS, "third"),
    measures=("loss",) + ("rank",),
    inputs={"corpus": ("a", "b"), "model": "m"},
    settings={"delta": RATES + (0.3,), "steps": 100, "sign": -1},
    ignores={"bad": ("delta",)},
    needs=(tuned,),
    together=("arm",),
    derive=ranks,
    derived_arms=("mean",),
    seeds=4,
    quick={"corpus": ("a",), "seeds": 3, "arms": ARMS, "steps": 5},
    paper=False,
    **LIMITS,
)
def race(trial):
    """Race."""
'''


def write(tmp_path, source):
    folder = tmp_path / "methods" / "some_method"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "study.py").write_text(textwrap.dedent(source))
    return folder


def test_the_outline_says_what_the_decorators_hold(tmp_path):
    folder = write(tmp_path, STUDY)
    outline, study = read_outline(folder), load_study(folder)
    assert outline.doc == "A study."
    for name, read in [*outline.experiments.items(), *outline.prepares.items()]:
        spec = getattr(study, name)
        assert read.doc == spec.function.__doc__
        for field in dataclasses.fields(spec):
            if field.name == "function":
                continue
            value = getattr(spec, field.name)
            if field.name == "needs":
                value = tuple(f.name for f in value)
            if field.name == "derive":
                value = value.__name__
            assert getattr(read, field.name) == value, field.name


def test_reading_runs_nothing(tmp_path):
    folder = write(tmp_path, "raise SystemExit('run')\n" + STUDY.partition('"""A study."""')[2])
    assert list(read_outline(folder).experiments) == ["race"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("RATES = (0.1, 0.2)", "RATES = tuple(range(3))"),
            "line 5: 'tuple(range(3))' cannot be read without running it",
        ),
        (("seeds=4", "seed=4"), "no argument 'seed'; did you mean 'seeds'?"),
        (('ignores={"bad"', 'ignores={"badd"'), "the arm 'badd', which it does not have; did you mean 'bad'?"),
        (('together=("arm",)', 'together=("steps",)'), "together= names 'steps', which is no axis"),
        (("derive=ranks", "derive=rank"), "no function of the study; did you mean 'ranks'?"),
        (
            ('("seed", "delta")', '("seed", "dellta")'),
            "depends on 'dellta': the experiment has no such setting or input",
        ),
        (
            ('quick={"corpus"', 'quick={"corpsu"'),
            "quick= names 'corpsu', which it does not have; did you mean 'corpus'?",
        ),
        (('"steps": 5}', '"seeds": 0}'), "seeds=0: give a whole number from 1 to 1000"),
        (('measures=("loss",) + ("rank",)', 'measures="loss"'), "measures= of 'race' must be a tuple of names"),
        (('settings={"delta": RATES', 'settings={"arm": RATES'), "has a meaning of its own: rename it"),
        (("def race(trial):", "def race(trial)"), "is not Python"),
    ],
)
def test_a_wrong_study_is_told_in_one_sentence(tmp_path, change, sentence):
    folder = write(tmp_path, STUDY.replace(*change))
    with pytest.raises(InputError, match=re.escape(sentence)):
        read_outline(folder)


def test_prepares_that_need_each_other_are_refused(tmp_path):
    source = """
    from assay.bench import prepare
    @prepare(needs=(b,))
    def a(job): ...
    @prepare(needs=(a,))
    def b(job): ...
    """
    with pytest.raises(InputError, match="in a circle: a -> b -> a"):
        read_outline(write(tmp_path, source))


def test_a_prepare_must_depend_on_what_it_reads(tmp_path):
    source = """
    from assay.bench import prepare
    @prepare(per=("seed",))
    def a(job): ...
    @prepare(needs=(a,))
    def b(job): ...
    """
    with pytest.raises(InputError, match="'b' needs 'a', which depends on 'seed': add it to per= of 'b'"):
        read_outline(write(tmp_path, source))


def test_a_scale_narrows_and_overrides_replace(tmp_path):
    race = read_outline(write(tmp_path, STUDY)).experiments["race"]
    quick = race.at_scale("quick")
    assert quick.arms == ("good", "bad")
    assert quick.seeds == (0, 1, 2)
    assert quick.axes == {"delta": (0.1, 0.2, 0.3), "corpus": ("a",)}
    assert quick.settings == {"steps": 5, "sign": -1}
    assert quick.inputs == {"model": "m"}
    assert quick.narrowed == {"corpus": ("b",)}
    full = race.at_scale("full", seeds=2, overrides={"steps": "7", "delta": "0.5"}, inputs={"corpus": "x.txt,y.txt"})
    assert full.arms == ("good", "bad", "third")
    assert full.seeds == (0, 1)
    assert full.axes == {"delta": (0.5,), "corpus": ("x.txt", "y.txt")}
    assert full.settings["steps"] == 7
    assert full.overridden == ("steps=7", "delta=0.5", "corpus=x.txt,y.txt")
    assert full.narrowed == {}  # what a user chose is named as such
    assert race.at_scale("paper") is None
    assert race.at_scale("full", overrides={"steps": "100"}).overridden == ()


@given(st.integers(-(10**9), 10**9))
def test_a_whole_number_comes_back_from_its_text(x):
    assert parse_setting("steps", str(x), 5) == x
    assert isinstance(parse_setting("steps", str(x), 5), int)
    assert isinstance(parse_setting("rate", str(x), 0.5), float)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=5))
def test_several_values_come_back_from_their_text(xs):
    assert parse_setting("rate", ",".join(map(repr, xs)), (0.1, 0.2)) == tuple(xs)


@pytest.mark.parametrize(("value", "default"), [("0.5", 3), ("many", 3), ("some", 0.1), ("perhaps", True), ("inf", 2)])
def test_a_value_of_another_kind_is_refused(value, default):
    with pytest.raises(InputError, match="x is"):
        parse_setting("x", value, default)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"x = '\xe9'", "is not UTF-8 text"),
        (b"x = '\0'", "is not Python"),
        (b"def f(:", "line 1, is not Python"),
    ],
)
def test_a_file_that_is_no_source_is_named(tmp_path, source, sentence):
    folder = write(tmp_path, "")
    (folder / "study.py").write_bytes(source)
    with pytest.raises(InputError, match=sentence):
        read_outline(folder)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    folder = write(tmp_path, "")
    (folder / "study.py").write_text(STUDY, encoding="utf-8-sig")
    assert list(read_outline(folder).experiments) == ["race"]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("threads='2'", "threads='2': give a whole number, 1 or more"),
        ("threads=0", "threads=0: give a whole number"),
        ("minutes='x'", "minutes='x': give a number above 0"),
        ("minutes=0", "minutes=0: give a number above 0"),
        ("memory_gib=-1", "memory_gib=-1: give a number above 0"),
        ("alone='no'", "alone='no': give True or False"),
        ("seeds=True", "seeds=True: give a whole number"),
        ("seeds=10**6", "seeds=1000000: give a whole number from 1 to 1000"),
        ("quick={'seeds': 10**6}", "seeds=1000000: give a whole number from 1 to 1000"),
        ("quick={'arms': 5}", "arms=5: give a tuple of its arms"),
        ("quick={'arms': ()}", r"arms=\(\): give a tuple of its arms"),
        ("quick={'delta': ()}", r"'delta' must be a number.* got \(\)"),
        ("quick={'delta': {}}", "'delta' must be a number"),
        ("quick={'delta': (1, 1)}", "'delta' has a value twice"),
        ("quick={'delta': 1e999}", "'delta' is not finite"),
        ("curves=(*3,)", "'3' cannot be read without running it"),
        ("quick={**3}", "'3' cannot be read without running it"),
        ("quick={1: 2}", "'1' cannot be read without running it"),
        ("seeds=-'x'", "cannot be read without running it"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_one_sentence(tmp_path, argument, sentence):
    study = f"""
    from assay.bench import experiment

    @experiment(arms=("good",), measures=("loss",), settings={{"delta": (1.0, 2.0)}}, {argument})
    def race(trial):
        pass
    """
    with pytest.raises(InputError, match=sentence):
        read_outline(write(tmp_path, study))


def test_a_value_that_is_given_twice_or_not_at_all_is_refused(tmp_path):
    race = read_outline(write(tmp_path, STUDY)).experiments["race"]
    with pytest.raises(InputError, match="steps has the value 5 twice"):
        race.at_scale("full", overrides={"steps": "5,5"})
    with pytest.raises(InputError, match="corpus has the value a twice"):
        race.at_scale("full", inputs={"corpus": "a,a"})
    with pytest.raises(InputError, match="corpus has an empty value"):
        race.at_scale("full", inputs={"corpus": "a,"})
    with pytest.raises(InputError, match=r"delta is a number .* got 'nan'"):
        race.at_scale("full", overrides={"delta": "nan"})
