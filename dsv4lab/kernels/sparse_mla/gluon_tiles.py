"""Sparse MLA decode for Hopper in Gluon: warp-specialised, wgmma, one dequantised tile that serves both products.

A block is one query row, 64 heads and one share of the row's selected positions, worked on by three groups of warps
that meet at mbarriers in shared memory:

- the producer gathers the FP8 bytes of a tile of BLOCK_N tokens, the next tile's in flight while it dequantises this
  one, and writes it as a bf16 tile [BLOCK_N, 512] in the swizzle that wgmma reads, K and V alike;
- `scores` computes S = Q K^T and the online softmax, publishes P and the rescaling factors, and accumulates the first
  256 output columns;
- `values` brings in Q, then accumulates the other 256 columns with the P that it is given.

All products run at Hopper's full rate only if they are issued back to back: `scores` issues the next tile's S right
behind this tile's P V, and waits for that alone before it hands the tile's buffer back.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4lab.kernels.sparse_mla.tiles import LOG2E, VARYING

OPTIONS = dict(OVERLAP=True, EARLY=True, WRITER_FENCES=False, REGISTERS=(208, 160))


@gluon.jit
def _decode_group(x, scales, g: gl.constexpr, WIDE: gl.constexpr):
    """Group g of a gathered tile: e4m3 in words [N, 16], packed scale bytes [N] -> pairs of bf16, words [N, 32]."""
    exponent = gl.minimum(((scales >> (8 * g)) & 0xFF).to(gl.int32) + 120, 254)
    first, second = gl.inline_asm_elementwise(
        """{ .reg .b32 t;
        prmt.b32 t, $2, 0, 0x9180; shl.b32 t, t, 4; and.b32 t, t, 0x87F087F0; mul.rn.bf16x2 $0, t, $3;
        prmt.b32 t, $2, 0, 0xB3A2; shl.b32 t, t, 4; and.b32 t, t, 0x87F087F0; mul.rn.bf16x2 $1, t, $3; }""",
        "=r,=r,r,r",
        [x, (exponent * 0x00800080)[:, None]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.convert_layout(gl.join(first, second).reshape([x.shape[0], 32]), WIDE, assert_trivial=True)


@gluon.jit
def _concat(a, b):
    """[N, W], [N, W] -> [N, 2W]; registers are relabelled, nothing moves."""
    return gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])


@gluon.jit
def _slots(select, t, hi, N: gl.constexpr, LANE: gl.constexpr):
    """Slots [N] of tile t, -1 beyond the length. select: (main tiles, pointers to and counts of both index rows)."""
    main_tiles, indices, n_main, extra_indices, n_extra = select
    extra = t >= main_tiles
    position = (t - gl.where(extra, main_tiles, 0)) * N + gl.arange(0, N, LANE)
    count = gl.where(t < hi, gl.where(extra, n_extra, n_main), 0)
    return gl.load(gl.where(extra, extra_indices, indices) + position, mask=position < count, other=-1)


@gluon.jit
def _locate(pools, slot, extra, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, HAS_EXTRA: gl.constexpr):
    """Byte offsets from the main cache, of token and scales, and validity, each [N]. Slot 0 stands for what is not."""
    page_stride, num_slots, extra_page_stride, extra_num_slots, apart = pools
    slot = slot.to(gl.uint32, bitcast=True)
    valid = slot < gl.where(extra, extra_num_slots, num_slots).to(gl.uint32)
    slot = gl.where(valid, slot, 0)
    page, offset = slot // PAGE, slot % PAGE
    first = page.to(gl.int64) * page_stride
    footer = first + PAGE * 576
    if HAS_EXTRA:
        page = slot // EXTRA_PAGE
        offset = gl.where(extra, slot % EXTRA_PAGE, offset)
        extra_first = page.to(gl.int64) * extra_page_stride + apart
        first = gl.where(extra, extra_first, first)
        footer = gl.where(extra, extra_first + EXTRA_PAGE * 576, footer)
    token = gl.multiple_of(first + offset.to(gl.int64) * 576, 16)
    return token, gl.multiple_of(footer + offset.to(gl.int64) * 8, 8), valid


@gluon.jit
def _load_words(cache, token, valid, first: gl.constexpr, N: gl.constexpr, TILE: gl.constexpr):
    """N words from byte `first` of each token, [tokens, N]; 0 where not valid."""
    token = gl.convert_layout(token, gl.SliceLayout(1, TILE), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(1, TILE), assert_trivial=True)
    d = gl.arange(0, N, gl.SliceLayout(0, TILE))
    at = gl.multiple_of((token >> 2) + first // 4, 4)
    return gl.load(cache.to(gl.pointer_type(gl.int32)) + (at[:, None] + d[None, :]), mask=valid[:, None], other=0)


@gluon.jit
def _load_scales(cache, footer, valid):
    return gl.load(cache.to(gl.pointer_type(gl.int64)) + (footer >> 3), mask=valid, other=0)


@gluon.jit
def _load_low(cache, token, valid, TILE: gl.constexpr):
    g0 = _load_words(cache, token, valid, 0, 16, TILE)
    g1 = _load_words(cache, token, valid, 64, 16, TILE)
    g2 = _load_words(cache, token, valid, 128, 16, TILE)
    g3 = _load_words(cache, token, valid, 192, 16, TILE)
    return g0, g1, g2, g3


@gluon.jit
def _load_high(cache, token, valid, TILE: gl.constexpr, WIDE: gl.constexpr):
    g4 = _load_words(cache, token, valid, 256, 16, TILE)
    g5 = _load_words(cache, token, valid, 320, 16, TILE)
    g6 = _load_words(cache, token, valid, 384, 16, TILE)
    rope = _load_words(cache, token, valid, 448, 32, WIDE)
    return g4, g5, g6, rope


@gluon.jit
def _produce(
    n, lo, hi, cache, select, pools, k_low, k_high, bias, kv_full, kv_empty,
    PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, HAS_EXTRA: gl.constexpr, EARLY: gl.constexpr,
    WRITER_FENCES: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = k_low.shape[0]
    N: gl.constexpr = k_low.shape[1]
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    LANE: gl.constexpr = gl.SliceLayout(1, TILE)
    low = k_low._reinterpret(gl.int32, [STAGES, N, 128], WORDS)
    high = k_high._reinterpret(gl.int32, [STAGES, N, 128], WORDS)
    main_tiles = select[0]
    slot = _slots(select, lo, hi, N, LANE)
    next_slot = _slots(select, lo + 1, hi, N, LANE)
    token, footer, valid = _locate(pools, slot, lo >= main_tiles, PAGE, EXTRA_PAGE, HAS_EXTRA)
    next_scales = _load_scales(cache, footer, valid)
    g0, g1, g2, g3 = _load_low(cache, token, valid, TILE)
    g4, g5, g6, rope = _load_high(cache, token, valid, TILE, WIDE)
    for i in range(n):
        t = lo + i
        stage = i % STAGES
        phase = i // STAGES & 1
        scales, live = next_scales, valid
        token, footer, valid = _locate(pools, next_slot, t + 1 >= main_tiles, PAGE, EXTRA_PAGE, HAS_EXTRA)
        next_slot = _slots(select, t + 2, hi, N, LANE)
        next_scales = _load_scales(cache, footer, valid)
        mbarrier.wait(kv_empty.index(stage), phase ^ 1)
        bias.index(stage).store(gl.where(live, 0.0, float("-inf")))
        # what held this tile's bytes takes the next tile's as soon as it is free
        a = _concat(_decode_group(g0, scales, 0, WIDE), _decode_group(g1, scales, 1, WIDE))
        b = _concat(_decode_group(g2, scales, 2, WIDE), _decode_group(g3, scales, 3, WIDE))
        low.index(stage).store(_concat(a, b))
        if EARLY:
            g0, g1, g2, g3 = _load_low(cache, token, valid, TILE)
        a = _concat(_decode_group(g4, scales, 4, WIDE), _decode_group(g5, scales, 5, WIDE))
        b = _concat(_decode_group(g6, scales, 6, WIDE), rope)
        high.index(stage).store(_concat(a, b))
        if EARLY:
            g4, g5, g6, rope = _load_high(cache, token, valid, TILE, WIDE)
        if WRITER_FENCES:
            fence_async_shared()
        mbarrier.arrive(kv_full.index(stage), count=1)
        if not EARLY:
            g0, g1, g2, g3 = _load_low(cache, token, valid, TILE)
            g4, g5, g6, rope = _load_high(cache, token, valid, TILE, WIDE)


@gluon.jit
def _sink_weight(lse2, sink):
    """As in `tiles`: Gluon calls no function of Triton's."""
    x = lse2 - sink * LOG2E
    e = gl.exp2(-gl.abs(x))
    return gl.where(x >= 0, 1.0, e) / (1.0 + e)


