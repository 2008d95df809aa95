import pytest
from traces import SGLANG, Eager, event, kernel, op, write

from dsv4lab import trace
from dsv4lab.trace import attribution, summary


def first(tmp_path, *events) -> dict:
    return trace.read(write(tmp_path / "t.json", list(events))).events.iloc[0].to_dict()


def test_a_kernel_launched_through_the_driver_has_its_op(tmp_path):
    """As Inductor's kernels are: cuLaunchKernel, the op around it named like the kernel."""
    name, shapes = "triton_poi_fused_add_cos_sin_0", [[10, 10], [10, 10], [10, 10], []]
    row = first(
        tmp_path,
        op("Torch-Compiled Region: 0/0", 0, 100),
        op(name, 20, 60, shapes, ["float", "float", "float", "Scalar"], grid="grid(100,)", stream=0),
        event("cuda_driver", "cuLaunchKernel", 40, 10, correlation=35),
        kernel(name, 60, 2, correlation=35),
    )
    assert (row["op"], row["parents"], row["launch"]) == (name, "Torch-Compiled Region: 0/0", "cuLaunchKernel")
    assert (row["shapes"], row["dtypes"]) == ("[[10,10],[10,10],[10,10],[]]", '["float","float","float","Scalar"]')


def test_the_innermost_op_of_the_launching_thread_counts(tmp_path):
    other_thread = event("cpu_op", "aten::elsewhere", 0, 100, tid=2)
    row = first(
        tmp_path,
        other_thread,
        op("aten::to", 0, 50),
        op("aten::copy_", 10, 20, [[8], [8]]),
        op("aten::before", 11, 5),
        event("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1),
        kernel("k", 60, 2, correlation=1),
    )
    assert (row["op"], row["parents"]) == ("aten::copy_", "aten::to")


def test_the_python_stack_is_that_around_the_launch(tmp_path):
    row = first(
        tmp_path,
        event("python_function", "/opt/venv/lib/python3.12/site-packages/sglang/srt/model.py(10): forward", 0, 90),
        event("python_function", "nn.Module: Indexer_0", 1, 80),
        event("python_function", "/home/me/lab/indexer.py(20): logits", 2, 60),
        event("python_function", "torch/functional.py(3): einsum", 3, 50),
        event("python_function", "<built-in method bmm>", 4, 40),
        event("python_function", "lab/later.py(1): never", 70, 5),
        event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
        kernel("k", 60, 2, correlation=1),
    )
    assert row["stack"] == "indexer.py(20): logits < sglang/srt/model.py(10): forward"


def replay(*names: str) -> list[dict]:
    """One launch of a graph with these kernels, 10 µs each."""
    kernels = [kernel(name, 100 + 20 * n, 10, correlation=7, grid=[n + 1, 1, 1]) for n, name in enumerate(names)]
    return [event("cuda_runtime", "cudaGraphLaunch", 50, 5, correlation=7), *kernels]


def test_a_graph_replay_is_not_attributed(tmp_path):
    events = [
        op("aten::around_the_launch", 0, 90, [[1, 2]]),
        event("cuda_runtime", "cudaGraphLaunch", 50, 5, correlation=7),
        kernel("flash_mla_sparse_kernel", 100, 100, correlation=7),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 200, 50, correlation=7),
        kernel("vectorized_elementwise_kernel<FillFunctor>", 250, 10, correlation=7),
    ]
    taken = trace.read(write(tmp_path / "t.json", events))
    families = summary.by(taken, "family").set_index("family")["sum_ns"].to_dict()
    assert families == {"sparse_attention": 100_000, "nccl": 50_000, "glue_fill": 10_000}
    assert summary.by(taken, "op")["op"].tolist() == [summary.NOT_ATTRIBUTABLE]
    assert taken.events["shapes"].tolist() == [""] * 3


def test_kernels_that_share_a_launch_outside_the_trace_are_not_attributed(tmp_path):
    events = [*replay("a", "b")[1:], kernel("alone", 300, 1, correlation=9)]
    by_op = summary.by(trace.read(write(tmp_path / "t.json", events)), "op").set_index("op")["calls"].to_dict()
    assert by_op == {summary.NOT_ATTRIBUTABLE: 2, summary.NO_OP: 1}


def test_our_own_replay_has_ops_for_what_was_launched_eagerly_alone():
    by_op = summary.by(trace.read(SGLANG), "op").set_index("op")
    assert by_op.loc[summary.NOT_ATTRIBUTABLE, "calls"] == 3 * 395
    assert by_op.loc["aten::index", "calls"] > 0


def test_a_replay_takes_its_ops_from_an_eager_trace(tmp_path):
    eager = Eager()
    for shape in ([4, 8], [4, 16]):  # twice the same kernel: told apart by their order
        eager.run("aten::copy_", 3, [shape, shape], name="copy", grid=[9, 1, 1])
    eager.run("aten::mm", 3, [[4, 4], [4, 4]], name="gemm", grid=[3, 1, 1])
    for _ in range(2):  # twice in the eager trace, once in the replay, always the same
        eager.run("aten::fill_", 3, [[4]], name="fill", grid=[4, 1, 1])
    eager.run("aten::add", 3, [[4]], name="add", grid=[5, 1, 1]).run("aten::add", 3, [[6]], name="add", grid=[5, 1, 1])
    capture = eager.write(tmp_path / "eager.json")
    events = replay("copy", "copy", "gemm", "fill", "add", "unseen")
    for number in (1, 2):
        events[number]["args"]["grid"] = [9, 1, 1]
    path = write(tmp_path / "replay.json", events)
    taken = trace.read(path, capture=capture)
    assert taken.events["op"].astype(object).fillna("-").tolist() == [
        "aten::copy_",
        "aten::copy_",
        "aten::mm",
        "aten::fill_",
        "-",
        "-",
    ]
    assert taken.events["shapes"].tolist()[:3] == ["[[4,8],[4,8]]", "[[4,16],[4,16]]", "[[4,4],[4,4]]"]
    assert taken.meta["joined"] == [4, 6]
    assert taken.events["launch"].unique().tolist() == ["cudaGraphLaunch"]


def test_a_replay_takes_its_ops_from_the_trace_of_a_capture(tmp_path):
    events = [
        event("cuda_runtime", "cudaStreamBeginCapture", 0, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=2),
        event("cuda_runtime", "cudaStreamBeginCapture", 10, 1, correlation=3),
        op("aten::mm", 11, 5, [[4, 8], [8, 4]]),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=4),
        event("cuda_runtime", "cudaMemcpyAsync", 17, 1, correlation=5),
        op("aten::relu", 20, 5, [[4, 4]]),
        event("cuda_driver", "cuLaunchKernelEx", 21, 1, correlation=6),
    ]
    capture, path = write(tmp_path / "c.json", events), write(tmp_path / "t.json", replay("a", "b"))
    taken = trace.read(path, capture=capture)
    assert taken.events["op"].tolist() == ["aten::mm", "aten::relu"]
    assert taken.events["shapes"].tolist() == ["[[4,8],[8,4]]", "[[4,4]]"]


def test_what_cannot_be_joined_says_so(tmp_path):
    graph = write(tmp_path / "t.json", replay("a", "b"))
    other = Eager().run("aten::mm", 1, name="c").write(tmp_path / "eager.json")
    with pytest.raises(ValueError, match="neither kernels nor a series of launches"):
        trace.read(graph, capture=other)
    with pytest.raises(ValueError, match="no kernels of a graph replay"):
        attribution.joined(trace.read(other), trace.read(graph))
