import gzip
import json
from pathlib import Path

import pandas as pd
import pytest
from traces import SGLANG, Eager, event, write

from dsv4lab import trace
from dsv4lab.trace import reduced, report
from dsv4lab.trace.frames import TraceError


def told(taken: trace.Trace) -> str:
    return report.as_json(report.findings(taken, "shape"))


@pytest.fixture(params=["ours", "eager"])
def source(request, tmp_path) -> Path:
    if request.param == "ours":
        return SGLANG
    step = Eager().run("aten::to > aten::copy_", 40, [[4, 8], [4, 8]], ["float", "c10::BFloat16"]).run("", 3)
    step.events.append(event("cuda_runtime", "cudaDeviceSynchronize", 1010, 50))
    step.events.append(event("python_function", "/home/me/lab/model.py(3): forward", 900, 500))
    return step.write(tmp_path / "eager.json")


def test_a_reduced_trace_tells_what_the_trace_tells(source, tmp_path):
    path = trace.reduce(source, tmp_path / "x.trace.jsonl.gz", stage="stock", batch=32)
    whole, small = trace.read(source), trace.read(path)
    pd.testing.assert_frame_equal(small.events.astype(object), whole.events.astype(object))
    pd.testing.assert_frame_equal(small.marks.astype(object), whole.marks.astype(object))
    assert small.meta == whole.meta | {"stage": "stock", "batch": 32}
    assert json.loads(told(small)) == json.loads(told(whole)) | {"meta": small.meta}


def test_a_reduced_trace_is_small_and_the_same_each_time(tmp_path):
    first, second = (trace.reduce(SGLANG, tmp_path / f"{n}.trace.jsonl.gz") for n in (1, 2))
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) < 20_000


def test_what_was_lost_stays_known(tmp_path):
    path = tmp_path / "cut.json.gz"
    path.write_bytes(SGLANG.read_bytes()[:40_000])
    small = trace.read(trace.reduce(path, tmp_path / "x.trace.jsonl.gz"))
    assert small.lost == trace.read(path).lost != {}


def test_no_folder_of_this_machine_is_kept(tmp_path):
    step = Eager().run("aten::add", 3)
    step.events[0]["args"]["Call stack"] = "/home/alice/lab/model.py(3): forward"
    path = trace.reduce(step.write(tmp_path / "t.json"), tmp_path / "x.trace.jsonl.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    assert "alice" not in text and "model.py(3): forward" in text


def test_a_reduced_trace_is_never_overwritten_and_has_its_name(tmp_path):
    path = trace.reduce(SGLANG, tmp_path / "x.trace.jsonl.gz")
    with pytest.raises(FileExistsError, match=r"x.trace.jsonl.gz exists already"):
        trace.reduce(SGLANG, path)
    with pytest.raises(ValueError, match=r"path must end in .trace.jsonl.gz, got 'x.gz'"):
        trace.reduce(SGLANG, tmp_path / "x.gz")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.trace.jsonl.gz"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"no gzip",
        lambda data: gzip.compress(b'{"schema": 1}\n'),
        lambda data: gzip.compress(gzip.decompress(data).replace(b'"schema":1', b'"schema":9')),
        lambda data: gzip.compress(gzip.decompress(data)[:-100]),
    ],
)
def test_a_damaged_one_is_one_clear_error(tmp_path, damage):
    path = trace.reduce(SGLANG, tmp_path / "x.trace.jsonl.gz")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=r"x.trace.jsonl.gz is"):
        trace.read(path)


def test_several_ranks_are_reduced_to_one_file(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank in (0, 1):
        events = Eager().run("aten::mm", 5).events
        write(tmp_path / "ranks" / f"{rank}.json", events, distributedInfo={"rank": rank})
    small = trace.read(trace.reduce(tmp_path / "ranks", tmp_path / "x.trace.jsonl.gz"))
    assert small.events["rank"].tolist() == [0, 1]


def test_the_newest_of_a_stage_is_found_by_its_name(tmp_path):
    names = ["split_k_graph_h200_20260101", "split_k_graph_a100_20260102", "split_k_eager_h200_20260103"]
    for name in [*names, "k_graph_h200_20260104", "split_k_tp2_graph_h200_20260105"]:
        (tmp_path / f"{name}T000000Z.trace.jsonl.gz").touch()
    assert reduced.newest("split_k", "graph", tmp_path).name == f"{names[1]}T000000Z.trace.jsonl.gz"
    assert reduced.newest("mma", "graph", tmp_path) is None
    assert reduced.newest("mma", "graph", tmp_path / "nowhere") is None


def test_a_stage_is_kept_under_its_name(tmp_path):
    path = reduced.keep(trace.read(SGLANG), "indexer", "graph", tmp_path, batch=32)
    assert reduced.newest("indexer", "graph", tmp_path) == path
    assert path.name.startswith("indexer_graph_h200_2")
    assert {"stage": "indexer", "mode": "graph", "batch": 32}.items() <= trace.read(path).meta.items()
    with pytest.raises(ValueError, match="mode must be graph or eager, got 'fast'"):
        reduced.keep(trace.read(SGLANG), "indexer", "fast", tmp_path)