@gluon.jit
def _write(o, stride_h, acc, norm, h, H, first: gl.constexpr, SPLIT: gl.constexpr):
    """256 columns of 64 finished rows; a partial row without a key is not written, as it is not read."""
    ACC: gl.constexpr = acc.type.layout
    d = gl.arange(0, 256, gl.SliceLayout(0, ACC))
    at = (h.to(gl.int64) * stride_h)[:, None] + (first + d)[None, :]
    live = h < H
    if SPLIT:
        live = live & (norm > 0)
    gl.store(o + at, (acc * norm[:, None]).to(o.dtype.element_ty), mask=live[:, None])


@gluon.jit
def _qk(q_low, q_high, k_low, k_high, stage, zero):
    """S = Q K^T of the tile in `stage`, issued and not awaited."""
    s = warpgroup_mma(q_low, k_low.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_high, k_high.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _softmax(s, m, l, scale2, bias, p_shared, alpha_shared, p_full):
    """One tile of the online softmax; P and the rescaling factors are published. Returns p, alpha, m, l."""
    x = s * scale2 + bias.load(gl.SliceLayout(0, s.type.layout))[None, :]
    m_new = gl.maximum(m, gl.max(x, 1))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # no valid key yet: -inf - -inf would be NaN
    alpha = gl.exp2(m - base)
    p = gl.exp2(x - base[:, None])
    l = l * alpha + gl.sum(p, 1)
    p = p.to(gl.bfloat16)
    p_shared.store(p)
    alpha_shared.store(alpha)
    fence_async_shared()
    mbarrier.arrive(p_full, count=1)
    return p, alpha, m_new, l


@gluon.jit
def _scores(
    n, scale2, heads, result, q_low, q_high, k_low, k_high, bias, p_shared, alpha_shared,
    q_full, kv_full, kv_empty, p_full, done, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
    WRITER_FENCES: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = k_low.shape[0]
    N: gl.constexpr = k_low.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    h_first, H, sink = heads
    o, stride_h, lse, lse_stride_h = result
    m = gl.full([64], float("-inf"), gl.float32, ROW)
    l = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, 256], gl.float32, ACC)
    zero = gl.zeros([64, N], gl.float32, S)
    mbarrier.wait(q_full, 0)
    if OVERLAP:
        mbarrier.wait(kv_full.index(0), 0)
        if not WRITER_FENCES:
            fence_async_shared()
        s = _qk(q_low, q_high, k_low, k_high, 0, zero)
        for i in range(1, n):
            stage = (i - 1) % STAGES
            p, alpha, m, l = _softmax(
                warpgroup_mma_wait(0, [s]), m, l, scale2, bias.index(stage), p_shared.index(stage),
                alpha_shared.index(stage), p_full.index(stage),
            )  # fmt: skip
            acc = acc * gl.convert_layout(alpha, ACC_ROW, assert_trivial=True)[:, None]
            pv = warpgroup_mma(gl.convert_layout(p, P, assert_trivial=True), k_low.index(stage), acc, is_async=True)
            mbarrier.wait(kv_full.index(i % STAGES), i // STAGES & 1)
            if not WRITER_FENCES:
                fence_async_shared()
            s = _qk(q_low, q_high, k_low, k_high, i % STAGES, zero)
            acc = warpgroup_mma_wait(1, [pv])
            mbarrier.arrive(kv_empty.index(stage), count=1)
        stage = (n - 1) % STAGES
        p, alpha, m, l = _softmax(
            warpgroup_mma_wait(0, [s]), m, l, scale2, bias.index(stage), p_shared.index(stage),
            alpha_shared.index(stage), p_full.index(stage),
        )  # fmt: skip
        acc = acc * gl.convert_layout(alpha, ACC_ROW, assert_trivial=True)[:, None]
        pv = warpgroup_mma(gl.convert_layout(p, P, assert_trivial=True), k_low.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [pv])
    else:
        for i in range(n):
            stage = i % STAGES
            mbarrier.wait(kv_full.index(stage), i // STAGES & 1)
            if not WRITER_FENCES:
                fence_async_shared()
            s = _qk(q_low, q_high, k_low, k_high, stage, zero)
            p, alpha, m, l = _softmax(
                warpgroup_mma_wait(0, [s]), m, l, scale2, bias.index(stage), p_shared.index(stage),
                alpha_shared.index(stage), p_full.index(stage),
            )  # fmt: skip
            acc = acc * gl.convert_layout(alpha, ACC_ROW, assert_trivial=True)[:, None]
            pv = warpgroup_mma(gl.convert_layout(p, P, assert_trivial=True), k_low.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [pv])
            mbarrier.arrive(kv_empty.index(stage), count=1)

    h = h_first + gl.arange(0, 64, ROW)
    lse2 = m + gl.log2(l)
    norm = gl.where(l > 0, 1.0 / gl.where(l > 0, l, 1.0), 0.0)
    if SPLIT:
        gl.store(lse + h * lse_stride_h, lse2, mask=h < H)
    else:
        if HAS_SINK:
            weight = _sink_weight(lse2, gl.load(sink + h, mask=h < H, other=0.0))
            norm = gl.where(l > 0, norm * weight, 0.0)
        gl.store(lse + h * lse_stride_h, gl.where(l > 0, lse2 / LOG2E, float("inf")), mask=h < H)
    alpha_shared.index(STAGES).store(norm)
    mbarrier.arrive(done, count=1)
    norm = gl.convert_layout(norm, ACC_ROW, assert_trivial=True)
    _write(o, stride_h, acc, norm, h_first + gl.arange(0, 64, ACC_ROW), H, 0, SPLIT)


@gluon.jit
def _values(
    n, q, q_stride_h, h_first, H, o, stride_h, q_low, q_high, k_high, p_shared, alpha_shared,
    q_full, kv_full, kv_empty, p_full, done, SPLIT: gl.constexpr, WRITER_FENCES: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = k_high.shape[0]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 256, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    h = h_first + gl.arange(0, 64, gl.SliceLayout(1, LOAD))
    at = (h.to(gl.int64) * q_stride_h)[:, None] + gl.arange(0, 256, gl.SliceLayout(0, LOAD))[None, :]
    first = gl.load(q + at, mask=(h < H)[:, None], other=0.0)
    second = gl.load(q + at + 256, mask=(h < H)[:, None], other=0.0)
    q_low.store(first)
    q_high.store(second)
    fence_async_shared()
    mbarrier.arrive(q_full, count=1)

    acc = gl.zeros([64, 256], gl.float32, ACC)
    for i in range(n):
        stage = i % STAGES
        phase = i // STAGES & 1
        mbarrier.wait(kv_full.index(stage), phase)
        if not WRITER_FENCES:
            fence_async_shared()
        mbarrier.wait(p_full.index(stage), phase)
        acc = acc * alpha_shared.index(stage).load(ROW)[:, None]
        acc = warpgroup_mma(p_shared.index(stage), k_high.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(kv_empty.index(stage), count=1)
    mbarrier.wait(done, 0)
    norm = alpha_shared.index(STAGES).load(ROW)
    _write(o, stride_h, acc, norm, h_first + gl.arange(0, 64, ROW), H, 256, SPLIT)


@gluon.jit(do_not_specialize=["NUM_SPLITS", *VARYING])
def gluon_kernel(
    q, q_stride_b, q_stride_s, q_stride_h,
    cache, page_stride, num_slots, indices, idx_stride_b, idx_stride_s, lengths, len_stride_b, len_stride_s,
    extra_cache, extra_page_stride, extra_num_slots, extra_indices, extra_idx_stride_b, extra_idx_stride_s,
    extra_lengths, extra_len_stride_b, extra_len_stride_s,
    attn_sink, out, out_stride_b, out_stride_s, out_stride_h, lse, partial_out, partial_lse,
    scale2, S_Q, H, NUM_SPLITS, extra_width,
    WIDTH: gl.constexpr, HAS_EXTRA: gl.constexpr, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr,
    HAS_LENGTHS: gl.constexpr, HAS_EXTRA_LENGTHS: gl.constexpr, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    EARLY: gl.constexpr, WRITER_FENCES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: one query row, 64 heads, one share of the row's selected positions; grid as `split_k_kernel`'s.

    EARLY: load the next tile's bytes while this one is dequantised, or when it is done. WRITER_FENCES: the producer, or
    each reader, orders the tile's stores before wgmma's reads. REGISTERS: of a thread of `scores` and of `values`.
    """
    pid = gl.program_id(0)
    head_blocks = gl.cdiv(H, 64)
    split = (pid // head_blocks) % NUM_SPLITS
    row = pid // (head_blocks * NUM_SPLITS)
    b = (row // S_Q).to(gl.int64)
    s = (row % S_Q).to(gl.int64)
    h_first = pid % head_blocks * 64

    n_main = WIDTH
    if HAS_LENGTHS:
        n_main = gl.minimum(gl.maximum(gl.load(lengths + b * len_stride_b + s * len_stride_s), 0), WIDTH)
    n_extra = extra_width
    if HAS_EXTRA_LENGTHS:
        n_extra = gl.load(extra_lengths + b * extra_len_stride_b + s * extra_len_stride_s)
        n_extra = gl.minimum(gl.maximum(n_extra, 0), extra_width)
    main_tiles = gl.cdiv(n_main, BLOCK_N)
    tiles = main_tiles + gl.cdiv(n_extra, BLOCK_N)
    share = gl.cdiv(tiles, NUM_SPLITS)
    lo = gl.minimum(split * share, tiles)
    hi = gl.minimum(lo + share, tiles)
    n = gl.maximum(hi - lo, 1)  # a row or share without a tile is one tile without a token

    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_low = gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
    q_high = gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
    k_low = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, 256], TILE)
    k_high = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, 256], TILE)
    P: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * BLOCK_N), 16, 2)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BLOCK_N], P)
    bias = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], FLAT)
    alpha_shared = gl.allocate_shared_memory(gl.float32, [STAGES + 1, 64], FLAT)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(done, count=1)

    q += b * q_stride_b + s * q_stride_s
    if SPLIT:
        first = (row.to(gl.int64) * NUM_SPLITS + split) * H
        result = (partial_out + first * 512, 512, partial_lse + first, 1)
    else:
        result = (out + b * out_stride_b + s * out_stride_s, out_stride_h, lse + b * H * S_Q + s, S_Q)
    heads = (h_first, H, attn_sink)
    select = (
        main_tiles, indices + b * idx_stride_b + s * idx_stride_s, n_main,
        extra_indices + b * extra_idx_stride_b + s * extra_idx_stride_s, n_extra,
    )  # fmt: skip
    apart = extra_cache.to(gl.int64) - cache.to(gl.int64)
    pools = (page_stride, num_slots, extra_page_stride, extra_num_slots, apart)
    gl.warp_specialize(
        [
            (_produce, (
                n, lo, hi, cache, select, pools, k_low, k_high, bias, kv_full, kv_empty, PAGE, EXTRA_PAGE, HAS_EXTRA,
                EARLY, WRITER_FENCES,
            )),
            (_scores, (
                n, scale2, heads, result, q_low, q_high, k_low, k_high, bias, p_shared, alpha_shared,
                q_full, kv_full, kv_empty, p_full, done, HAS_SINK, SPLIT, OVERLAP, WRITER_FENCES,
            )),
            (_values, (
                n, q, q_stride_h, h_first, H, result[0], result[1], q_low, q_high, k_high, p_shared, alpha_shared,
                q_full, kv_full, kv_empty, p_full, done, SPLIT, WRITER_FENCES,
            )),
        ],
        [4, 4],
        REGISTERS,
    )  # fmt: skip
