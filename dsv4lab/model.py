"""The dimensions of DeepSeek-V4-Flash, whole and per tensor-parallel rank.

Source: the model's public `config.json` (field names are its own) and SGLang 0.5.14, which serves it.
"""

from dataclasses import dataclass

LAYER_KINDS = {0: "window", 4: "c4", 128: "c128"}
"""Compression ratio -> what a layer attends to: the sliding window alone, or with one key per 4 or 128 tokens."""


@dataclass(frozen=True)
class RankShapes:
    """What one tensor-parallel rank holds. The single KV head and the indexer are replicated on every rank."""

    tp: int
    num_attention_heads: int
    o_groups: int
    moe_intermediate_size: int


@dataclass(frozen=True)
class DeepSeekV4Flash:
    """DeepSeek-V4-Flash. `head_dim` is the width of a query, of a key and of a value: K and V are the same vector."""

    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    nope_head_dim: int = 448
    rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2048
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    num_nextn_predict_layers: int = 1
    vocab_size: int = 129280
    max_position_embeddings: int = 1048576
    page_size: int = 256
    """Tokens in one logical page: 256 window slots, 64 c4 slots (and index keys) or 2 c128 slots."""
    compress_ratios: tuple[int, ...] = (0, 0, *(4, 128) * 20, 4, 0)
    """One entry per layer, then one per next-token-prediction layer."""

    @property
    def softmax_scale(self) -> float:
        """What q.k is multiplied by before the softmax."""
        return self.head_dim**-0.5

    @property
    def hc_dim(self) -> int:
        """Width of the hyper-connection state: `hc_mult` residual streams."""
        return self.hc_mult * self.hidden_size

    @property
    def mix_hc(self) -> int:
        """Outputs of the hyper-connection's pre-mix linear, of `hc_dim` inputs."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def layer_counts(self) -> dict[str, int]:
        """Decoder layers of each kind in LAYER_KINDS, the next-token-prediction layer left out."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return {kind: ratios.count(ratio) for ratio, kind in LAYER_KINDS.items()}

    def page_table_width(self, context_length: int) -> int:
        """Logical pages in a row of the page table for `context_length` tokens, as SGLang sizes it (4 tokens spare)."""
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, got {context_length}")
        return -(-(context_length + 4) // self.page_size)

    def c4_positions(self, context_length: int) -> int:
        """Compressed positions that a c4 layer's indexer can be asked to score: the page table's width in c4 slots."""
        return self.page_table_width(context_length) * self.page_size // 4

    def tensor_parallel(self, tp: int) -> RankShapes:
        """The shapes of one rank of `tp` (1, 2, 4 or 8: the output projection has 8 groups to share out)."""
        if tp < 1 or self.o_groups % tp:
            raise ValueError(f"tp must divide the {self.o_groups} output groups, got {tp}")
        return RankShapes(
            tp=tp,
            num_attention_heads=self.num_attention_heads // tp,
            o_groups=self.o_groups // tp,
            moe_intermediate_size=self.moe_intermediate_size // tp,
        )

    def fp8_linears(self, tp: int) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the block-FP8 linear layers of one rank of `tp`, as SGLang fuses them.

        `wo_a` is left out: SGLang multiplies it in bf16 where DeepGEMM does not do it. `mtp_proj` is e_proj and h_proj.
        """
        rank = self.tensor_parallel(tp)
        shared = self.n_shared_experts * rank.moe_intermediate_size
        return {
            "wqkv_a": (self.q_lora_rank + self.head_dim, self.hidden_size),
            "wq_b": (rank.num_attention_heads * self.head_dim, self.q_lora_rank),
            "wo_b": (self.hidden_size, rank.o_groups * self.o_lora_rank),
            "shared_gate_up": (2 * shared, self.hidden_size),
            "shared_down": (self.hidden_size, shared),
            "index_wq_b": (self.index_n_heads * self.index_head_dim, self.q_lora_rank),
            "mtp_proj": (self.hidden_size, self.hidden_size),
        }


DSV4_FLASH = DeepSeekV4Flash()
