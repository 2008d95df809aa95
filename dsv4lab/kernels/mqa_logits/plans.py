"""How many warps, how deep a pipeline, how many programs an SM: chosen per architecture, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry
from dsv4lab.kernels import choices


@dataclass(frozen=True)
class Config:
    """Warps of a program, pages in flight, programs an SM. early: launched while the kernel before still runs, where a
    GPU can."""

    num_warps: int
    num_stages: int
    programs_per_sm: int
    early: bool = False

    @property
    def name(self) -> str:
        return f"w{self.num_warps}_s{self.num_stages}_x{self.programs_per_sm}{'_early' * self.early}"


@dataclass(frozen=True)
class Choice:
    """The configs of an architecture, for one query a request and for several; `evidence` is the file that says why."""

    single: Config
    several: Config
    evidence: str

    def config(self, next_n: int) -> Config:
        return self.single if next_n == 1 else self.several


COMPILED = "records/static/mqa_logits_20261130T003726Z.json"
"""No such GPU has been measured: what the compiler makes without a spill, as many programs as an SM's shared memory
holds."""

MEASURED = "records/mqa_logits_h200_20261130T002455Z.jsonl"
"""What the configs take, which probes without a record chose."""

TABLE = {
    "sm_80": Choice(Config(4, 4, 3), Config(4, 4, 2), COMPILED),
    "sm_89": Choice(Config(4, 4, 2), Config(4, 4, 2), COMPILED),
    "sm_90": Choice(Config(4, 3, 4, early=True), Config(4, 3, 2, early=True), MEASURED),
    "sm_120": Choice(Config(4, 4, 2, early=True), Config(4, 3, 2, early=True), COMPILED),
}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}
FP8_PRODUCTS = ("sm_89", "sm_90", "sm_120", "sm_121")
"""Architectures whose tensor cores multiply e4m3; the others multiply fp16, decoded in software."""

SWEEP = (
    *(Config(4, 3, programs, early=True) for programs in (2, 3, 4, 5, 6)),
    *(Config(4, 4, programs, early=True) for programs in (2, 3, 4, 5)),
    Config(4, 5, 4, early=True),
    *(Config(4, 3, programs) for programs in (2, 4)),
)


def choose(arch: str) -> Choice:
    """What was tuned on this GPU, or the table's entry for an architecture; an unlisted one takes its relative's."""
    if own := choices.own("mqa_logits", arch):
        return Choice(Config(**own["single"]), Config(**own["several"]), own["evidence"])
    return arch_entry(TABLE, arch, RELATIVE)
