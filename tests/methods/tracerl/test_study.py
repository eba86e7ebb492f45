"""The parts of the study that a wrong edit would spoil silently: equal arms, equal problems, and what noise means."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from assay.bench import Trial
from assay.bench._card import check_card, load_card
from assay.bench._methods import method_folders
from assay.bench._outline import read_outline
from assay.bench._study import Cell, Prepared
from assay.mdlm import MaskedDiffusionLM, MDLMConfig
from assay.methods.tracerl import study
from assay.testbeds import runsum

SHAPE = {
    "vocab_size": runsum.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "mask_token_id": runsum.MASK, "eos_token_id": runsum.EOS, "pad_token_id": runsum.EOS,
}  # fmt: skip
SMALL = {"model": "start", "steps": 1, "tasks": 4, "problems": 6, "watched": 4, "every": 1, "temperature": 1.0}


def model(**more):
    torch.manual_seed(0)
    made = MaskedDiffusionLM(MDLMConfig(**SHAPE, **more)).eval()
    with torch.no_grad():
        made.lm_head.weight *= 15
    return made


class Fake(Trial):
    """A trial with settings and a folder."""

    scale = "quick"

    def __init__(self, folder, arm, seed=0, cells=(), **values):
        self.folder, self.arm, self.seed, self._cells, self._values = folder, arm, seed, cells, values
        self.logged = []

    def __getitem__(self, name):
        return self._values[name]

    def prepared(self, function, **at):
        return Prepared(self.folder, {"rewards": [0.1, 0.3, 0.2]})

    def cells(self):
        return iter(self._cells)

    def log(self, step, /, **values):
        self.logged.append((step, values))

    def progress(self, items):
        return range(items) if isinstance(items, int) else items


@pytest.fixture(autouse=True)
def untrained(monkeypatch):
    """A model that has learned nothing, commits several tokens a step, and gets half of the answers paid."""
    for name in ("ROLLOUT", "GREEDY"):
        monkeypatch.setattr(study, name, replace(getattr(study, name), threshold=0.2))
    monkeypatch.setattr(study, "load", lambda name, seed=0: model())
    monkeypatch.setattr(
        study,
        "runsum_reward",
        lambda prompts, completions, completion_ids, **columns: [float(sum(ids) % 2) for ids in completion_ids],
    )


def test_the_card_fits_the_study():
    folder = method_folders()["tracerl"]
    check_card(load_card(folder), read_outline(folder))


def test_arms_differ_in_their_rows_alone():
    asked, masks = set(), {}
    for arm, settings in study.ARMS.items():
        if arm == "value":
            continue
        trainer = study.trainer_of(model(), settings, 3, 2, 4)
        prompts, traces, columns = trainer.rollout()
        asked.add(str([trace.response_ids.tolist() for trace in traces]))
        rows = trainer.training_rows(trainer.judge(prompts, traces, columns))
        masks[arm] = len(rows.batch) / len({int(row) for row in rows.batch.row_of_response})
        same = {k: v for k, v in trainer.args.as_dict().items() if k not in ("method", "shrink", "masks_per_sample")}
        asked.add(str(sorted(same.items(), key=str)))
    assert len(asked) == 2  # one set of rollouts, one set of settings
    assert masks["random"] == masks["coupled"] == masks["one-step"] == 4
    assert masks["trace-s4"] == pytest.approx(masks["trace"] / 4, rel=0.2)


def test_seeds_draw_other_problems_and_training_never_asks_a_held_out_one():
    drawn = [study.trainer_of(model(), study.ARMS["trace"], seed, 2, 4).train_prompts.ids for seed in (0, 1)]
    assert not torch.equal(torch.stack(drawn[0]), torch.stack(drawn[1]))
    held_out = {tuple(row.tolist()) for row in runsum.problems("easy", 512).prompts}
    assert not held_out & {tuple(ids.tolist()) for ids in drawn[0] + drawn[1]}


def test_a_trial_trains_logs_and_measures_the_same_cases(tmp_path):
    trials = {arm: Fake(tmp_path, arm, **SMALL) for arm in ("start", "trace", "random")}
    found = {arm: study.policies(trial) for arm, trial in trials.items()}
    assert {f["exact_match"].ids for f in found.values()} == {runsum.problems("easy", 6).ids}
    assert found["start"]["rows"] == 0
    assert found["trace"]["rows"] > 0
    assert found["random"]["rows"] % 4 == 0
    assert [step for step, _ in trials["trace"].logged] == [0, 1]
    assert trials["start"].logged == []


def test_noise_is_the_spread_of_gradients_over_their_mean(tmp_path):
    gradients = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert study.relative_variance(gradients) == pytest.approx(2.0 / (2.0**2 + 2.0**2))
    assert study.relative_variance(5 * gradients) == pytest.approx(0.25)


def test_one_forward_gives_the_gradient_of_each_set_of_advantages():
    policy = model()
    trainer = study.trainer_of(policy, study.ARMS["trace"], 0, 1, 4)
    rows = trainer.training_rows(trainer.judge(*trainer.rollout()))
    double = study.policy_gradients(policy, rows.batch, (rows.advantages, 2 * rows.advantages))
    torch.testing.assert_close(double[1], 2 * double[0])
    trainer.args.beta = 0.0
    total = torch.zeros_like(double[0])
    for part in torch.arange(len(rows.batch)).split(64):
        policy.zero_grad()
        loss, _ = trainer.policy_loss(rows, part)
        (loss * len(part) / len(rows.batch)).backward()
        total += torch.cat(
            [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in policy.parameters()]
        )
    torch.testing.assert_close(double[0], total, atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_the_value_arm_is_read_from_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "HALVES", 2)
    settings = SMALL | {"steps": 2, "every": 1, "tasks": 4}
    job = Fake(tmp_path, "", **settings)
    kept = study.value_run(job)
    assert len(kept["rewards"]) == 2
    assert {p.name for p in tmp_path.iterdir()} >= {"policy-1.safetensors", "value-2.safetensors"}
    found = study.variants(Fake(tmp_path, "value", **settings))
    assert found["reward_step_variance"] == pytest.approx(torch.tensor([0.2, -0.1]).var().item() / 2)
    cells = [Cell("zscore"), Cell("value")]
    noise = study.gradient_noise(Fake(tmp_path, "", cells=cells, **settings))
    for cell in cells:
        assert noise[cell]["noise"] == pytest.approx(math.sqrt(noise[cell]["noise_early"] * noise[cell]["noise_late"]))
    assert noise[cells[0]]["noise"] != noise[cells[1]]["noise"]


def test_fine_tuning_takes_as_many_rows_whatever_the_masks(tmp_path, monkeypatch):
    problems = runsum.draw(12, "easy", 5)
    steps = torch.randint(1, 4, problems.answers.shape)
    save_file(
        {"prompts": problems.prompts, "answers": problems.answers, "steps": steps}, tmp_path / "traces.safetensors"
    )
    monkeypatch.setattr(study.MaskedDiffusionLM, "from_autoregressive", classmethod(lambda cls, ar, mask: ar))
    seen = []
    plain = study.sft_loss
    monkeypatch.setattr(study, "sft_loss", lambda model, rows: seen.append(len(rows.batch)) or plain(model, rows))
    settings = {"model": "ar", "steps": 2, "batch": 8, "rate": 1e-3, "problems": 4}
    for arm in study.fine_tuning.arms:
        found = study.fine_tuning(Fake(tmp_path, arm, **settings))
        assert found["exact_match"].ids == runsum.problems("easy", 4).ids
    assert seen[:2] == [8, 8]
    assert all(6 <= count <= 8 for count in seen)  # a row without any mask is left out


def test_blocks_grow_by_the_model_s_own_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "load", lambda name, seed=0: model(attention="block", block_size=4))
    used = []
    plain = study.decoded

    def watched(policy, problems, config):
        used.append((policy.config.block_size, config.block_origin))
        return plain(policy, problems, config)

    monkeypatch.setattr(study, "decoded", watched)
    for arm in study.block_growth.arms:
        study.block_growth(Fake(tmp_path, arm, **SMALL))
    assert used[0] == (4, "prompt")
    assert set(used[1:]) == {(8, "prompt")}


def test_the_rate_is_the_best_of_the_grid_on_problems_that_no_seed_sees(tmp_path, monkeypatch):
    trial = Fake(tmp_path, "random", **SMALL)
    measured = dict(zip(study.RATES, (0.5, 0.625, 0.625, 0.5, 0.25), strict=True))
    trial.prepared = lambda function, rate: Prepared(tmp_path, {"exact_match": measured[rate]})
    assert study.rate_of(trial) == study.RATES[1]
    trial.prepared = lambda function, rate: Prepared(tmp_path, {})
    assert study.rate_of(trial) == study.RATE

    drawn = []
    draw = runsum.draw
    monkeypatch.setattr(runsum, "draw", lambda count, split, seed: drawn.append(seed) or draw(count, split, seed))
    monkeypatch.setattr(study, "TUNING_PROBLEMS", 4)
    job = Fake(tmp_path, "random", rate=1e-3, **SMALL)
    assert study.rate_run.function(job) == {}  # at the quick scale nothing is tuned
    job.scale = "full"
    assert 0 <= study.rate_run.function(job)["exact_match"] <= 1
    assert drawn
    assert {seed[0] for seed in drawn} == {study.TUNING_SEED}
    assert study.TUNING_SEED >= 30  # beyond any seed of a study
