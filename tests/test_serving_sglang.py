"""Against the real SGLang, where it is installed: its hook registry, its parser, and its torch kernels as oracles."""

import enum
import importlib.machinery
import importlib.util
import inspect
import os
import re
import socket
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

import torch
import triton

from dsv4lab import numerics, tuned, verdict
from dsv4lab.kernels import hc_head, launch, mqa_logits, sparse_mla
from dsv4lab.serving import arguments, bench, http, plugin, presets, releases, settings
from dsv4lab.serving.launch import Config
from dsv4lab.tune import candidates, fp8_gemm, moe


def stub(name: str, **attributes) -> None:
    module = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
    vars(module).update(attributes)
    sys.modules[name] = module


@pytest.fixture(scope="module", autouse=True)
def torchvision():
    """SGLang imports it whatever it serves, and there is none for a torch without CUDA: names are enough."""
    if importlib.util.find_spec("torchvision") is None:
        modes = "NEAREST NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS"
        names = dict(InterpolationMode=enum.Enum("InterpolationMode", modes), pil_to_tensor=None)
        stub("torchvision", __version__="0.26.0")
        stub(
            "torchvision.io", decode_jpeg=None, decode_image=None, ImageReadMode=enum.Enum("ImageReadMode", "RGB GRAY")
        )
        for place in ("", ".functional", ".v2", ".v2.functional"):
            stub(f"torchvision.transforms{place}", **names)


@pytest.fixture(scope="module")
def hooked(torchvision):
    """SGLang with all our kernels in its place, for the rest of this process."""
    from sglang.version import __version__

    ours = "attention=split_k,indexer=triton,topk=triton,gemm=split_k,gate=split_k,slots=triton,head=split_k,"
    plugin.install(settings.parse(f"{ours}sm120_path=forced,weights=random"), __version__)
    return releases.find(__version__)


def test_the_real_registry_puts_ours_where_sglang_looks(hooked):
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.layers.attention.dsv4 import compressor, indexer
    from sglang.srt.layers.quantization import fp8_utils
    from sglang.srt.model_loader import loader

    assert fp8_utils._dispatch_explicit_backend(fp8_utils.Fp8GemmRunnerBackend.TRITON) is plugin._resolve(
        hooked.gemm.targets[0]
    )
    assert deepseek_v4_backend._init_compression_metadata_triton is plugin._resolve(hooked.slots.targets[0])
    assert compressor.linear_bf16_fp32 is plugin._resolve(hooked.gate.targets[0])
    assert loader.initialize_dummy_weights is plugin._resolve(hooked.weights.targets[0])
    assert getattr(deepseek_v4_backend, "_is_sm120", True)  # later releases ask whenever they need to know
    assert plugin._resolve(hooked.sm120_path.targets[0])() is True
    for target in (*hooked.attention.targets, *hooked.indexer.targets, *hooked.topk.targets):
        assert plugin._resolve(target).__wrapped__.__module__.startswith("sglang.")
    assert vars(indexer)[hooked.topk.targets[0].rpartition(".")[2]] is plugin._resolve(hooked.topk.targets[0])


def test_attention_agrees_with_sglangs_torch_path(hooked):
    module = sys.modules[plugin._resolve(hooked.attention.targets[0]).__wrapped__.__module__]
    (call,) = sparse_mla.make_inputs(sparse_mla.Case("oracle", 2, 8, topk=64, lengths="mixed"), device="cpu")
    expected, _ = module._sm120_sparse_decode_fwd(
        call.q, call.k_cache, call.indices, call.topk_length, call.attn_sink, 512, call.softmax_scale,
        call.extra_k_cache, call.extra_indices_in_kvcache, call.extra_topk_length,
    )  # fmt: skip
    out, _ = plugin._resolve(hooked.attention.targets[0])(**vars(call), head_dim_v=512)
    assert numerics.relative_error(out, expected.view(out.shape).double()) < 1e-2


def test_logits_and_selection_agree_with_sglangs_torch_path(hooked):
    from sglang.srt.layers.attention.dsv4 import indexer

    (call,) = mqa_logits.make_inputs(mqa_logits.Case("oracle", 3, 896, 896, lengths="mixed"), device="cpu")
    lens, stock = call.context_lens.view(-1, 1), inspect.unwrap(indexer.fp8_paged_mqa_logits_torch_sm120)
    given = (call.q, call.kv_cache, call.weights, lens, call.block_table, None, call.max_context_len, False)
    expected, ours = stock(*given), plugin._resolve(hooked.indexer.targets[0])(*given)
    select = next(
        f for name, f in vars(indexer).items() if re.fullmatch(r"topk_transform(_512)?_pytorch_vectorized", name)
    )
    outs = [torch.full((3, 512), -7, dtype=torch.int32) for _ in range(2)]
    select(expected, call.context_lens, call.block_table, outs[0], 64)
    plugin._resolve(hooked.topk.targets[0])(ours, call.context_lens, call.block_table, outs[1], 64, None)
    seen = torch.arange(expected.shape[1]) < lens
    assert numerics.relative_error(ours[seen], expected[seen].double()) < 1e-2  # later releases multiply in bf16
    assert numerics.selection_overlap(outs[1], outs[0]).min() > 0.97


