"""How a server is started, by name: one for each kind of machine, and one for each stage of the campaign."""

from dataclasses import dataclass, field, replace

from dsv4lab.hardware import NO_MULTICAST
from dsv4lab.serving.settings import Setting

_ALL = dict(
    attention="gluon", indexer="triton", topk="triton", mhc="split_k", gemm="split_k", gate="split_k", slots="triton",
    head="split_k",
)  # fmt: skip
_OURS = Setting(**_ALL)
_FORCED = "forced"
_STOCK = Setting()


@dataclass(frozen=True)
class Preset:
    """`about` says what for; `arch` and `gpus` what it needs. flags: SGLang's own, overridden by the user's.

    layers: of a synthetic model with the true dimensions and dummy weights; 0 for a model there is. take_tuned: with
    tables=tuned where there are such tables for the GPU.
    """

    about: str
    setting: Setting = _STOCK
    arch: str = ""
    gpus: int = 1
    context_length: int | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    take_tuned: bool = False


_BLACKWELL = ("--moe-runner-backend", "marlin", "--fp8-gemm-backend", "triton")
_SYNTHETIC = (
    "--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache",
    "--sampling-backend", "pytorch", "--max-running-requests", "64", "--cuda-graph-max-bs", "64",
    "--mem-fraction-static", "0.7", "--chunked-prefill-size", "2048",
)  # fmt: skip
_TRITON_GEMM = ("--fp8-gemm-backend", "triton", "--moe-runner-backend", "triton")
_FP8_EXPERTS = NO_MULTICAST | {
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "SGLANG_DSV4_MHC_PREWARM": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
}
_DEEPGEMM_AS_NEEDED = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}  # else it compiles for every batch size there could be
_NO_DEEPGEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}

PRESETS = {
    "rtx6000-8x": Preset(
        "Eight RTX PRO 6000 Blackwell on PCIe, the campaign's machine: all our kernels, uncapped context.",
        _OURS, arch="sm_120", gpus=8, context_length=1_048_576, flags=_BLACKWELL, take_tuned=True,
    ),
    "rtx6000-2x": Preset(
        "Two RTX PRO 6000 Blackwell: all our kernels, a context that leaves room beside the weights.",
        _OURS, arch="sm_120", gpus=2, context_length=131_072, flags=_BLACKWELL, take_tuned=True,
    ),
    "single": Preset("One GPU of any kind that SGLang serves on, with SGLang's own choices and no hook."),
    "h200": Preset("One H200 through SGLang's own Hopper path, no hook: the mark to beat.", arch="sm_90"),
    "synthetic": Preset(
        "Six layers of the true dimensions with dummy weights, all our kernels, on any one GPU: nothing is downloaded.",
        replace(_OURS, sm120_path=_FORCED), context_length=1_048_576,
        flags=_SYNTHETIC + _TRITON_GEMM, environment=_FP8_EXPERTS | _NO_DEEPGEMM, layers=6, take_tuned=True,
    ),
}  # fmt: skip


def _stage(about: str, setting: Setting, *flags: str, context_length: int = 1_048_576, **environment: str) -> Preset:
    """A stage on SGLang's sm_120 code path, whatever the GPU."""
    return Preset(
        about, setting, context_length=context_length, flags=_SYNTHETIC + _TRITON_GEMM + flags,
        environment=_FP8_EXPERTS | _NO_DEEPGEMM | environment, layers=6,
    )  # fmt: skip


def _on_path(**hooks: str) -> Setting:
    return Setting(sm120_path=_FORCED, **hooks)


_COMPILE = "--enable-torch-compile"

STAGES = {
    "stock": _stage("Per-head SIMT attention and the torch indexer over the maximum context.", _on_path()),
    "mma": _stage("Attention on tensor cores, one block of heads a program.", _on_path(attention="mma")),
    "split_k": _stage("The same with each row's positions split.", _on_path(attention="split_k")),
    "bf16": _stage(
        "And what was forced to FP32 in bf16: the torch indexer's product and MHC-pre.",
        _on_path(attention="split_k", indexer="torch_bf16", mhc="bf16"),
    ),
    "compile": _stage("torch.compile on top, first attempt.", _on_path(attention="split_k"), _COMPILE),
    "compile_nographs": _stage(
        "Second attempt: Inductor's own graphs off.",
        _on_path(attention="split_k"), _COMPILE, TORCHINDUCTOR_CUDAGRAPHS="0",
    ),
    "compile_stock_attention": _stage("Third attempt: with the stock attention.", _on_path(), _COMPILE),
    "stock_ctx8192": _stage("Stock with the context capped to 8,192 tokens.", _on_path(), context_length=8192),
    "indexer": _stage(
        "All fixes, uncapped: attention, logits, top-k at a cost that follows the real length, MHC-pre in one pass, "
        "FP8 linear layers split over K.",
        _on_path(**_ALL),
    ),
    "indexer_ctx8192": _stage(
        "The same with the context capped to 8,192 tokens: what the cap still buys.",
        _on_path(**_ALL), context_length=8192,
    ),
    "indexer_stock_mhc": _stage(
        "The same uncapped, with SGLang's own MHC-pre: what ours is worth.", _on_path(**_ALL | {"mhc": "stock"})
    ),
    "indexer_stock_gemm": _stage(
        "The same uncapped, with SGLang's own block-FP8 GEMM: what ours is worth.", _on_path(**_ALL | {"gemm": "stock"})
    ),
    "attention_twice": _stage(
        "The same, and after each attention call SGLang's own on all padded heads: for a trace that has both.",
        _on_path(**_ALL, twice="padded"),
    ),
    "indexer_tuned": _stage(
        "All fixes with tuned tables for SGLang's FP8 GEMM and MoE.", _on_path(**_ALL, tables="tuned")
    ),
    "native": Preset(
        "SGLang's own path for this GPU, with the GEMM and MoE backends of the stages.",
        context_length=1_048_576, flags=_SYNTHETIC + _TRITON_GEMM, environment=_FP8_EXPERTS | _DEEPGEMM_AS_NEEDED,
        layers=6,
    ),
    "native_tuned": Preset(
        "SGLang's own path for this GPU with the same tuned tables.",
        Setting(tables="tuned"), context_length=1_048_576, flags=_SYNTHETIC + _TRITON_GEMM,
        environment=_FP8_EXPERTS | _DEEPGEMM_AS_NEEDED, layers=6,
    ),
    "native_auto": Preset(
        "SGLang's own path and choices throughout.",
        context_length=1_048_576, flags=_SYNTHETIC, environment=_FP8_EXPERTS | _DEEPGEMM_AS_NEEDED, layers=6,
    ),
}  # fmt: skip


def find(name: str) -> Preset:
    """A preset or a stage. ValueError listing them."""
    if name not in (known := PRESETS | STAGES):
        raise ValueError(f"preset must be one of {', '.join(known)}, got {name!r}")
    return known[name]
