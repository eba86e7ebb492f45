"""Real text at test-bed size: the tokenizer, the problems that are kept, and teacher-forced decoding by brute force."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mdlm.tiny import scatter
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import CachePolicy, ForwardPlan, MaskedDiffusionLM, MDLMConfig, NoCache, PrefixCache
from assay.testbeds import gsm8k_text
from assay.testbeds.gsm8k_text import ANSWER, END, MASK, teacher_forced_nll

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k"
TRAIN = gsm8k_text.read_problems("train", SAMPLE)
BPE = gsm8k_text.train_tokenizer([text for pair in TRAIN for text in pair])


def model(**settings: Any) -> MaskedDiffusionLM:
    """A small random model of the vocabulary."""
    shape = {**gsm8k_text.SHAPE, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    shape |= {"intermediate_size": 16, "num_hidden_layers": 2}
    shape.pop("bos_token_id")
    made = MaskedDiffusionLM(MDLMConfig(**shape, mask_token_id=MASK, qk_norm="head", **settings))
    scatter(made)
    return made.eval()


# --- text


@settings(max_examples=50)
@given(st.text())
def test_any_text_is_encoded_without_loss(text):
    assert BPE.decode(BPE.encode(text).ids, skip_special_tokens=False) == text or "<|" in text


def test_the_tokenizer_has_its_size_and_its_special_tokens():
    assert BPE.get_vocab_size() == gsm8k_text.VOCABULARY
    assert [BPE.token_to_id(token) for token in gsm8k_text.SPECIAL] == [MASK, END, ANSWER] == [0, 1, 2]
    assert min(min(BPE.encode(text).ids) for pair in TRAIN for text in pair) > 2
    again = gsm8k_text.train_tokenizer([text for pair in TRAIN for text in pair])
    assert again.to_str() == BPE.to_str()


def test_problems_are_padded_as_the_model_reads_them():
    texts = gsm8k_text.encoded(TRAIN, BPE, "train")
    assert 0 < len(texts.ids) < len(TRAIN)
    assert texts.prompts.shape == texts.visible.shape == texts.answers.shape == (len(texts.ids), 128)
    for prompt, visible, answer, name in zip(*texts):
        question, solution = TRAIN[int(name.removeprefix("train-"))]
        assert visible.tolist() == sorted(visible.tolist())  # padding on the left alone
        assert prompt[visible].tolist() == [*BPE.encode(question).ids, ANSWER]
        assert set(prompt[~visible].tolist()) <= {END}
        length = int((answer == END).int().argmax())
        assert BPE.decode(answer[:length].tolist()) == solution
        assert length <= 120
        assert set(answer[length:].tolist()) == {END}
    left_out = set(range(len(TRAIN))) - {int(name.removeprefix("train-")) for name in texts.ids}
    for row in left_out:
        question, answer = (len(BPE.encode(text).ids) for text in TRAIN[row])
        assert question > 127 or answer > 120


def test_packed_files_are_read_alike(tmp_path):
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress((SAMPLE / "test.jsonl").read_bytes()))
    assert gsm8k_text.read_problems("test", tmp_path) == gsm8k_text.read_problems("test", SAMPLE)


def test_each_seed_has_problems_of_its_own():
    texts = gsm8k_text.encoded(TRAIN, BPE, "train")
    few = gsm8k_text.sample(texts, 10, 0)
    assert len(set(few.ids)) == 10
    assert few.ids == gsm8k_text.sample(texts, 10, 0).ids != gsm8k_text.sample(texts, 10, 1).ids
    row = texts.ids.index(few.ids[3])
    assert torch.equal(few.prompts[3], texts.prompts[row])
    with pytest.raises(InputError, match="ask for 1 to that many"):
        gsm8k_text.sample(texts, 61, 0)


def test_what_is_no_data_is_said(tmp_path):
    with pytest.raises(InputError, match=r"has no train\.jsonl"):
        gsm8k_text.read_problems("train", tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Q", "answer": "A"}) + "\n{}\n")
    with pytest.raises(InputError, match=r"problem 2 of .*train\.jsonl has no question and answer"):
        gsm8k_text.read_problems("train", tmp_path)


def test_the_whole_of_gsm8k_comes_with_assay(tmp_path, monkeypatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    assert len(gsm8k_text.read_problems("train")) == 7473
    problems = gsm8k_text.read_problems("test")
    assert len(problems) == 1319
    assert problems[0][1].endswith("#### 18")
    assert all(answer.rpartition("#### ")[2].replace(",", "").lstrip("-").isdigit() for _, answer in problems)
    test = gsm8k_text.texts("test")
    assert 650 < len(test.ids) < 850
    assert len(list((tmp_path / "assets").glob("gsm8k-bpe-*.json"))) == 1


# --- teacher-forced decoding


def by_hand(model: Any, prompt: Tensor, answer: Tensor, block: int) -> tuple[list[float], int, int]:
    """NLL of each token at its block's first step, and how many argmaxes changed, with a whole forward a block."""
    start, nll, flips, pairs = len(prompt), [], 0, 0
    canvas = torch.cat([prompt, torch.full((128,), MASK)])
    before = None
    end = int((answer == END).int().argmax())
    for first in range(0, end + 1, block):
        with torch.no_grad():
            logits = model(input_ids=canvas[None]).logits[0, start:].double()
        logits[:, MASK] = -torch.inf
        log_p = logits.log_softmax(-1)
        nll += [-float(log_p[place, answer[place]]) for place in range(first, first + block)]
        guess = log_p.argmax(-1)
        if before is not None:
            flips += int((guess[first:] != before[first:]).sum())
            pairs += 128 - first
        before = guess
        canvas[start + first : start + first + block] = answer[first : first + block]
    return nll[: end + 1], flips, pairs


