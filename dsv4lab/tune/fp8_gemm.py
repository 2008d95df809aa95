"""SGLang's Triton block-FP8 GEMM (`w8a8_block_fp8_matmul_triton`) at the linear layers of one tensor-parallel rank.

    out[m, n] = sum over 128-wide chunks c of K: x_scale[m, c] * w_scale[n // 128, c] * <x[m, c], w[n, c]>

x e4m3 [M, K], w e4m3 [N, K], out bf16. It is called as SGLang calls it, with the table it would find replaced.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4lab import numerics, tuned
from dsv4lab.kv_cache import FP8
from dsv4lab.model import DSV4_FLASH
from dsv4lab.records import Record
from dsv4lab.roofline import Work
from dsv4lab.tune import candidates, compiling
from dsv4lab.tune.candidates import KEYS, Tile
from dsv4lab.tune.sweep import DEFAULT, Point, winner

EXPERIMENT = "tune_fp8_gemm"
SGLANG = "sglang.srt.layers.quantization.fp8_kernel"
ROWS = (32, 16, 64, 1, 4, 8, 128, 512, 2048, 256, 1024, 4096)
"""Rows of activations, the most wanted first: decode batches, then prefill. SGLang takes the nearest there is."""
BLOCK_N, BLOCK_K = tuned.BLOCK_SHAPE


@dataclass(frozen=True)
class Case:
    layer: str
    M: int
    N: int
    K: int

    @property
    def name(self) -> str:
        return f"n{self.N}_k{self.K}_m{self.M}"


@dataclass
class Inputs:
    """Operands of one call, and their scales."""

    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor


def cases(tp: int) -> list[Case]:
    """Every shape once, under the name of the first layer that has it."""
    shapes = {shape: layer for layer, shape in reversed(DSV4_FLASH.fp8_linears(tp).items())}
    return [Case(layer, m, *shape) for m in ROWS for shape, layer in reversed(shapes.items())]


def points(tp: int, *, sms: int, shared: int, arch: str) -> list[Point]:
    tried = {c: {DEFAULT: None} | candidates.gemm(c.M, c.N, sms=sms, shared=shared) for c in cases(tp)}
    sha256 = sources(SGLANG)
    return [Point(c.name, sys.modules[__name__], c, choices, sha256) for c, choices in tried.items()]


def sources(name: str) -> str:
    """sha256 of the file that has SGLang's kernel."""
    return hashlib.sha256(Path(import_module(name).__file__).read_bytes()).hexdigest()


def random_fp8(*shape: int, generator: torch.Generator) -> Tensor:
    """e4m3 of all signs and of magnitudes below 2, none of them NaN."""
    bits = torch.empty(shape, dtype=torch.uint8, device=generator.device).random_(generator=generator)
    return bits.bitwise_and_(0xBF).view(FP8)


def random_scale(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator) / 64 + 1 / 64


def dequantised(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 of `x` [..., R, K], with a scale a row and 128 columns, or one for 128 rows and 128 columns."""
    wide = scale.repeat_interleave(BLOCK_K, -1)
    if scale.shape[-2] != x.shape[-2]:
        wide = wide.repeat_interleave(BLOCK_N, -2)
    return x.float() * wide


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` weights, with an activation each."""
    g = torch.Generator(device).manual_seed(seed)
    n, k = case.N // BLOCK_N, case.K // BLOCK_K
    return [
        Inputs(
            random_fp8(case.M, case.K, generator=g), random_scale(case.M, k, generator=g),
            random_fp8(case.N, case.K, generator=g), random_scale(n, k, generator=g),
        )
        for _ in range(sets)
    ]  # fmt: skip


def blank(case: Case) -> Inputs:
    """Inputs on the CPU that are never read."""
    n, k = case.N // BLOCK_N, case.K // BLOCK_K
    x, w = torch.empty(case.M, case.K, dtype=FP8), torch.empty(case.N, case.K, dtype=FP8)
    return Inputs(x, torch.empty(case.M, k), w, torch.empty(n, k))


def variant(case: Case) -> tuple:
    """Triton compiles for whether an integer is 1 or a multiple of 16: rows, and scales a row."""
    return tuple((number == 1, number % 16 == 0) for number in (case.M, case.N, case.K, case.K // BLOCK_K))


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(out,) fp32 of the dequantised operands."""
    return (dequantised(inputs.x, inputs.x_scale) @ dequantised(inputs.w, inputs.w_scale).T,)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """(out,) of the dequantised operands in bf16."""
    return (dequantised(inputs.x, inputs.x_scale).bfloat16() @ dequantised(inputs.w, inputs.w_scale).bfloat16().T,)


def judge(inputs: Inputs, outputs: tuple[Tensor], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    return numerics.check(outputs[0], expected[0], usual[0])


def prepare(choice: Tile | None, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call of SGLang's wrapper with this config, or, for None, with what SGLang chooses."""
    sglang = import_module(SGLANG)
    operands = inputs.x, inputs.w, inputs.x_scale, inputs.w_scale, list(tuned.BLOCK_SHAPE), torch.bfloat16

    def call() -> tuple[Tensor]:
        with _table(sglang, choice):
            return (sglang.w8a8_block_fp8_matmul_triton(*operands),)

    return call


@contextmanager
def _table(sglang: ModuleType, choice: Tile | None) -> Iterator[None]:
    if choice is None:
        yield
    else:
        with patch.object(sglang, "get_w8a8_block_fp8_configs", lambda *_: {0: choice}):
            yield


def default(case: Case) -> Tile:
    """What SGLang would launch without our tables."""
    with compiling.launches(compile=False) as seen:
        prepare(None, blank(case))()
    return {key: seen[0][0][key] for key in KEYS}


def rotated_bytes(case: Case) -> float:
    return float(case.N * case.K)


def work(case: Case) -> Work:
    """Operands once, the output once."""
    return Work(2.0 * case.M * case.N * case.K, case.N * case.K + case.M * (case.K + 2.0 * case.N))


def config(case: Case) -> dict:
    return asdict(case)


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
