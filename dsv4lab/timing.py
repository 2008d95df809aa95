"""Times kernels by CUDA-graph replay, and measures the ceilings of the GPU they run on.

A *variant* is a list of launches: zero-argument callables, one per input set. All launches of a variant are captured
in one graph, so that launch overhead is out of the number; the graphs of all variants are replayed in turn (A B C,
B C A, C A B, ...), so that drift of the clocks meets all of them alike. An untimed replay of the same graph runs
right before each timed one: what an interval holds then starts neither on an idle GPU nor on another variant's cache.

Whether the L2 cache is part of the number is the caller's choice of input sets: `rotation_sets` gives how many it
takes for cold caches, `WARM_CALLS` how often one set is replayed for warm ones.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch

from dsv4lab.roofline import Work

Launch = Callable[[], object]

ROTATION_BYTES = 125_000_000  # at least 120 MB of KV, with the indices that are counted along
MIN_SETS = 8
MAX_SETS = 1024
WARM_CALLS = 20
MIN_REPLAYS = 5

_GIB = 1 << 30
_CLOCK_FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}


@dataclass(frozen=True)
class Replays:
    """What `graph_replay_us` saw: raw samples in microseconds per call, and for a variant without any, the error."""

    samples_us: dict[str, list[float]]
    errors: dict[str, str]


@dataclass(frozen=True)
class Ceiling:
    """One measured limit of the GPU: raw samples in microseconds, their work, and the check that came first."""

    samples_us: list[float]
    work: Work
    error: float
    tolerance: float
    timer: str = "cuda events"


def require_gpu(device: str | torch.device = "cuda") -> torch.device:
    """`device` as a CUDA device with an index; RuntimeError when it is not one or none is here."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise RuntimeError(f"timing needs a CUDA GPU: device is {str(device)!r}, and torch sees {_visible_gpus()}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def rotation_sets(bytes_per_call: float, l2_bytes: int = 0) -> int:
    """How many distinct input sets to rotate so that a set is out of the cache when its turn comes again.

    At least `ROTATION_BYTES`, and twice the L2, lie between two uses of a set, unless that takes more than `MAX_SETS`.
    """
    if bytes_per_call <= 0:
        raise ValueError(f"bytes_per_call must be positive, got {bytes_per_call}")
    return min(max(ceil(max(ROTATION_BYTES, 2 * l2_bytes) / bytes_per_call), MIN_SETS), MAX_SETS)


def l2_bytes(device: torch.device) -> int:
    """Size of the device's L2 cache; 0 for what is no GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def graph_replay_us(
    variants: Mapping[str, Sequence[Launch]],
    replays: int = 50,
    *,
    budget_s: float = 10.0,
    device: str | torch.device = "cuda",
) -> Replays:
    """Times every variant's launches by interleaved CUDA-graph replay.

    Args:
        variants: launches by name; a launch only enqueues work on the current stream.
        replays: timed replays per variant, one sample each.
        budget_s: replay time of all variants together; a slow variant gets fewer replays, never under `MIN_REPLAYS`.

    Returns:
        Samples in microseconds per call. A variant that cannot run or be captured is in `errors`, the others go on.

    Raises:
        RuntimeError: without a CUDA GPU. ValueError: a variant without launches, `replays` under 1.
    """
    device = require_gpu(device)
    if replays < 1:
        raise ValueError(f"replays must be at least 1, got {replays}")
    if empty := [name for name, launches in variants.items() if not launches]:
        raise ValueError(f"variants must have launches, {empty[0]!r} has none")
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graphs, errors = _capture_all(variants, stream)
            samples = _replay_all(graphs, replays, budget_s, stream)
        torch.cuda.current_stream().wait_stream(stream)
    per_call = {name: [us / len(variants[name]) for us in values] for name, values in samples.items()}
    return Replays(per_call, errors)


def replay_counts(replay_ms: Mapping[str, float], replays: int, budget_s: float) -> dict[str, int]:
    """Timed replays per variant: `replays`, or what an equal share of `budget_s` holds with the untimed ones."""
    share_ms = 1e3 * budget_s / max(len(replay_ms), 1)
    return {name: min(replays, max(MIN_REPLAYS, int(share_ms / (2 * ms)))) for name, ms in replay_ms.items()}


def rounds(counts: Mapping[str, int]) -> Iterator[list[str]]:
    """The order of the variants in each round: rotated from round to round, the rarer ones spread evenly."""
    total = max(counts.values(), default=0)
    names = list(counts)
    for index in range(total):
        first = index % len(names)
        due = {name for name, count in counts.items() if (index + 1) * count // total > index * count // total}
        yield [name for name in names[first:] + names[:first] if name in due]


def ceilings(device: str | torch.device = "cuda") -> dict[str, Ceiling]:
    """Measures `copy` and `read` (2 GiB buffers), `bf16_matmul` (8192^3, random data), `empty_kernel` (in a graph)."""
    device = require_gpu(device)
    with torch.cuda.device(device):
        measured = {**_bandwidth(device), "bf16_matmul": _matmul(device), "empty_kernel": _empty_kernel(device)}
        torch.cuda.empty_cache()
    return measured


def clocks(device: str | torch.device = "cuda") -> dict[str, float | None] | None:
    """SM and memory clock (MHz), temperature (C) and power (W) as nvidia-smi gives them; None when it is absent."""
    values = nvidia_smi(_CLOCK_FIELDS.values(), device)
    return None if values is None else {key: _number(text) for key, text in zip(_CLOCK_FIELDS, values, strict=True)}


def nvidia_smi(fields: Sequence[str], device: str | torch.device = "cuda") -> list[str] | None:
    """The answers to `nvidia-smi --query-gpu=<fields>` for `device`; None without the tool or a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        return None
    uuid = torch.cuda.get_device_properties(device).uuid  # its own index ignores CUDA_VISIBLE_DEVICES
    command = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [text.strip() for text in answer.strip().split(",")]


