"""Triton kernel of the second half of `hc_pre`: from a row's sums to its mix, its split, the new hidden state."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

COLUMNS = tl.constexpr(32)
"""Of a row of sums: 24 products, the sum of squares, padding."""


@triton.jit
def _pick(values, n, column):
    """One of the values [COLUMNS], n counting them, as a scalar."""
    return tl.sum(tl.where(n == column, values, 0.0))


@triton.jit
def _four(values, n, first):
    return (
        _pick(values, n, first),
        _pick(values, n, first + 1),
        _pick(values, n, first + 2),
        _pick(values, n, first + 3),
    )


@triton.jit
def _store_four(to, a, b, c, d):
    tl.store(to, a)
    tl.store(to + 1, b)
    tl.store(to + 2, c)
    tl.store(to + 3, d)


@triton.jit
def _normal(a, b, c, d, eps):
    """The four over their sum plus eps."""
    r = 1.0 / (a + b + c + d + eps)
    return a * r, b * r, c * r, d * r


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _normal(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _sinkhorn(mix, n, comb, eps, ITERS: tl.constexpr):
    """The doubly stochastic mix of the streams, 16 scalars in every thread: a chain of additions and reciprocals."""
    a0, b0, c0, d0 = _four(mix, n, 8)
    a1, b1, c1, d1 = _four(mix, n, 12)
    a2, b2, c2, d2 = _four(mix, n, 16)
    a3, b3, c3, d3 = _four(mix, n, 20)
    a0, b0, c0, d0 = _softmax(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _softmax(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _softmax(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _softmax(a3, b3, c3, d3, eps)
    for i in range(ITERS):
        if i > 0:
            a0, b0, c0, d0 = _normal(a0, b0, c0, d0, eps)
            a1, b1, c1, d1 = _normal(a1, b1, c1, d1, eps)
            a2, b2, c2, d2 = _normal(a2, b2, c2, d2, eps)
            a3, b3, c3, d3 = _normal(a3, b3, c3, d3, eps)
        a0, a1, a2, a3 = _normal(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _normal(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _normal(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _normal(d0, d1, d2, d3, eps)
    _store_four(comb, a0, b0, c0, d0)
    _store_four(comb + 4, a1, b1, c1, d1)
    _store_four(comb + 8, a2, b2, c2, d2)
    _store_four(comb + 12, a3, b3, c3, d3)


@triton.jit
def _mix(
    partials, splits, row, n, scales, bases, eps,
    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The row's mix [COLUMNS]: its partial sums added up in the order of the splits, over its root mean square."""
    SIZE: tl.constexpr = BLOCK_M * COLUMNS
    sums = partials + (row // BLOCK_M * splits).to(tl.int64) * SIZE + row % BLOCK_M * COLUMNS
    s = tl.arange(0, BLOCK_S)[:, None]
    total = tl.sum(tl.load(sums + s * SIZE + n[None, :], mask=s < splits, other=0.0), 0)
    r = tl.rsqrt(_pick(total, n, 24) / WIDTH + eps)
    return tl.where(n < 24, total * r * scales + bases, 0.0)


@triton.jit(
    do_not_specialize=["x_stride8", "splits", "rms_eps", "hc_eps"],
    do_not_specialize_on_alignment=["scale", "base"],
)
def mix_kernel(
    x, x_stride8, partials, splits, scale, base, y, post, comb, rms_eps, hc_eps,
    HIDDEN: tl.constexpr, ITERS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 1 + hidden tiles): program 0 of a row splits its mix, each other one sums a tile over the streams.

    partials: fp32 [row tiles, splits, BLOCK_M, COLUMNS]. What does not depend on them is asked for before the wait.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1) - 1
    n = tl.arange(0, COLUMNS)
    scales = tl.load(scale + (n >= 4).to(tl.int32) + (n >= 8).to(tl.int32))
    bases = tl.load(base + n, mask=n < 24, other=0.0)
    if tile < 0:
        if PDL:
            gdc_wait()
        mix = _mix(partials, splits, row, n, scales, bases, rms_eps, 4 * HIDDEN, BLOCK_S, BLOCK_M)
        tl.store(post + row * 4 + n - 4, 2.0 * tl.sigmoid(mix), mask=(n >= 4) & (n < 8))
        _sinkhorn(mix, n, comb + row * 16, hc_eps, ITERS)
    else:
        h = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        streams = x + row.to(tl.int64) * (x_stride8 * 8) + h
        x0 = tl.load(streams).to(tl.float32)
        x1 = tl.load(streams + HIDDEN).to(tl.float32)
        x2 = tl.load(streams + 2 * HIDDEN).to(tl.float32)
        x3 = tl.load(streams + 3 * HIDDEN).to(tl.float32)
        if PDL:
            gdc_wait()
        mix = _mix(partials, splits, row, n, scales, bases, rms_eps, 4 * HIDDEN, BLOCK_S, BLOCK_M)
        p0, p1, p2, p3 = _four(tl.sigmoid(mix) + hc_eps, n, 0)
        total = p0 * x0 + p1 * x1 + p2 * x2 + p3 * x3
        tl.store(y + row.to(tl.int64) * HIDDEN + h, total.to(y.dtype.element_ty))
