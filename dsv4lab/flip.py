"""What the bf16 flip costs in accuracy: the indexer's selection, the attention behind it, the residual streams.

    dsv4lab measure bf16_selection    # on a GPU as large as the model, on a CPU small
    dsv4lab measure bf16_drift

The indexer scores key t by sum_h w_h relu(q_h . k_t), q and k in e4m3, and keeps the 512 best. `fp32` is how SGLang's
sm_120 path multiplies; the flips differ in where they round:

- `bf16_fp32_out`: operands in bf16, which holds every e4m3 value, products added and left in fp32: the middle road;
- `bf16`: the same, each head's product rounded to bf16, as a bf16 matmul returns it;
- `bf16_dequantised`: keys times their scales rounded to bf16 first as well.

MHC-pre's product is followed through all layers of a random network in the model's shape, each flip beside float64.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from dsv4lab import kv_cache, numerics
from dsv4lab.journal import Journal
from dsv4lab.kernels import hc_pre, skinny_gemm
from dsv4lab.model import DSV4_FLASH
from dsv4lab.provenance import command_line, environment, git_state, kernel_hash
from dsv4lab.records import Clocks, Record

SELECTION, DRIFT = "bf16_selection", "bf16_drift"
KEYS = ("random", "clustered", "near_tie")
LENGTHS = (1024, 4096, 16_384, 65_536, 262_144)
PRODUCTS = ("fp32", "bf16_fp32_out", "bf16", "bf16_dequantised")
STREAM_PRODUCTS = ("fp32", "split_k", "bf16_fp32_out", "bf16")
_CLUSTERS, _NEAR = 64, 4


@dataclass(frozen=True)
class Query:
    """One token at the indexer and at attention: q [H, 128] e4m3 and weights [H]; keys [n, 128] e4m3, scales [n]."""

    q: Tensor
    weights: Tensor
    keys: Tensor
    scales: Tensor


def make_query(kind: str, n: int, *, device: torch.device | str, seed: int) -> Query:
    """n keys of a kind: "random" normal; "clustered" about 64 centres; "near_tie": one key, a few values stepped.

    A step is to the next smaller e4m3 value: scores differ by about as little as bf16 resolves, and some are equal.
    """
    if kind not in KEYS:
        raise ValueError(f"kind must be one of {', '.join(KEYS)}, got {kind!r}")
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    heads, dim = DSV4_FLASH.index_n_heads, DSV4_FLASH.index_head_dim
    if kind == "random":
        keys, scales = kv_cache.quantise_index(normal(n, dim))
    elif kind == "clustered":
        centre = torch.randint(0, _CLUSTERS, (n,), device=device, generator=g)
        keys, scales = kv_cache.quantise_index(normal(_CLUSTERS, dim)[centre] + 0.05 * normal(n, dim))
    else:
        one, scale = kv_cache.quantise_index(normal(dim))
        codes = one.view(torch.uint8).expand(n, dim).clone()
        place = torch.randint(0, dim, (n, _NEAR), device=device, generator=g)
        some = codes.gather(1, place)
        codes.scatter_(1, place, some - ((some & 0x7F) > 0).byte())
        keys, scales = codes.view(kv_cache.FP8), scale.expand(n).contiguous()
    return Query(kv_cache.quantise_index(normal(heads, dim))[0], normal(heads) * heads**-0.5, keys, scales)


def scores(query: Query, product: str) -> Tensor:
    """The score of each key [n], by one of `PRODUCTS` or "fp64"; all but the product in fp32, or fp64."""
    if product not in (*PRODUCTS, "fp64"):
        raise ValueError(f"product must be one of {', '.join(PRODUCTS)}, fp64, got {product!r}")
    rounded = product in ("bf16", "bf16_dequantised")
    wide = torch.float64 if product == "fp64" else torch.float32
    operand = torch.bfloat16 if rounded or (product == "bf16_fp32_out" and query.q.is_cuda) else wide
    q, keys, scales = query.q.to(operand), query.keys.to(wide), query.scales.to(wide)
    if product == "bf16_dequantised":
        keys, scales = keys * scales[:, None], torch.ones_like(scales)
    keys = keys.to(operand)
    if operand == torch.bfloat16 and not rounded:
        found = torch.mm(keys, q.T, out_dtype=torch.float32)
    else:
        found = keys @ q.T
    return (torch.relu(found.to(wide)) * query.weights.to(wide)).sum(1) * scales


def chosen(values: Tensor, k: int = DSV4_FLASH.index_topk) -> Tensor:
    """Positions of the k largest, of equal ones the first."""
    return torch.sort(values, descending=True, stable=True).indices[:k]


def attention_error(
    query: Query, right: Tensor, found: Tensor, *, aligned: bool, seed: int, heads: int = DSV4_FLASH.num_attention_heads
) -> float:
    """Relative error of attention over the keys `found` instead of `right`, in float64, the window with both.

    aligned: attention looks for what the indexer looks for (its logits grow with the score), so that a key at the edge
    of the selection weighs little. Otherwise the two know nothing of each other, the worst there can be.
    """
    n, dim, window = len(query.keys), DSV4_FLASH.head_dim, DSV4_FLASH.sliding_window
    g = torch.Generator(query.q.device).manual_seed(seed)
    kv = torch.randn(n, dim, device=query.q.device, generator=g)
    q = torch.randn(heads, dim, device=query.q.device, generator=g).double()
    logits = torch.zeros(n, device=query.q.device, dtype=torch.float64)
    if aligned:
        score = scores(query, "fp64")
        logits = 3 * (score - score.mean()) / score.std().clamp(min=1e-30)

    def attend(positions: Tensor) -> Tensor:
        recent = torch.arange(max(n - window, 0), n, device=positions.device)
        at = torch.cat([positions, recent])  # a key may stand in both, as in the model's two caches
        value = kv[at].double()
        return ((q @ value.T) * dim**-0.5 + logits[at]).softmax(1) @ value

    return numerics.relative_error(attend(found), attend(right))


def selection(kind: str, n: int, *, queries: int, device: torch.device | str, seed: int = 0) -> dict[str, dict]:
    """By product: the overlap with the fp32 selection and with fp64's, and the attention errors, mean and worst."""
    totals: dict[str, dict[str, list[float]]] = {product: {} for product in PRODUCTS}
    for each in range(queries):
        query = make_query(kind, n, device=device, seed=seed + each)
        exact, forced = (chosen(scores(query, product)) for product in ("fp64", "fp32"))
        for product, of_product in totals.items():
            found = chosen(scores(query, product))
            overlaps = {"overlap": forced, "overlap_fp64": exact}
            errors = {"error_independent": False, "error_aligned": True}
            new = {name: float(numerics.selection_overlap(found, other)) for name, other in overlaps.items()}
            new |= {
                name: attention_error(query, forced, found, aligned=aligned, seed=seed + each)
                for name, aligned in errors.items()
            }
            for name, value in new.items():
                of_product.setdefault(name, []).append(value)
    return {product: _summary(of_product) for product, of_product in totals.items()}


