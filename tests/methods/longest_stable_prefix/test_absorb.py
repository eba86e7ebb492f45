"""The cache that only appends: exact where nothing looks right, as much work as promised, and never rewritten."""

import math
from itertools import pairwise

import pytest
import torch

from assay.mdlm import FrozenRegionError, LowConfidenceDynamic, NoCache, diffusion_generate
from assay.methods.longest_stable_prefix import LongestStablePrefix, PrefixAbsorbCache

from .scripted import Causal, Scripted, config, sharp, tiny

PROMPT = torch.tensor([[1, 2, 3, 4, 5]])


class Kept(PrefixAbsorbCache):
    """Keeps the plans, and the cache as each forward left it."""

    def reset(self, state, model):
        super().reset(state, model)
        self.plans, self.versions, self.keys, self.boundaries = [], [], [], []

    def plan(self, state):
        if state.cache is not None:
            self.versions.append(state.cache.version.clone())
            self.keys.append(state.cache.keys.clone())
            assert state.cache.frozen[: self.boundaries[-1]].all()
            assert not state.cache.frozen[self.boundaries[-1] :].any()
        self.boundaries.append(int(state.masked.int().argmax(1)[0]))
        plans = super().plan(state)
        self.plans += plans
        return plans


@pytest.mark.parametrize("shift", [False, True])
def test_on_a_causal_model_the_output_is_that_without_a_cache(shift):
    model = Causal(logit_shift=shift)
    scheduler = LongestStablePrefix(delimiters=[1, 7])
    policy = Kept()
    settings = config(32, eos_policy="none")
    plain = diffusion_generate(model, PROMPT, settings, scheduler, NoCache())
    cached = diffusion_generate(model, PROMPT, settings, scheduler, policy)
    assert torch.equal(plain.sequences, cached.sequences)
    assert plain.stats["commit_lengths"] == cached.stats["commit_lengths"]
    assert plain.stats["tau"][0] == pytest.approx(cached.stats["tau"][0], abs=1e-4)

    # forward k computes the active columns and the last block; the first the whole canvas
    lengths, active = cached.stats["commit_lengths"][0], cached.stats["active_lengths"][0]
    sizes = [end - start for start, end in (plan.region for plan in policy.plans)]
    assert sizes == [37, *(n + last for n, last in zip(active[1:], lengths))]
    assert cached.token_forwards == sum(sizes)
    assert cached.kv_columns == 37 * len(sizes)

    # what is frozen keeps its bits, and was written by an earlier forward the further left it stands
    for before, after, plan in zip(policy.keys, policy.keys[1:], policy.plans[1:]):
        start = plan.region[0]
        assert torch.equal(before[:, :, :, :start], after[:, :, :, :start])
    assert all((version.diff() >= 0).all() for version in policy.versions)


def test_immediate_freezing_computes_the_active_columns_alone():
    policy = Kept("immediate")
    out = diffusion_generate(
        tiny(), PROMPT, config(24, eos_policy="none"), LongestStablePrefix(delimiters=None), policy
    )
    sizes = [end - start for start, end in (plan.region for plan in policy.plans)]
    assert sizes == [29, *out.stats["active_lengths"][0][1:]]
    shifted = diffusion_generate(
        tiny(logit_shift=True), PROMPT, config(24, eos_policy="none"), LongestStablePrefix(delimiters=None), policy
    )
    # the column left of the boundary is computed too, for its logits, and not written
    assert shifted.token_forwards == 29 + sum(n + 1 for n in shifted.stats["active_lengths"][0][1:])


def test_a_frozen_column_may_not_be_written():
    class Rewrites(PrefixAbsorbCache):
        def plan(self, state):
            plans = super().plan(state)
            if state.step == 3:
                start, end = plans[0].region
                return [type(plans[0])(region=(start - 1, end))]
            return plans

    with pytest.raises(FrozenRegionError):
        diffusion_generate(
            tiny(), PROMPT, config(24, eos_policy="none"), LongestStablePrefix(delimiters=None), Rewrites()
        )


@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_work_stays_below_its_bound(alpha, seed):
    n, prompt = 64, PROMPT.shape[1]
    scheduler = LongestStablePrefix(alpha=alpha, beta=0.5, lookback=0, stability=0, delimiters=None)
    out = diffusion_generate(tiny(seed), PROMPT, config(n, eos_policy="none"), scheduler, PrefixAbsorbCache())
    assert out.token_forwards <= prompt + n / alpha + n
    assert out.forwards <= 1 + math.log(n) / -math.log(1 - alpha) + 2  # at the end single places
    active = out.stats["active_lengths"][0]
    assert all(after <= (1 - alpha) * before or before - after == 1 for before, after in pairwise(active))


def test_a_horizon_ends_what_is_computed_seen_and_counted():
    policy = Kept(horizon=8)
    model = Scripted(lambda x, call: sharp(torch.full_like(x, 7), 3.0))
    out = diffusion_generate(model, PROMPT, config(24), LongestStablePrefix(delimiters=None), policy)
    for plan, boundary in zip(policy.plans, policy.boundaries):
        assert plan.region[1] == plan.see[1] == min(29, boundary + 8)
    assert out.stats["active_lengths"][0][0] == 8
    assert max(out.stats["active_lengths"][0]) == 8
    assert out.stats["commit_lengths"][0][:3] == [4, 4, 4]


def test_under_a_scattered_scheduler_nothing_stale_is_frozen():
    model = Causal(seed=2)
    settings = config(24, eos_policy="none")
    scheduler = LowConfidenceDynamic(0.5)
    plain = diffusion_generate(model, PROMPT, settings, scheduler)
    cached = diffusion_generate(model, PROMPT, settings, scheduler, Kept())
    assert torch.equal(plain.sequences, cached.sequences)
    assert cached.token_forwards < plain.token_forwards


def test_guidance_and_padding_go_through_the_cache():
    model = Causal(seed=4)
    prompts = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2])]
    settings = config(16, cfg_scale=0.5, eos_policy="none")
    scheduler = LongestStablePrefix(delimiters=[1])
    plain = diffusion_generate(model, prompts, settings, scheduler)
    cached = diffusion_generate(model, prompts, settings, scheduler, PrefixAbsorbCache())
    assert torch.equal(plain.sequences, cached.sequences)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": "soon"}, "'soon'"),
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": True}, "horizon is True, expected a whole number"),
    ],
)
def test_unknown_settings_are_refused(settings, message):
    with pytest.raises(Exception, match=message):
        PrefixAbsorbCache(**settings)
