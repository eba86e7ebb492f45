"""A kind is told by the name and the first bytes; what is something else is not taken for it."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from assay.data import KINDS, kind_of
from assay.data._kinds import named, wanted


def make(path: Path, content: bytes | str | dict | list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, (dict, list)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
FILES = {
    "a.gguf": (b"GGUF\x03\0\0\0", ["language model"]),
    "renamed.bin": (b"GGUF\x03\0\0\0", ["language model"]),
    "a.txt": ("It was a dark night.\n", ["documents", "text"]),
    "notes.md": ("# Title\n", ["documents", "text"]),
    "code.py": ("print(1)\n", ["documents", "text"]),
    "README": ("read me\n", ["documents", "text"]),
    "german.txt": ("Grüße\n".encode("latin-1"), []),
    "a.jsonl": ('{"prompt": "Who?"}\n', ["prompts"]),
    "gsm.jsonl": ('{"question": "2+2?", "answer": "4"}\n', ["prompts"]),
    "gsm.jsonl.gz": (gzip.compress(b'{"question": "2+2?"}\n'), ["prompts"]),
    "list.json": ([{"prompt": "Who?"}], ["prompts"]),
    "docs.jsonl": ('{"id": "a", "text": "long"}\n', ["documents"]),
    "long.jsonl": (json.dumps({"text": "x" * 50_000}) + "\n", ["documents"]),
    "a.csv": ("x,y\n1,2\n", ["table"]),
    "a.tsv": ("x\ty\n1\t2\n", ["table"]),
    "a.csv.gz": (gzip.compress(b"x,y\n1,2\n"), ["table"]),
    "a.parquet": (b"PAR1....", ["table"]),
    "fake.csv": (PNG, ["images"]),
    "a.h5ad": (b"\x89HDF\r\n\x1a\n" + b"\0" * 64 + b"obs\0var\0", ["cells"]),
    "tenx.h5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 64 + b"matrix\0barcodes\0features\0", ["cells"]),
    "burgers.h5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 64 + b"tensor\0x-coordinate\0t-coordinate\0", ["PDE fields"]),
    "climate.nc": (b"CDF\x01", ["PDE fields"]),
    "d4rl.hdf5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 64 + b"observations\0actions\0rewards\0", ["transitions"]),
    "a.edf": (b"0       X", ["EEG"]),
    "d493.tsp": ("NAME : d493\nDIMENSION : 493\n", ["routes"]),
    "n20.txt": ("!! n20w20\nCUST NO.   XCOORD.  READY TIME   DUE DATE\n 1 1 1 0 5\n", ["routes"]),
    "a.ply": (b"ply\nformat ascii 1.0\n", ["point clouds and meshes"]),
    "a.bvh": ("HIERARCHY\n", ["motion"]),
    "a.png": (PNG, ["images"]),
    "a.mp4": (b"\0\0\0\x20ftypisom", ["video"]),
    "a.avi": (b"RIFF\0\0\0\0AVI ", ["video"]),
    "a.aedat4": (b"#!AER-DAT4.0\r\n", ["events"]),
    "empty.txt": (b"", []),
    "noise.bin": (b"\0\1\2\3", []),
}


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str):
    content, kinds = FILES[name]
    assert kind_of(make(tmp_path / name, content)) == kinds


ARRAYS = {
    "motion": ("poses", "trans"),
    "transitions": ("observations", "actions", "rewards"),
    "events": ("x", "y", "t", "p"),
    "point clouds and meshes": ("points", "normals"),
    "EEG": ("x", "channels", "fs"),
    "votes": ("counts", "labels"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_told_by_their_names(tmp_path: Path, kind: str):
    np.savez(tmp_path / "a.npz", **dict.fromkeys(ARRAYS[kind], np.zeros(1)))
    assert kind_of(tmp_path / "a.npz") == [kind]


FOLDERS = {
    "llama": ({"config.json": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}}, ["language model"]),
    "gpt2": ({"config.json": {"architectures": ["GPT2LMHeadModel"]}}, ["language model"]),
    "bert": ({"config.json": {"architectures": ["BertForMaskedLM"]}}, ["masked-diffusion model"]),
    "encoder": ({"config.json": {"architectures": ["BertModel"]}}, []),
    "llada": ({"config.json": {"architectures": ["LLaDAModelLM"], "model_type": "llada"}}, ["masked-diffusion model"]),
    "llava": (
        {
            "config.json": {
                "architectures": ["LlavaForConditionalGeneration"],
                "vision_config": {"a": 1},
                "text_config": {"a": 1},
            }
        },
        ["vision-language model"],
    ),
    "sd": ({"model_index.json": {"_class_name": "StableDiffusionPipeline"}, "card.png": PNG}, ["diffusion pipeline"]),
    "texts": ({"a.txt": "one", "b/c.txt": "two"}, ["documents"]),
    "tenx": ({"matrix.mtx.gz": b"", "barcodes.tsv.gz": b""}, ["cells"]),
    "pictures": ({"cat/1.png": PNG, "dog/1.jpg": b"\xff\xd8\xff"}, ["images"]),
    "meshes": ({"chair.obj": "v 0 0 0\n"}, ["point clouds and meshes"]),
    "clips": ({"a.mp4": b"\0\0\0\x20ftyp"}, ["video"]),
    "bids": ({"sub-01/eeg/a.edf": b"0"}, ["EEG"]),
    "minari": ({"data/main_data.hdf5": b"\x89HDF\r\n\x1a\n"}, ["transitions"]),
    "instances": ({"n20.txt": "DIMENSION : 20\n"}, ["routes"]),
    "empty": ({"nothing.xyzzy": b"\0"}, []),
    "broken": ({"config.json": "{"}, []),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(tmp_path: Path, name: str):
    files, kinds = FOLDERS[name]
    for path, content in files.items():
        make(tmp_path / name / path, content)
    assert kind_of(tmp_path / name) == kinds


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (
            "Qwen/Qwen2.5-0.5B",
            ["language model", "masked-diffusion model", "vision-language model", "diffusion pipeline"],
        ),
        ("http://localhost:8000/v1", ["chat endpoint"]),
        ("CartPole-v1", ["environment"]),
        ("BabyAI/Go-v0", ["environment"]),
        ("folder/missing.csv", []),
        ("missing.txt", []),
    ],
)
def test_names_that_are_no_path(given: str, kinds: list[str]):
    assert kind_of(given) == kinds


def test_a_kind_recognises_what_kind_of_tells(tmp_path: Path):
    file = make(tmp_path / "a.csv", "x,y\n1,2\n")
    assert [name for name, kind in KINDS.items() if kind.recognises(file)] == ["table"]


def test_loaders_exist_where_they_are_named():
    from importlib import import_module

    for kind in KINDS.values():
        if kind.loader and not kind.loader.startswith("assay.lm"):
            module, _, name = kind.loader.partition(":")
            assert callable(getattr(import_module(module), name))


def test_kinds_read_well_in_a_sentence():
    assert named("table") == "a table"
    assert named("environment") == "an environment"
    assert wanted("documents") == "documents are expected"
    assert wanted("text") == "text is expected"


def test_a_broken_archive_is_no_kind(tmp_path: Path):
    make(tmp_path / "a.npz", b"PK\x03\x04 cut")
    make(tmp_path / "a.csv.gz", b"\x1f\x8b cut")
    assert kind_of(tmp_path / "a.npz") == []
    assert kind_of(tmp_path / "a.csv.gz") == []
    with zipfile.ZipFile(tmp_path / "b.npz", "w"):
        pass
    assert kind_of(tmp_path / "b.npz") == []
