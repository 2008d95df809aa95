import sqlite3
from pathlib import Path

import pytest

from dsv4lab import trace
from dsv4lab.trace import nsys, steps, summary
from dsv4lab.trace.frames import TraceError

NAMES = {
    1: "gemm_kernel",
    2: "ncclDevKernel_AllReduce",
    3: "cudaLaunchKernel_v7000",
    4: "step 0",
    5: "cudaStreamSynchronize",
}
KERNEL = (
    "start INT, end INT, deviceId INT, streamId INT, correlationId INT, {name} INT, gridX INT, gridY INT, gridZ INT, "
    "blockX INT, blockY INT, blockZ INT, registersPerThread INT, staticSharedMemory INT, dynamicSharedMemory INT"
)


def export(path: Path, **tables: tuple[str, list[tuple]]) -> Path:
    """A database of these tables, each its columns and rows."""
    with sqlite3.connect(path) as database:
        for table, (columns, rows) in tables.items():
            database.execute(f'CREATE TABLE "{table}" ({columns})')
            for row in rows:
                database.execute(f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(row))})', row)
    return path


def kernel(start: int, end: int, name: int, correlation: int, stream: int = 7) -> tuple:
    return (start, end, 0, stream, correlation, name, 4, 2, 1, 128, 1, 1, 40, 100, 28)


STRINGS = ("id INT, value TEXT", list(NAMES.items()))


@pytest.mark.parametrize("column", ["demangledName", "shortName"])
def test_kernels_alone_are_a_full_report(tmp_path, column):
    rows = [kernel(10**18 + 1, 10**18 + 101, 1, 5), kernel(10**18 + 51, 10**18 + 151, 2, 6, stream=20)]
    path = export(
        tmp_path / "a.sqlite", StringIds=STRINGS, CUPTI_ACTIVITY_KIND_KERNEL=(KERNEL.format(name=column), rows)
    )
    taken = trace.read(path)
    (device,) = summary.by_device(taken).itertuples()
    assert (device.kernels, device.kernel_ns, device.busy_ns, device.exposed_ns) == (2, 200, 150, 50)
    assert taken.events["ts"].tolist() == [10**18 + 1, 10**18 + 51]
    first = taken.events.iloc[0]
    assert (first["name"], first["grid"], first["block"], first["shared"]) == (
        "gemm_kernel",
        "[4,2,1]",
        "[128,1,1]",
        128,
    )
    assert taken.lost == {}


@pytest.mark.parametrize("nvtx", ["NVTX_EVENTS", "NVTX_EVENTS_V2"])
def test_launches_copies_ranges_and_the_device_are_read_where_they_are(tmp_path, nvtx):
    call = "start INT, end INT, globalTid INT, correlationId INT, nameId INT"
    ranges = [(0, 310, None, 4, 1), (320, 390, "step 1", None, 1), (5, None, "mark", None, 1)]
    path = export(
        tmp_path / "a.sqlite",
        StringIds=STRINGS,
        TARGET_INFO_GPU=("name TEXT, smCount INT", [("NVIDIA H200", 132)]),
        CUPTI_ACTIVITY_KIND_KERNEL=(KERNEL.format(name="shortName"), [kernel(100, 200, 1, 5), kernel(400, 500, 1, 6)]),
        CUPTI_ACTIVITY_KIND_MEMCPY=(
            "start INT, end INT, deviceId INT, streamId INT, correlationId INT, bytes INT, copyKind INT",
            [(250, 260, 0, 7, 9, 64, 2)],
        ),
        CUPTI_ACTIVITY_KIND_RUNTIME=(call, [(50, 60, 1, 5, 3), (210, 300, 1, 8, 5), (350, 360, 1, 6, 3)]),
        **{nvtx: ("start INT, end INT, text TEXT, textId INT, globalTid INT", ranges)},
    )
    taken = trace.read(path)
    assert (taken.meta["gpu"], taken.meta["sms"]) == ("NVIDIA H200", 132)
    assert taken.events["kind"].tolist() == ["kernel", "memcpy", "kernel"]
    assert taken.events["launch_ts"].tolist() == [50, -1, 350]
    assert taken.events["name"].tolist()[1] == "Memcpy DtoH"
    assert taken.events["step"].tolist() == [0, 0, 1]
    assert steps.table(taken)["step"].tolist() == [0, 1]
    assert summary.idle(taken)["cause"].tolist() == ["waiting: the host was in a synchronisation", "unknown"]


