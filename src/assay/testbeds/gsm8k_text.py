"""A small masked-diffusion model of real text, the grade-school problems of GSM8K, for teacher-forced measurements.

It has a million parameters and cannot solve a problem; what it generates is never judged. It serves where real text is
needed but no right answer: how the likelihood of the true text, the keys and values, and the predictions change when a
cache is used (`teacher_forced_nll`).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from assay._errors import InputError
from assay.data import fetch, read_prompts
from assay.data._cache import cache, made_once
from assay.data.tables import uncompressed
from assay.mdlm._generate import diffusion_generate
from assay.mdlm._state import CachePolicy, Commit, DiffusionGenerationConfig, Draft, GenState, Scheduler
from assay.mdlm._training import TrainingPlan
from assay.testbeds._stages import Batch, Chain, Stage, World, build, result

PROMPT_LENGTH, ANSWER_LENGTH = 128, 128
LONGEST_ANSWER = 120  # tokens: at least eight fillers follow
VOCABULARY = 1024
MASK, END, ANSWER = range(3)  # END: end of text, filler and padding; ANSWER: between question and answer
SPECIAL = ("<|mask|>", "<|end|>", "<|answer|>")

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 352,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
}
ROWS = 8
CHAIN: Chain = (
    Stage("ar", TrainingPlan(300, 5e-3), until=300),
    Stage("masked", TrainingPlan(500, 2e-3), until=500),
)


class Texts(NamedTuple):
    """Some problems, as tokens.

    ``prompts`` (problems, 128), padded on the left and ending in `ANSWER`; ``visible``, True where they hold a token;
    ``answers`` (problems, 128), with `END` behind them; ``ids``, a name for each.
    """

    prompts: Tensor
    visible: Tensor
    answers: Tensor
    ids: tuple[str, ...]

    def rows(self, index: Sequence[int] | Tensor) -> "Texts":
        """Some of them, in that order."""
        index = torch.as_tensor(index)
        return Texts(
            self.prompts[index], self.visible[index], self.answers[index], tuple(self.ids[i] for i in index.tolist())
        )


@dataclass
class TeacherForced:
    """What `teacher_forced_nll` measured, problem by problem.

    Attributes
    ----------
    nll
        For each problem (tokens,) float64: nats of each true token of the answer, its end included, at the first step of
        its block.
    flips, pairs
        For each problem: of how many masked tokens the most likely token changed from one block's step to the next, and
        of how many it could have.
    token_forwards
        For each problem: tokens that were computed.
    """

    nll: list[Float[Tensor, " tokens"]] = field(default_factory=list)
    flips: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    token_forwards: list[int] = field(default_factory=list)


def read_problems(split: Literal["train", "test"], folder: str | Path | None = None) -> list[tuple[str, str]]:
    """Questions and answers of GSM8K, as they are in its files: 7,473 for training and 1,319 for testing.

    Parameters
    ----------
    split
        *train* or *test*.
    folder
        Where ``train.jsonl`` and ``test.jsonl`` lie, also as ``.jsonl.gz``. By default the assets ``gsm8k-train`` and
        ``gsm8k-test``.

    Raises
    ------
    InputError
        If there is no such file, or a line has no question and answer.
    """
    path = _file(split, folder)
    found = []
    for number, record in enumerate(read_prompts(path), 1):
        if not (isinstance(record.get("question"), str) and isinstance(record.get("answer"), str)):
            raise InputError(f"problem {number} of {path} has no question and answer: both are expected, as text")
        found.append((record["question"], record["answer"]))
    return found


def tokenizer(folder: str | Path | None = None) -> Tokenizer:
    """Byte-level BPE with 1,024 entries, trained on the train split and kept in the cache.

    Any text is encoded without loss; ids 0 to 2 are the special tokens.
    """
    path = _file("train", folder)

    def make(target: Path) -> None:
        train_tokenizer([text for pair in read_problems("train", folder) for text in pair]).save(str(target))

    return Tokenizer.from_file(str(made_once(cache() / "assets" / f"gsm8k-bpe-{_sha256(path)[:16]}.json", make)))


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE of 1,024 entries over some texts."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return made


def texts(split: Literal["train", "test"], folder: str | Path | None = None) -> Texts:
    """The problems of a split that fit: a question of at most 127 tokens and the mark behind it, an answer of at most 120."""
    return encoded(read_problems(split, folder), tokenizer(folder), split)


def encoded(problems: Sequence[tuple[str, str]], bpe: Tokenizer, name: str) -> Texts:
    """Questions and answers as tokens, those that are too long left out. ``name`` and the row make their ids."""
    questions = [made.ids for made in bpe.encode_batch([question for question, _ in problems])]
    answers = [made.ids for made in bpe.encode_batch([answer for _, answer in problems])]
    kept = [
        row
        for row, (question, answer) in enumerate(zip(questions, answers))
        if len(question) < PROMPT_LENGTH and len(answer) <= LONGEST_ANSWER
    ]
    prompts = torch.full((len(kept), PROMPT_LENGTH), END)
    written = torch.full((len(kept), ANSWER_LENGTH), END)
    visible = torch.zeros(len(kept), PROMPT_LENGTH, dtype=torch.bool)
    for place, row in enumerate(kept):
        prompt = [*questions[row], ANSWER]
        prompts[place, -len(prompt) :] = torch.tensor(prompt)
        visible[place, -len(prompt) :] = True
        written[place, : len(answers[row])] = torch.tensor(answers[row])
    return Texts(prompts, visible, written, tuple(f"{name}-{row}" for row in kept))


def sample(texts: Texts, count: int, seed: int) -> Texts:
    """Some of them, drawn without replacement: a study's seed has problems of its own."""
    if not 1 <= count <= len(texts.ids):
        raise InputError(f"{count} problems were asked for, and there are {len(texts.ids)}: ask for 1 to that many")
    return texts.rows(np.random.default_rng([seed, 7]).permutation(len(texts.ids))[:count].tolist())


