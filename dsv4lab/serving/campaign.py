"""The campaign on a live server: each stage is started, proven, measured under load, profiled and stopped.

    out/<stage>.jsonl           its records, one for the start and one a concurrency, there when the stage is done
    out/<stage>.partial.jsonl   the same of a stage under way or cut off: it is started again, for what is missing
    out/<stage>.failed.jsonl    what happened to a stage that should have started and did not: it is tried again
    out/<stage>.step.jsonl      what a traced step of a stage that several GPUs share is made of, see `ranks`
    out/runs/<stage>/           log and receipts of its server, of <stage>_eager or _graph of one for a profile alone
    out/traces/<stage>_*        what it did in a few steps at batch 32, reduced; as the profiler had it, below out/runs
    out/records/                the newest file has all records so far, as the lab reads them

What is done is not done again, so that a run can be cut off, and continued on another machine with the same folder.
Several processes may walk at once with one folder, each on GPUs of its own (CUDA_VISIBLE_DEVICES): a stage that one is
at is left out by the others, and their records say what ran beside them. Those that walk together keep step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from dsv4lab import comm, hardware, records, trace
from dsv4lab.files import locked, write_atomically
from dsv4lab.records import Record
from dsv4lab.serving import bench, http, meeting, profile, ranks, server_record, stages, synthetic
from dsv4lab.serving.launch import ServeError, Server
from dsv4lab.serving.stages import LEAST_S, Plan

TRACED_BATCH = 32
PROFILED = 1e9
"""What step of a stage its profile is, the others being the concurrencies."""


def run(plan: Plan, chosen: Sequence[str], say: Callable[[str], None] = print) -> bool:
    """Does what of the stages `chosen` is not done and no other process is at; whether these are done now, and valid.

    ValueError if what the folder has of them was measured otherwise.
    """
    begun, _ = time.monotonic(), plan.deadline
    tell = lambda text: say(f"[{time.monotonic() - begun:6.0f} s] {text}")  # noqa: E731
    for stage in chosen:
        _check_alike(plan, stage)
    synthetic.write(plan.out / "model")
    ours = [stage for stage in chosen if _walk(plan, stage, tell)]
    with locked(plan.out / "records.lock"):  # else the newest file could lack what another process added
        for path in _join(plan):
            say(f"recorded: {path}")
    return all(done(plan, stage) and _good(plan, stage) for stage in ours)


def _walk(plan: Plan, stage: str, say: Callable[[str], None]) -> bool:
    """Does what is missing of a stage; False if another process is at it."""
    tell = lambda text: say(f"{plan.label(stage)}: {text}")  # noqa: E731
    with locked(plan.lock(stage), wait_s=1) as ours:  # who only looks has it for a moment
        if not ours:
            tell("another process is at it")
            return False
        for there, run_it in _Stage(plan, stage, tell).parts():
            if there:
                tell("done before")
            elif plan.left < LEAST_S:
                tell("not begun, the time is over")
            else:
                run_it()
    return True


def _beside(plan: Plan, stage: str) -> Iterator[str]:
    """The stages that other processes are at."""
    for lock in sorted(plan.lock(stage).parent.glob("*.lock")):
        if lock != plan.lock(stage):
            with locked(lock, wait_s=0) as free:
                if not free:
                    yield lock.stem


def _join(plan: Plan) -> Iterator[Path]:
    """Puts all records there are into one new file for each GPU."""
    lines = [line for stage in stages.LEGS for line in (*_read(plan, stage), *_lines(plan.file(stage, ".step")))]
    for gpu in {line.env.gpu for line in lines}:
        yield store(
            [line for line in lines if line.env.gpu == gpu], server_record.experiment(plan.tp), plan.out / "records"
        )


def store(lines: Sequence[Record], experiment: str, folder: Path) -> Path:
    """`records.write`, a second later where a file of this second is there."""
    try:
        return records.write(lines, experiment, folder)
    except FileExistsError:
        time.sleep(1)
        return records.write(lines, experiment, folder)


def done(plan: Plan, stage: str) -> bool:
    """Whether the records of a stage are there."""
    return plan.file(stage).is_file()


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
                    f"{name} is {value}, and {plan.out.name} has {plan.label(stage)} with {found[name]}: "
                    "take another out"
                )


def _good(plan: Plan, stage: str) -> bool:
    return stages.LEGS[stage].open_end or all(line.check["passed"] for line in _read(plan, stage))


def _read(plan: Plan, stage: str) -> list[Record]:
    """What there is of a stage: of its last complete attempt, else of the last."""
    return next(filter(None, (_lines(plan.file(stage, ending)) for ending in ("", ".partial", ".failed"))), [])


def _lines(path: Path) -> list[Record]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [Record.model_validate_json(line) for line in text.splitlines()]


def _told(error: Exception) -> str:
    """What an error says; with its type, if it is none that says what it means."""
    meant = isinstance(error, (ServeError, profile.NoTrace, trace.TraceError, ValueError, OSError))
    return str(error) if meant else f"{type(error).__name__}: {error}"


class _Stage:
    """One stage from start to stop; every record is on disk as soon as it exists."""

    def __init__(self, plan: Plan, name: str, say: Callable[[str], None]):
        self.plan, self.name, self.say, self.leg = plan, name, say, stages.LEGS[name]
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
        before_it = _read(self.plan, self.name)
        answered = not self.leg.concurrency or any(line.config["C"] and line.check["passed"] for line in before_it)
        if before and answered and not self.plan.trace(self.name, eager=False).is_file():
            yield False, partial(self.run_profile, eager=False)
        if self.plan.eager and self.leg.eager:
            yield self.plan.trace(self.name, eager=True).is_file(), partial(self.run_profile, eager=True)

    def run(self) -> None:
        """Never raises for what the server does: that is recorded."""
        self._meet(0)
        self._attempt()
        self._meet(meeting.END)

    def _attempt(self) -> None:
        self.lines = [line for line in _read(self.plan, self.name) if line.config["C"] and line.check["passed"]]
        if self.lines:
            self._write()
        self.plan.file(self.name, ".failed").unlink(missing_ok=True)
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

    def _meet(self, step: float) -> None:
        """Where processes walk together: waits for those that are not at this step of theirs yet."""
        if self.plan.together and not meeting.meet(self.plan.lock(self.name), step, self.plan.left):
            self.say("waited in vain for another process")

    def _started(self, server: Server, seconds: float) -> None:
        info = server_record.account(server.info)
        told = [memory["graph"] for memory in info["memory_gb"] if memory and "graph" in memory]
        graph = sum(told) if told else None
        taken = "" if graph is None else f"graphs take {graph:.2f} GB, "
        self.say(f"ready after {seconds:.0f} s, {taken}hooks live: {self.config.hooks or 'none'}")
        live = [{"hook": r.hook, "rank": r.rank, "saw": r.arguments} for r in server.receipts if r.kind == "live"]
        self._add(
            seconds, {"graph_gb": graph}, {"info": info, "hooks": str(self.config.hooks), "receipts": live}
        )  # fmt: skip

    def _measure(self, server: Server) -> None:
        identity = bench.identify(server.url)
        expect = {"context_length": self.config.context_length, "tp_size": self.plan.tp, "hooks": self.config.hooks}
        expect = {name: str(value) for name, value in expect.items()}
        bench.check_identity(identity, expect)
        for concurrency in self.missing:
            self._meet(concurrency)
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
        kind = stages.kind(eager)
        self._meet(PROFILED)
        try:
            raw = profile.steady(
                server.url, server.run / "traces", batch=TRACED_BATCH, input=self.plan.shape.input,
                steps=self.plan.steps, eager=eager, ranks=server.ranks,
                timeout_s=max(min(self.plan.left, 180.0), 1.0),
            )  # fmt: skip
        except Exception as error:
            return self.say(f"no {kind} profile: {_told(error)}")
        target = self.plan.trace(self.name, eager=eager)
        about = {key: value for key, value in self._config.items() if key != "C"}
        about |= {"mode": kind, "sglang": server.info.get("version")}
        try:
            target.unlink(missing_ok=True)
            trace.reduce(raw, target, batch=TRACED_BATCH, graphs=not eager, **about)
            if not eager and (self.plan.tp > 1 or not self.leg.concurrency):
                self._step(target)
        except Exception as error:
            return self.say(f"the {kind} profile stays as it is: {_told(error)}")
        sizes = [sum(path.stat().st_size for path in paths) / 2**20 for paths in ([target], raw.iterdir())]
        self.say(f"profiled, {kind}: {target.name}, {sizes[0]:.1f} of {sizes[1]:.1f} MiB")

    def _step(self, path: Path) -> None:
        """Records what the ranks' steps in a trace are made of."""
        traced, tp = trace.read(path), self.plan.tp
        found, spans = ranks.account(
            traced, tp=tp, batch=TRACED_BATCH, layers=self.plan.layers, link=comm.link_of(hardware.link())
        )  # fmt: skip
        seen = traced.events["rank"].nunique()
        line = server_record.line(
            "step", self._config | {"batch": TRACED_BATCH}, experiment=server_record.experiment(tp),
            method={"name": "whole decode steps of every rank in the trace", "trace": path.name},
            samples_us=spans, result=found, server={"info": {}, "hooks": str(self.config.hooks)},
            check={"ok": seen, "failed": tp - seen, "passed": seen == tp, "errors": []},
        )  # fmt: skip
        write_atomically(self.plan.file(self.name, ".step"), line.model_dump_json(by_alias=True) + "\n")
        self.say(", ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None))

    @property
    def _config(self) -> dict[str, int | str | None]:
        """Of the records that are of no concurrency."""
        lengths = {"context_length": self.config.context_length, "layers": self.plan.layers}
        return {"stage": self.name, "C": None, **lengths, "tp": self.plan.tp}

    def run_profile(self, *, eager: bool) -> None:
        """Another server for its profile alone: without graphs, or for one that did not come when it was measured."""
        kind = stages.kind(eager)
        run = self.config.run.with_name(f"{self.plan.label(self.name)}_{kind}")
        config = replace(self.plan.config(self.name, eager=eager), run=run)
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
        check = {"ok": int(not error), "failed": int(bool(error)), "passed": not error}
        line = server_record.line(
            "end" if started else "start", self._config, experiment=server_record.experiment(self.plan.tp),
            method={"name": "one start of the server"}, samples_us=[1e6 * seconds],
            check=check | {"errors": [error] if error else []}, result=result, server=server,
        )  # fmt: skip
        self._keep(line)

    def _keep(self, line: Record) -> None:
        method = line.method | {"beside": list(_beside(self.plan, self.name))}
        method |= {"together": True} if self.plan.together else {}
        self.lines.append(line.model_copy(update={"method": method}))
        self._write()

    def _write(self) -> None:
        text = "".join(each.model_dump_json(by_alias=True) + "\n" for each in self.lines)
        write_atomically(self.plan.file(self.name, ".partial"), text)

    def _end(self, ending: str) -> None:
        self.plan.file(self.name, ".partial").replace(self.plan.file(self.name, ending))
