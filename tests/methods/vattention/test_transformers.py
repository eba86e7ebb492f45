"""vAttention inside transformers: same logits where everything is read, no trace afterwards, an index that fits the keys."""

import copy
import gc
import inspect
import logging
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    MistralConfig,
    Qwen3Config,
    StaticCache,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from assay.methods.vattention import (
    GrowingKVCache,
    OffloadedKVCache,
    UnsupportedModelError,
    VAttentionConfig,
    register,
    reset_report,
    sparse_decoding,
    sparsity_report,
    vattention,
)
from assay.methods.vattention import _transformers as inside

EVERYTHING = VAttentionConfig(sink=4, local=4, min_keys=16, budget=1.0)
SPARSE = VAttentionConfig(sink=4, local=4, heavy=0.05, min_pilot=10, budget=0.2, min_keys=16)
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(model.config, max_cache_len=200),
    "growing": lambda model: GrowingKVCache(),
    "growing-by-config": lambda model: GrowingKVCache(model.config),
    "offloaded": lambda model: OffloadedKVCache(),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("beams", [1, 3])
def test_reading_everything_gives_sdpas_logits(tiny_llama, prompts, cache, beams):
    how = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": beams,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    dense = tiny_llama.generate(**prompts, cache=CACHES[cache](tiny_llama), **how)
    with sparse_decoding(tiny_llama, EVERYTHING):
        sparse = tiny_llama.generate(**prompts, cache=CACHES[cache](tiny_llama), **how)
    assert torch.equal(dense.sequences, sparse.sequences)
    assert torch.equal(dense.logits[0], sparse.logits[0])  # the prefill is sdpa's to the bit
    for a, b in zip(dense.logits, sparse.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_question_in_chunks_after_a_dense_context_sees_what_it_should(tiny_llama, prompts):
    ids = prompts["input_ids"][1:]
    reset_report(tiny_llama)
    dense = tiny_llama(ids).logits
    cache = GrowingKVCache()
    with sparse_decoding(tiny_llama, EVERYTHING):
        parts = [tiny_llama(ids[:, a:b], cache=cache).logits for a, b in ((0, 100), (100, 130), (130, 131), (131, 150))]
    torch.testing.assert_close(torch.cat(parts, 1), dense, rtol=1e-4, atol=1e-4)
    assert [r.steps for r in sparsity_report(tiny_llama)] == [50, 50]
    reset_report(tiny_llama)
    assert sparsity_report(tiny_llama) == []


def test_the_implementation_is_restored_whatever_happens(tiny_llama):
    tiny_llama.set_attn_implementation("sdpa")
    names = set(ALL_ATTENTION_FUNCTIONS.valid_keys()), set(AttentionMaskInterface().valid_keys())
    with pytest.raises(KeyError), sparse_decoding(tiny_llama, SPARSE):
        tiny_llama.config.to_dict()[tiny_llama.config._attn_implementation]  # not there
    assert tiny_llama.config._attn_implementation == "sdpa"
    tiny_llama.set_attn_implementation("eager")
    with sparse_decoding(tiny_llama, SPARSE):
        outer = tiny_llama.config._attn_implementation
        with sparse_decoding(tiny_llama, EVERYTHING):
            assert tiny_llama.config._attn_implementation != outer
        assert tiny_llama.config._attn_implementation == outer
    assert tiny_llama.config._attn_implementation == "eager"
    tiny_llama.set_attn_implementation("sdpa")
    assert (set(ALL_ATTENTION_FUNCTIONS.valid_keys()), set(AttentionMaskInterface().valid_keys())) == names


def test_registering_twice_replaces_the_configuration(tiny_llama, prompts):
    try:
        assert register("assay_test", SPARSE) == "assay_test"
        register("assay_test", EVERYTHING)
        tiny_llama.set_attn_implementation("assay_test")
        tiny_llama.generate(**prompts, max_new_tokens=3, do_sample=False)
        assert all((r.density == 1).all() for r in sparsity_report(tiny_llama))
    finally:
        tiny_llama.set_attn_implementation("sdpa")
        reset_report(tiny_llama)
        AttentionInterface._global_mapping.pop("assay_test", None)
        AttentionMaskInterface._global_mapping.pop("assay_test", None)


def test_the_report_tells_density_budget_and_true_error_of_each_head(tiny_llama, prompts):
    reset_report(tiny_llama)
    with sparse_decoding(tiny_llama, replace(SPARSE, audit=True, dense_layers=(0,))):
        tiny_llama.generate(**prompts, max_new_tokens=5, do_sample=False)
    (only,) = sparsity_report(tiny_llama)
    assert (only.layer, only.steps, only.path) == (1, 4, "kernel")
    assert only.density.shape == only.budget.shape == (4,)
    # sinks and window 8, heavy 5 % of 153 or 113, a fifth of the rest
    assert 0.2 < only.density.mean() < 0.35
    assert only.err is not None
    assert (only.err > 0).all()
    assert only.memory_bytes >= 2 * 2 * 150 * 16
    reset_report(tiny_llama)
    with sparse_decoding(tiny_llama, replace(SPARSE, min_keys=1000)):
        tiny_llama.generate(**prompts, max_new_tokens=3, do_sample=False)
    assert {r.path for r in sparsity_report(tiny_llama)} == {"dense"}
    assert all((r.density == 1).all() for r in sparsity_report(tiny_llama))
    reset_report(tiny_llama)


def test_a_half_precision_model_on_the_cpu_takes_the_torch_path(tiny_llama, prompts):
    import copy

    half = copy.deepcopy(tiny_llama).to(torch.bfloat16)
    with sparse_decoding(half, SPARSE):
        half.generate(**prompts, max_new_tokens=3, do_sample=False)
    assert {r.path for r in sparsity_report(half)} == {"torch"}


def test_the_same_seed_gives_the_same_tokens(tiny_llama, prompts):
    runs = []
    for seed in (0, 0, 1):
        with sparse_decoding(tiny_llama, replace(SPARSE, budget=0.02, heavy=0.0, seed=seed)):
            out = tiny_llama.generate(
                **prompts, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        runs.append(torch.stack(out.logits))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    reset_report(tiny_llama)


# The state of a layer ---------------------------------------------------------------------------------------------


class _Counting:
    """An index that remembers what was done to it."""

    events: ClassVar[list[str]] = []

    def build(self, k):
        self.n = k.shape[2]
        self.events.append(f"build {self.n}")

    def append(self, k_new):
        self.n += k_new.shape[2]
        self.events.append(f"append {k_new.shape[2]}")

    def topk(self, q, m, exclude):
        assert exclude.shape[3] == self.n
        return torch.full((*q.shape[:3], 0), -1)

    memory_bytes = 0


def _module():
    module = nn.Module()
    module.layer_idx, module.is_causal, module.num_key_value_groups = 0, True, 2
    return module.eval()


@pytest.fixture
def steps():
    config = replace(SPARSE, index=_Counting(), heavy=2)
    attend = inside._attention_function(config)
    module = _module()
    _Counting.events = []

    def step(key, queries=1, mask=None):
        q = torch.randn(key.shape[0], 4, queries, 16, dtype=key.dtype)
        attend(module, q, key, torch.randn_like(key), mask, scaling=0.25)
        seen, _Counting.events = _Counting.events, []
        return seen

    return step


def test_an_index_grows_with_its_keys_and_is_built_again_for_others(steps):
    keys = torch.randn(2, 2, 200, 16)
    assert steps(keys[:, :, :100], 100) == []  # a prefill
    assert steps(keys[:, :, :101]) == ["build 101"]
    assert steps(keys[:, :, :102]) == ["append 1"]
    chunk = torch.ones(2, 1, 5, 107, dtype=torch.bool).tril(102)
    assert steps(keys[:, :, :107], 5, chunk) == ["append 5"]
    assert steps(keys[:, :, :104]) == ["build 104"]  # cropped
    assert steps(keys[:, :, :105].flip(0)) == ["build 105"]  # beams reordered
    assert steps(torch.randn(2, 2, 106, 16)) == ["build 106"]  # another request of the right length
    assert steps(keys[:1, :, :107]) == ["build 107"]  # another batch
    assert steps(keys[:1, :, :108].double()) == ["build 108"]  # another dtype
    assert steps(keys[:1, :, :109].double()) == ["append 1"]
    assert steps(keys[:1, :, :109].double(), 109) == []  # a prefill drops it
    assert steps(keys[:1, :, :110].double()) == ["build 110"]


def test_a_static_cache_is_told_once_of_the_growing_one(steps, caplog):
    keys = torch.zeros(1, 2, 100, 16)
    with caplog.at_level(logging.WARNING, logger="assay.vattention"):
        for n in (50, 51, 52):
            keys[:, :, :n] = torch.randn(1, 2, n, 16)
            assert steps(keys, 1, (torch.arange(100) < n)[None, None, None]) == ["build 100"]
    assert [r.message for r in caplog.records if "GrowingKVCache" in r.message].__len__() == 1


def test_several_queries_that_see_only_themselves_are_a_prefill_into_an_empty_cache(steps):
    keys = torch.randn(1, 2, 100, 16)
    assert steps(keys, 20) == []
    mask = torch.ones(1, 1, 20, 100, dtype=torch.bool).tril()
    mask[..., :3] = False  # padding
    assert steps(keys, 20, mask) == []
    assert steps(keys, 20, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)) == []
    assert steps(keys, 20, torch.ones(1, 1, 20, 100, dtype=torch.bool).tril(60)) == ["build 100"]


def test_a_layers_state_goes_with_its_module():
    gc.collect()
    before = len(inside._states)
    module = _module()
    inside._attention_function(SPARSE)(module, torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 60, 16), None)
    assert len(inside._states) == before + 1
    del module
    gc.collect()
    assert len(inside._states) == before


