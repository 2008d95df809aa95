"""DeepGEMM's paged MQA logits, from the PyPI package `sgl-deep-gemm`: compiled by nvcc when first called.

On sm_90 it takes 32 or 64 heads, pages of 64 and one or two queries a request. Its schedule is made from the lengths by
a kernel of its own, once in `prepare`: an engine pays that once a step, not once a layer.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from shutil import which
from typing import Any

import torch
from torch import Tensor

from dsv4lab.peers import hopper_unavailable

IMPL = "deepgemm"
PACKAGE = "sgl-deep-gemm"
INSTALL = f"pip install {PACKAGE}==0.1.3 apache-tvm-ffi==0.1.11"

_PAGE, _HEADS = 64, (32, 64)


def unavailable() -> str | None:
    """Why DeepGEMM cannot run here, in one line with the command that helps, or None."""
    if reason := hopper_unavailable("DeepGEMM", "deep_gemm", PACKAGE, "whose calls this adapter knows", INSTALL):
        return reason
    if which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return "DeepGEMM compiles with nvcc, which is not on PATH: install the CUDA toolkit or set CUDA_HOME"
    return None


def notes(inputs: Any) -> dict:
    """What the record must say: the package, the hoisted schedule."""
    return {"package": f"{PACKAGE} {version(PACKAGE)}", "metadata": "hoisted"}


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A launch of DeepGEMM on `inputs` that returns (logits,); valid while the lengths stay as they are."""
    import deep_gemm

    batch, next_n, heads, _ = inputs.q.shape
    page = inputs.kv_cache.shape[1]
    if page != _PAGE or heads not in _HEADS:
        raise ValueError(f"DeepGEMM takes pages of {_PAGE} and H in {_HEADS}, got pages of {page} and H {heads}")
    lengths = inputs.context_lens.view(batch, -1)
    if lengths.shape[1] != next_n:
        lengths = lengths - torch.arange(next_n - 1, -1, -1, dtype=torch.int32, device=lengths.device)
    lengths = lengths.clamp(min=0).contiguous()
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, _PAGE, deep_gemm.get_num_sms())
    tensors = inputs.q.contiguous(), inputs.kv_cache.view(torch.uint8), inputs.weights.contiguous()

    def launch() -> tuple[Tensor]:
        return (
            deep_gemm.fp8_paged_mqa_logits(
                *tensors, lengths, inputs.block_table, schedule, inputs.max_context_len, False
            ),
        )

    return launch
