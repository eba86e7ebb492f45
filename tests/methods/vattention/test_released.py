"""The released arithmetic, against the numbers of the authors' own code and an independent loop."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.methods.vattention._attention import vattention
from assay.methods.vattention._config import VAttentionConfig
from assay.methods.vattention.released import collapse_bias, released_attention, released_budget

GOLDEN = Path(__file__).parents[2] / "data" / "vattention"


def _case(name: str) -> dict:
    data = np.load(GOLDEN / name)
    return {key: torch.from_numpy(data[key]) if data[key].ndim else data[key].item() for key in data.files}


def _config(case: dict, **more) -> VAttentionConfig:
    sizes = {
        name: int(case[name]) if float(case[name]).is_integer() else float(case[name]) for name in ("sink", "local")
    }
    heavy = float(case["heavy"])
    return VAttentionConfig(
        **sizes,
        heavy=int(heavy) if heavy >= 1 else heavy,
        pilot=float(case["f_b"]),
        eps=case["eps"],
        delta=case["delta"],
        mode="released",
        min_keys=0,
        **more,
    )


def _ragged(case: dict) -> torch.Tensor:
    """The second draws, one padded row each."""
    budget = case["budget"].reshape(-1).tolist()
    rows = torch.zeros(len(budget), max(budget), dtype=torch.int64)
    at = 0
    for row, size in zip(rows, budget, strict=True):
        row[:size] = case["draws_flat"][at : at + size]
        at += size
    assert at == len(case["draws_flat"])
    return rows.view(*case["budget"].shape, -1)


@pytest.mark.parametrize("name", ["released_step.npz", "released_step_chunk.npz", "released_step_equal_scores.npz"])
def test_a_released_step_is_the_authors_own_on_their_draws(name):
    case = _case(name)
    config = _config(case)
    given = {"fixed": case["det_mask"]} if "equal" in name else {}
    out = released_attention(
        case["q"], case["k"], case["v"],
        config=config, scale=case["scale"], pilot_draws=case["pilot_draws"], draws=_ragged(case), **given,
    )  # fmt: skip
    torch.testing.assert_close(out.budget, case["budget"], rtol=0, atol=0)
    torch.testing.assert_close(out.out, case["out"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.n_det, case["det_mask"].sum(-1), rtol=0, atol=0)
    visible = case["mask"] > 0
    n, t = visible.shape[-1], visible.shape[2]
    seen = torch.arange(n) < torch.arange(n - t + 1, n + 1)[:, None]
    expected = (visible & seen).sum(-1) / seen.sum(-1)
    torch.testing.assert_close(out.density.double(), expected.expand_as(out.density).double())


def test_the_released_budget_is_the_authors_own():
    for case in json.loads((GOLDEN / "released_budget.json").read_text())["cases"]:
        if not case["delta"] < 0.5:
            continue  # a negative quantile, whose square grows again: not a rule that anybody would want
        sigma, total = (torch.tensor([float(case[name])], dtype=torch.float64) for name in ("sigma", "D"))
        ours = released_budget(sigma, total, case["r"], eps=case["eps"], delta=case["delta"], pilot=case["n_p"])
        assert int(ours) == case["budget_after_pilot_floor"]


def test_a_released_step_follows_the_formula_draw_by_draw_with_duplicates():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 1, 4).double(), torch.randn(1, 1, 60, 4).double(), torch.randn(1, 1, 60, 3).double()
    config = VAttentionConfig(
        sink=2, local=3, heavy=4, pilot=0.1, eps=0.3, delta=0.2, mode="released", min_keys=0, min_pilot=50
    )
    pilot_draws = torch.randint(2, 57, (1, 2, 1, 5))
    draws = torch.randint(2, 57, (1, 2, 1, 55))
    draws[..., 1] = draws[..., 0]  # a duplicate for sure
    out = released_attention(q, k, v, config=config, scale=0.5, pilot_draws=pilot_draws, draws=draws)
    for head in range(2):
        s = (k[0, 0] @ q[0, head, 0]) * 0.5
        w = (s - s.max()).exp()
        fixed = {0, 1, 57, 58, 59}
        rest = sorted(set(range(60)) - fixed, key=lambda i: -float(s[i]))
        fixed |= set(rest[:4])
        size, drawn = 55, pilot_draws[0, head, 0].tolist()
        sigma = max(float(np.std([float(w[i]) for i in drawn], ddof=1)), 1e-8)
        total = sum(float(w[i]) for i in fixed) / (1 + 1e-6) + sum(float(w[i]) for i in set(drawn)) / (5 / size + 1e-6)
        budget = int(min(max((0.8416212335729143 * sigma * size / (0.3 * total)) ** 2, 1), size))
        budget = min(max(budget, 5), size)
        assert int(out.budget[0, head, 0]) == budget
        read = set(draws[0, head, 0, :budget].tolist())
        weight = {i: 1 / (min(1.0, (i in fixed) + budget / size * (i in read)) + 1e-6) for i in fixed | read}
        top = sum(weight[i] * float(w[i]) * v[0, 0, i] for i in weight)
        torch.testing.assert_close(out.out[0, head, 0], top / sum(weight[i] * float(w[i]) for i in weight))


def test_min_pilot_plays_no_part_and_the_mode_is_reached_from_the_front_door():
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 800, 8), torch.randn(1, 2, 800, 8)
    outs = [
        vattention(q, k, v, config=VAttentionConfig(mode="released", min_pilot=m, sink=4, local=4)) for m in (2, 300)
    ]
    torch.testing.assert_close(outs[0].out, outs[1].out, rtol=0, atol=0)
    assert outs[0].density.max() < 0.5


def test_collapsed_duplicates_lose_about_half_the_sampled_share():
    assert collapse_bias(10_000, 1000) == pytest.approx(1000 / 20_000, rel=0.05)


def test_a_dense_step_of_the_released_mode_is_audited_too():
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 2, 1, 8, generator=g), *torch.randn(2, 1, 1, 5, 8, generator=g)
    out = vattention(q, k, v, config=VAttentionConfig(mode="released", audit=True))
    assert out.err is not None
    assert (out.err == 0).all()
    assert [i.tolist() for i in out.indices or []] == [[0, 1, 2, 3, 4]] * 2
    q[0, 1] = torch.nan
    with pytest.raises(ValueError, match="layer 0, head 1 is not finite"):
        vattention(q, k, v, config=VAttentionConfig(mode="released", sink=1, local=1))
