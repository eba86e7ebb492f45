"""The command on a user's model and text: what it leaves, what it says, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from assay._errors import InputError
from assay.lm import load, perplexity
from assay.lm._bytes import byte_llama_config, byte_tokenizer
from assay.methods.saes_svd import command

SMALL = {"samples": 8, "length": 32, "batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(byte_llama_config(num_hidden_layers=2, max_position_embeddings=400)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "calibration.txt"
    path.write_text("".join(f"Line {i}: all work and no play makes Jack a dull boy.\n" for i in range(60)))
    return path


def test_it_leaves_a_model_that_opens_and_a_report(model, text, tmp_path, capsys):
    out = tmp_path / "smaller"
    command.compress(model=model, text=text, out=out, ratio=0.3, **SMALL)
    said = capsys.readouterr().out
    for words in ("perplexity (held-out text)", "weights, MB", "one token written, ms", f"saved: {out}"):
        assert words in said
    opened = load(out)
    assert type(opened.model).__name__ == "CompressedLlamaForCausalLM"
    ids = torch.tensor([opened.tokenizer("no play").input_ids])
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(again(ids).logits, opened.model(ids).logits)
    report = json.loads((out / "compression.json").read_text())
    assert report["parameters"] == [sum(p.numel() for p in m.parameters()) for m in (load(model).model, opened.model)]
    assert report["calibration"] == "calibration.txt, 256 tokens"
    assert len((out / "layers.csv").read_text().splitlines()) == 15
    held = "".join(f"Line {i}: all work and no play makes Jack a dull boy.\n" for i in range(60))
    tail = held[len(held) * 9 // 10 :]
    tokens = torch.tensor(opened.tokenizer(tail, add_special_tokens=False).input_ids)
    windows = tokens[: len(tokens) // 32 * 32].view(-1, 32)[:8]
    assert report["measured"]["after"]["perplexity"] == pytest.approx(
        perplexity(opened.model, list(windows), length=32).perplexity, rel=1e-4
    )


def test_methods_and_a_fixed_weight(model, text, tmp_path):
    for method, options in (("svd", {}), ("cealc", {"beta": 0.5}), ("saes-svd", {"beta": 0.5})):
        command.compress(model=model, text=text, out=tmp_path / method, method=method, **options, **SMALL)
    weights = [load(tmp_path / m).model.model.layers[1].mlp.up_proj.A.weight for m in ("svd", "cealc", "saes-svd")]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_what_is_refused_leaves_nothing(model, text, tmp_path):
    (tmp_path / "there").mkdir()
    for change, sentence in (
        ({"out": tmp_path / "there"}, "exists: --out names a new folder"),
        ({"beta": 0.5, "method": "svd"}, "--beta is of saes-svd and cealc"),
        ({"ratio": 1.5}, "the ratio is 1.5"),
        ({"samples": 9999}, "the texts hold .* windows of 32 tokens, not 9999"),
    ):
        with pytest.raises(InputError, match=sentence):
            command.compress(**({"model": model, "text": text, "out": tmp_path / "new"} | SMALL | change))
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "new.part").exists()


def test_a_killed_save_leaves_no_folder(model, text, tmp_path, monkeypatch):
    import assay.lm

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(assay.lm, "save_compressed", stop)
    with pytest.raises(KeyboardInterrupt):
        command.compress(model=model, text=text, out=tmp_path / "out", **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.txt"]
