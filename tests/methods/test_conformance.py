"""What all methods share. A new folder below src/assay/methods is covered without a line here."""

import ast
import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import assay
from assay.bench._card import check_card, load_card
from assay.bench._methods import METHODS, method_folders
from assay.bench._outline import read_outline
from assay.cli._run import choose, commands
from assay.cli._signature import read_docstring

ROOT = Path(assay.__file__).parents[2]
FOLDERS = method_folders(METHODS)
HEAVY = ("numpy", "scipy", "pandas", "sklearn", "torch", "transformers", "numba", "matplotlib")

each_method = pytest.mark.parametrize("slug", FOLDERS)


def public_names(slug: str) -> dict[str, object]:
    """What a method exports; skips where a package of its extras is not installed."""
    try:
        module = importlib.import_module(f"assay.methods.{FOLDERS[slug].name}")
    except ImportError as error:
        pytest.skip(str(error))
    return {name: getattr(module, name) for name in module.__all__}


# The card


@each_method
def test_the_card_is_valid_and_its_claims_exist_in_the_study(slug):
    card = load_card(FOLDERS[slug])
    outline = read_outline(FOLDERS[slug])
    check_card(card, outline)
    assert card.name == slug
    for experiment in outline.experiments.values():
        assert experiment.doc, f"{experiment.name} has no docstring: the report shows it"


@each_method
def test_every_claim_says_how_it_was_tested(slug):
    card = load_card(FOLDERS[slug])
    assert any(claim.reported for claim in card.claims), "no claim gives the paper's own figure"
    for claim in card.claims:
        assert claim.says.rstrip().endswith("."), f"{claim.id}: a sentence ends in a full stop"
        if claim.testable == "no":
            assert claim.because, f"{claim.id}: says why it cannot be tested here"
        else:
            assert claim.experiment, f"{claim.id}: names the experiment that measures it"
            assert bool(claim.holds_if) != bool(claim.report), f"{claim.id}: has holds_if, or report"
        if claim.testable == "scaled":
            assert claim.because, f"{claim.id}: says what is smaller"


@each_method
def test_every_experiment_serves_a_claim(slug):
    used = {claim.experiment for claim in load_card(FOLDERS[slug]).claims}
    assert set(read_outline(FOLDERS[slug]).experiments) <= used


@each_method
def test_its_extras_are_extras_of_assay(slug):
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(load_card(FOLDERS[slug]).extras) <= set(known)


# The public face


