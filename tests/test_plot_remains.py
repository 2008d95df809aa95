"""The last chapter's tables."""

import pandas as pd
import pytest

from dsv4lab import records
from dsv4lab.plot import remains, tables


@pytest.fixture(scope="module")
def frames():
    """The fullest run of each experiment."""
    found = {}
    for name in ("sparse_mla_decode", "sparse_mla_decode_sweep", "indexer", "mqa_logits"):
        frame = records.to_frame(records.read(name))
        found[name] = frame[frame["file"] == frame["file"].value_counts().idxmax()]
    return found


def test_a_step_of_c_requests_gives_c_tokens():
    steps = remains.step_ms(pd.Series({"C=16": 160.0, "C=1": 20.0}))
    assert steps.to_dict() == {1: 50.0, 16: 100.0}
    assert remains.step_ms(pd.Series({4: 40.0})).to_dict() == {4: 100.0}


def test_speculation_costs_a_larger_step_and_a_layer_a_draft():
    steps = pd.Series({1: 10.0, 4: 20.0, 16: 40.0})
    table = remains.speculation(steps, 3)
    assert table.index.tolist() == [1, 4]  # 16 requests would verify more than any known step
    assert table["verifying step (ms)"].tolist() == pytest.approx([20.0, 40.0])
    assert table["pays from (tokens a step)"].tolist() == pytest.approx([2 + 3 / 43] * 2)
    assert table.loc[1, "if every draft is right (x)"] == pytest.approx(4 / (2 + 3 / 43))
    between = remains.speculation(steps, 1).loc[1, "verifying step (ms)"]
    assert between == pytest.approx(10 * 2**0.5)  # on log scales


def test_the_decision_log_is_computed_from_the_records(frames):
    log = remains.decisions(records.reported(), frames)
    assert log.index.is_unique and set(log["then"]) >= {"taken", "not taken", "left open", "blocked"}
    chosen = dict(H=64, cache="cold", lengths="full", topk=512, s_q=1)
    attention = tables.times(tables.select(frames["sparse_mla_decode"], **chosen))
    ratio = remains.number(attention["stock_simt"][32] / attention["mma"][32])
    assert log.loc["tensor cores for attention (02)", "lab"] == f"{ratio}x at batch 32, " + (
        f"{remains.number(attention['stock_simt'][1] / attention['mma'][1])}x at batch 1"
    )
    slower = {name: frame.copy() for name, frame in frames.items()}
    slower["sparse_mla_decode"].loc[slower["sparse_mla_decode"]["impl"] == "mma", "median_us"] *= 2
    changed = remains.decisions(records.reported(), slower)
    differ = changed.index[changed["lab"] != log["lab"]].tolist()
    assert differ == ["tensor cores for attention (02)", "split-K first (03)"]


def test_what_only_a_server_tells_is_open_until_one_told(frames):
    options = ["bf16 for forced FP32 (04)", "torch.compile on the glue (05)"]
    assert remains.decisions(records.reported(), frames).loc[options, "lab"].tolist() == 2 * [remains.NOT_YET]
    columns = ["stage", "C", "passed", "output_tok_s"]
    rows = [("split_k", 64, True, 200.0), ("bf16", 64, True, 250.0), ("compile", None, False, None)]
    served = frames | {"serving": pd.DataFrame(rows, columns=columns)}
    told = remains.decisions(records.reported(), served).loc[options, "lab"].tolist()
    assert told == ["served 1.25x faster than without", "0 of 1 attempts started a server"]


def test_stages_keep_reported_and_measured_apart(frames):
    reported, measured = remains.stages(records.reported(), frames)
    assert reported.loc["baseline"].filter(like="gain").tolist() == [1.0, 1.0, 1.0]
    assert reported.loc["indexer_fix", "C=64, gain"] == pytest.approx(531.7 / 29.7)
    assert not set(reported) & set(measured)
    row = measured.loc["baseline"]
    assert row["c4 layers of a step (ms)"] == pytest.approx(0.021 * (row["attention (µs)"] + row["indexer (µs)"]))
    assert measured["gain (x)"].is_monotonic_increasing


def test_context_is_in_tokens_and_only_the_fallback_ignores_it(frames):
    table = remains.context(frames["indexer"])
    assert table.index[0] == 4 * 128 and table["fused"].is_monotonic_increasing
    assert table["torch_fallback"].max() / table["torch_fallback"].min() < 1.1


def test_reported_speculation():
    table = remains.reported_speculation(records.reported())
    assert table.loc[("prose", 1), "gain (x)"] == pytest.approx(200.79 / 106.73)
