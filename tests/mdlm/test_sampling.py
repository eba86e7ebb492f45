"""Draws follow the softmax they are drawn from; filters, confidences and ranks keep their promises on ties and extremes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from scipy.stats import chisquare  # noqa: E402

from assay._errors import InputError  # noqa: E402
from assay.mdlm import (  # noqa: E402
    add_gumbel,
    confidence,
    filter_logits,
    log_probability,
    most_confident,
    num_transfer,
)

INF = math.inf


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def log(*p: float) -> torch.Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


# --- draws


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([1.0, 0.2, -1.0, 0.5, -3.0])
    draws = add_gumbel(logits.expand(20_000, -1), temperature, seeded(1)).argmax(1)
    expected = (logits.double() / temperature).softmax(0) * 20_000
    assert chisquare(torch.bincount(draws, minlength=5).numpy(), expected.numpy()).pvalue > 0.001


def test_no_temperature_no_noise():
    logits = torch.randn(3, 7)
    assert add_gumbel(logits, 0.0) is logits


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_the_logarithm_draws_what_the_quotient_draws(temperature):
    logits = 3 * torch.randn(2000, 11, generator=seeded(2))
    u = torch.rand(logits.shape, generator=seeded(3), dtype=torch.float64)
    quotient = logits.double().exp() / (-u.log()) ** temperature
    assert torch.equal(add_gumbel(logits, temperature, seeded(3)).argmax(1), quotient.argmax(1))


def test_large_logits_do_not_overflow_and_excluded_tokens_are_never_drawn():
    logits = torch.tensor([[900.0, 899.0, -INF, 5.0]]).expand(500, -1)
    noisy = add_gumbel(logits, 1.0, seeded(4))
    assert noisy.dtype == torch.float64
    assert not noisy.isnan().any()
    drawn = torch.bincount(noisy.argmax(1), minlength=4)
    assert drawn[2] == drawn[3] == 0
    assert min(drawn[0], drawn[1]) > 50  # exp(900) is infinite, yet the two share the draws


# --- filters


def test_top_k_keeps_k_tokens_and_of_equal_ones_the_first():
    assert kept(filter_logits(torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]]), top_k=3)) == [[0, 1, 2]]
    assert kept(filter_logits(torch.tensor([[2.0, 2.0, 2.0]]), top_k=1)) == [[0]]
    logits = torch.randn(2, 4)
    assert filter_logits(logits, top_k=9) is logits


def test_top_p_keeps_the_first_token_above_the_threshold():
    p = log(0.1, 0.5, 0.1, 0.3)
    assert kept(filter_logits(p, top_p=0.45)) == [[1]]
    assert kept(filter_logits(p, top_p=0.55)) == [[1, 3]]
    assert kept(filter_logits(p, top_p=0.85)) == [[0, 1, 3]]
    assert filter_logits(p, top_p=1.0) is p


def test_the_second_filter_sees_what_the_first_has_left():
    p = log(0.4, 0.3, 0.2, 0.1)
    # of the two largest alone, the first holds 4/7 > 0.5 and is enough; of all four it holds 0.4
    assert kept(filter_logits(p, top_k=2, top_p=0.5, first="top_k")) == [[0]]
    assert kept(filter_logits(p, top_k=2, top_p=0.5, first="top_p")) == [[0, 1]]


def test_temperature_comes_before_the_filters():
    p = log(0.5, 0.3, 0.2)
    assert torch.allclose(filter_logits(p, temperature=2.0), p / 2)
    assert kept(filter_logits(p, temperature=0.2, top_p=0.9)) == [[0]]
    assert kept(filter_logits(p, temperature=5.0, top_p=0.65)) == [[0, 1]]
    assert kept(filter_logits(p, temperature=5.0, top_p=0.9)) == [[0, 1, 2]]


def test_half_precision_is_divided_in_single():
    logits = torch.tensor([[20.0, 19.875, 3.0]], dtype=torch.bfloat16)
    assert torch.equal(filter_logits(logits, temperature=0.7), logits.float() / 0.7)


# --- confidences


def test_confidences_of_a_known_distribution():
    p, second = log(0.6, 0.3, 0.1) + 7.0, torch.tensor([1])
    assert confidence("max_prob", p, second).item() == pytest.approx(0.3)  # of the sampled token, not the likeliest
    assert confidence("margin", p, second).item() == pytest.approx(0.3)
    assert confidence("logit_margin", p, second).item() == pytest.approx(math.log(2))
    entropy = sum(q * math.log(q) for q in (0.6, 0.3, 0.1))
    assert confidence("neg_entropy", p, second).item() == pytest.approx(entropy)
    assert log_probability(p, second).item() == pytest.approx(math.log(0.3))


@pytest.mark.parametrize("kind", ["max_prob", "margin", "neg_entropy", "logit_margin"])
def test_a_sure_distribution_is_surer_than_an_even_one(kind):
    both = torch.tensor([[5.0, -INF, 0.0], [1.0, 1.0, -INF], [2.0, -INF, -INF]])
    some, even, sole = confidence(kind, both, torch.zeros(3, dtype=torch.long)).tolist()
    assert even < some < sole < INF


def test_confidences_are_told_apart_beyond_float32():
    logits = torch.tensor([[0.0, -40.0], [0.0, -41.0]], dtype=torch.float32)
    entropy = confidence("neg_entropy", logits, torch.zeros(2, dtype=torch.long))
    assert entropy[0] < entropy[1] < 0


def test_random_confidence_is_drawn_from_the_generator():
    logits, tokens = torch.zeros(1000, 3), torch.zeros(1000, dtype=torch.long)
    values = confidence("random", logits, tokens, seeded(5))
    assert torch.equal(values, confidence("random", logits, tokens, seeded(5)))
    assert 0 <= values.min() < 0.01 < 0.99 < values.max() < 1


def test_an_unknown_confidence_is_named():
    with pytest.raises(InputError, match="'entropy' is unknown"):
        confidence("entropy", torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))


# --- counts and ranks


def test_transfer_counts_of_known_cases():
    assert num_transfer(7, 3) == [3, 2, 2]
    assert num_transfer(2, 4) == [1, 1, 0, 0]
    assert num_transfer(0, 2) == [0, 0]


@given(st.integers(0, 200), st.integers(1, 60))
def test_transfer_counts_sum_to_the_masks_and_never_rise(masked, steps):
    counts = num_transfer(masked, steps)
    assert len(counts) == steps
    assert sum(counts) == masked
    assert sorted(counts, reverse=True) == counts
    assert counts[0] - counts[-1] <= 1


@given(st.data())
def test_the_most_confident_are_the_largest_and_of_equal_ones_the_left(data):
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    value = st.sampled_from([-INF, -1.0, 0.0, 0.25, 0.5, 1.0])
    table = [[data.draw(value) for _ in range(width)] for _ in range(rows)]
    count = [data.draw(st.integers(0, width + 1)) for _ in range(rows)]
    chosen = most_confident(torch.tensor(table, dtype=torch.float64), torch.tensor(count))
    for row, number, picked in zip(table, count, chosen.tolist()):
        best = sorted((j for j in range(width) if row[j] > -INF), key=lambda j: (-row[j], j))[:number]
        assert [j for j in range(width) if picked[j]] == sorted(best)
