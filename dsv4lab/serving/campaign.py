"""The campaign on a live server: each stage is started, proven, measured under load, profiled and stopped.

    out/<stage>.jsonl           its records, one for the start and one a concurrency, there when the stage is done
    out/<stage>.partial.jsonl   the same of a stage under way or cut off: it is started again, for what is missing
    out/<stage>.failed.jsonl    what happened to a stage that should have started and did not: it is tried again
    out/runs/<stage>/           log and receipts of its server, of <stage>_eager or _graph of one for a profile alone
    out/traces/<stage>_*        what it did in a few steps at batch 32, reduced; as the profiler had it, below out/runs
    out/records/                the newest file has all records so far, as the lab reads them

What is done is not done again, so that a run can be cut off, and continued on another machine with the same folder.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from dsv4lab import records, trace
from dsv4lab.files import write_atomically
from dsv4lab.records import Record
from dsv4lab.serving import bench, http, launch, presets, profile, settings, synthetic
from dsv4lab.serving.launch import ServeError, Server
from dsv4lab.serving.load import Shape
from dsv4lab.trace import reduced

GRAPHS_OFF = "--disable-cuda-graph"
TRACED_BATCH = 32
LEAST_S = 30.0


@dataclass(frozen=True)
class Leg:
    """How a stage is measured. eager: a second start without graphs, for a profile with shapes and stacks.

    open_end: that it does not start is a result, not a failure.
    """

    concurrency: tuple[int, ...] = (1, 16, 64)
    eager: bool = False
    open_end: bool = False


LEGS = {
    "indexer": Leg((1, 16, 32, 64), eager=True),
    "native": Leg((1, 16, 32, 64)),
    "indexer_tuned": Leg((1, 16, 32, 64)),
    "native_tuned": Leg((1, 16, 32, 64)),
    "stock": Leg(eager=True),
    "indexer_ctx8192": Leg(),
    "split_k": Leg(),
    "mma": Leg(),
    "bf16": Leg(),
    "stock_ctx8192": Leg(),
    "native_auto": Leg(),
    "indexer_stock_mhc": Leg(),
    "compile": Leg(open_end=True),
    "compile_nographs": Leg(open_end=True),
    "compile_stock_attention": Leg(open_end=True),
}
"""In order of worth: what is cut off is what can best be done without."""


@dataclass(frozen=True)
class Plan:
    """What every stage has in common.

    context_length: of the stages that cap none. budget_s: no stage is begun or continued past it. start_s: until a
    server must be ready. eager: also the second starts. warm_up: tokens out of the unmeasured waves.
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
    port: int = 30000

    def __post_init__(self):
        counts = {"input": self.shape.input, "output": self.shape.output}
        settings.at_least(1, context_length=self.context_length, waves=self.waves, warm_up=self.warm_up, **counts)
        settings.at_least(1, steps=self.steps, budget_s=self.budget_s, start_s=self.start_s)
        synthetic.layer_flags(self.layers)

    @cached_property
    def deadline(self) -> float:
        """On the monotonic clock, counted from the first question."""
        return time.monotonic() + self.budget_s

    @property
    def left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def config(self, stage: str, *, eager: bool = False) -> launch.Config:
        """The server of a stage."""
        preset = presets.find(stage)
        return launch.Config(
            model=str(self.out / "model"),
            preset=stage,
            context_length=min(preset.context_length, self.context_length),
            layers=self.layers,
            port=self.port,
            flags=(GRAPHS_OFF,) if eager else (),
            run=self.out / "runs" / (f"{stage}_eager" if eager else stage),
            timeout_s=max(min(self.start_s, self.left), LEAST_S),
        )


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


def run(plan: Plan, stages: Sequence[str], say: Callable[[str], None] = print) -> bool:
    """Does what of `stages` is not done yet; whether all of them are now, and every number in them is valid.

    ValueError if what the folder has of them was measured otherwise.
    """
    begun, _ = time.monotonic(), plan.deadline
    for stage in stages:
        _check_alike(plan, stage)
    synthetic.write(plan.out / "model")
    for stage in stages:
        tell = lambda text, stage=stage: say(f"[{time.monotonic() - begun:6.0f} s] {stage}: {text}")  # noqa: E731
        for there, run_it in _Stage(plan, stage, tell).parts():
            if there:
                tell("done before")
            elif plan.left < LEAST_S:
                tell("not begun, the time is over")
            else:
                run_it()
    for path in _join(plan):
        say(f"recorded: {path}")
    return all(done(plan, stage) and _good(plan, stage) for stage in stages)


