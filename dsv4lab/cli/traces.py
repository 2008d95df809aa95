"""The command that reads traces."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from dsv4lab.cli.options import OptionalFile, OptionalNumber
from dsv4lab.files import write_atomically
from dsv4lab.notebooks.results import UsageError

if TYPE_CHECKING:
    from dsv4lab.trace import Trace


def profile(
    trace: Annotated[Positional[Path], arg(metavar="TRACE")],
    after: Annotated[Positional[Path | None], arg(metavar="[TRACE2]", help_behavior_hint="")] = None,
    /,
    *,
    by: Literal["family", "kernel", "op", "shape", "stream", "step"] = "family",
    rules: OptionalFile = None,
    capture: OptionalFile = None,
    max_context: OptionalNumber = None,
    live: OptionalNumber = None,
    html: OptionalFile = None,
    json: OptionalFile = None,
    reduce: OptionalFile = None,
) -> int:
    """Say where the GPU time of a trace goes, and which line of Python it came from.

    Example: dsv4lab profile decode.pt.trace.json.gz --by shape

    Args:
        trace: Of torch.profiler (JSON, plain or .gz), of Nsight Systems (sqlite export), or a reduced one; or a folder
            with a file for each rank.
        after: A second one; the first is compared with it, kernel by kernel.
        by: What a row of the table is.
        rules: A file of family rules (TOML, as dsv4lab/trace/families.toml) that go before the lab's own.
        capture: A trace of the same step run eagerly, or of its capture: gives graph replays their ops and shapes.
        max_context: Longest request that the server allows in tokens, to recognise what is as long.
        live: Positions that the requests had, likewise.
        html: File for the report as a web page with a figure.
        json: File for every table, times in nanoseconds.
        reduce: File for the events alone, NAME.trace.jsonl.gz: some 12 bytes an event, read like the trace itself.
    """
    from dsv4lab.trace import TraceError, families, read, reduced, report

    try:
        titles = families.load(rules).titles
        first = read(trace, rules, capture)
        others = [read(after, rules, capture)] if after is not None else []
        found = report.findings(first, by, max_context, live)
        sections = [*report.one(found, titles)]
        for second in others:
            sections += report.two(first, second, titles)
        print("\n\n".join(map(str, sections)))
        if html is not None:
            names = ["before", "after"] if others else [trace.name]
            figure = _bars(dict(zip(names, [first, *others], strict=True)), titles)
            write_atomically(
                html, report.page(sections, figure, " → ".join(path.name for path in (trace, after) if path))
            )
        if json is not None:
            write_atomically(json, report.as_json(found, *others))
        if reduce is not None:
            reduced.write(first, reduce)
    except TraceError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return 0


def _bars(traces: "dict[str, Trace]", titles: dict[str, str]) -> str:
    """The stacked bars of a web page, as SVG."""
    try:
        from dsv4lab.plot import profiles, style
    except ModuleNotFoundError as error:
        raise UsageError(f"--html needs {error.name}, which is not installed: pip install -e '.[notebook]'") from error
    from dsv4lab.trace import report

    unit, bars = report.bars(traces)
    return style.svg(profiles.stacked(bars, titles, f"GPU time (ms a {unit})"))
