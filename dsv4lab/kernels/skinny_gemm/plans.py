"""Tiles, slices of K, and who adds them up: chosen per architecture by rows and columns, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry

COMBINES = ("launch", "pdl")
"""Partial tiles are added up by a second kernel, or by one that is launched early."""


@dataclass(frozen=True)
class Dot:
    """One output a block: `block_k` products of its row and column at a time, or all K of them if that is less."""

    block_k: int
    num_warps: int

    @property
    def name(self) -> str:
        return f"dot_k{self.block_k}_w{self.num_warps}"


@dataclass(frozen=True)
class Split:
    """A tile of outputs over `chunk` of K a block, in steps of `block_k`; the tiles are added up as `combine` says.

    whole: all warps multiply a step together, instead of a slice of it each.
    """

    block_m: int
    block_n: int
    block_k: int
    chunk: int
    num_warps: int
    combine: str = "launch"
    whole: bool = False

    def __post_init__(self):
        if self.combine not in COMBINES:
            raise ValueError(f"combine must be one of {COMBINES}, got {self.combine!r}")

    @property
    def name(self) -> str:
        tile = f"m{self.block_m}_n{self.block_n}_k{self.block_k}_c{self.chunk}"
        return f"{tile}_{'whole' if self.whole else 'w'}{self.num_warps}_{self.combine}"

    def tiles(self, M: int, N: int) -> tuple[int, int]:
        """(column tiles, row tiles) of an [M, N] output."""
        return -(-N // self.block_n), -(-M // self.block_m)

    def splits(self, K: int) -> int:
        return -(-K // self.chunk)

    def partials(self, M: int, N: int, K: int) -> int:
        """Elements of the fp32 workspace."""
        columns, rows = self.tiles(M, N)
        return columns * rows * self.splits(K) * self.block_m * self.block_n


Config = Dot | Split


@dataclass(frozen=True)
class Bucket:
    """Products of up to max_m rows and max_n columns, of bf16 weights or fp32 ones; `evidence` says why."""

    max_m: int
    max_n: int
    config: Config
    evidence: str
    fp32: bool = False

    @property
    def limits(self) -> str:
        m, n = ("any" if limit == ANY else f"<= {limit}" for limit in (self.max_m, self.max_n))
        return f"M {m}, N {n}"


ANY = 1 << 30
COMPILED = "records/static/skinny_gemm_20261130T014512Z.json"
"""Nothing has been measured there: the H200's tiles, which the compiler makes without a spill."""
MEASURED = "records/skinny_gemm_h200_20261130T002557Z.jsonl"
"""As they are, the weights read early; no sweep of these kernels has a record."""
WIDE = "records/skinny_gemm_h200_20261129T214943Z.jsonl"
"""The same tiles of earlier kernels: right for many columns or rows, not fast."""


def _whole(block_m: int, block_n: int, chunk: int, warps: int, combine: str) -> Split:
    return Split(block_m, block_n, chunk, chunk, warps, combine, whole=True)


def _buckets(combine: str, few: str = COMPILED, many: str = COMPILED) -> tuple[Bucket, ...]:
    """few, many: the evidence for up to 128 rows and 256 columns, and beyond."""
    bf16 = (
        (4, 64, Dot(16384, 16), few),
        (16, 64, _whole(16, 8, 256, 1, combine), few),
        (128, 64, _whole(32, 32, 256, 8, combine), few),
        (1, ANY, Dot(4096, 8), few),
        (16, 256, _whole(16, 16, 256, 4, combine), few),
        (128, 256, _whole(32, 16, 256, 4, combine), few),
        (128, ANY, Split(16, 32, 512, 1024, 8, combine), many),
        (ANY, ANY, Split(32, 32, 256, 2048, 8, combine), many),
    )
    fp32 = (
        (4, 64, Dot(16384, 16), few),
        (16, 64, Split(16, 8, 512, 512, 4, combine), few),
        (128, 64, _whole(32, 8, 256, 2, combine), few),
        (ANY, ANY, Split(32, 32, 256, 2048, 8, combine), COMPILED),
    )
    return tuple(Bucket(*row) for row in bf16) + tuple(Bucket(*row, fp32=True) for row in fp32)


TABLE = {
    "sm_80": _buckets("launch"),
    "sm_89": _buckets("launch"),
    "sm_90": _buckets("pdl", MEASURED, WIDE),
    "sm_120": _buckets("pdl"),
}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}

_WHOLE = (
    *((16, block_n, 256, warps) for block_n, warps in ((8, 1), (16, 2), (16, 4), (32, 4), (32, 8))),
    *((32, block_n, 256, warps) for block_n, warps in ((8, 2), (16, 4), (32, 4), (32, 8))),
    *((64, block_n, 256, warps) for block_n, warps in ((8, 4), (16, 4), (32, 8))),
    *((block_m, 32, 512, 8) for block_m in (16, 32)),
    *((block_m, 32, 128, 8) for block_m in (32, 64)),
)
_SLICES = (
    *((block_m, block_n, 512, 4) for block_m in (16, 32) for block_n in (8, 32)),
    *((block_m, block_n, 1024, 8) for block_m in (16, 32) for block_n in (8, 16)),
    (16, 32, 512, 8),
    (32, 32, 512, 8),
)
SWEEP = (
    *(Dot(block_k, warps) for block_k, warps in ((4096, 4), (4096, 8), (16384, 8), (16384, 16))),
    *(_whole(*tile, "pdl") for tile in _WHOLE),
    Split(16, 32, 512, 1024, 8, "pdl"),
    Split(32, 32, 256, 2048, 8, "pdl"),
    *(Split(m, n, chunk, chunk, warps, "pdl") for m, n, chunk, warps in _SLICES),
)


def buckets(arch: str) -> tuple[Bucket, ...]:
    """The table's entries for an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    return arch_entry(TABLE, arch, RELATIVE)


def choose(arch: str, M: int, N: int, fp32: bool = False) -> Bucket:
    """The first entry that holds M rows and N columns, of fp32 weights or of bf16 ones."""
    return next(b for b in buckets(arch) if b.fp32 == fp32 and M <= b.max_m and N <= b.max_n)


def beats_cublas(M: int, N: int) -> bool:
    """Whether M rows of N columns, bf16 in and fp32 out, are known to take less time than with cuBLAS, on the H200.

    `records/skinny_gemm_h200_20261130T052638Z.jsonl` has 256 columns and 512: of the latter no more than one row is.
    """
    return 1 <= M <= (64 if N <= 256 else 1) and N <= 512
