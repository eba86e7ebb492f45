"""What FreeCache and guidance save, and what they cost themselves, at d 768 and 12 layers on one CPU thread.

Runs with a cache are replayed: each shape of a forward is timed once on a random model and the times are added up.
"""

from __future__ import annotations

import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from assay.mdlm import (
    CachePolicy,
    DiffusionGenerationConfig,
    MaskedDiffusionLM,
    MDLMConfig,
    NoCache,
    PrefixCache,
    diffusion_generate,
)
from assay.methods.freecache_guided_diffusion import (
    CROSSOVER_LENGTH,
    ARGuider,
    FreeCache,
    GuidedScheduler,
    flash_generate,
)
from assay.methods.freecache_guided_diffusion._flash import stopwatch
from assay.testbeds import ReplayTimer
from benchmarks._harness import Ratio, interleaved

PROMPT, NEW, BLOCK, VOCABULARY = 768, 256, 32, 1024
STEPS = 5  # of the run whose overhead is measured
TOKENS = 8  # of the autoregressive rival, after its prompt
SHAPE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}


def _config(canvas: int) -> MDLMConfig:
    return MDLMConfig(**SHAPE, vocab_size=VOCABULARY, mask_token_id=VOCABULARY - 1, eos_token_id=VOCABULARY - 2, max_position_embeddings=canvas)  # fmt: skip


def _cached() -> list[Ratio]:
    timer = ReplayTimer(_config(PROMPT + NEW), repeats=3)
    trace = torch.arange(1, NEW + 1)  # blocks of one token a step: the order in a block does not change a shape

    def seconds(policy: CachePolicy) -> float:
        return timer.replay(trace, PROMPT, policy, BLOCK).seconds

    full, settled, immediate, prefix = (
        seconds(policy) for policy in (NoCache(), FreeCache(), FreeCache(freeze="immediate"), PrefixCache())
    )
    sizes = f"replayed, prompt {PROMPT}, answer {NEW}, blocks of {BLOCK}"
    found = [
        Ratio("full recompute / FreeCache", full / settled, 4, "above", note=f"{sizes}: {full:.0f} s, {settled:.0f} s"),
        Ratio("FreeCache / prefix cache", settled / prefix, 1.05, note=f"{sizes}: {prefix:.0f} s"),
        Ratio("FreeCache settled / immediate", settled / immediate, note="the price of reading each block once more"),
        Ratio("FreeCache / autoregressive model of its size", settled / _autoregressive(), note=f"one token a step, {NEW} tokens"),
    ]  # fmt: skip
    for canvas in (16, 64, 256):
        short = ReplayTimer(_config(canvas), repeats=5)
        order = torch.arange(1, canvas // 2 + 1)
        plain, cached = (
            short.replay(order, canvas // 2, policy, canvas // 8).seconds for policy in (NoCache(), FreeCache())
        )
        found.append(Ratio(f"full recompute / FreeCache at {canvas} columns", plain / cached, note="replayed"))
    return found


def _crossover() -> list[Ratio]:
    """Whole runs of a model of d 96 and 4 layers, where a step's own overhead counts most."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 256}
    model = MaskedDiffusionLM(MDLMConfig(**sizes, vocab_size=24, mask_token_id=18, eos_token_id=17)).eval()
    found = []
    for canvas in (16, 64, 128, 256):
        prompt = torch.zeros(1, canvas // 2, dtype=torch.long)

        def run(policy: str, prompt: torch.Tensor = prompt) -> object:
            length = prompt.shape[1]
            return flash_generate(
                model, prompt, policy=policy, max_new_tokens=length, block_length=length // 4, eos_policy="none"
            )

        rivals = {"none": lambda run=run: run("none"), "freecache": lambda run=run: run("freecache")}
        seconds = interleaved(rivals, rounds=5, clock=time.process_time)
        note = "below this auto takes no cache" if canvas == CROSSOVER_LENGTH else "whole runs"
        found.append(
            Ratio(f"the same, d 96 and 4 layers, {canvas} columns", seconds["none"] / seconds["freecache"], note=note)
        )
    return found


@torch.no_grad()
def _autoregressive() -> float:
    """Seconds of transformers' own decoding with a model of the same size: the prompt, and each token after it."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, vocab_size=VOCABULARY, num_key_value_heads=12, head_dim=64)).eval()
    prompt = torch.zeros(1, PROMPT, dtype=torch.long)
    ask = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    taken = []
    for tokens in (1, 1, 1 + TOKENS):  # the first is a warm-up
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **ask)
        taken.append(time.perf_counter() - start)
    return taken[1] + (NEW - 1) * (taken[2] - taken[1]) / TOKENS


def _overhead() -> Ratio:
    """Everything of a guided step that is neither model's forward, as a share of the step."""
    torch.manual_seed(0)
    model = MaskedDiffusionLM(_config(PROMPT + NEW)).eval()
    small = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    judge = Qwen3ForCausalLM(Qwen3Config(**small, intermediate_size=256, vocab_size=VOCABULARY)).eval()
    guided = GuidedScheduler(ARGuider(judge), "topk_relative")
    config = DiffusionGenerationConfig(max_new_tokens=NEW, seed=0)
    prompt = torch.zeros(1, PROMPT, dtype=torch.long)
    with stopwatch(model) as drafting, stopwatch(judge) as judging:
        out = diffusion_generate(
            model,
            prompt,
            config,
            guided,
            FreeCache("sliding"),
            stopping=lambda state: torch.full((len(state.rows),), state.step >= STEPS),
        )
        forwards = drafting() + judging()
    own = out.timings["total"] - forwards
    return Ratio(
        "guided step without the models' forwards / whole step",
        own / out.timings["total"],
        0.05,
        note=f"window (256, 256), {1e3 * own / out.steps:.1f} ms a step",
    )


def measure() -> list[Ratio]:
    """Caches, the autoregressive rival, the crossover, and the method's own overhead."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*_cached(), *_crossover(), _overhead()]
    finally:
        torch.set_num_threads(before)
