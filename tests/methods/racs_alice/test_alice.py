"""Alice: the one-pass step against the plain form, its relatives, its variants, and what zeros do."""

import copy
import logging

import pytest
import torch

from assay.methods.racs_alice import RACS, Alice, AliceZero, EigenAdam
from assay.methods.racs_alice._switch import draw_generator, exchange_columns, iterate_subspace
from assay.methods.racs_alice.reference import alice_update

SMALL = {"rank": 6, "leading": 2, "interval": 4}


def stepped(optimizer, p, G):
    before = p.detach().clone()
    p.grad = G.clone()
    optimizer.step()
    return p.detach() - before


def gradients(shape, count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (12, 12)])
@pytest.mark.parametrize("compensation", ["optimal", "none", "fira", "fira+"])
@pytest.mark.parametrize("switch", ["complement", "gaussian-mix", "gaussian"])
@pytest.mark.parametrize("tracking", [True, False])
def test_equals_the_plain_form(shape, compensation, switch, tracking):
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    settings = {"switch": switch, "compensation": compensation, "tracking": tracking, "state_dtype": torch.float64}
    optimizer = Alice([p], lr=1.0, alpha=1.0, **SMALL, **settings)
    tall = shape[0] > shape[1]
    for t, G in enumerate(gradients(shape, 11, dtype=torch.float64), 1):
        state = copy.deepcopy(optimizer.state[p])
        G = G * 10.0 ** (t % 3 - 5)
        change = stepped(optimizer, p, G)
        if t == 1:
            state = {k: torch.zeros_like(v) for k, v in optimizer.state[p].items() if k != "step"}
        state.pop("step", None)
        state["U"] = optimizer.state[p]["U"]  # the basis has its own tests
        update, new = alice_update(G.T if tall else G, state, compensation=compensation)
        assert torch.allclose(change, -(update.T if tall else update), rtol=1e-6, atol=1e-8)
        for name, value in new.items():
            assert torch.allclose(optimizer.state[p][name], value, rtol=1e-6, atol=1e-12), name


def test_the_one_pass_form_agrees_in_single_precision():
    p = torch.nn.Parameter(torch.zeros(48, 80))
    optimizer = Alice([p], lr=1.0, alpha=1.0, rank=16, leading=5, interval=10**6)
    for G in gradients((48, 80), 5):
        state = copy.deepcopy(optimizer.state[p]) or None
        change = stepped(optimizer, p, G)
        if state:
            state.pop("step")
            update, _ = alice_update(G.double(), {k: v.double() for k, v in state.items()})
            assert (change.double() + update).norm() <= 1e-5 * update.norm()


def test_the_basis_follows_the_schedule_and_the_recipe():
    p = torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = Alice([p], **SMALL, seed=3)
    for t, G in enumerate(gradients((12, 20), 9), 1):
        before = copy.deepcopy(optimizer.state[p])
        stepped(optimizer, p, G)
        U = optimizer.state[p]["U"]
        if t == 1:
            new = exchange_columns(torch.linalg.svd(G).U[:, :6], 2, "complement", draw_generator(3, 0, 1))
            assert torch.allclose(U @ U.T, new @ new.T, atol=1e-5)
        elif t % 4 == 0:
            new = exchange_columns(
                iterate_subspace(before["U"], G, before["Q"], 0.999), 2, "complement", draw_generator(3, 0, t)
            )
            assert torch.allclose(U, new, atol=1e-5)
        else:
            assert torch.equal(U, before["U"])


def test_staggered_tensors_switch_at_different_steps():
    params = [torch.nn.Parameter(torch.zeros(12, 20)) for _ in range(4)]
    optimizer = Alice(params, rank=6, leading=2, interval=8, stagger=True)
    switched = {i: [] for i in range(4)}
    for t in range(1, 18):
        before = [optimizer.state[p].get("U", torch.zeros(())).clone() for p in params]
        for p, G in zip(params, gradients((12, 20), 4, t), strict=True):
            p.grad = G
        optimizer.step()
        for i, p in enumerate(params):
            if not torch.equal(before[i], optimizer.state[p]["U"]):
                switched[i].append(t)
    assert switched == {0: [1, 8, 16], 1: [1, 6, 14], 2: [1, 4, 12], 3: [1, 2, 10]}


def test_the_cost_of_a_basis_update_is_logged(caplog):
    p = torch.nn.Parameter(torch.zeros(12, 20))
    with caplog.at_level(logging.INFO, "assay.methods.racs_alice"):
        stepped(Alice([p], **SMALL), p, torch.randn(12, 20))
    assert "updated the basis of 1 matrices" in caplog.text


