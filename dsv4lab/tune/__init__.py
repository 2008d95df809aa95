"""`dsv4lab tune`: what is fastest on this very GPU, for the shapes of DeepSeek-V4-Flash on one tensor-parallel rank.

A target is swept point by point (`sweep`), its records end in a file of experiment `tune_<target>`, and from them come
the tables (`dsv4lab.tuned` says where). A run that is cut off, or whose budget is spent, leaves a `.partial` file that
the next run takes up, as long as GPU, Triton, SGLang and kernel are the same.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch
from tqdm import tqdm

from dsv4lab import hardware, timing, tuned
from dsv4lab.journal import Journal
from dsv4lab.provenance import command_line, environment, git_state
from dsv4lab.records import Environment, Record
from dsv4lab.tune.compiling import Processes, Threads, quiet
from dsv4lab.tune.sweep import Sweep, jobs_here

SEED = 0


@dataclass(frozen=True)
class Target:
    """`module` has points(tp, sms=, shared=, arch=) and write(root, gpu, tp, records) by name. sglang: its kernel."""

    experiment: str
    module: str
    points: str = "points"
    write: str = "write"
    sglang: bool = False

    def call(self, name: str, *args, **options):
        return getattr(import_module(f"{__name__}.{self.module}"), name)(*args, **options)


TARGETS = {
    "moe": Target("tune_moe", "moe", sglang=True),
    "fp8-gemm": Target("tune_fp8_gemm", "fp8_gemm", sglang=True),
    "gemm": Target("tune_gemm", "ours", "gemm_points", "write_gemm"),
    "attention": Target("tune_attention", "ours", "attention_points", "write_attention"),
    "indexer": Target("tune_indexer", "ours", "indexer_points", "write_indexer"),
}


@dataclass(frozen=True)
class Outcome:
    """Of one target: its record file, or the `.partial` one if points are left, and the tables."""

    record: Path
    tables: list[Path]
    left: list[str]


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)


def run(
    names: Sequence[str],
    *,
    tp: int = 1,
    budget_s: float = 600.0,
    jobs: int | None = None,
    directory: Path | str | None = None,
    say: Callable[[str], None] = _say,
) -> dict[str, Outcome]:
    """Tunes the targets one after another, those that matter most first, and writes their tables.

    budget_s: no point is begun past it, all targets together. jobs: processes that compile. directory: where the record
    files go; None is the records folder of the checkout.

    ValueError naming what is wrong with an argument; RuntimeError without a CUDA GPU.
    """
    chosen = _chosen(names)
    root = tuned.required()
    if budget_s <= 0 or (jobs is not None and jobs < 1):
        raise ValueError(f"budget_s and jobs must be positive, got {budget_s} and {jobs}")
    device, deadline = timing.require_gpu(), time.monotonic() + budget_s
    quiet()
    with _untuned(root):
        env, gpu = environment(device), hardware.probe()
        arch = hardware.arch_key(gpu["capability"])
        limits = dict(sms=gpu["sms"], shared=gpu["shared_memory_per_block"], arch=arch)
        try:
            plans = {name: TARGETS[name].call(TARGETS[name].points, tp, **limits) for name in chosen}
        except ImportError as error:
            raise ValueError(f"SGLang does not load ({error}): pip install '.[kernels,serve]'") from error
        outcomes = {}
        for name, points in plans.items():
            target, kinds = TARGETS[name], {point.sha256 for point in points}
            journal = Journal(target.experiment, env.gpu, directory, lambda record, k=kinds: _fits(record, env, k))
            many = jobs or jobs_here()
            compiler = Processes(arch, many) if target.sglang else Threads(many)
            shared = dict(experiment=target.experiment, argv=command_line(), git=git_state(), env=env)
            sweep = Sweep(device, limits["shared"], shared, compiler, deadline, SEED)
            try:
                with journal:
                    left = sweep.run(points, journal, say)
            finally:
                compiler.close()
            outcomes[name] = _finish(target, root, tp, journal, left)
    return outcomes


def _chosen(names: Sequence[str]) -> list[str]:
    """In the order of worth; all for none. ValueError naming a stranger, or what is not installed."""
    if unknown := [name for name in names if name not in TARGETS]:
        raise ValueError(f"there is no target {unknown[0]!r} to tune; known: {', '.join(TARGETS)}")
    chosen = [name for name in TARGETS if name in names or not names]
    if (needing := [name for name in chosen if TARGETS[name].sglang]) and find_spec("sglang") is None:
        raise ValueError(f"{needing[0]} is a kernel of SGLang, which is not installed: pip install '.[serve]'")
    return chosen


@contextmanager
def _untuned(root: Path) -> Iterator[None]:
    """Inside, `default` is what runs without tuned tables."""
    with patch.dict(os.environ, {tuned.VARIABLE: ""}):
        if os.environ.get(tuned.MOE_VARIABLE) == str(tuned.sglang_folder(root)):
            del os.environ[tuned.MOE_VARIABLE]
        yield


def _fits(record: Record, env: Environment, kernels: set[str]) -> bool:
    """Whether what was measured before was measured alike."""
    same = all(
        getattr(record.env, name) == getattr(env, name) for name in ("gpu", "driver", "torch", "triton", "sglang")
    )
    return same and record.kernel_sha256 in kernels and record.seed == SEED


def _finish(target: Target, root: Path, tp: int, journal: Journal, left: list[str]) -> Outcome:
    gpu = torch.cuda.get_device_name()
    tables = target.call(target.write, root, gpu, tp, journal.records)
    if not journal.records:
        journal.path.unlink()
    return Outcome(journal.path if left or not journal.records else journal.finish(), tables, left)


__all__ = ["TARGETS", "Outcome", "run"]
