"""The training loop: its schedule, its average, and that a stopped run goes on bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from assay._errors import InputError
from assay.mdlm import Training, TrainingPlan


def problem(seed: int = 0) -> tuple[nn.Module, object]:
    """A linear model and a loss whose batch depends on the step alone."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))

    def loss_at(step: int) -> Tensor:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return (model(x) - x[:, :2]).square().mean()

    return model, loss_at


def test_the_rate_rises_then_falls_on_a_cosine_to_a_tenth():
    plan = TrainingPlan(steps=300, lr=2.0, warmup=100)
    assert [plan.rate(step) for step in (0, 49, 99)] == pytest.approx([0.02, 1.0, 2.0])
    assert plan.rate(100) == pytest.approx(2.0)
    assert plan.rate(299) == pytest.approx(0.2)
    middle = plan.rate(199), plan.rate(200)
    assert middle[0] > 1.1 > middle[1] or middle == pytest.approx((1.1, 1.1), abs=0.02)
    rates = [plan.rate(step) for step in range(100, 300)]
    assert rates == sorted(rates, reverse=True)


def test_it_is_adamw_with_clipped_gradients_and_a_quick_average():
    plan = TrainingPlan(steps=30, lr=0.1, warmup=5, clip=1.0, weight_decay=0.1)
    model, loss_at = problem()
    training = Training(model, plan)
    training.advance(loss_at)

    peer, peer_loss = problem()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=0.1, betas=(0.9, 0.98), weight_decay=0.1)
    average = [weight.detach().clone() for weight in peer.parameters()]
    clipped = 0
    for step in range(30):
        share = (step - 5) / 24
        optimizer.param_groups[0]["lr"] = 0.1 * (
            (step + 1) / 5 if step < 5 else 0.1 + 0.45 * (1 + math.cos(math.pi * share))
        )
        optimizer.zero_grad()
        peer_loss(step).backward()
        clipped += float(nn.utils.clip_grad_norm_(peer.parameters(), 1.0)) > 1.0
        optimizer.step()
        decay = min(0.995, (step + 1) / (step + 21))
        average = [decay * old + (1 - decay) * new.detach() for old, new in zip(average, peer.parameters())]
    assert 0 < clipped < 30
    for weight, sure in zip(model.parameters(), peer.parameters()):
        assert torch.allclose(weight, sure, atol=1e-6)
    for name, sure in zip(("weight", "bias"), average):
        assert torch.allclose(training.average[name], sure, atol=1e-6)
    training.use_average()
    assert torch.equal(model.weight, training.average["weight"])


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path):
    plan = TrainingPlan(steps=40, lr=0.1, warmup=5)
    model, loss_at = problem()
    whole = Training(model, plan)
    whole.advance(loss_at)

    part_model, part_loss = problem()
    part = Training(part_model, plan)
    part.advance(part_loss, until=17)
    part.save(tmp_path / "state.safetensors")
    other_model, other_loss = problem(seed=9)
    other = Training(other_model, plan)
    other.restore(tmp_path / "state.safetensors")
    assert other.step == 17
    other.advance(other_loss)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(other_model.named_parameters())[name])
        assert torch.equal(whole.average[name], other.average[name])


def test_a_run_leaves_the_model_ready_for_use():
    model, loss_at = problem()
    Training(model, TrainingPlan(steps=2, lr=0.1)).advance(loss_at)
    assert not model.training


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_weights_move():
    model, loss_at = problem()
    training = Training(model, TrainingPlan(steps=5, lr=0.1))
    training.advance(loss_at, until=2)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="run: the gradient of step 2 is not finite"):
        training.advance(lambda step: loss_at(step) * float("nan"), label="run")
    assert torch.equal(model.weight, before)


def test_what_is_no_plan_or_another_models_state_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no plan"):
        TrainingPlan(steps=0, lr=1.0)
    with pytest.raises(InputError, match="no plan"):
        TrainingPlan(steps=1, lr=0.0)
    model, loss_at = problem()
    training = Training(model, TrainingPlan(steps=3, lr=0.1))
    training.advance(loss_at)
    training.save(tmp_path / "state.safetensors")
    with pytest.raises(InputError, match="another model"):
        Training(nn.Sequential(nn.Linear(3, 2)), TrainingPlan(steps=3, lr=0.1)).restore(tmp_path / "state.safetensors")
    with pytest.raises(InputError, match="of another size"):
        Training(nn.Linear(9, 7), TrainingPlan(steps=3, lr=0.1)).restore(tmp_path / "state.safetensors")
