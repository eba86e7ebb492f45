"""What a real run would cost on a larger model: its forwards are replayed by shape, without its weights.

The time of a forward depends on shapes alone. A run's commit trace, stretched to a longer canvas if wanted, is played
through the real generation loop under the real cache policy on a model of a few parameters, which records the shape of
each forward. Forwards of these shapes are then timed on a randomly initialised model of the size that is asked for, a few
widths a canvas, and the times are added up. Such numbers are to be labelled *replayed*.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from assay._errors import InputError
from assay.mdlm._config import MDLMConfig
from assay.mdlm._generate import diffusion_generate
from assay.mdlm._model import MaskedDiffusionLM
from assay.mdlm._state import CachePolicy, Commit, DiffusionGenerationConfig, Draft, GenState, Scheduler

WIDTHS = 8  # timed widths a canvas, at most
_TINY: dict[str, Any] = {
    "hidden_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 1,
}


class Shape(NamedTuple):
    """One forward of one row: columns computed, keys attended, columns whose logits were asked for, length of the canvas."""

    computed: int
    attended: int
    heads: int
    canvas: int


@dataclass(frozen=True)
class Replayed:
    """What a replayed run costs. ``seconds`` is a sum of timed shapes: label it *replayed*.

    ``forwards``, ``token_forwards`` and ``kv_columns`` are counted as in `DiffusionOutput`.
    """

    seconds: float
    forwards: int
    token_forwards: int
    kv_columns: int


def scaled_trace(steps: Int[Tensor, " answer"], factor: int, *, as_many_a_step: bool = False) -> Int[Tensor, " longer"]:
    """A commit trace for an answer that is ``factor`` times as long.

    Parameters
    ----------
    steps
        The 1-based step at which each token of an answer was committed.
    factor
        Each token becomes so many neighbours.
    as_many_a_step
        False: they are committed together, so that the run has as many steps as before. True: one after the other, so
        that each step commits as many tokens as before.

    Returns
    -------
    (answer * factor,)
    """
    if factor < 1:
        raise InputError(f"a factor of {factor} makes no trace: give 1 or more")
    longer = steps.repeat_interleave(factor)
    if not as_many_a_step:
        return longer
    apart = (longer - 1) * factor + torch.arange(len(longer)) % factor + 1
    return torch.where(longer > 0, apart, 0)  # what the EOS rule filled stays so


class ReplayTimer:
    """Times the forwards of recorded runs at the size of another model.

    Parameters
    ----------
    config
        The model to be timed: its weights are random, its vocabulary sets the cost of the head.
    repeats
        Timings of each shape, of which the median counts, after one that does not.
    clock
        Seconds; another one for tests.

    Notes
    -----
    At most eight widths are timed for each canvas, from one column to all, and the times in between are linear. Where a
    forward does not attend to the whole canvas, the same widths are timed with as few keys as there can be, and the time
    is linear in the keys. The head is timed by itself. Each is timed once for the life of the timer: a study makes one a
    seed, in a trial that runs alone.
    """

    def __init__(self, config: MDLMConfig, repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        if repeats < 1:
            raise InputError(f"{repeats} repeats time nothing: give 1 or more")
        self.config, self.repeats, self.clock = config, repeats, clock
        self._model: MaskedDiffusionLM | None = None
        self._known: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}

    def replay(
        self,
        steps: Int[Tensor, " answer"],
        prompt_length: int,
        policy: CachePolicy,
        block_length: int | None = None,
        asks_for: str = "block",
    ) -> Replayed:
        """What a run costs that commits the tokens of one answer at these steps.

        Parameters
        ----------
        steps
            (answer,), 1-based: `DecodingTrace.steps` of a row behind its prompt, scaled or not. Tokens that the EOS rule
            filled (0) count as committed at the last step.
        prompt_length
            Columns before the answer.
        policy
            What each forward recomputes.
        block_length
            That of the run, for policies that go by blocks.
        asks_for
            The columns whose logits the run's scheduler asked for: *block*, all of the current block (the standard
            schedulers), or *rest*, from the first mask on (those that commit from the left).
        """
        shapes = self.shapes(steps, prompt_length, policy, block_length, asks_for)
        return Replayed(
            seconds=sum(self.seconds(shape) for shape in shapes),
            forwards=len(shapes),
            token_forwards=sum(shape.computed for shape in shapes),
            kv_columns=sum(shape.attended for shape in shapes),
        )

    def shapes(
        self,
        steps: Int[Tensor, " answer"],
        prompt_length: int,
        policy: CachePolicy,
        block_length: int | None = None,
        asks_for: str = "block",
    ) -> list[Shape]:
        """The shapes of the forwards of a run, in order."""
        canvas = prompt_length + len(steps)
        model = _Recorder(
            MDLMConfig(
                **_TINY,
                vocab_size=3,
                max_position_embeddings=canvas,
                attention=self.config.attention,
                block_size=self.config.block_size,
                logit_shift=self.config.logit_shift,
                mask_token_id=2,
            )
        )
        config = DiffusionGenerationConfig(
            max_new_tokens=len(steps), block_length=block_length, eos_policy="none", seed=0
        )
        prompt = torch.zeros(1, prompt_length, dtype=torch.int64)
        diffusion_generate(model.eval(), prompt, config, scheduler=_Recorded(steps, asks_for), cache_policy=policy)
        return model.shapes

    def seconds(self, shape: Shape) -> float:
        """Of one forward, between the shapes that were timed."""
        body = self._at("whole", shape.canvas, shape.computed)
        if shape.attended < shape.canvas:
            least = self._at("own", shape.canvas, shape.computed)  # attending to its own columns alone
            share = (shape.attended - shape.computed) / (shape.canvas - shape.computed)
            body = least + share * (body - least)
        return body + self._at("head", shape.canvas, shape.heads)

    def _at(self, part: str, canvas: int, width: int) -> float:
        if (part, canvas) not in self._known:
            widths = np.unique(np.geomspace(1, canvas, WIDTHS).round().astype(int))
            self._known[part, canvas] = widths, np.array([self._timed(part, canvas, int(width)) for width in widths])
        widths, seconds = self._known[part, canvas]
        return float(np.interp(width, widths, seconds))

    @torch.no_grad()
    def _timed(self, part: str, canvas: int, width: int) -> float:
        """Median seconds of a forward of ``width`` columns over a full cache, without the head; or of the head."""
        model = self._built(canvas)
        if part == "head":
            hidden = torch.randn(1, width, self.config.hidden_size)
            return self._median(lambda: model.lm_head(hidden))
        ids = torch.zeros(1, canvas, dtype=torch.int64)
        inputs: dict[str, Any] = {"input_ids": ids, "logits_for": torch.zeros(0, dtype=torch.int64)}
        if width < canvas:
            first = canvas - width  # behind all others, where a block model sees the whole canvas too
            cache = model.new_cache(1, canvas)
            cache.valid[:] = True
            inputs |= {"cache": cache, "region": (first, canvas), "write": "all"}
            inputs |= {"see": (first, canvas)} if part == "own" else {}
        return self._median(lambda: model(**inputs))

    def _median(self, run: Callable[[], Any]) -> float:
        run()
        taken = []
        for _ in range(self.repeats):
            start = self.clock()
            run()
            taken.append(self.clock() - start)
        return median(taken)

    def _built(self, canvas: int) -> MaskedDiffusionLM:
        if self._model is None or self._model.config.max_position_embeddings < canvas:
            # Without a shift nothing is widened: the recorded widths have the extra column already.
            settings = copy.deepcopy(self.config)
            settings.logit_shift, settings.max_position_embeddings = False, canvas
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self._model = MaskedDiffusionLM(settings).eval()
        return self._model


class _Recorder(MaskedDiffusionLM):
    """A model of a few parameters that notes the shape of each forward."""

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__(config)
        self.shapes: list[Shape] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = replace(self.counters)
        output: Any = super().forward(*args, **kwargs)
        self.shapes.append(
            Shape(
                computed=self.counters.token_forwards - before.token_forwards,
                attended=self.counters.kv_columns - before.kv_columns,
                heads=output.logits.shape[-2],
                canvas=kwargs["input_ids"].shape[1],
            )
        )
        return output


class _Recorded(Scheduler):
    """Commits what a recorded run committed, step by step."""

    def __init__(self, steps: Tensor, asks_for: str) -> None:
        if asks_for not in ("block", "rest"):
            raise InputError(
                f"asks_for is {asks_for!r}, expected 'block' or 'rest': what the run's scheduler looked at"
            )
        if not len(steps) or int(steps.max()) < 1 or int(steps.min()) < 0:
            raise InputError(
                "a trace holds the 1-based step of each token of an answer: give DecodingTrace.steps behind the prompt"
            )
        self.asks_for = asks_for
        self.steps = torch.where(steps > 0, steps, steps.max())
        self._due = iter(sorted(set(self.steps.tolist())))

    @property
    def name(self) -> str:
        return "recorded"

    def reset(self, state: GenState) -> None:
        self._now = next(self._due)

    def candidates(self, state: GenState) -> tuple[int, int]:
        """What the run's scheduler asked for, and what is due now."""
        wanted = (state.block_of == state.current_block[:, None])[0]
        if self.asks_for == "rest":
            wanted &= state.masked[0].cumsum(0) > 0
        wanted[state.canvas_start :] |= self.steps == self._now
        columns = wanted.nonzero()[:, 0]
        return int(columns.min()), int(columns.max()) + 1

    def commit(self, state: GenState, logits: Tensor, draft: Draft) -> Commit:
        mine = draft.positions.cpu()
        mine = mine[self.steps[mine - state.canvas_start] == self._now]
        left = (self.steps == self._now) & state.masked[0, state.canvas_start :]
        if int(left.sum()) == len(mine):
            self._now = next(self._due, 0)
        return Commit([mine], [torch.zeros_like(mine)])
