"""Where a request's c128 keys lie in the paged cache: the slots that a c128 layer reads, one for 128 tokens.

    out[b, j] = page_table[b, j // P] * P + j % P  where j < seq_lens[b] // 128, else -1;  P = page_size // 128

A row has P slots for every page of the context limit, 8,192 at 1M tokens. SGLang's `init_compression_metadata` lets one
program write a row, 64 slots at a time, so that its time follows the limit; here as many programs write it as it has
1,024 slots. What it writes is the same, and each page that is not in use stays unread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lab.kernels.arguments import check_contiguous
from dsv4lab.kernels.launch import launch, warm

IMPLEMENTATIONS = ("triton",)
TOKENS = 128
"""Tokens of a slot."""
PAGE = 256
"""Tokens of a page, as SGLang has them for DeepSeek-V4."""

_BLOCK = 1024


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["page_table", "seq_lens"])
def c128_slots_kernel(
    page_table, table_stride, seq_lens, out, width, TOKENS: tl.constexpr, PER_PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = j < tl.load(seq_lens + b) // TOKENS
    page = tl.load(page_table + b * table_stride + j // PER_PAGE, mask=seen & (j < width), other=0)
    tl.store(out + b * width + j, tl.where(seen, page * PER_PAGE + j % PER_PAGE, -1), mask=j < width)


def empty(page_table: Tensor, page_size: int) -> Tensor:
    """The `out` of a call, not initialised."""
    bs, pages = page_table.shape
    return torch.empty(bs, page_size // TOKENS * pages, dtype=torch.int32, device=page_table.device)


def c128_slots(page_table: Tensor, seq_lens: Tensor, page_size: int, out: Tensor | None = None) -> Tensor:
    """The slots of each row's c128 keys, -1 behind them: int32 [bs, page_size // 128 * pages].

    page_table: int32 [bs, pages] with a dense last dimension and any row stride; pages not in use may hold anything.
    seq_lens: contiguous int32 or int64 [bs], tokens of each row, read on the device; past the table all of it counts.
    page_size: tokens of a page, a multiple of 128. out: contiguous, allocated if absent.

    Raises ValueError naming the argument and what it was, ColdKernel if the stream is capturing and this variant was
    never run before. No host sync.
    """
    if page_size < TOKENS or page_size % TOKENS:
        raise ValueError(f"page_size must be a multiple of {TOKENS}, got {page_size}")
    dense = page_table.ndim == 2 and (page_table.shape[1] <= 1 or page_table.stride(1) == 1)
    if page_table.dtype != torch.int32 or not dense:
        raise ValueError(
            f"page_table must be int32 [bs, pages] with dense rows, got {page_table.dtype} {list(page_table.shape)} "
            f"strides {page_table.stride()}"
        )
    bs, device = len(page_table), page_table.device
    out = empty(page_table, page_size) if out is None else out
    check_contiguous("seq_lens", seq_lens, (torch.int32, torch.int64), (bs,), device)
    check_contiguous("out", out, torch.int32, (bs, page_size // TOKENS * page_table.shape[1]), device)
    if out.numel():
        launch(*_launch(page_table, seq_lens, page_size, out))
    return out


def warm_up(device: torch.device | str = "cuda", *, page_size: int = PAGE) -> None:
    """Compile and load every variant that calls with this page size can need, whatever bs, pages and lengths."""
    for whole in (torch.int32, torch.int64):
        for pages in (1, 3, 16):
            table = torch.zeros(1, pages, dtype=torch.int32, device=device)
            lens = torch.zeros(1, dtype=whole, device=device)
            warm(*_launch(table, lens, page_size, empty(table, page_size)))


def _launch(page_table: Tensor, seq_lens: Tensor, page_size: int, out: Tensor) -> tuple:
    """(kernel, grid, arguments) of a call; nothing is launched."""
    bs, width = out.shape
    arguments = dict(
        page_table=page_table, table_stride=page_table.stride(0), seq_lens=seq_lens, out=out, width=width,
        TOKENS=TOKENS, PER_PAGE=page_size // TOKENS, BLOCK=_BLOCK,
    )  # fmt: skip
    return c128_slots_kernel, (bs, triton.cdiv(width, _BLOCK)), arguments
