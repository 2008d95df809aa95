"""How many warps, how deep a pipeline, how many programs an SM: chosen per architecture, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry
from dsv4lab.kernels import choices


@dataclass(frozen=True)
class Config:
    """One compiled variant.

    ids: where page ids wait: "carried" in a register, one page ahead; "piped" through the pipeline, as keys do; "lanes"
      in the registers of a warp, 32 at a time.
    lean: rows are searched 32 at a time by every warp for itself, and what is divided by is compiled in.
    ask: page ids and queries are asked for before the lengths are known.
    skew: pages that starting a row counts for in a share. keys, store: cache hints of what is read and written.
    early: 1: launched while the kernel before still ends (sm_90 on), and waits for it; 2: lets the next one do so too.
    """

    num_warps: int
    num_stages: int
    programs_per_sm: int
    ids: str = "carried"
    lean: bool = False
    ask: bool = False
    skew: int = 0
    keys: str = ""
    store: str = "evict_last"
    early: int = 0

    @property
    def name(self) -> str:
        extra = (
            ("lean", self.lean),
            ("ask", self.ask),
            (f"skew{self.skew}", self.skew),
            (f"keys_{self.keys}", self.keys),
        )
        extra += (
            (f"ids_{self.ids}", self.ids != "carried"),
            ("plain", not self.store),
            (f"early{self.early}", self.early),
        )
        return "_".join(
            (f"w{self.num_warps}_s{self.num_stages}_x{self.programs_per_sm}", *(n for n, on in extra if on))
        )


@dataclass(frozen=True)
class Choice:
    """The configs of an architecture, for one query a request and for several; `evidence` is the file that says why."""

    single: Config
    several: Config
    evidence: str

    def config(self, next_n: int) -> Config:
        return self.single if next_n == 1 else self.several


COMPILED = "records/static/mqa_logits_20261129T183100Z.json"
"""No such GPU has been measured: what the compiler makes without a spill, as many programs as an SM's shared memory
holds."""

MEASURED = "records/mqa_logits_h200_20261129T214610Z.jsonl"

TABLE = {
    "sm_80": Choice(Config(4, 4, 3), Config(4, 4, 2), COMPILED),
    "sm_89": Choice(Config(4, 4, 2), Config(4, 4, 2), COMPILED),
    "sm_90": Choice(Config(4, 3, 4), Config(4, 3, 2), MEASURED),
    "sm_120": Choice(Config(4, 4, 2), Config(4, 4, 2), COMPILED),
}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}
FP8_PRODUCTS = ("sm_89", "sm_90", "sm_120", "sm_121")
"""Architectures whose tensor cores multiply e4m3; the others multiply fp16, decoded in software."""

SWEEP = (
    *(Config(4, 3, programs) for programs in (2, 3, 4, 5, 6)),
    *(Config(4, 4, programs) for programs in (2, 3, 4, 5)),
    *(Config(4, 5, programs) for programs in (2, 4)),
    *(Config(4, stages, 4, ids="piped") for stages in (4, 5, 7)),
)


def choose(arch: str) -> Choice:
    """What was tuned on this GPU, or the table's entry for an architecture; an unlisted one takes its relative's."""
    if own := choices.own("mqa_logits", arch):
        return Choice(Config(**own["single"]), Config(**own["several"]), own["evidence"])
    return arch_entry(TABLE, arch, RELATIVE)
