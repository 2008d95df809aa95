"""Named products of few rows, their inputs, the float64 reference, PyTorch's bf16 result, the verdict, the work."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4lab import numerics
from dsv4lab.model import DSV4_FLASH
from dsv4lab.roofline import Work

EXPERIMENT = "skinny_gemm"


@dataclass(frozen=True)
class Layer:
    """A linear layer of the model, N outputs of K inputs: the dtype of its weights, where SGLang runs it in FP32."""

    N: int
    K: int
    weights: torch.dtype = torch.bfloat16
    forced_fp32: bool = False
    fp32_out: bool = True


LAYERS = {
    "mhc_pre": Layer(DSV4_FLASH.mix_hc, DSV4_FLASH.hc_dim, torch.float32, forced_fp32=True),
    "head_weights": Layer(DSV4_FLASH.index_n_heads, DSV4_FLASH.hidden_size, fp32_out=False),
    "router_gate": Layer(DSV4_FLASH.n_routed_experts, DSV4_FLASH.hidden_size),
    "wkv_gate_index": Layer(512, DSV4_FLASH.hidden_size),
    "wkv_gate_c128": Layer(1024, DSV4_FLASH.hidden_size),
    "wkv_gate_c4": Layer(2048, DSV4_FLASH.hidden_size),
    "indexer_bmm": Layer(DSV4_FLASH.index_n_heads, DSV4_FLASH.index_head_dim, forced_fp32=True),
    "odd": Layer(21, 600, torch.float32, forced_fp32=True),
}
"""What SGLang 0.5.14 computes in decode with few rows. fp32_out: it has its consumer read fp32."""


@dataclass(frozen=True)
class Case:
    """M rows through a layer; `batch` products of M keys by a request's own 64 queries for `indexer_bmm`."""

    name: str
    layer: str
    M: int
    batch: int = 1

    @property
    def shape(self) -> Layer:
        return LAYERS[self.layer]


@dataclass
class Inputs:
    """x: bf16 [M, K]; w: bf16 or fp32 [N, K]; with a batch [batch, M, K] and [batch, N, K]. out[m, n] = x[m] . w[n]."""

    x: Tensor
    w: Tensor
    layer: str


def _cases() -> dict[str, Case]:
    cases = [
        Case(f"{layer}_m{M}", layer, M) for layer in LAYERS for M in (1, 16, 32, 64) if layer[:3] not in ("ind", "odd")
    ]
    cases += [Case(f"indexer_bmm_b32_len{M}", "indexer_bmm", M, 32) for M in (2048, 16_384)]
    cases += [Case(f"mhc_pre_m{M}", "mhc_pre", M) for M in (4, 128, 1024)] + [Case("odd_m7", "odd", 7)]
    return {case.name: case for case in cases}


CASES = _cases()


def config(case: Case) -> dict:
    """What a record says of the case. `name` is the layer's: three shapes are known by it."""
    return {"name": case.layer, "M": case.M, "N": case.shape.N, "K": case.shape.K, "batch": case.batch}


def rotated_bytes(case: Case) -> float:
    """Bytes that one set of inputs reads and no other set does, weights in bf16."""
    return 2.0 * case.batch * (case.M + case.shape.N) * case.shape.K


def work(case: Case) -> Work:
    """One call: operands in bf16 once, outputs in fp32 once."""
    outputs = case.batch * case.M * case.shape.N
    return Work(flops=2.0 * outputs * case.shape.K, bytes=rotated_bytes(case) + 4.0 * outputs)


def make_inputs(case: Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Inputs]:
    """`sets` calls, each with weights of its own. The same seed gives the same inputs on the same device kind."""
    generator = torch.Generator(device).manual_seed(seed)
    calls, layer = [], case.shape
    for _ in range(sets):
        x = torch.randn(case.batch, case.M, layer.K, device=device, generator=generator)
        w = torch.randn(case.batch, layer.N, layer.K, device=device, generator=generator) * layer.K**-0.5
        x, w = x.bfloat16(), w.to(layer.weights)
        calls.append(Inputs(x, w, case.layer) if case.batch > 1 else Inputs(x[0], w[0], case.layer))
    return calls


def reference(inputs: Inputs) -> tuple[Tensor]:
    """(out [..., M, N],) in float64, of the weights as they are."""
    return (inputs.x.double() @ inputs.w.double().mT,)


def baseline(inputs: Inputs) -> tuple[Tensor]:
    """PyTorch's product in bf16, weights cast where they are fp32: the error bf16 makes."""
    return (inputs.x @ inputs.w.bfloat16().mT,)


def judge(inputs: Inputs, outputs: tuple[Tensor, ...], expected: tuple[Tensor], usual: tuple[Tensor]) -> numerics.Check:
    """The verdict on (out,) beside `reference` and `baseline`."""
    return numerics.check(outputs[0], expected[0], usual[0])
