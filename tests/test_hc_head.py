"""The head's mix against float64: every way to split, odd shapes, each row for itself, bad input, SGLang's kernel."""

from dataclasses import replace

import pytest
import torch

from dsv4lab import hardware, numerics
from dsv4lab.kernels import hc_head as head
from dsv4lab.kernels.hc_head import Config
from dsv4lab.kernels.launch import ColdKernel, frozen
from dsv4lab.peers import sglang_hc_head, stock_simt

pytest_plugins = ["compiler_on"]

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CONFIGS = [Config(256, 1, 256), Config(512, 4, 128), Config(128, 2, 512), Config(1024, 8, 1024)]


def one(T=5, hidden=256, seed=0):
    return head.make_inputs(head.Case("test", T, hidden), device=DEVICE, seed=seed)[0]


def run(call, config=CONFIGS[1], **numbers):
    """y of a call on NaNs, in a workspace of NaNs: it takes what it says and no more."""
    T, _, hidden = call.x.shape
    out, size = torch.empty(T, hidden, dtype=torch.bfloat16, device=DEVICE), head.workspace_numel(T, hidden, config)
    workspace = torch.full((size + 8,), float("nan"), device=DEVICE)
    buffers = dict(out=numerics.poison_(out), workspace=workspace[:size])
    assert head.hc_head(**vars(call), **numbers, **buffers, config=config) is out
    assert workspace[size:].isnan().all()
    return out


def assert_right(y, call, **numbers):
    """But for the spacing of bf16 (on a GPU rounded to nearest, cut off by the interpreter), as exact as fp32 sums."""
    right, size = head.composed(call, torch.float64, **numbers), call.x.double().abs().sum(1)
    assert ((y.double() - right).abs() <= 2.0**-7 * right.abs() + 2.0**-19 * size).all()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(("T", "hidden"), [(1, 256), (5, 776), (17, 64), (3, 8)])
def test_every_config_and_odd_shapes(config, T, hidden):
    call = one(T, hidden)
    assert_right(run(call, config), call)


def test_the_table_takes_any_number_of_rows():
    for T in (1, 6, 21, 130):
        call = one(T, 64)
        assert_right(head.hc_head(**vars(call)), call)


def test_the_numbers_of_a_model_are_arguments():
    call = one()
    found = run(call, norm_eps=1.0, hc_eps=0.125)
    assert_right(found, call, norm_eps=1.0, hc_eps=0.125)
    assert numerics.relative_error(found, *head.reference(call)) > 1e-2


def test_weights_count_with_all_their_bits():
    """Products that cancel but for what bf16 and TF32 would round away, made to count by their scale."""
    call = one(2)
    call.x[:] = 1
    call.hc_fn[:, ::2], call.hc_fn[:, 1::2] = 1 + 2.0**-20, -1
    call.hc_scale[:] = 2.0**10
    pre = torch.sigmoid(torch.tensor(512 * 2.0**-20 * 2**10).double() + call.hc_base.double().cpu())
    y = run(call).double().cpu()
    assert (y - pre.sum()).abs().max() < 2.0**-7 * pre.sum()
    call.hc_fn[:, ::2] = 1
    assert (run(call).double().cpu() - pre.sum()).abs().min() > 2.0**-5 * pre.sum()


def test_gates_saturate_and_a_quiet_row_is_normalised_by_its_own_mean_square():
    call = one(4)
    call.x[1] *= 1e-3
    call.x[2] = 0
    call.hc_base[:] = torch.tensor([50.0, -50.0, 200.0, 0.0], device=DEVICE)
    y = run(call)
    assert_right(y, call)
    assert not y[2].any()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_rows_do_not_depend_on_each_other_nor_on_what_the_buffers_held(config):
    call = one(9)
    clean = run(call, config)
    for row in (0, 4, 8):
        alone = replace(call, x=torch.full_like(call.x, float("nan")))
        alone.x[row] = call.x[row]
        found = run(alone, config)
        assert numerics.bitwise_equal(found[row], clean[row])
        assert found[[other for other in range(9) if other != row]].isnan().all()


