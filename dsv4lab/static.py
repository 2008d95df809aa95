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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dsv4lab import records, tuned
from dsv4lab.files import write_atomically

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_KEYS = {
    "split_k_kernel": lambda a: (584, a["BLOCK_N"] * (1 + a["HAS_EXTRA"]), -(-a["H"] // a["BLOCK_H"])),
    "logits_kernel": lambda a: (132, a["PAGE"], 1),
}
"""For a kernel that walks keys, by its arguments: bytes of a key in the cache, keys that pass when each of its MMA
instructions has run once (it may have a loop for each of two caches), and blocks that read the same key."""
_MMA = re.compile(r"[HQ]MMA\.(16)(8)(\d+)|[HQ]GMMA\.(64)x(\d+)x(\d+)")


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
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]+)", sass, re.M)


@contextmanager
def _cubin(compiled) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        yield f.name


def card(compiled) -> dict[str, int]:
    """Bytes of shared memory a block, registers a thread, bytes spilled a thread, and instruction counts in the binary.

    warps: of a block; mma: mma.sync and wgmma instructions; mma_m16n8k16: how many of that size a warp's share of them
    comes to, a quarter of a wgmma's 64 rows being its own; load128, load64, load_narrow: global loads of 16, of 8, and
    of 4 bytes or less, cp.async included; local: loads and stores of spilled values.
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
        "warps": compiled.metadata.num_warps,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spill_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "instructions": len(names),
        "mma": family["HMMA"] + family["HGMMA"] + family["QMMA"] + family["QGMMA"],
        "mma_m16n8k16": sum(_m16n8k16(name) for name in names if "MMA" in name.split(".")[0]),
        "load128": len(wide),
        "load64": len(middle),
        "load_narrow": len(loads) - len(wide) - len(middle),
        "local": family["LDL"] + family["STL"],
    }


def _m16n8k16(name: str) -> float:
    found = _MMA.match(name)
    if not found:
        raise RuntimeError(f"an MMA instruction of unknown size: {name}")
    rows, columns, depth = (int(size) for size in found.groups() if size)
    return (rows if rows == 16 else rows / 4) * columns * depth / (16 * 8 * 16)


def per_key(kernel: str, arguments: Mapping[str, Any], found: Mapping[str, int]) -> dict[str, float]:
    """What a key costs all blocks that read it: bytes from the cache, and MMA instructions of m16n8k16.

    Nothing for a kernel that walks no keys.
    """
    if kernel not in _KEYS:
        return {}
    key_bytes, keys, readers = _KEYS[kernel](arguments)
    return {
        "bytes_per_key": readers * key_bytes,
        "mma_per_key": readers * found["mma_m16n8k16"] * found["warps"] / keys,
    }


def cards(stem: str) -> dict:
    """The card of every kernel that a module's table of configs can launch: {arch: {entry: {kernel: card}}}."""
    module = import_module(f"dsv4lab.kernels.{stem}")
    return {
        arch: {
            entry: dict(_card(arch, *launch) for launch in launches) for entry, launches in module.static_launches(arch)
        }
        for arch in module.TABLE
    }


def _card(arch: str, kernel, grid: tuple[int, ...], arguments: dict) -> tuple[str, dict]:
    found = card(compile_for(arch, kernel, grid, arguments))
    return kernel.__name__, found | per_key(kernel.__name__, arguments, found)


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
