"""From the tables of a trace file to a `Trace`: unsound times dropped, each kernel joined with what launched it."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from dsv4lab.files import without_folders
from dsv4lab.trace.frames import (
    UNKNOWN,
    Codes,
    Trace,
    concat,
    constant,
    events_frame,
    marks_frame,
    matching,
    text_column,
)

UNREADABLE = np.iinfo(np.int64).min
"""A time that is no number."""

GRAPH_LAUNCH = re.compile(r"graph[_ ]?launch", re.IGNORECASE)
UNSEEN_GRAPH = "graph launch outside the trace"
OF_LAUNCH = ("op", "parents", "shapes", "dtypes", "strides", "stack")
_LAUNCH = re.compile(r"launch|memcpy|memset|begincapture", re.IGNORECASE)
_SYNC = re.compile(r"synchronize", re.IGNORECASE)
_GPU = {"kernel": "kernel", "graph": "kernel", "memcpy": "memcpy", "memset": "memset"}
_MINUTE = 60_000_000_000  # ns
DEPTH = 24
"""How many ops or Python frames around a call are kept, innermost first."""
_NOISE = re.compile(r"<built-in|^nn\.Module|^torch/|/torch/|^contextlib\.py|^threading\.py|^<frozen")


def assembled(frames: dict[str, pd.DataFrame], meta: dict[str, Any], lost: Counter[str]) -> Trace:
    """One file's trace.

    Args:
        frames: by kind (kernel, graph, memcpy, memset, launch, op, python, cpu, gpu), those there are, with ts and dur
            in ns and the columns that the format gives; text dictionary-encoded. A graph is one as a whole, and counts
            as a kernel.
        meta: what the file says of itself.
        lost: counts, added to.
    """
    frames = {kind: _sound(frame, kind in _GPU, lost) for kind, frame in frames.items()}
    frames = {kind: frame for kind, frame in frames.items() if len(frame)}
    latest = max((int((f["ts"] + f["dur"]).max()) for kind, f in frames.items() if kind not in _GPU), default=None)
    gpu = [_gpu(kind, frames[each], meta) for each, kind in _GPU.items() if each in frames]
    events = concat(gpu) if gpu else events_frame({}, 0)
    events = events.iloc[np.argsort(events["ts"].to_numpy(), kind="stable")].reset_index(drop=True)
    events = _cut(events, latest, lost)
    calls = frames.get("launch")
    calls = None if calls is None else calls[matching(calls["name"], _LAUNCH)]
    launches = None if calls is None or calls.empty else _launches(calls, frames.get("op"), frames.get("python"))
    return Trace(_launched(events, launches), _marks(frames, meta), meta, +lost, launches)


def _sound(frame: pd.DataFrame, on_gpu: bool, lost: Counter[str]) -> pd.DataFrame:
    """Without the events whose times say nothing."""
    ts, dur = frame["ts"].to_numpy(), frame["dur"].to_numpy()
    unreadable = (ts == UNREADABLE) | (dur == UNREADABLE)
    faults = {f"{'GPU' if on_gpu else 'CPU'} events without a readable time": unreadable}
    if on_gpu:
        faults["GPU events of negative duration"] = (dur < 0) & ~unreadable
        faults["GPU events with start and duration 0"] = (ts == 0) & (dur == 0)
    for fault, rows in faults.items():
        lost[fault] += int(rows.sum())
    bad = np.logical_or.reduce(list(faults.values()))
    return frame[~bad] if bad.any() else frame


def _gpu(kind: str, frame: pd.DataFrame, meta: dict[str, Any]) -> pd.DataFrame:
    columns = {name: _used(frame[name].array) for name in frame}
    columns |= {"kind": constant(kind, len(frame)), "rank": np.full(len(frame), int(meta.get("rank") or 0))}
    return events_frame(columns, len(frame))


def _used(values: pd.api.extensions.ExtensionArray) -> pd.api.extensions.ExtensionArray:
    return values.remove_unused_categories() if isinstance(values, pd.Categorical) else values


def _cut(events: pd.DataFrame, latest: int | None, lost: Counter[str]) -> pd.DataFrame:
    """With durations cut that cannot be.

    A stream runs its kernels in order and, outside of graphs, at most two at once: one that still runs when the second
    after it starts has its end at the start of the next. One that ends more than a minute after everything else ends
    with it.
    """
    stream = events.groupby(["device", "stream"], sort=False)["ts"]
    following, second = stream.shift(-1), stream.shift(-2)
    ts, dur = events["ts"], events["dur"]
    alone = ~events["correlation"].duplicated(keep=False) | (events["correlation"] < 0)
    overlong = alone & (ts + dur > second)
    dur = dur.mask(overlong, (following - ts).fillna(0).astype(np.int64))
    if latest is not None and len(events):
        end = max(latest, int(ts.max()))
        beyond = ts + dur > end + _MINUTE
        dur = dur.mask(beyond, end - ts)
        overlong |= beyond
    lost["GPU events cut short that ran past others of their stream or past the trace"] += int(overlong.sum())
    return events.assign(dur=dur) if overlong.any() else events


def _launches(calls: pd.DataFrame, ops: pd.DataFrame | None, python: pd.DataFrame | None) -> pd.DataFrame:
    """The calls that launch work, in order, with the op and the Python frames around each."""
    calls = calls.sort_values("ts", kind="stable", ignore_index=True)
    columns: dict[str, Any] = {name: constant("", len(calls)) for name in OF_LAUNCH}
    if ops is not None:
        spans = _Spans(ops)
        inside = spans.around(calls)
        of_op = {name: name for name in ("stack", "shapes", "dtypes", "strides") if name in ops} | {"op": "name"}
        columns |= {ours: _picked(spans.frame[theirs], inside) for ours, theirs in of_op.items()}
        columns["parents"] = spans.chains(inside, str, skip=1)
    if python is not None:
        spans = _Spans(python)
        columns["stack"] = spans.chains(spans.around(calls), _source_line)
    return calls.assign(**columns)


class _Spans:
    """Spans of time that nest within each thread, sorted so that each comes after those around it."""

    def __init__(self, frame: pd.DataFrame) -> None:
        order = np.lexsort((-frame["dur"], frame["ts"], frame["tid"]))
        self.frame = frame.iloc[order].reset_index(drop=True)
        self._ends = (self.frame["ts"] + self.frame["dur"]).to_numpy()
        self._parents = self._find_parents()

    def _find_parents(self) -> np.ndarray:
        parents, around = [], []
        last = None
        columns = (self.frame["tid"].tolist(), self.frame["ts"].tolist(), self._ends.tolist())
        for i, (tid, ts, end) in enumerate(zip(*columns, strict=True)):
            if tid != last:
                around, last = [], tid
            while around and around[-1][0] <= ts and around[-1][0] < end:
                around.pop()
            parents.append(around[-1][1] if around else -1)
            around.append((end, i))
        return np.array(parents, dtype=np.int64)

    def around(self, points: pd.DataFrame) -> np.ndarray:
        """For each point the innermost span that it starts in, as a row of `frame`; -1 for none."""
        inside = np.full(len(points), -1)
        threads = self.frame["tid"].to_numpy()
        for tid, rows in points.groupby("tid", sort=False).indices.items():
            first, end = np.searchsorted(threads, [tid, tid + 1])
            ts = points["ts"].to_numpy()[rows]
            at = first + np.searchsorted(self.frame["ts"].to_numpy()[first:end], ts, side="right") - 1
            at[at < first] = -1
            while (over := (at >= 0) & (self._ends[at] <= ts)).any():
                at[over] = self._parents[at[over]]
            inside[rows] = at
        return inside

    def chains(self, inside: np.ndarray, label: Callable[[str], str], skip: int = 0) -> pd.Categorical:
        """The names from each span outwards, " < " between; `label` shortens a name, or leaves it out by "" """
        names = self.frame["name"].cat.categories.map(label)
        codes = self.frame["name"].cat.codes.to_numpy()
        chain_of: dict[int, str] = {-1: ""}
        for row in np.unique(inside[inside >= 0]).tolist():
            chain, at, left = [], row, skip
            while at >= 0 and len(chain) < DEPTH:
                if left:
                    left -= 1
                elif name := names[codes[at]]:
                    chain.append(name)
                at = self._parents[at]
            chain_of[row] = " < ".join(chain)
        return text_column([chain_of[row] for row in inside.tolist()])


def _source_line(frame: str) -> str:
    """A Python frame as "package/module.py(12): function"; "" for what says nothing: torch's own, builtins."""
    if _NOISE.search(frame):
        return ""
    return without_folders(frame.rpartition("site-packages/")[2])


