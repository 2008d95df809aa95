"""What shipped configs should do on the campaign's GPU, which nobody here has: the compiler's cards and a prediction.

Nothing in it was measured on sm_120. A card is set beside its Hopper sibling: the same kernel, as sm_90's table has it
for the same calls. A time is predicted by the roofline: as far above the floor as an H200 was in its newest record.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from dsv4lab import records, roofline
from dsv4lab.hardware import lookup
from dsv4lab.kernels import fp8_gemm, hc_head, hc_pre, mqa_logits, norm_rope, skinny_gemm, sparse_mla, topk
from dsv4lab.records import Record

GPUS = {"sm_120": lookup("RTX PRO 6000 Blackwell"), "sm_90": lookup("H200")}
HERE, SIBLING = GPUS

SHIPPED: dict[str, tuple[ModuleType, str, Callable[[str, Mapping[str, Any]], str]]] = {
    "sparse_mla": (
        sparse_mla,
        "split_k",
        lambda arch, c: _first(sparse_mla, arch, max_heads=c["H"], max_rows=c["B"] * c["s_q"]),
    ),
    "mqa_logits": (mqa_logits, "triton", lambda arch, c: mqa_logits.TABLE[arch].config(c["next_n"]).name),
    "topk": (topk, "triton", lambda arch, c: topk.TABLE[arch].config.name),
    "skinny_gemm": (skinny_gemm, "split_k", lambda arch, c: _first(skinny_gemm, arch, max_m=c["M"], max_n=c["N"])),
    "fp8_gemm": (fp8_gemm, "split_k", lambda arch, c: _first(fp8_gemm, arch, max_m=c["M"], max_n=c["N"])),
    "hc_pre": (hc_pre, "split_k", lambda arch, c: _first(hc_pre, arch, max_m=c["M"])),
    "hc_head": (hc_head, "split_k", lambda arch, c: _first(hc_head, arch, max_t=c["T"])),
    "norm_rope": (norm_rope, "triton", lambda arch, c: f"w{norm_rope.TABLE[arch].num_warps}"),
}
"""By stem: the kernel module, its implementation that runs on both, and the config that an architecture's table has for
the call of a record."""

WORSE = {
    "shared_bytes": 1, "registers": 1, "spill_bytes": 1, "bytes_per_key": 1, "mma_per_key": 1, "occupancy": -1,
    "wide_loads": -1,
}  # fmt: skip
"""The properties that are compared, and which sign of a difference is the worse one."""

COLUMNS = {
    "config": "config",
    "shared_bytes": "shared memory (bytes)",
    "registers": "registers",
    "spill_bytes": "spilled (bytes)",
    "sm_blocks": "blocks an SM holds",
    "gpu_blocks": "all SMs",
    "occupancy": "of its warps",
    "bytes_per_key": "bytes a key",
    "mma_per_key": "MMA a key",
    "load128": "16-byte loads",
    "load64": "8-byte",
    "load_narrow": "narrower",
}

REASONS = {
    ("topk", "topk_kernel"): {
        "wide_loads": "a step takes half as many scores, in loads as wide: with all of them rows that are not aligned "
        "would spill"
    },
    ("fp8_gemm", "fp8_gemm_kernel"): {
        "wide_loads": "both operands come in 16-byte loads on both; in the layout of an mma.sync result more threads "
        "ask for a row's scales, and the sibling's tile is wider or its loop has more steps in flight",
    },
    ("mqa_logits", "logits_kernel"): {
        "wide_loads": "keys come in 16-byte loads on both; in the layout of mma.sync's result a thread asks for more "
        "of a page's scales than in wgmma's",
        "occupancy": "mma.sync takes its operands from registers, wgmma from shared memory",
    },
    ("sparse_mla", "split_k_kernel"): {
        "wide_loads": "no pipeline, whose first loads the sibling has twice more; a tile comes in 16-byte loads on "
        "both, its indices in narrow ones"
    },
    ("sparse_mla", "combine_kernel"): {
        "wide_loads": "tiles of 64 tokens make 16 splits at most: a thread loads the log-sum-exps of all of them and "
        "needs no shared memory to add them up"
    },
}
"""Why a property is worse on sm_120, where the SM does not explain it: by stem and kernel."""


def _first(module: ModuleType, arch: str, **needed: int) -> str:
    """The first entry of a module's table whose limits hold what is needed."""
    fits = (b for b in module.TABLE[arch] if all(getattr(b, limit) >= value for limit, value in needed.items()))
    return next(fits).config.name


