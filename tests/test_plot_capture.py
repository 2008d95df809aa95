"""The capture matrix drawn and explained, on made-up outcomes of the real cells."""

import gzip
import json

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from dsv4lab.capture.cells import cells
from dsv4lab.capture.errors import CODES
from dsv4lab.plot import capture


def row(cell, captured=False, replay_equal=None, text=None, code=None):
    name = CODES[code][0] if code else None
    found = dict(captured=captured, replay_equal=replay_equal, first_error=text, cuda_code=code, cuda_name=name)
    return cell.config | found | {"impl": cell.attention}


def invented(cell):
    if cell.stream == "event_before":
        return row(cell, text="AcceleratorError: CUDA error: dependency", code=905)
    if cell.warmth == "cold":
        return row(cell, text="RuntimeError: Cannot copy between CPU and CUDA tensors  during\ncapture")
    if cell.warmth == "other":
        return row(cell, text="something new")
    if cell.stream == "unjoined":
        return row(cell, text="AcceleratorError: CUDA error: unjoined", code=904)
    return row(cell, captured=True, replay_equal=cell.mode != "reduce-overhead")


@pytest.fixture
def frame():
    return pd.DataFrame([invented(cell) for name in ("split_k", "stock_simt") for cell in cells(name)])


def test_every_cell_has_an_outcome(frame):
    found = capture.outcomes(frame)
    assert set(found[frame["stream"] == "event_before"]) == {"cudaErrorStreamCaptureIsolation"}
    same = (frame["warmth"] == "same") & (frame["stream"] == "joined")
    assert set(found[same & (frame["mode"] == "reduce-overhead")]) == {capture.WRONG}
    assert set(found[same & (frame["mode"] == "default")]) == {capture.CAPTURED}
    assert set(found[(frame["warmth"] == "cold") & (frame["stream"] == "none")]) == {"Cannot copy between CPU and CUDA"}
    assert set(found[(frame["warmth"] == "other") & (frame["stream"] == "none")]) == {capture.UNKNOWN}


def test_causes_are_counted_and_explained_and_what_is_not_is_said(frame):
    table = capture.causes(frame)
    assert table["cells"].is_monotonic_decreasing
    assert table["cells"].sum() == (~frame["captured"]).sum()
    isolation = table.loc["cudaErrorStreamCaptureIsolation"]
    assert isolation["CUDA code"] == "905" and "before the capture began" in isolation["why"]
    assert table.loc[capture.UNKNOWN, ["why", "first error"]].tolist() == ["not explained", "something new"]
    assert table.loc["Cannot copy between CPU and CUDA", "first error"].endswith("tensors during capture")
    assert table.loc["Cannot copy between CPU and CUDA", "CUDA code"].startswith("none")
    assert all(why.count(". ") == 0 and why.endswith(".") for why in capture.CAUSES.values())


def test_switches_are_compared_without_a_second_stream(frame):
    table = capture.switches(frame)
    assert table.index.names == ["mode", "TORCHINDUCTOR_CUDAGRAPHS"]
    assert table.loc[("default", 1), ["same", "cold", "disk"]].tolist() == [
        capture.CAPTURED,
        "Cannot copy between CPU and CUDA",
        "–",
    ]
    assert table.loc[("reduce-overhead", 0), "same"] == capture.WRONG


def test_what_moved_between_two_runs_is_found_by_cell(frame):
    before, after = frame.assign(compiles=1.0), frame.sample(frac=1, random_state=0).assign(compiles=2.0)
    assert capture.moved(before, after).empty
    lucky = before[before["stream"] == "event_before"].index[0]
    before.loc[lucky, ["captured", "replay_equal"]] = True
    (moved,) = capture.moved(before, after).to_dict("records")
    assert moved == {
        ("before", "outcome"): capture.CAPTURED, ("before", "compiles"): 1,
        ("now", "outcome"): "cudaErrorStreamCaptureIsolation", ("now", "compiles"): 2,
    }  # fmt: skip
    assert capture.moved(before.drop(lucky), after).empty


def test_the_picture_has_a_square_for_each_cell_of_the_matrix(frame):
    figure = capture.matrix(frame, "a title")
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["attention: split-K", "attention: SGLang stock"]
    for axes in panels:
        assert len(axes.patches) == len(axes.texts) - 3 * (axes is panels[-1]) == 84
        assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["default, 0", "default, 1"]
    first = panels[0].patches[0], panels[0].texts[0].get_text()
    assert to_hex(first[0].get_facecolor()) == capture._COLORS[capture.CAPTURED].lower() and first[1] == "ok"
    (legend,) = figure.legends
    assert capture.WRONG in [text.get_text() for text in legend.get_texts()]


def test_kernels_of_inductor_are_told_by_name(tmp_path):
    names = ["triton_poi_fused_add_1"] * 4 + ["triton_red_fused_mean_0"] * 2 + ["_w8a8_block", "triton_kernel_by_hand"]
    where = {"ph": "X", "pid": 0, "tid": 7, "dur": 2.0, "args": {"device": 0, "stream": 7}}
    events = [{"cat": "kernel", "name": name, "ts": 3.0 * i} | where for i, name in enumerate(names)]
    events += [{"cat": "cpu_op", "name": names[0], "ts": 0.0} | where]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    table = capture.inductor_kernels(path, steps=2)
    assert table["in the trace"].to_dict() == {"triton_poi_fused_add_1": 4, "triton_red_fused_mean_0": 2}
    assert table.loc["triton_poi_fused_add_1", ["a step", "µs each"]].tolist() == [2.0, 2.0]
