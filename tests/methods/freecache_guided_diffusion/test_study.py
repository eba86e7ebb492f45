"""The parts of the study that a wrong edit would spoil silently: arms, what is counted, and how drift is measured."""

import numpy as np
import pytest
import torch

from assay.bench import Trial
from assay.bench._card import check_card, load_card
from assay.bench._methods import method_folders
from assay.bench._outline import read_outline
from assay.bench._study import Cell, Prepared
from assay.methods.freecache_guided_diffusion import study
from assay.testbeds import runsum

from ...mdlm.tiny import tiny
from .conftest import guider_model

SIZES = {
    "vocab_size": runsum.VOCABULARY,
    "mask_token_id": runsum.MASK,
    "eos_token_id": runsum.EOS,
    "pad_token_id": runsum.EOS,
    "logit_shift": True,
}


class Fake(Trial):
    """A trial whose cells and settings are given."""

    def __init__(self, cells, seed=0, scale="quick", result=None, **values):
        self._cells, self.seed, self.scale, self._result, self._values = cells, seed, scale, result, values
        self.arm = cells[0].arm if cells else ""

    def __getitem__(self, name):
        return self._values[name]

    def prepared(self, function, **at):
        return Prepared(None, self._result)

    def cells(self):
        return iter(self._cells)

    def progress(self, items):
        return items


@pytest.fixture
def untrained(monkeypatch):
    """Random models in place of the trained ones: the answers are wrong and everything else can be checked."""

    def load(name, seed=0):
        if "dlm" in name:
            return tiny(seed, **SIZES)
        return guider_model(vocab=runsum.VOCABULARY)

    monkeypatch.setattr(study, "load", load)
    monkeypatch.setattr(study, "NEW", 16)  # shorter answers


def test_the_card_fits_the_study():
    folder = method_folders()["freecache-guided-diffusion"]
    check_card(load_card(folder), read_outline(folder))


def test_every_arm_decodes_the_same_problems(untrained, tmp_path):
    cells = [Cell(arm) for arm in study.main.arms]
    trial = Fake(cells, result={"threshold": 0.7}, splits="easy+hard", problems=2)
    trial.folder = tmp_path
    found = study.main(trial)
    assert "<svg" in (tmp_path / "decoding.svg").read_text()
    assert found.keys() == set(cells)
    for cell in cells:
        measures = found[cell]
        assert set(measures) == set(study.main.measures)
        assert measures["exact_match"].ids == ("easy-0", "easy-1", "hard-0", "hard-1")
        assert measures["exact_match_hard"].ids == ("hard-0", "hard-1")
        assert set(measures["exact_match"].values) <= {0.0, 1.0}
    tokens = {arm: found[Cell(arm)]["token_forwards"].values for arm in study.main.arms}
    weighted = {arm: found[Cell(arm)]["weighted_tokens"].values for arm in study.main.arms}
    steps = {arm: found[Cell(arm)]["steps"].values for arm in study.main.arms}
    # step by step, problem by problem, as many as guidance took
    for arm in study.AT_GUIDED_STEPS:
        assert (steps[arm] <= steps["guided"]).all()
    assert (tokens["full"] == 51 * steps["full"]).all()
    assert (weighted["full"] == tokens["full"]).all()
    assert (weighted["guided"] > tokens["guided"]).all()
    assert (tokens["ar"] == 0).all()
    assert (weighted["ar"] > 0).all()
    assert (tokens["guided"] == 51 * steps["guided"]).all()
    assert (tokens["sliding"] <= 51 + 40 * steps["sliding"]).all()
    assert (found[Cell("dynamic-tuned")]["steps"].values == steps["dynamic-0.7"]).all()
    assert (steps["static-10"] <= 10).all()


def test_static_arms_keep_each_problem_at_its_place(untrained):
    problems = study.problems_of(("hard",), 4)
    decoder = study.Decoder("runsum-dlm", 0, problems.prompts)
    mixed = decoder._static(torch.tensor([5, 2, 5, 3]), "max_prob")
    for row, steps in enumerate((5, 2, 5, 3)):
        alone = study.Decoder("runsum-dlm", 0, problems.prompts[row : row + 1])._static(
            torch.tensor([steps]), "max_prob"
        )
        assert torch.equal(mixed.answers[row], alone.answers[0])
        assert mixed.steps[row] == alone.steps[0]


