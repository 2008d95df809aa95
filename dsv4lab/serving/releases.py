"""Where each SGLang release looks up what we replace, and which environment makes it take that path.

Data only; `contracts` holds what the wheels themselves say, and a test compares the two.
"""

from dataclasses import dataclass, field

_ATTENTION = "srt.layers.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120"
_MOVED = "kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120"
_INDEXER = "srt.layers.attention.dsv4.indexer"
_TORCH_LOGITS = (f"{_INDEXER}.fp8_paged_mqa_logits_torch_sm120", f"{_INDEXER}.fp8_paged_mqa_logits_torch")
_TORCH_INDEXER = {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1", "SGLANG_OPT_USE_TILELANG_INDEXER": "0"}
_TAIL_UNREAD = {"SGLANG_TOPK_TRANSFORM_512_TORCH": "0"}
"""SGLang's torch top-k needs -inf past a row's end, where our logits leave what was there."""
_TOPK_V1 = {"SGLANG_OPT_USE_TOPK_V2": "0"}


@dataclass(frozen=True)
class Hook:
    """Names below `sglang.` that are replaced, each as SGLang finds it when it calls, and what must be set for that."""

    targets: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Release:
    """One SGLang release. rank_function: a padded call carries a rank's heads at their place among all, which this
    function's rank tells; "" where they come first. sinkhorn: what MHC-pre leaves its mixing weights to. gemm: the
    block-FP8 linear layer where the backend is Triton, quantisation included. gate: the product of bf16 with fp32
    results, of the router's gate among others. slots: what writes the slots of the c128 keys, once a forward. head:
    what mixes the four streams in front of the output head. weights: what draws dummy weights before they are
    processed; None where that comes after. tables: what finds the tuned configs of a block-FP8 weight.
    """

    attention: Hook
    indexer: Hook
    topk: Hook
    rank_function: str = ""
    mhc: Hook = Hook(("srt.models.deepseek_v4.DeepseekV4DecoderLayer.hc_pre",))
    sinkhorn: str = "srt.layers.mhc.hc_split_sinkhorn"
    gemm: Hook = Hook(("srt.layers.quantization.fp8_utils.triton_w8a8_block_fp8_linear",))
    gate: Hook = Hook(("jit_kernel.dsv4.gemm.linear_bf16_fp32",))
    slots: Hook = Hook(("srt.layers.attention.dsv4.metadata_kernel.init_compression_metadata",))
    head: Hook = Hook(("srt.layers.mhc_head.fused_hc_head",))
    sm120_path: Hook = Hook(("srt.utils.common.is_sm120_supported",))
    weights: Hook | None = Hook(("srt.model_loader.weight_utils.initialize_dummy_weights",))
    tables: Hook = Hook(("srt.layers.quantization.fp8_kernel.get_w8a8_block_fp8_configs",))
    layer_forward: str = "srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend.forward"
    """The method through which every attention call passes, with the layer that knows how many heads are the rank's."""

    @property
    def backend_init(self) -> str:
        """What makes the attention backend: on every rank, when the weights are there and nothing is captured yet."""
        return f"{self.layer_forward.rpartition('.')[0]}.__init__"


_PREFILL = {"SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0"}
_OLD = dict(
    indexer=Hook(_TORCH_LOGITS, _TORCH_INDEXER | _TAIL_UNREAD),
    topk=Hook(("jit_kernel.dsv4.topk.topk_transform_512",), _TOPK_V1 | _TAIL_UNREAD),
)
_MOVED_SINKHORN = "kernels.ops.layernorm.mhc.hc_split_sinkhorn"
_MOVED_SLOTS = Hook(("kernels.ops.attention.dsv4.metadata_kernel.init_compression_metadata",))
_MOVED_HEAD = Hook(("kernels.ops.layernorm.mhc_head.fused_hc_head",))
_SRT, _OPS = Hook((_ATTENTION,), _PREFILL), Hook((_MOVED,), _PREFILL)

RELEASES = {
    "0.5.13.post1": Release(_SRT, **_OLD, rank_function="srt.layers.dp_attention.get_attention_tp_rank", weights=None),
    "0.5.14": Release(_SRT, **_OLD),
    "0.5.15.post1": Release(_SRT, **_OLD),
    # on sm_120 it always sets SGLANG_OPT_USE_TILELANG_INDEXER, so that the TileLang kernel is what must be hooked
    "0.5.16": Release(
        _OPS,
        indexer=Hook(
            ("kernels.ops.attention.dsa.tilelang_kernel.tilelang_fp8_paged_mqa_logits",),
            {"SGLANG_OPT_USE_TILELANG_INDEXER": "1"} | _TAIL_UNREAD,
        ),
        topk=_OLD["topk"],
        sinkhorn=_MOVED_SINKHORN,
        slots=_MOVED_SLOTS,
        head=_MOVED_HEAD,
        tables=Hook(("kernels.ops.quantization.fp8_kernel.get_w8a8_block_fp8_configs",)),
    ),
    "0.5.23": Release(
        _OPS,
        indexer=Hook(_TORCH_LOGITS, _TORCH_INDEXER),
        topk=Hook(("kernels.ops.attention.dsv4.topk.topk_transform_paged",), _TOPK_V1),
        mhc=Hook(("srt.models.deepseek_v4.DeepseekV4DecoderLayerBase.hc_pre",)),
        sinkhorn=_MOVED_SINKHORN,
        gate=Hook(("kernels.ops.gemm.bf16_fp32.linear_bf16_fp32",)),
        slots=_MOVED_SLOTS,
        head=_MOVED_HEAD,
        tables=Hook(("kernels.ops.gemm.fp8_kernel.get_w8a8_block_fp8_configs",)),
    ),
}


def find(installed: str, treat_as: str = "") -> Release:
    """The table of the installed release, or, asked for by name, of the one to treat it as. ValueError if unknown."""
    version = treat_as or installed
    if version not in RELEASES:
        known = ", ".join(RELEASES)
        how = f"it is none of {known}" if treat_as else f"known are {known}; version=ONE_OF_THEM treats it as that one"
        raise ValueError(f"no hooks for sglang {version}: {how}")
    return RELEASES[version]
