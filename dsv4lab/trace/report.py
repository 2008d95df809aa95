"""The report of one trace, or of two compared: sections that a terminal and a web page show alike, and JSON."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dsv4lab.trace import summary
from dsv4lab.trace.case import many
from dsv4lab.trace.compare import comparable, compared
from dsv4lab.trace.frames import Trace
from dsv4lab.trace.suspects import BLIND, NEED_SHAPES, Suspect, find, table, unseen

_NOISE = re.compile(r"^void |\(anonymous namespace\)::|at::native::|c10::|std::")
_WORDS = ("family", "name", "op", "shapes", "dtypes", "where", "cause", "verdict")
ROWS = 25
"""Rows of a table that are shown; JSON has them all."""


@dataclass(frozen=True)
class Section:
    """A heading with lines, a table, or both."""

    title: str
    lines: tuple[str, ...] = ()
    table: pd.DataFrame | None = None

    def __str__(self) -> str:
        rows = [] if self.table is None or self.table.empty else list(_aligned(self.table.head(ROWS)))
        more = [self.more] if self.more else []
        return "\n".join([self.title, *(f"  {line}" for line in (*self.lines, *rows, *more))])

    @property
    def more(self) -> str:
        hidden = 0 if self.table is None else len(self.table) - ROWS
        return f"and {hidden:,} more" if hidden > 0 else ""


@dataclass(frozen=True)
class Findings:
    """What there is to report of one trace."""

    trace: Trace
    by: summary.By
    tables: dict[str, pd.DataFrame]
    suspects: list[Suspect]


def findings(
    trace: Trace, by: summary.By = "family", max_context: int | None = None, live: int | None = None
) -> Findings:
    """Everything that a report shows; `max_context` and `live` help the suspects (see `suspects.find`)."""
    return Findings(trace, by, summary.overview(trace, by), find(trace, max_context, live))


def one(found: Findings, titles: dict[str, str]) -> Iterator[Section]:
    """The sections of one trace, times in microseconds."""
    tables = found.tables
    yield _source(found.trace)
    yield Section("devices (µs)", table=_devices(tables["devices"]))
    yield from _steps(tables["steps"])
    yield Section(f"by {found.by} (µs)", table=_groups(tables["groups"], titles))
    if len(tables["devices"]) > 1:
        yield Section("by family, on each GPU (µs)", table=_groups(tables["families"], titles))
    yield _unmatched(tables["unmatched"])
    yield Section("idle, by cause (µs)", table=_idle(tables["idle"]))
    yield _suspects(found)


def two(before: Trace, after: Trace, titles: dict[str, str]) -> Iterator[Section]:
    """The sections of a comparison."""
    for by in ("family", "kernel"):
        changes = compared(before, after, by)
        yield Section(f"before and after, by {by} (µs a {changes.attrs['unit']})", table=_changes(changes, titles))


def as_json(found: Findings, after: Trace | None = None) -> str:
    """Every table of the report in full, times in integer nanoseconds."""
    tables = found.tables | {"suspects": table(found.suspects)}
    if after is not None:
        tables["compared"] = compared(found.trace, after)
    rows = {name: json.loads(each.to_json(orient="records", double_precision=15)) for name, each in tables.items()}
    head = {"meta": found.trace.meta, "lost": dict(found.trace.lost), "by": found.by}
    return json.dumps(head | rows, indent=1, ensure_ascii=False) + "\n"


def microseconds(ns: float) -> str:
    """To the nanosecond: 1234567 -> "1,234.567"."""
    ns = round(ns)
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000:,}.{abs(ns) % 1000:03d}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def shortened(name: str, width: int = 72) -> str:
    """A kernel's name without what every name has, cut to `width`."""
    name = _NOISE.sub("", name)
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _source(trace: Trace) -> Section:
    meta = trace.meta
    gpu = meta.get("gpu") or "GPU not named"
    title = f"{meta.get('format', 'trace')}, {gpu}" + (f", {meta['sms']} SMs" if meta.get("sms") else "")
    lines = [f"lost or changed: {count:,} {what}" for what, count in trace.lost.items()]
    if joined := meta.get("joined"):
        lines.append(f"ops joined from another trace for {joined[0]:,} of {joined[1]:,} replayed kernels")
    return Section(title, tuple(lines))


def _devices(devices: pd.DataFrame) -> pd.DataFrame:
    columns = {
        "kernel sum": "kernel_ns", "kernel busy": "kernel_busy_ns", "with copies": "sum_ns", "busy": "busy_ns",
        "overlap": "overlap_ns", "idle": "idle_ns", "communication": "communication_ns", "exposed": "exposed_ns",
    }  # fmt: skip
    shown = {"rank": devices["rank"], "GPU": devices["device"], "kernels": devices["kernels"].map("{:,}".format)}
    return pd.DataFrame(shown | {title: devices[name].map(microseconds) for title, name in columns.items()})


