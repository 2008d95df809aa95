import subprocess
import sys
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from dsv4lab import numerics, peers
from dsv4lab.peers import PEERS, flashmla, peers_of, stock_simt

PEER_MODULES = [pytest.param(peer, id=peer.IMPL) for peer in (flashmla, stock_simt)]


def _inputs(batch=2, s_q=3, heads=8, window=128, topk=100):
    """Caches are left out: the fakes below look at the arguments only."""
    indices = torch.arange(batch * s_q * window, dtype=torch.int32).view(batch, s_q, window)
    return SimpleNamespace(
        q=torch.randn(batch, s_q, heads, 512, dtype=torch.bfloat16),
        k_cache=torch.zeros(1, 256, 1, 584, dtype=torch.uint8),
        indices=indices,
        topk_length=torch.arange(1, batch + 1, dtype=torch.int32),
        attn_sink=torch.randn(heads),
        softmax_scale=512**-0.5,
        extra_k_cache=torch.zeros(1, 64, 1, 584, dtype=torch.uint8),
        extra_indices_in_kvcache=indices[..., :topk],
        extra_topk_length=torch.arange(batch, dtype=torch.int32),
    )


FAKE_FLASHMLA = """
import torch
CALLS = []
def get_mla_metadata():
    return object(), None
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, **keywords):
    CALLS.append(dict(keywords, q=q, metadata=metadata))
    return q * 2, q.float().sum(-1).transpose(1, 2)
"""

