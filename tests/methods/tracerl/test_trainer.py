"""The loop: exact resume, accumulation, what is skipped, what is refused, and that it learns."""

import json
import warnings

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig, PrefixCache
from assay.methods.tracerl import DiffusionValueModel, Trace, TraceRLConfig, TraceRLTrainer, collect_traces
from assay.methods.tracerl._prompts import Prompts

from ...mdlm.tiny import EOS, MASK, tiny

BLOCK = {"attention": "block", "block_size": 2}
WITHOUT_END = DiffusionGenerationConfig(max_new_tokens=4, temperature=1.0, eos_policy="suppress")
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
    losses = [[record.get("policy_loss") for record in run.history] for run in (whole, second)]
    assert losses[0] == losses[1]
    assert any(loss is not None for loss in losses[0][2:])


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path):
    run = trainer(output_dir=str(tmp_path), save_every=2)
    run.train(until=2)
    run.one_step()  # killed before it was saved
    again = trainer(output_dir=str(tmp_path), save_every=2)
    again.train(resume=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["generation"]["threshold"] == 0.3
    assert settings["responses_per_step"] == 32
    with pytest.raises(InputError, match=r"was made with eps = 0\.2, this run has 0\.3"):
        trainer(output_dir=str(tmp_path), eps=0.3).train(resume=True)
    with pytest.raises(InputError, match="holds no checkpoint"):
        trainer().train(resume=str(tmp_path / "nowhere"))


def test_eight_forwards_of_one_row_are_one_of_eight():
    """And the tail counts: rows that do not fill the last update are trained on, by their real number."""
    ends = []
    for rows, forwards in ((8, 1), (1, 8), (3, 3)):
        model = policy(dtype=torch.float64)
        run = trainer(
            model, micro_batch_size=rows, gradient_accumulation_steps=forwards, updates_per_step=None, max_grad_norm=1e9
        )
        record = run.one_step()
        per_update = rows * forwards
        assert record["policy_updates"] == -(-record["rows"] // per_update)
        if per_update == 8:
            ends.append(weights(model))
        else:
            assert record["rows"] % per_update
    torch.testing.assert_close(ends[0], ends[1], atol=1e-9, rtol=0)


def test_it_learns_a_reward():
    model = policy()
    run = trainer(model, steps=8, eval_dataset=PROMPTS)
    before = run.evaluate()["reward"]
    run.train()
    rewards = [record["reward"] for record in run.history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.15
    assert run.evaluate()["reward"] >= before


def test_a_step_without_a_task_to_learn_from_is_skipped_and_counted():
    model = policy()
    start = weights(model).clone()
    run = trainer(model, reward=lambda prompts, completions, **columns: [1.0] * len(prompts))
    with pytest.warns(UserWarning, match="no task has a mean reward within"):
        record = run.one_step()
    assert (record["skipped"], record["kept"], run.step) == (1, 0, 1)
    assert torch.equal(weights(model), start)


def test_the_first_update_starts_from_ratio_one_and_only_kept_tasks_are_trained():
    run = trainer()
    experience = run.judge(*run.rollout())
    rows = run.training_rows(experience)
    _, metrics = run.policy_loss(rows, torch.arange(len(rows.batch)))
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics["kl"]) < 1e-9
    kept = experience.trained
    assert torch.equal(kept // 8, experience.kept.nonzero()[:, 0].repeat_interleave(8))
    groups = experience.zscores.view(-1, 8)
    torch.testing.assert_close(groups.mean(1), torch.zeros(4, dtype=torch.float64), atol=1e-9, rtol=0)
    deviation = groups.std(1, correction=0)[experience.kept]
    torch.testing.assert_close(deviation, torch.ones_like(deviation))
    assert (rows.advantages == 0)[~rows.batch.p_mask].all()


def test_a_fresh_value_model_leaves_the_advantages_and_then_learns():
    plain, with_value = trainer(), trainer(value=True)
    a = plain.training_rows(plain.judge(*plain.rollout()))
    b = with_value.training_rows(with_value.judge(*with_value.rollout()))
    assert (b.values_old == 0).all()
    torch.testing.assert_close(a.advantages, b.advantages)
    for _ in range(4):
        with_value._value_updates(b)
    assert weights(with_value.value_model.value_head).abs().max() > 0
    learned = with_value._scored(b.batch, with_value._values_of())
    error = [(v - b.returns)[b.batch.p_mask].square().mean() for v in (b.values_old, learned)]
    assert error[1] < 0.9 * error[0]
    raw = trainer(value=True, value_reward="raw")
    found = raw.training_rows(raw.judge(*raw.rollout())).returns
    assert set(found.unique().tolist()) <= {0.0, 1.0}


def test_value_models_of_every_family_start_as_their_policy():
    for overrides in ({}, {"logit_shift": True, "qkv_bias": True}, BLOCK, {"tie_word_embeddings": True}):
        model = tiny(**overrides)
        value = DiffusionValueModel.from_policy(model)
        ids = torch.randint(0, 38, (2, 7))
        assert torch.equal(value(ids), torch.zeros(2, 7))
        value.value_head.weight.data.fill_(1.0)
        torch.testing.assert_close(value(ids), model(ids).last_hidden_state.sum(-1))
        value.body.model.norm.weight.data.zero_()
        assert (model.model.norm.weight != 0).all()  # its own copy


def test_a_value_model_and_a_policy_are_saved_and_opened_again(tmp_path):
    run = trainer(value=True)
    run.one_step()
    run.save_model(tmp_path)
    value = DiffusionValueModel.from_pretrained(tmp_path / "value_model")
    assert torch.equal(weights(value), weights(run.value_model))
    again = type(run.policy).from_checkpoint(tmp_path)
    assert torch.equal(weights(again), weights(run.policy))


def test_process_rewards_fall_on_their_tokens_and_need_a_value_model():
    def by_token(prompts, completions, completion_ids, **columns):
        return [[float(t % 2 == 0) for t in ids] for ids in completion_ids]

    def by_segment(prompts, completions, completion_ids, **columns):
        return [[(2, 1.0), (len(ids), 0.5)] for ids in completion_ids]

    run = trainer(value=True, reward=[reward, by_token, by_segment], gamma=0.0, generation=WITHOUT_END)
    experience = run.judge(*run.rollout())
    rows = run.training_rows(experience)
    returns = rows.batch.by_response(rows.returns, len(experience.trained))
    for row, number in zip(returns, experience.trained.tolist()):
        trace = experience.traces[number]
        last = trace.step_map == trace.step_map.max()
        wanted = (trace.response_ids % 2 == 0).double() + torch.tensor([1.0, 1.0, 0.5, 0.5])
        wanted += experience.zscores[number] * last
        torch.testing.assert_close(row.double(), wanted, atol=1e-5, rtol=0)
    only = trainer(value=True, reward=by_token, keep_band=None, generation=WITHOUT_END)
    outcome = only.judge(*only.rollout()).rewards.outcome
    assert ((outcome * 4) % 1 == 0).all()
    with pytest.raises(InputError, match="process rewards need a value model"):
        trainer(reward=[reward, by_token]).one_step()
    with pytest.raises(InputError, match=r"segment \[0, 9\) of 4 tokens"):
        trainer(value=True, reward=lambda prompts, **columns: [[(9, 1.0)]] * len(prompts)).one_step()
    with pytest.raises(InputError, match="mixes numbers with lists"):
        trainer(value=True, reward=lambda prompts, **columns: [1.0] + [[1.0] * 4] * (len(prompts) - 1)).one_step()


def test_cut_off_answers_count_as_wrong_and_none_is_not_scored():
    def all_right(prompts, completions, wanted, **columns):
        return [None if w == 10 else 1.0 for w in wanted]

    run = trainer(reward=all_right, limit_margin=2, keep_band=None)
    experience = run.judge(*run.rollout())
    for trace, outcome in zip(experience.traces, experience.rewards.outcome.tolist()):
        if outcome == outcome:
            assert outcome == float(not trace.hit_limit)
    unscored = experience.rewards.outcome.isnan()
    assert unscored.any()
    assert not unscored[experience.trained].any()


def test_blocks_grow_after_the_warm_steps():
    model = policy(**BLOCK)
    run = trainer(model, block_size=4, warm_block_size=2, warm_steps=1)
    sizes = []
    for _ in range(2):
        run.one_step()
        sizes.append(run.policy.config.block_size)
    assert sizes == [2, 4]
    assert run.generation.block_origin == "prompt"


def test_another_engine_may_sample():
    seen = []

    def engine(model, prompts, n, generation):
        seen.append((len(prompts), n, generation.temperature))
        return collect_traces(model, prompts, n, generation)  # its own idea of what is cut off is not asked for

    run = trainer(rollout_fn=engine)
    plain = trainer()
    run.one_step(), plain.one_step()
    assert seen == [(4, 8, 1.0)]
    assert torch.equal(weights(run.policy), weights(plain.policy))
    with pytest.raises(InputError, match="returned 3 traces"):
        trainer(rollout_fn=lambda *a: engine(*a)[:3]).one_step()
    with pytest.raises(InputError, match="of another prompt"):
        trainer(rollout_fn=lambda *a: engine(*a)[::-1]).one_step()

    def unfinished(*a):
        return [
            Trace(prompt_ids=t.prompt_ids, response_ids=t.response_ids * 0 + MASK, step_map=t.step_map)
            for t in engine(*a)
        ]

    with pytest.raises(InputError, match="holds masks"):
        trainer(rollout_fn=unfinished).one_step()


def test_every_example_is_asked_once_an_epoch():
    prompts = Prompts(PROMPTS, None, MASK)
    asked = torch.cat([prompts.at_step(step, 4, 7) for step in range(6)])
    for epoch in asked.split(6):
        assert sorted(epoch.tolist()) == list(range(6))
    assert asked[:6].tolist() != asked[6:12].tolist()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: trainer(policy(**BLOCK)), "block_size is not set"),
        (lambda: trainer(block_size=4), "models that attend block by block"),
        (lambda: trainer(policy(**BLOCK), block_size=2, method="one_step"), "a block model never sees"),
        (lambda: trainer(value=True, method="random"), "a value model needs rows that follow a trace"),
        (lambda: trainer(tasks_per_step=7), "a step asks 7 prompts, and the data set has 6"),
        (lambda: trainer(dataset=[{"prompt": [3, MASK]}]), "holds the mask id 39"),
        (lambda: trainer(dataset=[{"question": "?"}]), "has no 'prompt', only question"),
        (lambda: trainer(dataset=[{"prompt": "text"}]), "there is no tokenizer"),
        (lambda: trainer(dataset=[{"prompt": []}]), "has no tokens"),
        (lambda: trainer(dataset=[]), "no prompt left to ask"),
        (lambda: trainer(reward=lambda prompts, **columns: [1.0]).one_step(), "returned 1 rewards for 32 completions"),
        (lambda: trainer(reward=lambda prompts, **columns: ["x"] * 32).one_step(), "returned 'x' for completion 0"),
        (lambda: trainer().evaluate(), "nothing to evaluate on"),
        (lambda: config(num_generations=1), "a group of one has no baseline"),
        (lambda: config(shrink=0), "shrink is 0, expected at least 1"),
        (lambda: config(warm_steps=3), "go together"),
        (lambda: config(keep_band=(0.8, 0.2)), "is no band"),
        (lambda: config(logprob_temperature=0.0), "expected a positive number"),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match=message):
            build()


def test_a_value_model_of_another_width_is_refused():
    other = DiffusionValueModel.from_policy(tiny(hidden_size=16, num_attention_heads=2, num_key_value_heads=2))
    with pytest.raises(InputError, match="hidden size 16 and the policy 32"):
        TraceRLTrainer(policy(), reward, config(), PROMPTS, value_model=other)


def test_what_is_known_to_go_badly_is_said():
    with pytest.warns(UserWarning, match="2 tasks of 4 responses are few"):
        trainer(tasks_per_step=2, num_generations=4)
    generation = DiffusionGenerationConfig(max_new_tokens=8, block_length=4, temperature=1.0)
    with pytest.warns(UserWarning, match="blocks of 4 tokens are short"):
        TraceRLTrainer(policy(), reward, config(generation=generation), PROMPTS, cache_policy=PrefixCache())
    with pytest.warns(UserWarning, match="3 prompts are longer than 2 tokens"):
        trainer(max_prompt_length=2, tasks_per_step=3, num_generations=16)


def test_the_penalty_may_pull_to_the_policy_before_the_run():
    run = trainer(kl_ref="reference", beta=0.1, learning_rate=0.05)
    run.one_step()
    rows = run.training_rows(run.judge(*run.rollout()))
    assert run.policy_loss(rows, torch.arange(len(rows.batch)))[1]["kl"] > 1e-4
    assert (rows.batch.dense(rows.logp_ref[rows.batch.p_mask]) - rows.logp_old).abs().max() > 1e-3


def test_suppressed_ends_are_no_part_of_the_distribution():
    run = trainer(generation=WITHOUT_END, keep_band=None)
    experience = run.judge(*run.rollout())
    rows = run.training_rows(experience)
    assert not any((trace.response_ids == EOS).any() for trace in experience.traces)
    recorded = torch.stack([trace.logps for trace in experience.traces])
    recomputed = rows.batch.by_response(rows.logp_old, len(recorded))
    torch.testing.assert_close(recomputed.double(), recorded, atol=5e-4, rtol=0)


def test_bfloat16_and_recomputed_activations_train_too():
    for settings in ({"bf16": True}, {"gradient_checkpointing": True}):
        model = policy()
        start = weights(model).clone()
        assert torch.isfinite(torch.tensor(trainer(model, **settings).one_step()["policy_loss"]))
        assert not torch.equal(weights(model), start)
