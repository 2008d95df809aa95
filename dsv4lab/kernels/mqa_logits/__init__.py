"""Paged MQA logits: the score of every key of a request for the indexer's top-k, over the paged FP8 index cache.

For query j of request b and key t, over heads h, with q `[B, next_n, 64, 128]` e4m3 and keys of 128 e4m3 values and one
fp32 scale (132 bytes, `dsv4lab.kv_cache`, found through the page table):

    logits[b * next_n + j, t] = scale_t * sum_h weights[b * next_n + j, h] * relu(<q[b, j, h], k_t>)

A call reads 132 bytes a key and writes 4 a key and query, for the keys there are: cost follows the lengths, which are
read on the device, and not the width of page table or output. It replaces SGLang's `fp8_paged_mqa_logits_torch_sm120`,
which gathers and scores the whole maximum context, and keeps the contract of DeepGEMM's `fp8_paged_mqa_logits`:

- query j sees the keys before its own position: `context_lens[b, j]` of them, or, with one length a request,
  `context_lens[b] - (next_n - 1 - j)`; lengths are clamped to 0..max_context_len and to the page table's width;
- past them the output is unwritten; nothing of the cache is read past the page that holds the last key;
- a page id outside the pool scores -inf; a product that is NaN counts as 0, as `fmaxf` has it.

Numerics: e4m3 products, exact, accumulated by the tensor core (on sm_90 in 14 bits or so); the rest in fp32. Bitwise
repeatable and the same under graph replay. Implementations: `triton`; `torch_fallback`, O(max_context_len);
`torch_capped`, the same over the positions that a server capped to a context of 8,192 tokens has.
"""

from collections.abc import Callable, Iterator

import torch
import triton.language as tl
from torch import Tensor

from dsv4lab import kv_cache as layouts
from dsv4lab.hardware import EARLY_LAUNCH
from dsv4lab.kernels.launch import INTERPRETED as _INTERPRETED
from dsv4lab.kernels.launch import launch, target, warm
from dsv4lab.kernels.mqa_logits import checks
from dsv4lab.kernels.mqa_logits.cases import (
    CASES,
    DIM,
    EXPERIMENT,
    PAGE,
    Case,
    Inputs,
    baseline,
    config,
    judge,
    make_inputs,
    query_lengths,
    reference,
    rotated_bytes,
    work,
)
from dsv4lab.kernels.mqa_logits.plans import FP8_PRODUCTS, SWEEP, TABLE, Config, choose
from dsv4lab.kernels.mqa_logits.tiles import logits_kernel
from dsv4lab.kernels.rows import length_arguments
from dsv4lab.model import DSV4_FLASH

__all__ = [
    "CANDIDATES", "CASES", "EXPERIMENT", "IMPLEMENTATIONS", "TABLE", "Case", "Config", "Inputs", "baseline", "config",
    "describe", "empty", "fp8_paged_mqa_logits", "judge", "launches", "make_inputs", "notes", "prepare",
    "query_lengths", "reference", "rotated_bytes", "static_launches", "torch_logits", "warm_up", "work",
]  # fmt: skip

IMPLEMENTATIONS = ("torch_fallback", "torch_capped", "triton")
CANDIDATES = {f"triton_{c.name}": ("triton", c) for c in SWEEP}
CAPPED = DSV4_FLASH.c4_positions(8192)
FALLBACK_BYTES = 4 << 30
_MANY_ROWS = 256


