"""Tiny models for the tests, and the real one where it is already in the cache."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """Two layers, 4 query heads on 2 key heads, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def prompts() -> dict[str, torch.Tensor]:
    """Two prompts of 150 tokens, the first padded on the left."""
    ids = torch.randint(1, 100, (2, 150), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