@pytest.mark.filterwarnings("ignore:rank 8 is not below")
def test_a_full_basis_is_eigen_adam():
    p, q = (torch.nn.Parameter(torch.zeros(8, 14, dtype=torch.float64)) for _ in range(2))
    alice = Alice([p], lr=1.0, rank=8, leading=8, interval=100, alpha=1.0, state_dtype=torch.float64)
    eigen = EigenAdam([q], lr=1.0, interval=100, state_dtype=torch.float64)
    for G in gradients((8, 14), 20, dtype=torch.float64):
        assert torch.allclose(stepped(alice, p, G), stepped(eigen, q, G), rtol=1e-4, atol=1e-7)


def test_a_rank_above_the_rows_is_clipped_with_one_warning(recwarn):
    params = [torch.nn.Parameter(torch.zeros(8, 14)) for _ in range(3)]
    optimizer = Alice(params, rank=12, leading=9, interval=2)
    for p in params:
        p.grad = torch.randn(8, 14)
    optimizer.step()
    optimizer.step()
    assert len([w for w in recwarn if "it is clipped to 8" in str(w.message)]) == 1
    assert optimizer.state[params[0]]["U"].shape == (8, 8)
    assert torch.isfinite(params[0]).all()


def test_without_its_parts_it_is_galore_inside_the_first_block():
    galore_torch = pytest.importorskip("galore_torch")
    fixed = gradients((24, 40), 20, 5)
    p, q = (torch.nn.Parameter(torch.zeros(24, 40)) for _ in range(2))
    alice = Alice(
        [p],
        lr=1.0,
        rank=8,
        leading=3,
        interval=200,
        alpha=1.0,
        betas=(0.9, 0.999, 0),
        eps=1e-12,
        tracking=False,
        switch="none",
        compensation="none",
    )
    group = {"params": [q], "rank": 8, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}
    galore = galore_torch.GaLoreAdamW([group], lr=1.0, eps=1e-12, no_deprecation_warning=True)
    for t, G in enumerate(fixed, 1):
        correction = (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        ours, theirs = stepped(alice, p, G), stepped(galore, q, G)
        assert (theirs - correction * ours).norm() <= 1e-3 * theirs.norm()


def test_alice_zero_is_alice_without_tracking():
    p, q, r = (torch.nn.Parameter(torch.zeros(12, 20)) for _ in range(3))
    optimizers = [
        (AliceZero([p], **SMALL), p),
        (Alice([q], **SMALL, tracking=False), q),
        (Alice([r], **SMALL, betas=(0.9, 0.9, 0.0)), r),
    ]
    for G in gradients((12, 20), 10):
        changes = [stepped(optimizer, parameter, G) for optimizer, parameter in optimizers]
        assert torch.equal(changes[0], changes[1])
        assert torch.allclose(changes[0], changes[2], rtol=1e-4, atol=1e-6)
    assert "Q" not in optimizers[0][0].state[p]
    with pytest.raises(ValueError, match="no tracking"):
        AliceZero([p], tracking=True)


def test_reprojection_turns_the_moments_into_the_new_coordinates():
    p = torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = Alice([p], **SMALL, reproject=True)
    for G in gradients((12, 20), 4):
        before = copy.deepcopy(optimizer.state[p])
        stepped(optimizer, p, G)
    after = optimizer.state[p]
    R = after["U"].T @ before["U"]
    sigma = after["U"].T @ G
    assert after["step"] == 4
    assert torch.allclose(after["M"], 0.9 * R @ before["M"] + 0.1 * sigma, atol=1e-6)
    assert torch.allclose(after["Q"], 0.999 * R @ before["Q"] @ R.T + 0.001 * sigma @ sigma.T, atol=1e-6)
    assert torch.allclose(after["V"], 0.9 * before["V"] + 0.1 * sigma**2, atol=1e-6)


def test_the_start_waits_for_a_gradient_that_is_not_zero():
    p = torch.nn.Parameter(torch.ones(12, 20))
    optimizer = Alice([p], **SMALL)
    assert (stepped(optimizer, p, torch.zeros(12, 20)) == 0).all()
    q = torch.nn.Parameter(torch.ones(12, 20))
    late = Alice([q], **SMALL)
    for G in gradients((12, 20), 5):
        assert torch.equal(stepped(optimizer, p, G), stepped(late, q, G))


@pytest.mark.parametrize("make", [Alice, AliceZero])
def test_a_zero_gradient_moves_nothing_and_decays_the_state_even_at_a_basis_update(make):
    p = torch.nn.Parameter(torch.randn(12, 20))
    optimizer = make([p], **SMALL)
    for G in gradients((12, 20), 3):
        stepped(optimizer, p, G)
    state = copy.deepcopy(optimizer.state[p])
    assert (stepped(optimizer, p, torch.zeros(12, 20)) == 0).all()  # step 4 = interval
    after = optimizer.state[p]
    for name, decay in (("M", 0.9), ("V", 0.9), ("p", 0.9), ("U", 1.0), ("phi", 1.0)):
        assert torch.allclose(after[name], decay * state[name]), name
    if make is Alice:
        assert torch.allclose(after["Q"], 0.999 * state["Q"])
    assert torch.isfinite(stepped(optimizer, p, torch.randn(12, 20))).all()


def test_columns_and_rows_without_gradient_stay_finite():
    p = torch.nn.Parameter(torch.randn(12, 20))
    optimizer = Alice([p], **SMALL)
    for G in gradients((12, 20), 9):
        G[3], G[:, 7] = 0, 0
        change = stepped(optimizer, p, G)
        assert torch.isfinite(change).all()
        assert (change[:, 7] == 0).all()


def test_dead_rows_do_not_move_while_the_basis_has_not_seen_them():
    p = torch.nn.Parameter(torch.randn(12, 20))
    optimizer = Alice([p], rank=6, leading=6, interval=4)
    for G in gradients((12, 20), 3):
        G[3] = 0
        assert stepped(optimizer, p, G)[3].abs().max() < 1e-6


@pytest.mark.parametrize("switch", ["complement", "gaussian-mix"])
def test_columns_that_lie_in_the_basis_are_not_blown_up(switch):
    # The gradient of eight tokens has rank eight: what a basis of twelve leading directions leaves is rounding alone.
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(64, 96))
    optimizer = Alice([p], lr=1.0, alpha=1.0, rank=16, leading=12, interval=10, switch=switch)
    for _ in range(6):
        tokens, errors = torch.randn(8, 96, generator=generator), torch.randn(64, 8, generator=generator)
        assert stepped(optimizer, p, 1e-3 * errors @ tokens).square().mean().sqrt() < 2

    # One token may also dominate a single column, as the first one does in trained language models.
    q = torch.nn.Parameter(torch.zeros(64, 96))
    G = 1e-3 * torch.randn(64, 96, generator=generator)
    G[:, 3] = 100 * torch.randn(64, generator=generator)
    columns = stepped(Alice([q], lr=1.0, alpha=1.0, rank=16, leading=5, switch=switch), q, G).square().mean(0).sqrt()
    assert columns[3] < 3 * columns.median()


