"""Graphs by batch: buckets, padding, freeze and failure, on a stand-in that calls again; CUDA's when here."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from dsv4lab import capture, hardware
from dsv4lab.capture import graphs

DEVICE = "cpu" if hardware.probe() is None else "cuda"


class Replayed:
    """A graph's stand-in: calls again on replay, into the outputs of the capture."""

    def __init__(self):
        self.captured = 0

    def capture(self, call):
        for _ in range(graphs.WARM_UPS):
            call()
        with capture.frozen():
            outputs = call()
        self.captured += 1
        return outputs, lambda: [old.copy_(new) for old, new in zip(outputs, call(), strict=True)]


BACKENDS = [Replayed, pytest.param(lambda: None, marks=pytest.mark.gpu)]


def scaled(values, factors):
    return [values * factors[:, None], values.sum(1)]


def inputs(batch, start=0.0):
    values = torch.arange(start, start + 3 * batch, device=DEVICE).view(batch, 3)
    return values, torch.arange(1.0, batch + 1, device=DEVICE)


def warmed(fn=scaled, buckets=(4, 1, 2), backend=Replayed, **options):
    graph = capture.graph(fn, buckets, backend())
    graph.warm_up(*inputs(2), **options)
    return graph


@pytest.fixture(autouse=True)
def thawed():
    yield
    assert not graphs.compiles._listeners, "a test left the process frozen"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_any_batch_up_to_the_largest_bucket_gives_what_the_function_gives(backend, batch):
    graph = warmed(backend=backend)
    for start in (0.0, 100.0):
        out = graph(*inputs(batch, start))
        for found, expected in zip(out, scaled(*inputs(batch, start)), strict=True):
            assert torch.equal(found, expected)
    graph.thaw()


def test_the_smallest_bucket_that_holds_a_batch_is_replayed_and_rows_left_repeat_the_last():
    seen = []

    def fn(values):
        seen.append(values.clone())
        return (values + 1,)

    graph = capture.graph(fn, [2, 8], Replayed())
    graph.warm_up(inputs(1)[0])
    for batch, bucket in ((1, 2), (2, 2), (3, 8), (8, 8)):
        graph(inputs(batch, 5.0)[0])
        assert seen[-1].shape[0] == bucket
        assert (seen[-1][batch:] == seen[-1][batch - 1]).all()
    graph.thaw()


def test_each_bucket_is_captured_once_the_largest_first_and_never_again():
    shapes, backend = [], Replayed()
    graph = capture.graph(lambda v: (shapes.append(len(v)), (v * 2,))[1], [1, 4, 2, 4], backend)
    graph.warm_up(inputs(3)[0])
    assert list(dict.fromkeys(shapes)) == [4, 2, 1]
    graph(inputs(3)[0])
    assert backend.captured == 3
    graph.thaw()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            inputs(5),
            r"args must be float32\[B, 3\], float32\[B\] with B from 1 to 4, got float32\[5, 3\], float32\[5\]",
        ),
        (inputs(0), r"got float32\[0, 3\]"),
        (inputs(2)[:1], "got float32"),
        ((inputs(2)[0], inputs(3)[1]), r"got float32\[2, 3\], float32\[3\]"),
        ((inputs(2)[0].double(), inputs(2)[1]), r"got float64\[2, 3\]"),
        ((torch.tensor(1.0), torch.tensor(1.0)), r"got float32\[\]"),
        ((3, inputs(2)[1]), r"got 3, float32\[2\]"),
        ((inputs(2)[0], None), r"got float32\[2, 3\], None"),
    ],
)
def test_what_no_graph_can_take_is_refused_with_its_shape(args, message):
    graph = warmed()
    with pytest.raises(ValueError, match=message):
        graph(*args)
    graph.thaw()


def test_bad_buckets_examples_and_outputs():
    for buckets in ([], [0, 2]):
        with pytest.raises(ValueError, match="buckets must be batch sizes of at least 1"):
            capture.graph(scaled, buckets)
    graph = capture.graph(scaled, [1], Replayed())
    with pytest.raises(ValueError, match="warm_up with examples first"):
        graph(*inputs(1))
    for examples in ((), (torch.ones(2), torch.ones(3)), (torch.tensor(1.0),), (torch.ones(0, 3),), (3,)):
        with pytest.raises(ValueError, match=r"examples must be tensors \[B, \.\.\.\]"):
            graph.warm_up(*examples)
    graph = capture.graph(lambda v: (v.sum(),), [2], Replayed())
    with pytest.raises(ValueError, match=r"fn must return tensors \[2, ...\] for bucket 2, got float32\[\]"):
        graph.warm_up(inputs(2)[0])


