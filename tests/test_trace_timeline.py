import numpy as np
import pytest
from traces import SGLANG, Eager, event, kernel, write

from dsv4lab import trace
from dsv4lab.trace import steps, summary, timeline


@pytest.mark.parametrize("seed", range(5))
def test_a_union_is_what_counting_nanoseconds_gives(seed):
    rng = np.random.default_rng(seed)
    ts, dur = rng.integers(0, 300, 40), rng.integers(0, 12, 40)
    covered = np.zeros(400, bool)
    for start, length in zip(ts, dur, strict=True):
        covered[start : start + length] = True
    starts, ends = timeline.union(ts, dur)
    assert timeline.length((starts, ends)) == covered.sum()
    assert (starts[1:] > ends[:-1]).all()  # disjoint, touching ones joined


def test_a_union_of_nothing_is_empty():
    empty = np.zeros(0, np.int64)
    assert timeline.length(timeline.union(empty, empty)) == 0


@pytest.mark.parametrize("key", ["family", "kernel", "op", "shape", "stream", "step"])
def test_every_table_adds_up_to_the_trace(key):
    table = summary.by(trace.read(SGLANG), key)
    assert table["calls"].sum() == 1267
    assert table["sum_ns"].sum() == 15_152_778
    assert (table["busy_ns"] <= table["sum_ns"]).all()
    assert table["busy_ns"].sum() >= 13_855_682


def test_the_busy_time_of_groups_is_that_of_each_alone():
    taken = trace.read(SGLANG)
    table = summary.by(taken, "family").set_index("family")["busy_ns"]
    for family, events in taken.events.groupby("family", observed=True):
        assert table[family] == timeline.busy(events)


def test_one_event_far_from_the_others_costs_no_group_its_busy_time(tmp_path):
    """The epoch in ns times a few groups is more than 64 bits hold."""
    far = [kernel(f"k{i % 20}", 1712195495505583 + 3 * i, 4) for i in range(60)]
    taken = trace.read(write(tmp_path / "t.json", [kernel("early", 1, 5, stream=9), *far]))
    busy = summary.by(taken, "kernel").set_index("name")["busy_ns"]
    assert busy.pop("early") == 5000 and (busy == 12_000).all()


def test_kernels_and_ops_know_each_other_and_their_line_of_python(tmp_path):
    step = (
        Eager().run("aten::mm", 5, name="gemm").run("aten::linear > aten::mm", 9, name="gemm2").run("", 3, name="gemm")
    )
    step.run("aten::bmm", 7, name="gemm")
    step.events.append(event("python_function", "lab/model.py(3): forward", 900, 500))
    taken = trace.read(step.write(tmp_path / "t.json"))
    kernels = summary.by(taken, "kernel").set_index("name")
    assert kernels["op"].to_dict() == {"gemm": "aten::bmm", "gemm2": "aten::mm"}
    assert kernels["where"].unique().tolist() == ["lab/model.py(3): forward"]
    ops = summary.by(taken, "op").set_index("op")["name"].to_dict()
    assert ops == {"aten::mm": "gemm2", "aten::bmm": "gemm", summary.NO_OP: "gemm"}


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match=r"by must be one of family, .*got 'colour'"):
        summary.by(trace.read(SGLANG), "colour")


def launched(name: str, call: float, start: float, dur: float, correlation: int) -> list[dict]:
    launch = event("cuda_runtime", "cudaLaunchKernel", call, 2, correlation=correlation)
    return [launch, kernel(name, start, dur, correlation=correlation)]


def test_idle_gaps_have_their_cause(tmp_path):
    events = [
        *launched("a", 0, 10, 10, 1),
        *launched("b", 5, 25, 10, 2),  # launched before a had ended: 5 µs waiting
        *launched("c", 40, 45, 5, 3),  # launched after b had: 10 µs launch-bound
        event("cuda_runtime", "cudaStreamSynchronize", 47, 10),
        *launched("d", 60, 70, 5, 4),  # launched late, the host having waited for c: 20 µs
        kernel("e", 90, 5),  # 15 µs, nobody knows
    ]
    taken = trace.read(write(tmp_path / "t.json", events))
    gaps = timeline.gaps(taken)
    late, synchronised, queued, unknown = timeline.CAUSES
    assert gaps["cause"].tolist() == [queued, late, synchronised, unknown]
    assert gaps["dur"].tolist() == [5000, 10_000, 20_000, 15_000]
    assert taken.events["name"].iloc[gaps["next"]].tolist() == ["b", "c", "d", "e"]
    assert summary.idle(taken)["sum_ns"].sum() == summary.by_device(taken)["idle_ns"].sum() == 50_000


def test_no_gap_in_a_trace_without_one(tmp_path):
    assert timeline.gaps(trace.read(write(tmp_path / "t.json", [kernel("k", 1, 2)]))).empty


def test_steps_of_our_own_trace():
    table = steps.table(trace.read(SGLANG))
    assert table["events"].tolist() == [398] * 3
    assert not table["partial"].any()


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path):
    events = [
        event("user_annotation", "ProfilerStep#4", 0, 50),
        event("user_annotation", "forward", 1, 30),
        event("user_annotation", "ProfilerStep#5", 50, 50),
        *launched("a", 10, 20, 10, 1),
        *launched("b", 45, 60, 10, 2),  # runs while the host is a step further
        *launched("c", 70, 80, 10, 3),
        *launched("d", 120, 130, 10, 4),
    ]
    assert trace.read(write(tmp_path / "t.json", events)).events["step"].tolist() == [0, 0, 1, -1]


def test_steps_by_annotations_on_the_gpu_where_the_host_has_none(tmp_path):
    spans = [
        event("gpu_user_annotation", f"step[DECODE bs={n}]", 100 * n + late, dur, tid=stream)
        for n in (1, 2)
        for stream, late, dur in ((7, 0, 90), (9, 60, 35))  # the second stream ends after the first
    ]
    kernels = [kernel("k", ts, 5) for ts in (50, 110, 180, 210)]
    assert trace.read(write(tmp_path / "t.json", spans + kernels)).events["step"].tolist() == [-1, 0, 0, 1]


def test_steps_by_the_graph_that_recurs(tmp_path):
    events = []
    for n in range(3):
        events.append(event("cuda_runtime", "cudaGraphLaunch", 100 * n, 5, correlation=n + 1))
        events += [kernel(f"k{m}", 100 * n + 10 + m, 1, correlation=n + 1) for m in range(4)]
        events.append(kernel("sample", 100 * n + 50, 1, correlation=100 + n))
    table = steps.table(trace.read(write(tmp_path / "t.json", events)))
    assert table["events"].tolist() == [5, 5, 5]


def test_a_first_step_that_lacks_kernels_is_partial(tmp_path):
    events = [event("user_annotation", f"step {n}", 100 * n, 90) for n in range(4)]
    for n in range(4):
        for m in range(5 if n else 2):
            events += launched("k", 100 * n + 10 * m, 100 * n + 10 * m + 5, 1, 10 * n + m + 1)
    assert steps.table(trace.read(write(tmp_path / "t.json", events)))["partial"].tolist() == [
        True,
        False,
        False,
        False,
    ]
