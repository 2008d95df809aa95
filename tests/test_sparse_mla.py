"""Sparse MLA decode against float64: shapes, lengths, sinks, layouts. a1 to a20 are faults met in public projects."""

import inspect
from dataclasses import replace

import pytest
import torch

from dsv4lab import hardware, kv_cache, numerics
from dsv4lab.kernels import sparse_mla as mla
from dsv4lab.kernels.launch import ColdKernel, frozen
from dsv4lab.kernels.sparse_mla import tiles
from dsv4lab.kernels.sparse_mla.gluon_tiles import gluon_kernel
from dsv4lab.kernels.sparse_mla.tiles import VARYING

pytest_plugins = ["compiler_on"]
DEVICE = "cpu" if hardware.probe() is None else "cuda"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
GLUON = [
    pytest.param(
        {"impl": impl, "config": config}, id=name,
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="the Gluon kernel is for sm_90")],
    )
    for name, (impl, config) in mla.CANDIDATES.items() if impl == "gluon"
]  # fmt: skip
FORMS = [pytest.param({"impl": "split_k"}, id="split_k"), *GLUON]
"""How `split_k` splits and merges, with its own kernel and with each tile of Gluon's, whatever the table says."""
EVERY = [*(pytest.param({"impl": impl}, id=impl) for impl in mla.IMPLEMENTATIONS), *GLUON]


def one(device=DEVICE, seed=0, **shape):
    defaults = dict(name="test", B=2, H=8, window=16, topk=24, page=16, extra_page=8)
    return mla.make_inputs(mla.Case(**(defaults | shape)), device=device, seed=seed)[0]


def decode(call, impl="split_k", **options):
    """A call on poisoned outputs."""
    B, s_q, H, D = call.q.shape
    out = numerics.poison_(torch.empty(B, s_q, H, D, dtype=torch.bfloat16, device=call.q.device))
    lse = numerics.poison_(torch.empty(B, H, s_q, device=call.q.device))
    return mla.sparse_mla_decode(**vars(call), out=out, lse=lse, impl=impl, **options)


def assert_right(call, impl="split_k", **options):
    out, lse = decode(call, impl, **options)
    expected, expected_lse = mla.reference(call)
    verdict = numerics.check(out, expected, mla.baseline(call)[0])
    assert verdict.passed, verdict
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-3)
    return out, lse


WHOLE, SPLIT = (mla.Config(16, 16, 4, 1, False, blocks_per_sm) for blocks_per_sm in (0, 10**6))
"""One split for a whole row, and as many splits as it has tiles of 16."""


@pytest.mark.parametrize("form", EVERY)
@pytest.mark.parametrize("lengths", ["full", "mixed"])
def test_every_implementation(form, lengths):
    assert_right(one(lengths=lengths, s_q=2, H=3, window=5, topk=7), **form)


@pytest.mark.parametrize("H", [1, 4, 8, 12, 16, 64, 128])
@pytest.mark.parametrize("form", [pytest.param({"impl": "mma"}, id="mma"), *FORMS])
def test_any_number_of_heads(H, form):
    assert_right(one(H=H, B=1, topk=37), **form)


@pytest.mark.parametrize("topk", [1, 37, 128, 512, 640])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_any_width(topk, B, form):
    assert_right(one(B=B, H=4, topk=topk, window=37, page=53, extra_page=61, lengths="mixed"), **form)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [1, 4, 8, 12, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("topk", [1, 37, 128, 192, 512, 640, 1152, 2048])
@pytest.mark.parametrize("form", FORMS)
def test_a6_heads_by_width_by_batch(H, topk, form):
    for B, s_q in ((1, 1), (5, 1), (7, 3), (65, 1)):
        for lengths in ("full", "mixed"):
            assert_right(
                one(B=B, s_q=s_q, H=H, topk=topk, window=128, page=256, extra_page=64, lengths=lengths), **form
            )
    assert_right(one(B=3, H=H, topk=topk, window=128), "mma")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n, (impl, _) in mla.CANDIDATES.items() if impl != "gluon" or HOPPER])
