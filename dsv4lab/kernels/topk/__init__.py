"""The indexer's top-k: the positions of the k largest scores of each row, straight to slots of the paged cache.

    positions = of the k largest of scores[row, :seq_lens[row]], equal ones by position; all if there are k or fewer
    out[row]  = page_tables[row, position // page_size] * page_size + position % page_size, ascending, then -1

Exact and deterministic: bitwise the same in every run, every tensor-parallel rank and every graph replay. One launch: a
row costs one read of its own scores and 33% more for group maxima, then a walk down the maxima by one program; rows of
k or fewer scores are not read. Nothing touches the width past a row's end, but for what lies with its last score in 16
bytes. NaN ranks below -inf and -0.0 equals 0.0. It takes the arguments of SGLang's `topk_transform_512`, with k up to
2048; it replaces SGLang's CUDA kernels there and, on sm_120, `torch.topk`, which reads the whole width.

Implementations: `triton`; `torch`: `torch.topk` alone, on rows whose tail holds -inf, without the page mapping.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsv4lab.hardware import EARLY_LAUNCH
from dsv4lab.kernels.launch import INTERPRETED, launch, target, warm
from dsv4lab.kernels.rows import length_arguments, maxima_ints
from dsv4lab.kernels.topk import checks
from dsv4lab.kernels.topk.cases import (
    CASES,
    EXPERIMENT,
    PAGE,
    Case,
    Inputs,
    baseline,
    config,
    judge,
    make_inputs,
    paged,
    reference,
    rotated_bytes,
    selection,
    unpaged,
    work,
)
from dsv4lab.kernels.topk.plans import MAX_K, SWEEP, TABLE, Config, choose, list_length
from dsv4lab.kernels.topk.tiles import topk_kernel
from dsv4lab.model import DSV4_FLASH

__all__ = [
    "CANDIDATES", "CASES", "EXPERIMENT", "IMPLEMENTATIONS", "TABLE", "Case", "Config", "Inputs", "baseline", "config",
    "describe", "judge", "launches", "make_inputs", "notes", "paged", "prepare", "reference", "rotated_bytes",
    "selection", "static_launches", "topk_transform", "unpaged", "warm_up", "work", "workspace_shape",
]  # fmt: skip

IMPLEMENTATIONS = ("torch", "triton")
ARRIVALS = 4
"""int32 at the end of a workspace row: the programs that have stored their maxima, and padding to 16 bytes."""
CANDIDATES = {f"triton_{c.name}": ("triton", c) for c in SWEEP}


def workspace_shape(rows: int, width: int, k: int) -> tuple[int, int]:
    """Shape of the int32 workspace for scores [rows, width]: a row's maxima, a list of groups, a count of arrivals."""
    return rows, maxima_ints(width) + list_length(k) + ARRIVALS


