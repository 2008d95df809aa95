"""SGLang's Triton FP8 MoE (`invoke_fused_moe_kernel`): the two products of the routed experts of one rank.

    up:   out[p] = x[p // topk] @ w[expert(p)].T                         w [E, 2 * inter, hidden]
    down: out[p] = weight(p) * (x[p] @ w[expert(p)].T)                   w [E, hidden, inter]

for every pair p of a token and one of its experts; e4m3 operands with scales as in `fp8_gemm`, out bf16. The pairs are
sorted once for both, into blocks of BLOCK_SIZE_M rows of one expert, so that their configs must agree in that. Neither
quantising nor sorting is timed. Routing is uniformly random; a real model's is not. Only FP8 experts run this: the
published DeepSeek-V4-Flash has FP4 ones, which SGLang gives to other kernels.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4lab import numerics, tuned
from dsv4lab.kernels.fp8_gemm import BLOCK, dequantised, random_fp8, random_scale
from dsv4lab.kv_cache import FP8
from dsv4lab.model import DSV4_FLASH
from dsv4lab.records import Record
from dsv4lab.roofline import Work
from dsv4lab.tune import candidates
from dsv4lab.tune.candidates import KEYS, Tile
from dsv4lab.tune.fp8_gemm import ROWS, sources, tile_of
from dsv4lab.tune.sweep import DEFAULT, Point, winner

EXPERIMENT = "tune_moe"
_PACKAGE = "sglang.srt.layers.moe.moe_runner.triton_utils"
SGLANG, _CONFIGS = f"{_PACKAGE}.fused_moe_triton_kernels", f"{_PACKAGE}.fused_moe_triton_config"
_QUANTISERS = ("sglang_per_token_group_quant_fp8", "per_token_group_quant_fp8")
_SERVER = SimpleNamespace(enable_deterministic_inference=False)


@dataclass(frozen=True)
class Case:
    """One product for M tokens; `inter` is the rank's share of an expert's width."""

    product: str
    M: int
    inter: int
    E: int = DSV4_FLASH.n_routed_experts
    topk: int = DSV4_FLASH.num_experts_per_tok
    hidden: int = DSV4_FLASH.hidden_size

    @property
    def name(self) -> str:
        return f"e{self.E}_n{self.inter}_{self.product}_m{self.M}"

    @property
    def down(self) -> bool:
        return self.product == "down"

    @property
    def weight(self) -> tuple[int, int]:
        return (self.hidden, self.inter) if self.down else (2 * self.inter, self.hidden)


@dataclass
class Inputs:
    """Operands of one call; `ids` int32 and `weights` fp32 are [M, topk]."""

    case: Case
    x: Tensor
    x_scale: Tensor
    w: Tensor
    w_scale: Tensor
    ids: Tensor
    weights: Tensor


def cases(tp: int) -> list[Case]:
    inter = DSV4_FLASH.tensor_parallel(tp).moe_intermediate_size
    return [Case(product, m, inter) for m in ROWS for product in ("up", "down")]


def points(tp: int, *, sms: int, shared: int, arch: str) -> list[Point]:
    tried = {c: {DEFAULT: None} | candidates.moe(c.M, experts=c.E, topk=c.topk, shared=shared) for c in cases(tp)}
    sha256, kind = sources(SGLANG), lambda choice: choice and choice["BLOCK_SIZE_M"]
    return [Point(c.name, sys.modules[__name__], c, choices, sha256, kind, 2) for c, choices in tried.items()]


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` batches with their own routing, over the same experts."""
    g = torch.Generator(device).manual_seed(seed)
    (n, k), rows = case.weight, case.M * (case.topk if case.down else 1)
    w = random_fp8(case.E, n, k, generator=g), random_scale(case.E, n // BLOCK, k // BLOCK, generator=g)
    batches = []
    for _ in range(sets):
        x = random_fp8(rows, k, generator=g), random_scale(rows, k // BLOCK, generator=g)
        chosen = torch.rand(case.M, case.E, device=device, generator=g).topk(case.topk)
        weights = chosen.values / chosen.values.sum(1, keepdim=True)
        batches.append(Inputs(case, *x, *w, chosen.indices.int(), weights))
    return batches


def blank(case: Case) -> Inputs:
    """Inputs on the CPU that are never read, but for the routing."""
    (n, k), rows = case.weight, case.M * (case.topk if case.down else 1)
    x, w = torch.empty(rows, k, dtype=FP8), torch.empty(1, n, k, dtype=FP8)  # of one expert: strides are what counts
    scales = torch.empty(rows, k // BLOCK), torch.empty(1, n // BLOCK, k // BLOCK)
    ids = torch.zeros(case.M, case.topk, dtype=torch.int32)
    return Inputs(case, x, scales[0], w, scales[1], ids, torch.empty(case.M, case.topk))


def variant(case: Case) -> tuple:
    """As for the GEMM, and the product; how many rows the sorted pairs have depends on the config too."""
    pairs = case.M * case.topk
    padded = tuple(_padded(case, block) % 16 == 0 for block in (16, 32, 64, 128))
    return case.product, pairs % 16 == 0, padded, case.weight[1] // BLOCK % 16 == 0, case.weight[1] == BLOCK


def _pairs(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """[M, topk, N], expert by expert, multiplied in `dtype`."""
    case, pairs = inputs.case, inputs.ids.numel()
    x = dequantised(inputs.x, inputs.x_scale).to(dtype)
    out = torch.empty(pairs, case.weight[0], dtype=dtype, device=x.device)
    experts = inputs.ids.flatten()
    for expert in experts.unique().tolist():
        mine = (experts == expert).nonzero()[:, 0]
        rows = x[mine if case.down else mine // case.topk]
        out[mine] = rows @ dequantised(inputs.w[expert], inputs.w_scale[expert]).to(dtype).T
    if case.down:
        out *= inputs.weights.flatten()[:, None].to(dtype)
    return out.view(case.M, case.topk, -1)


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(out,) fp32 of the dequantised operands."""
    return (_pairs(inputs, torch.float32),)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """(out,) of the dequantised operands in bf16."""
    return (_pairs(inputs, torch.bfloat16),)


def judge(inputs: Inputs, outputs: tuple[Tensor], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    return numerics.check(outputs[0], expected[0], usual[0])


def _padded(case: Case, block: int) -> int:
    """The length that SGLang gives to the sorted pairs."""
    pairs = case.M * case.topk
    return pairs * block if pairs < case.E + 1 else pairs + (case.E + 1) * (block - 1)


def aligned(case: Case, ids: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by expert in whole blocks, filled up with a number past the last; the expert of each block; rows.

    As SGLang's `moe_align_block_size`: int32 [padded], [padded / block rounded up], [1].
    """
    experts, device = ids.flatten().long(), ids.device
    counts = torch.zeros(case.E, dtype=torch.long, device=device).scatter_add_(0, experts, torch.ones_like(experts))
    whole = -(-counts // block) * block
    order = experts.argsort(stable=True)
    of = experts[order]
    place = (whole.cumsum(0) - whole)[of] + torch.arange(len(of), device=device) - (counts.cumsum(0) - counts)[of]
    length = _padded(case, block)
    pairs = torch.full((length,), len(of), dtype=torch.int32, device=device).scatter_(0, place, order.int())
    first = torch.arange(-(-length // block), device=device) * block
    owner = torch.searchsorted(whole.cumsum(0), first, right=True).clamp_(max=case.E - 1)
    return pairs, owner.int(), whole.sum(0, keepdim=True).int()


def prepare(choice: Tile | None, inputs: Inputs) -> Callable[[], tuple[Tensor]]:
    """A call of SGLang's wrapper with this config, or, for None, with what SGLang chooses; x is quantised already."""
    sglang, case = import_module(SGLANG), inputs.case
    tile = choice or default(case)
    pairs, owner, rows = aligned(case, inputs.ids, tile["BLOCK_SIZE_M"])
    out = torch.empty(case.M, case.topk, case.weight[0], dtype=torch.bfloat16, device=inputs.x.device)
    quantised = {name: lambda *_, **__: (inputs.x, inputs.x_scale) for name in _QUANTISERS}
    arguments = dict(
        A=inputs.x, B=inputs.w, bias=None, C=out, A_scale=None, B_scale=inputs.w_scale, B_zp=None,
        topk_weights=inputs.weights, topk_ids=inputs.ids, sorted_token_ids=pairs, expert_ids=owner,
        num_tokens_post_padded=rows, mul_routed_weight=case.down, top_k=1 if case.down else case.topk, config=tile,
        compute_type=tl.bfloat16, use_fp8_w8a8=True, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False,
        per_channel_quant=False, block_shape=list(tuned.BLOCK_SHAPE), filter_expert=False,
    )  # fmt: skip

    def call() -> tuple[Tensor]:
        with patch.multiple(sglang, **quantised):
            sglang.invoke_fused_moe_kernel(**arguments)
        return (out,)

    return call


def default(case: Case) -> Tile:
    """What SGLang would launch without our tables."""
    configs = import_module(_CONFIGS)
    up, down = ((case.E, 2 * case.inter, case.hidden), (case.E, case.hidden, case.inter))
    with patch.object(configs, "get_global_server_args", lambda: _SERVER):
        both, (for_down, _) = configs.try_get_optimal_moe_config(
            up, down, case.topk, "fp8_w8a8", case.M, block_shape=list(tuned.BLOCK_SHAPE), return_down_config=True
        )
    chosen = for_down if case.down and for_down else both
    return {key: chosen[key] for key in KEYS}


def _experts_met(case: Case) -> float:
    """How many experts M tokens choose between them, on average."""
    return case.E * (1 - (1 - case.topk / case.E) ** case.M)


def rotated_bytes(case: Case) -> float:
    return _experts_met(case) * case.weight[0] * case.weight[1]


def work(case: Case) -> Work:
    """The experts that are met once, activations and output once."""
    (n, k), pairs = case.weight, case.M * case.topk
    moved = (pairs if case.down else case.M) * k + 2.0 * pairs * n
    return Work(2.0 * pairs * n * k, rotated_bytes(case) + moved)


def config(case: Case) -> dict:
    return asdict(case)


def notes(choice: Tile | None, inputs: Inputs) -> dict:
    """The config, under SGLang's names."""
    return choice or default(inputs.case)


def write(root: Path, gpu: str, tp: int, found: Sequence[Record]) -> list[Path]:
    """A table for each product: for every M the pair of configs with one BLOCK_SIZE_M that takes the least time."""
    both = {case: [r for r in found if r.case == case.name] for case in cases(tp)}
    tables: dict[str, dict[int, Tile]] = {"up": {}, "down": {}}
    for m in ROWS:
        up, down = (case for case in both if case.M == m)
        pair = _pair(both[up], both[down]) or (default(up), default(down))
        for case, tile in zip((up, down), pair, strict=True):
            tables[case.product][m] = tile
    if not any(both.values()):
        return []
    paths = {
        product: tuned.moe_path(root, gpu, triton.__version__, up.E, up.inter, down=product == "down")
        for product in tables
    }
    return [tuned.write_sglang(paths[product], table) for product, table in tables.items()]


def _pair(up: Sequence[Record], down: Sequence[Record]) -> tuple[Tile, Tile] | None:
    """The fastest two that share BLOCK_SIZE_M; None if none do."""
    pairs = []
    for block in {tile_of(record)["BLOCK_SIZE_M"] for record in up}:
        mine = [[r for r in records if tile_of(r)["BLOCK_SIZE_M"] == block] for records in (up, down)]
        if all(mine):
            pairs.append([winner(records) for records in mine])
    best = min(pairs, key=lambda two: sum(record.median_us for record in two), default=None)
    return best and tuple(map(tile_of, best))
