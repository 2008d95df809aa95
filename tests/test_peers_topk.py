"""The adapters to SGLang's top-k, against stand-ins with its arguments; and what the verdict says of another order."""

import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
import torch

from dsv4lab.kernels import topk
from dsv4lab.peers import sglang_topk, sglang_topk_v2

BOTH = [pytest.param(peer, id=peer.IMPL) for peer in (sglang_topk, sglang_topk_v2)]


def select(scores, seq_lens, page_tables, out, page_size):
    """In no particular order; of equal scores the last ones."""
    call = topk.Inputs(scores.flip(1), seq_lens, page_tables, page_size, out.shape[1])
    positions = topk.selection(replace(call, seq_lens=torch.full_like(seq_lens, scores.shape[1])))
    out.copy_(topk.paged(call, scores.shape[1] - 1 - positions))


@pytest.fixture
def sglang(monkeypatch):
    module, seen = ModuleType("sglang.jit_kernel.dsv4"), []
    module.topk_transform_512 = lambda *given: select(*given)
    module.plan_topk_v2 = lambda seq_lens: ("plan", seq_lens)
    module.topk_transform_512_v2 = lambda *given: (seen.append(given[-1]), select(*given[:-1]))
    for name in ("sglang", "sglang.jit_kernel"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def tied(k: int = 512) -> topk.Inputs:
    """Two rows, whole, whose 512th and 513th largest scores are equal."""
    (call,) = topk.make_inputs(topk.Case("", 2, 1024, 1024, k=k), device="cpu")
    best = call.scores.sort(1, descending=True).indices
    call.scores.scatter_(1, best[:, 511:513], 0.0)
    return call


@pytest.mark.parametrize("peer", BOTH)
def test_its_selection_is_right_though_it_breaks_ties_another_way(peer, sglang):
    call = tied()
    out = peer.prepare(call)()
    expected = topk.reference(call)
    assert out[0].dtype == torch.int32 and not torch.equal(out[0].sort().values, expected[0].sort().values)
    assert topk.judge(call, out, expected, expected).passed
    assert sglang == ([("plan", call.seq_lens)] if peer is sglang_topk_v2 else [])


def test_the_verdict_is_as_strict_with_another_order():
    call = tied()
    expected = topk.reference(call)
    backwards = expected[0].flip(1)
    assert topk.judge(call, (backwards,), expected, expected).passed
    worst = topk.paged(call, call.scores.argmin(1, keepdim=True))
    assert not topk.judge(call, (torch.cat([backwards[:, 1:], worst], 1),), expected, expected).passed
    assert not topk.judge(call, (torch.cat([backwards[:, 1:], backwards[:, 1:2]], 1),), expected, expected).passed
    assert not topk.judge(
        call, (torch.cat([backwards[:, 1:], torch.full_like(worst, -1)], 1),), expected, expected
    ).passed


def test_positions_and_slots_are_two_ways_to_say_one_thing():
    (call,) = topk.make_inputs(topk.Case("", 3, 256, 200, k=64, lengths="mixed"), device="cpu")
    positions = topk.selection(call)
    assert torch.equal(topk.unpaged(call, topk.paged(call, positions)), positions)


@pytest.mark.parametrize("peer", BOTH)
def test_what_it_does_not_take_is_refused(peer, sglang):
    with pytest.raises(ValueError, match=r"takes k in .*, got k 37"):
        peer.prepare(tied(37))


@pytest.mark.parametrize("peer", BOTH)
def test_unavailable_gives_the_reason_and_the_command(peer, monkeypatch):
    monkeypatch.setattr(sglang_topk, "find_spec", lambda name: None)
    assert peer.unavailable() == "sglang is not installed: pip install sglang==0.5.14"
    monkeypatch.setattr(sglang_topk, "find_spec", lambda name: name)
    monkeypatch.setattr(sglang_topk, "version", lambda package: "0.5.23")
    assert "0.5.23 has its top-k in another place" in peer.unavailable()
    monkeypatch.setattr(sglang_topk, "version", lambda package: "0.5.14")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peer.unavailable() == "SGLang's top-k needs a CUDA GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("peer", BOTH)
@pytest.mark.parametrize("case", ["b32_max262208_len2048", "b8_max262208_len262144", "b8_ties", "b32_k1024"])
def test_on_the_gpu_it_selects_what_ours_does(peer, case):
    if reason := peer.unavailable():
        pytest.skip(reason)
    (call,) = topk.make_inputs(topk.CASES[case], device="cuda")
    expected = topk.reference(call)
    assert topk.judge(call, peer.prepare(call)(), expected, expected).passed, metadata.version("sglang")