def launches(
    call: Inputs,
    out: Tensor,
    raw: Tensor | None,
    workspace: Tensor,
    *,
    maxima_ready: bool = False,
    arch: str,
    sms: int,
    config: Config | None = None,
) -> list[tuple]:
    """[(kernel, grid, arguments)] of one call, in order; nothing is launched."""
    c = config or choose(arch).config
    (rows, width), scores = call.scores.shape, call.scores
    next_n = rows // call.page_tables.shape[0]
    length, aligned = list_length(call.k), scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
    programs = 1 if maxima_ready else max(c.programs_per_sm * sms // rows, 1)
    early = c.early and arch in EARLY_LAUNCH and not INTERPRETED
    warps = min(c.num_warps * length // 1024, 16)
    arguments = dict(
        scores=scores, stride=scores.stride(0) // (4 if aligned else 1),
        maxima=workspace, maxima_stride=workspace.stride(0) // 4, units=-(-width // 256),
        arrivals=workspace.shape[1] - ARRIVALS,
        **length_arguments(call.seq_lens.view(call.page_tables.shape[0], -1), next_n),
        limit=min(width, call.page_tables.shape[1] * call.page_size),
        table=call.page_tables, table_stride=call.page_tables.stride(0), out=out, out_stride=out.stride(0),
        raw=out if raw is None else raw, raw_stride=0 if raw is None else raw.stride(0), k=call.k,
        LIST=length, BLOCK=c.block, STAGES=c.num_stages, READY=maxima_ready, PAGE=call.page_size, RAW=raw is not None,
        ALIGNED=aligned, THREADS=32 * warps, EARLY=early, num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return [(topk_kernel, (rows, programs), arguments)]


def topk_transform(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    maxima_ready: bool = False,
    config: Config | None = None,
) -> None:
    """Writes the slots of each row's k largest scores to `out_page_indices`, and their positions to `out_raw_indices`.

    scores: fp32 [rows, width] with a dense last dimension and any row stride.
    page_tables: int32 [B, width / page_size or more] with a dense last dimension; rows = B * next_n, next_n 1 or more.
    seq_lens: int32 [rows], or as `fp8_paged_mqa_logits` takes them: [B], [B, 1] or [B, next_n]. Clamped on the device
      to 0..width and to the page table. page_size: a power of two.
    out_page_indices, out_raw_indices: int32 [rows, k], k 1 to 2048, with a dense last dimension.
    workspace: int32, at least `workspace_shape(rows, width, k)`; allocated if absent. Before its first use the last
      `ARRIVALS` columns must be 0, and every call leaves them so; the rest may hold anything.
    maxima_ready: the workspace already holds the maxima of the scores, as `fp8_paged_mqa_logits` stores them.

    Raises ValueError naming the argument and what it was. No host sync.
    """
    call = Inputs(scores, seq_lens, page_tables, page_size, out_page_indices.shape[-1])
    checks.check_call(call, out_page_indices, out_raw_indices)
    rows, ints = workspace_shape(*scores.shape, call.k)
    if workspace is None:
        if maxima_ready:
            raise ValueError("maxima_ready needs the workspace that holds them, got workspace=None")
        workspace = torch.zeros(rows, ints, dtype=torch.int32, device=scores.device)
    checks.check_workspace(workspace, rows, ints, scores.device)
    if rows:
        arch, sms = target(scores.device)
        buffers = out_page_indices, out_raw_indices, workspace
        for each in launches(call, *buffers, maxima_ready=maxima_ready, arch=arch, sms=sms, config=config):
            launch(*each)


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`; see `judge` for what it returns."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl == "torch":
        unseen = torch.arange(inputs.scores.shape[1], device=inputs.scores.device) >= inputs.seq_lens.view(-1, 1)
        scores = inputs.scores.masked_fill(unseen, float("-inf"))
        k = min(inputs.k, scores.shape[1])
        return lambda: (torch.topk(scores, k, dim=1, sorted=False).indices,)
    if impl != "triton":
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    rows = len(inputs.scores)
    out = torch.empty(rows, inputs.k, dtype=torch.int32, device=inputs.scores.device)
    shape = workspace_shape(*inputs.scores.shape, inputs.k)
    workspace = torch.zeros(shape, dtype=torch.int32, device=inputs.scores.device)

    arguments = dict(
        scores=inputs.scores, seq_lens=inputs.seq_lens, page_tables=inputs.page_tables, out_page_indices=out,
        page_size=inputs.page_size, workspace=workspace, config=config,
    )  # fmt: skip
    return lambda: (topk_transform(**arguments), out)[1:]


def _smallest(k: int, page: int, aligned: bool, device: torch.device | str) -> Inputs:
    """A call of this kind with one empty row: enough to compile for."""
    scores = torch.zeros(2, 256 if aligned else 257, device=device)
    table, lens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((2, 8), (2,)))
    return Inputs(scores, lens, table, page, k)


def _variants(ks: tuple[int, ...], page: int, device: torch.device | str) -> Iterator[tuple[str, tuple, bool]]:
    for k in ks:
        for aligned in (True, False):
            for raw in (False, True):
                for ready in (False, True):
                    call = _smallest(k, page, aligned, device)
                    out = torch.empty(2, k, dtype=torch.int32, device=device)
                    workspace = torch.zeros(workspace_shape(*call.scores.shape, k), dtype=torch.int32, device=device)
                    kinds = f"k <= {list_length(k)}", not aligned and "unaligned", raw and "raw"
                    name = ", ".join(filter(None, (*kinds, ready and "maxima ready")))
                    yield name, (call, out, out if raw else None, workspace), ready


def warm_up(
    device: torch.device | str = "cuda", *, ks: tuple[int, ...] = (DSV4_FLASH.index_topk,), page_size: int = PAGE
) -> None:
    """Compile and load every variant that calls with these k and this page size can need, whatever rows and lengths."""
    arch, sms = target(torch.device(device))
    for _, variant, ready in _variants(ks, page_size, device):
        for each in launches(*variant, maxima_ready=ready, arch=arch, sms=sms):
            warm(*each)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl != "triton":
        return {"mapped": False}
    config = config or choose(target(inputs.scores.device)[0]).config
    return {"variant": config.name, "mapped": True}


def describe(arch: str) -> list[str]:
    """What `triton` would run on an architecture, and the evidence for it."""
    choice = choose(arch)
    return [f"triton, any shape: {choice.config.name} ({choice.evidence})"]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of every variant an architecture can meet, on CPU tensors, by name."""
    for name, variant, ready in _variants((DSV4_FLASH.index_topk, MAX_K), PAGE, "cpu"):
        yield name, launches(*variant, maxima_ready=ready, arch=arch, sms=1)
