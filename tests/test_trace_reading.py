import gzip
import json
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from traces import SGLANG, event, kernel, op, write

from dsv4lab import trace
from dsv4lab.trace import kineto, summary, text
from dsv4lab.trace.frames import TraceError


def totals(path) -> tuple[int, int, int]:
    """Kernels, their sum and their busy union in ns, over all devices."""
    devices = summary.by_device(trace.read(path))
    return tuple(devices[["kernels", "kernel_ns", "kernel_busy_ns"]].sum())


@pytest.fixture
def lost(tmp_path):
    """What was lost, and the kernels that were not, of a file with this text."""

    def read(content: str | bytes):
        path = tmp_path / "t.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        taken = kineto.read(path)
        return dict(taken.lost), taken.events["name"].tolist(), taken.events["dur"].tolist()

    return read


def around(*events: str) -> str:
    return '{"traceEvents": [' + ",\n".join(events) + "]}"


GOOD, OTHER = json.dumps(kernel("good", 1, 2)), json.dumps(kernel("other", 1, 2, stream=9))


def test_the_numbers_of_our_own_trace():
    assert totals(SGLANG) == (1254, 15_138_250, 13_845_825)
    meta = trace.read(SGLANG).meta
    assert (meta["gpu"], meta["sms"], meta["rank"]) == ("NVIDIA H200", 132, 0)


def test_epoch_timestamps_with_decimals_do_not_pass_through_a_double(tmp_path):
    starts = ["1712195495505583.063", "1712195495505583.264", "1712195495505583.464"]
    events = ",".join(json.dumps(kernel("k", 0, 0.2)).replace('"ts": 0', f'"ts": {ts}') for ts in starts)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + events + "]}")
    ts = trace.read(path).events["ts"].to_numpy()
    assert (ts - 1712195495505583_000).tolist() == [63, 264, 464]
    assert totals(path) == (3, 600, 600)  # 1 ns between the first two: as doubles all three overlap
    assert len({float(start) for start in starts}) < 3 or Fraction(float(starts[0])) != Fraction(starts[0])


def test_times_count_from_the_base_that_the_file_names(tmp_path):
    path = write(tmp_path / "t.json", [kernel("k", 5103106034561.883, 1)], baseTimeNanoseconds=1790857026000000000)
    assert trace.read(path).events["ts"].tolist() == [1790857026000000000 + 5103106034561883]


def test_sub_microsecond_kernels_keep_their_time(tmp_path):
    assert totals(write(tmp_path / "t.json", [kernel("k", 100.7, 0.2)])) == (1, 200, 200)


@pytest.mark.parametrize(
    ("written", "ns"),
    [
        ("12", 12_000),
        ("12.5", 12_500),
        ("1.7e3", 1_700_000),
        ('"3.25"', 3_250),
        ("0.0004", 0),
        ("null", None),
        ("1e99", None),
        ("99999999999999999", None),
        ("99999999999999999.123", None),
        ("-1712195495505583.063", -1_712_195_495_505_583_063),
    ],
)
def test_any_way_of_writing_a_number(written, ns):
    expected = kineto.UNREADABLE if ns is None else ns
    assert kineto.nanoseconds([written.encode()]).tolist() == [expected]
    assert kineto.nanoseconds([written.encode(), b"1.250"]).tolist() == [expected, 1250]


def test_overlap_and_exposed_communication(tmp_path):
    events = [
        kernel("gemm", 0, 100),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50, 100, stream=20),
        event("cuda_sync", "Stream Synchronize", 0, 150, tid=7, stream=7, device=0),
    ]
    (row,) = summary.by_device(trace.read(write(tmp_path / "t.json", events))).itertuples()
    assert (row.kernels, row.kernel_ns, row.busy_ns, row.overlap_ns) == (2, 200_000, 150_000, 50_000)
    assert (row.communication_ns, row.exposed_ns) == (100_000, 50_000)


def test_old_spellings(tmp_path):
    events = [
        event("Operator", "aten::add", 10, 8, **{"Input dims": [[4], [4]], "Call stack": "m.py(3): f"}),
        event("Runtime", "cudaLaunchKernel", 12, 3, correlation=5),
        event("Kernel", "k", 20, 4, tid=3, correlation=5, grid=[2, 1, 1]) | {"pid": 0},
        event("Memcpy", "Memcpy DtoD (Device -> Device)", 30, 2, tid=3, bytes=64) | {"pid": 0},
    ]  # fmt: skip
    events = trace.read(write(tmp_path / "t.json", events)).events
    assert events["kind"].tolist() == ["kernel", "memcpy"]
    first = events.iloc[0]
    assert (first["device"], first["stream"], first["op"], first["shapes"]) == (0, 3, "aten::add", "[[4],[4]]")
    assert (first["stack"], first["grid"], first["launch_ts"]) == ("m.py(3): f", "[2,1,1]", 12_000)
    assert events.iloc[1]["bytes"] == 64