def test_every_candidate_config_is_right(name):
    call = one(B=9, H=64, window=128, topk=512, page=256, extra_page=64, lengths="mixed")
    out, lse = mla.prepare(name, call)()
    expected, expected_lse = mla.reference(call)
    assert numerics.check(out, expected, mla.baseline(call)[0]).passed
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-3)


def test_a_prefill_sized_batch_is_right():
    assert_right(one(B=33 if DEVICE == "cpu" else 3001, H=8, window=16, topk=0))


@pytest.mark.parametrize("form", FORMS)
def test_a1_lanes_past_topk_length_do_not_count(form):
    call = one(B=3, H=16, window=32, topk=0)
    call.topk_length = torch.full((3,), 5, dtype=torch.int32, device=DEVICE)
    call.k_cache = kv_cache.allocate_main(8, 16, DEVICE)
    slots = torch.randperm(128, device=DEVICE)[:96].int()
    kv_cache.write_main(call.k_cache, slots, torch.randn(96, 512, device=DEVICE))
    call.indices = slots.view(3, 1, 32)
    kv_cache.write_main(call.k_cache, call.indices[..., 5:].reshape(-1), torch.full((81, 512), 50.0, device=DEVICE))
    masked = replace(call, indices=call.indices.clone(), topk_length=None)
    masked.indices[..., 5:] = -1
    out, lse = decode(call, **form)
    again, lse_again = decode(masked, **form)
    assert numerics.bitwise_equal(out, again) and numerics.bitwise_equal(lse, lse_again)


@pytest.mark.parametrize("form", EVERY)
def test_a2_a_masked_first_tile_is_no_nan(form):
    call = one(B=1, H=1, window=32, topk=0)
    call.k_cache = kv_cache.allocate_main(2, 16, DEVICE)
    key = torch.zeros(2, 512, device=DEVICE)
    key[0, 0], key[1, 1] = 1.0, 2.0
    kv_cache.write_main(call.k_cache, torch.tensor([20, 27], dtype=torch.int32, device=DEVICE), key)
    call.q = torch.ones(1, 1, 1, 512, dtype=torch.bfloat16, device=DEVICE)
    call.indices = torch.full((1, 1, 32), -1, dtype=torch.int32, device=DEVICE)
    call.indices[0, 0, 20], call.indices[0, 0, 27] = 20, 27
    call.topk_length, call.attn_sink, call.softmax_scale = None, None, 1.0
    out, lse = decode(call, **form)
    assert lse.item() == pytest.approx(2.31326, abs=1e-4)
    assert out[0, 0, 0, :2].tolist() == pytest.approx([0.26894, 2 * 0.73106], rel=8e-3)


@pytest.mark.parametrize("form", [{"config": WHOLE}, {"config": SPLIT}, *GLUON])
def test_a3_empty_rows_and_empty_splits_follow_one_convention(form):
    call = one(B=4, H=4, window=48, topk=32)
    call.topk_length = torch.tensor([0, 3, 48, 0], dtype=torch.int32, device=DEVICE)
    call.extra_topk_length = torch.tensor([0, 0, 32, 7], dtype=torch.int32, device=DEVICE)
    out, lse = assert_right(call, **form)
    assert (out[0] == 0).all() and (lse[0] == float("inf")).all()


def test_a3_the_merge_weighs_partial_rows_by_their_lse():
    from dsv4lab.kernels.sparse_mla.tiles import combine_kernel

    inf = float("inf")
    partial_lse = torch.tensor([[-inf, 1.5, -inf, 0.5], [-inf] * 4], device=DEVICE) * 1.4426950408889634
    partial_out = torch.arange(1.0, 9.0, device=DEVICE)[:, None].expand(8, 512).contiguous()
    partial_out[[0, 2, 4, 5, 6, 7]] = float("nan")  # an empty split leaves its partial row unwritten
    out = numerics.poison_(torch.empty(2, 1, 1, 512, dtype=torch.bfloat16, device=DEVICE))
    lse = numerics.poison_(torch.empty(2, 1, 1, device=DEVICE))
    combine_kernel[(2, 1)](
        partial_out, partial_lse, torch.tensor([-inf], device=DEVICE), out, 512, 512, 512, lse,
        1, 1, 4, SPLITS_POW2=4, HAS_SINK=True, BLOCK_D=512, PDL=False,
    )  # fmt: skip
    assert lse.flatten().tolist() == pytest.approx([1.81326, inf], abs=1e-5)
    assert out[0].float().unique().item() == pytest.approx(2 * 0.73106 + 4 * 0.26894, rel=8e-3)
    assert (out[1] == 0).all()


