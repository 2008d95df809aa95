"""SGLang's CUDA top-k of the indexer, one block a row: compiled by nvcc when first called, for k 512 or 1024.

Slots come in no particular order. Of equal scores it takes which it meets first, where ours takes the lowest position.
"""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

IMPL = "sglang_topk"
INSTALL = "pip install sglang==0.5.14"

_KS = (512, 1024)


def unavailable() -> str | None:
    """Why SGLang's top-k cannot run here, in one line with the command that helps, or None."""
    if find_spec("sglang") is None:
        return f"sglang is not installed: {INSTALL}"
    if version("sglang") != "0.5.14":
        return f"sglang {version('sglang')} has its top-k in another place or form: {INSTALL}"
    if not torch.cuda.is_available():
        return "SGLang's top-k needs a CUDA GPU"
    return None


def notes(inputs: Any) -> dict:
    """What the record must say: the package."""
    return {"package": f"sglang {version('sglang')}"}


def output(inputs: Any) -> Tensor:
    """int32 [rows, k], where slots go. ValueError for what the kernels do not take."""
    rows, lengths = len(inputs.scores), inputs.seq_lens
    if inputs.k not in _KS or lengths.shape != (rows,) or len(inputs.page_tables) != rows:
        raise ValueError(
            f"SGLang's top-k takes k in {_KS}, a length and a page table for each row, got k {inputs.k}, "
            f"{list(lengths.shape)} lengths, {len(inputs.page_tables)} page tables for {rows} rows"
        )
    return torch.empty(rows, inputs.k, dtype=torch.int32, device=inputs.scores.device)


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A launch of it on the top-k's inputs that returns (slots,)."""
    from sglang.jit_kernel.dsv4 import topk_transform_512

    out = output(inputs)
    arguments = inputs.scores, inputs.seq_lens, inputs.page_tables, out, inputs.page_size
    return lambda: (topk_transform_512(*arguments), out)[1:]