def test_what_is_null_costs_its_event_alone_and_no_digit_of_others(tmp_path):
    torn, sound = kernel(10**18 + 1, 0, 1, 5), kernel(10**18 + 201, 10**18 + 301, 1, 6)
    nameless = (*sound[:4], None, None, *sound[6:])
    rows = [(torn[0], None, *torn[2:]), sound, nameless]
    taken = trace.read(
        export(
            tmp_path / "a.sqlite",
            StringIds=STRINGS,
            CUPTI_ACTIVITY_KIND_KERNEL=(KERNEL.format(name="shortName"), rows),
        )
    )
    assert taken.lost == {"GPU events of negative duration": 1}
    assert taken.events[["ts", "dur"]].values.tolist() == [[10**18 + 201, 100]] * 2
    assert taken.events["name"].tolist() == ["gemm_kernel", ""]


def test_processes_with_the_same_correlations_and_devices_are_ranks(tmp_path):
    first, second = 3 << 24, 9 << 24
    ranges = [(0, 90, "step 0", first + 1), (0, 90, "step 0", second + 1), (95, 200, "step 1", second + 1)]
    path = export(
        tmp_path / "a.sqlite",
        StringIds=STRINGS,
        CUPTI_ACTIVITY_KIND_KERNEL=(
            KERNEL.format(name="shortName") + ", globalPid INT",
            [(*kernel(100, 200, 1, 5), first), (*kernel(150, 250, 2, 5), second)],
        ),
        CUPTI_ACTIVITY_KIND_RUNTIME=(
            "start INT, end INT, globalTid INT, correlationId INT, nameId INT",
            [(50, 60, first + 1, 5, 3), (140, 145, second + 1, 5, 3)],
        ),
        NVTX_EVENTS=("start INT, end INT, text TEXT, globalTid INT", ranges),
    )
    taken = trace.read(path)
    assert taken.events[["rank", "launch_ts", "step"]].values.tolist() == [[0, 50, 0], [1, 140, 1]]
    assert summary.by_device(taken)[["rank", "busy_ns", "exposed_ns"]].values.tolist() == [[0, 100, 0], [1, 100, 100]]


GRAPH = "start INT, end INT, deviceId INT, graphId INT, streamId INT, correlationId INT"


def test_graphs_as_whole_blocks_still_give_the_total(tmp_path):
    path = export(
        tmp_path / "a.sqlite", CUPTI_ACTIVITY_KIND_GRAPH_TRACE=(GRAPH, [(100, 400, 0, 1, 7, 5), (500, 600, 0, 1, 7, 6)])
    )
    taken = trace.read(path)
    assert taken.lost == {nsys.GRAPHS_WHOLE: 2}
    assert "--cuda-graph-trace=node" in nsys.GRAPHS_WHOLE
    (device,) = summary.by_device(taken).itertuples()
    assert (device.kernels, device.kernel_ns) == (2, 400)
    assert summary.unmatched(taken)["name"].tolist() == ["a whole CUDA graph, not cut into kernels"]


def test_a_graph_with_its_kernels_is_not_counted_twice(tmp_path):
    path = export(
        tmp_path / "a.sqlite",
        StringIds=STRINGS,
        CUPTI_ACTIVITY_KIND_KERNEL=(
            KERNEL.format(name="demangledName"),
            [kernel(100, 200, 1, 5), kernel(210, 300, 1, 5)],
        ),
        CUPTI_ACTIVITY_KIND_GRAPH_TRACE=(GRAPH, [(100, 300, 0, 1, 7, 5), (500, 600, 0, 1, 7, 6)]),
    )
    taken = trace.read(path)
    (device,) = summary.by_device(taken).itertuples()
    assert (device.kernels, device.kernel_ns) == (3, 290)
    assert summary.by(taken, "op").set_index("op")["calls"].to_dict() == {summary.NOT_ATTRIBUTABLE: 2, summary.NO_OP: 1}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: export(path), "is empty"),
        (lambda path: export(path, other=("a INT", [])), "no GPU kernels in a.sqlite"),
        (lambda path: export(path, CUPTI_ACTIVITY_KIND_KERNEL=(KERNEL.format(name="shortName"), [])), "no GPU kernels"),
        (lambda path: export(path, CUPTI_ACTIVITY_KIND_KERNEL=("start INT", [(1,)])), "no sound Nsight Systems export"),
        (lambda path: export(path, CUPTI_ACTIVITY_KIND_KERNEL=("other INT", [(1,)])), "no sound Nsight Systems export"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 5000), "no sound Nsight Systems export"),
    ],
)
def test_an_export_without_gpu_work_is_one_clear_error(tmp_path, make, says):
    path = tmp_path / "a.sqlite"
    make(path)
    with pytest.raises(TraceError, match=says):
        trace.read(path)
