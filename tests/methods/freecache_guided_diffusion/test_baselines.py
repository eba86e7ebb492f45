"""Speculative decoding gives the target model's answers, in law and to the token."""

import pytest
import torch
from scipy.stats import chisquare

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig, diffusion_generate
from assay.methods.freecache_guided_diffusion import ARGuider, FreeCache, SpeculativeDiffusionScheduler
from assay.methods.freecache_guided_diffusion.baselines import accept_speculated

from ...mdlm.tiny import MASK, tiny
from .conftest import Bigram, Table, golden


def test_the_greedy_answer_and_its_steps_are_those_of_the_released_code():
    data = golden("sdd_greedy_trace.json")
    model = Table(data["draft_by_column"], data["vocab"], data["mask_id"], 0)
    guider = ARGuider(Bigram(data["ar_argmax_after_token"]))
    scheduler = SpeculativeDiffusionScheduler(guider, verify_chunk=data["verify_chunk"])
    new = len(data["draft_by_column"]) - len(data["prompt"])
    config = DiffusionGenerationConfig(max_new_tokens=new, eos_policy="none", return_trace=True)
    out = diffusion_generate(model, [data["prompt"]], config, scheduler, FreeCache())
    assert out.sequences[0].tolist() == data["final"]
    steps = out.trace.steps[0]
    assert [(steps == n).nonzero()[:, 0].tolist() for n in range(1, out.steps + 1)] == data["committed_columns"]


def test_the_greedy_answer_is_the_targets_own(ar):
    prompt = torch.randint(0, 38, (2, 6), generator=torch.Generator().manual_seed(0))
    config = DiffusionGenerationConfig(max_new_tokens=14, eos_policy="none")
    out = diffusion_generate(tiny(), prompt, config, SpeculativeDiffusionScheduler(ARGuider(ar), verify_chunk=4))
    own = ar.generate(prompt, max_new_tokens=14, do_sample=False, eos_token_id=None, suppress_tokens=[MASK])
    assert torch.equal(out.sequences, own)


def test_kept_and_replaced_drafts_together_follow_the_target():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))
    n = 50_000
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(p, n, replacement=True, generator=generator)
    kept = accept_speculated(
        p.expand(n, 3), q.expand(n, 3), drafts, torch.rand(n, generator=generator, dtype=torch.float64)
    )
    assert abs(float(kept.double().mean()) - 0.6) < 0.01  # the sum of the smaller of the two
    left = (q - p).clamp(min=0)
    replaced = torch.multinomial(left, n, replacement=True, generator=generator)
    counts = torch.where(kept, drafts, replaced).bincount(minlength=3)
    assert chisquare(counts.numpy(), (n * q).numpy()).pvalue > 0.001


def test_two_positions_follow_the_target_whatever_the_proposal():
    """The rule over two positions: the second is drafted and kept only behind a kept first."""
    n, generator = 50_000, torch.Generator().manual_seed(1)
    p = torch.rand(2, 4, 4, generator=generator, dtype=torch.float64).softmax(2)  # position, token before, token
    q = (4 * torch.rand(2, 4, 4, generator=generator, dtype=torch.float64)).softmax(2)

    def drawn(weights):
        return torch.multinomial(weights, 1, generator=generator)[:, 0]

    def spoken(position, before):
        proposal, target = p[position, before], q[position, before]
        drafts = drawn(proposal)
        kept = accept_speculated(proposal, target, drafts, torch.rand(n, generator=generator, dtype=torch.float64))
        left = (target - proposal).clamp(min=0)
        replaced = drawn(torch.where(kept[:, None], target, left))
        return torch.where(kept, drafts, replaced)

    first = spoken(0, torch.zeros(n, dtype=torch.long))
    second = spoken(1, first)
    counts = (4 * first + second).bincount(minlength=16)
    expected = n * (q[0, 0][:, None] * q[1]).flatten()
    assert chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_is_distributed_as_the_target_samples(temperature):
    """Two tokens of three, over many rows; drafts are sampled, or (temperature 0) always the same."""
    rows = 300
    target = Bigram([0, 1, 2, 0, 0])
    with torch.no_grad():
        target.logits.copy_(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))
    model = Table([1, 2, 0], 5, 4, 3)
    config = DiffusionGenerationConfig(max_new_tokens=2, eos_policy="suppress", temperature=10 * temperature, seed=0)
    scheduler = SpeculativeDiffusionScheduler(ARGuider(target), exact=True)
    out = diffusion_generate(model, torch.ones(rows, 1, dtype=torch.long), config, scheduler)
    q = target.logits[:, :3].detach().double().softmax(1)  # neither the mask, 4, nor the end, 3, is written
    counts = (3 * out.sequences[:, 1] + out.sequences[:, 2]).bincount(minlength=9).double()
    assert chisquare(counts.numpy(), (rows * (q[1][:, None] * q[:3]).flatten()).numpy()).pvalue > 0.001


def test_a_draft_that_the_target_does_not_have_is_replaced():
    model = Table([1, 2, 50, 3], 60, 59, 58)
    guider = ARGuider(Bigram([(i + 1) % 20 for i in range(20)]))
    config = DiffusionGenerationConfig(max_new_tokens=2, eos_policy="none")
    out = diffusion_generate(model, torch.tensor([[1, 2]]), config, SpeculativeDiffusionScheduler(guider))
    assert out.sequences[0].tolist() == [1, 2, 3, 4]


def test_what_it_cannot_do_is_refused(ar):
    class Bridge:
        identical, special = False, {}

    with pytest.raises(InputError, match="same vocabulary"):
        SpeculativeDiffusionScheduler.__init__.__wrapped__(
            object.__new__(SpeculativeDiffusionScheduler), ARGuider(ar), aligner=Bridge()
        )
    prompt = torch.tensor([[1, MASK, 2]])
    config = DiffusionGenerationConfig(max_new_tokens=2, allow_masks_in_prompt=True)
    with pytest.raises(InputError, match="left to right"):
        diffusion_generate(tiny(), prompt, config, SpeculativeDiffusionScheduler(ARGuider(ar)))
