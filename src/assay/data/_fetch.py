"""From a name to what it names on this machine: the places of an asset in their order, a user's file, a hub model."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from assay._extras import extras
from assay.data import _cache
from assay.data._assets import Asset, DataPath, Hub, Package, Recipe, Shipped, Url, asset, assets, nearest
from assay.data._errors import DataError, MissingData, Offline, UnknownAsset
from assay.data._kinds import KINDS, has_file_ending, kind_of, named, wanted
from assay.data._packages import fetch_deb, fetch_npm, fetch_sdist, fetch_wheel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_KINDS = ("language model", "masked-diffusion model", "vision-language model", "diffusion pipeline")
_FILES = Path(__file__).parent / "files"


def fetch(name: str, *, progress: bool = True) -> Path:
    """An asset, ready on disk: found in one of its places, fetched or made where it must be.

    Parameters
    ----------
    name
        Of an asset.
    progress
        Say on standard error what is fetched.

    Returns
    -------
    The file or the folder. It is read by the loader of its kind, and is not to be changed.

    Raises
    ------
    UnknownAsset
        If no asset has this name.
    MissingData, Offline
        If it is nowhere on this machine and cannot be fetched.
    DataError
        If what was found is not what its digest says.
    """
    it = asset(name)
    if (path := found(it)) is not None:
        return path
    reasons = []
    for place in it.places:
        if isinstance(place, (Package, Hub, Url, Recipe)):
            try:
                return _fetch_from(place, it, progress)
            except Offline:
                raise
            except MissingData as error:
                reasons.append(str(error))
    raise MissingData("; ".join(reasons) if reasons else f"{it.name} is not on this machine: {it.missing or it.source}")


def found(it: Asset) -> Path | None:
    """Where an asset lies on this machine, or None; nothing is fetched.

    Raises
    ------
    DataError
        If a file of a folder of ``ASSAY_DATA_PATH``, or one of Assay's own, has the wrong digest.
    """
    for place in it.places:
        if isinstance(place, DataPath):
            for folder in _data_path():
                path = folder / place.relative
                if path.exists():
                    return _checked(it, path, "replace it, or take its folder out of ASSAY_DATA_PATH")
        elif isinstance(place, Shipped):
            return _checked(it, _FILES / place.file, "install Assay again")
    cached = cached_path(it)
    if not _good(it, cached):
        for place in it.places:
            if isinstance(place, Package) and place.client == "deb" and place.convert is None:
                installed = Path("/") / place.member
                if installed.exists() and _good(it, installed):
                    return installed
        return None
    return cached


def cached_path(it: Asset) -> Path:
    """Where the cache keeps an asset, whether it is there or not."""
    digest = f"-{it.sha256[:16]}" if it.sha256 else ""
    return _cache.cache() / "assets" / f"{it.name}{digest}-{it.version}{it.suffix}"


def clean(name: str | None = None) -> int:
    """Remove what the cache holds of an asset and of the packages that it came from; of everything, without a name.

    Returns
    -------
    Bytes freed.
    """
    if name is None:
        return _cache.clear()
    it = asset(name)
    freed = 0
    for path in (cached_path(it), *(_package_folder(place) for place in it.places if isinstance(place, Package))):
        if path.exists():
            freed += _cache.size_of(path)
            _cache.remove(path)
    return freed


@dataclass(frozen=True)
class Resolved:
    """What a name, a path or a hub id stands for. ``path`` fetches where it must; the rest is known without.

    Attributes
    ----------
    name
        As it was given.
    kind, licence
        ``licence`` is empty for what is the user's own.
    digest
        Of the content: the same name with another digest is other data.
    asset
        None for what is the user's own.
    """

    name: str
    kind: str
    digest: str
    licence: str
    asset: Asset | None = None
    own: Path | None = None

    @property
    def path(self) -> Path:
        """Where it lies on this machine."""
        return self.own if self.own is not None else fetch(self.name)


def resolve(name_or_path: str | Path, kind: str | None = None) -> Resolved:
    """What an input names: an asset, else a path of the user's, else a model of the hub.

    Parameters
    ----------
    name_or_path
        An asset's name wins over a file of the same name in the working folder; write ``./house`` for the file.
    kind
        The kind that is expected, one of `KINDS`. Without it, the first kind that the file may be.

    Raises
    ------
    UnknownAsset
        If it is none of the three.
    DataError
        If it is of another kind than expected.
    """
    name = str(name_or_path)
    if not name.strip():
        raise DataError("the name of an input is empty: give an asset's name or a path")
    if kind is not None and kind not in KINDS:
        raise DataError(f"there is no kind {kind!r}: the kinds are {', '.join(KINDS)}")
    known = {it.name: it for it in assets()}.get(name)
    if known is not None:
        if kind is not None and kind != known.kind and not _also(known, kind):
            raise DataError(f"{name} is {named(known.kind)}, but {wanted(kind)}: give another asset or a path")
        return Resolved(name, kind or known.kind, known.digest, known.licence, asset=known)
    path = Path(name).expanduser()
    if path.exists():
        kinds = kind_of(path)
        if kind is None and not kinds:
            raise DataError(f"{path} is of no kind that Assay knows: {', '.join(KINDS)}")
        if kind is not None and kind not in kinds:
            looks = f"looks like {named(kinds[0])}" if kinds else "is not one that Assay recognises"
            raise DataError(f"{path} {looks}, but {wanted(kind)}: {KINDS[kind].describe}")
        path = path.absolute()
        return Resolved(name, kind or kinds[0], _cache.content_digest(path), "", own=path)
    if _HUB_ID.fullmatch(name) and not has_file_ending(name) and (kind is None or kind in _HUB_KINDS):
        path = hub(name)
        kinds = kind_of(path)
        if kind is not None and kind not in kinds:
            raise DataError(
                f"{name} is not {named(kind)}, it looks like {named(kinds[0]) if kinds else 'none of the kinds that Assay knows'}"
            )
        return Resolved(name, kind or (kinds or ["language model"])[0], f"hub-{path.name}", "", own=path)
    if kind in ("chat endpoint", "environment") and kind in kind_of(name):
        return Resolved(name, kind, name, "", own=Path(name))
    raise UnknownAsset(f"{name!r} is neither an asset nor a path that exists: {nearest(name)}")


def open_input(resolved: Resolved) -> Any:
    """An input, opened by the loader of its kind."""
    loader = KINDS[resolved.kind].loader
    if loader is None:
        raise DataError(
            f"Assay has no loader for {named(resolved.kind)} yet: open {resolved.name} with its own library"
        )
    return _function(loader)(resolved.path)


def hub(repo: str, revision: str | None = None) -> Path:
    """A model of the hub: its configuration, tokenizer and safetensors, in the hub's own cache."""
    with extras("lm"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    files = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files, local_files_only=_cache.offline()))
    except LocalEntryNotFoundError as error:
        if _cache.offline():
            raise Offline(
                f"the model {repo} is not on this machine and ASSAY_OFFLINE forbids to download it: unset it and run again"
            ) from error
        raise MissingData(
            f"there is no file {repo}, and the model hub could not be reached for a model of that name: "
            "check the path, or give a folder that holds the model"
        ) from error
    except RepositoryNotFoundError as error:
        raise UnknownAsset(
            f"{repo!r} is neither an asset, nor a path that exists, nor a public model of the hub: {nearest(repo)}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise MissingData(
            f"the model hub did not give {repo} ({type(error).__name__}): check the network, or give a folder that holds the model"
        ) from error


