"""When a guider agrees with a draft."""

import numpy as np
import pytest
import torch

from assay._errors import InputError
from assay.methods.freecache_guided_diffusion import MatchRule

from .conftest import GOLDEN


def agreed(rule: MatchRule, q: list[float], draft: int) -> bool:
    return bool(rule.agrees(torch.tensor([q]), torch.tensor([draft]))[0])


@pytest.mark.parametrize(
    ("rule", "q", "draft", "expected"),
    [
        (MatchRule("topk_relative"), [0.5, 0.3, 0.2], 1, True),  # 0.3 >= 0.25
        (MatchRule("topk_relative"), [0.7, 0.3, 0.0], 1, False),  # 0.3 < 0.35
        (MatchRule("topk_relative"), [0.4, 0.3, 0.3], 2, True),  # ties with the second largest
        (MatchRule("topk_relative"), [0.34, 0.35, 0.31], 2, False),  # near enough, but third
        (MatchRule("topk", 2), [0.9, 0.08, 0.02], 1, True),
        (MatchRule("topk", 2), [0.9, 0.08, 0.02], 2, False),
        (MatchRule("exact"), [0.4, 0.4, 0.2], 0, True),
        (MatchRule("exact"), [0.4, 0.4, 0.2], 1, False),  # the lowest id on ties
        (MatchRule("threshold"), [0.5, 0.4, 0.1], 2, False),  # above, not at
        (MatchRule("threshold", threshold=0.05), [0.5, 0.4, 0.1], 2, True),
    ],
)
def test_rules_by_hand(rule, q, draft, expected):
    assert agreed(rule, q, draft) is expected


def test_a_stochastic_rule_agrees_as_often_as_the_draft_is_likely():
    q = torch.tensor([[0.3, 0.7]]).expand(20_000, 2)
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    share = MatchRule("stochastic").agrees(q, torch.zeros(20_000, dtype=torch.long), u).double().mean()
    assert abs(float(share) - 0.3) < 0.015
    with pytest.raises(InputError, match="uniform number"):
        MatchRule("stochastic").agrees(q, torch.zeros(20_000, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("exact", MatchRule("exact")),
        ("topk5", MatchRule("topk")),
        ("topk2", MatchRule("topk", 2)),
        ("topk_relative_2_0.5", MatchRule("topk_relative")),
        ("topk_relative_5_0.3", MatchRule("topk_relative", 5, 0.3)),
        ("threshold_0.1", MatchRule("threshold")),
        ("stochastic", MatchRule("stochastic")),
    ],
)
def test_the_prefix_is_as_long_as_in_the_released_code(name, rule):
    data = np.load(GOLDEN / "match_rules.npz")
    q, draft, u = (torch.from_numpy(data[key]) for key in ("q", "draft", "uniform"))
    lengths = [int(rule.agrees(q[i], draft[i], u[i]).long().cumprod(0).sum()) for i in range(len(q))]
    assert lengths == data[f"k_{name}"].tolist()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"top_k": 0}, "at least 1"),
        ({"rho": 1.2}, "from 0 to 1"),
        ({"threshold": 1.0}, "below 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        MatchRule(**settings)
