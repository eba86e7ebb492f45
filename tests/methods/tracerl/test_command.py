"""The command on a small checkpoint and on run sums: what it writes, that it goes on, what it refuses."""

import csv
import json

import pytest
import torch

from assay._errors import InputError
from assay.lm._bytes import byte_tokenizer
from assay.mdlm import MaskedDiffusionLM
from assay.methods.tracerl import command
from assay.testbeds import runsum

from ...mdlm.tiny import tiny

VOCABULARY = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte model that has learned nothing."""
    folder = tmp_path_factory.mktemp("model")
    made = tiny(
        vocab_size=VOCABULARY, mask_token_id=VOCABULARY - 1, eos_token_id=0, pad_token_id=0, max_position_embeddings=64
    )
    with torch.no_grad():
        made.lm_head.weight *= 0.3
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"ask {i}", "answer": i}) + "\n" for i in range(12)))
    return str(path)


@pytest.fixture
def reward(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def score(prompts, completions, completion_ids, answer, **columns):\n"
        "    assert all(isinstance(p, str) and isinstance(c, str) for p, c in zip(prompts, completions))\n"
        "    return [float(sum(ids) % 2) for ids in completion_ids]\n"
        "constant = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "my_rewards:score"


def run(model, prompts, reward, out, **changed):
    small = {"steps": 2, "tasks": 4, "responses": 8, "max_new_tokens": 6, "block_length": 6, "eos": "none", "lr": 1e-3}
    command.train(model=model, prompts=prompts, reward=reward, out=out, **(small | changed))


def test_it_leaves_a_policy_a_curve_and_a_picture_and_goes_on(model, prompts, reward, tmp_path, capsys):
    out = tmp_path / "out"
    run(model, prompts, reward, out, steps=1)
    first = torch.cat([p.flatten() for p in MaskedDiffusionLM.from_checkpoint(out).parameters()])
    run(model, prompts, reward, out)
    said = capsys.readouterr().out
    assert "goes on from step 1" in said
    assert "held-out reward" in said
    assert "schedule dynamic, threshold 0.9, temperature 1.0" in said
    assert {"model.safetensors", "config.json", "tokenizer.json", "curve.csv", "curve.png", "trace.png", "settings.json",
            "steps.jsonl", "evaluations.jsonl"} <= {path.name for path in out.iterdir()}  # fmt: skip
    rows = list(csv.DictReader((out / "curve.csv").open()))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert rows[0]["held_out_reward"] != ""
    assert rows[2]["held_out_reward"] != ""
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("curve.png", "trace.png"))
    last = torch.cat([p.flatten() for p in MaskedDiffusionLM.from_checkpoint(out).parameters()])
    assert not torch.equal(first, last)
    whole = tmp_path / "whole"
    run(model, prompts, reward, whole)
    assert torch.equal(last, torch.cat([p.flatten() for p in MaskedDiffusionLM.from_checkpoint(whole).parameters()]))
    with pytest.raises(InputError, match=r"holds a run with --lr 0\.001, this one has 0\.01"):
        run(model, prompts, reward, out, lr=0.01)


def test_run_sums_are_read_as_signs_or_drawn(tmp_path, monkeypatch, capsys):
    asked = []
    shape = {"vocab_size": runsum.VOCABULARY, "mask_token_id": runsum.MASK, "eos_token_id": runsum.EOS,
             "pad_token_id": runsum.EOS}  # fmt: skip
    from assay.testbeds import _open

    def opened(name, **options):
        asked.append(name)
        return _open.TextModel(tiny(**shape), None)

    monkeypatch.setattr(_open, "open_model", opened)
    problems = runsum.problems("easy", 6)
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": runsum.text(p)}) + "\n" for p in problems.prompts))
    with pytest.warns(UserWarning, match="no task has a mean reward"):  # nothing is ever right
        command.train(
            model="runsum-dlm-start", prompts=str(path), eval_prompts=str(path), reward="runsum", out=tmp_path / "out",
            steps=1, tasks=4, value_model=True,
        )  # fmt: skip
    assert asked == ["runsum-dlm-start"]
    assert "1 without a task to learn from" in capsys.readouterr().out
    assert (tmp_path / "out" / "value_model" / "model.safetensors").exists()
    (example, *_) = command._asked("runsum", 8, 0, True, False)
    assert runsum.solve(example["prompt"][None]).shape == (1, runsum.ANSWER_LENGTH)
    with pytest.raises(InputError, match="goes with a run-sum model"):
        command._asked("runsum", 8, 0, False, False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward": "nothing"}, "there is no reward 'nothing'"),
        ({"reward": "no_such_module:f"}, "cannot be imported"),
        ({"reward": "my_rewards:absent"}, "has no absent"),
        ({"reward": "my_rewards:constant"}, "is a int"),
        ({"prompts": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({"model": "nowhere"}, "there is no folder nowhere"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"eval_share": 1.0}, "--eval-share must lie between"),
        ({"tasks": 40}, "a step asks 40 prompts"),
    ],
)
def test_what_does_not_fit_is_refused(model, prompts, reward, tmp_path, changed, message):
    given = {"model": model, "prompts": prompts, "reward": reward} | changed
    with pytest.raises(InputError, match=message):
        run(given.pop("model"), given.pop("prompts"), given.pop("reward"), tmp_path / "out", **given)


def test_a_folder_with_other_things_in_it_is_left_alone(model, prompts, reward, tmp_path):
    out = tmp_path / "full"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        run(model, prompts, reward, out)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
