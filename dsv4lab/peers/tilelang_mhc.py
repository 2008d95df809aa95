"""SGLang's Hopper path of MHC-pre without DeepGEMM: `mhc_pre`, two TileLang kernels."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lab.kernels.hc_pre import EPS
from dsv4lab.model import DSV4_FLASH
from dsv4lab.peers.stock_mhc import notes, unavailable

__all__ = ["IMPL", "notes", "prepare", "prepare_with", "unavailable"]

IMPL = "tilelang_mhc"


def prepare_with(deepgemm: bool, inputs: Any) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """A launch of SGLang's `mhc_pre` that returns (y, post, comb), its product by DeepGEMM or TileLang."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.mhc import mhc_pre

    if inputs.hc_fn.dtype != torch.float32:
        raise ValueError(f"mhc_pre takes hc_fn in float32, got {inputs.hc_fn.dtype}")
    norm = {} if inputs.norm_weight is None else {"norm_weight": inputs.norm_weight, "norm_eps": EPS}
    call = functools.partial(
        mhc_pre, inputs.x, inputs.hc_fn, inputs.hc_scale, inputs.hc_base, rms_eps=EPS, hc_pre_eps=EPS,
        hc_sinkhorn_eps=EPS, hc_post_mult_value=2.0, sinkhorn_repeat=DSV4_FLASH.hc_sinkhorn_iters, **norm,
    )  # fmt: skip

    def launch() -> tuple[Tensor, Tensor, Tensor]:
        with envs.SGLANG_OPT_DEEPGEMM_HC_PRENORM.override(deepgemm), envs.SGLANG_DSV4_MHC_PREWARM.override(False):
            post, comb, y = call()
        return y, post.squeeze(-1), comb

    return launch


prepare = functools.partial(prepare_with, False)
