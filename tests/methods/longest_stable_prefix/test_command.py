"""The command on a user's model and prompts: what it writes, how it goes on, what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from assay._errors import InputError
from assay.lm._bytes import byte_tokenizer
from assay.mdlm import DiffusionGenerationConfig, MaskedDiffusionLM, MDLMConfig, diffusion_generate
from assay.methods.longest_stable_prefix import LongestStablePrefix, PrefixAbsorbCache, command
from assay.testbeds import _open, runsum

from ...mdlm.tiny import scatter

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level model in LLaDA's form: 257 tokens, the mask behind them."""
    path = tmp_path_factory.mktemp("model")
    settings = {"vocab_size": 258, "mask_token_id": 257, "eos_token_id": 0, "pad_token_id": 0}
    model = MaskedDiffusionLM(MDLMConfig(**SIZES, **settings, max_position_embeddings=128))
    scatter(model)
    model.export_family("llada", path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": f"Say {name}"}) + "\n" for name in "abc"))
    return path


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_those_of_the_library(folder, prompts, tmp_path, capsys):
    out = tmp_path / "deep" / "answers.jsonl"
    command.generate(model=folder, prompts=prompts, out=out, max_new_tokens=24, tau_floor=1.0)
    found = records(out)
    assert [record["id"] for record in found] == ["a", "b", "c"]
    model, tokenizer = MaskedDiffusionLM.from_checkpoint(folder), byte_tokenizer()
    scheduler = LongestStablePrefix(tau_floor=1.0, tokenizer=tokenizer)
    for record in found:
        ids = torch.tensor(tokenizer(f"Say {record['id']}")["input_ids"])[None]
        config = DiffusionGenerationConfig(max_new_tokens=24, seed=0)
        expected = diffusion_generate(model, ids, config, scheduler, PrefixAbsorbCache())
        answer = expected.sequences[0, expected.canvas_start :].tolist()
        answer = answer[: answer.index(0)] if 0 in answer else answer
        assert record["text"] == tokenizer.decode(answer)
        assert record["forwards"] == expected.forwards
        assert record["token_forwards"] == expected.token_forwards
        assert record["commit_lengths"] == expected.stats["commit_lengths"][0]
        assert len(record["ends"]) == len(record["tau"]) == record["steps"]
        assert record["eos_filled"] == int(expected.row_filled[0])
        assert record["settings"]["max_new_tokens"] == 24
        assert record["settings"]["policy"] == "PrefixAbsorbCache(freeze=settled, horizon=None)"
        assert "tau_floor=1.0" in record["settings"]["scheduler"]
        assert record["seconds"] > 0
    assert "3 answers" in capsys.readouterr().out


def test_a_stopped_run_goes_on_and_ends_as_if_it_had_not(folder, prompts, tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    settings = {"model": folder, "prompts": prompts, "max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    command.generate(out=whole, **settings)
    lines = whole.read_text().splitlines(keepends=True)
    cut.write_text(lines[0] + lines[1][:25])
    command.generate(out=cut, **settings)

    def timeless(path):
        return [{**record, "seconds": 0} for record in records(path)]

    assert timeless(cut) == timeless(whole)
    with pytest.raises(InputError, match="was made with"):
        command.generate(out=cut, **{**settings, "temperature": 0.0})


def test_one_prompt_is_answered_on_the_screen_and_drawn(folder, tmp_path, capsys):
    picture = tmp_path / "pictures" / "trace.png"
    command.generate(model=folder, prompt="Hi", max_new_tokens=8, cache="none", delimiters="none", trace=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "calls" in said
    assert "token-forwards" in said


def test_without_a_file_the_lines_are_printed(folder, prompts, capsys):
    command.generate(model=folder, prompts=prompts, max_new_tokens=4)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["id"] for record in found] == ["a", "b", "c"]


def test_a_run_sum_is_written_in_its_signs(monkeypatch, capsys):
    settings = {"vocab_size": runsum.VOCABULARY, "mask_token_id": runsum.MASK, "eos_token_id": runsum.EOS}
    model = MaskedDiffusionLM(MDLMConfig(**SIZES, **settings, pad_token_id=runsum.EOS)).eval()
    scatter(model)
    monkeypatch.setattr(_open._runsum_models, "load", lambda name, seed: model)
    sheet = runsum.text(runsum.problems("easy", 1).prompts[0])
    command.generate(model="runsum-dlm", prompt=sheet, max_new_tokens=40)
    said = capsys.readouterr().out.splitlines()[0]
    assert set(said) <= set(runsum.SIGNS) | {"~"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "give one of --prompt and --prompts"),
        ({"alpha": 0.7}, "alpha is 0.7 and beta 0.5"),
        ({"model": "no-such-folder"}, "there is no folder no-such-folder"),
        ({"model": "runsum-guider"}, "causal"),
        ({"max_new_tokens": 200}, "the model takes 128"),
        ({"cache": "none", "horizon": 8}, "--horizon belongs to a cache"),
        ({"horizon": 0}, "horizon is 0"),
        ({"trace": Path("trace.gif")}, "use .png, .svg or .pdf"),
    ],
)
def test_what_does_not_fit_is_refused(folder, change, message, monkeypatch):
    monkeypatch.setattr(_open._runsum_models, "load", lambda name, seed: object())
    with pytest.raises(InputError, match=message):
        command.generate(**{"model": folder, "prompt": "Hi", "max_new_tokens": 8, **change})


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llada"}')
    with pytest.raises(InputError, match="no tokenizer"):
        command.generate(model=str(tmp_path), prompt="Hi")
