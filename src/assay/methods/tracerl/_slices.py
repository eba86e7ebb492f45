"""Training rows: each step of a decoding order with the canvas that the policy saw before it.

Full attention: one row a step. Block attention: one row serves one step of every block at once, by a clean copy of the
response that later blocks look at, and a noisy one that is trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm import positions_from_padding, two_stream_mask
from assay.methods.tracerl._traces import NEVER, Trace, collapse_steps, dense_ranks, left_padded


@dataclass(kw_only=True, eq=False)
class SliceBatch:
    """Training rows of some responses.

    Attributes
    ----------
    input_ids : (R, T)
        Full attention: prompt and noisy response, T = L0 + L1. Block attention: prompt, clean response, noisy response,
        T = L0 + 2 L1. Prompts are padded on the left to L0.
    position_ids : (R, T)
        From 0 at the prompt's first token, pads 1; the noisy copy repeats those of the response.
    real : (R, L0 + L1)
        Not padding.
    p_mask : (R, L1)
        Targets: the response positions that are trained in this row.
    labels : (R, L1)
        The response.
    row_of_response : (R,)
        Which response a row belongs to.
    prompt_length
        L0.
    block_size
        Of the two-stream rows; None: full attention.
    """

    input_ids: Int[Tensor, "R T"]
    position_ids: Int[Tensor, "R T"]
    real: Bool[Tensor, "R C"]
    p_mask: Bool[Tensor, "R L1"]
    labels: Int[Tensor, "R L1"]
    row_of_response: Int[Tensor, "R"]
    prompt_length: int
    block_size: int | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def response_length(self) -> int:
        """L1."""
        return self.labels.shape[1]

    @property
    def attn(self) -> Tensor:
        """What the model takes as attention mask, made when it is asked for: (R, T) keys, or (R, 1, T, T) for two streams.

        In the second, rows without anything to see (pads) see themselves.
        """
        if self.block_size is None:
            return self.real
        canvas = self.real.shape[1]
        visible = two_stream_mask(
            self.position_ids[:, :canvas], self.prompt_length, self.block_size, self.real, block_origin="prompt"
        )
        blind = ~visible.any(-1, keepdim=True)
        return visible | (blind & torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device))

    @property
    def noisy(self) -> slice:
        """The columns of the noisy response."""
        return slice(self.input_ids.shape[1] - self.response_length, self.input_ids.shape[1])

    @property
    def logits_for(self) -> Bool[Tensor, "R T"]:
        """The columns whose logits the loss needs: targets, in the noisy response."""
        asked = torch.zeros_like(self.input_ids, dtype=torch.bool)
        asked[:, self.noisy] = self.p_mask
        return asked

    def dense(self, values: Float[Tensor, " targets"]) -> Float[Tensor, "R L1"]:
        """One value a target, in row-major order, as (R, L1) with 0 elsewhere; differentiable."""
        return values.new_zeros(self.p_mask.shape).masked_scatter(self.p_mask, values)

    def select(self, rows: Int[Tensor, " rows"]) -> "SliceBatch":
        """Some of the rows."""
        return self._replaced(lambda value: value[rows])

    def trimmed(self) -> "SliceBatch":
        """The same rows without the columns that change no target: pads left of every prompt, and blocks right of the
        last that has a target, which nothing before them sees."""
        if not len(self):
            return self
        prompts, responses = self.lengths()
        cut, width = self.prompt_length - int(prompts.max()), int(responses.max())
        canvas = self.prompt_length + width
        both = self.block_size is not None
        noisy = self.input_ids[:, self.noisy][:, :width]
        places = self.position_ids[:, cut:canvas]
        return SliceBatch(
            input_ids=torch.cat([self.input_ids[:, cut:canvas], noisy], 1) if both else self.input_ids[:, cut:],
            position_ids=torch.cat([places, places[:, self.prompt_length - cut :]], 1) if both else places,
            real=self.real[:, cut:canvas],
            p_mask=self.p_mask[:, :width],
            labels=self.labels[:, :width],
            row_of_response=self.row_of_response,
            prompt_length=self.prompt_length - cut,
            block_size=self.block_size,
        )

    def lengths(self) -> tuple[Int[Tensor, "R"], Int[Tensor, "R"]]:
        """Columns that a forward of each row needs: of its prompt, and of its response (full attention: all of it)."""
        prompt = self.real[:, : self.prompt_length].sum(1)
        if self.block_size is None:
            return prompt, torch.full_like(prompt, self.response_length)
        columns = torch.arange(self.response_length, device=prompt.device) + 1
        last = (self.p_mask * columns).amax(1)
        blocks = -(-last // self.block_size) * self.block_size
        return prompt, blocks.clamp(min=1, max=self.response_length)

    def to(self, device: torch.device | str) -> "SliceBatch":
        """The same on a device."""
        return self._replaced(lambda value: value.to(device))

    def _replaced(self, change: Callable[[Tensor], Tensor]) -> "SliceBatch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed)

    def by_response(self, values: Float[Tensor, "R L1"], responses: int) -> Float[Tensor, "responses L1"]:
        """What the rows of each response say at their targets, put together; 0 where nothing is a target.

        Raises
        ------
        InputError
            If a position is a target in two rows, where there is no one value.
        """
        index = self.row_of_response[:, None].expand_as(self.p_mask)
        covered = torch.zeros(responses, self.response_length, dtype=torch.int64, device=values.device)
        covered.scatter_add_(0, index, self.p_mask.long())
        if int(covered.max()) > 1:
            response, position = (covered > 1).nonzero()[0].tolist()
            raise InputError(
                f"position {position} of response {response} is a target in {int(covered.max())} rows, expected one: "
                "only rows that follow a trace give each position one value"
            )
        out = values.new_zeros(responses, self.response_length)
        return out.scatter_add_(0, index, values * self.p_mask)


@dataclass(eq=False)
class Responses:
    """Some traces side by side: prompts padded on the left to L0, responses on the right to L1."""

    prompts: Int[Tensor, "B L0"]
    prompt_real: Bool[Tensor, "B L0"]
    responses: Int[Tensor, "B L1"]
    response_real: Bool[Tensor, "B L1"]  # on the row's own canvas
    steps: Int[Tensor, "B L1"]
    pad: Int[Tensor, "B L1"]  # the how-manieth pad of the response each pad is, from 1; 0 for other tokens

    @classmethod
    def of(cls, traces: Sequence[Trace], pad_token_id: int, block_size: int | None) -> "Responses":
        """Put traces side by side.

        Raises
        ------
        InputError
            If there are none, or the blocks of a trace were counted from elsewhere than the prompt's end.
        """
        if not traces:
            raise InputError("there are no traces to make training rows of: collect some, or skip the step")
        for number, trace in enumerate(traces):
            if block_size is not None and trace.block_origin != "prompt":
                raise InputError(
                    f"trace {number} was decoded with blocks counted from the {trace.block_origin}, and training rows count "
                    'them from the prompt\'s end: set block_origin="prompt" in the generation config'
                )
        prompts, real = left_padded([trace.prompt_ids for trace in traces], pad_token_id)
        width = max(len(trace.response_ids) for trace in traces)
        if block_size is not None:  # blocks that nobody decoded are seen by nobody
            ends = [int((trace.step_map != NEVER).nonzero().max()) + 1 for trace in traces if trace.step_map.any()]
            width = min(width, -(-max(ends, default=1) // block_size) * block_size)
        responses = torch.full((len(traces), width), pad_token_id)
        response_real = torch.zeros(len(traces), width, dtype=torch.bool)
        steps = torch.zeros(len(traces), width, dtype=torch.int64)
        for row, trace in enumerate(traces):
            size = min(len(trace.response_ids), width)
            responses[row, :size], steps[row, :size] = trace.response_ids[:size], trace.step_map[:size]
            response_real[row, :size] = True
        is_pad = responses == pad_token_id
        return cls(prompts, real.bool(), responses, response_real, steps, is_pad.long().cumsum(1) * is_pad)

    def rows(
        self,
        row_of_response: Int[Tensor, "R"],
        masked: Bool[Tensor, "R L1"],
        targets: Bool[Tensor, "R L1"],
        mask_token_id: int,
        block_size: int | None,
        prompt_masked: Bool[Tensor, "R L0"] | None = None,
    ) -> SliceBatch:
        """Rows that show a response with ``masked`` hidden and train ``targets``; rows without targets are left out."""
        kept = targets.any(1)
        row_of_response, masked, targets = row_of_response[kept], masked[kept], targets[kept]
        prompts = self.prompts[row_of_response]
        if prompt_masked is not None:
            prompts = prompts.masked_fill(prompt_masked[kept], mask_token_id)
        clean = self.responses[row_of_response]
        noisy = clean.masked_fill(masked, mask_token_id)
        real = torch.cat([self.prompt_real, self.response_real], 1)[row_of_response]  # own canvas only
        positions = positions_from_padding(real)
        parts, places = [prompts, noisy], [positions]
        if block_size is not None:
            parts, places = [prompts, clean, noisy], [positions, positions[:, prompts.shape[1] :]]
        return SliceBatch(
            input_ids=torch.cat(parts, 1),
            position_ids=torch.cat(places, 1),
            real=real,
            p_mask=targets,
            labels=clean,
            row_of_response=row_of_response,
            prompt_length=prompts.shape[1],
            block_size=block_size,
        )


def build_full_slices(
    traces: Sequence[Trace],
    *,
    mask_token_id: int,
    pad_token_id: int,
    shrink: int = 1,
    post_num: int | None = 0,
) -> SliceBatch:
    """One row for each step of each response: everything decoded at this step or later is hidden, this step is trained.

    Parameters
    ----------
    traces
        Whole canvases: what was masked right of an answer is masked in its rows too.
    mask_token_id, pad_token_id
        Of the model; pads are usually its EOS.
    shrink
        s of `collapse_steps`, over the whole response.
    post_num
        How many pads of a response stay targets, from the left; None: all. At 0 the answer's own EOS is dropped too
        where pad and EOS are one token; 1 keeps exactly it.

    Source: arXiv:2509.06949, section 4.2 and released code (full attention).
    """
    side = Responses.of(traces, pad_token_id, None)
    values = collapse_steps(side.steps, shrink)
    return _full_rows(side, values, trainable(side, post_num), mask_token_id)


def _full_rows(side: Responses, values: Tensor, kept: Tensor, mask_token_id: int) -> SliceBatch:
    value_of_row, row_of_response = [], []
    for number, row in enumerate(values):
        distinct = row.unique()  # ascending
        value_of_row.append(distinct)
        row_of_response.append(torch.full_like(distinct, number))
    owner, at = torch.cat(row_of_response), torch.cat(value_of_row)[:, None]
    here = values[owner]
    return side.rows(owner, here >= at, (here == at) & kept[owner], mask_token_id, None)


def trainable(side: Responses, post_num: int | None) -> Bool[Tensor, "B L1"]:
    """Positions of each response that may be targets: its own canvas, and of the pads the first ``post_num``."""
    if post_num is None:
        return side.response_real
    return side.response_real & (side.pad <= post_num)


def build_block_slices(
    traces: Sequence[Trace],
    *,
    block_size: int,
    mask_token_id: int,
    pad_token_id: int,
    shrink: int = 1,
    post_num: int | None = 0,
) -> SliceBatch:
    """Row l trains the l-th step of every block at once.

    The prompt and the clean response stand first; behind them a copy in which each block hides what it decoded at its
    l-th step or later. Blocks without an l-th step are clean there and train nothing.

    Parameters
    ----------
    traces
        Decoded with blocks that are counted from the prompt's end.
    block_size
        Of the model.
    mask_token_id, pad_token_id
        Of the model.
    shrink
        s of `collapse_steps`, inside each block.
    post_num
        How many pads stay targets *in each row*, from the left; None: all.

    Source: arXiv:2509.06949, section 4.2 and released code (sliced training, block attention).
    """
    if block_size < 1:
        raise InputError(f"block_size must be at least 1, got {block_size}: give the block size of the model")
    side = Responses.of(traces, pad_token_id, block_size)
    values = collapse_steps(side.steps, shrink, block_size)
    count, length = values.shape
    short = -length % block_size
    cells = torch.nn.functional.pad(values, (0, short), value=int(values.max()) + 1).unflatten(1, (-1, block_size))
    in_block = dense_ranks(cells).flatten(1)[:, :length]  # fillers of a short last block rank behind its tokens
    rounds = in_block.amax(1) + 1
    owner = torch.repeat_interleave(torch.arange(count), rounds)
    number = torch.cat([torch.arange(int(r)) for r in rounds])[:, None]
    here = in_block[owner]
    targets = (here == number) & side.response_real[owner]
    if post_num is not None:
        is_pad = targets & (side.pad[owner] > 0)
        targets = targets & ~(is_pad & (is_pad.long().cumsum(1) > post_num))
    return side.rows(owner, here >= number, targets, mask_token_id, block_size)


def build_slices(traces: Sequence[Trace], *, block_size: int | None, **settings: Any) -> SliceBatch:
    """`build_block_slices` where there is a block size, else `build_full_slices`."""
    if block_size is None:
        return build_full_slices(traces, **settings)
    return build_block_slices(traces, block_size=block_size, **settings)
