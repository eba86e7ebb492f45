"""Losses do not depend on batches and padding, windows score each token once, distances are those of the definitions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay._errors import InputError
from assay.lm._perplexity import cosine_by_block, distances, perplexity


def tiny(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    ).eval()
    model.lm_head.weight.data *= 20  # a model with opinions
    return model


MODEL = tiny()
DOCUMENTS = [torch.randint(30, (n,), generator=torch.Generator().manual_seed(n)) for n in (17, 5, 2, 40, 17)]


@torch.no_grad()
def token_losses(model, document) -> torch.Tensor:
    logits = model(document[None]).logits[0].double().log_softmax(-1)
    return -logits[:-1].gather(1, document[1:, None])[:, 0]


def test_documents_are_scored_as_if_each_stood_alone():
    expected = torch.stack([token_losses(MODEL, document).mean() for document in DOCUMENTS])
    for batch_size in (1, 3, 8):
        losses = perplexity(MODEL, DOCUMENTS, batch_size=batch_size)
        torch.testing.assert_close(losses.nll, expected, rtol=1e-5, atol=1e-5)
        assert losses.tokens.tolist() == [16, 4, 1, 39, 16]
    total = sum(float(token_losses(MODEL, document).sum()) for document in DOCUMENTS)
    assert losses.perplexity == pytest.approx(math.exp(total / 76), rel=1e-5)
    assert perplexity(MODEL, [d.tolist() for d in DOCUMENTS]).nll.equal(perplexity(MODEL, DOCUMENTS).nll)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (7, 7), (40, 40), (39, 39), (2, 2), (3, 2)])
def test_windows_score_each_token_once_with_the_context_that_they_hold(length, stride):
    document = DOCUMENTS[3]
    losses = perplexity(MODEL, [document], length=length, stride=stride)
    assert losses.tokens.tolist() == [39]
    expected = []
    for token in range(1, 40):
        if stride == length:
            # a window begins with the last token of the one before
            begin = max(0, token // length * length - 1)
        else:
            begin = max(0, -(-(token + 1 - length) // stride) * stride)  # the first window that holds it
        expected.append(float(token_losses(MODEL, document[begin : token + 1])[-1]))
    assert float(losses.nll) == pytest.approx(sum(expected) / 39, rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = tiny()
    model.lm_head.weight.data.zero_()
    losses = perplexity(model, DOCUMENTS)
    assert losses.perplexity == pytest.approx(30, rel=1e-6)
    assert perplexity(model, DOCUMENTS, autocast=True).perplexity == pytest.approx(30, rel=1e-3)


def test_distances_are_those_of_the_definitions():
    other = tiny(1)
    found = distances(other, MODEL, DOCUMENTS, batch_size=2)
    for number, document in enumerate(DOCUMENTS):
        with torch.no_grad():
            p, q = (m(document[None]).logits[0, :-1].double().softmax(-1) for m in (MODEL, other))
        assert float(found.kl[number]) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
        assert float(found.agreement[number]) == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    same = distances(MODEL, copy.deepcopy(MODEL), DOCUMENTS)
    assert same.kl.abs().max() < 1e-6
    assert same.agreement.tolist() == [1.0] * 5


def test_cosines_fall_from_the_block_on_that_was_changed():
    other = copy.deepcopy(MODEL)
    assert cosine_by_block(other, MODEL, DOCUMENTS).tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    other.model.layers[1].mlp.down_proj.weight.data += torch.randn(16, 24)
    found = cosine_by_block(other, MODEL, DOCUMENTS, batch_size=2)
    assert float(found[0]) == pytest.approx(1.0, abs=1e-6)
    assert float(found[1]) < 0.99
    streams = []
    for model in (other, MODEL):
        kept = []
        hook = model.model.layers[1].register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[0]))
        with torch.no_grad():
            for document in DOCUMENTS:
                model(document[None])
        hook.remove()
        streams.append(torch.cat(kept))
    expected = torch.nn.functional.cosine_similarity(*streams, dim=-1).mean()
    assert float(found[1]) == pytest.approx(float(expected), rel=1e-5)


def test_what_cannot_be_scored_is_refused():
    for call, sentence in (
        (lambda: perplexity(MODEL, []), "there is no document"),
        (lambda: perplexity(MODEL, [DOCUMENTS[0], torch.tensor([1])]), "document 1 has the shape"),
        (lambda: perplexity(MODEL, DOCUMENTS, length=8, stride=9), "leave gaps: give a stride of 1 to 8"),
        (lambda: perplexity(MODEL, DOCUMENTS, batch_size=0), "a batch of 0"),
        (lambda: distances(MODEL, MODEL, []), "there is no document"),
    ):
        with pytest.raises(InputError, match=sentence):
            call()
