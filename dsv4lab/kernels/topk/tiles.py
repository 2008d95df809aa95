"""The Triton kernels of the top-k: maxima of groups of scores, then one program a row that follows them down.

A row of n scores is a tree of maxima: each group of 4, 16, 64 and 256 scores by its largest key. The k largest scores
lie in the k groups with the largest maxima, ties going to the lower group (whatever beats a group's maximum beats all
in it), so a row is narrowed level by level: at most LIST groups are kept, their 4 * LIST children are the next tile.
The threshold that keeps them is searched by counting keys held in registers, and the search stops as soon as it keeps
between k and LIST; only the last level needs the k-th largest exactly. What a row costs depends on its scores by the
number of search steps alone.
"""

import triton
import triton.language as tl

from dsv4lab.kernels.rows import query_length, score_key, store_maxima


@triton.jit(
    do_not_specialize=[
        "stride", "maxima_stride", "units", "length_stride_b", "length_stride_n", "length_step", "next_n", "limit",
        "direct",
    ],
    do_not_specialize_on_alignment=["scores", "maxima", "lengths"],
)  # fmt: skip
def maxima_kernel(
    scores, stride, maxima, maxima_stride, units,
    lengths, length_stride_b, length_stride_n, length_step, next_n, limit, direct,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs): the maxima over 4, 16 and 64 scores of rows longer than `direct`."""
    row = tl.program_id(0)
    n = query_length(
        lengths, length_stride_b, length_stride_n, length_step, row // next_n, row % next_n, next_n, limit, True
    )
    if n > direct:
        x = _row_of_scores(scores, row, stride, ALIGNED)
        levels = maxima + row.to(tl.int64) * maxima_stride
        for first in range(tl.program_id(1) * BLOCK, n, tl.num_programs(1) * BLOCK):
            t = first + tl.arange(0, BLOCK)
            keys = score_key(tl.load(x + t, mask=_whole(t, n, ALIGNED), other=0.0))
            store_maxima(levels, tl.where(t < n, keys, 0), first, n, units, BLOCK)


@triton.jit
def _row_of_scores(scores, row, stride, ALIGNED: tl.constexpr):
    """The row's first score. Aligned rows start at multiples of 16 bytes, and `stride` counts four scores."""
    if ALIGNED:
        return tl.multiple_of(scores + row.to(tl.int64) * (stride * 4), 16)
    else:
        return scores + row.to(tl.int64) * stride


@triton.jit
def _whole(t, n, ALIGNED: tl.constexpr):
    """Which of the positions t to load: those below n, rounded up to whole vectors where rows are."""
    if ALIGNED:
        return t < (n + 3) // 4 * 4
    else:
        return t < n


@triton.jit
def _children(values, parents, kept, count, LIST: tl.constexpr, ALIGNED: tl.constexpr):
    """Ids and values [LIST, 4] of the children of the kept parents, of `count` on their level, and which exist.

    parents: the list of a row, its first `kept` entries in use; with kept < 0 there is none, and every parent is in.
    """
    p = tl.arange(0, LIST)
    some = (kept < 0) | (p < kept)
    parent = tl.where(kept < 0, p, tl.load(parents + p, mask=(kept >= 0) & some, other=0))
    ids = (parent * 4)[:, None] + tl.arange(0, 4)[None, :]
    x = tl.load(values + ids, mask=some[:, None] & _whole(ids, count, ALIGNED), other=0)
    return ids, x, some[:, None] & (ids < count)


@triton.jit
def _threshold(keys, lo, hi, k, most):
    """A key that between k and `most` keys reach, or else the k-th largest. At least k reach lo, none is above hi.

    Two keys are tried a step, a third and two thirds of the way, both counts in one reduction: at most 21 steps. The
    first step tries 0.0 and what follows it: a rectified row has most of its scores there.
    """
    reached = tl.sum((keys >= lo).to(tl.int32))
    one = tl.full([], 0x80000000, tl.uint32)
    two = one + 1
    while (lo < hi) & (reached > most):
        low = tl.minimum(tl.maximum(one, lo + 1), hi)
        high = tl.minimum(tl.maximum(two, lo + 1), hi)
        both = tl.sum((keys >= low).to(tl.int32) + ((keys >= high).to(tl.int32) << 16))
        at_low = both & 0xFFFF
        at_high = both >> 16
        hi = tl.where(at_high >= k, hi, tl.where(at_low >= k, high - 1, low - 1))
        lo = tl.where(at_high >= k, high, tl.where(at_low >= k, low, lo))
        reached = tl.where(at_high >= k, at_high, tl.where(at_low >= k, at_low, reached))
        third = (hi - lo) // 3
        one = lo + third
        two = hi - third
    return lo


@triton.jit
def _take(keys, live, threshold, most):
    """(chosen, place, number): keys above the threshold and the first that equal it, `most` in all, in order."""
    above = keys > threshold
    equal = live & (keys == threshold)
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    groups = tl.sum(both, 1)
    total = tl.sum(groups, 0)
    quota = most - (total & 0xFFFF)
    before = (tl.cumsum(groups, 0) - groups)[:, None] + tl.cumsum(both, 1) - both
    ties = before >> 16
    place = (before & 0xFFFF) + tl.minimum(ties, quota)
    return above | (equal & (ties < quota)), place, (total & 0xFFFF) + tl.minimum(total >> 16, quota)


