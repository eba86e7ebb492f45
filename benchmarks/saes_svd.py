"""SAES-SVD: the time and memory of a compression against a naive one, of its factorisation, and of thin layers.

The model is SmolLM2's architecture with random weights and eight blocks. The naive compression is what one writes first: for
each block, whole forwards of both networks with the activations of its Linears kept, roots of H from eigenvectors, an
inverse, and two full SVDs a layer.
"""

from __future__ import annotations

import copy
import json
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from assay.lm import LowRankLinear, blocks, groups, rank_for
from assay.lm._blocks import replace, weight_of
from assay.methods.saes_svd import aces_beta, cealc, compress_model
from benchmarks._harness import Ratio, interleaved

BLOCKS, THREADS, RATIO = 8, 2, 0.2


def _model(layers: int = BLOCKS) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    return LlamaForCausalLM(config).eval()


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(2048, (count // 256, 256), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _naive(model: nn.Module, tokens: torch.Tensor) -> None:
    original = copy.deepcopy(model)
    for number in range(len(blocks(model))):
        for group in groups(blocks(model)[number]):
            kept: dict[str, list[torch.Tensor]] = {"model": [], "original": []}
            for name, network in (("model", model), ("original", original)):
                hooks = [
                    blocks(network)[number]
                    .get_submodule(linear)
                    .register_forward_pre_hook(
                        lambda _, args, name=name, kept=kept: kept[name].append(args[0].flatten(0, 1))
                    )
                    for linear in group
                ]
                network.base_model(input_ids=tokens, use_cache=False)
                for hook in hooks:
                    hook.remove()
            for place, (name, linear) in enumerate(group.items()):
                X, reference = kept["model"][place].T.double(), kept["original"][place].T.double()
                W = weight_of(linear).double()
                H, Delta = X @ X.T, (reference - X) @ X.T
                H += 1e-4 * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
                values, vectors = torch.linalg.eigh(H)
                L = torch.linalg.inv((vectors * values.sqrt()) @ vectors.T)
                rank = rank_for(RATIO, *W.shape)
                S, D = W @ H @ L, W @ Delta @ L
                torch.linalg.svd(S, full_matrices=False)
                beta, _, _ = aces_beta(S, D, rank)
                u, s, v = torch.linalg.svd(S + beta * D, full_matrices=False)
                A, B = u[:, :rank] * s[:rank].sqrt(), s[:rank, None].sqrt() * v[:rank] @ L
                replace(blocks(model)[number], name, LowRankLinear.from_factors(A.float(), B.float()))


def _alone(which: str, tokens: int, layers: int) -> dict[str, float]:
    """Seconds and peak memory of one compression, in a process of its own."""
    code = [sys.executable, "-m", "benchmarks.saes_svd", which, str(tokens), str(layers)]
    said = subprocess.run(code, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(said.stdout.splitlines()[-1])
    return found


def _here(which: str, tokens: int, layers: int) -> None:
    torch.set_num_threads(THREADS)
    model, ids = _model(layers), _tokens(tokens)
    begun, start = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if which == "ours":
        compress_model(model, ids, ratio=RATIO)
    elif which == "naive":
        _naive(model, ids)
    else:
        raise SystemExit(f"unknown: {which}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": time.perf_counter() - begun, "mib": (peak - start) / 1024}))


def _factorisation() -> Ratio:
    torch.manual_seed(0)
    W, X = torch.randn(1536, 576), torch.randn(576, 2000, dtype=torch.float64)
    H, Delta = X @ X.T, 0.1 * torch.randn(576, 2000, dtype=torch.float64) @ X.T
    rank = rank_for(RATIO, 1536, 576)

    def by_svd() -> None:
        values, vectors = torch.linalg.eigh(H + 1e-4 * H.diagonal().mean() * torch.eye(576, dtype=H.dtype))
        L = (vectors / values.sqrt()) @ vectors.T
        u, s, v = torch.linalg.svd(W.double() @ (H + 0.5 * Delta) @ L, full_matrices=False)
        _ = u[:, :rank] * s[:rank].sqrt(), s[:rank, None].sqrt() * v[:rank] @ L

    seconds = interleaved({"svd": by_svd, "ours": lambda: cealc(W, H, Delta, rank, beta=0.5)}, 5)
    note = f"1536 x 576, rank {rank}: {seconds['svd']:.2f} s, {seconds['ours']:.2f} s"
    what = "eigh of H and SVD / Cholesky and eigh of a Gram matrix"
    return Ratio(what, seconds["svd"] / seconds["ours"], None, "above", note=note)


def _thin() -> list[Ratio]:
    found = []
    for rows, what in ((256, "256 tokens"), (1, "one token")):
        for m, n in ((1536, 576), (11008, 4096)):
            dense, x = nn.Linear(n, m, bias=False), torch.randn(rows, n)
            thin = LowRankLinear(n, m, rank_for(0.4, m, n))
            with torch.no_grad():
                seconds = interleaved({"dense": lambda: dense(x), "thin": lambda: thin(x)}, 15)  # noqa: B023
            size = sum(p.numel() for p in thin.parameters()) / (m * n)
            bar = 1.2 if rows > 1 and m == 1536 else None
            note = f"ratio 0.4, {what}; {size:.2f} of the bytes are read"
            found.append(
                Ratio(
                    f"dense / factored, {m} x {n}, {what}", seconds["dense"] / seconds["thin"], bar, "above", note=note
                )
            )
    return found


def measure() -> list[Ratio]:
    """All ratios."""
    torch.set_num_threads(THREADS)
    ours, naive = _alone("ours", 4096, BLOCKS), _alone("naive", 4096, BLOCKS)
    whole = _alone("ours", 8192, 30)
    both = f"8 blocks, 4,096 tokens: {naive['seconds']:.0f} s, {ours['seconds']:.0f} s"
    memory = f"above the model: {naive['mib']:.0f} MiB, {ours['mib']:.0f} MiB"
    return [
        Ratio("naive / ours, time of a compression", naive["seconds"] / ours["seconds"], 2, "above", note=both),
        Ratio("ours / naive, peak memory above the model", ours["mib"] / naive["mib"], 0.2, "below", note=memory),
        Ratio("seconds of SmolLM2's 30 blocks, 8,192 tokens", whole["seconds"], 60, "below", "s", f"{THREADS} threads"),
        _factorisation(),
        *_thin(),
    ]


if __name__ == "__main__":
    _here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
