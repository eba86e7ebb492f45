"""Which weights go under which rule."""

import pytest
import torch
from torch import nn

from assay.methods.racs_alice import RACS, build_param_groups


def names(groups, rule):
    return {name for group in groups if group["rule"] == rule for name in group["param_names"]}


def llama(**more):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2, **more
    )
    return transformers.LlamaForCausalLM(config)


def test_a_llama_puts_attention_and_mlp_under_the_method():
    model = llama(tie_word_embeddings=False)
    groups = build_param_groups(model, "alice", adam_lr=5e-3)
    expected = {
        f"model.layers.{i}.{part}.weight"
        for i in range(2)
        for part in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    }
    assert names(groups, "matrix") == expected
    assert "lm_head.weight" in names(groups, "adam")
    assert "model.embed_tokens.weight" in names(groups, "adam")
    assert names(groups, "matrix") | names(groups, "adam") == {n for n, _ in model.named_parameters()}
    assert [g["lr"] for g in groups] == [0.02, 5e-3]
    assert {k: groups[1][k] for k in ("betas", "eps", "weight_decay")} == {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    with_head = build_param_groups(model, "racs", lr=0.5, last_layer="method")
    assert names(with_head, "matrix") == expected | {"lm_head.weight"}
    assert with_head[0]["lr"] == 0.5


def test_tied_embeddings_are_put_once_under_adam():
    model = llama(tie_word_embeddings=True)
    for last_layer in ("adam", "method"):
        groups = build_param_groups(model, "alice", last_layer=last_layer)
        every = [id(p) for group in groups for p in group["params"]]
        assert len(every) == len(set(every))
        assert names(groups, "adam") >= {"model.embed_tokens.weight"}
        assert len(names(groups, "matrix")) == 14


def test_a_model_without_a_named_head_keeps_its_last_layer_out():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))
    groups = build_param_groups(net, "racs")
    assert names(groups, "matrix") == {"2.weight"}
    assert names(build_param_groups(net, "racs", last_layer="method"), "matrix") == {"2.weight", "4.weight"}
    RACS(groups)


def test_a_headless_transformer_keeps_all_its_layers():
    model = llama().model
    assert len(names(build_param_groups(model, "racs"), "matrix")) == 14


def test_frozen_and_excluded_weights():
    model = llama()
    model.model.layers[0].requires_grad_(False)
    groups = build_param_groups(model, "alice", exclude=("*.q_proj.weight",))
    assert names(groups, "matrix") == {
        f"model.layers.1.{x}.weight"
        for x in (
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }
    assert not any("layers.0" in name for name in names(groups, "adam"))
    with pytest.raises(ValueError, match="matches no parameter"):
        build_param_groups(model, "alice", exclude=("*.router.weight",))


def test_a_model_with_nothing_for_the_method_is_refused():
    with pytest.raises(ValueError, match="nothing to do"):
        build_param_groups(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4)), "racs")


def test_two_optimizers_may_share_a_list_of_groups():
    groups = build_param_groups(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), "racs")
    RACS(groups)
    assert set(groups[0]) == {"params", "param_names", "rule", "lr"}
    assert torch.is_tensor(groups[0]["params"][0])
    RACS(groups)


def test_models_without_parameters_or_shapes_are_told_apart():
    with pytest.raises(ValueError, match="this model has none"):
        build_param_groups(nn.Sequential(), "racs", exclude="*.weight")
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        build_param_groups(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3), nn.Linear(3, 2)), "racs")
    with pytest.raises(ValueError, match="besides its head"):
        build_param_groups(nn.Linear(3, 4), "racs")
    assert names(build_param_groups(nn.Linear(3, 4), "racs", last_layer="method"), "matrix") == {"weight"}
