"""Measures a server under load, after it has shown to be the server that was meant, and records it, failures in front.

For each concurrency C: one unmeasured wave of the same shape, then waves of C requests. A wave's throughput is the
tokens of its good requests over the time from the first request to the last answer; the steady one, over the time in
which all of them decoded. More than 1% of failures make a run invalid; one without any success is still a result.
"""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsv4lab.journal import Journal
from dsv4lab.records import Clocks, Record
from dsv4lab.serving import http, launch, load, receipts, server_log, server_record, settings, sglang_load
from dsv4lab.serving.load import Outcome, Shape

ALLOWED_FAILURES = 0.01
DRIVERS = ("own", "sglang")
"""All requests of a wave at once, or SGLang's own serving benchmark (`sglang_load`), which tells what it saw, too."""
_OF_SGLANG = {"output_throughput": "output_tok_s", "median_ttft_ms": "ttft_ms", "median_tpot_ms": "tpot_ms"}


class WrongServer(ValueError):
    """The server that answers is not the one that was meant."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    expect: by name, what the server's account of itself must show as text; "hooks" as a setting. warm_up: tokens out in
    the unmeasured wave, if not those of the shape. timeout_s: of a wave. budget_s: of all waves at one concurrency;
    what is still asked then has failed. driver: what starts the requests of a wave, of `DRIVERS`.
    """

    concurrency: tuple[int, ...] = (1, 16, 32, 64)
    shape: Shape = field(default_factory=Shape)
    waves: int = 3
    seed: int = 0
    expect: dict[str, str] = field(default_factory=dict)
    warm_up: int | None = None
    timeout_s: float = load.TIMEOUT_S
    budget_s: float = math.inf
    driver: str = "own"

    def __post_init__(self):
        if self.driver not in DRIVERS:
            raise ValueError(f"driver must be one of {', '.join(DRIVERS)}, got {self.driver!r}")
        counts = {"input": self.shape.input, "output": self.shape.output, "warm_up": self.warm_up}
        settings.at_least(1, waves=self.waves, concurrency=min(self.concurrency, default=0), **counts)


@dataclass(frozen=True)
class Identity:
    """Which server this is: its own account and, if our launcher started it on this machine, what it started it as."""

    info: dict[str, Any]
    stage: str = ""
    hooks: str = ""
    log: Path | None = None


