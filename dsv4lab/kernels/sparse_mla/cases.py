"""Named shapes of sparse MLA decode, their inputs, the float64 reference, PyTorch's own bf16 result, and the work."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dsv4lab import kv_cache
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "sparse_mla_decode"
HEAD_DIM = DSV4_FLASH.head_dim
TOKEN_BYTES = 584
LENGTHS = ("full", "short", "mixed")


@dataclass(frozen=True)
class Case:
    """One decode call: B requests, s_q query tokens each, H heads; `window` main and `topk` extra positions a row.

    lengths: "full" selects every position, "short" 40 to 200 of them, "mixed" anything from 0 to all.
    """

    name: str
    B: int
    H: int
    s_q: int = 1
    window: int = DSV4_FLASH.sliding_window
    topk: int = DSV4_FLASH.index_topk
    lengths: str = "full"
    page: int = 256
    extra_page: int = 64

    def __post_init__(self):
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths must be one of {LENGTHS}, got {self.lengths!r}")


@dataclass
class Inputs:
    """Arguments of one `sparse_mla_decode` call, by its argument names."""

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    topk_length: Tensor | None
    attn_sink: Tensor | None
    softmax_scale: float
    extra_k_cache: Tensor | None = None
    extra_indices_in_kvcache: Tensor | None = None
    extra_topk_length: Tensor | None = None


def _cases() -> dict[str, Case]:
    batches = {64: (1, 4, 16, 32, 64, 128, 256), 8: (1, 4, 16, 32, 64, 128), 128: (32, 128)}
    cases = [Case(f"b{B}_h{H}", B, H) for H in batches for B in batches[H]]
    cases += [Case(f"b32_h{H}_{lengths}", 32, H, lengths=lengths) for H in (64, 8) for lengths in ("short", "mixed")]
    cases += [
        Case("b32_h64_window", 32, 64, topk=0),
        Case("b32_h64_c128", 32, 64, topk=256, extra_page=2),
        Case("b16_h64_sq2", 16, 64, s_q=2),
        Case("b8_h64_sq4", 8, 64, s_q=4),
        Case("b2048_h64", 2048, 64),
        Case("b7_h12_odd", 7, 12, s_q=3, window=37, topk=129, lengths="mixed", page=53, extra_page=61),
    ]
    return {case.name: case for case in cases}


CASES = _cases()


def config(case: Case) -> dict:
    """What a record says of the case."""
    return {k: v for k, v in asdict(case).items() if k in ("B", "H", "s_q", "window", "topk", "lengths")}


def work(case: Case) -> Work:
    """One call: every selected KV token once per row; q, out and lse once. Four operations a head, token and dimension.

    Counted for full lengths; "short" and "mixed" count their expected share.
    """
    share = {"full": 1.0, "mixed": 0.5, "short": 0.5 * (40 + 200) / max(case.window + case.topk, 1)}[case.lengths]
    tokens = case.B * case.s_q * (case.window + case.topk) * min(share, 1.0)
    rows = case.B * case.s_q * case.H
    return Work(flops=4.0 * tokens * case.H * HEAD_DIM, bytes=tokens * (TOKEN_BYTES + 4) + rows * (4 * HEAD_DIM + 4))


def _lengths(case: Case, width: int, generator: torch.Generator) -> Tensor:
    if case.lengths == "full":
        return torch.full((case.B,), width, dtype=torch.int32)
    total = case.window + case.topk
    low, high = (round(40 * width / total), round(200 * width / total)) if case.lengths == "short" else (0, width)
    return torch.randint(low, min(high, width) + 1, (case.B,), generator=generator, dtype=torch.int32)


def _indices(case: Case, width: int, slots: Tensor, lengths: Tensor) -> Tensor:
    """slots: distinct flat slots [B * s_q * width] -> indices [B, s_q, width]; lanes past the length are -1."""
    indices = slots.view(case.B, case.s_q, width).int()
    dead = torch.arange(width, device=slots.device) >= lengths.to(slots.device)[:, None, None]
    return indices.masked_fill_(dead, -1)


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` calls over one pool. No two rows or sets share a KV slot: what a call reads, no other has read.

    Values are random in every slot; the same seed gives the same inputs on the same device kind.
    """
    generator, host = torch.Generator(device).manual_seed(seed), torch.Generator().manual_seed(seed)

    def pool(width: int, page: int) -> tuple[Tensor, Tensor]:
        tokens = max(sets * case.B * case.s_q * width, 1)
        cache = kv_cache.random_main(-(-tokens // page), page, device, generator)
        return cache, torch.randperm(tokens, generator=generator, device=device).view(sets, -1)

    main, main_slots = pool(case.window, case.page)
    extra, extra_slots = pool(case.topk, case.extra_page) if case.topk else (None, None)
    calls = []
    for i in range(sets):
        shape = (case.B, case.s_q, case.H, HEAD_DIM)
        q = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16()
        length = _lengths(case, case.window, host)
        call = Inputs(
            q, main, _indices(case, case.window, main_slots[i], length), length.to(device),
            torch.randn(case.H, generator=generator, device=device), DSV4_FLASH.softmax_scale,
        )  # fmt: skip
        if case.topk:
            extra_length = _lengths(case, case.topk, host)
            call.extra_k_cache, call.extra_topk_length = extra, extra_length.to(device)
            call.extra_indices_in_kvcache = _indices(case, case.topk, extra_slots[i], extra_length)
        calls.append(call)
    return calls


def _gather(cache: Tensor, indices: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """KV [B, s_q, width, 512] in float64 and its validity [B, s_q, width]; what is not valid reads slot 0 as zeros."""
    slots = cache.shape[0] * cache.shape[1]
    valid = (indices >= 0) & (indices < slots)
    if lengths is not None:
        lengths = lengths.view(lengths.shape[0], -1, 1)
        valid &= torch.arange(indices.shape[-1], device=indices.device) < lengths
    kv = kv_cache.dequantise_main(cache, indices.masked_fill(~valid, 0))
    return kv.masked_fill_(~valid[..., None], 0.0), valid


def _selected(inputs: Inputs) -> tuple[Tensor, Tensor]:
    kv, valid = _gather(inputs.k_cache, inputs.indices, inputs.topk_length)
    if inputs.extra_k_cache is None:
        return kv, valid
    extra_kv, extra_valid = _gather(inputs.extra_k_cache, inputs.extra_indices_in_kvcache, inputs.extra_topk_length)
    return torch.cat([kv, extra_kv], 2), torch.cat([valid, extra_valid], 2)


def _attention(q: Tensor, kv: Tensor, valid: Tensor, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, s_q, H, 512], kv [B, s_q, T, 512] of one dtype; softmax in fp32 or wider. Out as wide as the softmax."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.einsum("bshd,bstd->bsht", q, kv).to(wide) * scale
    scores = scores.masked_fill(~valid[:, :, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    empty = lse == float("-inf")
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    out = torch.einsum("bsht,bstd->bshd", weights.to(q.dtype), kv).to(wide)
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.to(wide)).masked_fill(empty, 0.0)[..., None]
    return out, lse.masked_fill(empty, float("inf")).transpose(1, 2)


def reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out [B, s_q, H, 512], lse [B, H, s_q]) in float64."""
    kv, valid = _selected(inputs)
    return _attention(inputs.q.double(), kv, valid, inputs.attn_sink, inputs.softmax_scale)


def baseline(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The same in PyTorch with bf16 operands, softmax in fp32, bf16 out: the error that bf16 itself makes."""
    kv, valid = _selected(inputs)
    out, lse = _attention(inputs.q, kv.bfloat16(), valid, inputs.attn_sink, inputs.softmax_scale)
    return out.bfloat16(), lse
