"""What `dsv4lab.tune.compiling` compiles in other processes: a kernel, and candidates that fail in all ways."""

import os

import torch
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + at, mask=at < n, other=0.0), 0)
    tl.store(out + tl.program_id(0), total)


def blank(case):
    return torch.empty(case), torch.empty(case)


def variant(case):
    return case % 16


def prepare(choice, inputs):
    x, out = inputs

    def call():
        if choice == "aborts":
            os.abort()
        if choice == "raises":
            raise ValueError("no such tile")
        scale_kernel[(1,)](x, out, x.numel(), BLOCK=choice)
        return (out,)

    return call