def _shipped(stem: str) -> tuple[ModuleType, str, Callable[[str, Mapping[str, Any]], str]]:
    if stem not in SHIPPED:
        raise ValueError(f"stem must be one of {', '.join(SHIPPED)}, got {stem!r}")
    return SHIPPED[stem]


def path(stem: str) -> Path:
    """The newest cards of a module; ValueError if it has none. Cards are never rewritten; the first had no date."""
    folder = records.root() / "static"
    found = [*folder.glob(f"{stem}.json"), *folder.glob(f"{stem}_[0-9]*Z.json")]
    if not found:
        raise ValueError(f"stem {stem!r} has no cards in records/static: python -m dsv4lab.static {stem} makes them")
    return max(found, key=lambda each: each.stem)


def read(stem: str) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The newest cards of a module as `dsv4lab.static` made them: {architecture: {entry: {kernel: card}}}."""
    return json.loads(path(stem).read_text(encoding="utf-8"))["cards"]


def compared(stem: str) -> pd.DataFrame:
    """The newest cards of a module: a row a use and kernel, columns (property, architecture).

    A use is an entry of the table less its config. Beside what `static.card` has: sm_blocks that an SM holds at once,
    gpu_blocks that the GPU holds, occupancy (the share of an SM's warps that they are) and wide_loads (the share of
    16-byte loads among the global ones). ValueError for a stem that has no cards.
    """
    _shipped(stem)
    cards = read(stem)
    rows = {arch: dict(_rows(cards[arch], arch)) for arch in GPUS}
    tables = {arch: pd.DataFrame.from_dict(found, orient="index") for arch, found in rows.items()}
    table = pd.concat(tables, axis=1).swaplevel(axis=1)
    return table.loc[list(rows[HERE])[::-1]].rename_axis(["used for", "kernel"])


def beside(stem: str) -> pd.DataFrame:
    """`compared` as text: the value for sm_120, and in brackets the sibling's where that is another."""

    def cell(values: pd.Series) -> str:
        here, sibling = (value if isinstance(value, str) else _number(value) for value in values[list(GPUS)])
        return here if here == sibling else f"{here} ({sibling})"

    table = compared(stem)
    known = {name: label for name, label in COLUMNS.items() if name in table.columns.levels[0]}
    cells = {label: table[name].apply(cell, axis=1) for name, label in known.items()}
    return pd.DataFrame(cells).replace("nan", "–")


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def _rows(
    entries: Mapping[str, Mapping[str, Mapping[str, float]]], arch: str
) -> Iterator[tuple[tuple[str, str], dict]]:
    gpu = GPUS[arch]
    for entry, kernels in reversed(entries.items()):  # Gluon's come last, and its combine must not hide split-K's
        limits, _, rest = entry.partition(": ")
        config, *more = rest.split(", ")
        for kernel, card in reversed(kernels.items()):
            blocks = gpu.resident_blocks(card["warps"], card["registers"], card["shared_bytes"])
            yield (
                (", ".join([limits, *more]), kernel),
                {
                    "config": config,
                    **card,
                    "sm_blocks": blocks,
                    "gpu_blocks": blocks * gpu.sms,
                    "occupancy": blocks * card["warps"] / gpu.warps_per_sm,
                    "wide_loads": card["load128"] / (card["load128"] + card["load64"] + card["load_narrow"]),
                },
            )


