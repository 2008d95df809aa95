"""The model's dimensions against one another and against what is public about them."""

import pytest

from dsv4lab.model import DSV4_FLASH


def test_dimensions_fit_together():
    m = DSV4_FLASH
    assert m.head_dim == m.nope_head_dim + m.rope_head_dim == 512
    assert m.softmax_scale == 512**-0.5
    assert (m.hc_dim, m.mix_hc) == (16384, 24)
    assert len(m.compress_ratios) == m.num_hidden_layers + m.num_nextn_predict_layers == 44


def test_layer_counts():
    assert DSV4_FLASH.layer_counts == {"window": 2, "c4": 21, "c128": 20}
    assert sum(DSV4_FLASH.layer_counts.values()) == DSV4_FLASH.num_hidden_layers


@pytest.mark.parametrize(
    ("context_length", "pages", "c4_positions"),
    [(252, 1, 64), (253, 2, 128), (4096, 17, 1088), (8192, 33, 2112), (131072, 513, 32832), (1048576, 4097, 262208)],
)
def test_page_table_width(context_length, pages, c4_positions):
    assert DSV4_FLASH.page_table_width(context_length) == pages
    assert DSV4_FLASH.c4_positions(context_length) == c4_positions


def test_page_table_width_refuses_an_empty_context():
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        DSV4_FLASH.page_table_width(0)


@pytest.mark.parametrize(("tp", "heads"), [(1, 64), (2, 32), (4, 16), (8, 8)])
def test_tensor_parallel(tp, heads):
    rank = DSV4_FLASH.tensor_parallel(tp)
    assert (rank.tp, rank.num_attention_heads) == (tp, heads)
    assert rank.o_groups * tp == DSV4_FLASH.o_groups
    assert rank.moe_intermediate_size * tp == DSV4_FLASH.moe_intermediate_size


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 16])
def test_tensor_parallel_refuses_what_does_not_divide(tp):
    with pytest.raises(ValueError, match=f"tp .* got {tp}$"):
        DSV4_FLASH.tensor_parallel(tp)


def test_fp8_linears_shrink_with_the_ranks_where_they_are_shared():
    whole, eighth = DSV4_FLASH.fp8_linears(1), DSV4_FLASH.fp8_linears(8)
    assert whole["wq_b"] == (64 * 512, 1024) and eighth["wq_b"] == (8 * 512, 1024)
    assert whole["wo_b"] == (4096, 8 * 1024) and eighth["wo_b"] == (4096, 1024)
    assert whole["shared_gate_up"] == (4096, 4096) and eighth["shared_down"] == (4096, 256)
    for replicated in ("wqkv_a", "index_wq_b", "mtp_proj"):
        assert whole[replicated] == eighth[replicated]
    assert all(side % 128 == 0 for shape in eighth.values() for side in shape)  # blocks of 128 x 128 share a scale
