"""argparse with sentences: a wrong option says what was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from assay._errors import InputError
from assay.cli._terminal import nearest, unknown, width


class UsageError(InputError):
    """The command line was wrong; says so under the name of the program and its command."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=width())


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised as `UsageError`, with the nearest option where one is unknown.

    Attributes
    ----------
    options : dict[str, list[str]]
        The choices of options, for shell completion.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {"formatter_class": _Help, **kwargs, "allow_abbrev": False}
        super().__init__(*args, **kwargs)
        self.options: dict[str, list[str]] = {}

    def subcommands(self) -> dict[str, Parser]:
        """The parsers of the commands below this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def suggest(self, dest: str, choices: Iterable[str]) -> None:
        """Name the values of an argument."""
        for action in self._actions:
            if action.dest == dest:
                action.choices = list(choices)

    def forget(self, *dests: str) -> None:
        """Take arguments out again."""
        for action in [action for action in self._actions if action.dest in dests]:
            self._remove_action(action)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        asked, left = self.parse_known_args(args, namespace)
        if left:
            raise self._deepest(asked)._stranger(left[0])
        return asked

    def error(self, message: str) -> NoReturn:
        if missing := re.match(r"the following arguments are required: (.*)", message):
            message = f"{missing[1]} is needed: see {self.prog} --help"
        elif valueless := re.match(r"argument (\S+): expected (?:one|at least one) argument", message):
            message = f"{valueless[1]} needs a value: see {self.prog} --help"
        else:
            message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        raise UsageError(self.prog, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = action.dest if not action.option_strings else action.option_strings[-1].lstrip("-")
            raise argparse.ArgumentError(None, unknown(what, str(value), [str(choice) for choice in action.choices]))

    def _deepest(self, asked: argparse.Namespace) -> Parser:
        """The parser of the command, and of its verb, that was asked for."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices[getattr(asked, action.dest)]._deepest(asked)
        return self

    def _stranger(self, text: str) -> UsageError:
        name = text.partition("=")[0]
        if not name.startswith("-"):
            return UsageError(self.prog, f"{name!r} is one too many: see {self.prog} --help")
        known = [option for action in self._actions for option in action.option_strings]
        near = nearest(name, [option for option in known if option.startswith("--")])
        meant = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return UsageError(self.prog, f"there is no option {name}: {meant}")
