"""SGLang's sm_120 path of MHC-pre: a compiled FP32 closure, its TileLang kernel for the split, an eager weighted sum.

The closure is a local function of `DeepseekV4DecoderLayer.hc_pre`, which SGLang compiles while it captures a graph:
`hc_pre.mixes` of the lab says the same, and is compiled here. The split is SGLang's own `hc_split_sinkhorn`. The norm
that follows is a launch of another module there: calls with one are not taken.
"""

import functools
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dsv4lab.kernels.hc_pre import EPS, HC, mixes
from dsv4lab.model import DSV4_FLASH

IMPL = "stock_mhc"
INSTALL = "pip install sglang==0.5.14 tilelang==0.1.8"


def unavailable() -> str | None:
    """Why SGLang's MHC kernels cannot run here, in one line with the command that helps, or None."""
    for name in ("sglang", "tilelang"):
        if find_spec(name) is None:
            return f"{name} is not installed: {INSTALL}"
    if not torch.cuda.is_available():
        return "SGLang's MHC kernels need a CUDA GPU"
    return None


def notes(inputs: Any) -> dict:
    """What the record must say: the packages."""
    return {"package": ", ".join(f"{name} {version(name)}" for name in ("sglang", "tilelang"))}


@functools.cache
def _closure() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def forced(x: Tensor, hc_fn: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.flatten(1).float()
        return wide, mixes(wide, hc_fn, EPS)

    return torch.compile(forced, dynamic=False)


def prepare(inputs: Any) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """A launch that returns (y, post, comb). ValueError for a call with a norm."""
    from sglang.srt.layers.mhc import hc_split_sinkhorn

    if inputs.norm_weight is not None:
        raise ValueError("stock_mhc leaves the norm to another kernel, got norm_weight")
    closure, x, iters = _closure(), inputs.x, DSV4_FLASH.hc_sinkhorn_iters

    def launch() -> tuple[Tensor, Tensor, Tensor]:
        wide, mix = closure(x, inputs.hc_fn)
        pre, post, comb = hc_split_sinkhorn(mix[:, None], inputs.hc_scale, inputs.hc_base, HC, iters, EPS)
        y = (pre.squeeze(1)[..., None] * wide.view(x.shape)).sum(1)
        return y.to(x.dtype), post.squeeze(1), comb.squeeze(1)

    return launch
