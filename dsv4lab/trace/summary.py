"""Tables of one trace: where its time goes, by family, kernel, op, shape, stream or step."""

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import pandas as pd

from dsv4lab.trace import families, steps, timeline
from dsv4lab.trace.frames import Trace, source_line

By = Literal["family", "kernel", "op", "shape", "stream", "step"]
NOT_ATTRIBUTABLE = "graph replay, not attributable"
NO_OP = "no op in the trace"
_COLUMNS = {
    "family": ["family"],
    "kernel": ["family", "name"],
    "op": ["op"],
    "shape": ["op", "shapes", "dtypes"],
    "stream": ["rank", "device", "stream"],
    "step": ["rank", "step"],
}
_MOSTLY = {"kernel": "op", "op": "name", "shape": "name"}


def by(trace: Trace, key: By, per_device: bool = False) -> pd.DataFrame:
    """A row a group of `key`, largest first (steps and streams in order): the columns that name it, then

    calls; sum_ns, the durations added up, and share of all events' sum; busy_ns, the time in which one of the group
    ran, and busy_share of the devices' busy time (more than 1 in all where groups overlap); mean_ns a call; for
    kernels, ops and shapes what most of the group's time goes with: op or kernel, and where, a line of Python if known.
    With `per_device`, the groups of each rank and device by themselves, their shares those of their device.

    ValueError naming `key` if it is none of `By`.
    """
    if key not in _COLUMNS:
        raise ValueError(f"by must be one of {', '.join(get_args(By))}, got {key!r}")
    if per_device:
        parts = {device: by(replace(trace, events=events), key) for device, events in timeline.devices(trace.events)}
        tables = pd.concat(parts, names=["rank", "device"]).droplevel(2)
        return tables.drop(columns=["rank", "device"], errors="ignore").reset_index()
    events, columns = trace.events, _COLUMNS[key]
    named = events[columns].assign(**({"op": attribution(events)} if "op" in columns else {}))
    in_order = key in ("stream", "step")
    codes = named.groupby(columns, sort=in_order, observed=True).ngroup().to_numpy()
    _, firsts = np.unique(codes, return_index=True)
    table, count = named.iloc[firsts].copy(), len(firsts)
    sums = np.zeros(count, np.int64)
    np.add.at(sums, codes, events["dur"].to_numpy())
    busy = timeline.busy_by(events, codes, count)
    table["calls"] = np.bincount(codes, minlength=count)
    table["sum_ns"], table["share"] = sums, sums / max(1, sums.sum())
    table["busy_ns"], table["busy_share"] = busy, busy / max(1, timeline.busy(events))
    table["mean_ns"] = sums / table["calls"]
    if key in _MOSTLY:
        table[_MOSTLY[key]] = _mostly(codes, events, _MOSTLY[key])
        table["where"] = [source_line(stack) for stack in _mostly(codes, events, "stack")]
    order = table if in_order else table.sort_values("sum_ns", ascending=False, kind="stable")
    return order.reset_index(drop=True)


def _mostly(codes: np.ndarray, events: pd.DataFrame, name: str) -> list[str]:
    """For each group the text of a column that most of its time goes with."""
    column = attribution(events) if name == "op" else events[name].array
    costs = pd.Series(events["dur"].to_numpy()).groupby([codes, column.codes]).sum()
    most = costs.sort_values(kind="stable").reset_index(level=1, name="ns").groupby(level=0)["level_1"].last()
    return [column.categories[code] for code in most]


def attribution(events: pd.DataFrame) -> pd.Categorical:
    """The op of each event, or why there is none."""
    op = events["op"].array
    codes = op.codes.astype(np.int64)
    texts = [text or NO_OP for text in op.categories]
    categories = pd.Index(dict.fromkeys([*texts, NOT_ATTRIBUTABLE]), dtype=object)
    positions = np.append(categories.get_indexer(texts), categories.get_loc(NOT_ATTRIBUTABLE))
    return pd.Categorical.from_codes(positions[codes], categories=categories)


def unmatched(trace: Trace) -> pd.DataFrame:
    """The kernels of no family, by name, as `by(trace, "kernel")` has them."""
    return by(trace, "kernel").query("family == @families.OTHER").reset_index(drop=True)


def idle(trace: Trace) -> pd.DataFrame:
    """Idle time by cause: gaps, sum_ns, longest_ns and share of all devices' span."""
    gaps = timeline.gaps(trace)
    span = max(1, int(by_device(trace)["span_ns"].sum()))
    table = gaps.groupby("cause", observed=False)["dur"].agg(gaps="size", sum_ns="sum", longest_ns="max").reset_index()
    table["longest_ns"] = table["longest_ns"].fillna(0).astype(np.int64)
    return table.assign(share=table["sum_ns"] / span).query("gaps > 0").reset_index(drop=True)


def by_device(trace: Trace) -> pd.DataFrame:
    """`timeline.by_device` with NCCL and custom collectives as communication."""
    return timeline.by_device(trace, trace.events["family"].isin(families.COMMUNICATION).to_numpy())


def overview(trace: Trace, key: By = "family") -> dict[str, pd.DataFrame]:
    """All tables of one trace by name: devices, steps, groups (by `key`), families (a device), unmatched, idle."""
    return {
        "devices": by_device(trace),
        "steps": steps.table(trace),
        "groups": by(trace, key),
        "families": by(trace, "family", per_device=True),
        "unmatched": unmatched(trace),
        "idle": idle(trace),
    }
