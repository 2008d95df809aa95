"""Triton kernels of the head's mix: a row's sums over shares of K, then its gates and a tile of their weighted sum.

A row is little: what counts is that all its bytes are asked for at once, from many SMs. A block of few rows has all its
operands on their way before it adds up anything, and the second kernel its streams before the first has ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SUMS = 5
"""Of a row: four products and the sum of its squares."""

_SUMS = tl.constexpr(SUMS)


@triton.jit(do_not_specialize=["T"])
def hc_head_sums_kernel(
    x, w, partials, T,
    K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / ROWS) * SPLITS): the sums of ROWS rows over CHUNK of K, to partials, fp32 [T, SUMS, SPLITS].

    x: bf16 [T, K]; w: fp32 [4, K]. Rows past the last are the last again, and not stored.
    """
    if PDL and not AHEAD:
        gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    first = tl.program_id(0) // SPLITS * ROWS
    k = split * CHUNK + tl.arange(0, CHUNK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    weights = ()
    for n in tl.static_range(4):
        weights += (tl.load(w + n * K + k, mask=k < K, other=0.0),)
    if AHEAD:  # in this order: the next kernel may then read x before it waits for this one
        gdc_wait()
        gdc_launch_dependents()
    rows = ()
    for i in tl.static_range(ROWS):
        row = tl.minimum(first + i, T - 1).to(tl.int64)
        rows += (tl.load(x + row * K + k, mask=k < K, other=0.0),)
    for i in tl.static_range(ROWS):
        a = rows[i].to(tl.float32)
        sums = partials + (first + i).to(tl.int64) * (_SUMS * SPLITS) + split
        for n in tl.static_range(4):
            tl.store(sums + n * SPLITS, tl.sum(tl.sum(a * weights[n], 1), 0), mask=first + i < T)
        tl.store(sums + 4 * SPLITS, tl.sum(tl.sum(a * a, 1), 0), mask=first + i < T)


@triton.jit
def _total(partials, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    s = tl.arange(0, BLOCK_S)
    return tl.sum(tl.load(partials + s, mask=s < SPLITS, other=0.0, cache_modifier=".cg"), 0)


@triton.jit(do_not_specialize=["norm_eps", "hc_eps"], do_not_specialize_on_alignment=["scale", "base"])
def hc_head_mix_kernel(
    x, partials, scale, base, y, norm_eps, hc_eps,
    HIDDEN: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T * ceil(HIDDEN / TILE)): TILE of a row of y, bf16 [T, HIDDEN]; x: bf16 [T, 4, HIDDEN]."""
    TILES: tl.constexpr = (HIDDEN + TILE - 1) // TILE
    row = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    streams = ()
    bases = ()
    for n in tl.static_range(4):
        streams += (tl.load(x + row * (4 * HIDDEN) + n * HIDDEN + d, mask=d < HIDDEN, other=0.0),)
        bases += (tl.load(base + n),)
    factor = tl.load(scale)
    if PDL:
        gdc_wait()
    sums = partials + row * (_SUMS * SPLITS)
    factor *= tl.rsqrt(_total(sums + 4 * SPLITS, SPLITS, BLOCK_S) / (4 * HIDDEN) + norm_eps)
    total = tl.zeros([TILE], tl.float32)
    for n in tl.static_range(4):
        gate = tl.sigmoid(_total(sums + n * SPLITS, SPLITS, BLOCK_S) * factor + bases[n]) + hc_eps
        total += gate * streams[n].to(tl.float32)
    tl.store(y + row * HIDDEN + d, total.to(tl.bfloat16), mask=d < HIDDEN)
