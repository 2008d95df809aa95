"""Named shapes of paged MQA logits: inputs, the float64 reference, PyTorch's bf16 result, the verdict, the work."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dsv4lab import kv_cache, numerics
from dsv4lab.kernels.rows import own_lengths
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "mqa_logits"
DIM = DSV4_FLASH.index_head_dim
TOKEN_BYTES = DIM + 4
PAGE = 64
MAX_1M = DSV4_FLASH.c4_positions(1_048_576)
"""Positions an indexer must be ready to score at a context of 1M tokens: 262,208."""
LENGTHS = ("full", "mixed")


@dataclass(frozen=True)
class Case:
    """One decode step of the indexer: B requests of next_n queries, up to max_len compressed positions.

    lengths: "full" gives every request `actual` positions, "mixed" anything from 0 to `actual`, both ends included.
    """

    name: str
    B: int
    max_len: int
    actual: int
    next_n: int = 1
    lengths: str = "full"
    H: int = DSV4_FLASH.index_n_heads

    def __post_init__(self):
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {LENGTHS}, got {self.lengths!r}")
        if not 0 <= self.actual <= self.max_len:
            raise ValueError(f"actual must be in 0..{self.max_len}, got {self.actual}")


@dataclass
class Inputs:
    """Arguments of one `fp8_paged_mqa_logits` call, by its argument names."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int


def _cases() -> dict[str, Case]:
    shapes = ((1, MAX_1M, 128), (32, MAX_1M, 128), (32, 2048, 128), (32, MAX_1M, 2048), (32, MAX_1M, 16384))
    shapes += ((8, MAX_1M, 262_144), (64, 2048, 2048), (1, MAX_1M, 262_144))
    cases = [Case(f"b{B}_max{max_len}_len{actual}", B, max_len, actual) for B, max_len, actual in shapes]
    contexts = [DSV4_FLASH.c4_positions(1024 * kilo) for kilo in (8, 16, 32, 64, 128, 256, 512)]
    cases += [Case(f"b32_max{max_len}_len128", 32, max_len, 128) for max_len in contexts]
    cases += [Case(f"b32_max{MAX_1M}_len{actual}", 32, MAX_1M, actual) for actual in (512, 65_536)]
    cases += [
        Case("b64_mixed", 64, MAX_1M, 262_144, lengths="mixed"),
        Case("b32_next2_len2048", 32, MAX_1M, 2048, next_n=2),
        Case("b5_next3_odd", 5, 1000, 777, next_n=3, lengths="mixed"),
    ]
    return {case.name: case for case in cases}


CASES = _cases()


def config(case: Case) -> dict:
    """What a record says of the case."""
    return {k: v for k, v in asdict(case).items() if k in ("B", "next_n", "max_len", "actual", "lengths")}


def _tokens(case: Case) -> float:
    return case.B * case.actual * (1.0 if case.lengths == "full" else 0.5)


def rotated_bytes(case: Case) -> float:
    """Bytes of the cache that one set of inputs reads and no other set does; "mixed" counts its expected share."""
    return _tokens(case) * TOKEN_BYTES


def work(case: Case) -> Work:
    """One call: each key once per request, each logit written once, queries, weights and page ids."""
    tokens, queries = _tokens(case), case.B * case.next_n
    written = 4.0 * tokens * case.next_n
    read = rotated_bytes(case) + 4.0 * tokens / PAGE + queries * case.H * (DIM + 4)
    return Work(flops=2.0 * tokens * case.next_n * case.H * DIM, bytes=read + written)


def _lengths(case: Case, generator: torch.Generator) -> Tensor:
    lengths = torch.full((case.B,), case.actual, dtype=torch.int32)
    if case.lengths == "mixed":
        lengths = torch.randint(0, case.actual + 1, (case.B,), generator=generator, dtype=torch.int32)
        lengths[0], lengths[-1] = case.actual, 0
    return lengths


