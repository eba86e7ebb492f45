"""A method that costs nothing, in a methods folder of its own, and the command line as a process."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

CARD = '''
name = "tiny-mean"
title = "Tiny mean"
summary = "The mean of a few numbers, found at once."
fields = ["arithmetic"]
extras = ["tables"]

[paper]
title = "On the mean"
id = "arXiv:0000.00000"
venue = "Nowhere 2026"
bibtex = """@inproceedings{mean, title={On the mean}, year={2026}}"""

[[takes]]
kind = "table"
command = "assay run tiny-mean --table {path} --column price"

[[claims]]
id = "closer"
says = "The mean is closer to the truth than the first number."
reported = "0.1 against 0.4 (ten numbers)"
testable = "scaled"
because = "five numbers"
experiment = "compare"
holds_if = "error[mean] < error[first]"

[[claims]]
id = "tiny"
says = "Its error is below a thousandth."
testable = "full"
experiment = "compare"
holds_if = "error[mean] <= 0.001"

[[claims]]
id = "elsewhere"
says = "It is liked by everybody."
testable = "no"
because = "needs everybody"

[[claims]]
id = "rows"
says = "A table has rows."
testable = "full"
experiment = "on_table"
report = "rows[mean]"
'''

STUDY = '''
"""Errors of two estimates of zero."""

import random
import time

from assay.bench import Cases, Exact, Trial, experiment


@experiment(
    arms=("mean", "first"),
    measures=("error",),
    settings={"numbers": 5, "pause": 0.0, "crash": "no"},
    seeds=5,
    quick={"seeds": 3},
    paper=False,
)
def compare(trial: Trial) -> dict:
    """How far an estimate is from zero."""
    time.sleep(trial["pause"])
    if trial["crash"] == trial.arm:
        raise ValueError("the numbers ran out")
    source = random.Random(trial.seed)
    errors = []
    for _ in range(100):
        numbers = [source.gauss(0, 1) for _ in range(trial["numbers"])]
        errors.append(abs(sum(numbers) / len(numbers) if trial.arm == "mean" else numbers[0]))
    return {"error": Cases(errors)}


@experiment(arms=("mean",), measures=("rows",), inputs={"table": "house"}, seeds=3, quick={"seeds": 3})
def on_table(trial: Trial) -> dict:
    """How many rows a table has."""
    return {"rows": Exact(len(trial.input("table")))}
'''

COMMAND = '''
"""The mean of a column."""

from pathlib import Path
from types import ModuleType
from typing import Literal

__all__ = ["mean"]


def mean(
    *,
    table: Path,
    column: str,
    round_to: int = 3,
    weights: tuple[float, ...] = (),
    kind: Literal["arithmetic", "geometric"] = "arithmetic",
    verbose: bool = False,
    need: str | None = None,
) -> None:
    """Print the mean of a column.

    Rows without a number are an error.

    Parameters
    ----------
    table
        A CSV file.
    column
        Its column, 100% numbers.
    round_to
        Digits after the point.
    weights
        One a row.
    kind
        Which mean.
    verbose
        Say more.
    need
        A package to import first.

    Examples
    --------
    assay run tiny-mean --table my.csv --column price
    """
    if need:
        __import__(need)
    from assay.data import read_table

    values = read_table(table)[column]
    if values.dtype == object or values.dtype.kind not in "if":
        raise ValueError(f"column {column!r} of {table} holds text: give a column of numbers")
    print(f"{kind} {round(float(values.mean()), round_to)} weights={weights} verbose={verbose}")
'''

INIT = '''
"""The mean of a few numbers.

Reach for it when there are several.
"""

__all__ = ["mean"]


def mean(numbers):
    """The mean."""
    return sum(numbers) / len(numbers)
'''


@dataclass
class Said:
    """What a process printed, and its exit status."""

    status: int
    out: str
    err: str


class Shell:
    """Runs the command line in processes with a home and methods of their own."""

    def __init__(self, home: Path, methods: Path) -> None:
        self.home, self.methods = home, methods
        self.env = {**os.environ, "ASSAY_HOME": str(home), "ASSAY_METHODS": str(methods), "OMP_NUM_THREADS": "1"}
        self.env.pop("NO_COLOR", None)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "assay", *map(str, words)]

    def __call__(self, *words: str, cwd: Path | None = None, stdin: str | None = None, **env: str) -> Said:
        ran = subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            env={**self.env, **env},
            cwd=cwd,
            input=stdin,
            timeout=120,
        )
        return Said(ran.returncode, ran.stdout, ran.stderr)


def write_tiny(folder: Path, card: str = CARD, study: str = STUDY, command: str = COMMAND, init: str = INIT) -> Path:
    """Write the tiny method into a methods folder."""
    method = folder / "tiny_mean"
    method.mkdir(parents=True)
    for name, text in (("card.toml", card), ("study.py", study), ("command.py", command), ("__init__.py", init)):
        (method / name).write_text(text.lstrip("\n"), encoding="utf-8")
    return folder


@pytest.fixture
def assay(tmp_path: Path) -> Shell:
    """The command line with the tiny method beside Assay's own."""
    return Shell(tmp_path / "home", write_tiny(tmp_path / "methods"))


@pytest.fixture(scope="session")
def cli_tools() -> ModuleType:
    """This module, for fixtures that make a command line of their own."""
    return sys.modules[__name__]


class Tiny:
    """Writes another version of the tiny method: ``tiny(folder, card=...)``."""

    CARD, STUDY, COMMAND = CARD, STUDY, COMMAND

    def __call__(self, folder: Path, **texts: str) -> Path:
        return write_tiny(folder, **texts)


@pytest.fixture
def tiny() -> Tiny:
    return Tiny()
