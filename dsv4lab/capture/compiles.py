"""Tells of every compilation and autotuning before it begins, whoever asks for it: torch.compile, Triton, their tuners.

The few functions that all of them go through are patched once, at the first use, and for good: what listens may then
come and go in any order.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.autotuner import Autotuner

from dsv4lab.kernels import launch
from dsv4lab.kernels.launch import ColdKernel, named

Tell = Callable[[str], None]

_MODES = ("__torch_function__", "__torch_dispatch__")
"""Where Dynamo looks too when it runs a frame uncompiled under a mode; there is nothing to compile."""

_listeners: list[Tell] = []


@contextmanager
def watching(tell: Tell) -> Iterator[None]:
    """Inside, `tell` hears what is about to be compiled or tuned, with its shapes; if it raises, nothing is."""
    _install()
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


@contextmanager
def frozen() -> Iterator[None]:
    """Inside, whatever would compile or tune a kernel raises ColdKernel with its shapes: for the whole process."""
    with launch.frozen(), watching(_refuse):
        yield


def _refuse(what: str) -> None:
    raise ColdKernel(f"kernels are frozen, and this call needs {what}; warm it up before")


def _tell(what: str) -> None:
    for listener in tuple(_listeners):
        listener(what)


@functools.cache
def _install() -> None:
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    CatchErrorsWrapper.__call__ = _before_frame(CatchErrorsWrapper.__call__)
    Autotuner._bench = _before_tuning(Autotuner._bench)
    CachingAutotuner.benchmark_all_configs = _before_tuning(CachingAutotuner.benchmark_all_configs)
    triton.knobs.runtime.jit_cache_hook = _before_kernel(triton.knobs.runtime.jit_cache_hook)


def _before_frame(original: Callable) -> Callable:
    """Dynamo's callback for a Python frame that no compiled code fits.

    Under a dispatch mode none fits, and Dynamo would never again compile what it meets there: that runs uncompiled.
    """
    from torch._dynamo.types import ConvertFrameReturn

    @functools.wraps(original)
    def call(self: Any, frame: Any, *rest: Any, **options: Any) -> Any:
        if _listeners and _would_compile(frame):
            if not _is_compiled(frame):
                tensors = {name: value for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor)}
                _tell(f"torch.compile to compile {frame.f_code.co_name}({named(tensors)})")
            if torch._C._len_torch_dispatch_stack():
                return ConvertFrameReturn(apply_to_code=False)
        return original(self, frame, *rest, **options)

    return call


def _would_compile(frame: Any) -> bool:
    """Whether it is none of the frames that Dynamo leaves alone."""
    from torch._dynamo import trace_rules
    from torch._dynamo.convert_frame import has_tensor_in_frame

    return frame.f_code.co_name not in _MODES and not trace_rules.check(frame.f_code) and has_tensor_in_frame(frame)


def _is_compiled(frame: Any) -> bool:
    """Whether compiled code would fit the frame if no dispatch mode were on."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    with _disable_current_modes():
        return any(entry.guard_manager.check(frame.f_locals) for entry in _debug_get_cache_entry_list(frame.f_code))


def _before_tuning(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [a for a in (*arguments, *options.values()) if isinstance(a, torch.Tensor)]
        _tell(f"autotuning of {_kernel_name(self)}({named(dict(enumerate(tensors)))})")
        return original(self, *arguments, **options)

    return call


def _before_kernel(before: Callable | None) -> Callable:
    def hook(**call: Any) -> bool | None:
        names, variant = call["fn"].jit_function.arg_names, call["compile"]
        constants = {names[path[0]]: value for path, value in variant["constants"].items()}
        _tell(f"Triton to compile {call['fn'].name}({named(variant['signature'] | constants)})")
        return before and before(**call)

    return hook


def _kernel_name(tuner: Any) -> str:
    """Of Triton's own autotuner or Inductor's."""
    while hasattr(tuner, "fn"):
        tuner = tuner.fn
    return getattr(tuner, "__name__", type(tuner).__name__)
