"""Ready rewards; packages that are not installed are stood in for."""

import sys
from types import SimpleNamespace

import pytest
import torch

from assay._errors import InputError
from assay.methods.tracerl import math_verify_reward, reasoning_gym_reward, runsum_reward
from assay.methods.tracerl._rewards import last_boxed, reasoning_gym_problems
from assay.rl import call_reward, group_advantages, outcome_rewards
from assay.testbeds import runsum


def test_run_sums_are_right_or_wrong():
    problems = runsum.problems("easy", 3)
    answers = [row[: row.tolist().index(runsum.EOS)].tolist() for row in problems.answers]
    wrong = [*answers[1][:-1], (answers[1][-1] + 1) % 10]
    endless = (answers[2] + [0] * 40)[:40]
    prompts = [problems.prompts[0], runsum.text(problems.prompts[1]), problems.prompts[2]]
    assert runsum_reward(prompts, [], completion_ids=answers) == [1.0, 1.0, 1.0]
    assert runsum_reward(prompts, [], completion_ids=[answers[0], wrong, endless]) == [1.0, 0.0, 0.0]
    assert runsum_reward(prompts[:1], [], completion_ids=[[]]) == [0.0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x^{2}} \boxed{broken", "x^{2}"),
        ("nothing", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_balanced_box_counts(text, found):
    assert last_boxed(text) == found


def test_math_verify_is_asked_about_the_box(monkeypatch):
    asked = []

    def verify(gold, given):
        asked.append((gold, given))
        return gold == given

    fake = SimpleNamespace(parse=lambda text: [] if "?" in text else [text.strip("$")], verify=verify)
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    texts = [r"\boxed{4}", "4", r"\boxed{5}", r"\boxed{1}"]
    assert math_verify_reward([], texts, answer=["4", "4", 4, "?"]) == [1.0, 0.0, 0.0, None]
    assert asked == [(["4"], ["4"]), (["4"], ["5"])]


def test_reasoning_gym_scores_by_the_task_of_the_entry(monkeypatch):
    def scorer(name):
        return lambda answer, entry: 0.5 if (name, answer, entry["answer"]) == ("chain_sum", "7", "7") else 0.01

    made = [{"question": "3 + 4 =", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}]
    fake = SimpleNamespace(get_score_answer_fn=scorer, create_dataset=lambda task, size, seed: made * size)
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    (problem,) = reasoning_gym_problems("chain_sum", 1)
    about = {"metadata": [problem["metadata"]] * 2, "answer": ["7", "7"]}
    texts = ["I think <answer>8</answer>, no: <answer> 7 </answer>", "8"]
    assert reasoning_gym_reward([problem["prompt"]] * 2, texts, **about) == [0.5, 0.01]
    with pytest.raises(InputError, match="name no source_dataset"):
        reasoning_gym_reward(["?"], ["x"], metadata=[{}])


@pytest.mark.parametrize(("reward", "columns"), [(math_verify_reward, "answer"), (reasoning_gym_reward, "metadata")])
def test_a_missing_package_is_named(monkeypatch, reward, columns):
    for name in ("math_verify", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError):
        reward(["?"], ["x"], **{columns: [{}]})


def test_advantages_of_groups():
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 1, torch.nan, 0, 0])
    found = group_advantages(rewards, 4)
    assert found[:4].tolist() == pytest.approx([0.86587, -0.86587, -0.86587, 0.86587], abs=1e-4)
    assert found[4:8].tolist() == [0.0] * 4
    assert found[9] == 0
    assert found[[8, 10, 11]].sum().item() == pytest.approx(0, abs=1e-6)
    assert group_advantages(torch.full((4,), 0.1), 4, eps=0.0).tolist() == [0.0] * 4
    assert group_advantages(torch.full((4,), 0.1, dtype=torch.float64), 4, eps=0.0).tolist() == [0.0] * 4
    assert group_advantages(rewards[:4], 4, scale="none").tolist() == [0.5, -0.5, -0.5, 0.5]
    batch = group_advantages(torch.tensor([1.0, 0, 1, 1]), 2, scale="batch", eps=0.0)
    assert batch.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])
    assert group_advantages(torch.tensor([1.0, torch.nan]), 2).tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match="no groups of 5"):
        group_advantages(rewards, 5)
    with pytest.raises(InputError, match="no baseline"):
        group_advantages(rewards, 1)


def test_a_reward_is_called_as_trl_does():
    def mine(prompts, completions, level):
        return (len(c) * n for c, n in zip(completions, level))

    assert call_reward(mine, ["a", "b"], ["xx", "y"], {"level": [1, 5]}) == [2, 5]
    assert outcome_rewards([1, None, True], mine).nan_to_num(-1).tolist() == [1, -1, 1]
    with pytest.raises(InputError, match="mine returned 1 rewards for 2 completions"):
        call_reward(mine, ["a", "b"], ["xx", "y"], {"level": [1]})
    with pytest.raises(InputError, match="returned float, expected a list"):
        call_reward(lambda prompts, completions: 1.0, ["a"], ["b"])
