"""What the host can know of a call is refused by name and value."""

import torch
from torch import Tensor

from dsv4lab.kernels.arguments import check_contiguous, check_start

MAX_ROWS = 1 << 20
MAX_K = 1 << 16


def check_operands(x: Tensor, w: Tensor) -> None:
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(
            f"x must be bfloat16 [M, K] with a dense last dimension, got {x.dtype} {list(x.shape)} strides {x.stride()}"
        )
    M, K = x.shape
    if M > MAX_ROWS or not 8 <= K <= MAX_K or K % 8:
        raise ValueError(
            f"x must have at most {MAX_ROWS} rows and K a multiple of 8 up to {MAX_K}, got {list(x.shape)}"
        )
    if x.data_ptr() % 16 or (M > 1 and x.stride(0) % 8):
        raise ValueError(f"x must have rows at multiples of 16 bytes, got stride {x.stride(0)} at {x.data_ptr():#x}")
    known = torch.bfloat16, torch.float32
    if w.dtype not in known or w.ndim != 2 or w.shape[1] != K or not w.is_contiguous() or w.device != x.device:
        raise ValueError(
            f"w must be contiguous bfloat16 or float32 [N, {K}] on {x.device}, got {w.dtype} {list(w.shape)} strides "
            f"{w.stride()} on {w.device}"
        )
    check_start("w", w)


def check_out(out: Tensor, M: int, N: int, device: torch.device) -> None:
    dense = not out.numel() or out.stride(-1) == 1
    if out.dtype != torch.float32 or out.shape != (M, N) or out.device != device or not dense:
        raise ValueError(
            f"out must be float32 [{M}, {N}] on {device} with a dense last dimension, got {out.dtype} "
            f"{list(out.shape)} strides {out.stride()} on {out.device}"
        )


def check_flat(name: str, buffer: Tensor, dtype: torch.dtype, least: int, device: torch.device) -> None:
    check_start(name, buffer)
    if buffer.dtype != dtype or buffer.numel() < least or not buffer.is_contiguous() or buffer.device != device:
        raise ValueError(
            f"{name} must be contiguous {str(dtype).removeprefix('torch.')} with at least {least} elements on "
            f"{device}, got {buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        )


def check_bias(bias: Tensor, N: int, device: torch.device) -> None:
    check_contiguous("bias", bias, torch.float32, (N,), device)
