"""Reads the Chrome JSON of torch.profiler (kineto), old and new spellings, in bounded memory and exact nanoseconds.

The format: an object whose traceEvents array holds complete events (ph X) with ts and dur in microseconds, written in
decimal. New files count ts from their baseTimeNanoseconds; older ones from the epoch, in more digits than a double has.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from dsv4lab.trace import text
from dsv4lab.trace.assembly import UNREADABLE, assembled
from dsv4lab.trace.frames import UNKNOWN, Codes, Trace

KINDS = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "runtime": "launch",
    "driver": "launch",
    "cpu_op": "op",
    "operator": "op",
    "python_function": "python",
    "user_annotation": "cpu",
    "gpu_user_annotation": "gpu",
}
"""A category, in lower case, and what it is here. Others, cuda_sync above all, are no work of the GPU."""

_GPU = ("kernel", "memcpy", "memset")
_TEXTS = ("name", "stack", "collective")
_ARRAYS = ("grid", "block", "shapes", "dtypes", "strides")
_US = rb"-?[1-8]?\d{1,15}"  # as ns within 64 bits
_WHOLE = re.compile(rb"(?:%b\n)*%b" % (_US, _US))
_THREE_DECIMALS = re.compile(rb"(?:%b\.\d{3}\n)*%b\.\d{3}" % (_US, _US))
_END = re.compile(rb"\}\s*\]")
_RAW = msgspec.Raw(b"")


class _Args(msgspec.Struct, frozen=True, gc=False):
    """What is read of an event's args. Types are left open: one odd value must not cost the event."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    grid: msgspec.Raw = _RAW
    block: msgspec.Raw = _RAW
    registers: Any = msgspec.field(default=None, name="registers per thread")
    shared: Any = msgspec.field(default=None, name="shared memory")
    bytes: Any = None
    collective: Any = msgspec.field(default=None, name="Collective name")
    shapes: msgspec.Raw = msgspec.field(default=_RAW, name="Input Dims")
    old_shapes: msgspec.Raw = msgspec.field(default=_RAW, name="Input dims")
    dtypes: msgspec.Raw = msgspec.field(default=_RAW, name="Input type")
    strides: msgspec.Raw = msgspec.field(default=_RAW, name="Input Strides")
    stack: Any = msgspec.field(default=None, name="Call stack")


_NO_ARGS = _Args()


class _Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: msgspec.Raw = _RAW
    dur: msgspec.Raw = _RAW
    args: _Args | None = None


_EVENTS = msgspec.json.Decoder(list[_Event])
_EVENT = msgspec.json.Decoder(_Event)


def read(path: Path) -> Trace:
    """The trace in a file, `.json` or `.json.gz`, with as much of it as can be read.

    TraceError if it is no Chrome trace. A trace without any GPU kernel is returned as such.
    """
    lost: Counter[str] = Counter()
    runs, parser, tables = text.Runs(path, lost), _Parser(lost), _Tables()
    for run in runs:
        tables.add(parser.events(run))
    parser.finish()
    meta = _meta(runs.head, parser.tail, lost)
    return assembled(tables.frames(meta["base_ns"]), meta, lost)


