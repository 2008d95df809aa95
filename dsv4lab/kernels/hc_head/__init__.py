"""The four residual streams into the hidden state in front of the output head, in two launches.

For each token, x [4, hidden] in bf16 and learnt rows of weights in fp32, hc_fn [4, 4 * hidden]:

    pre = sigmoid((hc_fn . x) / sqrt(mean(x^2) + norm_eps) * hc_scale + hc_base) + hc_eps;    y = sum_j pre[j] * x[j]

This is SGLang's `fused_hc_head`, run once a forward after the last layer. There one program walks a row, 512 values at
a time and twice, so that one row takes as long as many. Here a row's sums are spread over many SMs, and a second
kernel, launched early, has its streams in registers when the sums are there: it ends them and writes y.
Weights count with all of their 24 bits and all sums are fp32, without tensor cores: the call waits for bytes.
Deterministic: bitwise the same in every run, whatever the other rows hold.

Implementations: `split_k`, ours; `torch`: the formula in eager PyTorch, in fp32.
"""

from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from dsv4lab.hardware import EARLY_LAUNCH
from dsv4lab.kernels.arguments import check_contiguous, check_start
from dsv4lab.kernels.hc_head.cases import (
    CASES,
    EPS,
    EXPERIMENT,
    HC,
    Case,
    Inputs,
    baseline,
    composed,
    config,
    judge,
    make_inputs,
    reference,
    rotated_bytes,
    work,
)
from dsv4lab.kernels.hc_head.plans import SWEEP, TABLE, Config, buckets, choose
from dsv4lab.kernels.hc_head.tiles import SUMS, hc_head_mix_kernel, hc_head_sums_kernel
from dsv4lab.kernels.launch import INTERPRETED, launch, target, warm
from dsv4lab.kernels.skinny_gemm.checks import check_flat
from dsv4lab.model import DSV4_FLASH

__all__ = [
    "CANDIDATES", "CASES", "EPS", "EXPERIMENT", "HC", "IMPLEMENTATIONS", "TABLE", "Case", "Config", "Inputs",
    "baseline", "composed", "config", "describe", "empty", "hc_head", "judge", "launches", "make_inputs", "notes",
    "prepare", "reference", "rotated_bytes", "static_launches", "takes", "warm_up", "work", "workspace_numel",
]  # fmt: skip

IMPLEMENTATIONS = ("torch", "split_k")
CANDIDATES = {f"split_k_{c.name}": ("split_k", c) for c in SWEEP}

_ONE_WARP = dict(num_warps=1, maxnreg=255)
"""Of every block: it needs no barrier, and ptxas, told that it may have all registers, leaves the loads together."""


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for these streams: bf16 [T, 4, hidden], T at least 1, hidden a multiple of 8."""
    return x.dtype == torch.bfloat16 and x.ndim == 3 and x.shape[1] == HC and x.numel() > 0 and not x.shape[2] % 8


def workspace_numel(T: int, hidden: int, config: Config) -> int:
    """Elements of the fp32 workspace that a call of T tokens needs."""
    return T * SUMS * config.splits(HC * hidden)


def empty(T: int, hidden: int, device: torch.device, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """(result, workspace) of a call of T tokens, for the table's config or another."""
    config = config or choose(target(device)[0], T).config
    y = torch.empty(T, hidden, dtype=torch.bfloat16, device=device)
    return y, torch.empty(workspace_numel(T, hidden, config), device=device)


