"""The command line: `dsv4lab run | measure | tune | profile | serve | bench | campaign | parity | doctor`.

Thin skins over the package. What the user got wrong is one line on stderr and exit status 2; what went wrong in the
lab is exit status 1.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction, arg

from dsv4lab import hardware
from dsv4lab.files import write_atomically
from dsv4lab.notebooks.results import UsageError

if TYPE_CHECKING:
    from dsv4lab.trace import Trace

INTERRUPTED = 130

DESCRIPTION = "The DeepSeek-V4-Flash decode lab: run its chapters, measure its kernels, serve with them."

Folder = Annotated[Path, arg(metavar="DIR")]
OptionalFolder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
OptionalFile = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
OptionalNumber = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
Names = Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME")]

app = tyro.extras.SubcommandApp()


@app.command
def run(
    notebooks: Annotated[Positional[tuple[str, ...]], arg(metavar="[NOTEBOOK ...]", help_behavior_hint="")] = (),
    /,
    *,
    live: Annotated[bool, arg(help_behavior_hint="(default with a CUDA GPU)")] = False,
    no_live: Annotated[bool, arg(help_behavior_hint="(default without one)")] = False,
    param: Annotated[UseAppendAction[tuple[str, ...]], arg(aliases=["-p"], metavar="NAME=VALUE")] = (),
    out: Folder = Path("report"),
    records: OptionalFolder = None,
    timeout: int = 600,
) -> int:
    """Run the chapters and write a report.

    Example: dsv4lab run 03 -p batch=64 --out report

    Args:
        notebooks: Notebook files, or beginnings of names in notebooks/ (03). All of notebooks/ if none is given.
        live: Measure on this GPU first and add a record file.
        no_live: Read the committed records.
        param: Change a parameter that each chosen notebook declares.
        out: Folder of the report: index.html, results.json and the executed notebooks.
        records: Folder for new record files. records/ of the checkout if not given.
        timeout: Seconds a cell may take.
    """
    try:
        from dsv4lab.notebooks import run as batch
    except ModuleNotFoundError as error:
        raise UsageError(f"run needs {error.name}, which is not installed: pip install -e '.[notebook]'") from error
    if live and no_live:
        raise UsageError("--live and --no-live exclude each other")
    if timeout < 1:
        raise UsageError(f"--timeout must be at least 1 second, got {timeout}")
    live = not no_live and (live or hardware.probe() is not None)
    if records is not None:
        with batch.writable(records, "--records"):
            pass
    jobs = batch.plan(notebooks, param, live=live, records=records)
    return 0 if batch.run(jobs, out, live=live, timeout=timeout).good else 1


@app.command
def measure(
    stem: Annotated[Positional[str], arg(metavar="STEM")],
    /,
    *,
    peers: bool = False,
    sweep: bool = False,
    case: Names = (),
    impl: Names = (),
    ranks: OptionalNumber = None,
    quick: bool = False,
    jobs: OptionalNumber = None,
    timeout: OptionalNumber = None,
    out: OptionalFolder = None,
) -> int:
    """Check, time and record a kernel module on this GPU, or run another of the lab's experiments.

    Example: dsv4lab measure sparse_mla --peers --case b32_h64

    Args:
        stem: A module of dsv4lab/kernels that has CASES; or allreduce (NCCL and its rivals on all GPUs of this machine,
            gloo on its CPU where there are not two), bf16_selection and bf16_drift (what the bf16 flip costs in
            accuracy), capture (what of torch.compile can be captured in a CUDA graph), capture_gain (what it gains).
        peers: Measure other people's kernels in the same run, where they are installed.
        sweep: Measure the module's candidate configurations instead: what its table of configs is chosen from.
        case: One of the module's CASES; for allreduce a size, as 512KiB. All if none is given.
        impl: One of the module's IMPLEMENTATIONS (with --sweep, CANDIDATES); for capture the attention kernel inside
            the step, split_k or stock_simt. All if none is given.
        ranks: For allreduce: how many GPUs, or processes on the CPU.
        quick: For allreduce: fewer sizes and configurations.
        jobs: For capture: cells at once, each in a process of its own. One a core, 16 at most, if not given.
        timeout: For capture: seconds that a cell may take.
        out: Folder for the record file. records/ of the checkout if not given.
    """
    from dsv4lab import experiments
    from dsv4lab.verdict import CheckFailed

    options = dict(
        cases=case, impls=impl, peers=peers, sweep=sweep, ranks=ranks, quick=quick, jobs=jobs, timeout_s=timeout
    )
    try:
        path = experiments.run(stem, out, **options)
    except CheckFailed as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"recorded: {path}")
    return 0


@app.command
def tune(
    targets: Annotated[
        Positional[tuple[str, ...]], arg(metavar="[TARGET ...]", help_behavior_hint="(default: all)")
    ] = (),
    /,
    *,
    tp: int = 1,
    budget_s: float = 600,
    jobs: OptionalNumber = None,
    out: OptionalFolder = None,
) -> int:
    """Find what is fastest on this GPU, for DeepSeek-V4-Flash's shapes on one of TP ranks, and write it into tables.

    Example: dsv4lab tune fp8-gemm moe --tp 8

    Every candidate is compiled, checked against a reference, then timed; the best few are timed again beside what runs
    now. What is done is on disk at once: run the same command again after an interrupt, or when the budget is spent.

    Tables go to ~/.cache/dsv4lab/tuned, or to the folder that DSV4LAB_TUNED names. Our kernels take theirs from there.
    SGLang's server takes its own with --hooks tables=tuned, which dsv4lab serve adds by itself to the presets with our
    kernels. dsv4lab doctor says what is there.

    Args:
        targets: fp8-gemm (SGLang's block-FP8 linear layers), moe (its FP8 experts), attention, indexer (our kernels).
        tp: GPUs that share the model: 1, 2, 4 or 8. Tune once for each that you serve with.
        budget_s: Seconds after which no further shape is begun.
        jobs: Candidates that are compiled at once. One a core, but one, if not given.
        out: Folder for the record files. records/ of the checkout if not given.
    """
    if hardware.probe() is None:
        raise UsageError("tune needs a CUDA GPU, and torch sees none (dsv4lab doctor says why)")
    from dsv4lab import tune as module

    try:
        outcomes = module.run(targets, tp=tp, budget_s=budget_s, jobs=jobs, directory=out)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    for name, outcome in outcomes.items():
        print(*(f"{name}: {path}" for path in outcome.tables), sep="\n")
        print(f"{name}: recorded: {outcome.record}")
        if outcome.left:
            print(f"{name}: {len(outcome.left)} shapes are left ({outcome.left[0]}, ...): run the same command again")
    return 1 if any(outcome.left for outcome in outcomes.values()) else 0


@app.command
def profile(
    trace: Annotated[Positional[Path], arg(metavar="TRACE")],
    after: Annotated[Positional[Path | None], arg(metavar="[TRACE2]", help_behavior_hint="")] = None,
    /,
    *,
    by: Literal["family", "kernel", "op", "shape", "stream", "step"] = "family",
    rules: OptionalFile = None,
    capture: OptionalFile = None,
    max_context: OptionalNumber = None,
    live: OptionalNumber = None,
    html: OptionalFile = None,
    json: OptionalFile = None,
    reduce: OptionalFile = None,
) -> int:
    """Say where the GPU time of a trace goes, and which line of Python it came from.

    Example: dsv4lab profile decode.pt.trace.json.gz --by shape

    Args:
        trace: Of torch.profiler (JSON, plain or .gz), of Nsight Systems (sqlite export), or a reduced one; or a folder
            with a file for each rank.
        after: A second one; the first is compared with it, kernel by kernel.
        by: What a row of the table is.
        rules: A file of family rules (TOML, as dsv4lab/trace/families.toml) that go before the lab's own.
        capture: A trace of the same step run eagerly, or of its capture: gives graph replays their ops and shapes.
        max_context: Longest request that the server allows in tokens, to recognise what is as long.
        live: Positions that the requests had, likewise.
        html: File for the report as a web page with a figure.
        json: File for every table, times in nanoseconds.
        reduce: File for the events alone, NAME.trace.jsonl.gz: some 12 bytes an event, read like the trace itself.
    """
    from dsv4lab.trace import TraceError, families, read, reduced, report

    try:
        titles = families.load(rules).titles
        first = read(trace, rules, capture)
        others = [read(after, rules, capture)] if after is not None else []
        found = report.findings(first, by, max_context, live)
        sections = [*report.one(found, titles)]
        for second in others:
            sections += report.two(first, second, titles)
        print("\n\n".join(map(str, sections)))
        if html is not None:
            names = ["before", "after"] if others else [trace.name]
            figure = _bars(dict(zip(names, [first, *others], strict=True)), titles)
            write_atomically(
                html, report.page(sections, figure, " → ".join(path.name for path in (trace, after) if path))
            )
        if json is not None:
            write_atomically(json, report.as_json(found, *others))
        if reduce is not None:
            reduced.write(first, reduce)
    except TraceError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return 0


def _bars(traces: "dict[str, Trace]", titles: dict[str, str]) -> str:
    """The stacked bars of a web page, as SVG."""
    try:
        from dsv4lab.plot import profiles, style
    except ModuleNotFoundError as error:
        raise UsageError(f"--html needs {error.name}, which is not installed: pip install -e '.[notebook]'") from error
    from dsv4lab.trace import report

    unit, bars = report.bars(traces)
    return style.svg(profiles.stacked(bars, titles, f"GPU time (ms a {unit})"))


@app.command
def serve(
    model: Annotated[Positional[str], arg(metavar="[MODEL]", help_behavior_hint="")] = "",
    /,
    *,
    preset: Annotated[str, arg(metavar="NAME")] = "single",
    hooks: Annotated[str | None, arg(metavar="HOOK=IMPL,...", help_behavior_hint="")] = None,
    tp: OptionalNumber = None,
    context_length: OptionalNumber = None,
    layers: OptionalNumber = None,
    host: str = "127.0.0.1",
    port: int = 30000,
    nnodes: int = 1,
    node_rank: int = 0,
    dist_init_addr: Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    out: OptionalFolder = None,
    timeout: float = 1800,
    sglang: Names = (),
) -> int:
    """Serve a model with SGLang and our kernels, proven to be live; ends with everything it started.

    Example: dsv4lab serve deepseek-ai/DeepSeek-V4-Flash --preset rtx6000-8x -- --mem-fraction-static 0.85

    Args:
        model: A folder, or a name on the Hugging Face hub. A preset with a synthetic model needs none.
        preset: All our kernels on RTX PRO 6000 (rtx6000-8x, rtx6000-2x); SGLang as it is, on an H200 (h200) or any GPU
            (single); synthetic, six layers with dummy weights and no download; or a stage of the campaign.
        hooks: What runs in SGLang's place, over the preset: attention=split_k,indexer=triton,topk=triton,mhc=split_k.
            What is not named is SGLang's own.
        tp: GPUs that share the model.
        context_length: Longest request in tokens.
        layers: Layers of a synthetic model.
        host: Address to answer on.
        port: Port to answer on.
        nnodes: Machines that share the model.
        node_rank: Which of them this is.
        dist_init_addr: Where they meet.
        out: Folder for log, receipts and a synthetic model. A new temporary one if not given.
        timeout: Seconds until the server must be ready; the first start on a machine compiles for minutes.
        sglang: A flag for SGLang itself; what comes after -- is taken as such.
    """
    from dsv4lab.serving import launch, machine, settings

    try:
        setting = None if hooks is None else settings.parse(hooks)
        config = launch.Config(
            model=model, preset=preset, setting=setting, tp=tp, context_length=context_length, layers=layers, host=host,
            port=port, nnodes=nnodes, node_rank=node_rank, dist_init_addr=dist_init_addr, flags=sglang, run=out,
            timeout_s=timeout,
        )  # fmt: skip
        for gpu in machine.gpus()[:1]:
            config = config.with_tables(gpu.name)
        with launch.Server(config, say=lambda text: print(text, flush=True)) as server:
            live = ", ".join(f"{hook}={impl}" for hook, impl in config.hooks.active.items()) or "none"
            print(f"ready: {server.url}, hooks live on {server.ranks} ranks: {live}, log: {server.log}", flush=True)
            server.wait()
            return 0
    except launch.ServeError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        raise UsageError(str(error)) from error


@app.command
def bench(
    url: Annotated[Positional[str], arg(metavar="URL")] = "http://127.0.0.1:30000",
    /,
    *,
    concurrency: Annotated[str, arg(metavar="C,C,...")] = "1,16,32,64",
    input: int = 256,
    output: int = 256,
    waves: int = 3,
    no_stream: bool = False,
    seed: int = 0,
    expect: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = (),
    stage: Annotated[str, arg(help_behavior_hint="")] = "",
    out: OptionalFolder = None,
) -> int:
    """Measure a server under load and record it; failures come first, and make the exit status 1 above 1%.

    Example: dsv4lab bench http://127.0.0.1:30000 --concurrency 1,64 --expect context_length=1048576

    Args:
        url: Of an SGLang server.
        concurrency: Requests at once, one run each.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        waves: How often; the median counts.
        no_stream: Take answers whole: less work for server and client, and no times to first token.
        seed: Of the prompts.
        expect: What the server must say of itself, or hooks=HOOK=IMPL,... live; else nothing is timed.
        stage: What the records call it. The preset it was started with, if here.
        out: Folder for the record file. records/ of the checkout if not given.
    """
    from dsv4lab.serving import bench as module
    from dsv4lab.serving import http

    try:
        counts = _numbers("--concurrency", concurrency)
        expected = dict(_pair(text) for text in expect)
        shape = module.Shape(input, output, not no_stream)
        plan = module.Plan(counts, shape, waves, seed, expected)
        path, valid = module.run(url.rstrip("/"), plan, stage=stage, directory=out)
    except http.NoAnswer as error:
        print(f"dsv4lab: {url}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"recorded: {path}")
    return 0 if valid else 1


@app.command
def campaign(
    *,
    stages: Annotated[str, arg(metavar="STAGE,...", help_behavior_hint="(default: all)")] = "",
    layers: int = 6,
    context_length: int = 1_048_576,
    input: int = 256,
    output: int = 256,
    waves: int = 3,
    warm_up: int = 16,
    steps: int = 3,
    eager: bool = False,
    budget_s: float = 7200,
    start_s: float = 900,
    port: int = 30000,
    out: Folder = Path("campaign"),
    dry_run: bool = False,
) -> int:
    """Walk the campaign on a live server, stage by stage: start, prove the hooks, bench, profile, stop.

    Example: dsv4lab campaign --stages stock,indexer --budget-s 900 --out campaign

    Args:
        stages: Which of indexer, native, stock, indexer_ctx8192, split_k, mma, bf16, stock_ctx8192, native_auto,
            indexer_stock_mhc, compile, compile_nographs, compile_stock_attention, done in this order; what is done in
            the folder of --out is not done again.
        layers: Layers of the synthetic model.
        context_length: Longest request in tokens, for the stages that cap none.
        input: Tokens of a prompt.
        output: Tokens of an answer.
        waves: How often at each concurrency; the median counts.
        warm_up: Tokens of an answer in the unmeasured wave before.
        steps: Decode steps in a profile.
        eager: Also profile stock and indexer without graphs, with shapes and stacks: a second start of each.
        budget_s: Seconds for all; what is not done by then is left for another time.
        start_s: Seconds until a server must be ready.
        port: Port of the servers.
        out: Folder of records, traces and logs.
        dry_run: Only say with what environment and command line each stage would start.
    """
    from dsv4lab.serving import campaign as module
    from dsv4lab.serving import load

    try:
        chosen = module.choose([name for name in stages.split(",") if name])
        plan = module.Plan(
            out=out.resolve(), layers=layers, context_length=context_length, shape=load.Shape(input, output),
            waves=waves, warm_up=warm_up, steps=steps, eager=eager, budget_s=budget_s, start_s=start_s, port=port,
        )  # fmt: skip
        if dry_run:
            print(*module.describe(plan, chosen), sep="\n")
            return 0
        return 0 if module.run(plan, chosen, say=lambda text: print(text, flush=True)) else 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


@app.command
def parity(
    *,
    layers: int = 6,
    context_length: int = 1_048_576,
    budget_s: float = 900,
    start_s: float = 600,
    port: int = 30000,
    out: Folder = Path("campaign"),
    dry_run: bool = False,
) -> int:
    """Ask whether our kernels answer as SGLang's own: logprobs of 256 prompts on two servers with the same weights.

    Example: dsv4lab parity --budget-s 600 --out campaign

    Args:
        layers: Layers of the synthetic model, which has random weights here.
        context_length: Longest request in tokens.
        budget_s: Seconds for all; what is not answered by then is left for another time.
        start_s: Seconds until a server must be ready.
        port: Port of the servers.
        out: Folder of answers, records and logs; what it has is not asked again.
        dry_run: Only say with what environment and command line each server would start, and what it is asked.
    """
    from dsv4lab.serving import campaign as module
    from dsv4lab.serving import parity as comparison

    try:
        plan = module.Plan(
            out=out.resolve(), layers=layers, context_length=context_length, budget_s=budget_s, start_s=start_s,
            port=port,
        )  # fmt: skip
        if dry_run:
            print(*comparison.describe(plan), sep="\n")
            return 0
        return 0 if comparison.run(plan, say=lambda text: print(text, flush=True)) else 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise UsageError(f"{option} must read like 1,16,64, got {text!r}")
    return tuple(map(int, text.split(",")))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--expect {text} must read NAME=VALUE")
    return name, value


@app.command
def doctor() -> int:
    """Say what is installed, what the lab can do here, and how to mend what it cannot.

    Example: dsv4lab doctor
    """
    from dsv4lab.doctor import examine, lines

    findings = examine()
    print(*lines(findings), sep="\n")
    return 1 if any(finding.broken for finding in findings) else 0


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before a lone --, and those after it."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end + 1 :]


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    ours, theirs = _split(list(sys.argv[1:] if args is None else args))
    ours += [f"--sglang={flag}" for flag in theirs]
    try:
        status = app.cli(prog="dsv4lab", description=DESCRIPTION, args=ours, config=(tyro.conf.FlagCreatePairsOff,))
    except UsageError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("dsv4lab: interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
