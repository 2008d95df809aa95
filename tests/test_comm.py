"""The cost model of an all-reduce against closed forms, and against what others reported of such machines."""

import pandas as pd
import pytest

from dsv4lab import comm, records
from dsv4lab.comm import LINKS, Cost, cost
from dsv4lab.model import DSV4_FLASH


def reported(case: str, stage: str) -> tuple[int, dict[int, float]]:
    """Ranks, and reported seconds by bytes."""
    rows = records.reported().query("experiment == 'all_reduce_latency' and case == @case and stage == @stage")
    link, ranks = case.split(", ")
    assert link in LINKS
    return int(ranks.split()[0]), {
        int(q.split()[0]): 1e-6 * us for q, us in zip(rows.quantity, rows.value, strict=True)
    }


def test_a_step_has_two_all_reduces_a_layer_and_one_at_either_end():
    found = {c.name: c for c in comm.step(64, 8)}
    assert [c.count for c in found.values()] == [1, 43, 43, 1]
    assert {found[name].nbytes for name in ("embedding", "attention output", "experts")} == {512 * 1024}
    assert found["logits"].nbytes == 64 * DSV4_FLASH.vocab_size * 2
    assert comm.step(64, 1) == ()


@pytest.mark.parametrize(("batch", "tp", "complaint"), [(0, 8, "batch .* got 0"), (1, 3, "tp .* got 3")])
def test_a_step_refuses_what_cannot_be(batch, tp, complaint):
    with pytest.raises(ValueError, match=complaint):
        comm.step(batch, tp)


def test_no_algorithm_sends_less_than_an_all_reduce_must():
    assert comm.wire_bytes(800.0, 8) == 1400.0
    for link in LINKS.values():
        for algorithm in comm.ALGORITHMS:
            for protocol in comm.PROTOCOLS:
                fastest = max(link.ring_bytes_per_s, link.dense_bytes_per_s)
                assert cost(link, 8, algorithm, protocol).s_per_byte >= comm.wire_bytes(1, 8) / fastest * (1 - 1e-12)