def test_the_autoregressive_arm_counts_its_tokens(untrained):
    problems = study.problems_of(("easy",), 3)
    run = study.Decoder("runsum-dlm", 0, problems.prompts)("ar")
    price = study.Decoder("runsum-dlm", 0, problems.prompts)._price(study.ARGuider(guider_model(vocab=24)))
    ended = (run.answers == runsum.EOS).any(1)
    assert torch.allclose(run.weighted, price * (34 + run.steps).double())
    assert (run.steps[~ended] == 16).all()
    assert not (run.answers == runsum.MASK).any()


def test_the_threshold_with_the_most_exact_answers_is_taken(untrained, monkeypatch):
    exact = {0.7: [1, 0], 0.9: [1, 1], 0.95: [1, 1]}
    seen = iter(study.THRESHOLDS)
    monkeypatch.setattr(runsum, "exact_match", lambda prompts, answers: torch.tensor(exact[next(seen)]) > 0)
    assert study.tuned(Fake([], splits="hard", tuning=2))["threshold"] == 0.9  # as exact as 0.95, with fewer calls


def test_drift_compares_forwards_of_the_same_run():
    model = tiny(**SIZES, num_hidden_layers=4)
    prompts = runsum.problems("hard", 3).prompts
    found = study.drifts(model, prompts)
    assert set(found) == {"prompt", "masked", "committed"}
    for values in found.values():
        assert values.shape == (3,)
        assert (values < 1).all()
        assert (values > -1).all()
    assert (found["committed"] > found["masked"]).all()  # one step apart against many
    calls = model.counters.calls
    assert calls == 40 + 7


def test_replayed_arms_count_what_they_compute(monkeypatch):
    monkeypatch.setattr(study.ReplayTimer, "seconds", lambda self, shape: float(shape.computed))
    cells = [Cell(arm, (("length", 16),)) for arm in study.replay.arms]
    found = study.replay(Fake(cells, block=4))
    by_arm = {cell.arm: found[cell]["token_forwards"] for cell in cells}
    # 8 of 16 columns are prompt: (16 + 3 * 8) + 4 * 4, and 4 columns more where a block is read once more
    assert by_arm == {"full": 128, "immediate": 56, "settled": 60, "prefix": 2 * 16 + 3 * 8 + 3 * 4}
    assert all(found[cell]["replay_seconds"] == by_arm[cell.arm] for cell in cells)


def test_text_is_weighed_problem_by_problem(monkeypatch):
    from assay.testbeds import gsm8k_text

    texts = gsm8k_text.Texts(
        prompts=torch.randint(3, 39, (2, 8), generator=torch.Generator().manual_seed(0)),
        visible=torch.ones(2, 8, dtype=torch.bool),
        answers=torch.cat([torch.randint(3, 39, (2, 20)), torch.full((2, 108), 1)], 1),
        ids=("a", "b"),
    )
    model = tiny(mask_token_id=0, eos_token_id=1, pad_token_id=1, logit_shift=True)
    monkeypatch.setattr(gsm8k_text, "load", lambda: model)
    monkeypatch.setattr(gsm8k_text, "texts", lambda split: texts)
    monkeypatch.setattr(gsm8k_text, "sample", lambda all_of_them, count, seed: all_of_them)
    found = study.text(Fake([Cell(arm) for arm in study.text.arms], problems=2, block=16))
    nll = {arm: found[Cell(arm)]["nll"] for arm in study.text.arms}
    assert nll["full"].ids == ("a", "b")
    assert not np.allclose(nll["full"].values, nll["settled"].values)
    tokens = [found[Cell(arm)]["token_forwards"].values for arm in ("full", "settled", "immediate")]
    assert (tokens[0] > tokens[1]).all()
    assert (tokens[1] > tokens[2]).all()
