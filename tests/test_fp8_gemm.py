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
from dsv4lab.kv_cache import FP8
from dsv4lab.peers import deepgemm_fp8, peers_of, sglang_fp8, sglang_fp8_linear, sglang_fp8_tuned, stock_simt

DEVICE = "cpu" if hardware.probe() is None else "cuda"
INF = float("inf")
CONFIGS = [Config(64, 2, 4), Config(32, 1, 3), Config(64, 2, 4, swap=True), Config(128, 1, 3)]


def operands(M, N=256, K=640, seed=0):
    return gemm.make_inputs(gemm.Case("", M, N, K), device=DEVICE, seed=seed)[0]


def arguments(call, **other):
    return {name: value for name, value in vars(call).items() if name != "unquantised"} | other


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
    given = arguments(call)
    out, workspace = gemm.empty(7, 256, 640, call.x.device)
    assert gemm.fp8_gemm(**given, out=out, workspace=workspace) is out
    assert numerics.bitwise_equal(gemm.fp8_gemm(**given), out)
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
        gemm.fp8_gemm(**arguments(CALL, **wrong))


# activations in bf16


def wild(M, K=1664, seed=0):
    """bf16 of all sizes, with all that a quantisation may stumble over, as many rows as there are."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(M, K, device=DEVICE, generator=generator)
    x *= torch.randint(-12, 12, (M, K), device=DEVICE, generator=generator).float().exp2()
    odd = torch.zeros(7, K, device=DEVICE)
    odd[1] = -0.0
    odd[2] = torch.linspace(-2e-10, 2e-10, K)  # about the floor of amax
    odd[3:] = x[:1]
    odd[3, 5], odd[4, :128], odd[5, 130:132] = float("nan"), float("nan"), torch.tensor([INF, -INF])
    odd[6, 1] = 3e38
    x[1:8] = odd[: M - 1]
    return x.bfloat16()


def linear(x, call, config=CONFIGS[0], sms=132):
    """(result, x quantised, its scales unless fused), into NaNs, planned for a GPU of so many SMs."""
    (M, K), N = x.shape, len(call.w)
    plan = plans.plan(M, N, K, config, sms)
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    quantised = 0 if config.fused else M * (K // 4 + K // 128)
    workspace = torch.full((plan.partials(M, N) + quantised,), float("nan"), device=DEVICE)
    for each in gemm.linear_launches(x, call.w, call.w_scale, out, workspace, plan=plan, arch="sm_90"):
        launch(*each)
    if config.fused:
        return (out,)
    quantised, scales = workspace[plan.partials(M, N) :].split([M * K // 4, M * K // 128])
    return out, quantised.view(FP8).view(M, K), scales.view(M, -1)


def same_bits(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) for mine, other in pairs)


@pytest.mark.parametrize("M", [1, 9, 64])
def test_an_activation_is_quantised_as_torch_would(M):
    x, call = wild(M), operands(1, K=1664)
    out, *found = linear(x, call)
    quantised, scales = gemm.quantised(x)
    if DEVICE == "cpu":  # a GPU divides approximately
        assert same_bits(found, (quantised, scales))
    assert torch.equal(found[1], scales)
    assert numerics.bitwise_equal(out, product(replace(call, x=found[0], x_scale=found[1])))


def test_what_is_special_in_an_activation():
    _, x, scales = linear(wild(8), operands(1, K=1664))
    rows = x.float()
    assert not x[1].view(torch.uint8).any() and (x[2].view(torch.uint8) == 0x80).all()
    floor = torch.tensor(1e-10) * (1 / 448)
    assert scales[1:3].eq(floor).all() and scales[3, 0] > floor == scales[3, 6]
    assert rows[3].min() == -448 and 0 < rows[3, 768:896].amax() < 448
    assert rows[4, 5] == -448 and rows[5, :128].eq(-448).all() and scales[5, 0] == scales[1, 0]
    assert scales[6, 1] == INF and rows[6, 130:132].eq(-448).all() and not rows[6, 132:256].any()


def test_quantised_values_are_the_nearest():
    x = torch.randn(5, 640, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    _, found, scales = linear(x, operands(1))
    exact = x.double() / scales.double().repeat_interleave(128, 1)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8).double()
    codes = codes[codes.isfinite()]
    least = (exact[..., None] - codes).abs().amin(-1)
    assert ((exact - found.double()).abs() <= least + 1e-4).all()  # but where the division decides


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("M", [1, 5, 17])
def test_a_linear_layer_is_its_quantisation_and_its_product(M, sms):
    call = operands(M, K=1664)
    for config in CONFIGS[::2]:
        out, *found = linear(call.unquantised, call, config, sms)
        assert numerics.bitwise_equal(out, product(replace(call, x=found[0], x_scale=found[1]), config, sms))
        assert numerics.bitwise_equal(out, *linear(call.unquantised, call, replace(config, fused=True), sms))
        assert_right(call, out)


@pytest.mark.parametrize("M", [1, 9, 64])
def test_every_block_quantises_as_the_kernel_in_front_does(M):
    x, call = wild(M), operands(1, K=1664)
    for config in CONFIGS[::2]:
        (fused,) = linear(x, call, replace(config, fused=True))
        assert numerics.bitwise_equal(fused, linear(x, call, config)[0])


def test_the_activations_of_a_case_are_what_they_are_quantised_to():
    call = operands(7)
    assert numerics.bitwise_equal(gemm.dequantised(call.x, call.x_scale).bfloat16(), call.unquantised)
    assert call.unquantised.abs().unique().numel() > 100


def test_rows_of_an_activation_may_be_strided_and_do_not_depend_on_each_other():
    call = operands(5)
    wide = torch.full((5, 1024), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :640] = call.unquantised
    clean, _, _ = linear(call.unquantised, call)
    assert numerics.bitwise_equal(linear(wide[:, :640], call)[0], clean)
    wide[2] = INF
    others = [0, 1, 3, 4]
    assert numerics.bitwise_equal(linear(wide[:, :640], call)[0][others], clean[others])


def test_the_public_linear_layer_allocates_what_it_needs():
    call = operands(7)
    given = call.unquantised, call.w, call.w_scale
    out, workspace = gemm.empty(7, 256, 640, call.x.device, linear=True)
    numerics.poison_(out), numerics.poison_(workspace)
    assert gemm.fp8_linear(*given, out=out, workspace=workspace) is out
    assert numerics.bitwise_equal(gemm.fp8_linear(*given), out)
    assert_right(call, out)
    assert gemm.fp8_linear(call.unquantised[:0], call.w, call.w_scale).shape == (0, 256)


BAD_LINEAR = [
    (r"x must be bfloat16 \[M, K\]", dict(x=CALL.x)),
    (r"x must be bfloat16 \[M, K\]", dict(x=torch.zeros(3, 644, dtype=torch.bfloat16, device=DEVICE)[:, :640])),
    ("must have M up to 64", dict(x=torch.zeros(65, 640, dtype=torch.bfloat16, device=DEVICE))),
    (r"w must be contiguous float8_e4m3fn \[256, 640\]", dict(w=CALL.w.float())),
    (r"w_scale must be contiguous float32 \[2, 5\]", dict(w_scale=CALL.w_scale.double())),
    ("workspace must be contiguous float32", dict(workspace=torch.empty(9, dtype=torch.int32, device=DEVICE))),
    ("workspace must start at a multiple of 16 bytes", dict(workspace=torch.empty(1 << 20, device=DEVICE)[1:])),
]


@pytest.mark.parametrize(("message", "wrong"), BAD_LINEAR, ids=[message for message, _ in BAD_LINEAR])
def test_bad_arguments_of_a_linear_layer_are_named(message, wrong):
    with pytest.raises(ValueError, match=message):
        gemm.fp8_linear(**(dict(x=CALL.unquantised, w=CALL.w, w_scale=CALL.w_scale) | wrong))


@pytest.mark.parametrize("impl", gemm.IMPLEMENTATIONS)
def test_implementations_pass_the_verdict(impl):
    call = operands(6)
    assert_right(call, *gemm.prepare(impl, call)())


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="impl must be one of bf16, split_k, split_k_linear, got 'fast'"):
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

    def per_token_group_quant_fp8(self, x, group_size, column_major_scales):
        assert (group_size, column_major_scales) == (128, False)
        return gemm.quantised(x)


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    module = FakeSGLang()
    for peer in (sglang_fp8, sglang_fp8_linear):
        monkeypatch.setattr(peer, "import_module", lambda name: module)
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
    assert_right(call, *sglang_fp8_linear.prepare(call)())
    assert sglang.took == [None, {"BLOCK_SIZE_M": 32}, None]
    assert sglang.get_w8a8_block_fp8_configs() is None  # as it was


def test_peers_say_why_they_cannot_run(monkeypatch):
    monkeypatch.setattr(sglang_fp8, "version", lambda name: "0.5.16")
    for module in (sglang_fp8, stock_simt):
        monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=["nowhere"]))
    assert sglang_fp8.unavailable().startswith("sglang 0.5.16 has its block-FP8 GEMM in another place: pip install")
    monkeypatch.setattr(sglang_fp8, "find_spec", lambda name: None)
    assert sglang_fp8.unavailable() == "sglang is not installed: pip install sglang==0.5.14"
    assert {each.IMPL for each in peers_of("fp8_gemm")} == {
        "sglang_fp8", "sglang_fp8_tuned", "sglang_fp8_linear", "deepgemm_fp8",
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", gemm.layers(1), ids=str)
def test_every_candidate_config_is_right(shape):
    for M, wanted in ((1, "split_k_linear"), (17, "split_k"), (33, "split_k_linear")):
        call = operands(M, *shape)
        expected, usual = gemm.reference(call), gemm.baseline(call)
        for name, (impl, _) in gemm.CANDIDATES.items():
            if impl == wanted:
                assert gemm.judge(call, gemm.prepare(name, call)(), expected, usual).passed, name


@pytest.mark.gpu
def test_a_warm_up_covers_every_number_of_rows():
    gemm.warm_up("cuda", gemm.layers(1))
    with frozen():
        for shape in gemm.layers(1):
            for M in (1, 3, 16, 40, 64):
                call = operands(M, *shape)
                for impl in ("split_k", "split_k_linear"):
                    assert_right(call, *gemm.prepare(impl, call)())


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["split_k", "split_k_linear"])
@pytest.mark.parametrize("M", [1, 32, 64])
def test_a_captured_graph_replays_new_values_bitwise(M, impl):
    call = operands(M, 1536, 4096)
    launch_it = gemm.prepare(impl, call)
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
        assert numerics.bitwise_equal(out, *gemm.prepare(impl, new)())
        assert_right(new, out)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 9, 33, 64])
@pytest.mark.parametrize("K", [1024, 1536, 8192])
def test_an_activation_is_quantised_bitwise_as_sglang_does(M, K):
    if reason := sglang_fp8_linear.unavailable():
        pytest.skip(reason)
    for seed in range(20):
        x = wild(M, K, seed)
        assert same_bits(linear(x, operands(1, K=K))[1:], sglang_fp8_linear.quantise(x))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", gemm.layers(1), ids=str)
def test_a_chain_of_layers_waits_for_what_it_reads(shape):
    """Each layer's activation is made just in front of it, and by the layer in front."""
    call = operands(33, *shape)
    N, K = shape

    def chain(x):
        for _ in range(8):
            out = gemm.fp8_linear(x, call.w, call.w_scale)
            x = out.repeat(1, -(-K // N))[:, :K].div(out.abs().amax()).contiguous()
            yield out, x

    eager = []
    for out, _ in chain(call.unquantised):
        torch.cuda.synchronize()
        eager.append(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [out for out, _ in chain(call.unquantised)]
    for _ in range(20):
        for out in captured:
            numerics.poison_(out)
        graph.replay()
        assert all(numerics.bitwise_equal(*pair) for pair in zip(captured, eager, strict=True))


@pytest.mark.gpu
def test_layers_on_two_streams_of_one_graph_wait_for_what_they_read():
    call = operands(17, 4096, 2048)
    base, side = call.unquantised.clone(), torch.cuda.Stream()

    def both():
        x = base * 2
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            beside = gemm.fp8_linear(x, call.w, call.w_scale)
        out = gemm.fp8_linear(x, call.w, call.w_scale)
        here.wait_stream(side)
        return x, out, beside, out + beside

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, *found = both()
    for seed in range(20):
        base.copy_(operands(17, 4096, 2048, seed).unquantised)
        expected = gemm.fp8_linear(base * 2, call.w, call.w_scale)
        for out in found:
            numerics.poison_(out)
        graph.replay()
        for out, right in zip(found, (expected, expected, expected + expected), strict=True):
            assert numerics.bitwise_equal(out, right)


@pytest.mark.gpu
@pytest.mark.parametrize("peer", [sglang_fp8, sglang_fp8_linear, deepgemm_fp8], ids=lambda peer: peer.IMPL)
def test_rivals_give_the_same(peer):
    if reason := peer.unavailable():
        pytest.skip(reason)
    call = operands(33, 1536, 4096)
    assert_right(call, *peer.prepare(call)())
