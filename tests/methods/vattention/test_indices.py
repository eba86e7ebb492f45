"""The predictors against the authors' numbers, brute force, and their own growth."""

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from assay.methods.vattention import (
    DoubleSparsityIndex,
    HashIndex,
    OracleIndex,
    QuestIndex,
    SimHashIndex,
    TopKIndex,
    VAttentionConfig,
    load_hash_weights,
)
from assay.methods.vattention._attention import Rows, Sizes, fixed_ranks
from assay.methods.vattention._indices import make_index, pack_bits, page_bounds, page_scores, popcount

GOLDEN = Path(__file__).parents[2] / "data" / "vattention"


def _load(name):
    data = np.load(GOLDEN / name)
    return {key: torch.from_numpy(data[key]) if data[key].ndim else data[key].item() for key in data.files}


def _keys(n=50, seed=0, b=2, hkv=2, d=8):
    return torch.randn(b, hkv, n, d, generator=torch.Generator().manual_seed(seed))


def _ask(index, q, m, n, exclude=None):
    number = torch.full(q.shape[:3], m)
    return index.topk(
        q, number, torch.zeros(q.shape[0], 1, q.shape[2], n, dtype=torch.bool) if exclude is None else exclude
    )


INDICES = {
    "oracle": OracleIndex,
    "simhash": SimHashIndex,
    "double_sparsity": lambda: DoubleSparsityIndex(torch.arange(8).expand(2, 8), count=4),
    "quest": lambda: QuestIndex(7),
    "hash": lambda: HashIndex(**_weights()),
}


def _weights(heads=4, d=8, bits=32, seed=3):
    g = torch.Generator().manual_seed(seed)
    sizes = [(d, 16), (16, 16), (16, bits)]
    return {
        f"{who}_{what}": [torch.randn(heads, *((i, o) if what == "matrix" else (o,)), generator=g) for i, o in sizes]
        for who in ("query", "key")
        for what in ("matrix", "bias")
    }


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_grew_is_the_one_that_was_built_at_once(name):
    keys = _keys(60)
    grown, at_once = INDICES[name](), INDICES[name]()
    assert isinstance(grown, TopKIndex)
    at_once.build(keys[:, :, :20])  # the mean of simhash is fixed at build
    at_once.append(keys[:, :, 20:])
    grown.build(keys[:, :, :20])
    for a, b in ((20, 21), (21, 22), (22, 45), (45, 60)):
        grown.append(keys[:, :, a:b])
    q = torch.randn(2, 4, 3, 8)
    assert torch.equal(_ask(grown, q, 9, 60), _ask(at_once, q, 9, 60))
    assert grown.memory_bytes > 0


@pytest.mark.parametrize("name", INDICES)
def test_what_is_excluded_is_never_chosen_and_rows_may_ask_for_less(name):
    index = INDICES[name]()
    index.build(_keys(40))
    q = torch.randn(2, 4, 3, 8)
    exclude = torch.rand(2, 1, 3, 40) < 0.5
    m = torch.randint(0, 25, (2, 4, 3))
    chosen = index.topk(q, m, exclude)
    for b, h, t in np.ndindex(2, 4, 3):
        row = [x for x in chosen[b, h, t].tolist() if x >= 0]
        assert len(row) == len(set(row)) == min(int(m[b, h, t]), int((~exclude[b, 0, t]).sum()))
        assert not exclude[b, 0, t, row].any()


def test_the_oracle_finds_the_largest_scores():
    keys, q = _keys(40), torch.randn(2, 4, 1, 8)
    index = OracleIndex()
    index.build(keys)
    scores = torch.einsum("bhtd,bhnd->bhtn", q, keys.repeat_interleave(2, 1))
    assert torch.equal(_ask(index, q, 5, 40), scores.topk(5).indices)


def test_simhash_counts_matching_signs_and_prefers_the_newer_key():
    keys, q = _keys(40, hkv=1, b=1), torch.randn(1, 1, 1, 8)
    keys[0, 0, 30] = keys[0, 0, 3]  # the same code twice
    index = SimHashIndex()
    index.build(keys)
    planes = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(0))[0]
    match = (((keys[0, 0] - keys[0, 0].mean(0)) @ planes > 0) == (q[0, 0, 0] @ planes > 0)).sum(1)
    order = sorted(range(40), key=lambda i: (-int(match[i]), -i))
    for m in (1, 7, 40):
        assert sorted(_ask(index, q, m, 40)[0, 0, 0].tolist()) == sorted(order[:m])
    assert index.memory_bytes == 40 * 16


