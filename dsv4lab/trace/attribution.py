"""Ops and shapes for what a graph replay launched: joined from a trace of the same step that has them.

A replay has one launch call for hundreds of kernels, so that its trace knows no ops. Another trace does: of the same
step run eagerly, or of the capture itself, which launches every kernel once and runs none.
"""

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pandas as pd

from dsv4lab.trace.assembly import GRAPH_LAUNCH, OF_LAUNCH
from dsv4lab.trace.frames import Trace, matching, text_column

_BEGIN = re.compile(r"begincapture", re.IGNORECASE)
_KERNEL_LAUNCH = re.compile(r"(?<!graph)launch(?!host)", re.IGNORECASE)
_IDENTITY = ("name", "grid", "block")


def joined(trace: Trace, other: Trace) -> Trace:
    """`trace` with the ops, shapes, dtypes and stacks of its replayed kernels taken from `other`.

    From an eager trace, kernels are matched by name, grid and block: where these were always launched by one op with
    one set of shapes, or where they come equally often in the replay and in a step of `other`, in order. From the trace
    of a capture, launches and kernels are matched in order, if a capture has as many as the graph. What cannot be
    matched stays not attributable; meta["joined"] says how many of how many were.

    ValueError if nothing in `other` can be matched.
    """
    replayed = matching(trace.events["launch"], GRAPH_LAUNCH) & (trace.events["kind"] == "kernel").to_numpy()
    if not replayed.any():
        raise ValueError("trace has no kernels of a graph replay to join")
    eager = _one_step(other.events[(other.events["kind"] == "kernel") & other.events["op"].notna()])
    has_ops = (eager["op"] != "").any()
    found: dict[int, Any] = {}
    for _, rows in trace.events[replayed].groupby(["rank", "correlation"], sort=False):
        found |= _by_identity(rows, eager) if has_ops else _by_order(rows, other.launches)
    if not found:
        raise ValueError("capture has neither kernels nor a series of launches that match a replayed graph")
    columns = {name: trace.events[name].astype(object).tolist() for name in OF_LAUNCH}
    for row, source in found.items():
        for name in OF_LAUNCH:
            columns[name][row] = getattr(source, name)
    texts = {name: text_column([None if pd.isna(v) else v for v in values]) for name, values in columns.items()}
    meta = trace.meta | {"joined": [len(found), int(replayed.sum())]}
    return replace(trace, events=trace.events.assign(**texts), meta=meta)


def _one_step(events: pd.DataFrame) -> pd.DataFrame:
    """The fullest step of a trace, or all of it if it has none, in the order of launches."""
    inside = events[events["step"] >= 0]
    if len(inside):
        events = events[events["step"] == inside["step"].value_counts().idxmax()]
    return events.sort_values("launch_ts", kind="stable")


def _by_identity(rows: pd.DataFrame, eager: pd.DataFrame) -> dict[int, Any]:
    known = defaultdict(list)
    for source in eager[[*_IDENTITY, *OF_LAUNCH]].itertuples(index=False):
        known[source.name, source.grid, source.block].append(source)
    found = {}
    for identity, places in rows.groupby(list(_IDENTITY), observed=True, sort=False).groups.items():
        sources = known[identity]
        if len({source[len(_IDENTITY) :] for source in sources}) == 1:
            found |= dict.fromkeys(places, sources[0])
        elif len(sources) == len(places):
            found |= dict(zip(places, sources, strict=True))
    return found


def _by_order(rows: pd.DataFrame, launches: pd.DataFrame | None) -> dict[int, Any]:
    if launches is None or rows["stream"].nunique() > 1:  # side by side, kernels need not start in order
        return {}
    capture = matching(launches["name"], _BEGIN).cumsum()
    kernels = matching(launches["name"], _KERNEL_LAUNCH)
    for _, calls in launches[kernels].groupby(capture[kernels]):
        if len(calls) == len(rows):
            return dict(zip(rows.index, calls[list(OF_LAUNCH)].itertuples(index=False), strict=True))
    return {}
