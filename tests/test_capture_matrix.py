"""The matrix without a GPU: its cells, the processes they run in, what is recorded; with one, cells themselves."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from dsv4lab import hardware, records, timing, verdict
from dsv4lab.capture import cells, gain, matrix, step
from dsv4lab.capture.cells import Cell, Outcome
from dsv4lab.capture.errors import first_error

DEVICE = "cpu" if hardware.probe() is None else "cuda"


def cell(stream="none", mode="default", warmth="same"):
    return Cell("split_k", mode, warmth, False, stream)


def test_the_matrix_is_the_whole_product_and_every_cell_has_a_name_of_its_own():
    found = cells.cells("split_k")
    compiled = [c for c in found if c.mode != cells.EAGER and c.warmth in cells.WARMTHS]
    assert len(set(compiled)) == 3 * 3 * 2 * 4
    assert Counter(c.stream for c in compiled) == dict.fromkeys(cells.STREAMS, 18)
    assert len({c.name for c in found}) == len(found) == 72 + 12 + 6
    assert {c.attention for c in found} == {"split_k"}


def test_what_fills_the_cache_runs_first_and_what_needs_it_filled_last():
    found = [matrix._wave(cell, "split_k") for name in step.ATTENTION for cell in cells.cells(name)]
    assert Counter(found) == {0: 12, 1: 2 * (24 + 12), 2: 2 * (48 + 3) - 12, 3: 6}


def fate(cell):
    """Stands in for an attempt: what happens is in the name of the stream."""
    match cell.stream:
        case "none":
            return Outcome(True, replay_equal=True, compiles=0)
        case "raises":
            raise RuntimeError("no such thing as /usr/lib/thing.so")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(60)
        case "loud":
            print("x" * 100_000, flush=True)
            return Outcome(False, "noise", 905, "cudaErrorStreamCaptureIsolation")


def surroundings(cell):
    from torch._inductor import config

    told = [os.environ["TORCHINDUCTOR_CUDAGRAPHS"], str(config.triton.cudagraphs), str(config.compile_threads)]
    own = str(os.getpid()) in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return Outcome(False, " ".join([*told, "own" if own else "shared"]))


def test_a_cell_that_dies_hangs_or_raises_is_a_result_and_the_others_go_on(capfd):
    todo = [cell(stream) for stream in ("none", "raises", "dies", "hangs", "loud", "none")]
    found = list(matrix.outcomes(todo, fate, jobs=2, timeout_s=2))
    assert len(found) == len(todo)
    ended = {cell.stream: outcome for cell, outcome in found}
    assert ended["none"] == Outcome(True, replay_equal=True, compiles=0)
    assert ended["raises"].first_error == "outside of the capture: RuntimeError: no such thing as thing.so"
    assert ended["dies"].first_error == "the process died with exit code -9"
    assert ended["hangs"].first_error == "no end within 2 s"
    assert ended["loud"].cuda_code == 905
    assert capfd.readouterr().out == ""


def test_a_cell_finds_its_settings_and_cold_ones_an_empty_cache():
    todo = [Cell("split_k", "default", warmth, graphs, "none") for warmth, graphs in (("cold", True), ("same", False))]
    found = {cell.warmth: outcome.first_error for cell, outcome in matrix.outcomes(todo, surroundings, 2, 60)}
    assert found == {"cold": "1 True 1 own", "same": "0 False 1 shared"}


def test_the_variable_sets_what_a_cell_sets():
    command = [sys.executable, "-c", "import torch._inductor.config as c; print(c.triton.cudagraphs)"]
    environments = [os.environ | {"TORCHINDUCTOR_CUDAGRAPHS": value} for value in ("0", "1")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for env in environments]
    assert [process.communicate()[0].strip() for process in started] == ["False", "True"]


def test_leaving_early_ends_what_was_started():
    found = matrix.outcomes([cell("none"), cell("hangs")], fate, jobs=2, timeout_s=60)
    assert next(found)[0].stream == "none"
    start = time.monotonic()
    found.close()
    assert time.monotonic() - start < 30


def test_records_keep_what_was_found(monkeypatch, tmp_path):
    results = {
        "joined": Outcome(True, replay_equal=True, compiles=0),
        "none": Outcome(True, replay_equal=False, compiles=0),
    }
    failed = Outcome(False, "AcceleratorError: CUDA error: no", 905, "cudaErrorStreamCaptureIsolation", None, True, 0)
    monkeypatch.setattr(matrix.timing, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(matrix, "_forks", lambda cell: True)
    monkeypatch.setattr(matrix.stock_simt, "unavailable", lambda: "not here")
    monkeypatch.setattr(
        matrix, "outcomes", lambda todo, *_: ((cell, results.get(cell.stream, failed)) for cell in todo)
    )
    path = matrix.run(directory=tmp_path)
    found = records.read("capture", tmp_path)
    assert path.name == found[0].file and len(found) == 90
    frame = records.to_frame(found)
    assert frame["median_us"].isna().all()
    assert set(frame.loc[frame["stream"] == "joined", "passed"]) == {True}
    assert set(frame.loc[frame["stream"] == "none", "passed"]) == {False}
    isolated = frame[frame["stream"] == "event_before"]
    assert set(isolated["cuda_name"]) == {"cudaErrorStreamCaptureIsolation"}
    assert set(isolated["cuda_code"]) == {905.0}
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="attention must be one of split_k, stock_simt, got 'x'"):
        matrix.run(["x"], directory=tmp_path)
    with pytest.raises(ValueError, match="'stock_simt' cannot run here: not here"):
        matrix.run(["stock_simt"], directory=tmp_path)


def test_a_run_that_is_stopped_leaves_what_it_found(monkeypatch, tmp_path):
    def stopped(todo, *_):
        yield todo[0], Outcome(True, replay_equal=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix.timing, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(matrix, "_forks", lambda cell: True)
    monkeypatch.setattr(matrix, "outcomes", stopped)
    with pytest.raises(KeyboardInterrupt):
        matrix.run(["split_k"], directory=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".partial" and len(left.read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [dict(jobs=0), dict(timeout_s=-3)])
def test_numbers_below_1_are_refused(tmp_path, number):
    ((name, value),) = number.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        matrix.run(**number, directory=tmp_path)


def test_the_step_norms_turns_and_turns_back():
    made = step.Step("split_k", (2,), DEVICE, topk=16)
    hidden, residual, positions = step.inputs(2, DEVICE, seed=1)
    seen = []
    made.attend = lambda q, *new: (seen.append(q), q)[1]
    out, added = made(hidden, residual, positions)
    (q,) = seen
    assert torch.equal(added, residual + hidden) and q.dtype == out.dtype == torch.bfloat16
    normed = torch.nn.functional.rms_norm(added.float(), (4096,), made.weight, step.EPS).view(2, 8, 512)
    assert torch.allclose(q[..., :448].float(), normed[..., :448], rtol=1e-2, atol=1e-3)
    assert not torch.allclose(q[..., 448:].float(), normed[..., 448:], atol=1e-2)
    pairs = [x[..., 448:].float().unflatten(-1, (-1, 2)).norm(dim=-1) for x in (q, normed)]
    assert torch.allclose(*pairs, rtol=2e-2, atol=2e-3)
    assert torch.allclose(out.float(), normed.flatten(1), rtol=3e-2, atol=2e-2)
    exact = made(hidden, residual, positions, wide=torch.float64)[0]
    assert exact.dtype == torch.float64 and torch.allclose(exact, out.double(), rtol=3e-2, atol=2e-2)


def test_the_step_attends_over_its_caches():
    made = step.Step("split_k", (1, 2), DEVICE, topk=16)
    for batch in (1, 2):
        out, _ = made(*step.inputs(batch, DEVICE, seed=1))
        assert out.shape == (batch, 4096) and out.isfinite().all() and out.any()
    with pytest.raises(ValueError, match="attention must be one of split_k, stock_simt, got 'flash'"):
        step.Step("flash", (1,), DEVICE)


class Broken:
    """A capture that ends with an echo of whatever went wrong in it, or with an error of its own."""

    def __init__(self, graph, stream):
        self.own = graph

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        raise RuntimeError("operation failed due to a previous error during capture" if error else self.own)


@pytest.mark.parametrize("body", ["dependency created on uncaptured work in another stream", None])
def test_the_first_error_of_a_capture_is_raised_and_not_its_echo(monkeypatch, body):
    def call():
        if body:
            raise RuntimeError(body)
        return ()

    monkeypatch.setattr(torch.cuda, "graph", Broken)
    streams = object.__new__(cells._Streams)
    streams.plan, streams.main = "none", None
    with pytest.raises(RuntimeError) as raised:
        streams.capture("capturing stream has unjoined work", call, None)
    expected = "cudaErrorStreamCaptureIsolation" if body else "cudaErrorStreamCaptureUnjoined"
    assert first_error(raised.value).name == expected


def test_the_gain_is_of_checked_steps(monkeypatch, tmp_path):
    def replayed(variants, *, budget_s, device):
        return timing.Replays({name: [float(len(launches))] for name, launches in variants.items()}, {})

    monkeypatch.setattr(timing, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(timing, "graph_replay_us", replayed)
    monkeypatch.setattr(step, "_attention", lambda *_: lambda q, *new: q)
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    gain.run([1], directory=tmp_path)
    frame = records.to_frame(records.read("capture_gain", tmp_path)).set_index("impl")
    assert sorted(frame.index) == ["attention", "compiled", "eager"]
    assert frame.loc["attention", "error"] == 0 < frame.loc["eager", "error"] == frame.loc["compiled", "error"]
    assert frame.loc["eager", "bytes"] - frame.loc["attention", "bytes"] == 4 * 2 * 4096
    monkeypatch.setattr(torch, "compile", lambda function, mode: lambda *args: (function(*args)[0] * 1.1,))
    with pytest.raises(verdict.CheckFailed, match="the step has error"):
        gain.run([1], directory=tmp_path / "wrong")
    assert list((tmp_path / "wrong").iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stream", "mode", "warmth", "name"),
    [
        ("none", "default", "same", None),
        ("joined", "default", "same", None),
        ("unjoined", "eager", "same", "cudaErrorStreamCaptureUnjoined"),
        ("event_before", "default", "same", "cudaErrorStreamCaptureIsolation"),
        ("none", "default", "cold", "any"),
    ],
)
def test_cells_on_the_gpu(stream, mode, warmth, name):
    ((_, outcome),) = matrix.outcomes([cell(stream, mode, warmth)], cells.attempt, 1, 120)
    assert outcome.captured == (name is None), outcome
    if name is None:
        assert outcome.replay_equal and outcome.compiles == 0
    elif name != "any":
        assert outcome.cuda_name == name and outcome.usable_after


@pytest.mark.gpu
def test_the_gain_is_recorded(tmp_path):
    gain.run([2], directory=tmp_path, budget_s=0.05)
    frame = records.to_frame(records.read("capture_gain", tmp_path))
    assert set(frame["impl"]) == {"eager", "compiled", "attention"}
    assert (frame["error"] <= frame["tolerance"]).all()
