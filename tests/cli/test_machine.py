"""`assay doctor`, `data` and `completion`."""

import json
import shutil
import subprocess
from importlib import metadata

import pytest

from assay.cli._doctor import _extras, _within


def test_doctor_tells_what_is_there(assay):
    found = json.loads(assay("doctor", "--json").out)
    assert found["cores"] >= 1
    assert found["folders"]["home"] == {**found["folders"]["home"], "path": str(assay.home), "bytes": 0}
    torch = next(p for p in found["extras"]["torch"]["packages"] if p["name"] == "torch")
    assert torch["good"] == (torch["installed"] is not None)
    assert found["methods"]["tiny-mean"]["extras"] == ["tables"]
    said = assay("doctor").out
    assert "python" in said
    assert "tiny-mean" in said


def test_doctor_names_the_pip_line_of_what_is_missing(assay, monkeypatch, capsys):
    from assay.cli import main

    true = metadata.version

    def version(name):
        if name == "scikit-learn":
            raise metadata.PackageNotFoundError(name)
        return true(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "lacks scikit-learn" in said
    assert 'pip install -e ".[tables]"' in said


def test_an_extra_brings_the_extras_inside_it():
    extras = {name: {p["name"] for p in packages} for name, packages in _extras().items()}
    assert extras["torch"] < extras["lm"] < extras["all"]
    assert "pytest" not in set.union(*extras.values())


@pytest.mark.parametrize(
    ("version", "bound", "good"),
    [
        ("2.13.0+cpu", ">=2.9", True),
        ("2.8.1", ">=2.9", False),
        ("6.0", "<6", False),
        ("5.24.0", "<6", True),
        ("5.20", ">=5.20", True),
        ("2.8", "==2.8.0", True),
        ("2.8.1", "==2.8.0", False),
        ("26.0.1", ">=17", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, bound, good):
    assert _within(version, bound) is good


def test_data_list_and_show(assay):
    rows = {row["name"]: row for row in json.loads(assay("data", "list", "--json").out)}
    assert rows["house"]["licence"] == "CC0-1.0"
    assert rows["house"]["path"]  # comes with Assay
    shown = json.loads(assay("data", "show", "house", "--json").out)
    assert shown == rows["house"]
    said = assay("data", "show", "cifar10h").out
    assert "its licence forbids Assay to ship it" in " ".join(said.split()) or "lies at" in said
    assert "shakespeare" in assay("data", "list").out


def test_data_get_gives_the_path(assay):
    said = assay("data", "get", "house")
    assert said.status == 0
    name, _, path = said.out.strip().partition(": ")
    assert name == "house"
    assert path.endswith(("house.csv", "kc_house_data.csv.xz", "kc_house_data.csv")) or "house" in path


def test_data_offline_says_what_is_missing(assay, tmp_path):
    said = assay(
        "data", "get", "shakespeare", ASSAY_OFFLINE="1", ASSAY_CACHE=str(tmp_path / "cache"), ASSAY_DATA_PATH=""
    )
    assert said.status == 2
    assert "ASSAY_OFFLINE" in said.err
    assert said.err.count("\n") == 1


def test_data_clean_asks_first(assay, tmp_path):
    cache = tmp_path / "cache"
    (cache / "assets").mkdir(parents=True)
    (cache / "assets" / "old").write_bytes(b"x" * 2048)
    left = assay.home / "prepared" / "key"
    left.mkdir(parents=True)
    (left / "tensor").write_bytes(b"x" * 2048)
    refused = assay("data", "clean", ASSAY_CACHE=str(cache))
    assert refused.status == 2
    assert "--yes" in refused.err
    assert left.exists()
    done = assay("data", "clean", "--yes", ASSAY_CACHE=str(cache))
    assert (done.status, done.out) == (0, "4.0 KiB freed\n")
    assert not (cache / "assets" / "old").exists()
    assert not left.exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_methods_and_their_options(assay, shell):
    said = assay("completion", shell)
    assert said.status == 0
    assert said.err == ""
    deep = (
        () if shell == "tcsh" else ("--dry-run", "--column", "geometric")
    )  # shtab's tcsh knows no options below a command
    for name in ("tiny-mean", "shakespeare", *deep):
        assert name in said.out, name


def test_bash_sources_the_completion_and_completes(assay, tmp_path):
    script = tmp_path / "completion.sh"
    script.write_text(assay("completion", "bash").out)

    def complete(*words: str) -> set[str]:
        line = " ".join(words)
        program = f"""
set -e; source {script}
COMP_WORDS=({line} ''); COMP_CWORD={len(words)}; COMP_LINE='{line} '; COMP_POINT={len(line) + 1}
$(complete -p assay | sed 's/.*-F \\([^ ]*\\).*/\\1/') assay '' {words[-1]}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        said = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
        assert said.stderr == ""
        return set(said.stdout.split())

    assert {"list", "show", "check", "tour"} <= complete("assay")
    assert "tiny-mean" in complete("assay", "show")
    assert "tiny-mean" in complete("assay", "run")
    assert complete("assay", "check", "--scale") == {"quick", "full", "paper"}


def test_zsh_reads_the_completion(assay, tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    script = tmp_path / "_assay"
    script.write_text(assay("completion", "zsh").out)
    assert subprocess.run(["zsh", "-n", str(script)], capture_output=True).returncode == 0
