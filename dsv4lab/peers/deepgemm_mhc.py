"""SGLang's default path of MHC-pre on Hopper: DeepGEMM's TF32 product, then one TileLang kernel."""

import functools
from typing import Any

from dsv4lab.peers import deepgemm, stock_mhc
from dsv4lab.peers.tilelang_mhc import prepare_with

IMPL = "deepgemm_mhc"


def unavailable() -> str | None:
    """Why it cannot run here, in one line with the command that helps, or None."""
    return stock_mhc.unavailable() or deepgemm.unavailable()


def notes(inputs: Any) -> dict:
    """What the record must say: the packages."""
    return {"package": f"{stock_mhc.notes(inputs)['package']}, {deepgemm.notes(inputs)['package']}"}


prepare = functools.partial(prepare_with, True)
