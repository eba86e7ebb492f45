"""Prompts and answers in JSONL: what is read, what is refused, and that a stopped run goes on without loss or repetition."""

import json

import pytest

from assay._errors import InputError
from assay.mdlm._jsonl import AnswerFile, PromptLine, read_prompts


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_have_their_ids_or_numbers(tmp_path):
    chat = [{"role": "user", "content": "Hi"}]
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, "\n", {"id": 7, "question": "b"}, {"messages": chat})
    assert read_prompts(path) == [PromptLine("0", "a", 0), PromptLine("7", "b", 1), PromptLine("2", chat, 2)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a"}, "{oops\n"], "line 2, is not JSON"),
        ([{"prompt": 3}], "line 1, has no prompt"),
        (["[1, 2]\n"], "line 1, has no prompt"),
        ([{"messages": [{"role": "user"}]}], "line 1, has no prompt"),
        ([{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}], "line 2, has the id 'x' of line 1"),
        (["\n"], "has no prompt"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_line(tmp_path, lines, message):
    with pytest.raises(InputError, match=message):
        read_prompts(write(tmp_path / "p.jsonl", *lines))


def test_any_character_may_stand_in_a_prompt(tmp_path):
    odd = "a\u2028b\u0085c\x0cd\x1ee\ud800"
    line = json.dumps({"prompt": odd[:-1]}, ensure_ascii=False) + "\r\n"
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + json.dumps({"prompt": odd}).encode())
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "p.jsonl")] == [odd[:-1], odd]


def test_answers_hold_any_character_and_can_be_continued(tmp_path):
    odd = "a\u2028b\r\n\x0c\ud800"
    for name in ("x" + odd, "y"):
        with AnswerFile(tmp_path / "o.jsonl", {"n": 1}) as answers:
            answers.append({"id": name, "text": odd})
    lines = (tmp_path / "o.jsonl").read_bytes().rstrip(b"\n").split(b"\n")
    assert [json.loads(line)["text"] for line in lines] == [odd, odd]


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_stopped_run_goes_on_and_a_torn_line_is_written_again(tmp_path):
    prompts = [PromptLine(str(i), "p", i) for i in range(4)]
    path = tmp_path / "deep" / "out.jsonl"
    with AnswerFile(path, {"steps": 3}) as answers:
        for line in list(answers.missing(prompts))[:2]:
            answers.append({"id": line.id, "text": "é"})
    path.write_bytes(path.read_bytes() + b'{"id": "2", "text": "cut sho')
    with AnswerFile(path, {"steps": 3}) as answers:
        assert answers.done == {"0", "1"}
        for line in answers.missing(prompts):
            answers.append({"id": line.id, "text": "new"})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["id"] for r in records] == ["0", "1", "2", "3"]
    assert [r["text"] for r in records] == ["é", "é", "new", "new"]
    assert all(r["settings"] == {"steps": 3} for r in records)


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, {"steps": 3, "model": "a"}) as answers:
        answers.append({"id": 0})
    before = path.read_bytes()
    for settings, message in (
        ({"steps": 4, "model": "a"}, "line 1, was made with steps 3, not 4"),
        ({"steps": 3}, "a setting 'model'"),
        ({"steps": 3, "model": "a", "seed": 1}, "no setting 'seed'"),
    ):
        with pytest.raises(InputError, match=message), AnswerFile(path, settings):
            pass
    assert path.read_bytes() == before


def test_settings_are_compared_as_json_holds_them(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, {"floors": (1, 2)}) as answers:
        answers.append({"id": 0})
    with AnswerFile(path, {"floors": [1, 2]}) as answers:
        assert answers.done == {"0"}


def test_an_id_is_answered_once_and_nan_never_written(tmp_path):
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, {}) as answers:
        answers.append({"id": 1})
        with pytest.raises(InputError, match="answer of '1' already"):
            answers.append({"id": "1"})
        with pytest.raises(ValueError, match="not JSON compliant"):
            answers.append({"id": 2, "seconds": float("nan")})
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("text", ["Shall I compare thee\n", "Shall I compare thee", '{"prompt": "a"}', '{"prompt": "a'])
def test_a_file_of_something_else_is_not_touched(tmp_path, text):
    path = write(tmp_path / "poems.txt", text)
    with pytest.raises(InputError, match="line 1, is no answer"), AnswerFile(path, {}):
        pass
    assert path.read_text() == text
    with pytest.raises(InputError, match="is a folder"), AnswerFile(tmp_path, {}):
        pass