def _fetch_from(place: Package | Hub | Url | Recipe, it: Asset, progress: bool) -> Path:
    if isinstance(place, Hub):
        return hub(place.repo, place.revision)

    def make(target: Path) -> None:
        if isinstance(place, Url):
            _download(place, it, target, progress)
        elif isinstance(place, Recipe):
            parts = {part: fetch(part, progress=progress) for part in place.parts}
            if progress:
                print(f"Making {it.name}: {it.title}", file=sys.stderr)
            _function(place.function)(parts, target)
        else:
            try:
                _from_package(place, target, progress)
            except MissingData:
                raise
            except DataError:
                _cache.remove(
                    _package_folder(place)
                )  # it was changed after it was unpacked: the next run fetches it anew
                raise
        if not _good(it, target):
            if isinstance(place, Package):
                _cache.remove(_package_folder(place))
            raise DataError(
                f"{it.name} from {place} does not have the sha256 that Assay knows; it was removed, run again"
            )

    return _cache.made_once(cached_path(it), make, ready=functools.partial(_good, it))


def _from_package(place: Package, target: Path, progress: bool) -> None:
    source = _unpacked(place, progress) / place.member
    if not source.exists():
        raise DataError(f"the {place} has no {place.member}, which Assay expects in it; it was removed, run again")
    if place.convert is None:
        _copy(source, target)
    else:
        _function(place.convert)(source, target)


def _unpacked(place: Package, progress: bool) -> Path:
    if place.client == "deb":
        return fetch_deb(place.name, place.version, place.sha256, size=place.size, progress=progress)
    if place.client == "npm":
        assert place.version is not None
        return fetch_npm(place.name, place.version, place.sha256, size=place.size, progress=progress)
    assert place.version is not None
    assert place.sha256 is not None
    fetch_ = fetch_wheel if place.client == "wheel" else fetch_sdist
    return fetch_(place.name, place.version, place.sha256, size=place.size, progress=progress)


