"""The dense arithmetic of the study is the functional form's, set by set."""

import pytest
import torch

from assay.methods.vattention._attention import vattention
from assay.methods.vattention._config import IndexSets, VAttentionConfig
from assay.methods.vattention._indices import SimHashIndex
from assay.methods.vattention._rows import LayerRows, Sampler


def _layer(n=600, h=4, hkv=2, t=6, d=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=g) for shape in ((h, t, d), (hkv, n, d), (hkv, n, d)))
    return LayerRows(2 * q, k, v, tuple(range(t)))


@pytest.mark.parametrize(
    "config",
    [
        VAttentionConfig(sink=4, local=4, heavy=0.03, min_pilot=60, eps=0.1, index="oracle", min_keys=0),
        VAttentionConfig(
            sink=4, local=4, heavy=0.03, min_pilot=60, eps=0.3, guarantee="output", index="oracle", min_keys=0
        ),
        VAttentionConfig(
            sink=4, local=4, heavy=0.03, min_pilot=60, eps=0.2, tail="one", fpc=True, index="oracle", min_keys=0
        ),
    ],
)
def test_output_budget_and_density_are_those_of_a_step_on_the_same_sets(config):
    rows = _layer()
    fixed = rows.fixed(config.heavy)
    sampler = Sampler(rows, fixed, 1, torch.Generator().manual_seed(1))
    b = sampler.budget(config)
    n_p, _, _ = sampler.spread(config)
    sets = []
    for h in range(4):
        for t in range(6):
            rank = sampler.rank[0, h, t]
            order = rank.argsort()
            p, size = int(n_p[h, t]), int(b[0, h, t])
            sets.append(IndexSets(fixed[h, t].nonzero()[:, 0], order[:p], order[p:size]))
    step = vattention(rows.q[None], rows.k[None], rows.v[None], config=config, index_sets=sets, path="torch")
    torch.testing.assert_close(sampler.output(b)[0], step.out[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sampler.density(b)[0].double(), step.density[0].double())
    assert torch.equal(b[0], step.budget[0])
    # The budget too: with the pilot given, the step's own rule asks for as many.
    alone = vattention(rows.q[None], rows.k[None], rows.v[None], config=config, path="torch")
    assert abs(float(b.double().mean() / alone.budget.double().mean()) - 1) < 0.25


def test_the_fixed_set_is_the_steps_own():
    rows = _layer()
    config = VAttentionConfig(sink=4, local=4, heavy=0.05, index="oracle", min_keys=0, audit=True, budget=2)
    step = vattention(rows.q[None], rows.k[None], rows.v[None], config=config, path="torch")
    assert step.sets is not None
    for row, ours in zip(step.sets, rows.fixed(0.05).flatten(0, 1), strict=True):
        assert row.fixed.tolist() == ours.nonzero()[:, 0].tolist()


def test_the_fixed_set_by_matching_bits_is_the_steps_own():
    rows = _layer()
    index = SimHashIndex(seed=0)
    index.build(rows.k[None])
    config = VAttentionConfig(sink=4, local=4, heavy=0.05, index="simhash", min_keys=0, audit=True, budget=2)
    step = vattention(rows.q[None], rows.k[None], rows.v[None], config=config, index_state=index, path="torch")
    assert step.sets is not None
    for row, ours in zip(step.sets, rows.fixed(0.05, simhash=index).flatten(0, 1), strict=True):
        assert row.fixed.tolist() == ours.nonzero()[:, 0].tolist()


def test_everything_read_is_dense_attention():
    rows = _layer()
    sampler = Sampler(rows, rows.fixed(0.05), 2, torch.Generator().manual_seed(0))
    everything = sampler.n_s.expand(2, -1, -1)
    assert rows.error(sampler.output(everything)).max() < 1e-5
    torch.testing.assert_close(sampler.density(everything), torch.ones(2, 4, 6))
    torch.testing.assert_close(sampler.denominator(everything)[0], rows.total)
    assert rows.error_of(rows.visible.float()).max() < 1e-5


def test_samples_are_without_bias_and_have_the_variance_of_drawing_without_replacement():
    rows = _layer(n=300, h=1, hkv=1, t=1)
    sampler = Sampler(rows, rows.fixed(10), 4000, torch.Generator().manual_seed(0))
    b, n_s = 40, int(sampler.n_s)
    estimate = sampler.denominator(torch.full((4000, 1, 1), b)).flatten()
    rest = rows.w[0, 0][rows.visible[0, 0] & ~sampler.fixed[0, 0]]
    assert abs(float(estimate.mean() - rows.total)) < 4 * float(estimate.std()) / 4000**0.5
    assert float(estimate.var()) == pytest.approx(n_s**2 * float(rest.var()) / b * (1 - b / n_s), rel=0.1)


def test_flatness_is_one_where_all_keys_weigh_the_same():
    rows = LayerRows(torch.zeros(2, 3, 4), torch.randn(1, 50, 4), torch.randn(1, 50, 4), (0, 2))
    torch.testing.assert_close(rows.flatness, torch.ones(2, 2))
