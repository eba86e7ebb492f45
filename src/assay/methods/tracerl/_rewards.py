"""Ready rewards, in TRL's calling convention: ``f(prompts, completions, **columns) -> list``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay._errors import InputError
from assay._extras import extras

BOXED = re.compile(r"\\boxed\s*\{")


def runsum_reward(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float]:
    """1 where a run sum's answer is exactly right, else 0.

    Parameters
    ----------
    prompts
        Of `assay.testbeds.runsum`: token ids, or signs.
    completions
        Not looked at.
    completion_ids
        Tokens of each answer, without its EOS.
    **columns
        Not looked at.
    """
    from assay.testbeds import runsum

    rewards = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        asked = runsum.tokens(prompt) if isinstance(prompt, str) else torch.as_tensor(prompt)
        ended = len(ids) < runsum.ANSWER_LENGTH
        given = torch.tensor([*ids, runsum.EOS] if ended else list(ids))
        rewards.append(float(runsum.check(asked, given).exact))
    return rewards


def math_verify_reward(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1 where the last ``\\boxed{}`` of a completion equals the answer as mathematics, else 0.

    Parameters
    ----------
    prompts
        Not looked at.
    completions
        Texts.
    answer
        Column with the true answers, as LaTeX or plain. Where math-verify cannot read one, the reward is None.
    **columns
        Not looked at.

    Raises
    ------
    ImportError
        If math-verify is not installed.
    """
    with extras("rl"):
        from math_verify import parse, verify

    rewards: list[float | None] = []
    for text, gold in zip(completions, answer, strict=True):
        expected = parse(_as_latex(str(gold)))
        if not expected:
            rewards.append(None)
            continue
        given = last_boxed(text)
        rewards.append(0.0 if given is None else float(verify(expected, parse(_as_latex(given)))))
    return rewards


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{}`` with balanced braces, or None."""
    for start in reversed([match.end() for match in BOXED.finditer(text)]):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[start:at].strip()
    return None


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def reasoning_gym_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    answer: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float]:
    """The score that a Reasoning Gym task gives an answer.

    Parameters
    ----------
    prompts
        The questions.
    completions
        Texts; of one with ``<answer>`` tags, what stands in the last pair.
    metadata
        Column of the task's entries; its ``source_dataset`` names the task.
    answer
        Column of the entries' own answers.
    **columns
        Not looked at.

    Raises
    ------
    ImportError
        If reasoning-gym is not installed.
    """
    with extras("reasoning"):
        from reasoning_gym import get_score_answer_fn

    rewards = []
    for row, (prompt, text, about) in enumerate(zip(prompts, completions, metadata, strict=True)):
        if "source_dataset" not in about:
            raise InputError(
                f"the metadata of completion {row} name no source_dataset: keep the entries of Reasoning Gym whole"
            )
        entry = {"question": prompt, "answer": None if answer is None else answer[row], "metadata": about}
        tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        given = (tagged[-1] if tagged else text).strip()
        rewards.append(float(get_score_answer_fn(about["source_dataset"])(answer=given, entry=entry)))
    return rewards


def reasoning_gym_problems(task: str, count: int, seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    """Problems of a Reasoning Gym task (chain_sum, countdown, mini_sudoku, ...), as `TraceRLTrainer` takes them.

    Parameters
    ----------
    task
        Its name there.
    count, seed
        How many, and of which draw.
    **settings
        Of the task.
    """
    with extras("reasoning"):
        from reasoning_gym import create_dataset

    entries = create_dataset(task, size=count, seed=seed, **settings)
    return [{"prompt": e["question"], "answer": e["answer"], "metadata": e["metadata"]} for e in entries]
