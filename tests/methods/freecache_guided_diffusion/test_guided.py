"""How many drafts a step commits, and whose they are."""

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import DiffusionGenerationConfig, DualCache, NoCache, Sequential, diffusion_generate
from assay.methods.freecache_guided_diffusion import ARGuider, FreeCache, GuidedScheduler, MatchRule
from assay.methods.freecache_guided_diffusion.reference import guided_decoding

from ...mdlm.tiny import EOS, MASK, tiny
from .conftest import Bigram, Judge, Table, golden

PROMPT = torch.randint(0, 38, (1, 9), generator=torch.Generator().manual_seed(4))


def run(model, scheduler, policy=None, prompt=PROMPT, **settings):
    config = DiffusionGenerationConfig(**{"max_new_tokens": 12, "eos_policy": "none", "return_trace": True, **settings})
    return diffusion_generate(model, prompt, config, scheduler, policy)


def committed(out):
    """Columns by step of a single row; with the last those that the EOS rule filled."""
    steps = out.trace.steps[0]
    by_step = [(steps == n).nonzero()[:, 0].tolist() for n in range(1, out.steps + 1)]
    by_step[-1] += (steps == 0).nonzero()[:, 0].tolist()
    return by_step


@pytest.mark.parametrize("name", ["guided_trace.json", "guided_trace_eos.json"])
def test_commits_and_readings_are_those_of_the_released_code(name):
    data = golden(name)
    for case in data["cases"]:
        model = Table(data["draft_by_column"], data["vocab"], data["mask_id"], data["eos_id"])
        judge = Bigram(data["ar_argmax_after_token"])
        w = case["window"]
        policy = FreeCache(freeze="immediate")
        if w is not None:
            policy = FreeCache("sliding", window=(w, w), keep_last_commit=False)
        new = len(data["draft_by_column"]) - len(data["prompt"])
        scheduler = GuidedScheduler(ARGuider(judge), verify_chunk=data["verify_chunk"])
        out = run(model, scheduler, policy, [data["prompt"]], max_new_tokens=new, eos_policy="fill")
        assert out.sequences[0].tolist() == case["final"]
        assert committed(out) == case["committed_columns"]
        # The released code reads the last draft of a window too, and after a step of several chunks some of them again;
        # until then cells and tokens are equal, and always each chunk starts at its own place.
        theirs = [(call["cache_before"], call["fed"]) for call in case["ar_calls"]]
        mine = [(call["cache_before"], call["fed"]) for call in judge.calls]
        assert all((n, fed) == (m, f[: len(fed)]) for (n, fed), (m, f) in zip(mine[:4], theirs[:4], strict=True))
        assert all(any(fed == f[: len(fed)] for _, f in theirs) for _, fed in mine)
        assert len(mine) <= len(theirs)
        assert all(fed[0] == case["final"][n] for n, fed in mine)


def test_a_refused_first_draft_is_committed_all_the_same_and_is_the_models_own():
    model = tiny()
    judge = ARGuider(Bigram([(i + 1) % 40 for i in range(40)]))
    out = run(model, GuidedScheduler(judge))
    sequential = run(model, Sequential())
    refused = [k == 0 for k in out.stats["accepted"][0]]
    assert any(refused)
    assert all(len(columns) == max(k, 1) for columns, k in zip(committed(out), out.stats["accepted"][0], strict=True))
    follows = (out.sequences[0, 8:-1] + 1) % 40
    assert (out.sequences[0, 9:] != follows).any()  # not the judge's tokens
    if all(k <= 1 for k in out.stats["accepted"][0]):
        assert torch.equal(out.sequences, sequential.sequences)


@pytest.mark.parametrize("policy", [NoCache, FreeCache, lambda: FreeCache("sliding", window=(4, 20))])
def test_a_guider_that_always_refuses_gives_sequential_decoding(policy):
    for shift in (False, True):
        model = tiny(logit_shift=shift)
        out, sequential = run(model, GuidedScheduler(Judge(0)), policy()), run(model, Sequential(), policy())
        assert torch.equal(out.sequences, sequential.sequences)
        assert out.steps == 12
        assert out.stats["accepted"] == [[0] * 12]


def test_a_guider_that_agrees_with_everything_needs_one_step():
    out = run(tiny(), GuidedScheduler(Judge(None)), FreeCache("sliding", window=(2, 4)))
    assert (out.steps, out.forwards, out.token_forwards) == (1, 1, 21)
    assert out.stats["accepted"] == [[12]]


def test_after_the_first_step_a_window_holds_w_right_minus_one_masks():
    judge = Judge(0, None)
    out = run(tiny(), GuidedScheduler(judge), FreeCache("sliding", window=(2, 4)))
    assert [len(columns) for columns in committed(out)] == [1, 3, 3, 3, 2]
    assert [len(drafts) for _, drafts in judge.asked] == [12, 3, 3, 3, 2]


