"""A trace as the rules that look for suspects see it, and what they find."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from dsv4lab import hardware
from dsv4lab.trace.assembly import GRAPH_LAUNCH
from dsv4lab.trace.frames import Trace, matching, source_line
from dsv4lab.trace.operands import Call, calls

WORTH = 0.01  # of the GPU time; what takes less is no finding
EXAMPLES = 4


@dataclass(frozen=True)
class Suspect:
    """`ns` is the GPU time at stake, `share` that of all events' sum, `where` the Python line most of it came from."""

    rule: str
    finding: str
    ns: int
    share: float
    evidence: tuple[str, ...]
    advice: str
    where: str = ""


class Case:
    """A trace as the rules look at it: events in the order of their launches, and how each op was called.

    Args:
        max_context: longest request in tokens that the server allows, where known.
        live: positions that requests really had, where known.
    """

    def __init__(self, trace: Trace, max_context: int | None = None, live: int | None = None) -> None:
        events = trace.events
        order = np.argsort(events["ts"].where(events["launch_ts"] < 0, events["launch_ts"]), kind="stable")
        self.trace, self.max_context, self.live = trace, max_context, live
        self.events = events.iloc[order].reset_index(drop=True)
        self.calls, self.call = calls(self.events)
        self.dur = self.events["dur"].to_numpy()
        self.total = max(1, int(self.dur.sum()))
        self.kernel = (self.events["kind"] == "kernel").to_numpy()
        self.replayed = matching(self.events["launch"], GRAPH_LAUNCH)
        self.sms = trace.meta.get("sms")

    @cached_property
    def bytes_per_ns(self) -> float:
        """What the GPU's memory delivers; of one that is not in the table, the most that any in it does."""
        try:
            return hardware.lookup(self.trace.meta.get("gpu") or "").dram_bytes_per_s / 1e9
        except ValueError:
            return max(gpu.dram_bytes_per_s for gpu in hardware.GPUS) / 1e9

    def rows(self, fits: Callable[[Call], bool]) -> np.ndarray:
        """Bool by event: launched by a call that fits."""
        return np.array([fits(call) for call in self.calls])[self.call]

    def suspect(self, rule: str, rows: np.ndarray, finding: str, advice: str, evidence: Iterable[str] = ()) -> Suspect:
        ns = int(self.dur[rows].sum())
        evidence = tuple(evidence) or tuple(self.by_call(rows).values())
        return Suspect(rule, finding, ns, ns / self.total, evidence, advice, self.where(rows))

    def worth(self, rows: np.ndarray) -> bool:
        return bool(rows.any()) and self.dur[rows].sum() >= WORTH * self.total

    def by_call(self, rows: np.ndarray) -> dict[int, str]:
        """The costliest calls among those events, a line each."""
        costs = pd.Series(self.dur[rows]).groupby(self.call[rows]).agg(["sum", "size"])
        costs = costs.sort_values("sum", ascending=False).head(EXAMPLES)
        return {
            int(number): f"{self.calls[number]}: {many(cost['size'], 'kernel')}, {cost['sum'] / 1000:,.0f} µs"
            for number, cost in costs.iterrows()
        }

    def where(self, rows: np.ndarray) -> str:
        stacks = self.events["stack"].cat
        costs = pd.Series(self.dur[rows]).groupby(stacks.codes.to_numpy()[rows]).sum()
        costs = costs.groupby([source_line(stacks.categories[code]) for code in costs.index]).sum()
        costs = costs.drop("", errors="ignore")
        return costs.idxmax() if len(costs) else ""


def many(count: int, what: str) -> str:
    """ "1 kernel", "2 kernels", "3 copies"."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}es" if what.endswith("h") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"
