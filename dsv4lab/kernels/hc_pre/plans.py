"""How the sums are taken and by how many warps a row ends: chosen per architecture by rows, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry
from dsv4lab.kernels.skinny_gemm.plans import ANY, RELATIVE, Dot, Split


@dataclass(frozen=True)
class Config:
    """sums: of the products over K. warps: of a program of the second kernel. rows: whose mix one of them splits.

    pdl: the second kernel is launched early, and the first where the weights allow it.
    """

    sums: Dot | Split
    warps: int
    pdl: bool
    rows: int = 1

    def __post_init__(self):
        tile = self.sums.block_m if isinstance(self.sums, Split) else 1
        if self.rows < 1 or tile % self.rows:
            raise ValueError(f"rows must divide the {tile} of a tile of sums, got {self.rows}")

    @property
    def name(self) -> str:
        return f"{self.sums.name.removesuffix('_launch')}_mix{self.rows}x{self.warps}{'_pdl' if self.pdl else ''}"


@dataclass(frozen=True)
class Bucket:
    """Calls of up to max_m rows; `evidence` is the file that says why."""

    max_m: int
    config: Config
    evidence: str

    @property
    def limits(self) -> str:
        return "any M" if self.max_m == ANY else f"M <= {self.max_m}"


COMPILED = "records/static/hc_pre_20261130T053402Z.json"
"""Nothing has been measured there: what the compiler makes without a spill, with blocks enough for the SMs."""


def _whole(block_m: int, block_k: int, chunk: int, warps: int) -> Split:
    return Split(block_m, 32, block_k, chunk, warps, whole=True)


MEASURED = "records/hc_pre_h200_20261130T002709Z.jsonl"
"""Up to 64 rows, as they are; no sweep of so few has a record yet."""
SWEPT = "records/hc_pre_sweep_h200_20261130T052800Z.jsonl"


def _buckets(pdl: bool, few: str = COMPILED, many: str = COMPILED) -> tuple[Bucket, ...]:
    """few, many: the evidence up to 64 rows and beyond."""
    rows = (
        (4, Config(Dot(16384, 16), 4, pdl)),
        (16, Config(_whole(16, 128, 128, 8), 4, pdl)),
        (32, Config(_whole(32, 128, 128, 8), 4, pdl)),
        (64, Config(_whole(64, 128, 128, 8), 4, pdl)),
        (128, Config(_whole(64, 128, 128, 8), 4, pdl)),
        (ANY, Config(_whole(128, 128, 1024, 8), 4, pdl, rows=4)),
    )
    return tuple(Bucket(*row, few if row[0] <= 64 else many) for row in rows)


TABLE = {
    "sm_80": _buckets(False),
    "sm_89": _buckets(False),
    "sm_90": _buckets(True, MEASURED, SWEPT),
    "sm_120": _buckets(True),
}

_SUMS = (
    Dot(4096, 4),
    Dot(16384, 16),
    Split(16, 32, 256, 256, 8),
    Split(16, 32, 512, 512, 8),
    *(_whole(16, chunk, chunk, warps) for chunk, warps in ((64, 4), (128, 4), (128, 8), (256, 8))),
    *(_whole(32, chunk, chunk, warps) for chunk, warps in ((128, 4), (128, 8), (256, 4), (256, 8))),
    *(_whole(64, chunk, chunk, warps) for chunk, warps in ((128, 4), (128, 8), (256, 8))),
)
_MIDDLE = _whole(32, 128, 128, 8)
SWEEP = (
    *(Config(sums, 4, True) for sums in _SUMS),
    *(Config(sums, 4, False) for sums in (Dot(16384, 16), _MIDDLE)),
    *(Config(_MIDDLE, warps, True) for warps in (2, 8, 16)),
    *(Config(_MIDDLE, 4, True, rows) for rows in (2, 4)),
    *(Config(sums, 4, True, 4) for sums in (Split(32, 32, 256, 2048, 8), _whole(64, 128, 512, 8))),
    *(Config(_whole(64, 128, 1024, warps), 4, True, 4) for warps in (4, 8)),
    *(Config(_whole(*tile), 4, True, 4) for tile in ((32, 128, 1024, 4), (64, 64, 512, 4), (64, 256, 1024, 8))),
    *(Config(_whole(*tile), 4, True, 4) for tile in ((64, 128, 2048, 4), (128, 128, 1024, 8), (128, 64, 2048, 8))),
)


def buckets(arch: str) -> tuple[Bucket, ...]:
    """The table's entries for an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    return arch_entry(TABLE, arch, RELATIVE)


def choose(arch: str, M: int) -> Bucket:
    """The first entry that holds M rows."""
    return next(bucket for bucket in buckets(arch) if M <= bucket.max_m)
