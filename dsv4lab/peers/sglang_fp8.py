"""SGLang's Triton block-FP8 GEMM, which its linear layers run where DeepGEMM has no kernel, by its default config."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4lab import tuned
from dsv4lab.peers import stock_simt

IMPL = "sglang_fp8"
INSTALL = "pip install sglang==0.5.14"
SGLANG = "sglang.srt.layers.quantization.fp8_kernel"


def unavailable() -> str | None:
    """Why SGLang's kernel cannot run here, in one line with the command that helps, or None."""
    if find_spec("sglang") is None:
        return f"sglang is not installed: {INSTALL}"
    if stock_simt.source_file([f"{SGLANG.removeprefix('sglang.').replace('.', '/')}.py"]) is None:
        return f"sglang {version('sglang')} has its block-FP8 GEMM in another place: {INSTALL}"
    return None if torch.cuda.is_available() else "SGLang's block-FP8 GEMM needs a CUDA GPU"


def notes(inputs: Any) -> dict:
    """What the record must say: the package."""
    return {"package": f"sglang {version('sglang')}"}


def prepare(inputs: Any, tile: dict[str, int] | None = None) -> Callable[[], tuple[Tensor]]:
    """A call of SGLang's wrapper on the inputs of `fp8_gemm` that returns (out,): with this config, or with its own."""
    sglang = import_module(SGLANG)
    operands = inputs.x, inputs.w, inputs.x_scale, inputs.w_scale, list(tuned.BLOCK_SHAPE), torch.bfloat16

    def call() -> tuple[Tensor]:
        with _table(sglang, tile):
            return (sglang.w8a8_block_fp8_matmul_triton(*operands),)

    return call


@contextmanager
def _table(sglang: Any, tile: dict[str, int] | None) -> Iterator[None]:
    if tile is None:
        yield
    else:
        with patch.object(sglang, "get_w8a8_block_fp8_configs", lambda *_: {0: tile}):
            yield