def _steps(found: pd.DataFrame) -> Iterator[Section]:
    if found.empty:
        return
    busy, events = microseconds(found["busy_ns"].median()), found["events"].median()
    partial = tuple(
        f"step {row.step} of rank {row.rank} is partial: {row.events:,} events, the profiler has not the rest"
        for row in found[found["partial"]].itertuples()
    )
    yield Section(f"{many(len(found), 'step')}: busy for {busy} µs and {events:,.0f} events at the median", partial)


def _groups(groups: pd.DataFrame, titles: dict[str, str]) -> pd.DataFrame:
    shown = {
        "calls": groups["calls"].map("{:,}".format),
        "sum": groups["sum_ns"].map(microseconds),
        "share": groups["share"].map(percent),
        "busy": groups["busy_ns"].map(microseconds),
        "of busy": groups["busy_share"].map(percent),
        "a call": groups["mean_ns"].map(microseconds),
    }
    names = groups.columns.drop(["calls", "sum_ns", "share", "busy_ns", "busy_share", "mean_ns"])
    if "where" in names and (groups["where"] == "").all():
        names = names.drop("where")
    return pd.DataFrame(shown | _names(groups[names], titles))


def _names(columns: pd.DataFrame, titles: dict[str, str]) -> dict[str, pd.Series]:
    shown = {name: column.astype(object).map(lambda text: shortened(str(text))) for name, column in columns.items()}
    return shown | ({"family": columns["family"].astype(object).replace(titles)} if "family" in columns else {})


def _unmatched(kernels: pd.DataFrame) -> Section:
    if kernels.empty:
        return Section("every kernel belongs to a family")
    names = kernels["name"].astype(object).map(shortened)
    title = f"of no family: {percent(kernels['share'].sum())}, {len(kernels):,} by name"
    return Section(title, table=pd.DataFrame({"share": kernels["share"].map(percent), "name": names}))


def _idle(idle: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "gaps": idle["gaps"].map("{:,}".format),
            "sum": idle["sum_ns"].map(microseconds),
            "of the span": idle["share"].map(percent),
            "longest": idle["longest_ns"].map(microseconds),
            "cause": idle["cause"].astype(object),
        }
    )


def _suspects(found: Findings) -> Section:
    lines = []
    for number, suspect in enumerate(found.suspects, 1):
        lines.append(f"{number}. {percent(suspect.share)}, {microseconds(suspect.ns)} µs: {suspect.finding}")
        lines += [f"     {line}" for line in suspect.evidence]
        lines += [f"     from {suspect.where}"] if suspect.where else []
        lines.append(f"     {suspect.advice}")
    if (hidden := unseen(found.trace)) > BLIND:
        rules = ", ".join(rule.__name__ for rule in NEED_SHAPES)
        lines.append(f"{percent(hidden)} of the time has no shapes of ops, by which {rules} are found:")
        lines.append("     an eager trace of the step has them, and --capture joins them to this one")
    return Section("suspects" if found.suspects else "no suspects", tuple(lines))


def _changes(changes: pd.DataFrame, titles: dict[str, str]) -> pd.DataFrame:
    shown = {
        "calls": changes["calls_before"].map("{:,.0f}".format) + " → " + changes["calls_after"].map("{:,.0f}".format),
        "before": changes["ns_before"].map(microseconds),
        "after": changes["ns_after"].map(microseconds),
        "change": changes["change_ns"].map(microseconds),
        "share before": changes["share_before"].map(percent),
        "share after": changes["share_after"].map(percent),
        "after / before": changes["ratio"].map(lambda ratio: "" if np.isnan(ratio) else f"{ratio:.3g}"),
        "verdict": changes["verdict"],
    }
    return pd.DataFrame(shown | _names(changes[[name for name in ("family", "name") if name in changes]], titles))


def _aligned(rows: pd.DataFrame) -> Iterable[str]:
    """A table as lines: numbers to the right, words to the left."""
    cells = [list(rows), *rows.astype(str).to_numpy().tolist()]
    columns = list(zip(*cells, strict=True))
    left = [not any(cell.lstrip("-")[:1].isdigit() for cell in column[1:]) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    for row in cells:
        pairs = zip(row, widths, left, strict=True)
        yield "  ".join(
            f"{cell:<{width}}" if is_left else f"{cell:>{width}}" for cell, width, is_left in pairs
        ).rstrip()


def page(sections: Iterable[Section], figure: str, title: str) -> str:
    """A web page that needs nothing else. What a trace says is escaped; `figure` is SVG and goes in as it is."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    environment = Environment(loader=PackageLoader("dsv4lab.trace", ""), autoescape=True, trim_blocks=True)
    template = environment.get_template("page.html.j2")
    return template.render(sections=list(sections), figure=Markup(figure), title=title, rows=ROWS, words=_WORDS)


def bars(traces: dict[str, Trace]) -> tuple[str, pd.DataFrame]:
    """Milliseconds by family, in its order, a column a trace; before them, whether of a "step" or the whole "trace"."""
    unit, chosen = comparable(*traces.values())
    sums = [events.groupby("family", observed=False)["dur"].sum() / 1e6 / count for events, count in chosen]
    return unit, pd.concat(sums, axis=1, keys=traces)
