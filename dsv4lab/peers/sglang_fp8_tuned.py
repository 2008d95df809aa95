"""SGLang's Triton block-FP8 GEMM by the table that `dsv4lab tune fp8-gemm` made for this GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lab import tuned
from dsv4lab.peers import sglang_fp8
from dsv4lab.peers.sglang_fp8 import unavailable

__all__ = ["IMPL", "notes", "prepare", "unavailable"]

IMPL = "sglang_fp8_tuned"


def _tile(inputs: Any) -> dict[str, int]:
    """The config that SGLang takes from the table, of the nearest number of rows. ValueError without a table."""
    root, (N, K) = tuned.folder(), inputs.w.shape
    table = tuned.read_sglang(tuned.gemm_path(root, torch.cuda.get_device_name(), N, K)) if root else {}
    if not table:
        raise ValueError(f"there is no tuned table for a weight [{N}, {K}]: dsv4lab tune fp8-gemm")
    return table[min(table, key=lambda rows: abs(rows - len(inputs.x)))]


def notes(inputs: Any) -> dict:
    """What the record must say: the package, the config."""
    return sglang_fp8.notes(inputs) | _tile(inputs)


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A call of SGLang's wrapper that returns (out,)."""
    return sglang_fp8.prepare(inputs, _tile(inputs))
