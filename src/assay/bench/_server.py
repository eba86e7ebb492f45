"""The process that a job's process is forked from: it has the study's imports loaded, and has run nothing.

``python -m assay.bench._server FOLDER SOCKET MODE`` talks JSON, one message a line, over the inherited socket.

| from the check | |
|---|---|
| ``{"run": job, "deliver": "store" or "pipe", "since": t}`` | start a job |

| to the check | |
|---|---|
| ``{"ready": true}`` or ``{"error": sentence, "traceback": text}`` | after the imports |
| ``{"key": key, "progress": [done, total]}`` | from a job |
| ``{"key": key, ...}`` with one of ``ended``, ``busy``, ``stored``, ``store_error`` | how a job ended |

When the socket closes, because the check ended or was killed, the server kills its jobs and ends.
Where forking is unsafe (MODE ``fresh``) it starts a fresh interpreter for each job and loads nothing itself.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from assay.bench._plan import Job
from assay.bench._worker import load_study, perform

# How often a job's time and memory are looked at, in seconds.
_LOOK = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Running:
    job: Job
    pid: int
    pipe: int
    started: float
    text: bytes = b""
    result: dict[str, Any] | None = None
    killed: dict[str, Any] | None = None


def die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent ends."""
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Ask the kernel (Linux) to make this process the parent of all orphans below it, whatever session they are in."""
    if sys.platform == "linux":
        PR_SET_CHILD_SUBREAPER = 36
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def serve(folder: Path, channel: socket.socket, mode: str) -> None:
    """Run jobs until the channel closes."""
    adopt_orphans()
    if mode == "fork":
        try:
            load_study(folder)
        except Exception as error:  # noqa: BLE001 -- a study may raise anything when it is imported, and the check reports it
            sentence = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            _send(channel, {"error": sentence, "traceback": traceback.format_exc()})
            return
        # What is loaded by now is shared by all jobs: the collector must not touch, and so copy, its pages.
        gc.collect()
        gc.freeze()
    own = set(children(os.getpid()))  # what the study's imports have started
    _send(channel, {"ready": True})
    running: dict[int, _Running] = {}
    text = b""
    while True:
        watched = [channel.fileno(), *(r.pipe for r in running.values())]
        readable, _, _ = select.select(watched, [], [], _LOOK if running else None)
        if channel.fileno() in readable:
            more = channel.recv(1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                started = _start(json.loads(line), channel, mode)
                running[started.pipe] = started
        for pipe in readable:
            if pipe in running and not _read(running[pipe], channel):
                _finish(running.pop(pipe), channel)
                _end_orphans(own, running.values())
        for pipe, r in list(running.items()):
            # Something that the job started may hold its pipe open after its end.
            if hasattr(os, "waitid") and os.waitid(os.P_PID, r.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                while select.select([pipe], [], [], 0)[0] and _read(r, channel):
                    pass
                _finish(running.pop(pipe), channel)
                _end_orphans(own, running.values())
        _limit(running.values())
    for r in running.values():
        _kill(r.pid)
        os.waitpid(r.pid, 0)
    _end_orphans(own, ())


def _start(message: dict[str, Any], channel: socket.socket, mode: str) -> _Running:
    job = Job.from_json(message["run"])
    read, write = os.pipe()
    if mode == "fork":
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            channel.close()
            _child(job, message, write, parent)
        os.close(write)
    else:
        given, give = os.pipe()
        command = [sys.executable, "-m", "assay.bench._server", "--job", str(given), str(write), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=(given, write), start_new_session=True)
        os.close(given)
        os.close(write)
        with os.fdopen(give, "w") as file:
            json.dump(message, file)
        pid = process.pid
        process.returncode = 0  # waited for here, by its number
    return _Running(job, pid, read, time.monotonic())


def _child(job: Job, message: dict[str, Any], write: int, parent: int) -> NoReturn:
    """The job's own process: a group of its own, so that it can be killed with all that it starts."""
    try:
        if os.getpgid(0) != os.getpid():
            os.setsid()
        die_with_parent(parent)
        adopt_orphans()

        def emit(said: dict[str, Any]) -> None:
            # One whole line a write: a line that is cut short by a kill is no message.
            data = json.dumps(said).encode() + b"\n"
            while data:
                data = data[os.write(write, data) :]

        perform(job, emit, deliver=message["deliver"], since=message["since"])
    except BaseException:  # noqa: BLE001 -- the end of the process, which must not fall back into the server's loop
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)


