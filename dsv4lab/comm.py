"""What a decode step sends between GPUs, and what an all-reduce costs: bytes, links, protocols, levers.

Every algorithm here costs `latency + bytes * seconds per byte`, so that costs cross in closed form. Latencies and
efficiencies are the constants with which NCCL 2.30.7 chooses among its own algorithms (src/graph/tuning.cc, commit
5067397c); its corrections for trees of medium size are left out. The links are in `LINKS`, each with its source.

All of it is for the GPUs of one machine, and for messages in the sense of NCCL: the buffer that is reduced, or the one
that is gathered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from dsv4lab.model import DSV4_FLASH, DeepSeekV4Flash

BF16 = 2
PROTOCOLS = ("LL", "LL128", "Simple")
NCCL_ALGORITHMS = ("ring", "tree")
ALGORITHMS = (*NCCL_ALGORITHMS, "one_shot", "two_shot")

_BASE_US = {"ring": dict(LL=6.6, LL128=14.0, Simple=8.4), "tree": dict(LL=6.8, LL128=14.0, Simple=8.4)}
_HOP_US = {
    ("nvlink", "ring"): dict(LL=0.6, LL128=1.9, Simple=3.4),
    ("nvlink", "tree"): dict(LL=0.6, LL128=1.25, Simple=4.0),
    ("pcie", "ring"): dict(LL=1.0, LL128=2.5, Simple=5.7),
    ("pcie", "tree"): dict(LL=1.0, LL128=1.9, Simple=4.0),
}
_EFFICIENCY = {
    "ring": dict(LL=0.5, LL128=0.92, Simple=1.0),
    "tree": dict(LL=0.92 / 3.8, LL128=0.92 * 7 / 9, Simple=0.92),
}
"""Of the link: LL sends a flag with every 4 bytes, LL128 one with every 120."""


@dataclass(frozen=True)
class Link:
    """What joins the GPUs of a machine, or the processes on its CPU (loopback); rates are bytes/s out of each.

    ring_bytes_per_s: when each sends to one neighbour (bus bandwidth of a long ring). dense_bytes_per_s: when each
    sends to all others. one_shot_s: what a one-shot kernel takes for a few bytes: all its waiting.
    ll_bytes_per_s: what NCCL allows LL at most on such GPUs.
    """

    name: str
    kind: Literal["pcie", "nvlink", "loopback"]
    ring_bytes_per_s: float
    dense_bytes_per_s: float
    one_shot_s: float
    source: str
    ll_bytes_per_s: float = inf


_RTX6000 = "github.com/voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md, 8 RTX PRO 6000"
LINKS = {
    link.name: link
    for link in (
        Link(
            "pcie5_nominal",
            "pcie",
            63.0e9,
            63.0e9,
            2.0e-6,
            "32 GT/s x 16 lanes x 128/130 in each direction; one-shot: there and back, two of NCCL's LL hops",
        ),
        Link(
            "pcie5_switches",
            "pcie",
            41.1e9,
            191.8e9 / 8,
            6.79e-6,
            f"reported: {_RTX6000} behind 3 switches",
        ),
        Link(
            "pcie5_two_sockets",
            "pcie",
            37.6e9,
            173.1e9 / 8,
            6.03e-6,
            f"reported: {_RTX6000} on two EPYC Turin, NCCL_MIN_NCHANNELS=8",
        ),
        Link(
            "pcie5_host_bridges",
            "pcie",
            18.5e9,
            2.5e9,
            297e-6,
            "reported: github.com/nguyenhoangthuan99/deepseek-v41-flash-sm120, results/nccl-proto-ab.json, 8 RTX PRO "
            "6000: Simple at 21 MB, and the line through the times of a kernel that reads its peers",
        ),
        Link(
            "nvlink4",
            "nvlink",
            18 * 20.6e9,
            18 * 20.6e9,
            5.9e-6,
            "H100, H200: 18 links, 20.6 GB/s each as NCCL counts (25 nominal); one-shot: reported for 4 H100, "
            "github.com/vllm-project/vllm/pull/24532",
            ll_bytes_per_s=141.0e9,
        ),
    )
}


def link_of(topology: str | None) -> Link:
    """The link behind a name of `nvidia-smi topo` (`hardware.link`): NVLink for NV..., else nominal PCIe."""
    return LINKS["nvlink4" if str(topology).startswith("NV") else "pcie5_nominal"]


@dataclass(frozen=True)
class Cost:
    """Seconds of one collective as a line over its bytes."""

    latency_s: float
    s_per_byte: float

    def time_s(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.s_per_byte

    def crossing(self, other: "Cost") -> float:
        """Bytes from which `other` is the faster one, if this one has the lower latency; inf if it never is."""
        saved = self.s_per_byte - other.s_per_byte
        return max(0.0, (other.latency_s - self.latency_s) / saved) if saved > 0 else inf


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a step: `count` messages of `nbytes` each."""

    name: str
    kind: Literal["all_reduce", "all_gather"]
    count: int
    nbytes: int