def load(folder: str | Path | None = None, seed: int = 0) -> Any:
    """The trained `MaskedDiffusionLM` (1.07 million parameters, shifted logits): from the cache, or trained now.

    Training takes about four minutes of one core.
    """
    world = _world(folder)
    model = build(world, CHAIN[-1])
    model.load_state_dict(result(world, CHAIN, seed))
    return model.eval()


def teacher_forced_nll(
    model: Any,
    policy: CachePolicy,
    problems: Texts,
    block: int = 16,
    watch: Callable[[GenState], None] | None = None,
) -> TeacherForced:
    """Walk the true answers from left to right in blocks, and ask what a model says of each block under a cache policy.

    At each step the block's true tokens are committed, whatever the model says: two policies are compared on the same
    text, and a difference comes from what they cache alone.

    Parameters
    ----------
    model
        A `MaskedDiffusionLM` of this vocabulary.
    policy
        What is recomputed at each step.
    problems
        Each is decoded by itself.
    block
        Tokens that are committed at a step; a divisor of 128.
    watch
        Called at each step, before the commit: to look into ``state.cache``.

    Returns
    -------
    `TeacherForced`
    """
    if block < 1 or ANSWER_LENGTH % block:
        raise InputError(f"blocks of {block} tokens do not fill an answer of {ANSWER_LENGTH}: give a divisor")
    config = DiffusionGenerationConfig(max_new_tokens=ANSWER_LENGTH, block_length=block)
    measured = TeacherForced()
    for prompt, visible, answer in zip(problems.prompts, problems.visible, problems.answers):
        teacher = _Teacher(answer, watch)
        output = diffusion_generate(model, [prompt[visible]], config, scheduler=teacher, cache_policy=policy)
        measured.nll.append(teacher.nll[: int((answer == END).int().argmax()) + 1])
        measured.flips.append(teacher.flips)
        measured.pairs.append(teacher.pairs)
        measured.token_forwards.append(output.token_forwards)
    return measured


class _Teacher(Scheduler):
    """Commits the true tokens of the current block, and records what the model said of them."""

    def __init__(self, answer: Tensor, watch: Callable[[GenState], None] | None) -> None:
        self.answer, self.watch = answer, watch
        self.nll = torch.full((len(answer),), torch.nan, dtype=torch.float64)
        self.guess = torch.full((len(answer),), -1)
        self.flips = self.pairs = 0

    @property
    def name(self) -> str:
        return "teacher"

    def candidates(self, state: GenState) -> tuple[int, int]:
        return state.canvas_start, state.length  # all that is masked: its most likely tokens are compared

    def commit(self, state: GenState, logits: Tensor, draft: Draft) -> Commit:
        if self.watch is not None:
            self.watch(state)
        columns = draft.positions.cpu() - state.canvas_start
        log_p = logits[0].double().log_softmax(-1).cpu()
        guess = log_p.argmax(-1)
        known = (self.guess[columns] >= 0) & state.masked[0, columns + state.canvas_start].cpu()
        self.flips += int((known & (self.guess[columns] != guess)).sum())
        self.pairs += int(known.sum())
        self.guess[columns] = guess

        block = state.block_of[0, columns + state.canvas_start] == state.current_block[0]
        now = columns[block]
        self.nll[now] = -log_p[block].gather(1, self.answer[now, None])[:, 0]
        return Commit([now + state.canvas_start], [self.answer[now]])


def _world(folder: str | Path | None) -> World:
    digest = hashlib.sha256(f"{_sha256(_file('train', folder))} {ROWS} rows".encode()).hexdigest()
    return World("gsm8k-dlm", SHAPE, MASK, partial(_batch, folder), data=digest)


def _batch(folder: str | Path | None, seed: list[int]) -> Batch:
    kept = _training_texts(folder)
    rows = kept.rows(np.random.default_rng(seed).integers(0, len(kept.ids), ROWS).tolist())
    answers = torch.ones_like(rows.answers, dtype=torch.bool)
    return Batch(torch.cat([rows.prompts, rows.answers], 1), PROMPT_LENGTH, torch.cat([rows.visible, answers], 1))


@once
def _training_texts(folder: str | Path | None) -> Texts:
    return texts("train", folder)


def _file(split: str, folder: str | Path | None) -> Path:
    if split not in ("train", "test"):
        raise InputError(f"there is no split {split!r} of GSM8K: use train or test")
    if folder is None:
        return fetch(f"gsm8k-{split}")
    for name in (f"{split}.jsonl", f"{split}.jsonl.gz"):
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise InputError(f"{folder} has no {split}.jsonl (or .jsonl.gz): give the folder of GSM8K's files")


def _sha256(path: Path) -> str:
    """Of the lines, packed or not."""
    return hashlib.sha256(uncompressed(path)).hexdigest()
