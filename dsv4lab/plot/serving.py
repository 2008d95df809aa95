"""The campaign on a live server as tables and figures; what was reported of it stands in tables of its own."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from dsv4lab.plot.chapters import number
from dsv4lab.plot.palette import BLUE, GREEN, GREY, VERMILLION
from dsv4lab.plot.style import styled
from dsv4lab.records import Record

LADDER = {
    "stock": "stock",
    "mma": "+ attention on tensor cores",
    "split_k": "+ split-K",
    "bf16": "+ bf16 where FP32 was forced",
    "indexer_stock_gemm": "all fixes but the FP8 linear layers",
    "indexer": "all fixes",
}
"""The stages that follow from one another, and what each adds; the last two have all that is small besides."""

ALL_BUT = {"indexer_stock_mhc": "all fixes but MHC-pre"}
TUNED = {"indexer_tuned": "all fixes, tuned tables"}
MARKS = {
    "native": "SGLang's Hopper path",
    "native_tuned": "SGLang's Hopper path, tuned tables",
    "native_auto": "SGLang's own choices",
}
CAPPED = {"stock": "stock_ctx8192", "indexer": "indexer_ctx8192"}
REPORTED = {"baseline": "baseline", "indexer_fix": "+ context capped to 8K"}
"""Rungs that the campaign reported under names of its own."""
LABELS = LADDER | ALL_BUT | TUNED | REPORTED | MARKS
LABELS |= {short: f"{LADDER[stage]}, 8K allowed" for stage, short in CAPPED.items()}
GEMM_RIVALS = {
    "sglang_fp8": "SGLang, default",
    "sglang_fp8_tuned": "SGLang, tuned",
    "deepgemm_fp8": "DeepGEMM",
    "bf16": "cuBLAS, bf16",
}
COMPILED = ("compile", "compile_nographs", "compile_stock_attention")
STAGES = (*LADDER, *ALL_BUT, *TUNED, *MARKS, *CAPPED.values(), *COMPILED)


def served(frame: pd.DataFrame, what: str = "output_tok_s") -> pd.DataFrame:
    """Output tokens/s: a row a stage, in the order of `STAGES`, a column a concurrency; invalid runs are left out.

    what: "output_tok_s" over whole waves, "steady_tok_s" over their windows in which nothing is prefilled.

    ValueError where two records compete for one place.
    """
    rows = frame[frame["C"].notna() & frame["passed"]]
    twice = rows[rows.duplicated(["stage", "C"])]
    if not twice.empty:
        stage, at = twice.iloc[0][["stage", "C"]]
        raise ValueError(f"several records of {stage} at C={at:g}: choose one run first")
    table = rows.astype({"C": int}).pivot(index="stage", columns="C", values=what)
    return table.loc[[stage for stage in STAGES if stage in table.index]]


def by_start(run: Sequence[Record], stages: Sequence[str], what: str = "output_tok_s") -> pd.DataFrame:
    """Output tokens/s, or another of the results, of each start of these stages: a row a start, a column a concurrency.

    run: of one file or several after another; the rates of a start follow its first answer. Rows are named by stage,
    when the server stood (UTC) and what ran beside. ValueError for a rate that follows no start.
    """
    rows, last = {}, {}
    for record in run:
        stage, at = record.config["stage"], record.config["C"]
        if stage not in stages or not record.check["passed"]:
            continue
        if record.case == "start":
            last[stage] = stage, f"{record.date_utc:%m-%d %H:%M}", ", ".join(record.method["beside"]) or "none"
        elif stage not in last:
            raise ValueError(f"{stage} at C={at} in {record.file} follows no start of it")
        elif at is not None:
            rows.setdefault(last[stage], {})[at] = record.result[what]
    table = pd.DataFrame.from_dict(rows, orient="index").sort_index(axis=1)
    table = table.rename_axis(["stage", "at (UTC)", "beside"]).rename_axis(columns="C")
    return table.loc[[stage for stage in stages if stage in table.index]]


def middle(rates: pd.DataFrame, started: pd.DataFrame) -> pd.DataFrame:
    """`rates` (`served`), for the stages of `started` (`by_start`) with the median over their starts in its place."""
    return started.groupby(level="stage").median().combine_first(rates).loc[rates.index].rename_axis(columns="C")


def pairs(started: pd.DataFrame, stage: str, other: str) -> pd.DataFrame:
    """Each start of a stage over the start of another that ran beside it, in order of time, a column a concurrency.

    started: of `by_start`. ValueError unless each has one beside it.
    """
    both = [started.xs((one, two), level=("stage", "beside")) for one, two in ((stage, other), (other, stage))]
    if len({len(table) for table in both}) > 1:
        raise ValueError(f"{len(both[0])} starts of {stage} beside {other}, {len(both[1])} the other way round")
    return both[0].sort_index() / both[1].sort_index().to_numpy()


def starts(run: Sequence[Record]) -> pd.DataFrame:
    """What became of each stage: seconds to the first answer, memory taken by graphs (GB), the first error if any."""
    rows = {}
    for record in run:
        if record.case in ("start", "end") and record.config["stage"] in STAGES:
            row = rows.setdefault(record.config["stage"], {"start (s)": None, "graphs (GB)": None, "error": ""})
            if record.check["passed"]:
                row["start (s)"] = record.samples_us[0] / 1e6
                row["graphs (GB)"] = (record.result or {}).get("graph_gb")
            else:
                row["error"] = row["error"] or "; ".join(record.check.get("errors", []))
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["start (s)", "graphs (GB)", "error"])
    table = table.astype({"start (s)": float, "graphs (GB)": float})
    return table.loc[[stage for stage in STAGES if stage in table.index]]


def missing(table: pd.DataFrame) -> list[str]:
    """The stages without a row."""
    return [stage for stage in STAGES if stage not in table.index]


def waves(run: Sequence[Record], concurrency: int) -> pd.DataFrame:
    """Seconds of each wave at one concurrency in the order in which they ran, a row a stage."""
    rows = {
        record.config["stage"]: pd.Series(record.samples_us) / 1e6
        for record in run
        if record.config["C"] == concurrency and record.check["passed"]
    }
    table = pd.DataFrame(rows).T
    return table.loc[[stage for stage in STAGES if stage in table.index]]


def over(rates: pd.DataFrame, stage: str, other: str) -> pd.Series:
    """How many times the tokens/s of `other` a stage serves, by concurrency; empty where one was not measured."""
    if not {stage, other} <= set(rates.index):
        return pd.Series(dtype=float, index=pd.Index([], name="C", dtype=int))
    return (rates.loc[stage] / rates.loc[other]).dropna()


def conditions(run: Sequence[Record]) -> pd.DataFrame:
    """Under which conditions each rate was measured, a row a stage and C.

    When, which stages ran beside it on other GPUs of the machine, compilations in the window, the slowest of the waves
    over the fastest, the first token (ms), and tokens/s of the steady window, where nothing is prefilled.
    """
    rows = {}
    for record in run:
        if record.config["stage"] in STAGES and record.config["C"] is not None:
            rows[record.config["stage"], record.config["C"]] = {
                "at (UTC)": f"{record.date_utc:%m-%d %H:%M}",
                "beside": ", ".join(record.method.get("beside", ["unknown"])) or "none",
                "compiled": f"{record.result['compiles']:g}",
                "slowest / fastest wave": max(record.samples_us) / min(record.samples_us),
                "first token (ms)": record.result["ttft_ms"],
                "steady tokens/s": record.result["steady_tok_s"],
            }
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis(["stage", "C"])
    return table.loc[[stage for stage in STAGES if stage in table.index.levels[0]]]


def headline(rates: pd.DataFrame) -> str:
    """The README's table as Markdown, output tokens/s: stock, all fixes, SGLang's Hopper path, and two ratios."""
    stages = [stage for stage in ("stock", "indexer", "native") if stage in rates.index]
    columns = {LABELS[stage]: rates.loc[stage].map(number) for stage in stages}
    for other, title in (("stock", "fixes / stock"), ("native", "fixes / Hopper path")):
        gain = over(rates, "indexer", other)
        columns[title] = {load: f"{number(gain[load])}x" if load in gain else "–" for load in rates}
    lines = [["requests at once", *columns], ["--:"] * (len(columns) + 1)]
    lines += [[str(load), *(column[load] for column in columns.values())] for load in rates]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def met(marks: Sequence[tuple[str, float, float, int]]) -> pd.DataFrame:
    """Marks (text, measured, limit, 1 for at least or -1 for at most) and whether they were met; NaN: not measured."""
    table = pd.DataFrame(marks, columns=["mark", "measured", "limit", "sign"]).set_index("mark")
    good = table["sign"] * (table["measured"] - table["limit"]) >= 0
    table["met"] = good.map({True: "yes", False: "no"}).where(table["measured"].notna(), "not measured")
    return table[["measured", "met"]]


def worth(rates: pd.Series, concurrency: int) -> pd.DataFrame:
    """What each step of the ladder gave at one concurrency, of the stages measured.

    rates: output tokens/s by stage. In order: over the stage before. Alone: if it saved the same milliseconds of a
    step that still had everything else of the stock path. NaN in the first row.
    """
    step = 1e3 * concurrency / rates.reindex([stage for stage in LADDER if stage in rates.dropna().index])
    saved = -step.diff()
    table = pd.DataFrame({
        "tokens/s": rates[step.index],
        "a token of each (ms)": step,
        "saved (ms)": saved,
        "in order": step.shift() / step,
        "alone": step.iloc[:1].sum() / (step.iloc[:1].sum() - saved),
        "so far": step.iloc[:1].sum() / step,
    })  # fmt: skip
    return table.rename(index=LADDER)


def capped(rates: pd.DataFrame) -> pd.DataFrame:
    """Tokens/s at 8K allowed, at all of the context, and their ratio, for stock and for all fixes; a row each and C."""
    rows = {
        (stage, concurrency): (rates.loc[short, concurrency], rates.loc[stage, concurrency])
        for stage, short in CAPPED.items()
        if {stage, short} <= set(rates.index)
        for concurrency in rates
    }
    columns = ["8K allowed", "1M allowed"]
    index = pd.MultiIndex.from_tuples(rows, names=["stage", "C"]) if rows else pd.MultiIndex.from_arrays([[], []])
    table = pd.DataFrame(list(rows.values()), index=index, columns=columns, dtype=float).dropna()
    return table.assign(**{"8K / 1M": table["8K allowed"] / table["1M allowed"]})


def parity(frame: pd.DataFrame) -> pd.DataFrame:
    """Of records of serving_parity: a column a context and one for all, differences in nats."""
    names = {
        "prompts": "prompts",
        "noise_mean": "native against itself, mean",
        "difference_mean": "ours against native, mean",
        "noise_max": "native against itself, largest",
        "difference_max": "ours against native, largest",
        "decided": "decided: native's margin exceeds its noise",
        "changed_decided": "of these, with another token from ours",
        "changed": "of all, with another token from ours",
        "changed_native": "with another token from native itself, in all comparisons",
        "margin_median": "median margin",
    }
    return frame.set_index("case")[list(names)].rename(columns=names).T.rename_axis(columns=None)


def ladder(rates: Mapping[str, pd.Series], title: str | None = None, xlabel: str = "output tokens/s") -> Figure:
    """Tokens/s, or another number, as bars, a panel for each name: rows in their order, marks to beat in green."""
    with styled():
        height = 1.4 + 0.34 * max(len(series) for series in rates.values())
        figure, grid = plt.subplots(1, len(rates), squeeze=False, figsize=(5.1 * len(rates), height))
        for axes, (name, series) in zip(grid[0], rates.items(), strict=True):
            series = series.dropna()
            labels = [LABELS.get(stage, stage) for stage in series.index]
            colors = [
                GREEN if stage in MARKS else BLUE if stage in LADDER | ALL_BUT | TUNED | REPORTED else GREY
                for stage in series.index
            ]
            bars = axes.barh(labels, series, color=colors)
            axes.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in series], padding=3)
            axes.set_xlim(0, 1.2 * series.max())
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(xlabel)
            axes.set_title(name)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    plt.close(figure)
    return figure


def ratios(panels: Mapping[str, pd.DataFrame], title: str, xlabel: str) -> Figure:
    """Ratios of times as coloured cells, a panel for each name, all with the same rows: below 1 (blue) is faster."""
    colors = LinearSegmentedColormap.from_list("ratios", [BLUE, "white", VERMILLION])
    with styled():
        rows = max(len(table) for table in panels.values())
        figure, grid = plt.subplots(
            1, len(panels), sharey=True, squeeze=False, figsize=(1.6 + 2.4 * len(panels), 1.5 + 0.36 * rows)
        )
        for axes, (name, table) in zip(grid[0], panels.items(), strict=True):
            axes.imshow(np.log2(table.to_numpy(dtype=float)), cmap=colors, vmin=-1.5, vmax=1.5, aspect="auto")
            for (row, column), value in np.ndenumerate(table.to_numpy(dtype=float)):
                ink = "white" if abs(np.log2(value)) > 1 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=9)
            axes.set_xticks(range(table.shape[1]), [f"{at}" for at in table.columns])
            axes.set_yticks(range(len(table)), list(table.index))
            axes.tick_params(length=0)
            axes.grid(visible=False)
            axes.set_xlabel(xlabel)
            axes.set_title(name, fontsize=10)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    plt.close(figure)
    return figure
