"""The rewards with the packages that they stand on, as installed."""

import pytest

from assay.methods.tracerl import math_verify_reward, reasoning_gym_reward
from assay.methods.tracerl._rewards import reasoning_gym_problems


def test_math_verify_takes_equal_numbers_for_equal():
    pytest.importorskip("math_verify")
    texts = [
        r"so \boxed{\frac{1}{2}}",
        r"first \boxed{0.5}, no: \boxed{\frac{2}{3}}",
        r"\boxed{x^2+2x+1}",
        "0.5",
        r"\boxed{72}",
    ]
    answers = ["0.5", r"\frac{1}{2}", "(x+1)^2", "0.5", "72"]
    assert math_verify_reward([""] * 5, texts, answer=answers) == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_reasoning_gym_scores_its_own_answers_as_right():
    pytest.importorskip("reasoning_gym")
    problems = reasoning_gym_problems("chain_sum", 4, seed=3)
    assert problems == reasoning_gym_problems("chain_sum", 4, seed=3) != reasoning_gym_problems("chain_sum", 4, seed=4)
    about = {name: [problem[name] for problem in problems] for name in ("metadata", "answer")}
    prompts = [problem["prompt"] for problem in problems]
    right = [f"thinking ... <answer>{problem['answer']}</answer>" for problem in problems]
    assert reasoning_gym_reward(prompts, right, **about) == [1.0] * 4
    assert max(reasoning_gym_reward(prompts, ["<answer>-1234567</answer>"] * 4, **about)) < 0.1
