"""The loop: exact resume, accumulation, what is skipped, what is refused, and that it learns."""

import warnings

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig
from assay.methods.tracerl import DiffusionValueModel, TraceRLConfig, TraceRLTrainer

from ...mdlm.tiny import EOS, MASK, tiny

BLOCK = {"attention": "block", "block_size": 2}
PROMPTS = [{"prompt": [3 + i, 5, 7 + i][: 2 + i % 2], "wanted": 10 + i} for i in range(6)]


def reward(prompts, completions, wanted, completion_ids, **columns):
    """More than half of the tokens are even."""
    return [float(sum(t % 2 == 0 for t in ids) > len(ids) / 2) for ids in completion_ids]


def config(**settings):
    generation = DiffusionGenerationConfig(
        max_new_tokens=4, schedule="dynamic", threshold=0.3, temperature=1.0, eos_policy="none"
    )
    given = {
        "generation": generation, "steps": 4, "tasks_per_step": 4, "num_generations": 8, "learning_rate": 1e-2,
        "value_lr": 1e-2, "keep_band": (0.05, 0.95), "post_num": None, "limit_margin": None, "shrink": 1,
        "micro_batch_size": 8, "updates_per_step": 2, "use_cpu": True,
    }  # fmt: skip
    return TraceRLConfig(**(given | settings))


def policy(**overrides):
    """A policy that is not sure of anything yet."""
    model = tiny(**overrides)
    with torch.no_grad():
        model.lm_head.weight *= 0.3
    return model


def trainer(model=None, value=False, dataset=PROMPTS, reward=reward, **settings):
    model = policy() if model is None else model
    fast = {name: settings.pop(name) for name in ("rollout_fn", "eval_dataset", "callbacks") if name in settings}
    value_model = DiffusionValueModel.from_policy(model) if value else None
    return TraceRLTrainer(model, reward, config(**settings), dataset, value_model=value_model, **fast)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("model", "value", "settings"),
    [
        ({}, False, {}),
        ({"logit_shift": True}, True, {"gamma": 0.9, "lam": 0.5}),
        (BLOCK, True, {"block_size": 2, "shrink": 2}),
        ({}, False, {"method": "random", "masks_per_sample": 3, "kl_ref": "reference"}),
    ],
)
def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path, model, value, settings):
    whole = trainer(policy(**model), value, **settings)
    whole.train()
    first = trainer(policy(**model), value, output_dir=str(tmp_path), **settings)
    first.train(until=2)
    assert first.step == 2
    torch.manual_seed(99)  # nothing may hang on what else was drawn meanwhile
    second = trainer(policy(**model), value, output_dir=str(tmp_path), **settings)
    second.train(resume=True)
    assert second.step == 4
    assert torch.equal(weights(second.policy), weights(whole.policy))
    assert not torch.equal(weights(first.policy), weights(whole.policy))
    if value:
        assert torch.equal(weights(second.value_model), weights(whole.value_model))
    losses = [[record["policy_loss"] for record in run.history] for run in (whole, second)]
    assert losses[0] == losses[1]
