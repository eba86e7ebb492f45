"""The local engine: one fork server for each number of threads, jobs as its children."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from assay.bench._plan import Job

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def start_mode() -> str:
    """``"fork"`` where forking is safe, ``"fresh"`` elsewhere or where ``ASSAY_START=fresh`` asks for it."""
    given = os.environ.get("ASSAY_START", "")
    if given not in ("", "fork", "fresh"):
        raise ValueError(f"ASSAY_START is 'fork' or 'fresh', got {given!r}: set one of them, or unset it")
    return given or ("fork" if sys.platform == "linux" else "fresh")


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Server:
    """A running `assay.bench._server`: jobs in, messages out.

    Parameters
    ----------
    folder
        The method's folder.
    threads
        For torch, BLAS, OpenMP and numba.
    environment
        Variables of its environment, beside those of this process.
    """

    def __init__(self, folder: str, threads: int, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.jobs: dict[str, Job] = {}
        self._text = b""
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the server
        self._channel, theirs = socket.socketpair()
        variables = {
            **os.environ,
            **{name: str(threads) for name in THREADS},
            # The order of sets, whole tracebacks of crashes, no windows, repeatable matrix products on a GPU.
            "PYTHONHASHSEED": "0",
            "PYTHONFAULTHANDLER": "1",
            "MPLBACKEND": "Agg",
            "TOKENIZERS_PARALLELISM": "false",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # glibc: keep freed memory for the next large array, instead of a page fault for each of its pages.
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**31),
            **(environment or {}),
        }
        # A session of its own: Ctrl-C reaches the check, and the check ends its jobs.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "assay.bench._server", folder, str(theirs.fileno()), start_mode(), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            env=variables,
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def fileno(self) -> int:
        """For `select`."""
        return self._channel.fileno()

    def start(self, job: Job, *, deliver: str, since: float) -> None:
        """Start a job."""
        message = {"run": job.to_json(), "deliver": deliver, "since": since}
        self.jobs[job.key] = job
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server is gone: receive() says so

    def receive(self) -> list[dict[str, Any]]:
        """What has been said, as soon as something has.

        Raises
        ------
        ImportError, RuntimeError
            When the study cannot be imported.
        """
        try:
            more = self._channel.recv(1 << 16)
        except ConnectionResetError:
            more = b""
        if not more:
            return self._gone()
        *lines, self._text = (self._text + more).split(b"\n")
        said = []
        for line in lines:
            message = json.loads(line)
            if "error" in message:
                problem = RuntimeError(f"{Path(self.folder) / 'study.py'} cannot be imported: {message['error']}")
                if "ImportError" in message["traceback"] and "pip install" in message["error"]:
                    problem = ImportError(message["error"])  # type: ignore[assignment]
                problem.add_note(message["traceback"])
                raise problem
            if "key" in message:
                if "progress" not in message:
                    self.jobs.pop(message["key"], None)
                said.append(message)
        return said

    def _gone(self) -> list[dict[str, Any]]:
        """The server itself has died, and with it what it ran."""
        code = self._process.wait()
        self._printed.seek(0)
        printed = self._printed.read().decode("utf-8", "replace").strip()
        if code > 0 and not self.jobs:
            raise RuntimeError(f"the process that runs trials ended with status {code}: {printed[-2000:]}")
        why = f"the process that it was forked from ended with status {code}" + (
            f": {printed[-500:]}" if printed else ""
        )
        said = [{"key": key, "ended": "killed", "why": why} for key in self.jobs]
        self.jobs.clear()
        self.close()
        return said

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._channel.fileno() < 0

    def close(self) -> None:
        """End it, and all jobs that it runs."""
        if not self.closed:
            self._channel.close()
            self._printed.close()
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class LocalEngine:
    """Jobs on this machine, as many at once as its cores allow.

    Parameters
    ----------
    workers
        Cores to use; by default all that this process may use.
    """

    delivers = "store"

    def __init__(self, workers: int | None = None) -> None:
        self.cores = available_cores() if workers is None else workers
        self._servers: dict[int, Server] = {}

    def start(self, job: Job, since: float) -> None:
        server = self._servers.get(job.threads)
        if server is None or server.closed:
            server = self._servers[job.threads] = Server(job.folder, job.threads)
        server.start(job, deliver="store", since=since)

    def messages(self, timeout: float) -> list[dict[str, Any]]:
        servers = [s for s in self._servers.values() if not s.closed]
        readable, _, _ = select.select(servers, [], [], timeout)
        return [message for server in readable for message in server.receive()]

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
