"""What the profiler recorded of an op's inputs: shapes, dtypes and strides, parsed once for each distinct op call."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import pandas as pd

SIZES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2,
    "unsigned char": 1, "signed char": 1, "char": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element, by the profiler's names; its 8-bit floats begin with c10::Float8."""

NARROW = ("c10::BFloat16", "c10::Half", "c10::Float8")
INTEGERS = ("int", "long int", "long")


@dataclass(frozen=True)
class Operand:
    """A tensor among the inputs of an op. `dtype` is "" within lists of tensors, `strides` empty if not recorded."""

    dims: tuple[int, ...]
    dtype: str = ""
    strides: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        return self.elements * SIZES.get(self.dtype, 1 if self.dtype.startswith("c10::Float8") else 2)

    @property
    def narrow(self) -> bool:
        """Of a floating type narrower than FP32."""
        return self.dtype.startswith(NARROW)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Call:
    """One distinct way in which the trace launches kernels: an op with its inputs."""

    op: str
    parents: tuple[str, ...]
    operands: tuple[Operand, ...]

    def within(self, *names: str) -> bool:
        """Whether the op or one around it has one of these names, after its namespace and without a final _."""
        return any(op.rpartition("::")[2].rstrip("_") in names for op in (self.op, *self.parents))

    def __str__(self) -> str:
        shapes = " x ".join(f"{operand}{operand.dtype and ' ' + _short(operand.dtype)}" for operand in self.operands)
        return f"{self.op} {shapes}".strip()


def _short(dtype: str) -> str:
    known = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "long int": "int64", "int": "int32"}
    return known.get(dtype, dtype.removeprefix("c10::"))


def calls(events: pd.DataFrame) -> tuple[list[Call], np.ndarray]:
    """The distinct calls, and for each event which of them launched it."""
    columns = ["op", "parents", "shapes", "dtypes", "strides"]
    codes = pd.DataFrame({name: events[name].cat.codes.to_numpy() for name in columns})
    groups = codes.groupby(columns, sort=False)
    firsts = events[columns].iloc[groups.head(1).index].astype(object)
    found = [_call(*(text if isinstance(text, str) else "" for text in row)) for row in firsts.itertuples(index=False)]
    return found, groups.ngroup().to_numpy()


def _call(op: str, parents: str, shapes: str, dtypes: str, strides: str) -> Call:
    return Call(op, tuple(parents.split(" < ")) if parents else (), operands(shapes, dtypes, strides))


@lru_cache(maxsize=65536)
def operands(shapes: str, dtypes: str = "", strides: str = "") -> tuple[Operand, ...]:
    """The tensors of "[[32,4096],[],[[1,2],[3,4]]]": an empty list is no tensor, a list of lists several."""
    dims = json.loads(shapes) if shapes else []
    types = json.loads(dtypes) if dtypes else []
    steps = json.loads(strides) if strides else []
    found = []
    for number, entry in enumerate(dims):
        dtype = str(types[number]) if number < len(types) else ""
        step = steps[number] if number < len(steps) else []
        found += _tensors(entry, dtype, step)
    return tuple(found)


def _tensors(entry: object, dtype: str, step: object) -> Iterator[Operand]:
    if not isinstance(entry, list) or not entry:
        return
    if all(isinstance(size, int) for size in entry):
        flat = isinstance(step, list) and all(isinstance(size, int) for size in step)
        yield Operand(tuple(entry), dtype, tuple(step) if flat else ())
    else:
        for part in entry:
            yield from _tensors(part, "", [])
