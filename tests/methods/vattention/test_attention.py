"""One step: exact where it must be, unbiased where it samples, and it reads what it says and nothing else."""

import inspect
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from assay.methods.vattention import IndexSets, SimHashIndex, VAttentionConfig, vattention
from assay.methods.vattention._attention import Rows, Sizes, fixed_ranks
from assay.methods.vattention._indices import group_scores, make_index
from assay.methods.vattention._sampling import PAD, draw_distinct, row_keys
from assay.methods.vattention.reference import reference_row

SMALL = VAttentionConfig(sink=4, local=6, heavy=0.05, min_pilot=20, min_keys=0)


def make(b=1, h=4, hkv=2, t=1, n=300, d=16, dtype=torch.float32, seed=0, sharp=1.5):
    g = torch.Generator().manual_seed(seed)
    q = sharp * torch.randn(b, h, t, d, generator=g)
    k, v = (torch.randn(b, hkv, n, d, generator=g) for _ in "kv")
    return q.to(dtype), k.to(dtype), v.to(dtype)


def unchecked(**values):
    """A configuration below the run-time check of types."""
    config = object.__new__(VAttentionConfig)
    for field in fields(VAttentionConfig):
        object.__setattr__(config, field.name, values.get(field.name, field.default))
    config.__post_init__()
    return config


def causal(t, n):
    return torch.arange(n) < torch.arange(n - t + 1, n + 1)[:, None]


def padded(b, t, n, left):
    mask = causal(t, n).expand(b, 1, t, n).clone()
    for row, pad in enumerate(left):
        mask[row, ..., :pad] = False
    return mask


def holes(b, t, n):
    mask = causal(t, n).expand(b, 1, t, n).clone()
    mask[..., 50:90:3] = False
    mask[..., :7] = False
    return mask


# Exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("masked", ["none", "padded", "additive"])
@pytest.mark.parametrize("how", [{"eps": 1e-6}, {"budget": 1.0}, {"heavy": 1.0}, {"guarantee": "output", "eps": 1e-6}])
def test_reading_everything_is_dense_attention(path, t, masked, how):
    q, k, v = make(b=2, t=t)
    mask = None if masked == "none" else padded(2, t, 300, (0, 40))
    truth = scaled_dot_product_attention(q, k, v, attn_mask=causal(t, 300) if mask is None else mask, enable_gqa=True)
    if masked == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out = vattention(q, k, v, config=replace(SMALL, **how), attn_mask=mask, path=path)
    torch.testing.assert_close(out.out, truth, rtol=1e-5, atol=1e-5)
    assert (out.density == 1).all()
    assert out.path == path


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_other_dtypes_are_computed_in_float32_or_wider(dtype, tol):
    q, k, v = make(dtype=dtype, t=5)
    out = vattention(q, k, v, config=replace(SMALL, budget=1.0)).out
    assert out.dtype == dtype
    truth = scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=causal(5, 300), enable_gqa=True)
    torch.testing.assert_close(out.double(), truth, rtol=tol, atol=tol)


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_where_the_heavy_keys_are_all_keys_nothing_is_sampled(path):
    q, k, v = make()
    out = vattention(q, k, v, config=replace(SMALL, heavy=1.0), path=path)
    assert (out.budget == 0).all()
    assert (out.n_det == 300).all()


def test_masks_with_holes_and_biases_are_kept():
    q, k, v = make(b=2, t=3)
    config = replace(SMALL, budget=1.0)
    mask = holes(2, 3, 300)
    truth = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(vattention(q, k, v, config=config, attn_mask=mask).out, truth, rtol=1e-5, atol=1e-5)
    bias = torch.randn(2, 4, 3, 300).masked_fill(~mask, torch.finfo(torch.float32).min)
    truth = scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(vattention(q, k, v, config=config, attn_mask=bias).out, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "n"), [(65, 300), (40, 40)])
