"""The CPU path: one numba kernel a step, rows shared out to threads, float32.

A row scans the packed signs with a histogram of their distances in place of a sort, marks one byte a key, draws, and
multiplies each key and value once, where it lies. It follows the same rules and the same random streams as the torch path
in `_attention`, line by line.
"""

# mypy: ignore-errors
# Compiled by numba: its types are not Python's.

from __future__ import annotations

import logging
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from llvmlite import ir as llvm
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from assay.methods.vattention._attention import fixed_budget, fixed_ranks, not_finite, pilot_size
from assay.methods.vattention._budget import GOLDEN_STEPS, TINY, denominator_z
from assay.methods.vattention._config import MAX_DELTA_OF_A_VECTOR, IndexSets, VAttentionOutput
from assay.methods.vattention._indices import SimHashIndex, check_holds
from assay.methods.vattention._sampling import FURTHER, GAMMA, PAD

log = logging.getLogger("assay.vattention")

# Sums may be reordered (that is what makes them fast), but NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}
FIXED, PILOT, FURTHER_DRAW = 1, 2, 4
AHEAD = 8  # rows asked for before their turn: they lie anywhere, and memory answers late
BLOCK = 256  # rows of V added up in float32 before the sum goes into float64

_GAMMA, _M1, _M2 = np.uint64(GAMMA), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_FURTHER = np.uint64(FURTHER)


@intrinsic
def _popcount(_, x):
    """The processor's own count of set bits."""

    def code(_context, builder, _signature, args):
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), code


