"""The run sums: the example of the docstring, an independent solver, a checker that nothing slips past, fixed splits."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay._errors import InputError
from assay.testbeds import runsum

EXAMPLE = "^8 +2?; =5?; -1?;" + "?" * 20 + "|"


def worked_out(prompt: str) -> str:
    """The answer by reading the signs of a prompt, one step after the other."""
    result = int(prompt[1])
    written = ""
    for sign, operand in re.findall(r"([-+=])(\d)\?;", prompt):
        result = {"+": (result + int(operand)) % 10, "-": (result - int(operand)) % 10, "=": int(operand)}[sign]
        written += f"{sign}{operand}{result};"
    return f"{written}#{result}".ljust(runsum.ANSWER_LENGTH, "$")


def score(prompt: torch.Tensor, answer: str) -> runsum.RunsumScore:
    return runsum.check(prompt, runsum.tokens(answer))


def test_the_example():
    prompt = runsum.tokens(EXAMPLE)
    assert len(prompt) == 35
    assert runsum.text(runsum.solve(prompt[None])[0]) == "+20;=55;-14;#4" + "$" * 26


def test_answers_are_those_of_an_independent_solver():
    for split in ("easy", "hard"):
        listed = runsum.problems(split)
        for prompt, answer in zip(listed.prompts, listed.answers):
            assert runsum.text(answer) == worked_out(runsum.text(prompt))


def test_a_copy_always_reaches_back_by_the_same_distance():
    drawn = runsum.draw(50, "easy", 0)
    canvas = torch.cat([drawn.prompts, drawn.answers], 1)
    signs = (canvas >= runsum.PLUS) & (canvas <= runsum.SET)
    answer = signs[:, runsum.PROMPT_LENGTH :]
    back = runsum.PROMPT_LENGTH - 2
    rows, columns = answer.nonzero(as_tuple=True)
    columns = columns + runsum.PROMPT_LENGTH
    assert torch.equal(canvas[rows, columns], canvas[rows, columns - back])
    assert torch.equal(canvas[rows, columns + 1], canvas[rows, columns + 1 - back])


@given(seed=st.integers(0, 2**32 - 1), split=st.sampled_from(["easy", "hard"]))
def test_the_right_answer_is_right_whatever_follows_its_first_filler(seed, split):
    drawn = runsum.draw(1, split, seed)
    prompt, answer = drawn.prompts[0], drawn.answers[0].clone()
    assert runsum.check(prompt, answer) == (True, True, 1.0, True)
    end = answer.tolist().index(runsum.EOS) + 1
    answer[end:] = torch.from_numpy(np.random.default_rng(seed).integers(0, 24, 40 - end))
    assert runsum.check(prompt, answer) == (True, True, 1.0, True)
    assert runsum.check(prompt, answer[:end]) == (True, True, 1.0, True)


def test_every_corruption_of_a_single_token_is_caught():
    drawn = runsum.draw(6, "easy", 1)
    for prompt, answer in zip(drawn.prompts, drawn.answers):
        end = answer.tolist().index(runsum.EOS) + 1
        for place in range(end):
            for token in range(runsum.VOCABULARY):
                if token == answer[place]:
                    continue
                wrong = answer.clone()
                wrong[place] = token
                said = runsum.check(prompt, wrong)
                assert not said.exact
                # the last three tokens decide `final`, the others the steps
                assert said.final == (place < end - 3 and token != runsum.EOS)
                assert (said.step_accuracy < 1) == (place < end - 3)


def test_what_each_score_says():
    prompt = runsum.tokens(EXAMPLE)
    assert score(prompt, "+20;=55;-14;#4$") == (True, True, 1.0, True)
    assert score(prompt, "+20;=55;-15;#4$") == (False, True, 2 / 3, True)  # a wrong result, the right end
    assert score(prompt, "+20;=55;-14;#5$") == (False, False, 1.0, True)
    assert score(prompt, "+20;=55;#5$") == (False, False, 2 / 3, True)  # a step left out: another problem's answer
    assert score(prompt, "+20;=55;-14;#4") == (False, False, 1.0, False)  # no filler: it does not stop
    assert score(prompt, "+20;=55;-14;4#$") == (False, False, 1.0, False)
    assert score(prompt, "+20;=5_;-14;#4$") == (False, True, 2 / 3, False)  # a mask is left
    assert score(prompt, "$+20;=55;-14;#4$") == (False, False, 0.0, False)  # it stops at once
    assert score(prompt, "+20;$=55;-14;#4$") == (False, False, 1 / 3, False)
    assert score(prompt, "") == (False, False, 0.0, False)


def test_exact_match_is_the_exact_score_of_each_row():
    drawn = runsum.draw(20, "hard", 3)
    answers = drawn.answers.clone()
    answers[::2, 2] = (answers[::2, 2] + 1) % 10
    assert runsum.exact_match(drawn.prompts, answers).tolist() == [False, True] * 10


def test_splits_are_fixed_and_disjoint():
    assert runsum.fingerprint() == "d2d0e67d59ba210ed619d0d6685a22a9337e4c7c7257edd3ada956ed60afda5e"
    lists = [
        runsum.problems(split, tuning=tuning, count=50 if tuning else 1000)
        for split in ("easy", "hard")
        for tuning in (False, True)
    ]
    assert [len(listed.prompts) for listed in lists] == [1000, 50, 1000, 50]
    prompts = [bytes(prompt) for listed in lists for prompt in listed.prompts.tolist()]
    assert len(set(prompts)) == len(prompts)
    ids = [name for listed in lists for name in listed.ids]
    assert len(set(ids)) == len(ids)
    assert torch.equal(runsum.problems("easy", 32).prompts, runsum.problems("easy").prompts[:32])


def test_training_never_draws_a_listed_problem():
    # short problems are few: without a check some listed ones would be drawn among so many
    drawn = runsum.draw(60_000, "hard", 5)
    listed = {bytes(p) for split in ("easy", "hard") for p in runsum.problems(split).prompts.tolist()}
    assert not listed & {bytes(prompt) for prompt in drawn.prompts.tolist()}
    plain = runsum._random_prompts(60_000, 0.2, np.random.default_rng(5))
    assert listed & {bytes(prompt) for prompt in plain.tolist()}


def test_drawn_problems_depend_on_the_seed_alone_and_have_the_shares_they_should():
    assert torch.equal(runsum.draw(8, "easy", [1, 2]).prompts, runsum.draw(8, "easy", [1, 2]).prompts)
    assert not torch.equal(runsum.draw(8, "easy", [1, 2]).prompts, runsum.draw(8, "easy", [1, 3]).prompts)
    for split, share in (("easy", 0.5), ("hard", 0.2)):
        slots = runsum.draw(4000, split, 0).prompts[:, 2:-1].unflatten(1, (8, 4))
        used = slots[..., 0] != runsum.BLANK
        assert set(used.sum(1).tolist()) == {3, 4, 5, 6, 7, 8}
        sets = slots[..., 0] == runsum.SET
        assert float(sets[used].float().mean()) == pytest.approx(share, abs=0.02)
        assert set(slots[..., 1][sets].tolist()) == set(range(10))
        assert set(slots[..., 1][used & ~sets].tolist()) == {1, 2, 3}


def test_text_and_tokens_are_inverse():
    signs = "".join(random.Random(0).choices(runsum.SIGNS, k=75))
    assert runsum.text(runsum.tokens(signs)) == signs
    assert runsum.text(torch.tensor([23, -1])) == "~~"


@pytest.mark.parametrize(
    "prompt",
    [
        EXAMPLE.replace("^", "9"),
        EXAMPLE.replace("|", "?"),
        EXAMPLE.replace("8", "+"),
        EXAMPLE.replace("=5?;", "????"),  # a gap between the steps
        EXAMPLE.replace("=5?;", "=55;"),  # a result that is given away
        EXAMPLE.replace("=5?;", "=+?;"),
        "^8" + "?" * 32 + "|",
    ],
)
def test_a_prompt_of_another_kind_is_refused(prompt):
    with pytest.raises(InputError, match=r"prompt 1 .* is no run sum"):
        runsum.solve(torch.stack([runsum.tokens(EXAMPLE), runsum.tokens(prompt)]))


def test_what_does_not_exist_is_named():
    with pytest.raises(InputError, match="no split 'medium'"):
        runsum.problems("medium")
    with pytest.raises(InputError, match="no split 'medium'"):
        runsum.draw(1, "medium", 0)
    with pytest.raises(InputError, match="1001 problems"):
        runsum.problems("easy", 1001)
    with pytest.raises(InputError, match="51 problems were asked for, and the tuning list"):
        runsum.problems("easy", 51, tuning=True)
    with pytest.raises(InputError, match="'x' is no sign"):
        runsum.tokens("+2x;")


def test_ids_of_any_integer_type_are_solved_and_no_answer_is_passed_over():
    listed = runsum.problems("easy", 3)
    assert torch.equal(runsum.solve(listed.prompts.int()), listed.answers)
    with pytest.raises(ValueError, match="shorter"):
        runsum.exact_match.__wrapped__(listed.prompts, listed.answers[:2])
