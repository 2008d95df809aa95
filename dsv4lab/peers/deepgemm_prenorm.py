"""DeepGEMM's product for MHC-pre, TF32 with the sums of squares in the same pass, from `sgl-deep-gemm`.

It leaves partial sums over as many slices of K as SGLang 0.5.14 asks for. SGLang's next kernel adds them up; here,
where the product alone is measured, `torch.sum` does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lab.peers import deepgemm
from dsv4lab.peers.deepgemm import unavailable

__all__ = ["IMPL", "notes", "prepare", "unavailable"]

IMPL = "deepgemm_prenorm"

_BLOCK, _SMS = 64, 132


def splits(M: int, K: int) -> int:
    """Slices of K for M rows, as SGLang chooses them on a GPU of 132 SMs."""
    return max(1, min(_SMS // -(-M // _BLOCK), K // _BLOCK // 4))


def notes(inputs: Any) -> dict:
    """What the record must say: the package, the slices, who adds them up."""
    package = deepgemm.notes(inputs)["package"]
    return {"package": package, "num_splits": splits(*inputs.x.shape), "combine": "torch.sum"}


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A launch of DeepGEMM on `skinny_gemm`'s inputs that returns (out,)."""
    import deep_gemm

    x, w = inputs.x, inputs.w
    if w.dtype != torch.float32 or x.ndim != 2:
        raise ValueError(f"DeepGEMM's prenorm product takes fp32 weights and no batch, got {inputs.layer}")
    number = splits(*x.shape)
    partials = torch.empty(number, len(x), len(w), device=x.device)
    squares = torch.empty(number, len(x), device=x.device)

    def launch() -> tuple[Tensor]:
        deep_gemm.tf32_hc_prenorm_gemm(x, w, partials, squares, num_splits=number)
        return (partials.sum(0),)

    return launch
