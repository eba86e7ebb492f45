"""Draws without replacement from counter-based streams."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.methods.vattention import _kernel
from assay.methods.vattention._sampling import PAD, draw_distinct, ragged_groups, row_keys, signed, splitmix64


def test_splitmix64_gives_its_published_numbers():
    # The first three outputs of the reference implementation for seed 1234567.
    state, got = 1234567, []
    for _ in range(3):
        got.append(splitmix64(torch.tensor([signed(state)])).item() % 2**64)
        state += 0x9E3779B97F4A7C15
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert int(_kernel._splitmix64(np.uint64(1234567))) == got[0]


def test_every_part_of_a_key_matters():
    one, two = torch.tensor([1]), torch.tensor([2])
    keys = {
        row_keys(s, la, b, h, n).item()
        for s in (0, 1)
        for la in (0, 1)
        for b in (one, two)
        for h in (one, two)
        for n in (one, two)
    }
    assert len(keys) == 32


@given(data=st.data())
def test_draws_are_distinct_free_and_as_many_as_asked(data):
    rows = data.draw(st.integers(1, 5))
    count = torch.tensor(data.draw(st.lists(st.integers(1, 120), min_size=rows, max_size=rows)))
    taken = [sorted(data.draw(st.sets(st.integers(0, int(c) - 1)))) for c in count]
    need = torch.tensor([data.draw(st.integers(0, int(c) - len(t))) for c, t in zip(count, taken)])
    width = max(len(t) for t in taken)
    table = torch.tensor([t + [PAD] * (width - len(t)) for t in taken], dtype=torch.int64).view(rows, width)
    keys = torch.tensor(data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows)))
    out = draw_distinct(keys, count, table, need)
    assert torch.equal(out, draw_distinct(keys, count, table, need))
    for row in range(rows):
        drawn = [x for x in out[row].tolist() if x < PAD]
        assert len(drawn) == len(set(drawn)) == need[row]
        assert drawn == sorted(drawn)
        assert not set(drawn) & set(taken[row])
        assert all(0 <= x < count[row] for x in drawn)
        # The kernel walks the same stream.
        marks, mine = np.zeros(int(count[row]), np.uint8), np.empty(int(need[row]), np.int32)
        marks[taken[row]] = 1
        key = np.uint64(int(keys[row]) % 2**64)
        _kernel._draw(key, int(count[row]), int(count[row]) - len(taken[row]), int(need[row]), 2, marks, mine)
        assert sorted(mine.tolist()) == drawn
        assert np.flatnonzero(marks == 2).tolist() == drawn
        assert np.flatnonzero(marks == 1).tolist() == taken[row]


@pytest.mark.parametrize("need", [3, 8])  # drawn, and left out
def test_every_free_key_is_drawn_equally_often(need):
    draws = 20_000
    keys = splitmix64(torch.arange(draws))
    taken = torch.tensor([[2, 5]]).expand(draws, -1).contiguous()
    out = draw_distinct(keys, torch.full((draws,), 12), taken, torch.full((draws,), need))
    counts = np.bincount(out.flatten().numpy(), minlength=12)
    assert counts[[2, 5]].sum() == 0
    rest = np.delete(counts, [2, 5])
    # Counts of a simple random sample vary less than independent ones, by the share that is not drawn.
    spread = ((rest - draws * need / 10) ** 2).sum() / (draws * need / 10 * (1 - need / 10)) * 9 / 10
    assert stats.chi2.sf(spread, 9) > 1e-4


def test_more_than_is_left_is_refused():
    with pytest.raises(ValueError, match="more positions than are left"):
        draw_distinct(torch.tensor([1]), torch.tensor([5]), torch.tensor([[0, 1]]), torch.tensor([4]))


@given(st.lists(st.integers(0, 5000), max_size=40))
def test_groups_hold_each_row_once_and_waste_little(sizes):
    groups = [g.tolist() for g in ragged_groups(torch.tensor(sizes, dtype=torch.int64))]
    assert sorted(r for g in groups for r in g) == [r for r, s in enumerate(sizes) if s]
    for g in groups:
        assert max(sizes[r] for r in g) <= min(sizes[r] for r in g) * 1.25 + 32
