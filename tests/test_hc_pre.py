"""MHC-pre against float64: the mix, its split by Sinkhorn, the new hidden state; SGLang's arguments; bad input."""

from dataclasses import replace

import pytest
import torch

from dsv4lab import hardware, numerics
from dsv4lab.kernels import hc_pre as mhc
from dsv4lab.kernels.hc_pre import Config, Dot, Split
from dsv4lab.kernels.launch import frozen

DEVICE = "cpu" if hardware.probe() is None else "cuda"
CONFIGS = [
    Config(Dot(512, 4), 4, True),
    Config(Split(16, 32, 128, 256, 4), 4, False),
    Config(Split(32, 32, 64, 64, 2), 2, True),
    Config(Split(16, 32, 128, 256, 4, whole=True), 4, True, rows=4),
]
EXACT = 1e-5
"""What fp32 sums of products with weights of 16 bits and more stay under."""


def one(M=5, hidden=256, seed=0, norm=False):
    return mhc.make_inputs(mhc.Case("test", M, hidden, norm), device=DEVICE, seed=seed)[0]


def run(call, **options):
    """The outputs of a call on NaNs, in a workspace of NaNs."""
    M, _, hidden = call.x.shape
    out = tuple(torch.full_like(each, float("nan")) for each in _outputs(M, hidden))
    config = options.setdefault("config", CONFIGS[1])
    workspace = torch.full((mhc.workspace_numel(M, hidden, config),), float("nan"), device=DEVICE)
    return mhc.hc_pre(**vars(call), out=out, workspace=workspace, **options)


def _outputs(M, hidden):
    return (
        torch.empty(M, hidden, dtype=torch.bfloat16, device=DEVICE),
        torch.empty(M, 4, device=DEVICE),
        torch.empty(M, 4, 4, device=DEVICE),
    )


def assert_right(outputs, call, **numbers):
    """What a y is summed from may cancel, so that an error in its gates, of mixes of 16 bits, is no part of y itself.

    The other part is the spacing of bf16: on a GPU rounded to nearest, cut off by the interpreter.
    """
    (y, post, comb), (right_y, right_post, right_comb) = outputs, mhc.composed(call, torch.float64, **numbers)
    assert numerics.relative_error(post, right_post) < EXACT and numerics.relative_error(comb, right_comb) < EXACT
    bound = 2.0**-7 * right_y.abs() + 2.0**-12 * _summands(call, **numbers)
    assert ((y.double() - right_y).abs() <= bound).all()


def _summands(call, *, eps=mhc.EPS, hc_eps=mhc.EPS, norm_eps=mhc.EPS, iters=20):
    """For each y, the sum of the absolute values of what it is summed from, times the factor of its norm."""
    x, weight = call.x.double(), call.norm_weight
    mix = mhc.mixes(x.flatten(1), call.hc_fn.double(), eps)
    pre = mhc.split(mix, call.hc_scale.double(), call.hc_base.double(), hc_eps, iters)[0][:, :, None]
    if weight is None:
        return (pre * x.abs()).sum(1)
    r = torch.rsqrt((pre * x).sum(1).square().mean(-1, keepdim=True) + norm_eps)
    return (pre * x.abs()).sum(1) * r * weight.double().abs()


def rows(config, M):
    """M, or 3 where a block has one sum and interpreting M rows of them takes M times as long."""
    return min(M, 3) if isinstance(config.sums, Dot) and DEVICE == "cpu" else M


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(("M", "hidden", "norm"), [(1, 256, True), (17, 256, False), (2, 768, True), (2, 768, False)])
def test_every_config_and_odd_shapes(config, M, hidden, norm):
    call, iters = one(rows(config, M), hidden, norm=norm), 2 if M == 17 else 20  # each row interprets its own
    assert_right(run(call, config=config, sinkhorn_iters=iters), call, iters=iters)


def test_the_table_takes_any_number_of_rows():
    for M in (1, 5, 17):
        call = one(M, norm=M == 5)
        assert_right(mhc.hc_pre(**vars(call), sinkhorn_iters=2), call, iters=2)


def test_comb_is_doubly_stochastic_and_the_gates_are_in_range():
    y, post, comb = run(one(4))
    assert (comb.sum(1) - 1).abs().max() < 1e-4 and (comb.sum(2) - 1).abs().max() < 1e-2
    assert (comb > 0).all() and ((post > 0) & (post < 2)).all() and y.isfinite().all()


