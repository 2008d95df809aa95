"""Asks the installed SGLang itself whether it takes these flags, in a process that ends thereafter.

    python -m dsv4lab.serving.arguments --model-path DIR --tp-size 8 ...

Prints {"ranks": ...}, the processes that will hold a part of the model on this node, or what SGLang says against it.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import dsv4lab
from dsv4lab.serving.guard import one_line

_SIZES = (
    ("tp_size", "tensor_parallel_size"),
    ("pp_size", "pipeline_parallel_size"),
    ("dp_size", "data_parallel_size"),
)


_PARSER_S = 300
"""For importing SGLang, from whatever disk."""


def check(flags: list[str]) -> int:
    """The ranks of this node under `flags`. ValueError in SGLang's own words."""
    return _ranks_under(tuple(flags))


@functools.cache
def _ranks_under(flags: tuple[str, ...]) -> int:
    command = [sys.executable, "-m", "dsv4lab.serving.arguments", *flags]
    environment = os.environ | {"PYTHONPATH": python_path()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_PARSER_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"sglang does not read its flags within {_PARSER_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["its parser said nothing"]
        raise ValueError(one_line(said[-1]).removeprefix("dsv4lab: "))
    return json.loads(done.stdout.splitlines()[-1])["ranks"]


def python_path(*more: Path) -> str:
    """PYTHONPATH under which this package is found though it may not be installed, and `more`."""
    had = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(Path(dsv4lab.__file__).parents[1]), *map(str, more), *([had] if had else [])])


def ranks(parsed: argparse.Namespace) -> int:
    """Scheduler processes on one node: data parallelism repeats them, unless it is that of the attention alone.

    ValueError where the nodes cannot share them equally.
    """
    tp, pp, dp = (_size(parsed, *names) for names in _SIZES)
    every = tp * pp * (1 if getattr(parsed, "enable_dp_attention", False) else dp)
    if every < 1 or every % parsed.nnodes:
        raise ValueError(f"tp {tp}, pp {pp} and dp {dp} make {every} ranks, which {parsed.nnodes} nodes cannot share")
    return every // parsed.nnodes


def _size(parsed: argparse.Namespace, *names: str) -> int:
    """The first of `names` that is there: releases name one flag's value differently."""
    return next(value for name in names if (value := getattr(parsed, name, None)) is not None)


def parse(flags: list[str]) -> argparse.Namespace:
    """`flags` as SGLang's own parser takes them; it exits where it does not."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(flags)


def main() -> None:
    try:
        found = ranks(parse(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"dsv4lab: {error}")
    except ImportError as error:
        sys.exit(f"dsv4lab: sglang does not load ({one_line(str(error))}): pip install 'dsv4lab[kernels,serve]'")
    print(json.dumps({"ranks": found}))


if __name__ == "__main__":
    main()