@pytest.mark.parametrize(
    ("lse", "sink", "weight"),
    [(101.0, 100.0, 0.73106), (95.0, float("inf"), 0.0), (95.0, float("-inf"), 1.0), (0.5, 90.0, 0.0)],
)
@pytest.mark.parametrize("form", [{"config": WHOLE}, {"config": SPLIT}, *GLUON])
def test_a4_sinks_of_any_size(lse, sink, weight, form):
    call = one(B=1, H=1, window=16, topk=32)
    call.q.zero_()
    call.attn_sink = torch.tensor([sink], device=DEVICE)
    without = decode(replace(call, attn_sink=None), **form)
    shift = lse - without[1].item()  # 48 equal scores: move the lse by moving every score
    call.q[..., 448] = 1.0
    for cache in (call.k_cache, call.extra_k_cache):
        data = cache.as_strided((cache.shape[0], cache.shape[1], 576), (cache.stride(0), 576, 1))
        data[..., 448:450] = torch.tensor([shift], dtype=torch.bfloat16, device=DEVICE).view(torch.uint8)
    call.softmax_scale = 1.0
    plain, lse_found = decode(replace(call, attn_sink=None), **form)
    out, lse_again = decode(call, **form)
    assert numerics.bitwise_equal(lse_found, lse_again) and lse_found.item() == pytest.approx(lse, abs=0.3)
    exact = 1 / (1 + torch.tensor(sink - lse_found.item(), dtype=torch.float64).exp().item())
    assert exact == pytest.approx(weight, abs=0.06)
    torch.testing.assert_close(out.float(), plain.float() * exact, atol=1e-6, rtol=8e-3)


