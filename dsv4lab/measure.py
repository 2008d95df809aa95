"""Check, then time, then record: a kernel module and its rivals on the module's named cases.

`run("sparse_mla")` takes `dsv4lab.kernels.sparse_mla` through its `CASES`. Of every case all variants are first checked
on poisoned outputs against the module's float64 reference and PyTorch baseline, by the module's own `judge` if it has
one, and what passed is timed together; a variant whose `prepare` refuses the case (ValueError) is named and left out.
The ceilings of the GPU are measured at the start and stored in the same file as case `CEILINGS`, so that the floor a
figure draws belongs to the run it shows.

Cold means that the input sets rotate until at least `timing.ROTATION_BYTES` of KV lie between two uses of a set; where
`timing.MAX_SETS` sets do not reach that, or a slow variant has no time for so many, it is labelled "rotated" instead.
Warm means one set, replayed.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from dsv4lab import kernels, timing
from dsv4lab.journal import Journal
from dsv4lab.peers import peers_of
from dsv4lab.provenance import command_line, environment, git_state, kernel_hash
from dsv4lab.records import Clocks, Environment, Git, Record
from dsv4lab.verdict import CheckFailed, NotApplicable, verdict

CACHES = ("cold", "warm")
CEILINGS = "ceilings"
GRAPH_S = 0.15
"""The longest that one replay of a variant may take, in seconds."""


@dataclass(frozen=True)
class _Variant:
    """One implementation, ours or a rival's, as `prepare` makes it launchable on an input set."""

    impl: str
    prepare: Callable[[Any], timing.Launch]
    notes: Callable[[Any], dict]
    sha256: str
    lse_includes_sink: bool = False


@dataclass(frozen=True)
class _Run:
    """What all records of one run share."""

    experiment: str
    device: torch.device
    seed: int
    budget_s: float
    argv: list[str]
    git: Git
    env: Environment

    def record(self, **fields: Any) -> Record:
        shared = {name: getattr(self, name) for name in ("experiment", "seed", "argv", "git", "env")}
        return Record(**shared, date_utc=datetime.now(UTC), **fields)


@dataclass(frozen=True)
class _Timing:
    """One timing of several variants together: how each was timed, the clocks, the samples."""

    methods: dict[str, dict[str, Any]]
    clocks: Clocks
    replays: timing.Replays

    def cache(self, impl: str, asked: str) -> str:
        """The cache that a variant really met."""
        rotated = self.methods[impl]["rotated_bytes"]
        return "rotated" if asked == "cold" and rotated < timing.ROTATION_BYTES else asked


def run(
    stem: str,
    *,
    cases: Sequence[str] | None = None,
    impls: Sequence[str] | None = None,
    peers: bool = False,
    sweep: bool = False,
    cache: Sequence[str] = CACHES,
    directory: Path | str | None = None,
    device: str | torch.device = "cuda",
    seed: int = 0,
    budget_s: float = 10.0,
) -> Path:
    """Measures `dsv4lab.kernels.<stem>` and returns the new record file.

    Args:
        cases, impls: names out of the module's `CASES` and `IMPLEMENTATIONS`; None takes all.
        peers: also the rivals' kernels that can run here; those that cannot are named with the reason.
        sweep: the module's `CANDIDATES` instead, as experiment `<EXPERIMENT>_sweep`: what its config table cites.
        cache: which of "cold" and "warm" to time.
        directory: where the record file goes; None is the records folder of the checkout.
        budget_s: replay seconds for one case and cache, all variants together.

    Raises:
        RuntimeError: no CUDA GPU. ValueError: a name that does not exist. CheckFailed: at the end, with the file
        written, if a variant failed. Any other error carries a note naming the `.partial` file of what was measured.
    """
    device = timing.require_gpu(device)
    torch.cuda.set_device(device)
    module = kernel_module(stem)
    names = _chosen("cases", cases, module.CASES)
    caches = _chosen("cache", cache, CACHES)
    known = module.CANDIDATES if sweep else module.IMPLEMENTATIONS
    variants = _variants(module, _chosen("impls", impls, known), peers)
    experiment = f"{module.EXPERIMENT}_sweep" if sweep else module.EXPERIMENT
    this = _Run(experiment, device, seed, budget_s, command_line(), git_state(), environment(device))
    journal, failures = Journal(experiment, this.env.gpu, directory), []
    try:
        journal.add(_ceiling_records(this))
        for name in tqdm(names, desc=stem, unit="case", disable=None):
            found, failed = _measure_case(module, module.CASES[name], variants, caches, this)
            journal.add(found)
            failures += failed
            _report(name, found, failed)
        if not _measured(journal):
            raise CheckFailed(f"nothing could be measured: {'; '.join(failures) or 'no implementation takes the case'}")
        path = journal.finish()
    except BaseException as error:
        if kept := journal.abandon(error, worth_keeping=_measured(journal)):
            _say(f"stopped: {kept}")
        raise
    if failures:
        raise CheckFailed(f"{'; '.join(failures)} (not timed; the rest is in {path})")
    return path


