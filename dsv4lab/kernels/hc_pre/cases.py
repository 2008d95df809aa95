"""Named calls of MHC-pre, their inputs, the float64 reference, PyTorch with a bf16 product, the verdict, the work."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from dsv4lab import numerics
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "hc_pre"
HC = DSV4_FLASH.hc_mult
MIX = DSV4_FLASH.mix_hc
EPS = 1e-6
"""`rms_norm_eps` and `hc_eps` of the model."""

Outputs = tuple[Tensor, Tensor, Tensor]

_PARTS = [HC, HC, HC * HC]


@dataclass(frozen=True)
class Case:
    """M tokens of four residual streams; norm: the RMSNorm that follows is part of the call."""

    name: str
    M: int
    hidden: int = DSV4_FLASH.hidden_size
    norm: bool = False


@dataclass
class Inputs:
    """Arguments of one `hc_pre` call, by its argument names."""

    x: Tensor
    hc_fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    norm_weight: Tensor | None = None


CASES = {
    case.name: case
    for case in (
        *(Case(f"m{M}", M) for M in (1, 4, 7, 16, 32, 64, 128, 1024)),
        *(Case(f"m{M}_norm", M, norm=True) for M in (1, 4, 16, 32, 64, 128, 2048)),
    )
}


def config(case: Case) -> dict:
    """What a record says of the case."""
    return {"M": case.M, "hidden": case.hidden, "hc_mult": HC, "norm": case.norm}


def rotated_bytes(case: Case) -> float:
    """Bytes that one set of inputs reads and no other set does, weights in bf16."""
    return 2.0 * (case.M + MIX) * HC * case.hidden


def work(case: Case) -> Work:
    """One call: the streams and fp32 weights once, the hidden state and the split once."""
    weights = (4.0 * MIX * HC + 2.0 * case.norm) * case.hidden
    outputs = case.M * (2.0 * case.hidden + 4.0 * HC * (1 + HC))
    flops = 2.0 * case.M * case.hidden * (HC * (MIX + 2) + 2 * case.norm)
    return Work(flops=flops, bytes=2.0 * case.M * HC * case.hidden + weights + outputs)


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` calls, each with weights of its own. The same seed gives the same inputs on the same device kind."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def weight() -> Tensor | None:
        return (1 + 0.25 * normal(case.hidden)).bfloat16() if case.norm else None

    x, wide = (case.M, HC, case.hidden), HC * case.hidden
    return [
        Inputs(normal(*x).bfloat16(), normal(MIX, wide) * wide**-0.5, normal(3), normal(MIX), weight())
        for _ in range(sets)
    ]


def mixes(x: Tensor, hc_fn: Tensor, eps: float) -> Tensor:
    """[M, 24]: the product of the RMS-normalised streams, x as [M, 4 * hidden], with hc_fn, in their dtype."""
    return linear(x, hc_fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def split(mix: Tensor, hc_scale: Tensor, hc_base: Tensor, eps: float, iters: int) -> Outputs:
    """(pre [M, 4], post [M, 4], comb [M, 4, 4]) of a mix [M, 24]; comb by `iters` rounds of Sinkhorn."""
    parts = zip(mix.split(_PARTS, 1), hc_scale, hc_base.split(_PARTS), strict=True)
    pre, post, comb = (part * scale + base for part, scale, base in parts)
    comb = comb.unflatten(1, (HC, HC)).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def normed(y: Tensor, weight: Tensor | None, eps: float = EPS) -> Tensor:
    """y [M, hidden] over its rows' root mean square and times `weight`, in its dtype; without a weight, y itself."""
    return y if weight is None else y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(y.dtype)


def composed(
    inputs: Inputs,
    dtype: torch.dtype,
    *,
    eps: float = EPS,
    hc_eps: float = EPS,
    norm_eps: float = EPS,
    iters: int = DSV4_FLASH.hc_sinkhorn_iters,
) -> Outputs:
    """(y, post, comb) by PyTorch, product and all in `dtype`; y is left in it. In float32, what SGLang forces."""
    x = inputs.x.to(dtype)
    mix = mixes(x.flatten(1), inputs.hc_fn.to(dtype), eps)
    pre, post, comb = split(mix, inputs.hc_scale.to(dtype), inputs.hc_base.to(dtype), hc_eps, iters)
    return normed((pre[:, :, None] * x).sum(1), inputs.norm_weight, norm_eps), post, comb


def reference(inputs: Inputs) -> Outputs:
    """(y [M, hidden], post [M, 4], comb [M, 4, 4]) in float64."""
    return composed(inputs, torch.float64)


def baseline(inputs: Inputs) -> Outputs:
    """The same by PyTorch with the product in bf16 and the rest in fp32: the error that the flip makes.

    y is rounded to bf16 before its norm and after it, as between two modules.
    """
    x = inputs.x.float()
    product = linear(inputs.x.flatten(1), inputs.hc_fn.bfloat16()).float()
    mix = product * torch.rsqrt(x.flatten(1).square().mean(-1, keepdim=True) + EPS)
    pre, post, comb = split(mix, inputs.hc_scale, inputs.hc_base, EPS, DSV4_FLASH.hc_sinkhorn_iters)
    y = (pre[:, :, None] * x).sum(1).bfloat16()
    return normed(y.float(), inputs.norm_weight).bfloat16(), post, comb


def judge(inputs: Inputs, outputs: Outputs, expected: Outputs, usual: Outputs) -> numerics.Check:
    """The verdict on (y, post, comb) beside `reference` and `baseline`: that on the one nearest to its tolerance."""
    checks = [numerics.check(*each) for each in zip(outputs, expected, usual, strict=True)]
    return max(checks, key=lambda check: check.error / check.tolerance)
