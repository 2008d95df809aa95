"""Findings that a trace bears out, each with its evidence and a sentence of advice, the costliest first.

The rules read shapes, dtypes, grids, durations and what is around a launch; a kernel's name can at most acquit it. Four
need the shapes of ops: an eager trace recorded with shapes, or a replay joined with one (`attribution.joined`).
"""

import re
from collections.abc import Iterator
from math import prod

import numpy as np
import pandas as pd

from dsv4lab.trace import families, timeline
from dsv4lab.trace.case import EXAMPLES, WORTH, Case, Suspect, many
from dsv4lab.trace.frames import Trace, matching, numbers
from dsv4lab.trace.operands import INTEGERS, Call, Operand

EXPOSED = 0.05  # of the busy time
BIG = 2**20  # elements
FAR = 8  # times the live length
LEAST = 512  # positions; shorter dimensions are heads
PAGES = (16, 32, 64, 128, 256)  # positions in one, where a length is recognised by them
RATIOS = (1, 2, 4, 8, 16, 32, 64, 128)  # of compressed to real positions
TINY_NS, MANY = 10_000, 1_000  # launches
LONG_NS, TIMES_OWN = 20_000, 10  # a kernel that takes longer than both does more than pass over its own rows once
WIDEST_HEAD = 256  # no attention with heads of their own has wider ones: beyond, heads share a latent
LOOK_BACK = 200  # launches
NEIGHBOURS = 4  # launches
BLIND = 0.5  # of the time unseen, a rule has not looked at the trace
GEMMS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum")
COPIES = ("copy", "_to_copy", "clone", "contiguous")
_TENSOR_CORES = re.compile(r"tensorop|tf32|s1688|wgmma|_mma", re.IGNORECASE)
_OFF_GPU = re.compile(r"HtoD|DtoH|Host|Pageable|Pinned")


def find(trace: Trace, max_context: int | None = None, live: int | None = None) -> list[Suspect]:
    """The suspects of a trace with families, costliest first."""
    case = Case(trace, max_context, live)
    found = [suspect for rule in RULES for suspect in rule(case)]
    return sorted(found, key=lambda suspect: -suspect.ns)


def unseen(trace: Trace) -> float:
    """The part of the GPU time that the rules of `NEED_SHAPES` cannot look at.

    That is what graph replays launched, as far as it was not joined with ops; all of it if the trace has no shapes.
    """
    if (trace.events["shapes"] == "").all():
        return 1.0
    return float(trace.events.loc[trace.events["op"].isna(), "dur"].sum() / max(1, trace.events["dur"].sum()))


def max_context(case: Case) -> Iterator[Suspect]:
    """Tensors with a row for each position there could be, where each request has only so many."""
    tensors = {operand for call in case.calls for operand in call.operands if len(operand.dims) >= 2}
    for length, widths in _lengths(case, tensors):
        moved = np.array([_largest(call, widths) for call in case.calls])[case.call]
        rows = case.kernel & (moved > 0) & (case.dur >= moved / case.bytes_per_ns / 2)  # long enough to touch it all
        if case.worth(rows):
            factor = f", {length / case.live:,.0f} times what they have" if case.live else ""
            yield case.suspect(
                "max_context",
                rows,
                f"{many(rows.sum(), 'kernel')} over {length:,} positions of every request{factor}",
                "Let the cost follow each request's own length, read on the device; a cap on the context hides it.",
            )


def _largest(call: Call, widths: set[int]) -> int:
    big = (o.bytes for o in call.operands if len(o.dims) >= 2 and o.dims[1] in widths and o.elements >= BIG)
    return max(big, default=0)