# Refusals ---------------------------------------------------------------------------------------------------------


def test_what_it_cannot_compute_is_refused():
    attend, module = inside._attention_function(SPARSE), _module()
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 60, 16)
    with pytest.raises(ValueError, match="no attention weights"):
        attend(module, q, k, k, None, output_attentions=True)
    with pytest.raises(ValueError, match="no attention dropout"):
        attend(_module().train(), q, k, k, None, dropout=0.1)
    prefill = torch.randn(1, 4, 60, 16)
    for name in (
        "softcap",
        "s_aux",
    ):  # SDPA would leave out the second in silence: not in a prefill or dense layer either
        for queries, config in ((q, SPARSE), (prefill, SPARSE), (q, replace(SPARSE, dense_layers=(0,)))):
            with pytest.raises(UnsupportedModelError, match=f"{name}, which neither"):
                inside._attention_function(config)(module, queries, k, k, None, **{name: 30.0})
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        attend(module, q, k, k, None, position_bias=torch.zeros(1, 4, 1, 60))
    with pytest.raises(UnsupportedModelError, match="no layer_idx"):
        attend(nn.Module().eval(), q, k, k, None)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_the_name_of_another_implementation_is_left_to_it(name):
    with pytest.raises(ValueError, match="belongs to another"):
        register(name, SPARSE)


