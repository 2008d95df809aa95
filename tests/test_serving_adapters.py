import types
from collections.abc import Callable, Iterator

import pytest
import torch

from dsv4lab import hardware, numerics
from dsv4lab.kernels import (
    fp8_gemm,
    hc_head,
    hc_pre,
    launch,
    mqa_logits,
    replay,
    skinny_gemm,
    slots,
    sparse_mla,
    topk,
)
from dsv4lab.kernels.sparse_mla import plans
from dsv4lab.kv_cache import FP8
from dsv4lab.model import DSV4_FLASH
from dsv4lab.serving import adapters, linears
from dsv4lab.serving import launch as serving_launch
from dsv4lab.tune import fp8_gemm as sglang_gemm

DEVICE = "cpu" if hardware.probe() is None else "cuda"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def no_layer_noted():
    adapters._call.__dict__.clear()
    yield
    adapters._call.__dict__.clear()


def sglang_call(call: sparse_mla.Inputs) -> dict:
    return vars(call) | {"head_dim_v": 512}


def noted(heads: int) -> Callable:
    """What runs inside a layer that has `heads` of its own."""
    layer = types.SimpleNamespace(tp_q_head_num=heads)
    return lambda call, **kwargs: adapters.note_layer(
        lambda backend, q, k, v, layer: call(**kwargs), None, q=None, k=None, v=None, layer=layer
    )


def padded(call: sparse_mla.Inputs, first: int, garbage: float) -> dict:
    """The call with 64 heads of which `call` has its own at `first`, and garbage in those of other ranks."""
    own = slice(first, first + call.q.shape[2])
    q, sink = call.q.new_full((len(call.q), 1, 64, 512), garbage), call.attn_sink.new_full((64,), garbage)
    q[:, :, own], sink[own] = call.q, call.attn_sink
    return sglang_call(call) | {"q": q, "attn_sink": sink}


@pytest.mark.parametrize(
    ("tp", "rank", "place", "garbage"),
    [(8, 3, "in place", NAN), (8, 3, "first", INF), (4, 1, "first", NAN), (2, 1, "in place", INF)],
)
def test_a_rank_computes_its_own_heads_whatever_lies_in_the_others(tp, rank, place, garbage):
    own = 64 // tp
    case = sparse_mla.Case("rank", 2, own, window=64, topk=64, lengths="mixed")
    (call,) = sparse_mla.make_inputs(case, device=DEVICE)
    first = rank * own if place == "in place" else 0
    given = padded(call, first, garbage)
    ours = adapters.attention("split_k", (lambda: rank) if place == "in place" else None)
    out, lse = noted(own)(ours, **given)
    unpadded, _ = noted(own)(ours, **sglang_call(call))
    assert lse is None
    assert out.shape == (2, 1, 64, 512) and out.is_contiguous() and out.data_ptr() != given["q"].data_ptr()
    assert torch.equal(out[:, :, first : first + own], unpadded)
    assert torch.equal(unpadded, sparse_mla.sparse_mla_decode(**vars(call))[0])
    out[..., -64:].mul_(2)  # SGLang rotates the output in place


