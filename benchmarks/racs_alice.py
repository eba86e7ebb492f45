"""RACS and Alice against Adam and GaLore on the weights of a 130M-parameter LLaMA: one thread, rivals in turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from assay.methods.racs_alice import RACS, Alice, EigenAdam
from assay.methods.racs_alice._switch import draw_generator, exchange_columns, iterate_subspace
from benchmarks._harness import Ratio, interleaved

HIDDEN, FFN = 768, 2048
LAYER = [(HIDDEN, HIDDEN)] * 4 + [(FFN, HIDDEN)] * 2 + [(HIDDEN, FFN)]
RANK, LEADING = 256, 40
FAR = 10**9  # an interval that no timed step meets


def weights(layers: int = 2) -> list[nn.Parameter]:
    """The matrices of some layers, each with a gradient of its own."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in LAYER * layers:
        p = nn.Parameter(0.02 * torch.randn(shape, generator=generator))
        p.grad = 1e-3 * torch.randn(shape, generator=generator)
        params.append(p)
    return params


def galore(params: list[nn.Parameter], gap: int) -> torch.optim.Optimizer:
    """The package galore-torch, with Alice's rank."""
    from galore_torch import GaLoreAdamW

    group = {"params": params, "rank": RANK, "update_proj_gap": gap, "scale": 0.3, "proj_type": "std"}
    return GaLoreAdamW([group], lr=0.02, eps=1e-8, no_deprecation_warning=True)


def started(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The step of an optimizer that has its state."""
    optimizer.step()
    return optimizer.step


def measure() -> list[Ratio]:
    """The ratios of the specification of speed."""
    torch.set_num_threads(1)
    step = interleaved(
        {
            "adam": started(torch.optim.Adam(weights(), lr=1e-3, foreach=True)),
            "fused": started(torch.optim.Adam(weights(), lr=1e-3, fused=True)),
            "racs": started(RACS(weights())),
            "alice": started(Alice(weights(), rank=RANK, leading=LEADING, interval=FAR)),
            "eigen-adam": started(EigenAdam(weights(), interval=FAR)),
            "galore": started(galore(weights(), FAR)),
        },
        rounds=20,
        clock=time.process_time,
    )
    note = f"two layers of LLaMA-130M, one thread; Adam(foreach) {1e3 * step['adam']:.0f} ms"
    rows = [
        Ratio("RACS step / Adam(foreach) step", step["racs"] / step["adam"], 1.5, note=note),
        Ratio(f"Alice (r={RANK}) step / Adam(foreach) step", step["alice"] / step["adam"], 4.0, note=note),
        Ratio("Eigen-Adam step / Adam(foreach) step", step["eigen-adam"] / step["adam"], note=note),
        Ratio("Adam(fused) step / Adam(foreach) step", step["fused"] / step["adam"], note=note),
        Ratio("Alice step / galore-torch step, outside basis updates", step["alice"] / step["galore"], 1.3, note=note),
    ]

    G = weights(1)
    wide = [p.grad if p.shape[0] <= p.shape[1] else p.grad.mT for p in G]  # type: ignore[union-attr]
    bases = [torch.linalg.qr(g[:, :RANK]).Q.contiguous() for g in wide]
    tracked = torch.eye(RANK)

    def switch() -> None:
        for i, (g, U) in enumerate(zip(wide, bases, strict=True)):
            exchange_columns(iterate_subspace(U, g, tracked, 0.999), LEADING, "complement", draw_generator(0, i, 1))

    def decompose() -> None:
        for g in wide:
            torch.linalg.svd(g, full_matrices=False)

    update = interleaved(
        {
            "switch": switch,
            "svd": decompose,
            "alice": started(Alice(weights(1), rank=RANK, leading=LEADING, interval=1)),
            "galore": started(galore(weights(1), 1)),
        },
        rounds=3,
        warmup=1,
        clock=time.process_time,
    )
    note = f"every basis of one layer; switch {update['switch']:.2f} s"
    rows += [
        Ratio(
            "full SVD (GaLore) / subspace iteration and exchange (Alice)",
            update["svd"] / update["switch"],
            3.0,
            "above",
            note=note,
        ),
        Ratio(
            "galore-torch step / Alice step, with basis updates",
            update["galore"] / update["alice"],
            3.0,
            "above",
            note=note,
        ),
    ]

    whole = interleaved(
        {name: training_step(name) for name in ("adam", "racs", "alice")}, rounds=5, clock=time.process_time
    )
    note = f"two layers of width {HIDDEN}, 2,048 tokens, forward and backward; Adam {whole['adam']:.1f} s"
    rows += [
        Ratio("whole training step, RACS / Adam", whole["racs"] / whole["adam"], 1.2, note=note),
        Ratio("whole training step, Alice / Adam", whole["alice"] / whole["adam"], 1.2, note=note),
    ]
    return rows


class Block(nn.Module):
    """The products of a LLaMA layer, with attention over one short sequence: where a training step's time goes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (12, -1)).transpose(1, 2) for layer in self.qkv)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def training_step(name: str) -> Callable[[], object]:
    """Forward, backward and the optimizer's step of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(8, 256, HIDDEN)
    make = {
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True),
        "racs": lambda: RACS(model.parameters(), lr=1e-3),
        "alice": lambda: Alice(model.parameters(), lr=1e-3, rank=RANK, leading=LEADING, interval=FAR),
    }
    optimizer = make[name]()

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run
