"""Cuts a trace into steps: by the annotations of profiler or server if there are any, else by the graph that recurs."""

import re

import numpy as np
import pandas as pd

from dsv4lab.trace.assembly import GRAPH_LAUNCH
from dsv4lab.trace.frames import Trace, matching
from dsv4lab.trace.timeline import busy_by

STEP = re.compile(r"^(?:ProfilerStep\s*#\s*\d+|(?:step|decode|iteration)\b.*)$", re.IGNORECASE)
"""Annotations that are a step: torch.profiler's, SGLang's "step[DECODE bs=32]" and what people write by hand."""


def cut(trace: Trace) -> Trace:
    """The trace with `step` filled in: 0, 1, ... by start within each rank, -1 outside.

    An event belongs to the step in which the host launched it; one whose launch is not in the trace, to the step whose
    GPU annotation it starts in.
    """
    step = np.full(len(trace.events), -1, dtype=np.int32)
    for _, rows in trace.events.groupby("rank", sort=True):
        marks = trace.marks[trace.marks["rank"] == rows["rank"].iloc[0]]
        step[rows.index] = _steps(rows, marks)
    return trace.with_events(step=step)


def _steps(events: pd.DataFrame, marks: pd.DataFrame) -> np.ndarray:
    named = marks[matching(marks["name"], STEP)]
    launched, started = events["launch_ts"].to_numpy(), events["ts"].to_numpy()
    host = named[named["kind"] == "cpu"].sort_values("ts")
    if len(host):
        host = _outermost(host)
        return _inside(np.where(launched >= 0, launched, started), host)
    device = named[named["kind"] == "gpu"].sort_values("ts")
    if len(device):  # every stream has its own, the main one the longest
        main = device.groupby("tid")["dur"].sum().idxmax()
        return _inside(started, _outermost(device[device["tid"] == main]))
    return _by_graph(events)


def _outermost(spans: pd.DataFrame) -> pd.DataFrame:
    """Without those inside another one: the same step is often annotated at several levels."""
    ends = (spans["ts"] + spans["dur"]).to_numpy()
    before = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(ends)[:-1]))
    return spans[ends > before]


def _inside(at: np.ndarray, spans: pd.DataFrame) -> np.ndarray:
    found = np.searchsorted(spans["ts"].to_numpy(), at, side="right") - 1
    ends = (spans["ts"] + spans["dur"]).to_numpy()
    return np.where((found >= 0) & (at < ends[found]), found, -1).astype(np.int32)


def _by_graph(events: pd.DataFrame) -> np.ndarray:
    """A step from each launch of the graph that has most kernels to the next; nothing if no graph recurs."""
    replayed = events[matching(events["launch"], GRAPH_LAUNCH)]
    sizes = replayed.groupby("correlation")["ts"].agg(["min", "size"])
    largest = sizes[sizes["size"] >= 0.9 * sizes["size"].max()] if len(sizes) else sizes
    starts = np.sort(largest["min"].to_numpy())
    if len(starts) < 2:
        return np.full(len(events), -1, dtype=np.int32)
    return (np.searchsorted(starts, events["ts"].to_numpy(), side="right") - 1).astype(np.int32)


def table(trace: Trace) -> pd.DataFrame:
    """A row a rank and step: events, sum_ns, busy_ns, span_ns, and whether it is `partial`.

    Partial is the first or last step of a rank with fewer than 9 in 10 of the events that its steps have at the
    median: profilers drop the first kernels of a session.
    """
    events = trace.events[trace.events["step"] >= 0]
    groups = events.assign(end=events["ts"] + events["dur"]).groupby(["rank", "step"], sort=True)
    found = groups.agg(
        events=("ts", "size"), sum_ns=("dur", "sum"), start=("ts", "min"), end=("end", "max")
    ).reset_index()
    found["busy_ns"] = busy_by(events, groups.ngroup().to_numpy(), len(found))
    found["span_ns"] = found["end"] - found["start"]
    of_rank = found.groupby("rank")
    edge = (found["step"] == of_rank["step"].transform("min")) | (found["step"] == of_rank["step"].transform("max"))
    found["partial"] = edge & (found["events"] < 0.9 * of_rank["events"].transform("median"))
    return found[["rank", "step", "events", "sum_ns", "busy_ns", "span_ns", "partial"]]
