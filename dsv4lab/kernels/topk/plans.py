"""How many warps select a row and how many take its maxima: chosen per architecture, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry

MAX_K = 2048


@dataclass(frozen=True)
class Config:
    """Warps that `select_kernel` has for 4096 keys; warps, scores a step and programs an SM of `maxima_kernel`."""

    num_warps: int
    maxima_warps: int
    block: int
    programs_per_sm: int

    @property
    def name(self) -> str:
        return f"w{self.num_warps}_m{self.maxima_warps}_n{self.block}_x{self.programs_per_sm}"


@dataclass(frozen=True)
class Choice:
    """The config of an architecture; `evidence` is the file that says why."""

    config: Config
    evidence: str


COMPILED = "records/static/topk.json"
"""No such GPU has been measured: as on sm_90, where it compiles without a spill."""

MEASURED = "records/topk_h200_20261129T163103Z.jsonl"

_CONFIG = Config(8, 8, 2048, 4)
TABLE = {arch: Choice(_CONFIG, COMPILED) for arch in ("sm_80", "sm_89", "sm_120")} | {
    "sm_90": Choice(_CONFIG, MEASURED)
}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}

SWEEP = (
    *(Config(warps, 4, 2048, 4) for warps in (4, 8, 16)),
    *(Config(8, warps, block, programs) for warps, block, programs in ((4, 1024, 8), (8, 4096, 2), (8, 2048, 4))),
)


def choose(arch: str) -> Choice:
    """The table's entry for an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    return arch_entry(TABLE, arch, RELATIVE)


def list_length(k: int) -> int:
    """Groups kept on a level: room for k, and for twice as many where k is 512, so that the search stops early."""
    return 1024 if k <= 1024 else 2048
