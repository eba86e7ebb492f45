"""Counts of state, foretold and real, and the paper's sizes."""

from inspect import unwrap

import pytest
import torch
from torch import nn

from assay.methods.racs_alice import (
    RACS,
    Alice,
    AliceZero,
    EigenAdam,
    build_param_groups,
    llama_config,
    memory_report,
    paper_settings,
    state_elements,
)
from assay.methods.racs_alice._configs import SIZES
from assay.methods.racs_alice._memory import matrix_state

transformers = pytest.importorskip("transformers")


def on_meta(size, **more):
    config = llama_config(size)
    for key, value in more.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_states_have_exactly_the_stated_size(shape):
    m, n, r = 12, 20, 5
    for make, settings, count in (
        (RACS, {}, m + n + 1),
        (Alice, {"rank": r, "leading": 2}, 2 * n * r + m * r + n + r * r + 1),
        (AliceZero, {"rank": r, "leading": 2}, 2 * n * r + m * r + n + 1),
        (EigenAdam, {}, 2 * m * n + 2 * m * m),
    ):
        p = nn.Parameter(torch.zeros(shape))
        optimizer = make([p], **settings)
        p.grad = torch.randn(shape)
        optimizer.step()
        assert state_elements(optimizer) == {"0.0": count}


def test_the_report_matches_a_running_optimizer():
    net = nn.Sequential(nn.Embedding(7, 12), nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 7))
    for method, make, settings in (
        ("racs", RACS, {}),
        ("alice", Alice, {"rank": 4, "leading": 2}),
        ("alice-zero", AliceZero, {"rank": 4, "leading": 2}),
        ("eigen-adam", EigenAdam, {}),
    ):
        optimizer = make(build_param_groups(net, method), **settings)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        numbers = sum(state_elements(optimizer).values()) + sum(p.numel() for p in net.parameters())
        assert memory_report(net, method, torch.float32, rank=4) == 4 * numbers


# GB of the paper's Table 3 for 130M parameters; RACS with its head under Adam, the low-rank ones without.
@pytest.mark.parametrize(
    ("method", "last_layer", "paper"),
    [("adam", "adam", 0.75), ("galore", "method", 0.51), ("alice", "method", 0.53), ("racs", "adam", 0.43)],
)
def test_the_report_gives_the_paper_s_table(method, last_layer, paper):
    size = memory_report(on_meta("130m"), method, torch.bfloat16, rank=256, last_layer=last_layer)
    assert size / 2**30 == pytest.approx(paper, abs=0.03)


@pytest.mark.parametrize(("size", "parameters"), [("60m", 58e6), ("130m", 134e6), ("350m", 368e6), ("1.3b", 1.34e9)])
def test_the_paper_s_models_build_and_step(size, parameters):
    assert set(SIZES) == {"60m", "130m", "350m", "1.3b"}
    model = on_meta(size)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)
    short = on_meta(size, num_hidden_layers=1)  # without storage a step costs as much a layer as with it
    optimizer = RACS(build_param_groups(short, "racs"), **paper_settings("racs", size))
    for p in short.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert memory_report(short, "racs", torch.float32) == 4 * sum(
        [*state_elements(optimizer).values(), *(p.numel() for p in short.parameters())]
    )
    for method in ("alice", "alice-zero"):
        settings = paper_settings(method, size)
        make = {"alice": Alice, "alice-zero": AliceZero}[method]
        assert make(build_param_groups(model, method), **settings).param_groups[0]["rank"] == settings["rank"]
    racs, alice, adam = (memory_report(model, m, rank=settings["rank"]) for m in ("racs", "alice", "adam"))
    assert racs < alice < adam


@pytest.mark.parametrize("size", ["60m", *(pytest.param(s, marks=pytest.mark.slow) for s in ("130m", "350m", "1.3b"))])
def test_one_layer_of_the_paper_s_models_trains_on_real_numbers(size):
    config = llama_config(size, vocab_size=257)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = Alice(build_param_groups(model, "alice"), **paper_settings("alice", size))
    tokens = torch.randint(257, (2, 16))
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_unknown_methods_and_ranks_are_refused():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    with pytest.raises(ValueError, match="one of adam, racs"):
        unwrap(matrix_state)("lion", 4, 6, 2)
    for rank in (0, -3):
        with pytest.raises(ValueError, match="rank must be at least 1"):
            memory_report(net, "alice", rank=rank)
    with pytest.raises(ValueError, match="alice-zero, got 'muon'"):
        unwrap(paper_settings)("muon", "60m")
