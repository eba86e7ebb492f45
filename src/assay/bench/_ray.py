"""The Ray engine: the same jobs in the same kind of processes, on the workers of a cluster.

A Ray worker runs a job as this machine would: in a child of a fork server, with the job's threads and limits. The store
stays with the check, which writes what the workers send back. Where a worker sees the check's home (this machine, or a
shared disk) prepared folders and artifacts lie there; elsewhere they travel through Ray's object store.
"""

from __future__ import annotations

import io
import os
import secrets
import select
import shutil
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay._extras import extras
from assay.bench._home import artifacts_folder, home, log_path, prepared_folder
from assay.bench._local import Server, available_cores
from assay.bench._methods import METHODS
from assay.bench._plan import Job

# Where this is set, workers are taken to be on machines of their own: no home is shared with them. For tests.
_APART = "ASSAY_RAY_APART"


class RayEngine:
    """Jobs on a Ray cluster.

    Parameters
    ----------
    address
        Of a running cluster (``"ray://host:10001"``), where Assay must be installed as it is here; None starts one on
        this machine for the time of the check.
    workers
        Cores to use; by default all that the cluster has.

    Raises
    ------
    ImportError
        Where Ray is not installed.
    RuntimeError
        Where the cluster cannot be reached.
    """

    delivers = "pipe"

    def __init__(self, address: str | None, workers: int | None = None) -> None:
        with extras("ray"):
            import ray
        self._ray = ray
        self._started = not ray.is_initialized()
        if self._started:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            if address is None:
                # Its processes die with this one, and the dashboard would open a port for nothing.
                quiet |= {"num_cpus": workers or available_cores(), "include_dashboard": False}
            try:
                ray.init(address=address or "local", **quiet)
            except (ConnectionError, TimeoutError) as error:
                raise RuntimeError(
                    f"no Ray cluster answers at {address}: start one there, or use --engine ray"
                ) from error
        here = int(ray.cluster_resources().get("CPU", 1))
        self.cores = here if workers is None else min(workers, here)
        self._task = ray.remote(run_on_worker)
        self._running: dict[Any, str] = {}
        self._blobs: dict[str, Any] = {}
        self._derivations: Server | None = None
        # A worker that finds this file, with this word in it, shares the check's home.
        self._token = secrets.token_hex(16)
        self._marker = home() / f"ray-{self._token}"
        if _APART not in os.environ:
            self._marker.write_text(self._token)

    def start(self, job: Job, since: float) -> None:
        if job.kind == "derive":
            # It reads the store, which is here.
            if self._derivations is None or self._derivations.closed:
                self._derivations = Server(job.folder, job.threads)
            self._derivations.start(job, deliver="pipe", since=since)
            return
        if job.device == "cuda" and not self._ray.cluster_resources().get("GPU"):
            raise RuntimeError(f"the Ray cluster has no GPU, which {job.name} needs: leave it out with --only")
        needs = [(need.key, self._blob(prepared_folder(need.key))) for need in job.needs]
        inside = Path(job.folder).parent == METHODS
        study = None if inside else [self._blob(Path(job.folder))]
        options = {"num_cpus": job.threads, "num_gpus": 1 if job.device == "cuda" else 0, "max_retries": 0}
        reference = self._task.options(**options).remote(job.to_json(), str(home()), self._token, needs, study, since)
        self._running[reference] = job.key

    def _blob(self, folder: Path) -> Any:
        """A folder in Ray's object store, put there once."""
        if str(folder) not in self._blobs:
            self._blobs[str(folder)] = self._ray.put(pack_folder(folder))
        return self._blobs[str(folder)]

    def messages(self, timeout: float) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        if not self._running and (self._derivations is None or not self._derivations.jobs):
            time.sleep(timeout)
        server = self._derivations
        if server is not None and not server.closed and server.jobs:
            readable, _, _ = select.select([server], [], [], 0.0 if self._running else timeout)
            said += server.receive() if readable else []
            timeout = min(timeout, 0.05)
        if self._running and not said:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout)
            said += [self._heard(reference) for reference in ready]
        return said

    def _heard(self, reference: Any) -> dict[str, Any]:
        key = self._running.pop(reference)
        try:
            message, folder, log = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ImportError | RuntimeError) else error from None
        except self._ray.exceptions.RayError as error:
            return {"key": key, "ended": "killed", "why": f"its Ray worker ended: {str(error).splitlines()[0]}"}
        if folder is not None:
            kind, blob = folder
            unpack_folder(blob, prepared_folder(key) if kind == "prepare" else artifacts_folder(key))
        if log:
            log_path(key).parent.mkdir(parents=True, exist_ok=True)
            log_path(key).write_bytes(log)
        return dict(message)

    def close(self) -> None:
        self._marker.unlink(missing_ok=True)
        if self._derivations is not None:
            self._derivations.close()
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._blobs.clear()
        if self._started:
            self._ray.shutdown()
        for left in Path(tempfile.gettempdir()).glob(f"assay-ray-*-{self._token}"):
            shutil.rmtree(left, ignore_errors=True)


