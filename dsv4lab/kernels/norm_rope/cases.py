"""Named KV rows of a decode step, their inputs, the float64 reference, PyTorch's composition, the verdict, the work."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dsv4lab import kv_cache, numerics
from dsv4lab.kv_cache import GROUPS, HEAD_DIM, NOPE
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "norm_rope"
EPS = 1e-6
"""`rms_norm_eps` of the model."""
PAGE = DSV4_FLASH.page_size
POSITIONS = 1 << 16
TOKEN_BYTES = NOPE + 2 * (HEAD_DIM - NOPE)


@dataclass(frozen=True)
class Case:
    """B requests, one new token each."""

    name: str
    B: int


@dataclass
class Inputs:
    """Arguments of one `norm_rope` call, by its argument names."""

    kv: Tensor
    weight: Tensor
    freqs_cis: Tensor
    positions: Tensor
    slots: Tensor
    cache: Tensor


CASES = {case.name: case for case in (Case(f"b{B}", B) for B in (1, 7, 16, 32, 64, 128))}


def config(case: Case) -> dict:
    """What a record says of the case."""
    return {k: v for k, v in asdict(case).items() if k != "name"}


def rotated_bytes(case: Case) -> float:
    """Bytes that one set of inputs touches and no other set does."""
    return case.B * (2.0 * HEAD_DIM + 4.0 * (HEAD_DIM - NOPE) + TOKEN_BYTES + GROUPS)


def work(case: Case) -> Work:
    """One call: the row, its turn, the weights once, the stored token."""
    return Work(flops=8.0 * case.B * HEAD_DIM, bytes=rotated_bytes(case) + 2.0 * HEAD_DIM + 16.0 * case.B)


def frequencies(positions: int, device: torch.device | str, theta: float = 10_000.0) -> Tensor:
    """complex64 [positions, 32]: the turn of each pair at each position, without the stretching of long contexts."""
    width = HEAD_DIM - NOPE
    steps = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angles = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * steps
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def make_inputs(
    case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1, positions: int = POSITIONS
) -> list[Inputs]:
    """`sets` calls into one cache, no slot used twice. The same seed gives the same inputs on the same device kind."""
    generator, host = torch.Generator(device).manual_seed(seed), torch.Generator().manual_seed(seed)
    cache = kv_cache.allocate_main(-(-sets * case.B // PAGE) + 1, PAGE, device)
    slots = torch.randperm(len(cache) * PAGE, generator=host)[: sets * case.B].int().view(sets, case.B)
    places = torch.randint(0, positions, (sets, case.B), generator=host)
    freqs, calls = frequencies(positions, device), []
    for each in range(sets):
        kv = torch.randn(case.B, HEAD_DIM, device=device, generator=generator).bfloat16()
        weight = (1 + 0.1 * torch.randn(HEAD_DIM, device=device, generator=generator)).bfloat16()
        calls.append(Inputs(kv, weight, freqs, places[each].to(device), slots[each].to(device), cache))
    return calls


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in the dtype of x."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Pairs x [..., 64] turned by turn [..., 32, 2], (cos, sin), in the dtype of x."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turn.to(x.dtype).unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).flatten(-2)


def row(inputs: Inputs, turns: Tensor, dtype: torch.dtype, stored: torch.dtype, eps: float = EPS) -> Tensor:
    """[B, 512] before quantisation: norm and rotation in `dtype`, each left in `stored`, as separate kernels do.

    turns: fp32 [positions, 32, 2], `freqs_cis` as real numbers.
    """
    x = normalised(inputs.kv.to(dtype), inputs.weight.to(dtype), eps).to(stored)
    return torch.cat([x[..., :NOPE], rotated(x[..., NOPE:].to(dtype), turns[inputs.positions]).to(stored)], -1)


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(rows [B, 512],) in float64, not quantised."""
    return (row(inputs, torch.view_as_real(inputs.freqs_cis), torch.float64, torch.float64),)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """What PyTorch's composition stores, read back: the error of the layout, and of bf16 between the kernels."""
    batch = len(inputs.kv)
    cache, slots = kv_cache.allocate_main(1, batch, inputs.kv.device), torch.arange(batch, device=inputs.kv.device)
    turns = torch.view_as_real(inputs.freqs_cis)
    kv_cache.write_main(cache, slots, row(inputs, turns, torch.float32, torch.bfloat16))
    return (kv_cache.dequantise_main(cache, slots),)


def judge(inputs: Inputs, outputs: tuple[Tensor], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    """The verdict on (cache,): the rows that the call was to write, read back."""
    found = kv_cache.dequantise_main(outputs[0], inputs.slots)
    return numerics.check(found, expected[0], usual[0])


def flat_bytes(cache: Tensor) -> Tensor:
    """The storage of a cache from its first token to its last, uint8: what a compiled composition writes in place."""
    raw, last = cache.view(torch.uint8), (len(cache) - 1) * cache.stride(0)
    return raw.as_strided((last + cache.shape[1] * cache.shape[3],), (1,))


def composition(inputs: Inputs, turns: Tensor, flat: Tensor) -> None:
    """The same in PyTorch operations, to run eagerly or compiled: `flat` is `flat_bytes` of the cache, written.

    turns is real (see `row`): of complex numbers torch.compile would make kernels of their own.
    """
    nope, rope, scales = kv_cache.quantise_main(row(inputs, turns, torch.float32, torch.bfloat16))
    page, slot = inputs.cache.shape[1], inputs.slots.long()
    base = slot // page * inputs.cache.stride(0)
    token, footer = base + slot % page * TOKEN_BYTES, base + page * TOKEN_BYTES + slot % page * 8
    data = torch.cat([nope.view(torch.uint8), rope.contiguous().view(torch.uint8)], -1)
    flat[token[:, None] + torch.arange(TOKEN_BYTES, device=flat.device)] = data
    flat[footer[:, None] + torch.arange(GROUPS, device=flat.device)] = scales
