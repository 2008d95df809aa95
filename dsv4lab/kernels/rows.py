"""What the indexer's kernels share: how many keys a query sees, the order of scores, and maxima over groups of them.

Lengths are read on the device alone. A score's *key* is an int32 that sorts as the scores do: NaN below -inf, and -0.0
equal to 0.0. The *maxima* of a row of scores are the largest keys of every 4, 16, 64 and 256 consecutive ones, stored
one level after the other in 88 int32 for every 256 scores: 64 + 16 + 4 + 1, and 3 unused that keep levels aligned.
Those of 256 are left to the top-k, which takes them where a row is longer than 64 of its tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-(2**31))


def maxima_ints(width: int) -> int:
    """int32 that the maxima of a row of `width` scores take."""
    return 88 * -(-width // 256)


def check_lengths(name: str, lengths: Tensor, batch: int, next_n: int, device: torch.device) -> None:
    """ValueError unless `lengths` is int32 [batch], [batch, 1] or [batch, next_n] on `device`."""
    shapes = (batch,), (batch, 1), (batch, next_n)
    if lengths.dtype != torch.int32 or tuple(lengths.shape) not in shapes or lengths.device != device:
        raise ValueError(
            f"{name} must be int32 [{batch}], [{batch}, 1] or [{batch}, {next_n}] on {device}, "
            f"got {lengths.dtype} {list(lengths.shape)} on {lengths.device}"
        )


def own_lengths(lengths: Tensor, batch: int, next_n: int) -> Tensor:
    """`query_length` on the host's side: the keys that each query sees, int32 [batch, next_n], not clamped."""
    lengths = lengths.view(batch, -1)
    if lengths.shape[1] == next_n:
        return lengths
    return lengths - torch.arange(next_n - 1, -1, -1, device=lengths.device, dtype=torch.int32)


def length_arguments(lengths: Tensor, next_n: int) -> dict:
    """Arguments of `query_length`. One length a request is that of its last query; each earlier sees one key less."""
    own = lengths.ndim == 2 and lengths.shape[1] == next_n
    return dict(
        lengths=lengths,
        length_stride_b=lengths.stride(0),
        length_stride_n=lengths.stride(1) if own else 0,
        length_step=0 if own else 1,
        next_n=next_n,
    )


@triton.jit
def query_length(lengths, stride_b, stride_n, step, b, j, next_n, limit, mask):
    """Keys that query j of request b sees, clamped to 0..limit; 0 where not `mask`."""
    n = tl.load(lengths + b.to(tl.int64) * stride_b + j * stride_n, mask=mask, other=-1000)
    return tl.minimum(tl.maximum(n - step * (next_n - 1 - j), 0), limit)


@triton.jit
def flip(bits):
    """The bits of an fp32 score -> its key, and a key -> the bits of its score: negative numbers count downwards."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_key(x):
    """fp32 scores -> int32 keys in the same order; `LOWEST` for NaN."""
    return tl.where(x == x, flip((x + 0.0).to(tl.int32, bitcast=True)), LOWEST)


@triton.jit
def _store_level(maxima, keys, first, n, N: tl.constexpr, GROUP: tl.constexpr):
    at = first // GROUP + tl.arange(0, N)
    apart = at ^ (n >> 31)  # hides from the compiler that they lie side by side: it stores them as threads hold them
    tl.store(maxima + apart, keys, mask=at * GROUP < n)


@triton.jit
def store_maxima(maxima, x, first, n, units, N: tl.constexpr):
    """Maxima over 4, 16 and 64 of the scores x [N] at first..first + N - 1, of a row of n.

    maxima: int32, the row's; units: 256-score units it has room for. What is past the row's end must be NaN. first and
    N are multiples of 64.
    """
    m4 = score_key(tl.max(tl.reshape(x, (N // 4, 4)), 1))
    m16 = tl.max(tl.reshape(m4, (N // 16, 4)), 1)
    m64 = tl.max(tl.reshape(m16, (N // 64, 4)), 1)
    _store_level(maxima, m4, first, n, N // 4, 4)
    _store_level(maxima + units * 64, m16, first, n, N // 16, 16)
    _store_level(maxima + units * 80, m64, first, n, N // 64, 64)
