"""What a rollout leaves: the answer, and the order in which the policy committed it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay._errors import InputError

NEVER = 0  # in a step map: filled by the EOS rule, or padding


@dataclass(kw_only=True, eq=False)
class Trace:
    """One response and how it came about.

    Parameters
    ----------
    prompt_ids : (P,)
        Without padding.
    response_ids : (N,)
        What the policy committed, over the whole canvas behind the prompt: also tokens right of the answer's end that
        the EOS rule then overwrote in the text, since later steps saw them. EOS where nothing was committed.
    step_map : (N,)
        The denoising step at which each position was committed, counted from 1 over the whole response (on a block model
        across the blocks). 0: never.
    logps : (N,) or None
        Log-probabilities of the committed tokens when they were sampled. For checks: the training never uses them.
    text
        The decoded answer, or None without a tokenizer.
    hit_limit
        The answer was cut off by the length limit.
    canvas_len
        Columns of the row's canvas, P + N.
    block_origin
        Where the rollout counted the blocks of a block model from: "prompt" (from the prompt's end) is what the training
        rows need.

    Raises
    ------
    InputError
        If the parts do not belong together: their lengths differ, or a step is negative.
    """

    prompt_ids: Int[Tensor, "_"]
    response_ids: Int[Tensor, "_"]
    step_map: Int[Tensor, "_"]
    logps: Float[Tensor, "_"] | None = None
    text: str | None = None
    hit_limit: bool = False
    canvas_len: int | None = None
    block_origin: str = "prompt"

    def __post_init__(self) -> None:
        prompt, response = len(self.prompt_ids), len(self.response_ids)
        if len(self.step_map) != response:
            raise InputError(
                f"a trace has {response} response tokens and a step map of {len(self.step_map)}: give one step a token"
            )
        if self.logps is not None and len(self.logps) != response:
            raise InputError(
                f"a trace has {response} response tokens and {len(self.logps)} log-probabilities: give one a token, or None"
            )
        if response == 0 or bool((self.step_map < 0).any()):
            raise InputError("a trace needs at least one response token, and steps of 1 or more (0: never committed)")
        if self.canvas_len is None:
            self.canvas_len = prompt + response
        if self.canvas_len != prompt + response:
            raise InputError(
                f"a trace of {prompt} prompt and {response} response tokens says its canvas had {self.canvas_len} columns: "
                "keep the whole canvas, with step 0 where nothing was committed, or the masks that the policy saw are lost"
            )

    def answer(self, eos_id: int | None) -> Int[Tensor, " answer"]:
        """The answer's tokens, up to but without its first EOS."""
        ends = (self.response_ids == eos_id).nonzero() if eos_id is not None else self.response_ids.new_empty(0)
        return self.response_ids[: int(ends[0])] if len(ends) else self.response_ids


def settled(step_map: Int[Tensor, "*rows response"]) -> Int[Tensor, "*rows response"]:
    """Steps with those that never came (0) after all others: at the row's largest step + 1.

    Source: arXiv:2509.06949, released code (padding gets max + 1).
    """
    return torch.where(step_map == NEVER, step_map.amax(-1, keepdim=True) + 1, step_map)


def collapse_steps(
    step_map: Int[Tensor, "*rows response"], s: int, block_size: int | None = None
) -> Int[Tensor, "*rows response"]:
    """Merge every s consecutive steps of a decoding order into one, which is named by its last.

    The number of training rows falls from the number of steps to a fraction 1/s of it.

    Parameters
    ----------
    step_map : (..., L)
        Steps of one or more responses; 0 counts as one step after the last.
    s
        Distinct steps that become one; 1 changes nothing.
    block_size
        Merge inside each block of so many positions (counted from the response's start) separately; None: over the whole
        response.

    Returns
    -------
    (..., L)

    Raises
    ------
    InputError
        If s or the block size is below 1.

    Source: arXiv:2509.06949, section 4.2 (the shrinkage parameter).
    """
    if s < 1:
        raise InputError(f"the shrinkage s must be at least 1, got {s}: 1 trains on every step, 8 on every eighth")
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size must be at least 1, got {block_size}: give the model's, or None for no blocks")
    values = settled(step_map)
    length = values.shape[-1]
    if length == 0 or s == 1:
        return values
    block = length if block_size is None else min(block_size, length)
    short = -length % block
    cells = torch.nn.functional.pad(values, (0, short), value=int(values.max()) + 1).unflatten(-1, (-1, block))
    there = torch.nn.functional.pad(torch.ones_like(values, dtype=torch.bool), (0, short)).unflatten(-1, (-1, block))
    group = dense_ranks(cells).div(s, rounding_mode="floor")
    # A filler may share the last group of a short block; it must not name it.
    named = torch.full_like(cells, -1).scatter_reduce(-1, group, cells.masked_fill(~there, -1), "amax")
    return named.gather(-1, group).flatten(-2)[..., :length]


def dense_ranks(values: Int[Tensor, "*rows n"]) -> Int[Tensor, "*rows n"]:
    """How many distinct smaller values of its own row each value has."""
    ordered, order = values.sort(dim=-1)
    new = torch.zeros_like(ordered)
    new[..., 1:] = (ordered[..., 1:] != ordered[..., :-1]).long()
    return torch.empty_like(values).scatter_(-1, order, new.cumsum(-1))


def left_padded(rows: Sequence[Int[Tensor, "_"]], pad: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Rows of different lengths as one tensor, padded on the left, and where they are real (1) or padding (0)."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    real = torch.zeros_like(ids)
    for out, there, row in zip(ids, real, rows, strict=True):
        out[width - len(row) :] = row
        there[width - len(row) :] = 1
    return ids, real


def collect_traces(
    model: Any,
    prompts: Sequence[Int[Tensor, "_"]],
    n: int,
    config: Any,
    *,
    scheduler: Any = None,
    cache_policy: Any = None,
    decode: Callable[[list[int]], str] | None = None,
    limit_margin: int | None = 5,
    batch_size: int = 256,
) -> list[Trace]:
    """Let a policy answer each prompt n times, and keep how.

    Parameters
    ----------
    model
        A `MaskedDiffusionLM`. Its training mode is put back afterwards.
    prompts
        Token ids of each prompt, without padding.
    n
        Responses a prompt.
    config
        `DiffusionGenerationConfig`. Its seed (None: drawn) decides all draws; ``return_trace`` is switched on.
    scheduler, cache_policy
        Handed to `diffusion_generate`.
    decode
        Text of an answer's tokens.
    limit_margin
        An answer is cut off (`Trace.hit_limit`) if it is longer than the limit less this many tokens; None: only where
        it has no EOS at all.
    batch_size
        Canvases generated at once.

    Returns
    -------
    n traces a prompt, those of a prompt behind each other.

    Source: arXiv:2509.06949, section 4.1.
    """
    from assay.mdlm import diffusion_generate

    if n < 1 or not prompts:
        raise InputError(
            f"{len(prompts)} prompts with {n} responses each leave nothing to collect: give at least one each"
        )
    eos, limit = model.config.eos_token_id, config.max_new_tokens
    seed = int(torch.randint(2**31, ())) if config.seed is None else config.seed
    asked = [prompt.cpu() for prompt in prompts for _ in range(n)]
    traces: list[Trace] = []
    training = model.training
    model.eval()
    try:
        for at in range(0, len(asked), batch_size):
            rows = asked[at : at + batch_size]
            here = replace(config, return_trace=True, seed=seed + at)
            out = diffusion_generate(model, rows, here, scheduler=scheduler, cache_policy=cache_policy)
            answers = slice(out.canvas_start, None)
            assert out.trace is not None
            steps = out.trace.steps[:, answers]
            tokens = torch.where(steps == NEVER, out.sequences[:, answers].cpu(), out.trace.tokens[:, answers])
            for row, prompt in enumerate(rows):
                trace = Trace(
                    prompt_ids=prompt,
                    response_ids=tokens[row],
                    step_map=steps[row],
                    logps=out.trace.logp[row, answers],
                    block_origin=config.block_origin,
                )
                answer = trace.answer(eos)
                trace.hit_limit = len(answer) >= limit - (limit_margin or 0)
                trace.text = None if decode is None else decode(answer.tolist())
                traces.append(trace)
    finally:
        model.train(training)
    return traces


def padding_of(config: Any) -> int:
    """The token that pads: the model's pad id, else its EOS, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(config, name) is not None:
            return int(getattr(config, name))
    return 0
