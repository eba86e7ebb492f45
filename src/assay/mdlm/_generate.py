"""The generation loop of masked diffusion: `diffusion_generate`.

The loop owns what no plug point should have to think about: the canvas and its padding, guidance, the mask id, sampling,
the EOS rule, the account of what was computed, and that a row's result does not depend on the rows beside it. Rows with
equal plans share a forward; finished rows leave.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm._cache import RegionCache
from assay.mdlm._canvas import first_state, fitting, padded_canvas
from assay.mdlm._masks import block_causal_mask
from assay.mdlm._policies import NoCache
from assay.mdlm._sampling import add_gumbel, filter_logits
from assay.mdlm._schedulers import DreamSchedule, make_scheduler
from assay.mdlm._state import (
    CachePolicy,
    Commit,
    DecodingTrace,
    DiffusionGenerationConfig,
    DiffusionOutput,
    Draft,
    ForwardPlan,
    GenState,
    Scheduler,
    SchedulerError,
    SchedulerStall,
)

if TYPE_CHECKING:
    from assay.mdlm._model import MaskedDiffusionLM

LogitsProcessor = Callable[[GenState, Tensor, Tensor], Tensor]
Stopping = Callable[[GenState], Tensor]


@runtime_checkable
class Streamer(Protocol):
    """What transformers' streamers are: `put` takes the prompt, then each run of tokens that is final; `end` closes."""

    def put(self, value: Tensor) -> None:
        """Take tokens (n,), on the CPU."""

    def end(self) -> None:
        """No more tokens come."""


@torch.no_grad()
def diffusion_generate(
    model: "MaskedDiffusionLM",
    input_ids: Tensor | Sequence[Any],
    config: DiffusionGenerationConfig,
    scheduler: Scheduler | None = None,
    cache_policy: CachePolicy | None = None,
    logits_processor: LogitsProcessor | None = None,
    stopping: Stopping | None = None,
    streamer: Streamer | None = None,
    *,
    attention_mask: Tensor | None = None,
) -> DiffusionOutput:
    """Fill the masks after each prompt (and those in it, where allowed).

    Parameters
    ----------
    model
        The model.
    input_ids : (B, L0), or B prompts of any lengths
        Prompts of different lengths are padded on the left; at temperature 0 each row's result equals its result alone.
    config
        How.
    scheduler
        Which masks a step commits. None: what ``config.schedule`` names.
    cache_policy
        What a forward recomputes. None: `NoCache`.
    logits_processor
        ``(state, positions (w,), logits (B, w, V)) -> logits``: changes the logits of the columns ``positions`` after mask
        id and guidance, before temperature and filters.
    stopping
        ``state -> (B,) bool``: rows to be stopped now, from their first mask on; the rest becomes EOS.
    streamer
        A streamer of transformers, for a single row: is given the prompt, then tokens once all left of them is committed.
    attention_mask : (B, L0)
        With a padded ``input_ids``: 0 for the pads, which must stand on the left.

    Returns
    -------
    `DiffusionOutput`

    Raises
    ------
    InputError
        If prompts hold mask ids that are not to be filled in, the canvas is longer than the model's limit, the pad id is
        the mask id, pads stand on the right, or the config does not fit the model.
    SchedulerStall
        If the scheduler commits nothing for a row with candidates, or the policy never computes any.
    SchedulerError
        If the scheduler commits a position that is no candidate, or no token of the vocabulary.
    FloatingPointError
        If logits of a candidate are NaN or infinite; names step and layer.

    Source: Nie et al. 2025 (LLaDA, arXiv:2502.09992), sec. 2.4; Ye et al. 2025 (Dream, arXiv:2508.15487); Cheng et al.
    2025 (SDAR, arXiv:2510.06303).
    """
    config = fitting(config, model)
    state = first_state(model, *padded_canvas(model, input_ids, attention_mask, config), config)
    if scheduler is None:
        scheduler = make_scheduler(config, block_model=model.config.attention == "block")
    cache_policy = NoCache() if cache_policy is None else cache_policy
    if streamer is not None and len(state.rows) != 1:
        raise InputError(f"a streamer shows a single row, got {len(state.rows)} prompts: stream one prompt at a time")
    if stopping is not None and state.eos_id is None:
        raise InputError(
            "stopping fills the rest of a row with EOS, and the model has no eos_token_id: set it in its config"
        )
    run = _Run(model, state, scheduler, cache_policy, logits_processor, stopping, streamer)
    return run.until_finished()


