"""Any file of a trace, or a folder with one for each rank, as one `Trace` with families and steps."""

from pathlib import Path

from dsv4lab.trace import attribution, families, kineto, nsys, reduced, steps
from dsv4lab.trace.frames import Trace, TraceError, merge

_SUFFIXES = (".json", ".json.gz", reduced.SUFFIX, ".sqlite")
_SQLITE = b"SQLite format 3\0"


def read(source: Path | str, rules: Path | None = None, capture: Path | None = None) -> Trace:
    """The trace in `source`: torch.profiler JSON (plain or gzip), an Nsight Systems sqlite export, a reduced trace, or
    a folder of them, one a rank.

    Args:
        rules: a file of family rules that go before the package's own.
        capture: a trace of the same step run eagerly, or of its capture: gives graph replays their ops and shapes.

    FileNotFoundError if there is no such file; TraceError if it is none of these or holds no GPU kernel.
    """
    known = families.load(rules)
    trace = steps.cut(_merged(Path(source)))
    if not (trace.events["kind"] == "kernel").any():
        lost = "".join(f", {count:,} {what}" for what, count in trace.lost.items())
        ask = "was the profiler told to record CUDA activities?"
        raise TraceError(f"no GPU kernels in {Path(source).name}{lost}: {ask}")
    if capture is not None:
        trace = attribution.joined(trace, steps.cut(_merged(Path(capture))))
    return families.classified(trace, known)


def _merged(source: Path) -> Trace:
    return merge(_numbered([_read(path) for path in _files(source)]))


def reduce(source: Path | str, destination: Path | str, **about: object) -> Path:
    """Writes the reduced trace of `source` (see `reduced`); `about` is kept with it, as stage="stock", batch=32."""
    return reduced.write(read(source), destination, **about)


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = sorted(path for path in source.iterdir() if path.name.endswith(_SUFFIXES))
    if not found:
        raise TraceError(f"no traces in {source.name}: none of its files ends in {', '.join(_SUFFIXES)}")
    return found


def _read(path: Path) -> Trace:
    if path.name.endswith(reduced.SUFFIX):
        return reduced.read(path)
    with path.open("rb") as file:
        start = file.read(len(_SQLITE))
    if not start:
        raise TraceError(f"{path.name} is empty")
    return nsys.read(path) if start == _SQLITE else kineto.read(path)


def _numbered(traces: list[Trace]) -> list[Trace]:
    """Traces of one folder with ranks that differ: what the files say, or their order where that does not."""
    ranks = [int(trace.events["rank"].iloc[0]) if len(trace.events) else -1 for trace in traces]
    if len(traces) == 1 or len(set(ranks)) == len(ranks):
        return traces
    return [_as_rank(trace, rank) for rank, trace in enumerate(traces)]


def _as_rank(trace: Trace, rank: int) -> Trace:
    marks = trace.marks.assign(rank=rank)
    return Trace(trace.events.assign(rank=rank), marks, trace.meta | {"rank": rank}, trace.lost, trace.launches)
