"""How many warps and programs a row gets: chosen per architecture, never by the data."""

from dataclasses import dataclass, replace

from dsv4lab.hardware import arch_entry
from dsv4lab.kernels import choices

MAX_K = 2048


@dataclass(frozen=True)
class Config:
    """Warps for a tile of 4096 keys (for one of 8192 twice as many, up to 16); scores a step, steps in flight and
    programs an SM while the maxima are taken. early: launched while the kernel before still runs, where a GPU can."""

    num_warps: int
    block: int
    num_stages: int
    programs_per_sm: int
    early: bool = False

    @property
    def name(self) -> str:
        return f"w{self.num_warps}_n{self.block}_s{self.num_stages}_x{self.programs_per_sm}{'_early' * self.early}"


@dataclass(frozen=True)
class Choice:
    """The config of an architecture; `evidence` is the file that says why."""

    config: Config
    evidence: str


COMPILED = "records/static/topk_20261130T050119Z.json"
"""No such GPU has been measured: blocks of scores for which the compiler needs to spill nothing."""

MEASURED = "records/topk_h200_20261130T030542Z.jsonl"
"""What the config takes, which probes without a record chose."""

_CONFIG = Config(8, 4096, 1, 2)
TABLE = {
    "sm_80": Choice(_CONFIG, COMPILED),
    "sm_89": Choice(_CONFIG, COMPILED),
    "sm_90": Choice(Config(8, 8192, 1, 2, early=True), MEASURED),
    "sm_120": Choice(replace(_CONFIG, early=True), COMPILED),
}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}

SWEEP = (
    *(Config(8, n, stages, 1) for n, stages in ((2048, 5), (4096, 3), (8192, 2), (16384, 1))),
    *(Config(8, n, stages, 2) for n, stages in ((2048, 5), (4096, 1), (4096, 3), (8192, 1))),
    *(Config(warps, 8192, 1, 2) for warps in (4, 16)),
    *(Config(8, n, stages, 2, early=True) for n, stages in ((4096, 1), (8192, 1))),
)


def choose(arch: str) -> Choice:
    """What was tuned on this GPU, or the table's entry for an architecture; an unlisted one takes its relative's."""
    if own := choices.own("topk", arch):
        return Choice(Config(**own["config"]), own["evidence"])
    return arch_entry(TABLE, arch, RELATIVE)


def list_length(k: int) -> int:
    """Groups kept on a level: room for k, and for twice as many where k is 512, so that the search stops early."""
    return 1024 if k <= 1024 else 2048