def test_bitwise_the_same_in_every_run():
    call = one(3)
    first = run(call)
    for _ in range(1 if DEVICE == "cpu" else 50):
        assert numerics.bitwise_equal(run(call), first)


@pytest.mark.parametrize("impl", head.IMPLEMENTATIONS)
def test_implementations_pass_the_verdict_and_a_wrong_gate_does_not(impl):
    call = one(6)
    expected, usual = head.reference(call), head.baseline(call)
    (y,) = head.prepare(impl, call)()
    assert head.judge(call, (y,), expected, usual).passed
    assert not head.judge(call, (1.01 * y,), expected, usual).passed
    with pytest.raises(ValueError, match="impl must be one of torch, split_k, got 'fast'"):
        head.prepare("fast", call)


def test_the_public_call_allocates_what_it_needs():
    call = one(7)
    out, workspace = head.empty(7, 256, call.x.device)
    assert head.hc_head(*vars(call).values(), head.EPS, head.EPS, out=out, workspace=workspace) is out
    assert numerics.bitwise_equal(head.hc_head(**vars(call)), out)
    assert head.hc_head(**vars(one(0))).shape == (0, 256)


def test_it_says_what_it_takes():
    x = one().x
    assert head.takes(x) and head.takes(x[:1])
    assert not any(map(head.takes, (x[:0], x.half(), x[:, :2], x[0], x[:, :, :100])))


CALL = one(3)
BAD = [
    (r"x must be contiguous bfloat16 \[T, 4, hidden\], got torch.float32 \[3, 4, 256\]", dict(x=CALL.x.float())),
    (r"x must be contiguous .*, got torch.bfloat16 \[3, 2, 256\]", dict(x=CALL.x[:, :2].contiguous())),
    (r"x must be contiguous .* strides \(1024, 1, 4\)", dict(x=CALL.x.mT.contiguous().mT)),
    (r"x must have hidden a multiple of 8, got \[3, 4, 100\]", dict(x=CALL.x[:, :, :100].contiguous())),
    ("x must start at a multiple of 16 bytes", dict(x=CALL.x.flatten()[4 : 4 + 2048].view(2, 4, 256))),
    (r"hc_fn must be contiguous float32 \[4, 1024\]", dict(hc_fn=CALL.hc_fn.bfloat16())),
    (r"hc_fn must be contiguous float32 \[4, 1024\].*\[4, 512\]", dict(hc_fn=CALL.hc_fn[:, :512].contiguous())),
    (r"hc_scale must be contiguous float32 \[1\]", dict(hc_scale=CALL.hc_base)),
    (r"hc_base must be contiguous float32 \[4\]", dict(hc_base=CALL.hc_scale)),
    (r"out must be contiguous bfloat16 \[3, 256\]", dict(out=torch.empty(3, 256, device=DEVICE))),
    ("workspace must be contiguous float32 with at least 60", dict(workspace=torch.empty(59, device=DEVICE))),
]


@pytest.mark.parametrize(("message", "wrong"), BAD, ids=[message for message, _ in BAD])
def test_bad_arguments_are_named(message, wrong):
    with pytest.raises(ValueError, match=message):
        head.hc_head(**(vars(CALL) | wrong), config=CONFIGS[0])


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config_for_every_number_of_rows(arch):
    limits = [line.split(":")[0] for line in head.describe(arch)]
    assert limits == [f"split_k, {each}" for each in ("T <= 4", "T <= 16", "T <= 128", "any T")]
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        head.describe("sm_70")


def test_a_warm_up_covers_every_number_of_rows(compiled):
    compiled("""
        from dsv4lab.kernels import hc_head
        from dsv4lab.kernels.hc_head.plans import choose
        driver.set_active(Loads("sm_90"))
        hc_head.warm_up("cpu", hidden=512)
        for T in (1, 3, 16, 17, 300):
            (call,) = hc_head.make_inputs(hc_head.Case("", T, 512), device="cpu")
            call.hc_base = torch.empty(5)[1:]
            for ready in (False, True):
                numbers = dict(norm_eps=0.5, hc_eps=1e-6, weights_ready=ready)
                out, numbers["config"] = hc_head.empty(T, 512, call.x.device), choose("sm_90", T).config
                steps = hc_head.launches(call, *out, **numbers, arch="sm_90")
                assert all(is_warm(*each) for each in steps), T
    """)


