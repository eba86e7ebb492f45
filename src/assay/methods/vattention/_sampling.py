"""Counter-based draws without replacement: nothing to save, every step can be repeated, no permutation of all keys.

A row's key is a hash of (seed, layer, batch row, head, number of visible keys). Its stream of positions is hashed from the
key and a counter; the first b positions that are neither taken nor repeated are a uniform sample of size b without
replacement. The numba kernel walks the same streams, so both paths draw the same keys.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

#: Stands where a padded row has no entry; sorts last.
PAD = 2**62
GAMMA = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: Added to a row's key: the further draws have a stream of their own.
FURTHER = 0x5851F42D4C957F2D


def signed(x: int) -> int:
    """A 64-bit pattern as torch's int64."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The finaliser of splitmix64 (Steele et al. 2014) after one step of its counter, on int64 bit patterns."""
    z = x + signed(GAMMA)
    z = (z ^ _shift(z, 30)) * signed(_M1)
    z = (z ^ _shift(z, 27)) * signed(_M2)
    return z ^ _shift(z, 31)


def row_keys(
    seed: int, layer: int, batch: Int[Tensor, "row"], head: Int[Tensor, "row"], visible: Int[Tensor, "row"]
) -> Int[Tensor, "row"]:
    """One 64-bit key a row, from what makes the row unlike any other."""
    key = torch.full_like(batch, signed(seed))
    for part in (torch.full_like(batch, layer), batch, head, visible):
        key = splitmix64(splitmix64(key) ^ part)
    return key


def ragged_groups(sizes: Int[Tensor, "row"], *, most: int = 2**31, slack: float = 1.25) -> Iterator[Tensor]:
    """Rows of nearly equal size together, so that padding costs at most a quarter. Rows of size 0 are left out.

    Parameters
    ----------
    sizes
        Entries of each row.
    most
        Largest number of padded entries in a group (a single row may exceed it).
    slack
        Largest size in a group over its smallest.

    Yields
    ------
    Row numbers, int64, on the device of ``sizes``.
    """
    host = sizes.tolist()
    rows = sorted((r for r in range(len(host)) if host[r] > 0), key=lambda r: -host[r])
    begin = 0
    while begin < len(rows):
        top, end = host[rows[begin]], begin + 1
        while end < len(rows) and host[rows[end]] * slack + 32 >= top and (end + 1 - begin) * top <= most:
            end += 1
        yield torch.tensor(rows[begin:end], device=sizes.device)
        begin = end


def contains(table: Int[Tensor, "row m"], x: Int[Tensor, "row k"]) -> Tensor:
    """Whether each x stands in its row of a sorted table."""
    if table.shape[1] == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    at = torch.searchsorted(table, x.contiguous()).clamp_max(table.shape[1] - 1)
    return table.gather(1, at) == x


def draw_distinct(
    keys: Int[Tensor, "row"],
    count: Int[Tensor, "row"],
    taken: Int[Tensor, "row m"],
    need: Int[Tensor, "row"],
) -> Int[Tensor, "row b"]:
    """A uniform sample without replacement of ``range(count)`` minus ``taken``, for each row.

    Where more than half of what is left is wanted, what is left out is drawn instead.

    Parameters
    ----------
    keys
        One 64-bit key a row: the same key gives the same sample.
    count
        Size of each row's range.
    taken
        Sorted, without repetition, padded with `PAD`.
    need
        How many to draw; at most what is left.

    Returns
    -------
    (row, max need), sorted, padded with `PAD`.
    """
    left = count - (taken < PAD).sum(1)
    if bool((need > left).any()):
        raise ValueError("cannot draw more positions than are left: ask for at most count minus taken")
    flip = need * 2 > left
    drawn = _first_distinct(keys, count, taken, torch.where(flip, left - need, need))
    width = int(need.max()) if need.numel() else 0
    out = torch.full((len(keys), width), PAD, dtype=torch.int64, device=keys.device)
    if drawn.shape[1]:
        plain = torch.where(flip[:, None], PAD, drawn)[:, :width]
        out[:, : plain.shape[1]] = plain
    for rows in flip.nonzero()[:, 0].split(64) if bool(flip.any()) else ():
        # Everything but what is taken or left out: a byte a key, needed only where half of the keys are read anyway.
        n = int(count[rows].max())
        free = torch.arange(n, device=keys.device)[None] < count[rows][:, None]
        gone = torch.cat([taken[rows], drawn[rows]], 1)
        free = torch.cat([free, torch.zeros_like(free[:, :1])], 1).scatter_(1, gone.clamp_max(n), False)[:, :n]
        row, position = free.nonzero(as_tuple=True)
        rank = free.cumsum(1)[row, position] - 1
        out[rows[row], rank] = position
    return out.sort(1).values


def _first_distinct(keys: Tensor, count: Tensor, taken: Tensor, wanted: Tensor) -> Tensor:
    """The first ``wanted`` positions of each row's stream that are free and new. Unsorted, padded with PAD."""
    width = int(wanted.max()) if wanted.numel() else 0
    out = torch.full((len(keys), width), PAD, dtype=torch.int64, device=keys.device)
    left = (count - (taken < PAD).sum(1)).double()
    # Coupon collector: expected tries until `wanted` of the free positions have come up, and a margin.
    expected = count * torch.log(left / (left - wanted).clamp_min(0.5))
    for rows in ragged_groups(torch.where(wanted > 0, expected.ceil().long() + 1, 0)):
        tries = int(expected[rows].max())
        tries += 6 * math.isqrt(tries) + 16
        while True:
            counter = torch.arange(1, tries + 1, device=keys.device) * signed(GAMMA)
            hashed = splitmix64(keys[rows, None] + counter)
            position = (_shift(hashed, 32) * count[rows, None]) >> 32
            keep = _is_first(position) & ~contains(taken[rows], position)
            rank = keep.cumsum(1)
            if bool((rank[:, -1] >= wanted[rows]).all()):
                break
            tries *= 2
        keep &= rank <= wanted[rows, None]
        row, column = keep.nonzero(as_tuple=True)
        out[rows[row], rank[row, column] - 1] = position[row, column]
    return out


def _is_first(x: Tensor) -> Tensor:
    """Whether each entry is the first of its value in its row."""
    ordered, order = x.sort(dim=1, stable=True)
    new = torch.ones_like(x, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(new).scatter_(1, order, new)
