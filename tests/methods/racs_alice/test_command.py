"""The command on a user's text: its files, Ctrl-C and resuming, and what it refuses."""

import csv
import json

import pytest
import torch

from assay._errors import InputError
from assay.methods.racs_alice import _training, command

transformers = pytest.importorskip("transformers")
TEXT = "".join(f"Line {i} of a text that is long enough to be cut into three.\n" for i in range(400))
SETTINGS = {"steps": 6, "batch": 8, "length": 16, "adam_lr": 5e-3}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    return path


def test_it_leaves_a_model_that_opens_and_a_report(text, tmp_path, capsys):
    out = tmp_path / "out"
    command.train(text=text, out=out, method="racs", **SETTINGS)
    said = capsys.readouterr().out
    assert "Neither side was tuned" in said
    assert "update RMS" in said
    files = {path.name for path in out.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "curve.csv",
        "curve.png",
        "update_rms.csv",
        "report.json",
    } <= files
    assert not any(name.startswith(("checkpoint", "tokens", ".")) for name in files)
    with (out / "curve.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "racs", "adamw"]
    assert [int(row[0]) for row in rows[1:]] == list(range(7))
    assert rows[1][1] == rows[1][2]  # both start from the same weights
    report = json.loads((out / "report.json").read_text())
    assert report["sides"]["racs"]["state_bytes"] < report["sides"]["adamw"]["state_bytes"]

    from assay.lm import load

    model, tokenizer, _ = load(out)
    windows = torch.tensor([tokenizer(TEXT[:40])["input_ids"]])
    assert model(windows).logits.shape == (1, 40, 257)
    again = tmp_path / "again"
    command.train(text=text, out=again, model=str(out), method="alice", lr=1e-3, against="none", **SETTINGS)
    with (again / "curve.csv").open() as file:
        start = float(list(csv.reader(file))[1][1])
    assert start == pytest.approx(float(rows[-1][1]), abs=1e-4)  # it goes on from the weights of the folder
    assert "Neither" not in capsys.readouterr().out


def test_after_an_interruption_the_same_command_ends_at_the_same_weights(text, tmp_path, capsys, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(command, "CHECKPOINT_EVERY", 2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {**SETTINGS, "method": "alice", "lr": 0.02}
    command.train(text=text, out=whole, **settings)

    real = _training.training

    def interrupted(model, optimizers, *args, **more):
        for step in real(model, optimizers, *args, **more):
            if step == 4:  # after three whole steps: the checkpoint is of the second
                raise KeyboardInterrupt
            yield step

    monkeypatch.setattr(_training, "training", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.train(text=text, out=cut, **settings)
    assert "goes on from step 2" in capsys.readouterr().out
    assert (cut / "checkpoint-alice.pt").exists()
    monkeypatch.setattr(_training, "training", real)
    command.train(text=text, out=cut, **settings)
    assert "goes on from step 2" in capsys.readouterr().out
    first, second = load_file(whole / "model.safetensors"), load_file(cut / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (whole / "curve.csv").read_text() == (cut / "curve.csv").read_text()


def test_a_configuration_file_and_the_paper_s_sizes(text, tmp_path):
    from assay.lm._bytes import byte_llama_config

    folder = tmp_path / "config"
    byte_llama_config(num_hidden_layers=1, hidden_size=32, vocab_size=32_000).save_pretrained(folder)
    command.train(text=text, out=tmp_path / "a", config=str(folder / "config.json"), against="none", **SETTINGS)
    made = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (made["hidden_size"], made["num_hidden_layers"], made["vocab_size"]) == (32, 1, 257)
    fresh, tokenizer = command._opened("60m", None)
    assert tokenizer is None
    assert fresh(0).config.hidden_size == 512


@pytest.mark.parametrize("method", ["alice-zero", "eigen-adam"])
def test_the_other_methods_run(text, tmp_path, method):
    command.train(text=text, out=tmp_path / "out", method=method, against="none", bf16=True, accumulate=2, **SETTINGS)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_it_refuses(text, tmp_path):
    out = tmp_path / "out"
    command.train(text=text, out=out, against="none", **SETTINGS)
    with pytest.raises(InputError, match="--steps 6, this one has 7"):
        command.train(text=text, out=out, against="none", **{**SETTINGS, "steps": 7})
    with pytest.raises(InputError, match="give one of them"):
        command.train(text=text, out=tmp_path / "b", config="60m", model="x")
    with pytest.raises(InputError, match="at least 1"):
        command.train(text=text, out=tmp_path / "b", steps=0)
    with pytest.raises(InputError, match="neither a file nor one of"):
        command.train(text=text, out=tmp_path / "b", config="7b")
    with pytest.raises(InputError, match="not empty"):
        command.train(text=text, out=tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA"):
            command.train(text=text, out=tmp_path / "c", device="cuda", **SETTINGS)
    short = tmp_path / "short.txt"
    short.write_text("a\nb\nc\nd\n")
    with pytest.raises(ValueError, match="longer"):
        command.train(text=short, out=tmp_path / "d", **SETTINGS)


def test_numbers_out_of_range_are_refused_before_the_folder_is_made(text, tmp_path):
    for bad in ({"seed": -1}, {"rank": 0}, {"lr": -1.0}, {"lr": float("nan")}, {"adam_lr": float("inf")}):
        with pytest.raises(InputError, match="--" + next(iter(bad)).replace("_", "-")):
            command.train(text=text, out=tmp_path / "out", **{**SETTINGS, **bad})
    assert not (tmp_path / "out").exists()


def test_a_run_that_came_to_nothing_may_be_corrected_in_the_same_folder(text, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "short.txt"
    mine.write_text("a\nb\nc\nd\n")
    with pytest.raises(ValueError, match="longer"):  # after its tokens were written
        command.train(text=mine, out=out, against="none", **SETTINGS)
    mine.write_text(TEXT)
    command.train(text=mine, out=out, against="none", **SETTINGS)
    assert (out / "report.json").exists()
    (out / "settings.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        command.train(text=mine, out=out, against="none", **SETTINGS)
    other = tmp_path / "other"
    with pytest.raises(InputError, match="neither a file"):
        command.train(text=text, out=other, config="7b", against="none", **SETTINGS)
    command.train(text=text, out=other, against="none", **SETTINGS)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{nope", "valid JSON"),
        ("[1]", "not a configuration"),
        ('{"model_type": "vit"}', "no causal language model"),
        ('{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}', "--length 8"),
        ('{"model_type": "llama", "hidden_size": 15, "num_attention_heads": 4}', "not a multiple of"),
    ],
)
def test_configurations_that_cannot_be_trained_are_told_apart(text, tmp_path, config, says):
    path = tmp_path / "config.json"
    path.write_text(config)
    with pytest.raises(InputError, match=says):
        command.train(text=text, out=tmp_path / "out", config=str(path), against="none", **SETTINGS)


def test_no_model_that_looks_ahead_is_trained(text, tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", **small}))
    fresh, _ = command._opened(str(path), None)
    windows = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(0))
    command._fits(fresh(0), windows, 16)  # made a decoder
    looking = transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=257, initializer_range=0.5, **small))
    with pytest.raises(InputError, match="see the tokens after them"):
        command._fits(looking, windows, 16)
    with pytest.raises(InputError, match="do not belong together"):
        command._fits(fresh(0), windows + 100, 16)