def _read(r: _Running, channel: socket.socket) -> bool:
    """Pass on what a job says; False when it has ended."""
    more = os.read(r.pipe, 1 << 16)
    *lines, r.text = (r.text + more).split(b"\n")
    for line in lines:
        said = json.loads(line)
        if "progress" in said:
            _send(channel, {"key": r.job.key, **said})
        else:
            r.result = said
    return bool(more)


def _finish(r: _Running, channel: socket.socket) -> None:
    os.close(r.pipe)
    _kill_group(r.pid)  # what the job started and left behind
    _, status = os.waitpid(r.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if r.result is not None:
        said = r.result
    elif r.killed is not None:
        said = r.killed
    elif code < 0:
        name = _signal_name(-code)
        hint = ": the system may have run out of memory" if name == "SIGKILL" else ""
        said = {"ended": "killed", "why": f"its process was killed by {name}{hint}"}
    else:
        said = {"ended": "killed", "why": f"its process ended by itself with status {code} before it returned"}
    _send(channel, {"key": r.job.key, "elapsed": time.monotonic() - r.started, **said})


def _end_orphans(own: set[int], running: Iterable[_Running]) -> None:
    """End what jobs that are over have left behind in sessions of their own: it is this process's child by now."""
    known = own | {r.pid for r in running}
    while left := [pid for pid in children(os.getpid()) if pid not in known]:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal, which has no name of its own


def _limit(running: Any) -> None:
    """Kill what is over its time or its memory."""
    for r in running:
        if r.killed is not None:
            continue
        elapsed = time.monotonic() - r.started
        if elapsed > r.job.minutes * 60:
            r.killed = {"ended": "timeout", "why": f"it took longer than its limit of {_minutes(r.job.minutes)}"}
        elif resident(r.pid) > r.job.memory_gib * 2**30:
            r.killed = {"ended": "memory", "why": f"it took more than its limit of {r.job.memory_gib:g} GiB of memory"}
        if r.killed is not None:
            _kill(r.pid)


def _minutes(minutes: float) -> str:
    return f"{minutes:g} min" if minutes >= 1 else f"{minutes * 60:g} s"


def resident(pid: int) -> int:
    """Resident bytes of a process and all that it started; 0 when it has ended."""
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-o", "rss=", "-g", str(pid)], capture_output=True, text=True, check=False)
        return sum(int(line) for line in listed.stdout.split()) * 1024
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * _PAGE
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended between two looks
        todo += children(one)
    return total


def children(pid: int) -> list[int]:
    """The processes that a process is the parent of, ended ones included (Linux; elsewhere none are told)."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # it, or one of its threads, ended between two looks
    return found


def _kill(pid: int) -> None:
    _kill_group(pid)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it has not made its group yet, or nothing of it is left


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Serve, or (``--job``) run the one job that a fresh interpreter was started for."""
    if arguments[0] == "--job":
        given, write, parent = (int(a) for a in arguments[1:])
        with os.fdopen(given) as file:
            message = json.load(file)
        _child(Job.from_json(message["run"]), message, write, parent)
    folder, descriptor, mode, parent_pid = arguments
    die_with_parent(int(parent_pid))
    with socket.socket(fileno=int(descriptor)) as channel:
        try:
            serve(Path(folder), channel, mode)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the check is gone, and the jobs go with this process
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
