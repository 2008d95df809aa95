"""Stacked bars of where GPU time goes, one bar a profile."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dsv4lab.plot.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from dsv4lab.plot.style import styled

COLORS = {
    "sparse_attention": BLUE, "dense_attention": "#4a94cc", "indexer": PURPLE, "moe_gemm": GREEN, "gemm": "#7fc8b0",
    "gemm_simt": VERMILLION, "nccl": BLACK, "collective": "#444444", "moe_routing": "#b5dccf", "kv_compress": "#9ecae9",
    "hyper_connections": SKY, "norm_rope": "#d8b8cc", "sampling": "#c9c3e6", "glue_copy": ORANGE,
    "glue_elementwise": "#f0b93e", "glue_reduce": "#f7d98a", "glue_fill": "#fbecc5", "memcpy": "#a5722a",
    "memset": "#c9a66b", "other": "#bbbbbb",
}  # fmt: skip
"""A colour for each family of kernels; those of a user's own rules are grey."""

SMALL = 0.01
"""Parts of a bar below this are drawn as one, and those below three times this are not labelled in it."""

REST = "smaller ones"


def stacked(bars: pd.DataFrame, titles: Mapping[str, str], xlabel: str, title: str | None = None) -> Figure:
    """Horizontal stacked bars, the first column on top.

    Args:
        bars: a row a family, in the order of the stack, a column a bar; values in the unit of `xlabel`, NaN for none.
        titles: what the families are called.
    """
    bars = bars.fillna(0.0)
    shown = bars[(bars / bars.sum()).max(axis=1) >= SMALL]
    rest = bars.drop(shown.index).sum()
    if rest.max() > 0:
        shown = pd.concat([shown, rest.to_frame(REST).T])
    with styled():
        figure, axes = plt.subplots(figsize=(9.2, 1.3 + 0.62 * bars.shape[1] + 0.16 * len(shown)))
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        left = pd.Series(0.0, index=bars.columns)
        for family, values in shown.iterrows():
            color = COLORS.get(family, GREY if family != REST else "#e5e5e5")
            drawn = axes.barh(list(bars.columns), values, left=left, color=color, edgecolor="white", linewidth=0.6)
            drawn.set_label(titles.get(family, family))
            _label(axes, values, left, bars.sum(), color)
            left += values
        axes.invert_yaxis()
        axes.set_xlabel(xlabel)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower left", ncols=4, fontsize=8)
        if title:
            axes.set_title(title)
    plt.close(figure)
    return figure


def _label(axes: plt.Axes, values: pd.Series, left: pd.Series, totals: pd.Series, color: str) -> None:
    """Percentages inside the parts that have room for them."""
    ink = "white" if sum(to_rgb(color)) < 1.6 else "black"
    for number, (value, start, total) in enumerate(zip(values, left, totals, strict=True)):
        if value >= 3 * SMALL * totals.max():
            share = f"{100 * value / total:.0f}%"
            axes.text(start + value / 2, number, share, ha="center", va="center", color=ink, fontsize=8)