def _measured(journal: Journal) -> bool:
    """Whether it holds more than the ceilings."""
    return any(record.case != CEILINGS for record in journal.records)


def kernel_module(stem: str) -> ModuleType:
    """`dsv4lab.kernels.<stem>`; ValueError naming the known ones if it does not exist or has no cases."""
    name = f"{kernels.__name__}.{stem}"
    try:
        module = import_module(name)
        if hasattr(module, "CASES"):
            return module
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    known = (found.name for found in iter_modules(kernels.__path__) if not found.name.startswith("_"))
    raise ValueError(f"stem {stem!r} is no kernel module with cases; known: {', '.join(known)}")


def _variants(module: ModuleType, impls: Collection[str], peers: bool) -> list[_Variant]:
    digest = kernel_hash(module)
    variants = [_Variant(impl, partial(module.prepare, impl), partial(module.notes, impl), digest) for impl in impls]
    for peer in peers_of(module.EXPERIMENT) if peers else ():
        if reason := peer.unavailable():
            _say(f"without {peer.IMPL}: {reason}")
        else:
            digest = kernel_hash(peer)
            variants.append(
                _Variant(peer.IMPL, peer.prepare, peer.notes, digest, getattr(peer, "LSE_INCLUDES_SINK", False))
            )
    return variants


def _measure_case(
    module: ModuleType, case: Any, variants: Sequence[_Variant], caches: Sequence[str], this: _Run
) -> tuple[list[Record], list[str]]:
    """The records of one case, and a line for each variant that failed it."""
    make = partial(module.make_inputs, case, device=this.device, seed=this.seed)
    kv_bytes = module.rotated_bytes(case) if hasattr(module, "rotated_bytes") else _kv_bytes(module, case, make()[0])
    sets = timing.rotation_sets(kv_bytes, timing.l2_bytes(this.device)) if "cold" in caches else 1
    inputs = make(sets=sets)
    checks, failures = _check_all(module, case, variants, inputs[0])
    passed = [variant for variant in variants if variant.impl in checks]
    found = []
    for cache in caches if passed else ():
        timed = _time(passed, inputs, cache, kv_bytes, this)
        failures |= {impl: f"TimingFailed: {error}" for impl, error in timed.replays.errors.items()}
        found += [
            this.record(
                case=case.name,
                impl=variant.impl,
                config=module.config(case) | {"cache": timed.cache(variant.impl, cache)} | variant.notes(inputs[0]),
                method=timed.methods[variant.impl],
                samples_us=timed.replays.samples_us[variant.impl],
                check=checks[variant.impl],
                work=module.work(case),
                kernel_sha256=variant.sha256,
                clocks=timed.clocks,
            )
            for variant in passed
            if variant.impl in timed.replays.samples_us
        ]
    torch.cuda.empty_cache()
    return found, [f"{case.name} {impl}: {error}" for impl, error in failures.items()]