def _summary(values: dict[str, list[float]]) -> dict[str, float]:
    means = {name: sum(each) / len(each) for name, each in values.items()}
    worst = {f"worst_{name}": (min if "overlap" in name else max)(each) for name, each in values.items()}
    return means | worst


def _mix(product: str, x: Tensor, hc_fn: Tensor, eps: float) -> Tensor:
    """The mix [M, 24] of streams [M, 4 * hidden], by one of `STREAM_PRODUCTS` or "fp64"."""
    if product == "fp64":
        return hc_pre.mixes(x.double(), hc_fn.double(), eps)
    if product == "split_k":
        sums = skinny_gemm.skinny_gemm(x, hc_fn)
    elif product == "fp32":
        sums = linear(x.float(), hc_fn)
    else:
        weights = hc_fn.bfloat16()
        sums = linear(x, weights) if product == "bf16" else linear(x.float(), weights.float())
    return sums.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def drift(
    *, layers: int = DSV4_FLASH.num_hidden_layers, hidden: int = DSV4_FLASH.hidden_size, tokens: int = 64,
    device: torch.device | str, seed: int = 0,
) -> dict[str, list[float]]:  # fmt: skip
    """By product: the relative error of the streams after each layer, beside the same network with float64 streams.

    Each layer is twice MHC-pre, a random linear map of the normalised hidden state through tanh, and the update of the
    streams as SGLang has it. Streams are bf16 between the steps as in the model (float64 in the reference), so that
    `fp32` is what a bf16 model drifts anyway.
    """
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    start = normal(tokens, hc_pre.HC, hidden).bfloat16()
    streams = {product: start.double() if product == "fp64" else start for product in (*STREAM_PRODUCTS, "fp64")}
    errors: dict[str, list[float]] = {product: [] for product in STREAM_PRODUCTS}
    for _ in range(layers):
        for _ in range(2):
            wide = hc_pre.HC * hidden
            call = hc_pre.Inputs(start, normal(hc_pre.MIX, wide) * wide**-0.5, normal(3), normal(hc_pre.MIX))
            inner = normal(hidden, hidden) * hidden**-0.5
            streams = {product: _step(product, x, call, inner) for product, x in streams.items()}
        for product, of_product in errors.items():
            of_product.append(numerics.relative_error(streams[product], streams["fp64"]))
    return errors


