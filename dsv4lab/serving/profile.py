"""A profile of a few steps of a steady decode batch, made by SGLang with torch's profiler: a trace file a rank."""

import asyncio
import gzip
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from dsv4lab.serving import http, load
from dsv4lab.serving.load import Outcome, Shape

_OUTPUT = 2048  # tokens: more than come while it lasts
_POLL_S = 0.05
_SUFFIX = ".trace.json.gz"


class NoTrace(RuntimeError):
    """There is no trace; the message says how far it came."""


def steady(
    url: str, folder: Path, *, batch: int = 32, input: int = 256, steps: int = 3, eager: bool = False, ranks: int = 1,
    seed: int = 0, timeout_s: float = 120.0,
) -> Path:  # fmt: skip
    """A new folder in `folder` with a trace of each of `ranks`: `steps` decode steps of `batch` requests.

    input: tokens of their prompts. eager: with the shapes of every operation and the Python that called it; such a
    trace is large. The server must run on this machine, for it writes the files. NoTrace or NoAnswer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f"{len(list(folder.iterdir())) + 1}_", dir=folder))
    request = {
        "output_dir": str(place.resolve()),
        "num_steps": steps + 1,  # it ends before the last is launched
        "activities": ["CPU", "GPU"],
        "with_stack": eager,
        "record_shapes": eager,
    }
    written = lambda: sum(map(is_whole, place.glob(f"*{_SUFFIX}"))) >= ranks  # noqa: E731
    asyncio.run(_profile(url, Shape(input, _OUTPUT), batch, seed, request, written, timeout_s))
    return place


async def _profile(
    url: str, shape: Shape, batch: int, seed: int, request: dict, written: Callable[[], bool], timeout_s: float
) -> None:
    outcomes: list[Outcome] = []
    wave = asyncio.create_task(load.wave(url, shape, batch, seed, timeout_s=timeout_s, outcomes=outcomes))
    deadline = time.monotonic() + timeout_s
    try:
        while not (len(outcomes) == batch and all(outcome.arrivals for outcome in outcomes)):
            await _pause(deadline, wave, outcomes, "before all requests decoded")
        await asyncio.to_thread(http.tell, url, "/start_profile", request, timeout=timeout_s)
        while not written():
            await _pause(deadline, wave, outcomes, "while the trace was awaited")
    finally:
        wave.cancel()
        await asyncio.gather(wave, return_exceptions=True)


async def _pause(deadline: float, wave: asyncio.Task, outcomes: list[Outcome], when: str) -> None:
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise NoTrace(f"a request failed {when}: {errors[0]}")
    if wave.done():
        raise NoTrace(f"the requests ended {when}")
    if time.monotonic() > deadline:
        raise NoTrace(f"the time was over {when}")
    await asyncio.sleep(_POLL_S)


def is_whole(path: Path) -> bool:
    """Whether a gzip file is there to its end: the server is still writing it otherwise, or has only opened it."""
    size = 0
    try:
        with gzip.open(path) as file:
            while block := file.read(1 << 20):
                size += len(block)
    except (OSError, EOFError, zlib.error):
        return False
    return size > 0
