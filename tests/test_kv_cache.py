"""Both cache layouts, byte for byte against a plain writer of the formulas, in pools as engines hand them over."""

import math
import struct

import pytest
import torch

from dsv4lab import kv_cache as kv
from dsv4lab.numerics import bitwise_equal, poison_

PAGES = 3
POOLS = ["packed", "strided", "sliced"]
FINITE_FP8 = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)


def decode_e4m3(byte):
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if byte & 0x80 else value


def encode_e4m3(value):
    """The nearest finite e4m3, ties to the even mantissa."""
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    return sign | min(range(0x7F), key=lambda b: (abs(decode_e4m3(b) - abs(value)), b & 1))


def fp32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def plain_main_token(x):
    """The 576 data bytes and the 7 scale bytes of one token, from the formulas of the layout, in plain Python."""
    data, scales = bytearray(), []
    for start in range(0, 448, 64):
        group = x[start : start + 64]
        raw = fp32(max(fp32(1e-4), *map(abs, group)) / 448)
        exponent = math.ceil(math.log2(raw))
        assert 2.0 ** (exponent - 1) < raw <= 2.0**exponent
        scales.append(exponent + 127)
        data += bytes(encode_e4m3(v / 2.0**exponent) for v in group)
    return data + b"".join(struct.pack("<f", v)[2:] for v in x[448:]), scales  # bf16: the upper half of fp32


def pool_of(page_bytes, kind):
    """A poisoned pool [PAGES, ...] and where in each of its rows the page starts."""
    extra, start = {"packed": (0, 0), "strided": (1000, 0), "sliced": (1000, 256)}[kind]
    return torch.full((PAGES, page_bytes + extra), 0xFF, dtype=torch.uint8), start


