"""What FreeCache recomputes, and that what it keeps is what it says."""

import numpy as np
import pytest
import torch

from assay._errors import InputError
from assay.mdlm import (
    DiffusionGenerationConfig,
    FrozenRegionError,
    MaskedDiffusionLM,
    MDLMConfig,
    NoCache,
    PrefixCache,
    Sequential,
    diffusion_generate,
)
from assay.methods.freecache_guided_diffusion import (
    ARGuider,
    FreeCache,
    GuidedScheduler,
    UnsupportedPolicyError,
    kv_drift,
)
from assay.methods.freecache_guided_diffusion.reference import block_freecache

from ...mdlm.tiny import MASK, tiny
from .conftest import GOLDEN, Bigram, Judge, Table, golden

PROMPT = torch.randint(0, 38, (1, 11), generator=torch.Generator().manual_seed(1))
LONG = torch.randint(0, 38, (1, 35), generator=torch.Generator().manual_seed(2))


def run(model, policy, prompt=PROMPT, scheduler=None, **settings):
    """A run, and the logits that each of its commits saw (of its window)."""
    seen = []

    def look(state, positions, logits):
        seen.append((positions.tolist(), logits.clone()))
        return logits

    config = DiffusionGenerationConfig(
        **{"max_new_tokens": 16, "block_length": 4, "eos_policy": "none", "return_trace": True, **settings}
    )
    return diffusion_generate(model, prompt, config, scheduler, policy, logits_processor=look), seen


def regions(model, policy, **settings):
    """The region of each forward."""
    noted = []
    plan = policy.plan

    def note(state):
        plans = plan(state)
        noted.append(plans[0].region)
        return plans

    policy.plan = note
    return run(model, policy, **settings)[0], noted


