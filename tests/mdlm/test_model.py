"""A call's logits do not depend on padding, on how they are asked for, or on who shifts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from assay._errors import InputError  # noqa: E402
from assay.mdlm import MaskedDiffusionLM, block_causal_mask, positions_from_padding  # noqa: E402

from .tiny import MASK, tiny  # noqa: E402

FORMS: dict[str, dict[str, Any]] = {
    "full": {"qk_norm": "full", "norm_bias": True},
    "shifted": {"logit_shift": True, "qkv_bias": True},
    "block": {"attention": "block", "block_size": 4, "qk_norm": "head"},
    "shifted block": {"attention": "block", "block_size": 3, "logit_shift": True},
}


def canvas(rows: int = 1, columns: int = 12, masked: int = 6, seed: int = 0) -> Tensor:
    ids = torch.randint(0, 38, (rows, columns), generator=torch.Generator().manual_seed(seed))
    ids[:, columns - masked :] = MASK
    return ids


def padded(ids: Tensor, pads: int) -> tuple[Tensor, Tensor]:
    """Ids and padding mask with so many pads on the left."""
    front = torch.full((ids.shape[0], pads), 38)
    return torch.cat([front, ids], 1), torch.cat([torch.zeros_like(front), torch.ones_like(ids)], 1)


def run(model: MaskedDiffusionLM, *args: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **inputs).logits


# --- padding


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pads", [1, 3, 4, 7])
def test_padding_on_the_left_changes_nothing(form: str, pads: int):
    model = tiny(**FORMS[form])
    ids, mask = padded(canvas(), pads)
    plain = run(model, canvas())
    assert (run(model, ids, attention_mask=mask)[:, pads:] - plain).abs().max() < 1e-5
    without_positions = run(model, ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None])
    if "block" in form and pads % model.config.block_size:
        assert (without_positions[:, pads:] - plain).abs().max() > 1e-3  # blocks follow positions, not columns


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("origin", ["canvas", "prompt"])
def test_padding_changes_nothing_under_a_block_mask_of_either_origin(form: str, origin: str):
    model = tiny(**FORMS[form])
    block = 4
    plain = run(
        model,
        canvas(),
        attention_mask=block_causal_mask(torch.arange(12)[None], block, None, origin, 6),
    )
    for pads in (1, 4, 6):
        ids, real = padded(canvas(), pads)
        positions = positions_from_padding(real)
        mask = block_causal_mask(positions, block, real, origin, torch.tensor([6]))
        logits = run(model, ids, attention_mask=mask, position_ids=positions)
        assert (logits[:, pads:] - plain).abs().max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_padded_batch_get_the_logits_of_their_single_runs(form: str):
    model = tiny(**FORMS[form])
    long, short = canvas(columns=12, seed=1), canvas(columns=9, seed=2)
    short_padded, mask = padded(short, 3)
    batch = run(
        model, torch.cat([long, short_padded]), attention_mask=torch.cat([torch.ones(1, 12, dtype=torch.long), mask])
    )
    assert (batch[0] - run(model, long)[0]).abs().max() < 1e-5
    assert (batch[1, 3:] - run(model, short)[0]).abs().max() < 1e-5


def test_a_query_that_would_see_nothing_sees_itself():
    model = tiny(qk_norm="head")
    ids = canvas(2)
    nothing = torch.ones(2, 12, dtype=torch.long)
    nothing[0] = 0
    positions = torch.arange(12)[None].expand(2, -1)
    logits = run(model, ids, attention_mask=nothing, position_ids=positions)
    assert logits.isfinite().all()
    alone = torch.eye(12, dtype=torch.bool)[None, None]
    assert (logits[0] - run(model, ids[:1], attention_mask=alone)[0]).abs().max() < 1e-5
    assert (logits[1] - run(model, ids[1:])[0]).abs().max() < 1e-5
    blind = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    blind[..., 5, :] = False
    itself = blind.clone()
    itself[..., 5, 5] = True
    assert torch.equal(run(model, ids, attention_mask=blind), run(model, ids, attention_mask=itself))


# --- masks of four dimensions


def test_a_mask_of_one_query_row_is_a_padding_mask():
    model = tiny()
    ids, mask = padded(canvas(), 3)
    positions = positions_from_padding(mask)
    logits = run(model, ids, attention_mask=mask.bool()[:, None, None], position_ids=positions)
    assert torch.equal(logits, run(model, ids, attention_mask=mask))


def test_a_mask_of_four_dimensions_is_taken_as_it_is_by_a_block_model():
    model = tiny(attention="block", block_size=4)
    full = tiny()
    everything = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    assert torch.equal(run(model, canvas(), attention_mask=everything), run(full, canvas()))


def test_a_mask_that_hides_nothing_costs_nothing():
    model = tiny(logit_shift=True)
    plain = run(model, canvas())
    assert torch.equal(run(model, canvas(), attention_mask=torch.ones(1, 12, dtype=torch.long)), plain)
    assert torch.equal(run(model, canvas(), attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool)), plain)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(1, 11),
        torch.ones(12),
        torch.ones(1, 1, 12, 12),
        torch.ones(1, 1, 12, 11, dtype=torch.bool),
        torch.ones(1, 2, 12, 12, dtype=torch.bool),
        torch.ones(1, 1, 5, 12, dtype=torch.bool),
    ],
)
def test_a_mask_of_another_shape_or_kind_is_refused(mask: Tensor):
    with pytest.raises(InputError, match="attention_mask"):
        run(tiny(), canvas(), attention_mask=mask)


# --- the shift, and which logits


def test_logits_are_aligned():
    """A shifted model's row j is what the unshifted model with the same weights says at j - 1; position 0 keeps its own."""
    raw, aligned = run(tiny(), canvas(2)), run(tiny(logit_shift=True), canvas(2))
    assert torch.equal(aligned[:, 1:], raw[:, :-1])
    assert torch.equal(aligned[:, 0], raw[:, 0])


