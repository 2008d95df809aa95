"""Reads Nsight Systems sqlite exports, whichever of their tables and columns a version has.

Times in them are integer nanoseconds. Names stand in StringIds. With the default setting a CUDA graph is one row of
GRAPH_TRACE instead of its kernels; then only its total is known. An export may hold several processes, each with
correlations and device numbers of its own: each is a rank.
"""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from dsv4lab.trace.assembly import assembled
from dsv4lab.trace.frames import UNKNOWN, Trace, TraceError, constant, merge, text_column

_CUPTI = "CUPTI_ACTIVITY_KIND_"
_GPU = {"kernel": "KERNEL", "memcpy": "MEMCPY", "memset": "MEMSET", "graph": "GRAPH_TRACE"}
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_NVTX = ("NVTX_EVENTS", "NVTX_EVENTS_V2", "NVTX_EVENTS_V1")
_THREADS = 2**24  # global ids are a process and, in the last 24 bits, a thread
_WHOLE_GRAPH = "a whole CUDA graph, not cut into kernels"
GRAPHS_WHOLE = (
    "graph replays captured as one block each; record again with --cuda-graph-trace=node to see their kernels"
)


def read(path: Path) -> Trace:
    """The trace in an export; TraceError if it has no GPU activity at all or is no sound database."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            tables = _Tables(database)
            frames = {kind: tables.gpu(kind, table) for kind, table in _GPU.items()}
            frames |= {"launch": tables.calls(), "cpu": tables.ranges()}
            meta = {"format": "nsys", **tables.device()}
    except (sqlite3.DatabaseError, pd.errors.DatabaseError, KeyError) as error:
        raise TraceError(f"{path.name} is no sound Nsight Systems export: {error}") from error
    found = {kind: frame for kind, frame in frames.items() if frame is not None and len(frame)}
    if not found.keys() & _GPU.keys():
        raise TraceError(
            f"no GPU kernels in {path.name}: none of {', '.join(f'{_CUPTI}{t}' for t in _GPU.values())} has rows"
        )
    processes = {process for kind in _GPU.keys() & found.keys() for process in found[kind]["process"].unique()}
    known = sorted(processes - {UNKNOWN}) or [UNKNOWN]
    return merge([_of_process(found, each, meta | {"rank": rank}) for rank, each in enumerate(known)])


def _of_process(found: dict[str, pd.DataFrame], process: int, meta: dict[str, Any]) -> Trace:
    frames = found.copy()
    if process != UNKNOWN:
        frames = {kind: frame[frame["process"].isin((process, UNKNOWN))] for kind, frame in found.items()}
    lost: Counter[str] = Counter()
    if "graph" in frames:
        frames["graph"] = _without_kernels(frames["graph"], frames.get("kernel"))
        lost[GRAPHS_WHOLE] += len(frames["graph"])
    return assembled({kind: frame.drop(columns="process") for kind, frame in frames.items()}, meta, lost)


def _without_kernels(graphs: pd.DataFrame, kernels: pd.DataFrame | None) -> pd.DataFrame:
    """The graphs whose kernels are not in the export too: else both would count the same time."""
    if kernels is not None:
        graphs = graphs[~graphs["correlation"].isin(kernels["correlation"])]
    return graphs.assign(name=constant(_WHOLE_GRAPH, len(graphs)))


class _Tables:
    """An open export. Each method gives a frame as `assembled` takes it, or None where the version lacks the table."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._tables = {
            row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        }
        self._texts = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in self._tables else {}

    def _rows(self, table: str, wanted: dict[str, tuple[str, ...]]) -> pd.DataFrame | None:
        """The wanted columns under our names, each from the first of its spellings that the table has.

        NULL is `UNKNOWN`, so that integers stay such: an event without an end gets a negative duration and is counted.
        """
        if table not in self._tables:
            return None
        there = {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        chosen = {ours: next((name for name in names if name in there), None) for ours, names in wanted.items()}
        select = ", ".join(f'IFNULL("{name}", {UNKNOWN}) AS "{ours}"' for ours, name in chosen.items() if name)
        return pd.read_sql_query(f'SELECT {select} FROM "{table}"', self._database)

    def _named(self, ids: pd.Series) -> Any:
        return text_column([self._texts.get(each, "") if isinstance(each, int) else str(each) for each in ids.tolist()])

    def gpu(self, kind: str, table: str) -> pd.DataFrame | None:
        wanted = {
            "ts": ("start",), "end": ("end",), "device": ("deviceId",), "stream": ("streamId",),
            "correlation": ("correlationId",), "process": ("globalPid",),
        }  # fmt: skip
        if kind == "kernel":
            wanted |= {
                "name": ("demangledName", "shortName", "mangledName", "name"),
                "registers": ("registersPerThread",),
            }
            wanted |= {axis: (axis,) for axis in ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")}
            wanted |= {"static": ("staticSharedMemory",), "dynamic": ("dynamicSharedMemory",)}
        elif kind != "graph":
            wanted |= {"bytes": ("bytes",), "copyKind": ("copyKind",)}
        rows = self._rows(_CUPTI + table, wanted)
        if rows is None or rows.empty:
            return None
        rows["dur"] = rows.pop("end") - rows["ts"]
        rows["process"] = rows["process"] // _THREADS if "process" in rows else UNKNOWN
        if kind == "kernel":
            rows["name"] = self._named(rows["name"])
            for ours in ("grid", "block"):
                axes = [rows.pop(f"{ours}{axis}").tolist() for axis in "XYZ"]
                rows[ours] = text_column([f"[{x},{y},{z}]" for x, y, z in zip(*axes, strict=True)])
            rows["shared"] = sum(rows.pop(name) for name in ("static", "dynamic") if name in rows)
        elif kind == "memcpy":
            kinds = rows.pop("copyKind").tolist() if "copyKind" in rows else [0] * len(rows)
            rows["name"] = text_column([f"Memcpy {_COPIES.get(each, '')}".strip() for each in kinds])
        elif kind == "memset":
            rows = rows.drop(columns="copyKind", errors="ignore").assign(name=constant("Memset", len(rows)))
        return rows

    def calls(self) -> pd.DataFrame | None:
        """Calls of the runtime and the driver."""
        wanted = {
            "ts": ("start",), "end": ("end",), "tid": ("globalTid",), "correlation": ("correlationId",),
            "name": ("nameId", "name"),
        }  # fmt: skip
        parts = [self._rows(_CUPTI + table, wanted) for table in ("RUNTIME", "DRIVER")]
        parts = [part for part in parts if part is not None and len(part)]
        if not parts:
            return None
        rows = pd.concat(parts, ignore_index=True)
        rows["dur"] = rows.pop("end") - rows["ts"]
        return rows.assign(name=self._named(rows["name"]), process=rows["tid"] // _THREADS)

    def ranges(self) -> pd.DataFrame | None:
        """Ranges that the program annotated (NVTX), where they were recorded."""
        wanted = {"ts": ("start",), "end": ("end",), "text": ("text",), "textId": ("textId",), "tid": ("globalTid",)}
        for table in _NVTX:
            rows = self._rows(table, wanted)
            if rows is None:
                continue
            rows = rows[rows["end"] != UNKNOWN].reset_index(drop=True)  # marks of a moment have none
            texts = rows.get("text", pd.Series(UNKNOWN, rows.index, dtype=object))
            by_id = rows.get("textId", texts).map(self._texts)
            texts = texts.where(texts != UNKNOWN, by_id).fillna("").astype(str)
            return rows[["ts", "tid"]].assign(
                name=text_column(texts.tolist()), dur=rows["end"] - rows["ts"], process=rows["tid"] // _THREADS
            )
        return None

    def device(self) -> dict[str, Any]:
        rows = self._rows("TARGET_INFO_GPU", {"gpu": ("name",), "sms": ("smCount",)})
        return (
            {}
            if rows is None or rows.empty
            else {k: getattr(v, "item", lambda v=v: v)() for k, v in rows.iloc[0].items()}
        )