def test_a_prefill_is_dense(queries, n):
    q, k, v = make(t=queries, n=n)
    out = vattention(q, k, v, config=SMALL)
    assert (out.density == 1).all()
    torch.testing.assert_close(
        out.out,
        scaled_dot_product_attention(q, k, v, attn_mask=causal(queries, n), enable_gqa=True),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_min_keys_counts_the_keys_that_a_row_sees(path):
    q, k, v = make(b=2)
    out = vattention(
        q, k, v, config=replace(SMALL, min_keys=280, budget=0.2), attn_mask=padded(2, 1, 300, (0, 40)), path=path
    )
    assert (out.density[0] < 1).all()
    assert (out.density[1] == 1).all()


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_a_row_that_sees_nothing_is_zero_and_warned_about(path):
    q, k, v = make(b=2)
    mask = padded(2, 1, 300, (0, 300))
    with pytest.warns(UserWarning, match="hides every key"):
        out = vattention(q, k, v, config=replace(SMALL, audit=True), attn_mask=mask, path=path)
    assert (out.out[1] == 0).all()
    assert (out.density[1] == 0).all()
    assert out.out[0].isfinite().all()


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("guarantee", ["denominator", "output"])
def test_equal_scores_need_no_more_than_the_pilot(path, guarantee):
    q, k, v = make()
    v = torch.ones_like(v)
    out = vattention(torch.zeros_like(q), k, v, config=replace(SMALL, guarantee=guarantee), path=path)
    assert (out.budget == 20).all()  # sigma = 0
    torch.testing.assert_close(out.out, v[:, :1, :1].expand_as(out.out))


# What is read -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_what_is_read_is_visible_distinct_and_of_the_size_that_is_told(data):
    t, n = data.draw(st.integers(1, 4)), data.draw(st.integers(30, 200))
    q, k, v = make(b=2, t=t, n=n, seed=data.draw(st.integers(0, 99)))
    mask = data.draw(st.sampled_from([None, padded(2, t, n, (0, n // 3)), "holes"]))
    if mask == "holes":
        mask = causal(t, n).expand(2, 1, t, n) & (torch.rand(2, 1, t, n) < 0.7)
        mask[..., n - t] = True
    config = VAttentionConfig(
        sink=data.draw(st.sampled_from([0, 3, 0.05])),
        local=data.draw(st.sampled_from([0, 4, 0.1])),
        heavy=data.draw(st.sampled_from([0, 5, 0.1])),
        pilot=data.draw(st.sampled_from([0.0, 0.1, 30])),
        min_pilot=data.draw(st.sampled_from([2, 20])),
        guarantee=data.draw(st.sampled_from(["denominator", "output"])),
        eps=data.draw(st.sampled_from([0.05, 0.3])),
        reuse_pilot=data.draw(st.booleans()),
        share_group=data.draw(st.booleans()),
        min_keys=0,
        audit=True,
    )
    out = vattention(q, k, v, config=config, attn_mask=mask)
    visible = (causal(t, n) if mask is None else mask).expand(2, 4, t, n).reshape(-1, n)
    assert out.sets is not None
    for row, sets in enumerate(out.sets):
        count = int(visible[row].sum())
        parts = [sets.fixed.tolist(), sets.pilot.tolist(), sets.further.tolist()]
        assert all(visible[row, i] for part in parts for i in part)
        assert all(len(part) == len(set(part)) for part in parts)
        assert not set(parts[0]) & set(parts[1] + parts[2])
        if config.reuse_pilot:
            assert not set(parts[1]) & set(parts[2])
        assert len(parts[0]) == out.n_det.view(-1)[row]
        sampled = parts[2] + (parts[1] if config.reuse_pilot else [])
        assert len(sampled) == out.budget.view(-1)[row]
        assert len(set().union(*parts)) == pytest.approx(out.density.view(-1)[row].item() * count)
        assert int(visible[row].nonzero().max()) in parts[0]  # the newest key


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("guarantee", ["denominator", "output"])
@pytest.mark.parametrize("t", [1, 3])
def test_nothing_else_is_read(path, reuse, guarantee, t):
    q, k, v = make(b=2, t=t, n=600)
    config = replace(
        SMALL, guarantee=guarantee, eps=0.4 if guarantee == "denominator" else 0.9, reuse_pilot=reuse, audit=True
    )
    mask = padded(2, t, 600, (0, 100))
    index = make_index(config)
    index.build(k)
    first = vattention(q, k, v, config=config, attn_mask=mask, index_state=index, path=path)
    assert first.indices is not None
    keep = torch.zeros(2, 2, 600, dtype=torch.bool)
    for row, read in enumerate(first.indices):
        keep[row // (4 * t), row // t % 4 // 2, read] = True
    assert keep.float().mean() < 0.9
    k2, v2 = k.masked_fill(~keep[..., None], torch.nan), v.masked_fill(~keep[..., None], torch.nan)
    again = vattention(q, k2, v2, config=replace(config, audit=False), attn_mask=mask, index_state=index, path=path)
    assert torch.equal(first.out, again.out)
    assert again.out.isfinite().all()
    for row, sets in enumerate(first.sets or []):
        total = (
            len(sets.fixed)
            + len(sets.further)
            + (len(sets.pilot) if reuse else len(set(sets.pilot.tolist()) - set(sets.further.tolist())))
        )
        assert len(first.indices[row]) == total


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"guarantee": "output", "eps": 0.3},
        {"guarantee": "output", "eps": 0.3, "optimize_delta": True},
        {"guarantee": "output", "eps": 0.6, "tight": False},
        {"tail": "one", "fpc": True},
        {"reuse_pilot": False},
        {"index": "oracle"},
        {"budget": 0.2},
        {"budget": 25},
        {"heavy": 0},
    ],
)
@pytest.mark.parametrize("t", [1, 4])
def test_both_paths_read_the_same_keys_and_agree(more, t):
    q, k, v = make(b=2, t=t, n=700, hkv=1)
    config = replace(SMALL, audit=True, **more)
    mask = padded(2, t, 700, (0, 90))
    one, two = (vattention(q, k, v, config=config, attn_mask=mask, path=path) for path in ("kernel", "torch"))
    torch.testing.assert_close(one.out, two.out, rtol=1e-5, atol=1e-5)
    for a, b in zip(one.sets or [], two.sets or [], strict=True):
        assert torch.equal(a.fixed, b.fixed)
        assert torch.equal(a.pilot, b.pilot)
        assert torch.equal(a.further, b.further)
    for name in ("density", "budget", "n_det"):
        assert torch.equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"guarantee": "output", "eps": 0.4},
        {"guarantee": "output", "eps": 0.7, "tight": False, "fpc": False},
        {"tail": "one", "fpc": True, "reuse_pilot": False},
    ],
)
def test_a_step_is_the_dense_arithmetic_on_the_same_sets(path, more):
    q, k, v = make(b=2, t=3, n=500)
    config = replace(SMALL, audit=True, **more)
    mask = padded(2, 3, 500, (0, 60))
    out = vattention(q, k, v, config=config, attn_mask=mask, path=path)
    sets = out.sets or []
    given = vattention(q, k, v, config=config, attn_mask=mask, path=path, index_sets=sets)
    torch.testing.assert_close(given.out, out.out, rtol=1e-5, atol=1e-6)
    for row, s in enumerate(sets):
        b, h, t = row // 12, row // 3 % 4, row % 3
        want = reference_row(q[b, h, t], k[b, h // 2], v[b, h // 2], mask[b, 0, t], s, config)
        torch.testing.assert_close(out.out[b, h, t].double(), want.out, rtol=1e-4, atol=1e-5)
        assert abs(out.budget[b, h, t].item() - want.budget) <= 1  # float32 against float64, rounded up


def test_sharing_a_group_shares_keys_and_takes_the_largest_budget():
    q, k, v = make(n=600)
    config = replace(SMALL, eps=0.2, audit=True)
    alone = vattention(q, k, v, config=config)
    shared = vattention(q, k, v, config=replace(config, share_group=True))
    sets = shared.sets or []
    for group in (0, 2):
        assert torch.equal(sets[group].union, sets[group + 1].union)
        both = torch.cat([(alone.sets or [])[group].fixed, (alone.sets or [])[group + 1].fixed]).unique()
        assert torch.equal(sets[group].fixed, both)
        assert shared.budget[0, group] == shared.budget[0, group + 1]
    for h, s in enumerate(sets):
        want = reference_row(q[0, h, 0], k[0, h // 2], v[0, h // 2], torch.ones(600, dtype=torch.bool), s, config)
        torch.testing.assert_close(shared.out[0, h, 0].double(), want.out, rtol=1e-4, atol=1e-5)


def test_keys_are_read_through_the_strides_of_any_cache():
    q, k, v = make(b=2)
    buffer_k, buffer_v = torch.full((2, 2, 1024, 16), torch.nan), torch.full((2, 2, 1024, 16), torch.nan)
    buffer_k[:, :, :300], buffer_v[:, :, :300] = k, v
    packed = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 3)  # (b, n, heads, 2, d)
    want = vattention(q, k, v, config=SMALL)
    for a, b in (
        (buffer_k[:, :, :300], buffer_v[:, :, :300]),
        (packed[:, :, :, 0].transpose(1, 2), packed[:, :, :, 1].transpose(1, 2)),
    ):
        got = vattention(q, a, b, config=SMALL)
        assert got.path == "kernel"
        assert torch.equal(got.out, want.out)


# Sampling ---------------------------------------------------------------------------------------------------------


def test_numerator_and_denominator_are_unbiased_with_the_known_variance():
    _, k, v = make(n=120, h=1, hkv=1, d=4)
    q = torch.randn(4, generator=torch.Generator().manual_seed(5))
    w = (k[0, 0] @ q / 2).exp().double()
    fixed, draws, b = torch.arange(10), 20_000, 15
    keys = row_keys(0, 0, torch.arange(draws), torch.zeros(draws, dtype=torch.int64), torch.full((draws,), 120))
    taken = fixed.expand(draws, -1).contiguous()
    sample = draw_distinct(keys, torch.full((draws,), 120), taken, torch.full((draws,), b))
    d_hat = w[:10].sum() + 110 / b * w[sample].sum(1)
    terms = w[:, None] * v[0, 0].double()
    n_hat = terms[:10].sum(0) + 110 / b * terms[sample].sum(1)
    assert abs(d_hat.mean() - w.sum()) < 4 * d_hat.std() / math.sqrt(draws)
    assert ((n_hat.mean(0) - terms.sum(0)).abs() < 4 * n_hat.std(0) / math.sqrt(draws)).all()
    expected = 110**2 * w[10:].var() / b * (1 - b / 110)
    assert d_hat.var() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_the_denominator_is_missed_less_often_than_promised(path):
    q, k, v = make(b=1, h=32, hkv=1, t=32, n=2000, d=16, sharp=1.0, seed=3)
    config = VAttentionConfig(sink=4, local=4, heavy=0.02, eps=0.1, delta=0.1, min_keys=0, audit=True)
    index = make_index(config)
    index.build(k)
    out = vattention(q, k, v, config=config, index_state=index, path=path)
    w = (q.double() @ k.double().transpose(2, 3) / 4).exp().reshape(-1, 2000)
    missed = []
    for row, s in enumerate(out.sets or []):
        seen = w[row, : 2000 - 31 + row % 32]
        sample = torch.cat([s.pilot, s.further])
        estimate = seen[s.fixed].sum() + (len(seen) - len(s.fixed)) * seen[sample].mean()
        missed.append(abs(estimate - seen.sum()) > 0.1 * seen.sum())
    assert 0 < sum(missed) / len(missed) <= 0.1
    assert out.density.mean() < 0.5


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_the_same_seed_draws_the_same_keys_and_heads_draw_different_ones(path):
    q, k, v = make(n=600)
    q = q[:, :1].expand(-1, 4, -1, -1)
    k, v = k[:, :1].expand(-1, 2, -1, -1).contiguous(), v[:, :1].expand(-1, 2, -1, -1).contiguous()
    config = replace(SMALL, index="oracle", audit=True)
    one, same, other = (vattention(q, k, v, config=replace(config, seed=s), path=path) for s in (3, 3, 4))
    assert torch.equal(one.out, same.out)
    assert not torch.equal(one.out, other.out)
    pilots = [tuple(s.pilot.tolist()) for s in one.sets or []]
    assert len(set(pilots)) == 4
    layers = [vattention(q, k, v, config=config, layer=layer, path=path).out for layer in (0, 1)]
    assert not torch.equal(*layers)
    g = [torch.Generator().manual_seed(9) for _ in "ab"]
    assert torch.equal(*(vattention(q, k, v, config=config, generator=x, path=path).out for x in g))


# Numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_a_constant_added_to_all_scores_changes_nothing(path):
    q, k, v = make(d=8, n=600)
    config = replace(SMALL, index="oracle", audit=True)
    one = vattention(q, k, v, config=config, scale=1.0, path=path)
    # One more channel, 1 in every key: every score grows by 40.
    q2 = torch.cat([q, torch.full_like(q[..., :1], 40.0), torch.zeros_like(q[..., :7])], -1)
    k2 = torch.cat([k, torch.ones_like(k[..., :1]), torch.zeros_like(k[..., :7])], -1)
    two = vattention(q2, k2, v, config=config, scale=1.0, path=path, index_sets=one.sets)
    torch.testing.assert_close(one.out, two.out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("guarantee", ["denominator", "output"])
def test_scores_of_ten_thousand_do_not_overflow(path, guarantee):
    q, k, v = make(n=600)
    scale = 1e4 / (q @ k.repeat_interleave(2, 1).transpose(2, 3)).abs().max().item()
    out = vattention(q, k, v, config=replace(SMALL, guarantee=guarantee, audit=True), scale=scale, path=path)
    assert out.out.isfinite().all()
    exact = vattention(
        q, k, v, config=replace(SMALL, guarantee=guarantee, index="oracle", audit=True), scale=scale, path=path
    )
    assert exact.err is not None
    assert exact.err.max() < 1e-3  # one key has all the weight, and the oracle knows it


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_a_late_larger_score_rescales_what_was_summed(path):
    q, k, v = make(h=1, hkv=1, n=400, seed=2)
    k[0, 0, 200] = 40 * q[0, 0, 0] / q[0, 0, 0].norm()
    sets = [IndexSets(torch.arange(10), torch.arange(20, 60), torch.tensor([200, 300]))]
    config = replace(SMALL, audit=True)
    out = vattention(q, k, v, config=config, index_sets=sets, path=path)
    want = reference_row(q[0, 0, 0], k[0, 0], v[0, 0], torch.ones(400, dtype=torch.bool), sets[0], config)
    torch.testing.assert_close(out.out[0, 0, 0].double(), want.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_names_layer_and_head(path, bad):
    q, k, v = make()
    q[0, 2] = bad
    index = SimHashIndex()
    index.build(k)
    with pytest.raises(ValueError, match="layer 7, head 2 is not finite"):
        vattention(q, k, v, config=SMALL, index_state=index, layer=7, path=path)


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("guarantee", ["denominator", "output"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_name_layer_and_head(path, guarantee, bad):
    q, k, v = make()
    v[:, 1, 100:250] = bad
    with pytest.raises(ValueError, match="an output of layer 7, head 2 is not finite: the values"):
        vattention(q, k, v, config=replace(SMALL, guarantee=guarantee), layer=7, path=path)


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_a_row_whose_scores_are_all_minus_infinity_is_refused(path):
    q, k, v = make()
    with pytest.raises(ValueError, match="a score of layer 0, head 0 is not finite"):
        vattention(q.abs(), torch.full_like(k, -torch.inf), v, config=replace(SMALL, heavy=0), path=path)


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("guarantee", ["denominator", "output"])
def test_a_tolerance_near_zero_reads_everything_and_a_tiny_delta_does_no_harm(path, guarantee):
    q, k, v = make()
    config = replace(SMALL, guarantee=guarantee, fpc=True)
    assert (vattention(q, k, v, config=replace(config, eps=1e-300), path=path).density == 1).all()
    strict, lax = (vattention(q, k, v, config=replace(config, delta=d), path=path).budget for d in (1e-17, 0.1))
    assert (strict > lax).all()
    flat = vattention(torch.zeros_like(q), k, torch.ones_like(v), config=replace(config, delta=1e-17), path=path)
    assert (flat.budget == 20).all()  # nothing varies: the pilot is enough whatever delta is


def test_a_cache_of_one_or_two_keys_is_dense():
    for n in (1, 2, 3):
        q, k, v = make(n=n)
        out = vattention(q, k, v, config=replace(SMALL, audit=True))
        assert (out.density == 1).all()
        torch.testing.assert_close(out.out, scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.slow
def test_it_may_be_called_inside_of_a_compiled_function():
    q, k, v = make()
    compiled = torch.compile(lambda q: vattention(q + 0, k, v, config=SMALL).out * 1, backend="eager")
    assert torch.equal(compiled(q), vattention(q, k, v, config=SMALL).out)


# Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k, v[:, :, :-1]), "agree in batch, heads and length"),
        (lambda q, k, v: (q[:, :3], k, v), "does not fit"),
        (lambda q, k, v: (q[..., :8], k, v), "does not fit"),
        (lambda q, k, v: (q.expand(-1, -1, 301, -1), k, v), "at least as many keys"),
        (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), "k of shape .* is empty"),
        (lambda q, k, v: (q[:, :, :0], k, v), "q of shape .* is empty"),
        (lambda q, k, v: (q[:0], k[:0], v[:0]), "q of shape .* is empty"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "k of shape .* is empty"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), "q of shape .* is empty"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):  # below the run-time check of shapes
        inspect.unwrap(vattention)(*change(*make()), config=SMALL)


def test_numbers_of_numpy_are_counts_and_shares_as_they_are():
    counts = unchecked(sink=np.int64(4), heavy=np.int32(9), budget=np.int64(30), pilot=np.float32(0.25))
    assert counts == VAttentionConfig(sink=4, heavy=9, budget=30, pilot=0.25)
    assert all(type(x) is int for x in (counts.sink, counts.heavy, counts.budget))


def test_what_is_no_configuration_or_path_is_refused():
    bare = inspect.unwrap(vattention)
    with pytest.raises(TypeError, match="must be a VAttentionConfig, got dict"):
        bare(*make(), config={"eps": 0.1})
    with pytest.raises(ValueError, match="path must be"):
        bare(*make(), config=SMALL, path="fast")


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize("kind", ["simhash", "oracle", "quest", "double_sparsity"])
def test_an_index_of_other_keys_is_refused(path, kind):
    q, k, v = make(b=2)
    for part in (k[:, :, :200], k.repeat(1, 1, 2, 1)):
        index = make_index(replace(SMALL, index=kind))
        index.build(part)
        with pytest.raises(ValueError, match=r"the index holds .* append the new"):
            vattention(q, k, v, config=replace(SMALL, index=kind), index_state=index, path=path)
    with pytest.raises(ValueError, match="do not fit the keys"):
        inspect.unwrap(group_scores)(q, k[:1])


class _Careless:
    """Predicts sinks, keys twice, and keys that no row sees."""

    memory_bytes = 0

    def build(self, k): ...

    def append(self, k_new): ...

    def topk(self, q, m, exclude):
        return torch.tensor([0, 1, 60, 60, 61, 500, -3]).expand(*q.shape[:3], -1)


@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_a_careless_index_costs_density_and_never_the_answer(path):
    q, k, v = make(b=2)
    mask = padded(2, 1, 300, (0, 61))
    config = replace(SMALL, index=_Careless(), audit=True)
    out = vattention(q, k, v, config=replace(config, eps=1e-9), attn_mask=mask, path=path)
    assert out.err is not None
    assert out.err.max() < 1e-5
    assert out.n_det[0].eq(12).all()  # 4 sinks, 6 of the window, 60 and 61
    assert out.n_det[1].eq(10).all()  # 61 is a sink of the padded row, 60 is hidden
    with pytest.raises(ValueError, match="topk returned"):
        inspect.unwrap(fixed_ranks)(
            q,
            Rows.of(q, k, None),
            Sizes.of(torch.full((8,), 300), SMALL),
            type("_Careless", (_Careless,), {"topk": lambda *_: torch.zeros(3)})(),
        )


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([(range(4), range(20, 30), range(40, 50))] * 3, "one set a row, got 3 for 4"),
        ([(range(4), range(20, 30), range(295, 305))] * 4, "keys that their row sees"),
        ([(range(4), range(20, 30), range(-2, 0))] * 4, "keys that their row sees"),
        ([(range(4), range(20, 30), range(29, 35))] * 4, "name a key twice"),
        ([(range(4), range(3, 30), range(40, 50))] * 4, "name a key twice"),
        ([((), (), ())] * 4, "at least one"),
    ],
)
def test_index_sets_that_do_not_fit_are_refused(path, sets, message):
    q, k, v = make()
    given = [IndexSets(*(torch.tensor(list(part), dtype=torch.int64) for part in row)) for row in sets]
    with pytest.raises(ValueError, match=message):
        vattention(q, k, v, config=SMALL, index_sets=given, path=path)


def test_a_shared_group_keeps_to_what_each_head_sees():
    q, k, v = make(n=400)
    mask = torch.ones(1, 4, 1, 400, dtype=torch.bool)
    mask[:, 1, :, :250] = False
    mask[:, 3, :, 20:350:2] = False
    for eps in (0.3, 1e-9):
        config = replace(SMALL, eps=eps, share_group=True, heavy=0.1, audit=True)
        out = vattention(q, k, v, config=config, attn_mask=mask)
        for row, (sets, read) in enumerate(zip(out.sets or [], out.indices or [], strict=True)):
            assert mask[0, row, 0, read].all()
            assert len(read) == len(sets.fixed) + len(sets.pilot) + len(sets.further)
            want = reference_row(q[0, row, 0], k[0, row // 2], v[0, row // 2], mask[0, row, 0], sets, config)
            torch.testing.assert_close(out.out[0, row, 0].double(), want.out, rtol=1e-4, atol=1e-5)
    assert out.err is not None
    assert out.err.max() < 1e-5


def test_a_mask_of_another_shape_or_kind_is_refused():
    q, k, v = make()
    with pytest.raises(ValueError, match="holds NaN"):
        vattention(q, k, v, config=SMALL, attn_mask=torch.full((1, 1, 1, 300), math.nan))
    with pytest.raises(ValueError, match="does not broadcast"):
        vattention(q, k, v, config=SMALL, attn_mask=torch.ones(1, 1, 1, 299, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool or floating point"):
        vattention(q, k, v, config=SMALL, attn_mask=torch.ones(1, 1, 1, 300, dtype=torch.int64))


def test_the_kernel_says_where_it_does_not_apply():
    q, k, v = make()
    with pytest.raises(ValueError, match="other dtypes than float32"):
        vattention(q.double(), k.double(), v.double(), config=SMALL, path="kernel")
    with pytest.raises(ValueError, match="mask with holes"):
        vattention(q, k, v, config=SMALL, attn_mask=holes(1, 1, 300), path="kernel")
    with pytest.raises(ValueError, match="share_group"):
        vattention(q, k, v, config=replace(SMALL, share_group=True), path="kernel")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eps": 0.0}, "eps must lie between"),
        ({"delta": 1.0}, "delta must lie between"),
        ({"sink": -1}, "sink must be a count"),
        ({"heavy": 1.5}, "heavy must be a count"),
        ({"budget": 1}, "budget must be"),
        ({"budget": 0.0}, "budget must be"),
        ({"index": "magic"}, "index must be"),
        ({"guarantee": "output", "tail": "one"}, "tail='one'"),
        ({"guarantee": "output", "delta": 0.5}, "needs delta <="),
        ({"min_pilot": 1}, "min_pilot must be at least 2"),
        ({"max_query": 0}, "max_query must be at least 1"),
        ({"eps": math.nan}, "eps must lie between"),
        ({"eps": "small"}, "eps must lie between"),
        ({"sink": math.nan}, "sink must be a count"),
        ({"pilot": math.inf}, "pilot must be a count"),
        ({"budget": math.nan}, "budget must be"),
        ({"min_pilot": math.nan}, "min_pilot must be at least 2"),
        ({"min_keys": 2.5}, "min_keys must be at least 0"),
        ({"seed": 1.5}, "seed must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"dense_layers": 0}, "dense_layers must be numbers of layers"),
        ({"tail": "one", "delta": 0.9}, "needs delta < 0.5"),
        ({"mode": "released", "guarantee": "output"}, "mode='released' bounds the denominator"),
        ({"mode": "released", "budget": 0.1}, "mode='released' bounds the denominator"),
    ],
)
def test_a_configuration_is_checked(values, message):
    with pytest.raises(ValueError, match=message):
        unchecked(**values)


def test_index_sets_may_be_counted_in_ranks_or_positions():
    q, k, _ = make(b=2)
    mask = padded(2, 1, 300, (0, 40))
    rows = Rows.of(q, k, mask)
    sizes = Sizes.of(rows.count, SMALL)
    ranks = fixed_ranks(q, rows, sizes, None)
    assert ranks[4, 0] == 0  # the first visible key of the padded row ...
    assert rows.positions(torch.tensor([4]), ranks[4:5, :1]).item() == 40  # ... stands behind the padding
    assert (rows.ranks(torch.tensor([[-1]] * 8)) == PAD).all()


def test_the_kernel_is_compiled_once_whatever_it_is_given():
    from assay.methods.vattention import _kernel

    q, k, v = make(b=2, t=3)
    sets = vattention(q, k, v, config=replace(SMALL, audit=True)).sets
    for more in (
        {},
        {"guarantee": "output"},
        {"index": "oracle"},
        {"budget": 9, "reuse_pilot": False},
        {"audit": True},
    ):
        for mask in (None, padded(2, 3, 300, (0, 40)), padded(1, 3, 300, (5,))):
            vattention(q, k, v, config=replace(SMALL, **more), attn_mask=mask)
    vattention(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, config=SMALL, index_sets=sets)
    assert len(_kernel._step.signatures) == 1
