"""What the four share: two rules, errors, precisions, saving, scaling, and parallel training."""

import copy
import pickle

import pytest
import torch
from torch import nn

from assay.methods.racs_alice import RACS, Alice, AliceZero, EigenAdam, build_param_groups

ALL = [
    (RACS, {}),
    (Alice, {"rank": 4, "leading": 2, "interval": 5}),
    (AliceZero, {"rank": 4, "leading": 2, "interval": 5}),
    (EigenAdam, {"interval": 5}),
]
every = pytest.mark.parametrize(("make", "settings"), ALL, ids=lambda x: getattr(x, "__name__", ""))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.Linear(8, 9))


def train(model, optimizer, steps, seed=0, start=0):
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(seed + t)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def groups(model):
    return build_param_groups(model, "racs", lr=0.02)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_dict_continues_to_the_same_bits(make, settings, dtype):
    model = net().to(dtype)
    optimizer = make(groups(model), **settings)
    train(model, optimizer, 7)
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    other = net(1).to(dtype)
    other.load_state_dict(saved[0])
    resumed = make(groups(other), **settings)
    resumed.load_state_dict(saved[1])
    for p in resumed.state:
        assert all(v.dtype == torch.float32 for v in resumed.state[p].values() if torch.is_tensor(v))
    train(model, optimizer, 10, start=7)
    train(other, resumed, 10, start=7)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_loading_copies_the_states():
    model = net()
    optimizer = RACS(groups(model))
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    other = RACS(groups(net()))
    other.load_state_dict(saved)
    train(net(), other, 1)
    assert torch.equal(saved["state"][0]["s"], before["state"][0]["s"])


@every
def test_pickles_and_deep_copies(make, settings):
    model = net()
    optimizer = make(groups(model), **settings)
    train(model, optimizer, 3)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, 4, start=3)
    train(twin, twin_optimizer, 4, start=3)
    assert torch.equal(model[1].weight, twin[1].weight)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_stay_finite_and_follow_single_precision(make, settings, dtype):
    low, high = net().to(dtype), net().to(dtype).float()
    one, other = make(groups(low), **settings), make(groups(high), **settings)
    for _ in range(50):
        for p, q in zip(low.parameters(), high.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        one.step()
        other.step()
    for p, q in zip(low.parameters(), high.parameters(), strict=True):
        assert torch.isfinite(p).all()
        assert (p.float() - q).norm() < 0.1 * q.norm() + 0.05


@every
def test_states_can_be_kept_in_bfloat16(make, settings):
    model = net()
    optimizer = make(groups(model), **settings, state_dtype=torch.bfloat16)
    train(model, optimizer, 12)
    state = optimizer.state[model[1].weight]
    assert all(v.dtype == torch.bfloat16 for v in state.values() if torch.is_tensor(v))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@every
def test_a_loss_scaler_skips_a_step_that_overflowed(make, settings):
    model = net()
    optimizer = make(groups(model), **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    train(model, optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state[model[1].weight])
    scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(
        torch.equal(torch.as_tensor(v), torch.as_tensor(state[k])) for k, v in optimizer.state[model[1].weight].items()
    )
    assert scaler.get_scale() == 4.0

    # A scaled step is the unscaled one.
    twin = copy.deepcopy((model, optimizer))
    for p, q in zip(model.parameters(), twin[0].parameters(), strict=True):
        q.grad = torch.randn_like(p)
        p.grad = q.grad * 4.0
    scaler.step(optimizer)
    twin[1].step()
    assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), twin[0].parameters(), strict=True))


@every
def test_the_adam_group_is_torch_s_adam(make, settings):
    model = net()
    group = {"params": list(model.parameters()), "rule": "adam", "lr": 3e-3, "weight_decay": 0.1}
    twin = copy.deepcopy(model)
    optimizer = make([group], **settings)
    adam = torch.optim.AdamW(twin.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    train(model, optimizer, 5)
    train(twin, adam, 5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


@every
def test_weight_decay_is_decoupled_and_not_scaled_by_alpha(make, settings):
    p, q = nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.zeros(6, 9))
    start = p.detach().clone()
    decaying, plain = make([p], lr=0.1, weight_decay=0.5, **settings), make([q], lr=0.1, **settings)
    p.grad = torch.randn(6, 9)
    q.grad = p.grad.clone()
    decaying.step()
    plain.step()
    assert torch.allclose(p, (1 - 0.1 * 0.5) * start + q, atol=1e-6)


@every
def test_gradients_are_not_touched(make, settings):
    model = net()
    optimizer = make(groups(model), **settings)
    train(model, optimizer, 1)
    kept = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), kept, strict=True))


@every
def test_parameters_without_gradient_are_left_alone(make, settings):
    model = net()
    optimizer = make(groups(model), **settings)
    train(model, optimizer, 2)
    model[1].weight.grad = None
    model[2].weight.grad = None
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert torch.equal(model[1].weight, before["1.weight"])
    assert torch.equal(model[2].weight, before["2.weight"])
    assert not torch.equal(model[3].weight, before["3.weight"])


