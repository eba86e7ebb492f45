"""TraceRL: reinforcement learning along the decoding order of a diffusion language model (Wang et al., ICLR 2026)."""

from assay._extras import extras

with extras("lm"):
    from assay.methods.tracerl._gae import step_gae
    from assay.methods.tracerl._losses import trace_policy_loss, value_loss
    from assay.methods.tracerl._slices import SliceBatch, build_block_slices, build_full_slices
    from assay.methods.tracerl._traces import Trace, collapse_steps, collect_traces

__all__ = [
    "SliceBatch",
    "Trace",
    "build_block_slices",
    "build_full_slices",
    "collapse_steps",
    "collect_traces",
    "step_gae",
    "trace_policy_loss",
    "value_loss",
]