class _Parser:
    """Events from text, at the speed of the JSON library while it is sound and one by one where it is not."""

    def __init__(self, lost: Counter[str]) -> None:
        self.tail: bytes | None = None  # what follows the array, once its end was seen
        self._lost, self._torn = lost, 0

    def events(self, run: bytes) -> Iterable[_Event]:
        if self.tail is None:
            try:
                return _EVENTS.decode(b"[" + run + b"]")
            except msgspec.DecodeError:
                pass
        return list(self._one_by_one(run))

    def _one_by_one(self, run: bytes) -> Iterator[_Event]:
        """The events of a run that is broken somewhere or holds the end of the array."""
        for piece in text.single_events(run):
            if self.tail is not None:
                self.tail += piece + b","
            elif piece.lstrip()[:1] == b"]":
                self.tail = piece.lstrip()[1:]
            elif (event := self._rescued(piece)) is not None:
                self._torn = 0
                yield event
            elif piece.strip():
                self._lost["events that could not be read"] += 1
                self._torn = len(piece)

    def _rescued(self, piece: bytes) -> _Event | None:
        for change in (bytes, text.mended):
            body = change(piece)
            event, end = _decoded(body), None
            if event is None:
                ends = _END.finditer(body)
                event, end = next(((e, at) for at in ends if (e := _decoded(body[: at.start() + 1]))), (None, None))
            if event is not None:
                if end is not None:
                    self.tail = body[end.end() :]
                if change is text.mended:
                    self._lost["events with invalid JSON, mended"] += 1
                return event
        return None

    def finish(self) -> None:
        """Counts the event that the file ends in as bytes of it."""
        if self.tail is None and self._torn:
            self._lost["events that could not be read"] -= 1
            self._lost["bytes of an event that the file breaks off in"] += self._torn
        elif self.tail is None:
            self._lost["file that ends before its array of events does"] += 1


def _decoded(piece: bytes) -> _Event | None:
    try:
        return _EVENT.decode(piece)
    except msgspec.DecodeError:
        return None


def nanoseconds(values: Sequence[bytes | msgspec.Raw]) -> np.ndarray:
    """Microseconds as written in decimal -> int64 ns, exactly; `UNREADABLE` for what is no number."""
    joined = b"\n".join(values)
    if _THREE_DECIMALS.fullmatch(joined):
        return np.fromstring(joined.replace(b".", b""), dtype=np.int64, sep="\n")
    if _WHOLE.fullmatch(joined):
        return 1000 * np.fromstring(joined, dtype=np.int64, sep="\n")
    return np.array([_nanoseconds(bytes(value)) for value in values], dtype=np.int64)


def _nanoseconds(value: bytes) -> int:
    try:
        exact = 1000 * Decimal(value.decode().strip('"'))
        ns = int(exact.to_integral_value())
    except (InvalidOperation, ValueError, OverflowError):
        return UNREADABLE
    return ns if abs(ns) < 2**62 else UNREADABLE


def _integers(values: list[Any]) -> np.ndarray:
    if (missing := values.count(None)) == len(values):
        return np.full(len(values), UNKNOWN)
    if missing:
        values = [UNKNOWN if value is None else value for value in values]
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_integer(value) for value in values], dtype=np.int64)


def _integer(value: Any) -> int:
    try:
        return number if abs(number := int(value)) < 2**62 else UNKNOWN
    except (TypeError, ValueError, OverflowError):
        return UNKNOWN


