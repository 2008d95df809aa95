"""The Triton kernel of the top-k: maxima of groups of scores, then one program a row that follows them down.

A row of n scores is a tree of maxima: each group of 4, 16, 64 and 256 scores by its largest key. The k largest scores
lie in the k groups with the largest maxima, ties going to the lower group (whatever beats a group's maximum beats all
in it), so a row is narrowed level by level: at most LIST groups are kept, their 4 * LIST children are the next tile.
The threshold that keeps them need only keep between k and LIST: on the first level a mean of the larger maxima mostly
does, on the next ones the same threshold still; failing that, it is searched by counting keys held in registers. Only
the last level needs the k-th largest exactly. What a row costs depends on its scores by the number of counts alone.

The programs of a row share out its maxima, and the last to finish goes on to select; which one that is changes nothing.
A row of no more than 4 * LIST scores needs no maxima: its first program selects, the others leave.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dsv4lab.kernels.rows import LOWEST, flip, query_length, score_key, store_maxima


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
def _store_all_maxima(x, levels, n, units, BLOCK: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr):
    """This program's share of the row's maxima."""
    for first in tl.range(tl.program_id(1) * BLOCK, n, tl.num_programs(1) * BLOCK, num_stages=STAGES):
        t = first + tl.arange(0, BLOCK)
        scores = tl.load(x + t, mask=_whole(t, n, ALIGNED), other=0.0)
        store_maxima(levels, tl.where(t < n, scores, float("nan")), first, n, units, BLOCK)


@triton.jit
def _finished_last(arrivals):
    """Whether all other programs of the row have stored their share; the count is then 0 again."""
    tl.debug_barrier()  # every thread of this one has
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _kept(groups, kept, LIST: tl.constexpr, THREADS: tl.constexpr):
    """(ids, which exist) [LIST, 1] of the first `kept` groups of a list; kept < 0: of all groups, there is none.

    A thread holds neighbours of the list, not every 256th group: a prefix sum then crosses from thread to thread once.
    """
    i = tl.arange(0, LIST)[:, None]
    p = i % THREADS * (LIST // THREADS) + i // THREADS
    some = (kept < 0) | (p < kept)
    return tl.where(kept < 0, p, tl.load(groups + p, mask=(kept >= 0) & some, other=0)), some


@triton.jit
def _children(parent, some, count):
    """(ids, which exist) [LIST, 4] of the children of groups, of `count` on their level."""
    ids = parent * 4 + tl.arange(0, 4)[None, :]
    return ids, some & (ids < count)


@triton.jit
def _narrow(keys, low, high, lo, hi, reached, above, k):
    """(lo, hi, reached, above) after trying two keys, both counts in one reduction."""
    low = tl.minimum(tl.maximum(low, lo + 1), hi)
    high = tl.minimum(tl.maximum(high, low), hi)
    both = tl.sum((keys >= low).to(tl.int32) + ((keys >= high).to(tl.int32) << 16))
    at_low = both & 0xFFFF
    at_high = both >> 16
    above = tl.where(at_high >= k, above, tl.where(at_low >= k, at_high, at_low))
    hi = tl.where(at_high >= k, hi, tl.where(at_low >= k, high, low) - 1)
    lo = tl.where(at_high >= k, high, tl.where(at_low >= k, low, lo))
    reached = tl.where(at_high >= k, at_high, tl.where(at_low >= k, at_low, reached))
    return lo, hi, reached, above


@triton.jit
def _between(lo, hi, share):
    """The key of the score at this share of the way between the scores of two keys."""
    start = flip(lo).to(tl.float32, bitcast=True)
    end = flip(hi).to(tl.float32, bitcast=True)
    return flip((start + (end - start) * share).to(tl.int32, bitcast=True))


@triton.jit
def _threshold(keys, lo, hi, reached, k, most, TAIL: tl.constexpr):
    """(lo, sure, reached): keys from `sure` on are kept, then the first that equal lo, up to `most` in all.

    reached: how many keys reach the lo given, k or more: more or less, or less than 0 for unknown; returned, how many
    reach `sure`, `most` or fewer. No key is above the hi given. With TAIL two keys are tried first a tenth to either
    side of where the k-th largest score would lie if their number fell by halves, as it does far out; then up to six
    times a little to either side of where it would if they were spread evenly; then at thirds of the keys between,
    which takes 21 times at most.
    """
    above = 0  # keys above hi
    if reached < 0:
        both = tl.sum((keys >= lo).to(tl.int32) + ((keys > lo).to(tl.int32) << 16))
        reached = both & 0xFFFF
        if (both >> 16) < k:  # the k-th largest is lo
            above = both >> 16
            hi = lo
    goal = 0.5 * (k + most)
    if TAIL:
        if lo < hi:
            many = reached.to(tl.float32)
            whole = tl.log2(many) + 1.0
            first = tl.log2(many / (goal + 0.1 * many)) / whole
            second = tl.log2(many / tl.maximum(goal - 0.1 * many, 0.5)) / whole
            low, high = _between(lo, hi, first), _between(lo, hi, second)
            lo, hi, reached, above = _narrow(keys, low, high, lo, hi, reached, above, k)
    step = 0
    while (step < 6) & (lo < hi) & (reached > most):
        one = 1.0 / (reached - above).to(tl.float32)
        share = (reached.to(tl.float32) - goal) * one
        margin = tl.maximum(0.5 * one, 0.03125)
        low, high = _between(lo, hi, share - margin), _between(lo, hi, share + margin)
        lo, hi, reached, above = _narrow(keys, low, high, lo, hi, reached, above, k)
        step += 1
    while (lo < hi) & (reached > most):
        third = ((hi - lo).to(tl.uint32, bitcast=True) // 3).to(tl.int32, bitcast=True)
        lo, hi, reached, above = _narrow(keys, lo + third, hi - third, lo, hi, reached, above, k)
    few = reached <= most
    return lo, tl.where(few, lo, lo + 1), tl.where(few, reached, above)


@triton.jit
def _before(one, THREADS: tl.constexpr):
    """How many ones of [LIST, 4] lie before each, in the order of `_kept`."""
    LIST: tl.constexpr = one.shape[0]
    groups = tl.reshape(tl.sum(one, 1), (LIST // THREADS, THREADS))
    threads = tl.sum(groups, 0)
    first = (tl.cumsum(threads, 0) - threads)[None, :] + tl.cumsum(groups, 0) - groups
    return tl.reshape(first, (LIST,))[:, None] + tl.cumsum(one, 1) - one


@triton.jit
def _take(keys, ids, live, lo, sure, reached, most, THREADS: tl.constexpr):
    """(chosen, place): what `_threshold` keeps, in order. `LOWEST` may be a NaN or no score at all."""
    one = (keys >= sure).to(tl.int32)
    if sure > lo:
        tied = (live & (keys == lo)).to(tl.int32)
        one += tl.where(_before(tied, THREADS) < most - reached, tied, 0)
    return one > 0, _before(one, THREADS)


@triton.jit
def _two_sums_and_max(a, b, c, d, e, f):
    return a + d, b + e, tl.maximum(c, f)


@triton.jit
def _first_threshold(keys, live, count, k):
    """(lo, hi, reached): a key that `reached` keys reach, k or more, hardly more for most rows, and the largest key.

    Tried are the mean score of the larger of two neighbours and that of the largest of four, which about a quarter and
    a seventh of the groups reach. Failing both, lo is the smallest key and reached more than any list holds.
    """
    GROUPS: tl.constexpr = keys.shape[0]
    of_two = tl.max(tl.reshape(flip(keys).to(tl.float32, bitcast=True), (GROUPS, 2, 2)), 2)
    of_four = tl.max(of_two, 1)
    of_two = tl.sum(tl.where(of_two == of_two, of_two, of_four[:, None]), 1)
    some = of_four == of_four  # the key of a NaN is a NaN
    of_group = (tl.where(some, of_two, 0.0), tl.where(some, of_four, 0.0), tl.max(keys, 1))
    sum_two, sum_four, hi = tl.reduce(of_group, 0, _two_sums_and_max)
    many = (count + 3) // 4
    low, high = score_key(sum_two / (2 * many)), score_key(sum_four / many)
    both = tl.sum((keys >= low).to(tl.int32) + ((keys >= high).to(tl.int32) << 16))
    lo = tl.where((both >> 16) >= k, high, low)
    reached = tl.where((both >> 16) >= k, both >> 16, both & 0xFFFF)
    if reached < k:
        lo = tl.min(tl.where(live, keys, 0x7FFFFFFF))
        reached = 4 * GROUPS
    return lo, hi, reached


@triton.jit
def _keep(groups, keys, ids, live, lo, hi, reached, k, LIST: tl.constexpr, THREADS: tl.constexpr):
    """Writes the list of groups kept, between k and LIST of them; (how many, what their keys reach)."""
    sure = lo
    if reached > LIST:
        lo, sure, reached = _threshold(keys, lo, hi, -1, k, LIST, False)
    chosen, place = _take(keys, ids, live, lo, sure, reached, LIST, THREADS)
    tl.store(groups + place, ids, mask=chosen)
    tl.debug_barrier()  # the next level reads what other threads have written
    return tl.where(sure > lo, LIST, reached), lo


@triton.jit
def _coarsest(maxima, n, units, LIST: tl.constexpr):
    """Maxima over 256 scores from those over 64."""
    p = tl.arange(0, LIST)
    for first in range(0, tl.cdiv(n, 256), LIST):
        at = ((first + p) * 4)[:, None] + tl.arange(0, 4)[None, :]
        m256 = tl.max(tl.load(maxima + units * 80 + at, mask=at * 64 < n, other=LOWEST), 1)
        tl.store(maxima + units * 84 + first + p, m256, mask=(first + p) * 256 < n)
    tl.debug_barrier()


@triton.jit
def _pages_of(pages, parent, some, ids, live, PAGE: tl.constexpr):
    """The page [LIST, 4] of each id; the children of one parent share theirs unless pages are smaller."""
    if PAGE % 4 == 0:
        page = tl.load(pages + parent * 4 // PAGE, mask=some, other=0)
        return tl.broadcast_to(page, ids.shape)
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


@triton.jit
def _select_k(
    x, parent, some, n, lo, hi, reached, k, pages, out, raw,
    TAIL: tl.constexpr, PAGE: tl.constexpr, RAW: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Writes the k largest of the scores in groups of 4. lo, hi, reached: as for `_threshold`; lo > hi: unknown."""
    ids, live = _children(parent, some, n)
    scores = tl.load(x + ids, mask=some & _whole(ids, n, ALIGNED), other=0.0)
    page = _pages_of(pages, parent, some & (parent * 4 < n), ids, live, PAGE)  # asked for now, needed after the search
    keys = tl.where(live, score_key(scores), LOWEST)
    if lo > hi:
        lo = tl.min(tl.where(live, keys, 0x7FFFFFFF))
        hi = tl.max(keys)
    lo, sure, reached = _threshold(keys, lo, hi, reached, k, k, TAIL)
    chosen, place = _take(keys, ids, live, lo, sure, reached, k, THREADS)
    tl.store(out + place, page * PAGE + ids % PAGE, mask=chosen)
    if RAW:
        tl.store(raw + place, ids, mask=chosen)


