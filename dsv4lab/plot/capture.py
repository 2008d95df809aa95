"""The capture matrix as a picture and as a list of causes, from the frame of one run of experiment `capture`."""

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dsv4lab.plot.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, ink_on, look
from dsv4lab.plot.style import styled
from dsv4lab.trace import read

CAPTURED, WRONG, UNKNOWN = "captured, replays right", "captured, replays wrong", "another error"
CAUSES = {
    "cudaErrorStreamCaptureIsolation": (
        "A captured stream waits for an event that was recorded before the capture began; that the event has long "
        "happened does not matter, since a graph cannot hold a dependency on work outside of it."
    ),
    "cudaErrorStreamCaptureUnjoined": (
        "A stream was forked off and never joined again, so the graph would have an end that nothing waits for."
    ),
    "Cannot copy between CPU and CUDA": (
        "torch.compile begins to compile inside the capture, and on the way copies from pageable memory, which a "
        "capture cannot hold."
    ),
    "BackendCompilerFailed": (
        "torch.compile begins to compile inside the capture, and its backend gives up before CUDA refuses anything; "
        "this run kept the wrapper's first line, not the error within."
    ),
    "Cannot prepare for replay": (
        "This mode has CUDA graphs of its own: warm, it would replay one, which cannot be done inside a capture."
    ),
    "ColdKernel": "Our own kernel was not compiled for this shape; its launcher refuses before it touches the stream.",
    "cudaErrorStreamCaptureUnsupported": (
        "Something that compiles, tunes or loads code waits for the device or makes a call that a capture forbids."
    ),
    "cudaErrorStreamCaptureInvalidated": "An echo: the capture was already broken by an error that nobody raised.",
}
"""What an error is recognised by, its CUDA name or its text, and what is behind it in one sentence."""

_COLORS = {CAPTURED: GREEN, WRONG: BLACK, UNKNOWN: GREY}
_COLORS |= dict(zip(CAUSES, (VERMILLION, ORANGE, BLUE, "#5A3A8A", PURPLE, SKY, "#F0E442", "#BBBBBB"), strict=True))
_WARMTHS = {"same": "warmed at the shape", "other": "warmed at another", "cold": "cold"}
_STREAMS = {"none": "none", "joined": "joined", "unjoined": "not joined", "event_before": "old event"}


def outcomes(frame: pd.DataFrame) -> pd.Series:
    """What became of each cell: `CAPTURED`, `WRONG`, the key of one of `CAUSES`, or `UNKNOWN`."""
    return pd.Series([_outcome(row) for row in frame.to_dict("records")], frame.index, dtype=object)


def _outcome(row: Mapping[str, object]) -> str:
    if row["captured"]:
        return CAPTURED if row["replay_equal"] else WRONG
    by_name = [cause for cause in CAUSES if cause == row["cuda_name"]]
    by_text = [cause for cause in CAUSES if cause in str(row["first_error"])]
    return next(iter(by_name + by_text), UNKNOWN)


def causes(frame: pd.DataFrame) -> pd.DataFrame:
    """Each kind of failure: in how many cells, its CUDA code, an example of the first error, what is behind it."""
    failed = frame.assign(cause=outcomes(frame))[~frame["captured"].astype(bool)]
    rows = {}
    for cause, cells in failed.groupby("cause"):
        codes = sorted({int(code) for code in cells["cuda_code"].dropna()})
        rows[cause] = {
            "cells": len(cells),
            "CUDA code": ", ".join(map(str, codes)) or "none: refused before CUDA was",
            "first error": re.sub(r"\s+", " ", cells["first_error"].iloc[0])[:110],
            "why": CAUSES.get(cause, "not explained"),
        }
    return pd.DataFrame(rows).T.rename_axis("failure").sort_values("cells", ascending=False)


def switches(frame: pd.DataFrame) -> pd.DataFrame:
    """What became of the cells without a second stream: a row a mode and variable, a column a warm-up."""
    cells = frame.assign(outcome=outcomes(frame))[frame["stream"] == "none"]
    cells["cudagraphs"] = cells["cudagraphs"].astype(int)
    keys = ["mode", "cudagraphs", "warmth"]
    table = cells.groupby(keys, sort=False)["outcome"].agg(lambda each: " / ".join(sorted(set(each)))).unstack()
    return table.fillna("–").rename_axis(index={"cudagraphs": "TORCHINDUCTOR_CUDAGRAPHS"}, columns=None)


