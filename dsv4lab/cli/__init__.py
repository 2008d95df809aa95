"""The command line: `dsv4lab run | measure | tune | cards | profile | serve | bench | campaign | parity |
doctor`.

Thin skins over the package. What the user got wrong is one line on stderr and exit status 2; what went wrong in the
lab is exit status 1.
"""

import sys
from collections.abc import Sequence

import tyro

from dsv4lab.cli import lab, server, traces
from dsv4lab.notebooks.results import UsageError

INTERRUPTED = 130

DESCRIPTION = "The DeepSeek-V4-Flash decode lab: run its chapters, measure its kernels, serve with them."

_COMMANDS = (
    lab.run, lab.measure, lab.tune, lab.cards, traces.profile, server.serve, server.bench, server.campaign,
    server.parity, lab.doctor,
)  # fmt: skip


def _split(args: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before a lone --, and those after it."""
    end = args.index("--") if "--" in args else len(args)
    return args[:end], args[end + 1 :]


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its status."""
    ours, theirs = _split(list(sys.argv[1:] if args is None else args))
    ours += [f"--sglang={flag}" for flag in theirs]
    app = tyro.extras.SubcommandApp()
    for command in _COMMANDS:
        app.command(command)
    try:
        status = app.cli(prog="dsv4lab", description=DESCRIPTION, args=ours, config=(tyro.conf.FlagCreatePairsOff,))
    except UsageError as error:
        print(f"dsv4lab: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("dsv4lab: interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)
