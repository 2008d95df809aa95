"""What is to run inside SGLang, in one environment variable: DSV4LAB=attention=gluon,indexer=triton,topk=triton."""

from dataclasses import dataclass, fields

VARIABLE = "DSV4LAB"
STOCK = "stock"
CHOICES = {
    "attention": (STOCK, "simt", "mma", "split_k", "gluon"),
    "indexer": (STOCK, "torch_fallback", "torch_bf16", "triton"),
    "topk": (STOCK, "triton"),
    "mhc": (STOCK, "bf16", "split_k", "split_k_bf16"),
    "gemm": (STOCK, "split_k"),
    "gate": (STOCK, "split_k"),
    "slots": (STOCK, "triton"),
    "head": (STOCK, "split_k"),
    "sm120_path": (STOCK, "forced"),
    "weights": (STOCK, "random"),
    "tables": (STOCK, "tuned"),
    "twice": (STOCK, "padded"),
}


@dataclass(frozen=True)
class Setting:
    """One of `CHOICES` for each hook; `version`: the SGLang release to treat an unknown one as.

    attention "gluon": `split_k` on a GPU that Gluon has no kernel for; the receipt of the first call says what ran.
    gemm "split_k": SGLang's Triton FP8 linear layers are ours, with their quantisation, where rows are few, and stay
      SGLang's where they are many.
    gate "split_k": the same of the bf16 products with fp32 results, which are the router's gate and the compressors'.
    slots "triton": the slots of the c128 keys, which SGLang writes up to the context limit by one program a row.
    head "split_k": the mix of the four streams in front of the output head, which SGLang gives one program a row.
    sm120_path "forced": SGLang takes the code path of sm_120 on whatever GPU there is. weights "random": in place of
    SGLang's dummy weights, such as give an answer something to depend on. tables "tuned": SGLang's Triton FP8 GEMM and
    MoE take their configs from what `dsv4lab tune` wrote for this GPU. twice "padded": after our attention, SGLang's
    own on the call as it came, heads of other ranks and all, its result dropped: for a trace that has both.
    """

    attention: str = STOCK
    indexer: str = STOCK
    topk: str = STOCK
    mhc: str = STOCK
    gemm: str = STOCK
    gate: str = STOCK
    slots: str = STOCK
    head: str = STOCK
    sm120_path: str = STOCK
    weights: str = STOCK
    tables: str = STOCK
    twice: str = STOCK
    version: str = ""

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{VARIABLE}: {name} must be one of {', '.join(choices)}, got {value!r}")
        if self.twice != STOCK and self.attention == STOCK:
            raise ValueError(f"{VARIABLE}: twice={self.twice} needs an attention of ours")

    @property
    def active(self) -> dict[str, str]:
        """The hooks asked for, by name; empty when all is stock."""
        return {name: getattr(self, name) for name in CHOICES if getattr(self, name) != STOCK}

    def __str__(self) -> str:
        """The setting as `parse` reads it, stock parts left out."""
        given = self.active | ({"version": self.version} if self.version else {})
        return ",".join(f"{name}={value}" for name, value in given.items())


def parse(text: str) -> Setting:
    """The setting that "name=value,name=value" spells. ValueError naming what is unknown, malformed or said twice."""
    known = [field.name for field in fields(Setting)]
    given: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"{VARIABLE}: {part!r} must read name=value")
        if name not in known:
            raise ValueError(f"{VARIABLE}: there is no {name!r}; known: {', '.join(known)}")
        if name in given:
            raise ValueError(f"{VARIABLE}: {name} is given twice")
        given[name] = value
    return Setting(**given)


def at_least(least: float, **numbers: float | None) -> None:
    """ValueError naming the first of `numbers` that is less; None is none."""
    for name, value in numbers.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
