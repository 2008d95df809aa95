"""The stages of the campaign in their order, how each is measured, and where what it leaves goes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic

from dsv4lab.model import DSV4_FLASH
from dsv4lab.serving import launch, machine, presets, settings, synthetic
from dsv4lab.serving.load import Shape
from dsv4lab.trace import reduced

GRAPHS_OFF = "--disable-cuda-graph"
LEAST_S = 30.0


@dataclass(frozen=True)
class Leg:
    """How a stage is measured. concurrency: none for a stage that is only profiled. eager: a second start without
    graphs, for a profile with shapes and stacks. open_end: that it does not start is a result, not a failure.
    """

    concurrency: tuple[int, ...] = (1, 16, 64)
    eager: bool = False
    open_end: bool = False


LEGS = {
    "indexer": Leg((1, 16, 32, 64), eager=True),
    "native": Leg((1, 16, 32, 64)),
    "indexer_tuned": Leg((1, 16, 32, 64)),
    "native_tuned": Leg((1, 16, 32, 64)),
    "indexer_ctx8192": Leg(),
    "native_auto": Leg((1, 16, 32, 64)),
    "stock": Leg(eager=True),
    "split_k": Leg(),
    "mma": Leg(),
    "bf16": Leg(),
    "stock_ctx8192": Leg(),
    "indexer_stock_gemm": Leg(),
    "indexer_stock_mhc": Leg(),
    "attention_twice": Leg(()),
    "compile": Leg(open_end=True),
    "compile_nographs": Leg(open_end=True),
    "compile_stock_attention": Leg(open_end=True),
}
"""In order of worth: what is cut off is what can best be done without."""


@dataclass(frozen=True)
class Plan:
    """What every stage has in common.

    context_length: of the stages that cap none. budget_s: no stage is begun or continued past it. start_s: until a
    server must be ready. eager: also the second starts. warm_up: tokens out of the unmeasured waves. tp: GPUs that
    share the model. flags: SGLang's own, of every server. together: keep step with the other processes of `out`.
    """

    out: Path
    layers: int = 6
    context_length: int = 1_048_576
    shape: Shape = field(default_factory=Shape)
    waves: int = 3
    warm_up: int = 16
    steps: int = 3
    eager: bool = False
    budget_s: float = 7200.0
    start_s: float = 900.0
    port: int = field(default_factory=machine.usual_port)
    tp: int = 1
    flags: tuple[str, ...] = ()
    together: bool = False

    def __post_init__(self):
        counts = {"input": self.shape.input, "output": self.shape.output}
        settings.at_least(1, context_length=self.context_length, waves=self.waves, warm_up=self.warm_up, **counts)
        settings.at_least(1, steps=self.steps, budget_s=self.budget_s, start_s=self.start_s)
        synthetic.layer_flags(self.layers)
        DSV4_FLASH.tensor_parallel(self.tp)

    @cached_property
    def deadline(self) -> float:
        """On the monotonic clock, counted from the first question."""
        return monotonic() + self.budget_s

    @property
    def left(self) -> float:
        return max(self.deadline - monotonic(), 0.0)

    def label(self, stage: str) -> str:
        """What its files are called."""
        return stage if self.tp == 1 else f"{stage}_tp{self.tp}"

    def file(self, stage: str, ending: str = "") -> Path:
        """Its records: "" of a stage that is done, ".partial", ".failed", or ".step" of a traced step."""
        return self.out / f"{self.label(stage)}{ending}.jsonl"

    def trace(self, stage: str, *, eager: bool) -> Path:
        """Where its reduced trace goes."""
        return self.out / "traces" / f"{self.label(stage)}_{kind(eager)}{reduced.SUFFIX}"

    def lock(self, stage: str) -> Path:
        """What a process holds that is at the stage."""
        return self.out / "runs" / f"{self.label(stage)}.lock"

    def config(self, stage: str, *, eager: bool = False) -> launch.Config:
        """The server of a stage."""
        preset = presets.find(stage)
        return launch.Config(
            model=str(self.out / "model"),
            preset=stage,
            tp=self.tp,
            context_length=min(preset.context_length, self.context_length),
            layers=self.layers,
            port=self.port,
            flags=(*self.flags, *((GRAPHS_OFF,) if eager else ())),
            run=self.out / "runs" / (self.label(stage) + ("_eager" if eager else "")),
            timeout_s=max(min(self.start_s, self.left), LEAST_S),
        )


def kind(eager: bool) -> str:
    return "eager" if eager else "graph"


def choose(names: Sequence[str]) -> list[str]:
    """The stages of these names in the order of the table; all of them for none. ValueError naming a stranger."""
    if unknown := [name for name in names if name not in LEGS]:
        raise ValueError(f"stages must be of {', '.join(LEGS)}, got {unknown[0]!r}")
    return [name for name in LEGS if name in names or not names]


def describe(plan: Plan, stages: Iterable[str]) -> Iterable[str]:
    """For each stage the environment and the command line it would be started with."""
    for stage in stages:
        for eager in (False, True) if plan.eager and LEGS[stage].eager else (False,):
            config = plan.config(stage, eager=eager)
            yield f"{config.run.name}: {config.command_line}"
