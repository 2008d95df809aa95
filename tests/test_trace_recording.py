"""Recording with a stand-in for torch whose profiler writes a trace by hand, and on a GPU where there is one."""

import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from traces import Eager, event, kernel, write

from dsv4lab import hardware
from dsv4lab.trace import recording, summary, suspects

COPY = ("aten::to > aten::copy_", 40, [[4096, 64], [4096, 64]], ["float", "c10::BFloat16"])


class FakeTorch(SimpleNamespace):
    """Counts what `record` asks for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        stream = SimpleNamespace(wait_stream=lambda other: None)
        graph = SimpleNamespace(replay=lambda: self.log.append("replay"))
        super().__init__(
            cuda=SimpleNamespace(
                Stream=lambda: stream,
                current_stream=lambda: stream,
                stream=lambda _: nullcontext(),
                synchronize=lambda: None,
                CUDAGraph=lambda: graph,
                graph=self._capture,
            ),
            profiler=SimpleNamespace(
                ProfilerActivity=SimpleNamespace(CPU=0, CUDA=1),
                profile=self._profile,
                record_function=lambda name: nullcontext(),
            ),
        )

    @contextmanager
    def _capture(self, graph):
        self.log.append("capture")
        yield

    @contextmanager
    def _profile(self, activities, record_shapes, with_stack):
        assert record_shapes == with_stack
        self.log.append("eager" if record_shapes else "graph")
        yield SimpleNamespace(export_chrome_trace=self._eager if record_shapes else self._replay)

    def _eager(self, path: str) -> None:
        Eager().run(*COPY, name="cast", grid=[256, 1, 1]).write(Path(path))

    def _replay(self, path: str) -> None:
        cast = kernel("cast", 20, 40, correlation=1, grid=[256, 1, 1])
        write(Path(path), [event("cuda_runtime", "cudaGraphLaunch", 5, 2, correlation=1), cast])


def test_a_callable_is_recorded_eagerly_and_as_a_graph(monkeypatch):
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(hardware, "probe", lambda: {"name": "NVIDIA H200"})
    with recording.record(lambda: torch.log.append("step"), steps=2, warmup=1) as taken:
        assert sorted(path.name for path in taken.files.values()) == ["eager.json", "replay.json"]
        assert all(path.is_file() for path in taken.files.values())
    assert not any(path.exists() for path in taken.files.values())
    warm, eager, captured, replayed = ["step"], ["eager", "step", "step"], ["capture", "step"], ["replay"]
    assert torch.log == [*warm, *eager, *captured, *replayed, "graph", "replay", "replay"]
    for each in (taken.eager, taken.replay):
        assert summary.by(each, "shape")["shapes"].tolist() == ["[[4096,64],[4096,64]]"]
        assert [suspect.rule for suspect in suspects.find(each)] == ["needless_copies"]


def test_what_the_callable_raises_is_passed_on_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", FakeTorch())
    monkeypatch.setattr(hardware, "probe", lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(recording, "TemporaryDirectory", lambda prefix: nullcontext(tmp_path))
    with pytest.raises(ZeroDivisionError), recording.record(lambda: 1 / 0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(hardware, "probe", lambda: None)
    with pytest.raises(RuntimeError, match="record needs a CUDA GPU"), recording.record(lambda: None):
        pass
    with (
        pytest.raises(ValueError, match="steps and warmup must be at least 1, got 0 and 3"),
        recording.record(None, steps=0),
    ):
        pass


@pytest.mark.gpu
def test_a_real_step_is_recorded_and_its_replay_attributed():
    import torch

    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1024, 256, device="cuda")
    with recording.record(lambda: x.float() @ w) as taken:
        pass
    assert taken.eager.meta["gpu"] == torch.cuda.get_device_name()
    for each in (taken.eager, taken.replay):
        ops = set(each.events["op"].dropna())
        assert {"aten::copy_", "aten::mm"} <= ops
        assert sorted(each.events["step"].unique()) == [0, 1, 2]
    assert "[[512,1024],[1024,256]]" in set(taken.replay.events["shapes"])
