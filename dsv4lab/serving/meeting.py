"""Processes that walk the campaign in one folder keep step: each waits for those that are not as far in their stage.

How far a process is stands beside the lock of the stage that it is at. One that ended, however it did, holds no lock,
and nobody waits for it.
"""

import time
from math import inf
from pathlib import Path

from dsv4lab.files import locked, write_atomically

END = inf
"""The last step of a stage."""
_POLL_S = 0.05


def meet(lock: Path, step: float, wait_s: float) -> bool:
    """Says that the holder of `lock` is at `step` of its stage, and returns when all that hold a lock beside it are.

    Those that come later are not waited for. False if `wait_s` seconds were not enough.
    """
    others = [other for other in sorted(lock.parent.glob("*.lock")) if other != lock and _held(other)]
    write_atomically(_place(lock), str(step))
    end = time.monotonic() + wait_s
    while others := [other for other in others if _held(other) and _step(other) < step]:
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _held(lock: Path) -> bool:
    with locked(lock, wait_s=0) as free:
        return not free


def _place(lock: Path) -> Path:
    return lock.with_suffix(".step")


def _step(lock: Path) -> float:
    return float(place.read_text(encoding="utf-8")) if (place := _place(lock)).is_file() else 0.0