class _Clock:
    """Seconds by part. On a GPU the wait for a forward falls to the first part that needs its result."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("forward", "sampling", "scheduler", "policy", "total"), 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


class _Run:
    """One call of `diffusion_generate`. ``state`` holds the rows in progress, the other tensors all rows of the call."""

    def __init__(
        self,
        model: "MaskedDiffusionLM",
        state: GenState,
        scheduler: Scheduler,
        policy: CachePolicy,
        processor: LogitsProcessor | None,
        stopping: Stopping | None,
        streamer: Streamer | None,
    ) -> None:
        self.model, self.state, self.scheduler, self.policy = model, state, scheduler, policy
        self.processor, self.stopping, self.streamer = processor, stopping, streamer
        self.clock = _Clock()
        self.sequences = state.x.clone()
        self.steps = self.forwards = self.token_forwards = self.kv_columns = 0
        batch = len(state.rows)
        self.row_forwards, self.row_tokens, self.row_keys, self.row_filled, self.row_steps = torch.zeros(
            5, batch, dtype=torch.long
        ).unbind()
        self.trace = None
        if state.config.return_trace:
            self.trace = DecodingTrace(
                steps=torch.where(state.masked, 0, -1),
                logp=torch.zeros(state.host.shape, dtype=torch.float64),
                tokens=state.host.clone(),
            )
        self.mask = self._attention_mask()
        self.shown = 0  # columns that the streamer was given
        self.eos = -1 if state.eos_id is None else state.eos_id
        self.has_eos = False  # whether an EOS was ever committed

    # --- the loop

    def until_finished(self) -> DiffusionOutput:
        state, clock = self.state, self.clock
        with clock("total"):
            self._show()
            self.scheduler.reset(state)
            self.policy.reset(state, self.model)
            if state.config.drop_finished:
                self._retire(state.finished)
            refreshes = 0
            while not state.finished.all():
                if self._iterate():
                    refreshes = 0
                    continue
                refreshes += 1
                if refreshes > state.length:
                    raise SchedulerStall(
                        f"{self.policy.name} made {refreshes} forwards in a row whose regions hold none of the positions "
                        f"that {self.scheduler.name} waits for: let its region reach them"
                    )
            self._retire(torch.ones_like(state.finished))
            if self.streamer is not None:
                self.streamer.end()
        state.stats |= {"scheduler": self.scheduler.name, "policy": self.policy.name}
        return DiffusionOutput(
            sequences=self.sequences,
            canvas_start=state.canvas_start,
            steps=self.steps,
            forwards=self.forwards,
            token_forwards=self.token_forwards,
            kv_columns=self.kv_columns,
            row_steps=self.row_steps,
            row_forwards=self.row_forwards,
            row_token_forwards=self.row_tokens,
            row_kv_columns=self.row_keys,
            row_filled=self.row_filled,
            trace=self.trace,
            timings=clock.seconds,
            stats=state.stats,
        )

    def _iterate(self) -> bool:
        """One iteration; False if it only refreshed the cache."""
        state, clock = self.state, self.clock
        with clock("scheduler"):
            window = _spans(self.scheduler.candidates(state), len(state.rows))
        with clock("policy"):
            groups, region = self._groups(self.policy.plan(state))
        lo, hi = torch.maximum(window, region)[:, :1], torch.minimum(window, region)[:, 1:]
        every = torch.arange(state.length)
        open_columns = (every >= lo) & (every < hi)
        candidates = open_columns & state.masked  # finished rows have none
        open_columns &= candidates.any(1, keepdim=True)
        columns = open_columns.any(0).nonzero()[:, 0]
        groups = self._alike_at_the_edge(groups, open_columns)
        with clock("forward"):
            logits = self._forwards(groups, open_columns, columns)
        if not len(columns):
            return False
        with clock("sampling"):
            draft, sound = self._draft(logits, candidates[:, columns], columns)
        with clock("scheduler"):
            commit = self.scheduler.commit(state, draft.raw, draft)
        if not sound:
            self._report_unsound(groups)
        self._write(commit, candidates, draft)
        self._apply_eos_rule()
        if self.stopping is not None:
            self._stop(self.stopping(state).cpu())
        state.finished = ~state.masked.any(1)
        self._show()
        state.step += 1
        self.steps += 1
        if state.config.drop_finished:
            self._retire(state.finished)
        return True

    # --- the forward

    def _groups(
        self, plans: ForwardPlan | Sequence[ForwardPlan]
    ) -> tuple[list[tuple[ForwardPlan, list[int] | None]], Tensor]:
        """Rows with equal plans (None: all rows), and each row's region (B, 2). Finished rows follow the first group."""
        rows = len(self.state.rows)
        if isinstance(plans, ForwardPlan):
            return [(plans, None)], _spans(plans.region, rows)
        if len(plans) != rows:
            raise SchedulerError(
                f"{self.policy.name} made {len(plans)} plans for {rows} rows: make one a row, or one for all"
            )
        members: dict[ForwardPlan, list[int]] = {}
        finished = self.state.finished.tolist()
        for row, plan in enumerate(plans):
            if not finished[row]:
                members.setdefault(plan, []).append(row)
        region = torch.tensor([plan.region for plan in plans])
        if len(members) == 1:
            return [(next(iter(members)), None)], region
        return list(members.items()), region

    def _alike_at_the_edge(
        self, groups: list[tuple[ForwardPlan, list[int] | None]], open_columns: Tensor
    ) -> list[tuple[ForwardPlan, list[int] | None]]:
        """Groups whose rows all ask for the first column of their region, or none does.

        A shifted model computes one column more for it, which the whole group would see.
        """
        if not self.model.config.logit_shift:
            return groups
        alike: list[tuple[ForwardPlan, list[int] | None]] = []
        for plan, rows in groups:
            members = torch.arange(len(self.state.rows)) if rows is None else torch.tensor(rows)
            asking = open_columns[members, plan.region[0]]
            running = ~self.state.finished[members]
            if plan.region[0] == 0 or not asking.any() or asking[running].all():
                alike.append((plan, rows))
            else:
                alike += [(plan, members[part & running].tolist()) for part in (asking, ~asking)]
        return alike

    def _forwards(
        self, groups: list[tuple[ForwardPlan, list[int] | None]], open_columns: Tensor, columns: Tensor
    ) -> Tensor:
        """Logits (B, w, V) of the columns: one call of the model a group. Where a row's plan leaves a column out, zeros."""
        frozen = [plan.freeze for plan, _ in groups]
        if len(groups) == 1 and groups[0][1] is None:
            logits = self._forward(groups[0][0], None, columns)
        else:
            logits = torch.zeros(len(self.state.rows), len(columns), self.model.config.vocab_size)
            logits = logits.to(self.model.device, self.model.dtype)
            for plan, rows in groups:
                own = open_columns[rows].any(0)
                part = self._forward(plan, rows, own.nonzero()[:, 0])
                index = (
                    torch.tensor(rows, device=logits.device)[:, None],
                    own[columns].nonzero()[:, 0].to(logits.device),
                )
                logits[index] = part.to(logits.dtype)
        if self.state.cache is not None and None not in frozen:
            lo, hi = max(span[0] for span in frozen if span), min(span[1] for span in frozen if span)
            if lo < hi:
                self.state.cache.freeze(lo, hi)
        return logits

    def _forward(self, plan: ForwardPlan, rows: list[int] | None, columns: Tensor) -> Tensor:
        """Logits (rows, n, V) of the columns, guided if asked for."""
        state, model = self.state, self.model
        inputs, cache = self._inputs(plan, rows)
        before = dataclasses.replace(model.counters)
        logits = model(**inputs, cache=cache, write=plan.write, logits_for=columns).logits
        tokens = model.counters.token_forwards - before.token_forwards
        keys = model.counters.kv_columns - before.kv_columns
        members = state.rows if rows is None else state.rows[rows]
        self.forwards += 1
        self.token_forwards += tokens
        self.kv_columns += keys
        self.row_forwards[members] += 1
        self.row_tokens[members] += tokens // len(members)
        self.row_keys[members] += keys // len(members)
        if state.config.cfg_scale:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + (state.config.cfg_scale + 1) * (conditional - unconditional)
        return logits

    def _inputs(self, plan: ForwardPlan, rows: list[int] | None) -> tuple[dict[str, Any], RegionCache | None]:
        """Arguments of the model for some rows (None: all), and their part of the run's cache."""
        state = self.state
        x, positions, mask, index = state.x, state.position_ids, self.mask, None
        if rows is not None:
            index = torch.tensor(rows, device=x.device)
            x, positions, mask = x[index], positions[index], None if mask is None else mask[index]
        if state.config.cfg_scale:
            unconditional = x.clone()
            unconditional[:, : state.canvas_start] = state.mask_id
            x, positions = torch.cat([x, unconditional]), torch.cat([positions, positions])
            mask = None if mask is None else torch.cat([mask, mask])
            index = None if index is None else torch.cat([index, index + len(state.rows)])
        inputs = {
            "input_ids": x,
            "position_ids": positions,
            "attention_mask": mask,
            "region": plan.region,
            "see": plan.see,
        }
        if state.config.cfg_scale and self.model.config.logit_shift and state.config.allow_masks_in_prompt:
            # a window that serves all rows may hold a row's first column, which the unconditional half has masked
            inputs["inputs_embeds"] = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        if not plan.use_cache:
            return inputs, None
        if state.cache is None:
            state.cache = self.model.new_cache(len(state.rows) * (2 if state.config.cfg_scale else 1), state.length)
        state.cache.step = state.step
        return inputs, state.cache if index is None else state.cache.select(index)

    def _attention_mask(self) -> Tensor | None:
        """Padding (B, T), or the blocks of a prompt origin (B, 1, T, T); None where nothing is hidden from anyone."""
        state, config = self.state, self.state.config
        real = None
        if state.pad.any():
            real = (torch.arange(state.length) >= state.pad[:, None]).to(state.x.device)
        if self.model.config.attention != "block" or config.block_origin == "canvas":
            return real
        assert config.block_length is not None
        prompt_len = state.prompt_len.to(state.x.device)
        return block_causal_mask(state.position_ids, config.block_length, real, config.block_origin, prompt_len)

    # --- the draft

    def _draft(self, logits: Tensor, masked: Tensor, columns: Tensor) -> tuple[Draft, Tensor]:
        """Sampled tokens, and whether all logits that they came from are sound (on the device)."""
        state, config = self.state, self.state.config
        logits[..., state.mask_id] = -torch.inf
        if config.eos_policy == "suppress" and state.eos_id is not None:
            logits[..., state.eos_id] = -torch.inf
        if self.processor is not None:
            logits = self.processor(state, columns, logits)
        device = logits.device
        where = None
        if not masked.all():
            rows, places = masked.nonzero(as_tuple=True)
            where = rows.to(device), places.to(device)
        masked = masked.to(device)
        best, tokens = logits.max(-1)
        draft = Draft(
            positions=columns, masked=masked, tokens=tokens, raw=logits, generator=state.generator, where=where
        )
        if config.temperature or config.top_k is not None or config.top_p is not None:
            filtered = filter_logits(
                draft.of_candidates(logits),
                config.temperature,
                config.top_k,
                config.top_p,
                first="top_p" if isinstance(self.scheduler, DreamSchedule) else "top_k",
            )
            draft.filtered = filtered
            if config.temperature:
                drawn = add_gumbel(filtered, 1.0, state.generator).argmax(-1)
                draft.tokens = draft.spread(drawn, state.mask_id)
        draft.tokens = draft.tokens.masked_fill(~masked, state.mask_id)
        return draft, (best.isfinite() | ~masked).all()

    def _report_unsound(self, groups: list[tuple[ForwardPlan, list[int] | None]]) -> None:
        step = self.state.step
        for plan, rows in groups:
            inputs, cache = self._inputs(plan, rows)
            layer = self.model.first_nonfinite_layer(**inputs, cache=cache)
            if layer is not None:
                raise FloatingPointError(
                    f"logits are NaN or infinite at step {step}, first in {layer}: run the model in bfloat16 or float32"
                )
        raise FloatingPointError(
            f"logits are NaN or infinite at step {step}, though the model's own are not: look at guidance and logits_processor"
        )

    # --- the commit

    def _write(self, commit: Commit, candidates: Tensor, draft: Draft) -> None:
        """Check a commit and put it on the canvas."""
        state, batch = self.state, len(self.state.rows)
        if len(commit.positions) != batch or len(commit.tokens) != batch:
            raise SchedulerError(
                f"{self.scheduler.name} returned {len(commit.positions)} rows of positions and {len(commit.tokens)} of tokens "
                f"for {batch} rows: give one entry a row, empty where nothing is committed"
            )
        sizes = torch.tensor([len(positions) for positions in commit.positions])
        rows = torch.arange(batch).repeat_interleave(sizes)
        columns = torch.cat(list(commit.positions)).cpu().long()
        tokens = torch.cat(list(commit.tokens)).cpu().long()
        written = self._checked(rows, columns, tokens, candidates)
        state.host[rows, columns] = tokens
        if state.host is not state.x:
            device = state.x.device
            state.x[rows.to(device), columns.to(device)] = tokens.to(device)
        active = sizes > 0
        state.commits += active
        self.row_steps[state.rows] = state.commits
        edges = torch.stack([written.int().argmax(1), state.length - written.flip(1).int().argmax(1)], dim=1)
        state.last_commit = torch.where(active[:, None], edges, state.last_commit)
        self.has_eos = self.has_eos or bool((tokens == self.eos).any())
        if self.trace is not None:
            self.trace.steps[state.rows[rows], columns] = state.commits[rows]
            self.trace.tokens[state.rows[rows], columns] = tokens
            self.trace.logp[state.rows[rows], columns] = self._logp(commit, draft, rows, columns, tokens)

    def _logp(self, commit: Commit, draft: Draft, rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
        if commit.logp is not None:
            return torch.cat(list(commit.logp)).cpu().double()
        place = torch.searchsorted(draft.positions, columns)
        own = draft.tokens.cpu()[rows, place] == tokens
        return torch.where(own, draft.logp.cpu()[rows, place], 0.0)

    def _checked(self, rows: Tensor, columns: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """Where a commit writes (B, T)."""
        name, step = self.scheduler.name, self.state.step
        if len(tokens) != len(columns):
            raise SchedulerError(
                f"{name} returned {len(columns)} positions and {len(tokens)} tokens: give a token a position"
            )
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < self.state.length:
            raise SchedulerError(
                f"{name} committed columns {int(columns.min())} to {int(columns.max())} at step {step} of a canvas of "
                f"{self.state.length}: choose among draft.positions"
            )
        written = torch.zeros_like(candidates)
        written[rows, columns] = True
        if (written & ~candidates).any():
            row, column = (written & ~candidates).nonzero()[0].tolist()
            raise SchedulerError(
                f"{name} committed column {column} of row {int(self.state.rows[row])} at step {step}, which is committed "
                "already or outside the window: choose among draft.masked"
            )
        if int(written.sum()) != len(columns):
            raise SchedulerError(f"{name} committed a column twice at step {step}: return each position once")
        stalled = candidates.any(1) & ~written.any(1)
        if stalled.any():
            raise SchedulerStall(
                f"{name} committed nothing in row {int(self.state.rows[stalled][0])} at step {step}: commit at least one "
                "candidate"
            )
        lowest, highest = int(tokens.min()), int(tokens.max())
        if not 0 <= lowest <= highest < self.model.config.vocab_size or (tokens == self.state.mask_id).any():
            raise SchedulerError(
                f"{name} committed tokens from {lowest} to {highest} at step {step}, expected ids below "
                f"{self.model.config.vocab_size} other than the mask's {self.state.mask_id}"
            )
        return written

    # --- the end of a row

    def _apply_eos_rule(self) -> None:
        """Where an EOS and all left of it is committed, the rest of the row becomes EOS."""
        state = self.state
        if state.config.eos_policy != "fill" or not self.has_eos or state.canvas_start == state.length:
            return
        is_eos = state.host[:, state.canvas_start :] == self.eos
        first = torch.where(is_eos.any(1), state.canvas_start + is_eos.int().argmax(1), state.length)
        self._fill(torch.where(first < self._first_mask(), first + 1, state.length))

    def _stop(self, stopped: Tensor) -> None:
        self._fill(torch.where(stopped, self._first_mask(), self.state.length))

    def _first_mask(self) -> Int[Tensor, "B"]:
        masked = self.state.masked
        return torch.where(masked.any(1), masked.int().argmax(1), self.state.length)

    def _fill(self, start: Int[Tensor, "B"]) -> None:
        """EOS from a column on, a row."""
        state = self.state
        rest = (torch.arange(state.length) >= start[:, None]) & (state.host != self.eos)
        if not rest.any():
            return
        self.row_filled[state.rows] += rest.sum(1)
        if self.trace is not None:
            # what was committed right of the EOS stays in the trace: later steps have seen it
            unknown = rest & state.masked
            self.trace.tokens[state.rows] = torch.where(unknown, self.eos, self.trace.tokens[state.rows])
        state.host[rest] = self.eos
        if state.host is not state.x:
            state.x[rest.to(state.x.device)] = self.eos

    def _retire(self, leaving: Bool[Tensor, "B"]) -> None:
        """Take rows out of the state; their result is kept."""
        if not leaving.any():
            return
        state, device = self.state, self.state.x.device
        self.sequences[state.rows[leaving].to(device)] = state.x[leaving.to(device)]
        kept = (~leaving).nonzero()[:, 0]
        state.keep(kept)
        kept = kept.to(device)
        self.mask = None if self.mask is None or (self.mask.ndim == 2 and not state.pad.any()) else self.mask[kept]
        if state.cache is not None and len(kept):
            state.cache.keep(torch.cat([kept, kept + len(leaving)]) if state.config.cfg_scale else kept)

    def _show(self) -> None:
        """Give the streamer what is new left of the first mask: the prompt, then the answer up to its first EOS."""
        if self.streamer is None:
            return
        state = self.state
        final = int(self._first_mask()[0])
        first = max(self.shown, int(state.pad[0]))
        tokens = state.host[0, first:final]
        ends = (tokens == self.eos) & (torch.arange(first, final) >= state.canvas_start)
        if state.config.eos_policy == "fill" and ends.any():
            tokens = tokens[: int(ends.int().argmax()) + 1]
        if len(tokens):
            self.streamer.put(tokens.clone())
        self.shown = final


def _spans(spans: tuple[int, int] | Tensor, rows: int) -> Tensor:
    """(rows, 2) from one span for all, or one a row."""
    return spans.cpu() if isinstance(spans, Tensor) else torch.tensor([spans]).expand(rows, 2)
