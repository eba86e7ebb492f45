"""What the generation loop, its schedulers and its cache policies say to each other.

One iteration of `diffusion_generate`::

    scheduler.candidates(state)          -> the columns whose logits the scheduler wants
    policy.plan(state)                   -> what the model recomputes, for all rows or for each row
    forward(s)                           -> one call for each group of rows with the same plan
    mask id to -inf, logits_processor, filters, sampling   -> Draft
    scheduler.commit(state, logits, draft) -> Commit
    EOS rule, stopping, streamer; finished rows leave

An iteration in which no candidate lies in its row's region commits nothing: the forward only refreshes the cache.

A row's result never depends on the rows beside it. Whatever steers a row (its block, its window, its plan) is therefore
kept a row; memory of a scheduler or a policy that outlives an iteration is indexed by `GenState.rows`, since finished
rows leave the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import _sampling

Schedule = Literal["static", "dynamic", "dream", "sequential"]
Confidence = Literal["max_prob", "margin", "neg_entropy", "logit_margin", "random"]
Source = Literal["raw", "filtered"]
EosPolicy = Literal["fill", "none", "suppress"]
BlockOrigin = Literal["canvas", "prompt"]


class SchedulerError(RuntimeError):
    """A scheduler returned a position that it may not commit, or a token that does not exist."""


class SchedulerStall(SchedulerError):
    """A scheduler committed nothing for an unfinished row, or a policy never lets its candidates be computed."""


@dataclass(kw_only=True)
class DiffusionGenerationConfig:
    """How an answer is generated.

    Parameters
    ----------
    max_new_tokens
        Masks put after the prompt, N. 0 only where masks of the prompt are to be filled in.
    block_length
        Columns of a block. None: all masks are one block; on a block model, its own block size.
    steps
        Denoising steps of the whole answer, shared equally by its blocks. None: one token a step.
    schedule
        The scheduler made when none is given.
    threshold
        Of the dynamic schedule; None: 0.9.
    confidence
        What ranks candidates; see `assay.mdlm.confidence`.
    confidence_from
        ``"raw"``: from the unfiltered logits at temperature 1; ``"filtered"``: after temperature and filters. None: raw
        for static, dynamic and sequential, filtered for dream and on block models.
    temperature, top_k, top_p
        Of the sampled tokens; temperature 0 takes the most likely token (the lowest id on ties).
    alg_temp
        Of the dream schedule: positions are drawn by softmax(confidence / alg_temp). None or 0: the most confident.
    cfg_scale
        Classifier-free guidance: u + (cfg_scale + 1)(c - u), u with the prompt masked. 0: off.
    eos_policy
        ``"fill"``: once an EOS and all left of it is committed, the rest becomes EOS and the row is finished. ``"none"``:
        every position is committed by the scheduler. ``"suppress"``: EOS is never committed.
    block_origin
        Of a block model: blocks are counted from the row's first token, or from the end of its prompt.
    allow_masks_in_prompt
        Masks in the prompt are filled in where they stand (infilling); otherwise they are an error.
    seed
        Of all draws. None: drawn from torch's global generator.
    return_trace
        Keep which step committed which token, and its log-probability.
    drop_finished
        Leave finished rows out of the forward. Changes the time, not the result.

    Raises
    ------
    InputError
        If a value is out of its range.
    """

    max_new_tokens: int
    block_length: int | None = None
    steps: int | None = None
    schedule: Schedule = "static"
    threshold: float | None = None
    confidence: Confidence = "max_prob"
    confidence_from: Source | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    alg_temp: float | None = None
    cfg_scale: float = 0.0
    eos_policy: EosPolicy = "fill"
    block_origin: BlockOrigin = "canvas"
    allow_masks_in_prompt: bool = False
    seed: int | None = None
    return_trace: bool = False
    drop_finished: bool = True

    def __post_init__(self) -> None:
        least_new = 0 if self.allow_masks_in_prompt else 1
        for name, value, fits, expected in (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= least_new, f"at least {least_new}"),
            ("block_length", self.block_length, self.block_length is None or self.block_length >= 1, "at least 1"),
            ("steps", self.steps, self.steps is None or self.steps >= 1, "at least 1"),
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or 1e-30 <= self.temperature <= 1e30,  # float32 holds the quotients
                "0, or 1e-30 to 1e30",
            ),
            ("threshold", self.threshold, self.threshold is None or self.threshold == self.threshold, "a number"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1, or None for no limit"),
            ("top_p", self.top_p, self.top_p is None or 0 < self.top_p <= 1, "in (0, 1], or None for no limit"),
            ("alg_temp", self.alg_temp, self.alg_temp is None or self.alg_temp >= 0, "0 or more"),
            ("cfg_scale", self.cfg_scale, self.cfg_scale >= 0, "0 or more"),
        ):
            if not fits:
                raise InputError(f"{name} is {value}, expected {expected}: change it in the generation config")
        for name, kind in (
            ("schedule", Schedule),
            ("confidence", Confidence),
            ("eos_policy", EosPolicy),
            ("block_origin", BlockOrigin),
        ):
            if getattr(self, name) not in kind.__args__:  # type: ignore[attr-defined]
                names = ", ".join(kind.__args__)  # type: ignore[attr-defined]
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {names}: choose one of them")
        if self.confidence_from not in (None, *Source.__args__):  # type: ignore[attr-defined]
            raise InputError(
                f"confidence_from is {self.confidence_from!r}, expected raw or filtered, or None for the schedule's own: "
                "choose one of them"
            )


@dataclass(kw_only=True)
class GenState:
    """Everything known about the rows that are still being generated (finished ones too if they are not dropped).

    Control flow reads what lies on the CPU (marked so): it costs no wait for the device.

    Attributes
    ----------
    x : (B, T)
        The canvas on the model's device: left padding, prompt, answer with mask ids where nothing is committed.
    host : (B, T), CPU
        The same canvas on the CPU; on a CPU model the same tensor.
    rows : (B,), CPU
        Which row of the call each row is. Index what you remember a row by it.
    prompt_len, pad : (B,), CPU
        Tokens of the row's own prompt, and pads left of it; they sum to ``canvas_start``.
    canvas_start
        L0, the padded prompt length: answers are the columns [L0, T) of every row.
    position_ids : (B, T)
        cumsum of the real columns - 1; pads have 1.
    block_of : (B, T), CPU
        The block of each column, as `DiffusionGenerationConfig.block_length` cuts the row. Full attention: block b is
        [L0 + b block_length, ...), blocks of the prompt are negative. Without a block length, block 0 is from the row's
        first mask to the end. Block models: the model's blocks, at their origin; the first block may hold the prompt's
        last tokens. Pads have -2**31.
    step
        1-based number of the coming commit, counted over iterations that committed something.
    commits : (B,), CPU
        Iterations in which the row committed something; ``commits + 1`` is the row's own coming step.
    last_commit : (B, 2), CPU
        First column and one past the last column of the row's latest commit (EOS filling not counted); (L0, L0) before
        the first.
    finished : (B,), CPU
        Rows without masks left.
    generator
        Source of all random numbers, on the model's device.
    mask_id, eos_id
        Token ids; eos_id None: the model has none.
    config
        As given to `diffusion_generate`.
    cache
        The run's `RegionCache` (rows as here; with guidance, rows of the unconditional half follow), or None so far.
    stats
        Belongs to scheduler and policy; ends in `DiffusionOutput.stats`.
    """

    x: Int[Tensor, "B T"]
    host: Int[Tensor, "B T"]
    rows: Int[Tensor, "B"]
    prompt_len: Int[Tensor, "B"]
    pad: Int[Tensor, "B"]
    canvas_start: int
    position_ids: Int[Tensor, "B T"]
    block_of: Int[Tensor, "B T"]
    step: int
    commits: Int[Tensor, "B"]
    last_commit: Int[Tensor, "B 2"]
    finished: Bool[Tensor, "B"]
    generator: torch.Generator
    mask_id: int
    eos_id: int | None
    config: DiffusionGenerationConfig
    cache: Any = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """T, the columns of the canvas."""
        return self.host.shape[1]

    @property
    def masked(self) -> Bool[Tensor, "B T"]:
        """Where nothing is committed yet, on the CPU."""
        return self.host == self.mask_id

    @property
    def current_block(self) -> Int[Tensor, "B"]:
        """The leftmost block with a mask, a row, on the CPU; 2**31 for rows without masks."""
        return torch.where(self.masked, self.block_of, 2**31).amin(1)

    def span(self, block: Int[Tensor, "B"]) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"]]:
        """First column and one past the last column of a block of each row, on the CPU; (T, T) for a block that is not there."""
        inside = self.block_of == block[:, None]
        width = inside.sum(1)
        start = torch.where(width > 0, inside.int().argmax(1), self.length)
        return start, start + width

    def keep(self, kept: Int[Tensor, "k"]) -> None:
        """Let the other rows go. The cache is not touched."""
        shared = self.host is self.x
        for name in ("rows", "prompt_len", "pad", "block_of", "commits", "last_commit", "finished"):
            setattr(self, name, getattr(self, name)[kept])
        device = self.x.device
        self.x, self.position_ids = self.x[kept.to(device)], self.position_ids[kept.to(device)]
        self.host = self.x if shared else self.host[kept]


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """What one forward recomputes, and what it may see.

    Parameters
    ----------
    region
        Columns [a, e) whose Q, K and V are computed. Without a cache only (0, T). Candidates outside it are dropped.
    see
        Columns [lo, hi) that are attended, which must hold the region; None: all that are valid.
    write
        Which of the fresh K, V go to the cache: all, none, or columns [lo, hi).
    use_cache
        False: the forward neither reads nor writes the cache.
    freeze
        Columns of the cache that nobody may write after this forward. Where rows have different plans, what all of them
        freeze.
    """

    region: tuple[int, int]
    see: tuple[int, int] | None = None
    write: Literal["all", "none"] | tuple[int, int] = "all"
    use_cache: bool = True
    freeze: tuple[int, int] | None = None


@dataclass(kw_only=True, eq=False)
class Draft:
    """A token for each candidate, as the loop sampled it. On the model's device, but for the positions.

    Attributes
    ----------
    positions : (w,), CPU
        Columns of the window that some row has a candidate in, ascending; not always contiguous.
    masked : (B, w)
        Which of them are this row's candidates: masked, in the window, in the region of the row's plan. Only those may
        be committed. A row without any is exempt in this iteration.
    tokens : (B, w)
        Sampled (temperature 0: most likely) tokens; the mask id where not a candidate.
    raw : (B, w, V)
        Logits after mask id and processors, before temperature and filters. Meaningless where not a candidate.
    """

    positions: Int[Tensor, "w"]
    masked: Bool[Tensor, "B w"]
    tokens: Int[Tensor, "B w"]
    raw: Float[Tensor, "B w V"]
    generator: torch.Generator
    where: tuple[Int[Tensor, "n"], Int[Tensor, "n"]] | None = None  # (row, place) of the candidates; None: every place
    filtered: Float[Tensor, "n V"] | None = None  # a row for each candidate; None: equal to raw

    @cached_property
    def logits(self) -> Float[Tensor, "B w V"]:
        """Logits after temperature and filters (-inf where filtered out)."""
        if self.filtered is None:
            return self.raw
        if self.where is None:
            return self.filtered.view_as(self.raw)
        return torch.zeros_like(self.raw).index_put_(self.where, self.filtered)

    @cached_property
    def logp(self) -> Float[Tensor, "B w"]:
        """Log-probability (float64) of the token under the distribution it was drawn from; 0 where not a candidate.

        At temperature 0: under the softmax of the filtered logits at temperature 1.
        """
        logits = self.of_candidates(self.raw) if self.filtered is None else self.filtered
        return self.spread(_sampling.log_probability(logits, self.of_candidates(self.tokens)), 0.0)

    def confidence(self, kind: Confidence, source: Source) -> Float[Tensor, "B w"]:
        """Confidence (float64) of each candidate, -inf elsewhere; see `assay.mdlm.confidence`."""
        logits = self.of_candidates(self.raw) if source == "raw" or self.filtered is None else self.filtered
        values = _sampling.confidence(kind, logits, self.of_candidates(self.tokens), self.generator)
        return self.spread(values, -torch.inf)

    def of_candidates(self, values: Shaped[Tensor, "B w *rest"]) -> Shaped[Tensor, "n *rest"]:
        """The entries at candidates, row by row; without a copy if every place is one."""
        return values.flatten(0, 1) if self.where is None else values[self.where]

    def spread(self, values: Shaped[Tensor, "n"], elsewhere: int | float) -> Shaped[Tensor, "B w"]:
        """The inverse of `of_candidates`: one value for each candidate, and another where there is none."""
        if self.where is None:
            return values.view(self.masked.shape)
        return values.new_full(self.masked.shape, elsewhere).index_put_(self.where, values)


@dataclass(eq=False)
class Commit:
    """Which columns a scheduler commits, and to what: one entry a row of the state, empty where it commits nothing.

    Parameters
    ----------
    positions
        A row's columns, each a candidate of the draft, in any order. On the CPU nothing has to be waited for.
    tokens
        Their tokens.
    logp
        Their log-probabilities; None: the draft's, where the token is the draft's own (0 otherwise).
    """

    positions: Sequence[Int[Tensor, "_"]]
    tokens: Sequence[Int[Tensor, "_"]]
    logp: Sequence[Float[Tensor, "_"]] | None = None

    @classmethod
    def where(cls, draft: Draft, chosen: Bool[Tensor, "B w"]) -> "Commit":
        """Commit the draft's own tokens at the chosen places."""
        # both in one transfer: the only wait for the device in a step
        flags, tokens = torch.stack([chosen.to(draft.tokens), draft.tokens]).cpu()
        rows, places = flags.nonzero(as_tuple=True)
        sizes = flags.sum(1).tolist()
        return cls(positions=draft.positions[places].split(sizes), tokens=tokens[rows, places].split(sizes))


