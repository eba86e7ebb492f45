"""RACS: the rank-one fit, the scaling, the limiter, and what zeros do."""

import copy
import itertools

import pytest
import torch
from scipy.optimize import minimize

from assay.methods.racs_alice import RACS, empirical_fisher, fit_structure, rank_one_fit
from assay.methods.racs_alice.reference import racs_update


def stepped(optimizer, p, G):
    """The weight's change under one gradient."""
    before = p.detach().clone()
    p.grad = G.clone()
    optimizer.step()
    return p.detach() - before


def test_the_fixed_point_is_the_best_rank_one_fit():
    generator = torch.Generator().manual_seed(0)
    P = torch.rand(5, 7, generator=generator, dtype=torch.float64) + 0.01
    s, q = rank_one_fit(P, 200)
    U, sigma, Vh = torch.linalg.svd(P)
    assert torch.allclose(torch.outer(q, s), sigma[0] * torch.outer(U[:, 0], Vh[0]), rtol=1e-6)


def test_the_kronecker_product_of_the_scales_minimises_the_distance_to_the_fisher_matrix():
    generator = torch.Generator().manual_seed(1)
    G = torch.randn(32, 3, 4, generator=generator, dtype=torch.float64)
    F = torch.diag(empirical_fisher(G).diagonal())  # S (x) Q is diagonal: the rest of F is a constant
    fit = fit_structure(G, "row-column")
    best = fit.objective(F).item()

    def objective(logs):
        s, q = torch.tensor(logs[:4]).exp(), torch.tensor(logs[4:]).exp()
        return (torch.kron(torch.diag(s), torch.diag(q)) - F).square().sum().item()

    for _ in range(2000):
        pair = torch.randn(7, generator=generator, dtype=torch.float64)
        assert objective(pair.numpy()) >= best
    found = minimize(objective, [0.0] * 7, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    assert found.fun == pytest.approx(best, rel=1e-6)


def test_five_rounds_differ_from_row_and_column_means():
    P = torch.rand(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 4
    s, q = rank_one_fit(P, 5)
    means = torch.outer(P.mean(1), P.mean(0)) / P.mean()
    best = torch.linalg.svdvals(P)[1:].square().sum()
    assert (torch.outer(q, s) - P).square().sum() == pytest.approx(best.item(), rel=1e-3)
    assert (means - P).square().sum() > 1.05 * best


def test_a_rank_one_gradient_gives_entries_of_one_size():
    a, b = torch.tensor([0.5, -2.0, 1e-3, 7.0]), torch.tensor([1.0, -3.0, 0.1, 4.0, -1e-2])
    p = torch.nn.Parameter(torch.zeros(4, 5))
    change = stepped(RACS([p]), p, torch.outer(a, b))
    assert torch.allclose(change.abs(), change.abs()[0, 0].expand(4, 5), rtol=1e-4)
    # s and q are a tenth of their steady values after the first step, and there is no limit yet.
    assert change.abs()[0, 0].item() == pytest.approx(0.02 * 0.05 * 10, rel=1e-4)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 8), (8, 1), (7, 7)])
def test_equals_the_plain_form_over_many_steps(shape):
    generator = torch.Generator().manual_seed(2)
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = RACS([p], lr=1.0, alpha=1.0, state_dtype=torch.float64)
    m, n = min(shape), max(shape)
    state = {
        "s": torch.zeros(n, dtype=torch.float64),
        "q": torch.zeros(m, dtype=torch.float64),
        "phi": torch.zeros((), dtype=torch.float64),
    }
    for step in range(12):
        G = torch.randn(shape, generator=generator, dtype=torch.float64) * (0 if step == 6 else 10.0 ** (step % 4 - 3))
        update, state = racs_update(G.T if shape[0] > shape[1] else G, state)
        expected = -(update.T if shape[0] > shape[1] else update)
        assert torch.allclose(stepped(optimizer, p, G), expected, rtol=1e-8, atol=1e-9)


def test_permuting_rows_and_columns_permutes_the_update():
    generator = torch.Generator().manual_seed(3)
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(9, generator=generator)
    p, permuted = torch.nn.Parameter(torch.zeros(6, 9)), torch.nn.Parameter(torch.zeros(6, 9))
    one, other = RACS([p]), RACS([permuted])
    for _ in range(3):
        G = torch.randn(6, 9, generator=generator)
        assert torch.allclose(
            stepped(other, permuted, G[rows][:, columns]), stepped(one, p, G)[rows][:, columns], rtol=1e-4
        )


