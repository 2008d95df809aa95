"""Named products, their inputs, the reference, PyTorch's bf16 result, the verdict, the work."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dsv4lab import numerics
from dsv4lab.kernels.fp8_gemm.plans import AMAX_FLOOR, BLOCK
from dsv4lab.kv_cache import FP8, FP8_MAX
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "fp8_gemm"


@dataclass(frozen=True)
class Case:
    layer: str
    M: int
    N: int
    K: int

    @property
    def name(self) -> str:
        return f"n{self.N}_k{self.K}_m{self.M}"


@dataclass
class Inputs:
    """x e4m3 [M, K], x_scale fp32 [M, K / 128], w e4m3 [N, K], w_scale fp32 [N / 128, K / 128].

    unquantised: bf16 [M, K], of which x and x_scale are the quantisation.
    """

    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor
    unquantised: Tensor | None = None


def layers(tp: int) -> dict[tuple[int, int], str]:
    """Every weight [N, K] of a rank once, under the name of the first layer that has it."""
    found = {shape: layer for layer, shape in reversed(DSV4_FLASH.fp8_linears(tp).items())}
    return dict(reversed(found.items()))


CASES = {
    case.name: case
    for tp in (1, 8)
    for (N, K), layer in layers(tp).items()
    for M in (1, 16, 32, 64)
    for case in [Case(layer, M, N, K)]
}


def random_fp8(*shape: int, generator: torch.Generator) -> Tensor:
    """e4m3 of all signs and of magnitudes below 2, none of them NaN."""
    bits = torch.empty(shape, dtype=torch.uint8, device=generator.device).random_(generator=generator)
    return bits.bitwise_and_(0xBF).view(FP8)


def random_scale(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, device=generator.device, generator=generator) / 64 + 1 / 64


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., K], fp32 scales [..., K / 128]) of bf16 x [..., K], as `fp8_linear` says, divided as IEEE does."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    amax = groups.abs().nan_to_num(0.0, posinf=float("inf")).amax(-1, keepdim=True).clamp_min(AMAX_FLOOR)
    scaled = (groups * (torch.full_like(amax, FP8_MAX) / amax)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.nan_to_num(-FP8_MAX).flatten(-2).to(FP8), amax.squeeze(-1) * (1 / FP8_MAX)


def dequantised(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 of `x` [..., R, K], with a scale a row and 128 columns, or one for 128 rows and 128 columns."""
    wide = scale.repeat_interleave(BLOCK, -1)
    if scale.shape[-2] != x.shape[-2]:
        wide = wide.repeat_interleave(BLOCK, -2)
    return x.float() * wide


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` weights, with an activation each: e4m3 values times a power of two, which any division quantises alike."""
    g = torch.Generator(device).manual_seed(seed)
    found = []
    for _ in range(sets):
        bits = torch.empty(case.M, case.K // BLOCK, BLOCK, dtype=torch.uint8, device=device).random_(generator=g)
        bits[..., 0] = 0x7E  # a group holds the largest
        values = torch.where(bits & 0x7F == 0x7F, 0x7E, bits).view(FP8).float()
        powers = torch.randint(-9, -5, values.shape[:-1], device=device, generator=g)
        x = torch.ldexp(values, powers[..., None]).flatten(1).bfloat16()
        w = random_fp8(case.N, case.K, generator=g)
        found.append(Inputs(*quantised(x), w, random_scale(case.N // BLOCK, case.K // BLOCK, generator=g), x))
    return found


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(out,) in float64, of the dequantised operands."""
    x, w = dequantised(inputs.x, inputs.x_scale), dequantised(inputs.w, inputs.w_scale)
    return (x.double() @ w.double().T,)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """(out,) of the dequantised operands in bf16."""
    return (dequantised(inputs.x, inputs.x_scale).bfloat16() @ dequantised(inputs.w, inputs.w_scale).bfloat16().T,)


def judge(inputs: Inputs, outputs: tuple[Tensor], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    return numerics.check(outputs[0], expected[0], usual[0])


def rotated_bytes(case: Case) -> float:
    return float(case.N * case.K)


def work(case: Case) -> Work:
    """Operands once, the output once."""
    return Work(2.0 * case.M * case.N * case.K, case.N * case.K + case.M * (case.K + 2.0 * case.N))


def config(case: Case) -> dict:
    return asdict(case)