def test_latency_grows_with_the_ranks_and_rings_have_nccls_numbers():
    pcie = LINKS["pcie5_nominal"]
    assert cost(pcie, 8, "ring", "LL").latency_s == pytest.approx((6.6 + 14 * 1.0) * 1e-6)
    assert cost(pcie, 2, "tree", "Simple").latency_s == pytest.approx((8.4 + 2 * 4.0) * 1e-6)
    assert cost(pcie, 8, "one_shot").s_per_byte == pytest.approx(4 * cost(pcie, 8, "two_shot").s_per_byte)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [((1,), "ranks .* got 1"), ((2, "butterfly"), "algorithm .*'butterfly'"), ((2, "ring", "ll"), "protocol .*'ll'")],
)
def test_cost_refuses_what_it_does_not_know(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        cost(LINKS["nvlink4"], *arguments)


def test_costs_cross_where_they_are_equal():
    low, high = Cost(10e-6, 2e-9), Cost(30e-6, 1e-9)
    at = low.crossing(high)
    assert at == pytest.approx(20_000)
    assert low.time_s(at) == pytest.approx(high.time_s(at))
    assert low.crossing(Cost(30e-6, 2e-9)) == float("inf")
    assert Cost(30e-6, 2e-9).crossing(Cost(10e-6, 1e-9)) == 0.0


@pytest.mark.parametrize("line", [Cost(20e-6, 3e-10), Cost(0.0, 3e-10), Cost(20e-6, 0.0)])
def test_a_fit_finds_the_line(line):
    found = comm.fit({nbytes: line.time_s(nbytes) for nbytes in (4096, 65536, 1 << 20)})
    assert found.latency_s == pytest.approx(line.latency_s, abs=1e-12)
    assert found.s_per_byte == pytest.approx(line.s_per_byte, abs=1e-18)


def test_a_fit_never_has_a_negative_part_and_needs_two_sizes():
    falling = comm.fit({1000: 20e-6, 100_000: 10e-6})
    assert falling.s_per_byte == 0.0 and 10e-6 < falling.latency_s < 20e-6
    steep = comm.fit({1000: 1e-6, 100_000: 500e-6})
    assert steep.latency_s == 0.0 and steep.s_per_byte > 0
    with pytest.raises(ValueError, match="at least two sizes"):
        comm.fit({4096: 1e-6})


def test_two_processes_on_a_cpu_are_a_link():
    line = Cost(500e-6, 1e-9)
    link = comm.loopback({nbytes: line.time_s(nbytes) for nbytes in (4096, 65536, 1 << 20)}, "here")
    assert (link.one_shot_s, link.ring_bytes_per_s) == (pytest.approx(500e-6), pytest.approx(1e9))
    two, four = cost(link, 2), cost(link, 4)
    assert two.time_s(65536) == pytest.approx(line.time_s(65536))
    assert four.latency_s == pytest.approx(3 * 500e-6) and four.s_per_byte == pytest.approx(1.5e-9)
    assert comm.loopback({4096: 1e-3, 65536: 1e-3}, "flat").ring_bytes_per_s > 1e15


def test_a_step_costs_the_sum_of_its_collectives():
    per_call = Cost(1e-6, 0.0)
    assert comm.step_s(per_call, 64, 8) == pytest.approx((87 + 0.5) * 1e-6)
    assert comm.step_s(per_call, 64, 1) == 0.0


def test_links_are_what_was_reported():
    rows = records.reported().query("experiment == 'all_reduce_link' and stage != 'default'")
    links = rows.pivot(index="case", columns="quantity", values="value")
    for name, row in links.iterrows():
        link = LINKS[name]
        assert link.ring_bytes_per_s == row["ring_bus_bandwidth"] * 1e9
        assert link.dense_bytes_per_s == pytest.approx(row["dense_bandwidth_all_gpus"] / 8 * 1e9)
        assert link.one_shot_s == pytest.approx(row["effective_latency"] * 1e-6)
    for case in ("pcie5_host_bridges, 8 GPUs", "nvlink4, 4 GPUs"):
        _, times = reported(case, "one_shot")
        assert LINKS[case.split(",")[0]].one_shot_s == pytest.approx(comm.fit(times).latency_s, rel=0.01)


@pytest.mark.parametrize(
    ("case", "stage", "algorithm", "protocol", "within"),
    [
        ("pcie5_host_bridges, 8 GPUs", "nccl_ring_ll", "ring", "LL", 1.15),
        ("pcie5_host_bridges, 8 GPUs", "nccl_ring_simple", "ring", "Simple", 1.4),
        ("pcie5_switches, 8 GPUs", "one_shot", "one_shot", "LL", 1.15),
        ("nvlink4, 4 GPUs", "one_shot", "one_shot", "LL", 1.15),
        ("nvlink4, 4 GPUs", "two_shot", "two_shot", "LL", 1.35),
    ],
)
def test_the_model_is_near_what_was_reported(case, stage, algorithm, protocol, within):
    ranks, times = reported(case, stage)
    predicted = cost(LINKS[case.split(",")[0]], ranks, algorithm, protocol)
    off = pd.Series({nbytes: predicted.time_s(nbytes) / seconds for nbytes, seconds in times.items()})
    assert off.between(1 / within, within).all(), off


def test_the_protocols_cross_where_a_deployment_saw_them_cross():
    """DeepSeek-V4.1-Flash with DSpark: 40 KiB of hidden state for each request; Simple lost at C=4 and won at C=16."""
    ll, simple = (comm.fit(reported("pcie5_host_bridges, 8 GPUs", f"nccl_ring_{p}")[1]) for p in ("ll", "simple"))
    rows = records.reported().query("experiment == 'all_reduce_serving'")
    rates = rows.pivot(index="case", columns="stage", values="value")
    faster = rates["Simple"] > rates["default"]
    assert faster.to_dict() == {"C=1": False, "C=4": False, "C=16": True, "C=32": True}
    assert 4 < ll.crossing(simple) / 40960 < 16


def test_nccl_chooses_low_latency_for_short_messages_and_ll128_over_nvlink_alone():
    pcie, nvlink = LINKS["pcie5_switches"], LINKS["nvlink4"]
    assert comm.nccl_choice(pcie, 8, 4096)[1] == "LL"
    assert comm.nccl_choice(pcie, 8, 1 << 26) == ("ring", "Simple")
    assert {comm.nccl_choice(nvlink, 8, 1 << n)[1] for n in range(12, 27)} == {"LL", "LL128", "Simple"}
    assert "LL128" not in {comm.nccl_choice(pcie, 8, 1 << n)[1] for n in range(12, 27)}
    best = min(cost(pcie, 8, "ring", p).time_s(4096) for p in comm.PROTOCOLS)
    assert comm.predicted_s(pcie, 8, "nccl", 4096) == best == comm.predicted_s(pcie, 8, "nccl_ring_ll", 4096)
    with pytest.raises(ValueError, match=r"impl must be one of nccl, .*'nccl_4_channels'"):
        comm.predicted_s(pcie, 8, "nccl_4_channels", 4096)


def test_levers_buy_no_more_than_all_communication():
    line = cost(LINKS["pcie5_host_bridges"], 8, "ring", "LL")
    found = comm.levers_s(line, 0.1, 64, 8)
    assert found["as it is"] == found["sequence parallel"] == pytest.approx(0.1 + comm.step_s(line, 64, 8))
    assert found["overlapped in two halves"] == found["no communication at all"] == 0.1
    assert found["as it is"] > found["all-reduce in 8 bits"] > found["all-reduce in 4 bits"] > 0.1
    exposed = comm.levers_s(line, 0.001, 64, 8)["overlapped in two halves"]
    assert exposed == pytest.approx(2 * comm.step_s(line, 32, 8))  # nothing to hide it behind
    latency_alone = comm.levers_s(Cost(20e-6, 0.0), 0.1, 1, 8)
    assert latency_alone["all-reduce in 4 bits"] == latency_alone["as it is"]
