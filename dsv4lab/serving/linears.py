"""As `adapters`, of a step's linear layers and of the mixes of its four streams.

All go around SGLang's own functions, which keep the calls that our kernels are not made for.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4lab import tuned
from dsv4lab.kernels import fp8_gemm, hc_head, skinny_gemm
from dsv4lab.kernels import hc_pre as kernel
from dsv4lab.kernels.replay import replay
from dsv4lab.kv_cache import FP8


def gemm_configs(root: Path, gpu: Callable[[], str]) -> Callable:
    """Around SGLang's lookup of a block-FP8 weight's configs: the tuned table of `root` for this GPU, if it has one."""

    @functools.cache
    def tuned_configs(n: int, k: int, shape: tuple[int, int]) -> dict[int, dict]:
        return tuned.read_sglang(tuned.gemm_path(root, gpu(), n, k)) if shape == tuned.BLOCK_SHAPE else {}

    def configs(original: Callable, N: int, K: int, block_n: int, block_k: int) -> dict[int, dict] | None:
        return tuned_configs(N, K, (block_n, block_k)) or original(N, K, block_n, block_k)

    return configs


def mhc_pre(impl: str, sinkhorn: Callable[[], Callable]) -> Callable:
    """Around `DeepseekV4DecoderLayer.hc_pre`: our kernel, or ("bf16") PyTorch with the linear in bf16, summed in fp32.

    Where SGLang hands over the RMSNorm that comes next, as every release does where its own kernel takes it along, so
    does ours, with the same weight and epsilon; the fourth result says whether y is normalised already. "bf16" never
    does: SGLang then launches its norm. sinkhorn: brings its own `hc_split_sinkhorn`, to which "bf16" leaves the mixing
    weights.
    """

    def hc_pre(
        original: Callable, layer: Any, x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor,
        norm: Any = None, *rest, **more,
    ) -> tuple[Tensor, Tensor, Tensor, bool]:  # fmt: skip
        if not x.shape[0]:
            return original(layer, x, hc_fn, hc_scale, hc_base, norm, *rest, **more)
        if impl != "bf16":
            ready = impl == "split_k" or hasattr(hc_fn, "bf16")  # else its cast is what is launched in front
            weight = _bf16(hc_fn) if impl == "split_k_bf16" else hc_fn.detach()
            numbers = dict(rms_eps=layer.rms_norm_eps, hc_eps=layer.hc_eps, sinkhorn_iters=layer.hc_sinkhorn_iters)
            if norm is not None:
                numbers |= dict(norm_weight=norm.weight.detach(), norm_eps=norm.variance_epsilon)
            out, workspace = kernel.empty(x.shape[0], x.shape[2], x.device)
            given = x, weight, hc_scale.detach(), hc_base.detach()
            buffers = dict(out=out, workspace=workspace)
            call = functools.partial(kernel.hc_pre, *given, **numbers, weights_ready=ready, **buffers)
            key = "mhc", ready, layer.rms_norm_eps, layer.hc_eps, numbers.get("norm_eps"), layer.hc_sinkhorn_iters
            replay(call, key, (*given, numbers.get("norm_weight"), *out, workspace))
            return *out, norm is not None
        flat = x.flatten(1)
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True, dtype=torch.float32)
        rms = torch.rsqrt(length.square() / flat.shape[1] + layer.rms_norm_eps)
        mixes = (_fp32_product(flat, _bf16(hc_fn)) * rms).unsqueeze(1)
        pre, post, comb = sinkhorn()(mixes, hc_scale, hc_base, layer.hc_mult, layer.hc_sinkhorn_iters, layer.hc_eps)
        y = (pre.squeeze(1).unsqueeze(-1) * x).sum(1)
        return y.to(x.dtype), post.squeeze(1), comb.squeeze(1), False

    return hc_pre


def gemm(proven: Callable[[Callable], Callable] = lambda ours: ours) -> Callable:
    """Around `triton_w8a8_block_fp8_linear`: our kernels for the calls they are made for, SGLang's for all others.

    proven: goes around our kernels' calls alone, as SGLang's are no proof of them.
    """

    @proven
    def ours(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        out, workspace = fp8_gemm.empty(x.shape[0], *weight.shape, x.device, linear=True)
        call = functools.partial(fp8_gemm.fp8_linear, x, weight, scale, out=out, workspace=workspace)
        replay(call, ("gemm",), (x, weight, scale, out, workspace))
        return out

    def w8a8_block_fp8_linear(
        original: Callable, input: Tensor, weight: Tensor, block_size: Sequence[int], weight_scale: Tensor,
        input_scale: Tensor | None = None, bias: Tensor | None = None, **more,
    ) -> Tensor:  # fmt: skip
        if (
            0 < input.numel() <= fp8_gemm.MAX_M * input.shape[-1]
            and input.dtype == torch.bfloat16
            and weight.dtype == FP8
            and weight_scale.dtype == torch.float32
            and input_scale is None
            and bias is None
            and not more.get("act_scale_ue8m0")
            and tuple(block_size) == tuned.BLOCK_SHAPE
            and input.is_contiguous()
            and weight.is_contiguous()
            and weight_scale.is_contiguous()
            and fp8_gemm.takes(input.numel() // input.shape[-1], *weight.shape)
        ):
            if input.dim() == 2:
                return ours(input, weight, weight_scale)
            return ours(input.view(-1, input.shape[-1]), weight, weight_scale).view(*input.shape[:-1], -1)
        return original(input, weight, block_size, weight_scale, input_scale, bias, **more)

    return w8a8_block_fp8_linear


def gate(proven: Callable[[Callable], Callable] = lambda ours: ours) -> Callable:
    """Around `linear_bf16_fp32`: our product where it is known to be faster than cuBLAS's, SGLang's for all else.

    proven: goes around our kernel's calls alone, as SGLang's are no proof of it.
    """

    @proven
    def ours(x: Tensor, y: Tensor) -> Tensor:
        out, workspace = skinny_gemm.empty(len(x), *y.shape, x.device)
        buffers = dict(out=out, workspace=workspace)
        call = functools.partial(skinny_gemm.skinny_gemm, x, y.detach(), weights_ready=True, **buffers)
        replay(call, ("gate",), (x, y, out, workspace))
        return out

    def linear_bf16_fp32(original: Callable, x: Tensor, y: Tensor, **more) -> Tensor:
        if (
            skinny_gemm.beats_cublas(len(x), len(y))
            and x.dim() == 2
            and x.dtype == y.dtype == torch.bfloat16
            and x.is_contiguous()
            and y.is_contiguous()
        ):
            return ours(x, y)
        return original(x, y, **more)

    return linear_bf16_fp32


def head(proven: Callable[[Callable], Callable] = lambda ours: ours) -> Callable:
    """Around `fused_hc_head`: our kernel for the streams it takes, SGLang's for all others; proven as in `gemm`."""

    @proven
    def ours(x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
        out, workspace = hc_head.empty(x.shape[0], x.shape[2], x.device)
        given, buffers = (x, hc_fn.detach(), hc_scale.detach(), hc_base.detach()), dict(out=out, workspace=workspace)
        call = functools.partial(hc_head.hc_head, *given, norm_eps, hc_eps, weights_ready=True, **buffers)
        replay(call, ("head", norm_eps, hc_eps), (*given, out, workspace))
        return out

    def fused_hc_head(
        original: Callable, x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, norm_eps: float, hc_eps: float
    ) -> Tensor:
        given = x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps
        return ours(*given) if hc_head.takes(x) else original(*given)

    return fused_hc_head


def _bf16(weight: Tensor) -> Tensor:
    """`weight` in bf16, kept with it: made at its first call, which is no captured one."""
    if not hasattr(weight, "bf16"):
        with torch.inference_mode(False):
            weight.bf16 = weight.detach().to(torch.bfloat16)
    return weight.bf16


def _fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.float().T
