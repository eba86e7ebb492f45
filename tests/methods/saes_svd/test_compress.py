"""A whole model: the same factors as by hand, and what comes out is a model."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from assay._errors import InputError
from assay.lm import (
    CompressionReport,
    LowRankLinear,
    blocks,
    fwsvd_factors,
    groups,
    load,
    load_compressed,
    rank_for,
    save_compressed,
    svd_factors,
    svd_llm_factors,
)
from assay.methods.saes_svd import METHODS, cealc, compress_model
from assay.methods.saes_svd.baselines import adasvd_ratios, learn_ranks

transformers = pytest.importorskip("transformers")

IDS = torch.randint(60, (8, 16), generator=torch.Generator().manual_seed(1))


def tiny(family: str = "Llama", layers: int = 2, hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "num_hidden_layers": layers, "num_attention_heads": 4, "hidden_size": hidden}
    if family == "GPT2":
        config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=layers, n_head=4, n_positions=32)
        return transformers.GPT2LMHeadModel(config).eval()
    if family == "OPT":
        sizes |= {"ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    else:
        sizes |= {"num_key_value_heads": 2, "intermediate_size": hidden * 3 // 2, "initializer_range": 0.2}
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def activations(model: nn.Module, block: int, name: str) -> torch.Tensor:
    caught = []
    hook = blocks(model)[block].get_submodule(name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    hook.remove()
    return caught[0].reshape(-1, caught[0].shape[-1]).T.double()


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "OPT", "GPT2"])
@pytest.mark.parametrize("method", ["saes-svd", "svd-llm"])
def test_every_family_compresses_saves_and_generates(family, method, tmp_path):
    model = tiny(family)
    dense = sum(p.numel() for p in blocks(model).parameters())
    report = compress_model(model, IDS, method=method, ratio=0.3)
    thin = [m for m in model.modules() if isinstance(m, LowRankLinear)]
    expected = sum(len(group) for block in blocks(tiny(family)) for group in groups(block))
    assert len(thin) == expected == len(report.layers)
    assert report.parameters[0] - report.parameters[1] == dense - sum(p.numel() for p in blocks(model).parameters())
    for row in report.layers:
        assert row["rank"] == rank_for(0.3, row["out"], row["in"])
        assert row["local"] < 1.0
    want = model(IDS).logits
    save_compressed(model, tmp_path)
    back = load_compressed(tmp_path)
    assert torch.equal(back(IDS).logits, want)
    assert back.generate(IDS[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 7)


def test_the_last_layer_is_the_closed_form_of_what_it_is_fed():
    original, model = tiny(), tiny()
    compress_model(model, IDS, ratio=0.3, beta=0.5, ridge=1e-3)
    by_hand = copy.deepcopy(model)
    linear = blocks(original)[1].mlp.down_proj
    # Everything before the last Linear is compressed, and its input does not depend on itself.
    x, ref = activations(by_hand, 1, "mlp.down_proj"), activations(original, 1, "mlp.down_proj")
    want = cealc(linear.weight.detach(), x @ x.T, (ref - x) @ x.T, rank_for(0.3, 16, 24), beta=0.5, ridge=1e-3)
    got = blocks(model)[1].mlp.down_proj
    torch.testing.assert_close(got.dense_weight(), want.A @ want.B, rtol=1e-3, atol=1e-4)


def test_without_alignment_and_with_original_inputs_it_is_svd_llm():
    original, model = tiny(), tiny()
    compress_model(model, IDS, method="svd-llm", ratio=0.3, inputs="original")
    for number in (0, 1):
        linear = blocks(original)[number].self_attn.o_proj
        x = activations(original, number, "self_attn.o_proj")
        want = svd_llm_factors(linear.weight.detach(), x @ x.T, rank_for(0.3, 16, 16)).product
        got = blocks(model)[number].self_attn.o_proj.dense_weight()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    zero, compressed = tiny(), tiny()
    compress_model(zero, IDS, method="cealc", ratio=0.3, beta=0.0)
    compress_model(compressed, IDS, method="svd-llm", ratio=0.3)
    torch.testing.assert_close(zero(IDS).logits, compressed(IDS).logits, rtol=1e-3, atol=1e-4)


def test_plain_factorisations_are_those_of_the_weights():
    original, model = tiny(), tiny()
    compress_model(model, method="svd", ratio=0.3)
    linear = blocks(original)[1].mlp.up_proj
    want = svd_factors(linear.weight.detach(), rank_for(0.3, 24, 16)).product
    torch.testing.assert_close(blocks(model)[1].mlp.up_proj.dense_weight(), want)
    model = tiny()
    compress_model(model, IDS, method="fwsvd", ratio=0.3)
    total = torch.zeros(16)
    for row in IDS:
        original.zero_grad()
        original(input_ids=row[None], labels=row[None]).loss.backward()
        total += linear.weight.grad.square().sum(0)
    want = fwsvd_factors(linear.weight.detach(), (total / len(IDS)).sqrt(), rank_for(0.3, 24, 16)).product
    torch.testing.assert_close(blocks(model)[1].mlp.up_proj.dense_weight(), want, rtol=1e-3, atol=1e-4)


def test_the_weighted_methods_are_nearer_to_the_original_than_the_plain_one():
    """On a model whose activations have a shape: embeddings of low rank."""
    original = tiny()
    with torch.no_grad():
        scale = torch.logspace(0, -2, 16)
        original.model.embed_tokens.weight.mul_(scale)
    want = original(IDS).logits.log_softmax(-1)
    far = {}
    for method in ("svd", "svd-llm", "saes-svd"):
        model = copy.deepcopy(original)
        compress_model(model, IDS, method=method, ratio=0.4)
        got = model(IDS).logits.log_softmax(-1)
        far[method] = float((want.exp() * (want - got)).sum(-1).mean())
    assert far["svd-llm"] < far["svd"]
    assert far["saes-svd"] < far["svd"]


def test_the_same_call_gives_the_same_model_whatever_the_batches_and_streams():
    models = []
    for options in ({"batch_size": 8}, {"batch_size": 8}, {"batch_size": 3, "offload": "disk"}):
        model = tiny()
        compress_model(model, IDS, ratio=0.3, **options)
        models.append(model(IDS).logits)
    assert torch.equal(models[0], models[1])
    torch.testing.assert_close(models[0], models[2], rtol=1e-2, atol=1e-2)


def test_padding_does_not_count():
    plain, padded = tiny(), tiny()
    compress_model(plain, IDS, ratio=0.3)
    pad = torch.zeros(8, 3, dtype=torch.int64)
    batch = {
        "input_ids": torch.cat([pad, IDS], 1),
        "attention_mask": torch.cat([pad, torch.ones_like(IDS)], 1),
    }
    report = compress_model(padded, [batch], ratio=0.3)
    assert report.calibration == "the given text, 128 tokens"
    torch.testing.assert_close(plain(IDS).logits, padded(IDS).logits, rtol=1e-2, atol=1e-2)


def test_ratios_by_importance_keep_the_budget_and_the_learned_ranks_too():
    model = tiny(layers=4, hidden=64)
    ratios = adasvd_ratios(model, [IDS], 0.4)
    assert sum(ratios) / 4 == pytest.approx(0.4)
    assert all(0.2 <= r <= 0.6 for r in ratios)
    assert len(set(ratios)) > 1
    before = model(IDS).logits
    learned = learn_ranks(model, [IDS], 0.4, steps=30, length=12)
    assert torch.equal(model(IDS).logits, before)  # nothing was changed
    assert not any(isinstance(m, LowRankLinear) for m in model.modules())
    kept = dense = 0
    for (number, name), factors in learned.factors.items():
        m, n = blocks(model)[number].get_submodule(name).weight.shape
        dense += m * n
        kept += m * n if factors is None else factors.A.shape[1] * (m + n)
    assert kept / dense == pytest.approx(0.6, abs=0.02)  # ranks are whole numbers
    assert learned.losses[-1] < learned.losses[0] + 0.5


@pytest.mark.parametrize("method", ["adasvd", "dobi", "asvd"])
def test_the_other_rivals_compress_to_the_size_that_was_asked(method):
    model = tiny(layers=3, hidden=64)
    before = sum(p.numel() for p in blocks(model).parameters() if p.ndim == 2)
    report = compress_model(model, IDS, method=method, ratio=0.3, **({"steps": 5} if method == "dobi" else {}))
    after = sum(p.numel() for p in blocks(model).parameters() if p.ndim == 2)
    assert after / before == pytest.approx(0.7, abs=0.03)
    assert report.method == method
    assert model(IDS).logits.isfinite().all()


def test_layers_that_stay_dense_are_named():
    report = CompressionReport("dobi", {}, "nothing", 0, [{"block": 0, "name": "self_attn.q_proj", "rank": None}])
    assert report.dense == ["0.self_attn.q_proj"]
    assert "left dense, as the factors would not be smaller: 0.self_attn.q_proj (1 in all)" in str(report)


def test_the_report_tells_what_was_done():
    model = tiny()
    report = compress_model(model, IDS, ratio=0.3, source="a test", seed=3)
    frame = report.to_frame()
    assert len(frame) == 14
    assert {"block", "name", "rank", "beta", "retained", "local", "alignment", "ridge", "top_share"} <= set(frame)
    first = frame[(frame.block == 0) & (frame.name == "self_attn.q_proj")].iloc[0]
    assert first.beta_irrelevant
    assert frame[frame.block == 1].beta.between(0.25, 0.75).all()
    assert len(report.cosine) == 2
    assert 0 < report.cosine[1] <= report.cosine[0] + 0.05
    assert "a test, 128 tokens, seed 3" in str(report)


def test_texts_are_cut_by_the_seed():
    class Letters:
        def __call__(self, text, *, add_special_tokens):
            return {"input_ids": [ord(c) % 60 for c in text]}

    texts = ["the quick brown fox jumps over the lazy dog " * 3] * 4
    seen = []
    for seed in (0, 0, 1):
        model = tiny()
        compress_model(model, texts, tokenizer=Letters(), ratio=0.3, n_samples=6, seq_len=16, seed=seed)
        seen.append(model(IDS).logits)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_too_few_tokens_warn(caplog):
    with caplog.at_level(logging.WARNING, "assay.lm"):
        model = tiny()
        compress_model(model, IDS[:1, :10], ratio=0.3)
    assert "10 calibration tokens are fewer than the 16 inputs" in caplog.text
    assert model(IDS).logits.isfinite().all()


def test_a_gguf_file_compresses_saves_and_generates(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    model, tokenizer, _ = load(tiny_gguf)
    ids = tokenizer("the theatre abc the", return_tensors="pt").input_ids
    compress_model(model, ids.repeat(4, 1), ratio=0.3)
    want = model(ids).logits
    save_compressed(model, tmp_path / "out", tokenizer)
    again = load(tmp_path / "out")  # the tokenizer too
    assert torch.equal(again.model(ids).logits, want)
    assert again.tokenizer("the theatre abc the").input_ids == ids[0].tolist()
    assert again.model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_what_cannot_be_compressed_is_said():
    with pytest.raises(InputError, match="the ratio is 0"):
        compress_model(tiny(), IDS, ratio=0.0)
    with pytest.raises(InputError, match=r"the ratio is 1\.0"):
        compress_model(tiny(), IDS, ratio=1.0)
    with pytest.raises(InputError, match="the method is 'pca'"):
        compress_model(tiny(), IDS, method="pca")
    with pytest.raises(InputError, match="svd has no option 'beta': it has none"):
        compress_model(tiny(), method="svd", beta=0.5)
    with pytest.raises(InputError, match="cealc needs beta="):
        compress_model(tiny(), IDS, method="cealc")
    with pytest.raises(InputError, match="no calibration"):
        compress_model(tiny())
    with pytest.raises(InputError, match="texts need a tokenizer"):
        compress_model(tiny(), ["a text"])
    with pytest.raises(InputError, match="no \\(rows, tokens\\) of ids"):
        compress_model(tiny(), IDS.float())
    model = tiny()
    compress_model(model, IDS, ratio=0.3)
    with pytest.raises(InputError, match="compressed already"):
        compress_model(model, IDS, ratio=0.3)
    model = tiny()
    blocks(model)[1].mlp.gate_proj.weight.data[3, 2] = torch.nan
    with pytest.raises(
        InputError, match=r"block 1, mlp.down_proj: an input of the calibration is not finite|block 1, mlp"
    ):
        compress_model(model, IDS, ratio=0.3)
    model = tiny()
    model.is_quantized = True
    with pytest.raises(TypeError, match="quantised"):
        compress_model(model, IDS)
    assert set(METHODS) >= {"svd", "saes-svd"}