@each_method
def test_the_package_says_what_the_method_does(slug):
    doc = ast.get_docstring(ast.parse((FOLDERS[slug] / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert 3 <= len(doc.splitlines()) <= 20, (
        "the docstring of __init__.py says in ten lines what it does and when to reach for it"
    )


@each_method
def test_public_names_have_numpy_docstrings(slug):
    unexplained = []
    for name, value in public_names(slug).items():
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        assert value.__doc__, f"{name} has no docstring"
        explained: set[str] = set()
        if inspect.isclass(value):
            if issubclass(value, BaseException | tuple | dict):
                continue
            for base in value.__mro__[:-1]:  # what a class shares with its base is explained there
                docs = read_docstring(base.__doc__)
                explained |= {*docs.parameters, *_attributes(docs.sections.get("Attributes", ""))}
                explained |= set(read_docstring(base.__init__.__doc__).parameters)
        else:
            explained |= set(read_docstring(value.__doc__).parameters)
        parameters = [
            p.name
            for p in inspect.signature(value).parameters.values()
            if p.name != "self" and not p.name.startswith("_") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        unexplained += [f"{name}({parameter})" for parameter in parameters if parameter not in explained]
    assert not unexplained, "a Parameters section lacks these"


def _attributes(section: str) -> list[str]:
    heads = [line.partition(" :")[0] for line in section.splitlines() if line and not line[0].isspace()]
    return [name.strip() for head in heads for name in head.split(",")]


# The command


@each_method
def test_every_option_of_its_command_is_explained(slug):
    for verb, function in commands(FOLDERS[slug]).items():
        docs = read_docstring(function.__doc__)
        assert docs.summary, f"{verb} has no docstring"
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.kind is parameter.KEYWORD_ONLY, f"{verb}({parameter.name}) is keyword-only"
            assert docs.parameters.get(parameter.name), (
                f"{verb} does not explain {parameter.name}: its --help is the docstring"
            )


@each_method
def test_the_commands_of_its_card_parse(slug):
    card = load_card(FOLDERS[slug])
    assert card.takes, "says for which files `assay list --for` names it"
    for takes in card.takes:
        words = shlex.split(takes.command.replace("{path}", "file"))
        assert words[:3] == ["assay", "run", slug], takes.command
        _, parser, rest = choose(slug, commands(FOLDERS[slug]), words[3:])
        parser.parse_args(rest)


@each_method
def test_the_kinds_that_it_takes_are_known(slug):
    from assay.data import KINDS

    assert {takes.kind for takes in load_card(FOLDERS[slug]).takes} <= set(KINDS)


@each_method
def test_its_card_plan_and_options_are_read_without_anything_heavy(slug):
    program = f"""
import sys
from pathlib import Path
from assay.bench._card import load_card
from assay.bench._outline import read_outline
from assay.cli._run import commands, parser_of
folder = Path({str(FOLDERS[slug])!r})
load_card(folder), read_outline(folder)
[parser_of(function, "x") for function in commands(folder).values()]
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


# The house


@each_method
def test_it_has_a_benchmark_tests_and_a_page(slug):
    name = FOLDERS[slug].name
    benchmark = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))
    assert "measure" in {node.name for node in benchmark.body if isinstance(node, ast.FunctionDef)}
    assert list((ROOT / "tests" / "methods" / name).glob("test_*.py"))
    page = (ROOT / "docs" / "methods" / f"{slug}.md").read_text(encoding="utf-8")
    assert f"<!-- generated: claims {slug} -->" in page
    assert f"assay run {slug}" in page
    assert f"::: assay.methods.{name}" in page


@each_method
def test_a_fast_path_has_its_slow_twin(slug):
    kernels = list(FOLDERS[slug].glob("_kernel*.py"))
    assert not kernels or (FOLDERS[slug] / "reference.py").is_file()


# The study


def cheapest(slug: str) -> str | None:
    """The experiment of the quick scale with the least minutes allowed, over all its trials of a seed."""
    costs = {}
    for name, experiment in read_outline(FOLDERS[slug]).experiments.items():
        scaled = experiment.at_scale("quick", seeds=1)
        if scaled is not None and scaled.device is None:
            cells = len(scaled.arms)
            for values in scaled.axes.values():
                cells *= len(values)
            costs[name] = experiment.minutes * cells
    return min(costs, key=costs.get) if costs else None


def run_once(slug: str, *only: str) -> dict:
    """A quick check with one seed, in processes of its own as a user starts it, on the data that are here."""
    command = [sys.executable, "-m", "assay", "check", slug, "--seeds", "1", "--json"]
    for name in only:
        command += ["--only", name]
    said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ASSAY_OFFLINE": "1"})
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


def held(found: dict, slug: str) -> None:
    if found["trials"]["skipped"] and not found["trials"]["done"] + found["trials"]["reused"]:
        pytest.skip("the data of this study are not on this machine")
    assert found["trials"]["failed"] == found["trials"]["missing"] == 0
    assert found["trials"]["done"] + found["trials"]["reused"] > 0
    words = {claim["id"]: claim["verdict"] for claim in found["claims"]}
    assert not set(words.values()) & {"holds", "fails"}, "one seed decided a claim"


@each_method
def test_the_cheapest_experiment_runs(slug):
    name = cheapest(slug)
    if name is None:
        pytest.skip("no experiment at the quick scale without a graphics card")
    held(run_once(slug, name), slug)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_method
def test_the_quick_study_runs(slug):
    held(run_once(slug), slug)
