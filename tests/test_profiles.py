"""Profiles of stages as tables and bars."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from traces import SGLANG, Eager

from dsv4lab import records, trace
from dsv4lab.plot import profiles, tables
from dsv4lab.trace import reduced, steps


@pytest.fixture
def kept(tmp_path):
    """Two stages: ours as a replay, another one eager."""
    reduced.keep(trace.read(SGLANG), "indexer", "graph", tmp_path, layers=6, batch=32, context_length=8192)
    step = Eager().run("aten::copy_", 40, [[4096, 64], [4096, 64]], ["float", "c10::BFloat16"], grid=[256, 1, 1])
    reduced.keep(trace.read(step.write(tmp_path / "t.json")), "stock", "eager", tmp_path)
    return tmp_path


def test_stages_are_those_that_have_a_trace(kept):
    assert list(profiles.stages(["stock", "indexer", "mma"], "graph", kept)) == ["indexer"]
    assert list(profiles.stages(["stock", "indexer", "mma"], "eager", kept)) == ["stock"]
    assert profiles.stages(["stock"], "graph", kept / "nowhere") == {}


def test_origins_say_what_the_traces_say(kept):
    table = profiles.origins(profiles.stages(["indexer"], "graph", kept), "graph", kept)["indexer"]
    assert table["file"].startswith("indexer_graph_h200_")
    assert table["layers, batch"] == "6, 32"
    assert table["context limit"] == "8,192"
    assert table["steps, GPU events"] == "3, 1,267"
    assert table["traced (UTC)"] == "2026-11-29 13:48"
    assert table["lost"] == "nothing"


def test_totals_are_medians_of_a_step():
    row = profiles.totals({"ours": trace.read(SGLANG)}).loc["ours"]
    assert row["launches"] == "398"
    assert row["sum (µs)"] == 5096.636
    assert row["busy (µs)"] == 4688.893
    assert row["overlap (µs)"] == pytest.approx(5096.636 - 4688.893)


def test_a_step_is_a_whole_one_and_its_families_add_up_to_it():
    ours = trace.read(SGLANG)
    in_steps = ours.events.query("step >= 0")
    assert profiles.a_step(ours.events).sum() == pytest.approx(in_steps["dur"].sum() / 3 / 1e6)
    first = in_steps.query("step == 0 and family == 'moe_gemm'")
    assert profiles.a_step(first)["moe_gemm"] == pytest.approx(first["dur"].sum() / 1e6)


def test_what_events_add_is_the_busy_time():
    ours = trace.read(SGLANG)
    found = profiles.added(ours)
    busy = steps.table(ours)["busy_ns"].sum() / 1000
    assert found["added"].sum() == pytest.approx(busy) and (found["added"] <= found["dur"] / 1000 + 1e-9).all()
    early = ours.events.query("step == 0").head(3).assign(ts=[0, 50, 60], dur=[100, 70, 20])
    assert profiles.added(replace(ours, events=early))["added"].tolist() == [0.1, 0.02, 0.0]


def test_a_rule_that_found_nothing_differs_from_one_that_could_not_look(kept):
    replay = profiles.stages(["indexer"], "graph", kept)
    eager = profiles.stages(["stock"], "eager", kept)
    table = profiles.suspected(replay | eager)
    assert table.loc["max_context"].to_dict() == {"indexer": "no shapes", "stock": "–"}
    assert table.loc["needless_copies"].to_dict() == {"indexer": "no shapes", "stock": "100.0%"}
    assert table.loc["idle_sms"].to_dict() == {"indexer": "20.8%", "stock": "–"}


def test_reported_shares_as_bars_add_up_with_what_is_not_named():
    bars = profiles.reported(tables.reported_profile(records.reported()))
    assert bars.sum().tolist() == pytest.approx([100] * 4)
    assert bars["indexer_fix"].dropna().to_dict() == {
        "sparse_attention": 18, "moe_gemm": 27, "nccl": 23, "glue": 4, "not named": 28,
    }  # fmt: skip
    assert pd.isna(bars.loc["glue", "split_k_bf16"])  # its parts are there
    assert bars.loc["not named", "split_k_bf16"] == 31


def test_the_stacked_bars_have_every_share_and_leave_no_figure_open():
    bars = {"before": {"gemm": 60.0, "glue_copy": 39.5, "nccl": 0.5}, "after": {"gemm": 60.0, "mine": 5.0}}
    figure = profiles.stacked(pd.DataFrame(bars), {"gemm": "GEMM"}, "ms")
    (axes,) = figure.axes
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["GEMM", "glue_copy", "mine", "smaller ones"]
    assert sorted(text.get_text() for text in axes.texts) == ["40%", "60%", "8%", "92%"]
    assert sum(patch.get_width() for patch in axes.patches) == pytest.approx(165)
    assert plt.get_fignums() == []
