"""Starts the ranks of one setup after the other, each group under a time limit, and records what they measured.

A group that fails or hangs costs its own setup only: its processes are ended, what it had measured is kept, and the
next one starts. The launcher keeps the store at which the ranks meet, so that no port is guessed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from dsv4lab import comm, hardware, timing
from dsv4lab.allreduce import setups, worker
from dsv4lab.allreduce.setups import Setup
from dsv4lab.files import without_folders
from dsv4lab.journal import Journal
from dsv4lab.provenance import command_line, environment, git_state, kernel_hash
from dsv4lab.records import Clocks, Environment, Record
from dsv4lab.roofline import Work
from dsv4lab.verdict import CheckFailed

EXPERIMENT = "allreduce"
GROUP_S = 45.0
"""How long the ranks of one setup may take, their start included."""
TOTAL_S = 105.0
"""After this no further setup is started."""
SAMPLE_BUDGET_S = 0.05

_CHOICE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+)")
_TRANSPORT = re.compile(r"via ((?:P2P|SHM|NET)\S*)")


@dataclass(frozen=True)
class Group:
    """What the ranks of one setup said: a list of lines for each rank, and what went wrong, if anything."""

    lines: list[list[dict[str, Any]]]
    error: str | None


def run(
    ranks: int | None = None,
    *,
    quick: bool = False,
    cases: Sequence[str] | None = None,
    impls: Sequence[str] | None = None,
    directory: Path | str | None = None,
    seed: int = 0,
    total_s: float = TOTAL_S,
) -> Path:
    """Measures every setup and returns the new record file.

    With two GPUs or more it is NCCL and kernels over symmetric memory, on `ranks` of them (all, if None). Without, or
    asked for "gloo" alone, it is gloo on the CPU with `ranks` processes (2, if None).

    Args:
        quick: fewer sizes and setups.
        cases: sizes of messages, as "512KiB"; impls: names of setups. None takes all.
        total_s: seconds after which no further setup is started; those left out are named.

    Raises:
        ValueError: a name that does not exist, fewer than 2 ranks or more than GPUs. CheckFailed: at the end, with the
        file written, if a setup failed, gave a wrong sum or had no time; or nothing could be measured.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpus = gpus >= 2 and list(impls or ()) != ["gloo"]
    ranks = (gpus if on_gpus else 2) if ranks is None else ranks
    if not 2 <= ranks <= (gpus if on_gpus else 64):
        most = f"the {gpus} GPUs" if on_gpus else "64 processes"
        raise ValueError(f"ranks must be at least 2 and at most {most}, got {ranks}")
    known = {setup.name: setup for setup in (setups.GPU_SETUPS if on_gpus else setups.CPU_SETUPS)}
    some = setups.QUICK_SETUPS if quick and on_gpus else known.values()
    chosen = [known[name] for name in _chosen("impls", impls, known, [setup.name for setup in some])]
    lengths = {setups.label(nbytes): nbytes for nbytes in setups.SIZES}
    usual = setups.QUICK_SIZES if quick else setups.SIZES if on_gpus else setups.CPU_SIZES
    nbytes = tuple(lengths[name] for name in _chosen("cases", cases, lengths, [setups.label(size) for size in usual]))
    return _Sweep(ranks, on_gpus, nbytes, seed, directory).run(chosen, total_s)


