"""The kinds of input: how each is recognised by its name and first bytes, what it is, and what opens it.

Nothing heavy is imported and no file is read further than its first bytes.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_HEAD = 2**16  # bytes that are looked at
_HDF_HEAD = 2**21  # the names of an HDF5 file's groups lie further in
_LISTED = 200  # files of a folder that are looked at


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes
    ----------
    name
        As a card's ``takes`` and a study's assets have it.
    loader
        ``module:function`` that opens it, given its path; None where no method of Assay reads it yet.
    describe
        What it is, for an error's sentence.
    recognises
        Whether a path looks like it.
    """

    name: str
    loader: str | None
    describe: str
    recognises: Callable[[Path], bool]


def kind_of(path: str | Path) -> list[str]:
    """The kinds that a path may be, the likeliest first; empty where none fits.

    A hub id (``owner/name``), an endpoint's address and an environment's id are recognised by their form alone.
    """
    look = _Look(str(path))
    return [name for name, recognises in _RULES.items() if recognises(look)]


class _Look:
    """What can be told of a path by its name, its first bytes and, for a folder, the names in it."""

    def __init__(self, given: str) -> None:
        self.given = given
        self.path = Path(given).expanduser()
        self.is_file = self.path.is_file()
        self.is_folder = self.path.is_dir()

    def ends(self, *endings: str) -> bool:
        """A file (or a folder with such files) whose name has one of the endings."""
        if self.is_folder:
            return any(name.endswith(endings) for name in self.names)
        return self.is_file and self.path.name.lower().endswith(endings)

    @cached_property
    def names(self) -> list[str]:
        if not self.is_folder:
            return []
        found = []
        for entry in self.path.rglob("*"):
            if entry.is_file():
                found.append(entry.relative_to(self.path).as_posix().lower())
            if len(found) == _LISTED:
                break
        return found

    @cached_property
    def head(self) -> bytes:
        if not self.is_file:
            return b""
        try:
            if self.path.suffix == ".gz":
                with gzip.open(self.path) as file:
                    return file.read(_HEAD)
            if self.path.suffix == ".xz":
                with lzma.open(self.path) as file:
                    return file.read(_HEAD)
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError):
            return b""
        with self.path.open("rb") as file:
            return file.read(_HEAD)

    @cached_property
    def stem(self) -> str:
        """The name in lower case, without the ending of a compression."""
        return re.sub(r"\.(gz|xz|bz2)$", "", self.path.name.lower())

    @cached_property
    def text(self) -> str | None:
        """The first bytes as text, or None."""
        if not self.head or b"\0" in self.head:
            return None
        try:
            return self.head.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            cut = error.start >= len(self.head) - 4 and len(self.head) == _HEAD
            return self.head[: error.start].decode("utf-8-sig") if cut else None

    @cached_property
    def arrays(self) -> set[str]:
        """Names of the arrays of an ``.npz`` file, in lower case."""
        if not (self.is_file and self.path.suffix == ".npz"):
            return set()
        try:
            with zipfile.ZipFile(self.path) as file:
                return {name.removesuffix(".npy").lower() for name in file.namelist()}
        except zipfile.BadZipFile:
            return set()

    @cached_property
    def hdf(self) -> bytes:
        """The first bytes of an HDF5 file, where the names of its groups stand; empty for any other file."""
        if not self.head.startswith(b"\x89HDF"):
            return b""
        with self.path.open("rb") as file:
            return file.read(_HDF_HEAD)

    def groups(self, *names: str) -> bool:
        """Whether an HDF5 file has all of these names."""
        return bool(self.hdf) and all(
            re.search(rb"(?<![\w])" + name.encode() + rb"(?![\w])", self.hdf) for name in names
        )

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of a folder; empty where there is none."""
        file = self.path / name
        if not (self.is_folder and file.is_file()):
            return {}
        try:
            held = json.loads(file.read_text("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return {}
        return held if isinstance(held, dict) else {}

    @cached_property
    def architecture(self) -> str:
        """The first architecture of a transformers folder."""
        return next(iter(self.json("config.json").get("architectures") or []), "")

    @cached_property
    def record(self) -> dict[str, Any]:
        """The first record of a JSONL file, or of a JSON file that holds a list of records."""
        if self.text is None or not self.stem.endswith((".jsonl", ".ndjson", ".json")):
            return {}
        if self.stem.endswith(".json"):
            start = self.text.find("{") if self.text.lstrip().startswith("[") else -1
            if start < 0:
                return {}
            source = self.text[start:]
        else:
            source = self.text.lstrip()
        try:
            held, _ = json.JSONDecoder().raw_decode(source)
        except json.JSONDecodeError:
            return {}
        return held if isinstance(held, dict) else {}


def _language_model(look: _Look) -> bool:
    if look.head.startswith(b"GGUF"):
        return True
    if look.json("config.json").get("vision_config"):
        return False
    return "ForCausalLM" in look.architecture or "LMHeadModel" in look.architecture or _hub_id(look)


def _masked_diffusion(look: _Look) -> bool:
    family = str(look.json("config.json").get("model_type", "")).lower()
    diffuses = any(word in family for word in ("llada", "dream", "mdlm", "sedd", "diffu", "sdar"))
    return diffuses or "ForMaskedLM" in look.architecture or "LLaDA" in look.architecture or _hub_id(look)


def _vision_language(look: _Look) -> bool:
    config = look.json("config.json")
    return (
        bool(config.get("vision_config") and config.get("text_config"))
        or "Vision2Seq" in look.architecture
        or _hub_id(look)
    )


def _pipeline(look: _Look) -> bool:
    return bool(look.json("model_index.json").get("_class_name")) or _hub_id(look)


def _hub_id(look: _Look) -> bool:
    form = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", look.given)
    return (
        bool(form)
        and not look.path.exists()
        and not re.search(r"-v\d+$", look.given)
        and not has_file_ending(look.given)
    )


def has_file_ending(name: str) -> bool:
    """Whether a name ends like a data file, so that ``folder/name.csv`` is a path and not a model of the hub."""
    return re.sub(r"\.(gz|xz|bz2)$", "", name.lower()).endswith(_ENDINGS)


_TABLE = (".csv", ".tsv", ".parquet", ".pq")
_TEXT = (".txt", ".md", ".rst", ".tex")
_CLOUD = (".ply", ".obj", ".off", ".xyz", ".pcd", ".stl", ".glb", ".gltf", ".pts", ".wrl")
_IMAGE = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_VIDEO = (".mp4", ".avi", ".mkv", ".webm", ".mov", ".m4v")
_EEG = (".edf", ".bdf", ".gdf", ".set", ".fif", ".vhdr", ".cnt")
_EVENTS = (".aedat", ".aedat4", ".raw", ".es", ".evt")
_LISTS = (".jsonl", ".ndjson", ".json", ".npz", ".npy", ".h5", ".hdf5", ".h5ad", ".nc", ".gguf", ".tsp", ".vrp", ".bvh")
_ENDINGS = _TABLE + _TEXT + _CLOUD + _IMAGE + _VIDEO + _EEG + _EVENTS + _LISTS


def _table(look: _Look) -> bool:
    if not look.is_file:
        return False
    if look.head.startswith(b"PAR1"):
        return True
    if look.path.suffix == ".bz2":
        return look.stem.endswith(_TABLE[:2])
    return look.stem.endswith(_TABLE[:2]) and look.text is not None


def _routes(look: _Look) -> bool:
    if look.is_file and look.stem.endswith((".tsp", ".vrp", ".sop", ".atsp")):
        return True
    text = look.text or ""
    if look.is_folder:
        texts = [name for name in look.names if name.endswith((".tsp", ".vrp", ".txt"))]
        return any(_routes(_Look(str(look.path / name))) for name in texts[:3])
    return bool(re.search(r"^\s*DIMENSION\s*:", text, re.M) or re.search(r"CUST\s*NO\.?.*(READY|DUE)", text))


def _text(look: _Look) -> bool:
    """Any file that is text and has no ending of another kind: prose, logs, source code."""
    other = has_file_ending(look.path.name) and not look.stem.endswith(_TEXT)
    return look.is_file and not other and look.text is not None and not _routes(look)


def _documents(look: _Look) -> bool:
    if look.is_folder:
        return any(name.endswith(".txt") for name in look.names) and not _routes(look)
    return _text(look) or isinstance(look.record.get("text"), str)


def _prompts(look: _Look) -> bool:
    return any(name in look.record for name in ("prompt", "question", "messages", "instruction", "problem", "input"))


def _cells(look: _Look) -> bool:
    if look.is_folder:
        return any(name.rpartition("/")[2].startswith("matrix.mtx") for name in look.names)
    if look.stem.endswith(".h5ad"):
        return bool(look.hdf)
    tenx = look.groups("barcodes") or look.groups("matrix", "features")
    return look.path.suffix == ".h5" and bool(look.hdf) and (tenx or look.groups("obs", "var") or look.groups("X", "Y"))


def _eeg(look: _Look) -> bool:
    return look.ends(*_EEG) or {"x", "channels", "fs"} <= look.arrays or {"x", "sfreq"} <= look.arrays


def _pde(look: _Look) -> bool:
    if look.is_file and look.stem.endswith(".nc"):
        return look.head.startswith((b"CDF", b"\x89HDF"))
    fields = look.groups("tensor") or look.groups("x-coordinate") or look.groups("nu") or look.groups("velocity")
    return (bool(look.hdf) and fields and not _cells(look)) or {"u", "t"} <= look.arrays


def _clouds(look: _Look) -> bool:
    by_array = bool(look.arrays & {"points", "xyz", "vertices"}) or any(name.endswith("/v") for name in look.arrays)
    return look.ends(*_CLOUD) or by_array


def _motion(look: _Look) -> bool:
    poses = {"poses", "trans"} <= look.arrays or any(name.endswith("/quat") for name in look.arrays)
    return look.ends(".bvh", ".amc") or poses or (look.text is not None and '"Frames"' in look.text)


def _images(look: _Look) -> bool:
    pictures = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
    if look.is_file:
        return look.head.startswith(pictures) or (look.head[:4] == b"RIFF" and look.head[8:12] == b"WEBP")
    return look.ends(*_IMAGE) and not look.json("model_index.json")


def _video(look: _Look) -> bool:
    if look.is_file:
        riff = look.head[:4] == b"RIFF" and look.head[8:12] == b"AVI "
        return look.head[4:8] == b"ftyp" or look.head.startswith(b"\x1aE\xdf\xa3") or riff
    return look.ends(*_VIDEO)


def _events(look: _Look) -> bool:
    polar = {"x", "y", "t", "p"} <= look.arrays or {"x", "y", "ts", "p"} <= look.arrays
    return look.ends(*_EVENTS) or polar or look.groups("events", "x", "y", "p")


def _transitions(look: _Look) -> bool:
    steps = bool(look.arrays & {"observations", "states"}) and "actions" in look.arrays
    return (
        steps or look.groups("observations", "actions") or any(name.endswith("main_data.hdf5") for name in look.names)
    )


def _environment(look: _Look) -> bool:
    return not look.path.exists() and bool(re.fullmatch(r"(?:[\w.-]+/)?[A-Za-z][\w-]*-v\d+", look.given))


def _endpoint(look: _Look) -> bool:
    return look.given.startswith(("http://", "https://"))


def _votes(look: _Look) -> bool:
    if look.is_folder:
        tables = [name for name in look.names if name.endswith(".npz")]
        return (
            len(tables) == 1
            and _votes(_Look(str(look.path / tables[0])))
            and any(n.endswith(".npy") for n in look.names)
        )
    return {"counts", "labels"} <= look.arrays


_ALL: tuple[tuple[str, str | None, str, Callable[[_Look], bool]], ...] = (
    ("language model", "assay.lm:load", "a transformers folder, a GGUF file or a hub id", _language_model),
    (
        "masked-diffusion model",
        "assay.testbeds._open:open_model",
        "a transformers folder of a masked language model, or a hub id",
        _masked_diffusion,
    ),
    (
        "vision-language model",
        None,
        "a transformers folder with a vision and a text part, or a hub id",
        _vision_language,
    ),
    ("diffusion pipeline", None, "a diffusers folder (model_index.json), or a hub id", _pipeline),
    (
        "documents",
        "assay.data:read_documents",
        "a .txt file, a folder of .txt files, or JSONL lines with a text",
        _documents,
    ),
    ("text", "assay.data:read_text", "a UTF-8 text file", _text),
    ("prompts", "assay.data:read_prompts", "a JSONL file whose lines have a prompt, a question or messages", _prompts),
    ("table", "assay.data:read_table", "a CSV, TSV or Parquet file", _table),
    ("votes", "assay.data:read_votes", "an .npz with counts and labels, beside an .npy with features", _votes),
    ("cells", None, "an .h5ad file, or the .h5 file or matrix folder of 10x", _cells),
    ("EEG", None, "a recording (EDF, BDF, FIF, BrainVision, EEGLAB) or a folder of them", _eeg),
    ("PDE fields", None, "an HDF5 or NetCDF file of fields over space and time", _pde),
    ("routes", None, "a TSPLIB or VRP file, or an instance with time windows", _routes),
    ("point clouds and meshes", None, "PLY, OBJ, OFF, STL, glTF, PCD or XYZ files", _clouds),
    ("motion", None, "BVH files, or an .npz with poses and trans", _motion),
    ("images", None, "an image file, or a folder of them", _images),
    ("video", None, "a video file, or a folder of them", _video),
    ("events", None, "a recording of an event camera", _events),
    ("transitions", None, "an offline data set with observations and actions (HDF5, npz, Minari)", _transitions),
    ("environment", None, "the id of a Gymnasium environment, as CartPole-v1", _environment),
    ("chat endpoint", None, "the http address of a chat-completions endpoint", _endpoint),
)

_RULES = {name: rule for name, _, _, rule in _ALL}


def _recogniser(rule: Callable[[_Look], bool]) -> Callable[[Path], bool]:
    return lambda path: rule(_Look(str(path)))


KINDS: dict[str, Kind] = {
    name: Kind(name, loader, describe, _recogniser(rule)) for name, loader, describe, rule in _ALL
}


_MANY = ("documents", "prompts", "cells", "PDE fields", "routes", "images", "events", "votes", "transitions")


def named(kind: str) -> str:
    """A kind with its article, for a sentence."""
    if kind in (*_MANY, "text", "EEG", "motion", "video", "point clouds and meshes"):
        return kind
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def wanted(kind: str) -> str:
    """That a kind is expected, for a sentence."""
    return f"{named(kind)} {'are' if kind in _MANY else 'is'} expected"
