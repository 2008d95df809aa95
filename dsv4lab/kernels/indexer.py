"""The indexer of a decode step: paged MQA logits and the top-k behind them, from queries to slots of the paged cache.

    out[row] = the slots of the k keys with the largest logits[row] (`mqa_logits`), chosen as `topk` chooses them

The logits go through memory, where the top-k finds them in L2; a call costs one read of the row's own index keys (132
bytes each), whatever the maximum context. Implementations:

- `fused`: the logits kernel also stores the maxima of its groups of scores, so that the top-k starts from those and
  reads, of a row of any length, a few thousand scores;
- `triton`: `fp8_paged_mqa_logits`, then `topk_transform` on its own; like the above two kernels;
- `torch_fallback`, `torch_capped`: the O(max_context_len) logits and `torch.topk`; capped: to 8,192 tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lab import numerics
from dsv4lab.kernels import mqa_logits, topk
from dsv4lab.kernels.mqa_logits import CASES, TABLE, Case, config, describe, rotated_bytes
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

__all__ = [
    "CASES", "EXPERIMENT", "IMPLEMENTATIONS", "TABLE", "Case", "Inputs", "baseline", "config", "describe", "indexer",
    "judge", "make_inputs", "notes", "prepare", "reference", "rotated_bytes", "static_launches", "warm_up", "work",
]  # fmt: skip

EXPERIMENT = "indexer"
IMPLEMENTATIONS = ("torch_fallback", "torch_capped", "triton", "fused")


@dataclass
class Inputs(mqa_logits.Inputs):
    """Arguments of one `indexer` call, by its argument names; the indices are allocated by `prepare`."""

    k: int = DSV4_FLASH.index_topk


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """Those of `mqa_logits`."""
    return [Inputs(**vars(call)) for call in mqa_logits.make_inputs(case, device=device, seed=seed, sets=sets)]


def work(case: Case) -> Work:
    """One call: what the logits need to read, and the indices; that logits go through memory is not part of it."""
    logits = mqa_logits.work(case)
    queries = case.B * case.next_n
    written = 4.0 * queries * DSV4_FLASH.index_topk
    return Work(logits.flops, rotated_bytes(case) * (1 + 4 / 64 / 132) + queries * case.H * 132 + written)


def indexer(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    out_page_indices: Tensor,
    out_raw_indices: Tensor | None = None,
    *,
    logits: Tensor | None = None,
    workspace: Tensor | None = None,
    impl: str = "fused",
) -> None:
    """Writes to `out_page_indices` the slots of the keys that each query attends to.

    The arguments are those of `fp8_paged_mqa_logits` and `topk_transform`, logits being the `out` of the former; with
    logits and workspace given nothing is allocated. Raises ValueError naming the argument. No host sync.
    """
    if impl not in ("triton", "fused"):
        raise ValueError(f"impl must be triton or fused, got {impl!r}")
    fused = impl == "fused"
    rows, k = q.shape[0] * q.shape[1], out_page_indices.shape[-1]
    if workspace is None:
        shape = topk.workspace_shape(rows, max_context_len, k)
        workspace = torch.zeros(shape, dtype=torch.int32, device=q.device)
    logits = mqa_logits.fp8_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, None, max_context_len,
        out=logits, maxima=workspace if fused else None,
    )  # fmt: skip
    topk.topk_transform(
        logits, context_lens, block_table, out_page_indices, kv_cache.shape[1], out_raw_indices,
        workspace=workspace, maxima_ready=fused,
    )  # fmt: skip


def _ranked(inputs: Inputs, logits: Tensor) -> topk.Inputs:
    """The top-k of a call with these logits."""
    lengths = mqa_logits.query_lengths(inputs)
    return topk.Inputs(logits, lengths, inputs.block_table, inputs.kv_cache.shape[1], inputs.k)


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(slots [B * next_n, k],) chosen by the float64 logits."""
    return topk.reference(_ranked(inputs, *mqa_logits.reference(inputs)))


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """(slots,) chosen by logits with a bf16 product."""
    return topk.reference(_ranked(inputs, *mqa_logits.baseline(inputs)))


def judge(inputs: Inputs, outputs: tuple[Tensor], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    """The verdict on (indices,): error is the share of the float64 selection that was missed, over all rows.

    int32: slots. int64: positions as `torch.topk` gives them, those of a row's -inf tail included.
    """
    (found,) = outputs
    if found.dtype == torch.int64:
        unseen = found >= mqa_logits.query_lengths(inputs).view(-1, 1)
        found = topk.paged(_ranked(inputs, found), found.masked_fill(unseen, -1))
    missed, usually = (1 - numerics.selection_overlap(x, expected[0]).mean().item() for x in (found, usual[0]))
    allowed = numerics.tolerance(usually, floor=1e-3)
    return numerics.Check(missed, usually, allowed, missed <= allowed)


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches; returns (indices,), see `judge`."""
    arguments = {name: value for name, value in vars(inputs).items() if name != "k"}
    if impl in mqa_logits.IMPLEMENTATIONS and impl != "triton":
        logits = mqa_logits.prepare(impl, mqa_logits.Inputs(**arguments))
        return lambda: (torch.topk(scores := logits()[0], min(inputs.k, scores.shape[1]), dim=1, sorted=False).indices,)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    rows, device = inputs.q.shape[0] * inputs.q.shape[1], inputs.q.device
    out = torch.empty(rows, inputs.k, dtype=torch.int32, device=device)
    shape = topk.workspace_shape(rows, inputs.max_context_len, inputs.k)
    workspace = torch.zeros(shape, dtype=torch.int32, device=device)

    def call() -> tuple[Tensor]:
        indexer(**arguments, out_page_indices=out, workspace=workspace, impl=impl)
        return (out,)

    return call


def warm_up(device: torch.device | str = "cuda", *, next_n: tuple[int, ...] = (1,)) -> None:
    """Compile and load every variant that an indexer with these next_n can need."""
    mqa_logits.warm_up(device, next_n=next_n)
    topk.warm_up(device)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    return mqa_logits.notes("triton" if impl == "fused" else impl, inputs)


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of both halves, on CPU tensors, by name."""
    yield from mqa_logits.static_launches(arch)
    yield from topk.static_launches(arch)
