"""Takes traces of a callable on this GPU: eagerly, with shapes and stacks, and as a CUDA graph that is replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dsv4lab import hardware
from dsv4lab.trace.attribution import joined
from dsv4lab.trace.families import classified
from dsv4lab.trace.frames import Trace
from dsv4lab.trace.reading import read


@dataclass(frozen=True)
class Recorded:
    """Two traces of the same steps. Those of the replay have the ops and shapes of the eager ones, where they match.

    `files` are the profiler's own, which last as long as the `with` block.
    """

    eager: Trace
    replay: Trace
    files: dict[str, Path]


@contextmanager
def record(step: Callable[[], Any], *, steps: int = 3, warmup: int = 3) -> Iterator[Recorded]:
    """`with record(step) as taken:` runs `step` eagerly and as a graph and gives both traces.

    Args:
        step: without arguments, always on the same tensors, without a synchronisation: it is captured.
        steps: how often it runs under each profiler.
        warmup: how often before that.

    RuntimeError where torch sees no GPU; what `step` raises, eagerly or under capture, is passed on.
    """
    if steps < 1 or warmup < 1:
        raise ValueError(f"steps and warmup must be at least 1, got {steps} and {warmup}")
    if hardware.probe() is None:
        raise RuntimeError("record needs a CUDA GPU, and torch sees none")
    torch = import_module("torch")  # by name: traces are read without it
    with TemporaryDirectory(prefix="dsv4lab-trace-") as folder:
        files = {mode: Path(folder) / f"{mode}.json" for mode in ("eager", "replay")}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warmup):
                step()
        torch.cuda.synchronize()
        _profile(torch, step, steps, files["eager"], detailed=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        _profile(torch, graph.replay, steps, files["replay"], detailed=False)
        eager, replay = read(files["eager"]), read(files["replay"])
        yield Recorded(eager, classified(joined(replay, eager)), files)


def _profile(torch: Any, call: Callable[[], Any], steps: int, path: Path, *, detailed: bool) -> None:
    profiler = torch.profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=activities, record_shapes=detailed, with_stack=detailed) as taken:
        for number in range(steps):
            with profiler.record_function(f"step {number}"):
                call()
        torch.cuda.synchronize()
    taken.export_chrome_trace(str(path))
