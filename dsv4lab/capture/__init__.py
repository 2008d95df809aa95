"""CUDA graphs without surprises: what breaks a capture (`check`), captures by batch (`graph`), no late compile.

    for finding in capture.check(step, *arguments):
        print(finding)  # model.py:41: item: ...
    fast = capture.graph(step, buckets=[1, 4, 16])
    fast.warm_up(*arguments)  # compiles, captures, and then refuses whatever would compile
    out = fast(*arguments)

`matrix` is the experiment behind the rules: which combinations of torch.compile, warm-up and streams can be captured.
"""

import dsv4lab.kernels  # noqa: F401 (before Triton is imported it decides whether kernels are interpreted)
from dsv4lab.capture.compiles import frozen
from dsv4lab.capture.graphs import BucketedGraph, CaptureFailed, graph
from dsv4lab.capture.lint import Finding, check
from dsv4lab.kernels.launch import ColdKernel

__all__ = ["BucketedGraph", "CaptureFailed", "ColdKernel", "Finding", "check", "frozen", "graph"]
