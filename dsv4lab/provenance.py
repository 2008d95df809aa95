"""Where a measurement comes from: machine, versions, commit, kernel source and command line, free of local paths."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from platform import python_version
from types import ModuleType

import torch

from dsv4lab import timing
from dsv4lab.files import without_folders
from dsv4lab.kernels.choices import source_hash
from dsv4lab.records import Environment, Git

_PACKAGE = Path(__file__).resolve().parent


def environment(device: str | torch.device = "cuda") -> Environment:
    """Versions of what takes part, and the GPU as its driver names it."""
    gpu = torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None
    driver = timing.nvidia_smi(["driver_version"], device)
    return Environment(
        gpu=gpu and gpu.name,
        gpu_count=torch.cuda.device_count(),
        capability=gpu and (gpu.major, gpu.minor),
        driver=driver and driver[0],
        cuda=torch.version.cuda,
        python=python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        sglang=_version("sglang"),
    )


def git_state() -> Git:
    """The commit of this checkout, and whether the package differs from it; both None outside of a checkout."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _PACKAGE.parent:
        return Git(commit=None, dirty=None)
    changed = _git("status", "--porcelain", "--", ".")
    return Git(commit=_git("rev-parse", "HEAD"), dirty=None if changed is None else bool(changed))


def kernel_hash(module: ModuleType) -> str:
    """sha256 over the sources of `module` and of every `dsv4lab.kernels` module it imports."""
    return source_hash(module.__name__)


def command_line() -> list[str]:
    """`sys.argv` with absolute paths cut to their last part: records are published."""
    return [without_folders(argument) for argument in sys.argv]


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(_PACKAGE), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
