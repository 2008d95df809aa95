"""Sparse MLA decode for Hopper in Gluon: warp-specialised, wgmma, one dequantised tile that serves both products.

A block is one query row, 64 heads and one share of the row's selected positions, worked on by three groups of warps
that meet at mbarriers in shared memory:

- the producer asks for the FP8 bytes of tiles of BLOCK_N tokens by cp.async, 128 tokens ahead, and turns what has come
  into a bf16 tile [BLOCK_N, 512] in the swizzle that wgmma reads, K and V alike;
- `scores` computes S = Q K^T and the online softmax, publishes P and the rescaling factors, and accumulates the first
  256 output columns;
- `values` brings in Q, then accumulates the other 256 columns with the P that it is given.

The readers wait for the producer, so all care goes into its loop. In probes without a record (an H200, B = 128, H = 64,
cold) a launch took 47 us with the next tile's bytes on their way to registers while this one is written, 42 to 44 with
the next loads issued once this one is handed over, and 39 with bytes ahead in shared memory; FlashMLA took 46. Issuing
the next tile's S behind this one's P V, so that the tensor cores never wait, gave nothing and is not done. The fence
between the producer's stores and wgmma's reads is the readers', who have time for it.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from dsv4lab.kernels.sparse_mla.tiles import LOG2E, VARYING

REGISTERS = gl.constexpr((232, 160))
"""Of a thread of `scores` and of `values`; the producer has what is left."""


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
def _positions(select, t, hi, N: gl.constexpr, LANE: gl.constexpr):
    """Where tile t's indices lie and which count, each [N]. select: (main tiles, both rows' indices and counts)."""
    main_tiles, indices, n_main, extra_indices, n_extra = select
    extra = t >= main_tiles
    position = (t - gl.where(extra, main_tiles, 0)) * N + gl.arange(0, N, LANE)
    count = gl.where(t < hi, gl.where(extra, n_extra, n_main), 0)
    return gl.where(extra, extra_indices, indices) + position, position < count


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
def _words(cache, token, first: gl.constexpr, N: gl.constexpr, TILE: gl.constexpr):
    """Pointers to N words from byte `first` of each token, [tokens, N]."""
    token = gl.convert_layout(token, gl.SliceLayout(1, TILE), assert_trivial=True)
    d = gl.arange(0, N, gl.SliceLayout(0, TILE))
    at = gl.multiple_of((token >> 2) + first // 4, 4)
    return cache.to(gl.pointer_type(gl.int32)) + (at[:, None] + d[None, :])


@gluon.jit
def _fetch_slots(i, lo, hi, select, ring, LANE: gl.constexpr):
    at, counts = _positions(select, lo + i, hi, ring.shape[1], LANE)
    async_copy.async_copy_global_to_shared(ring.index(i % ring.shape[0]), at, mask=counts)


@gluon.jit
def _fetch(
    i, lo, hi, cache, select, pools, staging, PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, HAS_EXTRA: gl.constexpr,
    TILE: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Ask for the bytes of tile i of the share, and for the indices of a later one: one group of copies."""
    ring, groups, rope, scales = staging
    AHEAD: gl.constexpr = scales.shape[0]
    N: gl.constexpr = scales.shape[1]
    LANE: gl.constexpr = gl.SliceLayout(1, TILE)
    _, counts = _positions(select, lo + i, hi, N, LANE)
    slot = gl.where(counts, ring.index(i % ring.shape[0]).load(LANE), -1)
    token, footer, valid = _locate(pools, slot, lo + i >= select[0], PAGE, EXTRA_PAGE, HAS_EXTRA)
    at = i % AHEAD
    packed = cache.to(gl.pointer_type(gl.int64)) + (footer >> 3)
    async_copy.async_copy_global_to_shared(scales.index(at), packed, mask=valid)
    live = gl.convert_layout(valid, gl.SliceLayout(1, TILE), assert_trivial=True)[:, None]
    for g in gl.static_range(7):
        words = _words(cache, token, 64 * g, 16, TILE)
        async_copy.async_copy_global_to_shared(groups[g].index(at), words, mask=live)
    live = gl.convert_layout(valid, gl.SliceLayout(1, WIDE), assert_trivial=True)[:, None]
    async_copy.async_copy_global_to_shared(rope.index(at), _words(cache, token, 448, 32, WIDE), mask=live)
    _fetch_slots(i + AHEAD, lo, hi, select, ring, LANE)
    async_copy.commit_group()


@gluon.jit
def _pair(groups, at, scales, g: gl.constexpr, TILE: gl.constexpr, WIDE: gl.constexpr):
    """Groups g and g + 1 of the tile of bytes in `at`, words [N, 64]."""
    first = _decode_group(groups[g].index(at).load(TILE), scales, g, WIDE)
    return _concat(first, _decode_group(groups[g + 1].index(at).load(TILE), scales, g + 1, WIDE))


