"""One way to launch a Triton kernel, which never compiles one while a CUDA graph is captured or kernels are frozen.

Triton compiles a variant at the first call that needs it, and loads its binary at the first launch: a stall of a second
in a live server, and inside a stream capture a synchronisation that kills it. `launch` refuses such a call before it
touches the stream, so the capture stays usable; `warm` does compilation and loading beforehand, without launching.
"""

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from dsv4lab.hardware import arch_key

Arguments = Mapping[str, Any]

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels are interpreted in this process: what a GPU alone can do is then left out of launches."""

_lock = threading.RLock()
_freezes = 0
_records = threading.local()


class ColdKernel(RuntimeError):
    """A launch would compile, tune or load a kernel where it must not; the message names kernel and arguments."""


def target(device: torch.device) -> tuple[str, int]:
    """Architecture and SM count of a device. For the CPU, whose programs run one after another: one SM of an H200."""
    if device.type != "cuda":
        return "sm_90", 1
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return arch_key((properties.major, properties.minor)), properties.multi_processor_count


@contextmanager
def frozen() -> Iterator[None]:
    """Inside, any `launch` of a variant that is not warm raises ColdKernel instead of stalling a request.

    For the whole process. A server enters it once, after its warm-up, and need not leave it.
    """
    global _freezes
    with _lock:
        _freezes += 1
    try:
        yield
    finally:
        with _lock:
            _freezes -= 1


@contextmanager
def recorded() -> Iterator[list[tuple]]:
    """Inside, what this thread launches, as (kernel, grid, arguments), in order."""
    before, _records.made = getattr(_records, "made", None), []
    try:
        yield _records.made
    finally:
        _records.made = before


def launch(kernel: Any, grid: tuple[int, ...], arguments: Arguments) -> None:
    """Launch `kernel`, a @triton.jit function, on the current stream; `arguments` by name, with options as num_warps.

    Raises ColdKernel when the current stream is capturing, or kernels are frozen, and this variant is not warm.
    """
    capturing = _capturing()
    if (capturing or _freezes) and not is_warm(kernel, grid, arguments):
        reason = "the current stream is capturing a CUDA graph" if capturing else "kernels are frozen"
        raise ColdKernel(f"{reason} and {_name(kernel)} is not warm; warm up this call before: {named(arguments)}")
    kernel[grid](**arguments)
    if (made := getattr(_records, "made", None)) is not None:
        made.append((kernel, grid, arguments))


def warm(kernel: Any, grid: tuple[int, ...], arguments: Arguments) -> None:
    """Compile and load the variant that this launch needs, launching nothing. ColdKernel when kernels are frozen."""
    if triton.knobs.runtime.interpret or is_warm(kernel, grid, arguments):
        return
    if _freezes or _capturing():
        raise ColdKernel(f"too late to warm up {_name(kernel)}: {named(arguments)}")
    plain, arguments = _tuned(kernel, arguments) or (None, None)
    if plain is None:
        raise ValueError(f"kernel {_name(kernel)} has to be tuned by a launch first: give it one config to warm it up")
    plain.warmup(grid=grid, **arguments).run  # noqa: B018 (reading the property loads the binary)


def is_warm(kernel: Any, grid: tuple[int, ...], arguments: Arguments) -> bool:
    """Whether this launch needs no tuning, no compilation and no loading. Compiles nothing."""
    return triton.knobs.runtime.interpret or loaded(kernel, grid, arguments)[0] is not None


def loaded(kernel: Any, grid: tuple[int, ...], arguments: Arguments) -> tuple[Any, list]:
    """What this launch runs, and its arguments by position, for `loaded[grid](*arguments)`; None if it is not warm."""
    plain, arguments = _tuned(kernel, arguments) or (None, arguments)
    if plain is None:
        return None, []
    with _compiling_nothing():
        compiled = plain.warmup(grid=grid, **arguments)
    if compiled is None or compiled.module is None:
        return None, []
    return compiled, [arguments.get(parameter.name, parameter.default) for parameter in plain.params]


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def _compiling_nothing() -> Iterator[None]:
    """Inside, a variant this thread asks for and that is not compiled comes back as None; other threads compile on."""
    asking = threading.get_ident()
    with _lock:
        before = triton.knobs.runtime.jit_cache_hook

        def skip(**call: Any) -> bool | None:
            return True if threading.get_ident() == asking else before and before(**call)

        triton.knobs.runtime.jit_cache_hook = skip
        try:
            yield
        finally:
            triton.knobs.runtime.jit_cache_hook = before


def _tuned(kernel: Any, arguments: Arguments) -> tuple[Any, Arguments] | None:
    """The plain kernel with the arguments its autotuner settled on; None if it would have to measure first."""
    if not isinstance(kernel, Autotuner):
        return kernel, arguments
    config = kernel.configs[0]
    if len(kernel.configs) > 1:
        given = {name: value for name, value in arguments.items() if name in kernel.arg_names}
        dtypes = [str(value.dtype) for value in given.values() if hasattr(value, "dtype")]
        config = kernel.cache.get((*(given[name] for name in kernel.keys if name in given), *dtypes))
    return config and (kernel.fn, {**arguments, **config.all_kwargs()})


def _name(kernel: Any) -> str:
    while isinstance(kernel, Autotuner):
        kernel = kernel.fn
    return kernel.__name__


def named(arguments: Arguments) -> str:
    """Arguments as messages name them: tensors by dtype and shape."""
    return ", ".join(f"{name}={_short(value)}" for name, value in arguments.items())


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value)
