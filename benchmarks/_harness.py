"""How the benchmarks measure: rivals take turns in one process, and only their ratios count."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ratio:
    """One line of the table.

    Parameters
    ----------
    what
        What is compared, in words: "RACS step / Adam step (130M shapes)".
    ratio
        The measured ratio (or plain figure, where ``unit`` names one).
    bar
        What the ratio should reach, or None for a figure without a bar.
    better
        Whether a ratio should stay "below" its bar or lie "above" it.
    unit
        "x" for a ratio, else the unit of a plain figure.
    note
        Sizes, threads, medians: what a reader needs to repeat it.
    """

    what: str
    ratio: float
    bar: float | None = None
    better: Literal["below", "above"] = "below"
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without a bar."""
        if self.bar is None:
            return None
        return self.ratio <= self.bar if self.better == "below" else self.ratio >= self.bar


def interleaved(
    rivals: Mapping[str, Callable[[], object]],
    rounds: int = 20,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each rival, run in turns so that a slow spell of the machine hits all alike.

    Parameters
    ----------
    rivals
        Calls without arguments, by name.
    rounds, warmup
        Timed turns and turns before them.
    clock
        `time.perf_counter`, or `time.process_time` where other programs share the cores.
    """
    for _ in range(warmup):
        for call in rivals.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            names = list(rivals)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = clock()
                rivals[name]()
                seconds[name].append(clock() - start)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}
