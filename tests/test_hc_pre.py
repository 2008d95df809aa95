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
    Config(Dot(512, 4), 256, True),
    Config(Split(16, 32, 128, 256, 4), 128, False),
    Config(Split(32, 32, 64, 64, 2), 256, True),
]
EXACT = 1e-5
"""What fp32 sums of products with weights of 16 bits and more stay under."""


def one(M=5, hidden=256, seed=0):
    return mhc.make_inputs(mhc.Case("test", M, hidden), device=DEVICE, seed=seed)[0]


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


def assert_right(outputs, expected):
    (y, post, comb), (right_y, right_post, right_comb) = outputs, expected
    assert numerics.relative_error(post, right_post) < EXACT and numerics.relative_error(comb, right_comb) < EXACT
    spacing = right_y.abs() * 2.0**-7 + 1e-6  # of bf16: on a GPU rounded to nearest, cut off by the interpreter
    assert ((y.double() - right_y).abs() <= spacing).all()


def rows(config, M):
    """M, or 3 where a block has one sum and interpreting M rows of them takes M times as long."""
    return min(M, 3) if isinstance(config.sums, Dot) and DEVICE == "cpu" else M


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(("M", "hidden"), [(1, 256), (17, 256), (2, 768)])
def test_every_config_and_odd_shapes(config, M, hidden):
    call, iters = one(rows(config, M), hidden), 2 if M == 17 else 20  # each row interprets its own
    found = run(call, config=config, sinkhorn_iters=iters)
    assert_right(found, mhc.composed(call, torch.float64, iters=iters))


def test_the_table_takes_any_number_of_rows():
    for M in (1, 5, 17):
        call = one(M)
        assert_right(mhc.hc_pre(**vars(call), sinkhorn_iters=2), mhc.composed(call, torch.float64, iters=2))


def test_comb_is_doubly_stochastic_and_the_gates_are_in_range():
    y, post, comb = run(one(4))
    assert (comb.sum(1) - 1).abs().max() < 1e-4 and (comb.sum(2) - 1).abs().max() < 1e-2
    assert (comb > 0).all() and ((post > 0) & (post < 2)).all() and y.isfinite().all()


def test_the_numbers_of_a_model_are_arguments():
    call = one()
    found = run(call, rms_eps=1.0, hc_eps=0.125, sinkhorn_iters=2)
    expected = mhc.composed(call, torch.float64, eps=1.0, hc_eps=0.125, iters=2)
    assert_right(found, expected)
    assert numerics.relative_error(found[2], mhc.reference(call)[2]) > 1e-2


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
    assert_right(run(call), mhc.reference(call))


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
    assert_right(run(call), mhc.reference(call))


@pytest.mark.parametrize("impl", ["torch", "split_k", "split_k_bf16"])
def test_implementations_are_as_exact_as_they_say(impl):
    call = one(4)
    expected = mhc.reference(call)
    errors = [numerics.relative_error(*each) for each in zip(mhc.prepare(impl, call)(), expected, strict=True)]
    assert (max(errors[1:]) < EXACT) == (impl != "split_k_bf16") and max(errors) < 5e-3
    with pytest.raises(ValueError, match="impl must be one of torch, split_k, split_k_bf16, got 'fast'"):
        mhc.prepare("fast", call)


def test_the_verdict_is_that_on_the_worst_output():
    call = one(8)
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121"])
def test_every_architecture_has_a_config(arch):
    assert all(line.startswith("split_k, ") for line in mhc.describe(arch))
    with pytest.raises(ValueError, match="no configuration for arch 'sm_70'"):
        mhc.describe("sm_70")


@pytest.mark.gpu
@pytest.mark.parametrize("name", mhc.CANDIDATES)
def test_every_candidate_config_is_right(name):
    for M in (1, 33):
        call = one(M, 4096)
        assert_right(mhc.prepare(name, call)(), mhc.reference(call))


@pytest.mark.gpu
def test_a_warm_up_covers_every_number_of_rows():
    mhc.warm_up()
    with frozen():
        for M in (1, 3, 16, 40, 128, 300):
            call = one(M, 4096)
            assert_right(mhc.hc_pre(**vars(call)), mhc.reference(call))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, Config(Split(16, 32, 256, 256, 8), 512, False)])
def test_a_captured_graph_replays_new_values_bitwise(config):
    call = one(33, 4096)
    mhc.hc_pre(**vars(call), config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mhc.hc_pre(**vars(call), config=config)
    for seed in range(20):
        call.x.copy_(one(33, 4096, seed).x)
        graph.replay()
        assert all(map(numerics.bitwise_equal, out, mhc.hc_pre(**vars(call), config=config)))
        assert_right(out, mhc.reference(call))


@pytest.mark.gpu
def test_it_is_two_launches(kernels_of):
    for M, first in ((1, "dot_kernel"), (32, "split_kernel")):
        launch = mhc.prepare("split_k", one(M, 4096))
        launch()
        assert kernels_of(launch) == sorted([first, "mix_kernel"])
