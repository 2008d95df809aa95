"""Compile a kernel for a GPU that is not here and read the result: shared memory, registers, spills, MMA, loads.

A launch is compiled exactly as it would be on the device (same specialisation of every argument) through a driver that
only names a target. Works on a CPU with CPU tensors, but not under TRITON_INTERPRET=1, which replaces the compiler.

    TRITON_INTERPRET=0 python -m dsv4lab.static sparse_mla      # writes records/static/sparse_mla_<UTC>.json
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dsv4lab import records, tuned
from dsv4lab.files import write_atomically

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class NamedTarget:
    """What the compiler asks of a driver, answered for an architecture like "sm_120"."""

    def __init__(self, arch: str):
        self.capability = int(arch.removeprefix("sm_"))

    def get_current_device(self) -> int:
        return self.capability  # compiled variants are cached by device: keep the architectures apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_for(arch: str, kernel, grid: tuple[int, ...], arguments: dict):
    """The compiled kernel of one (kernel, grid, arguments) launch for `arch`; nothing runs."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("compiling needs TRITON_INTERPRET unset: the interpreter replaces the compiler")
    had = driver._active
    driver.set_active(NamedTarget(arch))
    try:
        return kernel.warmup(grid=grid, **arguments)
    finally:
        driver._active = had


def _tool(name: str, *flags: str) -> str:
    run = subprocess.run([TOOLS / name, *flags], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{name} failed: {run.stderr.strip()[:300]}")
    return run.stdout


def instructions(compiled) -> list[str]:
    """Names of the machine instructions of a compiled kernel, in order."""
    with _cubin(compiled) as file:
        sass = _tool("nvdisasm", "-c", file)
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.M)


@contextmanager
def _cubin(compiled) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        yield f.name


def card(compiled) -> dict[str, int]:
    """Bytes of shared memory a block, registers a thread, bytes spilled a thread, and instruction counts in the binary.

    mma: mma.sync and wgmma instructions; load128: 16-byte global loads, cp.async included; load_narrow: those of
    4 bytes or less; local: loads and stores of spilled values.
    """
    with _cubin(compiled) as file:
        usage = _tool("cuobjdump", "-res-usage", file)
    names = instructions(compiled)
    family = Counter(name.split(".")[0] for name in names)
    loads = [name for name in names if name.split(".")[0] in ("LDG", "LDGSTS")]
    wide = [name for name in loads if name.endswith(".128") or ".128." in name]
    middle = [name for name in loads if name.endswith(".64") or ".64." in name]
    return {
        "shared_bytes": compiled.metadata.shared,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spill_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "instructions": len(names),
        "mma": family["HMMA"] + family["HGMMA"] + family["QMMA"] + family["QGMMA"],
        "load128": len(wide),
        "load_narrow": len(loads) - len(wide) - len(middle),
        "local": family["LDL"] + family["STL"],
    }


def cards(stem: str) -> dict:
    """The card of every kernel that a module's table of configs can launch: {arch: {entry: {kernel: card}}}."""
    module = import_module(f"dsv4lab.kernels.{stem}")
    return {
        arch: {
            entry: {launch[0].__name__: card(compile_for(arch, *launch)) for launch in launches}
            for entry, launches in module.static_launches(arch)
        }
        for arch in module.TABLE
    }


def path(stem: str) -> Path:
    """The newest cards of a module; ValueError if it has none. Cards are never rewritten; the first had no date."""
    folder = records.root() / "static"
    found = [*folder.glob(f"{stem}.json"), *folder.glob(f"{stem}_[0-9]*Z.json")]
    if not found:
        raise ValueError(f"stem {stem!r} has no cards in records/static: python -m dsv4lab.static {stem} makes them")
    return max(found, key=lambda each: each.stem)


def main() -> None:
    os.environ[tuned.VARIABLE] = ""  # cards are of the shipped configs
    (stem,) = sys.argv[1:] or sys.exit("usage: python -m dsv4lab.static STEM")
    found = {"triton": triton.__version__, "cards": cards(stem)}
    target = records.root() / "static" / f"{stem}_{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    target.parent.mkdir(exist_ok=True)
    write_atomically(target, json.dumps(found, indent=1) + "\n")
    print(target)


if __name__ == "__main__":
    main()