def _check_all(
    module: ModuleType, case: Any, variants: Sequence[_Variant], inputs: Any
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The verdicts of the variants that are right, and one line for each that is not, both by name."""
    expected = module.reference(inputs), module.baseline(inputs)
    checks, failures = {}, {}
    for variant in variants:
        try:
            sink = variant.lse_includes_sink
            checks[variant.impl] = verdict(module, variant.prepare, inputs, *expected, lse_includes_sink=sink)
        except NotApplicable as reason:
            _say(f"{case.name} without {variant.impl}: {reason}")
        except Exception as error:
            failures[variant.impl] = f"{type(error).__name__}: {error}".splitlines()[0]
    return checks, failures


def _time(variants: Sequence[_Variant], inputs: Sequence[Any], cache: str, kv_bytes: float, this: _Run) -> _Timing:
    used, repeat = (inputs, 1) if cache == "cold" else (inputs[:1], timing.WARM_CALLS)
    wanted = len(used) * repeat
    calls = _affordable({variant.impl: variant.prepare(used[0]) for variant in variants}, wanted, kv_bytes, this)
    sets = {impl: min(number, len(used)) for impl, number in calls.items()}
    launches = {v.impl: [v.prepare(each) for each in used[: sets[v.impl]]] for v in variants}
    launches = {impl: (few * repeat)[: calls[impl]] for impl, few in launches.items()}
    before = timing.clocks(this.device)
    replays = timing.graph_replay_us(launches, budget_s=this.budget_s, device=this.device)
    rotated = {impl: number * kv_bytes if cache == "cold" else 0 for impl, number in sets.items()}
    return _Timing(
        methods={
            impl: {
                "timer": "cuda graph replay",
                "calls": calls[impl],
                "sets": sets[impl],
                "rotated_bytes": rotated[impl],
            }
            for impl in launches
        },
        clocks=Clocks(before=before, after=timing.clocks(this.device)),
        replays=replays,
    )


def _affordable(launches: Mapping[str, timing.Launch], wanted: int, kv_bytes: float, this: _Run) -> dict[str, int]:
    """How many calls the graph of each variant holds: `wanted`, or what runs for `GRAPH_S`.

    What is not cold even so needs no more of them than let its fewest replays fit into its share of the budget.
    """
    once = timing.graph_replay_us({impl: [launch] for impl, launch in launches.items()}, 1, device=this.device)
    share_s, calls = this.budget_s / len(launches) / (2 * timing.MIN_REPLAYS), {}
    for impl in launches:
        call_s = 1e-6 * min(once.samples_us.get(impl, [1.0]))
        calls[impl] = min(wanted, max(int(GRAPH_S / call_s), 1))
        if calls[impl] < wanted and calls[impl] * kv_bytes < timing.ROTATION_BYTES:
            calls[impl] = min(calls[impl], max(int(share_s / call_s), 1))
    return calls


def _kv_bytes(module: ModuleType, case: Any, inputs: Any) -> float:
    """What a call moves beside its queries and its output, which has their shape and dtype."""
    return module.work(case).bytes - 2 * inputs.q.nbytes


def _ceiling_records(this: _Run) -> list[Record]:
    before = timing.clocks(this.device)
    measured = timing.ceilings(this.device)
    clocks = Clocks(before=before, after=timing.clocks(this.device))
    return [
        this.record(
            case=CEILINGS,
            impl=name,
            config={},
            method={"timer": ceiling.timer},
            samples_us=ceiling.samples_us,
            check={"error": ceiling.error, "baseline_error": 0.0, "tolerance": ceiling.tolerance},
            work=ceiling.work,
            kernel_sha256=None,
            clocks=clocks,
        )
        for name, ceiling in measured.items()
    ]


def _chosen(argument: str, names: Sequence[str] | None, known: Mapping[str, Any] | Sequence[str]) -> list[str]:
    if names is None:
        return list(known)
    for name in names or ("",):
        if name not in known:
            raise ValueError(f"{argument} has no {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _report(name: str, found: Sequence[Record], failed: Sequence[str]) -> None:
    if found and not sys.stderr.isatty():
        _say(f"{name}: " + ", ".join(f"{r.impl} {r.config['cache']} {r.median_us:.1f} us" for r in found))
    for line in failed:
        _say(f"FAILED {line}")


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
