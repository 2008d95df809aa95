"""One colour and one marker for each implementation, the same in every figure of its kind (Okabe and Ito's colours)."""

from dataclasses import dataclass

from matplotlib.colors import to_hex, to_rgb

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#777777"


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
LOOKS = ATTENTION | INDEXER | ALL_REDUCE | {"floor": Look("roofline floor", GREY, "", "--")}


def look(impl: str) -> Look:
    """The look of `impl`. What the palette does not know is dotted: "mma_bh16" like "mma", anything else in purple."""
    if impl in LOOKS:
        return LOOKS[impl]
    kin = next((known for name, known in LOOKS.items() if impl.startswith(f"{name}_")), Look(impl, PURPLE, "X"))
    return Look(impl, kin.color, kin.marker, ":")


def in_order(impls: set[str]) -> list[str]:
    """`impls` in the palette's order, unknown ones last by name: tables and figures agree on it."""
    return [impl for impl in LOOKS if impl in impls] + sorted(impls - LOOKS.keys())
