"""What servers answered to the same prompts, and whether some are as near to one another as others are."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

ALLOWED = 2.0
"""Times the difference of `native` to itself that `indexer` may differ."""


@dataclass(frozen=True)
class Run:
    """All prompts to the server of a stage on `tp` GPUs, in batches of `batch`."""

    stage: str
    batch: int
    tp: int = 1

    @property
    def server(self) -> str:
        return self.stage if self.tp == 1 else f"{self.stage}_tp{self.tp}"

    @property
    def name(self) -> str:
        return f"{self.server}_b{self.batch}"


REFERENCE, AGAIN, OURS = Run("native", 16), (Run("native", 1), Run("native", 4)), Run("indexer", 16)


@dataclass(frozen=True)
class Comparison:
    """Runs: `ours` may be `ALLOWED` times as far from `base` as the reference and those of `again` are from another."""

    again: tuple[Run, ...]
    base: Run
    ours: Run

    @property
    def runs(self) -> tuple[Run, ...]:
        """In the order in which they are asked: all follow the reference."""
        return tuple(dict.fromkeys((REFERENCE, *self.again, self.base, self.ours)))


def comparison(tp: int) -> Comparison:
    """What is compared for a plan with this `tp`."""
    if tp == 1:
        return Comparison(AGAIN, REFERENCE, OURS)
    return Comparison((replace(REFERENCE, tp=tp),), OURS, replace(OURS, tp=tp))


@dataclass(frozen=True)
class Answer:
    """Two tokens, and at the second the logprobs of what the reference likes best; seconds: its share of the call."""

    context: int
    prompt: int
    first: int
    second: int
    logprobs: dict[str, float]
    seconds: float

    @property
    def key(self) -> tuple[int, int]:
        return self.context, self.prompt

    @property
    def margin(self) -> float:
        """By how much a reference preferred its second token."""
        best, following = sorted(self.logprobs.values(), reverse=True)[:2]
        return best - following


@dataclass(frozen=True)
class Judged:
    """The `result` and the `check` of a record."""

    result: dict[str, float | None]
    check: dict[str, Any]


def judge(answers: list[list[Answer]], expected: int) -> Judged:
    """Of the answers of the reference, and of the runs of a comparison in their order, to the same prompts.

    expected: how many prompts there were to be. Noise is of every prompt in every two of the reference and `again`.
    """
    reference, *again, base, ours = answers
    followed = [len({answer.first for answer in each}) == 1 for each in zip(*answers, strict=True)]
    itself = [pair for two in combinations((reference, *again), 2) for pair in zip(*two, strict=True)]
    noise = [difference(*pair) for pair in itself]
    differences = list(map(difference, base, ours))
    decided = [answer.margin > max(noise) for answer in base]
    changed = [a.second != b.second for a, b in zip(base, ours, strict=True)]
    result = {
        "prompts": len(reference),
        "noise_mean": statistics.fmean(noise),
        "noise_max": max(noise),
        "difference_mean": statistics.fmean(differences),
        "difference_max": max(differences),
        "decided": sum(decided),
        "changed_decided": sum(a and b for a, b in zip(decided, changed, strict=True)),
        "changed": sum(changed),
        "changed_native": sum(a.second != b.second for a, b in itself),
        "margin_median": statistics.median(answer.margin for answer in reference),
        "distinct": len({answer.second for answer in reference}),
    }
    broken = sum(map(math.isinf, noise + differences))
    errors = list(_complaints(result, expected, followed.count(False), broken))
    return Judged(
        {name: value if math.isfinite(value) else None for name, value in result.items()},
        {
            "ok": len(reference),
            "failed": expected - len(reference),
            "passed": not errors,
            "errors": errors,
            "noise": _short(noise),
            "differences": _short(differences),
            "margins": _short(answer.margin for answer in reference),
        },
    )


def difference(one: Answer, other: Answer) -> float:
    """The largest of any token's logprob, in nats; infinite where one of them is no number."""
    gaps = (abs(value - other.logprobs[token]) for token, value in one.logprobs.items())
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def _complaints(result: dict[str, float], expected: int, lost: int, broken: int) -> Iterator[str]:
    """What keeps the bounds from being kept."""
    if result["prompts"] < expected:
        yield f"{result['prompts']} of {expected} prompts answered by every run"
    if lost:
        yield f"{lost} prompts went on after another first token"
    if broken:
        yield f"{broken} answers have a logprob that is no number"
    for kind in ("mean", "max"):
        ours, noise = result[f"difference_{kind}"], result[f"noise_{kind}"]
        if ours > ALLOWED * noise:
            yield f"difference_{kind} {ours:.4g} exceeds {ALLOWED:g} times the noise, {noise:.4g}"
    if result["changed_decided"]:
        yield f"{result['changed_decided']} tokens changed where native's margin exceeds its noise"
    if result["distinct"] <= result["prompts"] // 2:
        yield f"only {result['distinct']} different answers to {result['prompts']} prompts: the weights are degenerate"


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