@pytest.mark.parametrize("form", FORMS)
def test_a8_views_of_a_shared_pool(form):
    call = one(B=2, H=4)
    strided = replace(call)
    for name in ("k_cache", "extra_k_cache"):
        cache = getattr(call, name)
        pages, page = cache.shape[:2]
        pool = torch.full((pages, 1002240), 0xFF, dtype=torch.uint8, device=DEVICE)
        page_bytes = kv_cache.main_page_bytes(page)
        offset = 64 * 576
        pool[:, offset : offset + page_bytes] = cache.as_strided((pages, page_bytes), (cache.stride(0), 1))
        setattr(strided, name, kv_cache.main_view(pool[:, offset : offset + page_bytes], page))
        assert getattr(strided, name).stride(0) == 1002240
    for mine, theirs in zip(decode(call, **form), decode(strided, **form), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_a15_unused_slots_full_of_nan_do_not_leak(form):
    call = one(B=1, H=4, window=13, topk=0, page=16)
    dirty = call.k_cache.clone()
    data = dirty.as_strided((dirty.shape[0], 16, 576), (dirty.stride(0), 576, 1))
    data[:, 13:] = 0xFF
    dirty.as_strided((dirty.shape[0], 16, 8), (dirty.stride(0), 8, 1), 16 * 576)[:, 13:] = 0xFF
    slots = torch.arange(13, dtype=torch.int32, device=DEVICE).view(1, 1, 13)
    call.indices = torch.nn.functional.pad(slots, (0, 3), value=-1)
    call.topk_length = None
    for mine, theirs in zip(decode(call, **form), decode(replace(call, k_cache=dirty), **form), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_a18_heads_do_not_depend_on_how_many_there_are(form):
    wide = one(B=2, H=16)
    first = decode(wide, **form)
    for H in (4, 8, 12):
        out, lse = decode(replace(wide, q=wide.q[:, :, :H], attn_sink=wide.attn_sink[:H]), **form)
        assert numerics.bitwise_equal(out, first[0][:, :, :H]) and numerics.bitwise_equal(lse, first[1][:, :H])


@pytest.mark.parametrize("form", FORMS)
def test_a18_nothing_is_written_past_the_last_head(form):
    call = one(B=2, H=5)
    wide = numerics.poison_(torch.empty(2, 1, 8, 640, dtype=torch.bfloat16, device=DEVICE))
    out, _ = mla.sparse_mla_decode(**vars(call), out=wide[:, :, :5, 64:576], **form)
    assert out.data_ptr() == wide[..., 64:].data_ptr() and not out.isnan().any()
    assert wide[:, :, 5:].isnan().all() and wide[..., :64].isnan().all() and wide[..., 576:].isnan().all()


@pytest.mark.parametrize("form", [pytest.param({"impl": "mma"}, id="mma"), *FORMS])
def test_garbage_in_foreign_heads_stays_there(form):
    call = one(B=2, H=16)
    call.q[:, :, 8:] = float("nan")
    own = replace(call, q=call.q[:, :, :8], attn_sink=call.attn_sink[:8])
    assert numerics.bitwise_equal(decode(call, **form)[0][:, :, :8], decode(own, **form)[0])


@pytest.mark.parametrize("form", FORMS)
def test_a19_slices_of_a_packed_q_are_read_in_place(form):
    call = one(B=4, H=16)
    packed = torch.zeros(4, 1, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    packed[..., :512] = call.q
    for mine, theirs in zip(decode(call, **form), decode(replace(call, q=packed[..., :512]), **form), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


@pytest.mark.gpu
def test_a19_a_strided_call_launches_no_copy(kernels_of):
    call = one(B=4, H=16, window=128, topk=512)
    packed = torch.zeros(4, 1, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    launch = mla.prepare("split_k", replace(call, q=packed[..., :512]))
    launch()
    assert kernels_of(launch) == ["combine_kernel", "split_k_kernel"]


@pytest.mark.parametrize("form", EVERY)
def test_a20_lengths_beyond_the_width_are_clamped(form):
    call = one(B=2, H=4, window=16, topk=0)
    call.topk_length = torch.tensor([200, -3], dtype=torch.int32, device=DEVICE)
    right = replace(call, topk_length=torch.tensor([16, 0], dtype=torch.int32, device=DEVICE))
    for mine, theirs in zip(decode(call, **form), decode(right, **form), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


@pytest.mark.parametrize("form", EVERY)
def test_a12_leftovers_of_an_earlier_replay_are_not_read(form):
    """Padded rows: length 0 over indices far outside the pool; and one such index among valid ones is skipped."""
    call = one(B=4, H=4)
    for length, indices in ((call.topk_length, call.indices), (call.extra_topk_length, call.extra_indices_in_kvcache)):
        length[2:] = 0
        indices[2:] = 999999
        indices[0, 0, 1] = 2**31 - 1
    out, _ = assert_right(call, **form)
    live = mla.Inputs(
        call.q[:2], call.k_cache, call.indices[:2], call.topk_length[:2], call.attn_sink, call.softmax_scale,
        call.extra_k_cache, call.extra_indices_in_kvcache[:2], call.extra_topk_length[:2],
    )  # fmt: skip
    same = {"config": mla.plan_for(call).config} if form["impl"] == "split_k" else {}
    assert numerics.bitwise_equal(decode(live, **form | same)[0], out[:2]) and (out[2:] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_length_per_query_token(form):
    call = one(B=2, s_q=3, H=4)
    call.topk_length = torch.tensor([[1, 2, 16], [0, 5, 9]], dtype=torch.int32, device=DEVICE)
    assert_right(call, **form)


def test_short_rows_do_not_depend_on_the_width_of_the_index():
    call = one(B=2, H=4, window=48, topk=0)
    call.topk_length = torch.tensor([3, 16], dtype=torch.int32, device=DEVICE)
    narrow = replace(call, indices=call.indices[..., :16].contiguous())
    for mine, theirs in zip(decode(call, config=WHOLE), decode(narrow, config=WHOLE), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_repeats_bitwise(form):
    call = one(B=3, H=12, lengths="mixed")
    first = decode(call, **form)
    for _ in range(2 if DEVICE == "cpu" else 50):
        for mine, theirs in zip(decode(call, **form), first, strict=True):
            assert numerics.bitwise_equal(mine, theirs)


def test_a_plan_knows_shapes_alone():
    plan = mla.plan(32, 64, (128, 512), arch="sm_90", sms=132)
    assert plan.num_splits == 4 and plan.blocks == 256 and plan.workspace_numel == 32 * 4 * 64 * 513
    assert mla.plan(1, 64, (128, 512), arch="sm_120", sms=188).num_splits == 20
    assert mla.plan(5000, 64, (128, 512), arch="sm_120", sms=188).workspace_numel == 0


def test_no_allocation_with_all_buffers_given():
    call = one(B=1, H=4)
    plan = mla.plan_for(call)
    out, lse = torch.empty_like(call.q), torch.empty(1, 4, 1, device=DEVICE)
    workspace = torch.empty(plan.workspace_numel, device=DEVICE)
    found = mla.sparse_mla_decode(**vars(call), out=out, lse=lse, workspace=workspace)
    assert found[0] is out and found[1] is lse
    with pytest.raises(ValueError, match=f"workspace must be .* at least {plan.workspace_numel} elements"):
        mla.sparse_mla_decode(**vars(call), workspace=workspace[:-1])


BAD = {
    "q must be bfloat16": lambda c: replace(c, q=c.q.float()),
    "q must have 1 to 4 query tokens": lambda c: replace(c, q=c.q.expand(2, 5, 8, 512)),
    r"k_cache must be uint8 .* got torch.int16": lambda c: replace(c, k_cache=c.k_cache.view(torch.int16)),
    r"k_cache must be .*584\]": lambda c: replace(c, k_cache=c.k_cache[..., :576]),
    "multiples of 16 bytes, got stride": lambda c: replace(
        c, extra_k_cache=kv_cache.allocate_main(2, 8, DEVICE, pool_stride=5192)
    ),
    r"indices must be int32 \[2, 1, width\]": lambda c: replace(c, indices=c.indices.long()),
    r"extra_indices_in_kvcache must be int32": lambda c: replace(c, extra_indices_in_kvcache=c.indices[:1]),
    r"topk_length must be int32 \[2\]": lambda c: replace(c, topk_length=c.topk_length.float()),
    "must be given together": lambda c: replace(c, extra_k_cache=None),
    "extra_topk_length needs extra_k_cache": lambda c: replace(c, extra_k_cache=None, extra_indices_in_kvcache=None),
    r"attn_sink must be dense float32 \[8\]": lambda c: replace(c, attn_sink=c.attn_sink[:4]),
    "k_cache must be on": lambda c: replace(c, k_cache=c.k_cache.to("meta")),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        mla.sparse_mla_decode(**vars(BAD[message](one())))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "fast"}, "impl must be one of .*'fast'"),
        ({"out": torch.empty(2, 1, 8, 512)}, "out must be torch.bfloat16"),
        ({"lse": torch.empty(2, 8, dtype=torch.float32)}, "lse must be"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        mla.sparse_mla_decode(**vars(one()), **options)


def test_the_debug_switch_reads_what_only_the_device_knows():
    call = one()
    mla.sparse_mla_decode(**vars(call), check_values=True)
    call.topk_length[1] = 17
    with pytest.raises(ValueError, match=r"topk_length must be in 0\.\.16, got 17"):
        mla.sparse_mla_decode(**vars(call), check_values=True)
    call = one()
    call.extra_indices_in_kvcache[0, 0, 0] = 10**6
    with pytest.raises(ValueError, match=r"extra_indices_in_kvcache must be -1 or in 0\.\.47, got 1000000"):
        mla.sparse_mla_decode(**vars(call), check_values=True)
    call = one()
    slot = call.indices[0, 0, 0].item()
    page, offset = divmod(slot, call.k_cache.shape[1])
    call.k_cache.view(torch.uint8)[page].flatten()[576 * offset] = 0x7F  # e4m3's NaN
    with pytest.raises(ValueError, match=f"main cache, slot {slot}: nan is a value, not finite"):
        mla.sparse_mla_decode(**vars(call), check_values=True)


def test_an_empty_batch_is_no_launch():
    call = one()
    out, lse = mla.sparse_mla_decode(call.q[:0], call.k_cache, call.indices[:0])
    assert out.shape == (0, 1, 8, 512) and lse.shape == (0, 8, 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config_for_every_shape(arch):
    for heads in (1, 8, 16, 64, 128):
        for rows in (1, 2, 3, 8, 9, 64, 10**6):
            assert mla.plan(rows, heads, (128, 512), arch=arch, sms=100).blocks >= rows
    assert len(mla.describe(arch)) >= 3


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        mla.plan(1, 8, (128,), arch="sm_70", sms=80)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [8, 64])
@pytest.mark.parametrize("form", [pytest.param({"impl": "mma"}, id="mma"), *FORMS])
def test_capture_and_replay_with_other_lengths_equals_eager(H, form):
    """Captured at full lengths, replayed with others, fewer live rows and stale indices: bitwise what eager gives."""
    case = mla.Case("capture", 8, H, lengths="mixed")
    captured, *others = mla.make_inputs(case, device="cuda", sets=4)
    launch = lambda: mla.sparse_mla_decode(**vars(captured), **form)  # noqa: E731
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch()
    for live, other in zip((8, 5, 1), others, strict=True):
        for name in ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length"):
            getattr(captured, name).copy_(getattr(other, name))
        captured.topk_length[live:] = 0
        captured.extra_topk_length[live:] = 0
        captured.indices[live:] = 999999
        captured.extra_indices_in_kvcache[live:] = 999999
        numerics.poison_(out)
        graph.replay()
        expected = launch()
        assert numerics.bitwise_equal(out, expected[0]) and numerics.bitwise_equal(lse, expected[1])
        assert (out[live:] == 0).all()


def variant(step: tuple) -> tuple:
    """What Triton compiles a launch for: constants, options, and how far its integers are known."""
    kernel, _, arguments = step
    known = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            known[name] = str(value.dtype)
        elif name in ("NUM_SPLITS", *VARYING):
            continue
        elif name.isupper() or name in ("num_warps", "num_stages"):
            known[name] = str(value)
        elif isinstance(value, int):
            known[name] = "1" if value == 1 else str(value % 16 == 0)
    return kernel.__name__, tuple(sorted(known.items()))


@pytest.mark.parametrize(
    ("heads", "impl"),
    [
        *((heads, impl) for heads in (8, 64) for impl in ("split_k", "gluon")),
        (16, "gluon"),
        (32, "gluon"),
        (64, "mma"),
        (8, "simt"),
    ],
)
def test_what_is_warmed_up_is_all_that_a_server_can_need(monkeypatch, heads, impl):
    warmed = set()
    monkeypatch.setattr(mla, "_INTERPRETED", False)
    monkeypatch.setattr(mla, "warm", lambda *step: warmed.add(variant(step)))
    mla.warm_up("cpu", heads=heads, impl=impl)
    needed = set()
    for topk, extra_page in ((0, 1), (512, 64), (64, 2), (320, 2), (1088, 2), (mla.MAX_C128, 2)):
        case = mla.Case("x", 1, 64, topk=min(topk, 64), extra_page=extra_page)
        (call,) = mla.make_inputs(case, device="cpu")
        for rows in (1, 2, 3, 5, 8, 9, 15, 16, 17, 24, 25, 33, 64, 66, 67, 130, 133, 264, 265, 512):
            ints = torch.zeros(rows, 1, topk, dtype=torch.int32)
            length = torch.zeros(rows, dtype=torch.int32)
            more = (ints, length) if topk else (None, None)
            now = replace(call, q=torch.empty(rows, 1, 64, 512, dtype=torch.bfloat16)[:, :, :heads],
                          indices=torch.zeros(rows, 1, 128, dtype=torch.int32), topk_length=length,
                          attn_sink=call.attn_sink[:heads], extra_indices_in_kvcache=more[0],
                          extra_topk_length=more[1])  # fmt: skip
            out, lse = torch.empty(rows, 1, 64, 512, dtype=torch.bfloat16)[:, :, :heads], torch.empty(rows, heads, 1)
            plan = None if impl == "simt" else mla.plan_for(now, impl)
            workspace = torch.empty(plan.workspace_numel if plan else 0)
            needed |= {variant(step) for step in mla.launches(now, out, lse, workspace, impl=impl, plan=plan)}
    assert needed <= warmed
    assert len(warmed) <= len(needed) + 2  # and hardly more


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("impl", ["split_k", "gluon"])
def test_after_warm_up_no_batch_and_no_width_compiles_anything(heads, impl):
    mla.warm_up("cuda", heads=heads, impl=impl)
    with frozen():
        for rows, topk, extra_page in (
            (1, 0, 1),
            (3, 512, 64),
            (1, 64, 2),
            (17, 320, 2),
            (300, 1088, 2),
            (70, 512, 64),
        ):
            case = mla.Case("served", rows, heads, topk=topk, extra_page=extra_page, lengths="mixed")
            (call,) = mla.make_inputs(case, device="cuda")
            assert mla.sparse_mla_decode(**vars(call), impl=impl)[0].isfinite().all()


def test_gluon_is_split_k_where_it_has_no_kernel():
    for arch in ("sm_80", "sm_89", "sm_120", "sm_121"):
        for rows in (1, 8, 128):
            mine, theirs = (mla.plan(rows, 64, (128, 512), impl=i, arch=arch, sms=188) for i in ("gluon", "split_k"))
            assert mine == theirs
    (name, (_, config)) = next((n, c) for n, c in mla.CANDIDATES.items() if c[0] == "gluon")
    with pytest.raises(ValueError, match=f"config {name} must run on sm_90, got sm_120"):
        mla.plan(1, 64, (128,), impl="gluon", arch="sm_120", sms=188, config=config)


@pytest.mark.parametrize(
    ("heads", "few", "then"),
    [(1, 24, {25: 32, 64: 32, 65: 64, 10**6: 64}), (8, 24, {25: 32, 64: 32, 65: 64}), (16, 24, {64: 32, 65: 64}),
     (17, 4, {5: 64}), (32, 4, {5: 64, 32: 64}), (64, 4, {5: 64, 256: 64}), (128, 2, {3: 64, 128: 64})],
)  # fmt: skip
def test_gluon_takes_over_from_split_k_with_the_rows_to_fill_its_tiles(heads, few, then):
    def config(impl, rows):
        return mla.plan(rows, heads, (128, 512), impl=impl, arch="sm_90", sms=132).config

    for rows in range(1, few + 1):
        assert config("gluon", rows) == config("split_k", rows)
    for rows, block_n in then.items():
        assert config("gluon", rows).name == f"gluon_n{block_n}"
        assert not config("split_k", rows).gluon


def test_gluon_is_not_measured_where_it_would_be_split_k(monkeypatch):
    call = one(device="cpu")
    mla.prepare("gluon", call)
    monkeypatch.setattr(mla, "_target", lambda device: ("sm_120", 188))
    for name in ("gluon", "gluon_n64", "gluon_n32"):
        with pytest.raises(ValueError, match="gluon has a kernel for sm_90 alone; on sm_120 it is split_k"):
            mla.prepare(name, call)


@pytest.mark.parametrize("impl", ["split_k", "gluon"])
@pytest.mark.parametrize(
    ("arch", "early"),
    [("sm_80", False), ("sm_86", False), ("sm_89", False), ("sm_90", True), ("sm_120", True), ("sm_121", True)],
)
def test_the_combine_is_launched_early_where_the_gpu_can(monkeypatch, arch, early, impl):
    monkeypatch.setattr(mla, "_INTERPRETED", False)
    call = one(device="cpu", B=4, H=64)
    for rows, split in ((4, True), (10**5, False)):
        plan = mla.plan(rows, 64, (128, 512), impl=impl, arch=arch, sms=132)
        assert (plan.num_splits > 1) == split
        workspace = torch.empty(plan.workspace_numel)
        attend, *combine = mla.launches(call, call.q, torch.empty(4, 64, 1), workspace, impl=impl, plan=plan)
        assert len(combine) == split and attend[2]["PDL"] == (split and early)
        for _, _, arguments in combine:
            assert (arguments["PDL"], arguments.get("launch_pdl", False)) == (early, early)


@pytest.mark.parametrize("kernel", [tiles.split_k_kernel, tiles.combine_kernel, tiles.simt_kernel, gluon_kernel])
def test_no_kernel_has_a_default_that_a_launch_need_not_pass(kernel):
    assert all(p.default is p.empty for p in inspect.signature(kernel.fn).parameters.values())


@pytest.mark.parametrize(("impl", "B"), [("simt", 1), ("mma", 1), ("split_k", 1), ("gluon", 4), ("gluon", 200)])
def test_what_ran_once_is_warm_and_replays(compiled, impl, B):
    """Compiled for sm_90 and launched on a driver that does nothing: as in a capture, and as a server's next call."""
    compiled(
        f"""
    from dsv4lab.kernels import sparse_mla as mla
    from dsv4lab.kernels.replay import replay, _kept
    driver.set_active(Loads("sm_90"))
    (call,) = mla.make_inputs(mla.Case("x", {B}, 64, window=128, topk=64), device="cpu")
    out, lse = torch.empty_like(call.q), torch.empty({B}, 64, 1)
    workspace = torch.empty(10**7)
    decode = lambda: mla.sparse_mla_decode(**vars(call), out=out, lse=lse, workspace=workspace, impl={impl!r})
    with frozen():
        assert "is not warm" in refusal(decode)
    decode()
    steps = 2 if {impl!r} in ("split_k", "gluon") and {B} < 100 else 1
    assert len(Loads.seen) == steps
    with frozen():
        decode()
        tensors = [out, lse, workspace, *(t for t in vars(call).values() if isinstance(t, torch.Tensor))]
        for _ in range(2):
            replay(decode, ("x",), tensors)
    assert len(Loads.seen) == 4 * steps and list(_kept.values()) != [None]
    """,
    )


@pytest.mark.gpu
def test_a_variant_never_run_is_refused_in_capture_and_the_capture_goes_on():
    call = one(B=2, H=8, window=23, topk=41)
    graph, flag = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(ColdKernel, match=r"capturing a CUDA graph and split_k_kernel is not warm.*WIDTH=23,"):
            mla.sparse_mla_decode(**vars(call))
        flag += 1
    graph.replay()
    assert flag.item() == 1
    assert_right(call)


@pytest.mark.gpu
@pytest.mark.parametrize(("pages", "pool_stride"), [(57_500, None), (62_000, None), (2_200, 1_002_240)])
@pytest.mark.parametrize("form", EVERY)
def test_a10_pages_beyond_2_gib(pages, pool_stride, form):
    """The same keys in the first and in the last pages of a pool of more than 2^31 bytes give the same bits."""
    near = one(B=1, H=8, window=64, topk=0, page=64)
    used, page_bytes = near.k_cache.shape[0], kv_cache.main_page_bytes(64)
    cache = kv_cache.allocate_main(pages, 64, "cuda", pool_stride=pool_stride)
    stride = cache.stride(0)
    assert stride * (pages - used) > 2**31
    last = cache.as_strided((used, page_bytes), (stride, 1), (pages - used) * stride)
    last.copy_(near.k_cache.as_strided((used, page_bytes), (near.k_cache.stride(0), 1)))
    far = replace(near, k_cache=cache, indices=near.indices + (pages - used) * 64)
    for mine, theirs in zip(decode(near, **form), decode(far, **form), strict=True):
        assert numerics.bitwise_equal(mine, theirs)


def test_a_combine_of_many_splits_keeps_its_rows_in_registers(compiled):
    """A request alone under 1M of context: the fewer heads a rank has, the more splits."""
    said = compiled("""
        from dsv4lab.kernels import sparse_mla
        from dsv4lab.static import card, compile_for

        for heads in (64, 32, 16):
            (call,) = sparse_mla.make_inputs(sparse_mla.Case("split", 1, heads), device="cpu")
            plan = sparse_mla.plan(1, heads, (128, 8192), arch="sm_90", sms=132)
            given = torch.empty_like(call.q), torch.empty(1, heads, 1), torch.empty(plan.workspace_numel)
            *_, combine = sparse_mla.launches(call, *given, impl="split_k", plan=plan)
            found = card(compile_for("sm_90", *combine))
            print(plan.num_splits, found["spill_bytes"] + found["local"])
    """)
    assert said.split() == ["65", "0", "130", "0", "260", "0"]
