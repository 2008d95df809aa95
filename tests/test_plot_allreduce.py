"""The frames of the all-reduce chapter."""

import pandas as pd
import pytest

from dsv4lab import comm, records
from dsv4lab.plot import allreduce as frames
from dsv4lab.plot import figures, serving
from dsv4lab.plot.palette import look


def test_reported_times_have_the_model_beside_them():
    table = frames.reported_times(records.reported())
    assert set(table["link"]) <= set(comm.LINKS) and table["model_us"].notna().all()
    row = table.query("link == 'pcie5_host_bridges' and impl == 'nccl_ring_ll' and KiB == 40").iloc[0]
    expected = 1e6 * comm.cost(comm.LINKS["pcie5_host_bridges"], 8, "ring", "LL").time_s(40960)
    assert (row["ranks"], row["us"], row["model_us"]) == (8, 31.2, pytest.approx(expected))
    assert row["off"] == pytest.approx(expected / 31.2)


def test_measured_times_know_their_link_and_their_bus_bandwidth():
    columns = {"impl": ["nccl", "nccl_4_channels"], "mode": "graph", "ranks": 2, "message_bytes": 1 << 20}
    columns |= {
        "median_us": [10.0, 20.0],
        "p10_us": 9.0,
        "p90_us": 21.0,
        "bytes": float(1 << 20),
        "link": ["NV18", None],
    }
    table = frames.measured_times(pd.DataFrame(columns))
    assert table["link"].tolist() == ["nvlink4", "pcie5_nominal"]
    assert table["bus_gb_per_s"].tolist() == pytest.approx([104.8576, 52.4288])
    assert table["KiB"].tolist() == [1024, 1024] and table["KiB"].dtype.kind == "i"  # is shown as 1024, not 1024.0
    assert table["model_us"].notna().tolist() == [True, False]  # of four channels the model knows nothing
    panels = frames.lines(table)
    assert {name: len(lines) for name, lines in panels.items()} == {"nvlink4, 2 GPUs": 2, "pcie5_nominal, 2 GPUs": 1}
    assert len(figures.lines_against(panels, "message", "µs").axes) == 2


def test_the_axis_names_messages_in_powers_of_two():
    assert list(frames.SIZES.values()) == ["4 KiB", "64 KiB", "1 MiB", "16 MiB", "64 MiB"]
    panel = {"n": [(look("nccl"), pd.Series({4 << n: 10.0 + n for n in range(11)}))]}
    axes = figures.lines_against(panel, "message", "µs", ticks=frames.SIZES).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4 KiB", "64 KiB", "1 MiB"]  # up to 4 MiB
    assert axes.get_xticks().tolist() == [4, 64, 1024] and not axes.xaxis.get_minorticklocs().size


def test_measured_sizes_are_set_against_the_model_and_against_nccl():
    us = {"nccl": (12.0, 40.0), "nccl_ring_ll": (10.0, 50.0), "nccl_ring_simple": (20.0, 30.0), "one_shot": (6.0, 80.0)}
    us["nccl_4_channels"] = (11.0, 90.0)
    rows = [
        {"impl": impl, "KiB": kib, "us": time, "model_us": 15.0, "chosen": "RING LL" if impl == "nccl" else None}
        for impl, times in us.items()
        for kib, time in zip((4, 4096), times, strict=True)
    ]
    frame = pd.DataFrame(rows).assign(off=lambda each: each["model_us"] / each["us"])
    frame.loc[frame["impl"] == "nccl_4_channels", ["model_us", "off"]] = None
    frame.loc[(frame["impl"] == "nccl_ring_ll") & (frame["KiB"] == 4096), "model_us"] = 16.0
    assert list(frames.off_by_size(frame)) == ["nccl", "nccl_ring_ll", "nccl_ring_simple", "one_shot"]
    assert frames.off_by_size(frame).loc[4, "one_shot"] == 2.5
    assert frames.over_nccl(frame, ["one_shot"])["one_shot"].tolist() == [0.5, 2.0]
    table = frames.fastest(frame)
    assert table["measured"].tolist() == ["NCCL ring LL", "NCCL ring Simple"]
    assert table.loc[4096, "by the model"] == "NCCL ring Simple" and table.loc[4, "NCCL took"] == "RING LL"
    assert table["NCCL / fastest"].tolist() == pytest.approx([1.2, 4 / 3])