def empty(rows: int, max_context_len: int, device: torch.device) -> Tensor:
    """fp32 [rows, max_context_len] with rows at multiples of 1 KB: where logits go."""
    return torch.empty(rows, -(-max_context_len // 256) * 256, device=device)[:, :max_context_len]


def launches(
    call: Inputs, out: Tensor, maxima: Tensor | None = None, *, arch: str, sms: int, config: Config | None = None
) -> list[tuple]:
    """[(kernel, grid, arguments)] of one call; nothing is launched."""
    c = config or choose(arch).config(call.q.shape[1])
    B, next_n, H, _ = call.q.shape
    nq = 1 if next_n == 1 else 2
    rows = B * -(-next_n // nq)
    block = next((few for few in (32, 64) if rows <= few), _MANY_ROWS)
    chunks = -(-rows // block)
    page = call.kv_cache.shape[1]
    programs = max(c.programs_per_sm * sms // chunks, 1)
    early = c.early and arch in EARLY_LAUNCH and not _INTERPRETED
    arguments = dict(
        q=call.q.view(torch.uint8), q_stride_b=call.q.stride(0) // 16, q_stride_n=call.q.stride(1) // 16,
        q_stride_h=call.q.stride(2) // 16, cache=call.kv_cache.view(torch.uint8),
        page_stride=call.kv_cache.stride(0) // 16, num_pages=call.kv_cache.shape[0], weights=call.weights,
        weights_stride=call.weights.stride(0), **length_arguments(call.context_lens.view(B, -1), next_n),
        table=call.block_table, table_stride=call.block_table.stride(0), out=out, out_stride=out.stride(0),
        maxima=call.block_table if maxima is None else maxima, maxima_stride=0 if maxima is None else maxima.stride(0),
        units=-(-call.max_context_len // 256), B=B, limit=min(call.max_context_len, call.block_table.shape[1] * page),
        chunk=-(-rows // chunks), H=H, PAGE=page, NQ=nq, ROWS=block, MAXIMA=maxima is not None,
        GROUPS=-(-next_n // nq), PROGRAMS=programs if chunks == 1 else 0, EARLY=early,
        STAGES=c.num_stages, COMPUTE=tl.float8e4nv if arch in FP8_PRODUCTS and not _INTERPRETED else tl.float16,
        num_warps=c.num_warps, num_stages=c.num_stages, launch_pdl=early,
    )  # fmt: skip
    return [(logits_kernel, (programs, chunks), arguments)]


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: object,
    max_context_len: int,
    clean_logits: bool = False,
    *,
    out: Tensor | None = None,
    maxima: Tensor | None = None,
    config: Config | None = None,
    check_values: bool = False,
) -> Tensor:
    """The logits of every key that each query sees; see the module for the formula. Returns fp32 [B * next_n, max].

    q: e4m3 [B, next_n, H, 128], next_n 1 to 6, H a power of two from 16 to 128; heads at multiples of 16 bytes.
    kv_cache: uint8 or e4m3 view [pages, page, 1, 132] of the index layout, page a power of two from 16 to 128, pages at
      multiples of 16 bytes, which may be those of one wide pool.
    weights: fp32 [B * next_n, H]. context_lens: int32 [B], [B, 1] or [B, next_n].
    block_table: int32 [B, width], any row stride, wider than needed or stale past a row's keys.
    schedule_meta: taken for DeepGEMM's sake, and not read. max_context_len: columns of the result.
    clean_logits: False; the tail of a row is unwritten.
    out: fp32 [B * next_n, max_context_len] with a dense last dimension; if absent, with rows at multiples of 1 KB.
    maxima: int32 [B * next_n, at least `rows.maxima_ints(max_context_len)`]: also store group maxima, for `topk`; pages
      of 64 or 128. config: overrides the table's choice. check_values: check lengths, page ids and the cache's layout
      first, which waits for the device.

    Raises ValueError naming the argument and what it was. No host sync unless check_values is set.
    """
    call = Inputs(q, kv_cache, weights, context_lens, block_table, max_context_len)
    checks.check_call(call, clean_logits)
    if check_values:
        checks.check_values(call)
    rows = q.shape[0] * q.shape[1]
    if out is None:
        out = empty(rows, max_context_len, q.device)
    checks.check_out(call, out)
    if maxima is not None:
        checks.check_maxima(call, maxima)
    if q.shape[0] and max_context_len and block_table.shape[1]:
        arch, sms = target(q.device)
        for each in launches(call, out, maxima, arch=arch, sms=sms, config=config):
            launch(*each)
    return out


def torch_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The indexer that costs O(max_context_len): gather every page of the table, score every position, mask.

    The same result and arguments, with -inf past each query's keys; capture-safe. Requests are taken a few at a time,
    so that what lies in memory stays under `FALLBACK_BYTES`. dtype: of q, keys and their products; the rest is fp32.
    """
    call = Inputs(q, kv_cache, weights, context_lens, block_table, max_context_len)
    (B, next_n, H, _), page = q.shape, kv_cache.shape[1]
    pages = min(-(-max_context_len // page), block_table.shape[1])
    width = min(pages * page, max_context_len)
    flat = kv_cache.view(torch.uint8).as_strided((kv_cache.shape[0], page * (DIM + 4)), (kv_cache.stride(0), 1))
    out = torch.full((B, next_n, max_context_len), float("-inf"), device=q.device)
    step = max(FALLBACK_BYTES // (max(pages, 1) * page * (2 * (DIM + 4) + 4 * DIM + 12 * H)), 1)
    for b in range(0, B, step):
        some = slice(b, b + step)
        gathered = flat[block_table[some, :pages].long()]
        values = gathered[..., : page * DIM].contiguous().view(layouts.FP8).to(dtype).view(-1, pages * page, DIM)
        scale = gathered[..., page * DIM :].contiguous().view(torch.float32).view(-1, pages * page)
        for j in range(next_n):
            x = torch.relu(torch.bmm(values, q[some, j].to(dtype).transpose(1, 2)))
            x = (x * weights.view(B, next_n, 1, H)[some, j]).sum(2) * scale
            out[some, j, :width] = x[:, :width]
    unseen = torch.arange(max_context_len, device=q.device) >= query_lengths(call)[..., None]
    return out.masked_fill_(unseen, float("-inf")).flatten(0, 1)


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`; returns (logits,)."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    arguments = vars(inputs)
    if impl == "triton":
        return lambda: (fp8_paged_mqa_logits(**arguments, schedule_meta=None, config=config),)
    if impl == "torch_fallback":
        return lambda: (torch_logits(**arguments),)
    if impl == "torch_capped":
        if (longest := int(query_lengths(inputs).max())) > CAPPED:
            raise ValueError(f"context_lens must be at most {CAPPED} for a capped context, got {longest}")
        capped = arguments | {"max_context_len": min(CAPPED, inputs.max_context_len)}
        return lambda: (torch_logits(**capped),)
    raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")


def warm_up(
    device: torch.device | str = "cuda",
    *,
    next_n: tuple[int, ...] = (1,),
    heads: int = DSV4_FLASH.index_n_heads,
    page: int = PAGE,
    maxima: tuple[bool, ...] = (False, True),
) -> None:
    """Compile and load every variant that calls with these next_n, heads and page can need, whatever B and lengths."""
    arch, sms = target(torch.device(device))
    for n in next_n:
        groups = 1 if n == 1 else -(-n // 2)
        for rows in (groups, 64, _MANY_ROWS, _MANY_ROWS + groups):
            B = rows // groups
            call = _smallest(B, n, heads, page, device)
            out = torch.empty(B * n, 256, device=device)
            for with_maxima in maxima:
                levels = torch.empty(B * n, 128, dtype=torch.int32, device=device) if with_maxima else None
                for each in launches(call, out, levels, arch=arch, sms=sms):
                    warm(*each)


def _smallest(B: int, next_n: int, heads: int, page: int, device: torch.device | str) -> Inputs:
    """A call of this kind with no keys: enough to compile for."""
    q = torch.zeros(B, next_n, heads, DIM, dtype=layouts.FP8, device=device)
    cache = layouts.allocate_index(1, page, device)
    table, lens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((B, 4), (B,)))
    return Inputs(q, cache, torch.zeros(B * next_n, heads, device=device), lens, table, page)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl != "triton":
        return {"dtype": "float32"}
    arch, sms = target(inputs.q.device)
    config = config or choose(arch).config(inputs.q.shape[1])
    return {"variant": config.name, "blocks": config.programs_per_sm * sms}


def describe(arch: str) -> list[str]:
    """What `triton` would run on an architecture, and the evidence for it."""
    choice = choose(arch)
    return [
        f"triton, {queries}: {config.name} ({choice.evidence})"
        for queries, config in (("next_n 1", choice.single), ("next_n 2 to 6", choice.several))
    ]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of every variant an architecture can meet, on CPU tensors, by name."""
    for next_n in (1, 2):
        for B, rows in ((1, "B <= 32"), (64, "B <= 64"), (_MANY_ROWS, "B > 64")):
            for maxima in (None, torch.empty(B * next_n, 128, dtype=torch.int32)):
                call = _smallest(B, next_n, DSV4_FLASH.index_n_heads, PAGE, "cpu")
                name = f"next_n {next_n}, {rows}{', maxima' if maxima is not None else ''}"
                yield name, launches(call, torch.empty(B * next_n, 256), maxima, arch=arch, sms=1)
