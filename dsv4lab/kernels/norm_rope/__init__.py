"""One token's KV row, from the projection to the cache, in one launch: RMSNorm, RoPE, cast, paged write.

    x = kv / sqrt(mean(kv^2) + eps) * weight;  x[448:] turned in pairs (2i, 2i + 1) by freqs_cis[position]
    cache[slot] = x[:448] in e4m3 with a power-of-two scale for each 64 (`dsv4lab.kv_cache`), x[448:] in bf16

kv is bf16 [B, 512]; everything is fp32 until it is stored, so that each value is rounded once. It is a row of 1,024
bytes in and 583 out a request: its time is that of a launch and of two dependent trips to memory. SGLang does this in
kernels of its own (`fused_norm_rope_v2.cuh`); the lab wants it beside what torch.compile makes of the same operations.
Deterministic, bitwise the same in every run.

Implementations: `triton`; `compiled`: the composition in PyTorch under torch.compile, warmed up; `torch`: eagerly.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lab import kv_cache
from dsv4lab.hardware import arch_entry
from dsv4lab.kernels.arguments import check_contiguous, check_start
from dsv4lab.kernels.launch import launch, target, warm
from dsv4lab.kernels.norm_rope.cases import (
    CASES,
    EPS,
    EXPERIMENT,
    HEAD_DIM,
    NOPE,
    PAGE,
    Case,
    Inputs,
    baseline,
    composition,
    config,
    flat_bytes,
    frequencies,
    judge,
    make_inputs,
    reference,
    rotated_bytes,
    row,
    work,
)
from dsv4lab.kernels.norm_rope.tiles import norm_rope_kernel

__all__ = [
    "CANDIDATES", "CASES", "EPS", "EXPERIMENT", "IMPLEMENTATIONS", "TABLE", "Case", "Choice", "Inputs", "baseline",
    "composition", "config", "describe", "flat_bytes", "frequencies", "judge", "launches", "make_inputs", "norm_rope",
    "notes", "prepare", "reference", "rotated_bytes", "row", "static_launches", "warm_up", "work",
]  # fmt: skip

IMPLEMENTATIONS = ("torch", "compiled", "triton")


@dataclass(frozen=True)
class Choice:
    """Warps a row on an architecture; `evidence` is the file that says why."""

    num_warps: int
    evidence: str


COMPILED = "records/static/norm_rope.json"
"""No such GPU has been measured: eight values a thread, which is one 16-byte load."""

MEASURED = "records/norm_rope_h200_20261129T203640Z.jsonl"
"""As it is; other warps have not been timed."""

TABLE = {arch: Choice(2, COMPILED) for arch in ("sm_80", "sm_89", "sm_120")} | {"sm_90": Choice(2, MEASURED)}
RELATIVE = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_121": "sm_120"}
CANDIDATES = {f"triton_w{warps}": ("triton", warps) for warps in (1, 2, 4)}


def _check(call: Inputs) -> None:
    kv, device = call.kv, call.kv.device
    if kv.dtype != torch.bfloat16 or kv.ndim != 2 or kv.shape[1] != HEAD_DIM or kv.stride(1) != 1:
        raise ValueError(
            f"kv must be bfloat16 [B, {HEAD_DIM}] with dense rows, got {kv.dtype} {list(kv.shape)} strides "
            f"{kv.stride()}"
        )
    if kv.data_ptr() % 16 or (len(kv) > 1 and kv.stride(0) % 8):
        raise ValueError(f"kv must have rows at multiples of 16 bytes, got stride {kv.stride(0)} at {kv.data_ptr():#x}")
    kv_cache.check_pages("cache", call.cache, 584, device)
    whole, half = (torch.int32, torch.int64), (torch.bfloat16, torch.float32)
    wanted = {
        "weight": (half, (HEAD_DIM,)), "positions": (whole, (len(kv),)), "slots": (whole, (len(kv),)),
        "freqs_cis": ((torch.complex64,), (len(call.freqs_cis), (HEAD_DIM - NOPE) // 2)),
    }  # fmt: skip
    for name, (dtypes, shape) in wanted.items():
        check_contiguous(name, getattr(call, name), dtypes, shape, device)
    for name in ("weight", "freqs_cis"):
        check_start(name, getattr(call, name))
    if not len(call.freqs_cis):
        raise ValueError("freqs_cis must have a position at least, got none")


def launches(call: Inputs, *, eps: float, num_warps: int) -> list[tuple]:
    """[(kernel, grid, arguments)] of one call; nothing is launched."""
    B, (pages, page) = len(call.kv), call.cache.shape[:2]
    arguments = dict(
        kv=call.kv, stride8=(call.kv.stride(0) if B > 1 else HEAD_DIM) // 8, weight=call.weight,
        freqs=torch.view_as_real(call.freqs_cis), positions=call.positions, position_count=len(call.freqs_cis),
        slots=call.slots, cache=call.cache.view(torch.uint8), page_stride=call.cache.stride(0),
        num_slots=pages * page, eps=eps, PAGE=page, num_warps=num_warps,
    )  # fmt: skip
    return [(norm_rope_kernel, (B,), arguments)]


def norm_rope(
    kv: Tensor,
    weight: Tensor,
    freqs_cis: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    eps: float = EPS,
    num_warps: int | None = None,
) -> None:
    """Writes the normalised, rotated, quantised rows of kv to their slots of the main cache.

    kv: bf16 [B, 512] with dense rows at multiples of 16 bytes, a strided view or not. weight: bf16 or fp32 [512].
    freqs_cis: complex64 [positions, 32]. positions: int32 or int64 [B], clamped on the device to what freqs_cis has.
    slots: int32 or int64 [B], page * page_size + offset; one out of range writes nothing; of equal ones any wins.
    cache: uint8 or float8_e4m3fn view [pages, page, 1, 584], pages at multiples of 16 bytes. num_warps: overrides the
    table's choice.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    call = Inputs(kv, weight, freqs_cis, positions, slots, cache)
    _check(call)
    if len(kv):
        warps = num_warps or _choice(target(kv.device)[0]).num_warps
        for each in launches(call, eps=eps, num_warps=warps):
            launch(*each)


