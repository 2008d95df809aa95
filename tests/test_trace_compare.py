import pytest
from traces import SGLANG, event, kernel, write

from dsv4lab import trace
from dsv4lab.trace.compare import compared


def taken(path, *durations: tuple[str, float]):
    at, events = 0.0, []
    for name, dur in durations:
        events.append(kernel(name, at, dur))
        at += dur + 1
    return trace.read(write(path, events))


def test_kernels_are_paired_by_name_and_not_by_position(tmp_path):
    before = taken(tmp_path / "a.json", ("g1", 10), ("g2", 20), ("g3", 30), ("old", 1))
    after = taken(tmp_path / "b.json", ("g1", 10), ("x", 5), ("g2", 10), ("g3", 45))
    table = compared(before, after).set_index("name")
    assert table["verdict"].to_dict() == {"g1": "same", "g2": "faster", "g3": "slower", "old": "gone", "x": "new"}
    assert table.loc["g2", ["ns_before", "ns_after", "change_ns", "ratio"]].tolist() == [20_000, 10_000, -10_000, 0.5]
    assert table.index[0] == "g3"  # the largest change
    assert table["share_before"].sum() == pytest.approx(1)
    assert table.attrs["unit"] == "trace"


def steps(path, *durations: float):
    """As many steps as durations, of two kernels each; one of half the events is cut off."""
    events = []
    for n, dur in enumerate(durations):
        events.append(event("user_annotation", f"step {n}", 1000 * n, 900))
        for m in range(2 if dur else 1):
            events.append(event("cuda_runtime", "cudaLaunchKernel", 1000 * n + 10 * m, 5, correlation=10 * n + m + 1))
            events.append(kernel("k", 1000 * n + 100 + 200 * m, dur or 99, correlation=10 * n + m + 1))
    return trace.read(write(path, events))


def test_traces_with_steps_are_compared_by_the_step_without_those_cut_off(tmp_path):
    before, after = steps(tmp_path / "a.json", 0, 100, 100, 100), steps(tmp_path / "b.json", 50, 50)
    (row,) = compared(before, after).itertuples()
    assert (row.calls_before, row.calls_after, row.ns_before, row.ns_after) == (2, 2, 200_000, 100_000)
    assert (row.verdict, compared(before, after).attrs["unit"]) == ("faster", "step")


def test_families_are_compared_in_one_call():
    ours = trace.read(SGLANG)
    table = compared(ours, ours, "family")
    assert set(table["verdict"]) == {"same"}
    assert table["ns_before"].sum() == pytest.approx((5_096_636 + 4_752_299 + 5_102_147) / 3)
