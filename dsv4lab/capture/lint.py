"""`check` runs a function once and names, with its line, whatever would break or silently corrupt its capture.

Operators are seen as they are dispatched, calls that PyTorch hides from dispatch as they are made, and streams, events
and kernels at their own methods. What a C++ extension enqueues by itself is not seen. Without a GPU, tensors on the CPU
stand for the device's, but for `pageable_copy` and `host_read`, which need two kinds of memory ("meta" will do).
"""

import contextlib
import gc
import linecache
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dsv4lab.capture import compiles, streams

RULES = {
    "item": "reads a value back to the host, which waits for the device; a replay keeps the value of the capture",
    "nonzero": "has as many rows as the data says, so it waits for the device; use a mask or torch.nonzero_static",
    "unique": "has as many rows as the data says, so it waits for the device",
    "data_dependent_size": "allocates what the data asks for, so it waits for the device; use torch.where",
    "repeat_interleave": "with a tensor of repeats has the data's size; a replay keeps that of the capture",
    "pageable_copy": "copies from host memory that is not pinned, or waits for the copy; make it before, on the device",
    "host_read": "copies to the host, which waits for the device",
    "synchronize": "waits for the device, which a capture forbids",
    "cold_compile": "compiles or tunes, which synchronises and loads code; call it with these shapes before",
    "outside_event": "waits for an event that was recorded outside of the capture (cudaErrorStreamCaptureIsolation)",
    "outside_stream": "runs on a stream that does not follow the captured one: at once, and in no replay",
    "unjoined_stream": "runs on a stream that the captured one never waits for (cudaErrorStreamCaptureUnjoined)",
    "freed_kernel": "launches a kernel that nothing refers to afterwards: a replay would run what has been unloaded",
}
"""What `check` finds, and why it matters."""

_OPERATORS = {"nonzero": "nonzero", "repeat_interleave": "repeat_interleave"}
_OPERATORS |= dict.fromkeys(("_local_scalar_dense", "equal", "allclose", "is_nonzero"), "item")
_OPERATORS |= dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive"), "unique")
_FROM_LISTS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (Tensor, "new_tensor"))
_FOREIGN = (os.path.dirname(torch.__file__), os.path.dirname(triton.__file__), contextlib.__file__, "<")
_OURS = (__file__, compiles.__file__)


@dataclass(frozen=True)
class Finding:
    """One thing that a capture would not survive, or not tell: the rule, where, and the reason."""

    rule: str
    file: str
    line: int
    detail: str = ""

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.file}:{self.line}: {self.rule}: {self.code!r} {RULES[self.rule]}{detail}"


def check(fn: Callable, *args: Any) -> list[Finding]:
    """Calls `fn(*args)` once, uncaptured, and returns what would break or corrupt its capture, in order of appearance.

    The device is that of the first tensor of `args` that is not on the CPU. What torch.compile has compiled or would
    compile runs uncompiled here, and what was cold stays cold; Triton kernels are compiled. An error of `fn` carries
    the findings so far as notes.
    """
    watch = _Watch(_device(args))
    try:
        with watch.everything():
            result = fn(*args)
    except Exception as error:
        for finding in watch.findings.values():
            error.add_note(f"found before: {finding}")
        raise
    watch.conclude()
    del result
    return list(watch.findings.values())


