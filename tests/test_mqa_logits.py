"""Paged MQA logits against float64: lengths, layouts, page tables. a* and b* are faults met in public projects."""

import sys
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from dsv4lab import hardware, kv_cache, numerics, peers
from dsv4lab.kernels import mqa_logits as mqa
from dsv4lab.kernels.launch import ColdKernel, frozen, is_warm
from dsv4lab.kernels.rows import maxima_ints
from dsv4lab.peers import deepgemm

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CANARY = -12345.5


def one(seed=0, **shape):
    defaults = dict(name="test", B=2, max_len=300, actual=200, H=16)
    return mqa.make_inputs(mqa.Case(**(defaults | shape)), device=DEVICE, seed=seed)[0]


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def logits(call, **options):
    """A call on an output full of canaries, with room beyond its columns."""
    rows, width = call.q.shape[0] * call.q.shape[1], call.max_context_len
    out = torch.full((rows, width + 7), CANARY, device=DEVICE)
    found = mqa.fp8_paged_mqa_logits(**vars(call), schedule_meta=None, out=out[:, :width], **options)
    assert width == 0 or found.data_ptr() == out.data_ptr()
    assert (out[:, width:] == CANARY).all()
    return found


def assert_right(call, **options):
    """Right where a query sees a key, untouched elsewhere."""
    found, expected = logits(call, **options), mqa.reference(call)
    unseen = expected[0].isinf()
    assert (found[unseen] == CANARY).all()
    verdict = mqa.judge(call, (found,), expected, mqa.baseline(call))
    assert unseen.all() or verdict.passed, verdict
    return found


@pytest.mark.parametrize("H", [16, 32, 64, 128])
def test_any_number_of_heads(H):
    assert_right(one(H=H, lengths="mixed"))


@pytest.mark.parametrize("B", [1, 33, 40])
def test_any_batch(B):
    """One chunk of 32 rows, one of 256, and lengths from 0 to all."""
    assert_right(one(B=B, max_len=130, actual=129, lengths="mixed"))


def test_more_rows_than_one_chunk_holds():
    B = 300
    call = one(B=3, max_len=64, actual=33)
    call.q, call.weights = call.q[:1].expand(B, -1, -1, -1), call.weights[:1].expand(B, -1)
    call.block_table = call.block_table[:1].expand(B, -1)
    call.context_lens = torch.arange(B, dtype=torch.int32, device=DEVICE) % 34
    assert_right(call)


@pytest.mark.parametrize("impl", ["torch_fallback", "torch_capped"])
@pytest.mark.parametrize("next_n", [1, 3])
def test_the_torch_implementations(impl, next_n, monkeypatch):
    monkeypatch.setattr(mqa, "FALLBACK_BYTES", 1)  # one request at a time
    call = one(B=3, next_n=next_n, lengths="mixed")
    (found,), expected = mqa.prepare(impl, call)(), mqa.reference(call)
    assert torch.equal(found.isinf(), expected[0].isinf())
    assert mqa.judge(call, (found,), expected, mqa.baseline(call)).passed


def test_a_capped_context_refuses_what_it_cannot_serve():
    call = one(B=1, max_len=2200, actual=2113)
    with pytest.raises(ValueError, match="context_lens must be at most 2112 for a capped context, got 2113"):
        mqa.prepare("torch_capped", call)


@pytest.mark.parametrize("next_n", range(1, 7))
def test_b14_a_query_sees_the_keys_before_its_own_position(next_n):
    call = one(next_n=next_n)
    call.context_lens = lengths(130, next_n - 1)
    found = assert_right(call)
    assert ((found != CANARY).sum(1).view(2, next_n) == mqa.query_lengths(call)).all()
    for same in (call.context_lens[:, None], mqa.query_lengths(call)):
        assert numerics.bitwise_equal(logits(replace(call, context_lens=same)), found)


def test_b14_lengths_of_its_own_for_every_query():
    call = one(next_n=3)
    call.context_lens = lengths(70, 3, 129, 0, 0, 200).view(2, 3)
    assert_right(call)