@pytest.mark.parametrize("rows", [3, 65])
def test_a_linear_layer_is_right_on_either_side_of_what_our_gemm_takes(hooked, monkeypatch, rows):
    from sglang.srt.layers.quantization import fp8_utils

    (call,) = fp8_gemm.make_inputs(fp8_gemm.Case("", rows, 256, 384), device="cpu")
    gemm = sys.modules[plugin._resolve(hooked.tables.targets[0]).__module__]
    monkeypatch.setattr(gemm, "get_w8a8_block_fp8_configs", lambda *_: None)
    quantised = []
    monkeypatch.setattr(
        fp8_utils, "per_token_group_quant_fp8", lambda x, *_, **__: quantised.append(x) or (call.x, call.x_scale)
    )
    linear = fp8_utils._dispatch_explicit_backend(fp8_utils.Fp8GemmRunnerBackend.TRITON)
    how = dict(weight=call.w, block_size=[128, 128], weight_scale=call.w_scale, input_scale=None, bias=None)
    out = linear(input=call.unquantised, **how)
    assert len(quantised) == (rows > 64)
    assert fp8_gemm.judge(call, (out,), fp8_gemm.reference(call), fp8_gemm.baseline(call)).passed


def test_the_router_s_gate_is_ours(hooked, monkeypatch):
    from sglang.srt.models import deepseek_v2

    monkeypatch.setattr(deepseek_v2, "_is_cuda", True)
    served = types.SimpleNamespace(enable_deterministic_inference=False)
    for name in ("get_global_server_args", "get_server_args"):
        monkeypatch.setattr(deepseek_v2, name, lambda: served, raising=False)
    sizes = types.SimpleNamespace(n_routed_experts=256, hidden_size=64, topk_method="noaux_tc", architectures=[""])
    gate = deepseek_v2.MoEGate(sizes, None, is_deepseek_v4=True).bfloat16()
    x = torch.randn(17, 64).bfloat16()
    gate.weight.data.copy_(torch.randn(256, 64))
    logits = gate(x)
    assert logits.dtype == torch.float32
    assert numerics.relative_error(logits, x.double() @ gate.weight.detach().double().T) < 1e-5


@pytest.mark.parametrize("lens", [[0, 1, 127, 128], [255, 1280, 1279, 1536], [4000, 129, 896, 384]])
def test_the_metadata_of_compressed_keys_is_bitwise_sglangs_own(hooked, lens):
    from sglang.srt.layers.attention import deepseek_v4_backend

    generator = torch.Generator().manual_seed(lens[0])
    lens = torch.tensor(lens, dtype=torch.int32)
    table = torch.randint(0, 2**20, (4, 6), dtype=torch.int32, generator=generator)
    locations = torch.randint(0, 2**20, (4,), generator=generator)
    given = lens, lens - 1, locations, table, 256
    ours = deepseek_v4_backend._init_compression_metadata_triton
    found, expected = ours(*given, compute_page_indices=True), inspect.unwrap(ours)(*given, compute_page_indices=True)
    assert len(found) == len(expected) and expected[-1].shape == (4, 12)
    for mine, theirs in zip(found, expected, strict=True):
        assert numerics.bitwise_equal(mine, theirs)


def test_the_model_mixes_its_streams_with_ours_as_with_its_own(hooked):
    from sglang.srt.models import deepseek_v4

    (call,) = hc_head.make_inputs(hc_head.Case("", 3, 256), device="cpu")
    model = types.SimpleNamespace(norm_eps=1e-6, hc_eps=1e-6)
    stock = inspect.unwrap(plugin._resolve(hooked.head.targets[0]))
    expected = stock(**vars(call), norm_eps=1e-6, hc_eps=1e-6)
    with launch.recorded() as made:
        for x in (call.x, torch.cat([call.x, call.x], 2)[:, :, :256]):
            y = deepseek_v4.DeepseekV4Model.hc_head(model, x, call.hc_fn, call.hc_scale, call.hc_base)
            assert numerics.relative_error(y, *hc_head.reference(call)) < 5e-3  # the interpreter cuts bf16 off
            assert numerics.relative_error(y, expected.double()) < 1e-3
    assert len(made) == 4