def launches(
    call: Inputs, y: Tensor, workspace: Tensor, *, norm_eps: float, hc_eps: float, weights_ready: bool, config: Config,
    arch: str,
) -> list[tuple]:  # fmt: skip
    """[(kernel, grid, arguments)] of one call, in order; nothing is launched."""
    T, _, hidden = call.x.shape
    pdl, splits = arch in EARLY_LAUNCH and not INTERPRETED, config.splits(HC * hidden)
    shared = dict(x=call.x, partials=workspace, SPLITS=splits, PDL=pdl) | _ONE_WARP
    ahead = pdl and weights_ready
    sums = shared | dict(
        w=call.hc_fn, T=T, K=HC * hidden, CHUNK=config.chunk, ROWS=config.rows, AHEAD=ahead, launch_pdl=ahead
    )  # fmt: skip
    mix = shared | dict(
        scale=call.hc_scale, base=call.hc_base, y=y, norm_eps=norm_eps, hc_eps=hc_eps, HIDDEN=hidden,
        TILE=config.tile, BLOCK_S=triton.next_power_of_2(splits), launch_pdl=pdl,
    )  # fmt: skip
    return [
        (hc_head_sums_kernel, (-(-T // config.rows) * splits,), sums),
        (hc_head_mix_kernel, (T * -(-hidden // config.tile),), mix),
    ]


def hc_head(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    norm_eps: float = EPS,
    hc_eps: float = EPS,
    *,
    weights_ready: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """y, bf16 [T, hidden]; see the module for the formula. The first six arguments are those of SGLang's function.

    x: bf16 [T, 4, hidden], any T, 0 included; hidden a multiple of 8. hc_fn: fp32 [4, 4 * hidden]; hc_scale: fp32 [1];
      hc_base: fp32 [4]. All contiguous, x and hc_fn from a multiple of 16 bytes on.
    weights_ready: hc_fn is not what the kernel launched before this call writes, as no weight of a model is: it may be
      read before that kernel has ended.
    out: contiguous. workspace: contiguous fp32, at least `workspace_numel(T, hidden, config)`, any contents. Both are
      allocated if absent. config: overrides the table's choice.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    call = Inputs(x, hc_fn, hc_scale, hc_base)
    _check(call)
    (T, _, hidden), device, arch = x.shape, x.device, target(x.device)[0]
    config = config or choose(arch, T).config
    if out is None or workspace is None:
        made = empty(T, hidden, device, config)
        out, workspace = made[0] if out is None else out, made[1] if workspace is None else workspace
    check_contiguous("out", out, torch.bfloat16, (T, hidden), device)
    check_start("out", out)
    check_flat("workspace", workspace, torch.float32, workspace_numel(T, hidden, config), device)
    if T:
        numbers = dict(norm_eps=norm_eps, hc_eps=hc_eps, weights_ready=weights_ready)
        for each in launches(call, out, workspace, **numbers, config=config, arch=arch):
            launch(*each)
    return out


def _check(call: Inputs) -> None:
    x, device = call.x, call.x.device
    if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[1] != HC or not x.is_contiguous() or not x.shape[2]:
        raise ValueError(
            f"x must be contiguous bfloat16 [T, {HC}, hidden], got {x.dtype} {list(x.shape)} strides {x.stride()}"
        )
    if x.shape[2] % 8:
        raise ValueError(f"x must have hidden a multiple of 8, got {list(x.shape)}")
    shapes = {"hc_fn": (HC, HC * x.shape[2]), "hc_scale": (1,), "hc_base": (HC,)}
    for name, shape in shapes.items():
        check_contiguous(name, getattr(call, name), torch.float32, shape, device)
    for name in ("x", "hc_fn"):
        check_start(name, getattr(call, name))


def prepare(impl: str, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call that only launches, of an implementation or one of `CANDIDATES`, and returns (y,).

    It allocates as a serving engine does: from the pool of the graph that captures it.
    """
    impl, config = CANDIDATES.get(impl, (impl, None))
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "torch":
        return lambda: baseline(inputs)
    return lambda: (hc_head(**vars(inputs), weights_ready=True, config=config),)


def _variants(hidden: int, device: torch.device | str, arch: str) -> Iterator[tuple[str, list[tuple]]]:
    """(name, launches) of each entry of the table, "ready" with weights that are."""
    for bucket in buckets(arch):
        (call,) = make_inputs(Case("smallest", 1, hidden), device=device)
        y = torch.empty(1, hidden, dtype=torch.bfloat16, device=device)
        workspace = torch.empty(workspace_numel(1, hidden, bucket.config), device=device)
        for ready in (False, True):
            numbers = dict(norm_eps=EPS, hc_eps=EPS, weights_ready=ready, config=bucket.config, arch=arch)
            name = f"{bucket.limits}: {bucket.config.name}{', ready' * ready}"
            yield name, launches(call, y, workspace, **numbers)


def warm_up(device: torch.device | str = "cuda", *, hidden: int = DSV4_FLASH.hidden_size) -> None:
    """Compile and load every variant that calls of this width can need, whatever T."""
    device = torch.device(device)
    for _, steps in _variants(hidden, device, target(device)[0]):
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
    return _variants(DSV4_FLASH.hidden_size, "cpu", arch)
