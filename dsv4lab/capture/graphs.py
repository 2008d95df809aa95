"""A function of a batch, captured once for each of a few batch sizes, and replayed for any batch up to the largest."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dsv4lab import timing
from dsv4lab.capture import compiles
from dsv4lab.capture.errors import first_error

WARM_UPS = 3
"""Calls before a capture: cuBLAS and autotuners settle, and torch.compile has seen the shape twice."""


class CaptureFailed(RuntimeError):
    """A batch size could not be captured; the message has the first error. Stream and graphs are usable as before."""


class Backend(Protocol):
    """What captures: calls it a few times, then once for good, and returns its outputs and what replays it."""

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]: ...


class CudaGraphs:
    """CUDA graphs on a stream of their own, over one pool of memory: only one of them may run at a time."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                call()
            self._stream.synchronize()
            graph, outputs = torch.cuda.CUDAGraph(), None
            try:
                with compiles.frozen(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    outputs = call()
            except Exception:
                timing.recover(self._stream)
                raise
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs, graph.replay


def graph(fn: Callable, buckets: Sequence[int], backend: Backend | None = None) -> "BucketedGraph":
    """`fn` of tensors [B, ...] as CUDA graphs for the batch sizes `buckets`; see `BucketedGraph`."""
    return BucketedGraph(fn, buckets, backend)


class BucketedGraph:
    """Warm up once, then call it like the function.

    `fn` takes tensors [B, ...] by position and returns tensors [B, ...] in any nesting; what else it needs (weights,
    caches) it holds itself. A call copies its arguments into static buffers of the smallest bucket that holds them,
    repeats their last row in the rows that are left (so that whatever it stores is stored twice, not elsewhere), and
    replays. What it returns lies in memory of the graph: valid until the next call.

    buckets: batch sizes, each at least 1. backend: None for CUDA graphs. ValueError naming what does not fit.
    """

    def __init__(self, fn: Callable, buckets: Sequence[int], backend: Backend | None = None):
        if not buckets or min(buckets) < 1:
            raise ValueError(f"buckets must be batch sizes of at least 1, got {list(buckets)}")
        self._fn, self.buckets, self._backend = fn, sorted(set(buckets)), backend
        self._buffers: list[Tensor] = []
        self._graphs: dict[int, tuple[Any, Callable[[], None]]] = {}
        self._freeze = ExitStack()

    def warm_up(self, *examples: Tensor, freeze: bool = True) -> None:
        """Compiles and captures every bucket, the largest first, with rows of `examples` [B, ...] over and over.

        Then, until `thaw`, whatever would compile anywhere in the process raises ColdKernel with its shapes; with
        several graphs let only the last one `freeze`. Raises CaptureFailed naming the bucket, and leaves what was
        captured before in place.
        """
        rows = {_batch(example) for example in examples}
        if len(rows) != 1 or not min(rows):
            raise ValueError(f"examples must be tensors [B, ...] of one B of at least 1, got {_shapes(examples)}")
        self.thaw()
        self._backend = self._backend or CudaGraphs(examples[0].device)
        buffers = [_rows(example, self.buckets[-1]) for example in examples]
        graphs = {bucket: self._capture([buffer[:bucket] for buffer in buffers]) for bucket in reversed(self.buckets)}
        self._buffers, self._graphs = buffers, graphs
        if freeze:
            self._freeze.enter_context(compiles.frozen())

    def thaw(self) -> None:
        """Ends the freeze that `warm_up` began."""
        self._freeze.close()

    def __call__(self, *args: Tensor) -> Any:
        batch = self._checked(args)
        bucket = self.buckets[bisect_left(self.buckets, batch)]
        for buffer, arg in zip(self._buffers, args, strict=True):
            buffer[:batch].copy_(arg)
            buffer[batch:bucket].copy_(arg[-1:].expand_as(buffer[batch:bucket]))
        outputs, replay = self._graphs[bucket]
        replay()
        return tree_map(lambda output: output[:batch], outputs)

    def _capture(self, inputs: Sequence[Tensor]) -> tuple[Any, Callable[[], None]]:
        bucket = len(inputs[0])
        try:
            outputs, replay = self._backend.capture(lambda: self._fn(*inputs))
        except Exception as error:
            raise CaptureFailed(f"bucket {bucket}, {_shapes(inputs)}: {first_error(error).text}") from error
        if wrong := [o for o in tree_leaves(outputs) if not isinstance(o, Tensor) or o.shape[:1] != (bucket,)]:
            raise ValueError(f"fn must return tensors [{bucket}, ...] for bucket {bucket}, got {_shapes(wrong)}")
        return outputs, replay

    def _checked(self, args: Sequence[Tensor]) -> int:
        """The batch of a call; ValueError where a graph could not take it."""
        if not self._graphs:
            raise ValueError("nothing is captured yet: call warm_up with examples first")
        wanted = ", ".join(f"{_dtype(b)}[{', '.join(map(str, ('B', *b.shape[1:])))}]" for b in self._buffers)
        batch = _batch(args[0]) if args else 0
        if not 1 <= batch <= self.buckets[-1] or not _alike(args, self._buffers, batch):
            raise ValueError(f"args must be {wanted} with B from 1 to {self.buckets[-1]}, got {_shapes(args)}")
        return batch


def _batch(value: Any) -> int:
    """B of a tensor [B, ...], 0 of anything else."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else 0


def _alike(args: Sequence[Any], buffers: Sequence[Tensor], batch: int) -> bool:
    return len(args) == len(buffers) and all(
        _batch(arg) and arg.shape == (batch, *buffer.shape[1:]) and arg.dtype == buffer.dtype
        for arg, buffer in zip(args, buffers, strict=True)
    )


def _rows(example: Tensor, rows: int) -> Tensor:
    """`rows` rows of an example, over and over, in memory of their own."""
    return example[torch.arange(rows, device=example.device) % example.shape[0]].contiguous()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shapes(values: Sequence[Any]) -> str:
    each = (f"{_dtype(v)}{list(v.shape)}" if isinstance(v, Tensor) else repr(v) for v in values)
    return ", ".join(each) or "nothing"