def _lengths(case: Case, tensors: set[Operand]) -> Iterator[tuple[int, set[int]]]:
    """Lengths that are the longest possible one, each with the second dimensions that show it.

    Such a length is the given maximum, compressed and rounded up to pages or not; far above the given live length, in a
    tensor of as many rows as most have (weights have others); or known by its pages: one tensor is [B, P, W] or an
    integer [B, P], another [B, P * page, ...] of the same batch.
    """
    by_batch: dict[int, dict[int, list[Operand]]] = {}
    for tensor in tensors:
        by_batch.setdefault(tensor.dims[0], {}).setdefault(tensor.dims[1], []).append(tensor)
    most = max(by_batch, key=lambda batch: sum(map(len, by_batch[batch].values())), default=None)
    lengths: dict[int, set[int]] = {}
    for batch, widths in by_batch.items():
        for length, found in widths.items():
            if length < LEAST or max(tensor.elements for tensor in found) < BIG:
                continue
            deep = [tensor for tensor in found if len(tensor.dims) > 2]
            pages = {length // page for page in PAGES if length % page == 0 and length // page in widths}
            pages = {count for count in pages if any(_paged(table, deep) for table in widths[count])}
            allowed = case.max_context and any(0 <= length - case.max_context / r <= PAGES[-1] for r in RATIOS)
            if pages or allowed or (case.live and deep and batch == most and length >= FAR * case.live):
                lengths.setdefault(length, set()).update({length}, pages)
    counts = {count for length, widths in lengths.items() for count in widths - {length}}
    yield from sorted(((length, widths) for length, widths in lengths.items() if length not in counts), reverse=True)


def _paged(table: Operand, deep: list[Operand]) -> bool:
    """Whether `table` holds the pages of one of the tensors: its page ids, or the same elements page by page."""
    if len(table.dims) == 2:
        return bool(deep) and table.dtype in INTEGERS
    return any(table.elements == tensor.elements for tensor in deep)


def forced_fp32(case: Case) -> Iterator[Suspect]:
    """GEMMs in FP32 on CUDA cores whose inputs had been narrower: a cast before them has the elements of one."""
    rows = case.rows(_is_fp32_gemm) & case.kernel & ~matching(case.events["name"], _TENSOR_CORES)
    forced = {}
    for call in np.unique(case.call[rows]):
        first = int(np.flatnonzero(rows & (case.call == call))[0])
        sizes = {operand.elements for operand in case.calls[call].operands if len(operand.dims) >= 2}
        before = (case.calls[each] for each in reversed(case.call[max(0, first - LOOK_BACK) : first]))
        if cast := next((each for each in before if _widens(each, sizes)), None):
            forced[call] = cast
    rows &= np.isin(case.call, list(forced))
    if case.worth(rows):
        evidence = [f"{line}, after {forced[call]}" for call, line in case.by_call(rows).items()]
        yield case.suspect(
            "forced_fp32",
            rows,
            f"{many(rows.sum(), 'kernel')} in FP32 and without tensor cores, on what was narrower before a cast",
            "Multiply in bf16 with FP32 accumulation; where a selection depends on it, check that it stays the same.",
            evidence,
        )


def _is_fp32_gemm(call: Call) -> bool:
    matrices = [operand for operand in call.operands if len(operand.dims) >= 2]
    return call.within(*GEMMS) and len(matrices) >= 2 and all(operand.dtype == "float" for operand in matrices)


def _widens(call: Call, sizes: set[int]) -> bool:
    """Whether the call copies from a narrower floating type to FP32, as many elements as one of `sizes`."""
    into, *rest = call.operands or (None,)
    return (
        call.within(*COPIES)
        and into is not None
        and into.elements in sizes
        and into.dtype == "float"
        and any(operand.narrow and operand.elements == into.elements for operand in rest)
    )


def per_head_grid(case: Case) -> Iterator[Suspect]:
    """Attention with one block per (row, head) over KV that the heads share, so that each block reads it again."""
    if not case.kernel.any():
        return
    grids = numbers(case.events["grid"])
    kernels = case.events.assign(_blocks=grids.prod(axis=1))[case.kernel & (case.dur >= LONG_NS)]
    for _, group in kernels.groupby(["name", "grid"], observed=True):
        if group["dur"].sum() < WORTH * case.total:
            continue
        rows = np.zeros(len(case.events), bool)
        rows[group.index] = True
        heads = _heads(case, group.index[len(group) // 2], int(group["_blocks"].iloc[0]))
        if heads is None or group["dur"].mean() < TIMES_OWN * 4 * heads.elements / case.bytes_per_ns:
            continue
        batch, count = heads.dims[0], heads.dims[-2]
        least, mean, longest = (group["dur"].agg(each) / 1000 for each in ("min", "mean", "max"))
        yield case.suspect(
            "per_head_grid",
            rows,
            f"a block for each of {batch} rows x {count} heads: the KV that the heads share is read {count} times",
            "Give a block many heads and gather each KV tile once for all of them, with tensor cores; split long rows.",
            [
                f"grid {group['grid'].iloc[0]} is rows x heads of {heads}, {many(len(group), 'launch')}",
                f"{mean:,.1f} µs a launch, {least:,.1f} to {longest:,.1f}; reading and writing {heads} in bf16 once "
                f"takes {4 * heads.elements / case.bytes_per_ns / 1000:,.1f} µs",
            ],
        )


def _heads(case: Case, row: int, blocks: int) -> Operand | None:
    """The tensor of [rows, heads, wide] that a grid has a block for each row and head of, if its heads share their KV.

    Taken from the launching op, where its other operands show whose KV it is; else from the ops launched just before
    and after, where only a width that no heads of their own have shows it.
    """
    own = case.calls[case.call[row]].operands
    if query := next((operand for operand in own if _has_a_block_a_head(operand, blocks)), None):
        keys = [
            each for each in own if len(each.dims) >= 3 and each.dims[-1] >= 64 and each.dims[:-1] != query.dims[:-1]
        ]
        fewer = any(2 * each.dims[-2] <= query.dims[-2] for each in keys)
        return query if fewer or (not keys and query.dims[-1] > WIDEST_HEAD) else None
    near = case.call[max(0, row - NEIGHBOURS) : row + NEIGHBOURS + 1]
    around = (operand for call in near for operand in case.calls[call].operands)
    return next((each for each in around if _has_a_block_a_head(each, blocks) and each.dims[-1] > WIDEST_HEAD), None)


def _has_a_block_a_head(tensor: Operand, blocks: int) -> bool:
    dims = tensor.dims
    return len(dims) >= 3 and prod(dims[:-1]) == blocks and dims[-2] >= 4 and dims[-1] >= 64


def needless_copies(case: Case) -> Iterator[Suspect]:
    """Copies on the GPU that change nothing but layout or dtype."""
    rows = case.rows(lambda call: call.within(*COPIES) and _moved(call) > 0)
    rows &= ~matching(case.events["name"], _OFF_GPU)
    if not case.worth(rows):
        return
    moved = np.array([_moved(call) for call in case.calls])[case.call][rows].sum()
    casts = case.rows(lambda call: len({operand.dtype for operand in call.operands[:2]}) > 1) & rows
    yield case.suspect(
        "needless_copies",
        rows,
        f"{many(rows.sum(), 'copy')} of {moved / 1e6:,.1f} MB read and written, {casts.sum():,} to another dtype",
        "Let the next kernel take the strides or the dtype as they are, or write them so in the kernel before.",
    )


def _moved(call: Call) -> int:
    """Bytes that a copy reads and writes; 0 where its operands are not known."""
    pair = [operand for operand in call.operands[:2] if operand.elements > 1]
    return sum(operand.bytes for operand in pair) if len(pair) == 2 else 0


def idle_sms(case: Case) -> Iterator[Suspect]:
    """Kernels with fewer blocks than there are SMs."""
    if not case.sms or not case.kernel.any():
        return
    blocks = numbers(case.events["grid"]).prod(axis=1)
    rows = case.kernel & (blocks > 0) & (blocks < case.sms) & (case.dur >= TINY_NS)
    rows &= ~case.events["family"].isin(families.COMMUNICATION).to_numpy()
    if not case.worth(rows):
        return
    groups = case.events[rows].groupby(["name", "grid"], observed=True)["dur"].agg(["sum", "size"])
    lines = [
        f"grid {grid}: {many(cost['size'], 'launch')}, {cost['sum'] / 1000:,.0f} µs, {name[:60]}"
        for (name, grid), cost in groups.sort_values("sum", ascending=False).head(EXAMPLES).iterrows()
    ]
    yield case.suspect(
        "idle_sms",
        rows,
        f"{many(rows.sum(), 'kernel')} of 10 µs and more with fewer blocks than the {case.sms} SMs",
        "Split the work further (over K, over positions), take smaller tiles, or run it beside something else.",
        lines,
    )


def tiny_launches(case: Case) -> Iterator[Suspect]:
    """Thousands of short kernels that the host launches one by one."""
    rows = case.kernel & ~case.replayed & (case.dur < TINY_NS) & (case.events["launch"] != "").to_numpy()
    if rows.sum() < MANY:
        return
    gaps = timeline.gaps(case.trace)
    late = int(gaps.loc[gaps["cause"] == timeline.CAUSES[0], "dur"].sum())
    yield case.suspect(
        "tiny_launches",
        rows,
        f"{many(rows.sum(), 'kernel')} of under 10 µs launched one by one",
        "Replay the step from a CUDA graph, or fuse what follows each other.",
        [f"{case.dur[rows].mean() / 1000:.1f} µs at the mean; the GPU idled {late / 1000:,.0f} µs for a late launch"],
    )


def exposed_communication(case: Case) -> Iterator[Suspect]:
    """Collectives that nothing runs beside."""
    events = case.events
    rows = (events["family"].isin(families.COMMUNICATION) | (events["collective"] != "")).to_numpy()
    exposed, busy = timeline.alone(events, rows), timeline.busy(events)
    if exposed < EXPOSED * max(1, busy):
        return
    found = case.suspect(
        "exposed_communication",
        rows,
        f"collectives run {exposed / 1000:,.0f} µs with nothing beside them, {exposed / busy:.0%} of the busy time",
        "Overlap them with compute, fuse them with the kernel before or after, or try other protocols and algorithms.",
        [f"{many(rows.sum(), 'kernel')}, {timeline.busy(events[rows]) / 1000:,.0f} µs in all"],
    )
    yield Suspect(**vars(found) | {"ns": exposed, "share": exposed / case.total})


NEED_SHAPES = (max_context, forced_fp32, per_head_grid, needless_copies)
RULES = (*NEED_SHAPES, idle_sms, tiny_launches, exposed_communication)


def table(found: list[Suspect]) -> pd.DataFrame:
    """A row a suspect, with its fields as columns."""
    columns = ["rule", "finding", "ns", "share", "evidence", "advice", "where"]
    return pd.DataFrame([vars(suspect) for suspect in found], columns=columns)
