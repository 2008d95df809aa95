"""Block-FP8 products of few rows against float64: every way to split, odd shapes, bad input, repeatability, peers."""

from dataclasses import replace
from itertools import product as product_of
from types import SimpleNamespace

import pytest
import torch

from dsv4lab import hardware, numerics, tuned
from dsv4lab.kernels import fp8_gemm as gemm
from dsv4lab.kernels.fp8_gemm import Config, plans
from dsv4lab.kernels.launch import frozen, launch
from dsv4lab.peers import deepgemm_fp8, sglang_fp8, sglang_fp8_tuned

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CONFIGS = [Config(64, 2, 4), Config(64, 1, 3), Config(128, 1, 3)]


def operands(M, N=256, K=640, seed=0):
    return gemm.make_inputs(gemm.Case("", M, N, K), device=DEVICE, seed=seed)[0]


def product(call, config=CONFIGS[0], sms=132):
    """The result on NaNs, in a workspace of NaNs, planned for a GPU of so many SMs."""
    (M, K), N = call.x.shape, len(call.w)
    plan = plans.plan(M, N, K, config, sms)
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    workspace = torch.full((plan.partials(M, N),), float("nan"), device=DEVICE)
    for each in gemm.launches(call, out, workspace, plan=plan, arch="sm_90"):
        launch(*each)
    return out


def assert_right(call, out):
    check = gemm.judge(call, (out,), gemm.reference(call), gemm.baseline(call))
    assert check.passed, check


@pytest.mark.parametrize("sms", [1, 12, 132])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("M", [1, 5, 16, 33, 64])
def test_every_way_to_split(M, config, sms):
    call = operands(M, K=1664)  # 13 steps: shares are uneven
    assert_right(call, product(call, config, sms))


def test_k_is_split_for_every_sm_and_no_share_is_empty():
    for N, K in (*gemm.layers(1), *gemm.layers(8), (128, 128)):
        for config in plans.SWEEP:
            plan = plans.plan(16, N, K, config, 132)
            assert (plan.splits - 1) * plan.steps < K // 128 <= plan.splits * plan.steps
            blocks = plan.splits * plan.tiles(16, N)[0]
            assert plan.splits == 1 or blocks <= config.blocks_per_sm * 132
    assert plans.plan(1, 4096, 8192, CONFIGS[0], 132).splits == 4 == plans.plan(1, 4096, 8192, CONFIGS[0], 128).splits
    assert plans.plan(1, 32768, 1024, CONFIGS[0], 132).splits == 1


def test_rows_may_be_strided_and_do_not_depend_on_each_other():
    call = operands(5)
    wide = torch.full((5, 1024), 0x7F, dtype=torch.uint8, device=DEVICE).view(call.x.dtype)
    wide[:, :640] = call.x
    clean = product(call)
    assert numerics.bitwise_equal(product(replace(call, x=wide[:, :640])), clean)
    call.x_scale[2] = float("nan")
    dirty, others = product(call), [0, 1, 3, 4]
    assert numerics.bitwise_equal(dirty[others], clean[others]) and dirty[2].isnan().all()


def test_scales_of_any_size_are_applied_in_fp32():
    call = operands(3)
    scaled = replace(call, x_scale=call.x_scale * 2.0**60, w_scale=call.w_scale * 2.0**-60)
    assert numerics.bitwise_equal(product(scaled), product(call))


def test_bitwise_the_same_in_every_run():
    call = operands(17, K=1664)
    first = product(call)
    for _ in range(1 if DEVICE == "cpu" else 50):
        assert numerics.bitwise_equal(product(call), first)


def test_the_public_call_allocates_what_it_needs():
    call = operands(7)
    arguments = call.x, call.w, call.x_scale, call.w_scale
    out, workspace = gemm.empty(7, 256, 640, call.x.device)
    assert gemm.fp8_gemm(*arguments, out=out, workspace=workspace) is out
    assert numerics.bitwise_equal(gemm.fp8_gemm(*arguments), out)
    assert_right(call, out)
    assert gemm.fp8_gemm(call.x[:0], call.w, call.x_scale[:0], call.w_scale).shape == (0, 256)


def test_it_says_what_it_takes():
    assert gemm.takes(1, 128, 128) and gemm.takes(64, 32768, 1024)
    assert not any(gemm.takes(*shape) for shape in ((0, 128, 128), (65, 128, 128), (1, 64, 128), (1, 128, 192)))


CALL = operands(3)
BAD = [
    (r"x must be float8_e4m3fn \[M, K\]", dict(x=CALL.x.float())),
    (r"x must be float8_e4m3fn \[M, K\]", dict(x=CALL.w.T[:3])),
    ("must have M up to 64, N and K multiples of 128", dict(x=CALL.x[:, :600])),
    ("must have M up to 64", dict(x=CALL.w[:65])),
    (r"w must be contiguous float8_e4m3fn \[256, 640\]", dict(w=CALL.w.float())),
    (r"x_scale must be contiguous float32 \[3, 5\]", dict(x_scale=CALL.x_scale[:2])),
    (r"x_scale must be contiguous float32 \[3, 5\]", dict(x_scale=CALL.x_scale.T.contiguous().T)),
    (r"w_scale must be contiguous float32 \[2, 5\]", dict(w_scale=CALL.w_scale.double())),
    (r"out must be contiguous bfloat16 \[3, 256\]", dict(out=torch.empty(3, 256, device=DEVICE))),
    ("workspace must be contiguous float32", dict(workspace=torch.empty(9, dtype=torch.int32, device=DEVICE))),
]