@triton.jit
def _coarsest(maxima, n, units, LIST: tl.constexpr):
    """Maxima over 256 scores from those over 64: only rows of more than 256 * LIST scores need them."""
    p = tl.arange(0, LIST)
    for first in range(0, tl.cdiv(n, 256), LIST):
        at = ((first + p) * 4)[:, None] + tl.arange(0, 4)[None, :]
        m64 = tl.load(maxima + units * 80 + at, mask=at * 64 < n, other=0).to(tl.uint32, bitcast=True)
        m256 = tl.max(m64, 1).to(tl.int32, bitcast=True)
        tl.store(maxima + units * 84 + first + p, m256, mask=(first + p) * 256 < n)
    tl.debug_barrier()


@triton.jit
def _pages_of(pages, ids, live, PAGE: tl.constexpr):
    """The page [LIST, 4] of each id; four in a row share theirs unless pages are smaller."""
    if PAGE % 4 == 0:
        page = tl.load(pages + tl.min(ids, 1) // PAGE, mask=tl.max(live.to(tl.int32), 1) > 0, other=0)
        return tl.broadcast_to(page[:, None], ids.shape)
    else:
        return tl.load(pages + ids // PAGE, mask=live, other=0)


@triton.jit
def _write_all(out, raw, n, k, pages, K: tl.constexpr, PAGE: tl.constexpr, RAW: tl.constexpr):
    """A row of n <= k: every position, then -1."""
    i = tl.arange(0, K)
    page = tl.load(pages + i // PAGE, mask=i < n, other=0)
    tl.store(out + i, tl.where(i < n, page * PAGE + i % PAGE, -1), mask=i < k)
    if RAW:
        tl.store(raw + i, tl.where(i < n, i, -1), mask=i < k)


@triton.jit(
    do_not_specialize=[
        "stride", "maxima_stride", "units", "length_stride_b", "length_stride_n", "length_step", "next_n", "limit",
        "table_stride", "out_stride", "raw_stride", "k",
    ],
    do_not_specialize_on_alignment=["scores", "maxima", "lengths", "table", "out", "raw"],
)  # fmt: skip
def select_kernel(
    scores, stride, maxima, maxima_stride, units,
    lengths, length_stride_b, length_stride_n, length_step, next_n, limit, table, table_stride,
    out, out_stride, raw, raw_stride, k,
    LIST: tl.constexpr, PAGE: tl.constexpr, RAW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the positions of the k largest scores of a row, in ascending order, through its page table.

    The row of `maxima` is followed by two lists of LIST int32, for the groups kept on one level and on the next.
    """
    TILE: tl.constexpr = 4 * LIST
    row = tl.program_id(0)
    b = row // next_n
    n = query_length(lengths, length_stride_b, length_stride_n, length_step, b, row % next_n, next_n, limit, True)
    pages = table + b.to(tl.int64) * table_stride
    out += row.to(tl.int64) * out_stride
    raw += row.to(tl.int64) * raw_stride
    if n <= k:
        _write_all(out, raw, n, k, pages, LIST, PAGE, RAW)
        return

    levels = tl.multiple_of(maxima + row.to(tl.int64) * (maxima_stride * 4), 16)
    lists = levels + units * 88
    level = (n > TILE).to(tl.int32) + (n > 4 * TILE).to(tl.int32) + (n > 16 * TILE).to(tl.int32)
    if n > 64 * TILE:
        _coarsest(levels, n, units, LIST)
        level += 1
    kept = -1
    lo = tl.full([], 0, tl.uint32)
    while level > 0:
        count = (n + (1 << (2 * level)) - 1) >> (2 * level)
        offset = (256 - (1024 >> (2 * level))) // 3 * units  # 0, 64, 80, 84
        ids, x, live = _children(
            tl.multiple_of(levels + offset, 16), lists + (level & 1) * LIST, kept, count, LIST, True
        )
        keys = tl.where(live, x.to(tl.uint32, bitcast=True), 0)
        if kept < 0:
            lo = tl.min(tl.where(live, keys, 0xFFFFFFFF))
        lo = _threshold(keys, lo, tl.max(keys), k, LIST)
        chosen, place, kept = _take(keys, live, lo, LIST)
        level -= 1
        tl.store(lists + (level & 1) * LIST + place, ids, mask=chosen)
        tl.debug_barrier()  # the next level reads what other threads have written
    ids, x, live = _children(_row_of_scores(scores, row, stride, ALIGNED), lists, kept, n, LIST, ALIGNED)
    page = _pages_of(pages, ids, live, PAGE)  # asked for now, needed after the search
    keys = tl.where(live, score_key(x), 0)
    if kept < 0:
        lo = tl.min(tl.where(live, keys, 0xFFFFFFFF))
    lo = _threshold(keys, lo, tl.max(keys), k, k)
    chosen, place, kept = _take(keys, live, lo, k)
    tl.store(out + place, page * PAGE + ids % PAGE, mask=chosen)
    if RAW:
        tl.store(raw + place, ids, mask=chosen)
