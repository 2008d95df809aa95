"""Checks that kernels share of the tensors they are given; each names the argument and what it was."""

import torch
from torch import Tensor


def check_contiguous(
    name: str,
    given: Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """ValueError unless it is contiguous, of one of these dtypes, of this shape and on this device."""
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if given.dtype not in dtypes or given.shape != shape or not given.is_contiguous() or given.device != device:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be contiguous {known} {list(shape)} on {device}, got {given.dtype} {list(given.shape)} "
            f"strides {given.stride()} on {given.device}"
        )


def check_start(name: str, given: Tensor) -> None:
    """ValueError unless it starts where 16 bytes can be loaded at once."""
    if given.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes, got {given.data_ptr():#x}")
