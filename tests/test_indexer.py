"""Logits and top-k together: the selection against float64, maxima handed over, attention over what was selected."""

from dataclasses import replace

import pytest
import torch

from dsv4lab import hardware, numerics
from dsv4lab.kernels import indexer, mqa_logits, sparse_mla, topk
from dsv4lab.kernels.launch import frozen

DEVICE = "cpu" if hardware.probe() is None else "cuda"
IMPLS = ("triton", "fused")


def one(seed=0, k=37, **shape):
    defaults = dict(name="test", B=2, max_len=700, actual=600, H=16)
    call = indexer.make_inputs(indexer.Case(**(defaults | shape)), device=DEVICE, seed=seed)[0]
    return replace(call, k=k)


def select(call, impl, **options):
    """(slots, positions) of a call on outputs full of canaries."""
    rows = call.q.shape[0] * call.q.shape[1]
    out, raw = (torch.full((rows, call.k), -77, dtype=torch.int32, device=DEVICE) for _ in range(2))
    arguments = {name: value for name, value in vars(call).items() if name != "k"}
    indexer.indexer(**arguments, out_page_indices=out, out_raw_indices=raw, impl=impl, **options)
    return out, raw


@pytest.mark.parametrize("impl", indexer.IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [{}, {"next_n": 3, "lengths": "mixed"}, {"B": 34, "max_len": 130, "actual": 100}])
def test_every_implementation_selects_what_float64_does(impl, shape):
    call = one(**shape)
    verdict = indexer.judge(call, indexer.prepare(impl, call)(), indexer.reference(call), indexer.baseline(call))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "shape", [{}, {"max_len": 5000, "actual": 4700}, {"max_len": 20_000, "actual": 17_000, "B": 1}]
)
@pytest.mark.parametrize("next_n", [1, 2])
def test_group_maxima_from_the_logits_kernel_change_nothing(shape, next_n):
    call = one(next_n=next_n, lengths="mixed", **shape)
    for mine, theirs in zip(select(call, "fused"), select(call, "triton"), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_selection_is_exact_in_the_kernels_own_logits(impl):
    call = one(lengths="mixed")
    arguments = {name: value for name, value in vars(call).items() if name != "k"}
    scores = mqa_logits.fp8_paged_mqa_logits(**arguments, schedule_meta=None)
    ranked = topk.Inputs(scores, call.context_lens, call.block_table, 64, call.k)
    assert torch.equal(select(call, impl)[0], topk.reference(ranked)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_b5_no_keys_at_all(impl):
    call = one(B=4, max_len=4096, actual=100)
    for lens, found in (([0, 0, 0, 0], [0] * 4), ([0, 1, 0, 100], [0, 1, 0, 37])):
        call.context_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        slots, positions = select(call, impl)
        assert (slots >= 0).sum(1).tolist() == found and (positions >= 0).sum(1).tolist() == found


@pytest.mark.parametrize("impl", IMPLS)
def test_b17_attention_over_the_selection(impl):
    """8 keys: with k 8 it is dense attention, bit for bit; with k 2 it is attention over the two best keys."""
    call = one(B=1, max_len=64, actual=8, k=8)
    (attention,) = sparse_mla.make_inputs(
        sparse_mla.Case("", 1, 4, window=1, topk=8, extra_page=64), device=DEVICE
    )  # fmt: skip
    pages = attention.extra_k_cache.shape[0]
    call.block_table = torch.full_like(call.block_table, pages - 1)
    attention.extra_topk_length = None

    def attend(slots):
        return sparse_mla.sparse_mla_decode(**vars(replace(attention, extra_indices_in_kvcache=slots[:, None])))[0]

    dense = ((pages - 1) * 64 + torch.arange(8, device=DEVICE)).int()[None]
    assert numerics.bitwise_equal(attend(select(call, impl)[0]), attend(dense))
    slots = select(replace(call, k=2), impl)[0]
    best = mqa_logits.reference(call)[0][0, :8].topk(2).indices.sort().values
    assert torch.equal(slots[0], dense[0, best])
    assert not numerics.bitwise_equal(attend(slots), attend(dense))


@pytest.mark.parametrize("impl", IMPLS)
def test_with_all_buffers_given_nothing_else_is_written(impl):
    call = one()
    logits = torch.full((2, 701), float("nan"), device=DEVICE)
    workspace = torch.empty(topk.workspace_shape(2, 700, call.k), dtype=torch.int32, device=DEVICE)
    found = select(call, impl, logits=logits[:, :700], workspace=workspace)
    assert logits[:, 600:].isnan().all() and not logits[:, :600].isnan().any()
    assert torch.equal(found[0], select(call, impl)[0])


def test_bad_options_are_named():
    call = one()
    with pytest.raises(ValueError, match="impl must be triton or fused, got 'torch'"):
        select(call, "torch")
    with pytest.raises(ValueError, match="impl must be one of torch_fallback"):
        indexer.prepare("fast", call)


def test_the_verdict_counts_what_was_missed():
    call = one()
    expected, usual = indexer.reference(call), indexer.baseline(call)
    (found,) = indexer.prepare("fused", call)()
    found[0, :30] = -1
    assert not indexer.judge(call, (found,), expected, usual).passed


def test_every_launch_is_listed_for_the_compiler():
    names = {step[0].__name__ for _, steps in indexer.static_launches("sm_120") for step in steps}
    assert names == {"logits_kernel", "topk_kernel"}


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("actual", [600, 5000, 70_000, 262_144, 262_208])
def test_recall_at_512(impl, actual):
    call = one(B=4, max_len=262_208, actual=actual, H=64, k=512)
    verdict = indexer.judge(call, indexer.prepare(impl, call)(), indexer.reference(call), indexer.baseline(call))
    assert verdict.passed and verdict.error < 0.01, verdict


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLS)
def test_capture_at_64_rows_and_a_million_tokens_replays_other_lengths_bitwise(impl):
    """Warmed up by the entry point alone, captured frozen, replayed with other lengths and with 5 live rows of 64."""
    case = indexer.Case("", 64, 262_208, 40_000, lengths="mixed")
    captured, *others = indexer.make_inputs(case, device="cuda", sets=3)
    indexer.warm_up()
    launch = indexer.prepare(impl, captured)
    graph = torch.cuda.CUDAGraph()
    with frozen(), torch.cuda.graph(graph):
        (out,) = launch()
    for live, other in zip((64, 5), others, strict=True):
        for name in ("q", "weights", "context_lens", "block_table"):
            getattr(captured, name).copy_(getattr(other, name))
        captured.context_lens[live:], captured.block_table[live:] = 0, 999_999
        numerics.poison_(out)
        graph.replay()
        replayed = out.clone()
        assert numerics.bitwise_equal(replayed, launch()[0]) and (replayed[live:] == -1).all()


@pytest.mark.gpu
def test_b3_nothing_of_the_step_touches_the_maximum(kernels_of):
    launch = indexer.prepare("fused", one(B=32, max_len=262_208, actual=7000, H=64, k=512))
    launch()
    assert kernels_of(launch) == ["logits_kernel", "topk_kernel"]
