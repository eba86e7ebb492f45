"""A fingerprint changes with the code that a trial runs, and with no other."""

import shutil
from pathlib import Path

import pytest

import assay
from assay.bench._fingerprint import fingerprints
from assay.bench._outline import read_outline

STUDY = '''
"""Text."""
import math
from typing import TYPE_CHECKING
from assay.bench import experiment, prepare
from assay.methods.tiny._algorithm import solve
if TYPE_CHECKING:
    from assay.data import corpus

RATE = 0.1
SEEDS = 2

@prepare()
def tuned(job):
    return {"x": helper(1)}

def helper(x):
    """Help."""
    return x * RATE

def ranks(arms):
    return {}

@experiment(arms=("good", "bad"), measures=("loss",), needs=(tuned,), seeds=SEEDS, derive=ranks)
def race(trial):
    # a comment
    return {"loss": solve(1)}

@experiment(arms=("good",), measures=("loss",))
def walk(trial):
    return {"loss": math.pi}
'''
FILES = {
    "_algorithm_py": "def solve(x):\n    from assay.methods.tiny import _deep\n    return _deep.root(x)\n",
    "_deep_py": "from assay.stats_copy import mean\ndef root(x):\n    return mean(x)\n",
    "command_py": "def run(): ...\n",
}


@pytest.fixture
def copy(bench, monkeypatch):
    """A method, and a copy of a shared room that it imports."""
    bench.method("tiny", STUDY, **FILES)
    root = bench.methods.parent / "assay"
    (root / "stats_copy").mkdir(parents=True)
    (root / "__init__.py").touch()
    (root / "stats_copy" / "__init__.py").write_text(
        "_LAZY = {'mean': '_mean', 'other': '_other'}\ndef __getattr__(name): ...\n"
    )
    (root / "stats_copy" / "_mean.py").write_text("def mean(x):\n    return x\n")
    (root / "stats_copy" / "_other.py").write_text("def other(x):\n    return x\n")
    (root / "apart.py").write_text("x = 1\n")
    monkeypatch.setattr(assay, "__file__", str(root / "__init__.py"))
    return bench


def read(bench):
    return fingerprints(read_outline(bench.methods / "tiny"))


def changed(bench, path, old, new):
    before = read(bench)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    after = read(bench)
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("# a comment", "# another comment", set()),
        ('"""Help."""', '"""Help more."""', set()),
        ("return x * RATE", "return (x *\n        RATE)", set()),
        ("SEEDS = 2", "SEEDS = 3", set()),
        ('measures=("loss",), needs', 'measures=("loss", "more"), needs', set()),
        ("from assay.data import corpus", "from assay.data import split", set()),
        ("RATE = 0.1", "RATE = 0.2", {"race", "tuned"}),
        ("return x * RATE", "return x + RATE", {"race", "tuned"}),
        ("solve(1)", "solve(2)", {"race"}),
        ("math.pi", "math.e", {"walk"}),
        ("    return {}", "    return {'good': {}}", {"ranks"}),
    ],
)
def test_of_a_study_counts_what_the_experiment_reaches(copy, old, new, stale):
    assert changed(copy, copy.methods / "tiny" / "study.py", old, new) == stale


def test_of_the_method_and_the_shared_rooms_counts_what_is_imported(copy):
    method, shared = copy.methods / "tiny", copy.methods.parent / "assay"
    assert changed(copy, method / "_algorithm.py", "(x)\n", "(x + 1)\n") == {"race"}
    assert changed(copy, method / "_deep.py", "mean(x)", "mean(x) + 1") == {"race"}
    assert changed(copy, shared / "stats_copy" / "_mean.py", "return x", "return x / 2") == {"race"}
    assert changed(copy, shared / "apart.py", "1", "2") == set()
    assert changed(copy, method / "command.py", "run", "go") == set()
    assert changed(copy, method / "card.toml", "tests", "trials") == set()


def test_a_data_file_of_the_method_counts(copy):
    before = read(copy)
    (copy.methods / "tiny" / "table.csv").write_text("1,2\n")
    assert all(before[name] != after for name, after in read(copy).items())


def test_the_workbench_itself_does_not_count(copy, tmp_path):
    # The copy of the package has no workbench at all, and the study imports it.
    assert not (Path(assay.__file__).parent / "bench").exists()
    assert read(copy)


def test_a_method_counts_the_same_wherever_it_lies(copy, tmp_path):
    shutil.copytree(copy.methods, tmp_path / "elsewhere")
    assert fingerprints(read_outline(tmp_path / "elsewhere" / "tiny")) == read(copy)
