"""What a chapter needs around its figures: the run it reads, where that came from, numbers as text, claims."""

from collections.abc import Callable, Mapping, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any

import pandas as pd

from dsv4lab import records
from dsv4lab.hardware import GPU
from dsv4lab.plot.palette import LOOKS
from dsv4lab.plot.tables import select, times, with_floor
from dsv4lab.records import Record

Claim = tuple[str, bool, str]


def read_run(experiment: str, file: str, directory: Path | str | None = None) -> list[Record]:
    """The records of one file, so that what a chapter shows stays the same when others are added beside it."""
    found = records.read(experiment, directory)
    if run := [record for record in found if record.file == file]:
        return run
    raise ValueError(f"file {file!r} is no run of {experiment}; there are {', '.join(sorted({r.file for r in found}))}")


def provenance(*runs: Sequence[Record]) -> pd.DataFrame:
    """Where runs come from: a column each, under the name of its experiment, which two of them may share."""
    return pd.concat([pd.Series(_origin(run), name=run[0].experiment) for run in runs], axis=1)


def _origin(run: Sequence[Record]) -> dict[str, str]:
    last, env = run[-1], run[-1].env
    clocks = [clock["sm_mhz"] for r in run for clock in (r.clocks.before, r.clocks.after) if clock]
    # exact results have an error of 0 of 0, and what is not a measurement has none
    strained = [r.check["error"] / (r.check["tolerance"] or 1.0) for r in run if r.config and "error" in r.check]
    commit = last.git.commit[:12] if last.git.commit else "not committed then"
    return {
        "record file": last.file,
        "measured (UTC)": f"{last.date_utc:%Y-%m-%d %H:%M}",
        "GPU": env.gpu,
        "driver, CUDA": f"{env.driver}, {env.cuda}",
        "python, torch, triton": f"{env.python}, {env.torch}, {env.triton}",
        "commit": f"{commit} with local changes" if last.git.commit and last.git.dirty else commit,
        "kernel source (sha256)": next((r.kernel_sha256[:12] for r in run if r.kernel_sha256), "none of ours"),
        "rivals": ", ".join(sorted({r.config["package"] for r in run if "package" in r.config})) or "none",
        "SM clock (MHz)": f"{min(clocks):.0f} to {max(clocks):.0f}" if clocks else "unknown",
        "largest error / its tolerance": number(max(strained)) if strained else "nothing of this kind",
    }


def number(value: float) -> str:
    """Three significant digits, thousands set apart, never an exponent; a dash for what was not measured."""
    if pd.isna(value):
        return "–"
    return f"{value:,.{max(0, 2 - floor(log10(abs(value))))}f}" if value else "0"


def span(values: pd.Series, form: Callable[[float], str] = number) -> str:
    """ "1.10 to 1.69", or the one value there is; a dash for none."""
    low, high = form(values.min()), form(values.max())
    return low if low == high else f"{low} to {high}"


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table as text that is the same everywhere: implementations by their labels, floats by `number`."""
    text = table.map(lambda value: number(value) if isinstance(value, float) else value)
    text = text.rename(columns={impl: known.label for impl, known in LOOKS.items()})
    return text.rename_axis(columns=[None] * text.columns.nlevels)


def at_most(text: str, values: pd.Series, limit: float) -> list[Claim]:
    """The claim that no value exceeds `limit` ("{}" in the text), the most as evidence; none where nothing is."""
    return _claim(text.format(limit), values.dropna(), "max", lambda value: value <= limit)


def at_least(text: str, values: pd.Series, limit: float) -> list[Claim]:
    """The claim that every value reaches `limit` ("{}" in the text), the least as evidence; none where nothing is."""
    return _claim(text.format(limit), values.dropna(), "min", lambda value: value >= limit)


def _claim(text: str, values: pd.Series, extreme: str, holds: Callable[[float], bool]) -> list[Claim]:
    if values.empty:
        return []
    value, at = values.agg(extreme), values.agg(f"idx{extreme}")
    at = at if isinstance(at, tuple) else (at,)
    place = ", ".join(f"{name} = {level}" for name, level in zip(values.index.names, at, strict=True))
    return [(text, bool(holds(value)), f"{number(value)} at {place}")]


def compiled(cards: Mapping[str, Mapping[str, Any]], gpu: GPU) -> pd.DataFrame:
    """What the compiler made for `gpu`: a row an entry of the config table.

    cards: of `dsv4lab.static`, by entry; each holds one card a kernel, the attention kernel's first.
    """
    rows = {}
    for entry, kernels in cards.items():
        card = next(iter(kernels.values()))
        used_for, _, config = entry.partition(": ")
        rows[used_for] = {
            "config": config,
            "shared memory (bytes)": card["shared_bytes"],
            "of the limit": f"{card['shared_bytes'] / gpu.shared_memory_per_block:.0%}",
            "registers": card["registers"],
            "spilled (bytes)": card["spill_bytes"],
            "MMA instructions": card["mma"],
            "16-byte loads": card["load128"],
            "narrow loads": card["load_narrow"],
            "blocks an SM holds": gpu.resident_blocks(card["warps"], card["registers"], card["shared_bytes"]),
        }
    return pd.DataFrame(rows).T.rename_axis("used for")


def headline(frame: pd.DataFrame, stock: pd.DataFrame, heads: int) -> str:
    """The README's table for `heads` heads as Markdown: cold medians in microseconds and two ratios, a row a batch.

    stock: a run with SGLang's kernel, of which nothing else is taken; dashes where it has no such batch.
    """
    call = dict(H=heads, cache="cold", lengths="full", s_q=1, window=128, topk=512)
    chosen = select(frame, **call)
    found = times(chosen)[["simt", "mma", "split_k", "gluon", "flashmla"]]
    found.insert(0, "stock_simt", times(select(stock, **call))["stock_simt"])
    floor_us = with_floor(chosen).query("impl == 'split_k'").set_index("B")["floor_us"]
    gain = found["stock_simt"] / found["gluon"]
    columns = {LOOKS[impl].label: found[impl].map(number) for impl in found} | {
        "floor": floor_us.map(number),
        "stock / Gluon": gain.map(lambda x: f"{number(x)}x", na_action="ignore").fillna(number(float("nan"))),
        "Gluon / FlashMLA": (found["gluon"] / found["flashmla"]).map(number),
    }
    lines = [["B", *columns], ["--:"] * (len(columns) + 1)]
    lines += [[str(batch), *(column[batch] for column in columns.values())] for batch in found.index]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def indexer_headline(frame: pd.DataFrame) -> str:
    """The README's table of the indexer as Markdown, microseconds: batch 32 under a limit of 1M tokens."""
    found = times(select(frame, B=32, next_n=1, max_len=frame["max_len"].max()), over="actual").dropna()
    columns = {LOOKS[impl].label: found[impl].map(number) for impl in found} | {
        "fallback / Triton": (found["torch_fallback"] / found["triton"]).map(lambda x: f"{number(x)}x")
    }
    lines = [["real positions", *columns], ["--:"] * (len(columns) + 1)]
    lines += [[f"{length:,}", *(column[length] for column in columns.values())] for length in found.index]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