def step(batch: int, tp: int, model: DeepSeekV4Flash = DSV4_FLASH) -> tuple[Collective, ...]:
    """The collectives of one decode step of `batch` tokens on `tp` ranks, as SGLang 0.5.14 serves the model.

    Each rank has a slice of the heads, of every expert and of the vocabulary: attention's output projection and the
    experts end in an all-reduce of the bf16 hidden state, and so does the embedding; the bf16 logits are gathered.
    With one rank there are none. ValueError as of `DeepSeekV4Flash.tensor_parallel`, and for a batch under 1.
    """
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if model.tensor_parallel(tp).tp == 1:
        return ()
    hidden, layers = batch * model.hidden_size * BF16, model.num_hidden_layers
    return (
        Collective("embedding", "all_reduce", 1, hidden),
        Collective("attention output", "all_reduce", layers, hidden),
        Collective("experts", "all_reduce", layers, hidden),
        Collective("logits", "all_gather", 1, batch * model.vocab_size * BF16),
    )


def wire_bytes(nbytes: float, ranks: int) -> float:
    """Bytes that each rank must send, and receive, for an all-reduce of `nbytes`: what bus bandwidth counts."""
    return 2 * nbytes * (ranks - 1) / ranks


def cost(link: Link, ranks: int, algorithm: str = "ring", protocol: str = "Simple") -> Cost:
    """The cost of an all-reduce of `ranks` GPUs.

    NCCL's ring and tree (within a machine a chain, so as many hops) take 2 (ranks - 1) hops, each GPU sending
    2 (ranks - 1) / ranks of the message (tree: 2). A one-shot kernel reads the whole message of every peer; a
    two-shot one reads a slice of each, waits again, and reads the sums. `protocol` is NCCL's, and ignored by them. Over
    loopback there is gloo's ring alone, of which two hops take `one_shot_s`.

    ValueError for fewer than 2 ranks or a name that is not in `ALGORITHMS` or `PROTOCOLS`.
    """
    if ranks < 2:
        raise ValueError(f"ranks must be at least 2, got {ranks}")
    _known("algorithm", algorithm, ALGORITHMS)
    _known("protocol", protocol, PROTOCOLS)
    peers, dense = ranks - 1, link.dense_bytes_per_s
    if algorithm == "one_shot":
        return Cost(link.one_shot_s, peers / dense)
    if algorithm == "two_shot":
        return Cost(2 * link.one_shot_s, 2 * peers / ranks / dense)
    if link.kind == "loopback":
        return Cost(peers * link.one_shot_s, 2 * peers / ranks / link.ring_bytes_per_s)
    latency_us = _BASE_US[algorithm][protocol] + 2 * peers * _HOP_US[link.kind, algorithm][protocol]
    rate = link.ring_bytes_per_s * _EFFICIENCY[algorithm][protocol]
    rate = min(rate, link.ll_bytes_per_s) if protocol == "LL" else rate
    return Cost(1e-6 * latency_us, (2 * peers / ranks if algorithm == "ring" else 2) / rate)


