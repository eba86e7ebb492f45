"""Against the average over all subsets, and where factorials would overflow."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from assay.stats import pass_at_k


@pytest.mark.parametrize("c", range(9))
@pytest.mark.parametrize("k", range(1, 9))
def test_it_is_the_share_of_subsets_with_a_right_answer(c, k):
    answers = [True] * c + [False] * (8 - c)
    want = np.mean([any(chosen) for chosen in combinations(answers, k)])
    assert pass_at_k(8, c, k) == pytest.approx(want)


def test_counts_may_differ_and_may_be_large():
    found = pass_at_k([10, 200_000, 4], [0, 1, 4], 3)
    assert found == pytest.approx([0.0, 3 / 200_000, 1.0])
    assert pass_at_k([10, 20], [1, 1], [1, 10]).shape == (2, 2)
    assert pass_at_k([10, 20], [1, 1], [1, 10])[1] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((4, 5, 1), "more right answers than answers"),
        ((4, 1, 0), "k is 0"),
        (([9, 4], [1, 1], 5), r"1 problems have fewer answers \(row 1 has 4\)"),
        ((4.5, 1, 1), "n has a value that is no count"),
        ((4, -1, 1), "c has a value that is no count"),
        ((4, np.nan, 1), "c has a value that is no count"),
    ],
)
def test_what_is_no_count_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        pass_at_k(*arguments)
