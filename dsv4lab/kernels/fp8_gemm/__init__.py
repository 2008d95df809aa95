"""A block-FP8 linear layer of a decode step, with few rows: e4m3 operands, fp32 sums, bf16 out, K split over blocks.

    out[m, n] = sum over 128-wide chunks c of K: x_scale[m, c] * w_scale[n // 128, c] * <x[m, c], w[n, c]>

It takes the operands of SGLang's `w8a8_block_fp8_matmul_triton`, which runs such layers where DeepGEMM has no kernel
(sm_120, sm_89): one block for 64 x 128 outputs, so that a weight of 4096 rows keeps 32 SMs busy and leaves the others
idle. Here up to `MAX_M` rows are a tile, and K is split until all SMs read. Each weight is read once; partial sums
stay in L2. Deterministic: bitwise the same in every run, whatever the other rows hold.

`fp8_linear` takes the activations in bf16, as SGLang's `triton_w8a8_block_fp8_linear` does. They are quantised by the
blocks of the product as they need them, each its own share, or, with more rows, by a kernel in front.

Implementations: `split_k`, ours; `split_k_linear`, ours with the quantisation; `bf16`: cuBLAS on operands that were
dequantised before, with twice the bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton.language as tl
from torch import Tensor

from dsv4lab.hardware import EARLY_LAUNCH, sms_of
from dsv4lab.kernels.arguments import check_start
from dsv4lab.kernels.fp8_gemm import checks
from dsv4lab.kernels.fp8_gemm.cases import (
    CASES,
    EXPERIMENT,
    Case,
    Inputs,
    baseline,
    config,
    dequantised,
    judge,
    layers,
    make_inputs,
    quantised,
    random_fp8,
    random_scale,
    reference,
    rotated_bytes,
    work,
)
from dsv4lab.kernels.fp8_gemm.checks import takes
from dsv4lab.kernels.fp8_gemm.plans import BLOCK, MAX_M, SWEEP, TABLE, Config, Plan, buckets, choose, plan
from dsv4lab.kernels.fp8_gemm.tiles import fp8_gemm_combine_kernel, fp8_gemm_kernel, fp8_gemm_quantise_kernel
from dsv4lab.kernels.launch import INTERPRETED, launch, target, warm
from dsv4lab.kernels.skinny_gemm.checks import check_flat
from dsv4lab.kv_cache import FP8

__all__ = [
    "BLOCK", "CANDIDATES", "CASES", "EXPERIMENT", "IMPLEMENTATIONS", "MAX_M", "TABLE", "Case", "Config", "Inputs",
    "baseline", "config", "dequantised", "describe", "empty", "fp8_gemm", "fp8_linear", "judge", "launches", "layers",
    "linear_launches", "make_inputs", "notes", "plan_for", "prepare", "quantised", "random_fp8", "random_scale",
    "reference", "rotated_bytes", "static_launches", "takes", "warm_up", "work",
]  # fmt: skip

_OURS = ("split_k", "split_k_linear")
IMPLEMENTATIONS = ("bf16", *_OURS)
_ELEMENTS = 256
"""Outputs that a program of the combine adds up: 32 partial sums a thread are on their way at once."""
_GROUPS = 8
"""Groups of 128 that a program quantises: one load of 16 bytes a thread."""
CANDIDATES = {f"split_k_{c.name}": ("split_k", c) for c in SWEEP if not c.fused}
CANDIDATES |= {f"split_k_linear_{c.name}": ("split_k_linear", c) for c in SWEEP}


def plan_for(M: int, N: int, K: int, device: torch.device, config: Config | None = None) -> Plan:
    """The plan of a call on a device, by its table's config or by another."""
    arch, sms = target(device)
    return plan(M, N, K, config or choose(arch, M, N).config, sms)