def _join(plan: Plan) -> Iterator[Path]:
    """Puts all records there are into one new file for each GPU."""
    lines = [line for stage in LEGS for line in _read(plan, stage)]
    for gpu in {line.env.gpu for line in lines}:
        yield store([line for line in lines if line.env.gpu == gpu], bench.EXPERIMENT, plan.out / "records")


def store(lines: Sequence[Record], experiment: str, folder: Path) -> Path:
    """`records.write`, a second later where a file of this second is there."""
    try:
        return records.write(lines, experiment, folder)
    except FileExistsError:
        time.sleep(1)
        return records.write(lines, experiment, folder)


def done(plan: Plan, stage: str) -> bool:
    """Whether the records of a stage are there."""
    return (plan.out / f"{stage}.jsonl").is_file()


def _check_alike(plan: Plan, stage: str) -> None:
    """ValueError naming how the records there are of a stage differ from what the plan would add to them."""
    config = plan.config(stage)
    for line in _read(plan, stage):
        wanted, found = {"layers": config.layers, "context_length": config.context_length}, line.config
        if line.config["C"]:
            wanted, found = wanted | asdict(plan.shape), found | line.server["load"]
            wanted, found = wanted | {"waves": plan.waves}, found | line.method
        for name, value in wanted.items():
            if found[name] is not None and found[name] != value:
                raise ValueError(
                    f"{name} is {value}, and {plan.out.name} has {stage} with {found[name]}: take another out"
                )


def _good(plan: Plan, stage: str) -> bool:
    return LEGS[stage].open_end or all(line.check["passed"] for line in _read(plan, stage))