class _Sweep:
    """One run: the ranks, what is shared by its records, and the file they go to."""

    def __init__(self, ranks: int, on_gpus: bool, sizes: tuple[int, ...], seed: int, directory: Path | str | None):
        self.ranks, self.on_gpus, self.sizes, self.seed = ranks, on_gpus, sizes, seed
        self.env = environment() if on_gpus else _without_gpu(environment("cpu"))
        self.shared = dict(seed=seed, argv=command_line(), git=git_state(), kernel_sha256=kernel_hash(worker))
        self.journal = Journal(EXPERIMENT, self.env.gpu, directory)

    def run(self, chosen: Sequence[Setup], total_s: float) -> Path:
        start, failures = time.monotonic(), []
        with self.journal:
            self.log = self._probe() if self.on_gpus else {}
            for setup in chosen:
                if time.monotonic() - start > total_s:
                    failures.append(f"{setup.name}: no time left")
                    continue
                failures += self._measure(setup)
            if not self.journal.records:
                raise CheckFailed(f"nothing could be measured: {'; '.join(failures)}")
            path = self.journal.finish()
        if failures:
            raise CheckFailed(f"{'; '.join(failures)} (the rest is in {path})")
        return path

    def _measure(self, setup: Setup) -> list[str]:
        """Records one setup; returns a line for each thing that went wrong."""
        before = self._clocks()
        group = self._group(setup)
        clocks = Clocks(before=before, after=self._clocks())
        shared = list(zip(*group.lines, strict=False))  # what every rank got to
        found = [self._record(setup, lines, clocks) for lines in shared if lines[0]["check"]["passed"]]
        self.journal.add(found)
        _say(f"{setup.name}: {len(found)} records" + (f", {group.error}" if group.error else ""))
        wrong = [
            f"{setup.impl_name(line['impl'])} {line['mode']} at {setups.label(line['bytes'])}: error "
            f"{line['check']['error']:.2e}, over {line['check']['tolerance']:.2e}"
            for line, *_ in shared
            if not line["check"]["passed"]
        ]
        return wrong + ([f"{setup.name}: {group.error}"] if group.error else [])

    def _record(self, setup: Setup, lines: Sequence[Mapping[str, Any]], clocks: Clocks) -> Record:
        first, nbytes = lines[0], lines[0]["bytes"]
        config = {
            "ranks": self.ranks,
            "message_bytes": nbytes,
            "mode": first["mode"],
            "backend": setup.backend,
            "environment": _steering(setup),
        }
        if self.on_gpus:
            config |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "link": self.log.get("link")}
        if setup.name == "nccl":
            config |= {"transport": self.log.get("transport"), "chosen": self.log.get(nbytes)}
        samples = [list(of_ranks) for of_ranks in zip(*(line["samples_us"] for line in lines), strict=True)]
        return Record(
            experiment=EXPERIMENT,
            case=f"n{self.ranks}_{setups.label(nbytes)}",
            impl=setup.impl_name(first["impl"]),
            config=config,
            method={
                "timer": "cuda events" if self.on_gpus else "perf_counter",
                "calls": first["calls"],
                "warm_up": "one untimed run of the calls before each timed one",
                "sample": "the slowest rank's",
            },
            samples_us=[max(of_ranks) for of_ranks in samples],
            check=dict(first["check"]),
            work=Work(float((self.ranks - 1) * nbytes // 2), comm.wire_bytes(nbytes, self.ranks)),
            date_utc=datetime.now(UTC),
            env=self.env,
            clocks=clocks,
            **self.shared,
        )

    def _probe(self) -> dict[Any, str]:
        """What joins the GPUs, and what NCCL's own log says it takes: {"link", "transport", bytes: "RING LL"}."""
        with tempfile.TemporaryDirectory() as folder:
            told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,TUNING", "NCCL_DEBUG_FILE": f"{folder}/%p"}
            group = self._group(Setup("probe", "nccl", ("all_reduce",), told, ("eager",)), timed=False)
            text = "\n".join(path.read_text(errors="replace") for path in Path(folder).iterdir())
        if group.error:
            _say(f"probe: {group.error}")
        log: dict[Any, str] = {int(size): f"{algo} {proto}" for size, algo, proto in _CHOICE.findall(text)}
        if transports := sorted(set(_TRANSPORT.findall(text))):
            log["transport"] = ", ".join(transports)
        if link := hardware.link():
            log["link"] = link
        return log

    def _group(self, setup: Setup, timed: bool = True) -> Group:
        """Runs the ranks of `setup` until all have ended, one has failed or the time is over."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = worker.Job(
            rank=0,
            ranks=self.ranks,
            port=store.port,
            launcher=os.getpid(),
            backend=setup.backend,
            impls=setup.impls,
            modes=setup.modes,
            sizes=self.sizes,
            seed=self.seed,
            budget_s=SAMPLE_BUDGET_S,
            timed=timed,
        )
        jobs = [json.dumps(asdict(replace(job, rank=rank))) for rank in range(self.ranks)]
        commands = [[sys.executable, "-c", f"from {worker.__name__} import main; main()", job] for job in jobs]
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, f"{rank}.jsonl") for rank in range(self.ranks)]
            with _started(commands, outputs, os.environ | setups.variables(setup)) as processes:
                error = _wait(processes, GROUP_S)
            if error == "":
                error = _last_words(outputs, processes)
            return Group([_lines(path) for path in outputs], error)

    def _clocks(self) -> dict[str, Any] | None:
        return timing.clocks() if self.on_gpus else None


@contextmanager
def _started(
    commands: Sequence[list[str]], outputs: Sequence[Path], variables: Mapping[str, str]
) -> Iterator[list[subprocess.Popen]]:
    """The processes, each writing to its file and its errors beside it; none of them outlives the block."""
    processes: list[subprocess.Popen] = []
    try:
        for command, path in zip(commands, outputs, strict=True):
            with path.open("wb") as out, path.with_suffix(".err").open("wb") as err:
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables)
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _wait(processes: Sequence[subprocess.Popen], limit_s: float) -> str | None:
    """None when all have ended well, "" when one has not, else that the time is over."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes):
            return ""
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
    return f"not done within {limit_s:g} s"


def _last_words(outputs: Sequence[Path], processes: Sequence[subprocess.Popen]) -> str:
    """What each rank that ended by itself, and badly, said last."""
    said = []
    for rank, (path, process) in enumerate(zip(outputs, processes, strict=True)):
        if process.returncode not in (0, -signal.SIGKILL):
            text = path.with_suffix(".err").read_text(errors="replace").strip()
            last = text.splitlines()[-1][:300] if text else f"ended with {process.returncode}"
            said.append(f"rank {rank}: {without_folders(last)}")
    return "; ".join(said) or "a rank was killed"


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a rank measured; libraries print there too, and its last line may be cut."""
    text = path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in text if line.startswith('{"impl"') and line.endswith("}")]


def _steering(setup: Setup) -> str:
    """The variables that NCCL saw, the user's own among them, without folders of this machine."""
    seen = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")} | setups.variables(setup)
    return " ".join(f"{key}={without_folders(value)}" for key, value in sorted(seen.items()))


def _without_gpu(env: Environment) -> Environment:
    return env.model_copy(update={"gpu": None, "gpu_count": 0, "capability": None, "driver": None})


def _chosen(
    argument: str, names: Sequence[str] | None, known: Mapping[str, Any], default: Sequence[str]
) -> Sequence[str]:
    for name in names or ():
        if name not in known:
            raise ValueError(f"{argument} has no {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names)) if names else default


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
