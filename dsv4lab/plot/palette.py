"""One colour and one marker for each implementation, the same in every figure of its kind (Okabe and Ito's colours)."""

from dataclasses import dataclass

from matplotlib.colors import to_hex, to_rgb

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"


def ink_on(color: str) -> str:
    """Black or white, whichever can be read on the colour."""
    red, green, blue = to_rgb(color)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"


@dataclass(frozen=True)
class Look:
    """How one implementation is named and drawn."""

    label: str
    color: str
    marker: str
    linestyle: str = "-"

    @property
    def ink(self) -> str:
        """The colour, darkened until text in it can be read on white."""
        return to_hex([0.75 * channel for channel in to_rgb(self.color)])


ATTENTION = {
    "simt": Look("SIMT per head", ORANGE, "s"),
    "mma": Look("MMA, no split", SKY, "^"),
    "split_k": Look("split-K", BLUE, "o"),
    "gluon": Look("Gluon", PURPLE, "X"),
    "stock_simt": Look("SGLang stock", VERMILLION, "D"),
    "flashmla": Look("FlashMLA", GREEN, "v"),
}
INDEXER = {
    "torch_fallback": Look("torch fallback", VERMILLION, "D"),
    "torch_capped": Look("capped fallback", PURPLE, "X"),
    "torch": Look("torch.topk", ORANGE, "s"),
    "triton": Look("Triton", BLUE, "o"),
    "fused": Look("Triton, fused", SKY, "^"),
    "deepgemm": Look("DeepGEMM", GREEN, "v"),
}
TOPK = {
    "torch": INDEXER["torch"],
    "triton": INDEXER["triton"],
    "sglang_topk": Look("SGLang, one block", VERMILLION, "D"),
    "sglang_topk_v2": Look("SGLang, several blocks", GREEN, "v"),
}
PRODUCTS = {
    "split_k": ATTENTION["split_k"],
    "fp32": Look("FP32, as forced", VERMILLION, "D"),
    "bf16": Look("cuBLAS bf16", ORANGE, "s"),
    "split_k_w32": Look("split-K, FP32 weights", SKY, "^"),
    "deepgemm_prenorm": Look("DeepGEMM TF32", GREEN, "v"),
}
MHC = {
    "split_k": ATTENTION["split_k"],
    "stock_mhc": Look("SGLang, sm_120 path", VERMILLION, "D"),
    "tilelang_mhc": Look("SGLang, TileLang", PURPLE, "X"),
    "deepgemm_mhc": Look("SGLang, DeepGEMM", GREEN, "v"),
    "split_k_bf16": Look("split-K, bf16 weights", SKY, "^"),
}
FLIP = {
    "fp32": PRODUCTS["fp32"],
    "split_k": ATTENTION["split_k"],
    "bf16_fp32_out": Look("bf16 in, FP32 out", GREEN, "v"),
    "bf16": PRODUCTS["bf16"],
    "bf16_dequantised": Look("bf16, keys scaled first", PURPLE, "X"),
}
ALL_REDUCE = {
    "nccl": Look("NCCL", BLACK, "s"),
    "nccl_ring_ll": Look("NCCL ring LL", VERMILLION, "D"),
    "nccl_ring_simple": Look("NCCL ring Simple", BLUE, "o"),
    "nccl_ring_ll128": Look("NCCL ring LL128", ORANGE, "P"),
    "nccl_tree_ll": Look("NCCL tree LL", VERMILLION, "<", ":"),
    "nccl_tree_simple": Look("NCCL tree Simple", BLUE, ">", ":"),
    "one_shot": Look("one-shot", GREEN, "v"),
    "two_shot": Look("two-shot", SKY, "^"),
    "gloo": Look("gloo", GREY, "X"),
}
LOOKS = (
    ATTENTION | INDEXER | TOPK | PRODUCTS | MHC | FLIP | ALL_REDUCE | {"floor": Look("roofline floor", GREY, "", "--")}
)


def look(impl: str) -> Look:
    """The look of `impl`. What the palette does not know is dotted: "mma_bh16" like "mma", anything else in purple."""
    if impl in LOOKS:
        return LOOKS[impl]
    kin = next((known for name, known in LOOKS.items() if impl.startswith(f"{name}_")), Look(impl, PURPLE, "X"))
    return Look(impl, kin.color, kin.marker, ":")


def in_order(impls: set[str]) -> list[str]:
    """`impls` in the palette's order, unknown ones last by name: tables and figures agree on it."""
    return [impl for impl in LOOKS if impl in impls] + sorted(impls - LOOKS.keys())
