"""The trained run-sum models: what ships is of today's recipe, whole and good, and needs neither network nor training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig, diffusion_generate
from assay.testbeds import _runsum_models, load, runsum
from assay.testbeds._runsum_models import (
    RECIPES,
    WEIGHTS,
    one_token_a_step_exact,
    shipped_weights,
    teacher_forced_exact,
)
from assay.testbeds._stages import digest

SHIPPED = [("runsum-dlm", 0), ("runsum-dlm", 1), ("runsum-dlm", 2), ("runsum-dlm-start", 0), ("runsum-guider", 0)]


@pytest.fixture
def untrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no training."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a model was trained")

    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_runsum_models, "result", refuse)


def dynamic(model: Any, problems: runsum.Problems) -> tuple[float, float]:
    """Share of exact answers at a threshold of 0.9 on the whole canvas, and the mean number of calls."""
    config = DiffusionGenerationConfig(max_new_tokens=40, schedule="dynamic", threshold=0.9)
    output = diffusion_generate(model, problems.prompts, config)
    exact = runsum.exact_match(problems.prompts, output.sequences[:, runsum.PROMPT_LENGTH :])
    return float(exact.float().mean()), float(output.row_forwards.float().mean())


def test_what_ships_is_listed_whole_and_of_todays_recipes():
    """A recipe that is changed needs its weights made anew: `assay.testbeds._runsum_models.ship`."""
    listed = shipped_weights()
    assert sorted(listed) == sorted(f"{name}-{seed}" for name, seed in SHIPPED)
    assert {path.stem for path in WEIGHTS.glob("*.safetensors")} == set(listed)
    for name, seed in SHIPPED:
        assert listed[f"{name}-{seed}"]["recipe"] == digest(*RECIPES[name], seed)
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 4.2e6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_shipped_main_models_solve_both_splits(untrained, seed):
    model = load("runsum-dlm", seed)
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert (model.config.logit_shift, model.config.attention, model.config.mask_token_id) == (True, "full", runsum.MASK)
    for split, calls in (("easy", 4), ("hard", 6)):
        exact, mean_calls = dynamic(model, runsum.problems(split, 24))
        assert exact >= 0.9
        assert mean_calls < calls


def test_the_shipped_start_has_much_to_learn_from(untrained):
    model = load("runsum-dlm-start")
    exact, _ = dynamic(model, runsum.problems("easy", 64))
    assert 0.3 < exact < 0.65
    # In many tasks some samples are right and some wrong: only those teach a policy anything.
    tasks = runsum.draw(24, "easy", 5).prompts.repeat_interleave(8, 0)
    config = DiffusionGenerationConfig(
        max_new_tokens=runsum.ANSWER_LENGTH, schedule="dynamic", threshold=0.9, temperature=1.0, eos_policy="none"
    )
    written = diffusion_generate(model, tasks, config).sequences[:, runsum.PROMPT_LENGTH :]
    shares = runsum.exact_match(tasks, written).double().view(24, 8).mean(1)
    assert int(((shares >= 0.2) & (shares <= 0.8)).sum()) >= 4


def test_the_shipped_guider_is_a_causal_model_that_knows_the_task(untrained):
    from transformers import DynamicCache

    guider = load("runsum-guider")
    assert guider.config.num_hidden_layers == 2
    for split in ("easy", "hard"):
        assert teacher_forced_exact(guider, runsum.problems(split, 64)) == 1.0
    cache = DynamicCache(config=guider.config)
    problem = runsum.problems("easy", 1)
    with torch.no_grad():
        guider(input_ids=problem.prompts, past_key_values=cache, use_cache=True)
        first = guider(input_ids=problem.answers[:, :1], past_key_values=cache, use_cache=True).logits[0, -1].argmax()
    assert int(first) == int(problem.answers[0, 1])


def test_one_token_a_step_is_exact(untrained):
    assert one_token_a_step_exact(load("runsum-dlm"), runsum.problems("hard", 6)) == 1.0


def test_a_model_that_has_not_learned_is_refused():
    world, chain = RECIPES["runsum-dlm"]
    model = _runsum_models.build(world, chain[0])
    with pytest.raises(RuntimeError, match=r"0\.0% of the answers exactly"):
        _runsum_models._accept(model, chain[0])


def test_weights_of_another_recipe_are_not_taken_and_damaged_ones_are_refused(tmp_path, monkeypatch, untrained):
    folder = tmp_path / "weights"
    shutil.copytree(WEIGHTS, folder)
    monkeypatch.setattr(_runsum_models, "WEIGHTS", folder)
    file = folder / "runsum-guider-0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match="is damaged"):
        load("runsum-guider")
    file.write_bytes(whole)
    listed = json.loads((folder / "weights.json").read_text())
    listed["runsum-guider-0"]["recipe"] = "0" * 16
    (folder / "weights.json").write_text(json.dumps(listed))
    shipped_weights.cache_clear()
    try:
        with pytest.raises(AssertionError, match="a model was trained"):
            load("runsum-guider")
    finally:
        shipped_weights.cache_clear()


def test_what_is_shipped_is_what_was_trained(tmp_path, monkeypatch):
    weights = {name: tensor.detach() for name, tensor in load("runsum-guider").state_dict().items()}
    monkeypatch.setattr(_runsum_models, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(_runsum_models, "result", lambda *arguments: weights)
    shipped_weights.cache_clear()
    try:
        file = _runsum_models.ship("runsum-guider", 7)
        assert file.stat().st_mode & 0o444 == 0o444  # everyone may read what is installed
        monkeypatch.setattr(_runsum_models, "result", None)
        again = load("runsum-guider", 7).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    finally:
        shipped_weights.cache_clear()


def test_what_does_not_exist_is_named():
    with pytest.raises(InputError, match="no model 'runsum-large'"):
        load("runsum-large")
    with pytest.raises(InputError, match="seed of -1"):
        load("runsum-dlm", -1)
