"""What an effect is and what its interval is made of, against values worked out by hand or by another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.proportion import proportion_confint

from assay.bench import Cases, Count, Exact
from assay.bench._effect import scale_of
from assay.bench._language import parse_expression
from assay.stats import mean_interval

from .evidence import Experiment, decide

RNG = np.random.default_rng(11)
SEEDS = 5
A, B = RNG.normal(size=(2, SEEDS)) * 0.1 + np.array([[2.0], [1.0]])
TWO = Experiment(("a", "b"))


def numbers(**by_arm):
    return lambda arm, at, seed: {"x": float(by_arm[arm][seed])}


def test_a_difference_is_averaged_as_it_is_and_its_interval_is_the_paired_one():
    verdict = decide(TWO, numbers(a=A, b=B), "x[a] > x[b]")
    assert verdict.effect == pytest.approx((A - B).mean())
    assert verdict.per_seed == pytest.approx(list(A - B))
    expected = scipy_stats.ttest_rel(A, B).confidence_interval(0.95)
    assert verdict.interval == pytest.approx((expected.low, expected.high))


def test_quotients_are_averaged_as_logarithms():
    verdict = decide(TWO, numbers(a=A, b=B), "x[a] / x[b] >= 1.5")
    logs = np.log(A / B)
    assert verdict.effect == pytest.approx(math.exp(logs.mean()))
    assert verdict.interval == pytest.approx(np.exp(mean_interval(logs)))
    assert verdict.per_seed == pytest.approx(list(A / B))
    # so that a claim and its inverse are one
    inverse = decide(TWO, numbers(a=A, b=B), "x[b] / x[a] <= 0.6666666666666666")
    assert 1 / inverse.effect == pytest.approx(verdict.effect)
    assert inverse.verdict == verdict.verdict


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("x[a] / x[b]", "log"),
        ("2 * x[a] * y[a] / (x[b] + y[b])", "log"),
        ("1 / x[a]", "log"),
        ("x[a] / max(x[b|c])", "log"),
        ("share(x[a] < 1) / share(x[b] < 1)", "log"),
        ("speedup(x[a], x[b])", "log"),
        ("x[a] / 2", "linear"),
        ("x[a] / delta", "linear"),
        ("x[a] * x[b]", "linear"),
        ("(x[a] - x[b]) / x[b]", "linear"),
        ("-x[a] / x[b]", "linear"),
        ("slope(x[a], n) / slope(x[b], n)", "linear"),
        ("1 - x[a] / x[b]", "linear"),
        ("pearson(x[a], x[b])", "z"),
        ("-spearman(x[a], x[b])", "z"),
        ("abs(pearson(x[a], x[b]))", "linear"),
        ("auc(x[a], y[a])", "linear"),
    ],
)
def test_the_form_alone_tells_the_scale(text, scale):
    assert scale_of(parse_expression(text)) == scale


def test_a_relative_gain_may_be_negative():
    verdict = decide(TWO, numbers(a=A, b=B), "(x[b] - x[a]) / x[a] >= 0.02")
    assert verdict.verdict == "fails"
    assert verdict.effect == pytest.approx(((B - A) / A).mean())


@pytest.mark.parametrize("zero", [0.0, -1.0])
def test_a_quotient_without_a_logarithm_is_open_and_says_what_to_write(zero):
    verdict = decide(TWO, numbers(a=[1, 2, zero, 1, 2], b=B), "x[a] / x[b] <= 1")
    assert verdict.verdict == "open"
    assert "has no logarithm under every seed: write a - c * b <= 0" in verdict.note
    assert "no logarithm" in decide(TWO, numbers(a=A, b=[1, 2, zero, 1, 2]), "x[a] / x[b] <= 1").note


def test_correlations_are_averaged_as_fishers_z():
    x = RNG.normal(size=(SEEDS, 30))
    y = x + RNG.normal(size=(SEEDS, 30))

    def measures(arm, at, seed):
        return {"x": Cases(x[seed]), "y": Cases(y[seed])}

    for name, scipys in (("pearson", scipy_stats.pearsonr), ("spearman", scipy_stats.spearmanr)):
        verdict = decide(Experiment(("a",)), measures, f"{name}(x[a], y[a]) >= 0.2")
        r = np.array([scipys(x[s], y[s])[0] for s in range(SEEDS)])
        assert verdict.per_seed == pytest.approx(list(r))
        assert verdict.effect == pytest.approx(math.tanh(np.arctanh(r).mean()))
        negative = decide(Experiment(("a",)), measures, f"-{name}(x[a], y[a]) <= -0.2")
        assert negative.effect == pytest.approx(-verdict.effect)
        assert negative.interval == pytest.approx((-verdict.interval[1], -verdict.interval[0]))


# ---------------------------------------------------------------------------------------------------------------- axes

GRID = Experiment(("a", "b"), {"n": (1, 2, 4), "t": ("u", "v")}, ignores={"b": ("n",)})
TABLE = {
    key: RNG.uniform(1, 2, SEEDS)
    for key in [("a", n, t) for n in (1, 2, 4) for t in "uv"] + [("b", None, t) for t in "uv"]
}


def table(arm, at, seed):
    return {"x": float(TABLE[(arm, at.get("n"), at["t"])][seed])}


def test_an_axis_that_is_not_named_is_averaged_over_rival_against_rival():
    verdict = decide(GRID, table, "x[a] / x[b] <= 5")
    logs = np.mean([np.log(TABLE["a", n, t] / TABLE["b", None, t]) for n in (1, 2, 4) for t in "uv"], axis=0)
    assert verdict.effect == pytest.approx(math.exp(logs.mean()))
    assert verdict.interval == pytest.approx(np.exp(mean_interval(logs)))


def test_a_named_axis_is_fixed_and_two_values_are_their_mean():
    verdict = decide(GRID, table, "x[a, n=1|4, t=u] - x[b, t=v] <= 5")
    expected = (TABLE["a", 1, "u"] + TABLE["a", 4, "u"]) / 2 - TABLE["b", None, "v"]
    assert verdict.per_seed == pytest.approx(list(expected))


def test_a_cell_fixes_its_axes_and_an_arm_that_ignores_one_stands_at_all_its_values():
    verdict = decide(GRID, table, "x[a] - x[b] <= 5", each=("n=1|4", "t"))
    for condition in verdict.conditions:
        n, t = condition.cell["n"], condition.cell["t"]
        assert condition.effect == pytest.approx((TABLE["a", n, t] - TABLE["b", None, t]).mean())
    assert [c.cell for c in verdict.conditions] == [{"n": n, "t": t} for n in (1, 4) for t in "uv"]


def test_what_a_reference_names_goes_before_the_cell():
    verdict = decide(GRID, table, "x[a, n=1] - x[a] <= 5", each="n=4")
    expected = np.mean([TABLE["a", 1, t] - TABLE["a", 4, t] for t in "uv"], axis=0)
    assert verdict.per_seed == pytest.approx(list(expected))


def test_an_axis_is_its_value_in_the_cell_and_averaged_over_where_no_cell_fixes_it():
    verdict = decide(GRID, table, "x[a] <= 2 * n", each="n")
    assert [c.bar for c in verdict.conditions] == [2, 4, 8]
    verdict = decide(GRID, table, "x[a] <= n")
    expected = np.mean([TABLE["a", n, t] - n for n in (1, 2, 4) for t in "uv"], axis=0)
    assert (verdict.per_seed, verdict.bar) == (pytest.approx(list(expected)), 0)


def test_a_setting_with_one_value_can_be_a_bar():
    experiment = Experiment(("a", "b"), settings={"target": 1.5})
    assert decide(experiment, numbers(a=A, b=B), "x[a] >= target").bar == 1.5
    assert decide(experiment, numbers(a=A, b=B), "x[a, target=1.5] >= x[b]").verdict == "holds"


def test_functions_over_an_axis():
    n = np.array([1.0, 2.0, 4.0])
    at_u = np.array([TABLE["a", k, "u"] for k in (1, 2, 4)])
    fits = [scipy_stats.linregress(n, at_u[:, s]) for s in range(SEEDS)]
    powers = [scipy_stats.linregress(np.log(n), np.log(at_u[:, s])).slope for s in range(SEEDS)]
    expected = {
        "slope": [f.slope for f in fits],
        "r2": [f.rvalue**2 for f in fits],
        "exponent": powers,
        "spread": list(np.ptp(at_u, axis=0)),
    }
    for name, values in expected.items():
        verdict = decide(GRID, table, f"{name}(x[a, t=u], n) <= 9")
        assert verdict.per_seed == pytest.approx(values)
        assert verdict.interval == pytest.approx(mean_interval(np.array(values)))


def test_a_function_over_an_axis_with_one_value_here_is_open():
    verdict = decide(Experiment(("a",), {"n": (3,)}), lambda arm, at, seed: {"x": float(A[seed])}, "slope(x[a], n) > 0")
    assert verdict.verdict == "open"
    assert "needs at least two values of n, and 1 is run" in verdict.note


def test_an_arithmetic_of_everything():
    verdict = decide(TWO, numbers(a=A, b=B), "abs(log(x[a]) - exp(-x[b] * 2)) + 3 / 2 <= 9")
    assert verdict.per_seed == pytest.approx(list(np.abs(np.log(A) - np.exp(-2 * B)) + 1.5))


# ------------------------------------------------------------------------------------------------------ the best rival


def test_the_best_rival_is_chosen_once():
    c = B + np.array([1, -1, 1, -1, -0.5])  # best under two seeds, worse on average
    verdict = decide(Experiment(("a", "b", "c")), numbers(a=A, b=B, c=c), "x[a] - max(x[b|c]) >= 0")
    assert verdict.per_seed == pytest.approx(list(A - B))
    least = decide(Experiment(("a", "b", "c")), numbers(a=A, b=B, c=c), "x[a] - min(x[b|c]) >= 0")
    assert least.per_seed == pytest.approx(list(A - c))


def test_the_best_rival_is_chosen_once_over_all_places():
    experiment = Experiment(("a", "b", "c"), {"n": (1, 2)})

    def measures(arm, at, seed):
        base = {"a": 0, "b": 5, "c": 4 + (at["n"] == 1) * 2 - (at["n"] == 2)}[arm]
        return {"x": base + float(A[seed]) * (1 + (arm == "a"))}

    # c is best at n=1 and b at n=2; b has the higher mean
    verdict = decide(experiment, measures, "x[a] - max(x[b|c]) <= 0")
    assert verdict.per_seed == pytest.approx(list(A - 5))
    each = decide(experiment, measures, "x[a] - max(x[b|c]) <= 0", each="n")
    assert [c.effect for c in each.conditions] == pytest.approx([(A - 6).mean(), (A - 5).mean()])


def test_the_best_of_several_sides_and_within_cases():
    cases = {"a": RNG.normal(size=40), "b": RNG.normal(size=40) + 1, "c": RNG.normal(size=40) - 1}

    def measures(arm, at, seed):
        return {"x": Cases(cases[arm] + 0.01 * seed), "y": float(A[seed])}

    experiment = Experiment(("a", "b", "c"))
    verdict = decide(experiment, measures, "share(x[a] <= min(x[b|c])) >= 0")
    assert verdict.effect == pytest.approx(np.mean(cases["a"] <= cases["c"]))
    verdict = decide(experiment, measures, "max(y[a], 2 * y[b], 0) >= 0")
    assert verdict.per_seed == pytest.approx(list(2 * A))


def test_a_rival_that_is_missing_leaves_the_choice_open():
    verdict = decide(Experiment(("a", "b")), numbers(a=A, b=B), "x[a] >= max(x[b|c])")
    assert verdict.verdict == "open"
    assert "c, seed 0" in verdict.note


# --------------------------------------------------------------------------------------------------------------- cases


def same(values):
    """The same cases under every seed, as an evaluation without chance."""
    return lambda arm, at, seed: {"x": Cases(values[arm])}


def test_cases_that_no_seed_moves_have_the_paired_interval_of_the_cases():
    values = {"a": RNG.normal(size=50), "b": RNG.normal(size=50)}
    verdict = decide(TWO, same(values), "x[a] <= x[b]")
    expected = scipy_stats.ttest_rel(values["a"], values["b"]).confidence_interval(0.95)
    assert verdict.interval == pytest.approx((expected.low, expected.high))


def test_the_two_intervals_are_joined():
    base = {"a": RNG.normal(size=50), "b": RNG.normal(size=50)}
    shift = np.array([-2.0, -1, 0, 1, 2]) * 0.2

    def measures(arm, at, seed):
        return {"x": Cases(base[arm] + (arm == "a") * shift[seed])}

    verdict = decide(TWO, measures, "x[a] <= x[b]")
    cases = mean_interval(base["a"] - base["b"])
    seeds = mean_interval((base["a"] - base["b"]).mean() + shift)
    assert verdict.interval == pytest.approx((min(cases[0], seeds[0]), max(cases[1], seeds[1])))


def test_values_are_averaged_over_the_seeds_before_cases_are_left_out():
    noise = RNG.normal(size=(SEEDS, 50))
    verdict = decide(Experiment(("a",)), lambda arm, at, seed: {"x": Cases(noise[seed])}, "x[a] <= 9")
    cases, seeds = mean_interval(noise.mean(axis=0)), mean_interval(noise.mean(axis=1))
    assert verdict.interval == pytest.approx((min(cases[0], seeds[0]), max(cases[1], seeds[1])))


def test_new_cases_under_every_seed_are_all_cases():
    values = RNG.normal(size=(SEEDS, 20))

    def measures(arm, at, seed):
        return {"x": Cases(values[seed], [f"{seed}-{i}" for i in range(20)])}

    verdict = decide(Experiment(("a",)), measures, "x[a] <= 9")
    error = scipy_stats.sem(values.ravel())
    low = values.mean() - scipy_stats.t.ppf(0.975, 99) * error
    seeds = mean_interval(values.mean(axis=1))
    assert verdict.interval[0] == pytest.approx(min(low, seeds[0]), rel=2e-2)


def test_a_quotient_leaves_out_one_case_at_a_time():
    values = {"a": RNG.uniform(1, 2, 30), "b": RNG.uniform(1, 2, 30)}
    verdict = decide(TWO, same(values), "x[a] / x[b] <= 9")
    a, b = values["a"], values["b"]
    whole = math.log(a.mean() / b.mean())
    pseudo = [30 * whole - 29 * math.log(np.delete(a, i).mean() / np.delete(b, i).mean()) for i in range(30)]
    assert verdict.interval == pytest.approx(np.exp(mean_interval(np.array(pseudo))))
    assert verdict.effect == pytest.approx(math.exp(whole))


def test_many_cases_in_groups_have_nearly_the_interval_of_single_ones():
    values = {"a": RNG.normal(size=3001), "b": RNG.normal(size=3001)}
    verdict = decide(TWO, same(values), "x[a] <= x[b]")
    expected = scipy_stats.ttest_rel(values["a"], values["b"]).confidence_interval(0.95)
    assert verdict.interval[1] - verdict.interval[0] == pytest.approx(expected.high - expected.low, rel=0.12)


def test_a_case_is_found_by_its_id_whatever_its_place():
    values = {"a": RNG.normal(size=40), "b": RNG.normal(size=40)}
    order = RNG.permutation(40)

    def measures(arm, at, seed):
        if arm == "b" and seed % 2:
            return {"x": Cases(values["b"][order], [f"case-{i}" for i in order])}
        return {"x": Cases(values[arm], [f"case-{i}" for i in range(40)])}

    for text in ("x[a] <= x[b]", "share(x[a] <= x[b]) <= 1", "pearson(x[a], x[b]) <= 1", "spearman(x[a], x[b]) <= 1"):
        assert decide(TWO, measures, text).interval == pytest.approx(decide(TWO, same(values), text).interval)


def test_arms_with_different_cases_are_compared_on_those_they_share_and_it_is_said():
    values = RNG.normal(size=(2, 50))

    def measures(arm, at, seed):
        kept = slice(0, 45) if arm == "a" else slice(10, 50)
        return {"x": Cases(values[int(arm == "b")][kept], range(50)[kept])}

    verdict = decide(TWO, measures, "x[a] <= x[b]")
    difference = values[0, 10:45] - values[1, 10:45]
    assert verdict.effect == pytest.approx(difference.mean())
    assert verdict.interval == pytest.approx(mean_interval(difference))
    assert "x is compared on the 35 cases that the arms share, of 40 and 45" in verdict.note


def test_arms_without_a_common_case_are_open():
    verdict = decide(TWO, lambda arm, at, seed: {"x": Cases([1.0, 2.0], [arm + "1", arm + "2"])}, "x[a] <= x[b]")
    assert verdict.verdict == "open"
    assert "x has no case in common between the arms" in verdict.note


def test_two_measures_of_different_cases_stand_side_by_side():
    heads, domains = RNG.uniform(1, 2, 60), RNG.uniform(1, 2, 7)

    def measures(arm, at, seed):
        return {"x": Cases(heads), "y": Cases(domains, [f"domain-{i}" for i in range(7)])}

    verdict = decide(Experiment(("a",)), measures, "x[a] - y[a] <= 9")
    assert verdict.effect == pytest.approx(heads.mean() - domains.mean())
    assert "compared" not in verdict.note


def test_a_single_case_is_a_number():
    verdict = decide(TWO, lambda arm, at, seed: {"x": Cases([float((A if arm == "a" else B)[seed])])}, "x[a] >= x[b]")
    assert verdict.interval == pytest.approx(mean_interval(A - B))
    assert "the seeds alone" in verdict.note


# -------------------------------------------------------------------------------------------------- shares and counts


def test_a_count_has_clopper_and_pearsons_interval_over_all_seeds():
    verdict = decide(Experiment(("a",)), lambda arm, at, seed: {"x": Count(3, 40)}, "x[a] <= 0.2")
    assert verdict.interval == pytest.approx(proportion_confint(15, 200, method="beta"))
    assert verdict.verdict == "holds"


def test_all_of_a_count_is_no_certainty():
    for seeds, n, word in ((5, 40, "open"), (5, 100, "holds")):
        experiment = Experiment(("a",), seeds=tuple(range(seeds)))
        verdict = decide(experiment, lambda arm, at, seed, n=n: {"x": Count(n, n)}, "x[a] >= 0.99")
        assert verdict.interval == pytest.approx((0.025 ** (1 / (seeds * n)), 1.0))
        assert verdict.verdict == word


def test_a_count_times_a_number_and_less_than_one():
    verdict = decide(Experiment(("a",)), lambda arm, at, seed: {"x": Count(3, 40)}, "100 * (1 - x[a]) >= 80")
    low, high = proportion_confint(15, 200, method="beta")
    assert verdict.interval == pytest.approx((100 * (1 - high), 100 * (1 - low)))


def test_a_count_that_stands_at_many_places_counts_once():
    experiment = Experiment(("a",), {"n": (1, 2, 3)}, ignores={"a": ("n",)})
    verdict = decide(experiment, lambda arm, at, seed: {"x": Count(3, 40)}, "x[a] <= n")
    assert verdict.interval == pytest.approx([e - 2 for e in proportion_confint(15, 200, method="beta")])


def test_counts_of_several_places_are_pooled():
    experiment = Experiment(("a",), {"n": (1, 2)})
    verdict = decide(experiment, lambda arm, at, seed: {"x": Count(3 if at["n"] == 1 else 7, 40)}, "x[a] <= 0.5")
    assert verdict.interval == pytest.approx(proportion_confint(50, 400, method="beta"))


def test_counts_that_differ_more_than_chance_have_the_interval_of_the_seeds():
    ks = [2, 30, 10, 22, 16]
    verdict = decide(Experiment(("a",)), lambda arm, at, seed: {"x": Count(ks[seed], 40)}, "x[a] <= 0.5")
    assert verdict.interval == pytest.approx(mean_interval(np.array(ks) / 40))


def test_a_difference_of_counts_has_the_seeds_alone():
    ks = {"a": [3, 5, 4, 6, 5], "b": [9, 8, 7, 9, 9]}
    verdict = decide(TWO, lambda arm, at, seed: {"x": Count(ks[arm][seed], 40)}, "x[a] <= x[b]")
    expected = mean_interval((np.array(ks["a"]) - np.array(ks["b"])) / 40)
    assert verdict.interval == pytest.approx(expected)


def test_counts_that_no_seed_moves_are_not_taken_for_certain():
    verdict = decide(TWO, lambda arm, at, seed: {"x": Count(10, 10)}, "x[a] - x[b] >= -0.02")
    edge = 1 - 0.025 ** (1 / 50)
    assert verdict.interval == pytest.approx((-edge, edge))
    assert verdict.verdict == "open"
    ratio = decide(TWO, lambda arm, at, seed: {"x": Count(10, 10)}, "x[a] / x[b] >= 0.98")
    assert ratio.interval == pytest.approx((1 - edge, 1 / (1 - edge)))


def test_a_share_of_cases_has_clopper_and_pearsons_interval():
    values = {"a": np.arange(40.0), "b": np.full(40, 29.5)}
    verdict = decide(TWO, same(values), "share(x[a] <= x[b]) >= 0.5")
    assert verdict.interval == pytest.approx(proportion_confint(30, 40, method="beta"))
    hits = {"a": (np.arange(40) < 30).astype(float)}
    assert decide(Experiment(("a",)), same(hits), "x[a] >= 0.5").interval == pytest.approx(verdict.interval)


def test_a_share_may_hold_a_chain_and_arithmetic():
    values = {"a": np.arange(10.0), "b": np.arange(10.0)[::-1].copy()}
    verdict = decide(TWO, same(values), "share(2 <= abs(x[a] - x[b]) / 3 < 3) >= 0")
    assert verdict.effect == np.mean((np.abs(2 * np.arange(10) - 9) / 3 >= 2) & (np.abs(2 * np.arange(10) - 9) / 3 < 3))


def test_perfect_agreement_of_yes_and_no_is_not_taken_for_certain():
    n = 50
    values = {"a": np.ones(n), "b": np.ones(n)}
    verdict = decide(TWO, same(values), "x[a] - x[b] >= -0.02")
    # one made-up case each way: a paired t interval over n + 2 differences, of which one is 1 and one is -1
    expected = mean_interval(np.array([0.0] * n + [1.0, -1.0]))
    assert verdict.interval == pytest.approx(expected)
    assert verdict.verdict == "open"
    many = {"a": np.ones(400), "b": np.ones(400)}
    assert decide(TWO, same(many), "x[a] - x[b] >= -0.02").verdict == "holds"


def test_made_up_cases_pull_a_difference_a_little_to_the_middle():
    a, b = (RNG.random((2, 60)) < [[0.9], [0.5]]).astype(float)
    verdict = decide(TWO, same({"a": a, "b": b}), "x[a] >= x[b]")
    low, high = mean_interval(np.concatenate([a - b, [1.0, -1.0]]))
    effect = (a - b).mean()
    assert verdict.effect == pytest.approx(effect)
    assert verdict.interval == pytest.approx((min(low, effect), max(high, effect)))


def test_a_difference_of_differences_and_a_quotient_get_made_up_cases_too():
    experiment = Experiment(("a", "b"), {"plan": ("good", "bad")})
    ones = lambda arm, at, seed: {"x": Cases(np.ones(50))}  # noqa: E731
    gap = "x[{0}, plan=good] - x[{0}, plan=bad]"
    verdict = decide(experiment, ones, f"{gap.format('a')} <= 0.5 * ({gap.format('b')})")
    expected = mean_interval(np.array([0.0] * 50 + [1.5, -1.5]))
    assert verdict.interval == pytest.approx(expected)
    quotient = decide(experiment, ones, "x[a] / x[b] >= 0.98")
    assert quotient.interval[0] < 0.98 < 1 < quotient.interval[1]


def test_a_share_against_an_exact_bar_is_still_a_share():
    def measures(arm, at, seed):
        return {"x": Cases(np.zeros(40)), "allowed": Exact(0.05)}

    verdict = decide(Experiment(("a",)), measures, "x[a] <= allowed[a]")
    low, high = proportion_confint(0, 40, method="beta")
    assert verdict.interval == pytest.approx((low - 0.05, high - 0.05))
    count = decide(Experiment(("a",)), lambda *_: {"x": Count(0, 8), "allowed": Exact(0.05)}, "x[a] <= allowed[a]")
    assert count.interval == pytest.approx(verdict.interval)


def test_over_cases_needs_cases():
    verdict = decide(TWO, numbers(a=A, b=B), "share(x[a] > x[b]) >= 0.5")
    assert verdict.verdict == "open"
    assert "none of its measures is Cases" in verdict.note


# --------------------------------------------------------------------------------------------- perfect and undefined


def test_a_perfect_order_of_few_domains_is_no_certainty():
    for n, word in ((4, "open"), (40, "holds")):

        def measures(arm, at, seed, n=n):
            return {"x": Cases(np.arange(n) + 0.01 * seed), "y": Cases(np.arange(n) ** 2.0)}

        verdict = decide(Experiment(("a",)), measures, "spearman(x[a], y[a]) >= 0.5")
        assert verdict.verdict == word
        assert verdict.interval[0] < verdict.effect < verdict.interval[1] < 1


def test_a_perfect_separation_says_as_much_as_its_smaller_class():
    def measures(arm, at, seed):
        return {"score": Cases(np.arange(60.0) + seed), "label": Cases((np.arange(60) >= 50).astype(float))}

    verdict = decide(Experiment(("a",)), measures, "auc(score[a], label[a]) >= 0.7")
    assert verdict.interval == pytest.approx((0.025 ** (1 / 10), 1.0))
    worst = decide(Experiment(("a",)), measures, "auc(-score[a], label[a]) <= 0.3")
    assert worst.interval == pytest.approx((0.0, 1 - 0.025 ** (1 / 10)))


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_a_correlation_with_a_constant_is_open(name):
    def measures(arm, at, seed):
        return {"x": Cases(np.arange(9.0) + seed), "y": Cases(np.full(9, 0.1))}

    verdict = decide(Experiment(("a",)), measures, f"{name}(x[a], y[a]) >= 0")
    assert verdict.verdict == "open"
    assert "is not defined under every seed: one of its sides is constant" in verdict.note


def test_a_correlation_that_hangs_on_one_case_is_open():
    def measures(arm, at, seed):
        y = np.zeros(9)
        y[3] = 1
        return {"x": Cases(np.arange(9.0) + RNG.normal(size=9)), "y": Cases(y)}

    verdict = decide(Experiment(("a",)), measures, "pearson(x[a], y[a]) <= 1")
    assert verdict.verdict == "open"
    assert "not defined without one of its cases" in verdict.note


def test_a_correlation_of_three_cases_is_open():
    def measures(arm, at, seed):
        return {"x": Cases(RNG.normal(size=3)), "y": Cases(RNG.normal(size=3))}

    verdict = decide(Experiment(("a",)), measures, "pearson(x[a], y[a]) <= 1")
    assert verdict.verdict == "open"
    assert "expected at least four for a correlation" in verdict.note


def test_labels_are_0_and_1():
    verdict = decide(TWO, same({"a": np.arange(5.0), "b": np.arange(5.0)}), "auc(x[a], x[b]) >= 0.5")
    assert "needs labels of 0 and 1" in verdict.note


def test_exact_quotients_are_exact():
    verdict = decide(TWO, lambda arm, at, seed: {"x": Exact({"a": 0.3, "b": 0.1}[arm])}, "x[a] / x[b] <= 3")
    assert verdict.interval == (0.3 / 0.1, 0.3 / 0.1)


def test_an_exact_divisor_leaves_the_seeds():
    def measures(arm, at, seed):
        return {"steps": Exact(128) if arm == "b" else 16 + float(A[seed])}

    verdict = decide(TWO, measures, "steps[a] / steps[b] <= 0.15")
    assert verdict.interval == pytest.approx(np.exp(mean_interval(np.log((16 + A) / 128))))


def test_no_spread_over_seeds_or_cases_is_told_by_its_width():
    verdict = decide(TWO, same({"a": np.arange(9.0), "b": np.arange(9.0) + 1}), "x[a] < x[b]")
    assert verdict.interval == pytest.approx((-1.0, -1.0))
    assert verdict.verdict == "holds"


def test_a_speedup_is_paired_by_seed_and_averaged_as_a_logarithm():
    rates = {"a": 4 + A, "b": 2 + B}

    def curves(arm, at, seed):
        return {"loss": [(step, math.exp(-rates[arm][seed] * step / 100)) for step in range(1, 1001)]}

    verdict = decide(TWO, lambda *_: {"y": 1.0}, "speedup(loss[a], loss[b]) >= 1.25", curves=curves)
    ratios = rates["a"] / rates["b"]
    assert verdict.per_seed == pytest.approx(list(ratios), rel=0.01)
    assert verdict.effect == pytest.approx(math.exp(np.log(ratios).mean()), rel=0.01)
    assert verdict.verdict == "holds"
