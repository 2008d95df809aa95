"""The figures of the kernel chapters: record frames in, `Figure` out (closed, so that a notebook shows it once)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dsv4lab.plot import tables
from dsv4lab.plot.palette import BLACK, GREY, Look, in_order, look
from dsv4lab.plot.style import styled

_DASHES = ("-", "--", ":", "-.")
_LABEL_GAP = 0.055  # of the height of the axes
_PANEL = (5.1, 4.2)  # inches
_BATCH = "batch size B"
_TICKS = 12  # of which every one can be labelled


def time_against_batch(frame: pd.DataFrame, title: str | None = None) -> Figure:
    """Median kernel time (µs) against batch, with the 10-90% range of the samples and the roofline floor.

    Args:
        frame: one run with its ceilings; of the kernel rows one cache and one kind of lengths (see `tables.select`).
            Each H has a panel of its own.
    """
    return time_against(dict(_by_heads(tables.with_floor(frame))), "B", _BATCH, title)


def time_against(
    panels: Mapping[str, pd.DataFrame], over: str, xlabel: str, title: str | None = None, floor: bool = True
) -> Figure:
    """Median time (µs) against a column of whole numbers, with the 10-90% range of the samples and the floor.

    Args:
        panels: by name, rows of `tables.with_floor`, one for each implementation and value of `over`.
        floor: whether to draw it.
    """
    drawn = {}
    for name, rows in panels.items():
        drawn[name] = [(look(impl), times) for impl, times in tables.times(rows, over=over).items()]
        if floor:
            drawn[name].append((look("floor"), rows.groupby(rows[over].astype(int))["floor_us"].min()))
    with styled():
        figure, all_axes = _panels(drawn, "kernel time (µs)", title, xlabel)
        for axes, rows in zip(all_axes, panels.values(), strict=True):
            low, high = tables.times(rows, "p10_us", over), tables.times(rows, "p90_us", over)
            for impl in low:
                axes.fill_between(low.index, low[impl], high[impl], color=look(impl).color, alpha=0.25, linewidth=0)
    return _closed(figure)


def lines_against(
    panels: Mapping[str, Sequence[tuple[Look, pd.Series]]],
    xlabel: str,
    ylabel: str,
    title: str | None = None,
    ticks: Mapping[int, str] | None = None,
) -> Figure:
    """Lines over whole numbers, which are their indices, on log scales; a panel for each name.

    ticks: which of those numbers to name on the axis, and how; what lies outside a panel is left out.
    """
    with styled():
        figure, all_axes = _panels(panels, ylabel, title, xlabel)
        for axes in all_axes if ticks else ():
            low, high = axes.get_xlim()
            inside = {x: name for x, name in ticks.items() if low <= x <= high}
            axes.set_xticks(list(inside), list(inside.values()), fontsize="small")
    return _closed(figure)


def megabytes_against(megabytes: pd.DataFrame, xlabel: str, title: str | None = None) -> Figure:
    """Memory traffic (MB) against the index of the table, a line for each column, which is an implementation."""
    with styled():
        lines = {"": [(look(impl), series) for impl, series in megabytes.items()]}
        figure, _ = _panels(lines, "bytes read and written (MB)", title, xlabel)
    return _closed(figure)


def speedup(frame: pd.DataFrame, baseline: str = "stock_simt", title: str | None = None) -> Figure:
    """How many times faster than `baseline` each implementation is, by median time, against batch; a panel an H."""
    panels = {}
    reference = Look(look(baseline).label, look(baseline).color, "", "--")
    for name, rows in _by_heads(tables.kernels(frame)):
        table = tables.speedups(rows, baseline)
        panels[name] = [(look(impl), table[impl]) for impl in table] + [(reference, pd.Series(1.0, index=table.index))]
    with styled():
        figure, _ = _panels(panels, f"speed relative to {reference.label} (times)", title)
    return _closed(figure)


def occupancy(blocks: pd.DataFrame, sms: Mapping[str, int], title: str | None = None) -> Figure:
    """Blocks in the grid against batch, beside the number of SMs there are to fill; a panel for each GPU.

    Args:
        blocks: columns gpu, B, impl, plan (its label, as "MMA, BLOCK_H 16") and blocks.
        sms: SM counts by GPU, drawn as lines.
    """
    panels = {}
    for gpu, of_gpu in blocks.groupby("gpu", sort=False):
        lines = []
        for impl in in_order(set(of_gpu["impl"])):
            plans = of_gpu[of_gpu["impl"] == impl].groupby("plan", sort=False)
            for (plan, group), dashes in zip(plans, _DASHES, strict=False):
                known = look(impl)
                lines.append((Look(plan, known.color, known.marker, dashes), group.set_index("B")["blocks"]))
        panels[f"{gpu}: {sms[gpu]} SMs"] = lines
    with styled():
        figure, all_axes = _panels(panels, "blocks in the grid", title)
        for axes, gpu in zip(all_axes, blocks["gpu"].unique(), strict=True):
            axes.set_ylim(axes.get_ylim())
            axes.axhspan(axes.get_ylim()[0], sms[gpu], color=GREY, alpha=0.08, linewidth=0, zorder=0)
            axes.axhline(sms[gpu], color=BLACK, linestyle=":", linewidth=1.2)
            where = {"xy": (0.01, sms[gpu]), "xycoords": ("axes fraction", "data")}
            axes.annotate(f"{sms[gpu]} SMs", **where, xytext=(0, 3), textcoords="offset points", fontsize=8)
    return _closed(figure)


def _by_heads(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each H, largest first, and what a panel of them is called."""
    for heads, of_heads in sorted(rows.groupby("H"), reverse=True):
        one = of_heads.iloc[0]
        yield f"H = {heads:g}, {one['cache']} cache, {one['gpu']}", of_heads