def _copy(source: Path, target: Path) -> None:
    """A hard link where the disk has them: the unpacked package and the asset then share their bytes."""
    import shutil

    if source.is_dir():
        shutil.copytree(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _download(place: Url, it: Asset, target: Path, progress: bool) -> None:
    """A file from its address. What a killed run left is continued, where the server gives a part of a file."""
    import urllib.error
    import urllib.request

    from tqdm import tqdm

    if _cache.offline():
        raise Offline(f"{it.name} is not in the cache and ASSAY_OFFLINE forbids to download it: unset it and run again")
    _cache.need_space(place.size, it.name)
    part = target.with_name(target.name + "-download")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(place.address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            have = have if answer.status == 206 else 0
            total = have + int(answer.headers.get("Content-Length") or 0)
            with (
                part.open("ab" if have else "wb") as file,
                tqdm(
                    total=total or None,
                    initial=have,
                    desc=it.name,
                    unit="B",
                    unit_scale=True,
                    disable=not (progress and sys.stderr.isatty()),
                ) as bar,
            ):
                while block := answer.read(2**18):
                    file.write(block)
                    bar.update(len(block))
    except urllib.error.HTTPError as error:
        part.unlink(
            missing_ok=True
        )  # 416 among them: the rest of a file that is already whole, or longer than it should be
        raise MissingData(f"the server of {it.name} answers {error.code} {error.reason}: run again later") from error
    except urllib.error.URLError as error:
        raise MissingData(
            f"the server of {it.name} could not be reached ({error.reason}): check the network, and run again"
        ) from error
    except (TimeoutError, ConnectionError) as error:
        raise MissingData(f"the download of {it.name} broke off ({error}): run again, it continues") from error
    if total and part.stat().st_size < total:
        raise MissingData(
            f"the download of {it.name} broke off after {part.stat().st_size:,} of {total:,} bytes: run again, it continues"
        )
    os.replace(part, target)


def _checked(it: Asset, path: Path, advice: str) -> Path:
    if not _good(it, path):
        raise DataError(
            f"{path} is not the {it.name} that Assay knows (another sha256, or a file is missing): {advice}"
        )
    return path


def _good(it: Asset, path: Path) -> bool:
    """Whether a file has the asset's digest, and a folder its files (and their set digest, unless it was converted)."""
    if it.files:
        files = [path / name for name in it.files]
        if not all(file.is_file() for file in files):
            return False
        converted = any(
            isinstance(place, Recipe) or (isinstance(place, Package) and place.convert) for place in it.places
        )
        return converted or it.sha256 is None or _set_digest(tuple(_stamp(file) for file in files)) == it.sha256
    return path.exists() and (it.sha256 is None or _sha256(_stamp(path)) == it.sha256)


# A digest is not computed twice in one process for a file that has not changed.
_Stamp = tuple[Path, int, int]


def _stamp(path: Path) -> _Stamp:
    about = path.stat()
    return path, about.st_size, about.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _sha256(stamp: _Stamp) -> str:
    return _cache.sha256(stamp[0])


@functools.lru_cache(maxsize=16)
def _set_digest(stamps: tuple[_Stamp, ...]) -> str:
    return _cache.set_digest(path for path, _, _ in stamps)


def _data_path() -> list[Path]:
    return [Path(part).expanduser() for part in os.environ.get("ASSAY_DATA_PATH", "").split(os.pathsep) if part]


def _function(text: str) -> Callable[..., Any]:
    module, _, name = text.partition(":")
    return getattr(import_module(module), name)


def _package_folder(place: Package) -> Path:
    from assay.data._packages import folder_of

    return folder_of(place.client, place.name, place.version, place.sha256)


def _also(it: Asset, kind: str) -> bool:
    """Texts are documents and the other way round; a table is nothing else."""
    return {it.kind, kind} == {"text", "documents"}


def describe(name: str) -> dict[str, Any]:
    """What `assay data show` tells of an asset: its fields, where it lies, how large it is there, or how to get it."""
    it = asset(name)
    path, missing = None, it.missing or f"assay data get {it.name}"
    try:
        path = found(it)
    except DataError as error:
        missing = str(error)
    return {
        "name": it.name,
        "title": it.title,
        "kind": it.kind,
        "licence": it.licence,
        "attribution": it.attribution,
        "sha256": it.sha256,
        "places": [str(place) for place in it.places],
        "path": path,
        "bytes": _cache.size_of(path) if path else None,
        "missing": None if path else missing,
    }
