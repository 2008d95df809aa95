from datetime import UTC, datetime

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb

from dsv4lab import records
from dsv4lab.plot import capture, figures, palette, profiles, style, tables
from dsv4lab.roofline import Work

US = {"stock_simt": {1: 280.0, 32: 3700.0}, "split_k": {1: 10.0, 32: 40.0}, "flashmla": {1: 12.5, 32: 20.0}}
CEILINGS = {"read": (500.0, Work(0.0, 2e9)), "bf16_matmul": (1400.0, Work(1.05e12, 4e8)), "copy": (1e3, Work(0.0, 4e9))}


def _record(case, impl, us, work, **config):
    env = {"gpu": "NVIDIA H200", "gpu_count": 1, "capability": (9, 0), "driver": None, "cuda": None}
    return records.Record(
        experiment="sparse_mla_decode",
        case=case,
        impl=impl,
        config=config,
        method={},
        samples_us=[us * factor for factor in (0.9, 1.0, 1.0, 1.0, 1.2)],
        check={"error": 0.0, "baseline_error": 0.0, "tolerance": 0.0},
        work=work,
        seed=0,
        argv=[],
        date_utc=datetime(2026, 1, 1, tzinfo=UTC),
        git={"commit": None, "dirty": None},
        kernel_sha256=None,
        env=env | {"python": "3", "torch": None, "triton": None},
        clocks={"before": None, "after": None},
        file="sparse_mla_decode_h200_20260101T000000Z.jsonl",
    )


@pytest.fixture
def frame():
    """Two heads counts, of which H = 8 takes half the time, and the ceilings: 4 TB/s, 750 TFLOP/s."""
    rows = [_record(tables.CEILINGS, impl, us, work) for impl, (us, work) in CEILINGS.items()]
    for heads, factor in ((64, 1.0), (8, 0.5)):
        for impl, by_batch in US.items():
            for batch, us in by_batch.items():
                config = {"B": batch, "H": heads, "cache": "cold", "lengths": "full"}
                rows.append(_record(f"b{batch}_h{heads}", impl, us * factor, Work(1e6, 4e6 * batch), **config))
    return records.to_frame(rows)


def test_times_and_ratios_come_from_the_selected_rows(frame):
    chosen = tables.select(frame, H=64, cache="cold")
    assert tables.times(chosen).to_dict() == {impl: US[impl] for impl in ("split_k", "stock_simt", "flashmla")}
    assert tables.ratios(chosen, "flashmla")["split_k"].to_dict() == {1: 0.8, 32: 2.0}
    assert tables.speedups(chosen, "stock_simt")["split_k"].to_dict() == {1: 28.0, 32: 92.5}
    assert list(tables.speedups(chosen, "stock_simt")) == ["split_k", "flashmla"]
    assert list(tables.times(chosen, over="case").index) == ["b1_h64", "b32_h64"]


def test_a_ratio_is_empty_where_one_side_was_not_measured(frame):
    times = tables.times(tables.select(frame, H=64))
    assert tables.ratio(times, "split_k", "flashmla").to_dict() == {1: 0.8, 32: 2.0}
    assert tables.ratio(times, "split_k", "mma").empty


def test_the_floor_is_that_of_the_same_run(frame):
    limits = tables.ceilings(frame)
    assert (limits.dram_bytes_per_s, limits.bf16_flops) == (4e12, 7.5e14)
    rows = tables.with_floor(tables.select(frame, H=64, impl="split_k"))
    assert rows["floor_us"].tolist() == pytest.approx([1.0, 32.0])
    assert rows["fraction"].tolist() == pytest.approx([0.1, 0.8])


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda f: tables.select(f, H=16), r"H 16 leaves no record; there are 8\.0, 64\.0"),
        (lambda f: tables.select(f, heads=16), "frame has no column 'heads'"),
        (lambda f: tables.times(f), "several records of .* at B=1: select one case"),
        (lambda f: tables.ratios(tables.select(f, H=8), "mma"), "baseline 'mma' was not measured"),
        (lambda f: tables.ceilings(pd.concat([f, f])), "ceilings read has 2 records: select one run"),
        (lambda f: tables.ceilings(tables.kernels(f)), "case 'ceilings' leaves no record"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, complaint, frame):
    with pytest.raises(ValueError, match=complaint):
        call(frame)


def test_reported_tables_hold_the_reported_numbers_alone():
    rows = records.reported()
    throughput = tables.reported_throughput(rows)
    assert list(throughput) == ["C=1", "C=16", "C=64"]
    assert throughput.loc["baseline"].tolist() == [11.5, 26.6, 29.7]
    assert tables.reported_profile(rows).loc["sparse_mla_decode", "baseline"] == 57.1


def _lines(figure):
    return {to_hex(line.get_color()): line for line in figure.axes[0].lines}


def test_time_figure_draws_every_implementation_and_the_floor(frame):
    figure = figures.time_against_batch(tables.select(frame, H=64))
    lines = _lines(figure)
    for impl, by_batch in US.items():
        line = lines[to_hex(palette.look(impl).color)]
        assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == by_batch
    assert lines[to_hex(palette.look("floor").color)].get_ydata().tolist() == pytest.approx([1.0, 32.0])
    axes = figure.axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert len(axes.collections) == len(US)  # the 10-90% bands
    assert {text.get_text() for text in axes.texts} == {"SGLang stock", "split-K", "FlashMLA", "roofline floor"}
    assert "H = 64, cold cache, NVIDIA H200" in axes.get_title(loc="left")


