"""One call: a masked-diffusion model, a prompt, and optionally a guider, put together as the paper does."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from assay._errors import InputError
from assay.mdlm import (
    CachePolicy,
    DiffusionGenerationConfig,
    DiffusionOutput,
    MaskedDiffusionLM,
    NoCache,
    Scheduler,
    diffusion_generate,
)

from ._aligner import TokenAligner
from ._freecache import FreeCache
from ._guided import GuidedScheduler
from ._guider import ARGuider
from ._matching import Match

#: Columns of a canvas below which a model of d 96 and 4 layers decodes no faster with FreeCache than without, on one CPU
#: thread. Larger models gain from fewer columns on; on a GPU, where a short forward costs what a long one does, from more.
CROSSOVER_LENGTH = 64
_GENERATION = ("attention_mask", "logits_processor", "stopping", "streamer")


def flash_generate(
    model: MaskedDiffusionLM,
    input_ids: Int[Tensor, "B L0"] | Sequence[Any],
    guider: ARGuider | PreTrainedModel | None = None,
    policy: Literal["freecache", "none", "auto"] | CachePolicy = "freecache",
    *,
    max_new_tokens: int,
    block_length: int | None = None,
    window: tuple[int, int] = (256, 256),
    match: Match = "exact",
    verify_chunk: int = 32,
    scheduler: Scheduler | None = None,
    tokenizer: Any = None,
    aligner: TokenAligner | None = None,
    drift_probe: int = 0,
    crossover: int = CROSSOVER_LENGTH,
    **options: Any,
) -> DiffusionOutput:
    """Answer prompts with FreeCache, and with Guided Diffusion where there is a guider. Nothing is trained.

    Without a guider: FreeCache's block form under the low-confidence schedule. With one: its sliding form, and the
    guider decides how many drafts a step commits.

    Parameters
    ----------
    model
        The masked-diffusion model.
    input_ids : (B, L0), or B prompts of any lengths
        As for `assay.mdlm.diffusion_generate`.
    guider
        A small causal language model, as `ARGuider` or as it is.
    policy
        ``"freecache"``; ``"none"``: everything is recomputed; ``"auto"``: FreeCache unless the canvas is shorter than
        ``crossover``; or a policy of your own.
    max_new_tokens
        Length of the answer's canvas, in tokens.
    block_length
        Of the block form and its schedule; must divide ``max_new_tokens``. None: 32. Without meaning under guidance.
    window
        (w_left, w_right) of the sliding form.
    match, verify_chunk
        The guider's rule and the drafts that it reads at a time; for a rule with other numbers give a scheduler.
    scheduler
        In place of the one that would be made.
    tokenizer
        The diffusion model's, to be compared with the guider's. Needed where the guider has one and no aligner is given.
    aligner
        Between the two vocabularies; see `TokenAligner`.
    drift_probe
        See `FreeCache`.
    crossover
        Of ``policy="auto"``, in columns of the canvas. The default was measured on a CPU; on a GPU give your own.
    options
        Fields of `DiffusionGenerationConfig` (``steps``, ``temperature``, ``seed``, ``return_trace``, ...), and
        ``attention_mask``, ``logits_processor``, ``stopping``, ``streamer`` of `diffusion_generate`.

    Returns
    -------
    DiffusionOutput
        ``stats`` holds steps, forwards, ar_forwards, token_forwards, kv_columns, accepted, time_dlm, time_ar, time_other
        (seconds; on CUDA the model's own by events), and drift if it was probed.

    Raises
    ------
    InputError
        If a setting is out of its range, or ``block_length`` does not divide ``max_new_tokens``.
    TokenizerMismatchError
        If the guider has another vocabulary and no aligner was given.
    """
    guider = ARGuider(guider) if isinstance(guider, PreTrainedModel) else guider
    block = 32 if block_length is None else block_length
    guided = guider is not None
    if guider is not None and scheduler is None:
        aligner = _aligner(guider, tokenizer, aligner)
        scheduler = GuidedScheduler(guider, match, verify_chunk=verify_chunk, aligner=aligner)
    if not guided and max_new_tokens % block:
        raise InputError(f"max_new_tokens {max_new_tokens} is no multiple of block_length {block}: change one of them")
    given = {name: options.pop(name) for name in _GENERATION if name in options}
    config = DiffusionGenerationConfig(max_new_tokens=max_new_tokens, block_length=None if guided else block, **options)
    if isinstance(policy, str):
        length = max(len(row) for row in input_ids) + max_new_tokens
        if policy not in ("freecache", "none", "auto"):
            raise InputError(
                f"policy is {policy!r}, expected freecache, none, auto, or a CachePolicy: choose one of them"
            )
        if policy == "none" or (policy == "auto" and length < crossover):
            policy = NoCache()
        else:
            policy = FreeCache("sliding" if guided else "block", window=window, drift_probe=drift_probe)
    with stopwatch(model) as seconds:
        out = diffusion_generate(model, input_ids, config, scheduler, policy, **given)
    stats = out.stats
    stats |= {
        "steps": out.steps,
        "forwards": out.forwards,
        "ar_forwards": stats.get("ar_forwards", 0),
        "token_forwards": out.token_forwards,
        "kv_columns": out.kv_columns,
        "time_dlm": seconds(),
        "time_ar": stats.get("time_ar", 0.0),
    }
    stats["time_other"] = max(0.0, out.timings["total"] - stats["time_dlm"] - stats["time_ar"])
    return out


def _aligner(guider: ARGuider, tokenizer: Any, aligner: TokenAligner | None) -> TokenAligner | None:
    """What translates: nothing, where the guider comes without a tokenizer and its ids are taken as the model's."""
    if aligner is not None or guider.tokenizer is None:
        return aligner
    if tokenizer is None:
        raise InputError(
            "the guider has a tokenizer, and nothing says whether its ids are those of the diffusion model: give tokenizer= "
            "(the diffusion model's), or an aligner"
        )
    return TokenAligner.same_ids(tokenizer, guider.tokenizer)


@contextmanager
def stopwatch(model: torch.nn.Module) -> Iterator[Callable[[], float]]:
    """Time a module's forwards while the context is open; what it gives returns the seconds so far.

    On CUDA by events on the stream, so that nothing waits while it runs.
    """
    on_cuda = next(model.parameters()).device.type == "cuda"
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    def seconds() -> float:
        if on_cuda:
            torch.cuda.synchronize()
            return sum(begin.elapsed_time(end) for begin, end in zip(marks[::2], marks[1::2])) / 1e3
        return sum(end - begin for begin, end in zip(marks[::2], marks[1::2]))

    handles = [model.register_forward_pre_hook(mark), model.register_forward_hook(mark)]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()
