"""Thin adapters to other people's kernels, imported only when asked.

One module a rival, each with

- `IMPL`: the name its records carry;
- `LSE_INCLUDES_SINK`, of attention: its convention for the returned log-sum-exp (ours excludes the sink);
- `unavailable() -> str | None`: one line saying why it cannot run here and the command that helps, or None;
- `notes(inputs) -> dict`: what a reader of the record must know (padding, package version);
- `prepare(inputs) -> launch`: everything a serving engine would hoist out of the layer loop; `launch()` returns what
  the kernel module's own `prepare` has it return, only launches kernels and may be captured in a CUDA graph.
"""

from importlib import import_module
from types import ModuleType

PEERS = {"sparse_mla_decode": ("flashmla", "stock_simt"), "mqa_logits": ("deepgemm",)}


def peers_of(experiment: str) -> list[ModuleType]:
    """The adapters to the rivals of `experiment`, importing nothing of the rivals themselves."""
    return [import_module(f"dsv4lab.peers.{name}") for name in PEERS.get(experiment, ())]