@gluon.jit
def _produce(
    n, lo, hi, cache, select, pools, staging, k_low, k_high, bias, kv_full, kv_empty,
    PAGE: gl.constexpr, EXTRA_PAGE: gl.constexpr, HAS_EXTRA: gl.constexpr,
):  # fmt: skip
    ring, groups, rope, packed = staging
    AHEAD: gl.constexpr = packed.shape[0]
    STAGES: gl.constexpr = k_low.shape[0]
    N: gl.constexpr = k_low.shape[1]
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    LANE: gl.constexpr = gl.SliceLayout(1, TILE)
    low = k_low._reinterpret(gl.int32, [STAGES, N, 128], WORDS)
    high = k_high._reinterpret(gl.int32, [STAGES, N, 128], WORDS)
    for i in gl.static_range(AHEAD):
        _fetch_slots(i, lo, hi, select, ring, LANE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    for i in gl.static_range(AHEAD):
        _fetch(i, lo, hi, cache, select, pools, staging, PAGE, EXTRA_PAGE, HAS_EXTRA, TILE, WIDE)
    for i in range(n):
        async_copy.wait_group(AHEAD - 1)
        _, counts = _positions(select, lo + i, hi, N, LANE)
        slot = ring.index(i % ring.shape[0]).load(LANE).to(gl.uint32, bitcast=True)
        valid = counts & (slot < gl.where(lo + i >= select[0], pools[3], pools[1]).to(gl.uint32))
        stage = i % STAGES
        mbarrier.wait(kv_empty.index(stage), i // STAGES & 1 ^ 1)
        bias.index(stage).store(gl.where(valid, 0.0, float("-inf")))
        at = i % AHEAD
        scales = packed.index(at).load(LANE)
        first = _pair(groups, at, scales, 0, TILE, WIDE)
        low.index(stage).store(_concat(first, _pair(groups, at, scales, 2, TILE, WIDE)))
        first = _pair(groups, at, scales, 4, TILE, WIDE)
        last = _decode_group(groups[6].index(at).load(TILE), scales, 6, WIDE)
        high.index(stage).store(_concat(first, _concat(last, rope.index(at).load(WIDE))))
        mbarrier.arrive(kv_full.index(stage), count=1)
        _fetch(i + AHEAD, lo, hi, cache, select, pools, staging, PAGE, EXTRA_PAGE, HAS_EXTRA, TILE, WIDE)
    async_copy.wait_group(0)


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
    q_full, kv_full, kv_empty, p_full, done, HAS_SINK: gl.constexpr, SPLIT: gl.constexpr,
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
    for i in range(n):
        stage = i % STAGES
        mbarrier.wait(kv_full.index(stage), i // STAGES & 1)
        fence_async_shared()
        s = warpgroup_mma(q_low, k_low.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(q_high, k_high.index(stage).permute((1, 0)), s, is_async=True)
        p, alpha, m, l = _softmax(
            warpgroup_mma_wait(0, [s]), m, l, scale2, bias.index(stage), p_shared.index(stage),
            alpha_shared.index(stage), p_full.index(stage),
        )  # fmt: skip
        acc = acc * gl.convert_layout(alpha, ACC_ROW, assert_trivial=True)[:, None]
        p = gl.convert_layout(p, P, assert_trivial=True)
        acc = warpgroup_mma_wait(0, [warpgroup_mma(p, k_low.index(stage), acc, is_async=True)])
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
    q_full, kv_full, kv_empty, p_full, done, SPLIT: gl.constexpr,
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
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: one query row, 64 heads, one share of the row's selected positions; grid as `split_k_kernel`'s.

    STAGES: bf16 tiles in shared memory, beside twice as many of bytes. PDL: as `split_k_kernel`'s.
    """
    if PDL:
        gdc_launch_dependents()
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
    AHEAD: gl.constexpr = 2 * STAGES
    WORD: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 2, [1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [4 * AHEAD, BLOCK_N], FLAT)
    # one allocation each: the compiler would order the copies into one by barriers
    g0 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    g1 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    g2 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    g3 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    g4 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    g5 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    g6 = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 16], WORD)
    rope = gl.allocate_shared_memory(gl.int32, [AHEAD, BLOCK_N, 32], ROPE)
    scales = gl.allocate_shared_memory(gl.int64, [AHEAD, BLOCK_N], FLAT)
    staging = (ring, (g0, g1, g2, g3, g4, g5, g6), rope, scales)
    gl.warp_specialize(
        [
            (_produce, (
                n, lo, hi, cache, select, pools, staging, k_low, k_high, bias, kv_full, kv_empty,
                PAGE, EXTRA_PAGE, HAS_EXTRA,
            )),
            (_scores, (
                n, scale2, heads, result, q_low, q_high, k_low, k_high, bias, p_shared, alpha_shared,
                q_full, kv_full, kv_empty, p_full, done, HAS_SINK, SPLIT,
            )),
            (_values, (
                n, q, q_stride_h, h_first, H, result[0], result[1], q_low, q_high, k_high, p_shared, alpha_shared,
                q_full, kv_full, kv_empty, p_full, done, SPLIT,
            )),
        ],
        [4, 4],
        REGISTERS,
    )  # fmt: skip