def moved(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """The cells of both runs that came out another way: a row a cell, what became of it and how often it compiled."""
    cell = ["impl", "mode", "warmth", "cudagraphs", "stream"]
    runs = {"before": before, "now": after}
    told = {name: run.assign(outcome=outcomes(run)).astype({"compiles": "Int64"}) for name, run in runs.items()}
    found = {name: run.set_index(cell)[["outcome", "compiles"]] for name, run in told.items()}
    table = pd.concat(found, axis=1, join="inner")
    return table[table["before", "outcome"] != table["now", "outcome"]].sort_index()


def matrix(frame: pd.DataFrame, title: str | None = None) -> Figure:
    """A square for each cell: a row a mode and TORCHINDUCTOR_CUDAGRAPHS, a column a warm-up and a use of streams.

    Each attention kernel has a panel. Only the three warm-ups of the matrix are drawn.
    """
    frame = frame.assign(outcome=outcomes(frame))[frame["warmth"].isin(list(_WARMTHS))]
    modes = set(zip(frame["mode"], frame["cudagraphs"], strict=True))
    rows = sorted(modes, key=lambda row: (row[0] == "eager", *row))
    columns = [(warmth, stream) for warmth in _WARMTHS for stream in _STREAMS]
    panels = list(frame.groupby("impl", sort=False))
    with styled():
        size = (9.5, (0.34 * len(rows) + 0.9) * len(panels) + 1.6)
        figure, grid = plt.subplots(len(panels), 1, squeeze=False, sharex=True, figsize=size)
        for axes, (impl, cells) in zip(grid[:, 0], panels, strict=True):
            _squares(axes, cells, rows, columns)
            axes.set_title(f"attention: {look(impl).label}")
        _column_names(grid[-1, 0], columns)
        shown = [outcome for outcome in _COLORS if outcome in set(frame["outcome"])]
        handles = [Rectangle((0, 0), 1, 1, color=_COLORS[outcome]) for outcome in shown]
        figure.legend(handles, shown, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    plt.close(figure)
    return figure


def _squares(axes: Axes, cells: pd.DataFrame, rows: list, columns: list) -> None:
    for row, (mode, graphs) in enumerate(rows):
        of_row = cells[(cells["mode"] == mode) & (cells["cudagraphs"] == graphs)]
        for cell in of_row.to_dict("records"):
            column = columns.index((cell["warmth"], cell["stream"]))
            color = _COLORS[cell["outcome"]]
            axes.add_patch(Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, facecolor=color, linewidth=0))
            code = cell["cuda_code"]
            text = {CAPTURED: "ok", WRONG: "≠"}.get(cell["outcome"], "–" if pd.isna(code) else f"{code:.0f}")
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink_on(color))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [f"{mode}, {int(graphs)}" for mode, graphs in rows], fontsize=8)
    axes.grid(False)


def _column_names(axes: Axes, columns: list) -> None:
    axes.set_xticks(range(len(columns)), [_STREAMS[stream] for _, stream in columns], fontsize=8, rotation=30)
    for start, name in zip(range(0, len(columns), len(_STREAMS)), _WARMTHS.values(), strict=True):
        middle = start + (len(_STREAMS) - 1) / 2
        where = {"xy": (middle, 0), "xycoords": ("data", "axes fraction"), "ha": "center", "annotation_clip": False}
        axes.annotate(name, **where, xytext=(0, -50), textcoords="offset points")


def inductor_kernels(trace: Path, steps: int) -> pd.DataFrame:
    """The kernels in a trace that Inductor generated: by name, how many a step, and microseconds each."""
    events = read(trace).events
    kernels = events.loc[events["kind"] == "kernel", ["name", "dur"]].astype({"name": str})
    generated = kernels[kernels["name"].str.match(r"triton_(poi|red|per|tem|for)_")].groupby("name")["dur"]
    return pd.DataFrame(
        {"in the trace": generated.size(), "a step": generated.size() / steps, "µs each": 1e-3 * generated.mean()}
    ).rename_axis("kernel")
