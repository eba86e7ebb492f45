"""Who sees whom, against definitions written out pair by pair."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from assay._errors import InputError  # noqa: E402
from assay.mdlm import block_causal_mask, block_index, positions_from_padding, two_stream_mask  # noqa: E402

from .tiny import MASK, tiny  # noqa: E402


def test_positions_start_at_the_first_real_token_and_padding_gets_one():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    assert positions_from_padding(mask).tolist() == [[0, 1, 2, 3], [1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]


def test_blocks_of_the_prompt_origin_are_counted_backwards_through_the_prompt():
    positions = torch.arange(9)[None]
    assert block_index(positions, 3).tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]]
    assert block_index(positions, 3, "prompt", 4).tolist() == [[-2, -1, -1, -1, 0, 0, 0, 1, 1]]
    rows = block_index(positions.expand(2, -1), 3, "prompt", torch.tensor([4, 6])).tolist()
    assert rows == [[-2, -1, -1, -1, 0, 0, 0, 1, 1], [-2, -2, -2, -1, -1, -1, 0, 0, 0]]


@settings(max_examples=30)
@given(prompt=st.integers(0, 12), block=st.integers(1, 5))
def test_both_origins_cut_alike_exactly_where_the_prompt_is_whole_blocks(prompt: int, block: int):
    positions = torch.arange(prompt + 2 * block + 1)[None]
    canvas = block_causal_mask(positions, block)
    behind = block_causal_mask(positions, block, block_origin="prompt", prompt_len=prompt)
    assert torch.equal(canvas, behind) == (prompt % block == 0)


@settings(max_examples=30)
@given(
    pads=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    block=st.integers(1, 4),
    origin=st.sampled_from(["canvas", "prompt"]),
)
def test_a_block_mask_is_the_one_of_the_unpadded_row(pads: list[int], block: int, origin: str):
    length, prompt = 9, 5
    width = length + max(pads)
    real = torch.stack([torch.arange(width) >= pad for pad in pads]).long()  # the more padding, the shorter the row
    positions = positions_from_padding(real)
    prompt_len = torch.tensor([prompt + max(pads) - pad for pad in pads])
    mask = block_causal_mask(positions, block, real, origin, prompt_len)
    for row, pad in enumerate(pads):
        alone = block_causal_mask(torch.arange(width - pad)[None], block, None, origin, prompt_len[row : row + 1])
        assert torch.equal(mask[row, 0, pad:, pad:], alone[0, 0])
        assert not mask[row, 0, :, :pad].any()


def pairs(prompt: int, response: int, block: int, origin: str) -> list[list[bool]]:
    """The two-stream mask by its definition, one pair at a time."""

    def block_of(position: int) -> int:
        return position // block if origin == "canvas" else (position - prompt) // block

    columns = [("clean", p) for p in range(prompt + response)]
    columns += [("noisy", p) for p in range(prompt, prompt + response)]

    def sees(query: tuple[str, int], key: tuple[str, int]) -> bool:
        b, k = block_of(query[1]), block_of(key[1])
        if query[0] == "clean":
            return key[0] == "clean" and k <= b
        return k < b if key[0] == "clean" else k == b

    return [[sees(query, key) for key in columns] for query in columns]


@pytest.mark.parametrize("origin", ["prompt", "canvas"])
@pytest.mark.parametrize(("prompt", "response", "block"), [(3, 5, 2), (4, 4, 2), (0, 5, 3), (5, 3, 4)])
def test_the_two_stream_mask_is_its_definition_pair_by_pair(origin: str, prompt: int, response: int, block: int):
    mask = two_stream_mask(torch.arange(prompt + response)[None], prompt, block, block_origin=origin)
    assert mask.shape == (1, 1, prompt + 2 * response, prompt + 2 * response)
    assert mask[0, 0].tolist() == pairs(prompt, response, block, origin)


@pytest.mark.parametrize("origin", ["prompt", "canvas"])
def test_the_two_stream_mask_hides_the_padding_of_prompt_and_response(origin: str):
    """Row 0: two pads before a prompt of 3; row 1: a prompt of 5 and two pads behind the response of 5."""
    real = torch.ones(2, 10, dtype=torch.long)
    real[0, :2] = 0
    real[1, 8:] = 0
    mask = two_stream_mask(positions_from_padding(real), 5, 2, real, origin)
    kept = torch.tensor([column not in (8, 9, 13, 14) for column in range(15)])
    assert mask[0, 0, 2:, 2:].tolist() == pairs(3, 5, 2, origin)
    assert not mask[0, 0, :, :2].any()
    expected = torch.tensor(pairs(5, 5, 2, origin)) & kept
    assert torch.equal(mask[1, 0][kept], expected[kept])


def test_one_forward_of_both_streams_gives_every_block_the_logits_of_its_own_canvas():
    """The noisy copy of block b equals a forward of clean columns before b followed by the noisy block."""
    model = tiny(attention="block", block_size=3, qk_norm="head")
    prompt, response = 6, 9
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(0, 38, (1, prompt + response), generator=generator)
    noisy = clean[:, prompt:].clone()
    noisy[torch.rand(noisy.shape, generator=generator) < 0.6] = MASK
    positions = torch.arange(prompt + response)[None]
    with torch.no_grad():
        both = model(
            torch.cat([clean, noisy], 1),
            attention_mask=two_stream_mask(positions, prompt, 3),
            position_ids=torch.cat([positions, positions[:, prompt:]], 1),
            logits_for=torch.arange(prompt + response, prompt + 2 * response),
        ).logits
        for start in range(0, response, 3):
            canvas = torch.cat([clean[:, : prompt + start], noisy[:, start : start + 3]], 1)
            alone = model(canvas).logits[:, -3:]
            assert (both[:, start : start + 3] - alone).abs().max() < 1e-5


def test_what_does_not_make_a_mask_is_refused():
    positions = torch.arange(8)[None]
    with pytest.raises(InputError, match="block_size must be at least 1, got 0"):
        block_index(positions, 0)
    with pytest.raises(InputError, match="give prompt_len"):
        block_index(positions, 2, "prompt")
    with pytest.raises(InputError, match="response_start must be a column of the canvas of 8, got 8"):
        two_stream_mask(positions, 8, 2)