class _Tables:
    """The columns of what was read so far, dictionary-encoded."""

    def __init__(self) -> None:
        self._codes: dict[str, Codes] = defaultdict(Codes)
        self._parts: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))

    def add(self, events: Iterable[_Event]) -> None:
        by_kind: dict[str, list[_Event]] = defaultdict(list)
        for event in events:
            if event.ph == "X" and (kind := KINDS.get(event.cat) or KINDS.get((event.cat or "").lower())):
                by_kind[kind].append(event)
        for kind, of_kind in by_kind.items():
            self._put(
                kind,
                ts=nanoseconds([event.ts for event in of_kind]),
                dur=nanoseconds([event.dur for event in of_kind]),
                name=self._codes["text"].encode([event.name or "" for event in of_kind]),
            )
            (self._add_gpu if kind in _GPU else self._add_cpu)(
                kind, of_kind, [event.args or _NO_ARGS for event in of_kind]
            )

    def _put(self, kind: str, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            self._parts[kind][name].append(values)

    def _add_gpu(self, kind: str, events: list[_Event], args: list[_Args]) -> None:
        pairs = list(zip(events, args, strict=True))
        self._put(
            kind,
            device=_integers([event.pid if a.device is None else a.device for event, a in pairs]),
            stream=_integers([event.tid if a.stream is None else a.stream for event, a in pairs]),
            correlation=_integers([a.correlation for a in args]),
        )
        if kind == "kernel":
            self._put(
                kind,
                grid=self._codes["array"].encode([bytes(a.grid) for a in args]),
                block=self._codes["array"].encode([bytes(a.block) for a in args]),
                registers=_integers([a.registers for a in args]),
                shared=_integers([a.shared for a in args]),
                collective=self._codes["text"].encode([str(a.collective or "") for a in args]),
            )
        else:
            self._put(kind, bytes=_integers([a.bytes for a in args]))

    def _add_cpu(self, kind: str, events: list[_Event], args: list[_Args]) -> None:
        self._put(kind, tid=self._codes["thread"].encode([(event.pid, event.tid) for event in events]))
        if kind == "launch":
            self._put(kind, correlation=_integers([a.correlation for a in args]))
        elif kind == "op":
            self._put(
                kind,
                shapes=self._codes["array"].encode([bytes(a.shapes) or bytes(a.old_shapes) for a in args]),
                dtypes=self._codes["array"].encode([bytes(a.dtypes) for a in args]),
                strides=self._codes["array"].encode([bytes(a.strides) for a in args]),
                stack=self._codes["text"].encode([str(a.stack or "") for a in args]),
            )

    def frames(self, base_ns: int) -> dict[str, pd.DataFrame]:
        """By kind, times counted from the epoch if the file says where its own count starts."""
        texts = pd.Index(list(self._codes["text"]), dtype=object)
        arrays = Codes()
        code_of = arrays.encode(_compact(value) for value in self._codes["array"])
        arrays = pd.Index(list(arrays), dtype=object)
        frames = {}
        for kind in list(self._parts):
            columns = {name: np.concatenate(parts) for name, parts in self._parts.pop(kind).items()}
            columns["ts"] = np.where(columns["ts"] == UNREADABLE, UNREADABLE, columns["ts"] + base_ns)
            for name, codes in columns.items():
                if name in _TEXTS:
                    columns[name] = pd.Categorical.from_codes(codes, categories=texts)
                elif name in _ARRAYS:
                    columns[name] = pd.Categorical.from_codes(code_of[codes], categories=arrays)
            frames[kind] = pd.DataFrame(columns)
        return frames


def _compact(array: bytes) -> str:
    """A JSON array in one spelling; empty for anything else."""
    try:
        value = json.loads(array)
    except ValueError:
        return ""
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list) else ""


def _meta(head: bytes, tail: bytes | None, lost: Counter[str]) -> dict[str, Any]:
    """What the file says around its events; the part before them alone if the end is missing, nothing in an array."""
    for text_around in (head + b"]" + (tail or b"}").rstrip(b", \r\n\t"), head + b"]}", head + b"]"):
        try:
            found = json.loads(text_around, strict=False)
        except ValueError:
            continue
        return _chosen(found if isinstance(found, dict) else {})
    lost["file header that could not be read"] += 1
    return _chosen({})


def _chosen(found: dict[str, Any]) -> dict[str, Any]:
    """The entries of a header that a report may need, as far as they are sound; others name users, hosts and jobs."""
    meta: dict[str, Any] = {"format": "kineto", "base_ns": max(0, _integer(found.get("baseTimeNanoseconds")))}
    match found:
        case {"deviceProperties": [{"name": str(gpu), "numSms": int(sms)}, *_]}:
            meta |= {"gpu": gpu, "sms": sms}
        case {"deviceProperties": [{"name": str(gpu)}, *_]}:
            meta |= {"gpu": gpu}
    match found:
        case {"distributedInfo": {"rank": int(rank)}} if 0 <= rank < 2**31:
            meta |= {"rank": rank}
    return meta
