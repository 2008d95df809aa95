"""The capture matrix: every cell in a process of its own, many at once, each result on disk as soon as it exists.

Processes are forked from a server that has imported PyTorch and its compiler and never touched CUDA, so that a cell
costs its CUDA context and its compilation. A cell that hangs ends itself by an alarm; one that dies is a result too.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from tqdm import tqdm

from dsv4lab import timing
from dsv4lab.capture.cells import EAGER, Cell, Outcome, attempt, cells, configure
from dsv4lab.capture.step import ATTENTION
from dsv4lab.files import without_folders
from dsv4lab.journal import Journal
from dsv4lab.kernels import sparse_mla
from dsv4lab.peers import stock_simt
from dsv4lab.provenance import command_line, environment, git_state, kernel_hash
from dsv4lab.records import Clocks, Record

EXPERIMENT = "capture"
JOBS = 16
TIMEOUT_S = 120
_PRELOAD = ["torch", "triton", "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.triton"]


def run(
    impls: Sequence[str] | None = None,
    *,
    jobs: int | None = None,
    timeout_s: int = TIMEOUT_S,
    directory: Path | str | None = None,
) -> Path:
    """Tries all cells and returns the new record file, one record a cell.

    Args:
        impls: attention kernels out of `ATTENTION`; None takes those that can run here, and says which cannot.
        jobs: cells at once; None for one a core, 16 at most.
        timeout_s: what a cell may take.

    Raises:
        RuntimeError: no CUDA GPU. ValueError: an attention that is unknown or cannot run, a number below 1.
    """
    for name, number in (("jobs", jobs), ("timeout_s", timeout_s)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    device, chosen = timing.require_gpu(), _chosen(impls)
    shared = dict(seed=0, argv=command_line(), git=git_state(), env=environment(device))
    record = partial(_record, shared=shared, sha256=kernel_hash(sparse_mla))
    todo = sorted((cell for name in chosen for cell in cells(name)), key=partial(_wave, first=chosen[0]))
    with Journal(EXPERIMENT, shared["env"].gpu, directory) as journal:
        method = "forkserver" if _forks(todo[0]) else "spawn"
        found = outcomes(todo, attempt, jobs or min(os.cpu_count() or 1, JOBS), timeout_s, method)
        for cell, outcome in tqdm(found, desc=EXPERIMENT, unit="cell", total=len(todo), disable=None):
            journal.add([record(cell, outcome)])
        right = sum(record.check["passed"] for record in journal.records)
        print(f"{right} of {len(todo)} cells captured and replayed right", file=sys.stderr)
        return journal.finish()


def _chosen(attention: Sequence[str] | None) -> list[str]:
    reason = stock_simt.unavailable()
    names = attention
    if names is None:
        names = [name for name in ATTENTION if name != stock_simt.IMPL or not reason]
        if reason:
            print(f"without {stock_simt.IMPL}: {reason}", file=sys.stderr)
    for name in names or ("",):
        if name not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {name!r}")
        if name == stock_simt.IMPL and reason:
            raise ValueError(f"attention {name!r} cannot run here: {reason}")
    return list(dict.fromkeys(names))


def _wave(cell: Cell, first: str) -> int:
    """What compiles and tunes for long comes first and once, so that the rest finds it in the shared cache."""
    if cell.warmth == "disk":
        return 3
    if cell.mode == EAGER or cell.warmth == "cold":
        return 1
    return 0 if cell.attention == first and cell.stream == "none" and cell.warmth in ("same", "other") else 2


def _forks(cell: Cell) -> bool:
    """Whether CUDA works in a process forked from the server: not if an import there has touched it."""
    ((_, outcome),) = outcomes([cell], _touch, 1, TIMEOUT_S)
    return outcome.captured


def _touch(cell: Cell) -> Outcome:
    return Outcome(captured=torch.ones(1, device="cuda").item() == 1)


def _record(cell: Cell, outcome: Outcome, *, shared: dict, sha256: str) -> Record:
    return Record(
        experiment=EXPERIMENT,
        case=cell.name,
        impl=cell.attention,
        config=cell.config,
        method={"name": "one capture in a process of its own", "compile_threads": 1},
        samples_us=[],
        check={"passed": bool(outcome.captured and outcome.replay_equal)},
        work=None,
        date_utc=datetime.now(UTC),
        kernel_sha256=sha256,
        clocks=Clocks(before=None, after=None),
        result=asdict(outcome),
        **shared,
    )


def outcomes(
    todo: Sequence[Cell], attempt: Callable[[Cell], Outcome], jobs: int, timeout_s: int, method: str = "forkserver"
) -> Iterator[tuple[Cell, Outcome]]:
    """Each cell with what became of it, as they end; `jobs` of them at once. Ends what it started when left early."""
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(_PRELOAD)
    waiting, running = list(reversed(todo)), {}
    with tempfile.TemporaryDirectory(prefix="dsv4lab-capture-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop()
                    receiving, sending = context.Pipe(duplex=False)
                    arguments = cell, attempt, folder, timeout_s, sending
                    process = context.Process(target=_child, args=arguments, daemon=True)
                    process.start()
                    sending.close()
                    running[receiving] = process, cell
                for receiving in wait(list(running)):
                    process, cell = running.pop(receiving)
                    yield cell, _outcome(receiving, process, timeout_s)
        finally:
            for process, _ in running.values():
                process.kill()
                process.join()


def _outcome(receiving: Connection, process: multiprocessing.Process, timeout_s: int) -> Outcome:
    """What a cell sent, or how it ended without having sent anything."""
    try:
        return receiving.recv()
    except EOFError:
        process.join()
        timed_out = process.exitcode == -signal.SIGALRM
        reason = f"no end within {timeout_s} s" if timed_out else f"the process died with exit code {process.exitcode}"
        return Outcome(captured=False, first_error=reason)
    finally:
        receiving.close()
        process.join()


def _child(cell: Cell, attempt: Callable[[Cell], Outcome], folder: str, timeout_s: int, sending: Connection) -> None:
    signal.alarm(timeout_s)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    configure(cell, os.path.join(folder, "shared"), os.path.join(folder, f"cold-{os.getpid()}"))
    try:
        sending.send(attempt(cell))
    except Exception as error:
        text = without_folders(f"outside of the capture: {type(error).__name__}: {error}").splitlines()[0]
        sending.send(Outcome(captured=False, first_error=text))
    sending.close()
    os._exit(0)  # what a broken capture left behind may hang or crash on the way out