@every
def test_a_closure_is_evaluated_and_schedulers_multiply_both_rates(make, settings):
    model = net()
    optimizer = make(build_param_groups(model, "racs", lr=0.02, adam_lr=0.01), **settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.005]

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(9)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    schedule.step()
    for _ in range(20):
        last = optimizer.step(closure)
    assert last.item() < first.item()


@every
def test_tensors_that_are_not_matrices_are_named_or_given_to_adam(make, settings):
    model = net()
    with pytest.raises(ValueError, match=r"2\.weight of shape \(12,\).*build_param_groups"):
        make(model.named_parameters(), **settings)
    optimizer = make(model.named_parameters(), **settings, fallback="adam", fallback_kwargs={"lr": 0.5})
    assert [g["rule"] for g in optimizer.param_groups] == ["matrix", "adam"]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert set(optimizer.param_groups[1]["param_names"]) == {"1.bias", "2.weight", "2.bias", "3.bias", "4.bias"}
    train(model, optimizer, 2)
    assert make(model.parameters(), **settings, fallback="adam").param_groups[1]["lr"] == 1e-3


@pytest.mark.filterwarnings("ignore:rank 4 is not below")
@every
def test_convolutions_are_matrices_only_when_asked(make, settings):
    conv = nn.Conv2d(6, 4, 3, bias=False).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="not"):
        make(conv.parameters(), **settings)
    assert make(conv.parameters(), **settings, fallback="adam").param_groups[0]["rule"] == "adam"
    flat = nn.Parameter(conv.weight.detach().reshape(4, 54).clone())
    one, other = make(conv.parameters(), **settings, reshape_conv=True), make([flat], **settings)
    for _ in range(6):
        conv.weight.grad = torch.randn(4, 6, 3, 3)
        flat.grad = conv.weight.grad.reshape(4, 54)
        one.step()
        other.step()
    assert torch.allclose(conv.weight.reshape(4, 54), flat, atol=1e-6)


@every
def test_sparse_complex_and_flattened_are_refused(make, settings):
    embedding = nn.Embedding(9, 8, sparse=True)
    optimizer = make(embedding.named_parameters(), **settings)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of weight of shape .* sparse"):
        optimizer.step()
    with pytest.raises(TypeError, match="complex"):
        make([nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))], **settings)
    flattened = nn.Parameter(torch.zeros(96))
    flattened._is_flat_param = True
    for fallback in ("error", "adam"):
        with pytest.raises(ValueError, match="FullyShardedDataParallel"):
            make([flattened], **settings, fallback=fallback)
    with pytest.raises(ValueError, match="rule"):
        make([{"params": [nn.Parameter(torch.zeros(3, 4))], "rule": "sgd"}], **settings)
    with pytest.raises(ValueError, match="fallback_kwargs"):
        make([nn.Parameter(torch.zeros(3, 4))], **settings, fallback_kwargs={"momentum": 0.9})


@every
def test_gradients_that_are_not_finite(make, settings):
    for bad in (torch.nan, torch.inf):
        p = nn.Parameter(torch.zeros(6, 9))
        optimizer = make([("w", p)], **settings, check_finite=True)
        p.grad = torch.randn(6, 9)
        p.grad[0, 0] = bad
        with pytest.raises(RuntimeError, match="w of shape"):
            optimizer.step()
        assert (p == 0).all()
        loose = make([("w", p)], **settings)
        for _ in range(7):  # also over a basis update: it spreads as in torch's optimizers, and raises nothing
            loose.step()
        assert not torch.isfinite(p).all()


def test_a_failed_group_leaves_the_optimizer_as_it_was():
    optimizer = RACS([nn.Parameter(torch.zeros(3, 4))])
    with pytest.raises(ValueError, match="gamma"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 4))], "gamma": 0.5})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "rule": "adam"})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)


@pytest.mark.filterwarnings("ignore:rank 4 is not below")
@every
def test_edge_sizes(make, settings):
    for shape in ((1, 1), (1, 5), (5, 1), (0, 4)):
        p = nn.Parameter(torch.zeros(shape))
        optimizer = make([p], **settings)
        for _ in range(6):
            p.grad = torch.randn(shape)
            optimizer.step()
        assert torch.isfinite(p).all()


@every
def test_the_peers_draw_alike(make, settings):
    """Two ranks with the same gradients end with the same bits, whatever their global generators did."""
    ends = []
    for rank in range(2):
        model = net()
        torch.manual_seed(100 + rank)
        optimizer = make(groups(model), **settings)
        train(model, optimizer, 11)
        ends.append(model[1].weight.detach())
    assert torch.equal(*ends)


@every
def test_sharded_parameters_follow_the_whole_ones(make, settings, tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole, sharded = net(), net()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        one = make(groups(whole), **settings)
        other = make(groups(sharded), **settings)
        for _ in range(7):
            for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
                p.grad = torch.randn_like(p)
                q.grad = torch.distributed.tensor.distribute_tensor(p.grad, q.device_mesh, q.placements)
            one.step()
            other.step()
        for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert torch.allclose(p, q.full_tensor(), atol=1e-6)
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
@every
def test_a_compiled_training_step_agrees(make, settings):
    model, twin = net(), net()
    optimizer, other = make(groups(model), **settings), make(groups(twin), **settings)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(9)).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    for _ in range(7):
        compiled(model, optimizer)
        step(twin, other)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@every