def _capture_all(
    variants: Mapping[str, Sequence[Launch]], stream: torch.cuda.Stream
) -> tuple[dict[str, torch.cuda.CUDAGraph], dict[str, str]]:
    graphs, errors = {}, {}
    for name, launches in variants.items():
        try:
            graphs[name] = _capture(launches, stream)
        except Exception as error:
            cause = error if error.__suppress_context__ else error.__context__ or error
            errors[name] = f"{type(cause).__name__}: {cause}".splitlines()[0]  # not that the capture could not be ended
            recover(stream)
    return graphs, errors


def _capture(launches: Sequence[Launch], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    for launch in launches:  # all of them: another alignment of a pointer is another compilation
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    return graph


def recover(stream: torch.cuda.Stream) -> None:
    """After a broken capture torch believes its random generator is still capturing; a whole one puts that right."""
    torch.cuda.synchronize()
    scratch = torch.zeros(1, device=stream.device)
    _capture([lambda: scratch.add_(1)], stream)


def _replay_all(
    graphs: Mapping[str, torch.cuda.CUDAGraph], replays: int, budget_s: float, stream: torch.cuda.Stream
) -> dict[str, list[float]]:
    trial = {name: _timed_replay(graph) for name, graph in graphs.items()}
    stream.synchronize()
    replay_ms = {name: start.elapsed_time(end) for name, (start, end) in trial.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for order in rounds(replay_counts(replay_ms, replays, budget_s)):
        pending = [(name, *_timed_replay(graphs[name])) for name in order]
        stream.synchronize()
        for name, start, end in pending:
            samples[name].append(1e3 * start.elapsed_time(end))
    return samples


def _timed_replay(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    return start, end


def _eager_us(function: Launch, repeats: int = 20) -> list[float]:
    function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in pairwise(events)]


def _bandwidth(device: torch.device) -> dict[str, Ceiling]:
    source = torch.randint(0, 256, (2 * _GIB,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    words = source.view(torch.int64)
    target.copy_(source)
    copied = float(not torch.equal(source, target))
    summed = float(words.sum() != words.view(4096, -1).sum(1).sum())
    return {
        "copy": Ceiling(_eager_us(lambda: target.copy_(source)), Work(0.0, 4.0 * _GIB), copied, 0.0),
        "read": Ceiling(_eager_us(words.sum), Work(0.0, 2.0 * _GIB), summed, 0.0),
    }


def _matmul(device: torch.device, n: int = 8192) -> Ceiling:
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    exact = a[:16].double() @ b.double()
    error = float((out[:16].double() - exact).norm() / exact.norm())
    samples = _eager_us(lambda: torch.mm(a, b, out=out))
    return Ceiling(samples, Work(2.0 * n**3, 6.0 * n**2), error, tolerance=1e-2)


def _empty_kernel(device: torch.device, calls: int = 100) -> Ceiling:
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    timed = graph_replay_us({"empty": [lambda: counter.add_(1)] * calls}, device=device)
    missed = float(counter.item() == 0 or counter.item() % calls != 0)
    return Ceiling(timed.samples_us["empty"], Work(0.0, 8.0), missed, 0.0, "cuda graph replay")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _visible_gpus() -> str:
    return f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
