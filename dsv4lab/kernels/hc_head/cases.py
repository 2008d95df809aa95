"""Named calls of the head's mix, their inputs, the float64 reference, PyTorch in fp32, the verdict, the work."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lab import numerics
from dsv4lab.kernels.hc_pre.cases import EPS, HC, mixes
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "hc_head"


@dataclass(frozen=True)
class Case:
    """T tokens of four residual streams."""

    name: str
    T: int
    hidden: int = DSV4_FLASH.hidden_size


@dataclass
class Inputs:
    """Arguments of one `hc_head` call, by its argument names."""

    x: Tensor
    hc_fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor


CASES = {case.name: case for case in (Case(f"t{T}", T) for T in (1, 4, 16, 32, 64, 2048))}


def config(case: Case) -> dict:
    """What a record says of the case."""
    return {"T": case.T, "hidden": case.hidden, "hc_mult": HC}


def rotated_bytes(case: Case) -> float:
    """Bytes that one set of inputs reads and no other set does."""
    return (2.0 * case.T + 4.0 * HC) * HC * case.hidden


def work(case: Case) -> Work:
    """One call: the streams and fp32 weights once, the hidden state once."""
    flops = 2.0 * case.T * HC * case.hidden * (HC + 2)
    return Work(flops=flops, bytes=rotated_bytes(case) + 2.0 * case.T * case.hidden)


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` calls, each with weights of its own. The same seed gives the same inputs on the same device kind."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    x, wide = (case.T, HC, case.hidden), HC * case.hidden
    return [Inputs(normal(*x).bfloat16(), normal(HC, wide) * wide**-0.5, normal(1), normal(HC)) for _ in range(sets)]


def composed(inputs: Inputs, dtype: torch.dtype, *, norm_eps: float = EPS, hc_eps: float = EPS) -> Tensor:
    """y [T, hidden] by PyTorch, all in `dtype`, and left in it."""
    x = inputs.x.to(dtype)
    mix = mixes(x.flatten(1), inputs.hc_fn.to(dtype), norm_eps)
    pre = (mix * inputs.hc_scale.to(dtype) + inputs.hc_base.to(dtype)).sigmoid() + hc_eps
    return (pre[:, :, None] * x).sum(1)


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(y [T, hidden],) in float64."""
    return (composed(inputs, torch.float64),)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """The same by PyTorch in fp32, rounded to bf16."""
    return (composed(inputs, torch.float32).bfloat16(),)


def judge(inputs: Inputs, outputs: tuple[Tensor], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    """The verdict on (y,) beside `reference` and `baseline`."""
    return numerics.check(outputs[0], expected[0], usual[0])