@pytest.mark.parametrize("shift", [False, True])
def test_without_a_cache_it_is_the_likelihood_of_each_block_given_the_true_ones_before(shift):
    it = model(logit_shift=shift)
    few = gsm8k_text.encoded(TRAIN, BPE, "train").rows([0, 3])
    measured = teacher_forced_nll(it, NoCache(), few, block=16)
    for row in range(2):
        nll, flips, pairs = by_hand(it, few.prompts[row][few.visible[row]], few.answers[row], 16)
        assert measured.nll[row].tolist() == pytest.approx(nll, abs=1e-4)
        assert (measured.flips[row], measured.pairs[row]) == (flips, pairs)
        assert flips > 0


class Frozen(CachePolicy):
    """Never recomputes what was computed at the first step, but the current block."""

    @property
    def name(self) -> str:
        return "frozen"

    def plan(self, state: Any) -> ForwardPlan:
        first = int(state.masked[0].int().argmax())
        return ForwardPlan(region=(0 if state.step == 1 else first, state.length))


def test_a_cache_changes_what_is_said_of_later_blocks_alone():
    it = model(logit_shift=True)
    few = gsm8k_text.encoded(TRAIN, BPE, "train").rows([0])
    exact = teacher_forced_nll(it, NoCache(), few, block=16)
    # recomputing everything at each block's first step is exact, however little is computed in between
    assert torch.allclose(teacher_forced_nll(it, PrefixCache(), few, block=16).nll[0], exact.nll[0], atol=1e-4)
    frozen = teacher_forced_nll(it, Frozen(), few, block=16)
    assert torch.allclose(frozen.nll[0][:16], exact.nll[0][:16], atol=1e-4)
    assert not torch.allclose(frozen.nll[0][16:], exact.nll[0][16:], atol=1e-3)
    assert frozen.token_forwards[0] < exact.token_forwards[0]


def test_a_watcher_sees_the_true_text_before_each_block():
    few = gsm8k_text.encoded(TRAIN, BPE, "train").rows([0])
    seen: list[Tensor] = []
    teacher_forced_nll(model(), NoCache(), few, block=32, watch=lambda state: seen.append(state.host[0].clone()))
    start = int(few.visible[0].sum())
    for step, canvas in enumerate(seen):
        known = start + 32 * step
        assert torch.equal(canvas[start:known], few.answers[0][: 32 * step])
        assert set(canvas[known:].tolist()) == {MASK}
    with pytest.raises(InputError, match="give a divisor"):
        teacher_forced_nll(model(), NoCache(), few, block=10)
