"""The guider's cache holds what was committed and nothing else, whatever it refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay._errors import InputError
from assay.methods.freecache_guided_diffusion import ARGuider, MatchRule

from .conftest import Bigram, guider_model

EXACT = MatchRule("exact")
COUNT_UP = [(i + 1) % 50 for i in range(50)]  # after token i comes i + 1


def as_if_fresh(model, tokens, cache):
    """Whether a cache holds what a model computes that reads these tokens anew."""
    fresh = model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
    return all(
        torch.allclose(mine.keys, theirs.keys, atol=1e-5) and torch.allclose(mine.values, theirs.values, atol=1e-5)
        for mine, theirs in zip(cache.layers, fresh.layers, strict=True)
    )


@torch.no_grad()
def greedy(model, tokens, n):
    tokens = list(tokens)
    for _ in range(n):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-n:]


@settings(max_examples=8)
@given(
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=6),
    agreements=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=4),
    chunk=st.integers(1, 5),
)
def test_after_every_match_the_cache_is_that_of_a_fresh_forward(ar, prompt, agreements, chunk):
    guider = ARGuider(ar)
    committed = list(prompt)
    for agreeing, more in agreements:
        drafts = greedy(ar, committed, agreeing) if agreeing else []
        wrong = (greedy(ar, committed + drafts, 1)[0] + 1) % 40  # no rule of ours agrees with this one
        drafts = [*drafts, wrong, *range(more)]
        result = guider.match(committed, drafts, EXACT, chunk)
        assert result.k == result.rejected_at == agreeing
        committed += drafts[: max(agreeing, 1)]
        held, cache = guider.held()
        assert held == committed[:-1]
        with torch.no_grad():
            assert cache.get_seq_length() == len(held)
            assert as_if_fresh(ar, held, cache)
            read = ar(input_ids=torch.tensor([committed])).logits[0, -1].softmax(0)
        following, _ = guider.next_distribution(committed)
        assert torch.allclose(following, read, atol=1e-5)
        guider.rollback(len(committed) - 1)


@pytest.mark.parametrize(("n", "calls"), [(31, [31]), (32, [32]), (33, [32, 1]), (64, [32, 32]), (65, [32, 32, 1])])
def test_a_chunk_is_read_only_after_a_whole_one_was_agreed(n, calls):
    model = Bigram([(i + 1) % 90 for i in range(90)])
    result = ARGuider(model).match([0], list(range(1, n + 1)), EXACT, 32)
    assert (result.k, result.rejected_at) == (n, None)
    assert [len(call["fed"]) for call in model.calls] == calls
    assert (result.forwards, result.tokens) == (len(calls), n)
    # the 32nd draft refused: the second chunk is not read, the 33rd refused: it is
    for at, expected in ((32, [32]), (33, [32, min(n - 32, 32)])):
        if at <= n:
            model.calls.clear()
            drafts = [*range(1, at), 0, *range(at + 1, n + 1)]
            assert ARGuider(model).match([0], drafts, EXACT, 32).k == at - 1
            assert [len(call["fed"]) for call in model.calls] == expected


def test_it_reads_the_prefix_once_and_never_again():
    model = Bigram(COUNT_UP)
    guider = ARGuider(model)
    guider.match([7, 8, 9], [10, 11, 0], EXACT)
    assert model.calls == [{"cache_before": 0, "fed": [7, 8]}, {"cache_before": 2, "fed": [9, 10, 11]}]
    model.calls.clear()
    guider.match([7, 8, 9, 10, 11], [3, 4], EXACT)
    assert model.calls == [{"cache_before": 4, "fed": [11, 3]}]
    model.calls.clear()
    guider.match([7, 8, 9, 10, 11, 3], [4], EXACT)  # nothing was agreed, and 3 was committed all the same
    assert model.calls == [{"cache_before": 5, "fed": [3]}]
    model.calls.clear()
    guider.match([7, 1, 2], [3], EXACT)  # another sequence: what it shares is kept
    assert model.calls == [{"cache_before": 1, "fed": [1]}, {"cache_before": 2, "fed": [2]}]


def test_tokens_that_are_given_are_read_and_not_judged():
    guider = ARGuider(Bigram(COUNT_UP))
    # 20 and 21 stand there already; the drafts 5, 22, 23 follow what is before them, the last does not
    result = guider.match([4], [5, 20, 21, 22, 23, 9], EXACT, 2, judged=[True, False, False, True, True, True])
    assert (result.k, result.rejected_at) == (3, 5)
    assert guider.held()[0] == [4, 5, 20, 21, 22]  # all but the last agreed draft


def test_rows_have_caches_of_their_own():
    guider = ARGuider(Bigram(COUNT_UP))
    guider.reset(2)
    guider.match([1, 2], [3], EXACT, row=0)
    guider.match([5], [6, 7], EXACT, row=1)
    assert (guider.held(0)[0], guider.held(1)[0]) == ([1, 2], [5, 6])


def test_a_token_that_it_does_not_have_is_refused_and_left_out():
    model = Bigram(COUNT_UP)
    guider = ARGuider(model)
    assert guider.match([1], [2, 50, 3], EXACT).k == 1
    assert guider.match([1, 2], [50, 3], EXACT).k == 0
    model.calls.clear()
    assert guider.match([1, 2, 50], [3], EXACT).k == 1  # reads 1, 2
    assert model.calls == [{"cache_before": 1, "fed": [2]}]
    with pytest.raises(InputError, match="knows no token"):
        guider.match([50], [3], EXACT)


def test_distributions_are_those_of_the_model_in_float32(ar):
    result = ARGuider(ar).match([1, 2, 3], [4, 5], MatchRule("topk", 40))
    with torch.no_grad():
        read = ar(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 2:4].softmax(1)
    assert result.k == 2
    assert torch.allclose(result.probs, read, atol=1e-6)


def test_a_guider_in_training_mode_is_refused():
    with pytest.raises(InputError, match="training mode"):
        ARGuider(guider_model().train())


def test_the_stochastic_rule_follows_the_generator(ar):
    def ks(seed):
        generator = torch.Generator().manual_seed(seed)
        return [
            ARGuider(ar).match([1], list(range(2, 12)), MatchRule("stochastic"), generator=generator).k
            for _ in range(30)
        ]

    assert ks(0) == ks(0)
    assert len(set(ks(0))) > 1
