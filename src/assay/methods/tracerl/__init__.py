"""TraceRL: reinforcement learning along the decoding order of a diffusion language model (Wang et al., ICLR 2026).

A masked-diffusion model commits its tokens in an order of its own. TraceRL records that order in each rollout and trains
the policy on exactly the canvases that it saw on the way, one row a step, with a clipped objective on a verifiable reward.
A diffusion value model (optional) lowers the variance and takes process rewards.

Reach for it when you have a diffusion model (LLaDA, Dream, SDAR, or a small one of your own) and a checker::

    trainer = TraceRLTrainer(model, reward, TraceRLConfig(generation=config), problems, processing_class=tokenizer)
    trainer.train()

The parts (recorder, row builders, loss, step-level advantages) work alone in another trainer.
"""

from assay._extras import extras

with extras("lm"):
    from assay.methods.tracerl._config import TraceRLConfig
    from assay.methods.tracerl._gae import step_gae
    from assay.methods.tracerl._losses import trace_policy_loss, value_loss
    from assay.methods.tracerl._rewards import math_verify_reward, reasoning_gym_reward, runsum_reward
    from assay.methods.tracerl._scores import target_logps, target_values
    from assay.methods.tracerl._sft import SFTRows, sft_loss, sft_rows
    from assay.methods.tracerl._slices import SliceBatch, build_block_slices, build_full_slices
    from assay.methods.tracerl._traces import Trace, collapse_steps, collect_traces
    from assay.methods.tracerl._trainer import TraceRLTrainer
    from assay.methods.tracerl._values import DiffusionValueModel

__all__ = [
    "DiffusionValueModel",
    "SFTRows",
    "SliceBatch",
    "Trace",
    "TraceRLConfig",
    "TraceRLTrainer",
    "build_block_slices",
    "build_full_slices",
    "collapse_steps",
    "collect_traces",
    "math_verify_reward",
    "reasoning_gym_reward",
    "runsum_reward",
    "sft_loss",
    "sft_rows",
    "step_gae",
    "target_logps",
    "target_values",
    "trace_policy_loss",
    "value_loss",
]
