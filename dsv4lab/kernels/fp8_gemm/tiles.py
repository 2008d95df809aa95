"""Triton kernels of block-FP8 products with few rows: a tile of outputs over a share of K, and the sum of the shares.

Such a product is bound by how soon the bytes of its weights are on their way: tiles are narrow, and K is split until
every SM has enough of them in flight. What blocks leave behind, fp32 partial tiles [row tiles, column tiles, splits,
BLOCK_M * BLOCK_N], a second kernel adds up in the order of the splits: a result is bitwise the same in every run.

Activations in bf16 are quantised by each block of the product as it needs them, or by a third kernel in front.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4lab.kernels.fp8_gemm.plans import AMAX_FLOOR, BLOCK

BLOCK_K = tl.constexpr(BLOCK)
FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def _inverse(amax, INTERPRETED: tl.constexpr):
    """448 / amax as nvcc divides under --use_fast_math; as IEEE does where there is no such instruction."""
    if INTERPRETED:
        return 448.0 / amax
    else:
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, 0f43E00000, $1;", "=f,f", [amax], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _e4m3(y, INTERPRETED: tl.constexpr):
    """fp32 -> e4m3, clamped to its range, to the nearest, ties to even; NaN becomes -448."""
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -448.0), 448.0), -448.0)
    if not INTERPRETED:
        return y.to(tl.float8e4nv)
    # the interpreter's conversion rounds ties up, and without a carry
    bits = y.to(tl.int32, bitcast=True)
    normal = (((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 8 * 120
    subnormal = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) & 0xFF  # whose last bit is 2**-9
    code = tl.where(tl.abs(y) < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _quantised(values, INTERPRETED: tl.constexpr):
    """(e4m3, fp32 scales) of bf16 [..., 128], a scale a row."""
    wide = values.to(tl.float32)
    sizes = tl.abs(wide)
    amax = tl.max(tl.where(sizes > FLOOR, sizes, FLOOR), 1)  # NaN does not count
    return _e4m3(wide * _inverse(amax, INTERPRETED)[:, None], INTERPRETED), amax * (1.0 / 448.0)


@triton.jit(do_not_specialize=["x_stride8"])
def fp8_gemm_quantise_kernel(
    x, x_stride8, out, scales, K, GROUPS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Grid (parts of a row, rows): GROUPS groups of 128 columns become e4m3 with a scale each.

    x: bf16 [M, K], rows 8 * x_stride8 apart; out: e4m3 [M, K]; scales: fp32 [M, K / 128]; both dense.
    """
    if PDL:  # what comes next touches nothing before it waits for this
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    some = group < K // BLOCK_K
    k = group[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    values = tl.load(x + row * (x_stride8 * 8) + k, mask=some[:, None], other=0.0)
    quantised, scale = _quantised(values, INTERPRETED)
    tl.store(out + row * K + k, quantised, mask=some[:, None])
    tl.store(scales + row * (K // BLOCK_K) + group, scale, mask=some)


@triton.jit(do_not_specialize=["M", "x_stride", "steps", "splits"])
def fp8_gemm_kernel(
    x, x_stride, x_scale, w, w_scale, out, M, N, K, steps, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    AHEAD: tl.constexpr, SWAP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, splits, row tiles): the sum over `steps` steps of K, in bf16 if it is the whole one.

    x: e4m3 [M, K] with x_scale, fp32 [M, K / 128], or bf16, of which every block quantises its share; rows x_stride
    times 16 bytes apart. w: e4m3 [N, K]; w_scale: fp32 [N / 128, K / 128]; out: bf16 [M, N], or the partial tiles. All
    but x dense. AHEAD: launched while x is still being made.
    """
    QUANTISE: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    UNIT: tl.constexpr = 8 if QUANTISE else 16
    if PDL:
        gdc_launch_dependents()
    all_steps = K // BLOCK_K
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    some = m < M
    rows = x + m.to(tl.int64)[:, None] * (x_stride * UNIT) + k[None, :]
    columns = w + n.to(tl.int64)[:, None] * K + k[None, :]
    row_scales = x_scale + m * all_steps
    tile_scales = w_scale + tile * BLOCK_N // BLOCK_K * all_steps
    first, last = split * steps, tl.minimum((split + 1) * steps, all_steps)
    if AHEAD:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        a = tl.load(rows + step * BLOCK_K, mask=some[:, None], other=0.0)
        b = tl.load(columns + step * BLOCK_K)
        if QUANTISE:
            a, row_scale = _quantised(a, COMPUTE == tl.float32)
        else:
            row_scale = tl.load(row_scales + step, mask=some, other=0.0)
        scale = row_scale * tl.load(tile_scales + step)
        if SWAP:
            acc += tl.dot(b.to(COMPUTE), a.to(COMPUTE).T, input_precision="ieee") * scale[None, :]
        else:
            acc += tl.dot(a.to(COMPUTE), b.to(COMPUTE).T, input_precision="ieee") * scale[:, None]
    if SWAP:
        acc = acc.T
    if SPLIT:
        at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial = (tl.program_id(2) * tl.num_programs(0) + tile) * splits + split
        tl.store(out + partial.to(tl.int64) * (BLOCK_M * BLOCK_N) + at, acc, mask=some[:, None])
    else:
        tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=some[:, None])


@triton.jit(do_not_specialize=["M", "splits"])
def fp8_gemm_combine_kernel(
    partials, out, M, N, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (parts of a tile, column tiles, row tiles): BLOCK_E elements of a tile, GROUP splits asked for at once."""
    if PDL:
        gdc_wait()
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    m = tl.program_id(2) * BLOCK_M + e // BLOCK_N
    n = tl.program_id(1) * BLOCK_N + e % BLOCK_N
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    partials += (tile * splits).to(tl.int64) * SIZE
    total = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, splits, GROUP):
        s = first + tl.arange(0, GROUP)[:, None]
        some = (s < splits) & (m < M)[None, :]
        total += tl.sum(tl.load(partials + s * SIZE + e[None, :], mask=some, other=0.0, cache_modifier=".cg"), 0)
    tl.store(out + m.to(tl.int64) * N + n, total.to(tl.bfloat16), mask=m < M)
