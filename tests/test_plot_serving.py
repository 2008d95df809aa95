from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from dsv4lab import records
from dsv4lab.plot import serving
from dsv4lab.records import Clocks, Environment, Git, Record

ENVIRONMENT = Environment(
    gpu="NVIDIA H200", gpu_count=1, capability=(9, 0), driver="1", cuda="13", python="3.12", torch="2", triton="3"
)


def record(stage: str, C: int | None, passed: bool = True, errors: tuple[str, ...] = (), **result: float) -> Record:
    return Record(
        experiment="serving", case=f"c{C}" if C else "start", impl=stage,
        config={"stage": stage, "C": C, "context_length": 8192, "layers": 6}, method={"name": "waves"},
        samples_us=[60e6], check={"passed": passed, "errors": list(errors)}, work=None, seed=0, argv=[],
        date_utc=datetime(2026, 1, 1, tzinfo=UTC), git=Git(commit=None, dirty=None), kernel_sha256=None,
        env=ENVIRONMENT, clocks=Clocks(before=None, after=None), server={}, result=result,
    )  # fmt: skip


RATES = {"indexer": 3200.0, "stock": 100.0, "split_k": 200.0, "native": 3300.0, "stock_ctx8192": 1600.0}
RUN = [
    *(record(stage, 64, output_tok_s=rate) for stage, rate in RATES.items()),
    record("mma", 64, passed=False, output_tok_s=1.0),
    record("stock", None, graph_gb=20.4),
    record("compile", None, passed=False, errors=("it broke",)),
]


@pytest.fixture
def rates() -> pd.DataFrame:
    return serving.served(records.to_frame(RUN))


def test_stages_come_in_order_and_what_failed_is_missing(rates):
    assert list(rates.index) == ["stock", "split_k", "indexer", "native", "stock_ctx8192"]
    assert list(rates.columns) == [64]
    assert set(serving.missing(rates)) == set(serving.STAGES) - set(rates.index)
    with pytest.raises(ValueError, match="several records of stock at C=64"):
        serving.served(records.to_frame([*RUN, record("stock", 64, output_tok_s=1.0)]))


def test_the_steady_window_and_the_waves_have_tables_of_their_own():
    run = [record("native", 64, steady_tok_s=5.0), record("stock", 64, steady_tok_s=2.0), record("stock", None)]
    run[0] = run[0].model_copy(update={"samples_us": [3e6, 1e6]})
    assert serving.served(records.to_frame(run), "steady_tok_s")[64].to_dict() == {"stock": 2.0, "native": 5.0}
    table = serving.waves(run, 64)
    assert list(table.index) == ["stock", "native"] and table.loc["native"].tolist() == [3.0, 1.0]


def at(minute: int, *lines: Record, beside: str = "") -> list[Record]:
    """Lines of one start, its first answer at that minute."""
    first = record(lines[0].impl, None).model_copy(
        update={"date_utc": datetime(2026, 1, 1, 3, minute, tzinfo=UTC), "method": {"beside": beside.split()}}
    )
    return [first, *lines]


def test_a_stage_started_again_has_a_row_a_start_and_a_median():
    again = at(7, record("indexer", 64, output_tok_s=10.0, ttft_ms=3.0), record("indexer", 1, output_tok_s=2.0))
    run = again[:2] + at(1, record("native", 64, output_tok_s=8.0)) + at(9, record("native", 64, output_tok_s=9.0))
    run += at(8, record("indexer", 64, output_tok_s=6.0), beside="native x") + at(
        5, record("mma", 64, output_tok_s=1.0)
    )
    table = serving.by_start(run, ("indexer", "native"))
    assert table.index.tolist() == [
        ("indexer", "01-01 03:07", "none"), ("indexer", "01-01 03:08", "native, x"),
        ("native", "01-01 03:01", "none"), ("native", "01-01 03:09", "none"),
    ]  # fmt: skip
    assert table[64].tolist() == [10.0, 6.0, 8.0, 9.0]
    assert serving.by_start(again[:2], ("indexer",), "ttft_ms")[64].tolist() == [3.0]
    rates = pd.DataFrame({1: [0.5, 5.0, 4.0], 64: [1.0, 7.0, 3.0]}, index=["stock", "indexer", "native_auto"])
    assert serving.middle(rates, table).to_dict("list") == {1: [0.5, 5.0, 4.0], 64: [1.0, 8.0, 3.0]}
    with pytest.raises(ValueError, match="indexer at C=64 in None follows no start"):
        serving.by_start(again[1:2], ("indexer",))


