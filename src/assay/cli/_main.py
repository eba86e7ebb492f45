"""The parser of every command, and what happens to an error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper

import assay
from assay.cli._parser import Parser, UsageError
from assay.cli._terminal import reflow, unknown

# The function behind each command, imported when the command is given: `assay list` must not pay for `assay check`.
_HANDLERS = {
    "list": "assay.cli._list:list_methods",
    "show": "assay.cli._list:show",
    "cite": "assay.cli._list:cite",
    "run": "assay.cli._run:run",
    "check": "assay.cli._check:check",
    "tour": "assay.cli._check:tour",
    "report": "assay.cli._report:report",
    "export": "assay.cli._report:export",
    "data": "assay.cli._data:data",
    "prune": "assay.cli._prune:prune",
    "doctor": "assay.cli._doctor:doctor",
    "completion": "assay.cli._completion:completion",
}


def build_parser() -> Parser:
    """The parser of ``assay`` with all its commands; the methods' own options are added by `assay run`."""
    parser = Parser(
        prog="assay",
        description="The methods of ICLR 2026 papers as drop-in parts, and their claims as experiments that you can run.",
        epilog="start with: assay list, assay show vattention, assay check vattention, assay tour",
    )
    parser.add_argument("--version", action="version", version=f"assay {assay.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)

    def command(name: str, what: str, more: str, example: str) -> Parser:
        return commands.add_parser(
            name, help=what, description=reflow(f"{what[0].upper()}{what[1:]}.\n\n{more}"), epilog=f"example: {example}"
        )

    p = command(
        "list",
        "every method: what it is for, its field, how its claims stand",
        "How claims stand is what the project's own full runs measured; `assay check` measures them here.",
        "assay list --for my.csv",
    )
    p.add_argument("--field", metavar="NAME", help="only the methods of this field")
    p.add_argument(
        "--for", dest="file", metavar="FILE", help="only the methods that take this file, with the command to try"
    )
    p.add_argument("--json", action="store_true", help="as JSON")

    p = command(
        "show",
        "a method's card: its paper, its claims, how to use it, what it needs",
        "Each claim stands with its verdict, the effect and its 95 % interval, the bar, and the paper's own figure.",
        "assay show vattention",
    )
    p.add_argument("name", metavar="NAME", help="a method of assay list")
    p.add_argument("--json", action="store_true", help="as JSON")

    p = command(
        "run",
        "use a method on your own files",
        "The options are the method's own: assay run NAME --help explains them.",
        "assay run vattention --help",
    )
    p.add_argument("name", metavar="NAME", help="a method of assay list")
    p.add_argument("rest", metavar="[VERB] OPTIONS", nargs="...", help="what the method's command takes")

    p = command(
        "check",
        "measure a method's claims against the baselines",
        "Every claim gets a verdict with its interval. What was measured before is kept and reused; an interrupted check "
        "goes on where it stopped. Exit status: 0 when every trial ran, whatever the verdicts; 1 when trials failed.",
        "assay check racs-alice --scale quick --input corpus=my.txt",
    )
    p.add_argument("names", metavar="NAME", nargs="*", help="methods of assay list")
    p.add_argument("--all", action="store_true", help="every method")
    p.add_argument(
        "--scale",
        choices=["quick", "full", "paper"],
        default="quick",
        help="quick: about a minute (default); full: about twenty; paper: the paper's own models and data, on your hardware",
    )
    p.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1; fewer than three leave every verdict open")
    p.add_argument(
        "--only", action="append", default=[], metavar="EXPERIMENT", help="only this experiment (may be repeated)"
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value for a setting, as --set steps=1000",
    )
    p.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="your own model or data, as --input corpus=my.txt",
    )
    p.add_argument("--engine", default="local", metavar="ENGINE", help="local (default), ray, or ray://HOST:PORT")
    p.add_argument("--workers", type=int, metavar="N", help="trials at the same time (default: as the cores allow)")
    p.add_argument("--dry-run", action="store_true", help="run nothing: say what would run, and what stands")
    p.add_argument("--save", action="store_true", help="write the verdicts to results/ (defaults of the study only)")
    p.add_argument("--json", action="store_true", help="one JSON object a line for each method")

    p = command(
        "report",
        "one page of what was measured here: verdicts, plots, curves, costs",
        "A single HTML file without anything outside it.",
        "assay report --open",
    )
    p.add_argument("--open", action="store_true", help="open it in the browser")
    p.add_argument("--out", metavar="FILE", help="where to write it (default: report.html in Assay's home)")

    p = command(
        "export",
        "every trial of the store as a table",
        "csv and parquet write a file; mlflow writes into a tracking server or a SQLite store (sqlite:///runs.db).",
        "assay export csv trials.csv",
    )
    p.add_argument("format", choices=["csv", "parquet", "mlflow"], help="csv, parquet or mlflow")
    p.add_argument("path", metavar="PATH", help="the file, or MLflow's store")

    p = command("cite", "BibTeX of the papers", "", "assay cite vattention >> refs.bib")
    p.add_argument("names", metavar="NAME", nargs="+", help="methods of assay list")

    p = command(
        "data",
        "the models and data sets behind the studies",
        "They are fetched when a study needs them; get fetches them before. ASSAY_OFFLINE=1 forbids any download.",
        "assay data get shakespeare",
    )
    verbs = p.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    v = verbs.add_parser("list", help="every asset: its kind, its licence, whether it is here")
    v.add_argument("--json", action="store_true", help="as JSON")
    v = verbs.add_parser("show", help="one asset: where it comes from, its licence, its digest, where it lies")
    v.add_argument("name", metavar="NAME")
    v.add_argument("--json", action="store_true", help="as JSON")
    v = verbs.add_parser("get", help="fetch assets, or make them by their recipe")
    v.add_argument("names", metavar="NAME", nargs="+")
    v = verbs.add_parser("clean", help="delete downloads and captured tensors from the cache; measured trials are kept")
    v.add_argument("names", metavar="NAME", nargs="*", help="only these assets")
    v.add_argument("--yes", action="store_true", help="do not ask")

    p = command(
        "prune",
        "delete stored trials whose code has changed since",
        "No check reads them any more. What was measured with today's code is kept, and so are saved results.",
        "assay prune --dry-run",
    )
    p.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    p.add_argument("--yes", action="store_true", help="do not ask")

    p = command(
        "doctor",
        "what is installed, what is missing, how to get it",
        "Also the cores, the memory, the graphics card, and the folders that Assay writes to.",
        "assay doctor",
    )
    p.add_argument("--json", action="store_true", help="as JSON")

    p = command(
        "tour",
        "a few quick checks from different fields on real data, and the report",
        "At most five minutes on two cores, after the downloads.",
        "assay tour",
    )
    p.add_argument("--out", metavar="FILE", help="where to write the report")

    p = command(
        "completion",
        "completion of commands, methods and options for your shell",
        "Put the printed script where your shell looks, or evaluate it in its start-up file.",
        'eval "$(assay completion bash)"',
    )
    p.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit status.

    Parameters
    ----------
    argv
        What follows ``assay``; the process's own arguments where None.

    Returns
    -------
    int
        0 done; 1 trials failed; 2 bad usage, or something that was given is wrong; 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _speak()
    try:
        status = _dispatch(argv)
        sys.stdout.flush()
        return status
    except SystemExit as done:  # argparse, after --help and --version
        return done.code if isinstance(done.code, int) else 2
    except KeyboardInterrupt:
        if _debug():
            traceback.print_exc()
        _say("assay: interrupted")
        return 130
    except BrokenPipeError:
        # The reader has gone (`assay list | head`); what is left to flush at exit must go nowhere too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UsageError as error:
        _say(f"{error.program}: {error}")
        return 2
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if _debug():
            traceback.print_exc()
        _say(f"assay: {_sentence(error)}")
        return 2


def _dispatch(argv: list[str]) -> int:
    parser = build_parser()
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in _HANDLERS:
        raise UsageError("assay", unknown("command", argv[0], _HANDLERS))
    asked = parser.parse_args(argv)
    asked.typed = argv
    module, _, function = _HANDLERS[asked.command].partition(":")
    handler: Callable[..., int] = getattr(import_module(module), function)
    return handler(asked)


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, MemoryError):
        return "not enough memory for this: give it a smaller input, or a machine with more"
    return str(error) or type(error).__name__


def _speak() -> None:
    """Let any text be printed: an ASCII stream (``LANG=C``) takes UTF-8, and a name that is no text is spelled out."""
    if isinstance(sys.stdout, TextIOWrapper):
        ascii_only = sys.stdout.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
        sys.stdout.reconfigure(encoding="utf-8" if ascii_only else None, errors="backslashreplace")


def _debug() -> bool:
    return os.environ.get("ASSAY_DEBUG", "") not in ("", "0")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