def test_simhash_finds_near_keys_more_often_than_chance():
    keys = _keys(2000, d=32, b=1, hkv=1)
    q = keys[:, :, 500:501] + 0.3 * torch.randn(1, 1, 1, 32)
    index = SimHashIndex()
    index.build(keys)
    assert 500 in _ask(index, q, 5, 2000)[0, 0, 0]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_popcount(words):
    assert popcount(torch.tensor(words)).tolist() == [(w % 2**64).bit_count() for w in words]


@given(st.lists(st.booleans(), min_size=1, max_size=130))
def test_packing_keeps_every_bit(bits):
    packed = pack_bits(torch.tensor(bits))
    assert sum((w % 2**64) << 64 * i for i, w in enumerate(packed.tolist())) == sum(b << i for i, b in enumerate(bits))


# The authors' numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", json.loads((GOLDEN / "index_sets.json").read_text())["cases"], ids=lambda c: str(c["seed"])
)
def test_sinks_window_and_oracle_are_the_authors_own(case):
    q, k = torch.tensor(case["q"], dtype=torch.float64)[None], torch.tensor(case["k"], dtype=torch.float64)[None]
    config = VAttentionConfig(sink=case["sink"], local=case["local"], heavy=case["heavy"], min_keys=0, index="oracle")
    rows = Rows.of(q, k, None)
    index = make_index(config)
    index.build(k)
    ranks = fixed_ranks(q, rows, Sizes.of(rows.count, config), index)
    t = q.shape[2]
    for h, by_query in enumerate(case["sets"]):
        for i, want in enumerate(by_query):
            got = [r for r in ranks[h * t + i].tolist() if r < 2**40]
            if len(got) < rows.count[h * t + i] or sorted(want) == got:
                # tied keys may be taken in any order: the scores decide
                scores = k[0, h // (q.shape[1] // k.shape[1])] @ q[0, h, i]
                assert torch.allclose(scores[got].sort().values, scores[want].sort().values)


def test_hash_attention_is_the_authors_own():
    data = _load("hash_index.npz")
    index = HashIndex(
        **{f"{w}_{p}": [data[f"{w}_{p}{i}"] for i in range(3)] for w in ("query", "key") for p in ("matrix", "bias")}
    )
    index.build(data["k"])
    assert torch.equal(index.bits_of(data["q"], index._query), data["query_signs"] > 0)
    visible = data["score"] > -1e8
    assert torch.equal(
        torch.where(visible, 2.0 * index.scores(data["q"]) - 16, 0), torch.where(visible, data["score"], 0)
    )
    at = torch.arange(20)
    for t in range(2):
        count = 19 + t
        exclude = ((at < 2) | (at >= count - 3))[None, None, None]
        chosen = index.topk(data["q"][:, :, t : t + 1], torch.full((1, 4, 1), 4), exclude)
        for h in range(4):
            mine, theirs = (
                data["score"][0, h, t][chosen[0, h, 0]],
                data["score"][0, h, t][data["mask"][0, h, t] & ~exclude[0, 0, 0] & (at < count)],
            )
            assert torch.equal(mine.sort().values, theirs.sort().values)


@pytest.mark.parametrize("bits", [16, 4])
def test_double_sparsity_is_the_authors_own(bits):
    data = _load("double_sparsity.npz")
    index = DoubleSparsityIndex(data["channels"], count=8 // data["group_factor"], bits=bits)
    index.build(data["k"])
    torch.testing.assert_close(index.scores(data["q"]), data[f"score_bits{bits}"], rtol=1e-10, atol=1e-12)
    exclude = (torch.arange(24) < 2)[None, None, None]
    chosen = index.topk(data["q"], torch.full((1, 2, 1), 5), exclude)
    for h in range(2):
        want = (data[f"mask_bits{bits}"][0, h, 0] & ~exclude[0, 0, 0]).nonzero()[:, 0].tolist()
        assert sorted(chosen[0, h, 0].tolist()) == want


def test_quests_bounds_are_the_authors_own_and_bound():
    data = _load("quest.npz")
    bounds = page_bounds(data["k"], data["page_size"])
    torch.testing.assert_close(page_scores(data["q"], *bounds), data["page_scores"], rtol=1e-10, atol=0)
    scores = data["q"] @ data["k"].transpose(2, 3)
    pages = data["page_scores"].repeat_interleave(data["page_size"], -1)[..., :38]
    assert (scores <= pages + 1e-12).all()


# Files and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pickle", "torch", "safetensors"])
def test_hash_weights_are_read_from_each_kind_of_file(tmp_path, kind):
    layers = {0: _weights(seed=1), 3: _weights(seed=2)}
    path = tmp_path / f"hash.{kind}"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(layers))
    elif kind == "torch":
        torch.save(layers, path)
    else:
        save_file(
            {f"{la}.{p}.{i}": t for la, w in layers.items() for p, ts in w.items() for i, t in enumerate(ts)}, path
        )
    weights = load_hash_weights(path)
    assert sorted(weights.layers) == [0, 3]
    for layer, parts in layers.items():
        for name, tensors in parts.items():
            assert all(torch.equal(a, b) for a, b in zip(weights.layers[layer][name], tensors, strict=True))
    index = make_index(VAttentionConfig(index=weights), layer=3)
    index.build(_keys(30))
    assert _ask(index, torch.randn(2, 4, 1, 8), 3, 30).shape == (2, 4, 1, 3)
    with pytest.raises(ValueError, match="no layer 1"):
        weights.for_layer(1)


class _Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch EVIL",)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_file_with_code_in_it_is_not_opened(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hash.pkl"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({0: _Evil()}))
    else:
        torch.save({0: _Evil()}, path)
    with pytest.raises(ValueError, match="more than tensors"):
        load_hash_weights(path)
    assert not (tmp_path / "EVIL").exists()


