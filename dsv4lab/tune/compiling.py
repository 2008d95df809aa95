"""Triton launches that are looked at or compiled instead of run; compilation of many candidates at once.

SGLang's kernels are compiled by processes that call SGLang's own wrappers on CPU tensors, for a GPU they only know by
name, into the cache on disk that Triton keeps: what then runs on the GPU is found there. Ours, whose plans ask for the
device, are compiled by threads on the device's own tensors.
"""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import Any

from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsv4lab.static import NamedTarget

TIMEOUT_S = 120.0
"""The longest a candidate may compile, waiting for its turn included."""


@contextmanager
def launches(compile: bool) -> Iterator[list[tuple[dict, Any]]]:
    """Inside, no Triton kernel runs; gives (keyword arguments, compiled kernel or None) of each that would have."""
    seen, run = [], JITFunction.run

    def instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options) if compile else None
        seen.append((options, compiled))
        return compiled

    JITFunction.run = instead
    try:
        yield seen
    finally:
        JITFunction.run = run


def shared_bytes(launch: Callable[[], object]) -> int:
    """Compiles what `launch` would run; the shared memory of a block, in bytes."""
    with launches(compile=True) as seen:
        launch()
    return max(compiled.metadata.shared for _, compiled in seen)


class Processes:
    """Compiles the candidates of points whose module has `blank` inputs, in `jobs` processes, from `begin` on."""

    def __init__(self, arch: str, jobs: int):
        self.arch, self.jobs = arch, jobs
        self.futures: dict[tuple, Future] = {}
        self.pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.jobs, get_context("spawn"), _enter)

    def begin(self, point: Any) -> None:
        for name, choice in point.candidates.items():
            key = self._key(point, name)
            if key not in self.futures:
                self.futures[key] = self._submit(point, choice)

    def outcome(self, point: Any, inputs: Any) -> Mapping[str, int | Exception]:
        """Shared memory of each candidate, or what went wrong; waits for it."""
        found: dict[str, int | Exception] = {}
        for name, choice in point.candidates.items():
            try:
                found[name] = self._result(self._key(point, name), point, choice)
            except Exception as error:
                found[name] = error
        return found

    def _result(self, key: tuple, point: Any, choice: Any) -> int:
        try:
            return self.futures[key].result(TIMEOUT_S)
        except BrokenProcessPool:  # one took all with it: each of the others again, alone
            self.futures[key] = self._submit(point, choice)
            return self.futures[key].result(TIMEOUT_S)

    def _submit(self, point: Any, choice: Any) -> Future:
        try:
            return self.pool.submit(*self._task(point, choice))
        except BrokenProcessPool:
            self.pool = self._start()
            return self.pool.submit(*self._task(point, choice))

    def _task(self, point: Any, choice: Any) -> tuple:
        return _compile, self.arch, point.module.__name__, point.case, choice

    def _key(self, point: Any, name: str) -> tuple:
        return point.module.__name__, name, point.module.variant(point.case)

    def close(self) -> None:
        for process in list((self.pool._processes or {}).values()):
            process.kill()
        self.pool.shutdown(cancel_futures=True)


class Threads:
    """Compiles the candidates of one point on its own inputs, in threads of this process."""

    def __init__(self, jobs: int):
        self.jobs = jobs

    def begin(self, point: Any) -> None:
        """Nothing: there are no inputs yet."""

    def outcome(self, point: Any, inputs: Any) -> Mapping[str, int | Exception]:
        with launches(compile=True), ThreadPoolExecutor(self.jobs) as pool:
            call = lambda choice: point.module.prepare(choice, inputs)()  # noqa: E731
            futures = {name: pool.submit(call, choice) for name, choice in point.candidates.items()}
        return {name: future.exception() or 0 for name, future in futures.items()}

    def close(self) -> None:
        """Nothing to end."""


def _enter() -> None:
    """In a new process: end when the parent does, however it does."""
    parent = parent_process().sentinel
    threading.Thread(target=lambda: (wait([parent]), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to answer
    quiet()
    warnings.simplefilter("ignore")  # what importing SGLang says, once a process


def quiet() -> None:
    """Keeps SGLang from telling of every table that it does not find."""
    logging.getLogger("sglang").setLevel(logging.ERROR)


def _compile(arch: str, module: str, case: Any, choice: Any) -> int:
    found = import_module(module)
    launch = found.prepare(choice, found.blank(case))  # imports SGLang, which asks Triton for the real GPU
    driver.set_active(NamedTarget(arch))
    return shared_bytes(launch)
