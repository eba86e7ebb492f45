"""Training rows: each position once, the two forms against each other, and against each block by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay._errors import InputError
from assay.methods.tracerl import Trace, build_block_slices, build_full_slices, collapse_steps, target_logps
from assay.methods.tracerl._slices import SliceBatch

from ...mdlm.tiny import EOS, MASK, tiny

IDS = {"mask_token_id": MASK, "pad_token_id": EOS}


@st.composite
def traces(draw, least=1, most=3):
    """Traces of random lengths and orders, with positions that were never committed."""
    made = []
    for _ in range(draw(st.integers(least, most))):
        length = draw(st.integers(1, 9))
        prompt = draw(st.lists(st.integers(0, EOS - 1), min_size=1, max_size=6))
        response = draw(st.lists(st.integers(0, EOS), min_size=length, max_size=length))
        steps = draw(st.lists(st.integers(0, length), min_size=length, max_size=length))
        made.append(
            Trace(prompt_ids=torch.tensor(prompt), response_ids=torch.tensor(response), step_map=torch.tensor(steps))
        )
    return made


def random_traces(count=3, length=8, seed=0, whole=True):
    g = torch.Generator().manual_seed(seed)
    return [
        Trace(
            prompt_ids=torch.randint(0, EOS, (3 + i,), generator=g),
            response_ids=torch.randint(0, EOS, (length,), generator=g),
            step_map=torch.randint(1, 6, (length,), generator=g),
        )
        for i in range(count)
    ]


@given(made=traces(), shrink=st.integers(1, 4), block=st.one_of(st.none(), st.integers(1, 4)))
def test_every_position_is_a_target_exactly_once(made, shrink, block):
    settings = IDS | {"shrink": shrink, "post_num": None}
    batch = (
        build_full_slices(made, **settings) if block is None else build_block_slices(made, block_size=block, **settings)
    )
    times = torch.zeros(len(made), batch.response_length, dtype=torch.int64)
    times.index_add_(0, batch.row_of_response, batch.p_mask.long())
    for row, trace in zip(times, made):
        reach = len(trace.response_ids)
        if block is not None:  # blocks that no response decoded anything of are left out
            reach = min(reach, batch.response_length)
        assert (row[:reach] == 1).all()
        assert (row[reach:] == 0).all()
        if block is not None:
            assert (trace.step_map[reach:] == 0).all()


@given(made=traces(), shrink=st.integers(1, 4))
def test_a_full_row_hides_what_came_at_its_step_or_later(made, shrink):
    batch = build_full_slices(made, shrink=shrink, post_num=None, **IDS)
    for row in range(len(batch)):
        trace = made[batch.row_of_response[row]]
        order = collapse_steps(trace.step_map, shrink)
        shown = batch.input_ids[row, batch.noisy][: len(order)]
        at = order[batch.p_mask[row, : len(order)]].unique()
        assert len(at) == 1
        assert torch.equal(shown == MASK, order >= at)
        assert torch.equal(shown[order < at], trace.response_ids[order < at])


def test_the_order_goes_on_from_block_to_block_and_rows_fall_with_the_shrinkage():
    trace = Trace(prompt_ids=torch.tensor([1]), response_ids=torch.arange(1, 9), step_map=torch.arange(1, 9))
    assert [len(build_full_slices([trace], shrink=s, **IDS)) for s in (1, 2, 3, 8, 50)] == [8, 4, 3, 1, 1]
    assert [len(build_block_slices([trace], block_size=4, shrink=s, **IDS)) for s in (1, 2, 3, 8)] == [4, 2, 2, 1]
    assert collapse_steps(trace.step_map, 3).tolist() == [3, 3, 3, 6, 6, 6, 8, 8]
    assert collapse_steps(trace.step_map, 3, 4).tolist() == [3, 3, 3, 4, 7, 7, 7, 8]


def test_a_short_last_block_is_not_named_by_what_is_not_there():
    assert collapse_steps(torch.tensor([1, 2, 3, 4, 9]), 2, 2).tolist() == [2, 2, 4, 4, 9]
    assert collapse_steps(torch.tensor([1, 2, 3, 4, 0]), 5, 4).tolist() == [4, 4, 4, 4, 5]


def test_pads_that_stay_targets():
    """The answer's own EOS is the first pad: post_num 0 drops it, 1 keeps exactly it."""
    trace = Trace(
        prompt_ids=torch.tensor([1]),
        response_ids=torch.tensor([4, 5, EOS, EOS, EOS]),
        step_map=torch.tensor([1, 2, 3, 3, 0]),
    )

    def kept(post_num):
        batch = build_full_slices([trace], post_num=post_num, **IDS)
        return batch.p_mask.any(0).tolist(), len(batch)

    assert kept(0) == ([True, True, False, False, False], 2)
    assert kept(1) == ([True, True, True, False, False], 3)
    assert kept(None) == ([True] * 5, 4)


