"""FlashMLA's sparse decode kernel, from the PyPI package `sgl-flash-mla`.

Its sm_90 kernel for the 584-byte cache layout is reached with `use_legacy=True`. It exists for 64 and 128 heads and
for index widths that are multiples of 64: fewer heads are padded with zero queries, as SGLang does, and narrower
indices with -1. Padding and scheduling metadata are made once in `prepare`: an engine pays them once per step, not
per layer, and metadata made inside a capture would be made again by every replay.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from dsv4lab.peers import hopper_unavailable

IMPL = "flashmla"
LSE_INCLUDES_SINK = False
PACKAGE = "sgl-flash-mla"
INSTALL = f"pip install {PACKAGE}==1.0.0"

_KERNEL_HEADS = (64, 128)
_INDEX_MULTIPLE = 64


def unavailable() -> str | None:
    """Why FlashMLA cannot run here, in one line with the command that helps, or None."""
    return hopper_unavailable("FlashMLA", "flash_mla", PACKAGE, "which has the legacy sm_90 kernels", INSTALL)


def kernel_heads(heads: int) -> int:
    """The head count FlashMLA runs for `heads` query heads; ValueError above 128."""
    for supported in _KERNEL_HEADS:
        if heads <= supported:
            return supported
    raise ValueError(f"H must be at most {_KERNEL_HEADS[-1]} for FlashMLA, got {heads}")


def notes(inputs: Any) -> dict:
    """What the record must say: the heads the kernel really computed, the package, the hoisted metadata."""
    return {
        "h_padded": kernel_heads(inputs.q.shape[2]),
        "package": f"{PACKAGE} {version(PACKAGE)}",
        "metadata": "hoisted",
    }


def prepare(inputs: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """A launch of FlashMLA on `inputs`; valid while their lengths stay as they are (its schedule depends on them)."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    heads, head_dim = inputs.q.shape[2:]
    missing = kernel_heads(heads) - heads
    q = pad(inputs.q, (0, 0, 0, missing)) if missing else inputs.q
    metadata, _ = get_mla_metadata()
    arguments = {
        "softmax_scale": inputs.softmax_scale,
        "is_fp8_kvcache": True,
        "indices": _widened(inputs.indices),
        "attn_sink": None if inputs.attn_sink is None else pad(inputs.attn_sink, (0, missing)),
        "extra_k_cache": inputs.extra_k_cache,
        "extra_indices_in_kvcache": _widened(inputs.extra_indices_in_kvcache),
        "topk_length": inputs.topk_length,
        "extra_topk_length": inputs.extra_topk_length,
        "use_legacy": True,
    }

    def launch() -> tuple[Tensor, Tensor]:
        out, lse = flash_mla_with_kvcache(q, inputs.k_cache, None, None, head_dim, metadata, **arguments)
        return out[:, :, :heads], lse[:, :heads]

    launch()  # the first call fills `metadata`
    return launch


def _widened(indices: Tensor | None) -> Tensor | None:
    if indices is None or indices.shape[-1] % _INDEX_MULTIPLE == 0:
        return indices
    return pad(indices, (0, -indices.shape[-1] % _INDEX_MULTIPLE), value=-1)
