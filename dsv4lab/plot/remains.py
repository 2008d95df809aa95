"""The last chapter's tables: what speculation needs to pay, the campaign's decisions, its stages beside the lab's."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from dsv4lab import comm
from dsv4lab.model import DSV4_FLASH
from dsv4lab.plot import allreduce, serving, tables
from dsv4lab.plot.chapters import number, span

C4_LAYERS = DSV4_FLASH.layer_counts["c4"]
OURS, OUR_INDEXERS = ["split_k", "gluon"], ["triton", "fused"]
"""Implementations of which the lab would take the faster."""
NOT_YET = "not measured yet"


def step_ms(rates: pd.Series) -> pd.Series:
    """Milliseconds a decode step from tokens/s by "C=..." or by a number, every request giving one token a step."""
    batches = rates.index.astype(str).str.removeprefix("C=").astype(int).rename("C")
    return pd.Series(1e3 * batches / rates.to_numpy(), index=batches).sort_index()


def speculation(steps: pd.Series, drafts: int) -> pd.DataFrame:
    """What MTP costs and can give, by concurrency (index of `steps`, which are milliseconds of a step).

    A step verifies 1 + drafts tokens of every request: it takes the time of a step of that many requests, read between
    the known ones on log scales, and each draft one layer's share of a step. Concurrencies whose verification is larger
    than any known step are left out. Tokens a step from which it pays: how much longer the step becomes.
    """
    sizes, times = np.log(steps.index.to_numpy(dtype=float)), np.log(steps.to_numpy(dtype=float))
    rows = {}
    for concurrency, plain in steps.items():
        verified = concurrency * (1 + drafts)
        if verified <= steps.index.max():
            verify = float(np.exp(np.interp(np.log(verified), sizes, times)))
            longer = (verify + drafts * plain / DSV4_FLASH.num_hidden_layers) / plain
            rows[concurrency] = {
                "step (ms)": plain,
                "verifying step (ms)": verify,
                "pays from (tokens a step)": longer,
                "if every draft is right (x)": (1 + drafts) / longer,
            }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("C")


def reported_speculation(rows: pd.DataFrame) -> pd.DataFrame:
    """Reported tokens/s without speculation and with it, by what was written and concurrency, and the gain."""
    table = rows[rows["experiment"] == "speculation_serving"].pivot(index="case", columns="stage", values="value")
    parts = table.index.str.extract(r"(\w+), C=(\d+)")
    table.index = pd.MultiIndex.from_arrays([parts[0], parts[1].astype(int)], names=["text", "C"])
    plain, drafted = table["no speculation"], table["DSpark, 3 drafts"]
    return table[["no speculation", "DSpark, 3 drafts"]].assign(**{"gain (x)": drafted / plain}).sort_index()


def context(frame: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds that all c4 layers' indexers take in a step of batch 32, by tokens of each request.

    frame: records of indexer. The limit is 1M tokens throughout, which is what the fallback's time follows.
    """
    limit = DSV4_FLASH.c4_positions(1_048_576)
    rows = tables.select(frame, B=32, max_len=limit, lengths="full", next_n=1)
    table = 1e-3 * C4_LAYERS * tables.times(rows, over="actual")
    return table.set_axis(4 * table.index, axis=0).rename_axis("tokens of a request")


