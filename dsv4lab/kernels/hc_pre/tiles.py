"""Triton kernel of the second half of `hc_pre`: from a row's sums to its mix, its split, the new hidden state.

What it costs is a chain of latencies: a row's partial sums from L2, then either the weighted sum of the streams or 39
half rounds of Sinkhorn. Each has programs of its own, so that neither waits for the other.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

COLUMNS = tl.constexpr(32)
"""Of a row of sums: 24 products, the sum of squares, padding."""


@triton.jit
def _reciprocal(x, APPROXIMATE: tl.constexpr):
    """1 / x: one instruction, an ulp off, or the division that the interpreter can do."""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def _sums(partials, splits, row, e, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):
    """Elements e, from the first of `row` on, of the sums: partial sums, added up in a fixed order.

    partials: fp32 [row tiles, splits, BLOCK_M, COLUMNS].
    """
    SIZE: tl.constexpr = BLOCK_M * COLUMNS
    first = partials + (row // BLOCK_M * splits).to(tl.int64) * SIZE + row % BLOCK_M * COLUMNS
    s = tl.arange(0, BLOCK_S)[:, None]
    return tl.sum(tl.load(first + s * SIZE + e[None, :], mask=s < splits, other=0.0), 0)


@triton.jit
def _group(values, g, i):
    """Group i of values [ROWS, 8, 4]."""
    return tl.sum(tl.where(g == i, values, 0.0), 1)


@triton.jit
def _sinkhorn(mix, g, eps, ITERS: tl.constexpr, ROWS: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Groups 2 to 5 of mix [ROWS, 8, 4] made doubly stochastic, as a factor for each row and for each column of them.

    p and q are the factors' reciprocals: c over (its sum + eps) is 1 / (sum over c + eps * q), one step shorter.
    """
    mix = tl.where((g >= 2) & (g < 6), mix, 0.0)
    e = tl.exp(mix - tl.max(mix, 2)[:, :, None])
    a = e * _reciprocal(tl.sum(e, 2), APPROXIMATE)[:, :, None] + eps
    a0 = _group(a, g, 2)
    a1 = _group(a, g, 3)
    a2 = _group(a, g, 4)
    a3 = _group(a, g, 5)
    p0 = tl.full([ROWS], 1.0, tl.float32)
    p1 = p0
    p2 = p0
    p3 = p0
    r0 = p0
    r1 = p0
    r2 = p0
    r3 = p0
    q = eps + a0 + a1 + a2 + a3
    c = _reciprocal(q, APPROXIMATE)
    for _ in range(1, ITERS):
        p0 = eps * p0 + tl.sum(a0 * c, 1)
        p1 = eps * p1 + tl.sum(a1 * c, 1)
        p2 = eps * p2 + tl.sum(a2 * c, 1)
        p3 = eps * p3 + tl.sum(a3 * c, 1)
        r0 = _reciprocal(p0, APPROXIMATE)
        r1 = _reciprocal(p1, APPROXIMATE)
        r2 = _reciprocal(p2, APPROXIMATE)
        r3 = _reciprocal(p3, APPROXIMATE)
        q = eps * q + a0 * r0[:, None] + a1 * r1[:, None] + a2 * r2[:, None] + a3 * r3[:, None]
        c = _reciprocal(q, APPROXIMATE)
    low = tl.where(g == 2, r0[:, None, None], r1[:, None, None])
    high = tl.where(g == 4, r2[:, None, None], r3[:, None, None])
    return a * tl.where(g < 4, low, high) * c[:, None, :]


