"""The study's experiments run through on a tiny model, and their measures are what they are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from assay.bench import Cases
from assay.data import Document

transformers = pytest.importorskip("transformers")

from assay.methods.saes_svd import study  # noqa: E402

TEXT = (
    "The quick brown fox jumps over the lazy dog and runs away. A second sentence of many words ends in the word here. "
)


class Letters:
    """A tokenizer: a token a letter."""

    def __call__(self, text, *, add_special_tokens=False):
        return {"input_ids": [ord(c) % 60 for c in text]}


def documents(name: str) -> list[Document]:
    return [Document(f"{name}/{i}", f"{name} {i} " + TEXT * 6) for i in range(120)]


class Fake:
    """A trial of a tiny llama on made-up text."""

    scale = "full"

    def __init__(self, folder, arm="", seed=0, prepared=None, **settings):
        self.arm, self.seed, self.folder, self.prepares = arm, seed, folder, prepared or {}
        self.opened = {}
        self.settings = {
            "documents": 4,
            "length": 24,
            "sentences": 6,
            "ratio": 0.3,
            "text": "a",
            "tokens": 32,
        } | settings

    def __getitem__(self, name):
        return self.settings[name]

    def input(self, name):
        if name not in self.opened:  # a trial opens an input once
            self.opened[name] = self.open(name)
        return self.opened[name]

    def open(self, name):
        if name != "model":
            return documents(name)
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.15,
        )
        return transformers.LlamaForCausalLM(config).eval(), Letters(), None

    def prepared(self, function, **at):
        return self.prepares[function.name]

    def skip(self, reason):
        raise RuntimeError(reason)


class Named(NamedTuple):
    """A cell."""

    arm: str


class Folder(SimpleNamespace):
    """What a prepare left."""

    def __truediv__(self, name):
        return self.folder / name


@pytest.fixture(scope="module")
def small():
    """Calibration of 4 x 16 tokens."""
    before = study.CALIBRATION
    study.CALIBRATION = (4, 16)
    yield
    study.CALIBRATION = before


@pytest.fixture(scope="module")
def prepared(small, tmp_path_factory):
    found = {}
    for spec in (study.original_states, study.plain_svd, study.better_inputs):
        folder = tmp_path_factory.mktemp(spec.name)
        result = spec(Fake(folder, prepared=found))
        found[spec.name] = Folder(folder=folder, result=result)
    return found


def test_the_original_is_at_no_distance_from_itself(prepared, tmp_path):
    found = study.models(Fake(tmp_path, "dense", prepared=prepared))
    assert np.allclose(found["kl"].values, 0, atol=1e-6)
    assert np.allclose(found["cosine"].values, 1, atol=1e-6)
    assert (found["agreement"].values == 1).all()


def test_the_losses_are_those_of_the_model(prepared, tmp_path):
    trial = Fake(tmp_path, "dense", prepared=prepared)
    model, tokenizer, _ = trial.input("model")
    ids = study.test_documents(trial, tokenizer)
    found = study.models(trial)
    for name, key in (("in", "nll"), ("out", "nll_out")):
        want = [float(model(input_ids=row[None], labels=row[None]).loss) for row in ids[name]]
        assert np.allclose(found[key].values, want, atol=1e-5)
    assert len(ids["in"]) == 2 * len(ids["out"]) == 4


@pytest.mark.parametrize("arm", ["svd", "fwsvd", "asvd", "svd-llm", "cealc-25", "cealc-50", "saes-svd", "saes-0-100"])
def test_every_arm_is_measured_alike(arm, prepared, tmp_path):
    trial = Fake(tmp_path, arm, prepared=prepared, ratio=0.2)
    found = study.models(trial)
    assert {"nll", "nll_out", "kl", "agreement", "cosine", "cloze"} <= set(found)
    assert set(found) <= set(study.models.measures)
    assert (found["kl"].values > 0).all()
    if arm.startswith(("saes", "cealc")):
        low, high = {"saes-svd": (0.25, 0.75), "saes-0-100": (0, 0.99), "cealc-25": (0.25, 0.25)}.get(arm, (0.5, 0.5))
        assert low <= found["beta"] <= high
        assert 0 <= found["at_bound"] <= 1
        assert (tmp_path / "layers.csv").read_text().count("\n") == 6 * 7 + 1


@pytest.mark.parametrize("arm", ["saes-10-90", "saes-40-60", "adasvd", "dobi"])
def test_the_others_too(arm, prepared, tmp_path, monkeypatch):
    monkeypatch.setitem(study.RECIPES["dobi"], "steps", 3)
    found = study.others(Fake(tmp_path, arm, prepared=prepared, ratio=0.2))
    assert set(found) <= set(study.others.measures)
    assert np.isfinite(found["nll"].values).all()


def test_arms_that_decide_nothing_are_left_out(prepared, tmp_path):
    for arm, seed in (("saes-0-100", 0), ("fwsvd", 1)):
        with pytest.raises(RuntimeError, match="not measured at this ratio"):
            study.models(Fake(tmp_path, arm, seed, prepared, ratio=0.4))


def test_four_blocks_are_compressed_and_the_rest_is_not(small, tmp_path):
    found = study.shallow(Fake(tmp_path, "saes-svd", ratio=0.3))
    assert isinstance(found["nll"], Cases)
    assert 0 < found["cosine"] < 1
    few = study.few_tokens(Fake(tmp_path, "svd-llm", tokens=32))
    assert len(few["nll"].values) == 4


def test_the_choice_is_measured_on_every_fifth_block(small, tmp_path):
    found = study.choice(Fake(tmp_path, "aces", ratio=0.2, every=5))
    assert len(found["close"].values) == 7  # block 5 alone of six
    assert set(found["close"].values) <= {0.0, 1.0}
    assert (found["span"].values >= 0).all()
    assert (found["distance"].values <= 1).all()


def test_the_clock_runs_both(tmp_path):
    trial = Fake(tmp_path, context=8, tokens=2, ratio=0.4)
    cells = [Named(arm) for arm in ("dense", "factored")]
    trial.cells = lambda: cells
    found = {cell.arm: measures for cell, measures in study.speed(trial).items()}
    assert found["factored"]["megabytes"] < found["dense"]["megabytes"]
    for measures in found.values():
        assert measures["prefill_seconds"] > 0
        assert measures["decode_seconds"] > 0


def test_sentences_end_in_a_word_that_follows_from_the_text():
    found = study.sentences([TEXT * 3, "No sentence", "short one."], 10)
    assert found[0] == ("The quick brown fox jumps over the lazy dog and runs", " away")
    assert len(found) == 3  # of one document at most three
    apart = "The Board of Mr. Smith announced on Friday that it was prepared to accept them , all .\nIt was so ."
    assert study.sentences([apart], 5) == [
        ("The Board of Mr. Smith announced on Friday that it was prepared to accept them ,", " all")
    ]
    assert (
        study.sentences(["An abbreviation is no end of what was said by Mr. Jones or by the clerk of St. Paul"], 5)
        == []
    )


def test_the_last_word_is_asked_for_token_by_token():
    class Echo(torch.nn.Module):
        """Finds the token most likely that it has just read, and one more."""

        def forward(self, input_ids, use_cache, logits_to_keep):
            logits = torch.nn.functional.one_hot((input_ids + 1) % 60, 60).float()
            return Output(logits[:, -logits_to_keep:])

    found = study.cloze(Echo(), Letters(), [("x a", "bc"), ("x a", "bd"), ("x z", "bc")])
    assert found.values.tolist() == [1.0, 0.0, 0.0]


class Output(NamedTuple):
    """What a model returns."""

    logits: torch.Tensor