def _floats(plan: Plan, M: int, N: int, K: int, linear: bool) -> list[int]:
    """fp32 elements of a workspace's parts: partial tiles and, where a kernel quantises x, that in e4m3 and scales."""
    return [plan.partials(M, N)] + [M * K // 4, M * K // BLOCK] * (linear and not plan.config.fused)


def empty(
    M: int, N: int, K: int, device: torch.device, config: Config | None = None, *, linear: bool = False
) -> tuple[Tensor, Tensor]:
    """(result, workspace) of a call of `fp8_gemm`, or of `fp8_linear`."""
    out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
    floats = sum(_floats(plan_for(M, N, K, device, config), M, N, K, linear)) if M else 0
    return out, torch.empty(floats, device=device)


def launches(
    call: Inputs, out: Tensor, workspace: Tensor, *, plan: Plan, arch: str, ahead: bool = False
) -> list[tuple]:
    """[(kernel, grid, arguments)] of one call, in order; nothing is launched.

    call: with x in bf16 every block quantises it. ahead: the first may be launched while what makes x still runs.
    """
    (M, K), N, c, split = call.x.shape, len(call.w), plan.config, plan.splits > 1
    pdl = split and arch in EARLY_LAUNCH and not INTERPRETED
    columns, rows = plan.tiles(M, N)
    stride = (call.x.stride(0) if M > 1 else K) * call.x.element_size()
    arguments = dict(
        x=call.x, x_stride=stride // 16, x_scale=call.x_scale, w=call.w,
        w_scale=call.w_scale, out=workspace if split else out, M=M, steps=plan.steps, splits=plan.splits, N=N, K=K,
        BLOCK_M=plan.block_m, BLOCK_N=c.block_n, STAGES=c.num_stages, SPLIT=split, PDL=pdl,
        AHEAD=ahead, SWAP=c.swap, COMPUTE=tl.float32 if INTERPRETED else tl.float8e4nv, num_warps=c.num_warps,
        launch_pdl=ahead,
    )  # fmt: skip
    first = fp8_gemm_kernel, (columns, plan.splits, rows), arguments
    if not split:
        return [first]
    parts = -(-min(M, plan.block_m) * c.block_n // _ELEMENTS)
    combine = dict(
        partials=workspace, out=out, M=M, N=N, splits=plan.splits, BLOCK_M=plan.block_m, BLOCK_N=c.block_n,
        BLOCK_E=_ELEMENTS, GROUP=4, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return [first, (fp8_gemm_combine_kernel, (parts, columns, rows), combine)]


def linear_launches(
    x: Tensor, w: Tensor, w_scale: Tensor, out: Tensor, workspace: Tensor, *, plan: Plan, arch: str
) -> list[tuple]:
    """`launches` of a call of `fp8_linear`: unless fused, x is quantised first, into the end of the workspace."""
    (M, K), ahead = x.shape, arch in EARLY_LAUNCH and not INTERPRETED
    if plan.config.fused:
        return launches(Inputs(x, w_scale, w, w_scale), out, workspace, plan=plan, arch=arch, ahead=ahead)
    parts = _floats(plan, M, len(w), K, linear=True)
    partials, x8, scales = workspace[: sum(parts)].split(parts)
    x8, scales = x8.view(FP8).view(M, K), scales.view(M, K // BLOCK)
    arguments = dict(
        x=x, x_stride8=(x.stride(0) if M > 1 else K) // 8, out=x8, scales=scales, K=K, GROUPS=_GROUPS,
        PDL=ahead, INTERPRETED=INTERPRETED, num_warps=4, launch_pdl=ahead,
    )  # fmt: skip
    first = fp8_gemm_quantise_kernel, (-(-K // (_GROUPS * BLOCK)), M), arguments
    call = Inputs(x8, scales, w, w_scale)
    return [first, *launches(call, out, partials, plan=plan, arch=arch, ahead=ahead)]


def fp8_gemm(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """The product, bf16 [M, N]; see the module for the formula.

    x: float8_e4m3fn [M, K], M up to `MAX_M`, rows dense and at multiples of 16 bytes. w: float8_e4m3fn [N, K]; N and K
    multiples of 128. x_scale: fp32 [M, K / 128]; w_scale: fp32 [N / 128, K / 128]. All but x contiguous.
    out: contiguous bf16 [M, N]. workspace: contiguous fp32, as large as the one of `empty`, any contents. Both are
    allocated if absent. config: overrides the table's choice.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    checks.check_call(x, w, x_scale, w_scale)
    (M, K), N, device = x.shape, len(w), x.device
    arch, _ = target(device)
    if out is None or workspace is None:
        made = empty(M, N, K, device, config)
        out, workspace = made[0] if out is None else out, made[1] if workspace is None else workspace
    checks.check_out(out, M, N, device)
    if M and N:
        chosen = plan_for(M, N, K, device, config)
        check_flat("workspace", workspace, torch.float32, chosen.partials(M, N), device)
        for each in launches(Inputs(x, x_scale, w, w_scale), out, workspace, plan=chosen, arch=arch):
            launch(*each)
    return out


def fp8_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`fp8_gemm` of x, which is quantised first, bf16 [M, N].

    x: bf16 [M, K], M up to `MAX_M`, rows dense and at multiples of 16 bytes; any values. w, w_scale, out, config: as
    `fp8_gemm` has them. workspace: contiguous fp32 from a multiple of 16 bytes, as large as the one of
    `empty(linear=True)`, any contents.

    The quantisation is bitwise that of SGLang 0.5.14 to 0.5.16 (`per_token_group_quant_8bit_v2.cuh`): of 128 columns
    amax = max(|x|, 1e-10), NaN left out; scale = amax * (1 / 448), each rounded once; x * (448 / amax) with an
    approximate division, clamped to +-448 with NaN becoming -448, then to the nearest e4m3, ties to even. 0.5.23 keeps
    a NaN; what 0.5.13.post1 has compiled in sgl-kernel is said to be the same. SGLang compiles with --use_fast_math:
    nvcc 13.0 makes `div.approx.ftz.f32` of the division, which ours asks for by name; what another nvcc makes of it the
    source does not say. Interpreted, ours divides as IEEE does.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    checks.check_linear(x, w, w_scale)
    (M, K), N, device = x.shape, len(w), x.device
    arch, _ = target(device)
    if out is None or workspace is None:
        made = empty(M, N, K, device, config, linear=True)
        out, workspace = made[0] if out is None else out, made[1] if workspace is None else workspace
    checks.check_out(out, M, N, device)
    if M and N:
        chosen = plan_for(M, N, K, device, config)
        check_flat("workspace", workspace, torch.float32, sum(_floats(chosen, M, N, K, linear=True)), device)
        check_start("workspace", workspace)
        for each in linear_launches(x, w, w_scale, out, workspace, plan=chosen, arch=arch):
            launch(*each)
    return out


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`.

    It allocates as a serving engine does: from the pool of the graph that captures it.
    """
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl == "bf16":
        x, w = (dequantised(*pair).bfloat16() for pair in ((inputs.x, inputs.x_scale), (inputs.w, inputs.w_scale)))
        return lambda: (torch.matmul(x, w.T),)
    if impl == "split_k_linear":
        return lambda: (fp8_linear(inputs.unquantised, inputs.w, inputs.w_scale, config=config),)
    if impl != "split_k":
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    return lambda: (fp8_gemm(inputs.x, inputs.w, inputs.x_scale, inputs.w_scale, config=config),)


def _variants(
    shapes: Iterable[tuple[int, int]], device: torch.device | str, arch: str, sms: int, impls: Sequence[str] = _OURS
) -> Iterator[tuple]:
    """(name, launches) of each entry of the table, for each weight [N, K] and each of `impls`."""
    for N, K in shapes:
        w = torch.empty(N, K, dtype=FP8, device=device)
        w_scale = torch.empty(N // BLOCK, K // BLOCK, device=device)
        for bucket in buckets(arch):
            if bucket != choose(arch, M := bucket.max_m, N):
                continue
            how = dict(plan=plan(M, N, K, bucket.config, sms), arch=arch)
            out = torch.empty(M, N, dtype=torch.bfloat16, device=device)
            workspace = torch.empty(sum(_floats(how["plan"], M, N, K, linear=True)), device=device)
            name = f"n{N}_k{K}, {bucket.limits}"
            if "split_k" in impls:
                x, x_scale = torch.empty(M, K, dtype=FP8, device=device), torch.empty(M, K // BLOCK, device=device)
                yield f"{name}: {bucket.config.name}", launches(Inputs(x, x_scale, w, w_scale), out, workspace, **how)
            if "split_k_linear" in impls:
                wide = torch.empty(M, K, dtype=torch.bfloat16, device=device)
                linear = linear_launches(wide, w, w_scale, out, workspace, **how)
                yield f"{name}, linear: {bucket.config.name}", linear


def warm_up(
    device: torch.device | str = "cuda", shapes: Iterable[tuple[int, int]] = layers(1), impls: Sequence[str] = _OURS
) -> None:
    """Compile and load every variant that calls of `impls` with weights [N, K] of these shapes can need, whatever M."""
    device = torch.device(device)
    for _, steps in _variants(shapes, device, *target(device), impls):
        for each in steps:
            warm(*each)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if not impl.startswith("split_k"):
        return {}
    chosen = plan_for(len(inputs.x), *inputs.w.shape, inputs.x.device, config)
    return {"variant": chosen.config.name, "num_splits": chosen.splits}


def describe(arch: str) -> list[str]:
    """One line for each bucket: what `split_k` would run on an architecture, and the evidence for it."""
    return [f"split_k, {b.limits}: {b.config.name} ({b.evidence})" for b in buckets(arch)]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of every table entry of an architecture, on CPU tensors, by the name of the entry."""
    return _variants([(4096, 8192), (32768, 1024)], "cpu", arch, sms_of(arch))
