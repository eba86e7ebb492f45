"""Rows of the baselines and of fine-tuning."""

import pytest
import torch

from assay._errors import InputError
from assay.mdlm import masked_diffusion_loss
from assay.methods.tracerl import Trace, build_full_slices, sft_loss, sft_rows
from assay.methods.tracerl.baselines import coupled_rows, one_step_rows, random_rows

from ...mdlm.tiny import EOS, MASK, tiny

IDS = {"mask_token_id": MASK, "pad_token_id": EOS}


def traces(count=3, length=40):
    g = torch.Generator().manual_seed(0)
    return [
        Trace(
            prompt_ids=torch.randint(0, EOS, (3 + i,), generator=g),
            response_ids=torch.randint(0, EOS, (length,), generator=g),
            step_map=torch.randint(1, 9, (length,), generator=g),
        )
        for i in range(count)
    ]


def generator():
    return torch.Generator().manual_seed(1)


def test_random_rows_have_a_rate_each_and_show_the_rest():
    batch = random_rows(traces(), generator=generator(), **IDS)
    assert len(batch) == 3 * 35
    shown = batch.input_ids[:, batch.noisy]
    assert torch.equal(shown == MASK, batch.p_mask)
    assert torch.equal(shown[~batch.p_mask], batch.labels[~batch.p_mask])
    rate = batch.p_mask.double().mean(1)
    assert 0.0 < rate.min() < 0.2
    assert 0.8 < rate.max() < 1.0
    assert rate.mean() == pytest.approx(0.5, abs=0.08)


def test_block_rows_have_a_rate_for_every_position():
    batch = random_rows(traces(), generator=generator(), block_size=4, masks_per_sample=50, **IDS)
    assert batch.block_size == 4
    assert batch.p_mask.double().mean(1).std() < 0.1  # half of each row: spread of 40 coins
    assert len(random_rows(traces(), generator=generator(), block_size=4, **IDS)) == 3


def test_a_pair_covers_every_position_once():
    batch = coupled_rows(traces(), generator=generator(), masks_per_sample=2, **IDS)
    assert len(batch) == 12
    times = torch.zeros(3, 40, dtype=torch.int64).index_add_(0, batch.row_of_response, batch.p_mask.long())
    assert (times == 2).all()
    assert not (batch.p_mask[:6] & batch.p_mask[6:]).any()


def test_one_step_hides_the_response_and_some_of_the_prompt():
    batch = one_step_rows(traces(), generator=generator(), masks_per_sample=200, **IDS)
    assert (batch.input_ids[:, batch.noisy] == MASK).all()
    assert batch.p_mask.all()
    prompt = batch.input_ids[:, : batch.prompt_length] == MASK
    real = batch.real[:, : batch.prompt_length]
    first = real.int().cumsum(1) == 1
    assert not prompt[~real].any()
    assert not prompt[first & real].any()
    assert prompt[real & ~first].double().mean() == pytest.approx(0.15, abs=0.03)
    with pytest.raises(InputError, match="a block model never sees"):
        one_step_rows(traces(), generator=generator(), block_size=4, **IDS)


def test_pads_beyond_post_num_are_masked_but_not_learned():
    trace = Trace(
        prompt_ids=torch.tensor([1]), response_ids=torch.tensor([4, EOS, EOS]), step_map=torch.tensor([1, 2, 3])
    )
    batch = random_rows([trace], generator=generator(), post_num=1, mask_rate=(1.0, 1.0), masks_per_sample=1, **IDS)
    assert (batch.input_ids[:, batch.noisy] == MASK).all()
    assert batch.p_mask.tolist() == [[True, True, False]]


def test_a_mask_rate_that_is_none_is_refused():
    with pytest.raises(InputError, match="is no range of shares"):
        random_rows(traces(), generator=generator(), mask_rate=(0.9, 0.1), **IDS)


def test_random_fine_tuning_is_the_masked_diffusion_loss():
    """In the mean over draws."""
    model = tiny(dtype=torch.float64)
    made = traces(2, 6)
    ids = torch.stack([torch.cat([trace.prompt_ids[-3:], trace.response_ids]) for trace in made])
    made = [Trace(prompt_ids=row[:3], response_ids=row[3:], step_map=torch.ones(6, dtype=torch.int64)) for row in ids]
    maskable = torch.zeros_like(ids, dtype=torch.bool)
    maskable[:, 3:] = True
    mine, theirs = [], []
    with torch.no_grad():
        for seed in range(150):
            g = torch.Generator().manual_seed(seed)
            rows = sft_rows(made, "random", generator=g, **IDS)
            mine.append(sft_loss(model, rows) * len(rows.batch) / 2)  # rows without a mask were left out
            g = torch.Generator().manual_seed(10_000 + seed)
            theirs.append(masked_diffusion_loss(model, ids, maskable, spread="stratified", generator=g))
    mine, theirs = torch.stack(mine), torch.stack(theirs)
    error = (mine.var() / len(mine) + theirs.var() / len(theirs)).sqrt()
    assert (mine.mean() - theirs.mean()).abs() < 4 * error


def test_trace_rows_are_those_of_the_trainer_with_equal_weight():
    rows = sft_rows(traces(), "trace", shrink=2, **IDS)
    other = build_full_slices(traces(), shrink=2, post_num=None, **IDS)
    assert torch.equal(rows.batch.input_ids, other.input_ids)
    torch.testing.assert_close(rows.weights.sum(1), torch.ones(len(other)))


def test_semi_ar_rows_are_clean_before_their_block_and_hidden_after_it():
    rows = sft_rows(traces(50), "semi_ar", block_length=8, generator=generator(), **IDS)
    hidden = rows.batch.input_ids[:, rows.batch.noisy] == MASK
    for masked, targets in zip(hidden, rows.batch.p_mask):
        block = int(targets.nonzero()[0]) // 8
        assert (targets.nonzero() // 8 == block).all()
        assert not masked[: 8 * block].any()
        assert torch.equal(masked[8 * block : 8 * block + 8], targets[8 * block : 8 * block + 8])
        assert masked[8 * block + 8 :].all()
    with pytest.raises(InputError, match="there is no objective 'other'"):
        sft_rows(traces(), "other", **IDS)
