"""The lab's own kernels: their `CANDIDATES` on the shapes of one rank, and the tables that their plans ask for.

`sparse_mla` gets a config for each batch of one number of heads; `fp8_gemm` for each number of rows and for few
or many outputs; `mqa_logits` and `topk`, whose tables know no batch, the one that is best over all cases. Best is the
least geometric mean of times.
"""

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from dsv4lab import tuned
from dsv4lab.kernels.choices import source_hash
from dsv4lab.model import DSV4_FLASH
from dsv4lab.records import Record
from dsv4lab.tune.sweep import DEFAULT, Point, winner

BATCHES = (1, 4, 8, 16, 32, 64, 128)
INDEXER_CASES = (
    "b32_max262208_len2048", "b1_max262208_len128", "b64_max2048_len2048", "b32_max262208_len16384",
    "b8_max262208_len262144",
)  # fmt: skip
SEVERAL = "b32_next2_len2048"
ALL = 1000


def _module(stem: str) -> Any:
    return import_module(f"dsv4lab.kernels.{stem}")


def _point(stem: str, impl: str, module: Any, case: Any, finalists: int, also: str = "") -> Point:
    """`default` is the shipped choice of `impl`, the candidates are the module's own of it and of `also`."""
    candidates = _module(stem).CANDIDATES.items()
    tried = {DEFAULT: impl} | {name: name for name, (of, _) in candidates if of in (impl, also)}
    name = f"{stem}_{case.name}"
    return Point(name, module, case, tried, finalists=finalists, sha256=source_hash(f"dsv4lab.kernels.{stem}"))


def attention_points(tp: int, *, arch: str, **_: Any) -> list[Point]:
    """`sparse_mla` with the heads of one rank; where Gluon has a kernel, it and `split_k` in one table."""
    module, heads = _module("sparse_mla"), DSV4_FLASH.tensor_parallel(tp).num_attention_heads
    queries_and_output = 4 * module.HEAD_DIM * heads
    with_bytes = SimpleNamespace(
        **vars(module), rotated_bytes=lambda case: module.work(case).bytes - case.B * queries_and_output
    )
    cases = [module.Case(f"b{B}_h{heads}", B, heads) for B in BATCHES]
    impl = "gluon" if arch in module.GLUON else "split_k"
    return [_point("sparse_mla", impl, with_bytes, case, finalists=4, also="split_k") for case in cases]


def indexer_points(tp: int, **_: Any) -> list[Point]:
    """`mqa_logits` and `topk`, which every rank runs whole."""
    logits, topk = _module("mqa_logits"), _module("topk")
    wanted = [("mqa_logits", logits, name) for name in (*INDEXER_CASES, SEVERAL)]
    wanted += [("topk", topk, name) for name in INDEXER_CASES]
    return [_point(stem, "triton", module, module.CASES[name], finalists=ALL) for stem, module, name in wanted]


def gemm_points(tp: int, **_: Any) -> list[Point]:
    """`fp8_gemm` as it is served, quantisation included: every weight of one rank, as many rows as a tile has."""
    module, rows = _module("fp8_gemm"), import_module("dsv4lab.kernels.fp8_gemm.plans").ROWS
    cases = [module.Case(layer, M, *shape) for M in rows for shape, layer in module.layers(tp).items()]
    return [_point("fp8_gemm", "split_k_linear", module, case, finalists=ALL) for case in cases]


def write_gemm(root: Path, gpu: str, tp: int, found: Sequence[Record]) -> list[Path]:
    """A config for each number of rows, and one more for many outputs if the rank has such a weight.

    Nothing until there is one for every number of rows.
    """
    plans, entries = import_module("dsv4lab.kernels.fp8_gemm.plans"), []
    for M in plans.ROWS:
        of_rows = [record for record in found if record.config["M"] == M]
        few = [record for record in of_rows if record.config["N"] <= plans.NARROW]
        many = [record for record in of_rows if record.config["N"] > plans.NARROW]
        for max_n, alike in ((plans.NARROW, few), (plans.ANY, many)) if many else ((plans.ANY, few),):
            if cases := _by_case(alike):
                config = _config("fp8_gemm", _overall(list(cases.values())))
                entries.append({"max_m": M, "max_n": max_n, "config": config})
    every = {entry["max_m"] for entry in entries} == set(plans.ROWS)
    return [_write(root, gpu, "fp8_gemm", entries=entries)] if every else []