def keys(n, width, seed=0):
    """n vectors of bf16 values of sizes from 2^-20 to 2^8, the first one zero: every branch of the scale is met."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator) * torch.exp2(torch.randint(-20, 9, (n, 1), generator=generator))
    x[0] = 0
    return x.bfloat16()


def test_page_bytes_are_those_of_the_engine():
    assert [kv.main_page_bytes(p) for p in (256, 64, 2)] == [149760, 37440, 1728]
    assert [kv.main_page_bytes(p) for p in (1, 53)] == [1152, 31104]
    assert [kv.index_page_bytes(p) for p in (64, 1)] == [8448, 132]


@pytest.mark.parametrize(
    ("allocate", "row", "page_bytes"), [(kv.allocate_main, 584, 37440), (kv.allocate_index, 132, 8448)]
)
def test_allocate_gives_the_engines_view(allocate, row, page_bytes):
    cache = allocate(4, 64, "cpu")
    assert (cache.shape, cache.stride(), cache.dtype) == ((4, 64, 1, row), (page_bytes, row, row, 1), torch.uint8)
    assert cache.untyped_storage().nbytes() == 4 * page_bytes
    assert allocate(4, 64, "cpu", pool_stride=1002240).stride() == (1002240, row, row, 1)
    assert not cache.any()


def test_main_bytes_match_the_plain_writer():
    x = keys(8, 512)
    cache = kv.main_view(torch.full((1, kv.main_page_bytes(8)), 0xFF, dtype=torch.uint8), 8)
    kv.write_main(cache, torch.arange(8), x)
    page = bytes(cache.untyped_storage())
    for t, row in enumerate(x.tolist()):
        data, scales = plain_main_token(row)
        assert page[t * 576 : (t + 1) * 576] == data
        assert list(page[8 * 576 + t * 8 : 8 * 576 + t * 8 + 8]) == [*scales, 0xFF]  # the pad byte stays


def test_index_bytes_match_the_plain_writer():
    x = keys(64, 128)
    cache = kv.allocate_index(1, 64, "cpu")
    kv.write_index(cache, torch.arange(64), x)
    page = bytes(cache.untyped_storage())
    for t, row in enumerate(x.tolist()):
        scale = fp32(max(fp32(1e-4), *map(abs, row)) / 448)
        inverse = fp32(1 / scale)
        assert page[t * 128 : (t + 1) * 128] == bytes(encode_e4m3(fp32(v * inverse)) for v in row)
        assert page[64 * 128 + t * 4 : 64 * 128 + t * 4 + 4] == struct.pack("<f", scale)


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("page_size", [1, 2, 53, 64, 256])
def test_main_writes_its_slots_and_nothing_else(page_size, kind):
    pool, start = pool_of(kv.main_page_bytes(page_size), kind)
    expected = pool.clone()
    cache = kv.main_view(pool[:, start : start + kv.main_page_bytes(page_size)], page_size)
    slots = torch.randperm(PAGES * page_size, generator=torch.Generator().manual_seed(1))[: max(2, page_size)]
    x = keys(len(slots), 512)
    kv.write_main(cache, slots.int(), x)

    nope, rope, scale = kv.quantise_main(x)
    for t, slot in enumerate(slots.tolist()):
        page, offset = expected[slot // page_size, start:], slot % page_size
        row, footer = page[offset * 576 :], page[page_size * 576 + offset * 8 :]
        row[:448], row[448:576], footer[:7] = nope[t].view(torch.uint8), rope[t].view(torch.uint8), scale[t]
    assert torch.equal(pool, expected)

    for got, wanted in zip(kv.read_main(cache, slots), (nope, rope, scale), strict=True):
        assert bitwise_equal(got, wanted)
    packed = kv.allocate_main(PAGES, page_size, "cpu")
    kv.write_main(packed, slots, x)
    assert bitwise_equal(kv.dequantise_main(cache, slots), kv.dequantise_main(packed, slots))


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("page_size", [1, 53, 64])
def test_index_writes_its_slots_and_nothing_else(page_size, kind):
    pool, start = pool_of(kv.index_page_bytes(page_size), kind)
    expected = pool.clone()
    cache = kv.index_view(pool[:, start : start + kv.index_page_bytes(page_size)], page_size)
    slots = torch.randperm(PAGES * page_size, generator=torch.Generator().manual_seed(1))[: max(2, page_size)]
    x = keys(len(slots), 128)
    kv.write_index(cache, slots.int(), x)

    values, scale = kv.quantise_index(x)
    for t, slot in enumerate(slots.tolist()):
        page, offset = expected[slot // page_size, start:], slot % page_size
        page[offset * 128 :][:128] = values[t].view(torch.uint8)
        page[page_size * 128 + offset * 4 :][:4] = scale[t : t + 1].view(torch.uint8)
    assert torch.equal(pool, expected)

    got, got_scale = kv.read_index(cache, slots)
    assert bitwise_equal(got, values) and bitwise_equal(got_scale, scale)


def test_every_stored_main_value_survives_a_round_trip():
    """All 254 finite FP8 values at every scale a writer can leave: the bytes come back, signed zeros included."""
    scales = torch.arange(105, 141, dtype=torch.uint8).repeat_interleave(7)[:, None].expand(-1, 7)
    nope = FINITE_FP8[torch.arange(len(scales) * 448) % 254].reshape(-1, 7, 64).clone()
    nope[..., 0] = 0x7E  # 448 somewhere in the group: the scale is the smallest that holds it
    rope = keys(len(scales), 64)
    cache = kv.allocate_main(4, 64, "cpu")
    slots = torch.arange(len(scales))
    for t in slots.tolist():
        page, offset = divmod(t, 64)
        raw = cache.as_strided((37440,), (1,), page * 37440)
        raw[offset * 576 :][:448] = nope[t].flatten()
        raw[offset * 576 + 448 :][:128] = rope[t].view(torch.uint8)
        raw[64 * 576 + offset * 8 :][:7] = scales[t]
    kv.check_main(cache, slots)

    values = kv.dequantise_main(cache, slots)
    for dtype in (torch.float32, torch.bfloat16):  # exact, so that an fp32 or a bf16 copy says the same
        assert torch.equal(kv.dequantise_main(cache, slots, dtype).double(), values)
    for x in (values, values.float(), values.bfloat16()):
        again, again_rope, again_scales = kv.quantise_main(x)
        assert torch.equal(again.view(torch.uint8), nope.flatten(1))
        assert bitwise_equal(again_rope, rope)
        assert torch.equal(again_scales, scales)


def test_a_group_that_ends_at_224_keeps_its_values_in_other_bytes():
    x = torch.zeros(1, 512)
    x[0, :64] = torch.linspace(-230, 230, 64)  # 230 rounds down to 224
    cache = kv.allocate_main(1, 2, "cpu")
    slot = torch.tensor([0])
    kv.write_main(cache, slot, x)
    first, scale = kv.dequantise_main(cache, slot), kv.read_main(cache, slot)[2]
    kv.write_main(cache, slot, first)
    assert bitwise_equal(kv.dequantise_main(cache, slot), first)
    assert kv.read_main(cache, slot)[2][0, 0] == scale[0, 0] - 1


def test_every_stored_index_key_survives_a_round_trip():
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(3))  # fp32: scales of all 24 bits
    values, scale = kv.quantise_index(x)
    for dtype in (torch.float64, torch.float32):
        again, again_scale = kv.quantise_index(values.to(dtype) * scale.to(dtype)[:, None])
        assert bitwise_equal(again, values) and bitwise_equal(again_scale, scale)


def test_scales_round_up_so_that_nothing_saturates():
    x = torch.zeros(3, 512)
    x[:, 0] = torch.tensor([56.0, math.nextafter(56.0, 0), 56.0 + 2**-18])  # 56 = 448 * 2^-3
    nope, _, scale = kv.quantise_main(x)
    assert scale[:, 0].tolist() == [124, 124, 125]
    assert nope[:, 0].tolist() == [448.0, 448.0, 224.0]
    assert kv.quantise_main(torch.zeros(1, 512))[2].tolist() == [[105] * 7]  # amax 0: 2^-22, from the floor of 1e-4


def test_bf16_and_fp32_inputs_leave_the_same_bytes():
    main, index = keys(500, 512, seed=5), keys(500, 128, seed=5)
    for a, b in zip(kv.quantise_main(main), kv.quantise_main(main.float()), strict=True):
        assert bitwise_equal(a, b)
    for a, b in zip(kv.quantise_index(index), kv.quantise_index(index.float()), strict=True):
        assert bitwise_equal(a, b)


def test_slots_of_any_shape_and_caches_seen_as_fp8_or_in_three_dimensions():
    cache = kv.allocate_main(2, 64, "cpu")
    slots = torch.randperm(128)[:24].view(2, 3, 4)
    x = keys(24, 512).view(2, 3, 4, 512)
    kv.write_main(cache, slots, x)
    values = kv.dequantise_main(cache, slots)
    assert values.shape == (2, 3, 4, 512)
    assert torch.equal(kv.dequantise_main(cache, slots.flatten()), values.view(24, 512))
    assert torch.equal(kv.dequantise_main(cache.view(torch.float8_e4m3fn), slots), values)

    pool = torch.zeros(4, 1002240, dtype=torch.uint8)
    wide, packed = pool.as_strided((4, 64, 132), (1002240, 132, 1)), kv.allocate_index(4, 64, "cpu")
    slots = torch.arange(256)
    for cache in (wide, packed):
        kv.write_index(cache, slots, keys(256, 128))
    for part, wanted in zip(kv.read_index(wide, slots), kv.read_index(packed, slots), strict=True):
        assert bitwise_equal(part, wanted)


def test_the_last_page_of_a_pool_beyond_two_gib():
    pages = 57_459  # 57,457 is the first page whose first byte an int32 cannot count
    cache = kv.main_view(torch.empty(pages, 37440, dtype=torch.uint8), 64)  # untouched memory costs nothing
    small, x = kv.allocate_main(1, 64, "cpu"), keys(64, 512)
    last = torch.arange((pages - 1) * 64, pages * 64, dtype=torch.int32)
    kv.write_main(cache, last, x)
    kv.write_main(small, torch.arange(64), x)
    assert torch.equal(kv.dequantise_main(cache, last), kv.dequantise_main(small, torch.arange(64)))
    assert cache.storage_offset() + (pages - 1) * cache.stride(0) > 2**31


def test_neighbours_full_of_nan_do_not_leak():
    cache = kv.main_view(poison_(torch.empty(1, kv.main_page_bytes(64), dtype=torch.uint8)), 64)
    kv.write_main(cache, torch.arange(13), keys(13, 512))
    kv.check_main(cache, torch.arange(13))
    with pytest.raises(ValueError, match="main cache, slot 13: nan is a scale"):
        kv.check_main(cache, torch.arange(64))


def test_random_main_fills_every_slot_reproducibly(monkeypatch):
    def make(**kwargs):
        return kv.random_main(5, 53, "cpu", torch.Generator().manual_seed(7), **kwargs)

    monkeypatch.setattr(kv, "_CHUNK", 100)  # chunks that end inside a page
    slots = torch.arange(5 * 53)
    cache = make()
    kv.check_main(cache, slots)
    values = kv.dequantise_main(cache, slots)
    assert 0.5 < values.std() < 2
    assert values.unique(dim=0).shape[0] == len(slots)
    assert len(kv.read_main(cache, slots)[2].unique()) >= 4
    assert bitwise_equal(make(), cache)
    assert torch.equal(kv.dequantise_main(make(pool_stride=40000), slots), values)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, 128], r"slots must be in 0\.\.127, got 128"),
        ([3, -1], r"slots must be in 0\.\.127, got -1"),
        ([1.0], "slots must be int32 or int64 on cpu, got torch.float32"),
    ],
)
def test_bad_slots_are_named(slots, message):
    slots = torch.tensor(slots)
    for allocate, write, read, width in (
        (kv.allocate_main, kv.write_main, kv.dequantise_main, 512),
        (kv.allocate_index, kv.write_index, kv.read_index, 128),
    ):
        cache = allocate(2, 64, "cpu")
        with pytest.raises(ValueError, match=message):
            read(cache, slots)
        with pytest.raises(ValueError, match=message):
            write(cache, slots, torch.ones(len(slots), width))


def test_bad_arguments_are_named():
    cache, index, slots = kv.allocate_main(2, 64, "cpu"), kv.allocate_index(2, 64, "cpu"), torch.arange(3)
    refused = [
        (lambda: kv.main_page_bytes(0), "page_size must be at least 1, got 0"),
        (lambda: kv.allocate_main(2, 64, "cpu", pool_stride=37376), "pool has 37376 bytes a page, .* need 37440"),
        (lambda: kv.main_view(torch.zeros(2, 37440), 64), "pool must be uint8"),
        (lambda: kv.index_view(torch.zeros(8448, dtype=torch.uint8), 64), "pool must be uint8"),
        (lambda: kv.read_main(index, slots), r"cache must be .* 584\], got torch.uint8 \(2, 64, 1, 132\)"),
        (lambda: kv.read_index(cache, slots), r"cache must be .* 132\], got torch.uint8 \(2, 64, 1, 584\)"),
        (lambda: kv.read_main(cache.bfloat16(), slots), "cache must be uint8"),
        (lambda: kv.read_main(cache[:, :, :, :1].expand(-1, -1, -1, 584)[:1].expand(2, -1, -1, -1), slots), "stride"),
        (lambda: kv.write_main(cache, slots, torch.ones(2, 512)), r"x must have shape \(3, 512\), got \(2, 512\)"),
        (lambda: kv.write_index(index, slots, torch.ones(2, 128)), r"x must have shape \(3, 128\), got \(2, 128\)"),
        (lambda: kv.quantise_main(torch.ones(3, 511)), r"x must be floating point \[..., 512\], got .* \(3, 511\)"),
        (lambda: kv.quantise_index(torch.ones(3, 128, dtype=torch.int32)), "x must be floating point"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


def interleaved(row, tokens):
    """One page [tokens, row] as a writer leaves it that keeps each token's scales right behind its values."""
    return torch.cat(tokens, -1).reshape(1, row * len(tokens[0]))


