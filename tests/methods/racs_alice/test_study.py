"""The parts of the study that a wrong edit would spoil silently: equal starts, arms, and the search for rates."""

import pytest
import torch

from assay.bench import Trial
from assay.bench._card import check_card, load_card
from assay.bench._methods import method_folders
from assay.bench._outline import read_outline
from assay.methods.racs_alice import study

pytest.importorskip("transformers")
ARMS = sorted({*study.pretrain.arms, *study.rivals.arms})


class Fake(Trial):
    """Just enough of a trial to build a model."""

    scale = "quick"

    def path(self, name):
        from assay.data import fetch

        return fetch("byte-llama")


def losses(arm, steps=6, seed=0):
    torch.manual_seed(0)
    windows = torch.randint(257, (4, 33))
    model = study.new_model(Fake(), seed)
    optimizers = study.optimizers_of(arm, model, 0.02, 0.004, seed)
    seen = []
    for _ in range(steps):
        loss = study.loss_of(model, windows)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append(loss.item())
    return seen


def test_the_card_fits_the_study():
    folder = method_folders()["racs-alice"]
    check_card(load_card(folder), read_outline(folder))


def test_every_arm_starts_alike_learns_and_differs():
    ends = {}
    starts = set()
    for arm in ARMS:
        if study.missing_peer(study.RULE.get(arm, arm)):
            continue
        seen = losses(arm)
        assert seen[-1] < seen[0] - 0.05, arm
        starts.add(round(seen[0], 6))
        ends[arm] = round(seen[-1], 5)
    assert len(starts) == 1
    ends.pop("alice-fewer-steps", None)  # Alice but for the number of steps
    for same in ("alice-no-switch", "alice-tracking-only", "alice-zero"):  # differ after the first basis update only
        ends.pop(same, None)
    assert len(set(ends.values())) == len(ends)


def test_all_arms_train_the_same_weights_and_the_rest_is_adam_s():
    for arm in ARMS:
        if study.missing_peer(study.RULE.get(arm, arm)):
            continue
        model = study.new_model(Fake(), 0)
        optimizers = study.optimizers_of(arm, model, 0.02, 0.004, 0)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in model.parameters())
        if arm != "adam-one-rate":
            matrices, rest = groups
            assert (matrices["lr"], rest["lr"]) == (0.02, 0.004)
            assert sum(p.numel() for p in matrices["params"]) == 197_632
            assert rest["eps"] == 1e-8
            assert all(not g["weight_decay"] for g in groups)


def test_the_search_goes_outwards_at_an_edge_at_most_twice():
    tried = []

    def loss(rate):
        tried.append(rate)
        return abs(rate - best)

    best = 0.04
    assert set(study.searched((0.02, 0.04, 0.08), loss)) == {0.02, 0.04, 0.08}
    best = 0.16
    assert set(study.searched((0.02, 0.04, 0.08), loss)) == {0.02, 0.04, 0.08, 0.16, 0.32}
    best = 0.0
    assert set(study.searched((0.02, 0.04, 0.08), loss)) == {0.005, 0.01, 0.02, 0.04, 0.08}
    assert len(tried) == 3 + 5 + 5


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    assert study.missing_peer("galore") == "bitsandbytes"
    assert study.missing_peer("alice") is None
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    assert study.missing_peer("fira") == "fira"


def test_counted_states_and_the_framework():
    model = study.new_model(Fake(), 0)
    for arm in ("racs", "alice"):
        counted = study.counted(model, arm, 0)
        assert counted["elements"].value == counted["formula"].value
    fitted = study.fitted("row-column", 0)
    assert (fitted["implied"].k, fitted["not_improved"].k) == (300, 500)
