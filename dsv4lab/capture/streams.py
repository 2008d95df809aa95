"""What a stream capture would say of forks, joins and events, kept as a ledger while the calls are made for real.

A capture begins on one stream. Another stream enters it by waiting on an event that was recorded inside, and all that
it is given must have come back to the first one, by an event again, when the capture ends. Each stream carries a clock
for every stream whose work it follows.
"""

from collections.abc import Hashable
from typing import Any

Line = Hashable


class Ledger:
    """origin: the stream that captures. Streams are any hashable names of theirs, lines any mark of a place."""

    def __init__(self, origin: Hashable):
        self.origin = origin
        self._clocks: dict[Hashable, dict[Hashable, int]] = {origin: {origin: 0}}
        self._last: dict[Hashable, Line] = {}
        self._events: dict[int, tuple[Any, dict[Hashable, int]]] = {}

    def work(self, stream: Hashable, line: Line) -> bool:
        """Something is enqueued on `stream`; False if that stream is not in the capture."""
        if stream not in self._clocks:
            return False
        self._clocks[stream][stream] += 1
        self._last[stream] = line
        return True

    def record(self, event: Any, stream: Hashable) -> None:
        self._events.pop(id(event), None)
        if stream in self._clocks:
            self._events[id(event)] = event, dict(self._clocks[stream])  # holds the event: its id stays its own

    def wait(self, event: Any, stream: Hashable, line: Line) -> bool:
        """`stream` waits for `event`; False if it is in the capture and the event is not."""
        if id(event) not in self._events:
            return stream not in self._clocks
        _, seen = self._events[id(event)]
        mine = self._clocks.setdefault(stream, {stream: 1})
        self._last.setdefault(stream, line)
        for other, count in seen.items():
            mine[other] = max(mine.get(other, 0), count)
        return True

    def unjoined(self) -> list[Line]:
        """Where each stream that was never joined was last given work, or entered the capture."""
        known = self._clocks[self.origin]
        return [self._last[s] for s, clock in self._clocks.items() if s != self.origin and known.get(s, 0) < clock[s]]