# On a worker ---------------------------------------------------------------------------------------------------------

_servers: dict[tuple[str, int, str], Server] = {}


def run_on_worker(
    described: dict[str, Any],
    home_: str,
    token: str,
    needs: list[tuple[str, Any]],
    study: list[Any] | None,
    since: float,
) -> tuple[dict[str, Any], tuple[str, bytes] | None, bytes]:
    """Run one job in a child of this Ray worker's fork server.

    Returns
    -------
    What the job said at its end; the folder that it left, with its kind, where the check cannot see it; and its log.

    Raises
    ------
    RuntimeError
        Where this worker has other code than the check.
    """
    job = Job.from_json(described)
    marker = Path(home_) / f"ray-{token}"
    shared = marker.is_file() and marker.read_text() == token
    place = home_ if shared else str(_scratch(token))
    os.environ["ASSAY_HOME"] = place
    if study is None:
        folder = METHODS / Path(job.folder).name
    elif shared and Path(job.folder).is_dir():
        folder = Path(job.folder)
    else:
        folder = Path(place) / "methods" / Path(job.folder).name
        if not folder.is_dir():
            unpack_folder(_fetched(study[0]), folder)
    job = replace(job, folder=str(folder))
    _check_code(job)
    if not shared:
        for key, blob in needs:
            if not prepared_folder(key).is_dir():
                unpack_folder(_fetched(blob), prepared_folder(key))
    for other in [at for at in _servers if at[2] != place]:
        _servers.pop(other).close()  # of a check that is over
    at = (job.folder, job.threads, place)
    if at not in _servers or _servers[at].closed:
        _servers[at] = Server(job.folder, job.threads)
    server = _servers[at]
    server.start(job, deliver="pipe", since=since)
    ended: list[dict[str, Any]] = []
    while not ended:
        ended = [message for message in server.receive() if "progress" not in message]
    if shared:
        return ended[0], None, b""
    left = prepared_folder(job.key) if job.kind == "prepare" else artifacts_folder(job.key)
    log = log_path(job.key).read_bytes() if log_path(job.key).is_file() else b""
    packed = (job.kind, pack_folder(left)) if left.is_dir() else None
    if job.kind != "prepare":
        shutil.rmtree(left, ignore_errors=True)
    return ended[0], packed, log


def _scratch(token: str) -> Path:
    """This worker's own home for one check; those of workers that have ended are removed."""
    mine = Path(tempfile.gettempdir()) / f"assay-ray-{os.getpid()}-{token}"
    if not mine.is_dir():
        for other in mine.parent.glob("assay-ray-*-*"):
            try:
                os.kill(int(other.name.split("-")[2]), 0)
            except ProcessLookupError:
                shutil.rmtree(other, ignore_errors=True)
            except PermissionError:
                pass  # another user's, and alive
        mine.mkdir()
    return mine


def _fetched(reference: Any) -> bytes:
    import ray

    found = ray.get(reference)
    assert isinstance(found, bytes)
    return found


def _check_code(job: Job) -> None:
    from assay.bench._fingerprint import fingerprints
    from assay.bench._outline import read_outline

    if fingerprints(read_outline(Path(job.folder))).get(job.name) != job.fingerprint:
        raise RuntimeError(
            f"a Ray worker has other code of {job.method} than this machine: install the same Assay on all nodes"
        )


def pack_folder(folder: Path) -> bytes:
    """A folder as the bytes of a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".", filter=lambda entry: None if "__pycache__" in entry.name else entry)
    return buffer.getvalue()


def unpack_folder(blob: bytes, folder: Path) -> None:
    """The folder that `pack_folder` packed: beside its place first, then renamed."""
    part = folder.with_name(f"{folder.name}.part-{os.getpid()}")
    part.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        archive.extractall(part, filter="data")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
