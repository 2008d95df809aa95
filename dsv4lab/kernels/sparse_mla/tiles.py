"""Triton kernels of sparse MLA decode: the tensor-core kernel, the combine of its splits, the per-head SIMT baseline.

All of them read the DSv4 cache through `load_tile`: BLOCK_N selected tokens are gathered and dequantised to a
[BLOCK_N, 512] tile, held as two halves [BLOCK_N, 256]. Three things make that cheap, each worth a factor:

- One pointer per view of the same page (uint8, int64, bfloat16), so that every load keeps its width: 16 bytes a lane.
- A token's seven scale bytes and its pad byte are one aligned int64, read once a token; the pad is never used.
- e4m3 is widened by moving bits (three instructions a pair), not by cvt: the hardware path to bf16 goes through a
  quarter-rate conversion unit. The exponent is not rebiased; the group scale, a power of two, carries the 2**120.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
HALF = tl.constexpr(256)


@triton.jit
def _decode_e4m3(x, COMPUTE: tl.constexpr):
    """uint8 e4m3 bit patterns -> value * 2**-120, in COMPUTE; a byte lands in the exponent and mantissa as it is."""
    if COMPUTE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            prmt.b32 t, $2, 0, 0x9180; shl.b32 t, t, 4; and.b32 $0, t, 0x87F087F0;
            prmt.b32 t, $2, 0, 0xB3A2; shl.b32 t, t, 4; and.b32 $1, t, 0x87F087F0; }""",
            "=r,=r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        bits = x.to(tl.int32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def _group_scale(scales, g: tl.constexpr, COMPUTE: tl.constexpr):
    """Scale byte g of a packed int64 -> 2**(byte - 127 + 120) in COMPUTE, saturating at a byte of 134."""
    exponent = tl.minimum(((scales >> (8 * g)) & 0xFF).to(tl.int32) + 120, 254)
    if COMPUTE == tl.bfloat16:
        return (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_group(values, scales, g: tl.constexpr, mask, COMPUTE: tl.constexpr):
    x = tl.load(values + 64 * g, mask=mask, other=0)
    return _decode_e4m3(x, COMPUTE) * _group_scale(scales, g, COMPUTE)[:, None]


@triton.jit
def _concat(a, b):
    """[N, W], [N, W] -> [N, 2W]; registers are relabelled, nothing moves."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _pin(x, COMPUTE: tl.constexpr):
    """Keep Triton from choosing the dot operand's layout by looking through to the 8-bit loads.

    It would move the bytes, not the bf16 values, through shared memory, and lose ldmatrix: 4x the shared loads.
    """
    if COMPUTE == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def load_tile(cache, page_stride, slot, valid, PAGE: tl.constexpr, COMPUTE: tl.constexpr):
    """Gather BLOCK_N tokens of one cache, dequantised: dims 0..255 and 256..511 (rope last), [BLOCK_N, 256] each.

    cache: uint8 pointer to page 0; page_stride: int64 bytes. Rows that are not `valid` are never read; they are 0.
    """
    values64 = cache.to(tl.pointer_type(tl.int64))
    values16 = cache.to(tl.pointer_type(tl.bfloat16))
    slot = tl.where(valid, slot, 0)
    page = (slot // PAGE).to(tl.int64) * page_stride
    offset = slot % PAGE
    token = tl.multiple_of(page + offset * 576, 16)
    scales = tl.load(values64 + ((page >> 3) + (PAGE * 72) + offset), mask=valid, other=0)
    d = tl.arange(0, 64)
    x = cache + token[:, None] + d[None, :]
    mask = valid[:, None]
    g0 = _load_group(x, scales, 0, mask, COMPUTE)
    g1 = _load_group(x, scales, 1, mask, COMPUTE)
    g2 = _load_group(x, scales, 2, mask, COMPUTE)
    g3 = _load_group(x, scales, 3, mask, COMPUTE)
    g4 = _load_group(x, scales, 4, mask, COMPUTE)
    g5 = _load_group(x, scales, 5, mask, COMPUTE)
    g6 = _load_group(x, scales, 6, mask, COMPUTE)
    rope = tl.load(values16 + ((token >> 1) + 224)[:, None] + d[None, :], mask=mask, other=0.0).to(COMPUTE)
    low = _concat(_concat(g0, g1), _concat(g2, g3))
    high = _concat(_concat(g4, g5), _concat(g6, rope))
    return _pin(low, COMPUTE), _pin(high, COMPUTE)


@triton.jit
def _sink_weight(lse2, sink):
    """sigmoid(lse - sink), the share the sink leaves to the keys. lse2 in log2 units, sink in nats, infinite or not."""
    x = lse2 - sink * LOG2E
    e = tl.exp2(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def _attend(
    cache, page_stride, num_slots, indices, lo, hi,
    q_low, q_high, scale2, m, l, acc_low, acc_high,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TRANSPOSE_SCORES: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Online softmax over positions lo..hi of one cache. m, l: [BLOCK_H] fp32; acc_*: [BLOCK_H, 256] fp32."""
    n = tl.arange(0, BLOCK_N)
    slot = tl.load(indices + lo + n, mask=lo + n < hi, other=-1)
    for t in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        # read one tile ahead: otherwise each tile waits for two dependent trips to memory
        next_slot = tl.load(indices + t + BLOCK_N + n, mask=t + BLOCK_N + n < hi, other=-1)
        valid = slot.to(tl.uint32, bitcast=True) < num_slots  # rejects -1 and slots beyond the pool alike
        k_low, k_high = load_tile(cache, page_stride, slot, valid, PAGE, COMPUTE)
        if TRANSPOSE_SCORES:
            s = tl.dot(k_low, tl.trans(q_low))
            s = tl.dot(k_high, tl.trans(q_high), s)
            s = tl.trans(tl.where(valid[:, None], s * scale2, float("-inf")))
        else:
            s = tl.dot(q_low, tl.trans(k_low))
            s = tl.dot(q_high, tl.trans(k_high), s)
            s = tl.where(valid[None, :], s * scale2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # no valid key yet: -inf - -inf would be NaN
        alpha = tl.exp2(m - base)
        p = tl.exp2(s - base[:, None])
        l = l * alpha + tl.sum(p, 1)
        p = p.to(COMPUTE)
        acc_low = tl.dot(p, k_low, acc_low * alpha[:, None])
        acc_high = tl.dot(p, k_high, acc_high * alpha[:, None])
        m = m_new
        slot = next_slot
    return m, l, acc_low, acc_high


# these vary with the batch, the prefill or the pool: a variant of its own for each would compile in mid-service
VARYING = ["extra_width", "num_slots", "extra_num_slots"]


@triton.jit(do_not_specialize=["NUM_SPLITS", *VARYING])
def split_k_kernel(
    q, q_stride_b, q_stride_s, q_stride_h,
    cache, page_stride, num_slots, indices, idx_stride_b, idx_stride_s, lengths, len_stride_b, len_stride_s,
    extra_cache, extra_page_stride, extra_num_slots, extra_indices, extra_idx_stride_b, extra_idx_stride_s,
    extra_lengths, extra_len_stride_b, extra_len_stride_s,
    attn_sink, out, out_stride_b, out_stride_s, out_stride_h, lse, partial_out, partial_lse,
    scale2, S_Q, H, NUM_SPLITS, extra_width,
    WIDTH: tl.constexpr, HAS_EXTRA: tl.constexpr, PAGE: tl.constexpr, EXTRA_PAGE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_EXTRA_LENGTHS: tl.constexpr, HAS_SINK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TRANSPOSE_SCORES: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one query row, BLOCK_H heads, one share of the row's selected positions.

    Grid (head blocks * NUM_SPLITS * rows), head blocks fastest so that they meet the same KV in L2. With SPLIT the
    normalised partial result and its log2-sum-exp2 go to the workspace; without, the finished row goes to `out`.
    PDL: the combine may be launched while this runs.
    """
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    head_blocks = tl.cdiv(H, BLOCK_H)
    hb = pid % head_blocks
    split = (pid // head_blocks) % NUM_SPLITS
    row = pid // (head_blocks * NUM_SPLITS)
    b = (row // S_Q).to(tl.int64)
    s = (row % S_Q).to(tl.int64)
    h = hb * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < H

    n_main = WIDTH
    if HAS_LENGTHS:
        n_main = tl.minimum(tl.maximum(tl.load(lengths + b * len_stride_b + s * len_stride_s), 0), WIDTH)
    n_extra = extra_width
    if HAS_EXTRA_LENGTHS:
        n_extra = tl.load(extra_lengths + b * extra_len_stride_b + s * extra_len_stride_s)
        n_extra = tl.minimum(tl.maximum(n_extra, 0), extra_width)
    main_tiles = tl.cdiv(n_main, BLOCK_N)
    tiles = main_tiles + tl.cdiv(n_extra, BLOCK_N)
    share = tl.cdiv(tiles, NUM_SPLITS)
    lo = split * share
    hi = tl.minimum(lo + share, tiles)
    slot_row = (row.to(tl.int64) * NUM_SPLITS + split) * H + h
    if SPLIT:
        if lo >= hi:
            tl.store(partial_lse + slot_row, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=live)
            return

    d = tl.arange(0, HALF)
    q_row = q + b * q_stride_b + s * q_stride_s + (h * q_stride_h)[:, None] + d[None, :]
    q_low = tl.load(q_row, mask=live[:, None], other=0.0).to(COMPUTE)
    q_high = tl.load(q_row + HALF, mask=live[:, None], other=0.0).to(COMPUTE)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)
    acc_low = tl.zeros([BLOCK_H, HALF], tl.float32)
    acc_high = tl.zeros([BLOCK_H, HALF], tl.float32)
    # two plain loops: selecting between the caches per tile costs the loads their width
    m, l, acc_low, acc_high = _attend(
        cache, page_stride, num_slots, indices + b * idx_stride_b + s * idx_stride_s,
        lo * BLOCK_N, tl.minimum(hi * BLOCK_N, n_main), q_low, q_high, scale2, m, l, acc_low, acc_high,
        PAGE, BLOCK_N, STAGES, TRANSPOSE_SCORES, COMPUTE,
    )  # fmt: skip
    if HAS_EXTRA:
        m, l, acc_low, acc_high = _attend(
            extra_cache, extra_page_stride, extra_num_slots,
            extra_indices + b * extra_idx_stride_b + s * extra_idx_stride_s,
            tl.maximum(lo - main_tiles, 0) * BLOCK_N, tl.minimum((hi - main_tiles) * BLOCK_N, n_extra),
            q_low, q_high, scale2, m, l, acc_low, acc_high,
            EXTRA_PAGE, BLOCK_N, STAGES, TRANSPOSE_SCORES, COMPUTE,
        )  # fmt: skip

    lse2 = m + tl.log2(l)
    norm = tl.where(l > 0, 1.0 / tl.where(l > 0, l, 1.0), 0.0)
    if SPLIT:
        o_row = partial_out + slot_row[:, None] * 512 + d[None, :]
        tl.store(partial_lse + slot_row, lse2, mask=live)
    else:
        if HAS_SINK:
            norm = tl.where(l > 0, norm * _sink_weight(lse2, tl.load(attn_sink + h, mask=live, other=0.0)), 0.0)
        o_row = out + b * out_stride_b + s * out_stride_s + (h * out_stride_h)[:, None] + d[None, :]
        tl.store(lse + (b * H + h) * S_Q + s, tl.where(l > 0, lse2 / LOG2E, float("inf")), mask=live)
    tl.store(o_row, (acc_low * norm[:, None]).to(o_row.dtype.element_ty), mask=live[:, None])
    tl.store(o_row + HALF, (acc_high * norm[:, None]).to(o_row.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["NUM_SPLITS"])
def combine_kernel(
    partial_out, partial_lse, attn_sink, out, out_stride_b, out_stride_s, out_stride_h, lse,
    S_Q, H, NUM_SPLITS, SPLITS_POW2: tl.constexpr, HAS_SINK: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partial rows of one (row, head): out = sum_i w_i o_i / sum_i w_i, w_i = 2**(lse_i - max), and the sink.

    Grid (rows * H, 512 / BLOCK_D). The order is fixed, so the result is bitwise repeatable. Empty splits are not read.
    PDL: launched while they are still worked on, it waits for all of them itself.
    """
    row_head = tl.program_id(0)
    h = row_head % H
    row = (row_head // H).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i = tl.arange(0, SPLITS_POW2)
    slot = (row * NUM_SPLITS + i) * H + h
    if PDL:
        gdc_wait()
    lse2 = tl.load(partial_lse + slot, mask=i < NUM_SPLITS, other=float("-inf"))
    m = tl.max(lse2, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    w = tl.exp2(lse2 - base)
    o = tl.load(partial_out + slot[:, None] * 512 + d[None, :], mask=(w > 0)[:, None], other=0.0)
    total = tl.sum(w, 0)
    total_lse2 = base + tl.log2(total)
    norm = 1.0 / tl.where(total > 0, total, 1.0)
    if HAS_SINK:
        norm = tl.where(total > 0, norm * _sink_weight(total_lse2, tl.load(attn_sink + h)), 0.0)
    b = row // S_Q
    s = row % S_Q
    o_row = out + b * out_stride_b + s * out_stride_s + h * out_stride_h + d
    tl.store(o_row, (tl.sum(o * w[:, None], 0) * norm).to(o_row.dtype.element_ty))
    tl.store(lse + (b * H + h) * S_Q + s, tl.where(total > 0, total_lse2 / LOG2E, float("inf")))


@triton.jit
def _attend_one_head(
    cache, page_stride, num_slots, indices, n, q_low, q_high, scale2, m, l, acc_low, acc_high,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK_N)
    for t in tl.range(0, n, BLOCK_N):
        slot = tl.load(indices + t + offsets, mask=t + offsets < n, other=-1)
        valid = slot.to(tl.uint32, bitcast=True) < num_slots
        k_low, k_high = load_tile(cache, page_stride, slot, valid, PAGE, tl.float32)
        s = (tl.sum(k_low * q_low[None, :], 1) + tl.sum(k_high * q_high[None, :], 1)) * scale2
        s = tl.where(valid, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)
        p = tl.exp2(s - base)
        l = l * alpha + tl.sum(p, 0)
        acc_low = acc_low * alpha + tl.sum(p[:, None] * k_low, 0)
        acc_high = acc_high * alpha + tl.sum(p[:, None] * k_high, 0)
        m = m_new
    return m, l, acc_low, acc_high


@triton.jit(do_not_specialize=VARYING)
def simt_kernel(
    q, q_stride_b, q_stride_s, q_stride_h,
    cache, page_stride, num_slots, indices, idx_stride_b, idx_stride_s, lengths, len_stride_b, len_stride_s,
    extra_cache, extra_page_stride, extra_num_slots, extra_indices, extra_idx_stride_b, extra_idx_stride_s,
    extra_lengths, extra_len_stride_b, extra_len_stride_s,
    attn_sink, out, out_stride_b, out_stride_s, out_stride_h, lse,
    scale2, S_Q, H, extra_width,
    WIDTH: tl.constexpr, HAS_EXTRA: tl.constexpr, PAGE: tl.constexpr, EXTRA_PAGE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, HAS_EXTRA_LENGTHS: tl.constexpr, HAS_SINK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one query row and one head, fp32 on the SIMT lanes. Every head reads all of the row's KV again."""
    pid = tl.program_id(0)
    h = pid % H
    row = pid // H
    b = (row // S_Q).to(tl.int64)
    s = (row % S_Q).to(tl.int64)
    n_main = WIDTH
    if HAS_LENGTHS:
        n_main = tl.minimum(tl.maximum(tl.load(lengths + b * len_stride_b + s * len_stride_s), 0), WIDTH)
    d = tl.arange(0, HALF)
    q_row = q + b * q_stride_b + s * q_stride_s + h * q_stride_h + d
    q_low = tl.load(q_row).to(tl.float32)
    q_high = tl.load(q_row + HALF).to(tl.float32)
    m = float("-inf")
    l = 0.0
    acc_low = tl.zeros([HALF], tl.float32)
    acc_high = tl.zeros([HALF], tl.float32)
    m, l, acc_low, acc_high = _attend_one_head(
        cache, page_stride, num_slots, indices + b * idx_stride_b + s * idx_stride_s, n_main,
        q_low, q_high, scale2, m, l, acc_low, acc_high, PAGE, BLOCK_N,
    )  # fmt: skip
    if HAS_EXTRA:
        n_extra = extra_width
        if HAS_EXTRA_LENGTHS:
            n_extra = tl.load(extra_lengths + b * extra_len_stride_b + s * extra_len_stride_s)
            n_extra = tl.minimum(tl.maximum(n_extra, 0), extra_width)
        m, l, acc_low, acc_high = _attend_one_head(
            extra_cache, extra_page_stride, extra_num_slots,
            extra_indices + b * extra_idx_stride_b + s * extra_idx_stride_s,
            n_extra, q_low, q_high, scale2, m, l, acc_low, acc_high, EXTRA_PAGE, BLOCK_N,
        )  # fmt: skip
    lse2 = m + tl.log2(l)
    norm = 1.0 / tl.where(l > 0, l, 1.0)
    if HAS_SINK:
        norm = tl.where(l > 0, norm * _sink_weight(lse2, tl.load(attn_sink + h)), 0.0)
    o_row = out + b * out_stride_b + s * out_stride_s + h * out_stride_h + d
    tl.store(o_row, (acc_low * norm).to(tl.bfloat16))
    tl.store(o_row + HALF, (acc_high * norm).to(tl.bfloat16))
    tl.store(lse + (b * H + h) * S_Q + s, tl.where(l > 0, lse2 / LOG2E, float("inf")))
