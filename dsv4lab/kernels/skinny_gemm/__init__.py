"""A linear layer of a decode step, with few rows and few outputs: bf16 in, fp32 accumulate, fp32 out, one pass.

    out[m, n] = scale * sum_k x[m, k] * w[n, k] + bias[n]

x is bf16 [M, K], w bf16 or fp32 [N, K] as the checkpoint has it, out fp32. DeepSeek-V4-Flash has five such layers in a
decoder layer (`LAYERS`); SGLang's sm_120 path casts the activations of one up and multiplies in FP32 (SIMT, no tensor
cores), the others are cuBLAS's. M up to 128 is what it is made for; more rows are right, not fast. The bytes of the
operands once, and fp32 partial tiles, which stay in L2.

fp32 weights are multiplied as the sum of two bf16 terms, each product exact in the fp32 accumulator: they count with 16
of their 24 bits, and the error stays within a few times that of an FP32 product. With bf16 weights it is an FP32
product of what is given. Deterministic: partial sums are added in a fixed order, bitwise the same in every run.

Implementations: `split_k`, ours on bf16 weights; `split_k_w32`, ours on the fp32 weights of the layers that have them;
`bf16`: cuBLAS, through torch, with fp32 output where SGLang has it; `fp32`: SGLang's forced product, cast included.
"""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lab.kernels.launch import INTERPRETED, launch, target, warm
from dsv4lab.kernels.skinny_gemm import checks
from dsv4lab.kernels.skinny_gemm.cases import (
    CASES,
    EXPERIMENT,
    LAYERS,
    Case,
    Inputs,
    baseline,
    config,
    judge,
    make_inputs,
    reference,
    rotated_bytes,
    work,
)
from dsv4lab.kernels.skinny_gemm.plans import SWEEP, TABLE, Config, Dot, Split, beats_cublas, buckets, choose
from dsv4lab.kernels.skinny_gemm.tiles import combine_kernel, dot_kernel, split_kernel

__all__ = [
    "CANDIDATES", "CASES", "EXPERIMENT", "IMPLEMENTATIONS", "LAYERS", "TABLE", "Case", "Config", "Dot", "Inputs",
    "Split", "baseline", "beats_cublas", "choose", "config", "describe", "empty", "first_launch", "judge", "launches",
    "make_inputs", "notes", "prepare", "reference", "rotated_bytes", "skinny_gemm", "static_launches", "warm_up",
    "work", "workspace_numel",
]  # fmt: skip

IMPLEMENTATIONS = ("fp32", "bf16", "split_k", "split_k_w32")
CANDIDATES = {f"{impl}_{c.name}": (impl, c) for impl in ("split_k", "split_k_w32") for c in SWEEP}


def workspace_numel(M: int, N: int, K: int, config: Config) -> int:
    """Elements of the fp32 workspace that a call needs."""
    return config.partials(M, N, K) if isinstance(config, Split) else 0


