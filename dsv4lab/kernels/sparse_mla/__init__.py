"""Sparse MLA decode: attention of DeepSeek-V4's one shared KV head over selected positions of two paged FP8 caches.

For query row (b, s) and head h, over the valid selected tokens t of the main (window) and the extra (top-k) cache:

    score_t = softmax_scale * <q[b, s, h], kv_t>          lse[b, h, s] = log sum_t exp(score_t)
    out[b, s, h] = sum_t exp(score_t - lse) kv_t * sigmoid(lse - attn_sink[h])

K and V are the same 512 values (584 bytes a token, `dsv4lab.kv_cache`). A row costs (tokens selected) x 584 bytes,
however many heads read them. It replaces SGLang's `flash_mla_sm120_triton.py`, whose grid of (row, head) reads every
token once per head, and follows FlashMLA's `flash_mla_with_kvcache` contract:

- token t counts if its position is below `topk_length` and its index is in 0..slots-1; any other index is skipped;
- the sink scales the output and does not enter lse; +inf gives output 0, -inf changes nothing;
- a row without a valid token gives output 0 and lse +inf, whatever the number of splits.

Numerics: bf16 operands, fp32 scores, softmax and accumulation. A scale byte above 134 (activations beyond 57,344)
saturates. Bitwise repeatable, and the same under graph replay. Implementations: `simt` (one program per row and head:
the stock structure), `mma` (tensor cores, one program per row and head block), `split_k` (the same with each row's
positions split over programs and merged by log-sum-exp), `gluon` (`split_k` with a kernel for Hopper where that is
faster; the same as `split_k` on every other architecture).
"""

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lab.hardware import sms_of
from dsv4lab.kernels.launch import INTERPRETED as _INTERPRETED
from dsv4lab.kernels.launch import launch, target, warm
from dsv4lab.kernels.sparse_mla import checks
from dsv4lab.kernels.sparse_mla.cases import (
    CASES,
    EXPERIMENT,
    HEAD_DIM,
    Case,
    Inputs,
    baseline,
    config,
    make_inputs,
    reference,
    work,
)
from dsv4lab.kernels.sparse_mla.checks import IMPLEMENTATIONS
from dsv4lab.kernels.sparse_mla.gluon_tiles import gluon_kernel
from dsv4lab.kernels.sparse_mla.plans import (
    CANDIDATES,
    GLUON,
    SIMT_BLOCK_N,
    SIMT_WARPS,
    TABLE,
    Config,
    Plan,
    buckets,
    choose,
    mma_config,
    reachable,
    split_plan,
)
from dsv4lab.kernels.sparse_mla.tiles import combine_kernel, simt_kernel, split_k_kernel
from dsv4lab.model import DSV4_FLASH

__all__ = [
    "CANDIDATES",
    "CASES",
    "EXPERIMENT",
    "IMPLEMENTATIONS",
    "TABLE",
    "Case",
    "Config",
    "Inputs",
    "Plan",
    "baseline",
    "config",
    "describe",
    "launches",
    "make_inputs",
    "notes",
    "plan",
    "plan_for",
    "prepare",
    "reference",
    "sparse_mla_decode",
    "static_launches",
    "warm_up",
    "work",
]  # fmt: skip

