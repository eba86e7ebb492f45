"""`assay check`, `report` and `export`, in processes of their own."""

import csv
import json

import pytest


@pytest.fixture(scope="module")
def measured(tmp_path_factory, request):
    """The command line after one quick check of the tiny method, and what that check said."""
    from types import SimpleNamespace

    folder = tmp_path_factory.mktemp("measured")
    conftest = request.getfixturevalue("cli_tools")
    assay = conftest.Shell(folder / "home", conftest.write_tiny(folder / "methods"))
    return SimpleNamespace(assay=assay, first=assay("check", "tiny-mean"))


def test_a_check_gives_every_claim_a_verdict(measured):
    said = measured.first
    assert said.status == 0, said.err
    assert "\x1b" not in said.out + said.err
    assert max(map(len, said.out.splitlines())) <= 80
    lines = said.out.splitlines()
    assert lines[0].startswith("Tiny mean (tiny-mean): scale quick, 9 trials")
    rows = {line.split("  ")[0]: line for line in lines if line and not line.startswith(" ")}
    assert rows["holds"].endswith("The mean is closer to the truth than the first number.")
    assert rows["fails"].endswith("Its error is below a thousandth.")
    assert rows["measured"].endswith("A table has rows.")
    assert "not testable here" in rows
    assert "21,613" in said.out or "21613" in said.out or "21\N{NARROW NO-BREAK SPACE}613" in said.out
    assert "paper: 0.1 against 0.4 (ten numbers)" in said.out
    assert lines[-1] == "tiny-mean: 1 holds, 1 fails, 1 measured, 1 not testable here"


def test_a_second_check_runs_nothing(measured):
    found = json.loads(measured.assay("check", "tiny-mean", "--json").out)
    assert found["trials"] == {"done": 0, "reused": 9, "failed": 0, "skipped": 0, "missing": 0}


def test_the_json_has_the_form_of_a_result(measured):
    found = json.loads(measured.assay("check", "tiny-mean", "--json").out)
    assert {"method", "scale", "trials", "claims"} <= set(found)
    claims = {claim["id"]: claim for claim in found["claims"]}
    assert claims["closer"]["verdict"] == "holds"
    low, high = claims["closer"]["interval"]
    assert low < claims["closer"]["effect"] < high < claims["closer"]["bar"] == 0
    assert claims["tiny"]["verdict"] == "fails"
    assert claims["tiny"]["bar"] == 0.001
    assert claims["rows"]["effect"] == 21613
    assert claims["elsewhere"]["verdict"] == "not testable here"


def test_a_dry_run_says_what_would_run(measured):
    found = json.loads(measured.assay("check", "tiny-mean", "--scale", "full", "--dry-run", "--json").out)
    assert found["trials"] == {"done": 0, "reused": 0, "failed": 0, "skipped": 0, "missing": 13}
    assert {claim["verdict"] for claim in found["claims"]} == {"open", "not testable here"}
    assert "nothing was run" in measured.assay("check", "tiny-mean", "--dry-run").out


def test_several_methods_give_a_line_of_json_each(measured):
    said = measured.assay("check", "tiny-mean", "tiny_mean", "--json")
    assert [json.loads(line)["method"] for line in said.out.splitlines()] == ["tiny-mean"]


def test_two_seeds_leave_every_verdict_open(measured):
    found = json.loads(measured.assay("check", "tiny-mean", "--seeds", "2", "--only", "compare", "--json").out)
    claims = {claim["id"]: claim for claim in found["claims"]}
    assert claims["closer"]["verdict"] == claims["tiny"]["verdict"] == "open"
    assert "seeds" in claims["closer"]["note"]


def test_another_setting_is_said(measured):
    said = measured.assay("check", "tiny-mean", "--only", "compare", "--set", "numbers=50")
    assert said.status == 0, said.err
    assert "off the study's defaults: numbers=50" in said.out


