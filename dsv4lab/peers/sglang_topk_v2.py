"""SGLang's second CUDA top-k, which spreads long rows over several blocks by a plan of the lengths.

SGLang takes it in place of the first where nothing else wants the positions (SGLANG_OPT_USE_TOPK_V2). A kernel of its
own makes the plan, once in `prepare`: an engine pays that once a step, not once a layer.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dsv4lab.peers import sglang_topk
from dsv4lab.peers.sglang_topk import unavailable

__all__ = ["IMPL", "notes", "prepare", "unavailable"]

IMPL = "sglang_topk_v2"


def notes(inputs: Any) -> dict:
    """What the record must say: the package, the hoisted plan."""
    return sglang_topk.notes(inputs) | {"metadata": "hoisted"}


def prepare(inputs: Any) -> Callable[[], tuple[Tensor]]:
    """A launch of it on the top-k's inputs that returns (slots,); valid while the lengths stay as they are."""
    from sglang.jit_kernel.dsv4 import plan_topk_v2, topk_transform_512_v2

    out = sglang_topk.output(inputs)
    arguments = inputs.scores, inputs.seq_lens, inputs.page_tables, out, inputs.page_size, plan_topk_v2(inputs.seq_lens)
    return lambda: (topk_transform_512_v2(*arguments), out)[1:]