def test_main_pages_of_another_layout_are_detected():
    nope, rope, scale = kv.quantise_main(torch.randn(64, 512, generator=torch.Generator().manual_seed(0)))
    tokens = [nope.view(torch.uint8), rope.view(torch.uint8), torch.nn.functional.pad(scale, (0, 1))]
    page = torch.nn.functional.pad(interleaved(584, tokens), (0, 64))
    with pytest.raises(ValueError, match=r"main cache, slot 0: .* is a scale, outside .* another layout"):
        kv.check_main(kv.main_view(page, 64), torch.arange(64))


def test_index_pages_of_another_layout_are_detected():
    """The value of token t is t/64: each key is 448 times its scale, and the bytes of 448 make a scale of 8.5e37."""
    x = (torch.arange(64) / 64)[:, None].expand(64, 128)
    values, scale = kv.quantise_index(x)
    page = interleaved(132, [values.view(torch.uint8), scale[:, None].view(torch.uint8)])
    with pytest.raises(ValueError, match=r"index cache, slot 0: 8\.\d+e\+37 is a scale"):
        kv.check_index(kv.index_view(page, 64), torch.arange(64))


def test_index_pages_read_in_another_layout_are_detected():
    """Scales of 1, values of t/64 in token t: logits rise with t; read at 132 bytes a token, values pass for scales."""
    values = (torch.arange(64) / 64)[:, None].expand(64, 128).to(torch.float8_e4m3fn)
    page = torch.cat([values.flatten().view(torch.uint8), torch.ones(64).view(torch.uint8)])[None]
    cache, slots = kv.index_view(page, 64), torch.arange(64)
    kv.check_index(cache, slots)
    values, scale = kv.read_index(cache, slots)
    logits = values.double() @ torch.ones(128, dtype=torch.float64) * scale.double()
    assert (logits.diff() >= 0).all() and logits[-1] == 128 * values[-1, 0].double()

    wrong = page.clone()
    wrong[0, 64 * 128 :] = page.reshape(64, 132)[:, 128:].flatten()  # the scales that the wrong reader sees
    with pytest.raises(ValueError, match=r"index cache, slot 1: 2\.8\d+e-29 is a scale"):
        kv.check_index(kv.index_view(wrong, 64), slots[1:])


