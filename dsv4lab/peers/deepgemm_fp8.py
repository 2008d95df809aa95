"""DeepGEMM's block-FP8 GEMM, from `sgl-deep-gemm`: SGLang's choice on sm_90 and sm_100.

Its scales of the activations lie column by column, as SGLang's quantisation writes them there: turned once, in
`prepare`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lab.peers import deepgemm
from dsv4lab.peers.deepgemm import unavailable

__all__ = ["IMPL", "notes", "prepare", "unavailable"]

IMPL = "deepgemm_fp8"


def notes(inputs: Any) -> dict:
    """What the record must say: the package, who lays out the scales."""
    return {"package": deepgemm.notes(inputs)["package"], "scales": "laid out before"}


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A launch of DeepGEMM on the inputs of `fp8_gemm` that returns (out,)."""
    import deep_gemm
    from deep_gemm.utils.layout import get_mn_major_tma_aligned_tensor

    x = inputs.x, get_mn_major_tma_aligned_tensor(inputs.x_scale)
    w = inputs.w, inputs.w_scale

    def launch() -> tuple[Tensor]:
        out = torch.empty(len(inputs.x), len(inputs.w), dtype=torch.bfloat16, device=inputs.x.device)
        deep_gemm.fp8_gemm_nt(x, w, out)
        return (out,)

    return launch
