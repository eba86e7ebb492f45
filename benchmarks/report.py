"""How long the report takes, and what it weighs: 38 methods with five claims and five seeds, none of them measured."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VERDICTS = ("holds", "holds", "fails", "open", "measured")


def synthetic(methods: int = 38, claims: int = 5, seeds: int = 5, arms: int = 4, steps: int = 400) -> list[Any]:
    """Checks that look like real ones: conditions in cells, curves of every arm and seed, costs."""
    dice = random.Random(0)
    return [_check(dice, m, claims, seeds, arms, steps) for m in range(methods)]


def _check(dice: random.Random, m: int, claims: int, seeds: int, arms: int, steps: int) -> Any:
    name, fields = f"method-{m + 1:02d}", ["vision", "language models", "statistics", "robotics"]
    cards, verdicts = [], []
    for i in range(claims):
        word = "not testable here" if (m + i) % 11 == 10 else VERDICTS[(m + i) % len(VERDICTS)]
        bar = None if word in ("measured", "not testable here") else round(dice.uniform(0.5, 2), 2)
        effect = dice.uniform(0.5, 2) if bar is None else bar + {"holds": 0.2, "fails": -0.2, "open": 0.02}[word]
        values = [dice.gauss(effect, 0.05) for _ in range(seeds)]
        interval = [effect - 0.11, effect + 0.11]
        if word == "not testable here":
            effect, interval, values = None, None, []
        cells = [{"table": t, "delta": d} for t in ("house", "bio") for d in (0.05, 0.1, 0.2)]
        conditions = [
            SimpleNamespace(
                test=f"score[ours] - score[rival] >= {bar}",
                cell=cell,
                effect=effect,
                interval=interval,
                bar=bar,
                verdict=word,
            )
            for cell in cells
        ]
        cards.append(
            SimpleNamespace(
                id=f"claim-{i}", says="The method ends at least two per cent below its best rival on every table.",
                reported="21.95 against 27.18 (LLaMA-130M, C4)", testable="no" if effect is None else "scaled",
                because="a 0.2M-parameter model on 21 MB of English", experiment=f"experiment_{i % 2}",
            )
        )  # fmt: skip
        verdicts.append(
            SimpleNamespace(
                id=f"claim-{i}", verdict=word, reported=cards[-1].reported, effect=effect, interval=interval, bar=bar,
                seeds=len(values), per_seed=values, left_out=False, note="The widest interval is over the cases.",
                conditions=conditions if effect is not None else [],
            )
        )  # fmt: skip
    names = [f"arm-{a}" for a in range(arms)]
    evidence = {
        f"experiment_{e}": SimpleNamespace(
            blocked=None,
            experiment=SimpleNamespace(arms=names),
            observations=[
                SimpleNamespace(
                    arm=arm, at={"table": "house"}, seed=seed, status="done", why="",
                    measures={"seconds": dice.uniform(1, 9), "peak_bytes": dice.uniform(1e8, 4e9)},
                    curves={"loss": [(s, 4 / (1 + s / 40) + dice.gauss(0, 0.05)) for s in range(steps)]},
                )
                for arm in names
                for seed in range(seeds)
            ],
        )
        for e in range(2)
    }  # fmt: skip
    return SimpleNamespace(
        method=name, scale="quick", interrupted=False, overridden=(), partial=(), verdicts=verdicts, evidence=evidence,
        trials={"done": 40, "reused": 0, "failed": 0, "skipped": 0, "missing": 0},
        versions={"numpy": "2.4.6", "torch": "2.13.0"}, machine={"processor": "synthetic", "cores": 2},
        data={"english": {"licence": "public domain", "sha256": "0" * 64}},
        card=SimpleNamespace(
            title=f"Method {m + 1}", summary="What it does, in one sentence.", fields=[fields[m % 4], "synthetic"],
            paper=SimpleNamespace(title="A paper of its own", venue="ICLR 2026", id="arXiv:2510.05688"), claims=cards,
        ),
    )  # fmt: skip


def measure() -> list[Any]:
    """Seconds and megabytes of the largest report there will be."""
    from assay.bench._report import write_report
    from benchmarks._harness import Ratio

    checks = synthetic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        write_report(path, checks[:1])
        start = time.perf_counter()
        write_report(path, checks)
        seconds = time.perf_counter() - start
        weight = path.stat().st_size / 1e6
    note = "38 methods, 5 claims, 5 seeds, 4 arms, 1520 curves of 400 points"
    return [
        Ratio("report of 38 methods", seconds, 10, unit="s", note=note),
        Ratio("weight of the page", weight, 5, unit="MB", note=note),
    ]
