"""Which tiles are worth a try, by rule: SGLang's names for their parts, and what a GPU's shared memory holds.

A tile multiplies BLOCK_SIZE_M rows of activations by BLOCK_SIZE_N rows of a weight, BLOCK_SIZE_K columns a step; both
operands are FP8. BLOCK_SIZE_K is at most the 128 columns that share a scale: the kernels have one scale a step.
"""

from collections.abc import Iterator

KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
Tile = dict[str, int]

FEW = 64
"""Rows up to which the weights are what takes the time: decode. Beyond, tiles are square and large."""


def tile(*parts: int) -> Tile:
    """A config as SGLang's tables have it, from its six parts in the order of KEYS."""
    return dict(zip(KEYS, parts, strict=True))


def name(config: Tile) -> str:
    return "_".join(f"{letter}{config[key]}" for letter, key in zip("mnkgws", KEYS, strict=True))


def gemm(m: int, n: int, *, sms: int, shared: int) -> dict[str, Tile]:
    """For `m` rows of activations and a weight of `n` rows on a GPU with `sms` SMs and `shared` bytes a block."""
    rows = min(max(_power_of_2(m), 16), 128)
    heights = {rows, 64} | ({rows // 2} if rows > 32 else set())
    grid = [(bm, bn) for bm in sorted(heights) for bn in _widths(m)]
    most = 8 * sms if m <= FEW else 2**31  # decode: no more blocks than keep it busy
    filling = [t for t in grid if sms // 6 <= -(-m // t[0]) * -(-n // t[1]) <= most]
    return _all(filling or grid, m, shared)


def moe(tokens: int, *, experts: int, topk: int, shared: int) -> dict[str, Tile]:
    """For `tokens` tokens that choose `topk` of `experts`: a tile's rows all belong to one expert."""
    rows = min(max(_power_of_2(tokens * topk // experts), 16), 64)
    grid = [(bm, bn) for bm in sorted({rows, 2 * rows, 64}) for bn in _widths(2 * rows) if bn > 16]
    return _all(grid, tokens * topk / experts, shared)


def _widths(m: int) -> tuple[int, ...]:
    return (16, 32, 64, 128) if m <= FEW else (64, 128, 256)


def _all(grid: list[tuple[int, int]], rows: float, shared: int) -> dict[str, Tile]:
    found = {}
    for bm, bn in grid:
        for bk in (64, 128):
            for groups in (1, 8) if rows > bm and rows > FEW else (1,):
                for warps, stages in _depths(bm * bn, bk, rows):
                    if (bm + bn) * bk * (stages - 1) <= shared:  # one step may be in registers
                        config = tile(bm, bn, bk, groups, warps, stages)
                        found[name(config)] = config
    return found


def _depths(area: int, bk: int, rows: float) -> Iterator[tuple[int, int]]:
    """(num_warps, num_stages): few rows live on loads in flight, many on registers."""
    warps = [4] if area < 128 * 128 else [8] if area > 128 * 128 else [4, 8]
    stages = (3, 4) if rows > FEW else (2, 4, 6) if bk == 128 else (4, 8)
    yield from ((w, s) for w in warps for s in stages)


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
