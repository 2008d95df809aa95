"""What the host can know of a call is refused by name and value; what only the device knows has a debug switch."""

import torch
from torch import Tensor

from dsv4lab import kv_cache
from dsv4lab.kernels.sparse_mla.cases import HEAD_DIM, TOKEN_BYTES, Inputs

IMPLEMENTATIONS = ("simt", "mma", "split_k", "gluon")


def _check_indices(name: str, indices: Tensor, length_name: str, length: Tensor | None, q: Tensor) -> None:
    B, s_q = q.shape[:2]
    if indices.dtype != torch.int32 or indices.ndim != 3 or indices.shape[:2] != (B, s_q) or indices.stride(2) != 1:
        raise ValueError(
            f"{name} must be int32 [{B}, {s_q}, width] with a dense last dimension, got {indices.dtype} "
            f"{tuple(indices.shape)} strides {indices.stride()}"
        )
    if length is not None and (length.dtype != torch.int32 or tuple(length.shape) not in ((B,), (B, s_q))):
        raise ValueError(f"{length_name} must be int32 [{B}] or [{B}, {s_q}], got {length.dtype} {tuple(length.shape)}")
    for label, t in ((name, indices), (length_name, length)):
        if t is not None and t.device != q.device:
            raise ValueError(f"{label} must be on {q.device} like q, got {t.device}")


def check_call(call: Inputs, impl: str) -> None:
    q = call.q
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {IMPLEMENTATIONS}, got {impl!r}")
    if q.dtype != torch.bfloat16 or q.ndim != 4 or q.shape[3] != HEAD_DIM or q.stride(3) != 1:
        raise ValueError(
            f"q must be bfloat16 [B, s_q, H, {HEAD_DIM}] with a dense last dimension, got {q.dtype} {tuple(q.shape)} "
            f"strides {q.stride()}"
        )
    if not (1 <= q.shape[1] <= 4 and q.shape[2] >= 1):
        raise ValueError(f"q must have 1 to 4 query tokens and at least one head, got {tuple(q.shape)}")
    kv_cache.check_pages("k_cache", call.k_cache, TOKEN_BYTES, q.device)
    _check_indices("indices", call.indices, "topk_length", call.topk_length, q)
    if (call.extra_k_cache is None) != (call.extra_indices_in_kvcache is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache must be given together")
    if call.extra_k_cache is None and call.extra_topk_length is not None:
        raise ValueError("extra_topk_length needs extra_k_cache, got None")
    if call.extra_k_cache is not None:
        kv_cache.check_pages("extra_k_cache", call.extra_k_cache, TOKEN_BYTES, q.device)
        names = "extra_indices_in_kvcache", "extra_topk_length"
        _check_indices(names[0], call.extra_indices_in_kvcache, names[1], call.extra_topk_length, q)
    sink = call.attn_sink
    if sink is not None and (
        sink.dtype != torch.float32 or sink.shape != q.shape[2:3] or sink.stride(0) != 1 or sink.device != q.device
    ):
        raise ValueError(
            f"attn_sink must be dense float32 [{q.shape[2]}] on {q.device}, "
            f"got {sink.dtype} {tuple(sink.shape)} on {sink.device}"
        )


def check_buffer(name: str, t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if t.dtype != dtype or tuple(t.shape) != shape or t.device != device or (shape and t.stride(-1) != 1):
        raise ValueError(
            f"{name} must be {dtype} {shape} on {device} with a dense last dimension, got {t.dtype} {tuple(t.shape)} "
            f"strides {t.stride()} on {t.device}"
        )


def check_values(call: Inputs) -> None:
    """The debug switch: what only the device knows, read back. Waits for the device."""
    for name, length_name, cache_name in (
        ("indices", "topk_length", "k_cache"),
        ("extra_indices_in_kvcache", "extra_topk_length", "extra_k_cache"),
    ):
        indices, length, cache = (getattr(call, each) for each in (name, length_name, cache_name))
        if cache is None:
            continue
        width, slots = indices.shape[-1], cache.shape[0] * cache.shape[1]
        live = torch.ones_like(indices, dtype=torch.bool)
        if length is not None:
            wrong = length[(length < 0) | (length > width)]
            if wrong.numel():
                raise ValueError(f"{length_name} must be in 0..{width}, got {wrong[0].item()}")
            live = torch.arange(width, device=indices.device) < length.view(length.shape[0], -1, 1)
        wrong = indices[live & ((indices < -1) | (indices >= slots))]
        if wrong.numel():
            raise ValueError(f"{name} must be -1 or in 0..{slots - 1}, got {wrong[0].item()}")
        kv_cache.check_main(cache, indices[live & (indices >= 0)])
