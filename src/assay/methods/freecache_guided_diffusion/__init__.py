"""FreeCache and Guided Diffusion (FlashDLM): masked-diffusion language models with far less to compute (Hu et al., ICLR 2026).

A diffusion language model recomputes its whole canvas at every step. FreeCache keeps the keys and values of the prompt
and of finished tokens, and recomputes only what is active. Guided Diffusion asks a small autoregressive model how many of
the drafted tokens to keep, so that a step commits many; all tokens are the diffusion model's own. Nothing is trained.

Reach for it when LLaDA, Dream or a model like them is too slow as it is::

    out = flash_generate(model, prompt, guider=ARGuider(qwen), max_new_tokens=256)
    out.stats                                        # steps, forwards, token_forwards, accepted, time of either model
"""

from assay._extras import extras

with extras("lm"):
    from assay.methods.freecache_guided_diffusion._aligner import TokenAligner, TokenizerMismatchError, swapped_ends
    from assay.methods.freecache_guided_diffusion._flash import CROSSOVER_LENGTH, flash_generate
    from assay.methods.freecache_guided_diffusion._freecache import FreeCache, UnsupportedPolicyError, kv_drift
    from assay.methods.freecache_guided_diffusion._guided import GuidedScheduler
    from assay.methods.freecache_guided_diffusion._guider import ARGuider
    from assay.methods.freecache_guided_diffusion._matching import Guider, MatchResult, MatchRule
    from assay.methods.freecache_guided_diffusion.baselines import SpeculativeDiffusionScheduler

__all__ = [
    "CROSSOVER_LENGTH",
    "ARGuider",
    "FreeCache",
    "GuidedScheduler",
    "Guider",
    "MatchResult",
    "MatchRule",
    "SpeculativeDiffusionScheduler",
    "TokenAligner",
    "TokenizerMismatchError",
    "UnsupportedPolicyError",
    "flash_generate",
    "kv_drift",
    "swapped_ends",
]