@runtime_checkable
class Scheduler(Protocol):
    """Decides which masked positions are committed, and to what. Plug into ``diffusion_generate(scheduler=...)``."""

    @property
    def name(self) -> str:
        """What it is, with its settings; goes into the stats."""
        return repr(self)

    def reset(self, state: GenState) -> None:
        """Called once before the first iteration, with all rows of the call."""
        return

    def candidates(self, state: GenState) -> tuple[int, int] | Int[Tensor, "B 2"]:
        """Columns [lo, hi) that may be committed next: one window for all rows, or one a row (on the CPU).

        Only masked columns count. Windows of finished rows are ignored.
        """
        ...

    def commit(self, state: GenState, logits: Float[Tensor, "B w V"], draft: Draft) -> Commit:
        """Choose among the draft's candidates; at least one for every row that has any.

        Parameters
        ----------
        state
            Before the commit.
        logits : (B, w, V)
            Of the draft's columns: after mask id and processors, before temperature and filters.
        draft
            The sampled tokens, with log-probabilities and confidences on demand.
        """
        ...


@runtime_checkable
class CachePolicy(Protocol):
    """Decides what each forward recomputes. Plug into ``diffusion_generate(cache_policy=...)``."""

    @property
    def name(self) -> str:
        """What it is, with its settings; goes into the stats."""
        return repr(self)

    def reset(self, state: GenState, model: Any) -> None:
        """Called once before the first iteration, with all rows of the call.

        Raises
        ------
        InputError
            If the model does not fit the policy.
        """
        return

    def plan(self, state: GenState) -> ForwardPlan | Sequence[ForwardPlan]:
        """The next forward: one plan for all rows, or one a row.

        Rows with equal plans are computed together. The plan of a finished row is ignored. A plan whose region holds no
        candidate of its row makes a forward that only writes the cache.
        """
        ...