# A square weight starts the fixed point from the other side. That fixes how the scale is shared between s and q, which an
# average over several gradients keeps: only the first update is the same, and only as the iteration converges.
@pytest.mark.parametrize(("shape", "n_iters", "steps"), [((5, 9), 5, 3), ((6, 6), 200, 1)])
def test_a_transposed_weight_gets_the_transposed_update(shape, n_iters, steps):
    generator = torch.Generator().manual_seed(4)
    p, turned = torch.nn.Parameter(torch.zeros(shape)), torch.nn.Parameter(torch.zeros(shape[::-1]))
    one, other = RACS([p], n_iters=n_iters), RACS([turned], n_iters=n_iters)
    for _ in range(steps):
        G = torch.randn(shape, generator=generator)
        assert torch.allclose(stepped(other, turned, G.T), stepped(one, p, G).T, rtol=1e-4)


def test_the_norm_grows_by_exactly_gamma_when_the_gradient_jumps():
    G = torch.randn(6, 9, generator=torch.Generator().manual_seed(5))
    p = torch.nn.Parameter(torch.zeros(6, 9))
    optimizer = RACS([p])
    for _ in range(50):
        stepped(optimizer, p, G)
    before = optimizer.state[p]["phi"].item()
    change = stepped(optimizer, p, 10 * G)
    assert optimizer.state[p]["phi"].item() == pytest.approx(1.01 * before, rel=1e-5)
    assert change.norm().item() == pytest.approx(0.02 * 0.05 * 1.01 * before, rel=1e-4)
    # From the first steps the norm only shrinks: there is no bias correction.
    fresh = RACS([torch.nn.Parameter(torch.zeros(6, 9))])
    q = fresh.param_groups[0]["params"][0]
    norms = [stepped(fresh, q, G).norm().item() for _ in range(5)]
    assert all(later < sooner for sooner, later in itertools.pairwise(norms))
    assert norms[0] > 5 * before * 0.02 * 0.05


def test_rows_and_columns_without_gradient_do_not_move():
    generator = torch.Generator().manual_seed(6)
    p = torch.nn.Parameter(torch.randn(6, 9, generator=generator))
    optimizer = RACS([p])
    for _ in range(5):
        G = torch.randn(6, 9, generator=generator)
        G[2], G[:, 4] = 0, 0
        change = stepped(optimizer, p, G)
        assert torch.isfinite(change).all()
        assert (change[2] == 0).all()
        assert (change[:, 4] == 0).all()
        assert change[0, 0] != 0


def test_a_zero_gradient_decays_the_scales_and_nothing_else():
    p = torch.nn.Parameter(torch.randn(4, 5))
    optimizer = RACS([p])
    assert (stepped(optimizer, p, torch.zeros(4, 5)) == 0).all()  # also as the first gradient
    stepped(optimizer, p, torch.randn(4, 5))
    state = copy.deepcopy(optimizer.state[p])
    assert (stepped(optimizer, p, torch.zeros(4, 5)) == 0).all()
    assert torch.allclose(optimizer.state[p]["s"], 0.9 * state["s"])
    assert torch.allclose(optimizer.state[p]["q"], 0.9 * state["q"])
    assert optimizer.state[p]["phi"] == state["phi"]


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e6])
def test_the_update_does_not_depend_on_the_gradients_scale(scale):
    G = torch.randn(6, 9, generator=torch.Generator().manual_seed(7))
    p, scaled = torch.nn.Parameter(torch.zeros(6, 9)), torch.nn.Parameter(torch.zeros(6, 9))
    one, other = RACS([p]), RACS([scaled])
    for _ in range(3):
        assert torch.allclose(stepped(other, scaled, scale * G), stepped(one, p, G), rtol=1e-3)


def test_maximize_climbs():
    G = torch.randn(4, 5)
    p, up = torch.nn.Parameter(torch.zeros(4, 5)), torch.nn.Parameter(torch.zeros(4, 5))
    assert torch.equal(stepped(RACS([up], maximize=True), up, G), -stepped(RACS([p]), p, G))


def test_the_fit_has_the_scale_of_what_it_fits_down_to_the_smallest_numbers():
    P = torch.rand(7, 11) ** 4
    P[0], P[:, 3] = 0, 0
    s, q = rank_one_fit(P, 5)
    for exponent in (-40, -90, -110):
        tiny_s, tiny_q = rank_one_fit(P * 2.0**exponent, 5)
        assert torch.allclose(tiny_q, q, rtol=1e-3)
        assert torch.allclose(tiny_s * 2.0**-exponent, s, rtol=1e-3)


def test_a_matrix_without_entries_and_no_rounds_are_refused():
    with pytest.raises(ValueError, match="at least one row"):
        rank_one_fit(torch.zeros(0, 4))
    with pytest.raises(ValueError, match="n_iters"):
        rank_one_fit(torch.rand(3, 4), 0)