def _read(plan: Plan, stage: str) -> list[Record]:
    """What there is of a stage: of its last complete attempt, else of the last."""
    for ending in ("", ".partial", ".failed"):
        path = plan.out / f"{stage}{ending}.jsonl"
        if path.is_file():
            return [Record.model_validate_json(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return []


def _kind(eager: bool) -> str:
    return "eager" if eager else "graph"


def _told(error: Exception) -> str:
    """What an error says; with its type, if it is none that says what it means."""
    meant = isinstance(error, (ServeError, profile.NoTrace, trace.TraceError, ValueError, OSError))
    return str(error) if meant else f"{type(error).__name__}: {error}"


class _Stage:
    """One stage from start to stop; every record is on disk as soon as it exists."""

    def __init__(self, plan: Plan, name: str, say: Callable[[str], None]):
        self.plan, self.name, self.say, self.leg = plan, name, say, LEGS[name]
        self.config = plan.config(name)
        self.lines: list[Record] = []

    @property
    def missing(self) -> list[int]:
        """Concurrencies without a record."""
        return [c for c in self.leg.concurrency if c not in [line.config["C"] for line in self.lines]]

    def parts(self) -> Iterator[tuple[bool, Callable[[], None]]]:
        """What is asked for, in order: whether it is there, and what brings it."""
        before = done(self.plan, self.name)
        yield before, self.run
        answered = any(line.config["C"] and line.check["passed"] for line in _read(self.plan, self.name))
        if before and answered and not self.trace(eager=False).is_file():
            yield False, partial(self.run_profile, eager=False)
        if self.plan.eager and self.leg.eager:
            yield self.trace(eager=True).is_file(), partial(self.run_profile, eager=True)

    def run(self) -> None:
        """Never raises for what the server does: that is recorded."""
        self.lines = [line for line in _read(self.plan, self.name) if line.config["C"] and line.check["passed"]]
        if self.lines:
            self._write()
        self._file(".failed").unlink(missing_ok=True)
        begun = time.monotonic()
        try:
            with Server(self.config, self.say) as server:
                self._started(server, time.monotonic() - begun)
                self._measure(server)
                if not self.missing:
                    self._profile(server, eager=False)
        except Exception as error:  # whatever it was, the next stage has its turn
            if not self.plan.left:
                return self.say(f"cut off, the time is over: {error}")
            self._failed(error, time.monotonic() - begun)
        else:
            if self.missing:
                return self.say("cut off, the time is over")
            self._end("")

    def _started(self, server: Server, seconds: float) -> None:
        info = bench.account(server.info)
        told = [memory["graph"] for memory in info["memory_gb"] if memory and "graph" in memory]
        graph = sum(told) if told else None
        taken = "" if graph is None else f"graphs take {graph:.2f} GB, "
        self.say(f"ready after {seconds:.0f} s, {taken}hooks live: {self.config.hooks or 'none'}")
        self._add(seconds, {"graph_gb": graph}, {"info": info, "hooks": str(self.config.hooks)})

    def _measure(self, server: Server) -> None:
        identity = bench.identify(server.url)
        expect = {"context_length": str(self.config.context_length), "hooks": str(self.config.hooks)}
        bench.check_identity(identity, expect)
        for concurrency in self.missing:
            if self.plan.left < 1:
                return
            plan = bench.Plan(
                (concurrency,), self.plan.shape, self.plan.waves, expect=expect, warm_up=self.plan.warm_up,
                budget_s=self.plan.left,
            )  # fmt: skip
            (found,) = bench.measure(server.url, plan, identity.log, self.say)
            if found.valid or self.plan.left:
                self._keep(bench.record(found, plan, identity, self.name))

    def _profile(self, server: Server, *, eager: bool) -> None:
        """A trace, or word of why there is none: the numbers do not depend on it."""
        kind = _kind(eager)
        try:
            raw = profile.steady(
                server.url, server.run / "traces", batch=TRACED_BATCH, input=self.plan.shape.input,
                steps=self.plan.steps, eager=eager, timeout_s=max(min(self.plan.left, 180.0), 1.0),
            )  # fmt: skip
        except Exception as error:
            return self.say(f"no {kind} profile: {_told(error)}")
        target = self.trace(eager=eager)
        try:
            target.unlink(missing_ok=True)
            trace.reduce(raw, target, stage=self.name, batch=TRACED_BATCH, graphs=not eager)
        except Exception as error:
            return self.say(f"the {kind} profile stays as it is: {_told(error)}")
        sizes = " of ".join(f"{path.stat().st_size / 2**20:.1f}" for path in (target, raw))
        self.say(f"profiled, {kind}: {target.name}, {sizes} MiB")

    def trace(self, *, eager: bool) -> Path:
        """Where the reduced trace goes."""
        return self.plan.out / "traces" / f"{self.name}_{_kind(eager)}{reduced.SUFFIX}"

    def run_profile(self, *, eager: bool) -> None:
        """Another server for its profile alone: without graphs, or for one that did not come when it was measured."""
        kind = _kind(eager)
        config = replace(self.plan.config(self.name, eager=eager), run=self.config.run.with_name(f"{self.name}_{kind}"))
        try:
            with Server(config, self.say) as server:
                self._profile(server, eager=eager)
        except Exception as error:
            self.say(f"no {kind} profile: {_told(error)}")

    def _failed(self, error: Exception, seconds: float) -> None:
        """Records what ended it: of an open end a result if the server did, but not if it could not even be tried."""
        self.say(f"failed: {_told(error)}")
        self._add(seconds, {}, {"hooks": str(self.config.hooks)}, _told(error))
        result = self.leg.open_end and isinstance(error, (ServeError, http.NoAnswer))
        self._end("" if result else ".failed")

    def _add(self, seconds: float, result: dict[str, float | None], server: dict, error: str = "") -> None:
        """A record of the start, or of what ended a started server before its time."""
        started = any(line.case == "start" for line in self.lines)
        config = {"stage": self.name, "C": None, "context_length": self.config.context_length}
        check = {"ok": int(not error), "failed": int(bool(error)), "passed": not error}
        line = bench.line(
            "end" if started else "start", config | {"layers": self.plan.layers},
            method={"name": "one start of the server"}, samples_us=[1e6 * seconds],
            check=check | {"errors": [error] if error else []}, result=result, server=server,
        )  # fmt: skip
        self._keep(line)

    def _keep(self, line: Record) -> None:
        self.lines.append(line)
        self._write()

    def _write(self) -> None:
        text = "".join(each.model_dump_json(by_alias=True) + "\n" for each in self.lines)
        write_atomically(self._file(".partial"), text)

    def _end(self, ending: str) -> None:
        self._file(".partial").replace(self._file(ending))

    def _file(self, ending: str) -> Path:
        return self.plan.out / f"{self.name}{ending}.jsonl"
