"""What the host can know of a call is refused by name and value."""

import torch
from torch import Tensor

from dsv4lab.kernels.rows import check_lengths
from dsv4lab.kernels.topk.cases import Inputs
from dsv4lab.kernels.topk.plans import MAX_K, list_length


def check_call(call: Inputs, out: Tensor, raw: Tensor | None) -> None:
    scores, tables, device = call.scores, call.page_tables, call.scores.device
    if scores.dtype != torch.float32 or scores.ndim != 2 or scores.stride(1) != 1:
        raise ValueError(
            f"scores must be float32 [rows, width] with a dense last dimension, got {scores.dtype} "
            f"{list(scores.shape)} strides {scores.stride()}"
        )
    if tables.dtype != torch.int32 or tables.ndim != 2 or tables.stride(1) != 1 or tables.device != device:
        raise ValueError(
            f"page_tables must be int32 [B, width] on {device} with a dense last dimension, got {tables.dtype} "
            f"{list(tables.shape)} strides {tables.stride()} on {tables.device}"
        )
    _check_rows(call)
    if call.page_size < 1 or call.page_size & (call.page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {call.page_size}")
    if not 1 <= call.k <= MAX_K:
        raise ValueError(f"out_page_indices must have 1 to {MAX_K} columns, got {call.k}")
    if scores.shape[1] > 1024 * list_length(call.k):
        raise ValueError(f"scores must be at most {1024 * list_length(call.k)} wide, got {scores.shape[1]}")
    rows = scores.shape[0]
    for name, each in (("out_page_indices", out), ("out_raw_indices", raw)):
        if each is not None and (
            each.dtype != torch.int32 or each.shape != (rows, call.k) or each.stride(1) != 1 or each.device != device
        ):
            raise ValueError(
                f"{name} must be int32 [{rows}, {call.k}] on {device} with a dense last dimension, got {each.dtype} "
                f"{list(each.shape)} strides {each.stride()} on {each.device}"
            )


def _check_rows(call: Inputs) -> None:
    rows, batch = call.scores.shape[0], call.page_tables.shape[0]
    if rows and (not batch or rows % batch):
        raise ValueError(f"page_tables must have a divisor of the {rows} rows of scores, got {batch} rows")
    flat = call.seq_lens.ndim == 1 and call.seq_lens.shape[0] == rows
    requests, next_n = (rows, 1) if flat else (batch, rows // max(batch, 1))
    check_lengths("seq_lens", call.seq_lens, requests, next_n, call.scores.device)


def check_workspace(workspace: Tensor, rows: int, ints: int, device: torch.device) -> None:
    fits = workspace.ndim == 2 and workspace.shape[0] >= rows and workspace.shape[1] >= ints
    if workspace.dtype != torch.int32 or not fits or workspace.stride(1) != 1 or workspace.device != device:
        raise ValueError(
            f"workspace must be int32, at least [{rows}, {ints}], on {device} with a dense last dimension, got "
            f"{workspace.dtype} {list(workspace.shape)} on {workspace.device}"
        )
    if workspace.stride(0) % 4 or workspace.data_ptr() % 16:
        raise ValueError(
            f"workspace must have rows at multiples of 16 bytes, got stride {workspace.stride(0)} at "
            f"{workspace.data_ptr():#x}"
        )
