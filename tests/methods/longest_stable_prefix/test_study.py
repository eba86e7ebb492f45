"""The parts of the study that a wrong edit would spoil silently: matched calls, the sweep, what is counted."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from assay.bench import Cases, Trial
from assay.bench._study import Cell, Prepared
from assay.mdlm import MaskedDiffusionLM, MDLMConfig
from assay.methods.longest_stable_prefix import study
from assay.testbeds import ReplayTimer, runsum

from ...mdlm.tiny import scatter, tiny


class Fake(Trial):
    """A trial with its settings and what a prepare left."""

    def __init__(self, folder, cells=(), seed=0, scale="full", result=None, **values):
        self.folder, self._cells, self.seed, self.scale, self._values = folder, cells, seed, scale, values
        self.result = result or {}

    def __getitem__(self, name):
        return self._values[name]

    def prepared(self, function, **at):
        return Prepared(self.folder, self.result)

    def cells(self):
        return iter(self._cells)

    def progress(self, items):
        return range(items) if isinstance(items, int) else items


@pytest.fixture(scope="module")
def model():
    """Untrained, of the run sums' vocabulary; it likes to write EOS late."""
    settings = {"vocab_size": runsum.VOCABULARY, "mask_token_id": runsum.MASK, "eos_token_id": runsum.EOS}
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    model = MaskedDiffusionLM(MDLMConfig(**sizes, **settings, pad_token_id=runsum.EOS, logit_shift=True)).eval()
    scatter(model, 1)
    return model


@pytest.fixture
def trial(model, monkeypatch):
    monkeypatch.setattr(study, "load", lambda name, seed: model)
    monkeypatch.setattr(study, "NEW_TOKENS", 8)
    cells = [Cell(arm) for arm in study.run_sums.arms]
    return Fake(None, cells, result={"tau": 0.5, "floor": 3.0}, model="runsum-dlm", problems=1)


def test_every_arm_is_measured_on_the_same_problems_and_the_rivals_are_matched(trial):
    found = {cell.arm: measures for cell, measures in study.run_sums(trial).items()}
    ids = ("easy-0", "hard-0")
    for arm, measures in found.items():
        assert measures["exact_match"].ids == measures["calls"].ids == ids, arm
        assert measures["exact_match_hard"].ids == ids[1:]
        assert measures["flip_rate"].n >= 1
        assert ("ends_on_delimiter" in measures) == arm.startswith(("lsp", "fixed")), arm
        assert set(measures) < set(study.run_sums.measures)
    calls = {arm: measures["calls"].values for arm, measures in found.items()}
    # scattered rivals may end early by an EOS, never later
    for arm in ("static", "scattered-equal"):
        assert (calls[arm] <= calls["lsp"]).all()
    assert (calls["one-token"] <= 8).all()
    assert (found["lsp-tuned"]["calls"].values == calls["lsp-floor-3"]).all()
    assert (found["lsp-tuned-cached"]["calls"].values == calls["lsp-floor-3-cached"]).all()
    for arm in ("lsp", "lsp-strict", "lsp-floor-5"):
        cached, plain = (found[name]["token_forwards"].values for name in (f"{arm}-cached", arm))
        assert cached.mean() < plain.mean()
    # without a cache every call computes the canvas
    assert (found["lsp"]["token_forwards"].values == (35 + 8) * calls["lsp"]).all()


def test_static_has_each_problems_own_number_of_steps(model):
    prompts = study.both_splits(3).prompts
    calls = torch.tensor([5, 2, 5, 8, 2, 1])
    run = study.static_at(model, prompts, calls)
    for row, steps in enumerate(calls.tolist()):
        alone = study.decode(model, prompts[row : row + 1], study.LowConfidenceStatic(), steps=steps)
        assert torch.equal(alone.answers[0], run.answers[row])
        assert alone.calls.item() == run.calls[row] <= steps
        assert alone.commit_lengths[0] == run.commit_lengths[row]


def test_the_arms_are_what_they_are_called(model):
    decoder = study.Decoder(model, torch.zeros(0), 1.25, 3.0)
    plans = {
        arm: decoder.plan(arm)
        for arm in study.run_sums.arms
        if "tuned" not in arm and "equal" not in arm and arm != "static"
    }
    assert plans["lsp-no-stability"][0].stability == 0
    assert plans["lsp-strict-cached"][0].rule.pick == "strict"
    assert plans["lsp-no-snap"][0].rule.lookback == 0
    assert plans["lsp-floor-5-cached"][0].rule.tau_floor == 5.0
    assert plans["fixed-threshold-cached"][0].rule.fixed_tau == 1.25
    assert plans["lsp-immediate"][1].freeze == "immediate"
    assert plans["dynamic-blocks-cached-0.95"][0].threshold == 0.95
    assert plans["dynamic-blocks-cached-0.95"][2] == plans["blocks-8"][2] == {"block_length": 8}
    assert plans["dynamic-0.7"][1] is None
    cached = {arm for arm, (_, policy, _) in plans.items() if policy is not None}
    assert cached == {arm for arm in plans if "cached" in arm} | {"lsp-immediate"}