@pytest.mark.parametrize(
    ("at", "byte", "message"),
    [
        (5 * 576, 0x7F, "slot 5: nan is a value, not finite"),
        (5 * 576 + 449, 0x7F, "slot 5: .* is a value, not finite"),
        (64 * 576 + 5 * 8 + 6, 255, "slot 5: nan is a scale"),
        (64 * 576 + 5 * 8 + 6, 0, "slot 5: 5.877e-39 is a scale, outside 2.2e-07 to 10000"),
    ],
)
def test_one_broken_byte_of_a_main_page_is_named(at, byte, message):
    pool = torch.zeros(1, 37440, dtype=torch.uint8)
    cache, x = kv.main_view(pool, 64), torch.ones(64, 512)
    x[:, 448:] = -1.9921875  # 0xBFFF, with another high byte a NaN
    kv.write_main(cache, torch.arange(64), x)
    kv.check_main(cache, torch.arange(64))
    pool[0, at] = byte
    with pytest.raises(ValueError, match=message):
        kv.check_main(cache, torch.arange(64))


def test_index_slots_never_written_are_detected():
    cache = kv.allocate_index(1, 64, "cpu")
    kv.write_index(cache, torch.arange(5), keys(5, 128))
    kv.check_index(cache, torch.arange(5))
    with pytest.raises(ValueError, match="index cache, slot 5: 0 is a scale"):
        kv.check_index(cache, torch.arange(6))


