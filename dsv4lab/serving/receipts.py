"""Proof from inside the server: each hook leaves a file, from every rank, when it is first called there.

A server whose hooks are not live answers like any other. So the launcher names a folder in `DSV4LAB_RECEIPTS` and
counts what lies in it.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from dsv4lab.files import write_atomically

VARIABLE = "DSV4LAB_RECEIPTS"


class Receipt(BaseModel):
    """ "installed": a process has this hook in its registry. "live": the hook was called, with these arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["installed", "live"]
    hook: str
    impl: str
    rank: int
    pid: int
    sglang: str
    arguments: dict[str, str] = {}


def write(receipt: Receipt) -> None:
    """Leaves `receipt` in the folder that the environment names, whole or not at all; without one, nothing."""
    if folder := os.environ.get(VARIABLE):
        path = Path(folder) / f"{receipt.kind}_{receipt.hook}_{receipt.pid}.json"
        write_atomically(path, receipt.model_dump_json())


def read(folder: Path) -> list[Receipt]:
    """What lies in `folder`, in order of rank and hook."""
    found = [Receipt.model_validate_json(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(found, key=lambda receipt: (receipt.rank, receipt.hook, receipt.kind, receipt.pid))


def missing(receipts: Iterable[Receipt], asked: dict[str, str], ranks: int) -> list[str]:
    """One line for each asked hook (name -> implementation) that is not live in `ranks` processes."""
    live = [receipt for receipt in receipts if receipt.kind == "live"]
    complaints = []
    for hook, impl in asked.items():
        seen = {receipt.pid: receipt.rank for receipt in live if (receipt.hook, receipt.impl) == (hook, impl)}
        if len(seen) < ranks:
            where = f"on ranks {sorted(seen.values())} only" if seen else "on no rank"
            complaints.append(f"{hook}={impl} is live {where}, of {ranks} asked for")
    return complaints