@pytest.mark.gpu
@pytest.mark.parametrize("garbage", [NAN, INF])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize(("topk", "page"), [(0, 64), (512, 64), (2048, 2)])
def test_on_the_gpu_a_padded_call_is_bitwise_the_rank_s_own(tp, garbage, rows, topk, page):
    """Every rank of the size, first and in place, eager and replayed from a graph, where layers and batches differ."""
    own = 64 // tp
    shape = sparse_mla.Case("rank", rows, own, topk=topk, extra_page=page, lengths="mixed")
    (call,) = sparse_mla.make_inputs(shape, device="cuda")
    expected, _ = sparse_mla.sparse_mla_decode(**vars(call))
    assert expected.isfinite().all()
    for rank in range(tp):
        for first in {0, rank * own}:
            ours = adapters.attention("split_k", (lambda rank=rank: rank) if first else None)
            given = padded(call, first, garbage)
            eager, _ = noted(own)(ours, **given)
            assert numerics.bitwise_equal(eager[:, :, first : first + own].contiguous(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = noted(own)(ours, **given)
    graph.replay()
    assert numerics.bitwise_equal(captured[:, :, first : first + own].contiguous(), expected)


def test_without_a_layer_all_heads_are_computed():
    (call,) = sparse_mla.make_inputs(sparse_mla.Case("all", 1, 64, window=64, topk=0), device=DEVICE)
    out, _ = adapters.attention("split_k", lambda: pytest.fail("no rank is needed"))(**sglang_call(call))
    assert torch.equal(out, sparse_mla.sparse_mla_decode(**vars(call))[0])


def test_a_layer_without_extra_cache_and_a_prefill_of_odd_length_go_through():
    (call,) = sparse_mla.make_inputs(sparse_mla.Case("prefill", 19, 8, window=64, topk=0), device=DEVICE)
    out, _ = adapters.attention("split_k")(**sglang_call(call))
    assert torch.equal(out, sparse_mla.sparse_mla_decode(**vars(call))[0])


def test_another_value_width_is_refused():
    (call,) = sparse_mla.make_inputs(sparse_mla.Case("width", 1, 8, topk=0), device=DEVICE)
    with pytest.raises(ValueError, match="head_dim_v must be that of q, 512, got 448"):
        adapters.attention("split_k")(**sglang_call(call) | {"head_dim_v": 448})


def linear_call(rows: int, n: int, k: int, **how) -> dict:
    """As SGLang calls a block-FP8 linear layer with a weight [n, k]."""
    (call,) = sglang_gemm.make_inputs(sglang_gemm.Case("", rows, n, k), **how)
    given = {"input": call.unquantised, "weight": call.w, "block_size": [128, 128], "weight_scale": call.w_scale}
    return given | {"input_scale": None, "bias": None}


def gate_call(rows: int, n: int, k: int, device: str = DEVICE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As SGLang multiplies by a bf16 weight [n, k]."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in ((rows, k), (n, k)))
    return x, torch.nn.Parameter(w)


def every_call(device: str, rows: int, seed: int = 0, hidden: int = 256) -> Iterator[tuple[str, Callable]]:
    """What a forward calls of ours, by name: calls of one name differ in what their tensors hold, not in layout."""
    for name, positions in (("attention", 512), ("attention of the window", 0)):
        case = sparse_mla.Case(name, rows, 16, topk=positions, lengths="mixed")
        (call,) = sparse_mla.make_inputs(case, device=device, seed=seed)
        yield name, lambda call=call: adapters.attention("split_k")(**sglang_call(call))[0]
    (call,) = mqa_logits.make_inputs(mqa_logits.Case("i", rows, 900, 900), device=device, seed=seed)
    arguments = call.q, call.kv_cache, call.weights, call.context_lens, call.block_table, None, 900
    unseen = torch.arange(900, device=device) >= call.context_lens.view(-1, 1)
    yield "indexer", lambda: adapters.indexer("triton")(*arguments).masked_fill(unseen, 0)
    scores = torch.randn(rows, 900, device=device, generator=torch.Generator(device).manual_seed(seed))
    out = torch.empty(rows, 512, dtype=torch.int32, device=device)
    yield "topk", lambda: (adapters.topk_transform(scores, *arguments[3:5], out, 64), out.clone())[1]
    layer = types.SimpleNamespace(rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=2, hc_eps=1e-6)
    ours = linears.mhc_pre("split_k", None)
    for normed in (True, False):
        (pre,) = hc_pre.make_inputs(hc_pre.Case("h", rows, hidden, normed), device=device, seed=seed)
        norm = types.SimpleNamespace(weight=pre.norm_weight, variance_epsilon=1e-6) if normed else None
        given = layer, pre.x, pre.hc_fn, pre.hc_scale, pre.hc_base, norm
        yield f"mhc, {normed}", lambda given=given: torch.cat([each.flatten() for each in ours(None, *given)[:3]])
    linear = linear_call(min(rows, 64), 256, 512, device=device, seed=seed)
    yield "gemm", lambda: linears.gemm()(None, **linear)
    x, w = gate_call(min(rows, 64), 96, 512, device=device, seed=seed)
    yield "gate", lambda: linears.gate()(None, x, w)
    (last,) = hc_head.make_inputs(hc_head.Case("h", rows, hidden), device=device, seed=seed)
    yield "head", lambda: linears.head()(None, **vars(last), norm_eps=1e-6, hc_eps=1e-6)
    given = call.context_lens, None, None, call.block_table, 256
    yield "slots", lambda: adapters.compression_metadata()(lambda *_: ("scalars", None), *given)[-1]


def test_every_launch_is_on_memory_that_can_be_told_again(monkeypatch):
    monkeypatch.setattr(adapters, "_workspace", lambda device: torch.empty(2**20, device=device))
    seen = []

    def watched(call, key, tensors):
        with launch.recorded() as made:
            call()
        starts = [0 if each is None else each.data_ptr() for each in tensors]
        given = [value for _, _, values in made for value in values.values() if isinstance(value, torch.Tensor)]
        seen.append(bool(given) and all(replay._place(value, tensors, starts) for value in given))

    for module in (adapters, linears):
        monkeypatch.setattr(module, "replay", watched)
    names = [(name, call())[0] for name, call in every_call(DEVICE, 2)]
    assert seen == [True] * len(names)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_on_the_gpu_a_call_told_again_is_bitwise_a_planned_one(monkeypatch, rows):
    replay._kept.clear()
    for _, call in every_call("cuda", rows, seed=0, hidden=4096):
        call()
    known = dict(replay._kept)
    assert len(known) == 10 and all(known.values())
    again = [call() for _, call in every_call("cuda", rows, seed=1, hidden=4096)]
    assert replay._kept == known
    for (name, call), told in zip(every_call("cuda", rows, seed=1, hidden=4096), again, strict=True):
        replay._kept.clear()
        assert numerics.bitwise_equal(told, call()), name


@pytest.mark.parametrize("arch", sorted(plans.TABLE))
def test_one_workspace_holds_the_partial_results_of_every_call(arch):
    sms = 132
    largest = max(
        sparse_mla.plan(rows, heads, widths, arch=arch, sms=sms).workspace_numel
        for rows in [*range(1, 140), 2048, 11673]
        for heads in (1, 8, 16, 17, 32, 64)
        for widths in ((128, 0), (128, 512), (128, 8256))
    )
    assert 0 < largest <= adapters.workspace_numel(arch, sms) < 2**24


@pytest.fixture(scope="module")
def index_call() -> mqa_logits.Inputs:
    (call,) = mqa_logits.make_inputs(mqa_logits.Case("small", 3, 900, 900, lengths="mixed"), device=DEVICE)
    return call


def indexed(call: mqa_logits.Inputs, impl: str, column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lens = call.context_lens.view(-1, 1) if column else call.context_lens
    logits = adapters.indexer(impl)(
        call.q, call.kv_cache, call.weights, lens, call.block_table, None, call.max_context_len, False
    )
    out, raw = (torch.full((3, 512), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    adapters.topk_transform(logits, call.context_lens, call.block_table, out, 64, raw)
    return out, raw


def test_logits_and_selection_meet(index_call):
    slots, raw = indexed(index_call, "triton", column=True)
    again = indexed(index_call, "triton", column=False)
    assert torch.equal(again[0], slots) and torch.equal(again[1], raw)
    torch_slots, _ = indexed(index_call, "torch_fallback", column=True)
    assert (torch_slots >= 0).sum(1).tolist() == index_call.context_lens.clamp(max=512).tolist()
    assert (slots >= 0).sum(1).tolist() == index_call.context_lens.clamp(max=512).tolist()


@pytest.mark.parametrize("rows", [1, 5])
def test_mhc_pre_is_sglangs_but_for_its_product(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, 256, generator=generator).to(torch.bfloat16)
    weight, scale, base = (torch.randn(shape, generator=generator) for shape in ((24, 1024), (3,), (24,)))
    layer = types.SimpleNamespace(rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6)
    seen = []

    def sinkhorn(mixes, *rest):
        seen.append((mixes, rest))
        return mixes[..., :4].softmax(-1), mixes[..., 4:8], mixes[..., 8:].unflatten(-1, (4, 4))

    ours = linears.mhc_pre("bf16", lambda: sinkhorn)
    y, post, comb, fused = ours(lambda *_: pytest.fail("the original"), layer, x, weight, scale, base, norm=None)
    flat = x.flatten(1).double()
    rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    mixes = flat @ weight.to(torch.bfloat16).double().T * rms
    torch.testing.assert_close(seen[0][0], mixes.float().unsqueeze(1), rtol=1e-4, atol=1e-4)
    assert seen[0][1] == (scale, base, 4, 20, 1e-6)
    expected = (mixes[:, :4].softmax(-1).unsqueeze(-1) * x.double()).sum(1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    assert (y.dtype, post.shape, comb.shape, fused) == (torch.bfloat16, (rows, 4), (rows, 4, 4), False)
    ours(None, layer, x, weight, scale, base)
    assert weight.bf16.dtype == torch.bfloat16 and weight.dtype == torch.float32


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("impl", ["split_k", "split_k_bf16"])
def test_our_mhc_pre_is_called_as_sglang_calls_its_own(impl, normed):
    (call,) = hc_pre.make_inputs(hc_pre.Case("small", 3, 256, normed), device=DEVICE)
    call.hc_fn.requires_grad_()
    layer = types.SimpleNamespace(rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6)
    norm = types.SimpleNamespace(weight=call.norm_weight, variance_epsilon=0.5) if normed else None
    if normed:
        norm.weight.requires_grad_()
    ours = linears.mhc_pre(impl, lambda: pytest.fail("SGLang's sinkhorn"))
    arguments = None, layer, call.x, call.hc_fn, call.hc_scale, call.hc_base
    *found, fused = ours(*arguments, norm=norm, forward_batch=None)
    assert fused is normed and found[0].shape == (3, 256) and not found[0].requires_grad
    for mine, expected in zip(found, hc_pre.composed(call, torch.float64, norm_eps=0.5), strict=True):
        torch.testing.assert_close(mine.double(), expected.double(), rtol=3e-2, atol=3e-2)
    for mine, same in zip(found, ours(*arguments, norm)[:3], strict=True):
        assert torch.equal(mine, same)


def test_weights_are_asked_for_early_but_not_while_they_are_cast(monkeypatch):
    (call,) = hc_pre.make_inputs(hc_pre.Case("small", 1, 256), device=DEVICE)
    layer = types.SimpleNamespace(rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6)
    seen = []
    monkeypatch.setattr(hc_pre, "hc_pre", lambda *_, weights_ready, **__: seen.append(weights_ready) or (0, 0, 0))
    for impl in ("split_k", "split_k_bf16", "split_k_bf16"):
        linears.mhc_pre(impl, None)(None, layer, call.x, call.hc_fn, call.hc_scale, call.hc_base)
    assert seen == [True, False, True]


def test_an_empty_batch_goes_to_sglangs_own_mhc_pre():
    original = lambda layer, x, *rest, **more: ("original", layer, rest, more)  # noqa: E731
    ours = linears.mhc_pre("split_k", lambda: pytest.fail("nothing to mix"))
    found = ours(original, "layer", torch.empty(0, 4, 256), None, None, None, norm=1, forward_batch=2)
    assert found == ("original", "layer", (None, None, None, 1), {"forward_batch": 2})


@pytest.mark.parametrize("shape", [(5, 384), (1, 5, 384)])
def test_a_linear_layer_of_few_rows_is_ours(shape):
    case = sglang_gemm.Case("", 5, 256, 384)
    (call,) = sglang_gemm.make_inputs(case, device=DEVICE)
    given = linear_call(case.M, case.N, case.K, device=DEVICE)
    given["input"] = given["input"].view(shape)
    out = linears.gemm()(lambda *_: pytest.fail("the original"), **given)
    assert out.dtype == torch.bfloat16 and out.shape == (*shape[:-1], 256)
    right = sglang_gemm.reference(call), sglang_gemm.baseline(call)
    assert sglang_gemm.judge(call, (out.view(5, 256),), *right).passed


@pytest.mark.parametrize(
    "other",
    [
        {"input": torch.empty(65, 256, dtype=torch.bfloat16)},
        {"input": torch.empty(5, 13, 256, dtype=torch.bfloat16)},
        {"input": torch.empty(0, 256, dtype=torch.bfloat16)},
        {"input": torch.empty(3, 512, dtype=torch.bfloat16)[:, ::2]},
        {"input": torch.empty(3, 256, dtype=torch.float16)},
        {"input": torch.empty(3, 256).to(FP8), "input_scale": torch.empty(3, 2)},
        {"weight": torch.empty(128, 256, dtype=torch.int8)},
        {"weight": torch.empty(192, 256).to(FP8), "weight_scale": torch.empty(2, 2)},
        {"weight": torch.empty(256, 128).to(FP8).T},
        {"weight_scale": torch.empty(1, 4)[:, ::2]},
        {"weight_scale": torch.empty(128, 1, dtype=torch.int32)},
        {"block_size": [64, 128]},
        {"bias": torch.empty(128)},
        {"act_scale_ue8m0": True, "weight_bf16": None},
    ],
)
def test_what_our_gemm_is_not_made_for_stays_sglangs(other):
    given = linear_call(3, 128, 256, device="cpu") | other
    ours = linears.gemm(lambda ours: lambda *_: pytest.fail("ours"))
    seen, more = ours(lambda *arguments, **more: (arguments, more), **given)
    found = dict(zip(given, seen, strict=False)) | more
    assert found.keys() == given.keys() and all(found[name] is given[name] for name in given)


def test_the_request_that_proves_the_hooks_has_rows_for_our_gemm_and_for_sglangs():
    prompt = len(serving_launch._PROBE["input_ids"])
    for n, k in DSV4_FLASH.fp8_linears(tp=1).values():
        assert fp8_gemm.takes(1, n, k) and not fp8_gemm.takes(prompt, n, k)
    assert skinny_gemm.beats_cublas(1, 4 * DSV4_FLASH.index_head_dim)  # an indexer's compressor, in every release


@pytest.mark.parametrize(("rows", "n"), [(1, 96), (5, 72), (17, 96), (1, 512)])
def test_few_rows_of_the_gate_are_multiplied_by_ours(rows, n):
    x, w = gate_call(rows, n, 264)
    out = linears.gate()(lambda *_: pytest.fail("the original"), x, w)
    assert (out.dtype, out.shape, out.requires_grad) == (torch.float32, (rows, n), False)
    assert numerics.relative_error(out, x.double() @ w.detach().double().T) < 1e-5


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.empty(0, 64), torch.empty(8, 64)),
        (torch.empty(65, 64), torch.empty(8, 64)),
        (torch.empty(2, 64), torch.empty(512, 64)),
        (torch.empty(1, 64), torch.empty(1024, 64)),
        (torch.empty(1, 3, 64), torch.empty(8, 64)),
        (torch.empty(64, 3).T, torch.empty(8, 64)),
        (torch.empty(3, 64), torch.empty(64, 8).T),
    ],
)
def test_what_our_gate_is_not_made_for_stays_sglangs(x, y):
    ours = linears.gate(lambda ours: lambda *_: pytest.fail("ours"))
    original = lambda *given, **more: (*given, more)  # noqa: E731
    bf16 = torch.bfloat16
    for given in ((x.to(bf16), y.to(bf16)), (torch.empty(3, 64), y.to(bf16)), (torch.empty(3, 64, dtype=bf16), y)):
        *seen, more = ours(original, *given, hpc_kernel_min_m=8)
        assert more == {"hpc_kernel_min_m": 8} and all(a is b for a, b in zip(seen, given, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "n"), [(1, 256), (16, 256), (32, 256), (64, 256), (1, 512)])
def test_on_the_gpu_the_gate_follows_its_rows_through_another_stream_of_a_graph(rows, n):
    """As SGLang captures it: what makes the rows is in front of it on the main stream, what reads the logits behind."""
    raw, w = gate_call(rows, n, 4096, device="cuda")
    skinny_gemm.warm_up(n, 4096)
    given, other, graph = raw.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = given
        for _ in range(20):
            x = x * 2
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            logits = linears.gate()(lambda *_: pytest.fail("the original"), x, w)
        torch.cuda.current_stream().wait_stream(other)
        again = linears.gate()(lambda *_: pytest.fail("the original"), x * 2, w)
        found = logits + again
    for factor in (1, -3):
        given.copy_(raw * factor)
        for _ in range(3):
            graph.replay()
            assert numerics.relative_error(found, 3 * 2**20 * given.double() @ w.detach().double().T) < 1e-5


def test_slots_are_ours_and_all_else_of_the_metadata_sglangs():
    original = lambda *given: (given, "scalar", None)  # noqa: E731
    table = torch.tensor([[5, 8], [3, 1]], dtype=torch.int32, device=DEVICE)
    given = torch.tensor([256, 600], device=DEVICE), "positions", "locations", table, 256
    (*asked, wanted), scalar, found = adapters.compression_metadata()(original, *given)
    assert scalar == "scalar" and wanted is False and all(a is b for a, b in zip(asked, given, strict=True))
    assert found.tolist() == [[10, 11, -1, -1], [6, 7, 2, 3]]


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ((1, 2, 3, 4, 256, False), (1, 2, 3, 4, 256, False)),
        ((1, 2, 3), (1, 2, 3, None, 0, True)),
    ],
)
def test_metadata_without_slots_stays_sglangs(call, asked):
    ours = adapters.compression_metadata(lambda ours: lambda *_: pytest.fail("ours"))
    assert ours(lambda *given: given, *call) == asked


def test_our_mix_is_called_as_sglang_calls_its_own():
    (call,) = hc_head.make_inputs(hc_head.Case("small", 3, 256), device=DEVICE)
    given = [each.requires_grad_() if name != "x" else each for name, each in vars(call).items()]
    y = linears.head()(lambda *_: pytest.fail("the original"), *given, norm_eps=1.0, hc_eps=0.125)
    assert (y.shape, y.dtype, y.requires_grad) == ((3, 256), torch.bfloat16, False)
    expected = hc_head.composed(call, torch.float64, norm_eps=1.0, hc_eps=0.125)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 4, 256), (3, 2, 256), (3, 4, 100)])
