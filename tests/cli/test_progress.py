"""How far a check is: plain lines where nobody watches, a bar on a terminal."""

import io
import sys

from assay.bench._run import Event
from assay.cli import _progress
from assay.cli._progress import Progress


def trial(kind: str, done: int, **more) -> Event:
    return Event(kind, "trial", f"k{done}", f"compare[mean] seed {done}", "compare", done=done, total=4, **more)


def test_each_reason_is_told_once(capsys):
    with Progress("tiny-mean") as progress:
        progress(trial("failed", 1, why="ValueError: no"))
        progress(trial("skipped", 2, why="no peer"))
        progress(trial("skipped", 3, why="no peer"))
        progress(trial("finished", 4))
    assert capsys.readouterr().err == (
        "failed compare[mean] seed 1: ValueError: no\nskipped compare[mean] seed 2: no peer\n"
    )


def test_lines_come_now_and_then(capsys, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(_progress.time, "monotonic", lambda: float(next(now)))
    progress = Progress("tiny-mean")
    for done in range(5):
        progress(trial("finished", done))
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert lines[0].startswith("tiny-mean: ")
    assert "of 4 trials after" in lines[0]


def test_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("tiny-mean") as progress:
        progress(Event("planned", done=0, total=4))
        progress(trial("started", 0))
        progress(Event("progress", "trial", "k0", "compare[mean] seed 0", "compare", done=3, total=9))
        progress(trial("finished", 1))
    assert "tiny-mean" in terminal.getvalue()
    assert "1/4" in terminal.getvalue()
    assert "compare[mean] seed 0 3/9" in terminal.getvalue()


def test_a_check_that_finds_everything_draws_no_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("tiny-mean") as progress:
        progress(Event("planned", done=4, total=4))
    assert terminal.getvalue() == ""
