"""What a c4 layer of a decode step takes that the lab replaces: indexer and attention as one captured sequence.

    slots = indexer(queries, index cache);  out = attention(heads, window + the slots chosen)

Timed whole and in its two parts, in turns and by graph replay, each on as many sets of inputs as the caches need to be
cold. A profile of the whole then tells its launches and how long the GPU lies idle between them.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4lab import kv_cache, numerics, timing, trace
from dsv4lab.journal import Journal
from dsv4lab.kernels import indexer, sparse_mla, topk
from dsv4lab.model import DSV4_FLASH
from dsv4lab.provenance import command_line, environment, git_state, kernel_hash
from dsv4lab.records import Clocks, Record
from dsv4lab.roofline import Work
from dsv4lab.trace import timeline
from dsv4lab.verdict import CheckFailed

EXPERIMENT = "c4_layer"
CASES = tuple(
    f"b{B}_max{DSV4_FLASH.c4_positions(1_048_576)}_len{actual}"
    for B, actual in ((1, 128), (32, 128), (32, 2048), (32, 16384), (8, 262_144))
)
PARTS = ("indexer", "attention", "layer")
MOST_SETS = 8
ATTENTION = "gluon"


@dataclass
class Layer:
    """One c4 layer's call on buffers of its own: `indexer` and `attention` are its parts, calling it runs both.

    slots: int32 [B, k], what the indexer chose. out: bf16 [B, 1, H, 512].
    """

    keys: indexer.Inputs
    heads: sparse_mla.Inputs
    slots: Tensor
    logits: Tensor
    workspace: Tensor

    def indexer(self) -> None:
        arguments = {name: value for name, value in vars(self.keys).items() if name != "k"}
        indexer.indexer(
            **arguments, out_page_indices=self.slots, logits=self.logits, workspace=self.workspace, impl="triton"
        )

    def attention(self) -> Tensor:
        return sparse_mla.sparse_mla_decode(**vars(self.heads), impl=ATTENTION)[0]

    def __call__(self) -> Tensor:
        self.indexer()
        return self.attention()


def layers(case: indexer.Case, *, device: torch.device | str, seed: int = 0, sets: int = 1) -> list[Layer]:
    """`sets` layers of a case of the indexer, on one pool of pages and no page shared; all selections begin empty."""
    generator = torch.Generator(device).manual_seed(seed)
    keys = indexer.make_inputs(case, device=device, seed=seed, sets=sets)
    shape = sparse_mla.Case(case.name, case.B, DSV4_FLASH.num_attention_heads, topk=0)
    heads = sparse_mla.make_inputs(shape, device=device, seed=seed, sets=sets)
    pages, page = keys[0].kv_cache.shape[:2]
    cache = kv_cache.random_main(pages, page, device, generator)
    made = []
    for each, call in zip(keys, heads, strict=True):
        slots = torch.full((case.B, each.k), -1, dtype=torch.int32, device=device)
        call.extra_k_cache, call.extra_indices_in_kvcache = cache, slots.view(case.B, 1, each.k)
        call.extra_topk_length = each.context_lens.view(-1).clamp(max=each.k)
        logits = torch.empty(case.B, each.max_context_len, device=device)
        shape = topk.workspace_shape(case.B, each.max_context_len, each.k)
        made.append(Layer(each, call, slots, logits, torch.zeros(shape, dtype=torch.int32, device=device)))
    return made


def check(layer: Layer) -> numerics.Check:
    """The attention over the slots chosen, against float64; the slots themselves must be those of float64 logits.

    Raises CheckFailed naming what is wrong.
    """
    out = layer()
    chosen = indexer.judge(layer.keys, (layer.slots,), indexer.reference(layer.keys), indexer.baseline(layer.keys))
    found = numerics.check(out, sparse_mla.reference(layer.heads)[0], sparse_mla.baseline(layer.heads)[0])
    for name, verdict in (("the selection", chosen), ("the attention", found)):
        if not verdict.passed:
            raise CheckFailed(f"{name} has error {verdict.error:.2e}, over its tolerance {verdict.tolerance:.2e}")
    return found


def idle(calls: Sequence[Callable[[], Any]]) -> dict[str, float]:
    """Of `calls` captured one after the other: launches, span and busy time of the GPU in us a call, share idle."""
    with trace.record(lambda: [call() for call in calls], steps=1) as taken:
        events = taken.replay.events
    span = int((events["ts"] + events["dur"]).max() - events["ts"].min())
    busy = timeline.busy(events)
    per_call = 1e-3 / len(calls)
    return {
        "launches": len(events) / len(calls),
        "span_us": span * per_call,
        "busy_us": busy * per_call,
        "idle_share": 1 - busy / span,
    }


def run(cases: Sequence[str] = CASES, *, directory: Path | str | None = None, budget_s: float = 1.0) -> Path:
    """Checks and times the layer of each case of the indexer, and returns the new record file; impl is one of `PARTS`.

    budget_s: replay seconds for one case. ValueError for an unknown case; RuntimeError without a CUDA GPU;
    CheckFailed if a result is wrong.
    """
    if unknown := [name for name in cases if name not in indexer.CASES]:
        raise ValueError(f"cases must be of {', '.join(indexer.CASES)}, got {unknown[0]!r}")
    device = timing.require_gpu()
    shared = dict(seed=1, argv=command_line(), git=git_state(), env=environment(device))
    shared["kernel_sha256"] = kernel_hash(sys.modules[__name__])
    with Journal(EXPERIMENT, shared["env"].gpu, directory) as journal:
        for name in cases:
            journal.add(_measure(indexer.CASES[name], device, budget_s, shared))
        return journal.finish()


def _measure(case: indexer.Case, device: torch.device, budget_s: float, shared: dict) -> list[Record]:
    sets = min(timing.rotation_sets(indexer.rotated_bytes(case), timing.l2_bytes(device)), MOST_SETS)
    made = layers(case, device=device, seed=shared["seed"], sets=sets)
    verdict = asdict(max((check(layer) for layer in made), key=lambda found: found.error))
    calls = {part: [layer if part == "layer" else getattr(layer, part) for layer in made] for part in PARTS}
    before = timing.clocks(device)
    timed = timing.graph_replay_us(calls, budget_s=budget_s, device=device)
    if timed.errors:
        raise CheckFailed("; ".join(f"{case.name}, {part}: {error}" for part, error in timed.errors.items()))
    clocks = Clocks(before=before, after=timing.clocks(device))
    return [
        Record(
            experiment=EXPERIMENT,
            case=case.name,
            impl=part,
            config=indexer.config(case) | {"attention": ATTENTION, "H": DSV4_FLASH.num_attention_heads},
            method={"timer": "cuda graph replay", "sets": sets},
            samples_us=samples,
            check=verdict,
            work=_work(case, part),
            date_utc=datetime.now(UTC),
            clocks=clocks,
            result=idle(calls[part]),
            **shared,
        )
        for part, samples in timed.samples_us.items()
    ]


def _work(case: indexer.Case, part: str) -> Work:
    chosen = min(case.actual, DSV4_FLASH.index_topk)
    parts = {
        "indexer": indexer.work(case),
        "attention": sparse_mla.work(sparse_mla.Case(case.name, case.B, DSV4_FLASH.num_attention_heads, topk=chosen)),
    }
    counted = parts.values() if part == "layer" else [parts[part]]
    return Work(sum(work.flops for work in counted), sum(work.bytes for work in counted))