def test_the_numbers_of_a_model_are_arguments():
    call = one(norm=True)
    found = run(call, rms_eps=1.0, hc_eps=0.125, norm_eps=0.5, sinkhorn_iters=2)
    assert_right(found, call, eps=1.0, hc_eps=0.125, norm_eps=0.5, iters=2)
    assert all(numerics.relative_error(*each) > 1e-2 for each in zip(found, mhc.reference(call), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_is_of_what_is_not_yet_rounded_and_takes_its_weight_as_it_is(dtype):
    call = one(3, norm=True)
    call.norm_weight = (1 + torch.rand(256, device=DEVICE) / 8).to(dtype)
    plain = run(replace(call, norm_weight=None))[0].float()
    y, post, comb = run(call)
    assert_right((y, post, comb), call)
    assert numerics.relative_error(y, mhc.normed(plain, call.norm_weight)) < 2.0**-6  # of two roundings
    assert abs((y.float() / call.norm_weight.float()).square().mean() - 1) < 1e-2


def test_terms_that_cancel_leave_what_their_gates_leave():
    call = one(2)
    call.x[:, 1:] = -call.x[:, :1] / 3  # with equal gates, next to nothing
    call.hc_scale[:] = 0
    call.hc_base[:4] = 0.25
    y = run(call)[0]
    assert y.double().abs().max() < 2.0**-7 * _summands(call).max()
    assert_right((y, *run(call)[1:]), call)


def test_extreme_mixes_saturate():
    call = one()
    call.hc_base = torch.tensor([50.0, -50.0] * 12, device=DEVICE)
    found, expected = run(call), mhc.reference(call)
    assert all(each.isfinite().all() for each in found)
    assert numerics.relative_error(found[1], expected[1]) < EXACT


def test_a_quiet_row_is_normalised_by_its_own_mean_square():
    call = one(3)
    call.x[1] *= 1e-3
    call.x[2] = 0
    assert_right(run(call), call)


def test_rows_may_be_strided_and_do_not_depend_on_each_other():
    call = one(4)
    wide = torch.full((8, 4, 256), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[::2] = call.x
    for mine, theirs in zip(run(replace(call, x=wide[::2])), run(call), strict=True):
        assert numerics.bitwise_equal(mine, theirs)
    call.x[2] = float("nan")
    for mine, theirs in zip(run(call), run(one(4)), strict=True):
        assert mine[2].isnan().all() and numerics.bitwise_equal(mine[3:], theirs[3:])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_bitwise_the_same_in_every_run(config):
    call = one(2)
    first = run(call, config=config)
    for _ in range(1 if DEVICE == "cpu" else 50):
        assert all(map(numerics.bitwise_equal, run(call, config=config), first))


def test_bf16_weights_are_taken_as_they_are():
    call = one()
    call.hc_fn = call.hc_fn.bfloat16()
    for config in CONFIGS:
        assert_right(run(call, config=config), call)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("impl", ["torch", "split_k", "split_k_bf16"])
def test_implementations_are_as_exact_as_they_say(impl, norm):
    call = one(4, norm=norm)
    expected = mhc.reference(call)
    errors = [numerics.relative_error(*each) for each in zip(mhc.prepare(impl, call)(), expected, strict=True)]
    assert (max(errors[1:]) < EXACT) == (impl != "split_k_bf16") and max(errors) < 5e-3
    with pytest.raises(ValueError, match="impl must be one of torch, split_k, split_k_bf16, got 'fast'"):
        mhc.prepare("fast", call)


@pytest.mark.parametrize("norm", [False, True])
def test_the_verdict_is_that_on_the_worst_output(norm):
    call = one(8, norm=norm)
    expected, usual = mhc.reference(call), mhc.baseline(call)
    right = mhc.prepare("torch", call)()
    assert mhc.judge(call, right, expected, usual).passed
    for place in range(3):
        wrong = [each.clone() for each in right]
        wrong[place][0] *= 1.5
        assert not mhc.judge(call, tuple(wrong), expected, usual).passed


def test_no_tokens_is_no_launch():
    assert [list(each.shape) for each in mhc.hc_pre(**vars(one(0)))] == [[0, 256], [0, 4], [0, 4, 4]]


BAD = {
    r"x must be bfloat16 \[M, 4, hidden\]": lambda c: replace(c, x=c.x.float()),
    r"x must be bfloat16 \[M, 4, hidden\] with dense rows": lambda c: replace(c, x=c.x.transpose(1, 2)),
    "hidden a multiple of 256, got .*128": lambda c: replace(c, x=c.x[:, :, :128].contiguous()),
    "hc_fn must be float32 or bfloat16, got torch.float64": lambda c: replace(c, hc_fn=c.hc_fn.double()),
    r"hc_fn must be contiguous float32 \[24, 1024\]": lambda c: replace(c, hc_fn=c.hc_fn[:20]),
    r"hc_scale must be contiguous float32 \[3\]": lambda c: replace(c, hc_scale=c.hc_scale.half()),
    r"hc_base must be contiguous float32 \[24\]": lambda c: replace(c, hc_base=c.hc_base[:3]),
    r"norm_weight must be contiguous bfloat16 or float32 \[256\].*\[4, 256\]": lambda c: replace(c, norm_weight=c.x[0]),
    "norm_weight must be .* got torch.float64": lambda c: replace(c, norm_weight=c.x[0, 0].double()),
    "norm_weight must be .* from a multiple of 16 bytes": lambda c: replace(c, norm_weight=c.x.flatten()[1:257]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        mhc.hc_pre(**vars(BAD[message](one())))


def test_bad_options_are_named():
    call = one()
    y, post, comb = _outputs(5, 256)
    for message, options in (
        ("sinkhorn_iters must be at least 1, got 0", dict(sinkhorn_iters=0)),
        (r"post must be contiguous float32 \[5, 4\]", dict(out=(y, post.half(), comb))),
        ("workspace must be contiguous float32 with at least 160", dict(workspace=y, config=CONFIGS[0])),
    ):
        with pytest.raises(ValueError, match=message):
            mhc.hc_pre(**vars(call), **options)


@pytest.mark.parametrize("rows", [0, 3, 32])
def test_a_program_splits_whole_tiles(rows):
    with pytest.raises(ValueError, match=f"rows must divide the 16 of a tile of sums, got {rows}"):
        Config(Split(16, 32, 128, 128, 4), 4, True, rows)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config(arch):
    assert all(line.startswith("split_k, ") for line in mhc.describe(arch))
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        mhc.describe("sm_70")


@pytest.mark.gpu
@pytest.mark.parametrize("name", mhc.CANDIDATES)
def test_every_candidate_config_is_right(name):
    for M, norm in ((1, False), (33, True), (150, True)):
        call = one(M, 4096, norm=norm)
        assert_right(mhc.prepare(name, call)(), call)


@pytest.mark.gpu
def test_a_warm_up_covers_every_number_of_rows():
    mhc.warm_up()
    with frozen():
        for M in (1, 3, 16, 40, 128, 300):
            for norm in (False, True):
                call = one(M, 4096, norm=norm)
                assert_right(mhc.hc_pre(**vars(call)), call)
                assert_right(mhc.prepare("split_k", call)(), call)


@pytest.mark.gpu
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("config", [None, Config(Split(16, 32, 256, 256, 8), 8, False)])
def test_a_captured_graph_replays_new_values_bitwise(config, ready):
    """Written inside the graph, right in front of the call: what is launched early waits for it."""
    call = one(33, 4096, norm=True)
    new = call.x.clone()
    mhc.hc_pre(**vars(call), config=config, weights_ready=ready)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.x.copy_(new)
        out = mhc.hc_pre(**vars(call), config=config, weights_ready=ready)
    for seed in range(20):
        new.copy_(one(33, 4096, seed).x)
        graph.replay()
        assert all(map(numerics.bitwise_equal, out, mhc.hc_pre(**vars(call), config=config)))
        assert_right(out, call)


@pytest.mark.gpu
def test_it_is_two_launches(kernels_of):
    for M, first in ((1, "dot_kernel"), (32, "split_kernel")):
        launch = mhc.prepare("split_k", one(M, 4096, norm=True))
        launch()
        assert kernels_of(launch) == sorted([first, "mix_kernel"])