def _step(product: str, x: Tensor, call: hc_pre.Inputs, inner: Tensor) -> Tensor:
    """One MHC-pre, an inner map, and the update of the streams x [M, 4, hidden], left in the dtype of x."""
    wide = torch.float64 if product == "fp64" else torch.float32
    mix = _mix(product, x.flatten(1), call.hc_fn, hc_pre.EPS)
    pre, post, comb = hc_pre.split(
        mix, call.hc_scale.to(wide), call.hc_base.to(wide), hc_pre.EPS, DSV4_FLASH.hc_sinkhorn_iters
    )
    y = (pre[:, :, None] * x.to(wide)).sum(1).to(x.dtype)
    normalised = y.to(wide) * torch.rsqrt(y.to(wide).square().mean(-1, keepdim=True) + hc_pre.EPS)
    out = torch.tanh(normalised @ inner.to(wide)).to(x.dtype).to(wide)
    new = post[:, :, None] * out[:, None] + (comb[..., None] * x.to(wide)[:, :, None]).sum(1)
    return new.to(x.dtype)


@dataclass(frozen=True)
class Size:
    """Lengths and queries of the selection; width and tokens of the streams."""

    lengths: Sequence[int]
    queries: int
    hidden: int
    tokens: int
    layers: int = DSV4_FLASH.num_hidden_layers


FULL, SMALL = Size(LENGTHS, 16, DSV4_FLASH.hidden_size, 64), Size(LENGTHS[:2], 2, 256, 4, 3)
"""On a GPU, and without one."""


def run_selection(
    *, cases: Sequence[str] | None = None, size: Size | None = None, directory: Path | str | None = None, seed: int = 0
) -> Path:
    """Overlap and attention errors by keys and length, one record for each product; returns the new record file.

    cases: as "near_tie_n4096", None takes all. ValueError for one that does not exist.
    """
    device, size = _here(size)
    known = {f"{kind}_n{n}": (kind, n) for kind in KEYS for n in size.lengths}
    for name in cases or ():
        if name not in known:
            raise ValueError(f"cases has no {name!r}; known: {', '.join(known)}")

    def results() -> Iterator[tuple[str, dict, dict[str, dict]]]:
        for name in cases or known:
            kind, n = known[name]
            config = {"keys": kind, "n": n, "queries": size.queries, "k": DSV4_FLASH.index_topk}
            yield name, config, selection(kind, n, queries=size.queries, device=device, seed=seed)

    return _recorded(SELECTION, results(), None, device, directory, seed)


def run_drift(*, size: Size | None = None, directory: Path | str | None = None, seed: int = 0) -> Path:
    """Error of the streams by layer, one record for each product; returns the new record file."""
    device, size = _here(size)

    def results() -> Iterator[tuple[str, dict, dict[str, dict]]]:
        config = {"layers": size.layers, "hidden": size.hidden, "tokens": size.tokens}
        found = drift(**config, device=device, seed=seed)
        errors = {p: {f"layer_{i}": each for i, each in enumerate(of, 1)} for p, of in found.items()}
        yield f"hidden{size.hidden}", config, errors

    return _recorded(DRIFT, results(), kernel_hash(skinny_gemm), device, directory, seed)


def _here(size: Size | None) -> tuple[torch.device, Size]:
    """This machine's GPU and the size of the model, or the CPU and what it can do."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), size or FULL
    return torch.device("cpu"), size or SMALL


def _recorded(
    experiment: str, results: Iterator[tuple[str, dict, dict[str, dict]]], sha256: str | None, device: torch.device,
    directory: Path | str | None, seed: int,
) -> Path:  # fmt: skip
    shared = dict(seed=seed, argv=command_line(), git=git_state(), env=environment(device))
    with Journal(experiment, shared["env"].gpu, directory) as journal:
        for case, config, found in results:
            journal.add([
                Record(
                    experiment=experiment, case=case, impl=product, config=config, method={"reference": "float64"},
                    samples_us=[], check={"passed": True}, work=None, date_utc=datetime.now(UTC),
                    kernel_sha256=sha256, clocks=Clocks(before=None, after=None), result=result, **shared,
                )
                for product, result in found.items()
            ])  # fmt: skip
            print(case, *(f"{p} {next(iter(r.values())):.6g}" for p, r in found.items()), file=sys.stderr, flush=True)
        return journal.finish()
