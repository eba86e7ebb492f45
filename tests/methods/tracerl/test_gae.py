"""Step-level advantages: the worked example, the slow twin on random traces, and the limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay._errors import InputError
from assay.methods.tracerl import step_gae
from assay.methods.tracerl._gae import discounted_sums, last_step
from assay.methods.tracerl.reference import step_gae_loops

STEPS = torch.tensor([[1, 1, 2, 3, 3]])
VALUES = torch.tensor([[0.2, 0.4, 0.5, 0.6, 0.8]], dtype=torch.float64)
REWARDS = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
ALL = torch.ones(1, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1.0, 1.0, [0.8, 0.6, 0.5, 0.4, 0.2], [1.0] * 5),
        (0.9, 0.5, [0.36925, 0.16925, 0.265, 0.4, 0.2], [0.81, 0.81, 0.9, 1, 1]),
    ],
)
def test_the_worked_example(gamma, lam, advantages, returns):
    found = step_gae(VALUES, REWARDS, STEPS, ALL, gamma, lam)
    assert found[0][0].tolist() == pytest.approx(returns)
    assert found[1][0].tolist() == pytest.approx(advantages)


@given(data=st.data())
def test_it_equals_its_slow_twin_on_any_trace(data):
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    steps = torch.randint(1, length + 1, (rows, length), generator=g)
    trainable = torch.rand(rows, length, generator=g) < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    values, rewards = torch.randn(2, rows, length, generator=g, dtype=torch.float64)
    gamma, lam = data.draw(st.sampled_from([(1.0, 1.0), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0), (0.99, 0.95)]))
    returns, advantages = step_gae(values, rewards, steps, trainable, gamma, lam)
    for row in range(rows):
        slow = step_gae_loops(*(x[row].tolist() for x in (values, rewards, steps, trainable)), gamma, lam)
        assert returns[row].tolist() == pytest.approx(slow[0], abs=1e-10)
        assert advantages[row].tolist() == pytest.approx(slow[1], abs=1e-10)


def test_only_the_order_of_steps_counts():
    wide = torch.tensor([[7, 7, 40, 900, 900]])
    for here, there in zip(
        step_gae(VALUES, REWARDS, STEPS, ALL, 0.9, 0.5), step_gae(VALUES, REWARDS, wide, ALL, 0.9, 0.5)
    ):
        assert torch.equal(here, there)


def test_values_of_zero_leave_the_returns():
    returns, advantages = step_gae(torch.zeros_like(VALUES), REWARDS, STEPS, ALL, 0.9, 1.0)
    torch.testing.assert_close(returns, advantages)


def test_discounted_sums_are_the_recursion():
    x = torch.randn(3, 37, dtype=torch.float64)
    y = torch.zeros(3, 38, dtype=torch.float64)
    for t in reversed(range(37)):
        y[:, t] = x[:, t] + 0.7 * y[:, t + 1]
    torch.testing.assert_close(discounted_sums(x, 0.7), y[:, :-1])


def test_the_terminal_reward_lies_on_the_last_step_that_is_trained():
    steps = torch.tensor([[2, 5, 0, 5, 9], [1, 0, 0, 2, 2]])
    trainable = torch.tensor([[True, True, False, True, False], [True, True, False, True, True]])
    assert last_step(steps, trainable).tolist() == [
        [False, True, False, True, False],
        [False, True, False, False, False],
    ]
    assert not last_step(steps, torch.zeros_like(trainable)).any()


def test_a_discount_beyond_one_is_refused():
    with pytest.raises(InputError, match="must lie in"):
        step_gae(VALUES, REWARDS, STEPS, ALL, 1.1)
