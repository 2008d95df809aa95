"""Which tile, how many warps, how many splits: chosen per architecture, head count and batch bucket, never by the data.

A plan depends on shapes alone, so a captured graph stays right whatever lengths its replays bring.
"""

from dataclasses import dataclass, replace

from dsv4lab.hardware import EARLY_LAUNCH, arch_entry
from dsv4lab.kernels import choices


@dataclass(frozen=True)
class Config:
    """One compiled variant: BLOCK_H heads share each gathered tile of BLOCK_N tokens.

    transpose_scores: compute K q^T rather than q K^T. blocks_per_sm: how many such blocks an SM holds at once, and so
    how many the split makes. gluon: the warp-specialised kernel of Hopper, with 64 heads a block and `num_stages` tiles
    of bf16 in shared memory.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    transpose_scores: bool
    blocks_per_sm: int
    gluon: bool = False

    @property
    def name(self) -> str:
        if self.gluon:
            return f"gluon_n{self.block_n}"
        order = "kq" if self.transpose_scores else "qk"
        return f"h{self.block_h}_n{self.block_n}_w{self.num_warps}_s{self.num_stages}_{order}_x{self.blocks_per_sm}"


@dataclass(frozen=True)
class Bucket:
    """Use `config` up to this many heads and rows (rows = batch * s_q); `evidence` is the file that says why."""

    max_heads: int
    max_rows: int
    config: Config
    evidence: str

    @property
    def limits(self) -> str:
        return f"H <= {self.max_heads}, rows <= {self.max_rows}".replace(f"<= {ANY}", "any")


ANY = 2**31
SWEEP_H200 = "records/sparse_mla_decode_sweep_h200_20261129T151739Z.jsonl"
MEASURED = "records/sparse_mla_decode_h200_20261129T214906Z.jsonl"
COMPILED = "records/static/sparse_mla_20261129T213511Z.json"
"""No such GPU has been measured. Taken is what the compiler makes without a spill within the shared memory of a block
there, and, of several such, what was faster on the H200 with one block an SM (the sweep's "x1")."""


TUNED = "records/tune_attention_h200_20261130T021938Z.jsonl"
"""At batch 4 with 64 heads, where neither the sweep nor Gluon had looked so far."""


def _table(evidence: str, *rows: tuple[int, int, Config]) -> tuple[Bucket, ...]:
    return tuple(Bucket(*row, evidence) for row in rows)


TABLE = {
    "sm_80": _table(
        COMPILED,
        (16, 8, Config(16, 32, 4, 1, False, 2)),
        (16, ANY, Config(16, 64, 4, 1, False, 1)),
        (ANY, 2, Config(16, 32, 4, 1, True, 2)),
        (ANY, ANY, Config(16, 64, 4, 1, False, 1)),
    ),
    "sm_89": _table(
        COMPILED,
        (16, 8, Config(16, 32, 4, 1, False, 1)),
        (16, ANY, Config(16, 64, 8, 1, False, 1)),
        (ANY, 2, Config(16, 32, 4, 1, False, 1)),
        (ANY, ANY, Config(32, 32, 4, 1, True, 1)),
    ),
    "sm_90": (
        *_table(
            SWEEP_H200,
            (16, 8, Config(16, 32, 4, 1, False, 2)),
            (16, 24, Config(16, 64, 4, 1, False, 2)),
            (16, ANY, Config(16, 32, 4, 3, False, 2)),
            (ANY, 2, Config(16, 32, 4, 1, True, 2)),
        ),
        *_table(TUNED, (64, 4, Config(16, 128, 8, 1, False, 1))),
        *_table(SWEEP_H200, (ANY, 8, Config(16, 64, 4, 1, False, 2)), (ANY, ANY, Config(32, 32, 4, 1, True, 2))),
    ),
    "sm_120": _table(
        COMPILED,
        (16, 8, Config(16, 32, 4, 1, False, 1)),
        (16, ANY, Config(16, 64, 8, 1, False, 1)),
        (ANY, 2, Config(16, 32, 4, 1, True, 1)),
        (ANY, ANY, Config(32, 32, 4, 1, True, 1)),
    ),
}


GLUON_N32, GLUON_N64 = (Config(64, n, 4, 64 // n, False, 1, gluon=True) for n in (32, 64))
GLUON = {
    "sm_90": (
        *(bucket for bucket in TABLE["sm_90"] if bucket.max_heads == 16 and bucket.max_rows <= 24),
        *_table(MEASURED, (16, 64, GLUON_N32), (16, ANY, GLUON_N64)),
        *(bucket for bucket in TABLE["sm_90"] if bucket.max_heads > 16 and bucket.max_rows <= 4),
        *_table(MEASURED, (ANY, ANY, GLUON_N64)),
    ),
}
"""What the implementation `gluon` runs, where it has a kernel at all: with few rows `split_k`'s own is faster.

Elsewhere `gluon` is `split_k`.
"""
RELATIVE = {"sm_86": "sm_89", "sm_87": "sm_89", "sm_121": "sm_120"}

SIMT_BLOCK_N, SIMT_WARPS = 16, 8  # one of the stock kernel's three; faster ones exist and would be no baseline


def mma_config(heads: int, block_h: int = 32) -> Config:
    """The head-batched kernel without split as the campaign had it; tensor cores take 16 rows at least."""
    block_h = min(block_h, 16 if heads <= 16 else block_h)
    return Config(block_h, 32, 8 if block_h == 64 else 4, 1, True, 1)


SWEEP = (
    *(Config(16, 32, 4, stages, kq, 2) for stages in (1, 2, 3) for kq in (True, False)),
    Config(16, 64, 4, 1, False, 1),
    Config(16, 64, 4, 1, False, 2),
    Config(16, 64, 8, 1, False, 1),
    Config(16, 128, 8, 1, False, 1),
    *(Config(32, 32, 4, 1, kq, 2) for kq in (True, False)),
    Config(32, 32, 4, 2, True, 2),
    Config(32, 32, 4, 1, True, 1),
    Config(32, 32, 8, 1, True, 1),
    Config(32, 64, 8, 1, False, 1),
    Config(64, 32, 8, 1, True, 1),
)
"""What a sweep tries. Those with one block an SM stand for GPUs whose shared memory holds no more."""

CANDIDATES = {
    **{f"mma_bh{block_h}": ("mma", mma_config(64, block_h)) for block_h in (16, 32, 64)},
    **{f"split_k_{config.name}": ("split_k", config) for config in SWEEP},
    **{config.name: ("gluon", config) for config in (GLUON_N64, GLUON_N32)},
}
"""Names under which a sweep measures (implementation, config)."""


@dataclass(frozen=True)
class Plan:
    """What one call launches: `head_blocks * num_splits * rows` programs, and the fp32 workspace they need.

    pdl: the combine is launched early, and waits for the partial rows itself.
    """

    config: Config
    rows: int
    heads: int
    num_splits: int = 1
    pdl: bool = False

    @property
    def head_blocks(self) -> int:
        return -(-self.heads // self.config.block_h)

    @property
    def blocks(self) -> int:
        return self.head_blocks * self.num_splits * self.rows

    @property
    def partials(self) -> int:
        """Partial rows in the workspace; none without a split."""
        return 0 if self.num_splits == 1 else self.rows * self.num_splits * self.heads

    @property
    def workspace_numel(self) -> int:
        """fp32 elements: 512 values and a log-sum-exp for each partial row."""
        return self.partials * (512 + 1)


def buckets(arch: str) -> tuple[Bucket, ...]:
    """The table of an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    return arch_entry(TABLE, arch, RELATIVE)


def tuned_buckets(arch: str) -> tuple[Bucket, ...]:
    """What was tuned on this GPU, each for one number of heads."""
    own = choices.own("sparse_mla", arch) or {"entries": ()}
    return tuple(Bucket(e["heads"], e["max_rows"], Config(**e["config"]), own["evidence"]) for e in own["entries"])


def in_use(arch: str) -> tuple[Bucket, ...]:
    """All that `choose` may choose from."""
    return *GLUON.get(arch, ()), *tuned_buckets(arch), *buckets(arch)


def choose(arch: str, heads: int, rows: int, impl: str = "split_k") -> Bucket:
    """The entry for `heads` and `rows` on an architecture: what was tuned here for as many heads, or the table's.

    For `gluon` that of its own table, where the architecture has one; for `split_k` never a config of Gluon's.
    """
    gluon = GLUON.get(arch, ()) if impl == "gluon" else ()
    tuned = [b for b in tuned_buckets(arch) if heads == b.max_heads and (impl == "gluon" or not b.config.gluon)]
    return next(b for b in (*tuned, *gluon, *buckets(arch)) if heads <= b.max_heads and rows <= b.max_rows)


def split_plan(config: Config, *, rows: int, heads: int, widths: tuple[int, ...], arch: str, sms: int) -> Plan:
    """Split the positions until the grid fills the GPU once, and no further than one tile a split.

    Splits are evened out: 20 tiles over 8 splits of at most 3 tiles are 7 splits.
    """
    tiles = max(sum(-(-width // config.block_n) for width in widths), 1)
    blocks = Plan(config, rows, heads).blocks
    wanted = min(max(config.blocks_per_sm * sms // blocks, 1), tiles)
    share = -(-tiles // wanted)
    return Plan(config, rows, heads, num_splits=-(-tiles // share), pdl=arch in EARLY_LAUNCH)


def reachable(impl: str, *, heads: int, window: int, most: int, arch: str, sms: int) -> list[Plan]:
    """One plan, of one row, for each variant that some number of rows and up to `most` extra positions come to."""
    found = {}
    full = sms * max(bucket.config.blocks_per_sm for bucket in in_use(arch))
    for width in {0, most, *range(64, most, 64)} if most else {0}:
        for rows in range(1, full + 2):  # with more rows nothing is split any more
            config = choose(arch, heads, rows, impl).config
            made = split_plan(config, rows=rows, heads=heads, widths=(window, width), arch=arch, sms=sms)
            found.setdefault((made.config, made.num_splits), replace(made, rows=1))
    return list(found.values())