def decisions(rows: pd.DataFrame, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The campaign's choices: what was chosen, what it was reported to give, what the lab measures of it.

    Args:
        rows: `records.reported`.
        frames: by experiment, records of sparse_mla_decode, sparse_mla_decode_sweep, indexer and mqa_logits, and of
            serving if there are.
    """
    profile = tables.reported_profile(rows)
    gain = _gains(rows)
    measured, on_server = _measured(frames), _on_server(frames.get("serving"))
    log = [
        (
            "tensor cores for attention (02)",
            "taken",
            f"attention {number(_attention_gain(rows))}x less time",
            measured["mma"],
        ),
        ("split-K first (03)", "taken", f"with bf16 {gain['split_k_bf16']} over the baseline", measured["split_k"]),
        ("a smaller BLOCK_H instead (03)", "not taken", "–", measured["block_h"]),
        (
            "bf16 for forced FP32 (04)",
            "taken",
            f"FP32 was {number(profile.loc['fp32_simt_gemm', 'mma'])}% of the time",
            on_server["bf16"],
        ),
        (
            "torch.compile on the glue (05)",
            "tried three times, given up",
            "it failed under capture",
            on_server["compile"],
        ),
        (
            "hunt avoidable copies (06)",
            "taken",
            f"copies {number(profile.loc['glue_direct_copy', 'split_k_bf16'])}% of the time",
            measured["copies"],
        ),
        (
            "fuse elementwise clusters by hand (06)",
            "not taken",
            f"glue {number(profile.loc['glue', 'indexer_fix'])}% after the fix",
            "what was left after the fallback is not in a chapter",
        ),
        ("cap the context at 8192 (06)", "taken", f"{gain['indexer_fix']} over the baseline", measured["cap"]),
        ("an indexer that costs O(actual) (07)", "left open", "–", measured["indexer"]),
        (
            "sweep NCCL's protocols (09)",
            "not taken",
            f"{number(profile.loc['nccl_all_reduce', 'indexer_fix'])}% of the time, believed a floor",
            _all_reduce(rows),
        ),
        ("MTP (10)", "blocked", "–", "the gate above"),
    ]
    return pd.DataFrame(log, columns=["option", "then", "reported", "lab"]).set_index("option")


def _attention_gain(rows: pd.DataFrame) -> float:
    of_attention = rows[(rows["quantity"] == "sparse_mla_decode") & (rows["unit"] == "ms")].set_index("stage")["value"]
    return of_attention["baseline"] / of_attention["mma"]


def _gains(rows: pd.DataFrame) -> dict[str, str]:
    rates = tables.reported_throughput(rows)
    fixed = rates.loc["indexer_fix"] / rates.loc["baseline"]
    of_split = rows[rows["quantity"].str.endswith("_gain_over_baseline")]["value"]
    return {
        "split_k_bf16": f"{number(of_split.min())} to {number(of_split.max())}x",
        "indexer_fix": f"{number(fixed.min())} to {number(fixed.max())}x",
    }


def _measured(frames: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    attention = _attention(frames["sparse_mla_decode"])
    sweep = tables.times(tables.select(frames["sparse_mla_decode_sweep"], H=64, cache="cold"))
    logits, pair = (_by_limit(frames[name]) for name in ("mqa_logits", "indexer"))
    ours = pair.reindex(columns=OUR_INDEXERS).min(axis=1)
    full, capped = (DSV4_FLASH.c4_positions(length) for length in (1_048_576, 8192))
    stock, mma, split = (attention[impl] for impl in ("stock_simt", "mma", "split_k"))
    fallback = logits["torch_fallback"]
    return {
        "mma": f"{number(stock[32] / mma[32])}x at batch 32, {number(stock[1] / mma[1])}x at batch 1",
        "split_k": f"{number(mma[32] / split[32])}x at batch 32, {number(mma[1] / split[1])}x at batch 1",
        "block_h": f"{number(sweep['mma_bh32'][1] / sweep['mma_bh16'][1])}x at batch 1",
        "copies": f"one fallback: {number(1e-3 * C4_LAYERS * fallback[full])} ms a step at batch 32",
        "cap": f"its logits {number(fallback[full] / fallback[capped])}x less, and 1M tokens become 8K",
        "indexer": f"{number(pair['torch_fallback'][full] / ours[full])}x less than the fallback at 1M, "
        f"{number(pair['torch_fallback'][capped] / ours[full])}x less than it capped",
    }


def _on_server(frame: pd.DataFrame | None) -> dict[str, str]:
    """What only the served campaign tells."""
    if frame is None:
        return {"bf16": NOT_YET, "compile": NOT_YET}
    gain = serving.over(serving.served(frame), "bf16", "split_k")
    tried = frame[frame["stage"].isin(serving.COMPILED) & frame["C"].isna()]
    return {
        "bf16": NOT_YET if gain.empty else f"served {span(gain)}x faster than without",
        "compile": NOT_YET if tried.empty else f"{tried['passed'].sum()} of {len(tried)} attempts started a server",
    }


def _attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds of one c4 layer's attention with 64 heads by batch: what SGLang calls on every rank."""
    return tables.times(tables.select(frame, H=64, cache="cold", lengths="full", s_q=1, window=128, topk=512))


def _by_limit(frame: pd.DataFrame) -> pd.DataFrame:
    """Microseconds by the most positions allowed, batch 32 with 128 real ones."""
    return tables.times(tables.select(frame, B=32, actual=128, lengths="full", next_n=1), over="max_len")


def _all_reduce(rows: pd.DataFrame) -> str:
    share = tables.reported_profile(rows).loc["nccl_all_reduce", "indexer_fix"] / 100
    campaign = allreduce.of_campaign(tables.reported_throughput(rows).loc["indexer_fix"].drop("C=1"), share, 8)
    batch = int(campaign.index.max())
    frame = allreduce.reported_times(rows)
    hosts = frame[frame["link"] == "pcie5_host_bridges"]
    nbytes = comm.step(batch, 8)[0].nbytes
    best = min(allreduce.fitted(hosts, impl).time_s(nbytes) for impl in ("nccl_ring_ll", "nccl_ring_simple"))
    times = number(campaign.loc[batch, "each_us"] / (1e6 * best))
    return f"{times}x what the slowest reported host needs; {NOT_YET}"


def stages(rows: pd.DataFrame, frames: Mapping[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The campaign stage by stage: reported tokens/s with gains, and what the lab measures of the two kernels.

    Measured are one c4 layer's attention (64 heads) and indexer at batch 32, in microseconds, and both over all c4
    layers of a step in milliseconds; the indexer with 128 real positions under a limit of 1M tokens, of 8K after the
    fix. The last row is the fastest that the lab has in their place, without a limit.
    """
    rates = tables.reported_throughput(rows)
    reported = rates.join(rates.div(rates.loc["baseline"]).add_suffix(", gain"))
    attention, pair = _attention(frames["sparse_mla_decode"]).loc[32], _by_limit(frames["indexer"])
    full, capped = (DSV4_FLASH.c4_positions(length) for length in (1_048_576, 8192))
    fallback = pair["torch_fallback"]
    kernels = {
        "baseline": (attention["stock_simt"], fallback[full]),
        "mma": (attention["mma"], fallback[full]),
        "split_k": (attention["split_k"], fallback[full]),
        "indexer_fix": (attention["split_k"], fallback[capped]),
        "the lab": (attention.reindex(OURS).min(), pair.loc[full].reindex(OUR_INDEXERS).min()),
    }
    measured = pd.DataFrame(kernels, index=["attention (µs)", "indexer (µs)"]).T
    measured["c4 layers of a step (ms)"] = 1e-3 * C4_LAYERS * measured.sum(axis=1)
    total = measured["c4 layers of a step (ms)"]
    return reported, measured.assign(**{"gain (x)": total["baseline"] / total})
