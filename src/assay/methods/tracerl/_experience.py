"""What a step's rollouts are worth: outcome rewards, process rewards, and which tasks are kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.methods.tracerl._groups import counted_and_kept
from assay.methods.tracerl._slices import SliceBatch
from assay.methods.tracerl._traces import Trace
from assay.rl import call_reward, group_advantages, outcome_rewards
from assay.rl.rewards import name_of


@dataclass(eq=False)
class Rewards:
    """Of some responses.

    Attributes
    ----------
    outcome : (B,)
        One number a response, the functions' sum; NaN: not scorable.
    process : list of (N,) tensors, or None
        One number a token, where some function judges parts of a response.
    """

    outcome: Float[Tensor, " B"]
    process: list[Tensor] | None


def score(
    functions: Sequence[Callable[..., Any]],
    prompts: Sequence[Any],
    traces: Sequence[Trace],
    eos_id: int | None,
    columns: Mapping[str, Sequence[Any]],
) -> Rewards:
    """Ask the reward functions about each response.

    Parameters
    ----------
    functions
        Called as TRL does. An entry is a number, None, one number a token of the answer, or ``(segment_end, score)`` pairs:
        the tokens from the last segment's end up to this one get the score.
    prompts
        As they stand in the data set, one a response.
    traces
        The responses. The functions see their text, or the answer's token ids where there is no tokenizer.
    eos_id
        Ends an answer.
    columns
        Of the data set, one entry a response.
    """
    answers = [trace.answer(eos_id).tolist() for trace in traces]
    completions = [ids if trace.text is None else trace.text for ids, trace in zip(answers, traces)]
    columns = {**columns, "completion_ids": answers}
    sums = torch.zeros(len(traces), dtype=torch.float64)
    scored = torch.zeros(len(traces), dtype=torch.bool)
    process: list[Tensor] | None = None
    for function in functions:
        answered = call_reward(function, prompts, completions, columns)
        if any(isinstance(entry, list | tuple) for entry in answered):
            parts = [_by_token(entry, trace, len(ids), function)
                     for entry, trace, ids in zip(answered, traces, answers)]  # fmt: skip
            process = parts if process is None else [a + b for a, b in zip(process, parts)]
            continue
        outcome = outcome_rewards(answered, function)
        known = ~outcome.isnan()
        sums[known] += outcome[known]
        scored |= known
    if process is not None and not scored.any():
        sums = torch.stack([part[: max(len(ids), 1)].mean() for part, ids in zip(process, answers)])
        scored[:] = True
    return Rewards(sums.masked_fill(~scored, torch.nan), process)


def _by_token(entry: Any, trace: Trace, length: int, function: Any) -> Tensor:
    """Rewards of a response's tokens, (N,)."""
    out = torch.zeros(len(trace.response_ids), dtype=torch.float64)
    if entry is None:
        return out
    if not isinstance(entry, list | tuple):
        raise InputError(
            f"the reward {name_of(function)} mixes numbers with lists: return lists (or None) for all completions"
        )
    if entry and isinstance(entry[0], list | tuple):
        start = 0
        for end, value in entry:
            if not start < end <= len(out):
                raise InputError(
                    f"the reward {name_of(function)} names a segment [{start}, {end}) of {len(out)} tokens: ends must rise "
                    "and stay inside"
                )
            out[start:end] = float(value)
            start = end
        return out
    if len(entry) > len(out) or len(entry) < length:
        raise InputError(
            f"the reward {name_of(function)} returned {len(entry)} token rewards for an answer of {length} tokens: give one a "
            "token of the answer"
        )
    out[: len(entry)] = torch.tensor([float(value) for value in entry], dtype=torch.float64)
    return out


@dataclass(eq=False)
class Experience:
    """The rollouts of a step.

    Attributes
    ----------
    prompts
        As in the data set, one a response.
    traces
        All responses, those of a task behind each other.
    rewards
        Of all responses; cut-off ones count as wrong.
    zscores : (B,)
        `group_advantages` of the rewards, of all tasks.
    kept : (tasks,)
        Tasks that are trained on.
    """

    prompts: list[Any]
    traces: list[Trace]
    rewards: Rewards
    zscores: Float[Tensor, " B"]
    kept: Bool[Tensor, " tasks"]

    @classmethod
    def of(
        cls,
        prompts: list[Any],
        traces: list[Trace],
        rewards: Rewards,
        group: int,
        band: tuple[float, float] | None,
        cut_off_is_wrong: bool,
    ) -> "Experience":
        """Count cut-off responses as wrong (where that is the rule), choose the tasks, and standardise inside each."""
        cut = torch.tensor([trace.hit_limit and cut_off_is_wrong for trace in traces])
        counted, kept = counted_and_kept(rewards.outcome, cut, group, band)
        zscores = group_advantages(counted, group, eps=0.0, ddof=0)
        return cls(prompts, traces, Rewards(counted, rewards.process), zscores, kept)

    @property
    def group(self) -> int:
        """Responses a task."""
        return len(self.traces) // len(self.kept)

    @property
    def trained(self) -> Int[Tensor, " kept"]:
        """Numbers of the responses that are trained on: scorable ones of the kept tasks."""
        chosen = self.kept.repeat_interleave(self.group) & ~self.rewards.outcome.isnan()
        return chosen.nonzero()[:, 0]


@dataclass(eq=False)
class TrainingRows:
    """What the updates of a step are made of, on the CPU.

    Attributes
    ----------
    batch
        Its rows' responses are numbered among those that are trained on.
    advantages, logp_old : (R, L1)
        Of each target; 0 elsewhere.
    logp_ref : (R, L1) or None
        Of the policy before the run, where the penalty pulls to it.
    values_old, returns : (R, L1) or None
        With a value model.
    idle
        There is nothing to learn here (on one process of several): the rows only keep it in step with the others.
    """

    batch: SliceBatch
    advantages: Tensor
    logp_old: Tensor
    logp_ref: Tensor | None = None
    values_old: Tensor | None = None
    returns: Tensor | None = None
    idle: bool = False
