"""Masked-diffusion language models: the backbone of LLaDA, Dream and SDAR, its region cache, and the generation loop.

A masked-diffusion model fills in a canvas: a prompt followed by [MASK] tokens, of which every call proposes all and a
scheduler commits some. One class runs every family (full or block-causal attention, shifted logits or not), at the size of
a released checkpoint or of a model that trains on two cores.

Reach for it to run such a checkpoint, to train a small one, or to plug in a scheduler or a cache policy of your own::

    model = MaskedDiffusionLM.from_checkpoint("models/LLaDA-8B-Instruct", device="cuda")
    logits = model(canvas).logits           # (B, T, V); logits[:, j] is about the token AT position j, in every family
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from assay._extras import extras

if TYPE_CHECKING:
    from assay.mdlm._cache import FrozenRegionError, RegionCache
    from assay.mdlm._config import MDLMConfig
    from assay.mdlm._generate import diffusion_generate
    from assay.mdlm._losses import (
        Noised,
        block_diffusion_loss,
        cart_weights,
        cut_rows,
        log_likelihood,
        mask_rates,
        mask_tokens,
        masked_diffusion_loss,
    )
    from assay.mdlm._masks import block_causal_mask, block_index, positions_from_padding, two_stream_mask
    from assay.mdlm._model import Counters, MaskedDiffusionLM, MDLMOutput
    from assay.mdlm._policies import DualCache, ExactBlockCache, NoCache, PrefixCache
    from assay.mdlm._sampling import (
        add_gumbel,
        confidence,
        filter_logits,
        log_probability,
        most_confident,
        num_transfer,
    )
    from assay.mdlm._schedulers import DreamSchedule, LowConfidenceDynamic, LowConfidenceStatic, Sequential
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
    from assay.mdlm._trace_plot import trace_picture
    from assay.mdlm._training import Training, TrainingPlan
    from assay.mdlm.checkpoints import UnsupportedCheckpointError

_HOMES = {
    "CachePolicy": "_state",
    "Commit": "_state",
    "Counters": "_model",
    "DecodingTrace": "_state",
    "DiffusionGenerationConfig": "_state",
    "DiffusionOutput": "_state",
    "Draft": "_state",
    "DreamSchedule": "_schedulers",
    "DualCache": "_policies",
    "ExactBlockCache": "_policies",
    "ForwardPlan": "_state",
    "FrozenRegionError": "_cache",
    "GenState": "_state",
    "LowConfidenceDynamic": "_schedulers",
    "LowConfidenceStatic": "_schedulers",
    "MDLMConfig": "_config",
    "MDLMOutput": "_model",
    "MaskedDiffusionLM": "_model",
    "NoCache": "_policies",
    "Noised": "_losses",
    "PrefixCache": "_policies",
    "RegionCache": "_cache",
    "Scheduler": "_state",
    "SchedulerError": "_state",
    "SchedulerStall": "_state",
    "Sequential": "_schedulers",
    "Training": "_training",
    "TrainingPlan": "_training",
    "UnsupportedCheckpointError": "checkpoints",
    "add_gumbel": "_sampling",
    "block_causal_mask": "_masks",
    "block_diffusion_loss": "_losses",
    "block_index": "_masks",
    "cart_weights": "_losses",
    "confidence": "_sampling",
    "cut_rows": "_losses",
    "diffusion_generate": "_generate",
    "filter_logits": "_sampling",
    "log_likelihood": "_losses",
    "log_probability": "_sampling",
    "mask_rates": "_losses",
    "mask_tokens": "_losses",
    "masked_diffusion_loss": "_losses",
    "most_confident": "_sampling",
    "num_transfer": "_sampling",
    "positions_from_padding": "_masks",
    "trace_picture": "_trace_plot",
    "two_stream_mask": "_masks",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import assay.mdlm` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras("lm"):
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


__all__ = [
    "CachePolicy",
    "Commit",
    "Counters",
    "DecodingTrace",
    "DiffusionGenerationConfig",
    "DiffusionOutput",
    "Draft",
    "DreamSchedule",
    "DualCache",
    "ExactBlockCache",
    "ForwardPlan",
    "FrozenRegionError",
    "GenState",
    "LowConfidenceDynamic",
    "LowConfidenceStatic",
    "MDLMConfig",
    "MDLMOutput",
    "MaskedDiffusionLM",
    "NoCache",
    "Noised",
    "PrefixCache",
    "RegionCache",
    "Scheduler",
    "SchedulerError",
    "SchedulerStall",
    "Sequential",
    "Training",
    "TrainingPlan",
    "UnsupportedCheckpointError",
    "add_gumbel",
    "block_causal_mask",
    "block_diffusion_loss",
    "block_index",
    "cart_weights",
    "confidence",
    "cut_rows",
    "diffusion_generate",
    "filter_logits",
    "log_likelihood",
    "log_probability",
    "mask_rates",
    "mask_tokens",
    "masked_diffusion_loss",
    "most_confident",
    "num_transfer",
    "positions_from_padding",
    "trace_picture",
    "two_stream_mask",
]