def test_the_compensation_reaches_every_entry_outside_the_basis():
    # A scale on a diagonal alone would leave all but 12 of 240 entries as they are without compensation.
    p, q = (torch.nn.Parameter(torch.zeros(12, 20)) for _ in range(2))
    with_it, without = Alice([p], **SMALL), Alice([q], **SMALL, compensation="none")
    G = torch.randn(12, 20)
    difference = stepped(with_it, p, G) - stepped(without, q, G)
    assert (difference.abs() > 1e-5).float().mean() > 0.9


@pytest.mark.parametrize(
    ("make", "settings"),
    [(RACS, {"lr": 0.2}), (Alice, {"lr": 0.1, "rank": 8, "leading": 3, "interval": 25})],
)
def test_a_bowl_and_a_small_network_are_learned(make, settings):
    torch.manual_seed(0)
    target = torch.randn(16, 24)
    p = torch.nn.Parameter(torch.zeros(16, 24))
    assert fall([p], lambda: (p - target).square().mean(), make, settings) >= 100

    X, W = torch.randn(256, 8), torch.randn(8, 2)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    settings = {**settings, "fallback": "adam"}
    if make is Alice:
        settings |= {"rank": 1, "leading": 1}
    assert fall(net.parameters(), lambda: (net(X) - torch.sin(X @ W)).square().mean(), make, settings) >= 5


def fall(params, loss, make, settings):
    """How many times smaller a loss is after 500 steps with a rate that falls to 0."""
    optimizer = make(params, **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 500)
    first = loss().item()
    for _ in range(500):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()
    return first / loss().item()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0, "leading": 0}, "rank"),
        ({"rank": 4, "leading": 5}, "leading"),
        ({"gamma": 0.9}, "gamma"),
        ({"alpha": -1.0}, "alpha"),
        ({"alpha_c": -1.0}, "alpha_c"),
        ({"betas": (0.9, 1.0, 0.9)}, "betas"),
        ({"betas": (0.9, 0.9)}, "3 numbers"),
        ({"interval": 0}, "interval"),
        ({"switch": "qr"}, "switch"),
        ({"compensation": "all"}, "compensation"),
        ({"complement": "svd"}, "complement"),
        ({"lr": -1.0}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"state_dtype": torch.int8}, "state_dtype"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Alice([{"params": [torch.nn.Parameter(torch.zeros(12, 20))], **settings}])
