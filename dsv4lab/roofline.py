"""The time a piece of work cannot beat, and how near a measurement comes to it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Work:
    """What one call must do: floating-point operations, and bytes that must cross DRAM at least once."""

    flops: float
    bytes: float

    def __post_init__(self) -> None:
        for name in ("flops", "bytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")


class HasCeilings(Protocol):
    """Anything that names its two ceilings: a `hardware.GPU` (datasheet) or `Ceilings` (measured)."""

    @property
    def dram_bytes_per_s(self) -> float: ...

    @property
    def bf16_flops(self) -> float: ...


@dataclass(frozen=True)
class Ceilings:
    """Ceilings as measured on one device; `source` says how."""

    dram_bytes_per_s: float
    bf16_flops: float
    source: str

    def __post_init__(self) -> None:
        for name in ("dram_bytes_per_s", "bf16_flops"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and positive, got {getattr(self, name)}")


def floor_s(work: Work, ceilings: HasCeilings) -> float:
    """Seconds `work` takes at least: the longer of moving its bytes and doing its bf16 operations."""
    return max(work.bytes / ceilings.dram_bytes_per_s, work.flops / ceilings.bf16_flops)


def fraction(time_s: float, work: Work, ceilings: HasCeilings) -> float:
    """The share of the roofline that `time_s` seconds reach: 1 is the floor; above 1, the data came from a cache."""
    if not 0 < time_s < float("inf"):
        raise ValueError(f"time_s must be finite and positive, got {time_s}")
    return floor_s(work, ceilings) / time_s
