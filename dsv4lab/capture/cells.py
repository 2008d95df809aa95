"""One cell of the capture matrix: a way to compile, to warm up and to use streams, tried in a process of its own."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dsv4lab import numerics, timing
from dsv4lab.capture import compiles
from dsv4lab.capture.errors import first_error
from dsv4lab.capture.step import Step, has_norm_rope, inputs

EAGER = "eager"
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
WARMTHS = ("same", "other", "cold")
STREAMS = ("none", "joined", "unjoined", "event_before")
BATCH, OTHER_BATCH, WARM_UPS = 16, 8, 3


@dataclass(frozen=True)
class Cell:
    """attention: of the step. mode: of torch.compile, or "eager" for none. cudagraphs: TORCHINDUCTOR_CUDAGRAPHS.

    warmth: what was called before the capture: the "same" shape, an "other" one, or nothing ("cold"); "disk" is cold
      with the compiled code in Inductor's cache, "closure" the same shape with a new closure compiled by every call.
    stream: beside the captured one "none", one that is forked and "joined" or left "unjoined", or a wait for an
      "event_before" the capture.
    """

    attention: str
    mode: str
    warmth: str
    cudagraphs: bool
    stream: str

    @property
    def name(self) -> str:
        return f"{self.mode}_{self.warmth}_cudagraphs{int(self.cudagraphs)}_{self.stream}"

    @property
    def config(self) -> dict[str, Any]:
        return asdict(self) | {"B": BATCH, "kv_write": "norm_rope" if has_norm_rope() else None}


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    first_error, cuda_code, cuda_name: of what ended the capture. replay_equal: the replay on other inputs gives bit for
    bit what a plain call of the same (compiled) function gives. usable_after: after a failure the stream captures and
    the function runs. compiles: how often something was compiled or tuned inside the capture.
    """

    captured: bool
    first_error: str | None = None
    cuda_code: int | None = None
    cuda_name: str | None = None
    replay_equal: bool | None = None
    usable_after: bool | None = None
    compiles: int | None = None


def cells(attention: str) -> list[Cell]:
    """The matrix; beside it the uncompiled step, SGLang's closures, and a disk cache that other cells have filled."""
    matrix = [Cell(attention, *each) for each in product(MODES, WARMTHS, (False, True), STREAMS)]
    uncompiled = [Cell(attention, EAGER, warmth, False, stream) for warmth, stream in product(WARMTHS, STREAMS)]
    extra = [Cell(attention, mode, warmth, False, "none") for warmth, mode in product(("closure", "disk"), MODES)]
    return matrix + uncompiled + extra


def configure(cell: Cell, shared_cache: str, own_cache: str) -> None:
    """Sets this process up for a cell; both caches are folders, and what is cold finds nothing in its own."""
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = own_cache if cell.warmth == "cold" else shared_cache
    os.environ["TORCHINDUCTOR_CUDAGRAPHS"] = str(int(cell.cudagraphs))
    inductor.triton.cudagraphs = cell.cudagraphs  # what the variable sets where this module is imported after it
    inductor.compile_threads = 1  # the cells themselves run in parallel
    torch.set_num_threads(1)


def attempt(cell: Cell) -> Outcome:
    """Warms up, captures, replays and compares; this process is spent afterwards."""
    step = Step(cell.attention, (BATCH, OTHER_BATCH), "cuda")
    call, args = _compiled(cell, step), inputs(BATCH, "cuda", seed=1)
    streams = _Streams(cell.stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams.main):
        if cell.warmth not in ("cold", "disk"):
            for _ in range(WARM_UPS):
                call(*(inputs(OTHER_BATCH, "cuda", seed=2) if cell.warmth == "other" else args))
        torch.cuda.synchronize()
        graph, told = torch.cuda.CUDAGraph(), []
        try:
            with compiles.watching(told.append):
                outputs = streams.capture(graph, lambda: call(*args), args[0])
        except Exception as error:
            found = first_error(error)
            usable = _usable(call, args, streams.main)
            return Outcome(False, found.text, found.code, found.name, None, usable, len(told))
        return Outcome(True, replay_equal=_replays(graph, outputs, call, args), compiles=len(told))


def _compiled(cell: Cell, step: Step) -> Callable:
    if cell.mode == EAGER:
        return step
    if cell.warmth != "closure":
        return torch.compile(step.__call__, mode=cell.mode)

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        def closure(*args: Tensor) -> tuple[Tensor, ...]:
            return step(*args)

        return torch.compile(closure, mode=cell.mode)(*args)

    return call


class _Streams:
    """The stream that captures, and what is done beside it."""

    def __init__(self, plan: str):
        self.plan, self.main, self.side = plan, torch.cuda.Stream(), torch.cuda.Stream()
        self.before = torch.cuda.Event()
        self.before.record(self.side)

    def capture(self, graph: torch.cuda.CUDAGraph, call: Callable, hidden: Tensor) -> list[Tensor]:
        """The outputs of the captured call; raises the first error, not what ends the capture after it."""
        first = None
        try:
            with torch.cuda.graph(graph, stream=self.main):
                try:
                    return self._body(call, hidden)
                except Exception as error:
                    first = error
                    raise
        except Exception as error:
            first = first or error
        raise first

    def _body(self, call: Callable, hidden: Tensor) -> list[Tensor]:
        if self.plan == "event_before":
            self.main.wait_event(self.before)
        if self.plan in ("joined", "unjoined"):
            self.side.wait_stream(self.main)
            with torch.cuda.stream(self.side):
                beside = hidden.float() * 2
        outputs = list(call())
        if self.plan == "joined":
            self.main.wait_stream(self.side)
            outputs.append(beside)
        return outputs


def _replays(graph: torch.cuda.CUDAGraph, outputs: list[Tensor], call: Callable, args: tuple[Tensor, ...]) -> bool:
    """Whether a replay on inputs that the capture did not see does what a plain call does."""
    for static, new in zip(args, inputs(BATCH, "cuda", seed=3), strict=True):
        static.copy_(new)
    for output in outputs:
        numerics.poison_(output)
    graph.replay()
    replayed = [output.clone() for output in outputs]
    plain = [*call(*args), args[0].float() * 2]  # beside it, where there is a side stream
    return all(numerics.bitwise_equal(*pair) for pair in zip(replayed, plain, strict=False))


def _usable(call: Callable, args: tuple[Tensor, ...], stream: torch.cuda.Stream) -> bool:
    try:
        timing.recover(stream)
        call(*args)
        torch.cuda.synchronize()
    except Exception:
        return False
    return True
