"""SGLang's Triton block-FP8 GEMM (`w8a8_block_fp8_matmul_triton`) at the linear layers of one tensor-parallel rank.

Cases, inputs and verdict are those of the lab's own `fp8_gemm`. It is called as SGLang calls it, with the table that it
would find replaced.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from dsv4lab import tuned
from dsv4lab.kernels.fp8_gemm.cases import (
    BLOCK,
    Case,
    Inputs,
    baseline,
    config,
    judge,
    layers,
    make_inputs,
    reference,
    rotated_bytes,
    work,
)
from dsv4lab.kv_cache import FP8
from dsv4lab.peers import sglang_fp8
from dsv4lab.peers.sglang_fp8 import SGLANG
from dsv4lab.records import Record
from dsv4lab.tune import candidates, compiling
from dsv4lab.tune.candidates import KEYS, Tile
from dsv4lab.tune.sweep import DEFAULT, Point, winner

__all__ = [
    "EXPERIMENT", "ROWS", "SGLANG", "Case", "Inputs", "baseline", "blank", "cases", "config", "default", "judge",
    "make_inputs", "notes", "points", "prepare", "reference", "rotated_bytes", "sources", "tile_of", "variant", "work",
    "write",
]  # fmt: skip

EXPERIMENT = "tune_fp8_gemm"
ROWS = (32, 16, 64, 1, 4, 8, 128, 512, 2048, 256, 1024, 4096)
"""Rows of activations, the most wanted first: decode batches, then prefill. SGLang takes the nearest there is."""


def cases(tp: int) -> list[Case]:
    """Every shape once, under the name of the first layer that has it."""
    return [Case(layer, m, *shape) for m in ROWS for shape, layer in layers(tp).items()]


def points(tp: int, *, sms: int, shared: int, arch: str) -> list[Point]:
    tried = {c: {DEFAULT: None} | candidates.gemm(c.M, c.N, sms=sms, shared=shared) for c in cases(tp)}
    sha256 = sources(SGLANG)
    return [Point(c.name, sys.modules[__name__], c, choices, sha256) for c, choices in tried.items()]


def sources(name: str) -> str:
    """sha256 of the file that has SGLang's kernel."""
    return hashlib.sha256(Path(import_module(name).__file__).read_bytes()).hexdigest()


def blank(case: Case) -> Inputs:
    """Inputs on the CPU that are never read."""
    n, k = case.N // BLOCK, case.K // BLOCK
    x, w = torch.empty(case.M, case.K, dtype=FP8), torch.empty(case.N, case.K, dtype=FP8)
    return Inputs(x, torch.empty(case.M, k), w, torch.empty(n, k))


def variant(case: Case) -> tuple:
    """Triton compiles for whether an integer is 1 or a multiple of 16: rows, and scales a row."""
    return tuple((number == 1, number % 16 == 0) for number in (case.M, case.N, case.K, case.K // BLOCK))


def prepare(choice: Tile | None, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call of SGLang's wrapper with this config, or, for None, with what SGLang chooses."""
    return sglang_fp8.prepare(inputs, choice)


def default(case: Case) -> Tile:
    """What SGLang would launch without our tables."""
    with compiling.launches(compile=False) as seen:
        prepare(None, blank(case))()
    return {key: seen[0][0][key] for key in KEYS}


def notes(choice: Tile | None, inputs: Inputs) -> dict:
    """The config, under SGLang's names."""
    return choice or default(Case("", *inputs.x.shape[:1], *inputs.w.shape))


def write(root: Path, gpu: str, tp: int, found: Sequence[Record]) -> list[Path]:
    """A table for each weight of which a point was measured; where one was not, it has what runs by default."""
    measured = {case: [r for r in found if r.case == case.name] for case in cases(tp)}
    written = []
    for shape in dict.fromkeys((case.N, case.K) for case in measured):
        mine = {case: records for case, records in measured.items() if (case.N, case.K) == shape}
        if any(mine.values()):
            best = {c.M: tile_of(winner(records)) if records else default(c) for c, records in mine.items()}
            written.append(tuned.write_sglang(tuned.gemm_path(root, gpu, *shape), best))
    return written


def tile_of(record: Record) -> Tile:
    """The config that a record was measured with."""
    return {key: record.config[key] for key in KEYS}