def _panels(
    panels: Mapping[str, Sequence[tuple[Look, pd.Series]]], ylabel: str, title: str | None, xlabel: str = _BATCH
) -> tuple[Figure, list[Axes]]:
    """Lines on log scales, panels side by side, each line named at its right end in its own colour."""
    size = (_PANEL[0] * len(panels), _PANEL[1]) if len(panels) > 1 else None
    figure, grid = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=size)
    all_axes = list(grid[0])
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, lines)
        axes.set_title(name)
        axes.set_xlabel(xlabel)
    all_axes[0].set_ylabel(ylabel)
    for axes, lines in zip(all_axes, panels.values(), strict=True):  # only now is the common scale known
        _label(axes, lines)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    return figure, all_axes


def _draw(axes: Axes, lines: Sequence[tuple[Look, pd.Series]]) -> None:
    for each, series in lines:
        series = series.dropna()
        axes.plot(series.index, series, color=each.color, marker=each.marker, linestyle=each.linestyle)
    ticks = sorted({x for _, series in lines for x in series.dropna().index})
    ticks = ticks[:: 1 + len(ticks) // _TICKS]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(
        ticks, [str(x) if x < 1000 else f"{x / 1000:.2g}k" if x < 99_500 else f"{x / 1000:.0f}k" for x in ticks]
    )
    axes.xaxis.set_minor_locator(NullLocator())


def _label(axes: Axes, lines: Sequence[tuple[Look, pd.Series]]) -> None:
    low, high = np.log10(axes.get_ylim())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high - low < 3 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    named = [(each, series.dropna()) for each, series in lines if each.label]
    ends = [(each, series.index[-1], series.iloc[-1]) for each, series in named]
    heights = _apart([(np.log10(y) - low) / (high - low) for _, _, y in ends])
    for (each, x, y), height in zip(ends, heights, strict=True):
        where = {"xy": (x, y), "xytext": (1.02, height), "textcoords": "axes fraction"}
        axes.annotate(each.label, **where, color=each.ink, va="center", annotation_clip=False)


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


def _closed(figure: Figure) -> Figure:
    plt.close(figure)
    return figure