@triton.jit(
    do_not_specialize=[
        "stride", "maxima_stride", "units", "length_stride_b", "length_stride_n", "length_step", "next_n", "limit",
        "arrivals", "table_stride", "out_stride", "raw_stride", "k",
    ],
    do_not_specialize_on_alignment=["scores", "maxima", "lengths", "table", "out", "raw"],
)  # fmt: skip
def topk_kernel(
    scores, stride, maxima, maxima_stride, units, arrivals,
    lengths, length_stride_b, length_stride_n, length_step, next_n, limit, table, table_stride,
    out, out_stride, raw, raw_stride, k,
    LIST: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, READY: tl.constexpr,
    PAGE: tl.constexpr, RAW: tl.constexpr, ALIGNED: tl.constexpr, THREADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows, programs): the positions of a row's k largest scores, in ascending order, through its page table.

    The row of `maxima` is followed by a list of LIST int32 for the groups kept; at `arrivals` it counts the programs
    that are done. READY: the maxima are there, and one program a row is enough.
    """
    if EARLY:
        gdc_wait()
    TILE: tl.constexpr = 4 * LIST
    row = tl.program_id(0)
    b = row // next_n
    n = query_length(lengths, length_stride_b, length_stride_n, length_step, b, row % next_n, next_n, limit, True)
    x = _row_of_scores(scores, row, stride, ALIGNED)
    pages = table + b.to(tl.int64) * table_stride
    out += row.to(tl.int64) * out_stride
    raw += row.to(tl.int64) * raw_stride
    if n <= TILE // 2:
        if tl.program_id(1) == 0:
            if n <= k:
                _write_all(out, raw, n, k, pages, LIST, PAGE, RAW)
            else:
                group, some = _kept(table, -1, LIST // 2, THREADS)
                _select_k(x, group, some, n, 1, 0, -1, k, pages, out, raw, False, PAGE, RAW, ALIGNED, THREADS)
        return

    levels = tl.multiple_of(maxima + row.to(tl.int64) * (maxima_stride * 4), 16)
    groups = levels + units * 88
    if n <= TILE:
        if tl.program_id(1) > 0:
            return
    elif not READY:
        _store_all_maxima(x, levels, n, units, BLOCK, STAGES, ALIGNED)
        if not _finished_last(levels + arrivals):
            return
    if n > 64 * TILE:
        _coarsest(levels, n, units, LIST)
    kept = -1
    lo, hi = 1, 0
    level = (n > TILE).to(tl.int32) + (n > 4 * TILE).to(tl.int32) + (n > 16 * TILE).to(tl.int32)
    level += (n > 64 * TILE).to(tl.int32)
    while level > 0:  # of groups of 4 ** level scores
        parent, some = _kept(groups, kept, LIST, THREADS)
        count = (n + (1 << (2 * level)) - 1) >> (2 * level)
        ids, live = _children(parent, some, count)
        offset = (256 - (1024 >> (2 * level))) // 3 * units  # 0, 64, 80, 84
        keys = tl.load(tl.multiple_of(levels + offset, 16) + ids, mask=some & (parent * 4 < count), other=LOWEST)
        keys = tl.where(live, keys, LOWEST)
        if kept < 0:
            lo, hi, reached = _first_threshold(keys, live, count, k)
        else:
            reached = tl.sum((keys >= lo).to(tl.int32))
        kept, lo = _keep(groups, keys, ids, live, lo, hi, reached, k, LIST, THREADS)
        level -= 1
    group, some = _kept(groups, kept, LIST, THREADS)
    likely = tl.where((kept < 0) | (kept == LIST), -1, kept + kept // 32 + 1)  # a full list may hold tied groups
    _select_k(x, group, some, n, lo, hi, likely, k, pages, out, raw, True, PAGE, RAW, ALIGNED, THREADS)