@pytest.mark.parametrize("form", FORMS)
def test_the_logits_that_are_asked_for_are_those_of_the_canvas(form: str):
    model = tiny(**FORMS[form])
    ids = canvas(3)
    everything = run(model, ids)
    columns = torch.tensor([9, 2, 11, 2])
    assert torch.allclose(run(model, ids, logits_for=columns), everything[:, columns], atol=1e-6)
    chosen = torch.rand(3, 12, generator=torch.Generator().manual_seed(0)) < 0.4
    assert torch.allclose(run(model, ids, logits_for=chosen), everything[chosen], atol=1e-6)
    assert run(model, ids, logits_for=torch.tensor([], dtype=torch.long)).shape == (3, 0, 40)
    assert run(model, ids, logits_for=torch.zeros(3, 12, dtype=torch.bool)).shape == (0, 40)


def test_the_head_runs_only_where_logits_are_asked_for():
    model = tiny(logit_shift=True)
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[-2]))
    run(model, canvas(2), logits_for=torch.tensor([7, 8, 9]))
    run(model, canvas(2), logits_for=torch.zeros(2, 12, dtype=torch.bool).index_fill(1, torch.tensor([6]), True))
    assert widths == [3, 2]


def test_a_masked_first_token_has_no_logits_in_a_shifted_model():
    model = tiny(logit_shift=True)
    ids = canvas()
    ids[0, 0] = MASK
    for wanted in (torch.tensor([0, 5]), torch.tensor([[True] + [False] * 11])):
        with pytest.raises(InputError, match="masked token at position 0"):
            run(model, ids, logits_for=wanted)
    assert run(model, ids, logits_for=torch.tensor([5])).isfinite().all()
    assert run(tiny(), ids, logits_for=torch.tensor([0, 5])).isfinite().all()
    behind_pads, mask = padded(ids, 3)
    with pytest.raises(InputError, match="masked token at position 0"):
        run(model, behind_pads, attention_mask=mask, logits_for=torch.tensor([3]))


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (torch.tensor([12]), "outside the region"),
        (torch.tensor([-1]), "outside the region"),
        (torch.tensor([[1]]), "must be int64"),
        (torch.tensor([1.0]), "must be int64"),
        (torch.zeros(1, 5, dtype=torch.bool), "must be the canvas"),
    ],
)
def test_logits_of_columns_that_are_not_there_are_refused(wanted: Tensor, sentence: str):
    with pytest.raises(InputError, match=sentence):
        run(tiny(), canvas(), logits_for=wanted)


# --- inputs


def test_embeddings_may_take_the_place_of_ids():
    model = tiny(logit_shift=True)
    embeds = model.model.embed_tokens(canvas()).detach()
    assert torch.equal(run(model, inputs_embeds=embeds), run(model, canvas()))
    with pytest.raises(InputError, match="exactly one of input_ids"):
        run(model, canvas(), inputs_embeds=embeds)
    with pytest.raises(InputError, match="exactly one of input_ids"):
        run(model)


