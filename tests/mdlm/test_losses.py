"""The losses: their expectations on sources whose entropy is known, brute force over masks, finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.mdlm.tiny import MASK, tiny
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import (
    block_diffusion_loss,
    cart_weights,
    cut_rows,
    log_likelihood,
    mask_rates,
    mask_tokens,
    masked_diffusion_loss,
)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Stub:
    """Called like a model; what it says of a token is a function of what it sees. Keeps its last inputs."""

    def __init__(self, says: Callable[[Tensor], Tensor], shift: bool = False, mask: int = 3) -> None:
        self.says = says
        self.config = SimpleNamespace(attention="full", logit_shift=shift, mask_token_id=mask, block_size=None)
        self.seen: dict[str, Any] = {}

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        self.seen = inputs
        return SimpleNamespace(logits=self.says(inputs["input_ids"])[inputs["logits_for"]])


SOURCE = torch.tensor([0.5, 0.3, 0.2])
ENTROPY = float(-(SOURCE * SOURCE.log()).sum())


def independent(ids: Tensor) -> Tensor:
    """The true law of tokens that are drawn independently, whatever is seen; the mask is impossible."""
    return torch.cat([SOURCE.log(), torch.tensor([-torch.inf])]).expand(*ids.shape, 4)


def draws(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.multinomial(SOURCE, rows * columns, replacement=True, generator=chance(seed)).view(rows, columns)


@pytest.mark.parametrize("spread", ["uniform", "stratified", "antithetic"])
@pytest.mark.parametrize("span", [(0.0, 1.0), (0.0, 0.5), (0.4, 0.6)])
def test_the_true_law_of_a_source_costs_its_entropy_whatever_the_rates(spread, span):
    ids = draws(20, 25)
    generator = chance(1)
    losses = torch.stack(
        [
            masked_diffusion_loss(
                Stub(independent),
                ids,
                torch.ones_like(ids, dtype=torch.bool),
                spread=spread,
                span=span,
                generator=generator,
            )
            for _ in range(400)
        ]
    )
    # given these tokens, the mean over masks is their own cross entropy
    expected = float(-SOURCE.log()[ids].mean())
    assert abs(float(losses.mean()) - expected) < 3 * float(losses.std()) / math.sqrt(len(losses))
    fresh = torch.stack(
        [
            masked_diffusion_loss(
                Stub(independent),
                draws(20, 25, seed),
                torch.ones_like(ids, dtype=torch.bool),
                span=span,
                generator=generator,
            )
            for seed in range(400)
        ]
    )
    assert abs(float(fresh.mean()) - ENTROPY) < 3 * float(fresh.std()) / math.sqrt(len(fresh))


def test_rates_are_spread_as_they_say():
    rates = mask_rates(8, spread="stratified", eps=1e-3, generator=chance())
    t = (rates - 1e-3) / (1 - 1e-3)
    assert sorted((t * 8).floor().tolist()) == list(range(8))
    assert t.tolist() != sorted(t.tolist())  # in random order: rows of a batch may be sorted by length
    t = (mask_rates(8, spread="antithetic", span=(0.2, 0.6), generator=chance()) - 1e-3) / (1 - 1e-3)
    assert torch.allclose(t[:4] + t[4:], torch.full((4,), 0.8))
    assert len(mask_rates(5, spread="antithetic")) == 5
    assert float(mask_rates(1000, eps=0.01).min()) >= 0.01
    for spread in ("uniform", "stratified", "antithetic"):  # each by itself is uniform
        first = torch.stack([mask_rates(4, spread=spread, generator=chance(seed)) for seed in range(2000)])[:, 0]
        assert float(first.mean()) == pytest.approx(0.5, abs=0.03)
        assert float(first.var()) == pytest.approx(1 / 12, abs=0.01)


def test_only_maskable_tokens_are_masked_each_with_its_own_rate():
    ids = torch.arange(12).view(2, 6)
    rates = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 1.0]).expand(2, 6)
    maskable = torch.tensor([[True] * 6, [True, True, False, True, True, False]])
    counts = torch.zeros(2, 6)
    for seed in range(500):
        noised = mask_tokens(ids, maskable, rates, MASK, generator=chance(seed))
        assert torch.equal(noised.input_ids, torch.where(noised.masked, MASK, ids))
        counts += noised.masked
    assert torch.equal(counts[:, [0, 1, 2, 3, 5]] / 500, torch.tensor([[0.0, 1, 1, 0, 1], [0.0, 1, 0, 0, 0]]))
    assert counts[:, 4].tolist() == pytest.approx([250, 250], abs=35)


def test_each_row_is_divided_by_its_own_response():
    """With everything masked at rate 1 the loss is the mean over rows of the mean cross entropy of the response."""
    model = tiny()
    ids = torch.randint(0, 38, (3, 10), generator=chance())
    maskable = torch.arange(10) >= torch.tensor([[4], [7], [9]])
    loss = masked_diffusion_loss(model, ids, maskable, span=(1 - 1e-7, 1.0), eps=1 - 1e-7)
    logits = model(input_ids=torch.where(maskable, MASK, ids)).logits
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    means = [each[row][maskable[row]].mean() for row in range(3)]
    assert loss.item() == pytest.approx(torch.stack(means).mean().item(), rel=1e-5)


def test_a_shifted_model_is_never_asked_for_the_first_visible_token():
    ids = draws(3, 6)
    visible = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]).bool()
    for shift in (False, True):
        model = Stub(independent, shift=shift)
        masked_diffusion_loss(
            model, ids, visible, attention_mask=visible, span=(1 - 1e-7, 1.0), eps=1 - 1e-7, generator=chance()
        )
        first = visible.int().argmax(1)
        expected = visible.clone()
        if shift:
            expected[torch.arange(3), first] = False
        assert torch.equal(model.seen["logits_for"], expected)
    masked_diffusion_loss(
        Stub(independent, shift=True), ids, torch.ones_like(visible)
    )  # column 0 where nothing is padded


def test_padding_on_the_left_changes_no_loss():
    for settings in ({}, {"logit_shift": True}):
        model = tiny(**settings)
        ids = torch.randint(0, 38, (2, 9), generator=chance())
        maskable = (torch.arange(9) >= 4).expand(2, 9)
        padded = torch.cat([torch.full((2, 3), 38), ids], 1)
        wider = torch.cat([torch.zeros(2, 3, dtype=torch.bool), maskable], 1)
        visible = torch.cat([torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)], 1)
        sure = {"span": (1 - 1e-7, 1.0), "eps": 1 - 1e-7}
        plain = masked_diffusion_loss(model, ids, maskable, **sure)
        assert torch.allclose(
            masked_diffusion_loss(model, padded, wider, attention_mask=visible, **sure), plain, atol=1e-5
        )


def test_cart_weights_are_the_sum_over_clean_neighbours():
    masked = torch.tensor([[True, False, True, True, False, True], [True] * 6])
    visible = torch.tensor([[True] * 5 + [True], [True] * 6])
    visible[0, 1] = False
    for seen in (None, visible):
        weights = cart_weights(masked, seen)
        for row in range(2):
            for n in range(6):
                clean = [i for i in range(6) if not masked[row, i] and (seen is None or seen[row, i])]
                sure = 0.5 * sum(0.3 * 0.7 ** (abs(n - i) - 1) for i in clean) if masked[row, n] else 0.0
                assert float(weights[row, n]) == pytest.approx(sure, abs=1e-7)


def test_cart_weighting_takes_the_place_of_one_over_p():
    ids = draws(4, 12)
    model = Stub(independent)
    loss = masked_diffusion_loss(
        model, ids, torch.ones_like(ids, dtype=torch.bool), weighting="cart", generator=chance()
    )
    masked = model.seen["logits_for"]
    expected = (cart_weights(masked) * -SOURCE.log()[ids] * masked).sum(1) / 12
    assert loss.item() == pytest.approx(expected.mean().item(), rel=1e-5)


def test_few_rows_are_cut_and_to_every_length():
    there = torch.ones(20_000, 8, dtype=torch.bool)
    kept = cut_rows(there, generator=chance())
    lengths = kept.sum(1)
    assert torch.equal(kept, torch.arange(8) < lengths[:, None])
    assert float((lengths < 8).float().mean()) == pytest.approx(0.01 * 7 / 8, abs=0.002)
    assert set(lengths.tolist()) == set(range(1, 9))


# --- blocks


def block_by_block(model: Any, ids: Tensor, start: int, size: int, masked: Tensor, rates: Tensor) -> Tensor:
    """The same loss from one forward a block, on [clean prompt and blocks before it, the noisy block]."""
    total = torch.zeros((), dtype=model.dtype)
    for first in range(start, ids.shape[1], size):
        last = min(first + size, ids.shape[1])
        seen = torch.cat([ids[:, :first], torch.where(masked[:, first:last], MASK, ids[:, first:last])], 1)
        position = torch.arange(last)
        block = (position - start).div(size, rounding_mode="floor")
        mask = (block[:, None] >= block[None])[None, None].expand(len(ids), 1, -1, -1)
        logits = model(input_ids=seen, attention_mask=mask).logits[:, first:last]
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, first:last], reduction="none")
        total = total + (each / rates[:, first:last] * masked[:, first:last]).sum()
    return total / (len(ids) * (ids.shape[1] - start))


class Watched:
    """Passes calls on to a model and keeps what it was asked for."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config

    def __call__(self, **inputs: Any) -> Any:
        self.seen = inputs
        return self.model(**inputs)