FAKE_STOCK = """
import torch
def flash_mla_sparse_decode_triton(q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale,
                                   extra_k_cache=None, extra_indices=None, extra_topk_length=None):
    assert q.shape[1] == 1 and indices.shape[:2] == q.shape[:2] and topk_length.shape == q.shape[:1]
    per_row = indices[:, 0, 0] * 1000.0 + topk_length
    if extra_k_cache is not None:
        per_row = per_row + extra_indices[:, 0, 0] * 1000.0 + extra_topk_length
    out = per_row[:, None, None, None].expand(q.shape).contiguous()
    return out, (out[..., 0] + attn_sink).permute(0, 2, 1)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installable fakes, first on the path; a real sglang is not seen, wherever it is installed."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(stock_simt, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    for name in ("flash_mla", "sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    invalidate_caches()
    yield tmp_path
    sys.modules.pop("flash_mla", None)
    stock_simt.load.cache_clear()


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    invalidate_caches()
    return path


def test_every_rival_of_an_experiment_is_listed():
    for experiment, names in PEERS.items():
        assert [peer.IMPL for peer in peers_of(experiment)] == list(names)
    assert peers_of("nothing") == []


@pytest.mark.parametrize("peer", PEER_MODULES)
def test_unavailable_gives_the_reason_and_the_command(peer, monkeypatch):
    for module in (peers, stock_simt):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "is not installed: pip install" in peer.unavailable()
    assert "\n" not in peer.unavailable()


@pytest.mark.parametrize(
    ("peer", "installed", "capability", "reason"),
    [
        (flashmla, "flash_mla/__init__.py", (12, 0), "sm_120"),
        (stock_simt, f"sglang/{stock_simt._PLACES[0]}", (8, 0), "sm_80"),
    ],
)
def test_unavailable_knows_which_gpus_run_it(peer, installed, capability, reason, site, monkeypatch):
    _write(site / installed, "")
    monkeypatch.setattr(peers, "version", lambda package: "1.0.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA GPU" in peer.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert reason in peer.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert peer.unavailable() is None


def test_another_flash_mla_is_not_mistaken_for_the_one_with_sm_90_kernels(site, monkeypatch):
    def unknown(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(peers, "version", unknown)
    _write(site / "flash_mla/__init__.py", "")
    assert "not the build of sgl-flash-mla" in flashmla.unavailable()


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (8, 64), (64, 64), (96, 128), (128, 128)])
def test_flashmla_pads_heads_and_index_widths(heads, padded, site):
    _write(site / "flash_mla/__init__.py", FAKE_FLASHMLA)
    inputs = _inputs(heads=heads)
    out, lse = flashmla.prepare(inputs)()
    call = sys.modules["flash_mla"].CALLS[-1]
    assert call["q"].shape == (2, 3, padded, 512) and call["attn_sink"].shape == (padded,)
    assert not call["q"][:, :, heads:].any()
    assert call["extra_indices_in_kvcache"].shape[-1] == 128
    assert (call["extra_indices_in_kvcache"][..., 100:] == -1).all()
    assert call["indices"] is inputs.indices and call["use_legacy"]
    assert torch.equal(out, inputs.q * 2)
    assert torch.equal(lse, inputs.q.float().sum(-1).transpose(1, 2))


def test_flashmla_fills_its_metadata_before_any_capture(site):
    _write(site / "flash_mla/__init__.py", FAKE_FLASHMLA)
    launch = flashmla.prepare(_inputs())
    calls = sys.modules["flash_mla"].CALLS
    assert len(calls) == 1
    launch()
    assert calls[0]["metadata"] is calls[1]["metadata"] and calls[0]["q"] is calls[1]["q"]


def test_flashmla_refuses_more_heads_than_it_has(site):
    _write(site / "flash_mla/__init__.py", FAKE_FLASHMLA)
    with pytest.raises(ValueError, match="H must be at most 128 for FlashMLA, got 129"):
        flashmla.prepare(_inputs(heads=129))


@pytest.mark.parametrize("place", stock_simt._PLACES)
@pytest.mark.parametrize("regular", [True, False])
def test_stock_file_is_found_and_loaded_without_importing_sglang(place, regular, site):
    path = _write(site / "sglang" / place, FAKE_STOCK)
    if regular:
        _write(site / "sglang/__init__.py", "raise ImportError('sglang was imported')")
    assert stock_simt.source_file() == path
    stock_simt.prepare(_inputs())()
    assert "sglang" not in sys.modules
    assert len(stock_simt.notes(None)["source_sha256"]) == 64


def test_stock_folds_the_queries_into_the_batch_and_back(site):
    _write(site / "sglang" / stock_simt._PLACES[0], FAKE_STOCK)
    inputs = _inputs()
    out, lse = stock_simt.prepare(inputs)()
    first = inputs.indices[..., 0] * 2000.0 + (inputs.topk_length + inputs.extra_topk_length)[:, None]
    assert torch.equal(out, first[:, :, None, None].expand(2, 3, 8, 512))
    assert torch.equal(lse, (first[:, :, None] + inputs.attn_sink).transpose(1, 2))


def test_stock_takes_a_length_for_each_query(site):
    _write(site / "sglang" / stock_simt._PLACES[0], FAKE_STOCK)
    inputs = _inputs()
    by_row = stock_simt.prepare(inputs)()
    inputs.topk_length = inputs.topk_length[:, None].expand(2, 3)
    assert torch.equal(stock_simt.prepare(inputs)()[0], by_row[0])
    inputs.topk_length = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    out, _ = stock_simt.prepare(inputs)()
    first = inputs.indices[..., 0] * 2000.0 + inputs.topk_length + inputs.extra_topk_length[:, None]
    assert torch.equal(out[..., 0, 0], first)


@pytest.mark.parametrize("peer", PEER_MODULES)
def test_window_only_layers_have_no_extra_cache(peer, site):
    _write(site / "flash_mla/__init__.py", FAKE_FLASHMLA)
    _write(site / "sglang" / stock_simt._PLACES[0], FAKE_STOCK)
    inputs = _inputs()
    inputs.extra_k_cache = inputs.extra_indices_in_kvcache = inputs.extra_topk_length = None
    out, lse = peer.prepare(inputs)()
    assert out.shape == (2, 3, 8, 512) and lse.shape == (2, 8, 3)


def test_importing_the_adapters_imports_no_rival():
    code = "from dsv4lab.peers import peers_of; peers_of('sparse_mla_decode'); import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "dsv4lab.peers.flashmla" in loaded
    assert not {"flash_mla", "sglang"} & set(loaded)


@pytest.mark.gpu
@pytest.mark.parametrize("peer", PEER_MODULES)
@pytest.mark.parametrize("case", ["b4_h64", "b4_h8", "b32_h64_window", "b16_h64_sq2", "b7_h12_odd"])
def test_the_rivals_agree_with_the_reference(peer, case):
    if reason := peer.unavailable():
        pytest.skip(reason)
    from dsv4lab.kernels import sparse_mla

    (inputs,) = sparse_mla.make_inputs(sparse_mla.CASES[case], device="cuda", seed=1)
    out, _ = peer.prepare(inputs)()
    reference, baseline = sparse_mla.reference(inputs)[0], sparse_mla.baseline(inputs)[0]
    assert numerics.check(out, reference, baseline).passed
