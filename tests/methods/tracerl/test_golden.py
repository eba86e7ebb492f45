"""The released code's numbers (dLLM-RL, commit 10b4fd1): rows, masks and positions exactly, losses to 1e-10."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.methods.tracerl import (
    Trace,
    build_block_slices,
    build_full_slices,
    collapse_steps,
    step_gae,
    trace_policy_loss,
)
from assay.methods.tracerl._groups import counted_and_kept
from assay.methods.tracerl._losses import value_loss
from assay.methods.tracerl.baselines import masked_rows
from assay.methods.tracerl.reference import step_gae_loops
from assay.rl import group_advantages

DATA = Path(__file__).parents[2] / "data" / "tracerl"
PAD, MASK = 11, 10


def load(name):
    return {key: torch.from_numpy(np.asarray(value)) for key, value in np.load(DATA / name).items()}


def cases(name):
    return json.loads((DATA / name).read_text())["cases"]


def traces_of(ids, steps, prompt_length):
    """Steps of the released code start at 0, ours at 1."""
    return [
        Trace(prompt_ids=row[:prompt_length][int((row[:prompt_length] != PAD).int().argmax()) :],
              response_ids=row[prompt_length:], step_map=map_ + 1)
        for row, map_ in zip(ids, steps)
    ]  # fmt: skip


def same_rows(batch, inputs, targets, response, prompt_length):
    """Rows agree, response by response and in order; columns of padding that all golden prompts have, ours have not."""
    cut = prompt_length - batch.prompt_length
    assert (inputs[:, :cut] == PAD).all()
    order = response.argsort(stable=True)
    mine = batch.row_of_response.argsort(stable=True)
    assert torch.equal(batch.row_of_response[mine], response[order])
    assert torch.equal(batch.input_ids[mine], inputs[order, cut:])
    assert torch.equal(batch.p_mask[mine], targets[order][:, prompt_length:])
    assert not targets[:, :prompt_length].any()
    return mine, order, cut


@pytest.mark.parametrize("case", cases("collapse.json"))
def test_collapse(case):
    values = torch.tensor(case["values"])
    assert collapse_steps(values, case["s"], case["block"] or None).tolist() == case["result"]
    # side by side with another response nothing changes
    both = torch.stack([values, values.flip(0) + 3])
    assert collapse_steps(both, case["s"], case["block"] or None)[0].tolist() == case["result"]


@pytest.mark.parametrize("number", range(3))
def test_full_rows(number):
    data = load("full_rows.npz")
    prompt_length, _, s, post, pad, mask = data[f"cfg{number}"].tolist()
    traces = traces_of(data[f"ids{number}"], data[f"step_map{number}"], prompt_length)
    batch = build_full_slices(
        traces, shrink=s, post_num=None if post < 0 else post, mask_token_id=mask, pad_token_id=pad
    )
    same_rows(batch, *(data[f"{k}{number}"] for k in ("inputs", "targets", "response")), prompt_length)


@pytest.mark.parametrize("number", range(3))
def test_block_rows_positions_and_masks(number):
    data = load("block_rows.npz")
    prompt_length, _, block, s, post, pad, mask = data[f"cfg{number}"].tolist()
    traces = traces_of(data[f"ids{number}"], data[f"step_map{number}"], prompt_length)
    batch = build_block_slices(
        traces, block_size=block, shrink=s, post_num=None if post < 0 else post, mask_token_id=mask, pad_token_id=pad
    )
    mine, order, cut = same_rows(
        batch, *(data[f"{k}{number}"] for k in ("inputs", "targets", "response")), prompt_length
    )
    assert torch.equal(batch.position_ids[mine], data[f"positions{number}"][order, cut:])
    # What a pad sees changes nothing, since nothing sees a pad: the released code lets it see its own columns' block.
    mine_sees, theirs = batch.attn[mine][:, 0], data[f"attention{number}"][order][:, cut:, cut:]
    real = torch.cat([batch.real, batch.real[:, batch.prompt_length :]], 1)[mine]
    assert torch.equal(mine_sees[real], theirs[real])
    assert not (mine_sees & ~real[:, None] & ~torch.eye(real.shape[1], dtype=torch.bool)).any()
    assert mine_sees.any(-1).all()


@pytest.mark.parametrize("method", ["random_masking", "coupled"])
def test_random_rows(method):
    data = load("random_rows.npz")
    prompt_length, _, block, _, post, pad, mask = data["cfg"].tolist()
    traces = traces_of(data["ids"], torch.zeros_like(data[f"{method}_u"], dtype=torch.int64), prompt_length)
    for trace in traces:
        trace.step_map = torch.ones_like(trace.step_map)
    drawn = data[f"{method}_u"] <= data[f"{method}_rate"]
    drawn = torch.cat([drawn, ~drawn]) if method == "coupled" else drawn
    owner = torch.arange(3).repeat(len(drawn) // 3)
    batch = masked_rows(traces, owner, drawn, block_size=block, post_num=post, mask_token_id=mask, pad_token_id=pad)
    same_rows(batch, *(data[f"{method}_{k}"] for k in ("inputs", "targets", "response")), prompt_length)


def log_probs(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


@pytest.mark.parametrize(
    ("name", "normalize"), [("block", "length"), ("full", "step"), ("block_beyond_clamp", "length")]
)
def test_policy_loss_and_gradient(name, normalize):
    data = load("losses.npz")
    prompt, length = int(data["L0"]), int(data["L1"])
    labels, targets, old = (data[f"{name}_{k}"][:, prompt:] for k in ("labels", "targets", "logp_old"))

    def loss_of(logits, beta):
        new = log_probs(logits[:, -length:], labels)
        return trace_policy_loss(
            new,
            old,
            data[f"{name}_advantage"][:, None],
            targets,
            eps=0.2,
            beta=beta,
            normalize=normalize,
            length=length,
        )[0]

    logits = data[f"{name}_logits"].clone().requires_grad_()
    assert loss_of(logits, 0.0).item() == pytest.approx(data[f"{name}_loss_beta0"].item(), abs=1e-10)
    loss = loss_of(logits, 0.01)
    if name == "block_beyond_clamp":  # the released code cuts the exponential and not the linear term
        assert loss.item() != pytest.approx(data[f"{name}_loss"].item(), abs=1e-6)
        return
    assert loss.item() == pytest.approx(data[f"{name}_loss"].item(), abs=1e-10)
    loss.backward()
    torch.testing.assert_close(logits.grad, data[f"{name}_grad"], atol=1e-10, rtol=0)


def test_value_loss_and_gradient():
    data = load("losses.npz")
    prompt, length = int(data["L0"]), int(data["L1"])
    new = data["value_new"].clone().requires_grad_()
    old, returns, targets = (data[f"value_{k}"][:, prompt:] for k in ("old", "return", "targets"))
    loss = value_loss(new[:, -length:], old, returns, targets, eps=0.2)
    assert loss.item() == pytest.approx(data["value_loss"].item(), abs=1e-10)
    loss.backward()
    torch.testing.assert_close(new.grad, data["value_grad"], atol=1e-10, rtol=0)


@pytest.mark.parametrize("case", cases("step_gae.json"))
def test_step_gae_fast_and_slow(case):
    trainable = torch.tensor([case["trainable"]])
    steps = torch.tensor([case["step_map"]])
    if case["per_token"]:
        rewards = torch.tensor([case["reward"]], dtype=torch.float64)
    else:
        last = max(s for s, there in zip(case["step_map"], case["trainable"]) if there)
        rewards = case["reward"] * (steps == last).double()
    values = torch.tensor([case["values"]], dtype=torch.float64)
    returns, advantages = step_gae(values, rewards, steps, trainable, case["gamma"], case["lam"])
    torch.testing.assert_close(returns[0], torch.tensor(case["returns"], dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(advantages[0], torch.tensor(case["advantages"], dtype=torch.float64), atol=1e-12, rtol=0)
    slow = step_gae_loops(
        case["values"], rewards[0].tolist(), case["step_map"], case["trainable"], case["gamma"], case["lam"]
    )
    assert slow[0] == pytest.approx(case["returns"], abs=1e-12)
    assert slow[1] == pytest.approx(case["advantages"], abs=1e-12)


@pytest.mark.parametrize("case", cases("group_rewards.json"))
def test_what_counts_and_which_tasks_are_kept(case):
    cut = torch.tensor([length >= case["limit"] - 5 for length in case["lengths"]])
    rewards, kept = counted_and_kept(
        torch.tensor(case["correct"], dtype=torch.float64), cut, len(case["correct"]), (0.2, 0.8)
    )
    assert rewards.tolist() == [float(x) for x in case["counted"]]
    assert kept.tolist() == [case["kept"]]
    advantages = group_advantages(rewards, len(rewards), eps=0.0, ddof=0)
    assert advantages.tolist() == pytest.approx(case["advantages"], abs=1e-12)
