"""Stacked bars of where GPU time goes, one bar a profile."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from dsv4lab.plot.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, ink_on
from dsv4lab.plot.style import styled
from dsv4lab.trace import Trace, read, reduced, steps, suspects

COLORS = {
    "sparse_attention": BLUE, "dense_attention": "#4a94cc", "indexer": PURPLE, "moe_gemm": GREEN, "gemm": "#7fc8b0",
    "gemm_simt": VERMILLION, "nccl": BLACK, "collective": "#444444", "moe_routing": "#b5dccf", "kv_compress": "#9ecae9",
    "hyper_connections": SKY, "norm_rope": "#d8b8cc", "sampling": "#c9c3e6", "glue": "#b87f00", "glue_copy": ORANGE,
    "glue_elementwise": "#f0b93e", "glue_reduce": "#f7d98a", "glue_fill": "#fbecc5", "memcpy": "#a5722a",
    "memset": "#c9a66b", "other": "#bbbbbb", "not named": "#dddddd",
}  # fmt: skip
"""A colour for each family of kernels; those of a user's own rules are grey."""

REPORTED = {
    "sparse_mla_decode": "sparse_attention", "fp32_simt_gemm": "gemm_simt", "fp4_moe_gemm": "moe_gemm",
    "nccl_all_reduce": "nccl", "glue_direct_copy": "glue_copy",
}  # fmt: skip
"""The campaign's names of the groups, and the families here."""

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
    for number, (value, start, total) in enumerate(zip(values, left, totals, strict=True)):
        if value >= 3 * SMALL * totals.max():
            share = f"{100 * value / total:.0f}%"
            axes.text(start + value / 2, number, share, ha="center", va="center", color=ink_on(color), fontsize=8)


def stages(names: Iterable[str], mode: reduced.Mode, directory: Path | str | None = None) -> dict[str, Trace]:
    """The newest reduced trace of each stage, of those that there are."""
    found = {name: reduced.newest(name, mode, directory) for name in names}
    return {name: read(path) for name, path in found.items() if path is not None}


def origins(traces: Mapping[str, Trace], mode: reduced.Mode, directory: Path | str | None = None) -> pd.DataFrame:
    """Where profiles come from, a column each."""
    return pd.DataFrame({name: _origin(trace, reduced.newest(name, mode, directory)) for name, trace in traces.items()})


def _origin(trace: Trace, path: Path) -> dict[str, str]:
    meta = trace.meta
    first = pd.Timestamp(trace.events["ts"].min(), unit="ns")
    return {
        "file": path.name,
        "traced (UTC)": f"{first:%Y-%m-%d %H:%M}" if meta.get("base_ns") else "unknown",
        "GPU": meta.get("gpu") or "unknown",
        "SGLang": meta.get("sglang", "unknown"),
        "layers, batch": f"{meta.get('layers', 'unknown')}, {meta.get('batch', 'unknown')}",
        "context limit": f"{meta['context_length']:,}" if "context_length" in meta else "unknown",
        "steps, GPU events": f"{trace.events['step'].max() + 1}, {len(trace.events):,}",
        "lost": ", ".join(f"{count:,} {what}" for what, count in trace.lost.items()) or "nothing",
    }


def totals(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """What one step takes, a row a profile: kernel sum, busy union, overlap and idle in µs, and launches."""
    rows = {}
    for name, trace in traces.items():
        whole = steps.table(trace).query("not partial")
        span, busy, total = (whole[column].median() / 1000 for column in ("span_ns", "busy_ns", "sum_ns"))
        rows[name] = {"launches": f"{whole['events'].median():,.0f}", "sum (µs)": total, "busy (µs)": busy}
        rows[name] |= {"overlap (µs)": total - busy, "idle within it (µs)": span - busy}
    return pd.DataFrame(rows).T


def a_step(events: pd.DataFrame) -> pd.Series:
    """Milliseconds that each family takes in one step, at the mean of those that `events` has."""
    inside = events.query("step >= 0")
    return inside.groupby("family", observed=True)["dur"].sum() / 1e6 / inside["step"].nunique()


def added(trace: Trace) -> pd.DataFrame:
    """The events inside a step with "added" (µs): how long each kept the GPU busy when none that began before it did.

    These add up to the busy time, which durations do not: a kernel may begin before the one in front of it has ended,
    and wait there.
    """
    events = trace.events.query("step >= 0").sort_values("ts", kind="stable")
    end = events["ts"] + events["dur"]
    free = end.cummax().shift(fill_value=0)
    return events.assign(added=(end - events["ts"].clip(lower=free)).clip(lower=0) / 1000)


def suspected(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """The share of GPU time at stake by rule, a column a profile; "no shapes" where a rule had too few to judge."""
    columns = {}
    for name, trace in traces.items():
        found = {suspect.rule: f"{100 * suspect.share:.1f}%" for suspect in suspects.find(trace)}
        blind = "no shapes" if suspects.unseen(trace) > suspects.BLIND else "–"
        columns[name] = {
            rule.__name__: found.get(rule.__name__, blind if rule in suspects.NEED_SHAPES else "–")
            for rule in suspects.RULES
        }
    return pd.DataFrame(columns)


def reported(shares: pd.DataFrame) -> pd.DataFrame:
    """Reported shares (`tables.reported_profile`) as bars: a row a family, in percent, and what no share names.

    Parts of the glue, where they are named, stand in its place.
    """
    named = shares.rename(index=REPORTED)
    parts = named.loc[named.index.str.startswith("glue_")].notna().any()
    named.loc["glue", parts] = float("nan")
    named.loc["not named"] = 100 - named.sum()
    return named.loc[[name for name in COLORS if name in named.index]]