@pytest.mark.parametrize(("start", "length", "size"), [(3, 5, 2), (4, 8, 4), (6, 7, 4), (0, 6, 3)])
def test_one_forward_gives_the_loss_of_every_block(start, length, size):
    """The noisy blocks see clean ones before them, and nothing of each other: two streams equal block by block."""
    model = tiny(attention="block", block_size=size, dtype=torch.float64)
    ids = torch.randint(0, 38, (3, start + length), generator=chance(2))
    watched = Watched(model)
    loss = block_diffusion_loss(watched, ids, start, generator=chance(3))
    masked = torch.zeros_like(ids, dtype=torch.bool)
    masked[:, start:] = watched.seen["logits_for"][:, start + length :]
    assert masked.any()
    assert not watched.seen["logits_for"][:, : start + length].any()
    blocks = -(-length // size)
    rates = mask_rates(3 * blocks, generator=chance(3)).view(3, blocks).repeat_interleave(size, 1)[:, :length]
    padded = torch.cat([torch.ones(3, start), rates], 1).double()
    assert loss.item() == pytest.approx(block_by_block(model, ids, start, size, masked, padded).item(), rel=1e-6)


def test_every_block_has_a_rate_of_its_own():
    """Under one rate a row, the numbers masked in two blocks would go up and down together."""
    ids = torch.zeros(400, 2 + 32, dtype=torch.long)
    model = Watched(tiny(attention="block", block_size=16))
    with torch.no_grad():
        block_diffusion_loss(model, ids, 2, generator=chance())
    counts = model.seen["logits_for"][:, -32:].unflatten(1, (2, 16)).sum(2).double()
    assert abs(float(torch.corrcoef(counts.T)[0, 1])) < 0.15
    assert float(counts.std()) > 3  # and it does vary: a fixed rate of a half would give 2


def test_padding_on_the_left_changes_no_block_loss():
    model = tiny(attention="block", block_size=4, dtype=torch.float64)
    ids = torch.randint(0, 38, (2, 11), generator=chance())
    padded = torch.cat([torch.full((2, 2), 38), ids], 1)
    visible = torch.cat([torch.zeros(2, 2, dtype=torch.bool), torch.ones(2, 11, dtype=torch.bool)], 1)
    plain = block_diffusion_loss(model, ids, 5, generator=chance(1))
    wider = block_diffusion_loss(model, padded, 7, attention_mask=visible, generator=chance(1))
    assert torch.allclose(plain, wider, atol=1e-9)


@pytest.mark.parametrize("form", ["masked", "shifted", "blocks"])
def test_gradients_equal_finite_differences(form):
    settings = {"masked": {}, "shifted": {"logit_shift": True}, "blocks": {"attention": "block", "block_size": 2}}[form]
    model = tiny(dtype=torch.float64, **settings)
    ids = torch.randint(0, 38, (2, 8), generator=chance())
    maskable = (torch.arange(8) >= 3).expand(2, 8)

    def loss() -> Tensor:
        if form == "blocks":
            return block_diffusion_loss(model, ids, 3, generator=chance(5))
        return masked_diffusion_loss(model, ids, maskable, generator=chance(5))

    loss().backward()
    step = 1e-6
    generator = chance(6)
    for weight in model.parameters():
        assert weight.grad is not None
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            weight += step * direction
            above = loss()
            weight -= 2 * step * direction
            below = loss()
            weight += step * direction
        numeric = float(above - below) / (2 * step)
        assert float((weight.grad * direction).sum()) == pytest.approx(numeric, rel=2e-5, abs=1e-7)


# --- likelihood


def test_an_answer_of_one_token_needs_one_draw():
    model = tiny()
    prompt, answer = torch.tensor([1, 2, 3]), torch.tensor([7])
    exact = model(input_ids=torch.tensor([[1, 2, 3, MASK]])).logits[0, 3].log_softmax(-1)[7].item()
    assert log_likelihood(model, prompt, answer, n_mc=1) == pytest.approx(exact, abs=1e-5)


def test_the_likelihood_is_the_mean_over_all_masks():
    model = tiny()
    prompt, answer = torch.tensor([1, 2]), torch.tensor([7, 8, 9])
    expected = 0.0
    for k in (1, 2, 3):
        chosen = list(combinations(range(3), k))
        for places in chosen:
            noisy = torch.cat([prompt, answer])
            noisy[[2 + place for place in places]] = MASK
            log_p = model(input_ids=noisy[None]).logits[0].log_softmax(-1)
            total = sum(float(log_p[2 + place, answer[place]]) for place in places)
            expected += 3 / k * total / len(chosen) / 3
    estimates = torch.tensor(
        [log_likelihood(model, prompt, answer, n_mc=60, batch_size=7, generator=chance(s)) for s in range(30)]
    )
    assert abs(float(estimates.mean()) - expected) < 3 * float(estimates.std()) / math.sqrt(30)


def test_the_true_law_of_independent_tokens_gives_their_likelihood_without_bias():
    answer = draws(1, 6)[0]
    assert log_likelihood(Stub(independent), torch.tensor([0]), answer, n_mc=4000, generator=chance()) == pytest.approx(
        float(SOURCE.log()[answer].sum()), rel=0.02
    )


# --- what is refused


def test_what_cannot_be_trained_is_refused():
    ids = torch.zeros(2, 4, dtype=torch.long)
    everything, nothing = torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    with pytest.raises(InputError, match="row 1 has no token"):
        masked_diffusion_loss(tiny(), ids, torch.stack([everything[0], nothing[0]]))
    with pytest.raises(InputError, match="train it with block_diffusion_loss"):
        masked_diffusion_loss(tiny(attention="block", block_size=2), ids, everything)
    with pytest.raises(InputError, match="shifted by one"):
        block_diffusion_loss(tiny(logit_shift=True), ids, 2, block_size=2)
    with pytest.raises(InputError, match="block size"):
        block_diffusion_loss(tiny(), ids, 2)
    with pytest.raises(InputError, match="leaves no response"):
        block_diffusion_loss(tiny(attention="block", block_size=2), ids, 4)
    with pytest.raises(InputError, match="give a prompt"):
        log_likelihood(tiny(logit_shift=True), torch.zeros(0, dtype=torch.long), torch.tensor([1]))
    with pytest.raises(InputError, match="0 tokens"):
        log_likelihood(tiny(), torch.tensor([1]), torch.zeros(0, dtype=torch.long))
    with pytest.raises(InputError, match="span"):
        mask_rates(3, span=(0.5, 0.5))


def test_ids_of_any_integer_type_cost_the_same():
    model, ids = tiny(), torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1))
    response = torch.arange(9).expand(2, 9) >= 4

    def cost(ids: Tensor) -> float:
        seeded = torch.Generator().manual_seed(0)
        return masked_diffusion_loss(model, ids, response, generator=seeded).item()

    assert cost(ids.int()) == cost(ids)


def test_a_block_of_no_tokens_is_refused_where_the_model_has_blocks_too():
    model = tiny(attention="block", block_size=4)
    with pytest.raises(InputError, match="a block size of 0"):
        block_diffusion_loss(model, torch.ones(1, 8, dtype=torch.int64), 4, block_size=0)
