"""The schedule, the windows and the loop of the small trainings."""

import itertools

import numpy as np
import pytest
import torch

from assay.methods.racs_alice._training import (
    loss_of,
    random_windows,
    schedule,
    spaced_windows,
    training,
    window_losses,
)


class Bigram(torch.nn.Module):
    """The smallest causal language model."""

    def __init__(self, vocabulary=5):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(vocabulary, vocabulary))

    def forward(self, input_ids, use_cache):
        return type("Output", (), {"logits": self.table[input_ids]})


def test_the_schedule_rises_over_a_tenth_and_falls_to_a_tenth():
    factors = [schedule(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.1)
    assert all(later < sooner for sooner, later in itertools.pairwise(factors[10:]))
    assert factors[10 + 45] == pytest.approx(0.55, abs=0.01)
    assert schedule(0, 1) == 1.0


def test_windows():
    text = np.arange(1000, dtype=np.uint16)
    spaced = spaced_windows(text, 4, 9)
    assert spaced.shape == (4, 10)
    assert spaced[:, 0].tolist() == [0, 330, 660, 990]
    assert (spaced[:, 1:] - spaced[:, :-1] == 1).all()
    drawn = random_windows(text, 8, 9, (1, 2, 0))
    assert torch.equal(drawn, random_windows(text, 8, 9, (1, 2, 0)))
    assert not torch.equal(drawn, random_windows(text, 8, 9, (1, 3, 0)))
    assert spaced_windows(text[:12], 256, 9).shape == (3, 10)
    with pytest.raises(ValueError, match="longer text"):
        spaced_windows(text[:9], 4, 9)


def test_losses_are_nats_a_token():
    windows = random_windows(np.arange(100) % 5, 6, 9, (0, 0, 0))
    model = Bigram()
    assert loss_of(model, windows).item() == pytest.approx(np.log(5))
    assert window_losses(model, windows, batch=4) == pytest.approx(np.full(6, np.log(5)))


def test_accumulated_batches_are_one_large_one_and_a_run_resumes_exactly():
    text = np.random.default_rng(0).integers(0, 5, 500)

    def run(steps, model=None, optimizer=None, **more):
        model = model or Bigram()
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
        done = training(model, [optimizer], text, steps=8, batch=4, length=9, seed=3, **more)
        assert [next(done) for _ in range(steps)] == list(
            range(more.get("start", 0) + 1, more.get("start", 0) + steps + 1)
        )
        return model, optimizer

    whole, _ = run(8)
    half, optimizer = run(3)
    saved = optimizer.state_dict()
    resumed = torch.optim.Adam(half.parameters(), lr=0.1)
    resumed.load_state_dict(saved)
    run(5, half, resumed, start=3)
    assert torch.equal(whole.table, half.table)

    model = Bigram()
    done = training(
        model, [torch.optim.SGD(model.parameters(), lr=1.0)], text, steps=1, batch=4, length=9, seed=3, accumulate=2
    )
    next(done)
    windows = torch.cat([random_windows(text, 4, 9, (3, 0, part)) for part in range(2)])
    twin = Bigram()
    loss_of(twin, windows).backward()
    assert torch.allclose(model.table, -twin.table.grad, atol=1e-6)