def test_served_steps_and_rates_are_those_of_several_gpus():
    step = {"step_us": 2000.0, "collectives_us": 100.0, "share": 0.05,
            "all_reduces": 13.0, "attention_us": 40.0, "padded_attention_us": None}  # fmt: skip
    same = {"stage": "indexer", "tp": 2, "passed": True}
    rows = [
        same | {"case": "step", "C": None} | step,
        same | {"case": "step", "C": None, "tp": 4, "passed": False} | step,
        same | {"case": "c16_in256_out256", "C": 16, "output_tok_s": 5000.0},
        same | {"case": "c16_in256_out256", "C": 16, "tp": 1, "output_tok_s": 4000.0},
        same | {"case": "c64_in256_out256", "C": 64, "output_tok_s": 9000.0, "passed": False},
    ]
    frame = pd.DataFrame(rows)
    table = frames.served_steps(frame)
    assert list(table.index) == [("indexer", 2)] and table["of the step (%)"].item() == 5
    assert table["SGLang's, padded heads (µs)"].isna().all()
    assert frames.served_rates(frame).to_dict() == {16: {("indexer", 1): 4000.0, ("indexer", 2): 5000.0}}
    of_steps = {"first_wait": [900.0, 30.0, 10.0], "wait": 20.0, "all_reduce": 50.0, "all_gather": 50.0}
    parts = frames.served_parts(
        {"indexer": pd.DataFrame(of_steps)}, {"indexer": {"all_reduce": 40.0, "all_gather": 10}}
    )
    assert parts["indexer", "measured"].tolist() == [50, 50, 20, 30]
    assert parts["indexer", "model"].iloc[:2].tolist() == [40, 10] and parts["indexer", "model"].iloc[2:].isna().all()
    shares = frames.served_shares(table, parts)
    assert shares["indexer"].to_dict() == pytest.approx({"measured": 5, "without waiting": 5, "model": 100 * 50 / 1950})
    assert len(serving.ladder(dict(shares.items()), xlabel="%").axes) == 1


def test_every_rank_says_what_its_hooks_ran_on():
    run = [record for record in records.read("serving_tp") if record.config["stage"] in ("indexer", "native")]
    table = frames.served_receipts(run)
    assert list(table) == ["rank 0", "rank 1"] and set(table.index.get_level_values("stage")) == {"indexer"}
    assert "q bfloat16[64, 1, 32, 512]" in table.loc[("indexer", "attention"), "rank 1"]
    assert table.loc[("indexer", "topk"), "rank 0"] == "live"


def test_a_share_of_a_step_becomes_the_time_of_one_all_reduce():
    table = frames.of_campaign(pd.Series({"C=64": 640.0}), 0.43, 8)
    assert table.loc[64].to_dict() == pytest.approx({"tok/s": 640.0, "step_ms": 100.0, "each_us": 500.0})
    part = frames.shares({"flat": comm.Cost(100e-6, 0.0)}, table, 8)
    assert part.loc["flat", 64] == pytest.approx(8.75)  # 87 all-reduces and half of one for the logits


def test_loopback_is_the_middle_run_and_its_source_says_how_far_apart_they_are():
    sizes = pd.Series([4096, 65536, 1 << 20])
    runs = [
        pd.DataFrame({"file": f"run{n}.jsonl", "impl": "gloo", "ranks": 2, "message_bytes": sizes}).assign(
            median_us=n * (400.0 + 1e-3 * sizes), p10_us=200.0 + 1e-3 * sizes, p90_us=5000.0
        )
        for n in (1, 2, 3)
    ]
    other = runs[0].assign(ranks=4, median_us=1e6)
    link = frames.loopback(pd.concat([*runs, other]))
    assert link.one_shot_s == pytest.approx(800e-6) and link.ring_bytes_per_s == pytest.approx(0.5e9)
    assert "run1, run2, run3; 400 to 1200 µs and 0.33 to 1 GB/s by run, 200 to 5000 µs" in link.source
    table = frames.links(link)
    assert list(table.index) == [*comm.LINKS, "loopback"] and table.loc["loopback", "ring (GB/s)"] == pytest.approx(0.5)


def test_tables_of_a_step_and_of_links():
    table = frames.sent([1, 64], 8)
    assert table.loc["experts"].to_dict() == {"calls": 43, "KiB each, B = 1": 8.0, "KiB each, B = 64": 512.0}
    assert frames.links()["source"].str.len().min() > 10
    assert frames.wire_us([64], 8, comm.LINKS["pcie5_nominal"])[64] == pytest.approx(14.56, abs=0.01)
    assert frames.by_batch({"flat": comm.Cost(1e-6, 0.0)}, [1, 2])["flat"].tolist() == [1.0, 1.0]


def test_parity_of_several_gpus_is_set_against_that_of_the_hopper_path():
    run = records.read("serving_parity_tp")
    table = frames.served_parity(records.to_frame(run))
    assert list(table) == [record.case for record in run]
    for record in run:
        found, result = table[record.case], record.result
        assert found["ours over the Hopper path, mean"] == result["difference_mean"] / result["noise_mean"]
        assert found["ours over the Hopper path, largest"] == result["difference_max"] / result["noise_max"]
        assert found.filter(like="another token").tolist() == [
            result[name] for name in ("changed_decided", "changed", "changed_native")
        ]


def test_a_fit_of_reported_times_is_the_line_through_them():
    frame = pd.DataFrame({"impl": ["a", "a", "b"], "KiB": [4.0, 8.0, 4.0], "us": [10.0, 14.0, 99.0]})
    found = frames.fitted(frame, "a")
    assert (1e6 * found.latency_s, 1e6 * found.time_s(4096)) == (pytest.approx(6.0), pytest.approx(10.0))


def test_protocols_cross_at_larger_batches_on_faster_links():
    table = frames.crossings([2, 8])
    assert table.loc["pcie5_nominal"].gt(table.loc["pcie5_host_bridges"]).all()
    link = comm.LINKS["pcie5_switches"]
    low, high = (comm.cost(link, 8, "ring", protocol) for protocol in ("LL", "Simple"))
    nbytes = 8192 * table.loc["pcie5_switches", "8 GPUs"]
    assert low.time_s(nbytes) == pytest.approx(high.time_s(nbytes))