@pytest.mark.parametrize("layers", [1, 2])
def test_one_block_as_long_as_the_response_is_the_full_form(layers):
    """Rows and targets agree. So do log-probabilities at one layer; with more, the full form's prompt sees the response."""
    made = random_traces()
    full = build_full_slices(made, post_num=None, **IDS)
    block = build_block_slices(made, block_size=8, post_num=None, **IDS)
    assert torch.equal(block.input_ids[:, block.noisy], full.input_ids[:, full.noisy])
    assert torch.equal(block.p_mask, full.p_mask)
    assert torch.equal(block.row_of_response, full.row_of_response)
    model = tiny(num_hidden_layers=layers, dtype=torch.float64)
    with torch.no_grad():
        gap = (target_logps(model, full) - target_logps(model, block)).abs().max()
    assert gap < 1e-9 if layers == 1 else gap > 1e-3


@pytest.mark.parametrize("block", [3, 4])
def test_two_streams_are_each_block_by_itself_behind_its_clean_prefix(block):
    made = random_traces()
    batch = build_block_slices(made, block_size=block, post_num=None, **IDS)
    model = tiny(attention="block", block_size=block, dtype=torch.float64)
    with torch.no_grad():
        together = batch.dense(target_logps(model, batch))
        for row in range(len(batch)):
            trace = made[batch.row_of_response[row]]
            prompt = len(trace.prompt_ids)
            noisy = batch.input_ids[row, batch.noisy]
            for start in range(0, 8, block):
                end = min(start + block, 8)
                canvas = torch.cat([trace.prompt_ids, trace.response_ids[:start], noisy[start:end]])[None]
                places = torch.arange(canvas.shape[1])
                blocks = (places - prompt).div(block, rounding_mode="floor")
                sees = (blocks[:, None] >= blocks)[None, None]
                logits = model(canvas, attention_mask=sees).logits[0, prompt + start :].log_softmax(-1)
                wanted = batch.p_mask[row, start:end]
                alone = logits[torch.arange(end - start), trace.response_ids[start:end]]
                torch.testing.assert_close(together[row, start:end][wanted], alone[wanted], atol=1e-5, rtol=0)


def test_trimming_changes_no_score_and_shortens_the_forward():
    made = random_traces(length=12)
    early = build_block_slices(made, block_size=4, post_num=None, **IDS)
    early.p_mask[:, 5:] = False
    early = early.select(early.p_mask.any(1).nonzero()[:, 0][early.row_of_response[early.p_mask.any(1)] < 2])
    short = early.trimmed()
    assert short.input_ids.shape[1] == 4 + 2 * 8
    assert early.input_ids.shape[1] == 5 + 2 * 12
    model = tiny(attention="block", block_size=4, dtype=torch.float64)
    with torch.no_grad():
        logits = model(
            early.input_ids, attention_mask=early.attn, position_ids=early.position_ids, logits_for=early.logits_for
        ).logits.log_softmax(-1)
    torch.testing.assert_close(
        target_logps(model, early).detach(), logits.gather(1, early.labels[early.p_mask][:, None])[:, 0]
    )


def test_only_targets_meet_the_head():
    model = tiny()
    widths = []
    model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[0]))
    batch = build_full_slices(random_traces(), post_num=None, **IDS)
    target_logps(model, batch)
    assert widths == [int(batch.p_mask.sum())] == [3 * 8]


def test_a_position_in_two_rows_has_no_one_value():
    batch = build_full_slices(random_traces(1), post_num=None, **IDS)
    batch.p_mask[1] |= batch.p_mask[0]
    with pytest.raises(InputError, match="is a target in 2 rows"):
        batch.by_response(torch.zeros(batch.p_mask.shape), 1)


def test_what_cannot_be_merged_or_cut_is_refused():
    with pytest.raises(InputError, match="shrinkage s must be at least 1, got 0"):
        collapse_steps(torch.tensor([1, 2]), 0)
    with pytest.raises(InputError, match="block_size must be at least 1"):
        collapse_steps(torch.tensor([1, 2]), 1, 0)
    with pytest.raises(InputError, match="block_size must be at least 1"):
        build_block_slices(random_traces(1), block_size=0, **IDS)
    assert isinstance(build_full_slices(random_traces(1), **IDS).to("cpu"), SliceBatch)