def write_attention(root: Path, gpu: str, tp: int, found: Sequence[Record]) -> list[Path]:
    """The winner of each batch counts up to that many rows, the last for all beyond."""
    heads = DSV4_FLASH.tensor_parallel(tp).num_attention_heads
    best = []
    for B in BATCHES:
        if records := [r for r in found if r.case == f"sparse_mla_b{B}_h{heads}"]:
            best.append({"heads": heads, "max_rows": B, "config": _config("sparse_mla", winner(records))})
    if not best:
        return []
    best[-1]["max_rows"] = import_module("dsv4lab.kernels.sparse_mla.plans").ANY
    old = tuned.read_kernels(root, gpu).get("sparse_mla", {})
    fits = old and not tuned.complaint(old, source_hash("dsv4lab.kernels.sparse_mla"), triton.__version__)
    others = [entry for entry in old["entries"] if entry["heads"] != heads] if fits else []
    return [_write(root, gpu, "sparse_mla", entries=others + best)]


def write_indexer(root: Path, gpu: str, tp: int, found: Sequence[Record]) -> list[Path]:
    """One config for each kernel; for the logits another for several queries a request."""
    by_case = _by_case(found)
    several = by_case.pop(f"mqa_logits_{SEVERAL}", [])
    logits = [records for case, records in by_case.items() if case.startswith("mqa_logits")]
    topk = [records for case, records in by_case.items() if case.startswith("topk")]
    written = []
    if logits and several:
        single, more = _config("mqa_logits", _overall(logits)), _config("mqa_logits", winner(several))
        written.append(_write(root, gpu, "mqa_logits", single=single, several=more))
    if topk:
        written.append(_write(root, gpu, "topk", config=_config("topk", _overall(topk))))
    return list(dict.fromkeys(written))


def _by_case(found: Sequence[Record]) -> dict[str, list[Record]]:
    return {case: [r for r in found if r.case == case] for case in dict.fromkeys(r.case for r in found)}


def _overall(cases: Sequence[Sequence[Record]]) -> Record:
    """A record of the candidate that is best over all cases, among those that ran in each."""
    times = [{record.impl: record.median_us for record in records} for records in cases]
    everywhere = [impl for impl in times[0] if all(impl in each for each in times)]
    if not everywhere:
        raise ValueError(f"no candidate ran in all of {', '.join(records[0].case for records in cases)}")
    best = min(everywhere, key=lambda impl: sum(log(each[impl]) for each in times))
    return next(record for record in cases[0] if record.impl == best)


def _config(stem: str, record: Record) -> dict:
    """The fields of the config that a record was measured with."""
    if record.impl != DEFAULT:
        return asdict(_module(stem).CANDIDATES[record.impl][1])
    plans = import_module(f"dsv4lab.kernels.{stem}.plans")
    arch = f"sm_{record.env.capability[0]}{record.env.capability[1]}"
    if stem == "sparse_mla":
        rows = record.config["B"] * record.config["s_q"]
        return asdict(plans.choose(arch, record.config["H"], rows, "gluon").config)
    if stem == "fp8_gemm":
        return asdict(plans.choose(arch, record.config["M"], record.config["N"]).config)
    choice = plans.choose(arch)
    return asdict(choice.config(record.config["next_n"]) if stem == "mqa_logits" else choice.config)


def _write(root: Path, gpu: str, stem: str, **table: Any) -> Path:
    made_for = {
        "sha256": source_hash(f"dsv4lab.kernels.{stem}"),
        "triton": triton.__version__,
        "evidence": f"tuned here, in {tuned.kernels_path(root, gpu).name}",
    }
    return tuned.write_kernel(root, gpu, stem, made_for | table)
