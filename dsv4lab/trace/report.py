"""The report of one trace in a terminal, and as JSON."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from dsv4lab.trace import families, summary
from dsv4lab.trace.frames import Trace

_NOISE = re.compile(r"^void |\(anonymous namespace\)::|at::native::|c10::|std::")
ROWS = 25
"""Rows of a table that a terminal gets; JSON has them all."""


def text(trace: Trace, by: summary.By = "family", titles: dict[str, str] | None = None) -> str:
    """The report for a terminal, times in microseconds."""
    titles = titles or families.load().titles
    tables = summary.overview(trace)
    sections = [
        _header(trace),
        _lines("devices (µs)", _devices(tables["devices"])),
        *_steps(tables["steps"]),
        _lines(f"by {by} (µs)", _groups(summary.by(trace, by), titles)),
        _unmatched(tables["unmatched"], tables["families"]),
        _lines("idle, by cause (µs)", _idle(tables["idle"])),
    ]
    return "\n\n".join(section for section in sections if section)


def as_json(trace: Trace, by: summary.By) -> str:
    """Every table of the report, times in integer nanoseconds."""
    tables = summary.overview(trace) | {f"by_{by}": summary.by(trace, by)}
    rows = {name: _records(table) for name, table in tables.items()}
    return json.dumps({"meta": trace.meta, "lost": dict(trace.lost), **rows}, indent=1, ensure_ascii=False) + "\n"


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return json.loads(table.to_json(orient="records", double_precision=15))


def microseconds(ns: int | np.integer) -> str:
    """Exact: 1234567 -> "1,234.567"."""
    return f"{int(ns) // 1000:,}.{int(ns) % 1000:03d}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def shortened(name: str, width: int = 72) -> str:
    """A kernel's name without what every name has, cut to `width`."""
    name = _NOISE.sub("", name)
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _header(trace: Trace) -> str:
    meta = trace.meta
    gpu = (
        f"{meta['gpu']}, {meta['sms']} SMs" if meta.get("gpu") and meta.get("sms") else meta.get("gpu") or "GPU unknown"
    )
    lines = [f"{meta.get('format', 'trace')}: {gpu}"]
    lines += [f"lost: {count:,} {what}" for what, count in trace.lost.items()]
    return "\n".join(lines)


def _devices(table: pd.DataFrame) -> pd.DataFrame:
    shown = {"rank": table["rank"], "GPU": table["device"], "kernels": table["kernels"].map("{:,}".format)}
    columns = {
        "kernel sum": "kernel_ns", "kernel busy": "kernel_busy_ns", "with copies": "sum_ns", "busy": "busy_ns",
        "overlap": "overlap_ns", "idle": "idle_ns", "communication": "communication_ns", "exposed": "exposed_ns",
    }  # fmt: skip
    return pd.DataFrame(shown | {title: table[name].map(microseconds) for title, name in columns.items()})


def _steps(table: pd.DataFrame) -> Sequence[str]:
    if table.empty:
        return ()
    busy = table["busy_ns"].median()
    lines = [f"steps: {len(table)}, busy {microseconds(busy)} µs at the median, {table['events'].median():,.0f} events"]
    for row in table[table["partial"]].itertuples():
        lines.append(
            f"step {row.step} of rank {row.rank} is partial: {row.events:,} events, the profiler lost the rest"
        )
    return ("\n".join(lines),)


def _groups(table: pd.DataFrame, titles: dict[str, str]) -> pd.DataFrame:
    numbers = ["calls", "sum_ns", "share", "busy_ns", "busy_share", "mean_ns"]
    shown = pd.DataFrame(
        {
            "calls": table["calls"].map("{:,}".format),
            "sum": table["sum_ns"].map(microseconds),
            "share": table["share"].map(percent),
            "busy": table["busy_ns"].map(microseconds),
            "of busy": table["busy_share"].map(percent),
            "a call": table["mean_ns"].map(lambda ns: microseconds(round(ns))),
        }
    )
    for name in table.columns.drop(numbers):
        column = table[name].astype(object)
        shown[name] = column.map(titles) if name == "family" else column.map(lambda value: shortened(str(value)))
    return shown


def _unmatched(table: pd.DataFrame, by_family: pd.DataFrame) -> str:
    if table.empty:
        return "every kernel belongs to a family"
    share = by_family.set_index("family").loc[families.OTHER, "share"]
    names = [f"  {percent(row.share):>6} {shortened(row.name)}" for row in table.head(ROWS).itertuples(index=False)]
    more = [f"  and {len(table) - ROWS:,} more"] if len(table) > ROWS else []
    return "\n".join([f"of no family: {percent(share)} in {len(table):,} kernels", *names, *more])


def _idle(table: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "gaps": table["gaps"].map("{:,}".format),
            "sum": table["sum_ns"].map(microseconds),
            "of the span": table["share"].map(percent),
            "longest": table["longest_ns"].map(microseconds),
            "cause": table["cause"].astype(object),
        }
    )


def _lines(title: str, table: pd.DataFrame) -> str:
    """A table as text: numbers to the right, names to the left, at most `ROWS` rows."""
    if table.empty:
        return ""
    cells = [list(table), *table.head(ROWS).astype(str).values.tolist()]
    left = [not any(cell[:1].isdigit() for cell in column[1:]) for column in zip(*cells, strict=True)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(f"{c:<{w}}" if is_left else f"{c:>{w}}" for c, w, is_left in zip(row, widths, left, strict=True))
        for row in cells
    ]
    more = [f"and {len(table) - ROWS:,} more"] if len(table) > ROWS else []
    return "\n".join([title, *(line.rstrip() for line in lines), *more])
