"""What traced steps of two ranks spend in collectives."""

import pandas as pd
import pytest

from dsv4lab import comm
from dsv4lab.serving import ranks
from dsv4lab.trace import Trace, TraceError, families
from dsv4lab.trace.frames import events_frame, marks_frame, text_column

PUSH = "all_reduce_one_shot_push_kernel<bf16>"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LINK = comm.LINKS["nvlink4"]


def traced(*events: tuple[int, int, int, int, str]) -> Trace:
    """Of (rank, step, start, duration, name), times in µs."""
    rank, step, ts, dur, names = zip(*sorted(events, key=lambda event: event[2]), strict=True)
    columns = {"rank": rank, "step": step, "name": text_column(names)}
    columns |= {"ts": [1000 * t for t in ts], "dur": [1000 * d for d in dur], "kind": text_column(["kernel"] * len(ts))}
    return families.classified(Trace(events_frame(columns, len(ts)), marks_frame({}, 0), {}))


def step(number: int, at: int, late: int) -> list[tuple[int, int, int, int, str]]:
    """Rank 1 is `late` at the first all-reduce, rank 0 is 4 late at the second; each then takes 3, the gather 40."""
    return [
        (0, number, at, late + 3, PUSH), (1, number, at + late, 3, PUSH),
        (0, number, at + late + 54, 3, PUSH), (1, number, at + late + 50, 7, PUSH),
        (0, number, at + late + 60, 40, GATHER), (1, number, at + late + 60, 40, GATHER),
        (0, number, at + late + 110, 5, "gemm"), (1, number, at + late + 110, 5, "gemm"),
    ]  # fmt: skip


def test_waiting_is_told_from_moving():
    table = ranks.parts(traced(*step(0, 0, 500), *step(1, 1000, 10)))
    assert table["first_wait"].to_dict() == {(0, 0): 500, (0, 1): 10, (1, 0): 0, (1, 1): 0}
    assert table["wait"].loc[0].tolist() == [0, 0] and table["wait"].loc[1].tolist() == [4, 4]
    assert set(table["all_reduce"]) == {6} and set(table["all_gather"]) == {40}


def test_both_attentions_of_one_trace_are_added_up_by_rank_and_step():
    ours = [(rank, n, 1000 * n + 200 + rank, 2 + rank, "gluon_kernel") for rank in (0, 1) for n in (0, 1)]
    merged = [(0, 0, 300, 1, "combine_kernel")]
    others = ("_tiled_sparse_decode_kernel", "gemm")
    padded = [(rank, n, 1000 * n + at, 40, others[n]) for rank in (0, 1) for n in (0, 1) for at in (310, 360)]
    trace = traced(*step(0, 0, 5), *step(1, 1000, 5), *ours, *merged, *padded)
    table = ranks.attention(trace)
    assert table["attention_us"].to_dict() == {(0, 0): 3, (0, 1): 2, (1, 0): 3, (1, 1): 3}
    assert table["padded_attention_us"].to_dict() == {(0, 0): 80, (0, 1): 0, (1, 0): 80, (1, 1): 0}
    account, _ = ranks.account(trace, tp=2, batch=32, layers=6, link=LINK)
    assert table.median().to_dict() == {name: account[name] for name in table}


def test_ranks_with_other_collectives_are_an_error():
    with pytest.raises(TraceError, match="not the same ones"):
        ranks.parts(traced(*step(0, 0, 5), (0, 0, 300, 3, PUSH)))
    with pytest.raises(TraceError, match="no collectives"):
        ranks.parts(traced((0, 0, 0, 3, "gemm"), (1, 0, 0, 3, "gemm")))


def test_each_collective_is_modelled_as_what_ran():
    found = ranks.modelled_us(traced(*step(0, 0, 5)), tp=2, batch=32, layers=6, link=LINK)
    reduce, *_, gather = comm.step(32, 2)
    one_shot, ring = comm.cost(LINK, 2, "one_shot"), comm.cost(LINK, 2, "ring", "LL")
    assert found["all_reduce"] == pytest.approx(13e6 * one_shot.time_s(reduce.nbytes))
    assert found["all_gather"] == pytest.approx(0.5e6 * ring.time_s(gather.nbytes))
    account, _ = ranks.account(traced(*step(0, 0, 5)), tp=2, batch=32, layers=6, link=LINK)
    assert account["model_us"] == pytest.approx(sum(found.values()))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128", ("tree", "LL128")),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_SIMPLE", ("ring", "Simple")),
        ("ncclKernel_AllReduce", comm.nccl_choice(LINK, 2, 4096)),
        ("cross_device_reduce_2stage<bf16>", ("two_shot",)),
    ],
)
def test_a_kernel_says_which_cost_it_has(name, kind):
    assert ranks.cost(pd.Series(text_column([name, name])), 2, 4096, LINK) == comm.cost(LINK, 2, *kind)
