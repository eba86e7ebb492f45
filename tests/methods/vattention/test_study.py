"""The parts of the study that a wrong edit would spoil silently: contexts, equal densities, and what is counted."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from assay.bench import Trial
from assay.bench._card import check_card, load_card
from assay.bench._methods import method_folders
from assay.bench._outline import read_outline
from assay.bench._study import Cell, Prepared
from assay.methods.vattention import study
from assay.methods.vattention._rows import LayerRows

Document = namedtuple("Document", "id text")


class Words:
    """A token a word."""

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([[int(w) for w in text.split()]])}


class Fake(Trial):
    """A trial over captured tensors that lie in a folder."""

    def __init__(self, folder, cells, seed=0, scale="full", **values):
        self.folder, self._cells, self.seed, self.scale, self._values = folder, cells, seed, scale, values
        self.arm = cells[0].arm
        self.logged = []

    def __getitem__(self, name):
        return self._values[name]

    def prepared(self, function, **at):
        return Prepared(self.folder)

    def cells(self):
        return iter(self._cells)

    def log(self, step, /, **values):
        self.logged.append((step, values))

    def progress(self, items):
        return range(items) if isinstance(items, int) else items


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four layers of 2 key heads and 4 query heads, 500 keys, some of them heavy."""
    path = tmp_path_factory.mktemp("captured")
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(4):
        tensors[f"q{layer}"] = (0.5 + layer) * torch.randn(4, 16, 16, generator=g)
        tensors[f"k{layer}"], tensors[f"v{layer}"] = (shift + torch.randn(2, 500, 16, generator=g) for shift in (0, 1))
    save_file({name: x.half() for name, x in tensors.items()}, path / "qkv.safetensors")
    return path


def test_the_card_fits_the_study():
    folder = method_folders()["vattention"]
    check_card(load_card(folder), read_outline(folder))


def test_a_seed_is_a_context_of_the_texts_in_turn(monkeypatch):
    monkeypatch.setattr(study, "APART", 10)
    documents = [
        Document(f"{text}/{part}", " ".join(str(1000 * t + 100 * p + i) for i in range(50)))
        for t, (text, parts) in enumerate(
            {
                "brown": ("ca00", "ca01", "ca02"),
                "shakespeare": ("all", "hamlet", "lear"),
                "sotu": ("2009_a", "2010_b"),
            }.items()
        )
        for p, part in enumerate(parts)
    ]
    first = {seed: study.context_tokens(documents, Words(), seed, 60)[0].tolist() for seed in (0, 1, 3)}
    # Shakespeare from Hamlet on, into the next play; then Brown from ca01 on, the addresses from 2010 on, and again.
    assert first[0] == [*range(1100, 1150), *range(1200, 1210)]
    assert first[1] == [*range(100, 150), *range(200, 210)]
    assert first[3] == [*range(1110, 1150), *range(1200, 1220)]
    with pytest.raises(ValueError, match="'sotu' has 50 tokens, but seed 2 needs 60"):
        study.context_tokens(documents, Words(), 2, 60)
    mine = [Document("mine", " ".join(map(str, range(100))))]
    assert study.context_tokens(mine, Words(), 3, 20)[0].tolist() == list(range(30, 50))


@pytest.mark.parametrize("arm", study.equal_density.arms)
def test_every_rule_reads_the_share_that_it_should(folder, arm, monkeypatch):
    monkeypatch.setattr(study, "TABLES", 60)
    cells = [Cell(arm, (("density", 0.2),))]
    found = study.equal_density(Fake(folder, cells, n=500))[cells[0]]
    # pages of 16 and whole tables are coarse here: 500 keys
    assert found["density_read"] == pytest.approx(0.2, rel=0.1 if arm in ("quest", "magicpig") else 0.02)
    assert found["error"].values.size == 2 * 4 * 4  # every third of four layers, heads, queries
    assert found["error"].ids == tuple(f"{la}-{h}-{t}" for la in (0, 3) for h in range(4) for t in study.USED)
    assert found["error_later"].ids == found["error"].ids[16:]  # layer 0 left out
    assert found["error_flat"].values.size >= 8
    assert not set(found["error_flat"].ids) & set(found["error_peaked"].ids)
    assert found["error_p95"] >= np.median(found["error"].values)


def test_five_percent_is_measured_likewise(folder):
    cells = [Cell("top-k"), Cell("uniform")]
    found = study.lowest_density(Fake(folder, cells, n=500, density=0.05))
    assert {round(found[c]["density_read"], 2) for c in cells} == {0.05}


def test_the_promise_counts_draws_and_judges_the_worst_layer_by_other_draws(folder):
    cells = [Cell(arm, (("eps", 0.1), ("delta", d))) for arm in study.promise.arms for d in (0.05, 0.2)]
    found = study.promise(Fake(folder, cells))
    for cell in cells:
        missed, worst = found[cell]["missed"], found[cell]["missed_worst_layer"]
        assert missed.n == 4 * 16 * 16  # layers, draws, rows
        assert worst.n == 8 * 16
        assert 0 < found[cell]["density"] <= 1
    tight, loose = (found[Cell("denominator", (("eps", 0.1), ("delta", d)))] for d in (0.05, 0.2))
    assert tight["density"] >= loose["density"]
    both = [
        found[Cell(arm, (("eps", 0.1), ("delta", 0.2)))]["missed"].k
        for arm in ("denominator", "denominator-small-pilot")
    ]
    assert both[0] <= both[1]


def test_the_error_is_seen_against_the_tolerance(folder):
    trial = Fake(folder, [Cell("output")])
    found = study.error_by_tolerance(trial)
    assert found["correlation"].ids == ("0", "1", "2", "3")
    assert set(found["linear"].values) <= {0.0, 1.0}
    steps, errors = zip(*((eps, v["error"]) for eps, v in trial.logged))
    assert steps[0] == pytest.approx(0.025)
    assert steps[-1] == pytest.approx(0.4)
    assert errors[0] < errors[-1]


def test_bisection_finds_the_knob():
    assert study._bisect(lambda x: x**2, 0.0, 1.0, 0.25, rising=True) == pytest.approx(0.5, rel=0.01)
    assert study._bisect(lambda x: 1 - x, 0.0, 1.0, 0.25, rising=False) == pytest.approx(0.75, rel=0.01)
    assert study._bisect_whole(lambda m: m / 100, 1, 300, 0.42) == 42


def test_a_key_is_known_from_its_second_collision_on():
    rows = LayerRows(torch.randn(2, 3, 8), torch.randn(1, 60, 8), torch.randn(1, 60, 8), (0, 2))
    second, cosine = study._second_hit(0, rows, 2, 0)
    assert second.shape == cosine.shape == rows.scores.shape
    share = (second <= 20).double().mean()
    expected = study.collision_probability(cosine, 2, 20).double().mean()
    assert share == pytest.approx(expected.item(), abs=0.1)


def test_one_step_of_the_clock(monkeypatch):
    cells = [Cell("dense", (("n", 2048),)), Cell("vattention", (("n", 2048), ("density", 0.2)))]
    found = study.step_time(Fake(None, cells, rounds=2))
    assert found[cells[0]]["density_read"] == 1
    assert found[cells[1]]["density_read"] == pytest.approx(0.2, abs=0.01)
    assert all(found[c]["milliseconds"] > 0 for c in cells)
