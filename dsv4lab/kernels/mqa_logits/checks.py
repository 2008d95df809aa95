"""What the host can know of a call is refused by name and value; what only the device knows has a debug switch."""

import torch
from torch import Tensor

from dsv4lab import kv_cache
from dsv4lab.kernels.mqa_logits.cases import DIM, TOKEN_BYTES, Inputs, query_lengths
from dsv4lab.kernels.rows import check_lengths, maxima_ints

_FEW = (16, 32, 64, 128)


def check_call(call: Inputs, clean_logits: bool) -> None:
    q, cache, weights, table = call.q, call.kv_cache, call.weights, call.block_table
    if q.dtype != torch.float8_e4m3fn or q.ndim != 4 or q.shape[3] != DIM or q.stride(3) != 1:
        raise ValueError(
            f"q must be float8_e4m3fn [B, next_n, H, {DIM}] with a dense last dimension, got {q.dtype} "
            f"{list(q.shape)} strides {q.stride()}"
        )
    B, next_n, H, _ = q.shape
    if not 1 <= next_n <= 6 or H not in _FEW:
        raise ValueError(f"q must have next_n 1 to 6 and H one of {_FEW}, got {list(q.shape)}")
    if any(stride % 16 for stride in q.stride()[:3]) or q.data_ptr() % 16:
        raise ValueError(f"q must have heads at multiples of 16 bytes, got strides {q.stride()} at {q.data_ptr():#x}")
    kv_cache.check_pages("kv_cache", cache, TOKEN_BYTES, q.device, _FEW)
    if weights.dtype != torch.float32 or weights.shape != (B * next_n, H) or weights.stride(1) != 1:
        raise ValueError(
            f"weights must be float32 [{B * next_n}, {H}] with a dense last dimension, got {weights.dtype} "
            f"{list(weights.shape)} strides {weights.stride()}"
        )
    check_lengths("context_lens", call.context_lens, B, next_n, q.device)
    if table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != B or table.stride(1) != 1:
        raise ValueError(
            f"block_table must be int32 [{B}, width] with a dense last dimension, got {table.dtype} "
            f"{list(table.shape)} strides {table.stride()}"
        )
    for name, tensor in (("weights", weights), ("block_table", table)):
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {tensor.device}")
    if not isinstance(call.max_context_len, int) or not 0 <= call.max_context_len < 2**31:
        raise ValueError(f"max_context_len must be an int in 0..2**31 - 1, got {call.max_context_len!r}")
    if clean_logits:
        raise ValueError(f"clean_logits must be False: past a query's keys nothing is written; got {clean_logits}")


def check_out(call: Inputs, out: Tensor) -> None:
    shape = (call.q.shape[0] * call.q.shape[1], call.max_context_len)
    dense = not out.numel() or out.stride(1) == 1
    if out.dtype != torch.float32 or out.shape != shape or out.device != call.q.device or not dense:
        raise ValueError(
            f"out must be float32 {list(shape)} on {call.q.device} with a dense last dimension, got {out.dtype} "
            f"{list(out.shape)} strides {out.stride()} on {out.device}"
        )


def check_maxima(call: Inputs, maxima: Tensor) -> None:
    rows, ints, page = call.q.shape[0] * call.q.shape[1], maxima_ints(call.max_context_len), call.kv_cache.shape[1]
    if page % 64:
        raise ValueError(f"maxima need a kv_cache with pages of 64 or 128, got {page}")
    fits = maxima.ndim == 2 and maxima.shape[0] == rows and maxima.shape[1] >= ints and maxima.stride(1) == 1
    if maxima.dtype != torch.int32 or not fits or maxima.device != call.q.device:
        raise ValueError(
            f"maxima must be int32 [{rows}, at least {ints}] on {call.q.device} with a dense last dimension, got "
            f"{maxima.dtype} {list(maxima.shape)} strides {maxima.stride()} on {maxima.device}"
        )


def check_values(call: Inputs) -> None:
    """The debug switch: what only the device knows, read back. Waits for the device."""
    page, table = call.kv_cache.shape[1], call.block_table
    room = min(call.max_context_len, table.shape[1] * page)
    wrong = call.context_lens[(call.context_lens < 0) | (call.context_lens > room)]
    if wrong.numel():
        raise ValueError(f"context_lens must be in 0..{room}, got {wrong[0].item()}")
    t = torch.arange(room, device=table.device)
    live = t < query_lengths(call).amax(1, keepdim=True)
    pages = table.long().repeat_interleave(page, 1)[:, :room][live]
    wrong = pages[(pages < 0) | (pages >= call.kv_cache.shape[0])]
    if wrong.numel():
        raise ValueError(f"block_table must be in 0..{call.kv_cache.shape[0] - 1}, got {wrong[0].item()}")
    kv_cache.check_index(call.kv_cache, pages * page + (t % page).expand_as(live)[live])
