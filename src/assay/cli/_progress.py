"""How far a check is: a bar on a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

from assay.bench._figures import duration, many
from assay.cli._terminal import paint

if TYPE_CHECKING:
    from assay.bench import _run

_EVERY = 15.0  # seconds between plain lines


class Progress:
    """Tells of a check's events. A context manager; give it to `assay.bench.check` as ``on_event``.

    Parameters
    ----------
    method
        Its slug.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self._said: set[str] = set()  # a reason that fifty trials share is told once
        self._running: dict[str, str] = {}
        self._started = self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._closed = Event()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if self._bar is not None:
            self._bar.close()

    def __call__(self, event: _run.Event) -> None:
        if event.kind in ("failed", "skipped") and event.why not in self._said:
            self._said.add(event.why)
            colour = {"failed": "red", "skipped": "yellow"}[event.kind]
            self._line(f"{paint(event.kind, colour, sys.stderr)} {event.label}: {event.why}")
        if event.kind in ("started", "progress"):
            part = f" {event.done}/{event.total}" if event.kind == "progress" and event.total else ""
            self._running[event.key] = event.label + part
        elif event.kind == "waiting":
            self._running[event.key] = f"{event.label} ({event.why})"
        else:
            self._running.pop(event.key, None)
        if event.kind == "progress" or event.done is None or event.total is None:
            self._show(None, None)
        else:
            self._show(event.done, event.total)

    def _show(self, done: int | None, total: int | None) -> None:
        if self._terminal:
            self._draw(done, total)
        elif done is not None and total is not None and time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            spent = duration(self._told - self._started)
            self._line(f"{self.method}: {done} of {many(total, 'trial')} after {spent}")

    def _draw(self, done: int | None, total: int | None) -> None:
        from tqdm import tqdm

        if self._bar is None:
            if not total or done == total:
                return  # everything was there before
            self._bar = tqdm(
                total=total,
                initial=done or 0,
                desc=self.method,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}, {remaining} to go{postfix}",
                dynamic_ncols=True,
                leave=False,
            )
            Thread(target=self._tick, daemon=True).start()
        if done is not None and done > self._bar.n:
            self._bar.update(done - self._bar.n)
        self._bar.set_postfix_str(next(reversed(self._running.values()), "")[:40], refresh=True)

    def _tick(self) -> None:
        """Keep the clock going while a long trial says nothing."""
        while not self._closed.wait(1.0):
            self._bar.refresh()

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)