@pytest.mark.parametrize(
    "head",
    [
        {"deviceProperties": {}, "distributedInfo": [], "baseTimeNanoseconds": "soon"},
        {"deviceProperties": [], "distributedInfo": {"rank": "first"}, "baseTimeNanoseconds": None},
        {"deviceProperties": [{"name": 7, "numSms": "many"}], "distributedInfo": {"rank": -1}},
    ],
)
def test_an_odd_header_costs_no_event(tmp_path, head):
    taken = trace.read(write(tmp_path / "t.json", [kernel("k", 1, 2)], **head))
    assert taken.meta == {"format": "kineto", "base_ns": 0}
    assert taken.events["rank"].tolist() == [0]


def test_a_bare_array_of_events_is_a_trace_too(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps([kernel("k", 1, 2)]))
    assert totals(path) == (1, 2000, 2000)
    assert trace.read(path).lost == {}


def test_one_odd_value_costs_no_event(lost):
    odd = kernel("odd", 1, 2, stream="default", correlation=None, grid="grid(100,)") | {"pid": "GPU"}
    bare = kernel("bare", 1, 2) | {"args": None}
    texts = (json.dumps(odd), json.dumps(bare), GOOD)
    assert lost(around(*texts)) == ({}, ["odd", "bare", "good"], [2000, 2000, 2000])


def test_what_is_read_does_not_depend_on_the_chunks(monkeypatch):
    whole = kineto.read(SGLANG)
    monkeypatch.setattr(text, "CHUNK", 4096)
    pieces = kineto.read(SGLANG)
    pd.testing.assert_frame_equal(whole.events.astype(object), pieces.events.astype(object))
    pd.testing.assert_frame_equal(whole.marks.astype(object), pieces.marks.astype(object))
    assert pieces.lost == whole.lost == {}
    assert pieces.meta == whole.meta


MENDED = {"events with invalid JSON, mended": 1}


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (GOOD.replace("good", 'f(\\"a\nb\\")'), 'f("a\nb")'),
        (GOOD.replace("good", "C:\\x"), "C:\\x"),
        (GOOD.replace("good", "C:\\users\\new"), "C:\\users\new"),
        (GOOD.replace("good", "bell\x07"), "bell\x07"),
        (GOOD.replace('"stream": 7', '"stream": 7, "memory bandwidth (GB/s)": inf'), "good"),
        (GOOD.replace('"stream": 7', '"stream": 7, "x": -nan'), "good"),
    ],
)
def test_invalid_json_is_mended_and_counted(lost, bad, name):
    assert lost(around(GOOD, bad, OTHER)) == (MENDED, ["good", name, "other"], [2000] * 3)
    assert lost(around(GOOD, bad))[1] == ["good", name]  # as the last event, too


def test_bytes_that_are_no_text_are_mended(lost):
    assert lost(around(GOOD, GOOD).encode().replace(b"good", b"\xff\xfe", 1))[0] == MENDED


def test_what_cannot_be_mended_is_counted(lost):
    bad = GOOD.replace('"name": "good"', '"name": "good')
    assert lost(around(GOOD, bad, GOOD)) == ({"events that could not be read": 1}, ["good", "good"], [2000] * 2)


def test_the_cut_off_end_of_a_file_is_counted_in_bytes(lost):
    found, names, _ = lost(around(GOOD, OTHER, GOOD)[:-40])
    assert names == ["good", "other"]
    assert found == {"bytes of an event that the file breaks off in": len(GOOD) - 38}
    assert lost(around(GOOD, GOOD)[:-2])[0] == {"file that ends before its array of events does": 1}


