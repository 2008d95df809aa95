"""The adapters to SGLang's and DeepGEMM's MHC-pre, against stand-ins that say what they were given."""

import os
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dsv4lab import numerics, peers
from dsv4lab.kernels import hc_pre, skinny_gemm
from dsv4lab.peers import deepgemm_mhc, deepgemm_prenorm, stock_mhc, tilelang_mhc

HC_PEERS = [pytest.param(peer, id=peer.IMPL) for peer in (stock_mhc, tilelang_mhc, deepgemm_mhc)]


class _Switch:
    def __init__(self, name):
        self.name = name

    @contextmanager
    def override(self, value):
        os.environ[self.name] = str(value)
        yield
        del os.environ[self.name]


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's two functions, with its arguments and its result shapes; `gemm` is what `mhc_pre` found switched on."""
    seen = SimpleNamespace(gemm=[])

    def hc_split_sinkhorn(mixes, hc_scale, hc_base, hc_mult, sinkhorn_iters, eps):
        assert mixes.shape[1:] == (1, 24) and hc_mult == 4
        return tuple(part[:, None] for part in hc_pre.split(mixes[:, 0], hc_scale, hc_base, eps, sinkhorn_iters))

    def mhc_pre(
        residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat,
        norm_weight=None, norm_eps=None,
    ):  # fmt: skip
        assert (rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat) == (1e-6, 1e-6, 1e-6, 2, 20)
        assert os.environ["PREWARM"] == "False" and norm_eps == (None if norm_weight is None else 1e-6)
        seen.gemm.append(os.environ["PRENORM"])
        y, post, comb = hc_pre.composed(hc_pre.Inputs(residual, fn, hc_scale, hc_base, norm_weight), torch.float32)
        return post[..., None], comb, y.bfloat16()

    environ, mhc = ModuleType("sglang.srt.environ"), ModuleType("sglang.srt.layers.mhc")
    environ.envs = SimpleNamespace(
        SGLANG_OPT_DEEPGEMM_HC_PRENORM=_Switch("PRENORM"), SGLANG_DSV4_MHC_PREWARM=_Switch("PREWARM")
    )
    mhc.hc_split_sinkhorn, mhc.mhc_pre = hc_split_sinkhorn, mhc_pre
    for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, environ.__name__, environ)
    monkeypatch.setitem(sys.modules, mhc.__name__, mhc)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    stock_mhc._closure.cache_clear()
    yield seen
    stock_mhc._closure.cache_clear()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("peer", HC_PEERS)
def test_the_rivals_of_hc_pre_return_what_the_lab_does(peer, norm, sglang):
    (call,) = hc_pre.make_inputs(hc_pre.Case("test", 3, 256, norm), device="cpu")
    if norm and peer is stock_mhc:
        with pytest.raises(ValueError, match="leaves the norm to another kernel"):
            peer.prepare(call)
        return
    found, expected = peer.prepare(call)(), hc_pre.reference(call)
    assert hc_pre.judge(call, found, expected, hc_pre.baseline(call)).passed
    assert [each.shape for each in found] == [each.shape for each in expected] and found[0].dtype == torch.bfloat16
    wanted = {stock_mhc: [], tilelang_mhc: ["False"], deepgemm_mhc: ["True"]}
    assert sglang.gemm == wanted[peer] and "PRENORM" not in os.environ


def test_mhc_pre_gets_weights_as_the_checkpoint_has_them(sglang):
    (call,) = hc_pre.make_inputs(hc_pre.Case("test", 3, 256), device="cpu")
    call.hc_fn = call.hc_fn.bfloat16()
    with pytest.raises(ValueError, match=r"mhc_pre takes hc_fn in float32, got torch\.bfloat16"):
        tilelang_mhc.prepare(call)


@pytest.mark.parametrize("peer", HC_PEERS)
def test_what_is_missing_is_named_with_the_command(peer, monkeypatch):
    monkeypatch.setattr(stock_mhc, "find_spec", lambda name: None if name == "tilelang" else name)
    assert peer.unavailable() == f"tilelang is not installed: {stock_mhc.INSTALL}"
    monkeypatch.setattr(stock_mhc, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA GPU" in peer.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    missing = peer.unavailable()
    assert missing is None if peer is not deepgemm_mhc else missing.startswith("deep_gemm is not installed")


def test_deepgemms_partial_sums_are_added_up(monkeypatch):
    fake = ModuleType("deep_gemm")

    def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
        assert d.shape == (num_splits, len(a), len(b)) and sqr_sum.shape == d.shape[:2]
        for split, (x, w) in enumerate(zip(a.chunk(num_splits, 1), b.chunk(num_splits, 1), strict=True)):
            d[split] = x.float() @ w.T

    fake.tf32_hc_prenorm_gemm = tf32_hc_prenorm_gemm
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    (call,) = skinny_gemm.make_inputs(skinny_gemm.Case("test", "mhc_pre", 2), device="cpu")
    (out,) = deepgemm_prenorm.prepare(call)()
    assert numerics.relative_error(out, skinny_gemm.reference(call)[0]) < 1e-6
    (router,) = skinny_gemm.make_inputs(skinny_gemm.Case("test", "router_gate", 2), device="cpu")
    with pytest.raises(ValueError, match="takes fp32 weights and no batch, got router_gate"):
        deepgemm_prenorm.prepare(router)


def test_deepgemm_is_split_as_sglang_does():
    assert [deepgemm_prenorm.splits(M, 16_384) for M in (1, 64, 128, 192, 10_000)] == [64, 64, 64, 44, 1]
