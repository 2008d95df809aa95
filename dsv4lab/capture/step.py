"""A decode step's cluster on one rank of eight: the glue around attention, attention itself, and the glue after it.

    residual' = residual + hidden
    q         = rope(rms_norm(residual') * weight)          [B, 8, 512] bf16
    caches[new] = norm, RoPE and cast of the token's own row, by the hand-fused kernel where the lab has it
    hidden'   = rope^-1(attention(q, caches))               [B, 4096] bf16

Eight heads of 512 are as wide as the hidden state, so the projections between can be left out: they are GEMMs, and what
is studied here is the glue. What stores and attends is opaque to torch.compile, as an attention backend is in a server.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from dsv4lab.kernels import sparse_mla
from dsv4lab.model import DSV4_FLASH
from dsv4lab.peers import stock_simt

ATTENTION = ("split_k", stock_simt.IMPL)
EPS = 1e-6
POSITIONS = 8192
_HEADS = DSV4_FLASH.tensor_parallel(8).num_attention_heads
_NOPE = DSV4_FLASH.nope_head_dim


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., D] / rms(x) * weight [D]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs of the last 64 of x [B, H, 512] by the angles of cos and sin [B, 1, 32]."""
    even, odd = x[..., _NOPE::2], x[..., _NOPE + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :_NOPE], turned), -1)


class Step:
    """The cluster with its weight, tables and caches, for the batch sizes given; call it, compiled or not.

    attention: one of `ATTENTION`. topk: selected positions beside the window. ValueError for an attention unknown.
    """

    q_shape = (_HEADS, DSV4_FLASH.head_dim)
    hidden_size = DSV4_FLASH.hidden_size

    def __init__(
        self, attention: str, batches: Sequence[int], device: torch.device | str, topk: int = DSV4_FLASH.index_topk
    ):
        generator = torch.Generator().manual_seed(0)
        angles = torch.arange(POSITIONS)[:, None] * 10_000.0 ** -torch.linspace(0, 1, DSV4_FLASH.rope_head_dim // 2)
        self.weight = torch.rand(DSV4_FLASH.hidden_size, generator=generator).to(device)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self._attend = {batch: _attention(attention, batch, device, topk) for batch in batches}
        self.attend = torch.compiler.disable(lambda q, *new: self._attend[q.shape[0]](q, *new))

    def __call__(
        self, hidden: Tensor, residual: Tensor, positions: Tensor, wide: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """hidden, residual: bf16 [B, 4096]. positions: int64 [B]. Returns both anew. wide: of norm and RoPE."""
        residual = residual + hidden
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        q = rope(rms_norm(residual.to(wide), self.weight).unflatten(-1, (_HEADS, -1)), cos, sin)
        out = self.attend(q.bfloat16(), residual[:, : DSV4_FLASH.head_dim], positions)
        return rope(out.to(wide), cos, -sin).flatten(1).to(torch.bfloat16 if wide == torch.float32 else wide), residual


def inputs(batch: int, device: torch.device | str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a step for `batch` requests."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, batch, DSV4_FLASH.hidden_size, generator=generator).bfloat16().to(device)
    return rows[0], rows[1], torch.randint(0, POSITIONS, (batch,), generator=generator).to(device)


def _attention(name: str, batch: int, device: torch.device | str, topk: int) -> Callable[..., Tensor]:
    """q [B, 8, 512], new rows [B, 512], their positions [B] -> out [B, 8, 512]."""
    if name not in ATTENTION:
        raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {name!r}")
    (call,) = sparse_mla.make_inputs(sparse_mla.Case("step", batch, _HEADS, topk=topk), device=device, seed=batch)
    launch = stock_simt.prepare(call) if name == stock_simt.IMPL else sparse_mla.prepare(name, call)
    store = _store(call) if has_norm_rope() else None

    def attend(q: Tensor, kv: Tensor, positions: Tensor) -> Tensor:
        if store:
            store(kv, positions)
        call.q.copy_(q[:, None])
        return launch()[0][:, 0]

    return attend


def has_norm_rope() -> bool:
    """Whether the hand-fused kernel for a token's row is part of this lab."""
    return find_spec("dsv4lab.kernels.norm_rope") is not None


def _store(call: sparse_mla.Inputs) -> Callable[[Tensor, Tensor], None]:
    """Writes rows [B, 512] to the first slot that each request attends to."""
    from dsv4lab.kernels import norm_rope

    device = call.q.device
    weight, turns = torch.ones(DSV4_FLASH.head_dim, device=device), norm_rope.frequencies(POSITIONS, device)
    slots = call.indices[:, 0, 0].contiguous()
    return lambda kv, positions: norm_rope.norm_rope(kv, weight, turns, positions, slots, call.k_cache)
