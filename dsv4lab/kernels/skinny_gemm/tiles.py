"""Triton kernels of products with few rows and few columns: one output a block, or slices of K and their combine.

Such a product is bound by how soon its bytes are on their way, not by arithmetic: a block asks for all its operands at
once, and there are enough blocks to ask for everything. What blocks leave behind, fp32 partial tiles
[row tiles, column tiles, splits, BLOCK_M * BLOCK_N], is added up in the order of the splits, so that a result is
bitwise the same in every run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _begin():
    """Of a kernel launched early: waits for what is in front of it, then lets the next be launched.

    In this order, so that the next may read what the one in front wrote before it waits for this.
    """
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def _finish(total, m, n, out, out_stride, scale, bias, M, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scale, add the bias, store where a row and a column are."""
    total *= scale
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0)
    tl.store(out + m.to(tl.int64) * out_stride + n, total, mask=(m < M) & (n < N))


@triton.jit(do_not_specialize=["x_stride8", "out_stride", "scale", "M"], do_not_specialize_on_alignment=["out", "bias"])
def dot_kernel(
    x, x_stride8, w, out, out_stride, scale, bias, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (N or N + 1, M): one output, in fp32; column N is the sum of squares of the row.

    x: bf16 [M, K], rows 8 * x_stride8 apart; w: bf16 or fp32 [N, K] dense; out: fp32 [M, at least N].
    """
    if PDL and not AHEAD:
        gdc_launch_dependents()
    n = tl.program_id(0)
    m = tl.program_id(1)
    row = x + m.to(tl.int64) * (x_stride8 * 8)
    acc = tl.zeros([BLOCK_K], tl.float32)
    for first in tl.static_range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        b = tl.load(w + n * K + k, mask=(k < K) & (n < N), other=0.0).to(tl.float32)
        if AHEAD and first == 0:
            _begin()
        a = tl.load(row + k, mask=k < K, other=0.0).to(tl.float32)
        acc += a * tl.where(n < N, b, a)
    total = tl.sum(acc)
    if n < N:
        _finish(total, m, n, out, out_stride, scale, bias, M, N, HAS_BIAS)
    else:
        tl.store(out + m.to(tl.int64) * out_stride + n, total)


@triton.jit
def _pinned(values):
    """The same values, here: Triton waits for what it loads, to store it to shared memory, right where it loads it."""
    if values.dtype == tl.bfloat16:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return values


@triton.jit
def _partial_tile(
    x, x_stride8, w, m, n, first, M, N: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, SQUARES: tl.constexpr, COMPUTE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] over k in first..first + CHUNK; with SQUARES, column N has the sums of the rows' squares.

    A step of BLOCK_K is cut into one slice a warp, a batch of small products: no warp repeats another's, and the
    chain of dependent MMAs is short. fp32 weights go in as two bf16 terms, which keep 16 of their 24 bits.
    """
    SLICE: tl.constexpr = BLOCK_K // SLICES
    acc = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    rows = x + m.to(tl.int64) * (x_stride8 * 8)
    for start in tl.static_range(0, CHUNK, BLOCK_K):
        k = first + start + tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
        k = k[:, None, :]
        b = tl.load(w + n[None, :, None] * K + k, mask=(n[None, :, None] < N) & (k < K), other=0.0)
        if AHEAD and start == 0:
            _begin()
        a = tl.load(rows[None, :, None] + k, mask=(m[None, :, None] < M) & (k < K), other=0.0)
        high = _pinned(b.to(COMPUTE))
        acc = tl.dot(a.to(COMPUTE), tl.permute(high, (0, 2, 1)), acc, input_precision="ieee")
        if b.dtype == tl.float32 and COMPUTE == tl.bfloat16:
            low = (b - high.to(tl.float32)).to(COMPUTE)
            acc = tl.dot(a, tl.permute(low, (0, 2, 1)), acc)
        if SQUARES:
            wide = a.to(tl.float32)
            squares += tl.sum(tl.sum(wide * wide, 2), 0)
    total = tl.sum(acc, 0)
    if SQUARES:
        total = tl.where(n[None, :] == N, squares[:, None], total)
    return total


@triton.jit
def _two_terms(b, COMPUTE: tl.constexpr):
    """fp32 [N, K] as two terms in bf16 that keep 16 of its 24 bits, a row each: [2 * N, K].

    Made here: Triton would move fp32 through shared memory, a slice at a time, to make the terms there.
    """
    high = b.to(COMPUTE)
    low = (b - high.to(tl.float32)).to(COMPUTE)
    return _pinned(tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (2 * b.shape[0], b.shape[1])))


