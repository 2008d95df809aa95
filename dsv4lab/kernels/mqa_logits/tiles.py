"""The Triton kernel of paged MQA logits: a fixed number of programs shares out the pages that the rows really have.

Every program reads all lengths, lays the rows' pages end to end, and takes its contiguous share: balanced whatever the
lengths are, with a grid that knows none of them. While the lengths are on their way it asks for page ids and queries
that some program will need. Per page it costs one [64, 128] x [128, 64] product in FP8: keys and scales stream through
shared memory, `num_stages` pages ahead, and the page ids are read one page further ahead.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dsv4lab.kernels.rows import query_length, store_maxima

MANY = tl.constexpr(2**31 - 1)
SKEW = tl.constexpr(4)
"""Pages that starting a row counts for where shares are large: its pipeline has to fill again."""
SMALL = tl.constexpr(8)
"""Pages of a share up to which it is better aligned to rows than even."""


@triton.jit
def _operand(x, COMPUTE: tl.constexpr):
    """What a tensor core multiplies: FP8 as loaded, or, without FP8 hardware, e4m3 bits as fp16 values * 2**-8."""
    if COMPUTE == tl.float8e4nv:
        return x
    else:
        bits = x.to(tl.int16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _store_query(x, p, n, out, maxima, units, PAGE: tl.constexpr, MAXIMA: tl.constexpr):
    """One query's logits [PAGE] of its page p, of n keys in all."""
    t = p * PAGE + tl.arange(0, PAGE)
    tl.store(out + t, x, mask=t < n, eviction_policy="evict_last")  # the top-k reads them next
    if MAXIMA:
        store_maxima(maxima, tl.where(t < n, x, float("nan")), p * PAGE, n, units, PAGE)