def test_streams_that_our_mix_is_not_made_for_stay_sglangs(shape):
    ours = linears.head(lambda ours: lambda *_: pytest.fail("ours"))
    for x in (torch.empty(shape, dtype=torch.bfloat16), torch.empty(3, 4, 256, dtype=torch.float16)):
        given = x, "hc_fn", "hc_scale", "hc_base", 1e-6, 1e-6
        assert all(a is b for a, b in zip(ours(lambda *arguments: arguments, *given), given, strict=True))


def test_a_counting_workspace_that_is_large_enough_is_used_again(monkeypatch):
    small, large = torch.zeros(2, 400, dtype=torch.int32), torch.zeros(3, 800, dtype=torch.int32)
    monkeypatch.setattr(adapters, "_counts", {small.device: [small, large]})
    for shape, expected in (((2, 400), small), ((1, 8), small), ((3, 400), large), ((3, 801), None)):
        assert adapters._counting_workspace(*shape, small.device) is expected


@pytest.mark.gpu
def test_the_counting_workspace_is_kept_grows_and_is_none_in_a_capture_without():
    adapters._counts.clear()
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert adapters._counting_workspace(2, 400, device) is None
    small = adapters._counting_workspace(2, 400, device)
    large = adapters._counting_workspace(3, 800, device)
    assert adapters._counting_workspace(1, 8, device) is small and adapters._counting_workspace(3, 400, device) is large
    assert adapters._counting_workspace(adapters.MOST_ROWS + 1, 8, device) is None and not large.any()


