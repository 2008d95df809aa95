"""Random weights that a model computes something with, for a server that has none: DSV4LAB=weights=random.

SGLang's dummy weights are below 0.001, nearly all of which FP8 rounds to zero, so that two servers agree whatever their
kernels do. Here each parameter is drawn by its role, in the form of a checkpoint, before SGLang processes it: layouts
may differ afterwards, what the weights say does not. Values depend on the parameter's name and shape and on the kind
of device alone: a rank of tensor parallelism draws its own part of what one rank would draw. Activations keep about
unit scale; attention is sharp enough, and its output large enough, to matter.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

E4M3_SPAN = 224.0
"""FP8 weights are uniform within plus and minus this: half of what e4m3 holds."""

_E2M1_RMS = math.sqrt(sum(x * x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_SCALE = "_scale_inv"
_AROUND = (
    (r"attn_mqa\.[kv]_scale$", 1.0, 0.0),
    (r"(kv_norm|self_attn\.compressor\.norm)\.weight$", 1.5, 0.1),  # keys, and values, of attention
    (r"norm\.weight$", 1.0, 0.1),
    (r"embed_tokens\.weight$", 0.0, 1.0),
    (r"attn_sink$", 4.0, 1.0),  # some per cent of the weight of a full window and selection
    (r"\.ape$", 0.0, 0.5),
    (r"e_score_correction_bias$", 0.0, 0.05),
    (r"hc_\w+_base$", 0.0, 0.5),
    (r"hc_\w+_scale$", 1.0, 0.1),
)
"""(name, mean, standard deviation) of what is not a matrix of a product; the first that fits."""

_GAINS = ((r"lm_head\.weight$", 3.0), (r"wo_b\.weight$", 4.0), (r"(weight|hc_\w+_fn)$", 1.0))
"""(name, standard deviation of a product with a vector of unit scale) of a matrix [..., out, in]."""


PIECES = 8
"""Parts in which a sharded parameter is drawn, each from a seed of its own: what the largest number of ranks needs."""


@dataclass(frozen=True)
class Shard:
    """How ranks share a parameter: along `dim`, counted from its last, `halves` matrices that lie below each other."""

    dim: int
    halves: int = 1


_ROWS, _COLUMNS = Shard(-2), Shard(-1)
_SHARDS = (
    (r"(embed_tokens|lm_head|self_attn\.wq_b|self_attn\.wo_a)\.weight", _ROWS),
    (r"(gate_up_proj\.|w13_)weight", Shard(-2, halves=2)),
    (r"(wo_b\.|down_proj\.|w2_)weight", _COLUMNS),
)
"""(name, shard) of what a rank has its own part of, scales like their weights; the rest it has whole."""


def fill(model: nn.Module, *_, **__) -> None:
    """In place of `initialize_dummy_weights`: draws every floating parameter of `model`, and packed FP4 ones.

    ValueError for a parameter without a rule, and for one that the ranks cannot share.
    """
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if not parameter.is_floating_point() and parameter.dtype != torch.int8:
            continue  # a table that SGLang makes itself
        weight = named.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) else None
        shared = ranks if _shard(name) == _COLUMNS else 1  # a product's inputs are those of all ranks
        inputs = shared * _inputs(parameter if weight is None else weight)
        for seed, piece in _pieces(parameter.data, name, rank, ranks):
            generator = torch.Generator(parameter.device).manual_seed(_seed(seed))
            for part in piece if parameter.ndim == 3 else (piece,):  # drawing needs four times the bytes of FP8
                _draw(part, name, weight, inputs, generator)


def _shard(name: str) -> Shard | None:
    return next((shard for pattern, shard in _SHARDS if re.search(pattern, name)), None)


def _pieces(data: Tensor, name: str, rank: int, ranks: int) -> Iterator[tuple[str, Tensor]]:
    """What to draw from one seed each: all of `data`, or the pieces of a shared parameter that are this rank's."""
    if (shard := _shard(name)) is None:
        yield name, data
        return
    dim = data.ndim + shard.dim
    halves = data.unflatten(dim, (shard.halves, -1))
    own = halves.shape[dim + 1]
    pieces = math.gcd(PIECES, own * ranks)
    if pieces % ranks:
        raise ValueError(f"weights=random cannot share {name} {list(data.shape)} among {ranks} ranks")
    size = own * ranks // pieces
    for n in range(pieces // ranks):
        yield f"{name}/{rank * pieces // ranks + n}", halves.narrow(dim + 1, n * size, size)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _draw(data: Tensor, name: str, weight: Tensor | None, inputs: int, generator: torch.Generator) -> None:
    made = dict(device=data.device, dtype=torch.float32)  # whatever the default is while a model is loaded
    if weight is not None:
        scale = _gain(name.removesuffix(_SCALE)) / math.sqrt(inputs) / _rms(weight)
        jitter = torch.randint(-1, 1, data.shape, generator=generator, device=data.device)  # no two blocks to mistake
        data.copy_(torch.exp2(jitter.float() + round(math.log2(scale))))
    elif data.dtype == torch.int8:
        data.copy_(torch.randint(-128, 128, data.shape, generator=generator, device=data.device, dtype=torch.int8))
    elif data.dtype == torch.float8_e4m3fn:
        data.copy_(torch.empty(data.shape, **made).uniform_(-E4M3_SPAN, E4M3_SPAN, generator=generator))
    else:
        around = next((rule[1:] for rule in _AROUND if re.search(rule[0], name)), None)
        if around is None and data.ndim < 2:
            raise ValueError(f"weights=random has no rule for parameter {name}")
        mean, spread = around or (0.0, _gain(name) / math.sqrt(inputs))
        data.copy_(mean + spread * torch.randn(data.shape, generator=generator, **made))


def _gain(name: str) -> float:
    for pattern, gain in _GAINS:
        if re.search(pattern, name):
            return gain
    raise ValueError(f"weights=random has no rule for parameter {name}")


def _inputs(weight: Tensor) -> int:
    if not weight.ndim:
        return 1
    return weight.shape[-1] * (2 if weight.dtype == torch.int8 else 1)


def _rms(weight: Tensor) -> float:
    """Of what `_draw` puts into a quantised weight."""
    return _E2M1_RMS if weight.dtype == torch.int8 else E4M3_SPAN / math.sqrt(3)