def test_the_sweep_is_joined_by_lines_and_held_at_its_ends():
    def at(tokens, exact):
        return {"token_forwards": Cases([tokens - 1, tokens + 1]), "exact_match": Cases(exact, ("a", "b"))}

    found = {
        "dynamic-cached-0.7": at(100, [0.0, 0.0]),
        "dynamic-cached-0.8": at(140, [0.0, 1.0]),
        "dynamic-cached-0.9": at(120, [0.0, 0.0]),
        "dynamic-cached-0.95": at(200, [1.0, 1.0]),
        "lsp-cached": at(50, [1.0, 1.0]),  # held: 0 0
        "lsp-floor-1-cached": at(130, [1.0, 1.0]),  # halfway: 0 0.5
        "lsp-floor-3-cached": at(155, [1.0, 1.0]),  # a quarter: 0.25 1
        "lsp-floor-5-cached": at(500, [1.0, 1.0]),  # held: 1 1
    }
    gain = study.against_dynamic(found)["lsp-cached"]["gain"]
    assert gain.ids == ("a", "b")
    assert gain.values == pytest.approx([np.mean([1, 1, 0.75, 0]), np.mean([1, 0.5, 0, 0])])


def test_tuning_takes_the_most_exact_floor_and_of_equal_ones_the_one_with_fewest_calls(model, monkeypatch):
    monkeypatch.setattr(study, "load", lambda name, seed: model)
    quality = {None: 0.0, 1.0: 0.5, 3.0: 1.0, 5.0: 1.0}

    def decoded(model, prompts, scheduler, *more, **settings):
        floor = scheduler.rule.tau_floor
        calls = torch.full((len(prompts),), int(floor or 0))
        share = int(quality[floor] * len(prompts))
        answers = torch.where(torch.arange(len(prompts))[:, None] < share, runsum.solve(prompts), 0)
        return study.Run(answers, calls, calls, 0.0, 0, 0, [], [], [[1.0, 2.0], [6.0]])

    monkeypatch.setattr(study, "decode", decoded)
    assert study.tuned(Fake(None, model="runsum-dlm", tuning=4)) == {"tau": 2.0, "floor": 3.0}
    assert study.both_splits(4, tuning=True).ids[0] == "easy-tuning-0"


@pytest.fixture
def text(monkeypatch):
    """Stand-ins for the real text: prompts of several lengths, a tiny model."""
    monkeypatch.setattr(study.gsm8k_text, "load", lambda: tiny(seed=1))
    monkeypatch.setattr(study, "text_delimiters", lambda: torch.arange(40) % 5 == 0)
    prompts = [torch.arange(1, 4), torch.arange(1, 8)]
    monkeypatch.setattr(study, "text_prompts", lambda count, seed: (prompts[:count], ("p0", "p1")[:count]))


def test_the_decay_and_the_bound(text):
    cells = [Cell(arm, (("n", n),)) for arm in study.real_text.arms for n in (16, 32)]
    found = study.real_text(Fake(None, cells, problems=2))
    plain = found[Cell("lsp-plain", (("n", 32),))]
    assert (plain["decay"].values <= math.log(0.75) + 0.03).all()
    assert (plain["calls_over_bound"].values <= 2).all()
    assert plain["calls_over_bound"].values == pytest.approx(plain["calls"].values - 1 - math.log(32) / math.log(4 / 3))
    one = {n: found[Cell("one-token", (("n", n),))]["attention_work"].values for n in (16, 32)}
    assert one[32] == pytest.approx(8 * one[16])
    assert study.decay([8, 4, 2, 1]) == pytest.approx(-math.log(2))


def test_replayed_times_compare_as_many_calls(text, tmp_path, monkeypatch):
    monkeypatch.setattr(study.gsm8k_text, "ANSWER_LENGTH", 16)
    study.traces(Fake(tmp_path, traces=2))
    kept = load_file(tmp_path / "traces.safetensors")
    for row in range(2):
        assert kept[f"lsp-{row}"].max() == kept[f"static-{row}"].max()
        assert (kept[f"lsp-{row}"].diff() >= 0).all()  # from left to right
    monkeypatch.setattr(study, "ReplayTimer", lambda config, repeats: ReplayTimer(tiny().config, repeats))
    cells = [Cell(arm, (("length", length),)) for arm in study.replayed.arms for length in (32, 64)]
    found = study.replayed(Fake(tmp_path, cells, traces=2))
    for length in (32, 64):
        ours, static = (found[Cell(arm, (("length", length),))] for arm in ("lsp", "static"))
        assert (ours["calls"].values == static["calls"].values).all()
        assert (ours["token_forwards"].values < static["token_forwards"].values).all()
        assert (static["token_forwards"].values == length + (static["calls"].values - 1) * length // 2).all()
        assert (ours["replayed_seconds"].values > 0).all()
