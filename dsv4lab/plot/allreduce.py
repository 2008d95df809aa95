"""The all-reduce chapter's frames: what was reported or measured, beside what the cost model says of it."""

from collections.abc import Mapping, Sequence

import pandas as pd

from dsv4lab import comm
from dsv4lab.plot.palette import Look, in_order, look
from dsv4lab.records import Record

KIB = 1024
SIZES = {kib: f"{kib} KiB" if kib < KIB else f"{kib // KIB} MiB" for kib in (4, 64, KIB, 16 * KIB, 64 * KIB)}
"""Messages (KiB) that the axis of a figure names, and how."""


def reported_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Reported all-reduces, `rows` as of `records.reported`: link, ranks, impl, KiB, us, and model_us beside."""
    chosen = rows[rows["experiment"] == "all_reduce_latency"]
    places = chosen["case"].str.extract(r"(?P<link>\w+), (?P<ranks>\d+) GPUs")
    frame = places.assign(
        ranks=places["ranks"].astype(int),
        impl=chosen["stage"],
        KiB=chosen["quantity"].str.split().str[0].astype(float) / KIB,
        us=chosen["value"],
    )
    return with_model(frame).reset_index(drop=True)


def measured_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Records of `allreduce` over GPUs (`records.to_frame`) in the columns of `reported_times`, and with mode and p10,
    p90; the link is NVLink where the driver calls it NV..., else nominal PCIe. What the model does not know has NaN.
    """
    names = {"message_bytes": "KiB", "median_us": "us", "p10_us": "p10", "p90_us": "p90"}
    found = frame.rename(columns=names).assign(KiB=frame["message_bytes"].astype(int) // KIB)
    found["link"] = [comm.link_of(topology).name for topology in frame["link"]]
    found["bus_gb_per_s"] = 1e-3 * frame["bytes"] / frame["median_us"]
    return with_model(found)


def with_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `model_us` and `off`, how many times the time that the model makes of it."""
    known = [
        _predicted_us(*row) for row in zip(frame["link"], frame["ranks"], frame["impl"], frame["KiB"], strict=True)
    ]
    model = pd.Series(known, index=frame.index, dtype=float)
    return frame.assign(model_us=model, off=model / frame["us"])


def lines(frame: pd.DataFrame) -> Mapping[str, list[tuple[Look, pd.Series]]]:
    """For `figures.lines_against`: by link and ranks, each implementation's times over KiB, the model's dashed."""
    panels: dict[str, list[tuple[Look, pd.Series]]] = {}
    for (link, ranks), of_link in frame.groupby(["link", "ranks"], sort=False):
        drawn = panels.setdefault(f"{link}, {ranks} GPUs", [])
        for impl in in_order(set(of_link["impl"])):
            rows = of_link[of_link["impl"] == impl].set_index("KiB").sort_index()
            known = look(impl)
            drawn.append((Look(known.label, known.color, known.marker, ""), rows["us"]))
            if rows["model_us"].notna().any():
                drawn.append((Look("", known.color, "", "--"), rows["model_us"]))
    return panels


def off_by_size(frame: pd.DataFrame) -> pd.DataFrame:
    """How many times the measured time the model makes of it: a row a size (KiB), a column an implementation."""
    return _by_size(frame, "off").dropna(axis="columns", how="all")


def over_nccl(frame: pd.DataFrame, impls: list[str]) -> pd.DataFrame:
    """Times of `impls` over those of NCCL as it is: a row a size (KiB), a column each, NaN if not measured."""
    times = _by_size(frame, "us")
    return times.reindex(columns=impls).div(times["nccl"], axis=0)


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Of NCCL's algorithms and protocols the fastest by size (KiB), measured and by the model, and what it took itself.

    The last column is how many times the fastest one's time that cost.
    """
    forced = frame[frame["impl"].str.match("nccl_(ring|tree)")]
    measured, modelled = _by_size(forced, "us"), _by_size(forced, "model_us")
    itself = frame[frame["impl"] == "nccl"].set_index("KiB").sort_index()
    names = {"measured": measured.idxmin(axis=1), "by the model": modelled.idxmin(axis=1)}
    labels = {name: column.map(lambda impl: look(impl).label) for name, column in names.items()}
    cost = itself["us"] / measured.min(axis=1)
    return pd.DataFrame(labels | {"NCCL took": itself["chosen"], "NCCL / fastest": cost})


def _by_size(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    table = frame.pivot(index="KiB", columns="impl", values=value)
    return table[in_order(set(table.columns))]


def by_batch(costs: Mapping[str, comm.Cost], batches: list[int]) -> pd.DataFrame:
    """Microseconds of one all-reduce of the hidden state: a row a batch, a column a cost."""
    nbytes = {batch: comm.step(batch, 2)[0].nbytes for batch in batches}
    table = {name: {b: 1e6 * line.time_s(n) for b, n in nbytes.items()} for name, line in costs.items()}
    return pd.DataFrame(table).rename_axis("B")


def loopback(frame: pd.DataFrame) -> comm.Link:
    """The link between two processes on one CPU, by records of gloo (`records.to_frame`): the line through the medians.

    Of several runs it is their median by size. `source` says how far apart lines through single runs are, and lines
    through the fast and the slow tenth of their samples.
    """
    pairs = frame[(frame["impl"] == "gloo") & (frame["ranks"] == 2)]
    lines = {
        column: [
            comm.loopback(_seconds(run.set_index("message_bytes")[column]), "") for _, run in pairs.groupby("file")
        ]
        for column in ("p10_us", "median_us", "p90_us")
    }

    def span(columns: list[str]) -> str:
        found = [line for column in columns for line in lines[column]]
        us, rate = [1e6 * line.one_shot_s for line in found], [line.ring_bytes_per_s / 1e9 for line in found]
        return f"{min(us):.0f} to {max(us):.0f} µs and {min(rate):.2g} to {max(rate):.2g} GB/s"

    files = [file.removesuffix(".jsonl") for file in sorted(set(pairs["file"]))]
    source = (
        f"measured: gloo between 2 processes, {', '.join(files)}; {span(['median_us'])} by run, {span(list(lines))} "
        "from the fast tenth of the samples to the slow one: it is the scheduler's time"
    )
    return comm.loopback(_seconds(pairs.groupby("message_bytes")["median_us"].median()), source)


def _seconds(us: pd.Series) -> dict[int, float]:
    return {int(nbytes): 1e-6 * value for nbytes, value in us.items()}


def links(*measured: comm.Link) -> pd.DataFrame:
    """`comm.LINKS` and what was measured besides as a table, rates in GB/s."""
    rows = {
        link.name: {
            "ring (GB/s)": link.ring_bytes_per_s / 1e9,
            "all to all (GB/s)": link.dense_bytes_per_s / 1e9,
            "one-shot of few bytes (µs)": 1e6 * link.one_shot_s,
            "source": link.source,
        }
        for link in (*comm.LINKS.values(), *measured)
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def sent(batches: list[int], ranks: int) -> pd.DataFrame:
    """The collectives of a decode step: calls, and KiB of each for every batch."""
    steps = {batch: comm.step(batch, ranks) for batch in batches}
    table = {"calls": {c.name: c.count for c in steps[batches[0]]}}
    table |= {f"KiB each, B = {batch}": {c.name: c.nbytes / KIB for c in step} for batch, step in steps.items()}
    return pd.DataFrame(table)


def of_campaign(rates: pd.Series, share: float, ranks: int) -> pd.DataFrame:
    """What a share of the step leaves for each all-reduce of the layers: tok/s, step_ms and each_us by batch.

    rates: reported tokens/s by "C=..." (see `tables.reported_throughput`), every request giving one token a step.
    """
    batches = rates.index.str.removeprefix("C=").astype(int).rename("B")
    frame = pd.DataFrame({"tok/s": rates.to_numpy()}, index=batches)
    frame["step_ms"] = 1e3 * frame.index / frame["tok/s"]
    calls = sum(c.count for c in comm.step(1, ranks) if c.kind == "all_reduce" and c.count > 1)
    return frame.assign(each_us=1e3 * share * frame["step_ms"] / calls)


def fitted(frame: pd.DataFrame, impl: str) -> comm.Cost:
    """The line through the times of `impl` in a frame of one link."""
    rows = frame[frame["impl"] == impl]
    return comm.fit(dict(zip((KIB * rows["KiB"]).astype(int), 1e-6 * rows["us"], strict=True)))


def wire_us(batches: list[int], ranks: int, link: comm.Link) -> pd.Series:
    """Microseconds that the bytes of one all-reduce of the hidden state need on a link, by batch."""
    nbytes = {batch: comm.step(batch, ranks)[0].nbytes for batch in batches}
    return pd.Series({b: 1e6 * comm.wire_bytes(n, ranks) / link.ring_bytes_per_s for b, n in nbytes.items()})


def crossings(ranks: list[int]) -> pd.DataFrame:
    """The batch from which Simple beats LL in a ring, by the model: a row a link, a column a number of ranks."""
    table = {}
    for link in comm.LINKS.values():
        for n in ranks:
            low, high = (comm.cost(link, n, "ring", protocol) for protocol in ("LL", "Simple"))
            table.setdefault(link.name, {})[f"{n} GPUs"] = low.crossing(high) / comm.step(1, n)[0].nbytes
    return pd.DataFrame.from_dict(table, orient="index")


def shares(costs: Mapping[str, comm.Cost], campaign: pd.DataFrame, ranks: int) -> pd.DataFrame:
    """Percent of the campaign's step (`of_campaign`) that all its collectives would be at each cost, by batch."""
    table = {
        batch: {name: 1e5 * comm.step_s(line, batch, ranks) / step_ms for name, line in costs.items()}
        for batch, step_ms in campaign["step_ms"].items()
    }
    return pd.DataFrame(table)


_STEP = {
    "step_us": "step (µs)",
    "collectives_us": "collectives (µs)",
    "share": "of the step (%)",
    "all_reduces": "all-reduces a step",
    "attention_us": "our attention, own heads (µs)",
    "padded_attention_us": "SGLang's, padded heads (µs)",
}
_PARTS = {
    "all_reduce": "all-reduces, once all ranks are there",
    "all_gather": "all-gather of the logits, likewise",
    "wait": "waiting for the other rank",
    "first_wait": "waiting in the step's first all-reduce",
}
_PARITY = {
    "prompts": "prompts",
    "noise_mean": "the Hopper path, mean",
    "difference_mean": "ours, mean",
    "over_mean": "ours over the Hopper path, mean",
    "noise_max": "the Hopper path, largest",
    "difference_max": "ours, largest",
    "over_max": "ours over the Hopper path, largest",
    "decided": "decided: ours' margin exceeds the Hopper path's largest",
    "changed_decided": "of these, another token from ours",
    "changed": "of all, another token from ours",
    "changed_native": "of all, another token from the Hopper path",
}


def served_receipts(run: Sequence[Record]) -> pd.DataFrame:
    """What each rank of a server said its hooks ran on: a row a stage and hook, a column a rank, "–" for no word.

    Of attention the queries that are the rank's own, and what was launched for them.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for record in run:
        for each in (record.server or {}).get("receipts", ()):
            saw = each["saw"]
            told = f"live: q {saw['q of this rank']}, {saw['runs']}" if "runs" in saw else "live"
            rows.setdefault((record.config["stage"], each["hook"]), {})[f"rank {each['rank']}"] = told
    index = pd.MultiIndex.from_tuples(rows, names=["stage", "hook"])
    return pd.DataFrame(list(rows.values()), index=index).sort_index(axis=1).fillna("–")


def served_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Of records of serving_tp: a row a stage and number of GPUs, what a traced decode step spends; shares in %."""
    rows = frame[(frame["case"] == "step") & frame["passed"]].set_index(["stage", "tp"]).sort_index()
    return rows.assign(share=100 * rows["share"])[list(_STEP)].astype(float).rename(columns=_STEP)


def served_parts(parts: Mapping[str, pd.DataFrame], modelled: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """What the collectives of a step are made of, in µs: a row a part, a column a stage and the model's beside it.

    parts, modelled: by stage `serving.ranks.parts`, of which medians are taken, and `modelled_us`.
    """
    columns: dict[tuple[str, str], pd.Series] = {}
    for stage, each in parts.items():
        columns[stage, "measured"] = each.median()
        columns[stage, "model"] = pd.Series(modelled[stage])
    return pd.DataFrame(columns).reindex(list(_PARTS)).rename(index=_PARTS)


def served_rates(frame: pd.DataFrame, value: str = "output_tok_s") -> pd.DataFrame:
    """Tokens/s of servers: a row a stage and number of GPUs, a column a concurrency; invalid runs left out."""
    rows = frame[frame["C"].notna() & frame["passed"]].astype({"C": int})
    return rows.pivot(index=["stage", "tp"], columns="C", values=value)


def served_parity(frame: pd.DataFrame) -> pd.DataFrame:
    """Of records of serving_parity_tp: how far several GPUs are from one (nats), a column a context and one for all."""
    over = {f"over_{kind}": frame[f"difference_{kind}"] / frame[f"noise_{kind}"] for kind in ("mean", "max")}
    table = frame.assign(**over).set_index("case")[list(_PARITY)].astype(float)
    return table.rename(columns=_PARITY).T.rename_axis(index=None, columns="prompts")


def served_shares(steps: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """% of a step that its collectives are, a column a stage: as measured, without waiting, and by the model.

    The last two are of a step whose rest is the measured one. steps: `served_steps` of one number of GPUs; parts:
    `served_parts`.
    """
    of_stage = steps.droplevel("tp")
    whole, spent = of_stage[_STEP["step_us"]], of_stage[_STEP["collectives_us"]]
    moving = parts.loc[[_PARTS["all_reduce"], _PARTS["all_gather"]]].sum()
    takes = {"measured": spent, "without waiting": moving.xs("measured", level=1), "model": moving.xs("model", level=1)}
    return pd.DataFrame({name: 100 * us / (whole - spent + us) for name, us in takes.items()}).T[list(of_stage.index)]


def _predicted_us(link: str, ranks: int, impl: str, kib: float) -> float:
    try:
        return 1e6 * comm.predicted_s(comm.LINKS[link], int(ranks), impl, KIB * kib)
    except ValueError:
        return float("nan")