def test_the_torch_indexers_differ_in_their_products_alone(index_call):
    given = vars(index_call)
    calls = [adapters.indexer(impl) for impl in ("torch_fallback", "torch_bf16")]
    arguments = [given[name] for name in ("q", "kv_cache", "weights", "context_lens", "block_table")]
    exact, rounded = (call(*arguments, None, index_call.max_context_len) for call in calls)
    seen = exact > -INF
    assert torch.equal(seen, rounded > -INF) and not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded[seen], exact[seen], rtol=5e-2, atol=5e-2 * exact[seen].std().item())


def test_before_anything_is_captured_every_asked_kernel_is_warmed_up(monkeypatch):
    warmed = []
    for module in (sparse_mla, mqa_logits, topk, fp8_gemm, hc_pre, hc_head):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "warm_up", lambda device, name=name, **how: warmed.append((name, how)))
    monkeypatch.setattr(slots, "warm_up", lambda device: warmed.append(("slots", str(device))))
    monkeypatch.setattr(skinny_gemm, "warm_up", lambda n, k, device: warmed.append(("skinny_gemm", {"shape": (n, k)})))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity(), torch.nn.ParameterList())
    for shape in ((512, 64), (256, 64), (256, 64), (1024, 64), (64,)):
        model[2].append(torch.empty(shape, dtype=torch.bfloat16))
    for shape in ((256, 128), (128, 384), (128, 384), (192, 128), (4, 128, 128)):
        weight = torch.nn.Parameter(torch.empty(shape).to(FP8), requires_grad=False)
        model[1].register_parameter(f"weight{len(model[1]._parameters)}", weight)
    model[1].tp_q_head_num = 8
    runner = types.SimpleNamespace(model=model)

    def start(**asked: str) -> list[tuple[str, dict]]:
        warmed.clear()
        made = []
        init = adapters.warm_up(asked)
        init(lambda backend, runner, **more: made.append((backend, more)), "backend", runner, skip_prefill=True)
        assert made == [("backend", {"skip_prefill": True})]
        return list(warmed)

    assert start(attention="mma") == [("sparse_mla", {"heads": 8, "impl": "mma"})]
    assert start(indexer="triton", topk="triton") == [("mqa_logits", {"maxima": (False,)}), ("topk", {})]
    served = {"shapes": [(128, 384), (256, 128)], "impls": ("split_k_linear",)}
    assert start(gemm="split_k", tables="tuned") == [("fp8_gemm", served)]
    assert start(gate="split_k") == [("skinny_gemm", {"shape": shape}) for shape in ((256, 64), (512, 64))]
    assert start(slots="triton") == [("slots", "cpu")]
    assert start(head="split_k") == [("hc_head", {})]
    assert start(mhc="split_k_bf16") == [("hc_pre", {"weights": torch.bfloat16})]
    assert start(indexer="torch_bf16", mhc="bf16", sm120_path="forced") == []