def _pool(pages: int, device: torch.device | str, generator: torch.Generator) -> Tensor:
    cache = kv_cache.allocate_index(pages, PAGE, device)
    for slots in torch.arange(pages * PAGE, device=device).split(2**18):
        kv_cache.write_index(cache, slots, torch.randn(len(slots), DIM, device=device, generator=generator))
    return cache


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` calls over one pool, no page shared by two rows or sets: what one call reads, no other has read.

    Page ids past a row's own are stale: other rows'. The same seed gives the same inputs on the same device kind.
    """
    generator, host = torch.Generator(device).manual_seed(seed), torch.Generator().manual_seed(seed)
    lengths = [_lengths(case, host) for _ in range(sets)]
    used = [(length + PAGE - 1) // PAGE for length in lengths]
    pages = max(sum(int(u.sum()) for u in used), 1)
    cache = _pool(pages, device, generator)
    free = torch.randperm(pages, generator=host, dtype=torch.int32)
    width = -(-case.max_len // PAGE)
    calls = []
    for length, count in zip(lengths, used, strict=True):
        table = torch.randint(0, pages, (case.B, width), generator=host, dtype=torch.int32)
        own = torch.arange(width) < count[:, None]
        table[own], free = free[: int(count.sum())], free[int(count.sum()) :]
        q = torch.randn(case.B, case.next_n, case.H, DIM, device=device, generator=generator)
        weights = torch.randn(case.B * case.next_n, case.H, device=device, generator=generator) * case.H**-0.5
        calls.append(Inputs(q.to(kv_cache.FP8), cache, weights, length.to(device), table.to(device), case.max_len))
    return calls


def query_lengths(inputs: Inputs) -> Tensor:
    """Keys that each query sees, int32 [B, next_n], clamped to what the call has room for."""
    room = inputs.block_table.shape[1] * inputs.kv_cache.shape[1]
    return own_lengths(inputs.context_lens, *inputs.q.shape[:2]).clamp(0, min(inputs.max_context_len, room))


def _rows(inputs: Inputs) -> Iterator[tuple[int, int, Tensor]]:
    """(b, keys, slots [keys]) of every request with any."""
    page = inputs.kv_cache.shape[1]
    for b, n in enumerate(query_lengths(inputs).amax(1).tolist()):
        if n:
            t = torch.arange(n, device=inputs.q.device)
            yield b, n, inputs.block_table[b].long()[t // page] * page + t % page


def _logits(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """[B * next_n, max_context_len], products in `dtype`, the rest in fp32 or wider; -inf past each query's keys."""
    wide = torch.promote_types(dtype, torch.float32)
    B, next_n = inputs.q.shape[:2]
    out = torch.full((B, next_n, inputs.max_context_len), float("-inf"), dtype=wide, device=inputs.q.device)
    for b, n, slots in _rows(inputs):
        values, scale = kv_cache.read_index(inputs.kv_cache, slots)
        for j in range(next_n):
            x = torch.relu(values.to(dtype) @ inputs.q[b, j].to(dtype).T).to(wide)
            out[b, j, :n] = (x * inputs.weights[b * next_n + j].to(wide)).sum(1) * scale.to(wide)
    unseen = torch.arange(inputs.max_context_len, device=out.device) >= query_lengths(inputs)[..., None]
    return out.masked_fill_(unseen, float("-inf")).flatten(0, 1)


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(logits [B * next_n, max_context_len],) in float64, -inf past each query's keys."""
    return (_logits(inputs, torch.float64),)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """The same in PyTorch with a bf16 product, as SGLang's fallback has it from 0.5.16 on: the error bf16 makes."""
    return (_logits(inputs, torch.bfloat16),)


def judge(inputs: Inputs, outputs: tuple[Tensor, ...], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    """The verdict on (logits,) beside `reference` and `baseline`: only what a query sees counts."""
    seen, width = expected[0].isfinite(), outputs[0].shape[1]  # a capped implementation is no wider than its cap
    if seen[:, width:].any():
        raise ValueError(f"logits are {width} wide, and a query sees more keys")
    seen = seen[:, :width]
    return numerics.check(*(each[:, :width][seen] for each in (outputs[0], expected[0], usual[0])))
