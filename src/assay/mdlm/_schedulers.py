"""The standard schedulers: which masked positions a step commits."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm._sampling import add_gumbel, most_confident, share
from assay.mdlm._state import (
    Commit,
    Confidence,
    DiffusionGenerationConfig,
    Draft,
    GenState,
    Scheduler,
    Source,
)

#: The threshold of the dynamic schedule where the config has none (Fast-dLLM, SDAR).
THRESHOLD = 0.9


class _BlockSchedule(Scheduler):
    """Blocks from left to right, each row at its own pace; a share of the block's masks is due at each of its steps."""

    _settings = ""

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"{type(self).__name__}({self._settings})"

    def reset(self, state: GenState) -> None:
        """Read the run's settings."""
        config, rows = state.config, len(state.rows)
        self._block = torch.full((rows,), -(2**31))
        self._entered = torch.zeros(rows, dtype=torch.long)  # the row's commits when it entered its block
        self._masks = torch.zeros(rows, dtype=torch.long)  # and the block's masks then
        self._steps = _steps_of_a_block(config)
        self._settings = f"block_length={config.block_length}, steps={config.steps}"

    def candidates(self, state: GenState) -> tuple[int, int] | Int[Tensor, "B 2"]:
        """The current block of each row."""
        block = state.current_block
        new = block != self._block[state.rows]
        if new.any():
            entering = state.rows[new]
            self._block[entering] = block[new]
            self._entered[entering] = state.commits[new]
            self._masks[entering] = (state.masked & (state.block_of == block[:, None])).sum(1)[new]
        return torch.stack(state.span(block), dim=1)

    def due(self, state: GenState) -> Int[Tensor, "B"]:
        """How many masks each row is to commit at its coming step; at least one."""
        masks = self._masks[state.rows]
        steps = masks if self._steps is None else torch.full_like(masks, self._steps)
        step = state.commits - self._entered[state.rows]
        # what a cache policy's region kept from earlier steps is left when they are used up: one a step
        return share(masks, steps.clamp(min=1), step).clamp(min=1)


def _number_of_blocks(config: DiffusionGenerationConfig) -> int:
    if config.block_length is None:
        return 1
    if config.max_new_tokens % config.block_length:
        raise InputError(
            f"max_new_tokens {config.max_new_tokens} is no multiple of block_length {config.block_length}: change one of them"
        )
    return config.max_new_tokens // config.block_length


def _steps_of_a_block(config: DiffusionGenerationConfig) -> int | None:
    """The steps that the config gives to each block; None: one a mask."""
    if config.steps is None:
        return None
    blocks = _number_of_blocks(config)
    if config.steps % blocks:
        raise InputError(f"steps {config.steps} is no multiple of the {blocks} blocks: give each block as many steps")
    return config.steps // blocks


def _source(state: GenState, otherwise: Source) -> Source:
    return state.config.confidence_from or otherwise


class LowConfidenceStatic(_BlockSchedule):
    """In each block the same number of most confident masks a step; the schedule of LLaDA.

    Blocks of ``block_length`` from left to right, each with ``steps / num_blocks`` steps, each step with its
    `num_transfer` share of the block's masks. Positions right of the block are never eligible. Steps, block length and
    confidence are the config's.

    Source: Nie et al. 2025 (LLaDA, arXiv:2502.09992), released sampler.
    """

    def reset(self, state: GenState) -> None:
        """Read the run's settings.

        Raises
        ------
        InputError
            If max_new_tokens is no multiple of the block length, or steps no multiple of the number of blocks.
        """
        super().reset(state)
        _number_of_blocks(state.config)
        self._source = _source(state, "raw")
        self._settings += f", confidence={state.config.confidence} from {self._source}"

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """The due number of most confident candidates."""
        return Commit.where(draft, most_confident(self._confidence(state, draft), self.due(state)))

    def _confidence(self, state: GenState, draft: Draft) -> Float[Tensor, "B w"]:
        return draft.confidence(state.config.confidence, self._source)


