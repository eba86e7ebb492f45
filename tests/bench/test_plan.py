"""Jobs and their keys."""

from itertools import product

import pytest

from assay._errors import InputError
from assay.bench._outline import read_outline
from assay.bench._plan import Job, make_plan

STUDY = """
from assay.bench import experiment, prepare

@prepare(per=("arm",), settings={"rate": (1, 2, 3)})
def tried(job): ...

@prepare(per=("arm",), needs=(tried,))
def tuned(job): ...

@prepare(per=("seed", "delta"))
def start(job): ...

@experiment(
    arms=("good", "bad"),
    measures=("loss",),
    settings={"delta": (1, 2), "eps": (0.1, 0.2), "steps": 10},
    ignores={"bad": ("delta",)},
    needs=(tuned, start),
    seeds=2,
)
def race(trial): ...

@experiment(arms=("good",), measures=("loss",), settings={"delta": 1, "width": 5}, needs=(tuned, start), seeds=3)
def walk(trial): ...
"""


@pytest.fixture
def study(bench):
    bench.method("tiny", STUDY)
    return read_outline(bench.methods / "tiny")


def plan(study, **more):
    return make_plan(study, "tiny", "full", **more)


def test_each_arm_runs_once_in_each_cell_that_it_does_not_ignore(study):
    found = [(j.arm, j.seed, tuple(sorted(j.at.items()))) for j in plan(study).trials("race")]
    wanted = [("good", s, (("delta", d), ("eps", e))) for s, d, e in product(range(2), (1, 2), (0.1, 0.2))]
    wanted += [("bad", s, (("eps", e),)) for s, e in product(range(2), (0.1, 0.2))]
    assert sorted(found) == sorted(wanted)


def test_jobs_come_seed_by_seed_and_after_what_they_read(study):
    jobs = plan(study).jobs
    order = {key: i for i, key in enumerate(jobs)}
    for job in jobs.values():
        assert all(order[need.key] < order[job.key] for need in job.needs)
    seeds = [job.seed for job in jobs.values() if job.kind == "trial"]
    assert seeds == sorted(seeds)


def test_a_prepare_runs_once_for_all_who_agree_on_what_it_depends_on(study):
    jobs = plan(study).jobs.values()
    # Per arm, and three rates each: shared by both experiments, all seeds and all cells.
    assert len([j for j in jobs if j.name == "tried"]) == 6
    assert len([j for j in jobs if j.name == "tuned"]) == 2
    # Per seed and delta. The arm that ignores delta has a start of its own, and `walk` has one more seed.
    assert sorted((j.seed, j.settings.get("delta", 0)) for j in jobs if j.name == "start") == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1),
    ]  # fmt: skip
    tuned = next(j for j in jobs if j.name == "tuned")
    assert sorted(need.at["rate"] for need in tuned.needs) == [1, 2, 3]


def test_a_key_changes_with_what_a_result_depends_on_and_with_nothing_else(study):
    def keys(**more):
        return {(j.name, j.arm, j.seed, tuple(j.at.items())): j.key for j in plan(study, **more).jobs.values()}

    base = keys()
    assert keys() == base
    steps = keys(overrides={"steps": 11})
    assert {name for name in base if base[name] != steps[name]} == {n for n in base if n[0] == "race"}
    more = keys(seeds=3)
    assert all(more[name] == key for name, key in base.items())
    assert len(set(more.values())) == len(more)


def test_an_input_counts_by_its_content(bench):
    bench.method(
        "tiny",
        """
        from assay.bench import experiment
        @experiment(arms=("good",), measures=("loss",), inputs={"corpus": ("a", "b"), "model": "m"}, seeds=1)
        def race(trial): ...
        """,
    )
    outline = read_outline(bench.methods / "tiny")
    one = plan(outline, digest=lambda name: name)
    two = plan(outline, digest=lambda name: name + ("!" if name == "b" else ""))
    changed = [a.inputs["corpus"] for a, b in zip(one.trials(), two.trials()) if a.key != b.key]
    assert changed == ["b"]


def test_what_is_walked_together_is_one_trial(bench):
    bench.method(
        "tiny",
        """
        from assay.bench import experiment
        @experiment(
            arms=("good", "bad"), measures=("loss",), settings={"delta": (1, 2, 3), "eps": (1, 2)},
            ignores={"bad": ("eps",)}, together=("arm", "delta"), seeds=1,
        )
        def race(trial): ...
        """,
    )
    trials = plan(read_outline(bench.methods / "tiny")).trials()
    walked = {tuple(j.at.items()): [(arm, at["delta"]) for arm, at in j.cells] for j in trials}
    assert walked == {
        (("eps", 1),): [("good", 1), ("good", 2), ("good", 3)],
        (("eps", 2),): [("good", 1), ("good", 2), ("good", 3)],
        (): [("bad", 1), ("bad", 2), ("bad", 3)],
    }


def test_a_job_survives_its_journey(study):
    import json

    for job in plan(study).jobs.values():
        assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"only": ("rase",)}, "no experiment 'rase'; did you mean 'race'?"),
        ({"overrides": {"step": 1}}, "no setting 'step'; did you mean 'steps'?"),
        ({"inputs": {"steps": "x"}}, "'steps' is a setting of tiny, not an input: write --set steps=..."),
        ({"seeds": 0}, "at least one seed"),
    ],
)
def test_unknown_names_give_the_nearest(study, given, sentence):
    with pytest.raises(InputError) as error:
        plan(study, **given)
    assert sentence in str(error.value)


def test_more_seeds_than_anybody_lists_are_refused(study):
    with pytest.raises(InputError, match="at most 1000 seeds, got 1000000"):
        plan(study, seeds=10**6)
