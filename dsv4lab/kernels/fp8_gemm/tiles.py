"""Triton kernels of block-FP8 products with few rows: a tile of outputs over a share of K, and the sum of the shares.

Such a product is bound by how soon the bytes of its weights are on their way: tiles are narrow, and K is split until
every SM has enough of them in flight. What blocks leave behind, fp32 partial tiles [row tiles, column tiles, splits,
BLOCK_M * BLOCK_N], a second kernel adds up in the order of the splits: a result is bitwise the same in every run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4lab.kernels.fp8_gemm.plans import BLOCK

BLOCK_K = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["M", "x_stride16", "steps", "splits"])
def fp8_gemm_kernel(
    x, x_stride16, x_scale, w, w_scale, out, M, N, K, steps, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, splits, row tiles): the sum over `steps` steps of K, in bf16 if it is the whole one.

    x: e4m3 [M, K], rows 16 * x_stride16 apart; x_scale: fp32 [M, K / 128]; w: e4m3 [N, K]; w_scale: fp32
    [N / 128, K / 128]; out: bf16 [M, N], or the partial tiles. All but x dense.
    """
    if PDL:
        gdc_launch_dependents()
    all_steps = K // BLOCK_K
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    some = m < M
    rows = x + m.to(tl.int64)[:, None] * (x_stride16 * 16) + k[None, :]
    columns = w + n.to(tl.int64)[:, None] * K + k[None, :]
    row_scales = x_scale + m * all_steps
    tile_scales = w_scale + tile * BLOCK_N // BLOCK_K * all_steps
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(split * steps, tl.minimum((split + 1) * steps, all_steps), num_stages=STAGES):
        a = tl.load(rows + step * BLOCK_K, mask=some[:, None], other=0.0)
        b = tl.load(columns + step * BLOCK_K)
        scale = tl.load(row_scales + step, mask=some, other=0.0) * tl.load(tile_scales + step)
        acc += tl.dot(a.to(COMPUTE), b.to(COMPUTE).T, input_precision="ieee") * scale[:, None]
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
