"""A decode step of vAttention on the CPU against dense attention: n keys, 8 heads of 64, one query, float32, two threads.

The index is built beforehand; its query, the pilot, the budget and the draws are in the time. The oracle index is never
timed: it reads every key.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from assay.methods.vattention import GrowingKVCache, VAttentionConfig, vattention
from assay.methods.vattention._indices import make_index
from benchmarks._harness import Ratio, interleaved

HEADS, WIDTH, THREADS, ROUNDS = 8, 64, 2, 30
DENSITIES = (0.2, 0.1, 0.05, 0.025)


def _config(density: float, n: int) -> VAttentionConfig:
    """Sinks and window 256 keys, then half by the index and half sampled; the pilot is in the sample."""
    rest = int(density * n) - 256
    return VAttentionConfig(heavy=rest // 2, budget=rest - rest // 2, pilot=rest // 8)


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What a toy does: all scores, and a mask over them. No read is saved."""
    scores = (q @ k.transpose(2, 3)) * WIDTH**-0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _step(n: int) -> list[Ratio]:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, HEADS, 1, WIDTH), torch.randn(1, HEADS, n, WIDTH), torch.randn(1, HEADS, n, WIDTH)
    k, v = GrowingKVCache().update(k, v, 0)  # where they lie in use, for all
    index = make_index(VAttentionConfig())
    index.build(k)
    mask = torch.rand(1, HEADS, 1, n) < 0.1
    rivals: dict[str, Callable[[], object]] = {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
        "matmul": lambda: (q @ k.transpose(2, 3) * WIDTH**-0.5).softmax(-1) @ v,
        "breath": lambda: time.sleep(
            0.02
        ),  # torch's threads spin after a dense call, on a core that the next one needs
    }
    for density in DENSITIES:
        config = _config(density, n)
        rivals[f"{density}"] = lambda c=config: vattention(q, k, v, config=c, index_state=index)
    if n == 65_536:
        config = _config(0.1, n)
        rivals["masked"] = lambda: _masked(q, k, v, mask)
        rivals["torch"] = lambda: vattention(q, k, v, config=config, index_state=index, path="torch")
        rivals["another breath"] = rivals["breath"]
        promise = VAttentionConfig(
            heavy=config.heavy, pilot=config.pilot, eps=0.999, delta=0.999
        )  # the pilot is enough
        plain = VAttentionConfig(heavy=config.heavy, pilot=2, min_pilot=2, budget=config.pilot)
        rivals["with budget"] = lambda: vattention(q, k, v, config=promise, index_state=index)
        rivals["without budget"] = lambda: vattention(q, k, v, config=plain, index_state=index)
    seconds = interleaved(rivals, rounds=ROUNDS)
    dense = min(seconds["sdpa"], seconds["matmul"])
    size = f"{n // 1024}k"
    found = []
    for density in DENSITIES:
        bar = 2.0 if (n, density) == (65_536, 0.1) else None
        found.append(
            Ratio(
                f"dense / vattention at {size}, {density:.1%} of the keys",
                dense / seconds[f"{density}"],
                bar,
                "above",
                note=f"{seconds[f'{density}'] * 1e3:.1f} ms, dense {dense * 1e3:.1f} ms, {THREADS} threads",
            )
        )
    if n == 65_536:
        times = torch.tensor([seconds[f"{d}"] for d in DENSITIES], dtype=torch.float64)
        r = torch.corrcoef(torch.stack([torch.tensor(DENSITIES, dtype=torch.float64), times]))[0, 1]
        found += [
            Ratio(f"R^2 of the time over the density at {size}", float(r**2), 0.95, "above", unit=""),
            Ratio(f"masked dense / vattention at {size}, 10 %", seconds["masked"] / seconds["0.1"], note="the toy"),
            Ratio(
                f"pure torch / vattention's kernel at {size}, 10 %",
                seconds["torch"] / seconds["0.1"],
                note="same draws",
            ),
            Ratio(f"dense / pure torch at {size}, 10 %", dense / seconds["torch"], note="why there is a kernel"),
            Ratio(
                f"pilot and budget / a fixed sample at {size}",
                seconds["with budget"] / seconds["without budget"],
                1.15,
                note="as many keys read",
            ),
        ]
    return found


def _cache(n: int) -> Ratio:
    """One step's update of a layer: transformers' cache copies everything, ours writes a row."""
    new = torch.randn(1, HEADS, 1, WIDTH)
    caches = {"dynamic": DynamicCache(), "growing": GrowingKVCache()}
    for cache in caches.values():
        cache.update(torch.randn(1, HEADS, n, WIDTH), torch.randn(1, HEADS, n, WIDTH), 0)
        cache.update(new, new, 0)
    rivals = {name: (lambda c=cache: c.update(new, new, 0)) for name, cache in caches.items()}
    seconds = interleaved(rivals, rounds=ROUNDS)
    return Ratio(
        f"DynamicCache / GrowingKVCache, one update at {n // 1024}k",
        seconds["dynamic"] / seconds["growing"],
        10,
        "above",
        note=f"{seconds['dynamic'] * 1e3:.1f} ms against {seconds['growing'] * 1e3:.3f} ms",
    )


def measure() -> list[Ratio]:
    """The step at 16k, 64k and 256k keys, and the cache."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.inference_mode():
            return [row for n in (16_384, 65_536, 262_144) for row in _step(n)] + [_cache(65_536)]
    finally:
        torch.set_num_threads(before)
