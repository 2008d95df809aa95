"""What traced decode steps of several ranks spend: collectives beside the cost model's, our attention beside SGLang's.

A rank that comes early waits inside the collective's kernel, so that a collective's time is transfer, start and waiting
together; the model knows the first two, and `parts` tells them apart. Time that overlaps with other streams counts in
full.
"""

import re
from dataclasses import replace

import numpy as np
import pandas as pd

from dsv4lab import comm
from dsv4lab.comm import Cost, Link
from dsv4lab.model import DSV4_FLASH
from dsv4lab.trace import Trace, TraceError, families, steps
from dsv4lab.trace.frames import matching

OURS = re.compile(r"^(split_k|gluon|combine|simt)_kernel$")
PADDED = re.compile(r"^_tiled_sparse_decode_kernel$")
"""SGLang's kernel on the call as it comes, which its launches in PyTorch that merge two caches are not part of."""
_ALL_REDUCE = re.compile(r"(?i)reduce")
_ALL_GATHER = re.compile(r"(?i)gather")
_NCCL = re.compile(r"^nccl")
_NCCL_KIND = re.compile(r"_(RING|TREE)_(LL128|LL|SIMPLE)")
_TWO_SHOT = re.compile(r"(?i)2stage|two_?shot")


def account(
    trace: Trace, *, tp: int, batch: int, layers: int, link: Link
) -> tuple[dict[str, float | None], list[float]]:
    """(numbers, microseconds of every whole step of every rank): medians over these of what a step spends, in µs.

    step_us: from its first kernel to its last. collectives_us, all_reduce_us, attention_us, padded_attention_us: added
    up, None where there was none; share: of the collectives in the step. all_reduces: calls of a step. model_us: what
    the collectives of the model's first `layers` layers take by `comm`, of the kinds that ran; model_share: in a step
    whose rest is the one measured.

    TraceError if there is no whole step.
    """
    whole = _whole(trace)
    events, names = trace.events, trace.events["name"]
    collective = events["family"].isin(families.COMMUNICATION).to_numpy()
    reduces = collective & matching(names, _ALL_REDUCE)

    def spent(chosen: np.ndarray) -> float | None:
        return float(_spent_us(events[chosen], whole).median()) if chosen.any() else None

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
        model_us = sum(modelled_us(trace, tp=tp, batch=batch, layers=layers, link=link).values())
        found |= {"model_us": model_us, "model_share": model_us / (step_us - collectives_us + model_us)}
    return found, (1e-3 * whole).tolist()


def attention(trace: Trace) -> pd.DataFrame:
    """Our attention and SGLang's padded call in µs: a row a rank and whole step, as `account` takes its medians over.

    Columns attention_us and padded_attention_us, 0 in a step without; TraceError if there is no whole step.
    """
    events, whole = trace.events, _whole(trace)
    kernels = {"attention_us": OURS, "padded_attention_us": PADDED}
    chosen = {name: matching(events["name"], kernel) for name, kernel in kernels.items()}
    return pd.DataFrame({name: _spent_us(events[rows], whole) for name, rows in chosen.items()})


def _whole(trace: Trace) -> pd.Series:
    """Nanoseconds of every whole step, by rank and step."""
    table = steps.table(trace)
    whole = table[~table["partial"]].set_index(["rank", "step"])["span_ns"]
    if whole.empty:
        raise TraceError("no whole step in the trace")
    return whole


def _spent_us(events: pd.DataFrame, whole: pd.Series) -> pd.Series:
    """The events' durations added up, for every one of the whole steps."""
    return 1e-3 * events.groupby(["rank", "step"])["dur"].sum().reindex(whole.index, fill_value=0)


def modelled_us(trace: Trace, *, tp: int, batch: int, layers: int, link: Link) -> dict[str, float]:
    """Microseconds of a step's all_reduce and all_gather by `comm`, each of the kind that most of the traced ones are.

    Gathers that have no kernel in the trace count as the all-reduces do.
    """
    names = trace.events.loc[trace.events["family"].isin(families.COMMUNICATION), "name"]
    reduces = names[matching(names, _ALL_REDUCE)]
    gathers = names[matching(names, _ALL_GATHER)]
    ran = {"all_reduce": reduces, "all_gather": gathers if len(gathers) else reduces}
    found = dict.fromkeys(ran, 0.0)
    for each in comm.step(batch, tp, replace(DSV4_FLASH, num_hidden_layers=layers)):
        seconds = cost(ran[each.kind], tp, each.nbytes, link).time_s(each.nbytes)
        found[each.kind] += 1e6 * each.count * comm.PARTS[each.kind] * seconds
    return found


def cost(names: pd.Series, tp: int, nbytes: int, link: Link) -> Cost:
    """The model's cost of an all-reduce of the kind that most of the kernels `names` are.

    Of NCCL's the name says algorithm and protocol; where it does not, what the model would choose for `nbytes`.
    """
    if matching(names, _NCCL).mean() > 0.5:
        told = _NCCL_KIND.search(names.mode()[0])
        protocols = {protocol.upper(): protocol for protocol in comm.PROTOCOLS}
        kind = (told[1].lower(), protocols[told[2]]) if told else comm.nccl_choice(link, tp, nbytes)
        return comm.cost(link, tp, *kind)
    return comm.cost(link, tp, "two_shot" if matching(names, _TWO_SHOT).mean() > 0.5 else "one_shot")


def parts(trace: Trace) -> pd.DataFrame:
    """What whole steps spend in collectives, in µs: a row a rank and step, as `account` takes its medians over.

    A rank waits in a collective until the last rank has begun the same: first_wait in the step's first, which ends
    what the hosts are apart; wait in the others. all_reduce and all_gather: the rest, from when all are there.

    The ranks' clocks are taken for one. TraceError where ranks differ in their collectives.
    """
    table = steps.table(trace)
    whole = table.groupby("step")["partial"].sum().eq(0)
    events = trace.events
    chosen = events["family"].isin(families.COMMUNICATION) & events["step"].isin(whole.index[whole])
    calls = events.loc[chosen, ["rank", "step", "ts", "dur", "name"]].sort_values("ts")
    calls["call"] = calls.groupby(["rank", "step"]).cumcount()
    same = calls.groupby(["step", "call"])
    if calls.empty or same["rank"].nunique().ne(calls["rank"].nunique()).any():
        raise TraceError("the ranks of the trace have no collectives, or not the same ones")
    waits = (same["ts"].transform("max") - calls["ts"]).clip(upper=calls["dur"])
    rest, first = calls["dur"] - waits, calls["call"] == 0
    reduces = matching(calls["name"], _ALL_REDUCE)
    columns = {
        "first_wait": waits.where(first, 0),
        "wait": waits.where(~first, 0),
        "all_reduce": rest.where(reduces, 0),
        "all_gather": rest.where(~reduces, 0),
    }
    return 1e-3 * pd.DataFrame(columns).groupby([calls["rank"], calls["step"]]).sum()
