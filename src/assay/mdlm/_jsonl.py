"""Prompts read from JSONL, answers written to JSONL, one line each; a run that was stopped goes on where it was.

The answers' file is only ever appended to, a whole line at a time, and each line tells with which settings it was made. A
line that a kill cut short is dropped when the run goes on.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

from assay._errors import InputError

#: Under these names a line's prompt is looked for, in this order.
PROMPT_KEYS = ("prompt", "question", "problem", "instruction", "input", "messages")
_BEGIN = b'{"id": '  # of each line that we write


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file.

    Attributes
    ----------
    id
        The line's ``id``, else its number from 0.
    prompt
        A text, or the messages of a chat (``[{"role": ..., "content": ...}]``).
    index
        Its place among the prompts, from 0.
    """

    id: str
    prompt: str | list[dict[str, str]]
    index: int


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a JSONL file; blank lines are passed over.

    Each line is an object with a ``prompt`` (or ``question``, ``problem``, ``instruction``, ``input``), or with
    ``messages``, and may have an ``id``.

    Raises
    ------
    InputError
        If a line is no such object, two have the same id, or there is none; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a prompt may hold other ends of line, as U+2028
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: expected a JSONL file with one prompt a line") from error
    found: list[PromptLine] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f'{path}, line {number}, is not JSON ({error.msg}): expected an object such as {{"prompt": "..."}}'
            ) from error
        prompt = _prompt(record)
        if prompt is None:
            raise InputError(
                f'{path}, line {number}, has no prompt: expected an object with a text under "prompt", or a list under '
                '"messages"'
            )
        name = str(record.get("id", len(found)))
        if name in seen:
            raise InputError(f"{path}, line {number}, has the id {name!r} of line {seen[name]}: an id names one prompt")
        seen[name] = number
        found.append(PromptLine(name, prompt, len(found)))
    if not found:
        raise InputError(f'{path} has no prompt: expected one object such as {{"prompt": "..."}} a line')
    return found


def _prompt(record: Any) -> str | list[dict[str, str]] | None:
    if not isinstance(record, dict):
        return None
    value = next((record[key] for key in PROMPT_KEYS if key in record), None)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        return None
    spoken = all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    return value if spoken else None


class AnswerFile:
    """A JSONL file of answers, one line an id, that is continued if it is there.

    Every line gets the run's ``settings``. A file whose lines have others is not continued. ::

        with AnswerFile(out, {"model": name, "max_new_tokens": 64}) as answers:
            for line in answers.missing(read_prompts(prompts)):
                answers.append({"id": line.id, "text": ...})

    Parameters
    ----------
    path
        The file; its folder is made.
    settings
        What the answers depend on, as JSON can hold it.

    Attributes
    ----------
    done
        Ids of the answers that the file holds.

    Raises
    ------
    InputError
        On entering, if the file holds something else than such answers, or answers made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.done: set[str] = set()
        self._file: BufferedRandom | None = None

    def __enter__(self) -> "AnswerFile":
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder: name a file in it")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.done = set()
        whole = self._read() if self.path.exists() else 0
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.truncate(whole)
        self._file.seek(whole)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None

    def missing(self, lines: Sequence[PromptLine]) -> Iterator[PromptLine]:
        """The prompts without an answer, in their order."""
        return (line for line in lines if line.id not in self.done)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the answer of one id; it is on the disk when this returns.

        Raises
        ------
        InputError
            If the id has an answer already.
        """
        assert self._file is not None, "an AnswerFile is used in a with statement"
        name = str(record["id"])
        if name in self.done:
            raise InputError(f"{self.path} has an answer of {name!r} already: an id has one answer")
        line = json.dumps({"id": name, **record, "settings": self.settings}, ensure_ascii=False, allow_nan=False)
        # a lone surrogate, which UTF-8 cannot hold, becomes its JSON escape
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(name)

    def _read(self) -> int:
        """Note what is done; the length in bytes of the whole lines."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        torn = data[whole:]
        if not (_BEGIN.startswith(torn) or torn.startswith(_BEGIN)):
            whole = len(data)  # no line of ours that was cut short: judged like all others
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                name, settings = str(record["id"]), dict(record["settings"])
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{self.path}, line {number}, is no answer of such a run: name another file to write to"
                ) from error
            if settings != self.settings:
                raise InputError(
                    f"{self.path}, line {number}, was made with {_difference(settings, self.settings)}: go on with the "
                    "same settings, or name another file"
                )
            self.done.add(name)
        return whole


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    name = next(key for key in (*new, *old) if old.get(key, old) != new.get(key, new))
    if name not in old or name not in new:
        return f"{'a' if name in old else 'no'} setting {name!r}"
    return f"{name} {old[name]!r}, not {new[name]!r}"
