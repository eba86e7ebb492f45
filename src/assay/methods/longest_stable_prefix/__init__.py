"""Longest stable prefix: a masked-diffusion model commits one contiguous block at the left end a step (Li et al., ICLR 2026).

Schedulers that commit the most confident places anywhere leave islands that no cache can keep and no later step can
revise. This one commits the longest prefix whose predictions are clear and have held, cut at a delimiter: the text grows
from left to right, the model still looks ahead over all that is masked, and the cache only ever appends.

Reach for it to run LLaDA, Dream or SDAR with fewer calls and no second model::

    scheduler = LongestStablePrefix(tokenizer=tokenizer, tau_floor=3.0)
    diffusion_generate(model, prompt, config, scheduler, PrefixAbsorbCache())
"""

from assay._extras import extras

with extras("lm"):
    from assay.methods.longest_stable_prefix._absorb import PrefixAbsorbCache
    from assay.methods.longest_stable_prefix._delimiters import delimiter_mask
    from assay.methods.longest_stable_prefix._diagnostics import Watched
    from assay.methods.longest_stable_prefix._prefix import LSPDecision, longest_stable_prefix
    from assay.methods.longest_stable_prefix._scheduler import LongestStablePrefix

__all__ = [
    "LSPDecision",
    "LongestStablePrefix",
    "PrefixAbsorbCache",
    "Watched",
    "delimiter_mask",
    "longest_stable_prefix",
]