@triton.jit
def _split(
    partials, splits, first, scale, base, post, comb, M, rms_eps, eps,
    WIDTH: tl.constexpr, ITERS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """post and comb of ROWS rows from `first` on: their sums as [ROWS, 8, 4], of which group 1 and groups 2 to 5."""
    row = first + tl.arange(0, ROWS)[:, None, None]
    g = tl.arange(0, 8)[None, :, None]
    j = tl.arange(0, 4)[None, None, :]
    n = g * 4 + j
    scales = tl.load(scale + (n >= 4).to(tl.int32) + (n >= 8).to(tl.int32))
    bases = tl.load(base + n, mask=n < 24, other=0.0)
    if PDL:
        gdc_wait()
    sums = _sums(partials, splits, first, tl.arange(0, ROWS * COLUMNS), BLOCK_S, BLOCK_M)
    sums = tl.reshape(sums, (ROWS, 8, 4))
    squares = tl.sum(tl.sum(tl.where(n == 24, sums, 0.0), 2), 1)
    mix = sums * tl.rsqrt(squares / WIDTH + rms_eps)[:, None, None] * scales + bases
    found = tl.where(g == 1, 2.0 * tl.sigmoid(mix), _sinkhorn(mix, g, eps, ITERS, ROWS, APPROXIMATE))
    to = tl.where(g == 1, post + row * 4 + j, comb + row * 16 + n - 8)
    tl.store(to, found, mask=(row < M) & (g >= 1) & (g < 6))


@triton.jit
def _state(
    x, x_stride8, partials, splits, row, scale, base, weight, y, rms_eps, eps, norm_eps,
    HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y of a row. The streams and the weight are in registers before the wait."""
    j = tl.arange(0, 4)
    h = tl.arange(0, BLOCK_H)
    streams = x + row.to(tl.int64) * (x_stride8 * 8) + j[:, None] * HIDDEN + h[None, :]
    streams = tl.load(streams, mask=h[None, :] < HIDDEN, other=0.0).to(tl.float32)
    if NORM:
        weights = tl.load(weight + h, mask=h < HIDDEN, other=0.0)
    scales = tl.load(scale)
    bases = tl.load(base + j)
    if PDL:
        gdc_wait()
    n = tl.arange(0, 8)
    e = tl.max_contiguous(tl.multiple_of(n + n // 4 * 20, 4), 4)  # the first four, and four from the squares on
    sums = tl.reshape(_sums(partials, splits, row, e, BLOCK_S, BLOCK_M), (2, 4))
    n = tl.reshape(n, (2, 4))
    squares = tl.sum(tl.sum(tl.where(n == 4, sums, 0.0), 1), 0)
    pre = tl.sum(tl.where(n < 4, sums, 0.0), 0)
    pre = tl.sigmoid(pre * tl.rsqrt(squares / (4 * HIDDEN) + rms_eps) * scales + bases) + eps
    total = tl.sum(pre[:, None] * streams, 0)
    if NORM:
        total *= tl.rsqrt(tl.sum(total * total) / HIDDEN + norm_eps) * weights.to(tl.float32)
    tl.store(y + row.to(tl.int64) * HIDDEN + h, total.to(y.dtype.element_ty), mask=h < HIDDEN)


@triton.jit(
    do_not_specialize=["x_stride8", "splits", "M", "rms_eps", "hc_eps", "norm_eps"],
    do_not_specialize_on_alignment=["scale", "base"],
)
def mix_kernel(
    x, x_stride8, partials, splits, scale, base, weight, y, post, comb, M, rms_eps, hc_eps, norm_eps,
    HIDDEN: tl.constexpr, ITERS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / ROWS) + M): the first ones split the mix of ROWS rows each, the others make y of a row each.

    NORM: y is RMS-normalised and takes `weight`, [HIDDEN].
    """
    tiles = (M + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if program < tiles:
        _split(
            partials, splits, program * ROWS, scale, base, post, comb, M, rms_eps, hc_eps,
            4 * HIDDEN, ITERS, BLOCK_S, BLOCK_M, ROWS, PDL, APPROXIMATE,
        )  # fmt: skip
    else:
        _state(
            x, x_stride8, partials, splits, program - tiles, scale, base, weight, y, rms_eps, hc_eps, norm_eps,
            HIDDEN, BLOCK_H, BLOCK_S, BLOCK_M, NORM, PDL,
        )  # fmt: skip
