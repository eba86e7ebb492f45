"""`assay run`: a method's own command."""

import pytest


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("price,name\n1,a\n2,b\n6,c\n")
    return path


def test_a_lone_verb_is_not_typed(assay, table):
    said = assay("run", "tiny-mean", "--table", table, "--column", "price", "--weights", "1,2.5")
    assert (said.status, said.out) == (0, "arithmetic 3.0 weights=(1.0, 2.5) verbose=False\n")


def test_the_help_teaches(assay):
    said = assay("run", "tiny-mean", "--help")
    assert said.status == 0
    assert "Print the mean of a column." in said.out
    assert "Its column, 100% numbers." in said.out
    assert "assay run tiny-mean --table my.csv --column price" in said.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--colum price", "assay run tiny-mean: "),
        ("--table t.csv --column price --kind harmonic", "assay run tiny-mean: --kind: there is no choice 'harmonic'"),
        ("--table nowhere.csv --column price", "assay: "),
    ],
)
def test_bad_options(assay, words, sentence):
    said = assay("run", "tiny-mean", *words.split())
    assert said.status == 2
    assert said.err.startswith(sentence)
    assert "Traceback" not in said.err


def test_a_column_of_text_is_one_sentence(assay, table):
    said = assay("run", "tiny-mean", "--table", table, "--column", "name")
    assert said.status == 2
    assert "column 'name'" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("text", ["", "price,name\n", "price,price\n1,2\n"], ids=["empty", "no rows", "a column twice"])
def test_a_broken_table_is_one_sentence(assay, tmp_path, text):
    path = tmp_path / "broken.csv"
    path.write_text(text)
    said = assay("run", "tiny-mean", "--table", path, "--column", "price")
    assert said.status == 2
    assert "broken.csv" in said.err
    assert "Traceback" not in said.err


def test_a_missing_package_names_the_extra_to_install(assay, table):
    said = assay("run", "tiny-mean", "--table", table, "--column", "price", "--need", "no_such_package.part")
    assert said.status == 2
    assert (
        said.err
        == "assay: tiny-mean needs the package 'no_such_package', which is not installed: pip install -e \".[tables]\"\n"
    )


def test_several_verbs(assay, tmp_path, tiny):
    two = tiny.COMMAND.replace('__all__ = ["mean"]', '__all__ = ["mean", "largest_value"]') + (
        "\n\ndef largest_value(*, table: Path) -> None:\n"
        '    """Print the largest value.\n\n    Parameters\n    ----------\n    table\n        A file.\n    """\n'
        '    print("largest of", table)\n'
    )
    folder = str(tiny(tmp_path / "two", command=two))
    said = assay("run", "tiny-mean", "largest-value", "--table", "a.csv", ASSAY_METHODS=folder)
    assert (said.status, said.out) == (0, "largest of a.csv\n")
    overview = assay("run", "tiny-mean", "--help", ASSAY_METHODS=folder)
    assert overview.status == 0
    assert "Print the largest value." in overview.out
    for words, sentence in (
        (["larges-value"], "assay run tiny-mean: there is no verb 'larges-value': did you mean 'largest-value'?\n"),
        (["--table", "a"], "assay run tiny-mean: a verb comes first, one of mean, largest-value"),
    ):
        said = assay("run", "tiny-mean", *words, ASSAY_METHODS=folder)
        assert said.status == 2
        assert said.err.startswith(sentence)


def test_a_method_without_a_command(assay, tmp_path, tiny):
    folder = tiny(tmp_path / "none")
    (folder / "tiny_mean" / "command.py").unlink()
    said = assay("run", "tiny-mean", ASSAY_METHODS=str(folder))
    assert said.status == 2
    assert said.err.startswith("assay: tiny-mean has no command of its own")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("def mean(:\n", "command.py, line 1, is not Python"),
        ("mean = 1\n", "has no verbs: name its functions in __all__"),
        ("__all__ = ['mean']\n", "has no verbs: name its functions in __all__"),
    ],
)
def test_a_broken_command_is_named(assay, command, sentence):
    (assay.methods / "tiny_mean" / "command.py").write_text(command)
    said = assay("run", "tiny-mean", "--help")
    assert said.status == 2
    assert sentence in said.err
    assert "Traceback" not in said.err
