"""Our kernels behind the signatures that SGLang calls, one maker for each hook: implementation name in, function out.

Everything that couples serving to a kernel module stands here and, of linear layers and mixes, in `linears`.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from dsv4lab.kernels import fp8_gemm, hc_head, mqa_logits, skinny_gemm, slots, sparse_mla, topk
from dsv4lab.kernels import hc_pre as kernel
from dsv4lab.kernels.launch import target
from dsv4lab.kernels.replay import replay
from dsv4lab.kernels.sparse_mla.plans import in_use
from dsv4lab.kv_cache import FP8
from dsv4lab.model import DSV4_FLASH

MOST_ROWS = 256
"""Rows of a top-k that is given a workspace to keep: more are a prefill's, which is never captured."""

TORCH_LOGITS = {"torch_fallback": torch.float32, "torch_bf16": torch.bfloat16}
"""The indexers that score the whole maximum context, and the type they multiply in."""

_call = threading.local()
_workspaces: dict[torch.device, Tensor] = {}
_counts: dict[torch.device, list[Tensor]] = {}


def note_layer(original: Callable, backend: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, *args, **kwargs) -> Any:
    """Around the attention backend's `forward`: remembers how many query heads are this rank's own."""
    _call.heads = layer.tp_q_head_num
    return original(backend, q, k, v, layer, *args, **kwargs)


def own_heads(heads: int, rank: Callable[[], int] | None = None) -> slice:
    """The rank's own of the `heads` a call carries; with `rank` at their place among all, else first.

    All of them where no layer said how many there are: foreign heads cost time, and never a right result.
    """
    own = min(getattr(_call, "heads", heads), heads)
    first = rank() * own if rank and own < heads else 0
    return slice(first, first + own)


def workspace_numel(arch: str, sms: int) -> int:
    """fp32 elements that hold the partial results of any call: a plan splits no further than fills the GPU once."""
    fullest = max(bucket.config.blocks_per_sm * bucket.config.block_h for bucket in in_use(arch))
    return fullest * sms * (DSV4_FLASH.head_dim + 1)


def _workspace(device: torch.device) -> Tensor | None:
    """One for all calls of a process: they follow each other on one stream. None while a graph is captured without."""
    if device not in _workspaces and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        with torch.inference_mode(False):
            _workspaces[device] = torch.empty(workspace_numel(*target(device)), device=device)
    return _workspaces.get(device)


def warm_up(asked: dict[str, str]) -> Callable:
    """Around the attention backend's `__init__`: compiles what the asked hooks can need, before any capture."""

    def init(original: Callable, backend: Any, model_runner: Any, *args, **kwargs) -> None:
        original(backend, model_runner, *args, **kwargs)
        model = model_runner.model
        device = next(model.parameters()).device
        if impl := asked.get("attention"):
            heads = next(module.tp_q_head_num for module in model.modules() if hasattr(module, "tp_q_head_num"))
            sparse_mla.warm_up(device, heads=heads, impl=impl)
            _workspace(device)
        if asked.get("indexer") == "triton":
            mqa_logits.warm_up(device, maxima=(False,))
        if "topk" in asked:
            topk.warm_up(device)
        if (impl := asked.get("mhc")) in kernel.IMPLEMENTATIONS:
            kernel.warm_up(device, weights=torch.bfloat16 if impl == "split_k_bf16" else torch.float32)
        if "gemm" in asked:
            weights = {tuple(each.shape) for each in model.parameters() if each.dtype == FP8 and each.dim() == 2}
            shapes = sorted(shape for shape in weights if fp8_gemm.takes(1, *shape))
            fp8_gemm.warm_up(device, shapes=shapes, impls=("split_k_linear",))
        if "gate" in asked:
            weights = {each.shape for each in model.parameters() if each.dtype == torch.bfloat16 and each.dim() == 2}
            for N, K in sorted(weights):
                if skinny_gemm.beats_cublas(1, N):
                    skinny_gemm.warm_up(N, K, device=device)
        if "slots" in asked:
            slots.warm_up(device)
        if "head" in asked:
            hc_head.warm_up(device)

    return init


