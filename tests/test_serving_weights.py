import math

import pytest
import torch
from torch import nn

from dsv4lab.serving import weights

E4M3 = torch.float8_e4m3fn


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)


def model(**parameters: nn.Parameter) -> nn.Module:
    """A model with these parameters; "__" in a name stands for a dot."""
    root = nn.Module()
    for name, value in parameters.items():
        *path, last = name.split("__")
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, value)
    return root


def small() -> nn.Module:
    return model(
        model__embed_tokens__weight=parameter(64, 256, dtype=torch.bfloat16),
        layers__self_attn__wq_b__weight=parameter(256, 384, dtype=E4M3),
        layers__self_attn__wq_b__weight_scale_inv=parameter(2, 3),
        layers__self_attn__wo_b__weight=parameter(256, 384, dtype=E4M3),
        layers__self_attn__wo_b__weight_scale_inv=parameter(2, 3),
        layers__self_attn__kv_norm__weight=parameter(512),
        layers__self_attn__attn_sink=parameter(64),
        layers__self_attn__attn_mqa__k_scale=parameter(),
        layers__mlp__experts__w13_weight=parameter(3, 256, 256, dtype=E4M3),
        layers__mlp__experts__w13_weight_scale_inv=parameter(3, 2, 2),
        layers__mlp__topk__tid2eid=parameter(64, 6, dtype=torch.int32),
        layers__hc_attn_fn=parameter(24, 1024),
        lm_head__weight=parameter(512, 256, dtype=torch.bfloat16),
    )


def filled(made: nn.Module) -> dict[str, torch.Tensor]:
    weights.fill(made, low=-1e-3, high=1e-3, seed=1234)
    return {name: value.data for name, value in made.named_parameters()}


def product_scale(weight: torch.Tensor, scale: torch.Tensor) -> float:
    """The standard deviation of the product of a quantised weight with vectors of unit scale."""
    blocks = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return (weight.float() * blocks).square().sum(-1).mean().sqrt().item()


def test_what_is_drawn_depends_on_the_name_alone():
    first, again = filled(small()), filled(small())
    assert first["layers.self_attn.attn_mqa.k_scale"] == 1
    assert all(torch.equal(first[name].float(), again[name].float()) for name in first)
    one, other = first["layers.self_attn.wq_b.weight"], first["layers.self_attn.wo_b.weight"]
    assert not torch.equal(one.float(), other.float())
    experts = first["layers.mlp.experts.w13_weight"].float()
    assert not torch.equal(experts[0], experts[1])


def test_products_keep_the_scale_of_what_they_multiply():
    found = filled(small())
    for name, gain in (("self_attn.wq_b.", 1), ("self_attn.wo_b.", 4), ("mlp.experts.w13_", 1)):
        quantised = found[f"layers.{name}weight"], found[f"layers.{name}weight_scale_inv"]
        assert gain / 2 < product_scale(*quantised) < 2 * gain
        assert torch.equal(quantised[1], torch.exp2(quantised[1].log2().round())) and quantised[1].unique().numel() > 1
        assert (quantised[0].float() == 0).float().mean() < 0.02
    assert found["lm_head.weight"].float().square().sum(-1).mean().sqrt() == pytest.approx(3, rel=0.05)
    assert found["layers.hc_attn_fn"].square().sum(-1).mean().sqrt() == pytest.approx(1, rel=0.05)
    assert found["model.embed_tokens.weight"].float().std() == pytest.approx(1, rel=0.05)
    assert found["layers.self_attn.kv_norm.weight"].mean() == pytest.approx(1.5, rel=0.05)
    assert not found["layers.mlp.topk.tid2eid"].any()  # SGLang's own


def test_packed_fp4_experts_keep_it_too():
    found = filled(
        model(
            experts__w2_weight=parameter(2, 64, 64, dtype=torch.int8), experts__w2_weight_scale_inv=parameter(2, 64, 4)
        )
    )
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
    packed = found["experts.w2_weight"].to(torch.int32) & 0xFF
    values = codes[torch.stack([packed & 15, packed >> 4], -1).flatten(-2)]
    rows = (values * found["experts.w2_weight_scale_inv"].repeat_interleave(32, -1)).square().sum(-1)
    assert 0.5 < math.sqrt(rows.mean()) < 2


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"no rule for parameter layers\.strange\.bias"):
        weights.fill(model(layers__strange__bias=parameter(8)))
    with pytest.raises(ValueError, match=r"no rule for parameter layers\.strange\.table"):
        weights.fill(model(layers__strange__table=parameter(8, 8)))


def ranks_of(tp: int, rank: int) -> nn.Module:
    """What a rank of `tp` has of the model that one rank has whole."""
    return model(
        model__embed_tokens__weight=parameter(64 // tp, 256, dtype=torch.bfloat16),
        layers__self_attn__wq_b__weight=parameter(2048 // tp, 256, dtype=E4M3),
        layers__self_attn__wq_b__weight_scale_inv=parameter(16 // tp, 2),
        layers__self_attn__indexer__wq_b__weight=parameter(256, 256, dtype=E4M3),
        layers__self_attn__indexer__wq_b__weight_scale_inv=parameter(2, 2),
        layers__self_attn__wo_a__weight=parameter(512 // tp, 256, dtype=torch.bfloat16),
        layers__self_attn__wo_b__weight=parameter(256, 2048 // tp, dtype=E4M3),
        layers__self_attn__wo_b__weight_scale_inv=parameter(2, 16 // tp),
        layers__self_attn__attn_sink=parameter(64),
        layers__mlp__experts__w13_weight=parameter(2, 4096 // tp, 128, dtype=E4M3),
        layers__mlp__experts__w13_weight_scale_inv=parameter(2, 32 // tp, 1),
        layers__mlp__experts__w2_weight=parameter(2, 128, 2048 // tp, dtype=torch.int8),
        layers__mlp__shared_experts__gate_up_proj__weight=parameter(4096 // tp, 128, dtype=E4M3),
        layers__mlp__shared_experts__down_proj__weight=parameter(128, 2048 // tp, dtype=E4M3),
        layers__mlp__shared_experts__down_proj__weight_scale_inv=parameter(1, 16 // tp),
        lm_head__weight=parameter(512 // tp, 256, dtype=torch.bfloat16),
    )


def among(monkeypatch, tp: int, rank: int) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: tp)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    return filled(ranks_of(tp, rank))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_draw_the_parts_of_what_one_draws(monkeypatch, tp):
    whole, parts = filled(ranks_of(1, 0)), [among(monkeypatch, tp, rank) for rank in range(tp)]
    for name, expected in whole.items():
        found = [part[name].float() for part in parts]
        if "indexer" in name or "sink" in name:
            joined = found[0]
            assert all(torch.equal(each, joined) for each in found)
        elif "gate_up" in name or "w13" in name:  # each rank has its part of the gate, then its part of the rest
            dim = expected.ndim - 2
            halves = zip(*(each.chunk(2, dim) for each in found), strict=True)
            joined = torch.cat([torch.cat(half, dim) for half in halves], dim)
        else:
            joined = torch.cat(found, -1 if "wo_b" in name or "down" in name or "w2" in name else -2)
        assert torch.equal(joined, expected.float()), name


def test_what_ranks_cannot_share_is_named(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 16)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(ValueError, match=r"cannot share lm_head\.weight \[8, 256\] among 16 ranks"):
        weights.fill(model(lm_head__weight=parameter(8, 256)))
