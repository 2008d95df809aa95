"""Triton kernel of one token's KV row: normalised, rotated, quantised, stored."""

import triton
import triton.language as tl


@triton.jit
def _e4m3(x):
    """fp32 of at most 448 in magnitude -> the bits of the nearest e4m3 value, ties to even, as uint8.

    In integers, so that every architecture and the interpreter round alike.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0  # whose last bit is 2**-9, that of the subnormals
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(
    do_not_specialize=["stride8", "position_count", "page_stride", "num_slots", "eps"],
    do_not_specialize_on_alignment=["positions", "slots"],
)
def norm_rope_kernel(
    kv, stride8, weight, freqs, positions, position_count, slots, cache, page_stride, num_slots, eps,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (rows): kv bf16 [rows, 512], rows 8 * stride8 apart; weight bf16 or fp32 [512]; freqs fp32 [positions, 64].

    cache: uint8 pointer to page 0 of the main cache; pages lie page_stride bytes apart, a multiple of 16.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    group = tl.arange(0, 8)
    d = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    pair = 448 + tl.arange(0, 32)[:, None] * 2 + tl.arange(0, 2)[None, :]
    row_of = kv + row.to(tl.int64) * (stride8 * 8)
    nope = tl.load(row_of + d, mask=d < 448, other=0.0).to(tl.float32)
    rope = tl.load(row_of + pair).to(tl.float32)
    nope_weight = tl.load(weight + d, mask=d < 448, other=0.0).to(tl.float32)
    rope_weight = tl.load(weight + pair).to(tl.float32)
    position = tl.minimum(tl.maximum(position, 0), position_count - 1)
    turn = tl.load(freqs + position * 64 + pair - 448)

    squares = tl.sum(tl.sum(nope * nope, 1), 0) + tl.sum(tl.sum(rope * rope, 1), 0)
    r = tl.rsqrt(squares / 512 + eps)
    nope *= r * nope_weight
    real, imaginary = tl.split(rope * r * rope_weight)
    cos, sin = tl.split(turn)
    rotated = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)

    amax = tl.maximum(tl.max(tl.abs(nope), 1), 1e-4)
    bits = tl.div_rn(amax, tl.full([8], 448.0, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # rounded up: nothing saturates
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)

    live = (slot >= 0) & (slot < num_slots)
    page = cache + slot // PAGE * (page_stride // 16 * 16)
    offset = slot % PAGE
    token = tl.multiple_of(page + offset * 576, 16)
    tl.store(token + d, _e4m3(nope * inverse[:, None]), mask=live & (d < 448))
    tl.store(token.to(tl.pointer_type(tl.bfloat16)) + pair - 224, rotated.to(tl.bfloat16), mask=live)
    tl.store(page + PAGE * 576 + offset * 8 + group, exponent.to(tl.uint8), mask=live & (group < 7))