def test_sglang_reads_the_tables_as_they_are_written(hooked, monkeypatch, tmp_path):
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as moe

    gemm = sys.modules[plugin._resolve(hooked.tables.targets[0]).__module__]
    table = {32: {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_K": 128}, 1: {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_K": 64}}
    for module in (gemm, moe):
        monkeypatch.setattr(module, "get_device_name", lambda *_: "NVIDIA H200")
    path = tuned.write_sglang(tuned.gemm_path(tmp_path, "NVIDIA H200", 1536, 4096), table)
    monkeypatch.setattr(gemm, "__file__", str(path.parents[1] / "fp8_kernel.py"))  # its tables lie beside it
    monkeypatch.setattr(gemm, "_is_cuda", True)
    assert inspect.unwrap(gemm.get_w8a8_block_fp8_configs)(1536, 4096, 128, 128) == table
    for down in (False, True):
        tuned.write_sglang(tuned.moe_path(tmp_path, "NVIDIA H200", triton.__version__, 256, 256, down=down), table)
    monkeypatch.setenv(tuned.MOE_VARIABLE, str(tuned.sglang_folder(tmp_path)))
    monkeypatch.setattr(moe, "get_global_server_args", lambda: types.SimpleNamespace(enable_deterministic_inference=0))
    shapes = (256, 512, 4096), (256, 4096, 256)
    config, (for_down, _) = moe.try_get_optimal_moe_config(
        *shapes, 6, "fp8_w8a8", 20, block_shape=[128, 128], return_down_config=True
    )
    assert config == for_down == table[32]


@pytest.mark.parametrize("parts", [(16, 64, 128, 1, 4, 4), (64, 32, 64, 8, 4, 4), (32, 256, 128, 1, 8, 3)])
def test_the_kernels_of_sglang_are_right_as_they_are_tuned(hooked, parts):
    tile = candidates.tile(*parts)
    (call,) = fp8_gemm.make_inputs(fp8_gemm.Case("", 70, 256, 384), device="cpu")
    products = [moe.make_inputs(moe.Case(p, 9, 128, E=6, topk=3, hidden=256), device="cpu")[0] for p in ("up", "down")]
    for module, inputs in ((fp8_gemm, call), *((moe, product) for product in products)):
        right = module.reference(inputs), module.baseline(inputs)
        assert verdict.verdict(module, partial(module.prepare, tile), inputs, *right)["error"] < 5e-3
    right = fp8_gemm.reference(call), fp8_gemm.baseline(call)
    with pytest.raises(verdict.CheckFailed):  # two scales in one step, which the kernel does not have
        verdict.verdict(fp8_gemm, partial(fp8_gemm.prepare, tile | {"BLOCK_SIZE_K": 256}), call, *right)


@pytest.mark.parametrize("name", presets.PRESETS | presets.STAGES)
def test_the_real_parser_takes_every_preset(name):
    config = Config(model="a/b", preset=name)
    parsed = arguments.parse(config.argv("a/b"))
    assert (parsed.model_path, parsed.host) == ("a/b", "127.0.0.1")
    assert arguments.ranks(parsed) == config.from_preset.gpus


def test_the_real_parser_refuses_an_unknown_flag(capsys):
    with pytest.raises(SystemExit):
        arguments.parse(["--model-path", "a/b", "--no-such-flag", "1"])
    assert "unrecognized arguments: --no-such-flag 1" in capsys.readouterr().err


def test_the_real_benchmark_drives_a_wave(torchvision, monkeypatch):
    monkeypatch.setattr(bench, "clocks_now", lambda: None)
    if importlib.util.find_spec("datasets") is None:  # of which it uses nothing here
        stub("datasets", load_dataset=None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, Path(__file__).with_name("fake_sglang.py"), "--port", str(port)]
    server = subprocess.Popen(command, env=os.environ | {"DSV4LAB": ""}, stdout=subprocess.DEVNULL)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 20
        while not http.healthy(url) and time.monotonic() < end:
            time.sleep(0.05)
        plan = bench.Plan((2,), bench.Shape(8, 40), waves=2, driver="sglang")
        (found,) = bench.measure(url, plan, say=lambda text: None)
        assert (found.ok, len(found.accounts)) == (4, 2), found.headline()
        assert all((each["completed"], each["total_output_tokens"]) == (2, 80) for each in found.accounts)
        result = found.result()
        assert 0.5 < result["sglang_output_tok_s"] / result["output_tok_s"] < 1.05
        assert 0.8 < result["sglang_tpot_ms"] / result["tpot_ms"] < 1.3
    finally:
        server.kill()
        server.wait()