def test_numbers_out_of_range_are_refused_by_name(make, settings):
    p = nn.Parameter(torch.zeros(6, 9))
    defaults = make([p], **settings).defaults
    numbers = {"lr", "eps", "weight_decay", "alpha", "alpha_c", "gamma", "beta", "betas"} & set(defaults)
    whole = {"rank", "leading", "interval", "n_iters", "seed"} & set(defaults)
    for name in numbers | whole:
        for bad in (
            torch.nan,
            torch.inf,
            "1",
            None,
            2.5 if name in whole else -1.0,
            *([-1] if name != "seed" else [2**63]),
        ):
            with pytest.raises(ValueError, match=name):
                make([{"params": [p], name: bad}], **settings)
    for bad in ({"eps": -1.0}, {"weight_decay": -1.0}, {"lr": torch.inf}, {"betas": 0.9}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} of an adam group"):
            make([{"params": [nn.Parameter(torch.zeros(3))], "rule": "adam", **bad}], **settings)
        with pytest.raises(ValueError, match=f"{next(iter(bad))} of an adam group"):
            make([nn.Parameter(torch.zeros(3))], **settings, fallback="adam", fallback_kwargs=bad)
    for bad in (torch.float16, torch.int32, "float32"):  # squared gradients of 1e-4 are zero in float16
        with pytest.raises(ValueError, match="state_dtype"):
            make([{"params": [p], "state_dtype": bad}], **settings)


@every
def test_a_gradient_that_is_not_finite_stops_the_step_before_any_weight_moves(make, settings):
    for name, bad in (("4.bias", torch.nan), ("0.weight", torch.inf), ("3.weight", 1e30)):
        model = net()
        optimizer = make(groups(model), **settings, check_finite=True)
        train(model, optimizer, 2)
        model.get_parameter(name).grad[0] = bad
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
            optimizer.step()
        assert all(torch.equal(v, before[0][k]) for k, v in model.state_dict().items())
        for i, state in optimizer.state_dict()["state"].items():
            assert all(
                torch.equal(torch.as_tensor(v), torch.as_tensor(before[1]["state"][i][k])) for k, v in state.items()
            )


@every
def test_a_weight_in_double_precision_keeps_its_digits(make, settings):
    p = nn.Parameter(torch.full((6, 9), 1 + 1e-12, dtype=torch.float64))
    optimizer = make([p], **{**settings, "lr": 0.0})
    p.grad = torch.randn(6, 9, dtype=torch.float64)
    optimizer.step()
    assert (p == 1 + 1e-12).all()
    assert all(v.dtype == torch.float32 for v in optimizer.state[p].values() if torch.is_tensor(v))


@every
@pytest.mark.parametrize("scale", [1e-16, 1e-20, 1e-30, 1e-40])
def test_gradients_near_the_end_of_single_precision_do_not_throw_the_weights(make, settings, scale):
    p = nn.Parameter(torch.zeros(6, 9))
    optimizer = make([p], **settings)
    for _ in range(7):
        p.grad = torch.randn(6, 9) * scale
        optimizer.step()
    assert p.abs().max() < 0.1


@every
def test_rates_may_be_tensors(make, settings):
    ends = []
    for wrap in (float, torch.tensor):
        model = net()
        sorted_groups = [{**group, "lr": wrap(lr)} for group, lr in zip(groups(model), (0.02, 0.01), strict=True)]
        optimizer = make(sorted_groups, **settings)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for t in range(3):
            train(model, optimizer, 1, start=t)
            schedule.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(*ends, strict=True))


@every
def test_a_state_of_another_optimizer_or_model_is_refused_whole(make, settings):
    def stepped(make, settings, shape=(6, 9)):
        p = nn.Parameter(torch.zeros(shape))
        optimizer = make([p], **settings)
        p.grad = torch.randn(shape)
        optimizer.step()
        return optimizer

    mine = stepped(make, settings)
    before = copy.deepcopy(mine.state_dict())
    others = [o for o in ALL if not (issubclass(o[0], Alice) and issubclass(make, Alice)) and o[0] is not make]
    for other in [*others, (torch.optim.AdamW, {})]:
        with pytest.raises(ValueError, match=make.__name__):
            mine.load_state_dict(stepped(*other).state_dict())
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(6, 9\)"):
        mine.load_state_dict(stepped(make, settings, (7, 11)).state_dict())
    assert mine.state_dict()["param_groups"] == before["param_groups"]
    assert mine.state_dict()["state"][0].keys() == before["state"][0].keys()
    if issubclass(make, Alice):  # another rank is not another model: the saved groups bring it along
        mine.load_state_dict(stepped(make, {**settings, "rank": 5}).state_dict())
        mine.step()
        assert mine.param_groups[0]["rank"] == 5
