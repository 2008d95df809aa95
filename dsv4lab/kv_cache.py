"""The two paged caches of DeepSeek-V4-Flash, byte for byte as SGLang stores them: write, read, dequantise.

Main cache, 584 bytes a token, K and V being the same 512 values. A page of P tokens is laid out as
    P x 576 bytes   448 values in FP8 e4m3, then 64 rotary values in bf16
    P x 8 bytes     7 UE8M0 scales (2^(byte - 127), one per 64 FP8 values), then 1 byte that nobody writes
and padded to a multiple of 576 bytes. Index cache, 132 bytes a token, unpadded:
    P x 128 bytes   128 values in FP8 e4m3
    P x 4 bytes     1 fp32 scale

A cache travels as a uint8 (or float8_e4m3fn) view [N, P, 1, 584] or [N, P, 1, 132]. **Only its stride(0), the bytes
from page to page, and its shape[1], the page size, mean anything**: the rows of the view are not those of the layout,
whose scales stand in the page's footer. stride(0) may exceed the page, as it does in a view of one shared pool.

A slot is page * P + offset, int32 or int64, on the cache's device. On the CPU a slot out of range is a ValueError; on a
GPU nothing waits for the device, so -1 and slots past the end are the caller's to mask.

Source: SGLang 0.5.14, `jit_kernel/csrc/deepseek_v4/store.cuh` (writer), `srt/mem_cache/deepseek_v4_memory_pool.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lab.model import DSV4_FLASH, DeepSeekV4Flash

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
HEAD_DIM, NOPE, GROUP, GROUPS = 512, 448, 64, 7
INDEX_DIM = 128
SCALE_RANGE = (AMAX_FLOOR / FP8_MAX * (1 - 2**-20), 1e4)
"""Scales that a writer leaves behind: none is smaller (less rounding), and model activations give none larger."""

_CHUNK = 2**15  # tokens filled at a time: about 0.4 GiB of temporaries


@dataclass(frozen=True)
class _Layout:
    """A page of P tokens: P rows of `data` bytes, then P rows of `scale` bytes, padded to a multiple of `align`."""

    data: int
    scale: int
    align: int

    @property
    def row(self) -> int:
        return self.data + self.scale

    def page_bytes(self, page_size: int) -> int:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        return -(-page_size * self.row // self.align) * self.align

    def view(self, pool: Tensor, page_size: int) -> Tensor:
        if pool.ndim != 2 or pool.dtype != torch.uint8 or pool.stride(1) != 1:
            raise ValueError(f"pool must be uint8 [pages, bytes] with dense rows, got {pool.dtype} {tuple(pool.shape)}")
        if pool.shape[1] < self.page_bytes(page_size):
            raise ValueError(
                f"pool has {pool.shape[1]} bytes a page, {page_size} tokens need {self.page_bytes(page_size)}"
            )
        return pool.as_strided((pool.shape[0], page_size, 1, self.row), (pool.stride(0), self.row, self.row, 1))

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str, pool_stride: int | None) -> Tensor:
        stride = self.page_bytes(page_size) if pool_stride is None else pool_stride
        return self.view(torch.zeros(num_pages, stride, dtype=torch.uint8, device=device), page_size)

    def parts(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The storage as the layout has it: bytes [N, P, data] and scale bytes [N, P, scale], both views."""
        if cache.ndim not in (3, 4) or cache.shape[-1] != self.row or cache.dtype not in (torch.uint8, FP8):
            raise ValueError(
                f"cache must be uint8 or {FP8} [N, P, 1, {self.row}], got {cache.dtype} {tuple(cache.shape)}"
            )
        raw, (pages, page_size), stride = cache.view(torch.uint8), cache.shape[:2], cache.stride(0)
        if pages > 1 and stride < page_size * self.row:
            raise ValueError(f"cache has stride(0) {stride}, pages of {page_size} tokens need {page_size * self.row}")
        footer = raw.storage_offset() + page_size * self.data
        return (
            raw.as_strided((pages, page_size, self.data), (stride, self.data, 1)),
            raw.as_strided((pages, page_size, self.scale), (stride, self.scale, 1), footer),
        )

    def locate(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`parts`, and the page and the offset of each slot; what indexes them computes addresses in 64 bits."""
        data, scale = self.parts(cache)
        if slots.dtype not in (torch.int32, torch.int64) or slots.device != cache.device:
            raise ValueError(f"slots must be int32 or int64 on {cache.device}, got {slots.dtype} on {slots.device}")
        pages, page_size = cache.shape[:2]
        if slots.device.type == "cpu" and (wrong := slots[(slots < 0) | (slots >= pages * page_size)]).numel():
            raise ValueError(f"slots must be in 0..{pages * page_size - 1}, got {wrong[0].item()}")
        return data, scale, slots // page_size, slots % page_size


_MAIN = _Layout(data=NOPE + 2 * (HEAD_DIM - NOPE), scale=8, align=576)
_INDEX = _Layout(data=INDEX_DIM, scale=4, align=1)


def _scale(x: Tensor) -> Tensor:
    """max(1e-4, amax) / 448 over the last dimension, fp32. (448 times such a scale has that same scale, to the bit.)"""
    amax = x.abs().amax(-1).float().clamp(min=AMAX_FLOOR)
    return amax / torch.full_like(amax, FP8_MAX)  # by a scalar, CUDA would multiply by a rounded reciprocal


def _to_fp8(x: Tensor, inverse_scale: Tensor) -> Tensor:
    return (x.float() * inverse_scale[..., None]).to(FP8)  # at most 448 by its scale: nothing to clamp


def _values(name: str, x: Tensor, width: int) -> Tensor:
    if not x.is_floating_point() or x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"{name} must be floating point [..., {width}], got {x.dtype} {tuple(x.shape)}")
    return x


def main_page_bytes(page_size: int) -> int:
    """Bytes of a main-cache page of `page_size` tokens, padding included: 256 -> 149760, 64 -> 37440, 2 -> 1728."""
    return _MAIN.page_bytes(page_size)


def request_bytes(tokens: int, model: DeepSeekV4Flash = DSV4_FLASH) -> dict[str, int]:
    """Bytes that one request of `tokens` holds in whole pages, by what they are: c4 KV, index keys, c128 KV, window KV.

    The same on every tensor-parallel rank, for there is one KV head and the indexer is not split. Of the window a
    request holds the pages that its last tokens lie in. Next-token-prediction layers and the compressors' state, which
    does not grow, are left out. ValueError for fewer than 1 token.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    page, layers = model.page_size, model.layer_counts
    pages = -(-tokens // page)
    window_pages = pages - max(0, tokens - model.sliding_window) // page
    return {
        "c4 KV": pages * layers["c4"] * main_page_bytes(page // 4),
        "index keys": pages * layers["c4"] * index_page_bytes(page // 4),
        "c128 KV": pages * layers["c128"] * main_page_bytes(page // 128),
        "window KV": window_pages * model.num_hidden_layers * main_page_bytes(page),
    }


def main_view(pool: Tensor, page_size: int) -> Tensor:
    """The cache view [N, page_size, 1, 584] of a uint8 pool [N, bytes a page], which may be a slice of a wider pool."""
    return _MAIN.view(pool, page_size)


def allocate_main(
    num_pages: int, page_size: int, device: torch.device | str, *, pool_stride: int | None = None
) -> Tensor:
    """A zeroed main cache [num_pages, page_size, 1, 584], uint8, strides (pool_stride or page bytes, 584, 584, 1)."""
    return _MAIN.allocate(num_pages, page_size, device, pool_stride)


def quantise_main(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finite x [..., 512] -> FP8 [..., 448], rotary bf16 [..., 64], UE8M0 scale bytes uint8 [..., 7].

    A scale is rounded up to a power of two, so that nothing saturates. What a cache holds survives a second round trip
    bit for bit as values; its bytes do too, save in a group whose largest FP8 value is 224: that one fits the next
    smaller scale exactly, and takes it.
    """
    groups = _values("x", x, HEAD_DIM)[..., :NOPE].unflatten(-1, (GROUPS, GROUP))
    bits = _scale(groups).view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    inverse_scale = ((254 - exponent) << 23).view(torch.float32)
    nope = _to_fp8(groups, inverse_scale).flatten(-2)
    return nope, x[..., NOPE:].to(torch.bfloat16), exponent.to(torch.uint8)


def write_main(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Quantise x [*slots.shape, 512] into the main cache; padding stays as it was. Of repeated slots any one wins."""
    data, scale, page, offset = _MAIN.locate(cache, slots)
    if x.shape[:-1] != slots.shape:
        raise ValueError(f"x must have shape {(*slots.shape, HEAD_DIM)}, got {tuple(x.shape)}")
    nope, rope, scale_bytes = quantise_main(x)
    data[page, offset] = torch.cat([nope.view(torch.uint8), rope.contiguous().view(torch.uint8)], -1)
    scale[..., :GROUPS][page, offset] = scale_bytes


def read_main(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `quantise_main` made, as stored: FP8 [*slots.shape, 448], bf16 [..., 64], UE8M0 bytes [..., 7]."""
    data, scale, page, offset = _MAIN.locate(cache, slots)
    row = data[page, offset]
    return row[..., :NOPE].view(FP8), row[..., NOPE:].view(torch.bfloat16), scale[..., :GROUPS][page, offset]


def dequantise_main(cache: Tensor, slots: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The values [*slots.shape, 512] of the main cache, exact in float64, fp32 and bf16 alike."""
    nope, rope, scale_bytes = read_main(cache, slots)
    scale = scale_bytes.view(torch.float8_e8m0fnu).float().to(dtype)
    groups = nope.to(dtype).unflatten(-1, (GROUPS, GROUP)) * scale[..., None]
    return torch.cat([groups.flatten(-2), rope.to(dtype)], -1)


def random_main(
    num_pages: int,
    page_size: int,
    device: torch.device | str,
    generator: torch.Generator,
    pool_stride: int | None = None,
) -> Tensor:
    """A main cache with every slot written: normal values of about unit size, each group of 64 at its own scale."""
    cache = allocate_main(num_pages, page_size, device, pool_stride=pool_stride)
    for slots in torch.arange(num_pages * page_size, device=device).split(_CHUNK):
        x = torch.randn(len(slots), GROUPS + 1, GROUP, device=device, generator=generator)
        size = torch.randint(-2, 2, (len(slots), GROUPS + 1, 1), device=device, generator=generator)
        write_main(cache, slots, (x * torch.exp2(size)).flatten(-2))
    return cache


def index_page_bytes(page_size: int) -> int:
    """Bytes of an index-cache page of `page_size` tokens: 64 -> 8448."""
    return _INDEX.page_bytes(page_size)


def index_view(pool: Tensor, page_size: int) -> Tensor:
    """The cache view [N, page_size, 1, 132] of a uint8 pool [N, bytes a page], which may be a slice of a wider pool."""
    return _INDEX.view(pool, page_size)


def allocate_index(
    num_pages: int, page_size: int, device: torch.device | str, *, pool_stride: int | None = None
) -> Tensor:
    """A zeroed index cache [num_pages, page_size, 1, 132], uint8, strides (pool_stride or page bytes, 132, 132, 1)."""
    return _INDEX.allocate(num_pages, page_size, device, pool_stride)


def quantise_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finite x [..., 128] -> FP8 [..., 128] and its scale fp32 [...], which is not rounded to a power of two."""
    scale = _scale(_values("x", x, INDEX_DIM))
    return _to_fp8(x, 1 / scale), scale


def write_index(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Quantise x [*slots.shape, 128] into the index cache."""
    data, footer, page, offset = _INDEX.locate(cache, slots)
    if x.shape[:-1] != slots.shape:
        raise ValueError(f"x must have shape {(*slots.shape, INDEX_DIM)}, got {tuple(x.shape)}")
    values, scale = quantise_index(x)
    data[page, offset] = values.view(torch.uint8)
    footer[page, offset] = scale[..., None].view(torch.uint8)


def read_index(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantise_index` made, as stored: FP8 [*slots.shape, 128] and scale fp32 [*slots.shape]."""
    data, footer, page, offset = _INDEX.locate(cache, slots)
    return data[page, offset].view(FP8), footer[page, offset].view(torch.float32).squeeze(-1)


def check_main(cache: Tensor, slots: Tensor) -> None:
    """ValueError naming the first slot that no writer of this layout left so: its scale, or a value not finite.

    Waits for the device. Catches slots never written and, over a few slots of real data, pages written in another
    layout, whose footers hold values: a debug check, not a proof.
    """
    nope, rope, scale_bytes = read_main(cache, slots)
    _check_scales("main", slots, scale_bytes.view(torch.float8_e8m0fnu).float())
    _check_finite("main", slots, torch.cat([nope.float(), rope.float()], -1))


def check_index(cache: Tensor, slots: Tensor) -> None:
    """The same for the index cache."""
    values, scale = read_index(cache, slots)
    _check_scales("index", slots, scale[..., None])
    _check_finite("index", slots, values.float())


def _check_scales(name: str, slots: Tensor, scale: Tensor) -> None:
    low, high = SCALE_RANGE
    _refuse((scale >= low) & (scale <= high), name, slots, scale, f"scale, outside {low:.2g} to {high:g}")


def _check_finite(name: str, slots: Tensor, values: Tensor) -> None:
    _refuse(values.isfinite(), name, slots, values, "value, not finite")


def _refuse(good: Tensor, name: str, slots: Tensor, values: Tensor, what: str) -> None:
    if bad := (~good).nonzero().tolist():
        slot, value = slots[tuple(bad[0][:-1])].item(), values[tuple(bad[0])].item()
        raise ValueError(f"{name} cache, slot {slot}: {value:.4g} is a {what}: never written, or another layout")


def check_pages(
    name: str, cache: Tensor, token_bytes: int, device: torch.device, page_sizes: tuple[int, ...] = ()
) -> None:
    """ValueError unless a kernel can read `cache` on `device`: a view [pages, page, 1, token_bytes] of one-byte values,
    its pages apart and at multiples of 16 bytes; page one of `page_sizes`, or any."""
    known = not page_sizes or (cache.ndim == 4 and cache.shape[1] in page_sizes)
    if cache.element_size() != 1 or cache.ndim != 4 or cache.shape[2:] != (1, token_bytes) or not known:
        raise ValueError(
            f"{name} must be uint8 or float8_e4m3fn [pages, page, 1, {token_bytes}]"
            f"{f' with page one of {page_sizes}' if page_sizes else ''}, got {cache.dtype} {tuple(cache.shape)}"
        )
    if cache.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {cache.device}")
    stride, page_bytes = cache.stride(0), cache.shape[1] * token_bytes
    if cache.shape[0] > 1 and stride < page_bytes:
        raise ValueError(f"{name}.stride(0) must be at least {page_bytes} bytes, got {stride}")
    if stride % 16 or cache.data_ptr() % 16:
        raise ValueError(
            f"{name} must have pages at multiples of 16 bytes, got stride {stride} at {cache.data_ptr():#x}"
        )
