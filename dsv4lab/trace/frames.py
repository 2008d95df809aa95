"""A trace as frames: what the GPU did, what the CPU said around it, and what could not be read.

All times are integer nanoseconds. Text that repeats (names, shapes, stacks) is dictionary-encoded: an event costs the
same few bytes, however long its name.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import pandas as pd

UNKNOWN = -1
"""What an integer column holds where the trace says nothing."""

EVENT_INTEGERS = {
    "rank": np.int32, "device": np.int32, "stream": np.int32, "ts": np.int64, "dur": np.int64, "correlation": np.int64,
    "launch_ts": np.int64, "registers": np.int32, "shared": np.int32, "bytes": np.int64, "step": np.int32,
}  # fmt: skip
EVENT_TEXTS = (
    "kind", "name", "grid", "block", "launch", "op", "parents", "shapes", "dtypes", "strides", "stack", "collective",
)  # fmt: skip
MARK_INTEGERS = {"rank": np.int32, "tid": np.int64, "ts": np.int64, "dur": np.int64}
MARK_TEXTS = ("kind", "name")
_LAUNCHER = re.compile(r"(?:triton|tvm)/|<string>")


class TraceError(ValueError):
    """A trace that gives nothing to report; the message is one line that says why."""


@dataclass(frozen=True)
class Trace:
    """One or several ranks' traces.

    Attributes:
        events: one row for each kernel, copy and fill on a GPU, in order of start: `kind` is kernel, memcpy or memset;
            ts, dur and launch_ts in ns; grid and block as "[x,y,z]"; `launch` is the API call that launched it, and op,
            parents, shapes, dtypes, strides and stack are what ran around that call (empty text: not known; None in
            `op`: launched by a graph replay, so not attributable); step is -1 outside of every step.
        marks: annotations (`kind` cpu or gpu) and calls in which the host waited for the device (`kind` sync).
        launches: calls that launch a kernel, with ops and shapes as in `events`: what `attribution.join` needs of a
            trace taken while a graph was captured. Not kept in reduced traces.
        meta: what the file says of GPU, SMs, rank and versions.
        lost: what had to be dropped, repaired or cut, with counts.
    """

    events: pd.DataFrame
    marks: pd.DataFrame
    meta: dict[str, Any]
    lost: Counter[str] = field(default_factory=Counter)
    launches: pd.DataFrame | None = None

    def with_events(self, **columns: Any) -> Self:
        return replace(self, events=self.events.assign(**columns))


class Codes(defaultdict):
    """Text (or any hashable) -> the number of its first occurrence, so that columns hold small integers."""

    def __init__(self, first: Iterable[Hashable] = ()) -> None:
        super().__init__()
        self.default_factory = self.__len__
        for value in first:
            _ = self[value]

    def encode(self, values: Iterable[Hashable]) -> np.ndarray:
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32)

    def column(self, codes: np.ndarray) -> pd.Categorical:
        return pd.Categorical.from_codes(codes, categories=pd.Index(list(self), dtype=object))


def text_column(values: Sequence[str | None]) -> pd.Categorical:
    """Dictionary-encoded text; None stays missing."""
    codes = Codes()
    encoded = [-1 if value is None else codes[value] for value in values]
    return codes.column(np.array(encoded, dtype=np.int32))


def constant(value: str | None, rows: int) -> pd.Categorical:
    """A text column that says the same everywhere."""
    categories = pd.Index([] if value is None else [value], dtype=object)
    return pd.Categorical.from_codes(np.full(rows, -1 if value is None else 0, np.int8), categories=categories)


def complete(columns: dict[str, Any], rows: int, integers: dict[str, Any], texts: Sequence[str]) -> pd.DataFrame:
    """A frame with every column of its kind, in order; what `columns` lacks is unknown."""
    frame = {}
    for name, dtype in integers.items():
        values = columns.get(name)
        frame[name] = np.full(rows, UNKNOWN, dtype) if values is None else np.asarray(values, dtype)
    for name in texts:
        values = columns.get(name)
        frame[name] = constant("", rows) if values is None else values
    return pd.DataFrame(frame)


def events_frame(columns: dict[str, Any], rows: int) -> pd.DataFrame:
    return complete(columns, rows, EVENT_INTEGERS, EVENT_TEXTS)


def marks_frame(columns: dict[str, Any], rows: int) -> pd.DataFrame:
    return complete(columns, rows, MARK_INTEGERS, MARK_TEXTS)


def concat(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Frames of one kind below each other; text stays dictionary-encoded."""
    if len(frames) == 1:
        return frames[0]
    columns = {}
    for name in frames[0]:
        parts = [frame[name] for frame in frames]
        if isinstance(parts[0].dtype, pd.CategoricalDtype):
            columns[name] = pd.api.types.union_categoricals([part.cat.remove_unused_categories() for part in parts])
        else:
            columns[name] = np.concatenate([part.to_numpy() for part in parts])
    return pd.DataFrame(columns)


def merge(traces: Sequence[Trace]) -> Trace:
    """Several ranks as one trace, in order of start."""
    if len(traces) == 1:
        return traces[0]
    events = concat([trace.events for trace in traces])
    order = np.argsort(events["ts"].to_numpy(), kind="stable")
    launches = [trace.launches for trace in traces if trace.launches is not None]
    lost: Counter[str] = Counter()
    for trace in traces:
        lost.update(trace.lost)
    return Trace(
        events=events.iloc[order].reset_index(drop=True),
        marks=concat([trace.marks for trace in traces]),
        meta=traces[0].meta | {"ranks": [trace.meta.get("rank", 0) for trace in traces]},
        lost=lost,
        launches=concat(launches) if launches else None,
    )


def matching(column: pd.Series, pattern: re.Pattern[str]) -> np.ndarray:
    """Whether each text of a dictionary-encoded column has the pattern in it."""
    hits = np.array([bool(pattern.search(text)) for text in column.cat.categories] + [False])
    return hits[column.cat.codes.to_numpy()]


def source_line(stack: str) -> str:
    """The innermost frame of a stack that is not a launcher's own; "" for no stack."""
    frames = stack.split(" < ")
    return next((frame for frame in frames if not _LAUNCHER.match(frame)), frames[0])


def numbers(column: pd.Series) -> np.ndarray:
    """A grid or block column as int64 [rows, 3]; 0 where it is not known."""
    table = np.array([_three(text) for text in column.cat.categories] + [[0, 0, 0]], dtype=np.int64)
    return table[column.cat.codes.to_numpy()]


def _three(text: str) -> list[int]:
    sizes = json.loads(text) if text else []
    whole = len(sizes) == 3 and all(isinstance(size, int) for size in sizes)
    return sizes if whole else [0, 0, 0]
