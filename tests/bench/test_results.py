"""Result files, and the tables that README and docs take from them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from assay._errors import InputError
from assay.bench import _results
from assay.bench._results import (
    as_result,
    check_result,
    claims_table,
    fill,
    load_results,
    methods_index,
    methods_table,
    pages,
    read_result,
    save_result,
    spoken,
    tally,
)

_spec = importlib.util.spec_from_file_location("loaded_checks_of_results", Path(__file__).with_name("checks.py"))
assert _spec
assert _spec.loader
checks = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = checks
_spec.loader.exec_module(checks)


@pytest.fixture
def run():
    return checks.sample()[0]


def test_a_saved_run_is_read_back(run, tmp_path):
    path = save_result(run, tmp_path / "results")
    assert path == tmp_path / "results" / "vattention.json"
    result = load_results(path.parent)["vattention"]
    assert list(result) == [
        "method",
        "version",
        "fingerprint",
        "date",
        "machine",
        "versions",
        "data",
        "scale",
        "claims",
    ]
    first = result["claims"][0]
    assert list(first) == [
        "id",
        "verdict",
        "reported",
        "effect",
        "interval",
        "bar",
        "seeds",
        "per_seed",
        "note",
        "conditions",
    ]
    assert (first["verdict"], first["bar"], first["seeds"]) == ("holds", 0.05, 5)
    assert set(first["conditions"][0]) == {"test", "cell", "effect", "interval", "bar"}
    assert [p.name for p in path.parent.iterdir()] == ["vattention.json"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"overridden": ("steps=10",)}, "a run with steps=10 cannot be saved"),
        ({"partial": ("--seeds", "3")}, "a run with --seeds 3 cannot be saved"),
        ({"interrupted": True}, "was interrupted cannot be saved"),
        ({"trials": {"done": 3, "missing": 2}}, "lacks 2 trials cannot be saved"),
    ],
)
def test_only_whole_runs_with_every_default_are_saved(run, tmp_path, change, sentence):
    vars(run).update(change)
    with pytest.raises(InputError, match=sentence):
        save_result(run, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_quick_run_does_not_take_the_place_of_a_full_one(run, tmp_path):
    save_result(run, tmp_path)
    before = (tmp_path / "vattention.json").read_text()
    run.scale = "quick"
    with pytest.raises(InputError, match="holds a run at scale 'full', and this one is 'quick'"):
        save_result(run, tmp_path)
    assert (tmp_path / "vattention.json").read_text() == before


def spoil(key, value):
    def change(result):
        result[key] = value

    return change


def spoil_claim(key, value):
    def change(result):
        result["claims"][0][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.pop("machine"), "no 'machine', expected the keys"),
        (spoil("scale", "huge"), "scale 'huge', expected quick or full or paper"),
        (spoil("date", "yesterday"), "date 'yesterday', expected an ISO date"),
        (spoil("claims", {}), "'claims' is {}, expected list"),
        (lambda r: r["claims"][0].pop("note"), "claim 'guarantee' lacks note"),
        (lambda r: r["claims"].append(r["claims"][0]), "claim 'guarantee' twice"),
        (spoil_claim("verdict", "true"), "has the verdict 'true', expected holds or fails"),
        (spoil_claim("interval", [2, 1]), r"the interval \[2, 1\], expected \[low, high\]"),
        (spoil_claim("effect", True), "has effect True"),
        (spoil_claim("bar", None), "holds without effect, interval and bar"),
        (spoil_claim("seeds", 2), "holds on 2 seeds, expected at least three"),
        (lambda r: r["claims"][0]["conditions"][0].pop("cell"), "condition 0 of claim 'guarantee' lacks keys"),
    ],
)
def test_a_wrong_result_is_refused_with_the_place_and_what_was_expected(run, change, sentence):
    result = json.loads(json.dumps(as_result(run)))
    check_result(result, "here")
    change(result)
    with pytest.raises(InputError, match=f"here: .*{sentence}"):
        check_result(result, "here")


def test_a_file_that_is_not_a_result_is_named(run, tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InputError, match=r"a\.json is not JSON"):
        read_result(tmp_path / "a.json")
    save_result(run, tmp_path).rename(tmp_path / "other.json")
    with pytest.raises(InputError, match=r"is a result of 'vattention': name the file vattention\.json"):
        read_result(tmp_path / "other.json")


def test_no_results_are_no_error(tmp_path):
    assert load_results(tmp_path / "nowhere") == {}


def test_claims_are_counted_by_the_card_and_not_by_the_file(run):
    result = as_result(run)
    assert tally(run.card, result) == {"holds": 1, "fails": 1, "measured": 1, "not testable here": 1}
    assert tally(run.card, None) == {"not testable here": 1, "not measured yet": 3}
    del result["claims"][0]
    assert tally(run.card, result)["not measured yet"] == 1
    assert spoken({"holds": 4, "fails": 1, "open": 2}) == "4 hold, 1 fails, 2 open"


def cells(row: str) -> list[str]:
    return [c.strip() for c in row.strip().strip("|").split(" | ")]


def test_the_docs_table_has_the_papers_figure_beside_ours(run):
    table = claims_table(run.card, as_result(run)).splitlines()
    assert len({len(cells(r)) for r in table[:6] if "---" not in r}) == 1
    row = cells(table[3])
    assert row[1] == "10 to 20 points of accuracy at equal density (Llama-3.1-8B, RULER-HARD)"
    assert row[2].startswith("**0.55**")
    assert "0.51 to 0.60" in row[2]
    assert row[3] == "0.7"
    assert ">fails<" in row[4]
    assert "the whole interval lies below the bar" in row[4]
    assert "SmolLM2-135M at 4k tokens" in row[0]
    assert "`assay check vattention --scale full`" in "\n".join(table)


def test_without_a_run_the_tables_say_so(run):
    assert claims_table(run.card, None).count("not measured yet") == 3
    assert claims_table(run.card, None).count(">not testable here<") == 1
    assert "4 claims, not measured yet" in methods_table({"vattention": run.card}, {})
    assert "No method yet." in methods_table({}, {})


def test_a_bar_or_a_tag_in_a_card_stays_in_its_cell(run):
    run.card.claims[0].says = "loss[a|b] <b>\nfalls"
    assert r"loss[a\|b] &lt;b> falls" in claims_table(run.card, None)


def test_the_index_is_ordered_by_field(run):
    all_cards = {c.method: c.card for c in checks.sample()}
    index = methods_index(all_cards, {"vattention": as_result(run)})
    assert (
        index.index("## Language models")
        < index.index("(racs-alice.md)")
        < index.index("(vattention.md)")
        < index.index("## Tables")
    )
    assert "1 holds, 1 fails, 1 measured, 1 not testable here" in index


def test_generated_parts_are_replaced_and_nothing_else(run, tmp_path):
    page = tmp_path / "docs" / "methods" / "vattention.md"
    page.parent.mkdir(parents=True)
    shown = "write `<!-- generated: claims NAME -->` or\n\n    ```text\n    <!-- generated: x -->\n    <!-- end -->\n    ```\n"
    page.write_text("# Title\n<!-- generated: claims vattention -->\nold\n<!-- end -->\nprose\n" + shown)
    ((path, old, new),) = pages(tmp_path, {"vattention": run.card}, {})
    assert path == page
    assert old != new
    assert new.startswith("# Title\n<!-- generated: claims vattention -->\n\n| claim |")
    assert new.endswith("\n\n<!-- end -->\nprose\n" + shown)
    page.write_text(new)
    ((_, old, again),) = pages(tmp_path, {"vattention": run.card}, {})
    assert old == again


def test_a_part_that_nobody_generates_or_nobody_closes_is_an_error(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("<!-- generated: claims nothing -->\n<!-- end -->\n")
    with pytest.raises(InputError, match="asks for a generated part 'claims nothing'"):
        list(pages(tmp_path, {}, {}))
    with pytest.raises(InputError, match="without its end"):
        fill("<!-- generated: methods -->\n", str, "a.md")


def test_the_committed_tables_are_fresh(capsys):
    status = _results.main([])
    assert status == 0, capsys.readouterr().out + "run: python -m assay.bench._results --write"