@pytest.mark.parametrize(("message", "wrong"), BAD, ids=[message for message, _ in BAD])
def test_bad_arguments_are_named(message, wrong):
    with pytest.raises(ValueError, match=message):
        gemm.fp8_gemm(**(vars(CALL) | wrong))


@pytest.mark.parametrize("impl", gemm.IMPLEMENTATIONS)
def test_implementations_pass_the_verdict(impl):
    call = operands(6)
    assert_right(call, *gemm.prepare(impl, call)())


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="impl must be one of bf16, split_k, got 'fast'"):
        gemm.prepare("fast", CALL)


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config_for_every_number_of_rows(arch):
    limits = [f"split_k, M <= {m}, N {n}" for m in (16, 32, 64) for n in ("<= 16384", "any")]
    assert [line.split(":")[0] for line in gemm.describe(arch)] == limits
    for M, N in product_of(range(1, 65), (128, 16384, 32768)):
        chosen = plans.choose(arch, M, N)
        assert M <= chosen.max_m and N <= chosen.max_n
    with pytest.raises(ValueError, match="no configuration for arch 'sm_80'"):
        gemm.describe("sm_80")


class FakeSGLang(SimpleNamespace):
    """SGLang's module: its wrapper looks for a table in it, and tells which config it took."""

    def __init__(self):
        super().__init__(get_w8a8_block_fp8_configs=lambda *shape: None, took=[])

    def w8a8_block_fp8_matmul_triton(self, A, B, As, Bs, block_size, output_dtype):
        configs = self.get_w8a8_block_fp8_configs(*B.shape, *block_size)
        self.took.append(configs and configs[min(configs)])
        return gemm.reference(gemm.Inputs(A, As, B, Bs))[0].to(output_dtype)


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    module = FakeSGLang()
    monkeypatch.setattr(sglang_fp8, "import_module", lambda name: module)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    return module


def test_sglang_runs_by_its_own_config_or_by_the_tuned_one_of_the_nearest_rows(sglang, tmp_path):
    call = operands(6)
    assert_right(call, *sglang_fp8.prepare(call)())
    with pytest.raises(ValueError, match=r"no tuned table for a weight \[256, 640\]: dsv4lab tune fp8-gemm"):
        sglang_fp8_tuned.prepare(call)
    path = tuned.gemm_path(tmp_path, "NVIDIA H200", 256, 640)
    tuned.write_sglang(path, {1: {"BLOCK_SIZE_M": 16}, 8: {"BLOCK_SIZE_M": 32}})
    assert_right(call, *sglang_fp8_tuned.prepare(call)())
    assert sglang.took == [None, {"BLOCK_SIZE_M": 32}]
    assert sglang.get_w8a8_block_fp8_configs() is None  # as it was


def test_peers_say_why_they_cannot_run(monkeypatch):
    monkeypatch.setattr(sglang_fp8, "find_spec", lambda name: None)
    assert sglang_fp8.unavailable() == "sglang is not installed: pip install sglang==0.5.14"
    assert {each.IMPL for each in (sglang_fp8, sglang_fp8_tuned, deepgemm_fp8)} == {
        "sglang_fp8", "sglang_fp8_tuned", "deepgemm_fp8",
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", gemm.layers(1), ids=str)
def test_every_candidate_config_is_right(shape):
    for M in (1, 33):
        call = operands(M, *shape)
        expected, usual = gemm.reference(call), gemm.baseline(call)
        for name in gemm.CANDIDATES:
            assert gemm.judge(call, gemm.prepare(name, call)(), expected, usual).passed, name


@pytest.mark.gpu
def test_a_warm_up_covers_every_number_of_rows():
    gemm.warm_up("cuda", gemm.layers(1))
    with frozen():
        for shape in gemm.layers(1):
            for M in (1, 3, 16, 40, 64):
                call = operands(M, *shape)
                assert_right(call, *gemm.prepare("split_k", call)())


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 32, 64])
def test_a_captured_graph_replays_new_values_bitwise(M):
    call = operands(M, 1536, 4096)
    launch_it = gemm.prepare("split_k", call)
    launch_it()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = launch_it()
    for seed in range(20):
        new = operands(M, 1536, 4096, seed)
        for old, fresh in zip(vars(call).values(), vars(new).values(), strict=True):
            old.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        assert numerics.bitwise_equal(out, *gemm.prepare("split_k", new)())
        assert_right(new, out)


@pytest.mark.gpu
@pytest.mark.parametrize("peer", [sglang_fp8, deepgemm_fp8], ids=lambda peer: peer.IMPL)
def test_rivals_give_the_same(peer):
    if reason := peer.unavailable():
        pytest.skip(reason)
    call = operands(33, 1536, 4096)
    assert_right(call, *peer.prepare(call)())
