"""Two traces side by side, kernel by kernel: what is new, gone, faster or slower."""

from typing import Literal

import numpy as np
import pandas as pd

from dsv4lab.trace.frames import Trace

Unit = Literal["step", "trace"]
SAME = 0.02
"""Times that differ by less than this part of the longer are the same."""


def compared(before: Trace, after: Trace, by: Literal["kernel", "family"] = "kernel") -> pd.DataFrame:
    """A row for each kernel name (or family) of either trace, the largest change first.

    Kernels are paired by name, never by position. Columns: family, name (with by="kernel"), calls_before, calls_after,
    ns_before, ns_after, share_before, share_after, change_ns, ratio (after over before), verdict: new, gone, faster,
    slower or same. Calls and ns are for a step where both traces have steps (those cut off left out), else for the
    whole trace; `attrs["unit"]` says which.
    """
    unit, (first, second) = comparable(before, after)
    keys = ["family"] if by == "family" else ["family", "name"]
    table = _sums(first, keys).add_suffix("_before").join(_sums(second, keys).add_suffix("_after"), how="outer")
    table = table.fillna(0.0)
    for side in ("before", "after"):
        table[f"share_{side}"] = table[f"ns_{side}"] / max(1.0, table[f"ns_{side}"].sum())
    table["change_ns"] = table["ns_after"] - table["ns_before"]
    table["ratio"] = table["ns_after"] / table["ns_before"].replace(0.0, np.nan)
    table["verdict"] = np.select(
        [
            table["calls_before"] == 0,
            table["calls_after"] == 0,
            table["change_ns"].abs() <= SAME * table[["ns_before", "ns_after"]].max(axis=1),
            table["change_ns"] < 0,
        ],
        ["new", "gone", "same", "faster"],
        "slower",
    )
    columns = [f"{what}_{side}" for what in ("calls", "ns", "share") for side in ("before", "after")]
    table = table[[*columns, "change_ns", "ratio", "verdict"]].reset_index()
    order = table["change_ns"].abs().sort_values(ascending=False, kind="stable").index
    table = table.loc[order].reset_index(drop=True)
    table.attrs["unit"] = unit
    return table


def comparable(*traces: Trace) -> tuple[Unit, list[tuple[pd.DataFrame, int]]]:
    """The events to be compared, and over how many steps they go."""
    whole = [_whole_steps(trace.events) for trace in traces]
    if all(count for _, count in whole):
        return "step", whole
    return "trace", [(trace.events, 1) for trace in traces]


def _whole_steps(events: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    inside = events[events["step"] >= 0]
    sizes = inside.groupby(["rank", "step"])["ts"].transform("size")
    kept = inside[sizes >= 0.9 * sizes.median()] if len(inside) else inside
    return kept, int(kept["step"].nunique())


def _sums(chosen: tuple[pd.DataFrame, int], keys: list[str]) -> pd.DataFrame:
    events, steps = chosen
    named = events[["dur"]].assign(**{key: events[key].astype(object) for key in keys})
    sums = named.groupby(keys)["dur"].agg(calls="size", ns="sum")
    return sums / steps
