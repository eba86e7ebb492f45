"""The objective by hand, its gradient, and what it must not be moved by."""

import math

import pytest
import torch

from assay._errors import InputError
from assay.methods.tracerl import trace_policy_loss
from assay.methods.tracerl._losses import k3

ONE = torch.ones(1, 1, dtype=torch.bool)


def alone(ratio, advantage, **settings):
    """The loss of one token with this ratio."""
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    adv = torch.tensor([[advantage]], dtype=torch.float64)
    loss, metrics = trace_policy_loss(new, torch.zeros_like(new).detach(), adv, ONE, **{"beta": 0.0} | settings)
    return loss, new, metrics


@pytest.mark.parametrize(("advantage", "gain"), [(1.0, 1.2), (-1.0, -1.5)])
def test_a_large_ratio_is_clipped_where_it_would_gain(advantage, gain):
    loss, new, metrics = alone(1.5, advantage)
    assert -loss.item() == pytest.approx(gain)
    loss.backward()
    assert new.grad.item() == pytest.approx(0.0 if advantage > 0 else 1.5)
    assert metrics["clipped"] == (1.0 if advantage > 0 else 0.0)


def test_k3_is_never_negative_and_zero_at_equality_alone():
    t = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    assert (k3(t) >= 0).all()
    assert k3(torch.zeros(1, dtype=torch.float64)) == 0
    assert (k3(t[t.abs() > 1e-3]) > 0).all()
    assert k3(t).max() <= math.exp(10)


def test_at_the_first_update_it_is_reinforce():
    """Ratio 1, no penalty: the loss is minus the normalised advantages, its gradient that of -A log p."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(7, (3, 5), generator=g)
    p_mask = torch.rand(3, 5, generator=g) < 0.6
    p_mask[:, 0] = True
    adv = torch.randn(3, 1, generator=g, dtype=torch.float64)

    def logps(x):
        return x.log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    for normalize, size in (("step", p_mask.sum(1)), ("length", 5)):
        loss, metrics = trace_policy_loss(logps(logits), logps(logits).detach(), adv, p_mask, normalize=normalize)
        assert loss.item() == pytest.approx(float(-((adv * p_mask).sum(1) / size).mean()))
        assert metrics["ratio"] == pytest.approx(1.0)
        assert metrics["kl"] == 0
        (gradient,) = torch.autograd.grad(loss, logits)

        def reinforce(x, size=size):
            return -((adv * logps(x) * p_mask).sum(1) / size).mean()

        step = 1e-6
        for index in ((0, 0, 0), (1, 0, 3), (2, 0, 6)):
            bump = torch.zeros_like(logits)
            bump[index] = step
            with torch.no_grad():
                slope = (reinforce(logits + bump) - reinforce(logits - bump)) / (2 * step)
            assert gradient[index].item() == pytest.approx(slope.item(), abs=1e-8)


def test_a_group_of_equal_rewards_moves_nothing():
    new = torch.randn(2, 3, requires_grad=True)
    loss, _ = trace_policy_loss(new, torch.randn(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool), beta=0.0)
    loss.backward()
    assert loss == 0
    assert (new.grad == 0).all()


def test_one_token_answers_are_plain_clipped_grpo():
    """Bandit limit: the released formula of GRPO on the same samples."""
    g = torch.Generator().manual_seed(1)
    new = torch.randn(16, 1, generator=g, dtype=torch.float64)
    old = new + 0.5 * torch.randn(16, 1, generator=g, dtype=torch.float64)
    adv = torch.randn(16, 1, generator=g, dtype=torch.float64)
    ratio = (new - old).exp()
    grpo = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    for normalize in ("step", "length"):
        loss, _ = trace_policy_loss(new, old, adv, torch.ones(16, 1, dtype=torch.bool), beta=0.0, normalize=normalize)
        assert loss.item() == pytest.approx(grpo.item(), abs=1e-12)


def test_positions_that_are_no_targets_are_not_looked_at():
    new = torch.tensor([[0.1, torch.nan, 5.0]], requires_grad=True)
    p_mask = torch.tensor([[True, False, False]])
    loss, _ = trace_policy_loss(new, torch.tensor([[0.1, 0.0, torch.inf]]), torch.ones(1, 3), p_mask)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert new.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_the_penalty_may_pull_to_another_policy_and_be_scaled_otherwise():
    new, old, reference = (torch.full((1, 4), x, dtype=torch.float64) for x in (-1.0, -1.0, -1.5))
    p_mask = torch.ones(1, 4, dtype=torch.bool)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    one = math.exp(-0.5) - 1 + 0.5

    def penalty(**settings):
        return trace_policy_loss(new, old, zero, p_mask, beta=1.0, **settings)[0].item()

    assert penalty() == 0
    assert penalty(logp_ref=reference) == pytest.approx(4 * one)
    assert penalty(logp_ref=reference, kl_normalize="step") == pytest.approx(one)
    assert penalty(logp_ref=reference, normalize="length", length=8) == pytest.approx(one / 2)
    with pytest.raises(InputError, match="kl_normalize is 'row'"):
        penalty(kl_normalize="row")
    with pytest.raises(InputError, match="normalize is 'sum'"):
        penalty(normalize="sum")


def test_a_wild_ratio_is_cut_and_counted():
    loss, new, metrics = alone(math.exp(25.0), -1.0)
    assert loss.item() == pytest.approx(math.exp(10))
    loss.backward()
    assert new.grad.item() == 0
    assert metrics["cut"] == 1


def test_nan_is_named_with_its_row():
    bad = torch.zeros(2, 3)
    bad[1, 2] = torch.nan
    with pytest.raises(FloatingPointError, match="new log-probability of row 1, position 2"):
        trace_policy_loss(bad, torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))
