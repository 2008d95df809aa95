"""MHC-pre: four residual streams in, the hidden state a layer works on and the mix of its update out, in two launches.

For each token, x [4, hidden] in bf16 and 24 = 4 + 4 + 16 learnt rows of weights, hc_fn [24, 4 * hidden]:

    mix  = (hc_fn . x) / sqrt(mean(x^2) + rms_eps), its three parts each times hc_scale[part], plus hc_base
    pre  = sigmoid(mix[0:4]) + hc_eps            post = 2 * sigmoid(mix[4:8])
    comb = softmax over rows of mix[8:24] as 4 x 4, + hc_eps; then rows and columns in turn over their sums + hc_eps
    y    = sum over the streams j of pre[j] * x[j]; with norm_weight, y / sqrt(mean(y^2) + norm_eps) * norm_weight; bf16

This is `DeepseekV4DecoderLayer.hc_pre` of SGLang 0.5.14, run before attention and before the experts of each of 43
layers; on sm_120 it casts x to fp32, multiplies in FP32 without tensor cores, and launches some eight kernels, the
RMSNorm that follows not counted. Here one kernel takes the products with all 24 rows and the sum of squares in one pass
over x (`skinny_gemm`'s), the other ends a row's sums, reads x again, from L2, and normalises y before it is rounded.
fp32 weights count with 16 of their 24 bits, sums are fp32. Deterministic: bitwise the same in every run.

Implementations: `split_k`, ours on fp32 weights; `split_k_bf16`, ours on weights cast to bf16 once; `torch`: the
composition that SGLang forces, in eager PyTorch. Its split of the mix is a hundred small launches, which SGLang has in
one TileLang kernel: the peer `stock_mhc` is the mark, not `torch`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
import triton
from torch import Tensor

from dsv4lab.kernels.hc_pre import checks
from dsv4lab.kernels.hc_pre.cases import (
    CASES,
    EPS,
    EXPERIMENT,
    HC,
    MIX,
    Case,
    Inputs,
    Outputs,
    baseline,
    composed,
    config,
    judge,
    make_inputs,
    mixes,
    normed,
    reference,
    rotated_bytes,
    split,
    work,
)
from dsv4lab.kernels.hc_pre.plans import SWEEP, TABLE, Config, buckets, choose
from dsv4lab.kernels.hc_pre.tiles import mix_kernel
from dsv4lab.kernels.launch import INTERPRETED, launch, target, warm
from dsv4lab.kernels.skinny_gemm import Dot, Split, first_launch
from dsv4lab.kernels.skinny_gemm.checks import check_flat
from dsv4lab.model import DSV4_FLASH

__all__ = [
    "CANDIDATES", "CASES", "EPS", "EXPERIMENT", "IMPLEMENTATIONS", "TABLE", "Case", "Config", "Dot", "Inputs", "Split",
    "baseline", "composed", "config", "describe", "empty", "hc_pre", "judge", "launches", "make_inputs", "mixes",
    "normed", "notes", "prepare", "reference", "rotated_bytes", "split", "static_launches", "warm_up", "work",
    "workspace_numel",
]  # fmt: skip

IMPLEMENTATIONS = ("torch", "split_k", "split_k_bf16")
CANDIDATES = {f"split_k_{c.name}": ("split_k", c) for c in SWEEP}

_WIDTH = 32
"""Columns of a row of sums: 24, the sum of squares, padding."""


def workspace_numel(M: int, hidden: int, config: Config) -> int:
    """Elements of the fp32 workspace that a call of M tokens needs."""
    if isinstance(config.sums, Split):
        return config.sums.partials(M, _WIDTH, HC * hidden)
    return M * _WIDTH


def empty(M: int, hidden: int, device: torch.device, config: Config | None = None) -> tuple[Outputs, Tensor]:
    """(results, workspace) of a call of M tokens, for the table's config or another."""
    config = config or choose(target(device)[0], M).config
    y = torch.empty(M, hidden, dtype=torch.bfloat16, device=device)
    post, comb = torch.empty(M, HC, device=device), torch.empty(M, HC, HC, device=device)
    return (y, post, comb), torch.empty(workspace_numel(M, hidden, config), device=device)


