"""One rank: checks and times the all-reduces it is told, and prints a JSON line for each.

Started by `sweep`, which gives it a `Job` as JSON and holds the store at which the ranks meet; it does not outlive it.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dsv4lab import numerics

SAMPLES, MIN_SAMPLES = 30, 5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What one rank is to do; sizes in bytes. budget_s: for the samples of one size and mode."""

    rank: int
    ranks: int
    port: int
    launcher: int
    backend: str
    impls: tuple[str, ...]
    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    seed: int
    budget_s: float
    timed: bool = True
    """False: one call of each size, for what NCCL's log says of it."""


@dataclass(frozen=True)
class Call:
    """An all-reduce that can be launched again and again. in_place: each call takes the result of the one before."""

    refill: Callable[[], object]
    launch: Callable[[], Tensor]
    in_place: bool


def calls_per_sample(nbytes: int) -> int:
    """How many calls stand between two readings of the clock; in place, 8 ranks keep within bf16 for 2 x 16 of them."""
    return 16 if nbytes <= 1 << 20 else 4


def _all_reduce(source: Tensor) -> Call:
    buffer = torch.empty_like(source)

    def launch() -> Tensor:
        dist.all_reduce(buffer)
        return buffer

    return Call(lambda: buffer.copy_(source), launch, in_place=True)


def _symmetric(source: Tensor) -> tuple[Tensor, str]:
    """A buffer like `source` that every rank can read, and the name of the group."""
    from torch.distributed import _symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    buffer = symmetric.empty(source.numel(), dtype=source.dtype, device=source.device)
    symmetric.rendezvous(buffer, group=group)
    return buffer, group


def _one_shot(source: Tensor) -> Call:
    buffer, group = _symmetric(source)
    out = torch.empty_like(source)
    operation = torch.ops.symm_mem.one_shot_all_reduce_out
    return Call(lambda: buffer.copy_(source), lambda: operation(buffer, "sum", group, out), in_place=False)


def _two_shot(source: Tensor) -> Call:
    buffer, group = _symmetric(source)
    operation = torch.ops.symm_mem.two_shot_all_reduce_
    return Call(lambda: buffer.copy_(source), lambda: operation(buffer, "sum", group), in_place=True)


IMPLEMENTATIONS = {"all_reduce": _all_reduce, "one_shot": _one_shot, "two_shot": _two_shot}


class Rank:
    """This process among the others."""

    def __init__(self, job: Job):
        self.job = job
        self.cuda = job.backend == "nccl"
        self.device = torch.device("cuda", job.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        store = dist.TCPStore("127.0.0.1", job.port, job.ranks, is_master=False)
        device = self.device if self.cuda else None
        dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.ranks, device_id=device)

    def run(self) -> None:
        for mode in self.job.modes:  # what may fail in a capture comes last
            for impl in self.job.impls:
                for nbytes in self.job.sizes:
                    self._measure(impl, nbytes, mode)

    def _measure(self, impl: str, nbytes: int, mode: str) -> None:
        call = IMPLEMENTATIONS[impl](self._input(self.job.rank, nbytes))
        if not self.job.timed:
            call.refill()
            call.launch()
            return self._wait()
        calls = calls_per_sample(nbytes) if self.cuda else 1  # the CPU's clock needs no train of calls
        reference, baseline = self._expected(nbytes)
        check = self._check(call, call.launch, 1, reference, baseline)
        replay = self._repeated(call, calls, mode)
        if mode == "graph":
            check |= self._check(call, replay, calls, reference, baseline)
        line = {"impl": impl, "bytes": nbytes, "mode": mode, "calls": calls, "check": check}
        if check["passed"]:
            line["samples_us"] = [us / calls for us in self._samples_us(call, replay)]
        print(json.dumps(line), flush=True)

    def _input(self, rank: int, nbytes: int) -> Tensor:
        """bf16 [nbytes / 2] of `rank`, the same wherever it is made."""
        generator = torch.Generator(self.device).manual_seed(self.job.seed * 1000 + rank)
        return torch.randn(nbytes // 2, generator=generator, device=self.device).bfloat16()

    def _expected(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """The sum over all ranks in float64, and what bf16 makes of it."""
        exact, rounded = self._input(0, nbytes).double(), self._input(0, nbytes)
        for rank in range(1, self.job.ranks):
            other = self._input(rank, nbytes)
            exact += other.double()
            rounded += other
        return exact, rounded

    def _check(
        self, call: Call, run: Callable[[], Tensor], calls: int, reference: Tensor, baseline: Tensor
    ) -> dict[str, float | bool]:
        """The verdict on `calls` calls in a row, the worst of all ranks; each may add its own rounding."""
        call.refill()
        out = run()
        growth = float(self.job.ranks ** (calls - 1)) if call.in_place else 1.0
        found = asdict(numerics.check(out.double() / growth, reference, baseline.double()))
        worst = torch.tensor([found["error"], found["tolerance"]], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        error, tolerance = worst[0].item(), calls * worst[1].item()
        return found | {"error": error, "tolerance": tolerance, "passed": error <= tolerance}

    def _repeated(self, call: Call, calls: int, mode: str) -> Callable[[], Tensor]:
        """`calls` calls as one: launched one by one, or captured and replayed."""
        out: list[Tensor] = []

        def launches() -> Tensor:
            out[:] = [call.launch() for _ in range(calls)]
            return out[-1]

        if mode == "eager":
            return launches
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
            launches()

        def replay() -> Tensor:
            graph.replay()
            return out[-1]

        return replay

    def _samples_us(self, call: Call, run: Callable[[], Tensor]) -> list[float]:
        """Times of `run`, the same number on every rank: as many as the slowest one's budget holds."""
        first = torch.tensor(self._time_us(call, run), dtype=torch.float64, device=self.device)
        dist.all_reduce(first, dist.ReduceOp.MAX)
        wanted = int(self.job.budget_s / (2e-6 * first.item()))
        return [self._time_us(call, run) for _ in range(min(SAMPLES, max(MIN_SAMPLES, wanted)))]

    def _time_us(self, call: Call, run: Callable[[], Tensor]) -> float:
        """Microseconds of one `run`, after one that is not timed and lets the ranks catch up with one another."""
        call.refill()
        run()
        if not self.cuda:
            start = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    def _wait(self) -> None:
        dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()


def _die_with(launcher: int) -> None:
    """Has the kernel end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")


def main() -> None:
    fields = json.loads(sys.argv[1])
    job = Job(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
    _die_with(job.launcher)
    status = 0
    try:
        Rank(job).run()
        dist.barrier()
    except Exception as error:
        status = 1
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is said, and the end of a communicator can wait for ever


if __name__ == "__main__":
    main()
