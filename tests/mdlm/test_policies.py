"""What each policy recomputes is what its paper says, in exact numbers; where a policy is exact, nothing changes."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from assay._errors import InputError  # noqa: E402
from assay.mdlm import (  # noqa: E402
    CachePolicy,
    DiffusionGenerationConfig,
    DualCache,
    ExactBlockCache,
    ForwardPlan,
    GenState,
    LowConfidenceDynamic,
    LowConfidenceStatic,
    NoCache,
    PrefixCache,
    Sequential,
    diffusion_generate,
)

from .stubs import Recompute, Refreshing  # noqa: E402
from .tiny import MASK, tiny  # noqa: E402

PROMPT = [3, 1, 4, 1, 5]


def generate(policy: CachePolicy | None, model: Any = None, prompts: Any = None, **settings: Any):
    scheduler = settings.pop("scheduler", None)
    config = DiffusionGenerationConfig(**{"max_new_tokens": 12, "eos_policy": "none", "return_trace": True, **settings})
    model = tiny() if model is None else model
    return diffusion_generate(model, [PROMPT] if prompts is None else prompts, config, scheduler, policy)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a.sequences, b.sequences) and torch.equal(a.trace.steps, b.trace.steps)


# --- known amounts of work: the run-sum canvas, L0 = 35 and N = 40 in blocks of 8, one token a step


@pytest.mark.parametrize(
    ("policy", "shift", "tokens", "keys"),
    [
        (None, False, 40 * 75, 40 * 75),
        (None, True, 40 * 75, 40 * 75),
        # a full forward for each of 5 blocks; then 7 forwards a block from its start to the end
        (PrefixCache(), False, 5 * 75 + 7 * (40 + 32 + 24 + 16 + 8), 40 * 75),
        # with shifted logits each region is one column wider, the first of a block excepted
        (PrefixCache(), True, 5 * 75 + 7 * (41 + 33 + 25 + 17 + 9), 40 * 75),
        (PrefixCache(8), False, 5 * 75 + 7 * (16 + 16 + 16 + 16 + 8), 5 * 75 + 7 * (51 + 59 + 67 + 75 + 75)),
        (PrefixCache(0), False, 5 * 75 + 35 * 8, 5 * 75 + 7 * (43 + 51 + 59 + 67 + 75)),
        (DualCache(), False, 5 * 75 + 35 * 8, 40 * 75),
        (DualCache(), True, 5 * 75 + 35 * 9, 40 * 75),
    ],
)
def test_the_work_of_a_policy_is_known(policy, shift, tokens, keys):
    prompts = torch.randint(0, 30, (2, 35), generator=torch.Generator().manual_seed(0))
    output = generate(policy, tiny(logit_shift=shift), prompts, max_new_tokens=40, block_length=8)
    assert output.row_token_forwards.tolist() == [tokens, tokens]
    assert output.row_kv_columns.tolist() == [keys, keys]
    assert (output.token_forwards, output.kv_columns) == (2 * tokens, 2 * keys)
    assert (output.steps, output.forwards) == (40, 40)
    assert output.row_forwards.tolist() == output.row_steps.tolist() == [40, 40]


def test_the_work_of_the_exact_block_cache_is_known():
    model = tiny(attention="block", block_size=4)
    whole = generate(ExactBlockCache(), model, [[*PROMPT, 9, 2, 6]], max_new_tokens=8)
    # the prompt's two blocks; four steps of a block and its writing; four steps of the last
    assert (whole.steps, whole.forwards) == (8, 1 + 4 + 1 + 4)
    assert whole.token_forwards == 8 + 4 * 4 + 4 + 4 * 4
    assert whole.kv_columns == 8 + 4 * 12 + 12 + 4 * 16
    partial = generate(ExactBlockCache(), model, [PROMPT], max_new_tokens=8)
    # one whole block; the second holds the prompt's last token and three masks; then four; then one column
    assert (partial.steps, partial.forwards) == (8, 1 + 3 + 1 + 4 + 1 + 1)
    assert partial.token_forwards == 4 + 3 * 4 + 4 + 4 * 4 + 4 + 1
    from_prompt = generate(ExactBlockCache(), model, [PROMPT], max_new_tokens=8, block_origin="prompt")
    assert (from_prompt.forwards, from_prompt.token_forwards) == (1 + 4 + 1 + 4, 5 + 4 * 4 + 4 + 4 * 4)
    short = generate(ExactBlockCache(), model, [[3]], max_new_tokens=4)  # a prompt without a whole block
    assert (short.forwards, short.token_forwards) == (3 + 1 + 1, 3 * 4 + 4 + 1)


# --- exactness


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("policy", [Recompute(), Refreshing()])
def test_recomputing_everything_through_the_cache_changes_nothing(policy, shift):
    model = tiny(logit_shift=shift)
    cached, plain = generate(policy, model, block_length=4), generate(NoCache(), model, block_length=4)
    assert same(cached, plain)
    assert torch.equal(cached.trace.logp, plain.trace.logp)


@pytest.mark.parametrize("origin", ["canvas", "prompt"])
@pytest.mark.parametrize("length", [1, 5, 8])
@pytest.mark.parametrize("scheduler", [LowConfidenceStatic(), LowConfidenceDynamic(0.3), Sequential()])
def test_the_exact_block_cache_is_exact(origin, length, scheduler):
    model = tiny(attention="block", block_size=4, dtype=torch.float64)
    prompts = torch.randint(0, 30, (3, length), generator=torch.Generator().manual_seed(length))
    settings = {"block_origin": origin, "scheduler": scheduler}
    cached, plain = generate(ExactBlockCache(), model, prompts, **settings), generate(None, model, prompts, **settings)
    assert same(cached, plain)
    assert torch.allclose(cached.trace.logp, plain.trace.logp, atol=1e-10, rtol=0)
    assert cached.token_forwards < plain.token_forwards


def test_the_exact_block_cache_is_exact_around_a_gap_in_the_prompt():
    model = tiny(attention="block", block_size=4, dtype=torch.float64)
    prompt = [3, MASK, 4, 1, 5, 9, 2, 6, 5, 3, MASK, 8, 9]  # its second block has no mask
    cached, plain = (
        generate(policy, model, [prompt], allow_masks_in_prompt=True) for policy in (ExactBlockCache(), NoCache())
    )
    assert same(cached, plain)


@pytest.mark.parametrize("policy", [PrefixCache(), PrefixCache(2), DualCache()])
def test_with_one_token_a_block_the_block_caches_are_exact(policy):
    model = tiny(dtype=torch.float64)
    assert same(generate(policy, model, block_length=1), generate(None, model, block_length=1))


@pytest.mark.parametrize("policy", [PrefixCache(), DualCache()])
def test_the_block_caches_are_only_nearly_right_otherwise(policy):
    model = tiny(dtype=torch.float64)
    cached, plain = generate(policy, model, block_length=6), generate(None, model, block_length=6)
    first = plain.trace.steps == 1
    assert torch.equal(cached.trace.steps == 1, first)  # the first forward is the full one
    assert torch.equal(cached.trace.logp[first], plain.trace.logp[first])
    assert not torch.allclose(cached.trace.logp, plain.trace.logp, atol=1e-3)


class Watching(DualCache):
    """Notes the age of the columns when a step begins."""

    def plan(self, state: GenState) -> ForwardPlan | list[ForwardPlan]:
        if state.cache is not None:
            state.stats.setdefault("versions", []).append(state.cache.version.tolist())
        return super().plan(state)


def test_the_dual_cache_is_refreshed_once_a_block():
    output = generate(Watching(), block_length=6, max_new_tokens=12)
    assert output.stats["versions"] == [[1] * 17] * 6 + [[7] * 17] * 5


def test_what_is_frozen_stays():
    class Late(CachePolicy):
        def plan(self, state: GenState) -> ForwardPlan:
            frozen = None if state.step < 3 else (0, 5)
            return ForwardPlan(region=(0 if state.step < 4 else 5, state.length), freeze=frozen)

    kept = generate(Late())
    assert kept.steps == 12

    class TooLate(CachePolicy):
        def plan(self, state: GenState) -> ForwardPlan:
            return ForwardPlan(region=(0, state.length), freeze=None if state.step < 3 else (0, 5))

    with pytest.raises(RuntimeError, match="column 0, which is frozen"):
        generate(TooLate())


# --- what does not fit


def test_a_policy_and_a_model_that_do_not_fit_are_refused():
    block = tiny(attention="block", block_size=4)
    with pytest.raises(InputError, match=r"PrefixCache\(horizon=None\) is for models with full attention"):
        generate(PrefixCache(), block)
    with pytest.raises(InputError, match="DualCache is for models with full attention"):
        generate(DualCache(), block)
    with pytest.raises(InputError, match="ExactBlockCache is for block models"):
        generate(ExactBlockCache())
    with pytest.raises(InputError, match="horizon is -1"):
        PrefixCache(-1)


def test_the_result_says_which_policy_and_scheduler_it_is_of():
    output = generate(PrefixCache(4), block_length=4)
    assert output.stats == {
        "scheduler": "LowConfidenceStatic(block_length=4, steps=None, confidence=max_prob from raw)",
        "policy": "PrefixCache(horizon=4)",
    }
