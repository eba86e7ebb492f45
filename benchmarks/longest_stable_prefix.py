"""LSP's own cost beside a forward, and its wall-clock against a static schedule with a prompt cache at as many calls.

A random model of d 768, 12 layers and a vocabulary of 49,152: time depends on shapes alone. 256 tokens behind a prompt of
256, float32, one thread. Stability and snapping are off, so that a random model's calls are those of the decay.
"""

from __future__ import annotations

import torch

from assay.mdlm import (
    DiffusionGenerationConfig,
    DiffusionOutput,
    LowConfidenceStatic,
    MaskedDiffusionLM,
    MDLMConfig,
    PrefixCache,
    diffusion_generate,
)
from assay.methods.longest_stable_prefix import LongestStablePrefix, PrefixAbsorbCache, longest_stable_prefix, reference
from assay.methods.longest_stable_prefix._prefix import PrefixRule
from assay.methods.longest_stable_prefix._scheduler import _margins
from benchmarks._harness import Ratio, interleaved

THREADS, VOCABULARY, PROMPT, ANSWER, ROUNDS = 1, 49_152, 256, 256, 2


def _model() -> MaskedDiffusionLM:
    torch.manual_seed(0)
    config = MDLMConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
        mask_token_id=VOCABULARY - 1,
        tie_word_embeddings=True,
    )
    return MaskedDiffusionLM(config).eval()


def _generation() -> list[Ratio]:
    """The scheduler's share of a run, and the run against the static schedule."""
    model = _model()
    prompt = torch.randint(VOCABULARY - 1, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    outputs: dict[str, DiffusionOutput] = {}
    overheads: list[float] = []

    def ours() -> None:
        scheduler = LongestStablePrefix(lookback=0, stability=0, delimiters=None)
        config = DiffusionGenerationConfig(max_new_tokens=ANSWER, eos_policy="none", seed=0)
        outputs["ours"] = out = diffusion_generate(model, prompt, config, scheduler, PrefixAbsorbCache())
        overheads.append(out.timings["scheduler"] / out.timings["total"])

    def static() -> None:
        config = DiffusionGenerationConfig(
            max_new_tokens=ANSWER, steps=outputs["ours"].steps, eos_policy="none", seed=0
        )
        outputs["static"] = diffusion_generate(model, prompt, config, LowConfidenceStatic(), PrefixCache())

    model(prompt, logits_for=torch.arange(1))  # the first forward pays for what all later ones share
    seconds = interleaved({"ours": ours, "static": static}, rounds=ROUNDS, warmup=0)
    a, b = outputs["ours"], outputs["static"]
    work, time = b.token_forwards / a.token_forwards, seconds["static"] / seconds["ours"]
    sizes = f"T {PROMPT + ANSWER}, N {ANSWER}, d 768 x 12, V {VOCABULARY}, {THREADS} thread"
    bound = PROMPT + ANSWER / 0.25 + ANSWER
    return [
        Ratio(
            "scheduler / whole run", sorted(overheads)[len(overheads) // 2], 0.02, "below",
            note=f"{a.forwards} calls; {sizes}",
        ),
        Ratio(
            "static + PrefixCache / LSP + PrefixAbsorbCache, seconds at as many calls", time,
            note=f"{seconds['static']:.1f} s, {seconds['ours']:.1f} s; {a.forwards} calls each",
        ),
        Ratio("that ratio of seconds / the ratio of token-forwards", time / work, 0.8, "above", note=f"token-forwards {work:.2f}x"),
        Ratio("token-forwards / their bound N/alpha + N + L0", a.token_forwards / bound, 1.0, "below"),
    ]  # fmt: skip


def _margin() -> Ratio:
    """The gap of the two best logits: what a toy does, against one pass."""
    logits = torch.randn(1, ANSWER, VOCABULARY, generator=torch.Generator().manual_seed(0))
    tokens = logits.argmax(-1)

    def toy() -> torch.Tensor:
        best = logits.softmax(-1).sort(-1, descending=True).values
        return best[..., 0] - best[..., 1]

    def topk() -> torch.Tensor:
        best = logits.topk(2).values
        return best[..., 0] - best[..., 1]

    seconds = interleaved({"ours": lambda: _margins(logits, tokens), "topk": topk, "toy": toy}, rounds=ROUNDS, warmup=1)
    return Ratio(
        "softmax and sort / margins in one pass",
        seconds["toy"] / seconds["ours"],
        note=f"{seconds['ours'] * 1e3:.0f} ms for {ANSWER} places; topk(2) {seconds['topk'] / seconds['ours']:.1f}x",
    )


def _rule() -> Ratio:
    """The rule on 1,024 places against the same told place by place."""
    generator = torch.Generator().manual_seed(0)
    margins = torch.rand(1024, generator=generator)
    delimiters = torch.rand(1024, generator=generator) < 0.1
    lists = margins.tolist(), delimiters.tolist()
    seconds = interleaved(
        {
            "fast": lambda: longest_stable_prefix(margins, None, delimiters),
            "slow": lambda: reference.longest_stable_prefix(lists[0], None, lists[1], PrefixRule()),
        },
        rounds=20,
    )
    return Ratio(
        "place by place / vectorised, 1,024 places",
        seconds["slow"] / seconds["fast"],
        note=f"{seconds['fast'] * 1e3:.2f} ms",
    )


def measure() -> list[Ratio]:
    """The overhead, the wall-clock at equal calls, and the parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.inference_mode():
            return [*_generation(), _margin(), _rule()]
    finally:
        torch.set_num_threads(before)