def empty(M: int, N: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(result, workspace) of a call with bf16 weights."""
    config = choose(target(device)[0], M, N).config
    return torch.empty(M, N, device=device), torch.empty(workspace_numel(M, N, K, config), device=device)


def _all_registers(num_warps: int) -> dict:
    """The launch options of a kernel whose blocks ask for all their operands at once.

    Told that it may have every register of an SM, ptxas leaves the loads together; else it saves registers by waiting
    for one operand before it asks for the next.
    """
    return dict(num_warps=num_warps, maxnreg=min(65536 // (32 * num_warps), 255))


def _combine_shape(splits: int) -> tuple[int, int]:
    """(outputs that a program of `combine_kernel` adds up, partial tiles that it asks for at once): 32 values a thread.

    It has one warp, which needs no barrier.
    """
    tiles = triton.next_power_of_2(splits)
    elements = min(max(1024 // tiles, 16), 64)
    return elements, min(tiles, 1024 // elements)


def _ending(out: Tensor, scale: float, bias: Tensor | None) -> dict:
    return dict(
        out=out, out_stride=out.stride(0), scale=scale, bias=out if bias is None else bias, HAS_BIAS=bias is not None
    )  # fmt: skip


def first_launch(
    x: Tensor, w: Tensor, partials: Tensor, ending: dict, config: Config, *, squares: bool = False, pdl: bool = False,
    ahead: bool = False,
) -> tuple:  # fmt: skip
    """(kernel, grid, arguments) of the products: whole sums to `ending`'s out for `Dot`, else partial tiles.

    squares: column N of out, or of each partial tile, gets the sum of the squares of the row. pdl: what is launched
    next may start early, and waits for this by itself. ahead, with pdl: so may this one, which asks for w at once and
    for x when what is in front has ended.
    """
    (M, K), N = x.shape, w.shape[0]
    shared = dict(
        x=x, x_stride8=(x.stride(0) if M > 1 else K) // 8, w=w, M=M, N=N, K=K, PDL=pdl, AHEAD=ahead, launch_pdl=ahead
    )  # fmt: skip
    if isinstance(config, Dot):
        block = min(config.block_k, triton.next_power_of_2(K))
        return dot_kernel, (N + squares, M), shared | ending | dict(BLOCK_K=block) | _all_registers(config.num_warps)
    splits = config.splits(K)
    tiled = dict(
        partials=partials, CHUNK=config.chunk, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLITS=splits, SLICES=1 if config.whole else config.num_warps, SQUARES=squares,
        COMPUTE=tl.float32 if INTERPRETED else tl.bfloat16,
    )  # fmt: skip
    one_step = config.chunk == config.block_k
    tiled |= _all_registers(config.num_warps) if one_step else dict(num_warps=config.num_warps)
    return split_kernel, (splits, *config.tiles(M, N)), shared | tiled


def launches(
    x: Tensor, w: Tensor, out: Tensor, partials: Tensor, *, scale: float, bias: Tensor | None, config: Config,
    weights_ready: bool = False,
) -> list[tuple]:  # fmt: skip
    """[(kernel, grid, arguments)] of one call, in order; nothing is launched."""
    ending, (M, K), N = _ending(out, scale, bias), x.shape, w.shape[0]
    if isinstance(config, Dot):
        return [first_launch(x, w, out, ending, config)]
    splits, pdl = config.splits(K), config.combine == "pdl" and not INTERPRETED
    elements, group = _combine_shape(splits)
    combine = ending | dict(
        partials=partials, M=M, N=N, SPLITS=splits, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_E=elements,
        GROUP=group, PDL=pdl, launch_pdl=pdl, **_all_registers(1),
    )  # fmt: skip
    parts = config.block_m * config.block_n // elements
    return [
        first_launch(x, w, partials, ending, config, pdl=pdl, ahead=pdl and weights_ready),
        (combine_kernel, (parts, *config.tiles(M, N)), combine),
    ]


def skinny_gemm(
    x: Tensor,
    w: Tensor,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    weights_ready: bool = False,
    config: Config | None = None,
) -> Tensor:
    """scale * x w^T + bias, [M, N] in fp32.

    x: bf16 [M, K] with a dense last dimension, rows at multiples of 16 bytes; K a multiple of 8, up to 65536.
    w: bf16 or fp32 [N, K], contiguous. bias: fp32 [N]. out: fp32 [M, N] with a dense last dimension.
    workspace: contiguous fp32, at least `workspace_numel(M, N, K, config)`, any contents; allocated if absent.
    weights_ready: no kernel that may still run writes w, as none does with a weight of a model: w may then be read
      before the kernel in front has ended. config: overrides the table's choice.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    checks.check_operands(x, w)
    (M, K), N, device = x.shape, w.shape[0], x.device
    out = torch.empty(M, N, dtype=torch.float32, device=device) if out is None else out
    checks.check_out(out, M, N, device)
    if bias is not None:
        checks.check_bias(bias, N, device)
    config = config or choose(target(device)[0], M, N, w.dtype == torch.float32).config
    if isinstance(config, Split):
        least = workspace_numel(M, N, K, config)
        workspace = torch.empty(least, dtype=torch.float32, device=device) if workspace is None else workspace
        checks.check_flat("workspace", workspace, torch.float32, least, device)
    if M and N:
        for each in launches(x, w, out, workspace, scale=scale, bias=bias, config=config, weights_ready=weights_ready):
            launch(*each)
    return out


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`; ValueError if it does not take the layer.

    It allocates as a serving engine does: from the pool of the graph that captures it.
    """
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    x, w, layer = inputs.x, inputs.w, LAYERS[inputs.layer]
    if impl == "fp32":
        if not layer.forced_fp32:
            raise ValueError(f"fp32 is what SGLang forces on other layers, got {inputs.layer}")
        w = w.float()
        return lambda: (torch.matmul(x.float(), w.mT),)
    if impl == "bf16":
        w = w.bfloat16()
        if layer.fp32_out and not layer.forced_fp32 and x.is_cuda:
            return lambda: (torch.mm(x, w.mT, out_dtype=torch.float32),)
        return lambda: (torch.matmul(x, w.mT),)
    if x.ndim > 2:
        raise ValueError(f"{impl} takes one product, not a batch of {len(x)}")
    if impl == "split_k_w32" and w.dtype != torch.float32:
        raise ValueError(f"split_k_w32 is for layers with fp32 weights, got {inputs.layer}")
    w = w if impl == "split_k_w32" else w.bfloat16()
    return lambda: (skinny_gemm(x, w, config=config, weights_ready=True),)


def _smallest(N: int, K: int, weights: torch.dtype, rows: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Operands enough to compile for."""
    x = torch.empty(rows, K, dtype=torch.bfloat16, device=device)
    return x, torch.empty(N, K, dtype=weights, device=device)


def _variants(N: int, K: int, weights: torch.dtype, device: torch.device | str, arch: str) -> Iterator[tuple]:
    """(name, launches) of each entry of the table that N columns can meet, "ready" where weights_ready changes them."""
    for bucket in buckets(arch):
        if N <= bucket.max_n and bucket == choose(arch, bucket.max_m, N, weights == torch.float32):
            x, w = _smallest(N, K, weights, min(bucket.max_m, 16), device)
            out = torch.empty(len(x), N, device=device)
            partials = torch.empty(max(workspace_numel(len(x), N, K, bucket.config), 4), device=device)
            parts, shared = (x, w, out, partials), dict(scale=1.0, bias=None, config=bucket.config)
            pdl = isinstance(bucket.config, Split) and bucket.config.combine == "pdl"
            for ready in (False, True) if pdl else (False,):
                name = f"{bucket.limits}: {bucket.config.name}{', ready' * ready}"
                yield name, launches(*parts, **shared, weights_ready=ready)


def warm_up(N: int, K: int, weights: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda") -> None:
    """Compile and load every variant that calls with this w, without a bias, can need, whatever the rows."""
    device = torch.device(device)
    for _, steps in _variants(N, K, weights, device, target(device)[0]):
        for each in steps:
            warm(*each)


def notes(impl: str, inputs: Inputs) -> dict:
    """What a record says of how the call was launched."""
    impl, config = CANDIDATES.get(impl, (impl, None))
    if not impl.startswith("split_k"):
        return {}
    arch, M, N = target(inputs.x.device)[0], len(inputs.x), len(inputs.w)
    return {"variant": (config or choose(arch, M, N, impl == "split_k_w32").config).name}


def describe(arch: str) -> list[str]:
    """One line for each bucket: what ours would run on an architecture, and the evidence for it."""
    return [f"split_k{'_w32' * b.fp32}, {b.limits}: {b.config.name} ({b.evidence})" for b in buckets(arch)]


def static_launches(arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """The launches of every table entry of an architecture, on CPU tensors, by the name of the entry."""
    bf16, fp32 = torch.bfloat16, torch.float32
    # few columns in both dtypes and many: between them they meet every entry
    for name, weights in (("mhc_pre", bf16), ("mhc_pre", fp32), ("wkv_gate_c4", bf16)):
        layer = LAYERS[name]
        for entry, steps in _variants(layer.N, layer.K, weights, "cpu", arch):
            if name == "mhc_pre" or "N any" in entry:
                yield f"{name}{' in fp32' if weights == fp32 else ''}, {entry}", steps
