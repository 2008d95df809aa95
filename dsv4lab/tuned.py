"""Where the tables of `dsv4lab tune` lie, and which of them hold for a GPU.

    ~/.cache/dsv4lab/tuned/              or the folder that DSV4LAB_TUNED names; an empty DSV4LAB_TUNED turns tables off
        h200.json                        configs of this lab's kernels for the NVIDIA H200
        sglang/                          what SGLANG_MOE_CONFIG_DIR may name
            configs/N=...,K=...json      block-FP8 GEMM, in the names and the form of SGLang's own tables
            configs/triton_3_6_0/E=...   MoE, likewise

SGLang finds the MoE tables by its variable; for the GEMM it has none, and the plugin leads it here (tables=tuned).
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dsv4lab.files import write_atomically
from dsv4lab.hardware import gpu_slug

VARIABLE = "DSV4LAB_TUNED"
MOE_VARIABLE = "SGLANG_MOE_CONFIG_DIR"
BLOCK_SHAPE = (128, 128)
"""Rows and columns of a weight that share one scale."""

COMMANDS = {
    "sparse_mla": "dsv4lab tune attention",
    "fp8_gemm": "dsv4lab tune gemm",
    "mqa_logits": "dsv4lab tune indexer",
    "topk": "dsv4lab tune indexer",
}
"""What makes the table of each kernel anew."""

_FORM = f"dtype=fp8_w8a8,block_shape=[{BLOCK_SHAPE[0]}, {BLOCK_SHAPE[1]}]"


def folder() -> Path | None:
    """Where the tables are; None if they are turned off."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser().absolute() if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dsv4lab" / "tuned"


def required() -> Path:
    """`folder`, for those who cannot do without. ValueError if it is turned off."""
    if (found := folder()) is None:
        raise ValueError(f"{VARIABLE} is empty, which turns tuned tables off: unset it, or name a folder")
    return found


def sglang_folder(root: Path) -> Path:
    """The part of the folder that is laid out as SGLang's own."""
    return root / "sglang"


def gemm_path(root: Path, gpu: str, n: int, k: int) -> Path:
    """SGLang's table for a block-FP8 weight `[n, k]`; `gpu` as the driver names it."""
    return sglang_folder(root) / "configs" / f"N={n},K={k},{_device(gpu)},{_FORM}.json"


def moe_path(root: Path, gpu: str, triton: str, experts: int, n: int, *, down: bool = False) -> Path:
    """SGLang's table for `experts` experts whose second weight is `[hidden, n]`; `down`: for that second product."""
    version = f"triton_{triton.replace('.', '_')}"
    name = f"E={experts},N={n},{_device(gpu)},{_FORM}{'_down' if down else ''}.json"
    return sglang_folder(root) / "configs" / version / name


def sglang_tables(root: Path | None, gpu: str = "") -> list[Path]:
    """The tables for SGLang that there are, for this GPU if one is named."""
    wanted = f",{_device(gpu)}," if gpu else ""
    there = sorted(sglang_folder(root).glob("configs/**/*.json")) if root else []
    return [path for path in there if wanted in path.name]


def has_moe(root: Path) -> bool:
    """Whether SGLANG_MOE_CONFIG_DIR may name the folder: it stands in for SGLang's own."""
    return any(path.parent.name.startswith("triton_") for path in sglang_tables(root))


def _device(gpu: str) -> str:
    return f"device_name={gpu.replace(' ', '_')}"


def kernels_path(root: Path, gpu: str) -> Path:
    """The file with the configs of this lab's kernels."""
    return root / f"{gpu_slug(gpu)}.json"


def read_kernels(root: Path | None, gpu: str) -> dict[str, dict]:
    """{kernel: table}; empty without a file. ValueError naming the file if it cannot be read."""
    path = root and kernels_path(root, gpu)
    if not path or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["gpu"] != gpu:
            raise ValueError(f"it is for {found['gpu']}")
        return found["kernels"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: {error}: delete it, and tune again") from None


def write_kernel(root: Path, gpu: str, kernel: str, table: dict) -> Path:
    """Puts the table of one kernel in the place of its last one."""
    path = kernels_path(root, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    kernels = read_kernels(root, gpu) | {kernel: table}
    write_atomically(path, json.dumps({"gpu": gpu, "kernels": kernels}, indent=1) + "\n")
    return path


def read_sglang(path: Path) -> dict[int, dict]:
    """One of SGLang's tables: {rows of the activation: config}; empty without a file."""
    if not path.is_file():
        return {}
    return {int(rows): config for rows, config in json.loads(path.read_text(encoding="utf-8")).items()}


def write_sglang(path: Path, configs: dict[int, dict]) -> Path:
    """Writes one of SGLang's tables: {rows of the activation: config}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({str(m): configs[m] for m in sorted(configs)}, indent=4) + "\n")
    return path


def complaint(table: dict, sha256: str, triton: str) -> str:
    """Why a kernel's table does not hold for its sources and this Triton; empty if it does."""
    if table["sha256"] != sha256:
        return "made for another version of the kernel"
    return f"made with triton {table['triton']}, and here is {triton}" if table["triton"] != triton else ""


def describe(root: Path | None, gpu: str) -> Iterator[str]:
    """What there is for SGLang on a GPU, a line a kind."""
    there = sglang_tables(root, gpu)
    moe = [path for path in there if path.parent.name.startswith("triton_")]
    for kind, paths in (("FP8 GEMM", [path for path in there if path not in moe]), ("MoE", moe)):
        if paths:
            yield f"{kind}: {len(paths)} tables for SGLang: hooks tables=tuned"