def _device(args: Any) -> str:
    kinds = [leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return next((kind for kind in kinds if kind != "cpu"), "cpu" if kinds or not torch.cuda.is_available() else "cuda")


class _Watch:
    """The findings of one run; a line is named once for each rule."""

    def __init__(self, device: str):
        self.device = device
        self.findings: dict[tuple[str, str, int], Finding] = {}
        self._ledger = streams.Ledger(_current_stream())
        self._kernels: list[tuple[weakref.ref, tuple[str, int], str]] = []

    def found(self, rule: str, detail: str = "", at: tuple[str, int] | None = None) -> None:
        finding = Finding(rule, *(at or _caller()), detail)
        self.findings.setdefault((rule, finding.file, finding.line), finding)

    @contextmanager
    def everything(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(compiles.watching(partial(self.found, "cold_compile")))
            for owner, name, before in self._patches():
                stack.enter_context(patch.object(owner, name, _preceded(before, getattr(owner, name))))
            stack.enter_context(_Operators(self))
            yield

    def _patches(self) -> list[tuple[Any, str, Callable]]:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        waits = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
        return [
            *((owner, name, lambda *_, **__: self.found("synchronize")) for owner, name in waits),
            *((owner, name, self._from_list) for owner, name in _FROM_LISTS),
            (Tensor, "tolist", self._tolist),
            (torch.cuda.Event, "record", self._record),
            (torch.cuda.Event, "wait", self._wait),
            *((kernel, "run", self._launch) for kernel in (JITFunction, InterpretedFunction, CachingAutotuner)),
        ]

    def _from_list(self, *args: Any, data: Any = None, device: Any = None, **_: Any) -> None:
        """A tensor made on the device from what is not there; dispatch is not shown the copy."""
        like = args[0].device if args and isinstance(args[0], Tensor) else "cpu"  # new_tensor, or data that is one
        data = args[-1] if data is None else data
        if self.device != "cpu" and torch.device(device or like).type == self.device and not self.on_device(data):
            self.found("pageable_copy")

    def _tolist(self, tensor: Tensor) -> None:
        if self.on_device(tensor):
            self.found("item")

    def _record(self, event: Any, stream: Any = None) -> None:
        self._ledger.record(event, _current_stream() if stream is None else stream.cuda_stream)

    def _wait(self, event: Any, stream: Any = None) -> None:
        stream = _current_stream() if stream is None else stream.cuda_stream
        if not self._ledger.wait(event, stream, _caller()):
            self.found("outside_event")

    def _launch(self, kernel: Any, *args: Any, warmup: bool = False, **options: Any) -> None:
        self._kernels.append((weakref.ref(kernel), _caller(), getattr(kernel, "__name__", type(kernel).__name__)))
        if not warmup:
            self.work()

    def work(self) -> None:
        """Something is enqueued on the current stream."""
        if not self._ledger.work(_current_stream(), _caller()):
            self.found("outside_stream")

    def conclude(self) -> None:
        """What only the end can tell."""
        for at in self._ledger.unjoined():
            self.found("unjoined_stream", at=at)
        gc.collect()
        for kernel, at, name in self._kernels:
            if kernel() is None:
                self.found("freed_kernel", name, at)

    def on_device(self, *values: Any) -> bool:
        return any(isinstance(v, Tensor) and v.device.type == self.device for v in values)


class _Operators(TorchDispatchMode):
    def __init__(self, watch: _Watch):
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if rule := self._rule(op, args, kwargs):
            self._watch.found(rule, str(op).removesuffix(".default"))
        result = op(*args, **kwargs)
        if self._watch.on_device(*tree_leaves(result)) and not op.is_view:
            self._watch.work()
        return result

    def _rule(self, op: Any, args: tuple, kwargs: dict) -> str | None:
        name = op.overloadpacket.__name__
        if name in ("copy_", "_to_copy"):
            return self._copy(name, args, kwargs)
        if not self._watch.on_device(*tree_leaves(args)):
            return None
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            return self._index(args)
        if name in _OPERATORS:
            return _OPERATORS[name]
        return "data_dependent_size" if torch.Tag.dynamic_output_shape in op.tags else None

    def _copy(self, name: str, args: tuple, kwargs: dict) -> str | None:
        """A copy between host and device that is not from pinned memory and asynchronous."""
        source = args[1] if name == "copy_" else args[0]
        to = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if "cpu" not in (source.device.type, to.type) or self._watch.device not in (source.device.type, to.type):
            return None
        if source.device.type == to.type:
            return None
        if to.type == "cpu":
            return "host_read"
        waits = not (args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False))
        return "pageable_copy" if waits or not source.is_pinned() else None

    def _index(self, args: tuple) -> str | None:
        """By a mask, which is a nonzero inside unless one number is put there; or by positions on the host."""
        indices = [index for index in args[1] if isinstance(index, Tensor)]
        one_number = len(args) > 2 and args[2].dim() == 0
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return None if one_number else "data_dependent_size"
        return None if all(self._watch.on_device(index) for index in indices) else "pageable_copy"


def _preceded(before: Callable, original: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0


def _caller() -> tuple[str, int]:
    """File and line of the innermost frame that is neither PyTorch's, nor Triton's, nor compiled, nor ours."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_"))
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((*_FOREIGN, *_OURS, compiled)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
