"""Checks that nobody ran, with every verdict there is: what the tests of the report and of the results are shown."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any


def condition(test: str, cell: dict, effect: Any, interval: Any, bar: Any, verdict: str) -> Any:
    return SimpleNamespace(test=test, cell=cell, effect=effect, interval=interval, bar=bar, verdict=verdict)


def verdict(
    id: str, word: str, effect=None, interval=None, bar=None, per_seed=(), note="", conditions=(), reported=None
) -> Any:
    made = SimpleNamespace(
        id=id, verdict=word, reported=reported, effect=effect, interval=interval, bar=bar, seeds=len(per_seed),
        per_seed=list(per_seed), note=note, conditions=list(conditions), left_out=False,
    )  # fmt: skip
    made.to_json = lambda: {
        **{k: v for k, v in vars(made).items() if k not in ("conditions", "to_json", "left_out")},
        "conditions": [
            {k: getattr(c, k) for k in ("test", "cell", "effect", "interval", "bar")} for c in made.conditions
        ],
    }
    return made


def claim(id: str, says: str, reported=None, testable="full", because=None, experiment="attention_error") -> Any:
    return SimpleNamespace(
        id=id, says=says, reported=reported, testable=testable, because=because, experiment=experiment
    )


def check(name: str, card: Any, verdicts: list, evidence: dict | None = None, **more: Any) -> Any:
    fields = {
        "method": name, "scale": "full", "interrupted": False, "overridden": (), "partial": (), "verdicts": verdicts, "evidence": evidence or {}, "card": card,
        "trials": {"done": 40, "reused": 5, "failed": 0, "skipped": 0, "missing": 0}, "fingerprint": "0" * 16,
        "versions": {"assay": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0"},
        "machine": {"processor": "x86_64, 2 cores", "memory": "8 GiB", "python": "3.11.9"},
        "data": {"shakespeare": {"licence": "public domain", "sha256": "ab" * 32}},
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


def card(title: str, summary: str, fields: list[str], paper: tuple[str, str], claims: list) -> Any:
    return SimpleNamespace(
        name=title.lower().replace(" ", "-"), title=title, summary=summary, fields=fields, claims=claims,
        paper=SimpleNamespace(title=paper[0], id=paper[1], venue="ICLR 2026", bibtex="@misc{x}"),
    )  # fmt: skip


def sample() -> list[Any]:
    """Three methods: every verdict, curves, costs, lost trials, conditions in cells."""
    dice = random.Random(1)
    return [_attention(dice), _optimiser(dice), _imputation(dice)]


def _attention(dice: random.Random) -> Any:
    claims = [
        claim(
            "guarantee",
            "The error exceeds its tolerance with probability at most delta, over all heads and in the worst layer.",
            "holds on Llama-3.1-8B, RULER",
            "scaled",
            "SmolLM2-135M at 4k tokens",
        ),
        claim(
            "beats-top-k",
            "At a tenth of the keys, its error is below that of exact top-k for most heads.",
            "10 to 20 points of accuracy at equal density (Llama-3.1-8B, RULER-HARD)",
            "scaled",
            "SmolLM2-135M at 4k tokens",
        ),
        claim("density", "How much of the cache a tolerance of five per cent needs.", None, "scaled", "SmolLM2-135M"),
        claim(
            "long-reasoning",
            "Full-model accuracy at up to 32k generated tokens on AIME 2024.",
            "36.7 against 36.7 (DeepSeek-R1-Distill-Llama-8B, AIME 2024)",
            "no",
            "needs an 8B reasoning model: assay check vattention --scale paper",
            None,
        ),
    ]
    cells = [{"eps": e, "delta": d} for e in (0.05, 0.1) for d in (0.05, 0.1, 0.2)]
    misses = []
    for cell in cells:
        d = cell["delta"]
        misses += [
            condition("missed[vattention] <= delta", cell, 0.55 * d, [0.48 * d, 0.63 * d], d, "holds"),
            condition("missed_worst_layer[vattention] <= delta", cell, 0.86 * d, [0.75 * d, 0.97 * d], d, "holds"),
        ]
    worst = misses[1]
    verdicts = [
        verdict(
            "guarantee", "holds", worst.effect, worst.interval, worst.bar, [0.043, 0.0415, 0.0447, 0.0425, 0.0433],
            "", misses, claims[0].reported,
        ),
        verdict(
            "beats-top-k", "fails", 0.552, [0.507, 0.597], 0.7, [0.541, 0.56, 0.549, 0.557, 0.553],
            "The share of heads is above one half, but the whole interval lies below the bar.",
            [
                condition("share(error[vattention, density=0.1] <= error[top-k, density=0.1]) >= 0.7", {}, 0.552, [0.507, 0.597], 0.7, "fails"),
                condition("error[vattention, density=0.1] < error[top-k, density=0.1]", {}, -0.0061, [-0.0083, -0.0039], 0.0, "holds"),
            ],
            claims[1].reported,
        ),
        verdict("density", "measured", 0.123, [0.117, 0.129], None, [0.121, 0.124, 0.122, 0.125, 0.123]),
        verdict("long-reasoning", "not testable here", reported=claims[3].reported, note=claims[3].because),
    ]  # fmt: skip
    evidence = {
        "attention_error": SimpleNamespace(
            blocked=None,
            experiment=SimpleNamespace(arms=["vattention", "top-k", "uniform"]),
            observations=[
                _done(arm, {"corpus": "shakespeare"}, s, dice.gauss(middle, 0.2), 9e8 + dice.random() * 1e8)
                for s in range(5)
                for arm, middle in (("vattention", 4.2), ("top-k", 3.1), ("uniform", 2.6))
            ],
        )
    }
    return check(
        "vattention",
        card("vAttention", "Sparse decode attention with an error bound that you choose.", ["language models", "inference"],
             ("vAttention: Verified Sparse Attention via Sampling", "arXiv:2510.05688"), claims),
        verdicts,
        evidence,
    )  # fmt: skip


def _optimiser(dice: random.Random) -> Any:
    claims = [
        claim("beats-galore", "Alice ends at least 2 % below GaLore.", "perplexity 21.95 against 27.18 (LLaMA-130M, C4)", "scaled", "a 0.2M-parameter LLaMA on 21 MB of English", "pretrain"),
        claim("twice-as-fast", "RACS reaches Adam's last loss in half the steps.", "more than 2x fewer steps (LLaMA, C4)", "scaled", "a 0.2M-parameter LLaMA on 21 MB of English", "pretrain"),
        claim("memory", "RACS keeps no more state than plain SGD, to within two vectors a matrix.", "1.98 GiB against 2.98 GiB", "full", None, "state"),
    ]  # fmt: skip
    verdicts = [
        verdict("beats-galore", "holds", 0.938, [0.921, 0.955], 0.98, [0.934, 0.941, 0.945, 0.93, 0.94], "", [condition("perplexity[alice] / perplexity[galore] <= 0.98", {}, 0.938, [0.921, 0.955], 0.98, "holds")], claims[0].reported),
        verdict("twice-as-fast", "open", 1.92, [1.71, 2.15], 2.0, [1.85, 2.02, 1.9, 1.95, 1.88], "The interval straddles the bar.", [condition("speedup(loss[racs], loss[adam]) >= 2", {}, 1.92, [1.71, 2.15], 2.0, "open")], claims[1].reported),
        verdict("memory", "holds", 1.0031, [1.0031, 1.0031], 1.01, [1.0031] * 5, "Exact: the same for every seed.", [condition("state_bytes[racs] / state_bytes[sgd] <= 1.01", {}, 1.0031, [1.0031, 1.0031], 1.01, "holds")], claims[2].reported),
    ]  # fmt: skip
    arms = {"alice": 130, "racs": 150, "galore": 210, "adam": 260}
    observations = []
    for seed in range(5):
        for arm, pace in arms.items():
            loss = [
                (s, 3.1 + 5.4 * math.exp(-s / pace) + 0.4 / (1 + s / 80) + dice.gauss(0, 0.03))
                for s in range(0, 1000, 4)
            ]
            observations.append(_done(arm, {}, seed, dice.gauss(50 + pace / 10, 2), 4e8 + pace * 1e6, {"loss": loss}))
    observations.append(
        SimpleNamespace(
            arm="muon", at={}, seed=0, status="skipped", why='pip install "assay[peers]"', measures={}, curves={}
        )
    )
    evidence = {
        "pretrain": SimpleNamespace(
            blocked=None, experiment=SimpleNamespace(arms=[*arms, "muon"]), observations=observations
        )
    }
    return check(
        "racs-alice",
        card("RACS and Alice", "Memory-lean optimisers from structured Fisher approximations.", ["language models", "optimisation"],
             ("Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation", "arXiv:2502.07752"), claims),
        verdicts,
        evidence,
        trials={"done": 44, "reused": 0, "failed": 0, "skipped": 1, "missing": 0},
    )  # fmt: skip


def _imputation(dice: random.Random) -> Any:
    claims = [
        claim("naive-under-covers", "Calibrating on the clean labels alone covers less than promised.", "below 90 % on five tables", "full", None, "coverage"),
        claim("pcp-valid-not-wasteful", "With true weights, coverage is at least 89.5 % and at most 93 %.", "90 % on House and Bio", "full", None, "coverage"),
    ]  # fmt: skip
    cells = [
        condition("0.895 <= coverage[pcp-true]", {"table": t}, e, [e - 0.004, e + 0.004], 0.895, "holds")
        for t, e in (("house", 0.906), ("bio", 0.907))
    ] + [
        condition("coverage[pcp-true] <= 0.93", {"table": t}, e, [e - 0.004, e + 0.004], 0.93, "holds")
        for t, e in (("house", 0.906), ("bio", 0.907))
    ]
    verdicts = [
        verdict("naive-under-covers", "holds", 0.884, [0.881, 0.887], 0.895, [0.882, 0.885, 0.886, 0.883, 0.884], "", [condition("coverage[naive] <= 0.895", {"table": "house"}, 0.884, [0.881, 0.887], 0.895, "holds")], claims[0].reported),
        verdict("pcp-valid-not-wasteful", "holds", 0.906, [0.902, 0.91], 0.895, [0.904, 0.909, 0.905, 0.907, 0.905], "", cells, claims[1].reported),
    ]  # fmt: skip
    return check(
        "uncertain-imputation",
        card("Uncertain imputation", "Prediction intervals with the promised coverage, from labels that are partly missing or wrong.",
             ["tables", "conformal prediction"], ("Conformal Prediction with Corrupted Labels", "arXiv:2505.04733v3"), claims),
        verdicts,
        scale="quick",
    )  # fmt: skip


def _done(arm: str, at: dict, seed: int, seconds: float, peak: float, curves: dict | None = None) -> Any:
    return SimpleNamespace(
        arm=arm, at=at, seed=seed, status="done", why="", measures={"seconds": seconds, "peak_bytes": peak}, curves=curves or {},
    )  # fmt: skip
