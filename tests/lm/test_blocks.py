"""A model stepped through block by block is the model, and what is stopped early says the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assay._errors import InputError
from assay.lm._blocks import blocks, groups, hidden_at, inputs_of, replace, run_block, weight_of

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GATED, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GATED, sliding_window=4)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**GATED, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GATED, head_dim=8)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=64)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def test_the_blocks_one_by_one_are_the_model(model, batch):
    whole = model(**batch, output_hidden_states=True, use_cache=False).hidden_states
    real = batch["attention_mask"].bool()
    inputs = inputs_of(model, batch)
    hidden = inputs.hidden
    torch.testing.assert_close(hidden, whole[0])
    for number, (block, arguments) in enumerate(zip(blocks(model), inputs.arguments, strict=True)):
        hidden = run_block(block, hidden, arguments)
        if number < 2:  # the last entry is taken behind the final norm
            torch.testing.assert_close(hidden[real], whole[number + 1][real])
    # Nothing was left behind.
    torch.testing.assert_close(model(**batch, output_hidden_states=True, use_cache=False).hidden_states[-1], whole[-1])


def test_a_forward_that_stops_early_is_the_residual_stream_there(model, batch):
    whole = model(**batch, output_hidden_states=True, use_cache=False).hidden_states
    real = batch["attention_mask"].bool()
    for layer in range(2):
        torch.testing.assert_close(hidden_at(model, layer, **batch)[real], whole[layer + 1][real])
    last = hidden_at(model, 2, **batch)
    assert not torch.allclose(last[real], whole[3][real])
    final = next(m for name, m in model.named_modules() if name.rpartition(".")[2] in ("norm", "ln_f", "final_layer_norm")
                 and not any(name.startswith(b) for b in ("model.layers.", "transformer.h.", "model.decoder.layers.")))  # fmt: skip
    torch.testing.assert_close(final(last)[real], whole[3][real])


def test_later_blocks_are_not_run(model, batch):
    blocks(model)[2].register_forward_pre_hook(lambda *_: pytest.fail("the last block was run"))
    hidden_at(model, 1, **batch)
    with pytest.raises(InputError, match="has blocks 0 to 2, not 3"):
        hidden_at(model, 3, **batch)


def test_groups_share_their_input_and_stand_in_the_order_of_the_data(model, batch):
    block = blocks(model)[1]
    seen: list[tuple[str, torch.Tensor]] = []
    them = groups(block)
    for group in them:
        for name, module in group.items():
            module.register_forward_pre_hook(lambda m, args, name=name: seen.append((name, args[0].clone())))
    model(**batch, use_cache=False)
    assert [name for name, _ in seen] == [name for group in them for name in group]
    at = dict(seen)
    for group in them:
        first, *others = (at[name] for name in group)
        assert all(torch.equal(first, other) for other in others)
    assert sum(m.weight.numel() for group in them for m in group.values()) == sum(
        p.numel() for name, p in block.named_parameters() if p.ndim == 2
    )


def test_a_linear_with_the_same_weight_may_take_the_place_of_another(model, batch):
    before = model(**batch, use_cache=False).logits
    for block in blocks(model):
        for group in groups(block):
            for name, linear in group.items():
                weight = weight_of(linear)
                made = nn.Linear(weight.shape[1], weight.shape[0], bias=linear.bias is not None)
                made.weight.data = weight.detach().clone()
                if linear.bias is not None:
                    made.bias.data = linear.bias.detach().clone()
                replace(block, name, made)
    torch.testing.assert_close(model(**batch, use_cache=False).logits, before)


def test_what_is_no_known_transformer_is_said():
    with pytest.raises(InputError, match="has no list of blocks"):
        blocks(nn.Linear(2, 2))
    with pytest.raises(InputError, match="the Linears of a Sequential are 0: the names of LLaMA"):
        groups(nn.Sequential(nn.Linear(2, 2)))