def identify(url: str) -> Identity:
    """Asks the server, and looks at what its launcher left here. NoAnswer if there is no server."""
    info = http.server_info(url)
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return Identity(info)
    left = launch.read_state(launch.state_file(parts.port or 80))
    if not left or not launch.overseer(left):
        return Identity(info)  # what answers there now is not what was started
    try:
        run = Path(left["log"]).parent
        started = json.loads((run / launch.STARTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Identity(info)
    live = {r.hook: r.impl for r in receipts.read(run / "receipts") if r.kind == "live"}
    return Identity(info, started["preset"], str(settings.Setting(**live)), run / "server.log")


def check_identity(identity: Identity, expect: dict[str, str]) -> None:
    """WrongServer naming what is not as meant."""
    for name, wanted in expect.items():
        found = identity.hooks if name == "hooks" else _text(identity.info.get(name))
        if name == "hooks":
            wanted = str(settings.Setting(**settings.parse(wanted).active))
        if found != wanted:
            raise WrongServer(f"{name} was to be {wanted or 'none'}, and the server has {found or 'none'}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass
class Measured:
    """The waves at one concurrency, and how many compilations the server's log shows among them; None without a log.

    accounts: what SGLang's benchmark says of the waves that it drove.
    """

    concurrency: int
    waves: list[list[Outcome]]
    compiles: int | None = None
    clocks: Clocks | None = None
    accounts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for wave in self.waves for outcome in wave]

    @property
    def ok(self) -> int:
        return sum(not outcome.error for outcome in self.outcomes)

    @property
    def valid(self) -> bool:
        return len(self.outcomes) - self.ok <= ALLOWED_FAILURES * len(self.outcomes)

    def result(self) -> dict[str, Any]:
        """The numbers: throughputs in tokens/s, times in ms; None where nothing came.

        steps_s: verification steps of a request a second, which are the server's. cached_tokens: of the prompts, what
        the server took from its cache instead of computing it. sglang_...: the same by SGLang's own benchmark.
        """
        good = [outcome for outcome in self.outcomes if outcome.tokens]
        steps, tokens = sum(o.steps for o in good), sum(o.tokens for o in good)
        return {
            "output_tok_s": statistics.median(map(throughput, self.waves)),
            "steady_tok_s": _median([rate for wave in self.waves if (rate := steady(wave)) is not None]),
            "ttft_ms": _median([1e3 * o.ttft for o in good if o.ttft is not None]),
            "tpot_ms": _median([1e3 * o.tpot for o in good if o.tpot is not None]),
            "chunk_gap_ms": _median([1e3 * gap for o in good for gap in o.chunk_gaps]),
            "accept_length": tokens / steps if steps else None,
            "steps_s": _median([o.steps_s for o in good if o.steps_s is not None]),
            "cached_tokens": sum(o.cached for o in good),
            "compiles": self.compiles,
        } | {
            f"sglang_{ours}": _median([each[theirs] for each in self.accounts if math.isfinite(each[theirs])])
            for theirs, ours in _OF_SGLANG.items()
            if self.accounts
        }

    def headline(self) -> str:
        """One line; how many requests succeeded comes first."""
        found = self.result()
        verdict = "" if self.valid else "INVALID: "
        text = f"C={self.concurrency}: {verdict}{self.ok}/{len(self.outcomes)} ok, {found['output_tok_s']:.1f} tok/s"
        for name, unit in (
            ("steady_tok_s", "tok/s"),
            ("ttft_ms", "ms"),
            ("tpot_ms", "ms"),
            ("accept_length", "tokens"),
        ):
            if found[name] is not None:
                text += f", {name.partition('_')[0]} {found[name]:.2f} {unit}"
        if found["cached_tokens"]:
            text += f", {found['cached_tokens']} prompt tokens came from the server's cache"
        if found["compiles"]:
            text += f", {found['compiles']} compilations meanwhile"
        failed = [outcome for outcome in self.outcomes if outcome.error]
        return text + (f" (first error: {min(failed, key=lambda o: o.end).error})" if failed else "")


def duration(wave: Sequence[Outcome]) -> float:
    """Seconds from the first request to the last answer."""
    return max(o.end for o in wave) - min(o.start for o in wave)


def throughput(wave: Sequence[Outcome]) -> float:
    """Tokens/s of a wave: only what good requests brought counts, and all the time does."""
    return sum(o.tokens for o in wave) / duration(wave)


def steady(wave: Sequence[Outcome]) -> float | None:
    """Tokens/s while all good requests of a wave decoded; None if there was no such time."""
    if (window := load.steady_window(wave)) is None:
        return None
    start, end = window
    came = sum(o.tokens_until(end) - o.tokens_until(start) for o in wave if o.tokens)
    return came / (end - start)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def measure(url: str, plan: Plan, log: Path | None = None, say: Callable[[str], None] = print) -> Iterator[Measured]:
    """Warms up and measures at every concurrency of the plan, in its order."""
    for concurrency in plan.concurrency:
        seeds = iter(range(plan.seed + 1000 * concurrency, plan.seed + 1000 * concurrency + plan.waves + 1))
        end = time.monotonic() + plan.budget_s
        before, drive, accounts = clocks_now(), load.together, []
        if plan.driver == "sglang":
            drive = sglang_load.Benchmark()
            accounts = drive.accounts
        warm_up = replace(plan.shape, output=plan.warm_up or plan.shape.output)
        _wave(url, warm_up, concurrency, next(seeds), plan, end, drive)
        accounts.clear()
        written = log.stat().st_size if log else 0
        waves = [_wave(url, plan.shape, concurrency, seed, plan, end, drive) for seed in seeds]
        compiles = server_log.compilations(log.read_bytes()[written:].decode(errors="replace")) if log else None
        found = Measured(concurrency, waves, compiles, Clocks(before=before, after=clocks_now()), accounts)
        say(found.headline())
        yield found


def _wave(
    url: str, shape: Shape, concurrency: int, seed: int, plan: Plan, end: float, drive: load.Drive
) -> list[Outcome]:
    timeout_s = max(min(plan.timeout_s, end - time.monotonic()), 0.1)  # 0 would be none
    return asyncio.run(load.wave(url, shape, concurrency, seed, timeout_s=timeout_s, drive=drive))


def run(
    url: str, plan: Plan, *, stage: str = "", directory: Path | None = None, say: Callable[[str], None] = print
) -> tuple[Path, bool]:
    """Identifies, measures and records the server at `url`: the record file, and whether every run in it is valid.

    stage: what the records call the implementation; the preset it was started with if "". WrongServer or NoAnswer
    before anything is timed.
    """
    identity = identify(url)
    check_identity(identity, plan.expect)
    experiment = server_record.experiment(identity.info.get("tp_size", 1))
    gpu = server_record.provenance()[0].gpu
    with Journal(experiment, gpu, directory) as journal:
        for each in measure(url, plan, identity.log, say):
            journal.add([record(each, plan, identity, stage or identity.stage or "unnamed")])
        return journal.finish(), all(line.check["passed"] for line in journal.records)


def record(measured: Measured, plan: Plan, identity: Identity, stage: str) -> Record:
    """One concurrency as a record: samples are the durations of the waves."""
    info = server_record.account(identity.info)
    failed = len(measured.outcomes) - measured.ok
    return server_record.line(
        f"c{measured.concurrency}_in{plan.shape.input}_out{plan.shape.output}",
        {"stage": stage, "C": measured.concurrency, "context_length": info.get("context_length"),
         "layers": server_record.layers(info), "tp": info.get("tp_size", 1)},
        experiment=server_record.experiment(info.get("tp_size", 1)),
        method={
            "name": "waves of C requests",
            "waves": plan.waves,
            "stream": plan.shape.stream,
            "driver": plan.driver,
            "warm_up_waves": 1,
            "warm_up_output": plan.warm_up or plan.shape.output,
        },
        samples_us=[1e6 * duration(wave) for wave in measured.waves],
        check={
            "ok": measured.ok,
            "failed": failed,
            "passed": measured.valid,
            "errors": sorted({o.error for o in measured.outcomes if o.error})[:5],
        },
        seed=plan.seed,
        clocks=measured.clocks,
        server={"info": info, "hooks": identity.hooks or None, "load": asdict(plan.shape)},
        result=measured.result(),
    )  # fmt: skip


def clocks_now() -> dict[str, Any] | None:
    from dsv4lab import timing

    return timing.clocks()
