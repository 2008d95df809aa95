"""The configs that `dsv4lab tune` found on this GPU: a kernel's plans ask here before their own table.

Read once a process. A table made for other sources of the kernel or another Triton is refused with a warning, and the
kernel's own table counts. DSV4LAB_TUNED names the folder; empty, it turns this off (see `dsv4lab.tuned`).
"""

import ast
import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

from dsv4lab import tuned
from dsv4lab.hardware import arch_key

_PACKAGE = __name__.rpartition(".")[0]


def own(kernel: str, arch: str) -> dict | None:
    """The tuned table of `dsv4lab.kernels.<kernel>` for the GPU that is here, if that is of `arch` and has one."""
    return _read(kernel, arch, os.environ.get(tuned.VARIABLE))


@functools.cache
def _read(kernel: str, arch: str, _named: str | None) -> dict | None:
    if not torch.cuda.is_available() or arch != arch_key(torch.cuda.get_device_capability()):
        return None
    try:
        table = tuned.read_kernels(tuned.folder(), torch.cuda.get_device_name()).get(kernel)
        refused = table and tuned.complaint(table, source_hash(f"{_PACKAGE}.{kernel}"), triton.__version__)
    except (ValueError, LookupError, TypeError) as error:
        table, refused = None, str(error)
    if refused:
        warnings.warn(f"tuned configs of {kernel} are not used: {refused} (dsv4lab tune)", stacklevel=2)
    return None if refused else table


def source_hash(module: str) -> str:
    """sha256 over the sources of `module` and of every `dsv4lab.kernels` module it imports, in order of their names."""
    sources: dict[str, bytes] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in sources:
            sources[name] = Path(sys.modules[name].__file__).read_bytes()
            pending += _kernel_imports(sources[name])
    return hashlib.sha256(b"".join(sources[name] for name in sorted(sources))).hexdigest()


def _kernel_imports(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.startswith(f"{_PACKAGE}.") and name in sys.modules)