@dataclass(kw_only=True, eq=False)
class DecodingTrace:
    """What was decoded when: before step s of a row the model saw ``tokens`` where steps is -1 or 1 .. s - 1, masks elsewhere.

    Attributes
    ----------
    steps : (B, T)
        1-based step of the row at which the column was committed; 0: filled by the EOS rule; -1: given (prompt, pads).
    logp : (B, T)
        Log-probability (float64) of the committed token under the distribution it was drawn from; 0 where none was.
    tokens : (B, T)
        The committed tokens, also those right of an EOS which the EOS rule then replaced in the sequence.
    """

    steps: Int[Tensor, "B T"]
    logp: Float[Tensor, "B T"]
    tokens: Int[Tensor, "B T"]


@dataclass(kw_only=True, eq=False)
class DiffusionOutput:
    """What `diffusion_generate` returns. All tensors are on the CPU except the sequences.

    Attributes
    ----------
    sequences : (B, T)
        Pads, prompt and answer; no mask id is left.
    canvas_start
        First column of the answers, L0.
    steps, forwards
        Iterations that committed something; calls of the model.
    token_forwards, kv_columns
        Sums over the calls of columns whose Q was computed and of keys attended, over all rows (guidance doubles them).
    row_steps, row_forwards, row_token_forwards, row_kv_columns : (B,)
        The same, a row: what it would count if it ran alone (except for its pads).
    row_filled : (B,)
        Columns that the EOS rule or a stop filled.
    trace
        `DecodingTrace`, if asked for.
    timings
        Seconds by part: ``forward``, ``sampling``, ``scheduler``, ``policy``, ``total``.
    stats
        Filled by scheduler and policy; ``scheduler`` and ``policy`` hold their names.
    """

    sequences: Int[Tensor, "B T"]
    canvas_start: int
    steps: int
    forwards: int
    token_forwards: int
    kv_columns: int
    row_steps: Int[Tensor, "B"]
    row_forwards: Int[Tensor, "B"]
    row_token_forwards: Int[Tensor, "B"]
    row_kv_columns: Int[Tensor, "B"]
    row_filled: Int[Tensor, "B"]
    trace: DecodingTrace | None
    timings: dict[str, float]
    stats: dict[str, Any]
