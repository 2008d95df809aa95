"""Shares of K, rows a block and tiles of y: chosen per architecture by rows, never by the data."""

from dataclasses import dataclass

from dsv4lab.hardware import arch_entry


@dataclass(frozen=True)
class Config:
    """A block takes `chunk` of K of `rows` rows to their sums, another `tile` of a row of y; each has one warp."""

    chunk: int
    rows: int
    tile: int

    @property
    def name(self) -> str:
        return f"c{self.chunk}_r{self.rows}_d{self.tile}"

    def splits(self, K: int) -> int:
        return -(-K // self.chunk)


@dataclass(frozen=True)
class Bucket:
    """Calls of up to max_t rows; `evidence` is the file that says why."""

    max_t: int
    config: Config
    evidence: str

    @property
    def limits(self) -> str:
        return "any T" if self.max_t == ANY else f"T <= {self.max_t}"


ANY = 1 << 30
COMPILED = "records/static/hc_head_20261130T050403Z.json"
"""No such GPU has been measured: blocks enough for the SMs, weights read once for more rows where these are many."""
MEASURED = "records/hc_head_sweep_h200_20261130T052634Z.jsonl"
"""In which they are the best, or within 5% of it."""


def _buckets(evidence: str) -> tuple[Bucket, ...]:
    configs = (
        (4, Config(256, 1, 256)),
        (16, Config(256, 2, 256)),
        (128, Config(256, 4, 512)),
        (ANY, Config(512, 8, 1024)),
    )
    return tuple(Bucket(*each, evidence) for each in configs)


TABLE = dict.fromkeys(("sm_80", "sm_89", "sm_120"), _buckets(COMPILED)) | {"sm_90": _buckets(MEASURED)}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}

SWEEP = (
    *(Config(chunk, rows, 256) for chunk in (128, 256, 512) for rows in (1, 2, 4, 8)),
    *(Config(256, rows, 512) for rows in (1, 2, 4)),
    *(Config(chunk, rows, 1024) for chunk, rows in ((256, 4), (256, 8), (256, 16), (512, 8))),
)


def buckets(arch: str) -> tuple[Bucket, ...]:
    """The table's entries for an architecture like "sm_120"; an unlisted one takes its nearest relative's."""
    return arch_entry(TABLE, arch, RELATIVE)


def choose(arch: str, T: int) -> Bucket:
    """The first entry that holds T rows."""
    return next(bucket for bucket in buckets(arch) if T <= bucket.max_t)
