"""The arrows between the rooms go one way. Every method that has a folder is covered."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import assay
from assay.bench._methods import METHODS, method_folders

SOURCE = Path(assay.__file__).parent
ROOT = SOURCE.parents[1]
FOLDERS = method_folders(METHODS)


def imports_of(path: Path) -> set[str]:
    """The modules of Assay that a file imports, inside its functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # a relative import starts from the folder, one level up a dot more
            above = path.relative_to(SOURCE.parent).parts[: -node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "assay"}


def test_the_contracts_of_the_layout_are_kept():
    # in a process of its own: the linter's logging configuration disables every logger that exists by then
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    said = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr


def test_a_broken_arrow_is_found(tmp_path):
    package = tmp_path / "assay"
    for room in ("stats", "data", "bench", "cli", "lm", "methods", "methods/one", "methods/two"):
        (package / room).mkdir(parents=True, exist_ok=True)
        (package / room / "__init__.py").touch()
    (package / "__init__.py").touch()
    broken = {
        "stats/mean.py": "import assay.data",
        "methods/one/algorithm.py": "import assay.bench",
        "methods/two/algorithm.py": "import assay.methods.one",
        "bench/run.py": "import assay.methods.one",
        "lm/load.py": "import assay.bench",
    }
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.importlinter]")
    (tmp_path / "pyproject.toml").write_text(contracts[1] + contracts[2], encoding="utf-8")
    lint = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import *; sys.exit(lint_imports(no_cache=True))",
    ]
    (package / "bench" / "count.py").touch()
    (package / "methods" / "one" / "study.py").write_text("import assay.bench\nimport assay.bench.count\n")
    clean = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert clean.returncode == 0, clean.stdout + clean.stderr
    for name, text in broken.items():
        (package / name).write_text(text + "\n")
        said = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
        assert (said.returncode, "BROKEN" in said.stdout) == (1, True), f"{name} with {text!r} was not found"
        (package / name).unlink()


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert [
        path for path in SOURCE.rglob("*.py") if {path.stem.strip("_"), path.parent.name.strip("_")} & drawers
    ] == []


@pytest.mark.parametrize("slug", FOLDERS)
def test_an_algorithm_stands_alone(slug):
    own = f"assay.methods.{FOLDERS[slug].name}"
    for path in sorted(FOLDERS[slug].rglob("*.py")):
        if path.name in ("study.py", "command.py"):
            continue
        for name in imports_of(path):
            assert not name.startswith(("assay.bench", "assay.cli")), f"{path.name} imports {name}"
            if name.startswith("assay.methods."):
                assert name == own or name.startswith(own + "."), f"{path.name} imports another method: {name}"
                assert name.split(".")[3:4] not in (["study"], ["command"]), f"{path.name} imports {name}"
