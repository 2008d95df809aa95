"""Thin adapters to other people's kernels, imported only when asked.

One module a rival, each with

- `IMPL`: the name its records carry;
- `LSE_INCLUDES_SINK`, of attention: its convention for the returned log-sum-exp (ours excludes the sink);
- `unavailable() -> str | None`: one line saying why it cannot run here and the command that helps, or None;
- `notes(inputs) -> dict`: what a reader of the record must know (padding, package version);
- `prepare(inputs) -> launch`: everything a serving engine would hoist out of the layer loop; `launch()` returns what
  the kernel module's own `prepare` has it return, only launches kernels and may be captured in a CUDA graph.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

import torch

PEERS = {
    "sparse_mla_decode": ("flashmla", "stock_simt"),
    "mqa_logits": ("deepgemm",),
    "topk": ("sglang_topk", "sglang_topk_v2"),
    "skinny_gemm": ("deepgemm_prenorm",),
    "fp8_gemm": ("sglang_fp8", "sglang_fp8_tuned", "sglang_fp8_linear", "deepgemm_fp8"),
    "hc_pre": ("stock_mhc", "tilelang_mhc", "deepgemm_mhc"),
    "hc_head": ("sglang_hc_head",),
}


def peers_of(experiment: str) -> list[ModuleType]:
    """The adapters to the rivals of `experiment`, importing nothing of the rivals themselves."""
    return [import_module(f"dsv4lab.peers.{name}") for name in PEERS.get(experiment, ())]


def hopper_unavailable(name: str, module: str, package: str, known_for: str, install: str) -> str | None:
    """Why a rival for sm_90 and sm_100 cannot run here, or None; `known_for` tells `package` from its namesakes."""
    if find_spec(module) is None:
        return f"{module} is not installed: {install}"
    try:
        version(package)
    except PackageNotFoundError:
        return f"{module} is not the build of {package}, {known_for}: {install}"
    if not torch.cuda.is_available():
        return f"{name} needs a CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        return f"{name} has kernels for sm_90 and sm_100 only, this GPU is sm_{major}{minor}"
    return None
