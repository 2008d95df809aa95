"""The text of a Chrome trace, piece by piece: inflated in chunks, cut between events, mended where it is broken."""

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dsv4lab.trace.frames import TraceError

CHUNK = 256 * 1024
"""Bytes of text taken at a time: what is made of them stays in the cache. Never much more text than this is held."""

_INFLATED_AT_ONCE = 64 * 1024  # bytes of gzip
_HEAD = 64 * 1024**2  # bytes before the array of events

_ARRAY = re.compile(rb'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|bp|s|args)"\s*:)')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})|(\\.)', re.DOTALL)
_NOT_A_NUMBER = re.compile(rb"(:\s*)[+-]?(?:inf(?:inity)?|nan)(?=\s*[,}\]])", re.IGNORECASE)


def chunks(path: Path, lost: Counter[str]) -> Iterator[bytes]:
    """The text of a file, gzip or plain by its first bytes. What ends early ends here, and `lost` says so."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not zipped:
            while data := file.read(CHUNK):
                yield data
            return
        inflate, data = zlib.decompressobj(wbits=31), b""
        while data := data or file.read(_INFLATED_AT_ONCE):
            before = inflate.copy()
            try:
                yield inflate.decompress(data, CHUNK)
            except zlib.error:
                yield from _before_damage(before, data)
                lost["bytes of gzip after a damaged place"] += path.stat().st_size - file.tell() + len(data)
                return
            data = inflate.unconsumed_tail
            if inflate.eof:  # a file may be several streams, or padded with zeros
                if not (data := inflate.unused_data.lstrip(b"\0") or file.read(_INFLATED_AT_ONCE)):
                    return
                inflate = zlib.decompressobj(wbits=31)
        lost["gzip streams cut off before their end"] += 1


def _before_damage(inflate: "zlib._Decompress", data: bytes) -> Iterator[bytes]:
    """What can be had of a piece that breaks somewhere, by going through it in small steps."""
    for at in range(0, len(data), 64):
        try:
            yield inflate.decompress(data[at : at + 64])
        except zlib.error:
            return


class Runs:
    """The array of events in a file as runs of text: whole events with commas between, no brackets around.

    Iterating ends with the file, so that the last run also holds what follows the array. `head` is the text before it.
    """

    def __init__(self, path: Path, lost: Counter[str]) -> None:
        self.head = b""
        self._path, self._chunks = path, chunks(path, lost)

    def __iter__(self) -> Iterator[bytes]:
        buffer = self._first()
        for chunk in self._chunks:
            buffer += chunk
            if len(buffer) >= CHUNK and (between := _last_between(buffer)):
                yield buffer[: between.start() + 1]
                buffer = buffer[between.end() :]
        yield buffer

    def _first(self) -> bytes:
        buffer = b""
        for chunk in self._chunks:
            buffer += chunk
            if found := _ARRAY.search(buffer):
                self.head = buffer[: found.end()]
                return buffer[found.end() :]
            if len(buffer) > _HEAD:
                break
        raise TraceError(f"{self._path.name} holds no traceEvents array: not a Chrome trace")


def _last_between(buffer: bytes) -> re.Match[bytes] | None:
    for window in (64 * 1024, len(buffer)):
        found = None
        for found in _BETWEEN.finditer(buffer, max(0, len(buffer) - window)):  # noqa: B007
            pass
        if found:
            return found
    return None


def single_events(run: bytes) -> Iterator[bytes]:
    """A run that does not parse as a whole, cut wherever one event seems to end and another to begin."""
    at = 0
    for found in _BETWEEN.finditer(run):
        yield run[at : found.start() + 1]
        at = found.end()
    yield run[at:]


def mended(event: bytes) -> bytes:
    """An event with what profilers are known to write wrongly put right.

    Raw control bytes and stray backslashes in strings, bytes that are no UTF-8, and inf or nan for numbers.
    """
    event = _NOT_A_NUMBER.sub(rb"\1null", event)
    event = _STRING.sub(lambda found: _mended_string(found[0]), event)
    return event.decode("utf-8", errors="replace").encode()


def _mended_string(text: bytes) -> bytes:
    text = _BACKSLASH.sub(lambda found: found[1] or rb"\\", text)
    return _CONTROL.sub(lambda found: b"\\u%04x" % found[0][0], text)