def test_it_equals_the_slow_version(ar):
    for rule in (
        MatchRule("exact"),
        MatchRule("topk_relative"),
        MatchRule("topk", 12),
        MatchRule("threshold", threshold=0.02),
    ):
        model = tiny(logit_shift=True)
        scheduler = GuidedScheduler(ARGuider(ar), rule.kind, rule.top_k, rule.rho, rule.threshold, verify_chunk=3)
        out = run(model, scheduler)
        x, accepted = guided_decoding(model, ar, PROMPT[0], 12, rule)
        assert torch.equal(out.sequences[0], x)
        assert out.stats["accepted"] == [accepted]


@pytest.mark.parametrize("place", [0, 3, 6])
def test_an_eos_ends_the_answer_wherever_it_was_accepted(place):
    drafts = [*range(4), 20, 21, 22, 23, 24, 25, 26, 27]
    drafts[4 + place] = 58
    model = Table(drafts, 60, 59, 58)
    out = run(model, GuidedScheduler(Judge(7)), prompt=torch.arange(4)[None], max_new_tokens=8, eos_policy="fill")
    answer = out.sequences[0, 4:].tolist()
    assert answer == [*drafts[4 : 4 + place], *[58] * (8 - place)]
    assert (out.trace.steps[0, 5 + place :] == 0).all()
    # without the rule every draft stands
    out = run(model, GuidedScheduler(Judge(7)), prompt=torch.arange(4)[None], max_new_tokens=8)
    assert out.sequences[0, 4:].tolist() == drafts[4:]


def test_a_row_equals_its_single_run(ar):
    model = tiny(logit_shift=True)
    prompts = [PROMPT[0, :4], PROMPT[0], PROMPT[0, 2:8]]
    together = run(model, GuidedScheduler(ARGuider(ar), "topk", 10), FreeCache("sliding", window=(3, 6)), prompts)
    for row, prompt in enumerate(prompts):
        alone = run(model, GuidedScheduler(ARGuider(ar), "topk", 10), FreeCache("sliding", window=(3, 6)), [prompt])
        assert torch.equal(together.sequences[row, -12:], alone.sequences[0, -12:])
        assert together.stats["accepted"][row] == alone.stats["accepted"][0]
        assert together.stats["ar_token_forwards"][row] == alone.stats["ar_token_forwards"][0]


def test_gaps_are_filled_in_order_and_what_stands_between_is_read():
    model = tiny()
    prompt = PROMPT.clone()
    prompt[0, [2, 3, 6]] = MASK
    judge = Judge(0, 3)
    out = run(model, GuidedScheduler(judge), prompt=prompt, max_new_tokens=2, allow_masks_in_prompt=True)
    assert committed(out) == [[2], [3, 6, 9], [10]]
    prefix, tokens = judge.asked[1]
    assert prefix == out.sequences[0, :3].tolist()
    assert tokens[1:3] == PROMPT[0, 4:6].tolist()  # given, between the drafts of columns 3 and 6
    assert tokens[4:6] == PROMPT[0, 7:9].tolist()
    assert len(tokens) == 8
    given = [i for i in range(9) if i not in (2, 3, 6)]
    assert torch.equal(out.sequences[0, given], PROMPT[0, given])


def test_the_mask_is_never_drafted():
    drafts = [*range(4), *[59] * 4]
    out = run(Table(drafts, 60, 59, 58), GuidedScheduler(Judge(None)), prompt=torch.arange(4)[None], max_new_tokens=4)
    assert not (out.sequences == 59).any()


def test_a_prompt_that_fills_the_canvas_but_one(ar):
    out = run(tiny(), GuidedScheduler(ARGuider(ar)), FreeCache("sliding", window=(0, 2)), max_new_tokens=1)
    assert (out.steps, out.forwards) == (1, 1)


def test_drafts_follow_the_temperature(ar):
    runs = [run(tiny(), GuidedScheduler(ARGuider(ar)), temperature=1.0, seed=s).sequences for s in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_a_policy_that_leaves_the_first_mask_out_is_refused():
    class Right(DualCache):
        def within(self, start, end, length):
            return type(super().within(start, end, length))(region=(start + 2, length), write="none")

    with pytest.raises(InputError, match="commits from the left"):
        run(tiny(), GuidedScheduler(Judge(0)), Right(), block_length=4)


def test_the_account_tells_what_the_guider_read(ar):
    out = run(tiny(), GuidedScheduler(ARGuider(ar), "topk", 40))
    assert out.stats["accepted"] == [[12]]
    assert out.stats["ar_forwards"] == 2  # the prompt, and one chunk
    assert out.stats["ar_token_forwards"] == [8 + 12]
    assert out.stats["time_ar"] > 0
    assert out.stats["scheduler"] == "GuidedScheduler(match=topk, top_k=40, verify_chunk=32)"


def test_eos_is_the_models(ar):
    assert tiny().config.eos_token_id == EOS
    with pytest.raises(InputError, match="at least one draft"):
        GuidedScheduler(ARGuider(ar), verify_chunk=0)