def test_a_canvas_longer_than_the_model_is_refused():
    model = tiny(max_position_embeddings=10)
    with pytest.raises(InputError, match="a canvas of 12 columns is longer than the 10 positions"):
        run(model, canvas())
    ids, mask = padded(canvas(columns=9), 3)
    assert run(model, ids, attention_mask=mask).isfinite().all()  # 9 positions and padding
    assert run(model, canvas(), position_ids=torch.arange(12)[None] % 10).isfinite().all()
    with pytest.raises(InputError, match="position_ids must cover the whole canvas of 12"):
        run(tiny(), canvas(), position_ids=torch.arange(11)[None])
    with pytest.raises(InputError, match="in 1 or 2 rows, got the shape"):
        run(tiny(), canvas(2), position_ids=torch.arange(12).expand(3, 12))


def test_a_region_needs_a_cache():
    with pytest.raises(InputError, match="give the cache that holds them"):
        run(tiny(), canvas(), region=(3, 12))
    with pytest.raises(InputError, match="must hold at least one column"):
        run(tiny(), canvas(), region=(3, 13))


# --- what it counts, how it is trained, how it breaks


def test_the_last_hidden_state_feeds_the_head():
    model = tiny(scale_logits=True)
    with torch.no_grad():
        out = model(canvas())
        assert torch.allclose(out.logits, model.lm_head(out.last_hidden_state) / 32**0.5)


def test_calls_tokens_and_keys_are_counted():
    model = tiny()
    run(model, canvas(3))
    run(model, canvas(2), logits_for=torch.tensor([4]))
    assert (model.counters.calls, model.counters.token_forwards, model.counters.kv_columns) == (2, 60, 60)
    model.counters.reset()
    assert (model.counters.calls, model.counters.token_forwards, model.counters.kv_columns) == (0, 0, 0)


def test_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointed in (False, True):
        model = tiny(qk_norm="head").train()
        if checkpointed:
            model.activation_checkpointing_enable()
        ids, mask = padded(canvas(2), 2)
        model(ids, attention_mask=mask).logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))


def test_gradients_of_a_float64_model_match_finite_differences():
    model = tiny(dtype=torch.float64, qk_norm="head", logit_shift=True, rope_full_precision=True)
    ids, mask = padded(canvas(1, 6, 3), 2)
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: model(inputs_embeds=x, attention_mask=mask).logits[:, 2:].logsumexp(-1), (embeds,), fast_mode=True
    )


def test_bfloat16_stays_near_float32():
    for form in FORMS.values():
        exact, rough = run(tiny(**form), canvas()), run(tiny(**form, dtype=torch.bfloat16), canvas())
        assert rough.dtype == torch.bfloat16
        assert (rough - exact).abs().mean() < 0.05 * exact.std()


def test_rotation_in_full_precision_is_the_same_in_float32_only():
    low, full = {"rope_full_precision": False}, {"rope_full_precision": True}
    assert torch.equal(run(tiny(**low), canvas()), run(tiny(**full), canvas()))
    half = torch.bfloat16
    assert not torch.equal(run(tiny(**low, dtype=half), canvas()), run(tiny(**full, dtype=half), canvas()))


@pytest.mark.parametrize(
    ("poison", "name"),
    [
        (lambda model: model.model.embed_tokens.weight[MASK, 3].fill_(torch.nan), "model.embed_tokens"),
        (lambda model: model.model.layers[1].mlp.down_proj.weight[0, 0].fill_(torch.inf), "model.layers.1"),
        (lambda model: model.model.norm.weight[0].fill_(torch.nan), "model.norm"),
        (lambda model: model.lm_head.weight[0, 0].fill_(torch.nan), "lm_head"),
        (lambda model: None, None),
    ],
)
def test_the_first_layer_with_nan_is_named(poison: Any, name: str | None):
    model = tiny()
    with torch.no_grad():
        poison(model)
    cache = model.new_cache(1, 12)
    assert model.first_nonfinite_layer(input_ids=canvas(), cache=cache, write="all") == name
    assert not cache.valid.any()
    assert model.counters.calls == 0
    assert not model.lm_head._forward_hooks


def test_a_saved_model_comes_back_in_half_precision(tmp_path: Path):
    model = tiny(dtype=torch.bfloat16, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    back = MaskedDiffusionLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert torch.equal(run(back, canvas()), run(model, canvas()))
