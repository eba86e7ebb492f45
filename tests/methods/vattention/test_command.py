"""The command on a user's model and text: what it writes, what it says, what it refuses."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from assay._errors import InputError
from assay.lm._bytes import byte_llama_config, byte_tokenizer
from assay.methods.vattention import command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(byte_llama_config(num_hidden_layers=2, max_position_embeddings=1000)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("All work and no play makes Jack a dull boy.\n" * 20)
    return path


def test_it_leaves_a_report_a_picture_and_the_continuation(model, text, tmp_path, capsys):
    out = tmp_path / "a" / "out"
    command.decode(model=model, text=text, out=out, prompt="And?", max_new_tokens=5, audit=True, eps=0.3)
    said = capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {"report.json", "continuation.txt", "density.png"}
    report = json.loads((out / "report.json").read_text())
    assert report["tokens"] == 20 * 44 + 2 + 4
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    for layer in report["layers"]:
        assert layer["path"] == "kernel"
        assert all(0 < d <= 1 for d in layer["density"])
        assert all(0 <= e < 0.3 for e in layer["err"])
    assert report["continuation"]["sparse"] == (out / "continuation.txt").read_text()
    assert set(report["seconds_a_token"]) == {"dense", "sparse"}
    assert report["notes"] == []
    assert "of the keys, error" in said
    assert "dense continuation" in said
    assert (out / "density.png").read_bytes().startswith(b"\x89PNG")


def test_without_an_audit_there_is_no_error_and_the_seed_decides(model, text, tmp_path):
    reports = []
    for seed in (1, 1):
        command.decode(model=model, text=text, out=tmp_path / "out", max_new_tokens=3, seed=seed, eps=0.5)
        reports.append(json.loads((tmp_path / "out" / "report.json").read_text()))
    assert reports[0]["layers"] == reports[1]["layers"]
    assert reports[0]["continuation"] == reports[1]["continuation"]
    assert all(layer["err"] is None for layer in reports[0]["layers"])


def test_a_text_longer_than_the_model_is_cut_on_the_left_and_that_is_said(model, text, tmp_path, capsys):
    text.write_text("x" * 3000 + "the end")
    command.decode(model=model, text=text, out=tmp_path / "out", max_new_tokens=4)
    assert "3,007 tokens, the model 1,000 positions: the first 2,011 tokens were cut" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tokens"] == 996
    assert len(report["notes"]) == 1


def test_a_short_text_is_dense_and_that_is_said(model, text, tmp_path, capsys):
    text.write_text("a short text")
    command.decode(model=model, text=text, out=tmp_path / "out", max_new_tokens=4)
    said = capsys.readouterr().out
    assert "below 512 every step is dense" in said
    assert "the dense continuation is the same, all" in said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["density"] == 1
    assert report["first_difference"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 2.0}, "eps must lie between 0 and 1"),
        ({"delta": 0.0}, "delta must lie between 0 and 1"),
        ({"max_new_tokens": 1}, "must be at least 2"),
        ({"max_new_tokens": 1000}, "must be below 999"),
        ({"max_new_tokens": 999}, "must be below 999"),
        ({"model": "no-such-model"}, "no-such-model"),
    ],
)
def test_what_does_not_fit_is_refused(model, text, tmp_path, change, message):
    with pytest.raises((InputError, ValueError, OSError), match=message):
        command.decode(**{"model": model, "text": text, "out": tmp_path / "out", **change})
    assert not (tmp_path / "out").exists()


def test_a_text_of_one_token_is_refused(model, text, tmp_path):
    text.write_text("a")
    with pytest.raises(InputError, match="too short to continue"):
        command.decode(model=model, text=text, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is not a file"), (b" \n", "no text"), (b"\xff\xfe\x81", "UTF-8")]
)
def test_a_text_that_cannot_be_read_is_refused(model, tmp_path, content, message):
    text = tmp_path / "bad.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(InputError, match=message):
        command.decode(model=model, text=text, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_folder_is_kept(model, text, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="out is a file: --out names a folder"):
        command.decode(model=model, text=text, out=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_model_with_a_sliding_window_is_continued_twice_from_one_cache(tmp_path, text):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=byte_llama_config().vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=600, eos_token_id=None,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command.decode(model=str(tmp_path / "model"), text=text, out=tmp_path / "out", max_new_tokens=3, eps=1e-6)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tokens"] > 600
    assert report["density"] == 1
    assert report["first_difference"] is None