def test_a_cut_gzip_gives_every_whole_event_before_the_cut(tmp_path):
    data = SGLANG.read_bytes()
    path = tmp_path / "cut.json.gz"
    path.write_bytes(data[: len(data) * 6 // 10])
    taken, whole = trace.read(path), trace.read(SGLANG)
    assert 0 < len(taken.events) < len(whole.events)
    kept = taken.events[["name", "ts", "dur", "device", "stream"]].astype(object)
    everything = whole.events[["name", "ts", "dur", "device", "stream"]].astype(object)
    assert len(kept.merge(everything)) == len(kept)
    assert taken.lost["gzip streams cut off before their end"] == 1
    assert 0 < taken.lost["bytes of an event that the file breaks off in"] < 3000


def test_a_damaged_gzip_gives_what_is_before_the_damage(tmp_path):
    text_ = json.dumps({"traceEvents": [kernel(f"k{n * 7919 % 10007}", n, 0.5) for n in range(4000)]}).encode()
    data = bytearray(gzip.compress(text_))
    data[len(data) // 2 : len(data) // 2 + 64] = b"\xff" * 64
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    taken = kineto.read(path)
    assert taken.lost["bytes of gzip after a damaged place"] > 0
    assert 1000 < len(taken.events) < 3000
    assert taken.events["ts"].tolist() == [1000 * n for n in range(len(taken.events))]


def test_several_gzip_streams_are_one_file(tmp_path):
    text_ = json.dumps({"traceEvents": [kernel("k", n, 0.5) for n in range(10)]}).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text_[:300]) + gzip.compress(text_[300:]) + b"\0" * 8)
    assert totals(path)[0] == 10


@pytest.mark.parametrize(
    ("fault", "ts", "dur"),
    [
        ("GPU events with start and duration 0", 0, 0),
        ("GPU events of negative duration", 5, -3),
        ("GPU events without a readable time", 5, None),
        ("GPU events without a readable time", None, 3),
    ],
)
def test_kernels_of_impossible_times_are_dropped_and_counted(lost, fault, ts, dur):
    bad = json.dumps(kernel("bad", ts, dur))
    assert lost(around(GOOD, bad)) == ({fault: 1}, ["good"], [2000])


def test_cpu_events_of_unreadable_times_are_dropped_and_counted(lost):
    bad = [op("aten::add", None, 3), event("cuda_runtime", "cudaLaunchKernel", 1, None), op("aten::mul", "x", 1)]
    found, names, _ = lost(around(GOOD, *map(json.dumps, bad)))
    assert (found, names) == ({"CPU events without a readable time": 3}, ["good"])


def test_a_short_kernel_of_a_coarse_clock_is_kept(lost):
    assert lost(around(GOOD, json.dumps(kernel("short", 5, 0)))) == ({}, ["good", "short"], [2000, 0])


CUT = "GPU events cut short that ran past others of their stream or past the trace"


def test_durations_that_overrun_their_stream_are_cut(lost):
    events = [kernel("long", 10, 1000), kernel("a", 20, 5), kernel("b", 30, 5), kernel("beside", 12, 100, stream=8)]
    found = lost(around(*map(json.dumps, events)))
    assert found == ({CUT: 1}, ["long", "beside", "a", "b"], [10_000, 100_000, 5000, 5000])


def test_a_last_duration_beyond_all_else_is_cut(lost):
    events = [kernel("a", 10, 5), kernel("long", 30, 10**12), event("cuda_runtime", "cudaDeviceSynchronize", 5, 45)]
    assert lost(around(*map(json.dumps, events))) == ({CUT: 1}, ["a", "long"], [5000, 20_000])


def test_neighbours_that_overlap_on_a_stream_are_left_as_they_are(lost):
    events = [kernel("a", 10, 6), kernel("b", 15, 6), kernel("c", 20, 6)]  # programmatic dependent launch
    assert lost(around(*map(json.dumps, events))) == ({}, ["a", "b", "c"], [6000] * 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "t.json is empty"),
        (b"hello", "holds no traceEvents array"),
        (b'{"a": 1}', "holds no traceEvents array"),
        (b'{"traceEvents": []}', "no GPU kernels in t.json"),
        (around(json.dumps(op("aten::add", 1, 2))).encode(), "no GPU kernels in t.json"),
        (around(json.dumps(event("gpu_memcpy", "Memcpy", 1, 2))).encode(), "no GPU kernels in t.json"),
        (
            around('{"ph": kernel}', json.dumps(op("aten::add", 1, 2))).encode(),
            "no GPU kernels in t.json, 1 events that could not be read",
        ),
        (gzip.compress(b"", mtime=0)[:12], "holds no traceEvents array"),
    ],
)
def test_what_holds_nothing_is_one_clear_error(tmp_path, content, says):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        trace.read(path)


def test_a_folder_is_one_trace_of_several_ranks(tmp_path):
    for rank in (0, 1):
        write(tmp_path / f"r{rank}.json.gz", [kernel("k", 10 * rank, 5)], distributedInfo={"rank": rank})
    devices = summary.by_device(trace.read(tmp_path))
    assert devices[["rank", "kernel_ns"]].to_numpy().tolist() == [[0, 5000], [1, 5000]]
    assert summary.by(trace.read(tmp_path), "stream")["rank"].tolist() == [0, 1]
    table = summary.by(trace.read(tmp_path), "kernel", per_device=True)
    assert table[["rank", "device", "sum_ns", "share", "busy_share"]].to_numpy().tolist() == [
        [0, 0, 5000, 1, 1], [1, 0, 5000, 1, 1],
    ]  # fmt: skip


def test_ranks_that_files_do_not_name_are_their_order(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.json", [kernel(name, 1, 5)])
    events = trace.read(tmp_path).events
    assert dict(zip(events["name"], events["rank"], strict=True)) == {"a": 0, "b": 1}


def test_an_empty_folder_says_so(tmp_path):
    with pytest.raises(TraceError, match="no traces in"):
        trace.read(tmp_path)


def test_every_integer_column_keeps_its_type():
    events = trace.read(SGLANG).events
    assert events["ts"].dtype == events["dur"].dtype == np.int64
    assert isinstance(events["name"].dtype, pd.CategoricalDtype)
