"""Products of few rows against float64: every way to split and to combine, odd shapes, bad input, repeatability."""

import json
import os
import subprocess
import sys
from itertools import product as pairs

import pytest
import torch

from dsv4lab import hardware, numerics
from dsv4lab.kernels import skinny_gemm as gemm
from dsv4lab.kernels.launch import frozen
from dsv4lab.kernels.skinny_gemm import Dot, Split

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CONFIGS = [
    Dot(128, 4),
    *(Split(16, 32, 64, 128, 4, combine) for combine in ("launch", "pdl")),
    Split(32, 16, 128, 128, 2),
    Split(16, 8, 64, 64, 1, "pdl", whole=True),
    Split(16, 32, 64, 128, 4, "launch", whole=True),
]


def operands(M, N, K, weights=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(M, K, generator=g).bfloat16(), (torch.randn(N, K, generator=g) * K**-0.5).to(weights)
    return x.to(DEVICE), w.to(DEVICE), torch.randn(N, generator=g).to(DEVICE)


def product(x, w, *, config=None, **options):
    """The result of a call on NaNs, in a workspace of NaNs."""
    (M, K), N = x.shape, len(w)
    config = config or gemm.choose("sm_90", M, N, w.dtype == torch.float32).config
    out = torch.full((M, N), float("nan"), device=DEVICE)
    workspace = torch.full((gemm.workspace_numel(M, N, K, config),), float("nan"), device=DEVICE)
    return gemm.skinny_gemm(x, w, out=out, workspace=workspace, config=config, **options)


def assert_right(out, x, w, scale=1.0, bias=0.0):
    """An fp32 product of the operands as they are; on a GPU fp32 weights count with 16 of their bits."""
    assert numerics.relative_error(out, scale * (x.double() @ w.double().T) + bias) < 1e-5


def rows(config, M):
    """M, or 2 where a block has one output and interpreting M rows of them takes M times as long."""
    return min(M, 2) if isinstance(config, Dot) and DEVICE == "cpu" else M


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(
    ("M", "N", "K", "weights"), [(1, 24, 256, torch.bfloat16), (18, 19, 264, torch.float32), (7, 1, 8, torch.bfloat16)]
)
def test_every_way_to_split_and_to_combine(config, M, N, K, weights):
    x, w, bias = operands(rows(config, M), N, K, weights)
    assert_right(product(x, w, config=config, scale=0.25, bias=bias), x, w, 0.25, bias)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_bias_is_optional(config):
    x, w, _ = operands(2, 3, 136)
    assert_right(product(x, w, config=config), x, w)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_the_table_is_right_for_any_number_of_rows(weights):
    for M in (1, 4, 5, 17, 129):
        x, w, _ = operands(M, 3, 64, weights)
        assert_right(product(x, w), x, w)


def test_rows_and_outputs_may_be_strided():
    x, w, _ = operands(5, 21, 128)
    wide = torch.full((5, 4, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, 1] = x
    out = torch.full((5, 40), float("nan"), device=DEVICE)
    gemm.skinny_gemm(wide[:, 1], w, out=out[:, 3:24], config=CONFIGS[2])
    assert_right(out[:, 3:24], x, w)
    assert out[:, :3].isnan().all() and out[:, 24:].isnan().all()


def test_large_values_do_not_overflow_on_the_way():
    x, w, _ = operands(3, 8, 64)
    x, w = x * 1e20, w * 1e15
    assert_right(product(x, w, config=CONFIGS[1]), x, w)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_bitwise_the_same_in_every_run(config):
    x, w, _ = operands(rows(config, 17), 5, 512)
    first = product(x, w, config=config)
    for _ in range(1 if DEVICE == "cpu" else 50):
        assert numerics.bitwise_equal(product(x, w, config=config), first)


def test_rows_do_not_depend_on_each_other():
    x, w, _ = operands(4, 3, 256)
    poisoned = x.clone()
    poisoned[2] = float("nan")
    for config in CONFIGS:
        clean, dirty = product(x, w, config=config), product(poisoned, w, config=config)
        others = [0, 1, 3]
        assert numerics.bitwise_equal(dirty[others], clean[others]) and dirty[2].isnan().all()


def test_no_rows_is_no_launch():
    x, w, _ = operands(0, 24, 64)
    assert gemm.skinny_gemm(x, w).shape == (0, 24)


@pytest.mark.parametrize("impl", gemm.IMPLEMENTATIONS)
def test_implementations_pass_the_verdict(impl):
    (call,) = gemm.make_inputs(gemm.CASES["odd_m7"], device=DEVICE)
    expected, usual = gemm.reference(call), gemm.baseline(call)
    assert gemm.judge(call, gemm.prepare(impl, call)(), expected, usual).passed
    assert gemm.config(gemm.CASES["odd_m7"]) == {"name": "odd", "M": 7, "N": 21, "K": 600, "batch": 1}


def test_fp32_weights_keep_what_bf16_ones_lose():
    (call,) = gemm.make_inputs(gemm.CASES["odd_m7"], device=DEVICE)
    (expected,) = gemm.reference(call)
    kept, lost = (
        numerics.relative_error(gemm.prepare(impl, call)()[0], expected) for impl in ("split_k_w32", "split_k")
    )
    assert kept < 1e-5 and 1e-3 < lost < 4e-3


def test_an_implementation_refuses_what_it_is_not_for():
    (router,) = gemm.make_inputs(gemm.Case("tiny", "router_gate", 1), device=DEVICE)
    (bmm,) = gemm.make_inputs(gemm.Case("tiny", "indexer_bmm", 3, 2), device=DEVICE)
    for impl, call, message in (
        ("fp32", router, "fp32 is what SGLang forces on other layers, got router_gate"),
        ("split_k_w32", router, "split_k_w32 is for layers with fp32 weights, got router_gate"),
        ("split_k", bmm, "split_k takes one product, not a batch of 2"),
        ("fast", router, "impl must be one of fp32, bf16, split_k, split_k_w32, got 'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            gemm.prepare(impl, call)
    assert gemm.prepare("fp32", bmm)()[0].shape == (2, 3, 64)


X, W, BIAS = operands(3, 5, 64)
BAD = [
    (r"x must be bfloat16 \[M, K\]", dict(x=X.float())),
    (r"x must be bfloat16 \[M, K\]", dict(x=X.T)),
    ("K a multiple of 8", dict(x=X[:, :60].contiguous())),
    ("rows at multiples of 16 bytes", dict(x=torch.empty(3, 67, dtype=torch.bfloat16, device=DEVICE)[:, :64])),
    (r"w must be contiguous bfloat16 or float32 \[N, 64\]", dict(w=W.half())),
    (r"w must be contiguous bfloat16 or float32 \[N, 64\]", dict(w=W[:, :32])),
    (r"bias must be contiguous float32 \[5\]", dict(bias=BIAS[:4])),
    (r"out must be float32 \[3, 5\]", dict(out=torch.empty(3, 4, device=DEVICE))),
    ("workspace must be contiguous float32 with at least 512", dict(workspace=torch.empty(9, device=DEVICE))),
]


@pytest.mark.parametrize(("message", "wrong"), BAD, ids=[message for message, _ in BAD])
def test_bad_arguments_are_named(message, wrong):
    with pytest.raises(ValueError, match=message):
        gemm.skinny_gemm(**(dict(x=X, w=W, config=CONFIGS[2]) | wrong))


def test_an_unknown_combine_is_named():
    with pytest.raises(ValueError, match="got 'atomic'"):
        Split(16, 32, 64, 128, 4, "atomic")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config_for_any_shape(arch):
    assert all(line.startswith(("split_k, M ", "split_k_w32, M ")) for line in gemm.describe(arch))
    for M in (1, 2, 16, 17, 128, 129, 100_000):
        for N, fp32 in pairs((1, 24, 256, 4096), (False, True)):
            chosen = gemm.choose(arch, M, N, fp32)
            assert M <= chosen.max_m and N <= chosen.max_n and chosen.fp32 == fp32
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        gemm.describe("sm_70")


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_all_operands_are_asked_for_before_any_is_waited_for(arch):
    """In the machine code, which would rather save registers; a process of its own, as the interpreter is on here."""
    code = f"""
import json
from dsv4lab import static
from dsv4lab.kernels import skinny_gemm
for entry, steps in skinny_gemm.static_launches({arch!r}):
    if "N any" not in entry:  # what takes K in one step
        for each in steps:
            print(json.dumps([entry, static.instructions(static.compile_for({arch!r}, *each))]))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) > 4
    for entry, names in found:
        names = [name.split(".")[0] for name in names]
        asked = max(i for i, name in enumerate(names) if name == "LDG")
        assert not {"FADD", "FFMA", "HMMA", "STS"} & set(names[:asked]), entry


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["mhc_pre", "head_weights", "router_gate", "wkv_gate_c4"])
def test_every_candidate_config_is_right(layer):
    for M in (1, 33):
        (call,) = gemm.make_inputs(gemm.Case("", layer, M), device="cuda")
        expected, usual = gemm.reference(call), gemm.baseline(call)
        for name, (impl, _) in gemm.CANDIDATES.items():
            if impl == "split_k_w32" and call.w.dtype != torch.float32:
                continue
            assert gemm.judge(call, gemm.prepare(name, call)(), expected, usual).passed, name


@pytest.mark.gpu
def test_a_warm_up_covers_every_number_of_rows():
    gemm.warm_up(24, 16_384, torch.float32)
    with frozen():
        for M in (1, 3, 16, 40, 128, 300):
            x, w, _ = operands(M, 24, 16_384, torch.float32)
            assert_right(gemm.skinny_gemm(x, w), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("combine", ["launch", "pdl"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_a_captured_graph_replays_new_values_bitwise(combine, weights):
    x, w, _ = operands(33, 24, 16_384, weights)
    config = Split(16, 32, 256, 256, 8, combine)
    call = dict(x=x, w=w, config=config)
    gemm.skinny_gemm(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm.skinny_gemm(**call)
    for seed in range(20):
        x.copy_(operands(33, 24, 16_384, weights, seed)[0])
        out.fill_(float("nan"))
        graph.replay()
        assert numerics.bitwise_equal(out, gemm.skinny_gemm(**call))
        assert_right(out, x, w)


@pytest.mark.gpu
def test_nothing_but_the_kernels_runs(kernels_of):
    for layer, kernels in (("mhc_pre", ["combine_kernel", "split_kernel"]), ("router_gate", ["dot_kernel"])):
        (call,) = gemm.make_inputs(gemm.Case("", layer, 16 if layer == "mhc_pre" else 1), device="cuda")
        launch = gemm.prepare("split_k", call)
        launch()
        assert kernels_of(launch) == kernels