@pytest.mark.parametrize("next_n", [1, 2])
def test_b5_rows_without_keys(next_n):
    call = one(B=4, max_len=4096, actual=200, next_n=next_n)
    for context_lens in (lengths(0, 0, 0, 0), lengths(0, 1, 0, 200)):
        call.context_lens = context_lens
        assert_right(call)


@pytest.mark.parametrize(("width", "page"), [(257, 64), (300, 64), (513, 128), (1, 16), (64, 64)])
def test_b11_widths_that_are_no_multiple_of_the_page(width, page):
    call = one(B=2, max_len=width, actual=width)
    pages = -(-width // page)
    call.kv_cache = kv_cache.allocate_index(2 * pages, page, DEVICE)
    slots = torch.arange(2 * pages * page, device=DEVICE)
    kv_cache.write_index(call.kv_cache, slots, torch.randn(len(slots), 128, device=DEVICE))
    call.block_table = torch.randperm(2 * pages, device=DEVICE).int().view(2, pages)
    assert assert_right(call).shape == (2, width)
    packed = torch.full((2 * width + 8,), CANARY, device=DEVICE)
    out = packed[: 2 * width].view(2, width)
    mqa.fp8_paged_mqa_logits(**vars(call), schedule_meta=None, out=out)
    assert not (out == CANARY).any() and (packed[2 * width :] == CANARY).all()


def test_b1_the_grid_and_what_is_written_do_not_depend_on_the_maximum():
    narrow, wide = one(B=2, max_len=256), one(B=2, max_len=mqa.Case("", 1, 262_208, 0).max_len)
    grids = [mqa.launches(c, torch.empty(2, 256), arch="sm_90", sms=132)[0][1] for c in (narrow, wide)]
    assert grids[0] == grids[1]
    found = logits(wide)
    assert (found != CANARY).sum().item() == 400
    narrow.kv_cache, narrow.block_table = wide.kv_cache, wide.block_table[:, :4]
    narrow.q, narrow.weights = wide.q, wide.weights
    assert numerics.bitwise_equal(found[:, :200], logits(narrow)[:, :200])


def test_lengths_are_clamped_to_the_output_and_to_the_table():
    call = one(B=2, max_len=130, actual=130)
    right = logits(replace(call, context_lens=lengths(130, 0)))
    assert numerics.bitwise_equal(logits(replace(call, context_lens=lengths(2**31 - 1, -5))), right)
    call.block_table = call.block_table[:, :1]
    assert (logits(call)[:, 64:] == CANARY).all()


def test_strided_tensors_are_read_in_place():
    call = one(B=3, next_n=2, lengths="mixed")
    right = logits(call)
    q = torch.zeros(3, 2, 20, 256, dtype=torch.uint8, device=DEVICE)
    q[:, :, :16, :128] = call.q.view(torch.uint8)
    weights = torch.zeros(6, 40, device=DEVICE)
    weights[:, 8:24] = call.weights
    table = torch.full((3, 1000), 2**30, dtype=torch.int32, device=DEVICE)
    table[:, 3 : 3 + call.block_table.shape[1]] = call.block_table
    lens = torch.full((3, 5), -1, dtype=torch.int32, device=DEVICE)
    lens[:, 1] = call.context_lens
    strided = replace(
        call, q=q[:, :, :16, :128].view(kv_cache.FP8), weights=weights[:, 8:24], block_table=table[:, 3:],
        context_lens=lens[:, 1],
    )  # fmt: skip
    assert numerics.bitwise_equal(logits(strided), right)


def test_a8_views_of_a_shared_pool():
    call = one()
    page_bytes = kv_cache.index_page_bytes(64)
    pool = torch.full((call.kv_cache.shape[0], 1_002_240), 0xFF, dtype=torch.uint8, device=DEVICE)
    pool[:, 4096 : 4096 + page_bytes] = call.kv_cache.view(-1, page_bytes)
    view = kv_cache.index_view(pool[:, 4096 : 4096 + page_bytes], 64)
    assert view.stride(0) == 1_002_240
    assert numerics.bitwise_equal(logits(replace(call, kv_cache=view)), logits(call))


def test_a9_a_page_is_64_values_then_64_scales():
    pool = torch.zeros(1, 8448, dtype=torch.uint8, device=DEVICE)
    values = (torch.arange(64, device=DEVICE)[:, None] / 64).expand(64, 128).to(kv_cache.FP8)
    pool[0, :8192] = values.reshape(-1).view(torch.uint8)
    pool[0, 8192:] = torch.ones(64, device=DEVICE).view(torch.uint8)
    call = one(B=1, max_len=64, actual=64)
    call.q, call.weights = torch.ones_like(call.q, dtype=torch.float32).to(kv_cache.FP8), torch.ones_like(call.weights)
    call.kv_cache, call.block_table = kv_cache.index_view(pool, 64), torch.zeros_like(call.block_table)
    found = logits(call, check_values=True)[0]
    assert (found.diff() >= 0).all() and found[0] == 0 and found[63] > found[1] > 0


def test_a9_the_debug_switch_knows_pages_of_another_layout():
    call = one(B=1, max_len=64, actual=64)
    logits(call, check_values=True)
    page = call.kv_cache.view(-1, 8448)
    rows = [torch.cat([p[:8192].view(64, 128), p[8192:].view(64, 4)], 1).flatten() for p in page]
    with pytest.raises(ValueError, match=r"index cache, slot .* another layout"):
        logits(replace(call, kv_cache=kv_cache.index_view(torch.stack(rows), 64)), check_values=True)


def test_a15_unused_slots_full_of_nan_do_not_leak():
    call = one(B=1, actual=77)
    dirty = call.kv_cache.clone()
    last = dirty[call.block_table[0, 1].item()].view(-1)
    last[13 * 128 : 8192] = 0xFF
    last[8192 + 13 * 4 :] = 0xFF
    assert numerics.bitwise_equal(logits(replace(call, kv_cache=dirty)), logits(call))


def test_a12_page_ids_left_over_from_an_earlier_replay():
    """Padded rows have length 0 over any page ids; an id outside the pool within a row scores -inf."""
    call = one(B=4)
    call.context_lens, call.block_table[2:] = lengths(200, 150, 0, 0), 999_999
    right = logits(call)
    assert (right[2:] == CANARY).all()
    for page in (999_999, -1, call.kv_cache.shape[0]):
        call.block_table[0, 1] = page
        found = logits(call)
        assert (found[0, 64:128] == float("-inf")).all()
        found[0, 64:128] = right[0, 64:128]
        assert numerics.bitwise_equal(found, right)


def test_repeats_bitwise_whatever_the_number_of_programs():
    call = one(B=5, max_len=500, actual=450, lengths="mixed")
    first = logits(call)
    for programs in (1, 2, 7, 60):
        assert numerics.bitwise_equal(logits(call, config=mqa.Config(4, 4, programs)), first)


@pytest.mark.parametrize("next_n", [1, 2])
def test_group_maxima(next_n):
    call = one(B=2, max_len=600, actual=450, next_n=next_n, lengths="mixed")
    call.context_lens = lengths(450, 67)
    maxima = torch.full((2 * next_n, maxima_ints(600) + 3), -7, dtype=torch.int32, device=DEVICE)
    found = logits(call, maxima=maxima)
    assert numerics.bitwise_equal(found, logits(call))
    units = 3
    for row, n in enumerate(mqa.query_lengths(call).flatten().tolist()):
        for group, offset in ((4, 0), (16, 64 * units), (64, 80 * units)):
            count = -(-n // group)
            scores = torch.nn.functional.pad(found[row, :n], (0, count * group - n), value=float("-inf"))
            keys = maxima[row, offset : offset + count]
            stored = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
            assert torch.equal(stored, scores.view(count, group).amax(1))
            assert maxima[row, offset + count] == -7 or offset + count in (64 * units, 80 * units)


BAD = {
    r"q must be float8_e4m3fn \[B, next_n, H, 128\]": lambda c: replace(c, q=c.q.float()),
    "q must have next_n 1 to 6": lambda c: replace(c, q=c.q.expand(2, 7, 16, 128)),
    "H one of .* got .2, 1, 12": lambda c: replace(c, q=c.q[:, :, :12]),
    "heads at multiples of 16 bytes": lambda c: replace(
        c, q=torch.zeros(2, 1, 16, 136, dtype=torch.uint8, device=DEVICE)[..., :128].view(kv_cache.FP8)
    ),
    r"kv_cache must be uint8 .*132\]": lambda c: replace(c, kv_cache=c.kv_cache[..., :128]),
    "page one of .* got torch.uint8 .*48": lambda c: replace(c, kv_cache=kv_cache.allocate_index(2, 48, DEVICE)),
    "multiples of 16 bytes, got stride 8452": lambda c: replace(
        c, kv_cache=kv_cache.allocate_index(2, 64, DEVICE, pool_stride=8452)
    ),
    r"weights must be float32 \[2, 16\]": lambda c: replace(c, weights=c.weights.half()),
    r"context_lens must be int32 \[2\], \[2, 1\] or": lambda c: replace(c, context_lens=c.context_lens.long()),
    r"context_lens must be int32 .* got torch.int32 \[2, 3\]": lambda c: replace(
        c, context_lens=c.context_lens[:, None].expand(2, 3)
    ),
    r"block_table must be int32 \[2, width\]": lambda c: replace(c, block_table=c.block_table[:1]),
    "max_context_len must be an int": lambda c: replace(c, max_context_len=-1),
    "kv_cache must be on": lambda c: replace(c, kv_cache=c.kv_cache.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        mqa.fp8_paged_mqa_logits(**vars(BAD[message](one())), schedule_meta=None)


def test_bad_options_are_named():
    call = vars(one()) | {"schedule_meta": None}
    for options, message in (
        (dict(clean_logits=True), "clean_logits must be False"),
        (dict(out=torch.empty(2, 299, device=DEVICE)), r"out must be float32 \[2, 300\]"),
        (
            dict(maxima=torch.empty(2, 100, dtype=torch.int32, device=DEVICE)),
            r"maxima must be int32 \[2, at least 176\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            mqa.fp8_paged_mqa_logits(**call, **options)
    with pytest.raises(ValueError, match=r"impl must be one of .* got 'fast'"):
        mqa.prepare("fast", one())


def test_the_debug_switch_reads_what_only_the_device_knows():
    call = one()
    logits(call, check_values=True)
    with pytest.raises(ValueError, match=r"context_lens must be in 0\.\.300, got 301"):
        logits(replace(call, context_lens=lengths(301, 5)), check_values=True)
    call.block_table[1, 2] = 10**6
    with pytest.raises(ValueError, match=r"block_table must be in 0\.\.\d+, got 1000000"):
        logits(call, check_values=True)


def test_an_empty_batch_or_context_is_no_launch():
    call = one()
    empty = replace(call, q=call.q[:0], weights=call.weights[:0], context_lens=call.context_lens[:0])
    assert logits(replace(empty, block_table=call.block_table[:0])).shape == (0, 300)
    assert logits(replace(call, max_context_len=0)).shape == (2, 0)
    assert (logits(replace(call, block_table=call.block_table[:, :0])) == CANARY).all()


def test_an_output_of_its_own_has_the_alignment_that_deepgemm_gives():
    found = mqa.fp8_paged_mqa_logits(**vars(one()), schedule_meta=None)
    assert found.shape == (2, 300) and found.stride() == (512, 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config(arch):
    single, several = mqa.describe(arch)
    assert single.startswith("triton, next_n 1: ") and several.startswith("triton, next_n 2 to 6: ")
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        mqa.describe("sm_70")


def test_work_counts_each_key_once_a_request_and_each_logit_once():
    case = mqa.CASES["b8_max262208_len262144"]
    tokens = 8 * 262_144
    assert mqa.work(case).flops == 2 * tokens * 64 * 128
    assert mqa.work(case).bytes == pytest.approx(tokens * (132 + 4 + 4 / 64), rel=1e-3)


def test_no_two_sets_or_rows_share_a_page():
    calls = mqa.make_inputs(mqa.Case("", 3, 500, 400, lengths="mixed", H=16), device="cpu", sets=2)
    used = [c.block_table[b, : -(-int(n) // 64)] for c in calls for b, n in enumerate(c.context_lens)]
    pages = torch.cat(used)
    assert len(pages.unique()) == len(pages) == calls[0].kv_cache.shape[0]


def test_deepgemm_says_why_it_cannot_run(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert deepgemm.unavailable().startswith("deep_gemm is not installed: pip install sgl-deep-gemm")
    monkeypatch.setattr(peers, "find_spec", lambda name: "found")
    monkeypatch.setattr(peers, "version", lambda package: version("no-such-package"))
    assert "not the build of sgl-deep-gemm" in deepgemm.unavailable()
    monkeypatch.setattr(peers, "version", lambda package: "0.1.3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert "sm_120" in deepgemm.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(deepgemm, "which", lambda program: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert "nvcc" in deepgemm.unavailable()
    monkeypatch.setenv("CUDA_HOME", "here")
    assert deepgemm.unavailable() is None


def test_deepgemm_gets_a_length_for_every_query_and_its_schedule_once(monkeypatch):
    calls = []
    fake = SimpleNamespace(
        get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=lambda lengths, page, sms: calls.append((lengths, page, sms)) or "schedule",
        fp8_paged_mqa_logits=lambda *arguments: arguments,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    call = one(next_n=2, H=64)
    call.context_lens = lengths(1, 200)
    launch = deepgemm.prepare(call)
    (first,), (second,) = launch(), launch()
    ((given, page, sms),) = calls
    assert given.tolist() == [[0, 1], [199, 200]] and (page, sms) == (64, 132)
    assert first[3] is second[3] is given and first[5:] == ("schedule", 300, False)
    with pytest.raises(ValueError, match=r"DeepGEMM takes pages of 64 and H in .* got pages of 64 and H 16"):
        deepgemm.prepare(one())


@pytest.mark.gpu
@pytest.mark.parametrize("next_n", [1, 2])
def test_deepgemm_agrees_with_the_reference(next_n):
    if reason := deepgemm.unavailable():
        pytest.skip(reason)
    call = one(B=5, next_n=next_n, max_len=3000, actual=2500, H=64, lengths="mixed")
    assert mqa.judge(call, deepgemm.prepare(call)(), mqa.reference(call), mqa.baseline(call)).passed


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", *mqa.CANDIDATES])
def test_every_candidate_config_is_right(name):
    call = one(B=9, max_len=3000, actual=2500, H=64, lengths="mixed")
    assert mqa.judge(call, mqa.prepare(name, call)(), mqa.reference(call), mqa.baseline(call)).passed


@pytest.mark.gpu
def test_b64_mixed_from_nothing_to_a_million_tokens():
    assert_right(one(B=64, max_len=262_208, actual=262_144, H=64, lengths="mixed"))


@pytest.mark.gpu
def test_b4_a_warm_up_covers_every_width_length_and_batch():
    mqa.warm_up(next_n=(1, 2, 3))
    with frozen():
        for B, next_n, max_len in ((1, 1, 4097), (7, 2, 262_160), (64, 1, 1), (16, 3, 4096), (300, 1, 70)):
            call = one(B=B, next_n=next_n, max_len=max_len, actual=min(max_len, 60), H=64)
            call.block_table = torch.nn.functional.pad(call.block_table, (1, 0))[:, 1:]
            assert_right(call)
            out = torch.empty(B * next_n, max_len, device=DEVICE)
            assert all(is_warm(*each) for each in mqa.launches(call, out, arch="sm_90", sms=132))


@pytest.mark.gpu
def test_b4_a_variant_is_never_first_compiled_in_a_capture():
    call = one(B=2, H=32, next_n=4)
    with pytest.raises(ColdKernel, match=r"capturing .* logits_kernel .*q=uint8\[2, 4, 32, 128\]"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            logits_of = mqa.fp8_paged_mqa_logits(**vars(call), schedule_meta=None)
            del logits_of


@pytest.mark.gpu
def test_b3_nothing_but_the_kernel_runs(kernels_of):
    launch = mqa.prepare("triton", one(B=32, max_len=262_208, actual=7000, H=64))
    launch()
    assert kernels_of(launch) == ["logits_kernel"]


@pytest.mark.gpu
def test_capture_at_64_rows_and_a_million_tokens_replays_other_lengths_bitwise():
    case = mqa.Case("", 64, 262_208, 30_000, lengths="mixed")
    captured, *others = mqa.make_inputs(case, device="cuda", sets=3)
    launch = mqa.prepare("triton", captured)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = launch()
    for live, other in zip((64, 5), others, strict=True):
        for name in ("q", "weights", "context_lens", "block_table"):
            getattr(captured, name).copy_(getattr(other, name))
        captured.context_lens[live:], captured.block_table[live:] = 0, 999_999
        out.fill_(CANARY)
        graph.replay()
        assert numerics.bitwise_equal(out, logits(captured))


@pytest.mark.gpu
def test_a10_pages_beyond_2_gib():
    call = one(B=1, actual=200, H=64)
    pages = 254_300
    far = torch.zeros(pages * 8448, dtype=torch.uint8, device="cuda").view(pages, 64, 1, 132)
    far[-call.kv_cache.shape[0] :] = call.kv_cache
    moved = replace(call, kv_cache=far, block_table=call.block_table + pages - call.kv_cache.shape[0])
    assert (moved.block_table[0, :4] >= 254_201).all()
    assert numerics.bitwise_equal(logits(moved), logits(call))


@pytest.mark.gpu
def test_b10_rows_whose_bytes_pass_2_gib():
    call = one(B=1, max_len=1 << 20, actual=200, H=64)
    many = replace(
        call, q=call.q.expand(520, -1, -1, -1), weights=call.weights.expand(520, -1),
        block_table=call.block_table.expand(520, -1), context_lens=call.context_lens.expand(520),
    )  # fmt: skip
    found = mqa.fp8_paged_mqa_logits(**vars(many), schedule_meta=None)
    assert numerics.bitwise_equal(found[515, :200], logits(call)[0, :200])


@pytest.mark.parametrize("next_n", [1, 3])
def test_no_part_of_a_config_changes_a_bit(next_n):
    call = one(B=5, max_len=64 * 36, actual=64 * 36, next_n=next_n)
    call.context_lens = lengths(64 * 11, 0, 129, 1, 64 * 36)
    plain = assert_right(call, config=mqa.Config(4, 3, 3))
    for config in (mqa.Config(4, 4, 3), mqa.Config(4, 3, 60), mqa.Config(4, 3, 1, early=True)):
        assert numerics.bitwise_equal(logits(call, config=config), plain), config


def test_33_to_64_rows_are_searched_as_all_others():
    call = one(B=70, max_len=130, actual=129, lengths="mixed")
    whole = assert_right(call)
    some = replace(
        call, q=call.q[:64], weights=call.weights[:64], context_lens=call.context_lens[:64],
        block_table=call.block_table[:64],
    )  # fmt: skip
    assert numerics.bitwise_equal(logits(some), whole[:64])


@pytest.mark.parametrize(("arch", "early"), [("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_121", True)])
def test_it_is_launched_early_where_the_gpu_can(monkeypatch, arch, early):
    monkeypatch.setattr(mqa, "_INTERPRETED", False)
    call = one()
    config = mqa.Config(4, 3, 2, early=True)
    ((_, _, arguments),) = mqa.launches(call, torch.empty(2, 300), arch=arch, sms=4, config=config)
    assert (arguments["EARLY"], arguments["launch_pdl"]) == (early, early)