class Causal(MaskedDiffusionLM):
    """The same weights under a causal mask: a finished token's keys and values can then not depend on what follows."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        size = input_ids.shape[1]
        return super().forward(input_ids, attention_mask=torch.ones(1, 1, size, size).tril().bool(), **kwargs)


def causal(**settings):
    model = tiny(**settings)
    model.__class__ = Causal
    return model


@pytest.mark.parametrize(
    ("shift", "freeze", "expected"),
    [(False, "immediate", 995), (False, "settled", 1027), (True, "immediate", 1034), (True, "settled", 1062)],
)
def test_it_computes_the_known_number_of_columns(shift, freeze, expected):
    model = tiny(logit_shift=shift)
    counted = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda m, args, out: counted.append(out.shape[1]))
    out, _ = run(model, FreeCache(freeze=freeze), LONG, max_new_tokens=40, block_length=8)
    handle.remove()
    assert out.token_forwards == sum(counted) == expected
    assert out.forwards == out.steps == 40


def test_full_recompute_computes_everything():
    assert run(tiny(), None, LONG, max_new_tokens=40, block_length=8)[0].token_forwards == 3000


def test_the_window_shrinks_block_by_block_and_settled_visits_the_finished_block_once_more():
    _, noted = regions(tiny(), FreeCache(freeze="settled"), max_new_tokens=9, block_length=3)
    assert noted == [(0, 20), *[(11, 20)] * 3, *[(14, 20)] * 3, *[(17, 20)] * 2]
    _, noted = regions(tiny(), FreeCache(freeze="immediate"), max_new_tokens=9, block_length=3)
    assert noted == [(0, 20), *[(11, 20)] * 2, *[(14, 20)] * 3, *[(17, 20)] * 3]


def test_with_one_block_it_is_prompt_caching():
    out, noted = regions(tiny(), FreeCache(), max_new_tokens=6, block_length=None)
    assert noted == [(0, 17), *[(11, 17)] * 5]
    assert out.token_forwards == 17 + 5 * 6


def test_forced_to_the_whole_canvas_it_is_no_cache():
    class Everything(FreeCache):
        def plan(self, state):
            return [type(plan)(region=(0, state.length)) for plan in super().plan(state)]

    model = tiny()
    everything, plain = (run(model, policy, block_length=16)[0] for policy in (Everything(), NoCache()))
    assert torch.equal(everything.sequences, plain.sequences)
    assert everything.token_forwards == 16 * 27


@pytest.mark.parametrize("freeze", ["settled", "immediate"])
@pytest.mark.parametrize("shift", [False, True])
def test_logits_are_those_of_a_full_forward_with_the_kept_keys_and_values_put_back(freeze, shift):
    model = tiny(logit_shift=shift, qkv_bias=True)
    for steps in (12, 6):
        out, seen = run(model, FreeCache(freeze=freeze), max_new_tokens=12, block_length=4, steps=steps)
        x, logits = block_freecache(model, PROMPT[0], 12, 4, freeze, steps)
        assert torch.equal(out.sequences[0], x)
        assert len(seen) == len(logits) == steps
        first = model(torch.cat([PROMPT, torch.full((1, 12), MASK)], 1)).logits[0]
        first[:, MASK] = -torch.inf
        assert torch.allclose(seen[0][1][0], first[seen[0][0]], atol=1e-5)
        for (columns, mine), reference in zip(seen, logits, strict=True):
            assert torch.allclose(mine[0], reference[columns], atol=1e-5)


@pytest.mark.parametrize("shift", [False, True])
def test_under_a_causal_mask_settled_columns_are_exact_and_immediate_ones_are_not(shift):
    model = causal(logit_shift=shift)
    plain, exact = run(model, NoCache(), scheduler=Sequential())
    differences = {}
    for policy in (FreeCache(freeze="settled"), FreeCache(freeze="immediate")):
        out, seen = run(model, policy, scheduler=Sequential())
        differences[policy.freeze] = max(
            float((a[1] - b[1]).nan_to_num(0, 0, 0).abs().max()) for a, b in zip(seen, exact, strict=True)
        )
        if policy.freeze == "settled":
            assert torch.equal(out.sequences, plain.sequences)
    assert differences["settled"] < 1e-5
    assert differences["immediate"] > 1e-4


@pytest.mark.parametrize(("keep", "agree"), [(True, 5), (False, 5), (False, 2)])
def test_the_sliding_form_must_reach_back_over_the_last_commit(keep, agree):
    """Under a causal mask what is left of the window is exact, if its tokens were read once after they were committed."""
    model = causal()
    settings = {"max_new_tokens": 20, "block_length": None}
    plain, exact = run(model, NoCache(), scheduler=GuidedScheduler(Judge(agree)), **settings)
    policy = FreeCache("sliding", window=(2, 8), keep_last_commit=keep)
    out, seen = run(model, policy, scheduler=GuidedScheduler(Judge(agree)), **settings)
    # only the window is drafted: compare what both see
    differences = []
    for (columns, mine), (there, theirs) in zip(seen, exact):
        places = [there.index(column) for column in columns]
        differences.append(float((mine - theirs[:, places]).nan_to_num(0, 0, 0).abs().max()))
    if keep or agree <= 3:  # w_left 2 and the last committed column itself
        assert max(differences) < 1e-5
        assert torch.equal(out.sequences, plain.sequences)
    else:
        assert max(differences) > 1e-4


def test_the_sliding_window_follows_the_last_committed_column():
    policy = FreeCache("sliding", window=(4, 6))
    settings = {"scheduler": GuidedScheduler(Judge(2)), "max_new_tokens": 10, "block_length": None}
    _, noted = regions(tiny(), policy, **settings)
    # p = 12, 14, 16, ...: [p - 4, p + 6)
    assert noted == [(0, 21), (8, 18), (10, 20), (12, 21), (14, 21)]
    policy = FreeCache("sliding", window=(0, 6))
    _, noted = regions(tiny(), policy, **settings)
    assert noted == [(0, 21), (11, 18), (13, 20), (15, 21), (17, 21)]  # back to the first column of the last commit
    policy = FreeCache("sliding", window=(0, 6), keep_last_commit=False)
    assert regions(tiny(), policy, **settings)[1] == [(0, 21), (12, 18), (14, 20), (16, 21), (18, 21)]


def test_columns_right_of_the_window_are_not_seen():
    model = tiny()
    settings = {"scheduler": GuidedScheduler(Judge(1)), "block_length": None}
    wide, _ = run(model, FreeCache("sliding", window=(99, 99)), **settings)
    narrow, seen = run(model, FreeCache("sliding", window=(99, 4)), **settings)
    assert [len(columns) for columns, _ in seen][1:6] == [3] * 5  # w_right - 1 masks
    assert narrow.kv_columns < wide.kv_columns
    assert not torch.equal(narrow.sequences, wide.sequences)


def golden_model():
    """The random LLaDA-shaped model of the golden file, in float64 with angles in float64."""
    data = np.load(GOLDEN / "freecache_block.npz")

    class Wide(MaskedDiffusionLM):
        def _rotation(self, positions):
            width = self.config.head_dim
            powers = torch.arange(0, width, 2, dtype=torch.float64) / width
            angles = positions[:, None, :, None].double() / self.config.rope_theta**powers
            return angles.cos(), angles.sin()

    names = {
        "transformer_wte_weight": "model.embed_tokens.weight",
        "transformer_ln_f_weight": "model.norm.weight",
        "transformer_ff_out_weight": "lm_head.weight",
    }
    ours = {
        "attn_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
    }
    for i in (0, 1):
        for theirs, mine in ours.items():
            names[f"transformer_blocks_{i}_{theirs}_weight"] = f"model.layers.{i}.{mine}.weight"
    model = Wide(
        MDLMConfig(
            vocab_size=13,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=int(data["heads"]),
            intermediate_size=24,
            rms_norm_eps=float(data["rms_eps"]),
            rope_theta=float(data["rope_theta"]),
            mask_token_id=int(data["mask_id"]),
        )
    ).double()
    weights = {name: torch.from_numpy(data[f"w_{theirs}"]) for theirs, name in names.items()}
    model.load_state_dict(weights, strict=True)
    # the norms compute in float32 at least: here in float64, as the golden numbers
    return model.eval(), data


@pytest.mark.parametrize("steps", [9, 6])
def test_the_immediate_form_gives_the_logits_of_the_released_code(steps):
    model, data = golden_model()
    prompt = torch.from_numpy(data["prompt"])[None]
    settings = {"max_new_tokens": 9, "block_length": 3, "steps": steps}
    inputs = []
    handle = model.register_forward_pre_hook(
        lambda m, args, kwargs: inputs.append(kwargs["input_ids"][0].clone()), with_kwargs=True
    )
    policy = FreeCache(freeze="immediate")
    noted = []
    plan = policy.plan
    policy.plan = lambda state: noted.append(plan(state)) or noted[-1]
    out, seen = run(model, policy, prompt, **settings)
    handle.remove()
    assert out.sequences[0].tolist() == data[f"tokens_s{steps}"].tolist()
    assert [plans[0].region[0] for plans in noted] == data[f"starts_s{steps}"].tolist()
    for call, ((columns, logits), x) in enumerate(zip(seen, inputs, strict=True)):
        begin = noted[call][0].region[0]
        assert x[begin:].tolist() == data[f"inputs_s{steps}"][call][begin:].tolist()
        theirs = torch.from_numpy(data[f"logits_s{steps}"][call][columns])
        known = torch.arange(13) != int(data["mask_id"])
        assert torch.allclose(logits[0][:, known], theirs[:, known], atol=1e-9)
    full, seen = run(model, NoCache(), prompt, **settings)
    assert full.sequences[0].tolist() == data[f"full_tokens_s{steps}"].tolist()


def test_each_step_commits_what_the_released_code_commits():
    from assay.mdlm import num_transfer

    for case in golden("transfer_counts.json")["cases"]:
        counts = num_transfer(case["masks"], case["steps"])
        assert [n for n in counts if n] == [n for n in case["counts"] if n]


@pytest.mark.parametrize("name", ["guided_trace.json", "guided_trace_eos.json"])
def test_regions_of_the_sliding_form_are_those_of_the_released_code(name):
    data = golden(name)
    for case in data["cases"]:
        model = Table(data["draft_by_column"], data["vocab"], data["mask_id"], data["eos_id"])
        w = case["window"]
        policy = FreeCache() if w is None else FreeCache("sliding", window=(w, w), keep_last_commit=False)
        scheduler = GuidedScheduler(ARGuider(Bigram(data["ar_argmax_after_token"])), verify_chunk=data["verify_chunk"])
        new = len(data["draft_by_column"]) - len(data["prompt"])
        config = DiffusionGenerationConfig(max_new_tokens=new)
        diffusion_generate(model, [data["prompt"]], config, scheduler, policy)
        assert [list(region) for region in model.regions] == case["dlm_regions"]


def test_frozen_columns_cannot_be_written_again():
    class Careless(FreeCache):
        def plan(self, state):
            plans = super().plan(state)
            return [type(p)(region=(5, state.length)) for p in plans] if state.step == 3 else plans

    with pytest.raises(FrozenRegionError):
        run(tiny(), Careless())


def test_a_finished_block_is_read_once_more_before_it_is_frozen():
    """At the end of a settled run every kept column was last written after its token was committed."""
    versions = {}

    class Watching(FreeCache):
        def plan(self, state):
            if state.cache is not None:
                versions[self.freeze] = state.cache.version.clone()
            return super().plan(state)

    for freeze in ("settled", "immediate"):
        out, _ = run(tiny(), Watching(freeze=freeze))
        committed = out.trace.steps[0, 11:23]  # without the last block, which is never frozen
        late = versions[freeze][11:23] > committed
        assert bool(late.all()) is (freeze == "settled")


def test_a_row_equals_its_single_run():
    model = tiny(logit_shift=True)
    prompts = [PROMPT[0, :5], PROMPT[0], PROMPT[0, 2:9]]
    for policy, scheduler, block in (
        (lambda: FreeCache(), lambda: None, 4),
        (lambda: FreeCache("sliding", window=(3, 9)), lambda: GuidedScheduler(Judge(3)), None),
    ):
        together, _ = run(model, policy(), prompts, scheduler(), block_length=block)
        for i, prompt in enumerate(prompts):
            alone, _ = run(model, policy(), [prompt], scheduler(), block_length=block)
            assert torch.equal(together.sequences[i, -16:], alone.sequences[0, -16:])
            assert together.row_forwards[i] == alone.row_forwards[0]


def test_full_queries_change_the_price_and_nothing_else():
    model = tiny()
    plain, ablated = run(model, FreeCache()), run(model, FreeCache(full_query=True))
    assert torch.equal(plain[0].sequences, ablated[0].sequences)
    for (_, a), (_, b) in zip(plain[1], ablated[1], strict=True):
        assert torch.equal(a, b)
    assert "full_query=True" in ablated[0].stats["policy"]


def test_keys_and_values_are_held_once():
    model = tiny()
    pointers = set()

    class Watching(FreeCache):
        def plan(self, state):
            if state.cache is not None:
                pointers.add(state.cache.keys.data_ptr())
                assert (
                    state.cache.bytes() == 2 * 2 * 2 * 8 * 27 * 4
                )  # keys and values, 2 layers, 2 heads, 8 wide, 27 columns
            return super().plan(state)

    run(model, Watching())
    assert len(pointers) == 1


def test_drift_is_measured_against_a_full_recompute_and_not_counted():
    model = tiny()
    plain, _ = run(model, FreeCache())
    out, _ = run(model, FreeCache(drift_probe=5))
    assert torch.equal(out.sequences, plain.sequences)
    assert (out.token_forwards, out.forwards) == (plain.token_forwards, plain.forwards)
    assert [probe["step"] for probe in out.stats["drift"]] == [6, 11, 16]
    for probe in out.stats["drift"]:
        assert probe["cosine_keys"][0] == pytest.approx(1)  # the first layer sees no context
        assert probe["error_values"][0] == pytest.approx(0, abs=1e-6)
        assert 0 < probe["cosine_keys"][1] < 1
        assert probe["error_values"][1] > 0


def test_drift_of_known_caches():
    model = tiny()
    old, new = model.new_cache(1, 4), model.new_cache(1, 4)
    for cache in (old, new):
        cache.keys[:] = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
        cache.values[:] = 2.0
    old.keys[1, 0, :, 2] = torch.tensor([0, 1.0, 0, 0, 0, 0, 0, 0])
    old.values[:] = 3.0
    columns = torch.tensor([[False, True, True, False]])
    drift = kv_drift(old, new, columns)
    assert drift["cosine_keys"] == pytest.approx([1.0, 0.5])
    assert drift["error_keys"] == pytest.approx([0.0, 1.0])  # |(1,-1)| squared is 2, over two columns of 1
    assert drift["cosine_values"] == pytest.approx([1.0, 1.0])
    assert drift["error_values"] == pytest.approx([0.5, 0.5])
    with pytest.raises(InputError, match="no column"):
        kv_drift(old, new, torch.zeros(1, 4, dtype=torch.bool))


def test_on_a_block_model_the_settled_form_is_exact():
    model = tiny(attention="block", block_size=4)
    prompt = PROMPT[:, :8]
    plain, _ = run(model, NoCache(), prompt, max_new_tokens=12, block_length=4)
    out, _ = run(model, FreeCache(), prompt, max_new_tokens=12, block_length=4)
    assert torch.equal(out.sequences, plain.sequences)
    with pytest.raises(UnsupportedPolicyError, match="ExactBlockCache"):
        run(model, FreeCache("sliding"), prompt, max_new_tokens=12, block_length=4)


def test_masks_in_the_prompt_are_filled_in_and_their_blocks_count():
    model = tiny()
    prompt = PROMPT.clone()
    prompt[0, [1, 8, 9]] = MASK
    policy = FreeCache()
    out, noted = regions(model, policy, prompt=prompt, max_new_tokens=4, block_length=4, allow_masks_in_prompt=True)
    assert not (out.sequences == MASK).any()
    # blocks [0, 3), [7, 11), [11, 15), and none in [3, 7)
    assert noted == [(0, 15), (0, 15), (7, 15), (7, 15), *[(11, 15)] * 3]


def test_its_own_blocks_may_differ_from_the_schedule():
    _, noted = regions(tiny(), FreeCache(block_length=4), scheduler=Sequential(), max_new_tokens=8, block_length=8)
    assert noted == [(0, 19), *[(11, 19)] * 4, *[(15, 19)] * 3]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": (-1, 4)}, "w_left of at least 0"),
        ({"window": (0, 1)}, "w_right of at least 2"),
        ({"block_length": 0}, "at least 1"),
        ({"drift_probe": -1}, "number of steps"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        FreeCache(**settings)


def test_blocks_must_divide_the_answer():
    with pytest.raises(ValueError, match="no multiple"):
        run(tiny(), FreeCache(block_length=7), block_length=16)


def test_the_name_tells_what_makes_the_result():
    assert FreeCache().name == "FreeCache(mode=block, freeze=settled)"
    assert FreeCache("sliding", window=(8, 16)).name == (
        "FreeCache(mode=sliding, window=(8, 16), keep_last_commit=True)"
    )


def test_it_computes_no_more_than_the_prefix_cache():
    model = tiny()
    assert run(model, FreeCache())[0].token_forwards < run(model, PrefixCache())[0].token_forwards
