"""What a cache holds is what the columns had when they were written, to the last digit, and nothing else is read."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from assay._errors import InputError  # noqa: E402
from assay.mdlm import FrozenRegionError, MaskedDiffusionLM, RegionCache, positions_from_padding  # noqa: E402

from .families import _turned  # noqa: E402
from .test_model import FORMS, canvas, padded, run  # noqa: E402
from .tiny import MASK, tiny  # noqa: E402

T = 12


def contents(cache: RegionCache) -> list[Tensor]:
    return [cache.keys.clone(), cache.values.clone(), cache.valid.clone(), cache.version.clone(), cache.frozen.clone()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def filled(model: MaskedDiffusionLM, ids: Tensor, **inputs: Any) -> RegionCache:
    cache = model.new_cache(*ids.shape)
    run(model, ids, cache=cache, **inputs)
    return cache


@pytest.mark.parametrize("form", FORMS)
def test_recomputing_everything_with_a_cache_is_the_same_to_the_last_bit(form: str):
    model = tiny(**FORMS[form])
    cache = model.new_cache(2, T)
    for seed in range(3):
        ids = canvas(2, seed=seed)
        assert torch.equal(run(model, ids, cache=cache, region=(0, T)), run(model, ids))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("region", [(0, 5), (4, 8), (3, 12), (11, 12)])
@pytest.mark.parametrize("pads", [0, 2])
def test_a_cache_read_where_the_canvas_did_not_change_gives_the_same_logits(
    form: str, region: tuple[int, int], pads: int
):
    model = tiny(**FORMS[form])
    ids, mask = padded(canvas(2, T - pads), pads)
    inputs = {"attention_mask": mask} if pads else {}
    everything = run(model, ids, **inputs)
    cache = filled(model, ids, **inputs)
    before = contents(cache)
    for write in ("none", "all"):
        logits = run(model, ids, cache=cache, region=region, write=write, **inputs)
        assert (logits - everything[:, slice(*region)]).abs().max() < 1e-5
    assert all(torch.allclose(x.float(), y.float(), atol=1e-5) for x, y in zip(contents(cache), before))


def test_a_block_model_is_exact_under_its_cache_at_any_canvas():
    """Blocks written once stay true whatever follows them: prefill, denoise without writing, then write the clean block."""
    model = tiny(attention="block", block_size=4, qk_norm="head")
    cache = model.new_cache(2, T)
    ids = canvas(2, masked=8)
    run(model, ids, cache=cache, region=(0, 4), see=(0, 4))
    for start in (4, 8):
        for step in range(3):
            ids[:, start + step] = 5 + step
            logits = run(model, ids, cache=cache, region=(start, start + 4), see=(0, start + 4), write="none")
            assert (logits - run(model, ids)[:, start : start + 4]).abs().max() < 1e-5
        ids[:, start + 3] = 9
        run(model, ids, cache=cache, region=(start, start + 4), see=(0, start + 4))
    assert cache.valid.all()


@pytest.mark.parametrize("qk_norm", [None, "head"])
@pytest.mark.parametrize("widened", [False, True])
def test_stale_columns_serve_the_keys_that_they_had_before_the_rotation(qk_norm: str | None, widened: bool):
    """A brute-force forward that keeps keys as they were before the rotation, and turns them when they are read."""
    model = tiny(qk_norm=qk_norm, num_key_value_heads=4, dtype=torch.float64, logit_shift=widened)
    attention = [layer.self_attn for layer in model.model.layers]
    old, new = canvas(1, seed=1), canvas(1, seed=2)
    region = (5, 9)
    computed = (4, 9) if widened else region
    cache = filled(model, old)
    logits = run(model, new, cache=cache, region=region, write="none")

    def unrotated(x: Tensor, part: Any) -> tuple[Tensor, Tensor, Tensor]:
        def heads(y: Tensor, norm: Any) -> Tensor:
            y = y.unflatten(-1, (4, 8))
            return norm(y) if norm is not None else y

        return heads(part.q_proj(x), part.q_norm), heads(part.k_proj(x), part.k_norm), heads(part.v_proj(x), None)

    with torch.no_grad():
        stored: list[tuple[Tensor, Tensor]] = []
        for ids, columns in ((old, (0, T)), (new, computed)):
            x = model.model.embed_tokens(ids[0, slice(*columns)])
            for index, layer in enumerate(model.model.layers):
                q, k, v = unrotated(layer.input_layernorm(x), attention[index])
                if ids is old:
                    stored.append((k.clone(), v.clone()))
                    keys, values = k, v
                else:
                    keys, values = stored[index][0].clone(), stored[index][1].clone()
                    keys[slice(*columns)], values[slice(*columns)] = k, v
                outs = []
                for h in range(4):
                    lead = torch.zeros(columns[0], 8, dtype=torch.float64)
                    query = _turned(torch.cat([lead, q[:, h]]), 10000.0)[columns[0] :]
                    scores = query @ _turned(keys[:, h], 10000.0).T / math.sqrt(8)
                    outs.append(scores.softmax(-1) @ values[:, h])
                x = x + attention[index].o_proj(torch.cat(outs, 1))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        expected = model.lm_head(model.model.norm(x))
    assert (logits[0] - (expected[:-1] if widened else expected)).abs().max() < 1e-5
    assert (logits - run(model, new)[:, 5:9]).abs().max() > 0.01  # what was read is stale


# --- the shift


def test_a_region_of_a_shifted_model_gives_the_aligned_logits_of_its_first_column():
    model = tiny(logit_shift=True)
    ids = canvas(2)
    cache = filled(model, ids)
    everything = run(model, ids)
    model.counters.reset()
    first = run(model, ids, cache=cache, region=(6, 9), logits_for=torch.tensor([6]), write="none")
    assert (first - everything[:, [6]]).abs().max() < 1e-5
    assert (model.counters.token_forwards, model.counters.kv_columns) == (2 * 4, 2 * T)  # column 5 was computed too
    run(model, ids, cache=cache, region=(6, 9), logits_for=torch.tensor([7, 8]), write="none")
    assert model.counters.token_forwards == 2 * (4 + 3)
    chosen = torch.zeros(2, T, dtype=torch.bool)
    chosen[1, 6] = chosen[0, 8] = True
    both = run(model, ids, cache=cache, region=(6, 9), logits_for=chosen, write="none")
    assert (both - everything[chosen]).abs().max() < 1e-5
    assert model.counters.token_forwards == 2 * (4 + 3 + 4)
    with torch.no_grad():
        out = model(ids, cache=cache, region=(6, 9), write="none")
    assert (out.logits.shape[1], out.last_hidden_state.shape[1]) == (3, 3)


def test_the_column_that_a_shifted_model_adds_is_never_written():
    model = tiny(logit_shift=True)
    old, new = canvas(1, seed=1), canvas(1, seed=2)
    cache = filled(model, old)
    cache.freeze(0, 6)
    before = contents(cache)
    cache.step = 7
    logits = run(model, new, cache=cache, region=(6, 9))
    assert torch.equal(cache.keys[:, :, :, :6], before[0][:, :, :, :6])
    assert torch.equal(cache.values[:, :, :, :6], before[1][:, :, :, :6])
    assert not torch.equal(cache.keys[:, :, :, 6:9], before[0][:, :, :, 6:9])
    assert cache.version.tolist() == [0] * 6 + [7] * 3 + [0] * 3
    # Column 5 took part with fresh keys: the row of column 6 is not that of a stale column 5.
    stale = run(model, torch.cat([old[:, :6], new[:, 6:]], 1), cache=cache, region=(6, 9), write="none")
    assert (stale[:, 0] - logits[:, 0]).abs().max() > 1e-3


def test_the_added_column_is_seen_even_where_it_was_never_written():
    model = tiny(logit_shift=True)
    cache = model.new_cache(1, T)
    run(model, canvas(), cache=cache, region=(6, 9))
    assert cache.valid.tolist() == [False] * 6 + [True] * 3 + [False] * 3
    assert model.counters.kv_columns == 4


# --- writing


def test_nothing_is_written_unless_it_is_asked():
    model = tiny()
    old, new = canvas(2, seed=1), canvas(2, seed=2)
    cache = filled(model, old)
    before = contents(cache)
    cache.step = 3
    run(model, new, cache=cache, region=(4, 9), write="none")
    assert same(contents(cache), before)
    run(model, new, cache=cache, region=(4, 9), write=(5, 7))
    assert cache.version.tolist() == [0] * 5 + [3] * 2 + [0] * 5
    for held, kept in ((cache.keys, before[0]), (cache.values, before[1])):
        changed = (held != kept).any(-1).any(2).any(1).any(0)
        assert changed.tolist() == [False] * 5 + [True] * 2 + [False] * 5
    fresh = model.new_cache(2, T)
    run(model, new, cache=fresh, region=(4, 9), write=(5, 7))
    assert fresh.valid.tolist() == [False] * 5 + [True] * 2 + [False] * 5


@pytest.mark.parametrize("write", ["all", "none", (5, 7), (4, 6), (7, 9), (6, 6)])
def test_the_logits_of_a_call_do_not_depend_on_what_it_writes(write: Any):
    model = tiny(logit_shift=True)
    old, new = canvas(2, seed=1), canvas(2, seed=2)
    expected = run(model, new, cache=filled(model, old), region=(4, 9))
    assert torch.equal(run(model, new, cache=filled(model, old), region=(4, 9), write=write), expected)


def test_attention_reads_the_cache_itself():
    """No copy of the cached keys: what attention gets is a slice of the one buffer."""
    model = tiny()
    cache = filled(model, canvas())
    attention = model.model.layers[1].self_attn
    attend, places = attention._attend, []
    attention._attend = lambda q, k, v, mask: places.append((k.data_ptr(), v.data_ptr())) or attend(q, k, v, mask)
    run(model, canvas(), cache=cache, region=(4, 9), write="none")
    assert places == [(cache.keys[1].data_ptr(), cache.values[1].data_ptr())]


def test_a_forward_that_fails_halfway_leaves_no_column_that_counts():
    model = tiny()
    cache = filled(model, canvas(seed=1))
    before = contents(cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, canvas(seed=2), cache=cache, region=(4, 9), write="none")
    assert same(contents(cache), before)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, canvas(seed=2), cache=cache, region=(4, 9))
    handle.remove()
    assert cache.valid.tolist() == [True] * 4 + [False] * 5 + [True] * 3


# --- what is seen


def test_columns_outside_see_are_not_attended():
    model = tiny(logit_shift=True)
    ids = canvas(2)
    cache = filled(model, ids, region=(0, T))
    ended = run(model, ids, cache=cache, region=(0, 9), see=(0, 9), write="none")
    assert (ended - run(model, ids[:, :9])).abs().max() < 1e-5
    model.counters.reset()
    run(model, ids, cache=cache, region=(5, 9), see=(2, 10), write="none")
    assert model.counters.kv_columns == 2 * 8
    keys = torch.zeros(1, 1, 1, T, dtype=torch.bool)
    keys[..., 2:10] = True
    masked = run(model, ids, cache=cache, region=(5, 9), attention_mask=keys, write="none")
    seen = run(model, ids, cache=cache, region=(5, 9), see=(2, 10), write="none")
    assert (masked - seen).abs().max() < 1e-5
    for see in ((6, 12), (0, 8), (0, 13)):
        with pytest.raises(InputError, match="must contain the region"):
            run(model, ids, cache=cache, region=(5, 9), see=see)


def test_columns_that_were_never_written_are_not_attended():
    model = tiny()
    ids = canvas(2)
    cache = model.new_cache(2, T)
    cache.keys.fill_(1e4)  # what lies there must not matter
    cache.values.fill_(1e4)
    run(model, ids, cache=cache, region=(0, 3), see=(0, 3))
    run(model, ids, cache=cache, region=(9, 12), see=(9, 12))
    model.counters.reset()
    holes = run(model, ids, cache=cache, region=(4, 6), write="none")
    assert model.counters.kv_columns == 2 * 8
    short = model.new_cache(2, T)
    short.keys.copy_(cache.keys.nan_to_num(0) * (cache.valid[:, None]))
    short.values.copy_(cache.values * (cache.valid[:, None]))
    short.valid.fill_(True)
    keys = cache.valid.clone()
    keys[4:6] = True
    masked = run(model, ids, cache=short, region=(4, 6), attention_mask=keys[None, None, None], write="none")
    assert (holes - masked).abs().max() < 1e-5
    cache.trim(9)
    assert cache.valid.tolist() == [True] * 3 + [False] * 9
    model.counters.reset()
    run(model, ids, cache=cache, region=(4, 6), write="none")
    assert model.counters.kv_columns == 2 * 5


def test_a_mask_of_region_rows_is_that_of_the_canvas():
    model = tiny()
    ids = canvas(2)
    cache = filled(model, ids)
    mask = torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(0)) < 0.7
    whole = run(model, ids, cache=cache, region=(4, 9), attention_mask=mask, write="none")
    rows = run(model, ids, cache=cache, region=(4, 9), attention_mask=mask[:, :, 4:9], write="none")
    assert torch.equal(whole, rows)
    shifted = tiny(logit_shift=True)
    with pytest.raises(InputError, match="adds one: give"):
        run(shifted, ids, cache=filled(shifted, ids), region=(4, 9), attention_mask=mask[:, :, 4:9])


def test_padding_and_positions_are_sliced_for_a_region():
    model = tiny(logit_shift=True)
    long, short = canvas(1, 12, seed=1), canvas(1, 9, seed=2)
    short_padded, mask = padded(short, 3)
    ids, mask = torch.cat([long, short_padded]), torch.cat([torch.ones(1, 12, dtype=torch.long), mask])
    inputs = {"attention_mask": mask, "position_ids": positions_from_padding(mask)}
    cache = filled(model, ids, **inputs)
    logits = run(model, ids, cache=cache, region=(7, 11), **inputs)
    assert (logits[0] - run(model, long)[0, 7:11]).abs().max() < 1e-5
    assert (logits[1] - run(model, short)[0, 4:8]).abs().max() < 1e-5


# --- freezing, and what is refused


def test_a_frozen_column_is_not_written_and_the_error_comes_before_any_change():
    model = tiny()
    cache = filled(model, canvas(seed=1))
    cache.freeze(2, 5)
    before = contents(cache)
    calls = model.counters.calls
    with pytest.raises(FrozenRegionError, match=r"write \[4, 9\) would change column 4, which is frozen"):
        run(model, canvas(seed=2), cache=cache, region=(4, 9))
    with pytest.raises(FrozenRegionError, match="column 2"):
        run(model, canvas(seed=2), cache=cache)
    assert same(contents(cache), before)
    assert model.counters.calls == calls
    run(model, canvas(seed=2), cache=cache, region=(4, 9), write="none")
    assert same(contents(cache), before)
    run(model, canvas(seed=2), cache=cache, region=(4, 9), write=(5, 9))
    cache.trim(3)
    assert cache.frozen.tolist() == [False] * 2 + [True] + [False] * 9
    with pytest.raises(InputError, match=r"columns \[2, 5\) cannot be frozen before all of them are written"):
        cache.freeze(2, 5)


def test_a_cache_that_does_not_fit_is_refused():
    model, ids = tiny(), canvas(2)
    for cache in (
        model.new_cache(1, T),
        model.new_cache(2, T - 1),
        RegionCache(3, 2, T, 2, 8),
        RegionCache(2, 2, T, 4, 8),
    ):
        with pytest.raises(InputError, match="does not fit this model and a canvas of 2 x 12"):
            run(model, ids, cache=cache)
    with pytest.raises(InputError, match=r"the cache is torch\.bfloat16 on cpu, the model torch\.float32 on cpu"):
        run(model, ids, cache=tiny(dtype=torch.bfloat16).new_cache(2, T))
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        model(ids, cache=model.new_cache(2, T))
    with pytest.raises(InputError, match=r"write \[2, 9\) does not lie in region \[4, 9\)"):
        run(model, ids, cache=filled(model, ids), region=(4, 9), write=(2, 9))
    with pytest.raises(InputError, match="every size must be at least 1"):
        RegionCache(2, 0, T, 2, 8)
    with pytest.raises(InputError, match="does not lie in the cache of 12 columns"):
        model.new_cache(2, T).trim(13)


def test_a_cache_tells_its_memory():
    cache = RegionCache(2, 3, T, 2, 8, dtype=torch.bfloat16)
    assert cache.bytes() == 2 * (2 * 3 * T * 2 * 8) * 2
    assert (cache.batch, cache.max_len) == (3, T)
    assert MASK not in cache.version


# --- some rows of a cache


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("write", ["all", "none", (5, 7)])
def test_selected_rows_are_read_and_written_where_they_lie(form: str, write: Any):
    model = tiny(**FORMS[form])
    ids = canvas(3)
    whole, rows = filled(model, ids), torch.tensor([2, 0])
    alone = model.new_cache(2, T)
    run(model, ids[rows], cache=alone)
    untouched = whole.keys[:, 1].clone()
    held = whole.keys.data_ptr()
    new = canvas(3, seed=9)
    part = whole.select(rows)
    assert part.batch == 2
    expected = run(model, new[rows], cache=alone, region=(4, 8), write=write)
    assert torch.equal(run(model, new[rows], cache=part, region=(4, 8), write=write), expected)
    for mine, theirs in ((whole.keys, alone.keys), (whole.values, alone.values)):
        assert torch.allclose(mine[:, rows], theirs, atol=1e-6)
    assert torch.equal(whole.keys[:, 1], untouched)
    assert whole.keys.data_ptr() == held
    assert whole.select(torch.tensor([1, 2])).select(torch.tensor([1]))._rows.tolist() == [2]


def test_rows_that_are_not_kept_free_their_memory():
    model, ids = tiny(), canvas(3)
    cache = filled(model, ids)
    kept, size = cache.keys[:, [2, 0]].clone(), cache.bytes()
    cache.keep(torch.tensor([2, 0]))
    assert torch.equal(cache.keys, kept)
    assert (cache.batch, cache.bytes()) == (2, size * 2 // 3)