def launches(
    call: Inputs, y: Tensor, post: Tensor, comb: Tensor, workspace: Tensor, *, rms_eps: float, hc_eps: float,
    norm_eps: float, iters: int, weights_ready: bool, config: Config,
) -> list[tuple]:  # fmt: skip
    """[(kernel, grid, arguments)] of one call, in order; nothing is launched."""
    M, _, hidden = call.x.shape
    K, sums, pdl = HC * hidden, config.sums, config.pdl and not INTERPRETED
    splits = sums.splits(K) if isinstance(sums, Split) else 1
    ending = dict(out=workspace, out_stride=_WIDTH, scale=1.0, bias=workspace, HAS_BIAS=False)
    first = first_launch(
        call.x.flatten(1), call.hc_fn, workspace, ending, sums, squares=True, pdl=pdl, ahead=pdl and weights_ready
    )
    norm, weight = call.norm_weight is not None, call.norm_weight
    mix = dict(
        x=call.x, x_stride8=(call.x.stride(0) if M > 1 else K) // 8, partials=workspace, splits=splits,
        scale=call.hc_scale, base=call.hc_base, weight=weight if norm else y, y=y, post=post, comb=comb, M=M,
        rms_eps=rms_eps, hc_eps=hc_eps, norm_eps=norm_eps, HIDDEN=hidden, ITERS=iters,
        BLOCK_H=triton.next_power_of_2(hidden), BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_M=sums.block_m if isinstance(sums, Split) else 1, ROWS=config.rows, NORM=norm, PDL=pdl,
        APPROXIMATE=not INTERPRETED, num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip
    return [first, (mix_kernel, (-(-M // config.rows) + M,), mix)]


def hc_pre(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    rms_eps: float = EPS,
    hc_eps: float = EPS,
    norm_eps: float = EPS,
    sinkhorn_iters: int = DSV4_FLASH.hc_sinkhorn_iters,
    weights_ready: bool = False,
    out: Outputs | None = None,
    workspace: Tensor | None = None,
    config: Config | None = None,
) -> Outputs:
    """(y [M, hidden] bf16, post [M, 4] fp32, comb [M, 4, 4] fp32); see the module for the formula.

    The first four arguments are those of SGLang's method, in its order; norm_weight and norm_eps are `weight` and
    `variance_epsilon` of its `norm`, and its fourth result says whether there was one (`serving.linears`).

    x: bf16 [M, 4, hidden], dense but for its rows, which start at multiples of 16 bytes; hidden a multiple of 256; any
      M, 0 included.
    hc_fn: fp32 [24, 4 * hidden], as the checkpoint has it, or bf16; hc_scale: fp32 [3]; hc_base: fp32 [24]. Contiguous.
    norm_weight: bf16 or fp32 [hidden], contiguous; without it y is not normalised.
    weights_ready: hc_fn is not what the kernel launched before this call writes, as no weight of a model is: it may be
      read before that kernel has ended.
    out: the three results, contiguous. workspace: contiguous fp32, at least `workspace_numel(M, hidden, config)`, any
      contents. Both are allocated if absent. config: overrides the table's choice.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    call = Inputs(x, hc_fn, hc_scale, hc_base, norm_weight)
    checks.check_call(call)
    if sinkhorn_iters < 1:
        raise ValueError(f"sinkhorn_iters must be at least 1, got {sinkhorn_iters}")
    (M, _, hidden), device = x.shape, x.device
    config = config or choose(target(device)[0], M).config
    if out is None or workspace is None:
        made = empty(M, hidden, device, config)
        out, workspace = made[0] if out is None else out, made[1] if workspace is None else workspace
    checks.check_outputs(out, M, hidden, device)
    check_flat("workspace", workspace, torch.float32, workspace_numel(M, hidden, config), device)
    if M:
        numbers = dict(rms_eps=rms_eps, hc_eps=hc_eps, norm_eps=norm_eps, iters=sinkhorn_iters)
        for each in launches(call, *out, workspace, **numbers, weights_ready=weights_ready, config=config):
            launch(*each)
    return out


def _forced(inputs: Inputs) -> Outputs:
    y, post, comb = composed(replace(inputs, norm_weight=None), torch.float32)
    return normed(y.bfloat16().float(), inputs.norm_weight).bfloat16(), post, comb


def prepare(impl: str, inputs: Inputs) -> Callable[[], Outputs]:
    """A call that only launches, of an implementation or one of `CANDIDATES`.

    It allocates as a serving engine does: from the pool of the graph that captures it.
    """
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl == "torch":
        return lambda: _forced(inputs)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "split_k_bf16":
        inputs = replace(inputs, hc_fn=inputs.hc_fn.bfloat16())
        if inputs.x.is_cuda:
            torch.cuda.synchronize()  # the cast has ended before the first call
    return lambda: hc_pre(**vars(inputs), weights_ready=True, config=config)


def _variants(
    hidden: int, iters: int, weights: torch.dtype, norm: torch.dtype, device: torch.device | str, arch: str,
    uses: Iterable[tuple[bool, bool]],
) -> Iterator[tuple[str, list[tuple]]]:  # fmt: skip
    """(name, launches) of each entry of the table in each of `uses`: with a norm or without, weights_ready or not."""
    for bucket, (has_norm, ready) in product(buckets(arch), uses):
        M = min(bucket.max_m, 16)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        call = Inputs(
            empty(M, HC, hidden, dtype=torch.bfloat16), empty(MIX, HC * hidden, dtype=weights), empty(3), empty(MIX),
            empty(hidden, dtype=norm) if has_norm else None,
        )  # fmt: skip
        out = empty(M, hidden, dtype=torch.bfloat16), empty(M, HC), empty(M, HC, HC)
        workspace = empty(workspace_numel(M, hidden, bucket.config))
        numbers = dict(rms_eps=EPS, hc_eps=EPS, norm_eps=EPS, iters=iters, weights_ready=ready)
        name = f"{bucket.limits}: {bucket.config.name}{', norm' * has_norm}{', ready' * ready}"
        yield name, launches(call, *out, workspace, **numbers, config=bucket.config)


def warm_up(
    device: torch.device | str = "cuda", *, hidden: int = DSV4_FLASH.hidden_size,
    sinkhorn_iters: int = DSV4_FLASH.hc_sinkhorn_iters, weights: torch.dtype = torch.float32,
    norm: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    """Compile and load every variant that calls with these shapes can need, whatever M, with and without a norm."""
    device = torch.device(device)
    uses = product((False, True), repeat=2)
    for _, steps in _variants(hidden, sinkhorn_iters, weights, norm, device, target(device)[0], uses):
        for each in steps:
            warm(*each)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl == "torch":
        return {}
    return {"variant": (config or choose(target(inputs.x.device)[0], len(inputs.x)).config).name}


def describe(arch: str) -> list[str]:
    """One line for each bucket: what `split_k` would run on an architecture, and the evidence for it."""
    return [f"split_k, {b.limits}: {b.config.name} ({b.evidence})" for b in buckets(arch)]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of every table entry of an architecture, on CPU tensors, by the name of the entry."""
    hidden, iters = DSV4_FLASH.hidden_size, DSV4_FLASH.hc_sinkhorn_iters
    uses = (False, False), (True, True)
    return _variants(hidden, iters, torch.float32, torch.bfloat16, "cpu", arch, uses)