@pytest.mark.gpu
def test_a_gpu_leaves_the_same_bytes():
    slots = torch.randperm(PAGES * 64)[:100].int()
    main, index = kv.allocate_main(PAGES, 64, "cpu"), kv.allocate_index(PAGES, 64, "cpu")
    main_gpu, index_gpu = kv.allocate_main(PAGES, 64, "cuda"), kv.allocate_index(PAGES, 64, "cuda")
    kv.write_main(main, slots, keys(100, 512))
    kv.write_index(index, slots, keys(100, 128))
    kv.write_main(main_gpu, slots.cuda(), keys(100, 512).cuda())
    kv.write_index(index_gpu, slots.cuda(), keys(100, 128).cuda())
    assert bytes(main.untyped_storage()) == bytes(main_gpu.untyped_storage().cpu())
    assert bytes(index.untyped_storage()) == bytes(index_gpu.untyped_storage().cpu())
    assert bitwise_equal(kv.dequantise_main(main_gpu, slots.cuda()).cpu(), kv.dequantise_main(main, slots))
    cache = kv.random_main(1024, 256, "cuda", torch.Generator("cuda").manual_seed(0))
    kv.check_main(cache, torch.arange(0, 1024 * 256, 17, device="cuda"))


def test_a_request_holds_whole_pages_of_every_kind():
    one = kv.request_bytes(1)
    assert one == {"c4 KV": 21 * 37440, "index keys": 21 * 64 * 132, "c128 KV": 20 * 1728, "window KV": 43 * 149760}
    assert kv.request_bytes(256) == one
    more = kv.request_bytes(257)
    assert more["c4 KV"] == 2 * one["c4 KV"] and more["window KV"] == 2 * one["window KV"]
    assert kv.request_bytes(256 + 128)["window KV"] == one["window KV"]  # the page before holds no window token
    million = kv.request_bytes(1_048_576)
    assert million["index keys"] == 4096 * one["index keys"] and million["window KV"] == one["window KV"]
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        kv.request_bytes(0)
