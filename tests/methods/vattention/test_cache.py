"""The growing caches hold what transformers' own would, and copy nothing at most steps."""

import pytest
import torch
from transformers import DynamicCache, MistralConfig

from assay.methods.vattention import GrowingKVCache, OffloadedKVCache


def _states(n, seed=0, batch=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, n, 8, generator=g), torch.randn(batch, 2, n, 8, generator=g)


@pytest.mark.parametrize("kind", [GrowingKVCache, OffloadedKVCache])
def test_it_holds_what_a_dynamic_cache_holds(kind):
    mine, theirs = kind(), DynamicCache()
    for step, n in enumerate((100, 1, 1, 30, 200, 1)):
        for layer in (0, 1):
            states = _states(n, seed=10 * step + layer)
            for a, b in zip(mine.update(*states, layer), theirs.update(*states, layer), strict=True):
                assert torch.equal(a, b)
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert mine.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)
    order = torch.tensor([1, 1])
    for cache in (mine, theirs):
        cache.reorder_cache(order)
        cache.crop(-20)
    for layer in (0, 1):
        states = _states(2, seed=99)
        for a, b in zip(mine.update(*states, layer), theirs.update(*states, layer), strict=True):
            assert torch.equal(a, b)
    for cache in (mine, theirs):
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 2]))
    states = _states(1, seed=5, batch=3)
    for a, b in zip(mine.update(*states, 0), theirs.update(*states, 0), strict=True):
        assert torch.equal(a, b)


def test_a_step_writes_in_place():
    cache = GrowingKVCache()
    cache.update(*_states(100), 0)
    first, _ = cache.update(*_states(1, seed=1), 0)
    where = first.data_ptr()
    for step in range(60):
        keys, values = cache.update(*_states(1, seed=step), 0)
    assert keys.data_ptr() == where
    assert keys.shape[2] == values.shape[2] == 161
    cache.update(*_states(10), 0)  # full: the buffer doubles
    keys, _ = cache.update(*_states(1), 0)
    assert keys.data_ptr() != where
    assert keys.stride(1) == 8 * 2 * 164
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].keys.data_ptr() == keys.data_ptr()


def test_a_view_that_was_handed_out_stays_as_it_was():
    cache = GrowingKVCache()
    keys, _ = cache.update(*_states(10), 0)
    copy = keys.clone()
    for step in range(200):
        cache.update(*_states(1, seed=step), 0)
    assert torch.equal(keys, copy)


def test_reset_and_reuse():
    cache = GrowingKVCache()
    cache.update(*_states(10), 0)
    cache.reset()
    assert cache.get_seq_length() == 0
    keys, _ = cache.update(*_states(4, batch=1), 0)
    assert keys.shape == (1, 2, 4, 8)


def test_crop_takes_a_negative_number():
    cache = GrowingKVCache()
    cache.update(*_states(10), 0)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(5)
    cache.crop(-30)
    assert cache.get_seq_length() == 0


def test_layers_with_a_sliding_window_stay_transformers_own():
    config = MistralConfig(
        num_hidden_layers=2, sliding_window=16, hidden_size=32, num_attention_heads=2, num_key_value_heads=2
    )
    cache = GrowingKVCache(config)
    assert [layer.is_sliding for layer in cache.layers] == [True, True]


def test_an_offloaded_prefill_gets_back_what_it_brought():
    cache = OffloadedKVCache()
    k, v = _states(20)
    assert cache.update(k, v, 0)[0] is k
    keys, _ = cache.update(*_states(1, seed=3), 0)
    assert keys.device.type == "cpu"
    assert torch.equal(keys[:, :, :20], k)


@pytest.mark.parametrize("change", ["batch", "dtype"])
def test_what_does_not_fit_is_not_spread_over_the_buffer(change):
    cache = GrowingKVCache()
    cache.update(*_states(5), 0)
    k, v = _states(1, batch=1) if change == "batch" else (x.double() for x in _states(1))
    with pytest.raises(ValueError, match="use a new cache"):
        cache.update(k, v, 0)
    assert cache.get_seq_length() == 5


def test_a_cache_made_in_inference_mode_goes_on_outside_of_it():
    cache, like = GrowingKVCache(), DynamicCache()
    for c in (cache, like):
        with torch.inference_mode():
            c.update(*_states(5), 0)
        c.update(*_states(1, seed=1), 0)
        c.reorder_cache(torch.tensor([1, 0]))
        c.update(*_states(1, seed=2), 0)
    assert torch.equal(cache.layers[0].keys, like.layers[0].keys)
    assert torch.equal(cache.layers[0].values, like.layers[0].values)


def test_keys_may_be_replaced_by_a_part_of_themselves():
    cache = GrowingKVCache()
    cache.update(*_states(40), 0)
    layer = cache.layers[0]
    want = layer.keys[:, :, 3:].clone()
    layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
    assert torch.equal(layer.keys, want)
    assert layer.values.shape[2] == 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_buffers_hold_what_small_ones_hold(dtype, monkeypatch):
    from assay.methods.vattention import _cache

    g = torch.Generator().manual_seed(3)
    parts = [torch.randn(1, 2, n, 8, generator=g).to(dtype) for n in (50, 1, 120, 1)]
    for least in (1, 2**40):  # every buffer in large pages, none
        monkeypatch.setattr(_cache, "LARGE", least)
        cache = GrowingKVCache()
        for part in parts:
            k, v = cache.update(part, -part, 0)
        assert torch.equal(k, torch.cat(parts, 2))
        assert torch.equal(v, -torch.cat(parts, 2))
        cache.crop(-100)
        k, _ = cache.update(parts[1], parts[1], 0)
        assert torch.equal(k, torch.cat([torch.cat(parts, 2)[:, :, :72], parts[1]], 2))
