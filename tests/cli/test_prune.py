"""``assay prune`` says what it would delete, asks, and keeps what checks still read."""


def test_trials_of_changed_code_go_and_a_check_runs_anew(assay, tiny, tmp_path):
    assert assay("prune").out == "nothing is stored\n"
    words = ("check", "tiny-mean", "--only", "compare", "--seeds", "3")
    assert assay(*words).status == 0
    assert assay("prune").out == "nothing is outdated\n"
    changed = tiny(tmp_path / "changed", study=tiny.STUDY.replace("source.gauss(0, 1)", "source.gauss(0, 2)"))
    dry = assay("prune", "--dry-run", ASSAY_METHODS=str(changed))
    assert dry.out.startswith("tiny-mean: 6 jobs of older code")
    refused = assay("prune", ASSAY_METHODS=str(changed), stdin="")
    assert refused.status == 2
    assert "say --yes" in refused.err
    assert "6 reused" in assay(*words).out
    assert assay("prune", "--yes", ASSAY_METHODS=str(changed)).out.endswith("6 jobs deleted\n")
    assert "reused" not in assay(*words).out
