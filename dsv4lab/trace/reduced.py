"""Reduced traces: the event frame of a trace as a small file, committed beside the records and read like a trace.

Gzipped JSON Lines: a header (schema, meta, what was lost), then a line a table with its columns; text is kept once and
referred to by number, times count from the first event. The same trace gives the same bytes.
"""

import gzip
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from dsv4lab import records
from dsv4lab.files import without_folders, write_atomically
from dsv4lab.trace.frames import (
    EVENT_INTEGERS,
    EVENT_TEXTS,
    MARK_INTEGERS,
    MARK_TEXTS,
    UNKNOWN,
    Codes,
    Trace,
    TraceError,
    events_frame,
    marks_frame,
)

SUFFIX = ".trace.jsonl.gz"
SCHEMA = 1
Mode = Literal["graph", "eager"]
_TIMES = ("ts", "launch_ts")
_FRAMES = {"events": events_frame, "marks": marks_frame}


def keep(trace: Trace, stage: str, mode: Mode, directory: Path | str | None = None, **about: Any) -> Path:
    """Stores a stage of a campaign as <stage>_<mode>_<gpu>_<UTC time>.trace.jsonl.gz, in records/traces if not told
    otherwise; what `newest` finds.

    Args:
        mode: "graph" for graph replays, "eager" for a trace with shapes.
        about: kept with it, as batch=32.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be {' or '.join(get_args(Mode))}, got {mode!r}")
    name = f"{stage}_{mode}_{records.gpu_slug(trace.meta.get('gpu'))}_{datetime.now(UTC):%Y%m%dT%H%M%SZ}{SUFFIX}"
    return write(trace, _folder(directory) / name, stage=stage, mode=mode, **about)


def newest(stage: str, mode: Mode, directory: Path | str | None = None) -> Path | None:
    """The newest reduced trace of a stage, or None."""
    found = _folder(directory).glob(f"{stage}_{mode}_*{SUFFIX}")
    return max(found, key=lambda path: path.name.removesuffix(SUFFIX).rpartition("_")[2], default=None)


def _folder(directory: Path | str | None) -> Path:
    return records.root() / "traces" if directory is None else Path(directory)


def write(trace: Trace, path: Path | str, **about: Any) -> Path:
    """Stores the events and marks of `trace`; `about` (stage, batch, ...) is kept in its meta. Returns the path.

    ValueError if the name does not end in `SUFFIX` or there are no events; FileExistsError rather than overwrite.
    """
    path = Path(path)
    if not path.name.endswith(SUFFIX):
        raise ValueError(f"path must end in {SUFFIX}, got {path.name!r}")
    if trace.events.empty:
        raise ValueError("trace must have GPU events, got none")
    if path.exists():
        raise FileExistsError(f"{path.name} exists already: reduced traces are never rewritten")
    times = np.concatenate([trace.events["ts"], trace.events["launch_ts"], trace.marks["ts"]])
    first = int(times[times >= 0].min())
    lost = {name: int(count) for name, count in trace.lost.items()}
    header = {"schema": SCHEMA, "meta": trace.meta | about, "lost": lost, "first_ts": first}
    lines = [header, *({"table": name, **_table(getattr(trace, name), first)} for name in _FRAMES)]
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return path


def _table(frame: pd.DataFrame, first: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, column in frame.items():
        if name not in (*EVENT_TEXTS, *EVENT_INTEGERS, *MARK_TEXTS, *MARK_INTEGERS):
            continue  # added by an analysis, which can add it again
        if isinstance(column.dtype, pd.CategoricalDtype):
            column = column.cat.remove_unused_categories()
            texts = [without_folders(text) for text in column.cat.categories]
            columns[name] = {"texts": texts, "codes": column.cat.codes.tolist()}
        else:
            values = column.to_numpy()
            columns[name] = (np.where(values < 0, UNKNOWN, values - first) if name in _TIMES else values).tolist()
    return {"rows": len(frame), "columns": columns}


def read(path: Path | str) -> Trace:
    """The trace that `write` stored; TraceError if the file is damaged or of another schema."""
    path = Path(path)
    try:
        header, *lines = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
        if header["schema"] != SCHEMA:
            raise TraceError(f"{path.name} is of schema {header['schema']}, this version reads {SCHEMA}")
        tables = {line["table"]: _frame(line, header["first_ts"]) for line in lines}
        return Trace(tables["events"], tables["marks"], header["meta"], Counter(header["lost"]))
    except (EOFError, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, TraceError | FileNotFoundError):
            raise
        raise TraceError(f"{path.name} is no sound reduced trace: {error}") from error


def _frame(line: dict[str, Any], first: int) -> pd.DataFrame:
    columns: dict[str, Any] = {}
    for name, column in line["columns"].items():
        if isinstance(column, dict):
            texts = Codes()
            code_of = np.append(texts.encode(column["texts"]), -1)
            columns[name] = texts.column(code_of[np.array(column["codes"], dtype=np.int64)])
        else:
            values = np.array(column, dtype=np.int64)
            columns[name] = np.where(values < 0, UNKNOWN, values + first) if name in _TIMES else values
    return _FRAMES[line["table"]](columns, line["rows"])
