"""How long the command line takes to start, against a Python that does nothing."""

from __future__ import annotations

import subprocess
import sys

from benchmarks._harness import Ratio, interleaved


def measure() -> list[Ratio]:
    """Wall seconds of fresh processes, in turns: ``assay list`` must stay under 0.3 s."""
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import": [sys.executable, "-c", "import assay"],
        "help": [sys.executable, "-m", "assay", "--help"],
        "list": [sys.executable, "-m", "assay", "list"],
        "show": [sys.executable, "-m", "assay", "show", "vattention"],
    }

    def starter(command: list[str]):
        return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    seconds = interleaved({name: starter(command) for name, command in commands.items()}, rounds=20, warmup=2)
    base = seconds["python"]
    note = "median of 20 fresh processes"
    return [
        Ratio("import assay / python -c pass", seconds["import"] / base, note=note),
        Ratio("assay --help / python -c pass", seconds["help"] / base, note=note),
        Ratio("assay list / python -c pass", seconds["list"] / base, note=note),
        Ratio("assay show / python -c pass", seconds["show"] / base, note=note),
        Ratio("assay list", seconds["list"], bar=0.3, unit="s", note=note),
    ]