def worse(stem: str) -> pd.DataFrame:
    """Where a card is worse than its Hopper sibling: a row a use, kernel and property, both values, and the reason.

    The reason is empty where there is none: nothing like that is shipped.
    """
    found = []
    for (use, kernel), row in compared(stem).iterrows():
        here, sibling = row.xs(HERE, level=1), row.xs(SIBLING, level=1)
        for name in filter(here.__contains__, WORSE):
            if WORSE[name] * (here[name] - sibling[name]) > 0:  # neither, where a kernel walks no keys
                why = _of_the_sm(name, here, sibling) or REASONS.get((stem, kernel), {}).get(name, "")
                found.append((use, kernel, name, here[name], sibling[name], why))
    return pd.DataFrame(found, columns=["used for", "kernel", "property", HERE, SIBLING, "reason"])


def _of_the_sm(name: str, here: Mapping[str, Any], sibling: Mapping[str, Any]) -> str:
    """Why a property is worse, if what an SM has explains it, recomputed here; else nothing."""
    gpu, blocks = GPUS[HERE], here["sm_blocks"]
    needs = {what: here[what] for what in ("warps", "registers", "shared_bytes")}
    if name in ("registers", "shared_bytes") and gpu.resident_blocks(**needs | {name: sibling[name]}) == blocks:
        return f"with the sibling's {sibling[name]:,} an SM would hold no more blocks"
    if name == "occupancy" and gpu.resident_blocks(**needs | {"shared_bytes": 0}) > blocks:
        kib = [(each.shared_memory_per_block >> 10) + 1 for each in GPUS.values()]
        return f"an SM has {kib[0]} KiB of shared memory, Hopper's {kib[1]}"
    return ""


def predicted(stem: str, found: Sequence[Record] | None = None) -> pd.DataFrame:
    """A row a case and cache, times in microseconds: config on sm_120, measured on an H200, floors, share, predicted.

    Measured is the newest record, of `found` or of all there are, of the config that sm_90's table has; share is the
    part of its time that the floor is. Both floors are by public peaks, and predicted = floor on sm_120 / share. A call
    of few microseconds waits for latency and not for a peak: its share is small, and the prediction scales what may not
    scale. Warm calls are left out, for the floor is of DRAM.
    """
    module, impl, config = _shipped(stem)
    rows = {}
    for record in records.read(module.EXPERIMENT) if found is None else found:
        call, measured_on = record.config, record.env.gpu == f"NVIDIA {GPUS[SIBLING].name}"
        if record.impl != impl or not measured_on or call["cache"] == "warm":
            continue
        if call["variant"] != config(SIBLING, call):
            continue  # of a table that is shipped no more
        floor, floor_sibling = (1e6 * roofline.floor_s(record.work, gpu) for gpu in GPUS.values())
        share = floor_sibling / record.median_us
        rows[record.case, call["cache"]] = {
            "config": config(HERE, call),
            "H200": record.median_us,
            "floor, H200": floor_sibling,
            "share": share,
            "floor, sm_120": floor,
            "predicted, sm_120": floor / share,
        }
    return pd.DataFrame(list(rows.values()), pd.MultiIndex.from_tuples(list(rows), names=["case", "cache"]))


def text(stem: str) -> str:
    """All of it for one module, as `dsv4lab cards` prints it."""
    gpu, worst = GPUS[HERE], worse(stem).set_index(["used for", "kernel", "property"])
    peaks = f"{gpu.dram_bytes_per_s / 1e12:.2f} TB/s and {gpu.bf16_flops / 1e12:.0f} TFLOP/s"
    parts = [
        (f"{stem} as compiled for {HERE}, {gpu.name}; in brackets {SIBLING} where it differs", beside(stem)),
        (f"Worse than on {SIBLING}, and why", worst),
        (
            "A call in microseconds, predicted and not measured: its share of the floor on an H200, by public peaks, "
            f"kept on {peaks}. Where the share is small latency set the time, which may not scale",
            predicted(stem),
        ),
    ]
    return "\n\n".join(f"{title}\n{_lines(table)}" for title, table in parts)


def _lines(table: pd.DataFrame) -> str:
    return table.to_string(float_format="{:,.3g}".format) if len(table) else "nothing"