def test_a_time_figure_over_another_column_has_a_panel_a_frame_and_may_go_without_the_floor(frame):
    rows = tables.with_floor(tables.select(frame, H=64)).assign(max_len=lambda rows: rows["B"] * 8256)
    figure = figures.time_against({"logits": rows, "top-k": rows}, "max_len", "positions", "flat", floor=False)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["logits", "top-k"]
    axes = figure.axes[1]
    assert axes.get_xlabel() == "positions"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8.3k", "264k"]
    assert len(axes.lines) == len(axes.collections) == len(US)
    assert axes.lines[0].get_xdata().tolist() == [8256, 264_192]


def test_bytes_figure_draws_a_line_a_column():
    table = pd.DataFrame({"torch_fallback": [3.0, 300.0], "triton": [1.0, 1.0]}, index=[128, 12_800])
    axes = figures.megabytes_against(table, "positions", "flat").axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[3.0, 300.0], [1.0, 1.0]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "13k"]
    assert {text.get_text() for text in axes.texts} == {"torch fallback", "Triton"}


def test_speedup_figure_is_relative_to_its_baseline(frame):
    figure = figures.speedup(tables.select(frame, H=64), baseline="flashmla")
    lines = _lines(figure)
    assert lines[palette.look("split_k").color.lower()].get_ydata().tolist() == [1.25, 0.5]
    assert lines[palette.look("flashmla").color.lower()].get_ydata().tolist() == [1.0, 1.0]


def test_each_number_of_heads_has_a_panel_and_the_title_is_the_finding(frame):
    figure = figures.time_against_batch(tables.select(frame, cache="cold"), "it is faster")
    assert [axes.get_title(loc="left").split(",")[0] for axes in figure.axes] == ["H = 64", "H = 8"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.get_suptitle() == "it is faster"


def test_occupancy_figure_draws_each_plan_beside_the_sms():
    blocks = [
        {"gpu": gpu, "B": batch, "impl": "mma", "plan": f"BLOCK_H {rows}", "blocks": batch * 64 // rows}
        for gpu in ("RTX PRO 6000", "H200")
        for rows in (16, 32, 64)
        for batch in (1, 32)
    ]
    figure = figures.occupancy(pd.DataFrame(blocks), sms={"H200": 132, "RTX PRO 6000": 188})
    for axes, sms in zip(figure.axes, (188, 132), strict=True):
        assert [line.get_ydata()[-1] for line in axes.lines[:3]] == [128, 64, 32]
        assert len({line.get_linestyle() for line in axes.lines[:3]}) == 3
        assert axes.lines[3].get_ydata()[0] == sms
        assert f"{sms} SMs" in {text.get_text() for text in axes.texts}
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["RTX PRO 6000: 188 SMs", "H200: 132 SMs"]


def test_labels_are_moved_apart_no_more_than_needed_and_keep_their_order():
    assert figures._apart([0.1, 0.9]) == pytest.approx([0.1, 0.9])
    moved = figures._apart([0.52, 0.5, 0.5, 0.9])
    assert moved[1] < moved[2] < moved[0] < moved[3] == pytest.approx(0.9)
    assert moved[2] - moved[1] == pytest.approx(moved[0] - moved[2]) == pytest.approx(figures._LABEL_GAP)
    assert sum(moved[:3]) == pytest.approx(1.52)


@pytest.mark.parametrize(
    "kind", [palette.ATTENTION, palette.INDEXER, palette.TOPK, palette.PRODUCTS, palette.MHC, palette.FLIP]
)
def test_every_known_implementation_has_a_look_of_its_own_among_its_kind(kind):
    looks = [*kind.values(), palette.look("floor")]
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks)
    assert len({look.label for look in palette.LOOKS.values()}) == len(palette.LOOKS)


@pytest.mark.parametrize("color", sorted({*profiles.COLORS.values(), *capture._COLORS.values()}))
def test_text_can_be_read_on_the_colours_that_have_some(color):
    def light(of: str) -> float:  # relative luminance, as WCAG has it
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(of))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    low, high = sorted((light(color), light(palette.ink_on(color))))
    assert high / low >= 3


def test_what_the_palette_does_not_know_is_drawn_like_its_kin():
    assert palette.look("new_idea").label == "new_idea"
    assert palette.look("mma_bh16") == palette.Look("mma_bh16", palette.look("mma").color, "^", ":")
    assert palette.in_order({"new_idea", "flashmla", "simt"}) == ["simt", "flashmla", "new_idea"]


def test_the_session_keeps_its_own_style_and_shows_a_figure_once(frame):
    before = dict(matplotlib.rcParams)
    figures.time_against_batch(tables.select(frame, H=64))
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == []


def test_an_unchanged_figure_makes_no_diff(frame, tmp_path):
    chosen = tables.select(frame, H=64)
    paths = style.save(figures.time_against_batch(chosen), "time", tmp_path)
    assert [path.name for path in paths] == ["time.svg", "time.png"]
    first = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    with plt.rc_context({"svg.hashsalt": None, "savefig.dpi": 50, "font.size": 20}):
        style.save(figures.time_against_batch(chosen), "time", tmp_path)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths} == first
    style.save(figures.time_against_batch(tables.select(frame, H=8)), "time", tmp_path)
    assert all(path.read_bytes() != first[path][0] for path in paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["time.png", "time.svg"]
    for path in paths:
        content = path.read_bytes()
        assert b"dc:date" not in content and b"dc:creator" not in content and b"Software" not in content
