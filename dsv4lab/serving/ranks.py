"""What traced decode steps of several ranks spend: collectives beside the cost model's, our attention beside SGLang's.

A rank that comes early waits inside the collective's kernel, so that what is counted here as communication is transfer,
start and imbalance together; the model knows the first two. Time that overlaps with other streams counts in full.
"""

import re
from dataclasses import replace

import numpy as np

from dsv4lab import comm
from dsv4lab.comm import Cost, Link
from dsv4lab.model import DSV4_FLASH
from dsv4lab.trace import Trace, TraceError, families, steps
from dsv4lab.trace.frames import matching

OURS = re.compile(r"^(split_k|gluon|combine|simt)_kernel$")
PADDED = re.compile(r"^_tiled_sparse_decode_kernel$")
"""SGLang's kernel on the call as it comes, which its launches in PyTorch that merge two caches are not part of."""
_ALL_REDUCE = re.compile(r"(?i)reduce")
_NCCL = re.compile(r"^nccl")
_TWO_SHOT = re.compile(r"(?i)2stage|two_?shot")


def account(
    trace: Trace, *, tp: int, batch: int, layers: int, link: Link
) -> tuple[dict[str, float | None], list[float]]:
    """(numbers, microseconds of every whole step of every rank): medians over these of what a step spends, in µs.

    step_us: from its first kernel to its last. collectives_us, all_reduce_us, attention_us, padded_attention_us: added
    up, None where there was none; share: of the collectives in the step. all_reduces: calls of a step. model_us: what
    the collectives of the model's first `layers` layers take by `comm`, for the kind of all-reduce that ran;
    model_share: in a step whose rest is the one measured.

    TraceError if there is no whole step.
    """
    table = steps.table(trace)
    whole = table[~table["partial"]].set_index(["rank", "step"])["span_ns"]
    if whole.empty:
        raise TraceError("no whole step in the trace")
    events, names = trace.events, trace.events["name"]
    collective = events["family"].isin(families.COMMUNICATION).to_numpy()
    reduces = collective & matching(names, _ALL_REDUCE)

    def spent(chosen: np.ndarray) -> float | None:
        if not chosen.any():
            return None
        sums = events[chosen].groupby(["rank", "step"])["dur"].sum()
        return 1e-3 * float(sums.reindex(whole.index, fill_value=0).median())

    step_us, collectives_us = 1e-3 * float(whole.median()), spent(collective)
    calls = events[reduces].groupby(["rank", "step"]).size().reindex(whole.index, fill_value=0)
    found: dict[str, float | None] = {
        "step_us": step_us,
        "collectives_us": collectives_us,
        "share": None if collectives_us is None else collectives_us / step_us,
        "all_reduce_us": spent(reduces),
        "all_reduces": float(calls.median()),
        "attention_us": spent(matching(names, OURS)),
        "padded_attention_us": spent(matching(names, PADDED)),
        "model_us": None,
        "model_share": None,
    }
    if tp > 1 and collectives_us is not None:
        model = replace(DSV4_FLASH, num_hidden_layers=layers)
        model_us = 1e6 * comm.step_s(cost(trace, reduces, tp, batch, link), batch, tp, model)
        found |= {"model_us": model_us, "model_share": model_us / (step_us - collectives_us + model_us)}
    return found, (1e-3 * whole).tolist()


def cost(trace: Trace, reduces: np.ndarray, tp: int, batch: int, link: Link) -> Cost:
    """The model's cost of an all-reduce of the kind that most of `reduces`, a mask of events, are of."""
    names = trace.events["name"][reduces]
    if matching(names, _NCCL).mean() > 0.5:
        return comm.cost(link, tp, *comm.nccl_choice(link, tp, comm.step(batch, tp)[0].nbytes))
    return comm.cost(link, tp, "two_shot" if matching(names, _TWO_SHOT).mean() > 0.5 else "one_shot")