def fit(times_s: Mapping[int, float]) -> Cost:
    """The line through measured times, in seconds by bytes, that is least wrong in relative terms; both parts >= 0.

    ValueError for fewer than two sizes.
    """
    if len(times_s) < 2:
        raise ValueError(f"times_s must have at least two sizes, got {sorted(times_s)}")
    nbytes, seconds = (np.array(values, dtype=float) for values in zip(*sorted(times_s.items()), strict=True))
    columns = np.stack([1 / seconds, nbytes / seconds], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)[0]
    if slope < 0 or latency < 0:  # the best line with one part at 0
        kept = 0 if slope < 0 else 1
        value = columns[:, kept].sum() / (columns[:, kept] ** 2).sum()
        latency, slope = (value, 0.0) if kept == 0 else (0.0, value)
    return Cost(float(latency), float(slope))


def loopback(times_s: Mapping[int, float], source: str) -> Link:
    """The link between two processes on one CPU that the line through their all-reduces (seconds by bytes) is.

    ValueError as of `fit`.
    """
    line = fit(times_s)
    rate = wire_bytes(1, 2) / line.s_per_byte if line.s_per_byte else inf
    return Link("loopback", "loopback", rate, rate, line.latency_s, source)


PARTS = {"all_reduce": 1.0, "all_gather": 0.5}
"""What a collective takes of the time of an all-reduce of as many bytes: a gather is the half of one."""


def step_s(all_reduce: Cost, batch: int, tp: int, model: DeepSeekV4Flash = DSV4_FLASH) -> float:
    """Seconds that the collectives of one decode step take, one after another, all at the cost of one kind."""
    return sum(c.count * PARTS[c.kind] * all_reduce.time_s(c.nbytes) for c in step(batch, tp, model))


def nccl_choice(link: Link, ranks: int, nbytes: float) -> tuple[str, str]:
    """The (algorithm, protocol) of NCCL that should take least time; LL128 only over NVLink, as NCCL has it."""
    protocols = PROTOCOLS if link.kind == "nvlink" else ("LL", "Simple")
    pairs = [(algorithm, protocol) for algorithm in NCCL_ALGORITHMS for protocol in protocols]
    return min(pairs, key=lambda pair: cost(link, ranks, *pair).time_s(nbytes))


def predicted_s(link: Link, ranks: int, impl: str, nbytes: float) -> float:
    """Seconds of an all-reduce by the name that records give an implementation: nccl, nccl_ring_ll, one_shot, ..."""
    if impl == "nccl":
        return cost(link, ranks, *nccl_choice(link, ranks, nbytes)).time_s(nbytes)
    names = {f"nccl_{a}_{p.lower()}": (a, p) for a in NCCL_ALGORITHMS for p in PROTOCOLS}
    names |= {"one_shot": ("one_shot",), "two_shot": ("two_shot",)}
    _known("impl", impl, ("nccl", *names))
    return cost(link, ranks, *names[impl]).time_s(nbytes)


def levers_s(all_reduce: Cost, rest_s: float, batch: int, tp: int) -> dict[str, float]:
    """Seconds that a decode step would take at best, by what is done about its collectives.

    rest_s: the step without them, which none of these changes. "as it is" comes first. Overlapped: the batch in two
    halves, one computing while the other communicates, so twice as many messages. 8 and 4 bits: with a bf16 scale for
    32 values. Sequence parallel: a reduce-scatter and an all-gather have the bytes and hops of an all-reduce; what is
    gathered can have 8 bits, for it is quantised anyway where it goes next.
    """
    part = {bits: (bits + 16 / 32) / 16 for bits in (8, 4)}

    def step_with(bytes_left: float) -> float:
        return rest_s + step_s(Cost(all_reduce.latency_s, bytes_left * all_reduce.s_per_byte), batch, tp)

    return {
        "as it is": step_with(1.0),
        "overlapped in two halves": max(rest_s, 2 * step_s(all_reduce, -(-batch // 2), tp)),
        "all-reduce in 8 bits": step_with(part[8]),
        "all-reduce in 4 bits": step_with(part[4]),
        "sequence parallel": step_with(1.0),
        "sequence parallel, gathered in 8 bits": step_with((1 + part[8]) / 2),
        "no communication at all": rest_s,
    }


def _known(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {value!r}")
