"""How the sums are taken and how the hidden state is cut: chosen per architecture by rows, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry
from dsv4lab.kernels.skinny_gemm.plans import ANY, RELATIVE, Dot, Split


@dataclass(frozen=True)
class Config:
    """sums: of the products over K. block_h: hidden values a program. pdl: the second kernel is launched early."""

    sums: Dot | Split
    block_h: int
    pdl: bool

    @property
    def name(self) -> str:
        return f"{self.sums.name.removesuffix('_launch')}_h{self.block_h}{'_pdl' if self.pdl else ''}"


@dataclass(frozen=True)
class Bucket:
    """Calls of up to max_m rows; `evidence` is the file that says why."""

    max_m: int
    config: Config
    evidence: str

    @property
    def limits(self) -> str:
        return "any M" if self.max_m == ANY else f"M <= {self.max_m}"


COMPILED = "records/static/hc_pre.json"
"""Nothing has been measured there: what the compiler makes without a spill, with blocks enough for the SMs."""


def _buckets(pdl: bool) -> tuple[Bucket, ...]:
    rows = (
        (4, Config(Dot(16384, 16), 512, pdl)),
        (16, Config(Split(16, 32, 256, 256, 8), 512, pdl)),
        (128, Config(Split(16, 32, 512, 512, 8), 512, pdl)),
        (ANY, Config(Split(32, 32, 256, 2048, 8), 1024, pdl)),
    )
    return tuple(Bucket(*row, COMPILED) for row in rows)


TABLE = {"sm_80": _buckets(False), "sm_89": _buckets(False), "sm_90": _buckets(True), "sm_120": _buckets(True)}

_SUMS = (
    Dot(4096, 4),
    Dot(16384, 16),
    *(Split(16, 32, chunk, chunk, warps) for chunk, warps in ((256, 4), (256, 8), (512, 4), (512, 8))),
    Split(16, 32, 512, 1024, 8),
    Split(32, 32, 256, 256, 8),
)
SWEEP = (
    *(Config(sums, 512, pdl) for sums in _SUMS for pdl in (False, True)),
    *(Config(Split(16, 32, 512, 512, 8), block_h, True) for block_h in (256, 1024, 2048)),
)


def buckets(arch: str) -> tuple[Bucket, ...]:
    """The table's entries for an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    return arch_entry(TABLE, arch, RELATIVE)


def choose(arch: str, M: int) -> Bucket:
    """The first entry that holds M rows."""
    return next(bucket for bucket in buckets(arch) if M <= bucket.max_m)
