"""`assay tour`: says what it does, fetches first, measures, shows the verdicts, writes the report."""

import pytest

from assay.bench._card import load_card
from assay.bench._methods import METHODS, method_folders
from assay.bench._outline import read_outline
from assay.cli import _check, main


@pytest.fixture
def here(assay, monkeypatch):
    """This process as if it were the shell of the tiny method, which is all of the tour."""
    monkeypatch.setenv("ASSAY_HOME", str(assay.home))
    monkeypatch.setenv("ASSAY_METHODS", str(assay.methods))
    monkeypatch.setattr(_check, "TOUR", ("tiny-mean",))
    return assay


def test_the_tour_measures_and_writes_the_report(here, tmp_path, capsys):
    page = tmp_path / "tour.html"
    assert main(["tour", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert "The mean of a few numbers, found at once." in said
    assert "tiny-mean: 1 holds, 1 fails, 1 measured, 1 not testable here" in said
    assert f"The report, with every plot: {page}" in said
    assert "The mean is closer to the truth" in page.read_text(encoding="utf-8")
    assert max(map(len, said.splitlines())) <= max(80, len(f"The report, with every plot: {page}"))


def test_the_tour_fetches_before_it_measures(here, tmp_path, tiny, monkeypatch, capsys):
    study = tiny.STUDY.replace('{"table": "house"}', '{"table": "shakespeare"}')
    monkeypatch.setenv("ASSAY_METHODS", str(tiny(tmp_path / "other", study=study)))
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ASSAY_DATA_PATH", "")
    assert main(["tour"]) == 2
    said = capsys.readouterr()
    assert "ASSAY_OFFLINE" in said.err
    assert "holds" not in said.out
    assert not here.home.exists()


@pytest.mark.parametrize("slug", sorted(set(_check.TOUR) & set(method_folders(METHODS))))
def test_every_stop_of_the_tour_has_three_seeds_and_real_data(slug):
    folder = method_folders(METHODS)[slug]
    scaled = [e.at_scale("quick") for e in read_outline(folder).experiments.values()]
    quick = {e.name: e for e in scaled if e is not None}
    judged = {claim.experiment for claim in load_card(folder).claims if claim.experiment in quick}
    assert judged
    assert any(len(quick[name].seeds) >= 3 for name in judged)
    assert any(e.inputs or set(e.axes) & {"table", "corpus", "model", "text"} for e in quick.values())