def test_c8_after_warm_up_a_new_compile_is_refused_with_its_shape():
    compiled = torch.compile(lambda t: t.sin() + 1, backend="eager", dynamic=False)
    graph = warmed(lambda values, factors: [compiled(values)])
    with pytest.raises(capture.ColdKernel, match=r"torch.compile to compile <lambda>\(t=float32\[7, 3\]\); warm it up"):
        compiled(torch.ones(7, 3, device=DEVICE))
    assert torch.equal(graph(*inputs(3))[0], inputs(3)[0].sin() + 1)
    graph.thaw()
    assert compiled(torch.ones(7, 3, device=DEVICE)).shape == (7, 3)


def test_graphs_may_thaw_in_any_order_and_be_warmed_up_together():
    compiled = torch.compile(lambda t: t.cos(), backend="eager", dynamic=False)
    first, second = warmed(freeze=False), warmed()
    third = warmed()
    second.thaw()
    with pytest.raises(capture.ColdKernel):
        compiled(torch.ones(3))
    third.thaw()
    first.thaw()
    compiled(torch.ones(3))


def test_c5_a_call_that_compiles_only_when_captured_is_refused_with_bucket_and_shape():
    calls = []
    compiled = torch.compile(lambda t: t.tan(), backend="eager", dynamic=False)

    def fn(values, factors):
        calls.append(1)
        return [compiled(values) if len(calls) > graphs.WARM_UPS else values.tan()]

    with pytest.raises(capture.CaptureFailed, match=r"bucket 4, float32\[4, 3\], float32\[4\]: ColdKernel: .*\[4, 3\]"):
        warmed(fn)


def test_a_warm_up_that_fails_leaves_the_graphs_there_were():
    broken = []

    def fn(values, factors):
        if broken and len(values) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return scaled(values, factors)

    graph = warmed(fn, freeze=False)
    broken.append(True)
    with pytest.raises(capture.CaptureFailed, match=r"bucket 2, .*not permitted when stream is capturing"):
        graph.warm_up(*inputs(1))
    assert torch.equal(graph(*inputs(4))[0], scaled(*inputs(4))[0])


def test_triton_is_frozen_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch, triton, triton.language as tl
        from triton.runtime.driver import driver
        from dsv4lab import capture
        from dsv4lab.static import NamedTarget

        driver.set_active(NamedTarget("sm_90"))

        @triton.jit
        def add(x, n, BLOCK: tl.constexpr):
            tl.store(x + tl.arange(0, BLOCK), n)

        @triton.autotune([triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})], key=["n"])
        @triton.jit
        def tuned(x, n, BLOCK: tl.constexpr):
            tl.store(x + tl.arange(0, BLOCK), n)

        def refusal(launch):
            try:
                launch()
            except capture.ColdKernel as error:
                return str(error)

        call = dict(x=torch.empty(8), n=5, grid=(1,))
        add.warmup(BLOCK=8, **call)
        with capture.frozen():
            add.warmup(BLOCK=8, **call)
            message = refusal(lambda: add.warmup(BLOCK=16, **call))
            assert "Triton to compile add" in message and "BLOCK=16" in message, message
            message = refusal(lambda: tuned[(1,)](call["x"], 5))
            assert "autotuning of tuned(0=float32[8])" in message, message
        (finding,) = capture.check(lambda: add.warmup(BLOCK=32, **call))
        assert finding.rule == "cold_compile" and "BLOCK=32" in finding.detail, finding
        assert capture.check(lambda: add.warmup(BLOCK=32, **call)) == []
        """)
    )
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_c1_a_failed_capture_leaves_stream_and_earlier_graphs_usable():
    good = warmed(backend=lambda: None, freeze=False)
    with pytest.raises(capture.CaptureFailed, match=r"bucket 4, .*(900|captur)"):
        warmed(lambda values, factors: [values * values.sum().item()], backend=lambda: None)
    assert torch.equal(good(*inputs(3))[0], scaled(*inputs(3))[0])
    again = warmed(backend=lambda: None)
    assert torch.equal(again(*inputs(4))[1], scaled(*inputs(4))[1])
    assert torch.rand(3, device="cuda").shape == (3,)
    again.thaw()


@pytest.mark.gpu
def test_the_recipe_a_compiled_function_is_captured_for_every_bucket():
    compiled = torch.compile(lambda values, factors: scaled(values.sin(), factors))
    graph = warmed(compiled, backend=lambda: None)
    for batch in (1, 2, 3, 4):
        values, factors = inputs(batch)
        out = graph(values, factors)
        assert all(torch.allclose(a, b) for a, b in zip(out, scaled(values.sin(), factors), strict=True))
    graph.thaw()