class LowConfidenceDynamic(_BlockSchedule):
    """All masks of the block above a threshold of confidence, at least the most confident one.

    Parameters
    ----------
    threshold
        A candidate is committed if its confidence is larger. None: the config's, else 0.9.
    at_least
        ``"one"`` (Fast-dLLM): the most confident candidate is committed in any case. ``"schedule"`` (SDAR, dLLM-RL): as
        many as `LowConfidenceStatic` would commit; the config's steps then count.

    Source: Wu et al. 2025 (Fast-dLLM, arXiv:2505.22618); Cheng et al. 2025 (SDAR, arXiv:2510.06303); released samplers.
    """

    def __init__(self, threshold: float | None = None, at_least: Literal["one", "schedule"] = "one") -> None:
        if at_least not in ("one", "schedule"):
            raise InputError(f"at_least is {at_least!r}, expected 'one' or 'schedule': choose one of them")
        self.threshold, self.at_least = threshold, at_least

    def reset(self, state: GenState) -> None:
        """Read the run's settings."""
        super().reset(state)
        config = state.config
        self._threshold = next(value for value in (self.threshold, config.threshold, THRESHOLD) if value is not None)
        self._source = _source(state, "raw" if self.at_least == "one" else "filtered")
        self._settings = f"threshold={self._threshold}, at_least={self.at_least}, {self._settings}"
        self._settings += f", confidence={config.confidence} from {self._source}"

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """What is above the threshold, and the least number."""
        confidence = draft.confidence(state.config.confidence, self._source)
        due = self.due(state) if self.at_least == "schedule" else torch.ones_like(state.rows)
        return Commit.where(draft, (confidence > self._threshold) | most_confident(confidence, due))


class Sequential(_BlockSchedule):
    """The leftmost masks first: one a step, or the share that the config's steps make due in each block."""

    def candidates(self, state: GenState) -> tuple[int, int] | Int[Tensor, "B 2"]:
        """From the leftmost mask of each row to the last that is due."""
        super().candidates(state)
        first, rank = state.masked.int().argmax(1), state.masked.cumsum(1)
        inside = state.block_of == state.current_block[:, None]
        due = state.masked & inside & (rank <= self.due(state)[:, None])
        last = torch.where(due, torch.arange(state.length), first[:, None]).amax(1)
        return torch.stack([first, last + 1], dim=1)

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """All candidates: there are as many as are due."""
        return Commit.where(draft, draft.masked)


Alg = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]
_RANKED_BY: dict[str, Confidence] = {
    "maskgit_plus": "max_prob",
    "topk_margin": "margin",
    "entropy": "neg_entropy",
}


