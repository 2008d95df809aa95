"""The command line: `dsv4lab run | measure | doctor`, each a thin skin over a function of the package.

What the user got wrong is one line on stderr and exit status 2; what went wrong in the lab is exit status 1.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, UseAppendAction, arg

from dsv4lab import hardware
from dsv4lab.notebooks.results import UsageError

INTERRUPTED = 130

DESCRIPTION = "The DeepSeek-V4-Flash decode lab: run its chapters, measure its kernels, look at this machine."

Folder = Annotated[Path, arg(metavar="DIR")]
OptionalFolder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
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
    out: OptionalFolder = None,
) -> int:
    """Check, time and record a kernel module on this GPU.

    Example: dsv4lab measure sparse_mla --peers --case b32_h64

    Args:
        stem: A module of dsv4lab/kernels that has CASES.
        peers: Measure other people's kernels in the same run, where they are installed.
        sweep: Measure the module's candidate configurations instead: what its table of configs is chosen from.
        case: One of the module's CASES, all if none is given.
        impl: One of the module's IMPLEMENTATIONS (with --sweep, CANDIDATES), all if none is given.
        out: Folder for the record file. records/ of the checkout if not given.
    """
    if hardware.probe() is None:
        raise UsageError("measure needs a CUDA GPU, and torch sees none (dsv4lab doctor says why)")
    from dsv4lab import measure as module

    try:
        path = module.run(stem, cases=case or None, impls=impl or None, peers=peers, sweep=sweep, directory=out)
    except module.CheckFailed as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"recorded: {path}")
    return 0


@app.command
def doctor() -> int:
    """Say what is installed, what the lab can do here, and how to mend what it cannot.

    Example: dsv4lab doctor
    """
    from dsv4lab.doctor import examine, lines

    findings = examine()
    print(*lines(findings), sep="\n")
    return 1 if any(finding.broken for finding in findings) else 0


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    try:
        status = app.cli(prog="dsv4lab", description=DESCRIPTION, args=args, config=(tyro.conf.FlagCreatePairsOff,))
    except UsageError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("dsv4lab: interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