@triton.jit
def _whole_tile(
    x, x_stride8, w, m, n, first, M, N: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SQUARES: tl.constexpr, COMPUTE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What `_partial_tile` gives, by all warps on each step together: a longer chain of MMAs, and no warps to add up.

    The terms of a weight are neighbours in a row of products, which one thread has.
    """
    TERMS: tl.constexpr = 2 if w.dtype.element_ty == tl.float32 else 1
    acc = tl.zeros([BLOCK_M, TERMS * BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    rows = x + m.to(tl.int64) * (x_stride8 * 8)
    for start in tl.static_range(0, CHUNK, BLOCK_K):
        k = first + start + tl.arange(0, BLOCK_K)[None, :]
        b = tl.load(w + n[:, None] * K + k, mask=(n[:, None] < N) & (k < K), other=0.0)
        if AHEAD and start == 0:
            _begin()
        a = tl.load(rows[:, None] + k, mask=(m[:, None] < M) & (k < K), other=0.0)
        b = _two_terms(b, COMPUTE) if TERMS == 2 else _pinned(b.to(COMPUTE))
        acc = tl.dot(a.to(COMPUTE), b.T, acc, input_precision="ieee")
        if SQUARES:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
    total = tl.sum(tl.reshape(acc, (BLOCK_M, BLOCK_N, TERMS)), 2)
    if SQUARES:
        total = tl.where(n[None, :] == N, squares[:, None], total)
    return total


@triton.jit(do_not_specialize=["x_stride8", "M"])
def split_kernel(
    x, x_stride8, w, partials, M,
    N: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, SQUARES: tl.constexpr, PDL: tl.constexpr,
    COMPUTE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, column tiles, row tiles): one partial tile over CHUNK of K."""
    if PDL and not AHEAD:
        gdc_launch_dependents()
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    split = tl.program_id(0)
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    first_m = tl.program_id(2) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    if SLICES > 1:
        total = _partial_tile(
            x, x_stride8, w, first_m + m, first_n + n, split * CHUNK, M, N, K, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, SLICES,
            SQUARES, COMPUTE, AHEAD,
        )  # fmt: skip
    else:
        total = _whole_tile(
            x, x_stride8, w, first_m + m, first_n + n, split * CHUNK, M, N, K, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K,
            SQUARES, COMPUTE, AHEAD,
        )  # fmt: skip
    partials += (tile * SPLITS).to(tl.int64) * SIZE
    tl.store(partials + split * SIZE + m[:, None] * BLOCK_N + n[None, :], total)


@triton.jit(do_not_specialize=["out_stride", "scale", "M"], do_not_specialize_on_alignment=["out", "bias"])
def combine_kernel(
    partials, out, out_stride, scale, bias, M,
    N: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (parts of a tile, column tiles, row tiles): adds up BLOCK_E elements of a tile over its splits.

    GROUP of them are asked for at once; the order is fixed.
    """
    if PDL:
        _begin()
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    partials += (tile * SPLITS).to(tl.int64) * SIZE
    total = tl.zeros([BLOCK_E], tl.float32)
    for first in tl.static_range(0, SPLITS, GROUP):
        s = first + tl.arange(0, GROUP)[:, None]
        total += tl.sum(tl.load(partials + s * SIZE + e[None, :], mask=s < SPLITS, other=0.0, cache_modifier=".cg"), 0)
    m = tl.program_id(2) * BLOCK_M + e // BLOCK_N
    _finish(total, m, tl.program_id(1) * BLOCK_N + e % BLOCK_N, out, out_stride, scale, bias, M, N, HAS_BIAS)
