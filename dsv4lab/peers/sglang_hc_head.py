"""SGLang's Triton kernel of the head's mix, one program a row: one file, loaded by its path without importing SGLang.

`mhc_head.py` (byte-identical in SGLang 0.5.13 to 0.5.23, moved in 0.5.16) needs torch and triton only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lab.kernels.hc_head import EPS
from dsv4lab.peers import stock_simt

IMPL = "sglang_hc_head"

_PLACES = "srt/layers/mhc_head.py", "kernels/ops/layernorm/mhc_head.py"


def unavailable() -> str | None:
    """Why SGLang's kernel cannot run here, in one line with the command that helps, or None."""
    if stock_simt.source_file(_PLACES) is None:
        return f"no sglang with mhc_head.py is installed (0.5.13 is the first release with it): {stock_simt.INSTALL}"
    return None if torch.cuda.is_available() else "SGLang's kernel of the head's mix needs a CUDA GPU"


def notes(inputs: Any) -> dict:
    """What the record must say: which release the file is from, and its hash."""
    return stock_simt.notes(inputs, _PLACES)


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A call of SGLang's wrapper on the inputs of `hc_head` that returns (y,)."""
    fused = stock_simt.load(stock_simt.source_file(_PLACES)).fused_hc_head
    return lambda: (fused(**vars(inputs), norm_eps=EPS, hc_eps=EPS),)
