"""What the host can know of a call is refused by name and value."""

import torch
from torch import Tensor

from dsv4lab.kernels.arguments import check_contiguous, check_start
from dsv4lab.kernels.hc_pre.cases import HC, MIX, Inputs, Outputs
from dsv4lab.kernels.skinny_gemm.checks import MAX_ROWS

_HIDDEN = 256


def check_call(call: Inputs) -> None:
    x, device = call.x, call.x.device
    if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[1] != HC or x.stride()[1:] != (x.shape[2], 1):
        raise ValueError(
            f"x must be bfloat16 [M, {HC}, hidden] with dense rows, got {x.dtype} {list(x.shape)} strides {x.stride()}"
        )
    M, _, hidden = x.shape
    if M > MAX_ROWS or not hidden or hidden % _HIDDEN:
        raise ValueError(f"x must have at most {MAX_ROWS} rows and hidden a multiple of {_HIDDEN}, got {list(x.shape)}")
    if x.data_ptr() % 16 or (M > 1 and x.stride(0) % 8):
        raise ValueError(f"x must have rows at multiples of 16 bytes, got stride {x.stride(0)} at {x.data_ptr():#x}")
    if call.hc_fn.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hc_fn must be float32 or bfloat16, got {call.hc_fn.dtype}")
    shapes = {"hc_fn": (MIX, HC * hidden), "hc_scale": (3,), "hc_base": (MIX,)}
    for name, shape in shapes.items():
        each, dtype = getattr(call, name), call.hc_fn.dtype if name == "hc_fn" else torch.float32
        check_contiguous(name, each, dtype, shape, device)
    check_start("hc_fn", call.hc_fn)
    if call.norm_weight is not None:
        _check_norm(call.norm_weight, hidden, device)


def _check_norm(weight: Tensor, hidden: int, device: torch.device) -> None:
    if (
        weight.dtype not in (torch.bfloat16, torch.float32) or weight.shape != (hidden,) or weight.device != device
        or not weight.is_contiguous() or weight.data_ptr() % 16
    ):  # fmt: skip
        raise ValueError(
            f"norm_weight must be contiguous bfloat16 or float32 [{hidden}] on {device} from a multiple of 16 bytes "
            f"on, got {weight.dtype} {list(weight.shape)} on {weight.device} at {weight.data_ptr():#x}"
        )


def check_outputs(out: Outputs, M: int, hidden: int, device: torch.device) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    needed = ("y", bf16, (M, hidden)), ("post", fp32, (M, HC)), ("comb", fp32, (M, HC, HC))
    for (name, dtype, shape), each in zip(needed, out, strict=True):
        check_start(name, each)
        check_contiguous(name, each, dtype, shape, device)
