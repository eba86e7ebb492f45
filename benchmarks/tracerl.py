"""TraceRL's parts against the naive version: step-level advantages, the head at targets alone, and rollouts with a cache.

On the CPU. Rollout times are replayed: the shapes of a real run's forwards, timed at the size of a larger model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from assay.mdlm import MaskedDiffusionLM, MDLMConfig, NoCache, PrefixCache
from assay.methods.tracerl import Trace, build_full_slices, step_gae
from assay.methods.tracerl._scores import target_logps
from assay.methods.tracerl.reference import step_gae_loops
from assay.testbeds import ReplayTimer
from benchmarks._harness import Ratio, interleaved

VOCABULARY = 49_152
LARGE = MDLMConfig(
    vocab_size=VOCABULARY, hidden_size=576, num_hidden_layers=8, num_attention_heads=9, num_key_value_heads=3,
    intermediate_size=1536, mask_token_id=4, eos_token_id=2, pad_token_id=2,
)  # fmt: skip


def _advantages() -> Ratio:
    """64 responses of 1,024 tokens, four tokens a step."""
    g = torch.Generator().manual_seed(0)
    rows, length = 64, 1024
    steps = torch.stack([torch.randperm(length, generator=g) // 4 + 1 for _ in range(rows)])
    values, rewards = torch.randn(2, rows, length, generator=g)
    trainable = torch.rand(rows, length, generator=g) < 0.9
    lists = [x.tolist() for x in (values, rewards, steps, trainable)]

    def slow() -> None:
        for row in zip(*lists, strict=True):
            step_gae_loops(*row, 0.99, 0.95)

    rivals: dict[str, Callable[[], object]] = {
        "slow": slow,
        "fast": lambda: step_gae(values, rewards, steps, trainable, 0.99, 0.95),
    }
    seconds = interleaved(rivals, rounds=5, warmup=1)
    note = f"64 x 1,024 tokens: {seconds['fast'] * 1e3:.1f} ms, one response and token at a time {seconds['slow'] * 1e3:.0f} ms"
    return Ratio("loops / step_gae", seconds["slow"] / seconds["fast"], 20, "above", note=note)


def _rows(count: int, length: int) -> object:
    g = torch.Generator().manual_seed(0)
    return build_full_slices(
        [
            Trace(
                prompt_ids=torch.randint(5, 1000, (32,), generator=g),
                response_ids=torch.randint(5, 1000, (length,), generator=g),
                step_map=torch.randperm(length, generator=g) // 8 + 1,
            )
            for _ in range(count)
        ],
        mask_token_id=4,
        pad_token_id=2,
    )


def _head() -> list[Ratio]:
    """Bytes of the logits, and the time of a scoring forward, with a vocabulary of 49,152."""
    batch = _rows(1, 64)
    config = MDLMConfig(**{**LARGE.to_dict(), "num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 3,
                           "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 512})  # fmt: skip
    model = MaskedDiffusionLM(config).eval()
    inputs = {"attention_mask": batch.attn, "position_ids": batch.position_ids}

    def everywhere() -> torch.Tensor:
        logits = model(batch.input_ids, **inputs).logits[:, batch.noisy].log_softmax(-1)
        return logits.gather(2, batch.labels[..., None])[..., 0][batch.p_mask]

    rivals: dict[str, Callable[[], object]] = {"all": everywhere, "targets": lambda: target_logps(model, batch)}
    with torch.inference_mode():
        torch.testing.assert_close(everywhere(), target_logps(model, batch), atol=1e-4, rtol=0)
        seconds = interleaved(rivals, rounds=5, warmup=1)
    columns, targets = batch.input_ids.numel(), int(batch.p_mask.sum())
    return [
        Ratio(
            "logits everywhere / at targets alone, bytes",
            columns / targets,
            3,
            "above",
            note=f"{len(batch)} rows of 96 columns, {targets} targets: {targets * VOCABULARY * 4 / 2**20:.0f} MiB",
        ),
        Ratio(
            "logits everywhere / at targets alone, time", seconds["all"] / seconds["targets"], note="a scoring forward"
        ),
    ]


def _rollout() -> Ratio:
    """An answer of 512 tokens behind a prompt of 128, blocks of 32, one token a step."""
    steps = torch.arange(1, 513)
    timer = ReplayTimer(LARGE)
    plain = timer.replay(steps, 128, NoCache(), block_length=32)
    cached = timer.replay(steps, 128, PrefixCache(horizon=128), block_length=32)
    return Ratio(
        "rollout without cache / with PrefixCache, replayed",
        plain.seconds / cached.seconds,
        2,
        "above",
        note=f"512 tokens, horizon 128, 576 x 8 layers: {plain.seconds:.0f} s against {cached.seconds:.0f} s a row",
    )


def measure() -> list[Ratio]:
    """The three parts."""
    return [_advantages(), *_head(), _rollout()]