def test_what_is_no_configuration_is_refused_before_anything_is_changed(tiny_llama):
    bare = inspect.unwrap(inside._attention_function)  # below the run-time check of types
    with pytest.raises(TypeError, match="must be a VAttentionConfig"):
        bare({"eps": 0.1})
    with pytest.raises(TypeError), sparse_decoding(tiny_llama, {"eps": 0.1}):
        pass
    assert tiny_llama.config._attn_implementation == "sdpa"


_FAMILIES = {
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": 60, "num_attention_heads": 9, "num_key_value_heads": 3}),
}


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("cache", ["dynamic", "growing", "growing-by-config"])
def test_other_families_and_sliding_windows_give_sdpas_logits(family, cache, prompts):
    torch.manual_seed(0)
    kind, more = _FAMILIES[family]
    sizes = {"hidden_size": 72, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind(
        vocab_size=100, num_hidden_layers=1, initializer_range=0.2, eos_token_id=None, pad_token_id=0, **(sizes | more)
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    how = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    dense = model.generate(**prompts, **how)
    with sparse_decoding(model, EVERYTHING):
        sparse = model.generate(**prompts, cache=CACHES[cache](model), **how)
    for a, b in zip(dense.logits, sparse.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert [r.path for r in sparsity_report(model)] == ["kernel"]


def test_assisted_generation_crops_and_goes_on(tiny_llama, prompts):
    ids, how = prompts["input_ids"][1:], {"max_new_tokens": 8, "do_sample": False}
    dense = tiny_llama.generate(ids, **how)
    torch.manual_seed(1)
    draft = type(tiny_llama)(copy.deepcopy(tiny_llama.config)).eval()
    with sparse_decoding(tiny_llama, EVERYTHING), sparse_decoding(draft, SPARSE):
        assert torch.equal(tiny_llama.generate(ids, assistant_model=draft, **how), dense)
    assert tiny_llama.config._attn_implementation == "sdpa"
    reset_report(tiny_llama)


def test_a_score_that_is_no_number_names_the_layer():
    module = _module()
    module.layer_idx = 5
    q = torch.randn(1, 4, 1, 16)
    q[0, 3] = torch.nan
    with pytest.raises(ValueError, match="layer 5, head 3"):
        inside._attention_function(SPARSE)(module, q, *torch.randn(2, 1, 2, 60, 16), None)


def test_a_model_with_its_own_attention_is_refused():
    class Own(nn.Module):
        pass

    with pytest.raises(UnsupportedModelError, match="Own does not take its attention"), sparse_decoding(Own(), SPARSE):
        pass
    assert issubclass(UnsupportedModelError, TypeError)


def test_an_encoder_prefill_is_untouched():
    from transformers import BertModel

    torch.manual_seed(0)
    model = BertModel(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ).eval()
    ids = torch.randint(1, 50, (1, 80))
    want = model(ids).last_hidden_state
    with sparse_decoding(model, SPARSE):
        assert torch.equal(model(ids).last_hidden_state, want)


# The real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.network
def test_smollm2_decodes_alike_and_reports_what_it_read():
    from assay.lm import load

    opened = load("smollm2-135m-instruct")
    model, tokenizer = opened.model, opened.tokenizer
    tokenizer.padding_side = "left"
    batch = tokenizer(
        ["The capital of France is", "One two three four five six seven eight nine"], return_tensors="pt", padding=True
    )
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    dense = model.generate(**batch, **how)
    for cache in (
        None,
        DynamicCache(config=model.config),
        StaticCache(model.config, max_cache_len=64),
        GrowingKVCache(),
    ):
        with sparse_decoding(model, replace(EVERYTHING, min_keys=4, sink=1, local=1)):
            sparse = model.generate(**batch, cache=cache, **how)
        for a, b in zip(dense.logits, sparse.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert vattention is not None
    assert len(sparsity_report(model)) == 30
    reset_report(model)
