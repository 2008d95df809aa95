"""When the GPU was busy: unions of intervals, what ran alone, and why nothing ran.

Intervals are int64 ns. A device is a (rank, device) pair; streams of one overlap, devices do not share time.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from dsv4lab.trace.frames import Trace

CAUSES = ("launch-bound", "waiting: the host was in a synchronisation", "waiting: already launched", "unknown")
"""Why a device idled before an event: the host launched it late; late, having waited for the device before; in time, so
that it waited for another stream, a copy or the front end; the trace does not have the launch."""


def union(ts: np.ndarray, dur: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of the disjoint intervals that cover the given ones; events of no duration cover nothing."""
    some = dur > 0
    order = np.argsort(ts[some], kind="stable")
    starts, ends = ts[some][order], (ts + dur)[some][order]
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    new = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((np.flatnonzero(new)[1:] - 1, [len(starts) - 1]))
    return starts[new], reach[last]


def length(intervals: tuple[np.ndarray, np.ndarray]) -> int:
    """Time that disjoint intervals cover."""
    return int((intervals[1] - intervals[0]).sum())


def devices(events: pd.DataFrame) -> Iterator[tuple[tuple[int, int], pd.DataFrame]]:
    yield from events.groupby(["rank", "device"], sort=True)


def busy(events: pd.DataFrame) -> int:
    """Time in which at least one of the events ran, summed over devices."""
    return sum(length(union(rows["ts"].to_numpy(), rows["dur"].to_numpy())) for _, rows in devices(events))


def busy_by(events: pd.DataFrame, codes: np.ndarray, groups: int) -> np.ndarray:
    """`busy` of each group at once; `codes` (int, by row) numbers them from 0 to groups - 1."""
    if events.empty:
        return np.zeros(groups, dtype=np.int64)
    device = events.groupby(["rank", "device"]).ngroup().to_numpy(np.int64)
    lanes = codes.astype(np.int64) * (device.max() + 1) + device
    order = np.lexsort((events["ts"], lanes))
    lanes, ts, dur = lanes[order], events["ts"].to_numpy()[order], events["dur"].to_numpy()[order]
    reach = pd.Series(ts + dur).groupby(lanes).cummax()
    before = reach.groupby(lanes).shift(fill_value=np.iinfo(np.int64).min).to_numpy()
    total = np.zeros(groups, dtype=np.int64)  # of each event what it adds to those before it
    np.add.at(total, lanes // (device.max() + 1), np.maximum(0, ts + dur - np.maximum(ts, before)))
    return total


def alone(events: pd.DataFrame, chosen: np.ndarray) -> int:
    """Time in which only events of `chosen` (bool, by row) ran, summed over devices."""
    return busy(events) - busy(events[~chosen])


def by_device(trace: Trace, communication: np.ndarray) -> pd.DataFrame:
    """A row a device, in ns: kernels and their sum and union, the same with copies and fills, span, idle, overlap.

    Args:
        communication: bool by event, which of them are collectives. `exposed` is their time with nothing beside it.
    """
    rows = []
    for (rank, device), events in devices(trace.events.assign(_communication=communication)):
        kernels, of_comm = events[events["kind"] == "kernel"], events["_communication"].to_numpy()
        total, taken = busy(events), int(events["dur"].sum())
        span = int((events["ts"] + events["dur"]).max() - events["ts"].min())
        rows.append(
            {
                "rank": rank, "device": device, "kernels": len(kernels), "kernel_ns": int(kernels["dur"].sum()),
                "kernel_busy_ns": busy(kernels), "events": len(events), "sum_ns": taken, "busy_ns": total,
                "overlap_ns": taken - total, "span_ns": span, "idle_ns": span - total,
                "communication_ns": busy(events[of_comm]), "exposed_ns": alone(events, of_comm),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def gaps(trace: Trace) -> pd.DataFrame:
    """The idle gaps of each device: rank, device, ts, dur (ns), cause (of `CAUSES`), and the row of the event that
    ended it as `next`."""
    found = [_gaps(events, _syncs(trace.marks, rank)) for (rank, _), events in devices(trace.events)]
    columns = ["rank", "device", "ts", "dur", "cause", "next"]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)


def _syncs(marks: pd.DataFrame, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rows = marks[(marks["kind"] == "sync") & (marks["rank"] == rank)]
    return union(rows["ts"].to_numpy(), rows["dur"].to_numpy())


def _gaps(events: pd.DataFrame, syncs: tuple[np.ndarray, np.ndarray]) -> pd.DataFrame:
    starts, ends = union(events["ts"].to_numpy(), events["dur"].to_numpy())
    after, idle_from = starts[1:], ends[:-1]
    running = events[events["dur"] > 0]
    following = running.iloc[np.searchsorted(running["ts"].to_numpy(), after, side="left")]
    launched = following["launch_ts"].to_numpy()
    at = np.searchsorted(syncs[0], idle_from, side="right") - 1  # the last wait that began before the gap did
    waited = (at >= 0) & (syncs[1][at] > idle_from) if len(syncs[0]) else np.zeros(len(after), bool)
    cause = np.select([launched < 0, launched < idle_from, waited], [CAUSES[3], CAUSES[2], CAUSES[1]], CAUSES[0])
    return pd.DataFrame(
        {
            "rank": following["rank"].to_numpy(),
            "device": following["device"].to_numpy(),
            "ts": idle_from,
            "dur": after - idle_from,
            "cause": pd.Categorical(cause, categories=CAUSES),
            "next": following.index.to_numpy(),
        }
    )