def test_a_start_is_compared_with_the_one_beside_it():
    rates = [("indexer", 4, 8.0), ("native", 4, 5.0), ("native", 9, 4.0), ("indexer", 9, 6.0), ("indexer", 1, 1.0)]
    other = {"indexer": "native", "native": "indexer"}
    lines = [
        line
        for stage, minute, rate in rates
        for line in at(minute, record(stage, 64, output_tok_s=rate), beside=other[stage] if minute > 1 else "")
    ]
    table = serving.by_start(lines, ("indexer", "native"))
    assert serving.pairs(table, "indexer", "native")[64].to_dict() == {"01-01 03:04": 1.6, "01-01 03:09": 1.5}
    with pytest.raises(ValueError, match="2 starts of indexer beside native, 1 the other way round"):
        serving.pairs(table.drop(index=("native", "01-01 03:09", "indexer")), "indexer", "native")


def test_starts_tell_memory_and_the_first_error():
    table = serving.starts(RUN)
    assert list(table.index) == ["stock", "compile"]
    assert table.loc["stock", ["start (s)", "graphs (GB)", "error"]].tolist() == [60.0, 20.4, ""]
    assert table.loc["compile", "error"] == "it broke" and pd.isna(table.loc["compile", "graphs (GB)"])


def test_what_a_stage_was_worth_in_order_and_alone(rates):
    table = serving.worth(rates[64], 64)
    assert list(table.index) == [serving.LADDER[stage] for stage in ("stock", "split_k", "indexer")]
    assert table["a token of each (ms)"].tolist() == [640.0, 320.0, 20.0]
    assert table["saved (ms)"].tolist()[1:] == [320.0, 300.0]
    assert table["in order"].tolist()[1:] == [2.0, 16.0]
    assert table["alone"].tolist()[1:] == [2.0, pytest.approx(640 / 340)]
    assert table["so far"].tolist() == [1.0, 2.0, 32.0]


def test_conditions_say_what_ran_beside_and_how_even_the_waves_were():
    waves = {"ttft_ms": 30.0, "steady_tok_s": 90.0, "compiles": 5.0}
    uneven = record("stock", 64, **waves).model_copy(
        update={"samples_us": [2e6, 3e6], "method": {"name": "waves", "beside": ["native"]}}
    )
    table = serving.conditions([record("indexer", 1, **waves), record("stock", None), uneven])
    assert list(table.index) == [("stock", 64), ("indexer", 1)]
    assert table.loc[("stock", 64)].tolist() == ["01-01 00:00", "native", "5", 1.5, 30.0, 90.0]
    assert table.loc[("indexer", 1), "beside"] == "unknown"


def test_the_headline_has_a_dash_for_what_was_not_served():
    frame = records.to_frame([*RUN, record("indexer", 32, output_tok_s=50.0)])
    *_, at_32, at_64 = serving.headline(serving.served(frame)).splitlines()
    assert at_32 == "| 32 | – | 50.0 | – | – | – |"
    assert at_64 == "| 64 | 100 | 3,200 | 3,300 | 32.0x | 0.970x |"


def test_marks_are_met_missed_or_not_measured(rates):
    gain = serving.over(rates, "indexer", "stock")
    assert gain.to_dict() == {64: 32.0} and serving.over(rates, "indexer", "native_auto").empty
    table = serving.met([("a", gain[64], 17.9, 1), ("b", 0.6, 0.5, -1), ("c", float("nan"), 1.0, 1)])
    assert table["met"].tolist() == ["yes", "no", "not measured"]


def test_what_a_cap_buys_needs_both_stages(rates):
    table = serving.capped(rates)
    assert table.loc[("stock", 64)].tolist() == [1600.0, 100.0, 16.0] and len(table) == 1
    assert serving.capped(rates.loc[["native"]]).empty


def test_the_ladder_has_a_panel_for_each_source(rates):
    figure = serving.ladder({"measured": rates[64], "reported": pd.Series({"baseline": 29.7})}, "title")
    assert [axes.get_title("left") for axes in figure.axes] == ["measured", "reported"]
    assert len(figure.axes[0].patches) == len(rates)


def test_ratios_are_cells_with_their_number():
    table = pd.DataFrame({1: [0.5, 1.25], 16: [1.0, 4.0]}, index=["wo_b", "wq_b"])
    figure = serving.ratios({"DeepGEMM": table, "SGLang": table}, "title", "rows")
    assert [axes.get_title("left") for axes in figure.axes] == ["DeepGEMM", "SGLang"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.50", "1.00", "1.25", "4.00"]
    faster, slower = (figure.axes[0].images[0].to_rgba(np.log2([[0.5, 4.0]]))[0, i] for i in (0, 1))
    assert faster[2] > faster[0] and slower[0] > slower[2]
