"""The command on a user's checkpoints and prompts: what it writes, how it goes on, what it refuses."""

import json

import pytest

from assay._errors import InputError
from assay.methods.freecache_guided_diffusion import command

from ...mdlm.tiny import tiny
from .conftest import guider_model
from .test_aligner import A, B

SIZE = len(A) + 1  # [MASK] behind the vocabulary


def folder(path, model, tokenizer):
    path.mkdir()
    if hasattr(model, "export_family"):
        model.export_family("dream" if model.config.logit_shift else "llada", path)
    else:
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Dream and a LLaDA checkpoint over tokenizer A, a guider over A and one over B."""
    home = tmp_path_factory.mktemp("models")
    end = {
        "vocab_size": SIZE,
        "mask_token_id": SIZE - 1,
        "eos_token_id": A.eos_token_id,
        "pad_token_id": A.eos_token_id,
    }
    guiders = {name: guider_model(vocab=len(tokenizer)) for name, tokenizer in (("same", A), ("other", B))}
    return {
        "dream": folder(home / "dream", tiny(logit_shift=True, qkv_bias=True, **end), A),
        "llada": folder(home / "llada", tiny(num_key_value_heads=4, **end), A),
        "same": folder(home / "same", guiders["same"], A),
        "other": folder(home / "other", guiders["other"], B),
    }


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "the cat"}, {"id": "q", "question": "the dog sat on"}, {"prompt": "a b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["dream", "llada"])
@pytest.mark.parametrize("guider", [None, "same", "other"])
def test_each_prompt_gets_a_line_with_its_account(models, prompts, tmp_path, name, guider):
    out = tmp_path / "a" / "out.jsonl"
    command.generate(
        model=models[name],
        guider=guider and models[guider],
        prompts=prompts,
        out=out,
        max_new_tokens=8,
        block_length=4,
        window_right=5,
        eos="none",
    )
    lines = read(out)
    assert [line["id"] for line in lines] == ["0", "q", "2"]
    for line in lines:
        assert isinstance(line["text"], str)
        assert 1 <= line["steps"] == line["forwards"] <= 8
        assert 0 < line["token_forwards"] < line["forwards"] * 30
        assert min(line["time_dlm"], line["time_ar"], line["time_other"]) >= 0
        if guider is None:
            assert line["accepted"] is None
            assert line["policy"] == "FreeCache(mode=block, freeze=settled)"
        else:
            assert sum(max(k, 1) for k in line["accepted"]) == 8
            assert line["ar_forwards"] >= 1
            assert "sliding, window=(256, 5)" in line["policy"]


def test_a_stopped_run_goes_on_and_gives_the_same_answers(models, prompts, tmp_path, capsys):
    settings = {"model": models["llada"], "prompts": prompts, "max_new_tokens": 4, "block_length": 4}
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    command.generate(out=whole, **settings)
    lines = whole.read_bytes().splitlines(keepends=True)
    stopped.write_bytes(lines[0] + lines[1][:30])  # killed while the second was written
    command.generate(out=stopped, **settings)
    assert "2 answers, 1 were there" in capsys.readouterr().out
    assert [(x["id"], x["text"]) for x in read(stopped)] == [(x["id"], x["text"]) for x in read(whole)]
    with pytest.raises(InputError, match="was made with"):
        command.generate(out=stopped, **{**settings, "max_new_tokens": 8})


def test_a_batch_gives_the_answers_of_single_runs(models, prompts, tmp_path):
    outs = []
    for batch in (1, 2):
        path = tmp_path / f"{batch}.jsonl"
        command.generate(
            model=models["dream"], guider=models["same"], prompts=prompts, out=path, max_new_tokens=6, batch=batch
        )
        outs.append([(x["id"], x["text"], x["steps"], x["accepted"]) for x in read(path)])
    assert outs[0] == outs[1]


def test_one_prompt_is_shown_with_a_picture_of_its_decoding(models, tmp_path, capsys):
    picture = tmp_path / "made" / "trace.svg"
    settings = {"model": models["llada"], "max_new_tokens": 8, "block_length": 4, "eos": "none"}
    command.generate(prompt="the cat", trace=picture, drift_probe=2, **settings)
    said = capsys.readouterr().out
    assert "8 steps, 8 calls" in said
    assert "LowConfidenceStatic" in said
    assert "<svg" in picture.read_text()


def test_lines_without_a_file_are_printed(models, prompts, capsys):
    command.generate(
        model=models["llada"], prompts=prompts, max_new_tokens=4, block_length=4, policy="none", drift_probe=0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["policy"] for line in lines] == ["NoCache"] * 3
    assert lines[0]["settings"]["policy"] == "none"


def test_auto_takes_no_cache_on_short_canvases(models, prompts, capsys):
    command.generate(model=models["llada"], prompts=prompts, max_new_tokens=4, block_length=4, policy="auto")
    assert '"policy": "NoCache"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "one of --prompt and --prompts"),
        ({"prompts": "x"}, "one of --prompt and --prompts"),
        ({"batch": 0}, "expected at least 1"),
        ({"guider": "same", "steps": 4}, "no meaning with a guider"),
        ({"max_new_tokens": 7}, "no multiple"),
        ({"window_right": 1}, "w_right of at least 2"),
        ({"model": "nowhere"}, "there is no folder nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(models, change, said):
    with pytest.raises(ValueError, match=said):
        command.generate(
            **{"model": models["llada"], "prompt": "the cat", "max_new_tokens": 4, "block_length": 4, **change}
        )


def test_a_trace_is_of_one_answer(models, prompts, tmp_path):
    with pytest.raises(InputError, match="picture of one answer"):
        command.generate(model=models["llada"], prompts=prompts, trace=tmp_path / "x.png")
