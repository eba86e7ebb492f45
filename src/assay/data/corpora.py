"""English texts, as documents: Brown, State of the Union, Moby-Dick, Shakespeare, and any text of the user's.

A corpus is a list of documents with lasting ids, and is split by document, so that a text is never on both sides.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from assay.data._assets import asset
from assay.data._cache import set_digest
from assay.data._errors import DataError


class Document(NamedTuple):
    """One text and its lasting id, as ``shakespeare/hamlet``."""

    id: str
    text: str


def corpus(name: str) -> list[Document]:
    """The documents of a corpus that Assay knows: brown, sotu, moby-dick, shakespeare, or english (all four).

    Sorted by id, numbers by their value (``chapter_2`` before ``chapter_10``). Fetched on the first call.
    """
    from assay.data._fetch import fetch

    if asset(name).kind != "documents":
        raise DataError(f"{name} is not a corpus but a {asset(name).kind}: use assay.data.fetch")
    return read_documents(fetch(name))


def split(documents: Sequence[Document]) -> dict[str, list[Document]]:
    """Training, validation and test documents, by the hash of the id: 90, 5 and 5 of a hundred.

    ``int(sha256(id)) mod 100`` is below 5 for a test document, below 10 for validation. A document stays whole and the
    split does not depend on the others or on their order.

    Where that leaves a part empty (one long text of the user's), each document is cut at line ends instead: its first
    90 % of characters for training, then 5 % for validation and 5 % for test, with ids ``id#train`` and so on.

    Returns
    -------
    ``{"train": [...], "validation": [...], "test": [...]}``

    Raises
    ------
    DataError
        If the text is too short to be cut.
    """
    parts: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        place = int(hashlib.sha256(document.id.encode()).hexdigest(), 16) % 100
        parts["test" if place < 5 else "validation" if place < 10 else "train"].append(document)
    if all(parts.values()):
        return parts
    parts = {"train": [], "validation": [], "test": []}
    for document in documents:
        text, start = document.text, 0
        for part, share in (("train", 0.9), ("validation", 0.95), ("test", 1.0)):
            end = _line_end(text, int(share * len(text)), start)
            if end > start:
                parts[part].append(Document(f"{document.id}#{part}", text[start:end]))
            start = end
    if not all(parts.values()):
        size = sum(len(document.text) for document in documents)
        raise DataError(f"a text of {size} characters is too short to be split: give a longer one, or more documents")
    return parts


def _line_end(text: str, near: int, start: int) -> int:
    """The first line end at or after a place; the next space where the line is long; the place itself where neither is near."""
    for mark in ("\n", " "):
        end = text.find(mark, near, near + len(text) // 50)
        if end >= start and end >= 0:
            return end + 1
    return max(near, start)


def read_text(path: str | Path) -> str:
    """A text file, as it is: UTF-8, with or without a byte order mark; line ends become LF.

    Raises
    ------
    DataError
        If there is no such file, it is empty, or it is not UTF-8.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} is not a file: give a text file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}): convert it, "
            "for example `iconv -f ISO-8859-1 -t UTF-8`"
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DataError(f"{path} holds no text: give a text file that is not empty")
    return text


def read_documents(path: str | Path) -> list[Document]:
    """Documents of the user's: a text file, a folder of ``.txt`` files, or a JSONL file whose lines have a ``text``.

    A text file is one document, named by its stem. In a folder, read through, an id is the path without ``.txt``. A JSONL
    line may have an ``id``; without one it is the file's stem and the line number. Sorted by id, numbers by their value.
    """
    path = Path(path)
    if path.is_dir():
        files = [file for file in path.rglob("*.txt") if file.is_file()]
        if not files:
            raise DataError(f"the folder {path} has no .txt file: give a folder of texts, a .txt file or a JSONL file")
        documents = [Document(file.relative_to(path).with_suffix("").as_posix(), read_text(file)) for file in files]
    elif path.suffix in (".jsonl", ".ndjson"):
        documents = list(_lines(path))
    else:
        documents = [Document(path.stem, read_text(path))]
    seen: set[str] = set()
    for document in documents:
        if document.id in seen:
            raise DataError(
                f"{path} has two documents with the id {document.id!r}: make the ids differ, or leave them out"
            )
        seen.add(document.id)
    return sorted(documents, key=_natural)


def _lines(path: Path) -> Iterable[Document]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path} line {number} is not JSON ({error.msg}): one JSON object a line is expected"
            ) from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataError(f'{path} line {number} has no text: each line must be an object like {{"text": "..."}}')
        yield Document(str(record.get("id", f"{path.stem}/{number}")), record["text"])


def untag(tagged: str) -> str:
    """Plain text of a tagged Brown sample: ``The/at jury/nn`` is ``The jury``.

    A line is a sentence or a heading. Of each token the part after the last ``/`` is its tag; empty lines are dropped.
    """
    sentences = (" ".join(token.rpartition("/")[0] for token in line.split()) for line in tagged.split("\n"))
    return "\n".join(sentence for sentence in sentences if sentence)


# How each corpus is made of its package: convert(source folder, target file).

_BROWN_SET = "57dc3479394be411ae6c947ed776602785625c5e78b7190f2ae27d9dc503aea1"
_SOTU_SET = "14a7e1f951ceec8d97fc3a8b1b4f94bd05f838d86feb03a9e10c4073ae82649e"
_MOBY_SET = "6af9d5ab560afe14ebe6026b5d5a77b99fc5ee893e165cbf21dfdd18881fa075"
_SHAKESPEARE_SET = "0c9a6ed97877ad6b8dafc2601d386105915f4af5d563c4a825279ef55f0441d1"


def brown(source: Path, target: Path) -> None:
    """The 500 samples of the Brown corpus, untagged."""
    files = [file for file in source.iterdir() if re.fullmatch(r"c[a-r]\d\d", file.name)]
    _check(files, 500, _BROWN_SET)
    _write(target, [Document(f"brown/{file.name}", untag(file.read_text("utf-8"))) for file in files])


def sotu(source: Path, target: Path) -> None:
    """The 233 State of the Union addresses."""
    files = list(source.glob("*.txt"))
    _check(files, 233, _SOTU_SET)
    _write(target, [Document(f"sotu/{file.stem}", file.read_text("utf-8")) for file in files])


def moby_dick(source: Path, target: Path) -> None:
    """The 135 chapters of Moby-Dick."""
    files = list(source.glob("chapter_*.txt"))
    _check(files, 135, _MOBY_SET)
    _write(target, [Document(f"moby/{file.stem}", file.read_text("utf-8")) for file in files])


def shakespeare(source: Path, target: Path) -> None:
    """The 42 plays and poems in modern spelling; the First Folio files are the same plays once more, and are left out."""
    files = list(source.glob("*_gut.txt"))
    _check(files, 42, _SHAKESPEARE_SET)
    _write(
        target, [Document(f"shakespeare/{file.stem.removesuffix('_gut')}", file.read_text("utf-8")) for file in files]
    )


def together(parts: Mapping[str, Path], target: Path) -> None:
    """Several corpora as one."""
    _write(target, [document for path in parts.values() for document in read_documents(path)])


def _check(files: Sequence[Path], count: int, digest: str) -> None:
    if len(files) != count or set_digest(files) != digest:
        raise DataError(
            f"the package holds {len(files)} texts that are not the {count} that Assay knows; it was removed, run again"
        )


def _write(target: Path, documents: list[Document]) -> None:
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for document in sorted(documents, key=_natural):
            file.write(json.dumps({"id": document.id, "text": document.text}, ensure_ascii=False) + "\n")


def _natural(document: Document) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", document.id)]
