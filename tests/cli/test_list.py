"""`assay list`, `show` and `cite` tell what the cards and the results say."""

import json

import pytest


def test_list_names_every_method_with_its_field_and_claims(assay):
    said = assay("list")
    assert said.status == 0
    assert "tiny-mean" in said.out
    assert "arithmetic: 1 not testable here, 3 not measured yet" in said.out
    assert "\x1b" not in said.out
    assert max(map(len, said.out.splitlines())) <= 80


def test_list_as_json(assay):
    rows = {row["name"]: row for row in json.loads(assay("list", "--json").out)}
    row = rows["tiny-mean"]
    assert row["claims"] == {"not testable here": 1, "not measured yet": 3}
    assert row["fields"] == ["arithmetic"]
    assert row["extras"] == ["tables"]
    assert row["takes"] == [{"kind": "table", "command": "assay run tiny-mean --table {path} --column price"}]


def test_list_of_one_field(assay):
    rows = json.loads(assay("list", "--json", "--field", "arithmetic").out)
    assert [row["name"] for row in rows] == ["tiny-mean"]


def test_list_for_a_file_gives_the_command_to_try(assay, tmp_path):
    table = tmp_path / "my table.csv"
    table.write_text("price\n1\n2\n")
    said = assay("list", "--for", str(table))
    assert said.status == 0
    assert f"assay run tiny-mean --table '{table}' --column price" in said.out


def test_list_for_a_file_that_nobody_takes(assay, tmp_path):
    odd = tmp_path / "odd.xyz"
    odd.write_bytes(b"\x00\x01\x02")
    said = assay("list", "--for", str(odd))
    assert said.status == 2
    assert f"no method takes {odd}" in said.err


def test_show_tells_paper_use_needs_and_claims(assay):
    said = assay("show", "tiny-mean").out
    for part in (
        "On the mean. Nowhere 2026, arXiv:0000.00000",
        'pip install -e ".[tables]"',
        "from assay.methods.tiny_mean import mean",
        "assay run tiny-mean --table FILE --column price",
        "not measured  The mean is closer to the truth than the first number.",
        "paper: 0.1 against 0.4 (ten numbers)",
        "not testable here",
        "needs everybody",
        "assay check tiny-mean",
    ):
        assert part in said, part


def test_show_as_json(assay):
    card = json.loads(assay("show", "tiny_mean", "--json").out)
    assert [claim["id"] for claim in card["claims"]] == ["closer", "tiny", "elsewhere", "rows"]
    assert card["measured"] is None
    assert card["use"]["names"] == ["mean"]


def test_cite_gives_bibtex(assay):
    said = assay("cite", "tiny-mean", "tiny-mean")
    assert said.out.count("@inproceedings{mean,") == 2
    assert said.out.count("{") == said.out.count("}")


@pytest.mark.parametrize("text", ["def f(:", "__all__ = 3", "__all__ = names()", "x = '\\0'"])
def test_a_method_whose_init_cannot_be_read_is_named(assay, text):
    (assay.methods / "tiny_mean" / "__init__.py").write_bytes(text.replace("\\0", "\0").encode())
    said = assay("show", "tiny-mean")
    assert said.status == 2
    assert "__init__.py cannot be read" in said.err
    assert "Traceback" not in said.err
