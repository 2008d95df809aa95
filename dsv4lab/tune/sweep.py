"""The sweep that all targets share: compile, check, time briefly, time the best again together, write that down.

A point is one shape; what was measured of it is on disk before the next begins. Every candidate is checked against the
module's reference on poisoned outputs before it is timed, as `dsv4lab.measure` does. Weights or caches rotate, so that
at least `timing.ROTATION_BYTES` lie between two uses of a set.
"""

import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import ceil
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from dsv4lab import timing
from dsv4lab.journal import Journal
from dsv4lab.records import Clocks, Record
from dsv4lab.verdict import CheckFailed, verdict

DEFAULT = "default"
"""The candidate that stands for what runs without a tuned table."""

TOGETHER = 16
"""Candidates whose graphs are in memory at once."""
BRIEF_REPLAYS, BRIEF_S, LONG_REPLAYS, LONG_S = 5, 0.5, 30, 0.5
MIN_SETS, MAX_SETS = 2, 64


@dataclass(frozen=True)
class Point:
    """One shape to tune, and what to try: names, and what the module's `prepare` takes for them.

    module: as a kernel module, with `reference`, `baseline`, `judge`, `make_inputs(case)`, `prepare(choice, inputs)`,
    `config(case)`, `notes(choice, inputs)`, `work(case)` and `rotated_bytes(case)`; and for `Processes` also
    `blank(case)`, inputs to compile for, and `variant(case)`, alike for cases that are compiled alike.
    sha256: of the kernel's sources. kind: candidates of a kind compete with each other alone, and the best `finalists`
    of each are timed again.
    """

    name: str
    module: Any
    case: Any
    candidates: Mapping[str, Any]
    sha256: str
    kind: Callable[[Any], Hashable] = lambda choice: None
    finalists: int = 4


@dataclass(frozen=True)
class Sweep:
    """What all points of a sweep share. shared: what every record has; deadline: on the monotonic clock."""

    device: torch.device
    shared_memory: int
    shared: Mapping[str, Any]
    compiler: Any
    deadline: float
    seed: int = 0

    def run(self, points: Sequence[Point], journal: Journal, say: Callable[[str], None]) -> list[str]:
        """Measures the points that the journal lacks; the names of those that it still lacks."""
        there = {record.case for record in journal.records}
        todo = [point for point in points if point.name not in there]
        for point in todo:
            self.compiler.begin(point)
        left = []
        for point in tqdm(todo, desc=journal.experiment, unit="shape", disable=None):
            if time.monotonic() >= self.deadline:
                left.append(point.name)
                continue
            try:
                found, dropped = self.measure(point)
            except (CheckFailed, torch.OutOfMemoryError) as error:
                say(f"{point.name}: {str(error).splitlines()[0]}")
                left.append(point.name)
            else:
                journal.add(found)
                say(_summary(point, found, dropped))
            torch.cuda.empty_cache()
        return left

    def measure(self, point: Point) -> tuple[list[Record], int]:
        """The records of the best candidates and of the default, and how many candidates were wrong or did not run."""
        module, case = point.module, point.case
        bytes_per_call = module.rotated_bytes(case)
        sets = min(max(ceil(timing.ROTATION_BYTES / bytes_per_call), MIN_SETS), MAX_SETS)
        inputs = module.make_inputs(case, device=self.device, seed=self.seed, sets=sets)
        checks, complaints = self._check(point, inputs[0])
        brief: dict[str, float] = {}
        for names in _groups(list(checks), TOGETHER):
            timed = self._time(point, names, inputs, BRIEF_REPLAYS, BRIEF_S)
            brief |= {name: median(samples) for name, samples in timed.samples_us.items()}
        finalists = _best(point, brief)
        before = timing.clocks(self.device)
        timed = self._time(point, finalists, inputs, LONG_REPLAYS, LONG_S)
        clocks = Clocks(before=before, after=timing.clocks(self.device))
        rotated = sets * bytes_per_call
        cache = "cold" if rotated >= timing.ROTATION_BYTES else "rotated"
        method = {"timer": "cuda graph replay", "calls": sets, "sets": sets, "rotated_bytes": rotated}
        return [
            Record(
                **self.shared,
                case=point.name,
                impl=name,
                config=module.config(case) | {"cache": cache} | module.notes(point.candidates[name], inputs[0]),
                method=method | {"candidates": len(point.candidates), "dropped": len(complaints)},
                samples_us=samples,
                check=checks[name],
                work=module.work(case),
                kernel_sha256=point.sha256,
                seed=self.seed,
                date_utc=datetime.now(UTC),
                clocks=clocks,
            )
            for name, samples in timed.samples_us.items()
        ], len(complaints)

    def _check(self, point: Point, inputs: Any) -> tuple[dict[str, dict], dict[str, str]]:
        """The verdicts of the candidates that compile, fit and are right; for each of the others what it is not."""
        module, checks, complaints = point.module, {}, {}
        compiled = self.compiler.outcome(point, inputs)
        expected = module.reference(inputs), module.baseline(inputs)
        for name, choice in point.candidates.items():
            outcome = compiled[name]
            if isinstance(outcome, Exception) or outcome > self.shared_memory:
                complaints[name] = f"needs {outcome} bytes" if isinstance(outcome, int) else repr(outcome)
                continue
            try:
                checks[name] = verdict(module, partial(module.prepare, choice), inputs, *expected)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # raises if it broke more than itself
                complaints[name] = repr(error)
        if not checks:
            raise CheckFailed(f"no candidate of {len(complaints)} is right: {next(iter(complaints.values()))[:200]}")
        return checks, complaints

    def _time(
        self, point: Point, names: Iterable[str], inputs: Sequence[Any], replays: int, budget_s: float
    ) -> timing.Replays:
        launches = {name: [point.module.prepare(point.candidates[name], each) for each in inputs] for name in names}
        return timing.graph_replay_us(launches, replays, budget_s=budget_s, device=self.device)


def _groups(names: list[str], size: int) -> Iterable[list[str]]:
    return (names[first : first + size] for first in range(0, len(names), size))


def _best(point: Point, medians: Mapping[str, float]) -> list[str]:
    """The fastest of each kind, and the default."""
    if not medians:
        raise CheckFailed("no candidate could be timed")
    chosen, counts = [], {}
    for name in sorted(medians, key=medians.get):
        kind = point.kind(point.candidates[name])
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= point.finalists or name == DEFAULT:
            chosen.append(name)
    return chosen


def winner(found: Iterable[Record]) -> Record:
    """The fastest."""
    return min(found, key=lambda record: record.median_us)


def _summary(point: Point, found: Sequence[Record], dropped: int) -> str:
    best = winner(found)
    text = f"{point.name}: {best.impl} {best.median_us:.1f} us"
    if default := [record.median_us for record in found if record.impl == DEFAULT]:
        text += f", default {default[0]:.1f} us ({default[0] / best.median_us:.2f}x)"
    return text + (f"; {dropped} of {len(point.candidates)} candidates dropped" if dropped else "")


def jobs_here() -> int:
    """Processes that may compile beside this one."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)