def _picked(column: pd.Series, rows: np.ndarray) -> pd.Categorical:
    """The text at each row; empty where that is -1."""
    texts = Codes(column.cat.categories)
    nothing = texts[""]
    codes = np.append(column.cat.codes.to_numpy(), nothing)[rows].astype(np.int32)
    return texts.column(codes).remove_unused_categories()


def _launched(events: pd.DataFrame, launches: pd.DataFrame | None) -> pd.DataFrame:
    """The events with what is known of the calls that launched them; of a replay's, no op, whatever is around it."""
    if launches is None:
        none = constant("", 0)
        launches = pd.DataFrame({"correlation": [], "ts": [], "name": none} | dict.fromkeys(OF_LAUNCH, none))
    kernels, correlation = events["kind"] == "kernel", events["correlation"]
    first = launches[(launches["correlation"] >= 0) & ~launches["correlation"].duplicated()]
    rows = pd.Index(first["correlation"]).get_indexer(correlation.where(correlation >= 0, -2))
    many = kernels & (correlation >= 0) & correlation.where(kernels, -1).duplicated(keep=False)
    launch = _picked(first["name"], rows).add_categories(UNSEEN_GRAPH)
    launch[many.to_numpy() & (rows < 0)] = UNSEEN_GRAPH
    replayed = matching(pd.Series(launch), GRAPH_LAUNCH)
    columns = {name: _picked(first[name], np.where(replayed, -1, rows)) for name in OF_LAUNCH}
    op = columns["op"]
    columns["op"] = pd.Categorical.from_codes(np.where(replayed, -1, op.codes), categories=op.categories)
    columns["launch"] = launch.remove_unused_categories()
    columns["launch_ts"] = np.append(first["ts"].to_numpy(np.int64), UNKNOWN)[rows]
    return events.assign(**columns)


def _marks(frames: dict[str, pd.DataFrame], meta: dict[str, Any]) -> pd.DataFrame:
    """Annotations, and the calls in which the host waited."""
    found = {kind: frames[kind] for kind in ("cpu", "gpu") if kind in frames}
    if "launch" in frames:
        found["sync"] = frames["launch"][matching(frames["launch"]["name"], _SYNC)]
    marks = []
    for kind, frame in found.items():
        columns = {name: frame[name].array for name in ("ts", "dur", "tid", "name")}
        columns |= {"kind": constant(kind, len(frame)), "rank": np.full(len(frame), int(meta.get("rank") or 0))}
        marks.append(marks_frame(columns, len(frame)))
    return concat(marks).sort_values("ts", kind="stable", ignore_index=True) if marks else marks_frame({}, 0)
