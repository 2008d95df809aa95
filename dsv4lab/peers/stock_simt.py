"""SGLang's stock per-head decode kernel for sm_120: one file, loaded by its path without importing SGLang.

`flash_mla_sm120_triton.py` (byte-identical in SGLang 0.5.13 to 0.5.23, moved in 0.5.16) needs torch and triton only:
a grid of (batch, heads), one launch per cache, then a merge and the sink in eager torch. It takes one query per batch
row, so `s_q` queries are folded into the batch; its `lse` includes the sink.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

IMPL = "stock_simt"
LSE_INCLUDES_SINK = True
INSTALL = "pip install --no-deps sglang==0.5.14"

_PLACES = (
    "srt/layers/attention/flash_mla_sm120_triton.py",
    "kernels/ops/attention/flash_mla_sm120_triton.py",
)


def unavailable() -> str | None:
    """Why the stock kernel cannot run here, in one line with the command that helps, or None."""
    if find_spec("sglang") is None:
        return f"sglang is not installed: {INSTALL}"
    if source_file() is None:
        return f"this sglang has no {Path(_PLACES[0]).name} (0.5.13 is the first release with it): {INSTALL}"
    if not torch.cuda.is_available():
        return "the stock kernel needs a CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return f"the stock kernel converts FP8 in hardware, from sm_89 on; this GPU is sm_{major}{minor}"
    return None


def source_file(places: Sequence[str] = _PLACES) -> Path | None:
    """The stock file, or another, inside the installed `sglang` (a regular or a namespace package), or None."""
    spec = find_spec("sglang")
    roots = spec.submodule_search_locations or () if spec else ()
    found = (Path(root) / place for root in roots for place in places)
    return next((path for path in found if path.is_file()), None)


def notes(inputs: Any, places: Sequence[str] = _PLACES) -> dict:
    """What the record must say: which release the file is from, and its hash."""
    try:
        package = f"sglang {version('sglang')}"
    except PackageNotFoundError:
        package = "sglang, version unknown"
    return {"package": package, "source_sha256": hashlib.sha256(source_file(places).read_bytes()).hexdigest()}


def prepare(inputs: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """A launch of the stock kernel on `inputs`, its autotuning left to the first call."""
    decode = load(source_file()).flash_mla_sparse_decode_triton
    batch, s_q, heads, head_dim = inputs.q.shape
    q = inputs.q.reshape(batch * s_q, 1, heads, head_dim)
    main = _folded(inputs.indices, inputs.topk_length)
    extra = _folded(inputs.extra_indices_in_kvcache, inputs.extra_topk_length)

    def launch() -> tuple[Tensor, Tensor]:
        out, lse = decode(
            q, inputs.k_cache, *main, inputs.attn_sink, head_dim, inputs.softmax_scale, inputs.extra_k_cache, *extra
        )
        return out.view(batch, s_q, heads, head_dim), lse.reshape(batch, s_q, heads).transpose(1, 2)

    return launch


def _folded(indices: Tensor | None, lengths: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """indices `[B, s_q, topk]` and lengths `[B]` or `[B, s_q]` -> `[B * s_q, 1, topk]` and `[B * s_q]`."""
    if indices is None:
        return None, None
    batch, s_q, topk = indices.shape
    if lengths is not None:
        lengths = lengths.view(batch, -1).expand(batch, s_q).reshape(-1)
    return indices.reshape(batch * s_q, 1, topk), lengths


@cache
def load(path: Path) -> ModuleType:
    """The module in this file, under a private name."""
    spec = spec_from_file_location(f"dsv4lab.peers._{path.stem}_source", path)
    module = sys.modules[spec.name] = module_from_spec(spec)  # Triton looks its kernels' module up by name
    spec.loader.exec_module(module)
    return module