def test_code_inside_a_pickled_storage_is_not_run_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save(_Evil(), buffer)

    class Storage:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (buffer.getvalue(),)

    (tmp_path / "hash.pkl").write_bytes(pickle.dumps({0: Storage()}))
    with pytest.raises(ValueError, match="more than tensors"):
        load_hash_weights(tmp_path / "hash.pkl")
    assert not (tmp_path / "EVIL").exists()


def test_files_of_another_kind_are_refused(tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match="expected"):
        load_hash_weights(tmp_path / "a.pkl")
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({0: {"query_matrix": []}}))
    with pytest.raises(ValueError, match=r"layer 0 of .* expected"):
        load_hash_weights(tmp_path / "b.pkl")
    save_file({"model.weight": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="expected names such as"):
        load_hash_weights(tmp_path / "c.safetensors")


def test_indices_refuse_what_they_cannot_use():
    with pytest.raises(ValueError, match="multiple of 64"):
        SimHashIndex(bits=100)
    with pytest.raises(ValueError, match="page_size"):
        QuestIndex(0)
    with pytest.raises(ValueError, match="needs trained weights"):
        make_index(VAttentionConfig(index="hash"))
    with pytest.raises(TypeError, match="must be a TopKIndex"):
        make_index(VAttentionConfig(index=3))
    with pytest.raises(TypeError, match=r"the class SimHashIndex: make one, SimHashIndex"):
        VAttentionConfig(index=SimHashIndex)
    with pytest.raises(ValueError, match="count >= 1"):
        DoubleSparsityIndex(count=0)
    with pytest.raises(ValueError, match="channels must lie between 0 and"):
        DoubleSparsityIndex(torch.full((2, 4), 99)).build(_keys())
    with pytest.raises(RuntimeError, match="holds no keys yet"):
        SimHashIndex().topk(
            torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, 1, 4, dtype=torch.bool)
        )
    index = HashIndex(**_weights(heads=3))
    with pytest.raises(ValueError, match="do not fit 2 key heads"):
        index.build(_keys())
    bad = _weights()
    bad["key_bias"] = bad["key_bias"][:2]
    with pytest.raises(ValueError, match="one tensor a layer"):
        HashIndex(**bad)
    bad = _weights()
    bad["query_bias"][1] = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="query layer 1 needs"):
        HashIndex(**bad)
    with pytest.raises(ValueError, match="do not fit 2 key heads"):
        DoubleSparsityIndex(torch.zeros(3, 4, dtype=torch.int64)).build(_keys())


@pytest.mark.parametrize("kind", ["quest", "double_sparsity"])
def test_a_float16_product_does_not_overflow(kind):
    q, k = torch.full((1, 1, 1, 64), 120.0).half(), torch.full((1, 1, 64, 64), 12.0).half()
    k[0, 0, 16:32] = 13.0  # 64 * 120 * 12 = 92,160 is above float16's largest number
    index = make_index(VAttentionConfig(index=kind))
    index.build(k)
    none = torch.zeros(1, 1, 1, 64, dtype=torch.bool)
    assert sorted(index.topk(q, torch.full((1, 1, 1), 16), none)[0, 0, 0].tolist()) == list(range(16, 32))


@pytest.mark.parametrize("kind", ["simhash", "oracle", "quest", "double_sparsity"])
def test_an_index_made_in_inference_mode_grows_outside_of_it(kind):
    k, more = torch.randn(1, 1, 20, 8), torch.randn(1, 1, 2, 8)
    index = make_index(VAttentionConfig(index=kind))
    with torch.inference_mode():
        index.build(k)
    index.append(more)
    index.append(more)
    none = torch.zeros(1, 1, 1, 24, dtype=torch.bool)
    assert index.topk(torch.randn(1, 1, 1, 8), torch.full((1, 1, 1), 24), none).shape[-1] == 24