class DreamSchedule(Scheduler):
    """The schedule of Dream: over the whole canvas, at the times of a diffusion that runs from 1 to eps.

    The times are t_i = linspace(1, eps, steps + 1); step i with t = t_i, s = t_(i+1) commits int(n (1 - s/t)) of a row's n
    masks, the last step all. Steps that commit nothing are passed over without a forward. Each row counts its own masks
    (the released code takes the mean of the batch).

    Parameters
    ----------
    eps
        The last time.
    alg
        ``"origin"``: each mask by itself, with probability 1 - s/t. Otherwise the most confident by max_prob
        (``"maskgit_plus"``), margin (``"topk_margin"``) or neg_entropy (``"entropy"``). None: the one of the config's
        confidence.
    alg_temp
        Above 0, positions are drawn without replacement by softmax(confidence / alg_temp). None: the config's.

    Source: Ye et al. 2025 (Dream 7B, arXiv:2508.15487), released sampler.
    """

    def __init__(self, eps: float = 1e-3, alg: Alg | None = None, alg_temp: float | None = None) -> None:
        if not 0 < eps < 1:
            raise InputError(f"eps is {eps}, expected a time between 0 and 1: the released value is 1e-3")
        if alg is not None and alg != "origin" and alg not in _RANKED_BY:
            raise InputError(f"alg is {alg!r}, expected origin, {', '.join(_RANKED_BY)}: choose one of them")
        self.eps, self.alg, self.alg_temp = eps, alg, alg_temp
        self._settings = f"alg={alg}"

    @property
    def name(self) -> str:
        """What it is, with its settings."""
        return f"DreamSchedule({self._settings}, eps={self.eps})"

    def reset(self, state: GenState) -> None:
        """Lay out the times.

        Raises
        ------
        InputError
            If the config's confidence is none of this schedule's and no alg was given.
        """
        config, rows = state.config, len(state.rows)
        steps = [config.steps or max(masks, 1) for masks in state.masked.sum(1).tolist()]
        times = [torch.linspace(1, self.eps, own + 1, dtype=torch.float64) for own in steps]
        self._fraction = torch.ones(rows, max(steps), dtype=torch.float64)  # of the masks; 1 from a row's last step on
        for fraction, own in zip(self._fraction, times, strict=True):
            fraction[: len(own) - 2] = (1 - own[1:] / own[:-1])[:-1]
        self._step = torch.zeros(rows, dtype=torch.long)
        self._commits = torch.zeros(rows, dtype=torch.long)
        named = {kind: alg for alg, kind in _RANKED_BY.items()}
        alg = self.alg or named.get(config.confidence)
        if alg is None:
            raise InputError(
                f"the dream schedule knows no confidence {config.confidence!r}: choose max_prob, margin or neg_entropy, "
                "or give DreamSchedule an alg"
            )
        self._alg = alg
        self._alg_temp = config.alg_temp if self.alg_temp is None else self.alg_temp
        self._source = _source(state, "filtered")
        self._settings = f"alg={alg} from {self._source}, alg_temp={self._alg_temp}, steps={config.steps}"
        if alg == "origin":
            # A mask that survives step i with probability s/t survives to time s with probability s: its step is that of
            # one uniform number among the times, which can be drawn now.
            u = torch.rand(
                state.host.shape, generator=state.generator, device=state.x.device, dtype=torch.float64
            ).cpu()
            self._fate = torch.stack(
                [len(own) - 2 - torch.bucketize(row, own[1:-1].flip(0)) for row, own in zip(u, times, strict=True)]
            )

    def candidates(self, state: GenState) -> tuple[int, int] | Int[Tensor, "B 2"]:
        """From each row's first mask to its last. Moves each row on to the next step that commits something."""
        if self._alg != "origin":
            step = self._step[state.rows] + (state.commits > self._commits[state.rows])
            count = self._count(state)
            steps = torch.arange(self._fraction.shape[1])
            # left over by a cache policy's region after the last step: that step again
            step = step.clamp(max=len(steps) - 1)
            self._step[state.rows] = ((count > 0) & (steps >= step[:, None])).int().argmax(1)
            self._commits[state.rows] = state.commits
        masked = state.masked
        return torch.stack([masked.int().argmax(1), state.length - masked.flip(1).int().argmax(1)], dim=1)

    def _count(self, state: GenState) -> Int[Tensor, "B steps"]:
        return (state.masked.sum(1)[:, None] * self._fraction[state.rows]).long()

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """The candidates whose step it is, or the most confident."""
        if self._alg == "origin":
            fate = self._fate[state.rows][:, draft.positions].to(draft.masked.device)
            fate = fate.masked_fill(~draft.masked, self._fraction.shape[1])
            return Commit.where(draft, draft.masked & (fate == fate.amin(1, keepdim=True)))
        count = self._count(state).gather(1, self._step[state.rows, None])[:, 0]
        confidence = draft.confidence(_RANKED_BY[self._alg], self._source)
        if self._alg_temp:
            # Gumbel noise on the logarithms of the weights, then the largest: draws without replacement
            weights = draft.of_candidates(confidence) / self._alg_temp
            confidence = draft.spread(add_gumbel(weights, 1.0, state.generator), -torch.inf)
        return Commit.where(draft, most_confident(confidence, count.clamp(min=1)))


def make_scheduler(config: DiffusionGenerationConfig, block_model: bool) -> Scheduler:
    """The standard scheduler of the config's ``schedule``; the dynamic one in SDAR's form for block models."""
    if config.schedule == "static":
        return LowConfidenceStatic()
    if config.schedule == "dynamic":
        return LowConfidenceDynamic(at_least="schedule" if block_model else "one")
    if config.schedule == "dream":
        return DreamSchedule()
    return Sequential()
