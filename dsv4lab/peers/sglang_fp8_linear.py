"""SGLang's block-FP8 linear layer where its backend is Triton: its quantisation, then its GEMM by its own config."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4lab import tuned
from dsv4lab.peers.sglang_fp8 import SGLANG, notes, unavailable

__all__ = ["IMPL", "notes", "prepare", "quantise", "unavailable"]

IMPL = "sglang_fp8_linear"


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], fp32 scales [M, K / 128]) of bf16 x [M, K], as that layer calls it."""
    return import_module(SGLANG).per_token_group_quant_fp8(x, tuned.BLOCK_SHAPE[1], column_major_scales=False)


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A call of both on the bf16 activation of the inputs of `fp8_gemm` that returns (out,)."""
    sglang = import_module(SGLANG)

    def call() -> tuple[Tensor]:
        x, scale = quantise(inputs.unquantised)
        operands = x, inputs.w, scale, inputs.w_scale, list(tuned.BLOCK_SHAPE), torch.bfloat16
        return (sglang.w8a8_block_fp8_matmul_triton(*operands),)

    return call
