"""Record frames into the tables that notebooks show; reported numbers have tables of their own.

Every function takes a frame of `records.to_frame`, best of one run (`records.select_run`).
"""

from typing import Any

import pandas as pd

from dsv4lab.plot.palette import in_order
from dsv4lab.roofline import Ceilings, Work, floor_s, fraction

CEILINGS = "ceilings"
"""The case under which a record file holds the ceilings of its own run."""


def select(frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The kernel rows with these values, and the run's ceilings: `select(frame, H=64, cache="cold", lengths="full")`.

    ValueError for a column that does not exist, or naming the value that leaves no row and those there are.
    """
    is_ceiling = frame["case"] == CEILINGS
    return pd.concat([_where(frame[~is_ceiling], **columns), frame[is_ceiling]], ignore_index=True)


def kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of kernels: all but the ceilings."""
    return frame[frame["case"] != CEILINGS].reset_index(drop=True)


def ceilings(frame: pd.DataFrame) -> Ceilings:
    """The ceilings measured in the run of `frame`: device-memory reads and a bf16 matmul, by their medians."""
    rows = _where(frame, case=CEILINGS)
    rates = {}
    for impl, work in (("read", "bytes"), ("bf16_matmul", "flops")):
        row = _only(_where(rows, impl=impl), f"{CEILINGS} {impl}")
        rates[impl] = float(row[work] / (1e-6 * row["median_us"]))
    return Ceilings(rates["read"], rates["bf16_matmul"], f"measured on {rows['gpu'].iloc[0]} in the same run")


def with_floor(frame: pd.DataFrame) -> pd.DataFrame:
    """The kernel rows of `frame` with `floor_us`, the roofline under the run's own ceilings, and `fraction` of it."""
    limits = ceilings(frame)
    rows = kernels(frame)
    works = [Work(flops, moved) for flops, moved in zip(rows["flops"], rows["bytes"], strict=True)]
    rows["floor_us"] = [1e6 * floor_s(work, limits) for work in works]
    rows["fraction"] = [fraction(1e-6 * us, work, limits) for us, work in zip(rows["median_us"], works, strict=True)]
    return rows


def times(frame: pd.DataFrame, value: str = "median_us", over: str = "B") -> pd.DataFrame:
    """`value` with a row for each `over` and a column for each implementation.

    ValueError if two records compete for one cell: select H, cache, lengths, ... first.
    """
    rows = kernels(frame)
    if pd.api.types.is_numeric_dtype(rows[over]):
        rows[over] = rows[over].astype(int)
    twice = rows[rows.duplicated([over, "impl"])]
    if not twice.empty:
        impl, at = twice.iloc[0][["impl", over]]
        raise ValueError(f"several records of {impl} at {over}={at}: select one case, cache and run first")
    table = rows.pivot(index=over, columns="impl", values=value)
    return table[in_order(set(table))].sort_index()


def ratio(times: pd.DataFrame, impl: str, baseline: str) -> pd.Series:
    """One column of a table of times over another; empty where either was not measured."""
    if not {impl, baseline} <= set(times):
        return pd.Series(dtype=float, index=times.index[:0])
    return times[impl] / times[baseline]


def ratios(frame: pd.DataFrame, baseline: str, over: str = "B") -> pd.DataFrame:
    """Median times as multiples of the baseline's: 1.9 is 1.9 times its time. ValueError if it was not measured."""
    table = times(frame, over=over)
    if baseline not in table:
        raise ValueError(f"baseline {baseline!r} was not measured; there are {', '.join(table)}")
    return table.drop(columns=baseline).div(table[baseline], axis=0)


def speedups(frame: pd.DataFrame, baseline: str, over: str = "B") -> pd.DataFrame:
    """How many times faster than the baseline: its median time over each implementation's."""
    return 1 / ratios(frame, baseline, over)


def reported_throughput(rows: pd.DataFrame) -> pd.DataFrame:
    """Reported output tokens/s: a row a stage, a column a concurrency. `rows` as of `records.reported`."""
    chosen = _where(rows, experiment="serving_throughput", quantity="output_throughput")
    return _as_reported(chosen, "stage", "case")


def reported_profile(rows: pd.DataFrame) -> pd.DataFrame:
    """Reported shares of decode GPU time in percent: a row a group of kernels, a column a stage."""
    return _as_reported(_where(rows, experiment="decode_profile", unit="%"), "quantity", "stage")


def _where(frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    for name, value in columns.items():
        if name not in frame:
            raise ValueError(f"frame has no column {name!r}; it has {', '.join(frame)}")
        kept = frame[frame[name] == value]
        if kept.empty:
            there = ", ".join(map(str, sorted(frame[name].dropna().unique().tolist())))
            raise ValueError(f"{name} {value!r} leaves no record; there are {there}")
        frame = kept
    return frame


def _as_reported(rows: pd.DataFrame, index: str, columns: str) -> pd.DataFrame:
    """A pivot that keeps the order in which the rows come."""
    table = rows.pivot(index=index, columns=columns, values="value")
    return table.loc[list(dict.fromkeys(rows[index])), list(dict.fromkeys(rows[columns]))]


def _only(rows: pd.DataFrame, what: str) -> pd.Series:
    if len(rows) != 1:
        raise ValueError(f"{what} has {len(rows)} records: select one run first")
    return rows.iloc[0]
