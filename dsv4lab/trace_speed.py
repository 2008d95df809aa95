"""How fast `dsv4lab profile` is: a synthetic trace of a million kernels, beside HolisticTraceAnalysis on the same file.

    python -m dsv4lab.trace_speed --rival OTHER_VENV/bin/python

Each program runs in a process of its own under GNU time, in turns. HolisticTraceAnalysis lives in an environment of its
own: `pip install HolisticTraceAnalysis ijson 'pandas<3'`.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro

from dsv4lab import provenance, records
from dsv4lab.records import Clocks, Record
from dsv4lab.roofline import Work

EXPERIMENT = "trace_speed"
OURS = "dsv4lab"
STEPS = 10
"""As few as profiles have: HolisticTraceAnalysis takes a time that grows with events times steps."""

BACKENDS = ("JSON", "IJSON_BATCH_AND_COMPRESS")
"""Of its readers, the default and the one for large files."""

NAMES = (
    "fused_moe_kernel",
    "_w8a8_block_fp8_matmul",
    "nvjet_sm90_tst_64x32_64x16_2x1_v_bz_TNT",
    "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
    "triton_poi_fused_copy__mul_sum_0",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_tiled_sparse_decode_kernel",
)
_RIVAL = """
import sys
from hta.common.trace_parser import set_default_trace_parsing_backend
from hta.configs.parser_config import ParserBackend
from hta.trace_analysis import TraceAnalysis
set_default_trace_parsing_backend(ParserBackend[sys.argv[2]])
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="", include_last_profiler_step=True)
kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False)
print(kinds["sum"].sum())
"""


@dataclass(frozen=True)
class Run:
    """One process: wall and CPU seconds, peak memory in MiB, and the GPU time in µs that it found."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    found_us: float


def synthetic(path: Path, kernels: int) -> float:
    """Writes a trace of that many kernels, each launched by a call of its own; returns their time in µs.

    The same bytes each time: names and durations come from a linear congruential generator.
    """
    total = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],\n')
        file.write('"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n')
        for event, ns in _events(kernels):
            file.write(event)
            total += ns
        file.write('{"ph":"i","s":"g","name":"Record Window End","pid":"","tid":"","ts":0}\n]}\n')
    return total / 1000


def _events(kernels: int) -> Iterator[tuple[str, int]]:
    """The events as text, and the ns of each that is a kernel's."""
    now, seed = 1712195495505583_063, 1  # ns
    length = kernels // STEPS * 25_000  # about that of a step
    for number in range(kernels):
        if number * STEPS // kernels != (number - 1) * STEPS // kernels:
            yield _event("user_annotation", f"ProfilerStep#{number * STEPS // kernels}", now - 4900, length, 9, ""), 0
        seed = (1103515245 * seed + 12345) % 2**31
        ns = 900 + seed % 40_000
        yield _event("cuda_runtime", "cudaLaunchKernel", now - 4000, 3000, 9, f'"correlation":{number + 1}'), 0
        args = f'"device":0,"stream":7,"correlation":{number + 1},"grid":[{1 + number % 132},1,1],"block":[128,1,1]'
        yield _event("kernel", NAMES[seed // 64 % len(NAMES)], now, ns, 7, args), ns
        now += ns + 5000


def _event(cat: str, name: str, ts: int, dur: int, tid: int, args: str) -> str:
    times = f'"ts":{_us(ts)},"dur":{_us(dur)}'
    return f'{{"ph":"X","cat":"{cat}","name":"{name}","pid":{tid % 7},"tid":{tid},{times},"args":{{{args}}}}},\n'


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def timed(command: list[str], folder: Path) -> tuple[Run, str]:
    """Runs a command under GNU time; RuntimeError with the end of its output if it fails."""
    usage = folder / "usage"
    done = subprocess.run(
        ["/usr/bin/time", "-o", str(usage), "-f", "%e %U %S %M", *command], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-500:]}")
    wall, user, system, kib = map(float, usage.read_text().split())
    return Run(wall, user + system, kib / 1024, 0.0), done.stdout


def _programs(trace: Path, rival: Path, folder: Path) -> dict[str, tuple[list[str], Callable[[str], float]]]:
    """Each program's command, and how to find the GPU time in µs in what it leaves."""
    report = folder / "report.json"
    ours = [sys.executable, "-m", "dsv4lab.cli", "profile", str(trace), "--json", str(report)]
    theirs = [str(rival), "-c", _RIVAL, str(trace)]
    programs = {OURS: (ours, lambda _: json.loads(report.read_text())["devices"][0]["kernel_ns"] / 1000)}
    for backend in BACKENDS:
        programs[f"hta_{backend.lower()}"] = ([*theirs, backend], lambda output: float(output.split()[-1]))
    return programs


def _record(program: str, runs: list[Run], config: dict[str, Any], true_us: float, version: str) -> Record:
    error = max(abs(run.found_us - true_us) / true_us for run in runs)  # of a rival told, not judged: it rounds times
    return Record(
        experiment=EXPERIMENT,
        case=f"{config['kernels']}_kernels",
        impl=program,
        config=config | ({} if program == OURS else {"package": f"HolisticTraceAnalysis=={version}"}),
        method={"tool": "GNU time", "processes": "one a sample, the programs in turns"},
        samples_us=[1e6 * run.wall_s for run in runs],
        check={"error": error, "baseline_error": 0.0, "tolerance": 0.0 if program == OURS else error},
        work=Work(0.0, float(config["file_bytes"])),
        seed=0,
        argv=provenance.command_line(),
        date_utc=datetime.now(UTC),
        git=provenance.git_state(),
        kernel_sha256=None,
        env=provenance.environment(),
        clocks=Clocks(before=None, after=None),
        result={"cpu_s": median(run.cpu_s for run in runs), "peak_mib": max(run.peak_mib for run in runs)},
    )


def main(
    rival: Annotated[Path, tyro.conf.arg(metavar="PYTHON")],
    kernels: int = 1_000_000,
    runs: int = 1,
    out: Path | None = None,
) -> None:
    """Measure both programs on one file and record it.

    Args:
        rival: The Python of an environment with HolisticTraceAnalysis and ijson.
        kernels: How many the trace has.
        runs: How often each of its readers runs; ours runs before each of them.
        out: Folder for the record file. records/ of the checkout if not given.
    """
    ask = "from importlib.metadata import version; print(version('HolisticTraceAnalysis'))"
    version = subprocess.run([rival, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    with TemporaryDirectory(prefix="dsv4lab-speed-") as name:
        folder = Path(name)
        trace = folder / "trace.json"
        true_us = synthetic(trace, kernels)
        config = {"kernels": kernels, "file_bytes": trace.stat().st_size}
        programs = _programs(trace, rival, folder)
        found: dict[str, list[Run]] = {program: [] for program in programs}
        rivals = [program for program in programs if program != OURS]
        for program in [each for name in rivals * runs for each in (OURS, name)]:
            command, answer = programs[program]
            try:
                run, output = timed(command, folder)
            except RuntimeError as error:
                print(f"{program}: {error}", file=sys.stderr)
                continue
            found[program].append(replace(run, found_us=answer(output)))
            print(program, found[program][-1], flush=True)
    lines = [_record(program, runs, config, true_us, version) for program, runs in found.items() if runs]
    print(f"recorded: {records.write(lines, EXPERIMENT, out)}")


if __name__ == "__main__":
    tyro.cli(main)
