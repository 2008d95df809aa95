"""What the host can know of a call is refused by name and value."""

import torch
from torch import Tensor

from dsv4lab.kernels.arguments import check_contiguous, check_start
from dsv4lab.kernels.fp8_gemm.plans import BLOCK, MAX_M
from dsv4lab.kv_cache import FP8


def takes(M: int, N: int, K: int) -> bool:
    """Whether there is a kernel for M rows through a weight [N, K]."""
    return 1 <= M <= MAX_M and not N % BLOCK and not K % BLOCK and K > 0


def check_call(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> None:
    _check_operands(x, FP8, w, w_scale)
    _check("x_scale", x_scale, torch.float32, (len(x), x.shape[1] // BLOCK), x.device)


def check_linear(x: Tensor, w: Tensor, w_scale: Tensor) -> None:
    _check_operands(x, torch.bfloat16, w, w_scale)


def _check_operands(x: Tensor, dtype: torch.dtype, w: Tensor, w_scale: Tensor) -> None:
    apart = x.stride(0) * x.itemsize if x.ndim == 2 and len(x) > 1 else 0
    if x.dtype != dtype or x.ndim != 2 or x.stride(1) != 1 or (x.data_ptr() | apart) % 16:
        raise ValueError(
            f"x must be {str(dtype).removeprefix('torch.')} [M, K] with a dense last dimension and rows at multiples "
            f"of 16 bytes, got {x.dtype} {list(x.shape)} strides {x.stride()}"
        )
    if w.ndim != 2 or not takes(max(len(x), 1), len(w), x.shape[1]):
        raise ValueError(
            f"x [M, K] and w [N, K] must have M up to {MAX_M}, N and K multiples of {BLOCK}, got {list(x.shape)} and "
            f"{list(w.shape)}"
        )
    N, K = len(w), x.shape[1]
    _check("w", w, FP8, (N, K), x.device)
    _check("w_scale", w_scale, torch.float32, (N // BLOCK, K // BLOCK), x.device)


def check_out(out: Tensor, M: int, N: int, device: torch.device) -> None:
    _check("out", out, torch.bfloat16, (M, N), device)


def _check(name: str, given: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    check_contiguous(name, given, dtype, shape, device)
    check_start(name, given)
