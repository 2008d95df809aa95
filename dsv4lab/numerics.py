"""How a result is judged: error against float64, the tolerance it must keep, bitwise equality, selection overlap.

The rule of the lab: a kernel's error against a float64 reference must stay under twice the error that PyTorch makes in
the kernel's own dtype, plus a small constant. Deterministic means `bitwise_equal` over repeated runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-4
"""The small constant: what one value in 1500 contributes when it rounds to the other bf16 neighbour (2^-8)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Check:
    """One verdict; `dataclasses.asdict` of it is a record's `check`."""

    error: float
    baseline_error: float
    tolerance: float
    passed: bool


def relative_error(x: Tensor, ref: Tensor) -> float:
    """|x - ref| / |ref| in the Euclidean norm over all elements, in float64. NaN or Inf in either: inf.

    Against a reference of zeros only zeros are right (0.0), all else is inf. ValueError if the shapes differ.
    """
    if x.shape != ref.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, ref has {tuple(ref.shape)}")
    x, ref = x.double(), ref.double()
    if not (x.isfinite().all() and ref.isfinite().all()):
        return float("inf")
    error = torch.linalg.vector_norm(x - ref).item()
    return error / torch.linalg.vector_norm(ref).item() if ref.any() else (float("inf") if error else 0.0)


def tolerance(baseline_error: float, floor: float = FLOOR) -> float:
    """The largest error allowed beside a baseline of `baseline_error`; ValueError if that is not finite."""
    if not 0 <= baseline_error < float("inf"):
        raise ValueError(f"baseline_error must be finite and not negative, got {baseline_error}: it judges nothing")
    return 2 * baseline_error + floor


def check(out: Tensor, reference: Tensor, baseline: Tensor, floor: float = FLOOR) -> Check:
    """Judge `out` against the float64 `reference` beside PyTorch's `baseline` in the dtype of `out`; shapes alike."""
    error, baseline_error = relative_error(out, reference), relative_error(baseline, reference)
    allowed = tolerance(baseline_error, floor)
    return Check(error, baseline_error, allowed, error <= allowed)


def _bits(t: Tensor) -> Tensor:
    """The same storage as integers of the same width: any stride will do."""
    return t.view(_BITS[t.element_size()])


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Same shape, same dtype, same bits: NaNs are equal to themselves, -0.0 is not equal to 0.0."""
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def poison_(t: Tensor) -> Tensor:
    """Set every bit of `t` in place and return it: NaN in every float format (fp8 too), -1 or the maximum in ints."""
    _bits(t).fill_(255 if t.element_size() == 1 else -1)
    return t


def selection_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Row by row, the share of the larger selection that both made: |A & B| / max(|A|, |B|), float64 [...].

    a, b: integer indices [..., k] of any two widths; negative entries are padding, order and repeats do not count. Two
    empty rows agree (1.0). ValueError if the leading shapes differ.
    """
    if a.shape[:-1] != b.shape[:-1]:
        raise ValueError(f"a has rows {tuple(a.shape[:-1])}, b has {tuple(b.shape[:-1])}")
    rows = zip(a.reshape(-1, a.shape[-1]).tolist(), b.reshape(-1, b.shape[-1]).tolist(), strict=True)
    overlaps = [_overlap({i for i in x if i >= 0}, {i for i in y if i >= 0}) for x, y in rows]
    return torch.tensor(overlaps, dtype=torch.float64).reshape(a.shape[:-1])


def _overlap(a: set[int], b: set[int]) -> float:
    return len(a & b) / max(len(a), len(b)) if a or b else 1.0
