"""Small traces written by hand, as torch.profiler writes them."""

import gzip
import json
from pathlib import Path
from typing import Any

H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}]}
SGLANG = Path(__file__).parent / "data" / "sglang_0.5.14_h200_sketch_c32_graph_replay.json.gz"
"""3 steps of a live SGLang 0.5.14 decode at batch 32 on an H200, CUDA-graph replay."""


def event(cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "grid": [1, 1, 1], "block": [128, 1, 1]} | args
    return event("kernel", name, ts, dur, tid=stream, **args)


def op(name: str, ts: float, dur: float, shapes: list | None = None, dtypes: list | None = None, **args: Any) -> dict:
    return event("cpu_op", name, ts, dur, **{"Input Dims": shapes or [], "Input type": dtypes or []} | args)


class Eager:
    """Launches one after another: each an op (or ops around each other), its launch call and its kernel."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._at, self._free, self._correlation = 1000.0, 0.0, 0

    def run(self, ops: str, dur: float, shapes: list | None = None, dtypes: list | None = None, **args: Any) -> "Eager":
        """`ops` as "aten::to > aten::copy_", outermost first, none if empty; `dur` in µs of the kernel `name`."""
        self._correlation += 1
        name = args.pop("name", f"kernel_of_{ops or 'nothing'}")
        strides = args.pop("strides", [])
        for depth, each in enumerate(ops.split(" > ") if ops else []):
            self.events.append(
                op(each, self._at + depth / 10, 4 - depth / 5, shapes, dtypes, **{"Input Strides": strides})
            )
        self.events.append(event("cuda_runtime", "cudaLaunchKernel", self._at + 2, 1, correlation=self._correlation))
        start = max(self._at + 4, self._free)
        self.events.append(kernel(name, start, dur, correlation=self._correlation, **args))
        self._at, self._free = self._at + 5, start + dur
        return self

    def write(self, path: Path, **head: Any) -> Path:
        return write(path, self.events, **H200 | head)


def write(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    text = json.dumps({**head, "traceEvents": events}, indent=1).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