def attention(impl: str, rank: Callable[[], int] | None = None) -> Callable:
    """`flash_mla_with_kvcache_sm120`: decode, verification and prefill alike, on the rank's own heads alone."""

    def flash_mla_with_kvcache_sm120(
        *,
        q: Tensor,
        k_cache: Tensor,
        indices: Tensor,
        topk_length: Tensor,
        attn_sink: Tensor,
        head_dim_v: int,
        softmax_scale: float | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        if head_dim_v != q.shape[-1]:
            raise ValueError(f"head_dim_v must be that of q, {q.shape[-1]}, got {head_dim_v}")
        own, (rows, queries, *_) = own_heads(q.shape[2], rank), q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(rows, own.stop - own.start, queries, device=q.device)
        workspace = _workspace(q.device)

        def call() -> None:
            sparse_mla.sparse_mla_decode(
                q[:, :, own], k_cache, indices, topk_length, attn_sink=attn_sink[own].detach(),
                softmax_scale=softmax_scale, extra_k_cache=extra_k_cache,
                extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length,
                out=out[:, :, own], lse=lse, workspace=workspace, impl=impl,
            )  # fmt: skip

        main, extra = (k_cache, indices, topk_length), (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
        replay(call, ("attention", impl, own.start, softmax_scale), (q, *main, attn_sink, *extra, out, lse, workspace))
        return out, None

    return flash_mla_with_kvcache_sm120


def variant(impl: str, seen: dict[str, Any], own: slice) -> str:
    """What an attention call ran: `gluon` is `split_k` on a GPU that it has no kernel for, and with few rows."""
    given = {field.name: seen.get(field.name) for field in fields(sparse_mla.Inputs)} | {"q": seen["q"][:, :, own]}
    return ", ".join(f"{name} {value}" for name, value in sparse_mla.notes(impl, sparse_mla.Inputs(**given)).items())


def twice(ours: Callable) -> Callable:
    """Around SGLang's attention: `ours`, and after it SGLang's own on the same call, for nothing but its time."""

    def both(original: Callable, **call: Any) -> Any:
        result = ours(**call)
        original(**call)
        return result

    return both


def indexer(impl: str) -> Callable:
    """`fp8_paged_mqa_logits_torch_sm120` and its relatives."""

    def fp8_paged_mqa_logits(
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        schedule_meta: object,
        max_context_len: int,
        clean_logits: bool = False,
    ) -> Tensor:
        if impl in TORCH_LOGITS:
            arguments = q, kv_cache, weights, context_lens, block_table, max_context_len
            return mqa_logits.torch_logits(*arguments, dtype=TORCH_LOGITS[impl])
        given = q, kv_cache, weights, context_lens, block_table
        out = mqa_logits.empty(q.shape[0] * q.shape[1], max_context_len, q.device)
        arguments = *given, schedule_meta, max_context_len, clean_logits
        call = functools.partial(mqa_logits.fp8_paged_mqa_logits, *arguments, out=out)
        replay(call, ("indexer", max_context_len, clean_logits), (*given, out))
        return out

    return fp8_paged_mqa_logits


def topk_transform(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None = None,
) -> None:
    """`topk_transform_512`."""
    shape, device = topk.workspace_shape(*scores.shape, out_page_indices.shape[1]), scores.device
    workspace = _counting_workspace(*shape, device)
    if workspace is None:
        workspace = torch.zeros(shape, dtype=torch.int32, device=device)
    given = scores, seq_lens, page_tables, out_page_indices
    call = functools.partial(topk.topk_transform, *given, page_size, out_raw_indices, workspace=workspace)
    replay(call, ("topk", page_size), (*given, out_raw_indices, workspace))


def _counting_workspace(rows: int, ints: int, device: torch.device) -> Tensor | None:
    """A workspace whose counts are 0 between calls, which follow each other on one stream; None: make one for a call.

    One that turned out too small stays: captured graphs still use it.
    """
    kept = _counts.setdefault(device, [])
    if fitting := [each for each in kept if each.shape[0] >= rows and each.shape[1] >= ints]:
        return fitting[0]
    if rows > MOST_ROWS or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    with torch.inference_mode(False):
        kept.append(torch.zeros(rows, ints, dtype=torch.int32, device=device))
    return kept[-1]


def compression_metadata(proven: Callable[[Callable], Callable] = lambda ours: ours) -> Callable:
    """Around `init_compression_metadata`: our slots of the c128 keys, and SGLang's own of all that a row has one of.

    proven: goes around our kernel's calls alone, which are those that ask for slots.
    """

    @proven
    def ours(page_table: Tensor, seq_lens: Tensor, page_size: int) -> Tensor:
        out = slots.empty(page_table, page_size)
        call = functools.partial(slots.c128_slots, page_table, seq_lens, page_size, out)
        replay(call, ("slots", page_size), (page_table, seq_lens, out))
        return out

    def init_compression_metadata(
        original: Callable, seq_lens: Tensor, positions: Tensor, raw_out_loc: Tensor, page_table: Tensor | None = None,
        page_size: int = 0, compute_page_indices: bool = True,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        given = seq_lens, positions, raw_out_loc, page_table, page_size
        if not compute_page_indices or page_table is None:
            return original(*given, compute_page_indices)
        *scalars, _ = original(*given, False)
        return *scalars, ours(page_table, seq_lens, page_size)

    return init_compression_metadata
