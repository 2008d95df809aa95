"""A token's KV row in one launch: bytes as the cache's own writer makes them, pages, positions, bad input."""

from dataclasses import replace

import pytest
import torch

from dsv4lab import hardware, kv_cache, numerics
from dsv4lab.kernels import norm_rope as rope
from dsv4lab.kernels.launch import frozen
from dsv4lab.kernels.norm_rope.tiles import _e4m3, norm_rope_kernel, tl, triton

DEVICE = "cpu" if hardware.probe() is None else "cuda"


def one(B=5, seed=0, page=256, **changes):
    (call,) = rope.make_inputs(rope.Case("test", B), device=DEVICE, seed=seed, positions=1000)
    pages = -(-(int(call.slots.max()) + 1) // page)
    return replace(call, cache=kv_cache.allocate_main(pages, page, DEVICE), **changes)


def written(call, **options):
    """(values, rope, scales) of a call, each as stored."""
    numerics.poison_(call.cache)
    rope.norm_rope(**vars(call), **options)
    return kv_cache.read_main(call.cache, call.slots)


def expected(call, eps=rope.EPS):
    """What the cache's own writer makes of the same row in fp32."""
    turns = torch.view_as_real(call.freqs_cis)
    cache = torch.zeros_like(call.cache)
    kv_cache.write_main(cache, call.slots, rope.row(call, turns, torch.float32, torch.float32, eps))
    return kv_cache.read_main(cache, call.slots)


def assert_right(found, right):
    """Scales equal, e4m3 values but for a few on the edge between two, bf16 within a spacing."""
    assert torch.equal(found[2], right[2])
    assert (found[0].view(torch.uint8) != right[0].view(torch.uint8)).double().mean() < 2e-3
    assert torch.allclose(found[0].float(), right[0].float(), rtol=2**-3, atol=2**-9)
    assert torch.allclose(found[1].float(), right[1].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("page", [256, 64, 2])
@pytest.mark.parametrize("B", [1, 9])
def test_the_bytes_are_those_of_the_caches_own_writer(B, page):
    call = one(B, page=page)
    assert_right(written(call), expected(call))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 3e4])
def test_rows_of_any_size_are_normalised(scale):
    call = one()
    call.kv *= scale
    call.weight = (call.weight.float() * 40).contiguous()
    assert_right(written(call), expected(call))


@triton.jit
def encode_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, _e4m3(tl.load(x + i)))


def test_every_e4m3_value_and_every_tie_between_two_is_rounded_to_even():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, between, between * (1 + 2**-20), between * (1 - 2**-20)])
    x = torch.nn.functional.pad(torch.cat([values, -values]), (0, 2048 - 2 * len(values))).to(DEVICE)
    out = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
    encode_kernel[(1,)](x, out, N=2048)
    assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_nothing_else_is_written():
    call = one(3, page=64)
    flat = rope.flat_bytes(call.cache)
    before = flat.random_(0, 256).clone()
    rope.norm_rope(**vars(call))
    changed = (flat != before).nonzero().flatten().tolist()
    allowed = set()
    for slot in call.slots.tolist():
        base = slot // 64 * call.cache.stride(0)
        allowed |= {*range(base + slot % 64 * 576, base + slot % 64 * 576 + 576)}
        allowed |= {*range(base + 64 * 576 + slot % 64 * 8, base + 64 * 576 + slot % 64 * 8 + 7)}
    assert changed and set(changed) <= allowed


def test_slots_out_of_range_write_nothing_and_positions_are_clamped():
    call = one(4)
    right = expected(call)
    call.slots[1], call.slots[2] = -1, call.cache.shape[0] * 256
    numerics.poison_(call.cache)
    rope.norm_rope(**vars(call))
    kept = call.slots[[0, 3]]
    assert_right(kv_cache.read_main(call.cache, kept), [each[[0, 3]] for each in right])
    assert (rope.flat_bytes(call.cache) != 255).sum() <= 2 * 583
    call = one(2, positions=torch.tensor([-5, 10**6], device=DEVICE))
    assert_right(written(call), expected(replace(call, positions=torch.tensor([0, 999], device=DEVICE))))


def test_rows_may_be_strided_and_integers_narrow():
    call = one(4)
    wide = torch.full((4, 1536), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, 1024:] = call.kv
    strided = replace(call, kv=wide[:, 1024:], positions=call.positions.int(), slots=call.slots.long())
    for mine, theirs in zip(written(strided), written(call), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


def test_eps_and_warps_are_arguments():
    call = one(2)
    assert_right(written(call, eps=2.0), expected(call, 2.0))
    for warps in (1, 4):
        assert_right(written(call, num_warps=warps), expected(call))


def test_implementations_pass_the_verdict():
    call = one(6)
    wanted, usual = rope.reference(call), rope.baseline(call)
    for impl in ("torch", "triton"):
        numerics.poison_(call.cache)
        assert rope.judge(call, rope.prepare(impl, call)(), wanted, usual).passed
    numerics.poison_(call.cache)
    assert not rope.judge(call, (call.cache,), wanted, usual).passed
    with pytest.raises(ValueError, match="impl must be one of torch, compiled, triton, got 'fast'"):
        rope.prepare("fast", call)


def test_no_rows_is_no_launch():
    call = one(2)
    rope.norm_rope(call.kv[:0], call.weight, call.freqs_cis, call.positions[:0], call.slots[:0], call.cache)


BAD = {
    r"kv must be bfloat16 \[B, 512\]": lambda c: replace(c, kv=c.kv.float()),
    r"kv must be bfloat16 \[B, 512\] with dense": lambda c: replace(c, kv=c.kv[:, :256]),
    r"weight must be contiguous bfloat16 or float32 \[512\]": lambda c: replace(c, weight=c.weight[:9]),
    r"freqs_cis must be contiguous complex64 \[1000, 32\]": lambda c: replace(c, freqs_cis=c.freqs_cis.real),
    "freqs_cis must have a position at least": lambda c: replace(c, freqs_cis=c.freqs_cis[:0]),
    r"positions must be contiguous int32 or int64 \[5\]": lambda c: replace(c, positions=c.positions.float()),
    r"slots must be contiguous int32 or int64 \[5\]": lambda c: replace(c, slots=c.slots[:2]),
    r"cache must be uint8 or float8_e4m3fn": lambda c: replace(c, cache=c.cache[..., :500]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        rope.norm_rope(**vars(BAD[message](one())))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config(arch):
    (line,) = rope.describe(arch)
    assert line.startswith("triton, any B: ")
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        rope.describe("sm_70")


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 64])
def test_compiled_is_captured_and_right(B):
    call = one(B)
    launch = rope.prepare("compiled", call)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    numerics.poison_(call.cache)
    graph.replay()
    assert rope.judge(call, (call.cache,), rope.reference(call), rope.baseline(call)).passed


@pytest.mark.gpu
def test_a_warm_up_covers_every_batch_and_one_kernel_runs(kernels_of):
    rope.warm_up(whole=torch.int64)
    with frozen():
        for B in (1, 3, 16, 64):
            call = one(B)
            call.slots = call.slots.long()
            assert_right(written(call), expected(call))
    assert kernels_of(lambda: rope.norm_rope(**vars(call))) == [norm_rope_kernel.__name__]