@pytest.fixture
def sglang(monkeypatch, tmp_path):
    """Where its package lies, as far as the peer can see."""
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(stock_simt, "find_spec", lambda name: spec)
    return tmp_path


@pytest.mark.parametrize("place", sglang_hc_head._PLACES)
def test_sglangs_kernel_is_one_file_of_any_release(sglang, monkeypatch, place):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sglang_hc_head.unavailable().startswith("no sglang with mhc_head.py is installed (0.5.13 is the first")
    (sglang / place).parent.mkdir(parents=True)
    (sglang / place).write_text("def fused_hc_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps): return norm_eps, x")
    assert sglang_hc_head.unavailable() == "SGLang's kernel of the head's mix needs a CUDA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sglang_hc_head.unavailable() is None
    (found,) = sglang_hc_head.prepare(CALL)()
    assert found == (head.EPS, CALL.x) and len(sglang_hc_head.notes(CALL)["source_sha256"]) == 64


def test_ours_is_within_rounding_of_sglangs_own_kernel():
    if stock_simt.source_file(sglang_hc_head._PLACES) is None:
        pytest.skip("sglang is not installed")
    call = one(3)
    theirs, ours = sglang_hc_head.prepare(call)()[0], head.hc_head(**vars(call))
    assert_right(theirs, call)
    assert ((ours.double() - theirs.double()).abs() <= 2.0**-7 * theirs.double().abs() + 1e-5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", head.CANDIDATES)
def test_every_candidate_config_is_right(name):
    for T in (1, 33, 150):
        call = one(T, 4096)
        assert_right(*head.prepare(name, call)(), call)


@pytest.mark.gpu
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("T", [1, 16, 33, 300])
def test_a_captured_graph_replays_new_values_bitwise(T, ready):
    """Written inside the graph, right in front of the call: what is launched early waits for it."""
    call = one(T, 4096)
    new = call.x.clone()
    head.warm_up()
    graph = torch.cuda.CUDAGraph()
    with frozen(), torch.cuda.graph(graph):
        call.x.copy_(new)
        out = head.hc_head(**vars(call), weights_ready=ready)
    for seed in range(20):
        new.copy_(one(T, 4096, seed).x)
        out.fill_(float("nan"))
        graph.replay()
        assert numerics.bitwise_equal(out, head.hc_head(**vars(call)))
        assert_right(out, call)


@pytest.mark.gpu
def test_calls_in_a_row_do_not_overtake_each_other():
    """On one workspace: the sums of the next call are written when this one has read its own."""
    calls = [one(33, 4096, seed) for seed in range(8)]
    alone = [head.hc_head(**vars(call)) for call in calls]
    _, workspace = head.empty(33, 4096, calls[0].x.device)
    for _ in range(50):
        found = [head.hc_head(**vars(call), weights_ready=True, workspace=workspace) for call in calls]
        assert all(map(numerics.bitwise_equal, found, alone))


@pytest.mark.gpu
def test_a_variant_that_was_never_run_is_refused_while_a_graph_is_captured():
    call = one(2, 1016)  # a width that no other test here has
    with pytest.raises(ColdKernel, match="hc_head_sums_kernel is not warm"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        head.hc_head(**vars(call))


@pytest.mark.gpu
def test_it_is_two_launches(kernels_of):
    launch = head.prepare("split_k", one(32, 4096))
    launch()
    assert kernels_of(launch) == ["hc_head_mix_kernel", "hc_head_sums_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 32, 2048])
def test_the_rival_gives_the_same(T):
    if reason := sglang_hc_head.unavailable():
        pytest.skip(reason)
    call = one(T, 4096)
    assert_right(*sglang_hc_head.prepare(call)(), call)
    assert numerics.relative_error(head.hc_head(**vars(call)), sglang_hc_head.prepare(call)()[0].double()) < 2e-3
