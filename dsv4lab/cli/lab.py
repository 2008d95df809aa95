"""Commands of the lab itself: run its chapters, measure and tune kernels, say what can be done here."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from dsv4lab import hardware
from dsv4lab.cli.options import Folder, Names, OptionalFolder, OptionalNumber
from dsv4lab.notebooks.results import UsageError


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
            accuracy), c4_layer (indexer and attention of a layer as one captured sequence, and its gaps), capture (what
            of torch.compile can be captured in a CUDA graph), capture_gain (what it gains).
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
        targets: fp8-gemm (SGLang's block-FP8 linear layers), moe (its FP8 experts), gemm, attention, indexer (our
            kernels).
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


def cards(
    stems: Annotated[Positional[tuple[str, ...]], arg(metavar="[STEM ...]", help_behavior_hint="(default: all)")] = (),
    /,
) -> int:
    """Say what the compiler makes of our kernels for the campaign's GPU (sm_120) beside Hopper's, and predict times.

    Example: dsv4lab cards sparse_mla

    Needs no GPU. The cards are those of records/static, the times follow from the newest records of an H200: predicted,
    not measured.

    Args:
        stems: Modules of dsv4lab/kernels.
    """
    from dsv4lab import cards as module

    try:
        print(*map(module.text, stems or module.SHIPPED), sep="\n\n\n")
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return 0


def doctor() -> int:
    """Say what is installed, what the lab can do here, and how to mend what it cannot.

    Example: dsv4lab doctor
    """
    from dsv4lab.doctor import examine, lines

    findings = examine()
    print(*lines(findings), sep="\n")
    return 1 if any(finding.broken for finding in findings) else 0