def _choice(arch: str) -> Choice:
    return arch_entry(TABLE, arch, RELATIVE)


@functools.cache
def _compiled() -> Callable[[Inputs, Tensor, Tensor], None]:
    return torch.compile(composition, dynamic=False, fullgraph=True)


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`, and returns (cache,)."""
    impl, warps = CANDIDATES.get(impl, (impl, None))
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton":
        return lambda: (norm_rope(**vars(inputs), num_warps=warps), inputs.cache)[1:]
    call = composition if impl == "torch" else _compiled()
    turns, flat = torch.view_as_real(inputs.freqs_cis), flat_bytes(inputs.cache)
    return lambda: (call(inputs, turns, flat), inputs.cache)[1:]


def _variants(
    device: torch.device | str, page: int, weights: torch.dtype, whole: torch.dtype, arch: str
) -> Iterator[tuple[str, list[tuple]]]:
    (call,) = make_inputs(Case("smallest", 2), device=device, positions=1)
    call.cache = kv_cache.allocate_main(1, page, device)
    call.weight, call.slots, call.positions = call.weight.to(weights), call.slots.to(whole), call.positions.to(whole)
    yield f"page {page}", launches(call, eps=EPS, num_warps=_choice(arch).num_warps)


def warm_up(
    device: torch.device | str = "cuda", *, page_size: int = PAGE, weights: torch.dtype = torch.bfloat16,
    whole: torch.dtype = torch.int64,
) -> None:  # fmt: skip
    """Compile and load the variant for these dtypes, `whole` that of positions and slots, whatever B."""
    device = torch.device(device)
    for _, steps in _variants(device, page_size, weights, whole, target(device)[0]):
        for each in steps:
            warm(*each)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, warps = CANDIDATES.get(impl, (impl, None))
    if impl != "triton":
        return {}
    return {"variant": f"w{warps or _choice(target(inputs.kv.device)[0]).num_warps}"}


def describe(arch: str) -> list[str]:
    """What `triton` would run on an architecture, and the evidence for it."""
    choice = _choice(arch)
    return [f"triton, any B: {choice.num_warps} warps a row ({choice.evidence})"]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of an architecture, on CPU tensors."""
    return _variants("cpu", PAGE, torch.bfloat16, torch.int64, arch)
