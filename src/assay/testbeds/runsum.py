"""Run sums: a worksheet whose copies are easy, whose results depend on each other, and which can be checked exactly.

A problem has a start digit and three to eight steps. A step adds to the running result (``+a``), takes away from it
(``-a``) or sets it (``=a``), all modulo ten. The prompt has the steps with ``?`` in place of the results; the answer
repeats each step with its result and ends with ``#``, the last result and fillers. All prompts are 35 tokens long, all
answers 40::

    prompt  ^ 8 +2?; =5?; -1?; ???? ???? ???? ???? ???? |
    answer  +20; =55; -14; #4 $ $ $ ...

Prompt slot and answer slot are equally wide, so that a copy always reaches back by the same distance. The share of
``=`` steps rules how long the chains of dependent results are: half of the steps in split *easy* and in training, a
fifth in *hard*.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from assay._errors import InputError

VOCABULARY = 24  # the last four ids are spare
PLUS, MINUS, SET, STEP_END, FINAL, BLANK = range(10, 16)
BOS, EOS, MASK, SEP = range(16, 20)
SLOTS = 8
SLOT = 4  # tokens of a slot: sign, digit, result, end
PROMPT_LENGTH = 3 + SLOTS * SLOT
ANSWER_LENGTH = 40
LENGTH = PROMPT_LENGTH + ANSWER_LENGTH

#: The token of each id, as `text` writes it.
SIGNS = "0123456789+-=;#?^$_|"

#: The share of ``=`` steps in each split. Training uses that of *easy*.
SET_SHARE: dict[str, float] = {"easy": 0.5, "hard": 0.2}
#: Problems of each split's fixed list, and of its list for tuning.
LISTED, TUNING = 1000, 50


class Problems(NamedTuple):
    """Some problems: ``prompts`` (problems, 35) and ``answers`` (problems, 40), int64, and a name for each."""

    prompts: Tensor
    answers: Tensor
    ids: tuple[str, ...]

    def first(self, count: int) -> "Problems":
        """The first ``count`` of them."""
        return Problems(self.prompts[:count], self.answers[:count], self.ids[:count])


class RunsumScore(NamedTuple):
    """What `check` says of one answer.

    Attributes
    ----------
    exact
        Everything up to the first filler is right, the filler included.
    final
        ``#``, the right digit and the first filler stand where they belong.
    step_accuracy
        Share of the problem's steps whose four tokens are right, from 0 to 1. What follows a filler is not counted.
    well_formed
        It reads as an answer, of whatever problem: steps, then ``#``, a digit and a filler.
    """

    exact: bool
    final: bool
    step_accuracy: float
    well_formed: bool


def solve(prompts: Int[Tensor, "problems 35"]) -> Int[Tensor, "problems 40"]:
    """The one right answer of each prompt.

    Raises
    ------
    InputError
        If a prompt is not one of this task: the message names the row.
    """
    if prompts.ndim != 2 or prompts.shape[1] != PROMPT_LENGTH:
        raise InputError(
            f"prompts have the shape {tuple(prompts.shape)}, expected (problems, {PROMPT_LENGTH}): one row a problem"
        )
    prompts = prompts.long()
    start = prompts[:, 1]
    slots = prompts[:, 2:-1].unflatten(1, (SLOTS, SLOT))
    sign, operand = slots[..., 0], slots[..., 1]
    used = sign != BLANK
    count = used.sum(1)
    whole = (
        (sign >= PLUS) & (sign <= SET) & (operand < 10) & (slots[..., 2] == BLANK) & (slots[..., 3] == STEP_END)
    ) | (~used & (slots == BLANK).all(2))
    in_order = (used == (torch.arange(SLOTS) < count[:, None])).all(1)
    good = whole.all(1) & in_order & (count > 0) & (start < 10)
    good &= (prompts[:, 0] == BOS) & (prompts[:, -1] == SEP) & (prompts >= 0).all(1)
    if not good.all():
        row = int((~good).nonzero()[0])
        raise InputError(
            f"prompt {row} ({text(prompts[row])!r}) is no run sum: expected ^, a digit, up to 8 steps such as +2?; "
            "and blanks ????, then |"
        )

    answers = torch.full((len(prompts), ANSWER_LENGTH), EOS)
    result = start
    for place in range(SLOTS):
        change = torch.where(sign[:, place] == PLUS, operand[:, place], -operand[:, place])
        new = torch.where(sign[:, place] == SET, operand[:, place], (result + change) % 10)
        result = torch.where(used[:, place], new, result)
        step = torch.stack([sign[:, place], operand[:, place], result, torch.full_like(result, STEP_END)], 1)
        here = slice(place * SLOT, (place + 1) * SLOT)
        answers[:, here] = torch.where(used[:, place, None], step, EOS)
    rows = torch.arange(len(prompts))
    answers[rows, count * SLOT] = FINAL
    answers[rows, count * SLOT + 1] = result
    return answers


def check(prompt: Int[Tensor, "35"], answer: Int[Tensor, " length"]) -> RunsumScore:
    """Judge one answer exactly.

    Parameters
    ----------
    prompt
        (35,)
    answer
        What a model wrote after it, any length. Whatever follows the first filler is not part of it.
    """
    right = solve(prompt[None])[0].tolist()
    right = right[: right.index(EOS) + 1]
    given = answer.tolist()
    ended = EOS in given
    given = given[: given.index(EOS) + 1] if ended else given

    end = len(right) - 3  # where the steps end
    steps = [given[at : at + SLOT] == right[at : at + SLOT] for at in range(0, end, SLOT)]
    return RunsumScore(
        exact=given == right,
        final=ended and len(given) == len(right) and given[end:] == right[end:],
        step_accuracy=sum(steps) / len(steps),
        well_formed=ended and _reads_as_answer(given),
    )


def exact_match(
    prompts: Int[Tensor, "problems 35"], answers: Int[Tensor, "problems length"]
) -> Bool[Tensor, " problems"]:
    """Which answers are exactly right: the main measure (`RunsumScore.exact` of each row)."""
    return torch.tensor(
        [check(prompt, answer).exact for prompt, answer in zip(prompts, answers, strict=True)], dtype=torch.bool
    )


def _reads_as_answer(given: Sequence[int]) -> bool:
    steps, tail = given[:-3], given[-3:]
    if len(tail) < 3 or len(steps) % SLOT or not steps or tail[0] != FINAL or not 0 <= tail[1] < 10:
        return False
    return all(
        PLUS <= steps[at] <= SET and 0 <= steps[at + 1] < 10 and 0 <= steps[at + 2] < 10 and steps[at + 3] == STEP_END
        for at in range(0, len(steps), SLOT)
    )


def problems(split: str, count: int = LISTED, *, tuning: bool = False) -> Problems:
    """The first problems of a split's fixed list: the same ones in every seed and on every machine.

    Parameters
    ----------
    split
        *easy* (half of the steps set the result) or *hard* (a fifth).
    count
        At most 1,000, or 50 for tuning.
    tuning
        The list for choosing thresholds and the like; no problem stands in two lists.

    Raises
    ------
    InputError
        If there is no such split, or it has fewer problems.
    """
    _share(split)
    listed = TUNING if tuning else LISTED
    if not 1 <= count <= listed:
        raise InputError(
            f"{count} problems were asked for, and the {'tuning' if tuning else 'fixed'} list of {split} has {listed}: "
            f"ask for 1 to {listed}"
        )
    return _lists()[split, tuning].first(count)


def draw(count: int, split: str, seed: int | Sequence[int]) -> Problems:
    """Fresh problems for training, none of which stands in a fixed list.

    Parameters
    ----------
    count
        How many.
    split
        Whose share of ``=`` steps: training uses that of *easy*.
    seed
        Of NumPy's generator: the same seed gives the same problems.
    """
    generator, share = np.random.default_rng(seed), _share(split)
    taken = _listed_prompts()
    prompts = _random_prompts(count, share, generator)
    while known := [row for row, prompt in enumerate(prompts.tolist()) if bytes(prompt) in taken]:
        prompts[known] = _random_prompts(len(known), share, generator)
    return Problems(prompts, solve(prompts), tuple(f"fresh-{row}" for row in range(count)))


def text(tokens: Int[Tensor, " length"]) -> str:
    """Tokens as signs: ``^`` start, ``$`` filler, ``_`` mask, ``|`` the end of the prompt, ``~`` a spare id."""
    return "".join(SIGNS[token] if 0 <= token < len(SIGNS) else "~" for token in tokens.tolist())


def tokens(signs: str) -> Int[Tensor, " length"]:
    """The tokens of signs; spaces are left out.

    Raises
    ------
    InputError
        If a sign is not in the vocabulary.
    """
    signs = signs.replace(" ", "")
    if unknown := set(signs) - set(SIGNS):
        raise InputError(f"{sorted(unknown)[0]!r} is no sign of a run sum: use {' '.join(SIGNS)}")
    return torch.tensor([SIGNS.index(sign) for sign in signs], dtype=torch.int64)


def _share(split: str) -> float:
    if split not in SET_SHARE:
        raise InputError(f"there is no split {split!r} of run sums: use easy or hard")
    return SET_SHARE[split]


def _random_prompts(count: int, set_share: float, generator: np.random.Generator) -> Tensor:
    """(count, 35) prompts: three to eight steps, each ``=`` with chance ``set_share``, else ``+`` or ``-`` alike."""
    used = np.arange(SLOTS) < generator.integers(3, SLOTS + 1, (count, 1))
    sets = generator.random((count, SLOTS)) < set_share
    sign = np.where(sets, SET, generator.choice([PLUS, MINUS], (count, SLOTS)))
    operand = np.where(sets, generator.integers(0, 10, (count, SLOTS)), generator.integers(1, 4, (count, SLOTS)))
    slots = np.full((count, SLOTS, SLOT), BLANK)
    slots[..., 0] = np.where(used, sign, BLANK)
    slots[..., 1] = np.where(used, operand, BLANK)
    slots[..., 3] = np.where(used, STEP_END, BLANK)
    start = generator.integers(0, 10, (count, 1))
    ends = np.full((count, 1), BOS), np.full((count, 1), SEP)
    return torch.from_numpy(np.concatenate([ends[0], start, slots.reshape(count, -1), ends[1]], 1).astype(np.int64))


@cache
def _lists() -> dict[tuple[str, bool], Problems]:
    """The four lists, by split and whether for tuning. No prompt stands in them twice."""
    lists = {}
    taken: set[bytes] = set()
    for number, (split, share) in enumerate(SET_SHARE.items()):
        generator = np.random.default_rng([2026, number])
        for tuning, size in ((False, LISTED), (True, TUNING)):
            rows: list[list[int]] = []
            while len(rows) < size:
                for prompt in _random_prompts(size, share, generator).tolist():
                    if len(rows) < size and bytes(prompt) not in taken:
                        taken.add(bytes(prompt))
                        rows.append(prompt)
            prompts = torch.tensor(rows)
            name = f"{split}-tuning" if tuning else split
            lists[split, tuning] = Problems(prompts, solve(prompts), tuple(f"{name}-{row}" for row in range(size)))
    return lists


@cache
def _listed_prompts() -> frozenset[bytes]:
    return frozenset(bytes(prompt) for problems in _lists().values() for prompt in problems.prompts.tolist())


def fingerprint() -> str:
    """SHA-256 of the four fixed lists: results of two machines can be compared where it is the same."""
    digest = hashlib.sha256()
    for listed in _lists().values():
        digest.update(listed.prompts.numpy().astype(np.uint8).tobytes())
    return digest.hexdigest()