def test_failed_trials_are_status_1_and_named(measured):
    said = measured.assay("check", "tiny-mean", "--only", "compare", "--set", "crash=first")
    assert said.status == 1
    assert "compare[first] seed 0: ValueError: the numbers ran out" in said.err
    assert "3 failed" in said.out
    assert "Traceback" not in said.out + said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--only", "comparee"), "did you mean 'compare'"),
        (("--set", "numbres=3"), "did you mean 'numbers'"),
        (("--set", "numbers=many"), "numbers"),
        (("--set", "table=house"), "--input table="),
        (("--input", "tabel=house"), "did you mean 'table'"),
        (("--input", "table=nowhere.csv"), "nowhere.csv"),
        (("--input", "table=shakespeare"), "table"),
        (("--engine", "locl"), "there is no engine 'locl'"),
        (("--workers", "0"), "at least one worker"),
        (("--seeds", "0"), "at least one seed"),
    ],
)
def test_what_is_wrong_with_a_check_is_one_sentence(assay, words, sentence):
    said = assay("check", "tiny-mean", *words)
    assert said.status == 2
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "table"), ("price\n", "table"), ("price,price\n1,2\n", "price")],
    ids=["empty", "no rows", "a column twice"],
)
def test_a_broken_table_costs_its_trials_and_no_more(assay, tmp_path, text, expected):
    path = tmp_path / "broken.csv"
    path.write_text(text)
    said = assay("check", "tiny-mean", "--only", "on_table", "--input", f"table={path}")
    assert said.status in (1, 2)
    assert expected in said.err
    assert "Traceback" not in said.out + said.err


def test_an_own_table_takes_the_place_of_the_default(assay, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("price\n1\n2\n3\n")
    said = assay("check", "tiny-mean", "--only", "on_table", "--input", f"table={path}", "--json")
    assert said.status == 0, said.err
    assert json.loads(said.out)["claims"][0]["effect"] == 3


def test_a_claim_that_names_a_missing_experiment(assay, tmp_path, tiny):
    folder = tiny(tmp_path / "bad", card=tiny.CARD.replace('experiment = "on_table"', 'experiment = "on_tabel"'))
    said = assay("check", "tiny-mean", ASSAY_METHODS=str(folder))
    assert said.status == 2
    assert "on_tabel" in said.err
    assert "on_table" in said.err
    assert said.err.count("\n") == 1


def test_a_study_that_is_not_python(assay, tmp_path, tiny):
    folder = tiny(tmp_path / "bad", study="def broken(:\n")
    said = assay("check", "tiny-mean", ASSAY_METHODS=str(folder))
    assert said.status == 2
    assert "study.py" in said.err
    assert said.err.count("\n") == 1


def test_a_missing_package_names_the_extra_to_install(assay, tmp_path, tiny):
    folder = tiny(tmp_path / "bad", study="import no_such_package\n" + tiny.STUDY)
    said = assay("check", "tiny-mean", ASSAY_METHODS=str(folder))
    assert said.status == 2
    assert said.err == (
        "assay: tiny-mean needs the package 'no_such_package', which is not installed: pip install -e \".[tables]\"\n"
    )


def test_a_damaged_store_is_one_sentence(assay):
    assay.home.mkdir(parents=True)
    (assay.home / "assay.sqlite").write_bytes(b"SQLite format 3\x00" + b"rubbish" * 1000)
    said = assay("check", "tiny-mean")
    assert said.status == 2
    assert "assay.sqlite is damaged" in said.err
    assert said.err.count("\n") == 1


def test_the_report_is_one_page(measured, tmp_path):
    path = tmp_path / "page.html"
    said = measured.assay("report", "--out", str(path))
    assert (said.status, said.out) == (0, f"{path}\n")
    page = path.read_text(encoding="utf-8")
    assert "The mean is closer to the truth than the first number." in page
    assert "assay check tiny-mean" in page
    said = measured.assay("report")
    assert said.out.strip() == str(measured.assay.home / "report.html")


def test_a_report_of_nothing_says_what_to_do(assay):
    said = assay("report")
    assert said.status == 2
    assert said.err.startswith("assay: nothing was measured here yet: run `assay tour`")


def test_the_store_as_a_table(measured, tmp_path):
    path = tmp_path / "trials.csv"
    said = measured.assay("export", "csv", str(path))
    assert said.status == 0, said.err
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {"tiny-mean"}
    assert {"compare", "on_table"} <= set(rows[0].values()) | {value for row in rows for value in row.values()}


@pytest.mark.parametrize("text", ["{", "{}", "[3]", '[{"method": "tiny-mean"}]', "\xff"])
def test_damaged_terms_of_own_checks_are_named(measured, text):
    terms = measured.assay.home / "checks.json"
    terms.write_bytes(text.encode("latin-1"))
    said = measured.assay("report")
    terms.unlink()
    assert said.status == 2
    assert "checks.json is damaged: remove it" in said.err


def test_a_report_goes_to_a_pipe_and_not_to_a_folder(measured, tmp_path):
    said = measured.assay("report", "--out", tmp_path)
    assert said.status == 2
    assert said.err == f"assay: {tmp_path} is a folder: name a file in it\n"
    assert measured.assay("export", "csv", "/dev/stdout").out.startswith("method,experiment,")
