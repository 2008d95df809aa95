"""Tiles, and how often K is split: chosen per architecture by the number of rows and the SMs, never by the data."""

from dataclasses import dataclass, replace

from dsv4lab.hardware import arch_entry
from dsv4lab.kernels import choices

MAX_M = 64
"""Rows up to which the weights are what takes the time."""
BLOCK = 128
"""Rows and columns of a weight that share one scale, and columns of an activation: a step of K."""
AMAX_FLOOR = 1e-10
"""What the largest activation of a step counts for at least when they are quantised."""


@dataclass(frozen=True)
class Config:
    """block_n: outputs of a block. blocks_per_sm: blocks that K is split for. num_stages: steps on their way.

    swap: the weights are the left operand of the product, of which wgmma takes 64 rows; of the right one it takes few.
    fused: `fp8_linear` has every block quantise what it multiplies, instead of a kernel in front quantise all.
    """

    block_n: int
    blocks_per_sm: int
    num_stages: int
    num_warps: int = 4
    swap: bool = False
    fused: bool = False

    @property
    def name(self) -> str:
        tile = f"n{self.block_n}_x{self.blocks_per_sm}_s{self.num_stages}_w{self.num_warps}"
        return f"{tile}{'_swap' * self.swap}{'_fused' * self.fused}"


@dataclass(frozen=True)
class Plan:
    """`splits` shares of K, of `steps` steps each but for the last."""

    config: Config
    block_m: int
    splits: int
    steps: int

    def tiles(self, M: int, N: int) -> tuple[int, int]:
        """(column tiles, row tiles) of an [M, N] output."""
        return N // self.config.block_n, -(-M // self.block_m)

    def partials(self, M: int, N: int) -> int:
        """Elements of the fp32 workspace."""
        columns, rows = self.tiles(M, N)
        return columns * rows * self.splits * self.block_m * self.config.block_n if self.splits > 1 else 0


@dataclass(frozen=True)
class Bucket:
    """Products of up to max_m rows and max_n outputs; `evidence` says why."""

    max_m: int
    max_n: int
    config: Config
    evidence: str

    @property
    def limits(self) -> str:
        return f"M <= {self.max_m}, N {'any' if self.max_n == ANY else f'<= {self.max_n}'}"


ROWS, NARROW, ANY = (16, 32, MAX_M), 16384, 1 << 30
"""Rows of a tile; outputs up to which K has to be split for all SMs, and any number."""
COMPILED = "records/static/fp8_gemm_20261130T060619Z.json"
"""No such GPU has been measured: the tiles of the H200, with as many warps as spill nothing."""
MEASURED = "records/tune_gemm_h200_20261130T054142Z.jsonl"


def _buckets(narrow: tuple[Config, ...], wide: tuple[Config, ...], evidence: str) -> tuple[Bucket, ...]:
    """narrow, wide: for each of `ROWS`."""
    limits = [(N, configs) for N, configs in ((NARROW, narrow), (ANY, wide))]
    return tuple(Bucket(M, N, configs[i], evidence) for i, M in enumerate(ROWS) for N, configs in limits)


_COMPILED = _buckets(
    (Config(64, 2, 4, fused=True), Config(64, 2, 4, 8, fused=True), Config(64, 1, 4)),
    (*(Config(64, 1, 3, fused=True),) * 2, Config(64, 1, 3)),
    COMPILED,
)
_SWAPPED = Config(128, 1, 4, swap=True)
TABLE = {
    "sm_89": _COMPILED,
    "sm_90": _buckets(
        (replace(_SWAPPED, fused=True), replace(_SWAPPED, num_stages=3, fused=True), Config(64, 1, 8)),
        (replace(_SWAPPED, fused=True), _SWAPPED, Config(128, 1, 3)),
        MEASURED,
    ),
    "sm_120": _COMPILED,
}
"""From sm_89 on tensor cores take e4m3."""
RELATIVE = {"sm_121": "sm_120"}

SWEEP = tuple(
    Config(block_n, blocks, stages)
    for block_n in (64, 128)
    for blocks in (1, 2, 3, 4)
    for stages in (3, 4, 6)
    if block_n * stages * blocks <= 64 * 6 * 4
)
SWEEP += tuple(Config(32, blocks, stages) for blocks in (1, 2, 4) for stages in (4, 8))  # fewer shares, or one
SWEEP += (Config(64, 1, 8), Config(64, 2, 8))
SWEEP += tuple(Config(*tile, swap=True) for tile in ((64, 1, 4), (64, 1, 6), (64, 2, 3), (64, 2, 4)))
SWEEP += tuple(Config(128, 1, stages, swap=True) for stages in (3, 4))
SWEEP += tuple(
    Config(*tile, fused=True)
    for tile in ((64, 1, 4), (64, 1, 6), (64, 2, 3), (64, 2, 4), (64, 3, 3), (128, 1, 3), (128, 1, 4), (128, 2, 3))
)
SWEEP += tuple(Config(*tile, swap=True, fused=True) for tile in ((64, 2, 3), (64, 2, 4), (128, 1, 3), (128, 1, 4)))


def buckets(arch: str) -> tuple[Bucket, ...]:
    """What was tuned on this GPU, or the table's entries for an architecture; an unlisted one takes its relative's."""
    if own := choices.own("fp8_gemm", arch):
        entries = ((each["max_m"], each["max_n"], Config(**each["config"])) for each in own["entries"])
        return tuple(Bucket(*entry, own["evidence"]) for entry in entries)
    return arch_entry(TABLE, arch, RELATIVE)


def choose(arch: str, M: int, N: int) -> Bucket:
    """The first entry that holds M rows and N outputs."""
    return next(bucket for bucket in buckets(arch) if M <= bucket.max_m and N <= bucket.max_n)


def plan(M: int, N: int, K: int, config: Config, sms: int) -> Plan:
    """K split for `blocks_per_sm` blocks on each SM, into shares of two steps or more."""
    block_m, all_steps = max(16, 1 << (M - 1).bit_length()), K // BLOCK
    tiles = N // config.block_n
    splits = max(min(config.blocks_per_sm * sms // tiles, all_steps // 2), 1)
    steps = -(-all_steps // splits)
    return Plan(config, block_m, -(-all_steps // steps), steps)