MAX_C128 = 64 * -(-DSV4_FLASH.page_table_width(DSV4_FLASH.max_position_embeddings) // 32)
"""Positions that a c128 layer can select, as SGLang sizes its indices: two a logical page, in steps of 64."""

_LOG2E = 1.4426950408889634


def plan(
    rows: int, heads: int, widths: tuple[int, ...], *, impl: str = "split_k", arch: str, sms: int,
    config: Config | None = None,
) -> Plan:  # fmt: skip
    """The launch plan for `rows` = B * s_q query rows and index widths (window, topk): shapes in, shapes out."""
    if impl == "mma":
        return Plan(config or mma_config(heads), rows, heads)
    config = config or choose(arch, heads, rows, impl).config
    if config.gluon and arch not in GLUON:
        raise ValueError(f"config {config.name} must run on {', '.join(GLUON)}, got {arch}")
    return split_plan(config, rows=rows, heads=heads, widths=widths, arch=arch, sms=sms)


def plan_for(call: Inputs, impl: str = "split_k", config: Config | None = None) -> Plan:
    """The plan of a call on the device it lies on; interpreted calls are planned as on an H200."""
    q, extra = call.q, call.extra_indices_in_kvcache
    arch, sms = _target(q.device)
    if impl == "gluon" and config is None and _INTERPRETED:
        impl = "split_k"  # Gluon has no interpreter
    widths = call.indices.shape[-1], 0 if extra is None else extra.shape[-1]
    return plan(q.shape[0] * q.shape[1], q.shape[2], widths, impl=impl, arch=arch, sms=sms, config=config)


def _target(device: torch.device) -> tuple[str, int]:
    return target(device) if device.type == "cuda" else ("sm_90", 132)


def _cache_arguments(prefix: str, cache: Tensor, indices: Tensor, length: Tensor | None) -> dict:
    flat = cache.view(torch.uint8)
    strides = (0, 0) if length is None else (length.stride(0), length.stride(1) if length.ndim == 2 else 0)
    return {
        f"{prefix}cache": flat, f"{prefix}page_stride": cache.stride(0),
        f"{prefix}num_slots": cache.shape[0] * cache.shape[1],
        f"{prefix}indices": indices, f"{prefix}idx_stride_b": indices.stride(0),
        f"{prefix}idx_stride_s": indices.stride(1),
        f"{prefix}lengths": indices if length is None else length,
        f"{prefix}len_stride_b": strides[0], f"{prefix}len_stride_s": strides[1],
    }  # fmt: skip


def launches(
    call: Inputs, out: Tensor, lse: Tensor, workspace: Tensor | None, *, impl: str, plan: Plan | None
) -> list[tuple]:
    """[(kernel, grid, arguments)] of one call, in order; nothing is launched. `plan` is None for `simt`."""
    B, s_q, H, _ = call.q.shape
    has_extra = call.extra_k_cache is not None
    extra = call.extra_k_cache, call.extra_indices_in_kvcache, call.extra_topk_length
    output = dict(
        attn_sink=lse if call.attn_sink is None else call.attn_sink, lse=lse, out=out, out_stride_b=out.stride(0),
        out_stride_s=out.stride(1), out_stride_h=out.stride(2), S_Q=s_q, H=H, HAS_SINK=call.attn_sink is not None,
    )  # fmt: skip
    attend = dict(
        q=call.q, q_stride_b=call.q.stride(0), q_stride_s=call.q.stride(1), q_stride_h=call.q.stride(2),
        **_cache_arguments("", call.k_cache, call.indices, call.topk_length),
        **_cache_arguments("extra_", *(extra if has_extra else (call.k_cache, call.indices, None))),
        **output, scale2=call.softmax_scale * _LOG2E,
        WIDTH=call.indices.shape[-1], extra_width=extra[1].shape[-1] if has_extra else 0, HAS_EXTRA=has_extra,
        PAGE=call.k_cache.shape[1], EXTRA_PAGE=call.extra_k_cache.shape[1] if has_extra else 1,
        HAS_LENGTHS=call.topk_length is not None, HAS_EXTRA_LENGTHS=call.extra_topk_length is not None,
    )  # fmt: skip
    if impl == "simt":
        return [(simt_kernel, (B * s_q * H,), attend | dict(BLOCK_N=SIMT_BLOCK_N, num_warps=SIMT_WARPS))]
    c, split = plan.config, plan.num_splits > 1
    pdl = split and plan.pdl and not _INTERPRETED
    partial_out, partial_lse = (out, lse)
    if split:
        partial_out, partial_lse = workspace[: plan.workspace_numel].split([plan.partials * HEAD_DIM, plan.partials])
    attend |= dict(
        partial_out=partial_out, partial_lse=partial_lse, NUM_SPLITS=plan.num_splits, SPLIT=split, BLOCK_N=c.block_n,
        STAGES=c.num_stages, PDL=pdl, num_warps=c.num_warps,
    )  # fmt: skip
    of_triton = dict(
        BLOCK_H=c.block_h, TRANSPOSE_SCORES=c.transpose_scores, COMPUTE=tl.float32 if _INTERPRETED else tl.bfloat16,
        num_stages=c.num_stages,
    )  # fmt: skip
    kernel, options = (gluon_kernel, {}) if c.gluon else (split_k_kernel, of_triton)
    steps = [(kernel, (plan.blocks,), attend | options)]
    if split:
        slots = triton.next_power_of_2(plan.num_splits)
        # many partial rows: few columns a program, so that all are in flight at once; more than 64 for each warp spill
        block_d, warps = (64, max(slots // 64, 1)) if slots > 8 else (512, 4 if slots > 4 else 1)
        combine = output | dict(
            partial_out=partial_out, partial_lse=partial_lse, NUM_SPLITS=plan.num_splits,
            SPLITS_POW2=slots, BLOCK_D=block_d, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
        steps.append((combine_kernel, (plan.rows * H, HEAD_DIM // block_d), combine))
    return steps


def sparse_mla_decode(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    *,
    attn_sink: Tensor | None = None,
    softmax_scale: float | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    impl: str = "split_k",
    config: Config | None = None,
    check_values: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over the selected positions of a main and an optional extra cache; see the module for the formula.

    q: bf16 [B, s_q, H, 512], s_q 1 to 4, any H >= 1 (a tensor-parallel rank passes only its own heads); strided views
      are read as they are.
    k_cache, extra_k_cache: uint8 or float8_e4m3fn views [pages, page, 1, 584] of the DSv4 layout, pages at multiples of
      16 bytes; any page size, any page stride.
    indices, extra_indices_in_kvcache: int32 [B, s_q, width], slot = page * page_size + offset.
    topk_length, extra_topk_length: int32 [B] or [B, s_q], positions that count; clamped to 0..width on the device.
    attn_sink: fp32 [H], in nats. softmax_scale: default 512**-0.5.
    out: bf16 [B, s_q, H, 512], may be a strided slice. lse: fp32 [B, H, s_q], natural log, dense.
    workspace: fp32, at least `plan(...).workspace_numel` elements. Nothing is allocated if all three are given.
    config: overrides the table's choice. check_values: check lengths, indices and what they
      select first, which waits for the device.

    Returns (out, lse). Raises ValueError naming the argument and what it was, and ColdKernel if the stream is capturing
    and this variant was never run before. No host sync unless check_values is set.
    """
    scale = HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale
    call = Inputs(
        q, k_cache, indices, topk_length, attn_sink, scale, extra_k_cache, extra_indices_in_kvcache, extra_topk_length
    )
    checks.check_call(call, impl)
    if check_values:
        checks.check_values(call)
    B, s_q, H, _ = q.shape
    out = torch.empty(B, s_q, H, HEAD_DIM, dtype=torch.bfloat16, device=q.device) if out is None else out
    lse = torch.empty(B, H, s_q, dtype=torch.float32, device=q.device) if lse is None else lse
    checks.check_buffer("out", out, torch.bfloat16, (B, s_q, H, HEAD_DIM), q.device)
    checks.check_buffer("lse", lse, torch.float32, (B, H, s_q), q.device)
    if not lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
    if B == 0:
        return out, lse
    p = None if impl == "simt" else plan_for(call, impl, config)
    needed = p.workspace_numel if p else 0
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif workspace.dtype != torch.float32 or not workspace.is_contiguous() or workspace.numel() < needed:
        raise ValueError(
            f"workspace must be contiguous float32 with at least {needed} elements, "
            f"got {workspace.dtype} {tuple(workspace.shape)}"
        )
    for step in launches(call, out, lse, workspace.view(-1), impl=impl, plan=p):
        launch(*step)
    return out, lse


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`.

    It allocates as a serving engine does: from the pool of the graph that captures it. ValueError for `gluon` where it
    has no kernel of its own, so that nothing is measured twice under two names.
    """
    impl, config = CANDIDATES.get(impl, (impl, None))
    arch, _ = _target(inputs.q.device)
    if impl == "gluon" and arch not in GLUON:
        raise ValueError(f"gluon has a kernel for {', '.join(GLUON)} alone; on {arch} it is split_k")
    return functools.partial(sparse_mla_decode, **vars(inputs), impl=impl, config=config)


def warm_up(
    device: torch.device | str = "cuda", *, heads: int, impl: str = "split_k", page: int = 256,
    extras: tuple[tuple[int, int], ...] = ((0, 1), (DSV4_FLASH.index_topk, 64), (MAX_C128, 2)),
) -> None:  # fmt: skip
    """Compile and load every variant that calls with these heads and caches can need, whatever B and lengths.

    page: tokens of a page of the window's cache. extras: (most positions, tokens of a page) of each extra cache, (0, 1)
    for a layer without. A call has one query a row, the model's window, and lengths.
    """
    device = torch.device(device)
    arch, sms = _target(device)
    for width, extra_page in extras:
        case = Case("warm_up", 1, heads, topk=min(width, DSV4_FLASH.index_topk), page=page, extra_page=extra_page)
        (call,) = make_inputs(case, device=device)
        out, lse = torch.empty_like(call.q), torch.empty(1, heads, 1, device=device)
        plans = [None] if impl == "simt" else [plan(1, heads, (case.window, width), impl=impl, arch=arch, sms=sms)]
        if impl in ("split_k", "gluon"):
            plans = reachable(impl, heads=heads, window=case.window, most=width, arch=arch, sms=sms)
        for each in plans:
            workspace = torch.empty(each.workspace_numel if each else 0, device=device)
            for step in launches(call, out, lse, workspace, impl=impl, plan=each):
                warm(*step)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl == "simt":
        return {"block_n": SIMT_BLOCK_N, "num_warps": SIMT_WARPS}
    p = plan_for(inputs, impl, config)
    return {"variant": p.config.name, "num_splits": p.num_splits, "blocks": p.blocks}


def describe(arch: str) -> list[str]:
    """One line for each batch bucket: what `split_k` and `gluon` would run on an architecture, and the evidence."""
    tables = {"split_k": buckets(arch), "gluon": GLUON.get(arch, ())}
    return [f"{impl}, {b.limits}: {b.config.name} ({b.evidence})" for impl, table in tables.items() for b in table]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of every table entry of an architecture, on CPU tensors, by the name of the entry."""
    gluon = [bucket for bucket in GLUON.get(arch, ()) if bucket.config.gluon]
    sms = sms_of(arch)
    for bucket in (*buckets(arch), *gluon):
        heads, rows = min(bucket.max_heads, 64), min(bucket.max_rows, 4)
        (call,) = make_inputs(Case("static", rows, heads), device="cpu")
        out, lse = torch.empty_like(call.q), torch.empty(rows, heads, 1)
        widths = call.indices.shape[-1], call.extra_indices_in_kvcache.shape[-1]
        p = plan(rows, heads, widths, arch=arch, sms=sms, config=bucket.config)
        workspace = torch.empty(p.workspace_numel)
        yield f"{bucket.limits}: {p.config.name}", launches(call, out, lse, workspace, impl="split_k", plan=p)