@intrinsic
def _prefetch(_, table, row):
    """Ask for a row of a table of floats, 64 bytes at a time, so that it has come when its turn comes."""

    def code(context, builder, signature, args):
        table_type, _ = signature.args
        array = context.make_array(table_type)(context, builder, args[0])
        byte = llvm.IntType(8).as_pointer()
        index, number = llvm.IntType(64), llvm.IntType(32)
        stride, width = (builder.extract_value(x, i) for x, i in ((array.strides, 0), (array.shape, 1)))
        start = builder.gep(builder.bitcast(array.data, byte), [builder.mul(args[1], stride)])
        kind = llvm.FunctionType(llvm.VoidType(), [byte, number, number, number])
        ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        with cgutils.for_range_slice(builder, index(0), builder.mul(width, index(4)), index(64), intp=index) as (
            offset,
            _count,
        ):
            builder.call(ask, [builder.gep(start, [offset]), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(table, types.int64), code


@njit(cache=True)
def _splitmix64(x):
    z = x + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


@njit(cache=True)
def _draw(key, count, left, need, mark, marks, out):
    """Mark ``need`` of the ``left`` unmarked positions, uniformly without replacement; write them, return how many."""
    flip = 2 * need > left
    wanted = left - need if flip else need
    done, counter, n = 0, key, np.uint64(count)
    while done < wanted:
        counter += _GAMMA
        position = np.int64((_splitmix64(counter) >> np.uint64(32)) * n >> np.uint64(32))
        if marks[position] == 0:
            marks[position] = 8 if flip else mark
            if not flip:
                out[done] = position
            done += 1
    if flip:  # what was drawn is left out
        done = 0
        for position in range(count):
            if marks[position] == 0:
                marks[position] = mark
                out[done] = position
                done += 1
            elif marks[position] == 8:
                marks[position] = 0
    return done


@njit(cache=True)
def _distances(codes, base, q0, q1, out):
    """Differing bits of each key's code, a loop without branches so that it becomes vector instructions."""
    part = codes[base : base + out.shape[0]]
    for i in range(out.shape[0]):
        out[i] = np.uint8(_popcount(part[i, 0] ^ q0) + _popcount(part[i, 1] ^ q1))


@njit(cache=True)
def _histogram(distance, low, high):
    """How many keys there are at each distance; four tables, since equal neighbours would wait for each other."""
    tables = np.zeros((4, 129), np.int64)
    for i in range(low, high - 3, 4):
        tables[0, distance[i]] += 1
        tables[1, distance[i + 1]] += 1
        tables[2, distance[i + 2]] += 1
        tables[3, distance[i + 3]] += 1
    for i in range(max(low, high - (high - low) % 4), high):
        tables[0, distance[i]] += 1
    return tables[0] + tables[1] + tables[2] + tables[3]


@njit(cache=True)
def _nearest(distance, histogram, low, high, wanted, out):
    """Positions of the ``wanted`` least distances between low and high; among equal ones the newest. Returns how many."""
    edge, sure = 0, 0
    while sure + histogram[edge] < wanted:
        sure += histogram[edge]
        edge += 1
    done = 0
    # Without a branch: every position is written, and kept by moving on.
    spare = np.empty(sure + histogram[edge] + 1, np.int32)
    for i in range(low, high):
        spare[done] = i
        done += distance[i] <= edge
    skip = done - wanted  # the oldest of those at the edge
    kept = 0
    for i in range(done):
        if skip > 0 and distance[spare[i]] == edge:
            skip -= 1
        else:
            out[kept] = spare[i]
            kept += 1
    return kept


@njit(cache=True, fastmath=FAST)
def _score(q, k, base, step, positions, number, scale, out):
    """Scores of the listed positions; returns their maximum, nan where one is not a number."""
    top, width = np.float32(-np.inf), q.shape[0]
    broken = False
    for i in range(number):
        if i + AHEAD < number:
            _prefetch(k, base + positions[i + AHEAD] * step)
        row = base + positions[i] * step
        total = np.float32(0)
        for d in range(width):
            total += q[d] * k[row, d]
        total *= scale
        out[i] = total
        if total > top:
            top = total
        elif total != total:
            broken = True
    return np.float32(np.nan) if broken or top == np.inf else top


@njit(cache=True, fastmath=FAST)
def _add(v, base, step, positions, weights, number, factor, total):
    """Add ``factor * sum of weights V`` over the listed positions to ``total`` (float64)."""
    width = v.shape[1]
    part = np.empty(width, np.float32)
    for begin in range(0, number, BLOCK):
        part[:] = 0
        for i in range(begin, min(begin + BLOCK, number)):
            if i + AHEAD < number:
                _prefetch(v, base + positions[i + AHEAD] * step)
            row, w = base + positions[i] * step, weights[i]
            for d in range(width):
                part[d] += w * v[row, d]
        for d in range(width):
            total[d] += factor * part[d]


@njit(cache=True)
def _horner(x, coefficients):
    total = 0.0
    for c in coefficients:
        total = total * x + c
    return total


_TAIL = (
    -7.784894002430293e-03,
    -3.223964580411365e-01,
    -2.400758277161838,
    -2.549732539343734,
    4.374664141464968,
    2.938163982698783,
)
_TAIL_BELOW = (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996, 3.754408661907416, 1.0)
_MIDDLE = (
    -3.969683028665376e01,
    2.209460984245205e02,
    -2.759285104469687e02,
    1.383577518672690e02,
    -3.066479806614716e01,
    2.506628277459239,
)
_MIDDLE_BELOW = (
    -5.447609879822406e01,
    1.615858368580409e02,
    -1.556989798598866e02,
    6.680131188771972e01,
    -1.328068155288572e01,
    1.0,
)


@njit(cache=True)
def _z_above(p):
    """What a normal variable exceeds with chance p <= 1/2: Acklam's approximation, a step of Halley's method to full precision."""
    if p < 0.02425:
        t = math.sqrt(-2 * math.log(p))
        x = _horner(t, _TAIL) / _horner(t, _TAIL_BELOW)
    else:
        t = p - 0.5
        x = t * _horner(t * t, _MIDDLE) / _horner(t * t, _MIDDLE_BELOW)
    u = (0.5 * math.erfc(-x / math.sqrt(2.0)) - p) * math.sqrt(2 * math.pi) * math.exp(x * x / 2)
    return u / (1 + x * u / 2) - x


@njit(cache=True)
def _needed(a, c, output, eps, delta, z, by_c, room, optimize):
    """Budget before rounding: `split_tolerance` or the denominator's rule."""
    if not output:
        return (z * c / eps) ** 2
    delta_n = delta / 2
    if optimize:
        low, high = delta * 1e-6, min(delta * (1 - 1e-6), MAX_DELTA_OF_A_VECTOR)
        ratio = (math.sqrt(5.0) - 1) / 2
        for _ in range(GOLDEN_STEPS):
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            cost_left = _z_above(left / 2) * a + _z_above((delta - left) / 2) * by_c * c
            cost_right = _z_above(right / 2) * a + _z_above((delta - right) / 2) * by_c * c
            if cost_left < cost_right:
                high = right
            else:
                low = left
        delta_n = (low + high) / 2
    return ((_z_above(delta_n / 2) * a + by_c * _z_above((delta - delta_n) / 2) * c) / room) ** 2


@njit(cache=True, fastmath=FAST, nogil=True)
def _step(
    begin, end, work, q, k, v, base_k, step_k, base_v, step_v, start, count,  # rows of q; K and V as flat tables of rows
    fixed, n_fixed, scan, query_codes, codes, base_c, sink, local, heavy,  # fixed positions, or codes to scan
    given, pilot_given, n_pilot_given, further_given, n_further_given,  # draws to use in place of one's own
    n_pilot, seed, layer, batch, head, fixed_budget, scale, output, eps, delta, z, by_c, room, optimize, fpc, reuse,
    out, budget, n_det, read, broken, marks_out, keep_marks,
):  # fmt: skip
    for r in range(begin, end):
        n = count[r]
        if n == 0:
            continue
        bk, bv = base_k[r] + start[r] * step_k, base_v[r] + start[r] * step_v
        marks = marks_out[r] if keep_marks else work[0]
        marks[:n] = 0

        key = _splitmix64(seed) ^ np.uint64(layer)
        for part in (batch[r], head[r], n):
            key = _splitmix64(_splitmix64(key)) ^ np.uint64(part)
        key = _splitmix64(key)

        # What is read for certain.
        n_f = n_fixed[r]
        if scan[r]:
            n_f = sink[r] + local[r] + heavy[r]
        list_f = np.empty(n_f, np.int32)
        if scan[r]:
            low, high = sink[r], n - local[r]
            for i in range(low):
                list_f[i] = i
            at = low
            distance = work[1, :n]
            _distances(codes, base_c[r] + start[r], query_codes[r, 0], query_codes[r, 1], distance)
            histogram = _histogram(distance, low, high)
            at += _nearest(distance, histogram, low, high, heavy[r], list_f[at:])
            for i in range(high, n):
                list_f[at] = i
                at += 1
        else:
            for i in range(n_f):
                list_f[i] = fixed[r, i]
        for i in range(n_f):
            marks[list_f[i]] = FIXED
        n_s = n - n_f
        w_f = np.empty(n_f, np.float32)
        top = _score(q[r], k, bk, step_k, list_f, n_f, scale, w_f)

        # The pilot.
        n_p = n_pilot_given[r] if given else n_pilot[r]
        list_p = np.empty(n_p, np.int32)
        if given:
            for i in range(n_p):
                list_p[i] = pilot_given[r, i]
                marks[list_p[i]] = PILOT
        else:
            _draw(key, n, n_s, n_p, PILOT, marks, list_p)
        w_p = np.empty(n_p, np.float32)
        top_p = _score(q[r], k, bk, step_k, list_p, n_p, scale, w_p)
        if top != top or top_p != top_p:
            broken[r] = 1
            continue
        top = max(top, top_p)
        if top == -np.inf:
            broken[r] = 1
            continue
        d_f, d_p = 0.0, 0.0
        for i in range(n_f):
            w_f[i] = math.exp(w_f[i] - top)
            d_f += w_f[i]
        for i in range(n_p):
            w_p[i] = math.exp(w_p[i] - top)
            d_p += w_p[i]

        # The budget.
        total = np.zeros(v.shape[1])
        _add(v, bv, step_v, list_f, w_f, n_f, 1.0, total)
        b = n_p
        if given:
            b = n_further_given[r] + (n_p if reuse else 0)
        elif n_p > 0:
            mean, square = d_p / n_p, 0.0
            for i in range(n_p):
                square += (w_p[i] - mean) ** 2
            denominator = d_f + n_s * mean
            c = n_s * math.sqrt(square / max(n_p - 1, 1)) / max(denominator, TINY)
            a, norm = 0.0, 1.0
            if output:
                center = np.zeros(v.shape[1])
                _add(v, bv, step_v, list_p, w_p, n_p, 1.0 / n_p, center)
                trace = 0.0
                for i in range(n_p):
                    row, part = bv + list_p[i] * step_v, 0.0
                    for j in range(v.shape[1]):
                        off = w_p[i] * v[row, j] - center[j]
                        part += off * off
                    trace += part
                norm = 0.0
                for j in range(v.shape[1]):
                    norm += (total[j] + n_s * center[j]) ** 2
                norm = math.sqrt(norm)
                a = n_s * math.sqrt(trace / max(n_p - 1, 1)) / max(norm, TINY)
            needed = _needed(a, c, output, eps, delta, z, by_c, room, optimize)
            if needed != needed:
                broken[r] = 2
                continue
            if denominator < TINY or norm < TINY or needed > 1e300:
                needed = float(n_s)
            elif fpc and n_s > 0:
                needed = needed / (1 + needed / n_s)
            b = np.int64(min(math.ceil(min(needed, float(n_s))), n_s))
            b = max(b, min(n_p, n_s))
            if fixed_budget[r] >= 0:
                b = fixed_budget[r]

        # The further draws, and the log-sum-exp merge.
        n_q = n_further_given[r] if given else (b - n_p if reuse else b)
        list_q = np.empty(n_q, np.int32)
        if given:
            for i in range(n_q):
                list_q[i] = further_given[r, i]
                marks[list_q[i]] |= FURTHER_DRAW
        elif reuse:
            _draw(_splitmix64(key ^ _FURTHER), n, n_s - n_p, n_q, FURTHER_DRAW, marks, list_q)
        else:  # the pilot may be drawn again: its marks step aside meanwhile
            for i in range(n_p):
                marks[list_p[i]] = 0
            _draw(_splitmix64(key ^ _FURTHER), n, n_s, n_q, FURTHER_DRAW, marks, list_q)
            for i in range(n_p):
                marks[list_p[i]] |= PILOT
        w_q = np.empty(n_q, np.float32)
        top_q = _score(q[r], k, bk, step_k, list_q, n_q, scale, w_q)
        if top_q != top_q:
            broken[r] = 1
            continue
        shrink = 1.0
        if top_q > top:
            shrink = math.exp(top - top_q)
            top = top_q
        d_q = 0.0
        for i in range(n_q):
            w_q[i] = math.exp(w_q[i] - top)
            d_q += w_q[i]
        times = n_s / b if b > 0 else 0.0
        for j in range(v.shape[1]):
            total[j] *= shrink
        _add(v, bv, step_v, list_q, w_q, n_q, times, total)
        bottom = d_f * shrink + times * d_q
        if reuse:
            _add(v, bv, step_v, list_p, w_p, n_p, times * shrink, total)
            bottom += times * d_p * shrink
        for j in range(v.shape[1]):
            out[r, j] = total[j] / max(bottom, TINY)
            if not np.isfinite(out[r, j]):
                broken[r] = 2
        distinct = n_f + n_p + n_q
        if not reuse:
            for i in range(n_p):
                if marks[list_p[i]] == PILOT | FURTHER_DRAW:
                    distinct -= 1
        budget[r], n_det[r], read[r] = b, n_f, distinct


def kernel_step(q, k, v, rows, sizes, config, scale, seed, layer, index, given) -> VAttentionOutput:
    """The numba path of `vattention`: same arguments as the torch path, same draws, same result to rounding."""
    number, (b, h, t) = len(rows.count), rows.shape
    scan = isinstance(index, SimHashIndex) and index.bits == 128 and given is None
    none = np.zeros((number, 0), np.int32)
    codes, query_codes = np.zeros((1, 2), np.uint64), np.zeros((number, 2), np.uint64)
    base_c = np.zeros(number, np.int64)
    if scan:
        check_holds(index.codes, k)  # the kernel reads by address: a key too many would be another's
        codes, base_c, _ = _flat_rows(index.codes, rows)  # the words of one head lie one after another
        codes = codes.view(np.uint64)
        query_codes = index.query_codes(q.detach()).reshape(number, 2).numpy().view(np.uint64)
        by_scan = (~sizes.dense).numpy()
        fixed, n_fixed = (
            _table(fixed_ranks(q, rows, sizes, None)) if bool(sizes.dense.any()) else (none, np.zeros(number, np.int64))
        )
    else:
        by_scan = np.zeros(number, np.bool_)
        fixed, n_fixed = _table(fixed_ranks(q, rows, sizes, index) if given is None else given[0])
    pilot, n_pilot_given = (none, np.zeros(number, np.int64)) if given is None else _table(given[1])
    further, n_further = (none, np.zeros(number, np.int64)) if given is None else _table(given[2])
    n_f = torch.where(torch.from_numpy(by_scan), sizes.sink + sizes.local + sizes.heavy, torch.from_numpy(n_fixed))
    n_s = rows.count - n_f
    fixed_b, n_p = fixed_budget(n_s, config), pilot_size(n_s, config)
    if fixed_b is not None and config.reuse_pilot:
        n_p = torch.minimum(n_p, fixed_b)

    flat_k, base_k, step_k = _flat_rows(k, rows)
    flat_v, base_v, step_v = _flat_rows(v, rows)
    out = np.zeros((number, v.shape[3]), np.float32)
    budget, n_det, read = (np.zeros(number, np.int64) for _ in range(3))
    broken = np.zeros(number, np.uint8)
    marks = np.zeros((number, rows.n) if config.audit else (1, 1), np.uint8)
    eps, delta = config.eps, config.delta
    arguments = (
        q.detach().reshape(number, -1).numpy(), flat_k, flat_v, base_k, step_k, base_v, step_v,
        rows.start.numpy(), rows.count.numpy(),
        fixed, n_fixed, by_scan, query_codes, codes, base_c,
        sizes.sink.numpy(), sizes.local.numpy(), sizes.heavy.numpy(),
        given is not None, pilot, n_pilot_given, further, n_further,
        n_p.numpy(), np.uint64(seed % 2**64), layer, rows.batch.numpy(), rows.head.numpy(),
        (torch.full_like(n_s, -1) if fixed_b is None else fixed_b).numpy(),
        np.float32(scale), config.guarantee == "output", eps, delta,
        denominator_z(config),
        1 + eps if config.tight else 1.0, eps if config.tight else eps / 2,
        config.optimize_delta, config.uses_fpc, config.reuse_pilot,
        out, budget, n_det, read, broken, marks, config.audit,
    )  # fmt: skip
    # One layout, so that it is compiled once.
    arguments = [np.ascontiguousarray(a) if isinstance(a, np.ndarray) else a for a in arguments]

    def some(part):
        _step(part, min(part + share, number), _work(rows.n), *arguments)

    # Rows differ in their budgets: two parts a thread even that out.
    threads = min(torch.get_num_threads(), number)
    share = number if threads == 1 else math.ceil(number / (2 * threads))
    parts = iter(range(0, number, share))

    def work_off():
        for part in parts:
            some(part)

    helpers = [_threads(threads - 1).submit(work_off) for _ in range(threads - 1)]
    work_off()
    for helper in helpers:
        helper.result()
    if broken.any():
        row = int(broken.argmax())
        raise ValueError(not_finite("a score" if broken[row] == 1 else "an output", layer, int(rows.head[row])))
    return VAttentionOutput(
        torch.from_numpy(out).view(b, h, t, -1),
        (torch.from_numpy(read) / rows.count.clamp_min(1)).view(b, h, t),
        torch.from_numpy(budget).view(b, h, t),
        torch.from_numpy(n_det).view(b, h, t),
        sets=_sets(marks, rows) if config.audit else None,
        path="kernel",
    )


_kept = threading.local()


def _work(n):
    """Two bytes a key, kept by each thread: fresh memory would cost a page fault every 4 kB."""
    if getattr(_kept, "length", 0) < n:
        _kept.length = 2 * n
        _kept.bytes = np.empty((2, 2 * n), np.uint8)
    return _kept.bytes


@cache
def _threads(number):
    """Threads of Python's: the kernel lets go of the interpreter. (numba's own waited milliseconds beside torch's.)"""
    return ThreadPoolExecutor(number, thread_name_prefix="vattention")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)


def _flat_rows(x, rows):
    """A tensor (B, Hkv, n, D) as a table of its rows: (table, first row of each of ``rows``, rows from key to key).

    Read through the strides: a view of a longer buffer costs no copy.
    """
    width = x.shape[3]
    steps = [s // width for s in x.stride()[:3]]
    length = 1 + sum((size - 1) * step for size, step in zip(x.shape[:3], steps))
    table = torch.as_strided(x.detach(), (length, width), (width, 1)).numpy()
    return table, (rows.batch * steps[0] + rows.group * steps[1]).numpy(), steps[2]


def _table(ranks):
    """Padded ranks as int32, and how many are real."""
    real = ranks < PAD
    return torch.where(real, ranks, 0).to(torch.int32).numpy(), real.sum(1).numpy()


def _sets(marks, rows):
    marks, starts = torch.from_numpy(marks), rows.start.tolist()

    def having(mark):
        return [(row & mark).nonzero()[:, 0] + s for row, s in zip(marks, starts, strict=True)]

    return [IndexSets(f, p, d) for f, p, d in zip(having(FIXED), having(PILOT), having(FURTHER_DRAW), strict=True)]


@cache
def warm_up() -> None:
    """Compile the kernel, once a process; a compiled copy is kept beside this file."""
    from assay.methods.vattention._attention import vattention
    from assay.methods.vattention._config import VAttentionConfig

    begin = time.perf_counter()
    x = torch.zeros(1, 1, 32, 8)
    vattention(
        x[:, :, :1], x, x, config=VAttentionConfig(sink=1, local=1, heavy=2, min_pilot=2, min_keys=0), path="kernel"
    )
    took = time.perf_counter() - begin
    if took > 1:
        log.info("the vattention kernel was compiled in %.0f s; later starts read the compiled copy", took)
