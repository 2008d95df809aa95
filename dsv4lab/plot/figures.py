"""The figures of the kernel chapters: record frames in, `Figure` out (closed, so that a notebook shows it once)."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dsv4lab.plot import tables
from dsv4lab.plot.palette import BLACK, GREY, Look, in_order, look
from dsv4lab.plot.style import styled

SMS = {"RTX PRO 6000": 188, "H200": 132}
_DASHES = ("-", "--", ":", "-.")
_LABEL_GAP = 0.05  # of the height of the axes


def time_against_batch(frame: pd.DataFrame, title: str | None = None) -> Figure:
    """Median kernel time (µs) against batch, with the 10-90% range of the samples and the roofline floor.

    Args:
        frame: one run with its ceilings; of the kernel rows one H, cache and lengths (see `tables.select`).
    """
    rows = tables.with_floor(frame)
    medians, low, high = (tables.times(rows, value) for value in ("median_us", "p10_us", "p90_us"))
    floor = rows.groupby(rows["B"].astype(int))["floor_us"].min()
    with styled():
        figure, axes = plt.subplots()
        for impl in medians:
            axes.fill_between(low.index, low[impl], high[impl], color=look(impl).color, alpha=0.25, linewidth=0)
        lines = [(look(impl), medians[impl]) for impl in medians] + [(look("floor"), floor)]
        _draw(axes, lines, "kernel time (µs)")
        axes.set_title(title or _title("Kernel time", rows))
    return _closed(figure)


def speedup(frame: pd.DataFrame, baseline: str = "stock_simt", title: str | None = None) -> Figure:
    """How many times faster than `baseline` each implementation is, by median time, against batch."""
    rows = tables.kernels(frame)
    table = tables.speedups(rows, baseline)
    reference = Look(look(baseline).label, look(baseline).color, "", "--")
    with styled():
        figure, axes = plt.subplots()
        lines = [(look(impl), table[impl]) for impl in table] + [(reference, pd.Series(1.0, index=table.index))]
        _draw(axes, lines, f"speed relative to {reference.label} (times)")
        axes.set_title(title or _title("Speed-up", rows))
    return _closed(figure)


def occupancy(blocks: pd.DataFrame, sms: Mapping[str, int] = SMS, title: str | None = None) -> Figure:
    """Blocks in the grid against batch, beside the number of SMs there are to fill.

    Args:
        blocks: columns B, impl, plan (its label, as "MMA, BLOCK_H 16") and blocks.
        sms: SM counts by GPU name, each drawn as a line.
    """
    with styled():
        figure, axes = plt.subplots()
        lines = []
        for impl in in_order(set(blocks["impl"])):
            plans = blocks[blocks["impl"] == impl].groupby("plan", sort=False)
            for (plan, group), dashes in zip(plans, _DASHES, strict=False):
                known = look(impl)
                lines.append((Look(plan, known.color, known.marker, dashes), group.set_index("B")["blocks"]))
        _draw(axes, lines, "blocks in the grid")
        axes.set_ylim(axes.get_ylim())
        axes.axhspan(axes.get_ylim()[0], min(sms.values()), color=GREY, alpha=0.08, linewidth=0, zorder=0)
        for name, count in sms.items():
            axes.axhline(count, color=BLACK, linestyle=":", linewidth=1.2)
            where = {"xy": (0.01, count), "xycoords": ("axes fraction", "data")}
            axes.annotate(f"{count} SMs: {name}", **where, xytext=(0, 3), textcoords="offset points", fontsize=8)
        axes.set_title(title or "Blocks in the grid: where they are fewer than the SMs, SMs stay idle")
    return _closed(figure)


def _draw(axes: Axes, lines: Sequence[tuple[Look, pd.Series]], ylabel: str) -> None:
    """Lines against batch on log-log axes, each named at its right end in its own colour."""
    lines = [(each, series.dropna()) for each, series in lines]
    for each, series in lines:
        axes.plot(series.index, series, color=each.color, marker=each.marker, linestyle=each.linestyle)
    batches = sorted({batch for _, series in lines for batch in series.index})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = np.log10(axes.get_ylim())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high - low < 3 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size B")
    axes.set_ylabel(ylabel)
    heights = _apart([(np.log10(series.iloc[-1]) - low) / (high - low) for _, series in lines])
    for (each, series), height in zip(lines, heights, strict=True):
        where = {"xy": (series.index[-1], series.iloc[-1]), "xytext": (1.02, height), "textcoords": "axes fraction"}
        axes.annotate(each.label, **where, color=each.color, va="center", annotation_clip=False)


def _apart(heights: Iterable[float]) -> list[float]:
    """The same heights, moved as little as it takes for labels at them not to overlap; their order is kept."""
    heights = np.asarray(list(heights))
    order = np.argsort(heights, kind="stable")
    steps = _LABEL_GAP * np.arange(len(heights))
    moved = np.empty_like(heights)
    moved[order] = _isotonic(heights[order] - steps) + steps
    return moved.tolist()


def _isotonic(values: np.ndarray) -> np.ndarray:
    """The nearest non-decreasing sequence in least squares (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return np.concatenate([np.full(len(pool), np.mean(pool)) for pool in pools])


def _title(what: str, rows: pd.DataFrame) -> str:
    one = rows.iloc[0]
    return f"{what} of sparse-MLA decode: H = {one['H']:g}, {one['cache']} cache, {one['gpu']}"


def _closed(figure: Figure) -> Figure:
    plt.close(figure)
    return figure