@triton.jit
def _ask(
    q, q_stride_b, q_stride_n, q_stride_h, table, table_stride, first_row, rows, groups, next_n, limit,
    H: tl.constexpr, PAGE: tl.constexpr, NQ: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Loads page ids and queries into the L2 before the lengths say which are this program's; nothing waits for them.

    All programs together ask for each row's first ids, 16 a program, and for each query, 128 x 32 bytes a program.
    """
    i = tl.program_id(0)
    row = first_row + i % ROWS
    at = i // ROWS * 16 + tl.arange(0, 16)
    known = (row < rows) & (at < tl.cdiv(limit, PAGE))
    tl.load(table + (row // groups).to(tl.int64) * table_stride + at, mask=known, other=0, volatile=True)
    part = i * 128 + tl.arange(0, 128)
    row = first_row + part // (NQ * H * 4)
    j = row % groups * NQ + part // (H * 4) % NQ
    at = (row // groups).to(tl.int64) * q_stride_b + j * q_stride_n + part // 4 % H * q_stride_h + part % 4 * 2
    tl.load((q + at * 16).to(tl.pointer_type(tl.int32)), mask=(row < rows) & (j < next_n), other=0, volatile=True)


@triton.jit(
    do_not_specialize=[
        "q_stride_b", "q_stride_n", "q_stride_h", "page_stride", "num_pages", "weights_stride", "length_stride_b",
        "length_stride_n", "length_step", "table_stride", "out_stride", "maxima_stride", "units", "B", "next_n",
        "limit", "chunk",
    ],
    do_not_specialize_on_alignment=["weights", "lengths", "table", "out", "maxima"],
)  # fmt: skip
def logits_kernel(
    q, q_stride_b, q_stride_n, q_stride_h, cache, page_stride, num_pages, weights, weights_stride,
    lengths, length_stride_b, length_stride_n, length_step, table, table_stride,
    out, out_stride, maxima, maxima_stride, units, B, next_n, limit, chunk,
    H: tl.constexpr, PAGE: tl.constexpr, NQ: tl.constexpr, ROWS: tl.constexpr, MAXIMA: tl.constexpr,
    STAGES: tl.constexpr, COMPUTE: tl.constexpr, GROUPS: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs, chunks). A row is NQ queries of one request, which share its keys; a chunk is up to ROWS rows.

    Strides of q and cache count 16 bytes, those of the rest elements. A request has GROUPS rows, and PROGRAMS share
    them out (0: as many as there are): a division by a constant is none.
    """
    programs = tl.num_programs(0) if PROGRAMS == 0 else PROGRAMS
    rows = B * GROUPS
    first_row = tl.program_id(1) * chunk
    if EARLY:  # launched while the kernel before still runs: nothing of memory is touched before it has ended
        gdc_wait()
    counts = ()  # pages of 32 rows each: what a warp holds is scanned and searched without a barrier
    for i in tl.static_range(ROWS // 32):
        r = first_row + i * 32 + tl.arange(0, 32)
        mine = r < tl.minimum(first_row + chunk, rows)
        last_query = tl.minimum((r % GROUPS) * NQ + NQ, next_n) - 1
        n = query_length(
            lengths, length_stride_b, length_stride_n, length_step, r // GROUPS, last_query, next_n, limit, mine
        )
        if NQ > 1:  # lengths of their own need not grow with the query
            first_query = (r % GROUPS) * NQ
            n = tl.maximum(n, query_length(
                lengths, length_stride_b, length_stride_n, length_step, r // GROUPS, first_query, next_n, limit, mine
            ))  # fmt: skip
        counts += (tl.cdiv(n, PAGE),)
    _ask(
        q, q_stride_b, q_stride_n, q_stride_h, table, table_stride, first_row, rows, GROUPS, next_n, limit, H, PAGE, NQ,
        ROWS,
    )  # fmt: skip
    ends, lives = (), ()  # pages, and rows with any, up to each row's end
    total, live = 0, 0
    for i in tl.static_range(ROWS // 32):
        some = (counts[i] > 0).to(tl.int32)
        ends += (total + tl.cumsum(counts[i], 0),)
        lives += (live + tl.cumsum(some, 0),)
        total += tl.sum(counts[i], 0)
        live += tl.sum(some, 0)
    share = tl.cdiv(total, programs)
    full = programs  # programs with a whole share
    skew = 0
    if share > SMALL:
        skew = SKEW
        total += skew * live
        share = tl.cdiv(total, programs)
        full -= share * full - total
    lo = tl.program_id(0) * share - tl.maximum(tl.program_id(0) - full, 0)
    hi = tl.minimum(lo + share - (tl.program_id(0) >= full).to(tl.int32), total)

    values, queries = cache, q
    if COMPUTE == tl.float8e4nv:
        values = cache.to(tl.pointer_type(tl.float8e4nv))
        queries = q.to(tl.pointer_type(tl.float8e4nv))
    scales = cache.to(tl.pointer_type(tl.float32))
    d = tl.arange(0, 128)
    t = tl.arange(0, PAGE)
    c = tl.arange(0, NQ * H)
    while lo < hi:
        row = first_row
        row_start = 0
        segment_end = hi
        for i in tl.static_range(ROWS // 32):
            end = ends[i] + skew * lives[i]
            before = end <= lo
            row += tl.sum(before.to(tl.int32), 0)
            row_start = tl.maximum(row_start, tl.max(tl.where(before, end, 0), 0))
            segment_end = tl.minimum(segment_end, tl.min(tl.where(before, MANY, end), 0))
        b = (row // GROUPS).to(tl.int64)
        j0 = (row % GROUPS) * NQ
        j = j0 + c // H
        q_row = b * (q_stride_b * 16) + (j * (q_stride_n * 16) + (c % H) * (q_stride_h * 16))[:, None] + d[None, :]
        queries_t = tl.trans(_operand(tl.load(queries + q_row, mask=(j < next_n)[:, None], other=0.0), COMPUTE))
        w = tl.load(weights + (b * next_n + j) * weights_stride + c % H, mask=j < next_n, other=0.0)
        n0 = query_length(lengths, length_stride_b, length_stride_n, length_step, b, j0, next_n, limit, True)
        out_row = out + (b * next_n + j0) * out_stride
        maxima_row = maxima + (b * next_n + j0) * maxima_stride
        if NQ > 1:
            n1 = query_length(
                lengths, length_stride_b, length_stride_n, length_step, b, j0 + 1, next_n, limit, j0 + 1 < next_n
            )
        pages = table + b * table_stride
        start = tl.maximum(lo - row_start - skew, 0)
        stop = segment_end - row_start - skew
        page = tl.load(pages + start, mask=start < stop, other=0)
        for p in tl.range(start, stop, num_stages=STAGES):
            known = page.to(tl.uint32, bitcast=True) < num_pages
            base = tl.where(known, page, 0).to(tl.int64) * page_stride
            k = tl.load(values + base * 16 + (t * 128)[:, None] + d[None, :])
            scale = tl.load(scales + base * 4 + PAGE * 32 + t)
            page = tl.load(pages + p + 1, mask=p + 1 < stop, other=0)
            x = tl.maximum(tl.dot(_operand(k, COMPUTE), queries_t), 0.0) * w[None, :]
            if COMPUTE != tl.float8e4nv:
                scale *= 65536.0
            if NQ == 1:
                x = tl.where(known, tl.sum(x, 1) * scale, float("-inf"))
                _store_query(x, p, n0, out_row, maxima_row, units, PAGE, MAXIMA)
            else:
                x = tl.sum(tl.reshape(x, (PAGE, NQ, H)), 2) * scale[:, None]
                x0, x1 = tl.split(tl.where(known, x, float("-inf")))
                _store_query(x0, p, n0, out_row, maxima_row, units, PAGE, MAXIMA)
                _store_query(x1, p, n1, out_row + out_stride, maxima_row + maxima_stride, units, PAGE, MAXIMA)
        lo = segment_end
